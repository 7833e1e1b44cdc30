"""Real processes: what they give, and how they end."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from sealegs.drills.crew import Beat, Crew
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


def sleep(beat: Beat) -> None:
    time.sleep(600)


@pytest.fixture
def alone() -> Iterator[Crew]:
    """A rank that has begun."""
    with Crew(1) as crew:
        assert crew.do("hello", greet) == ["0 of 1"]
        yield crew
    assert not multiprocessing.active_children()


def test_ranks_stay_for_the_next_job_and_one_that_dies_is_named() -> None:
    with Crew() as crew:
        for _ in range(2):
            assert crew.do("hello", greet) == ["0 of 2", "1 of 2"]
        with pytest.raises(RankMissing, match=r"^rank-nan: rank 1 was ended by signal 9 after step 7; look at"):
            crew.do("rank-nan", die_on_rank_1)
        assert not multiprocessing.active_children(), "the other one is not left waiting"


def test_what_is_wrong_with_one_rank_is_said_and_not_who_waits_for_it() -> None:
    with (
        Crew() as crew,
        pytest.raises(RankMissing, match=r"^rank-nan: rank 1 failed before its first step: lr=-1: above 0$"),
    ):
        crew.do("rank-nan", refuse_on_rank_1)


def test_a_rank_that_hangs_is_not_waited_for(alone: Crew) -> None:
    alone.patience_s = 0.2
    with pytest.raises(RankMissing, match=r"^rank-nan: nothing from rank 0 before its first step for 0.2 s; run it"):
        alone.do("rank-nan", sleep)


def test_ctrl_c_takes_them_along(alone: Crew) -> None:
    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        alone.do("rank-nan", sleep)
    assert not multiprocessing.active_children()
