"""Real processes: a run that is saved by some ranks is gone on with by the same, by more or by fewer."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from tests.ranks.launch import launch

from sealegs.state.checkpoints import Checkpoints

PROGRAM = Path(__file__).with_name("resume.py")
_spec = importlib.util.spec_from_file_location("ranks_resume", PROGRAM)
assert _spec is not None
assert _spec.loader is not None
resume: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(resume)

pytestmark = pytest.mark.xdist_group("ranks")  # one launch serves all tests, on one worker

WRAPPERS = ("ddp", "fsdp2")
Saw = dict[str, Any]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Saw]:
    """What one process saw, then one launch with both wrappers: what each of two ranks saw."""
    out = tmp_path_factory.mktemp("resume")
    saw = {"none": resume.alone(out / "none")}
    launch(PROGRAM, 2, str(out))
    saw |= {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}
    return out, saw


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.integration("a loop of one's own")
@pytest.mark.conforms("resume")
def test_a_run_goes_on_bit_for_bit_on_as_many_ranks(launched: tuple[Path, Saw], wrapper: str) -> None:
    _, saw = launched
    for rank in range(2):
        one = saw[f"{wrapper}-{rank}"]
        after = one["gone on with"]
        assert after["digests"] == one["digests"]
        assert after["losses"] == one["losses"][resume.SAVED :]
        assert after["remarks"] == []
        assert after["draw"] == one["draw"]
    assert saw[f"{wrapper}-0"]["draw"] != saw[f"{wrapper}-1"]["draw"]
    assert len(one["digests"]) == 9 + 2 * 3 + 3  # weights; Adam's of two matrices; momenta of three vectors


def test_the_thread_writes_what_was_there_while_the_training_goes_on(launched: tuple[Path, Saw]) -> None:
    _, saw = launched
    for wrapper in WRAPPERS:
        for rank in range(2):
            one = saw[f"{wrapper}-{rank}"]
            assert (one["accepted"], one["trouble"], one["written"]) == (True, None, [resume.SAVED])


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_one_process_goes_on_with_what_two_ranks_saved(launched: tuple[Path, Saw], wrapper: str) -> None:
    out, saw = launched
    one = saw[f"{wrapper}-0"]
    after = resume.resumed(Checkpoints(out / wrapper), "none")
    assert after["digests"] == one["digests"]
    assert after["losses"] == pytest.approx(one["losses"][resume.SAVED :], rel=1e-5)
    assert after["draw"] == one["draw"]
    assert after["remarks"] == [
        "there were 2 ranks and are 1: the random state of the others is not used",
        "every rank takes the place in the data that rank 0 had",
    ]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_two_ranks_go_on_with_what_one_process_saved(launched: tuple[Path, Saw], wrapper: str) -> None:
    _, saw = launched
    alone = saw["none"]
    draws = []
    for rank in range(2):
        after = saw[f"{wrapper}-{rank}"]["from one process"]
        assert after["digests"] == alone["digests"]
        assert after["losses"] == pytest.approx(alone["losses"][resume.SAVED :], rel=1e-5)
        assert after["remarks"] == [
            "there were 1 ranks and are 2: ranks from 1 on are seeded by seed, step and rank",
            "every rank takes the place in the data that rank 0 had",
        ]
        draws.append(after["draw"])
    assert draws[0] == alone["draw"]
    assert draws[1] not in ([], alone["draw"])
    assert draws[1] == saw["ddp-1"]["from one process"]["draw"], "the same for the same seed, step and rank"


def test_names_are_the_same_in_every_wrapper_and_shards_are_shards(launched: tuple[Path, Saw]) -> None:
    _, saw = launched
    assert saw["ddp-0"]["names"] == saw["fsdp2-0"]["names"]
    assert [name for name in saw["ddp-1"]["names"] if name.startswith("rng/")] == ["rng/1/cpu"]
    assert saw["ddp-0"]["digests"].keys() == saw["none"]["digests"].keys()
    assert saw["ddp-0"]["gone on with"]["sharded"] == []
    sharded = saw["fsdp2-1"]["gone on with"]["sharded"]
    assert sharded == saw["fsdp2-1"]["from one process"]["sharded"]
    assert "optimizer/0/inside.weight.exp_avg" in sharded
    assert "model/again.weight" in sharded


def test_before_the_first_step_there_is_no_optimizer_state(launched: tuple[Path, Saw]) -> None:
    _, saw = launched
    for wrapper in WRAPPERS:
        assert not [name for name in saw[f"{wrapper}-0"]["names at first"] if name.startswith("optimizer")]


def test_all_ranks_save_or_none_does(launched: tuple[Path, Saw]) -> None:
    _, saw = launched
    for wrapper in WRAPPERS:
        one, other = (saw[f"{wrapper}-{rank}"] for rank in range(2))
        assert not one["accepted while one rank writes"]
        assert not other["accepted while one rank writes"]
        assert one["trouble of one"] == (
            f"checkpoint {resume.LAST}: rank 1 could not do its part: "
            "TypeError: Object of type object is not JSON serializable"
        )
        assert other["trouble of one"] == f"checkpoint {resume.LAST}: Object of type object is not JSON serializable"
        assert one["healthy"] == other["healthy"] == resume.SAVED
        assert (one["replaced"], other["replaced"]) == (False, False), "a healthy one stays"
        assert set(one["left"]) == {str(resume.SAVED), "tags.json"}
