"""Real processes: a frozen base stays out of the states of several ranks, with one digest however it is sharded."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from tests.ranks.launch import launch

from sealegs.state.checkpoints import Checkpoints

PROGRAM = Path(__file__).with_name("frozen.py")
_spec = importlib.util.spec_from_file_location("ranks_frozen", PROGRAM)
assert _spec is not None
assert _spec.loader is not None
frozen: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(frozen)

pytestmark = pytest.mark.xdist_group("ranks")  # one launch serves all tests, on one worker

WRAPPERS = ("ddp", "fsdp2")
BASE = {"0.base.weight", "0.base.bias", "2.base.weight", "2.base.bias", "3.weight", "3.bias"}
Saw = dict[str, Any]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Saw]:
    """What one process saw, then one launch with both wrappers: what each of two ranks saw."""
    out = tmp_path_factory.mktemp("frozen")
    saw = {"none": frozen.alone(out / "none")}
    launch(PROGRAM, 2, str(out))
    saw |= {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}
    return out, saw


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_base_is_left_out_with_one_digest_however_it_is_sharded(launched: tuple[Path, Saw], wrapper: str) -> None:
    _, saw = launched
    alone = saw["none"]
    assert alone["left out"].keys() == BASE
    for rank in range(2):
        one = saw[f"{wrapper}-{rank}"]
        assert one["left out"] == alone["left out"]
        held = {name for name in one["held"] if not name.startswith("rng/")}
        assert held == {name for name in alone["held"] if not name.startswith("rng/")}
        assert one["snapshot"] <= 3 * 4 * 4 * 2 * 33 + 32, "four adapters with two moments each, and steps"


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_ranks_go_back_and_go_on_bit_for_bit(launched: tuple[Path, Saw], wrapper: str) -> None:
    _, saw = launched
    for rank in range(2):
        one = saw[f"{wrapper}-{rank}"]
        assert one["after a rollback"] == one["losses"]
        assert one["gone on with"]["losses"] == one["losses"]
        assert one["gone on with"]["left out"] == one["left out"]
        assert one["gone on with"]["held"] == one["held"]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_other_numbers_of_ranks_check_the_same_digest(launched: tuple[Path, Saw], wrapper: str) -> None:
    out, saw = launched
    after = frozen.gone_on(Checkpoints(out / wrapper), "none")
    assert after["losses"] == pytest.approx(saw["none"]["losses"], rel=1e-4)
    refused = "the base model is another: 0.base.weight, which was frozen, was float32 [33, 33] "
    assert after["other base"].startswith(refused)
    for rank in range(2):
        for how in ("gone on with", "from one process"):
            assert saw[f"{wrapper}-{rank}"][how]["other base"].startswith(refused)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_one_rank_has_written_to_is_held_by_all(launched: tuple[Path, Saw], wrapper: str) -> None:
    _, saw = launched
    assert [saw[f"{wrapper}-{rank}"]["written to"] for rank in range(2)] == [[True, False], [True, False]]
