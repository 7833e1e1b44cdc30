"""Every kind of parallelism that four processes can run on CPUs, with one launch for all of them.

Three stand for all in `make test`; DDP, HSDP's parts and FSDP2 alone are run by the tests beside this one, too.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from tests.ranks.launch import launch

import sealegs

LOOP = Path(__file__).with_name("matrix.py")
_spec = importlib.util.spec_from_file_location("ranks_matrix", LOOP)
assert _spec is not None
assert _spec.loader is not None
matrix: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(matrix)

pytestmark = pytest.mark.xdist_group("jobs")

TOLERANCE = 1e-6
"""How far loss and norm may be from those of one process, in float32: sums are added in another order."""
OF_WEIGHTS = ("param_norm", "params_finite", "moment1_norm", "moment2_norm", "update_rms")
CULPRITS = {
    "DDP": ("rank 1", "on rank 1"),
    "HSDP": ("rank 1 (replicate 0, shard 1)", "on rank 1 (replicate 0, shard 1)"),
    # the ranks of a group share a batch, so that two or all of them are at fault
    "TP": ("", ""),
    "FSDP2 x TP": ("", "on rank 2 (dp 1, tp 0)"),
    # what is wrong goes through all stages: the tensor is named, and who holds it
    "PP": ("", "of rank 0"),
    "PP x FSDP2": ("", "of rank 0 (dp 0)"),
    "CP": ("rank 1", "on rank 1"),
    "EP": ("rank 1", "on rank 1"),
}
"""Who is named at the NaN, and at the spike after the tensor."""
SAMPLE = ("FSDP2 x TP", "PP", "EP")
NAMES = [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.long) for name in CULPRITS]
Launched = tuple[Path, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    out = tmp_path_factory.mktemp("matrix")
    tests = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    asked = {test.callspec.params["name"] for test in tests if hasattr(test, "callspec")}
    launch(LOOP, matrix.WORLD, str(out), *(name for name in CULPRITS if name in asked))
    assert set(CULPRITS) == set(matrix.CASES)
    return out, [json.loads((out / f"{rank}.json").read_text()) for rank in range(matrix.WORLD)]


@pytest.mark.parametrize("name", NAMES)
def test_both_faults_are_skipped_to_the_last_bit_on_every_rank(name: str, launched: Launched) -> None:
    for of_rank in launched[1]:
        assert of_rank[name]["verdicts"] == launched[1][0][name]["verdicts"]
        skipped = of_rank[name]["skipped"]
        assert set(skipped) == {str(matrix.NAN), str(matrix.SPIKE)}
        assert all(is_same for is_same, _ in skipped.values()), "weights, moments, counters"
        after = of_rank[name]["digests"]
        assert after[str(matrix.NAN)][-1] != after[str(matrix.NAN - 1)][-1], "else this tests nothing"


@pytest.mark.parametrize("name", NAMES)
def test_rank_coordinate_and_tensor_are_named(name: str, launched: Launched) -> None:
    skipped = launched[1][0][name]["skipped"]
    at_nan, at_spike = CULPRITS[name]
    assert skipped[str(matrix.NAN)][1] == at_nan
    tensor, _, where = skipped[str(matrix.SPIKE)][1].partition(" ")
    assert where == at_spike
    assert ".weight" in tensor or ".bias" in tensor


@pytest.mark.parametrize("name", NAMES)
def test_what_is_measured_is_what_one_process_measures(name: str, launched: Launched) -> None:
    """Copies count once, parts are added, and sums that are partial are made whole first."""
    out, _ = launched
    ranks, alone = sealegs.open_run(out / name), sealegs.open_run(out / matrix.CASES[name].kind)
    assert len(ranks.steps) == len(alone.steps) == matrix.LAST
    for signal in ("loss", "grad_norm", *OF_WEIGHTS):
        mine, theirs = (dict(zip(*each.series(signal), strict=True)) for each in (ranks, alone))
        # one process also samples the very step at which something is wrong
        both = sorted((mine.keys() & theirs.keys()) - {matrix.NAN, matrix.SPIKE})
        assert len(both) >= 2
        close = TOLERANCE if signal in ("loss", "grad_norm") else 1e-5
        assert [mine[step] for step in both] == pytest.approx([theirs[step] for step in both], rel=close), signal


@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_go_back_to_one_step_and_to_what_they_were(name: str, launched: Launched) -> None:
    (step,) = {of_rank[name]["back"][0] for of_rank in launched[1]}
    assert 0 < step <= matrix.ASKED - matrix.BACK
    for of_rank in launched[1]:
        assert of_rank[name]["back"][1] == of_rank[name]["digests"][str(step)][0]
        first, again = of_rank[name]["digests"][str(step + 1)]
        assert first == again, "what follows from the same batch is the same, too"


@pytest.mark.parametrize("name", NAMES)
def test_different_tensors_of_one_name_are_no_replicas_that_differ(name: str, launched: Launched) -> None:
    out, _ = launched
    events = sealegs.open_run(out / name).events
    assert len([event for event in events if event.kind == "parts-of-ranks"]) == (name in matrix.OF_PARTS)
    assert not [event for event in events if event.kind == "alarm"]
    is_left_out = not list((out / name).glob("incidents/*/capsule/state"))
    assert is_left_out or name not in matrix.OF_PARTS, "no process alone could run it again"


@pytest.mark.parametrize(
    "name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.long) for name in matrix.OF_PARTS]
)
def test_a_checkpoint_has_what_each_rank_holds(name: str, launched: Launched) -> None:
    """Also where all stages were made from one seed, and have tensors of the same names."""
    (step,) = {of_rank[name]["resumed"][0] for of_rank in launched[1]}
    assert step > 0
    for of_rank in launched[1]:
        _, found, after = of_rank[name]["resumed"]
        assert found == of_rank[name]["digests"][str(step)][0]
        # DDP lays its buckets out anew after its first step, and gloo then adds in another order
        assert (after == of_rank[name]["digests"][str(step + 1)][0]) or name == "EP"
    assert len({of_rank[name]["resumed"][1] for of_rank in launched[1]}) == matrix.WORLD


def test_a_replica_that_differs_gets_the_weights_and_moments_of_the_majority(launched: Launched) -> None:
    out, saw = launched
    digests = [of_rank["one of four"]["digests"] for of_rank in saw]
    is_alike = [len(set(of_step)) == 1 for of_step in zip(*digests, strict=True)]
    # found at the comparison after the damage, and mended after that step
    assert is_alike == [not matrix.DAMAGED <= step < 2 * matrix.COMPARED for step in range(3 * matrix.COMPARED)]
    assert not any(of_rank["one of four"]["error"] for of_rank in saw)
    events = [event for event in sealegs.open_run(out / "one of four").events if event.kind == "intervention"]
    (done,) = [event.detail for event in events]
    assert (done["trigger"], done["changed"]) == ("replicas-differ", "rank 2 has got what rank 0 holds")


def test_where_no_majority_holds_the_same_nothing_is_copied_and_the_run_halts(launched: Launched) -> None:
    out, saw = launched
    assert all("the run is halted" in of_rank["two of four"]["error"] for of_rank in saw)
    digests = [of_rank["two of four"]["digests"][-1] for of_rank in saw]
    assert digests[0] == digests[1] != digests[2] == digests[3]
    (passed,) = [event for event in sealegs.open_run(out / "two of four").events if event.kind == "rung-passed-over"]
    assert "of ranks 0, 1, 2, 3 no majority holds the same" in passed.detail["reason"]


def test_a_step_without_any_loss_is_refused(launched: Launched) -> None:
    for of_rank in launched[1]:
        (loss,) = of_rank["refused"]
        assert loss == "step 0: loss=None on every rank: give it on those with the last stage of the pipeline"
