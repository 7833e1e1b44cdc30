"""Real processes: what two ranks have saved, three go on with, or one: weights, moments, memory, and every sample."""

import importlib.util
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.ranks.launch import launch

import sealegs
from sealegs.errors import RanksChanged, RestartRefused
from sealegs.record.health import refuse_restart

PROGRAM = Path(__file__).with_name("elastic.py")
_spec = importlib.util.spec_from_file_location("ranks_elastic", PROGRAM)
assert _spec is not None
assert _spec.loader is not None
elastic: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(elastic)

pytestmark = pytest.mark.xdist_group("jobs")

WRAPPERS = ("ddp", "fsdp2")


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """What two ranks saw, three that went on, and one that did from a copy."""
    out = tmp_path_factory.mktemp("elastic")
    launch(PROGRAM, 2, str(out))
    for wrapper in WRAPPERS:
        shutil.copytree(out / wrapper, out / "alone" / wrapper)
    saw = {f"{wrapper}-1-0": _alone(wrapper, out / "alone") for wrapper in WRAPPERS}
    launch(PROGRAM, 3, str(out))
    return out, saw | {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}


def _alone(wrapper: str, out: Path) -> dict[str, Any]:
    shutil.move(out / wrapper, out / "none")
    try:
        saw = elastic.train("none", out, 0, 1, None)
    finally:
        shutil.move(out / "none", out / wrapper)
    return json.loads(json.dumps(saw))  # type: ignore[no-any-return]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_weights_moments_and_memory_are_those_that_were_saved(
    launched: tuple[Path, dict[str, Any]], wrapper: str, ranks: int
) -> None:
    _, saw = launched
    before = saw[f"{wrapper}-2-0"]
    for rank in range(ranks):
        after = saw[f"{wrapper}-{ranks}-{rank}"]
        assert (after["begins"], after["epoch"]) == (elastic.SAVED, 1)
        assert after["state"] == before["state"], "bit for bit"
        assert after["watch"] == before["watch"]
    assert len(before["state"]) == 4 * 4, "weights, two moments and a count of each"


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_every_sample_of_the_epoch_is_used_once_or_named(
    launched: tuple[Path, dict[str, Any]], wrapper: str, ranks: int
) -> None:
    out, saw = launched
    of_ranks = [saw[f"{wrapper}-2-{rank}"] for rank in range(2)]
    of_ranks += [saw[f"{wrapper}-{ranks}-{rank}"] for rank in range(ranks)]
    used = Counter(sample for one in of_ranks for epoch, samples in one["samples"] for sample in samples if epoch == 1)
    run = sealegs.open_run((out if ranks > 1 else out / "alone") / wrapper)
    (told,) = [event.detail for event in run.events if event.kind == "data-recut"]
    assert told["ranks"] == [2, ranks]
    assert used - Counter(told["used_twice"]) + Counter(told["left_out"]) == Counter(range(elastic.SAMPLES))
    (resume,) = [event.detail for event in run.events if event.kind == "resume"]
    assert not [remark for remark in resume["remarks"] if "place in the data" in remark], "it is everybody's"


def test_what_cannot_be_divided_is_refused_once(launched: tuple[Path, dict[str, Any]]) -> None:
    """The next start leaves at once, and one on as many ranks as before goes on."""
    out, _ = launched
    folder = out / "list"
    with pytest.raises(RanksChanged, match="of 2 ranks, and here is 1: loader=list does not say") as refused:
        elastic.train_on_a_list(out)
    health = json.loads((folder / "health.json").read_text())
    assert (health["advice"], health["verdict"], health["ranks"]) == ("do not restart", "failed", 2)
    assert health["because"] == str(refused.value)
    rows = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(RestartRefused, match="not started again: the place in the data is of 2 ranks"):
        elastic.train_on_a_list(out)
    assert (folder / "metrics.jsonl").read_bytes() == rows
    refuse_restart(folder, 2)
    with pytest.raises(RestartRefused):
        refuse_restart(folder, 3)


def test_a_folder_that_the_machines_do_not_share_is_refused_by_all(launched: tuple[Path, dict[str, Any]]) -> None:
    out, saw = launched
    for rank in range(3):
        told = saw[f"unshared-{rank}"]
        assert "rank 2 on " in told
        assert "does not see what rank 0 on " in told
        assert told.endswith("; give a folder on storage that all machines share")
    assert not [path.name for path in (out / "disk" / "run").iterdir() if path.name.startswith(".shared")]
