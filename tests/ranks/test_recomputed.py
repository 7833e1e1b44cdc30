"""Four processes compute each other's micro-batches again; one launch for all cases."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from tests.ranks.launch import launch

import sealegs
from sealegs.record.health import read_health
from sealegs.vocabulary import Event

LOOP = Path(__file__).with_name("recomputed.py")
_spec = importlib.util.spec_from_file_location("ranks_recomputed", LOOP)
assert _spec is not None
assert _spec.loader is not None
loop: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(loop)

pytestmark = pytest.mark.xdist_group("jobs")

WORLD = 4
Launched = tuple[Path, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    out = tmp_path_factory.mktemp("recomputed")
    launch(LOOP, WORLD, str(out))
    return out, [json.loads((out / f"{rank}.json").read_text()) for rank in range(WORLD)]


def events(launched: Launched, name: str, kind: str) -> list[Event]:
    return [event for event in sealegs.open_run(launched[0] / name).events if event.kind == kind]


@pytest.mark.parametrize(
    ("name", "undisturbed", "checks"),
    [
        ("with", "without", 3),
        ("with, two micro-batches", "without, two micro-batches", 3),
        ("buffers of its own", "buffers of its own, without", 3),
        ("gradient", "without", 5),
        ("gradient, with a playbook", "without, two micro-batches", 5),
        ("activation", "without", 5),
        ("fsdp2", "fsdp2 without", 5),
    ],
)
def test_weights_moments_buffers_and_random_state_are_those_without_it(
    name: str, undisturbed: str, checks: int, launched: Launched
) -> None:
    """Also where a fault was found: its step is computed once more, so that it does no harm."""
    for of_rank in launched[1]:
        assert len(of_rank[undisturbed]["digests"]) == loop.STEPS
        assert of_rank[name]["digests"] == of_rank[undisturbed]["digests"]
        assert of_rank[name]["passes"] == loop.STEPS + checks
    assert len(set(launched[1][0]["without"]["digests"].values())) == loop.STEPS, "else this tests nothing"


@pytest.mark.parametrize(
    ("name", "steps", "rank", "is_lasting", "is_in_loss"),
    [
        ("gradient", [6], 1, False, False),
        ("gradient, with a playbook", [6], 1, False, False),
        ("activation", [6], 2, False, True),
        ("lasting", [6, 9], 3, True, False),
        ("fsdp2", [6], 1, False, False),
    ],
)
def test_a_flip_is_found_and_rank_host_and_device_are_named(
    name: str, steps: list[int], rank: int, is_lasting: bool, is_in_loss: bool, launched: Launched
) -> None:
    found = events(launched, name, "silent-corruption")
    assert [event.step for event in found] == steps
    for event in found:
        told = event.detail
        assert (told["rank"], told["is_lasting"], told["is_in_loss"]) == (rank, is_lasting, is_in_loss)
        assert f"rank {rank} (cpu of {told['host']}) computed a micro-batch wrongly, " in told["text"]
    health = read_health(launched[0] / name)
    assert health.at_fault is not None
    assert health.at_fault.rank == rank
    assert (health.advice == "restart without this host") is is_lasting


@pytest.mark.parametrize("name", ["with", "with, two micro-batches", "buffers of its own", "own generator"])
def test_healthy_ranks_are_not_named(name: str, launched: Launched) -> None:
    assert not events(launched, name, "silent-corruption")
    assert events(launched, name, "recompute")[0].detail["is_exact"]


def test_a_playbook_knows_which_batches_a_step_took_and_a_resume_goes_on(launched: Launched) -> None:
    name = "gradient, with a playbook"
    assert not events(launched, name, "no-probe")
    assert not events(launched, name, "no-recompute")
    run = sealegs.open_run(launched[0] / name)
    # another process went on with the next epoch
    assert run.series("batch_index")[1].tolist() == [2 * step + 1 for step in range(2 * loop.STEPS)]
    for of_rank in launched[1]:
        assert [*of_rank["gone on with"]["digests"]] == [str(loop.STEPS + step) for step in range(loop.STEPS)]
        assert of_rank["gone on with"]["passes"] == loop.STEPS + 3


def test_a_loop_that_does_not_repeat_itself_is_told_so_and_left_alone(launched: Launched) -> None:
    (stopped,) = events(launched, "own generator", "no-recompute")
    assert stopped.detail["reason"].startswith("the loop does not compute the same on another rank (7 of 7 tensors")
    for of_rank in launched[1]:
        assert of_rank["own generator"]["passes"] > loop.STEPS


def test_what_it_costs_is_part_of_the_stability_tax(launched: Launched) -> None:
    (tax,) = events(launched, "with", "stability-tax")
    assert tax.detail["tax"]["parts"]["recomputed"] > 0
    (tax,) = events(launched, "without", "stability-tax")
    assert tax.detail["tax"]["parts"]["recomputed"] == 0


def test_a_model_whose_forward_pass_mixes_ranks_is_refused(launched: Launched) -> None:
    for of_rank in launched[1]:
        assert of_rank["refused"].startswith("Telemetry.recompute: SyncBatchNorm mixes the batches of all ranks")
