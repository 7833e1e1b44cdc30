"""Real processes: what they give, and how they end."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess

import pytest
import torch.distributed as dist
from tests.forked import FORKED

from sealegs.drills import rank_processes
from sealegs.drills.rank_processes import Beat, Crew
from sealegs.errors import ConfigError, RankMissing

pytestmark = pytest.mark.xdist_group("ranks")


def greet(beat: Beat) -> str:
    beat(0)
    return f"{dist.get_rank()} of {dist.get_world_size()}"


def die_on_rank_1(beat: Beat) -> None:
    beat(7)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def refuse_on_rank_1(beat: Beat) -> None:
    if dist.get_rank() == 1:
        raise ConfigError("lr=-1: above 0")
    dist.barrier()


@pytest.fixture
def left_behind() -> Callable[[], list[BaseProcess]]:
    """The processes of this test that are still there; other tests of this worker may have some of their own."""
    others = multiprocessing.active_children()
    return lambda: [each for each in multiprocessing.active_children() if each not in others]


def test_ranks_stay_for_the_next_job_and_one_that_dies_is_named(left_behind: Callable[[], list[BaseProcess]]) -> None:
    with Crew() as crew:
        for _ in range(2):
            assert crew.do("hello", greet) == ["0 of 2", "1 of 2"]
        with pytest.raises(RankMissing, match=r"^rank-nan: rank 1 was ended by signal 9 after step 7; look at"):
            crew.do("rank-nan", die_on_rank_1)
        assert not left_behind(), "the other one is not left waiting"


def test_what_is_wrong_with_one_rank_is_said_and_not_who_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "get_context", lambda method: FORKED)
    with (
        Crew() as crew,
        pytest.raises(RankMissing, match=r"^rank-nan: rank 1 failed before its first step: lr=-1: above 0\n"),
    ):
        crew.do("rank-nan", refuse_on_rank_1)


def test_a_rank_that_hangs_is_not_waited_for(left_behind: Callable[[], list[BaseProcess]]) -> None:
    """Here one that takes its time to begin."""
    told = r"^rank-nan: nothing from rank 0 before its first step for 0.1 s; run it again\nsee docs/ranks.md$"
    with Crew(1, patience_s=0.1) as crew, pytest.raises(RankMissing, match=told):
        crew.do("rank-nan", greet)
    assert not left_behind()


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """Which a job in the background does not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_takes_them_along(left_behind: Callable[[], list[BaseProcess]]) -> None:
    threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()
    with Crew(1) as crew, pytest.raises(KeyboardInterrupt):
        crew.do("rank-nan", greet)
    assert not left_behind()
