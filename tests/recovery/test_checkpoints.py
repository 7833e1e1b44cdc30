"""State in, folders on disk out, and back."""

import json
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from sealegs.errors import SourceError, StorageError
from sealegs.recovery.checkpoints import Checkpoints, State


def state(value: float) -> State:
    return State({"model/w": torch.full((40, 5), value), "rng/cpu": torch.get_rng_state()}, {"data": {"next": value}})


def files_of(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.is_file())


def test_what_was_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    tensors = {"a": odd, "b": odd.bfloat16(), "step": torch.tensor(3.0), "count": torch.tensor([2**40])}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(7, State(tensors, {"lr": 0.1 + 0.2}))
    loaded = checkpoints.load(7)
    assert loaded.plain == {"lr": 0.1 + 0.2}
    assert loaded.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded.tensors[name].dtype == tensor.dtype
        assert loaded.tensors[name].shape == tensor.shape
        assert torch.equal(loaded.tensors[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_the_newest_n_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (10, 20, 100):
        checkpoints.save(step, state(step))
    assert checkpoints.steps() == [20, 100]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["100", "20"]


DAMAGES = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-10]),
    "flipped": lambda file: file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:]),
    "emptied": lambda file: file.write_bytes(b""),
    "missing": lambda file: file.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("which", range(4), ids=[".metadata", "tensors", "digests", "plain"])
def test_damage_to_any_file_is_noticed_and_named(tmp_path: Path, damage: str, which: int) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state(1.0))
    checkpoints.save(2, state(2.0))
    files = files_of(tmp_path / "2")
    assert len(files) == 4
    DAMAGES[damage](files[which])
    step, passed_over = checkpoints.newest_intact()
    assert step == 1
    assert [entry.step for entry in passed_over] == [2]
    assert files[which].name in passed_over[0].reason
    assert checkpoints.load(step).tensors["model/w"][0, 0] == 1.0


def test_rotation_never_lets_the_only_good_one_go(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, state(1.0))
    Checkpoints(tmp_path, keep=3).save(2, state(2.0))
    Checkpoints(tmp_path, keep=3).save(3, state(3.0))
    for step in (2, 3):
        DAMAGES["flipped"](files_of(tmp_path / str(step))[1])
    checkpoints._rotate()
    assert checkpoints.steps() == [1, 2, 3]
    checkpoints.save(4, state(4.0))
    assert checkpoints.steps() == [3, 4]


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, state(1.0))
    checkpoints.save(5, state(2.0))
    assert checkpoints.load(5).tensors["model/w"][0, 0] == 2.0
    assert [entry.name for entry in tmp_path.iterdir()] == ["5"]


def test_what_a_kill_left_behind_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / ".7.partial").mkdir()
    (tmp_path / ".7.partial" / "__0_0.distcp").write_bytes(b"half")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps() == []
    checkpoints.save(9, state(9.0))
    assert [entry.name for entry in tmp_path.iterdir()] == ["9"]


def test_none_at_all(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "nowhere").newest_intact() == (None, [])


def test_a_save_that_fails_leaves_nothing_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(StorageError, match="cannot be written"):
        Checkpoints(tmp_path / "checkpoints").save(1, state(1.0))
    assert (tmp_path / "checkpoints").read_text() == "in the way"


def test_a_state_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state(1.0))
    with pytest.raises(TypeError):
        checkpoints.save(1, State({}, {"not json": object()}))
    assert checkpoints.newest_intact() == (1, [])
    assert [entry.name for entry in tmp_path.iterdir()] == ["1"]


def test_killed_while_saving_leaves_whole_checkpoints_only(tmp_path: Path) -> None:
    """Kills at many moments of a save: what has a checkpoint's name is always intact."""
    program = textwrap.dedent("""
        import sys, torch
        from pathlib import Path
        from sealegs.recovery.checkpoints import Checkpoints, State
        checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)
        for step in range(10**6):
            checkpoints.save(step % 3, State({"w": torch.full((2000, 100), float(step))}, {}))
            print(step, flush=True)
    """)
    for attempt in range(3):
        child = subprocess.Popen([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE)
        assert child.stdout
        for _ in range(3):
            child.stdout.readline()
        time.sleep(0.007 * (attempt + 1))  # somewhere in the next save, which takes some 20 ms
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        child.stdout.close()
        checkpoints = Checkpoints(tmp_path, keep=2)
        assert len(checkpoints.steps()) >= 2
        assert [checkpoints.check(step) for step in checkpoints.steps()] == [None] * len(checkpoints.steps())


class Exploit:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("code from a checkpoint ran",)


def test_a_table_of_contents_that_would_run_code_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state(1.0))
    (tmp_path / "1" / ".metadata").write_bytes(pickle.dumps(Exploit()))
    with pytest.raises(SourceError, match=r"not a checkpoint that Sealegs wrote \(it names builtins.print\)"):
        checkpoints.load(1)
    assert capsys.readouterr().out == ""


def test_digests_are_of_every_file(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(1, state(1.0))
    digests = json.loads((tmp_path / "1" / "digests.json").read_text())
    assert digests.keys() == {file.name for file in files_of(tmp_path / "1")} - {"digests.json"}
