"""Engines of DeepSpeed on two ranks: ZeRO 0 to 3, in three precisions, with the optimizer on the host.

DeepSpeed is not among what `make test` installs: `make test-long` makes an environment for it.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.ranks.launch import launch

import sealegs

pytest.importorskip("deepspeed", reason="deepspeed is not installed: `make test-long` runs this in its own environment")
pytestmark = [pytest.mark.xdist_group("deepspeed"), pytest.mark.trains]

PROGRAM = Path(__file__).with_name("deepspeed_ranks.py")
NAN, SPIKE, STEPS, SAVED, DAMAGED, BACK_STEPS = 12, 20, 26, 10, 70, 110
"""As in deepspeed_ranks.py, which imports DeepSpeed."""
ENGINES = (
    *("zero 0 fp32", "zero 0 bf16", "zero 0 fp16", "zero 1 bf16", "zero 1 bf16, gradients added in fp32"),
    *("zero 1 fp16", "zero 2 fp32", "zero 2 bf16", "zero 2 bf16, overflow not looked for", "zero 2 fp16"),
    *("zero 2 bf16, two micro-batches", "zero 2 bf16, optimizer on the host", "zero 3 fp32", "zero 3 bf16"),
    *("zero 3 fp16", "zero 3 bf16, two micro-batches", "zero 3 bf16, weights and optimizer on the host"),
)
GOING_BACK = (
    "zero 0 fp32",
    "zero 0 bf16",
    "zero 2 bf16",
    "zero 2 fp16",
    "zero 3 bf16",
    "zero 3 bf16, two micro-batches",
)


def of(names: tuple[str, ...]) -> list[Any]:
    """Each engine with the mark of its stage."""
    return [pytest.param(name, marks=pytest.mark.integration(f"DeepSpeed, ZeRO {name.split()[1]}")) for name in names]


TWO_A_STEP = tuple(name for name in ENGINES if "micro-batches" in name)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("deepspeed")
    launch(PROGRAM, 2, str(out), framework="deepspeed")
    return out


def saw(out: Path, name: str) -> list[dict[str, Any]]:
    found = [json.loads((out / f"{rank}-{name}.json").read_text()) for rank in range(2)]
    if "cannot" in found[0]:
        pytest.skip(f"DeepSpeed cannot make it here: {found[0]['cannot']}")
    return found


def folder(out: Path, name: str, run: str) -> Any:
    return sealegs.open_run(out / name.replace(" ", "-").replace(",", "") / run)


def test_every_engine_was_tried(launched: Path) -> None:
    assert {path.stem.split("-", 1)[1] for path in launched.glob("[01]-*.json")} == set(ENGINES)


@pytest.mark.parametrize("name", of(ENGINES))
@pytest.mark.conforms("unchanged")
def test_nothing_changes_where_nothing_is_wrong(launched: Path, name: str) -> None:
    for rank in saw(launched, name):
        assert rank["guarded"] == rank["plain"], "weights, moments, schedule, scale, norm"
        assert rank["guarded"]["unchanged"] == []
        assert rank["left alone"]


@pytest.mark.parametrize("name", of(ENGINES))
@pytest.mark.conforms("nan", "spike")
def test_a_skip_is_exact_on_every_rank(launched: Path, name: str) -> None:
    one, other = saw(launched, name)
    for rank in (one, other):
        assert rank["faulted"]["unchanged"] == [NAN, SPIKE]
        assert rank["faulted"]["losses"][:NAN] == rank["plain"]["losses"][:NAN]
        assert rank["faulted"]["numbers"][-1] == STEPS
    assert one["faulted"]["lr"] == other["faulted"]["lr"]


@pytest.mark.parametrize("name", of(ENGINES))
@pytest.mark.conforms("ranks")
def test_the_rank_at_fault_is_named_and_the_norm_is_the_true_one(launched: Path, name: str) -> None:
    seen, _ = saw(launched, name)
    run = folder(launched, name, "faulted")
    skips = {event.step: event.detail["text"] for event in run.events if event.kind == "skip"}
    assert skips.keys() == {NAN, SPIKE}
    assert all("rank 1" in text for text in skips.values())
    assert run.steps[run.logged("loss")].tolist() == list(range(STEPS))
    norms = run.column("grad_norm")
    assert norms[SPIKE] > 300 * norms[SPIKE - 1]
    if seen["optimizer"] != "AdamW":  # of torch's own optimizer DeepSpeed knows no norm
        assert seen["faulted"]["norm"][SPIKE] == pytest.approx(norms[SPIKE], rel=1e-3)


@pytest.mark.parametrize("name", of(ENGINES))
def test_the_schedule_counts_attempts_and_a_spike_leaves_the_scale_alone(launched: Path, name: str) -> None:
    seen, _ = saw(launched, name)
    plain, faulted, waits = seen["plain"]["lr"], seen["faulted"]["lr"], "fp16" in name
    assert faulted[:NAN] + faulted[NAN + waits :] == plain[: STEPS - waits], "fp16: an overflow is DeepSpeed's to skip"
    before, after = seen["faulted"]["scale"][SPIKE]
    assert before == after
    if waits:
        before, after = seen["faulted"]["scale"][NAN]
        assert after == before / 2, "DeepSpeed's own search goes on"


@pytest.mark.parametrize("name", of(ENGINES))
@pytest.mark.conforms("resume")
def test_a_resume_goes_on_to_the_same_bits(launched: Path, name: str) -> None:
    for rank in saw(launched, name):
        assert rank["resumed"]["end"] == rank["plain"]["end"]
        assert rank["resumed"]["losses"] == rank["plain"]["losses"][-len(rank["resumed"]["losses"]) :]
        assert rank["resumed"]["numbers"][-1] == rank["resumed"]["at"] == STEPS
    run = folder(launched, name, "guarded")
    assert run.steps[run.logged("loss")].tolist() == list(range(STEPS))
    (resumed,) = (event for event in run.events if event.kind == "resumed")
    assert (resumed.step, resumed.detail["with_guard"]) == (SAVED, True)


@pytest.mark.parametrize("name", of(GOING_BACK))
@pytest.mark.conforms("rollback")
def test_ranks_go_back_together(launched: Path, name: str) -> None:
    one, other = (rank["damaged"] for rank in saw(launched, name))
    assert one["numbers"] == other["numbers"]
    assert any(after < before for before, after in pairwise(one["numbers"]))
    assert one["numbers"][-1] == BACK_STEPS
    (done,) = (event for event in folder(launched, name, "damaged").events if event.kind == "intervention")
    assert (done.detail["trigger"], done.detail["acted"]) == ("damaged", True)
    assert done.detail["to_step"] < DAMAGED


@pytest.mark.conforms("accumulation")
@pytest.mark.parametrize("name", of(TWO_A_STEP))
def test_two_micro_batches_are_one_step(launched: Path, name: str) -> None:
    for rank in saw(launched, name):
        assert len(rank["guarded"]["losses"]) == 2 * STEPS == 2 * len(rank["guarded"]["numbers"])
    losses = folder(launched, name, "guarded").column("loss")
    of_ranks = [rank["guarded"]["losses"] for rank in saw(launched, name)]
    means = [sum(of_rank[2 * step] + of_rank[2 * step + 1] for of_rank in of_ranks) / 4 for step in range(STEPS)]
    assert losses.tolist() == pytest.approx(means, rel=1e-6)
