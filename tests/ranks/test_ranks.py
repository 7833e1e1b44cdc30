"""Real processes, real faults: equal verdicts on all ranks, the culprit named, no hang."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from tests.ranks.launch import launch

import sealegs
from sealegs.diagnosis.findings import look
from sealegs.diagnosis.rank import diagnose

LOOP = Path(__file__).with_name("loop.py")
_spec = importlib.util.spec_from_file_location("ranks_loop", LOOP)
assert _spec is not None
assert _spec.loader is not None
loop: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(loop)

pytestmark = pytest.mark.xdist_group("ranks")  # one launch serves all tests, on one worker

LAUNCHES = [("ddp", 4), ("fsdp2", 2)]
Saw = list[dict[str, Any]]


@pytest.fixture(scope="module", params=LAUNCHES, ids=[f"{wrapper}-{world}" for wrapper, world in LAUNCHES])
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Saw]:
    """One launch with all faults: what each rank saw."""
    wrapper, world = request.param
    out = tmp_path_factory.mktemp(f"{wrapper}-{world}")
    launch(LOOP, world, wrapper, str(out))
    return wrapper, out, [json.loads((out / f"{rank}.json").read_text()) for rank in range(world)]


def test_all_ranks_give_the_same_verdicts(launched: tuple[str, Path, Saw]) -> None:
    _, _, saw = launched
    assert len(saw[0]["verdicts"]) == loop.MISSING
    assert all(one["verdicts"] == saw[0]["verdicts"] for one in saw)


@pytest.mark.integration("a loop of one's own")
@pytest.mark.conforms("ranks")
def test_each_fault_is_skipped_and_its_rank_and_tensor_are_named(launched: tuple[str, Path, Saw]) -> None:
    _, _, saw = launched
    assert [len(one["strikes"]) for one in saw] == [3 if rank == 1 else 0 for rank in range(len(saw))]
    skipped = {step: culprit for step, (_, go, culprit) in enumerate(saw[0]["verdicts"]) if not go}
    assert set(skipped) == {*loop.FAULTS, loop.NAN_LOSS}
    assert skipped[12] == "2.weight on rank 1"
    assert skipped[16].endswith(" on rank 1")
    assert skipped[20] == "4.weight on rank 1"
    assert skipped[loop.NAN_LOSS].endswith(" on rank 0")


def test_a_skipped_step_changes_no_bit_on_any_rank(launched: tuple[str, Path, Saw]) -> None:
    _, _, saw = launched
    for one in saw:
        for step in (*loop.FAULTS, loop.NAN_LOSS):
            assert one["before"][str(step)] == one["after"][str(step)]
        assert one["before"]["11"] != one["after"]["11"]


def test_weights_that_differ_between_ranks_are_noticed(launched: tuple[str, Path, Saw]) -> None:
    """A change of one weight by a millionth; FSDP2 holds each weight once, and has nothing to compare."""
    wrapper, _, saw = launched
    said = [text for text, *_ in saw[0]["verdicts"] if "other weights" in text]
    assert len(said) == (1 if wrapper == "ddp" else 0)
    assert all(text.startswith(f"step {loop.CHECKSUM_STEPS}  ALARM  rank 1 ") for text in said)


def test_a_rank_that_does_not_come_is_named_by_all_others(launched: tuple[str, Path, Saw]) -> None:
    _, _, saw = launched
    for rank, one in enumerate(saw):
        if rank == 1:
            continue
        assert f"step {loop.MISSING}: " in one["error"]
        assert "rank 1 did not come" in one["error"]
        assert one["waited_s"] < 2 * loop.TIMEOUT_S + 2


def test_a_slow_rank_is_named_though_all_wait_for_it(launched: tuple[str, Path, Saw]) -> None:
    """DDP tells when a rank's own gradients are ready; FSDP2 does not."""
    wrapper, out, saw = launched
    run = sealegs.open_run(out / "run")
    told = [event.detail["text"] for event in run.events if event.kind == "remark" and "longer" in event.detail["text"]]
    if wrapper == "fsdp2":
        assert (told, "slowest_rank" in run.signals) == ([], False)
        return
    assert len(told) == 1
    assert f"rank {loop.SLOW_RANK} takes " in told[0]
    assert run.series("slowest_rank")[1][-1] == loop.SLOW_RANK
    assert all(one["verdicts"] == saw[0]["verdicts"] for one in saw)


def test_one_rank_keeps_the_record(launched: tuple[str, Path, Saw]) -> None:
    wrapper, out, saw = launched
    run = sealegs.open_run(out / "run")
    assert len(run.steps) == loop.MISSING
    (start,) = [event for event in run.events if event.kind == "guard"]
    assert (start.detail["ranks"], start.detail["norms_of_each_rank"]) == (
        len(saw),
        {"ddp": "DDP"}.get(wrapper, "FSDP2"),
    )
    assert [event.step for event in run.events if event.kind == "skip"] == [12, 16, 20, 24]


@pytest.mark.integration("a loop of one's own")
@pytest.mark.conforms("unchanged")
def test_where_nothing_happens_weights_are_those_without_a_guard(tmp_path: Path) -> None:
    """Three ranks: by which one divides, or multiplies by a third, and that is not the same."""
    launch(LOOP.with_name("same.py"), 3, str(tmp_path))
    for rank in range(3):
        for alone, guarded in json.loads((tmp_path / f"{rank}.json").read_text()):
            assert alone == guarded
            assert len(set(alone)) == len(alone) > 0


@pytest.mark.parametrize("is_damaged", [True, False])
def test_ranks_that_part_after_the_last_comparison_are_found_at_the_end(is_damaged: bool, tmp_path: Path) -> None:
    launch(LOOP.with_name("parted.py"), 2, str(tmp_path), "9" if is_damaged else "-1")
    run = sealegs.open_run(tmp_path / "run")
    found = diagnose(look(run), source="run", format="run folder")
    if is_damaged:
        assert run.series("ranks_differ")[1].tolist() == [0.0, 1.0]
        assert found.findings.verdict == "act"
        assert "ranks hold other weights than the rest since step 14, to the end" in found.findings.because
    else:
        assert run.series("ranks_differ")[1].tolist() == [0.0]
        assert run.steps[-1] == 13, "nothing was found, and nothing is written"
        assert "ranks" not in found.findings.because
