"""``sealegs train``: words in, a run folder out."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench.disk.layer import DiskLayer, Fault
from tests.forked import start

import sealegs.lab.train as lab_train
from sealegs.cli.main import main
from sealegs.cli.train import summary
from sealegs.lab.settings import Settings
from sealegs.lab.train import Result
from sealegs.record.run import open_run

Train = Callable[..., tuple[int, str, str]]

SMALL = ("--size", "nano", "--threads", "1", "--cadence.evaluate-batches", "1")

UNPROVEN = "no checkpoint is proven yet: this is the newest that is intact and from before any incident"
"""So few steps prove nothing."""


@pytest.fixture
def train(
    tmp_path: Path, tokens_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Train:
    """`sealegs train ...` in this process and an empty folder; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, data: Path | str = tokens_file) -> tuple[int, str, str]:
        sources = () if "--resume" in words else ("--data.sources", str(data))
        code = main(["train", *words, *SMALL, *sources])
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory: pytest.TempPathFactory, tokens_file: Path) -> Path:
    """A run that has done its four steps, to copy."""
    folder = tmp_path_factory.mktemp("runs") / "a"
    assert main(["train", "--run", str(folder), "--steps", "4", *SMALL, "--data.sources", str(tokens_file)]) == 0
    return folder


@pytest.fixture
def finished(four_steps: Path, tmp_path: Path) -> Path:
    """That run as `experiments/a`, as if it had been trained there."""
    return shutil.copytree(four_steps, tmp_path / "experiments" / "a")


def refused(result: tuple[int, str, str], *parts: str) -> None:
    """One sentence, exit 2."""
    code, out, err = result
    assert (code, out) == (2, "")
    *progress, sentence = err.splitlines()
    assert all(line.startswith("tokenising ") for line in progress)
    assert sentence.startswith("sealegs train: ")
    for part in parts:
        assert part in sentence


def folders(place: Path) -> list[str]:
    """What a refused run may not add to."""
    return sorted(str(path.relative_to(place)) for path in place.rglob("*"))


def test_a_run_leaves_its_folder_and_says_what_is_in_it(train: Train, tmp_path: Path) -> None:
    code, out, err = train("--run", "a", "--steps", "12", "--cadence.checkpoint-steps", "5")
    assert code == 0
    assert "12 of 12 steps" in out
    assert "nats under the unigram entropy of 4.1" in out
    assert "experiments/a/" in out
    assert "metrics.jsonl" in out
    assert err.splitlines()[-1].startswith("step 11/12  ok  loss ")
    run = open_run(tmp_path / "experiments" / "a")
    assert run.steps.tolist() == list(range(13))
    assert {"loss", "grad_norm", "lr", "batch_index", "batch_hash", "sources"} <= set(run.signals)
    saved = [event.detail["checkpoint"] for event in run.events if event.kind == "checkpoint"]
    assert [event.kind for event in run.events] == ["guard", "start", "snapshots", *["checkpoint"] * len(saved), "end"]
    assert min(saved) == 5  # on a slow disk the next one waits until that is written, and it is told of late
    assert max(saved) == 12
    assert run.logged("eval_loss").nonzero()[0].tolist() == [0, 12]
    assert run.logged("token_entropy").nonzero()[0].tolist() == [0, 10]
    assert not run.logged("loss")[12]
    assert run.manifest.settings["steps"] == 12
    assert run.manifest.dtype in ("fp32", "bf16")
    assert not list((tmp_path / "experiments").rglob("*.partial"))


def test_without_a_name_the_run_gets_one(train: Train, tmp_path: Path) -> None:
    assert train("--steps", "1")[0] == 0
    (folder,) = (tmp_path / "experiments").iterdir()
    assert folder.name.startswith("nano-2")


def test_a_path_is_taken_as_it_is(train: Train, tmp_path: Path) -> None:
    assert train("--steps", "1", "--run", "elsewhere/deep/a")[0] == 0
    assert open_run(tmp_path / "elsewhere" / "deep" / "a").steps.tolist() == [0, 1]
    assert train("--steps", "1", "--run", "./here/a")[0] == 0
    assert open_run(tmp_path / "here" / "a").steps.tolist() == [0, 1]


def test_the_hint_to_go_on_can_be_pasted() -> None:
    result = Result(
        folder=Path("experiments/my run"), steps=3, stopped_by="Ctrl-C", eval_loss=None, unigram_entropy=1.0
    )
    assert "sealegs train --run 'experiments/my run' --resume" in "\n".join(summary(result, Settings(), []))


def test_config_file_and_flags(train: Train, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text("steps = 2\nseed = 5\n[optimizer]\nlr = 0.01\nwarmup_steps = 0\n")
    assert train("my.toml", "--run", "a", "--seed", "6")[0] == 0
    settings = open_run(tmp_path / "experiments" / "a").manifest.settings
    assert (settings["steps"], settings["seed"], settings["optimizer"]["lr"]) == (2, 6, 0.01)


def test_a_config_file_that_does_not_come_first_is_refused(train: Train, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text("steps = 2")
    refused(train("--run", "a", "my.toml"), "my.toml: give the file of settings first")
    assert not (tmp_path / "experiments").exists()


def test_settings_that_change_at_a_resume_are_used(train: Train, tmp_path: Path) -> None:
    words = ("--run", "a", "--optimizer.warmup-steps", "0", "--optimizer.final-lr-share", "1.0")
    train(*words, "--steps", "4")
    changes = ("--optimizer.lr", "1e-6", "--optimizer.weight-decay", "0.3", "--price-per-hour", "3", "--steps", "6")
    assert train("--run", "a", "--resume", *changes)[0] == 0
    run = open_run(tmp_path / "experiments" / "a")
    assert run.column("lr")[:6].tolist() == [0.003] * 4 + [1e-6] * 2
    assert (run.manifest.price_per_hour, run.manifest.settings["optimizer"]["weight_decay"]) == (3.0, 0.3)
    saved = json.loads((tmp_path / "experiments" / "a" / "checkpoints" / "6" / "plain.json").read_text())
    assert [group["settings"]["weight_decay"] for group in saved["optimizers"][0]["groups"]] == [0.3, 0.0]
    (resume,) = (event for event in run.events if event.kind == "resume")
    assert resume.step == 4
    assert resume.detail["changed"]["optimizer.lr"] == [0.003, 1e-6]
    assert {"versions", "git", "host"} <= resume.detail.keys()


def test_more_steps_take_the_new_schedule_from_the_first_one_on(train: Train, tmp_path: Path) -> None:
    words = ("--optimizer.warmup-steps", "0")
    train("--run", "a", "--steps", "4", *words)
    train("--run", "a", "--resume", "--steps", "9")
    train("--run", "b", "--steps", "9", *words)
    long = open_run(tmp_path / "experiments" / "b").column("lr")
    assert open_run(tmp_path / "experiments" / "a").column("lr")[4:9].tolist() == long[4:9].tolist()


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (("--model.context", "16"), "model.context: changed since the run was started"),
        (("--model.heads", "2"), "model.heads: changed since the run was started"),
        (("--seed", "3"), "seed: changed since the run was started"),
        (("--steps", "2"), "steps=2: the run has done 4 already"),
    ],
)
def test_what_would_be_another_run_is_refused_at_a_resume(
    train: Train, finished: Path, flags: tuple[str, ...], part: str
) -> None:
    before = {path: path.read_bytes() for path in finished.parent.rglob("*") if path.is_file()}
    refused(train("--run", "a", "--resume", *flags), part)
    assert before == {path: path.read_bytes() for path in finished.parent.rglob("*") if path.is_file()}


def test_the_precision_may_change_at_a_resume(train: Train, tmp_path: Path) -> None:
    train("--run", "a", "--steps", "2", "--dtype", "fp32")
    assert train("--run", "a", "--resume", "--steps", "3", "--dtype", "fp16")[0] == 0
    assert train("--run", "a", "--resume", "--steps", "4", "--dtype", "fp32")[0] == 0
    run = open_run(tmp_path / "experiments" / "a")
    assert run.logged("loss_scale").tolist() == [False, False, True, False, False]
    assert run.manifest.dtype == "fp32"


def test_more_steps_can_be_added_at_a_resume(train: Train, finished: Path) -> None:
    code, _, err = train("--run", "a", "--resume", "--steps", "6")
    assert code == 0
    assert f"steps changed from 4 to 6; goes on at step 4 ({UNPROVEN})" in err
    run = open_run(finished)
    assert run.steps.tolist() == list(range(7))
    assert run.manifest.settings["steps"] == 6


def test_a_finished_run_resumed_stays_finished(train: Train, finished: Path) -> None:
    before = open_run(finished).column("eval_loss")
    assert train("--run", "a", "--resume")[0] == 0
    after = open_run(finished).column("eval_loss")
    assert np.array_equal(before, after, equal_nan=True)


# Bad input: one sentence, exit 2, nothing half-written.


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("none.txt", None, ["none.txt", "No such file"]),
        ("none.npy", None, ["none.npy", "No such file"]),
        ("none.bin", None, ["none.bin", "No such file"]),
        ("empty.txt", b"", ["empty.txt", "has no text in it"]),
        ("empty.npy", b"", ["empty.npy", "not a numpy array file"]),
        ("empty.bin", b"", ["empty.bin", "empty"]),
        ("odd.bin", b"123", ["odd.bin", "3 bytes, not a whole number of uint16"]),
        ("high.bin", np.full(9000, 777, "<u2").tobytes(), ["high.bin", "777 is beyond model.vocabulary=512"]),
        ("short.bin", np.full(9, 7, "<u2").tobytes(), ["short.bin", "too few for one row of model.context=32"]),
        ("latin1.txt", "é".encode("latin-1"), ["latin1.txt", "UTF-8"]),
        ("data.csv", b"1,2", ["data.csv", "no such source", ".txt, .npy or .bin"]),
        ("zip.npy", b"PK\x03\x04 and so on", ["zip.npy", "not a numpy array file"]),
        ("x" * 300 + ".npy", None, ["File name too long"]),
    ],
)
def test_bad_data_is_refused(train: Train, tmp_path: Path, name: str, content: bytes | None, parts: list[str]) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    before = folders(tmp_path)
    refused(train("--run", "a", "--steps", "2", data=name), *parts)
    assert folders(tmp_path) == before


@pytest.mark.parametrize("array", [np.zeros((3, 3), np.int64), np.zeros(3), np.full(900, -1)])
def test_an_array_that_is_no_row_of_ids_is_refused(train: Train, tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "odd.npy", array)
    refused(train("--run", "a", data="odd.npy"), "odd.npy: ")


def test_a_misspelt_key_is_refused(train: Train, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text("[optimizer]\nlearning_rate = 0.1\n")
    refused(train("my.toml", "--run", "a"), "my.toml", "no setting is called optimizer.learning_rate")
    assert not (tmp_path / "experiments").exists()


def test_an_impossible_flag_is_refused(train: Train, tmp_path: Path) -> None:
    refused(train("--run", "a", "--optimizer.lr", "-1"), "optimizer.lr=-1.0: must be above 0")
    assert not (tmp_path / "experiments").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that is not there; here it is")
def test_a_device_that_is_not_there_is_refused(train: Train, tmp_path: Path) -> None:
    refused(train("--run", "a", "--device", "cuda"), "device='cuda': torch sees no CUDA device here")
    assert not (tmp_path / "experiments").exists()


def test_a_flag_that_does_not_exist_is_usage(train: Train, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        train("--run", "a", "--stpes", "3")
    assert caught.value.code == 2
    assert not (tmp_path / "experiments").exists()


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden"])
def test_an_odd_name_is_refused(train: Train, name: str) -> None:
    refused(train("--run", name), "give a name")


def test_a_taken_name_is_refused_and_left_alone(train: Train, finished: Path) -> None:
    before = {path: path.read_bytes() for path in finished.parent.rglob("*") if path.is_file()}
    refused(train("--run", "a", "--steps", "1"), "experiments/a", "--resume", "another")
    assert before == {path: path.read_bytes() for path in finished.parent.rglob("*") if path.is_file()}


def test_resuming_what_is_not_there(train: Train, tmp_path: Path) -> None:
    refused(train("--run", "a", "--resume"), "experiments/a: no such run folder")
    refused(train("--resume"), "--run NAME")
    assert not (tmp_path / "experiments").exists()


def test_a_manifest_from_the_future_is_refused(train: Train, finished: Path, tmp_path: Path) -> None:
    path = finished / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 99}))
    before = folders(tmp_path)
    refused(train("--run", "a", "--resume"), "schema 99", "pip install -U sealegs")
    assert folders(tmp_path) == before


def test_a_truncated_checkpoint_is_passed_over_and_none_intact_is_refused(train: Train, tmp_path: Path) -> None:
    words = ("--run", "a", "--cadence.checkpoint-steps", "2")
    train(*words, "--steps", "4")  # the last one of a run is waited for: others come later on a slow disk
    train(*words, "--steps", "6", "--resume")
    checkpoints = tmp_path / "experiments" / "a" / "checkpoints"
    losses = open_run(tmp_path / "experiments" / "a").column("loss")

    def truncate(step: int) -> None:
        file = checkpoints / str(step) / "__0_0.distcp"
        file.write_bytes(file.read_bytes()[:-100])

    truncate(6)
    code, _, err = train(*words, "--resume")
    assert code == 0
    assert f"passed over checkpoint 6: __0_0.distcp is not what was written; goes on at step 4 ({UNPROVEN})" in err
    assert np.array_equal(open_run(tmp_path / "experiments" / "a").column("loss"), losses, equal_nan=True)

    for folder in checkpoints.glob("[0-9]"):
        truncate(int(folder.name))
    refused(train(*words, "--resume"), "no checkpoint is to be trusted", "__0_0.distcp")


def test_other_data_at_a_resume_is_refused(train: Train, tmp_path: Path) -> None:
    np.save(tmp_path / "data.npy", np.arange(5000) % 100)
    train("--run", "a", "--steps", "2", data="data.npy")
    np.save(tmp_path / "data.npy", np.arange(5000) % 101)
    refused(train("--run", "a", "--resume"), "data.npy: not the data that a-")
    np.save(tmp_path / "data.npy", np.arange(5000) % 100)
    refused(train("--run", "a", "--resume", "--data.batch", "4"), "data.batch: changed since the run was started")
    assert train("--run", "a", "--resume")[0] == 0


AT_ONCE = """
import sys
from sealegs.cli.main import main
from sealegs.state.checkpoints import Checkpoints

save_soon = Checkpoints.save_soon

def save_at_once(self, *args, **kwargs):
    is_taken = save_soon(self, *args, **kwargs)
    self.wait()
    return is_taken

Checkpoints.save_soon = save_at_once
print(main([*sys.argv[1:], "--run", "sealed/a"]))
sys.exit(main([*sys.argv[1:], "--run", "small/a"]))
"""
"""The command on disks that are faster than the training: which checkpoints there are is known then.

Twice in one process, of which importing torch is most.
"""
DISKS = "mount -t tmpfs -o ro tmpfs sealed && mount -t tmpfs -o size=2500k tmpfs small"


def on_own_disks(words: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command with file systems of its own, which go with it; what they held is left in `kept`."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"]).returncode:
        pytest.skip("this system lets no one make a mount namespace (unshare -rm), so no small disk can be had")
    for folder in ("sealed", "small", "kept"):
        (cwd / folder).mkdir()
    script = f'{DISKS} && "$@"; code=$?; cp -r sealed small kept; exit $code'
    command = ["unshare", "-rm", "sh", "-c", script, "sh", sys.executable, "-c", AT_ONCE, "train", *SMALL, *words]
    return subprocess.run(command, cwd=cwd, env=os.environ, capture_output=True, text=True, timeout=120)


def test_a_read_only_folder_and_a_full_disk_are_one_sentence_and_what_is_there_stays_good(
    train: Train, tmp_path: Path, tokens_file: Path
) -> None:
    """A disk holds two checkpoints of nano and not three: the run goes on without the third, and then fails."""
    done = on_own_disks(
        ["--steps", "16", "--cadence.checkpoint-steps", "5", "--data.sources", str(tokens_file)], tmp_path
    )
    assert (done.stdout.splitlines()[0], done.stderr.splitlines()[0]) == (
        "2",
        "sealegs train: sealed/a: cannot be written (Read-only file system): "
        "choose a folder that can be written and try again (docs/reliability.md)",
    )
    assert list((tmp_path / "kept" / "sealed").iterdir()) == []

    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1] == (
        "sealegs train: small/a/checkpoints/16: cannot be written (No space left on device): "
        "free some space and try again (docs/reliability.md)"
    )
    assert "Traceback" not in done.stderr
    kept = tmp_path / "kept" / "small" / "a"
    assert sorted(int(path.name) for path in (kept / "checkpoints").iterdir()) == [5, 10]
    failed = [event for event in open_run(kept).events if event.kind == "checkpoint-failed"]
    assert "No space left" in failed[0].detail["reason"]
    assert open_run(kept).steps.tolist() == list(range(16))
    assert train("--run", "kept/small/a", "--resume")[0] == 0
    assert open_run(kept).steps.tolist() == list(range(17))


def test_a_run_whose_checkpoints_found_no_room_does_not_exit_with_0(train: Train, tmp_path: Path) -> None:
    """Rows fit into what is left of a block, so that only checkpoints fail; also that of the last step."""
    words = ("--run", "a", "--steps", "6", "--cadence.checkpoint-steps", "2", "--cadence.evaluate-steps", "0")
    with DiskLayer(tmp_path / "experiments" / "a" / "checkpoints", Fault("full", 1)):
        code, out, err = train(*words)
    assert (code, out) == (2, "")
    missing = "3 checkpoints could not be written, the last of step 6; there is none on disk"
    assert err.splitlines()[-2:] == [
        f"sealegs: the run folder is not complete: {missing}",
        "sealegs train: experiments/a/checkpoints/6: cannot be written (No space left on device): "
        "free some space and try again (docs/reliability.md)",
    ]
    run = open_run(tmp_path / "experiments" / "a")
    assert run.steps.tolist() == list(range(6))
    assert (run.events[-1].kind, run.events[-1].detail["missing"]) == ("end", missing)
    assert train("--run", "a", "--resume")[0] == 0


def test_a_run_whose_capsule_found_no_room_says_what_is_missing_and_does_not_exit_with_0(
    train: Train, tmp_path: Path
) -> None:
    words = ("--run", "a", "--steps", "12", "--cadence.checkpoint-steps", "4", "--cadence.snapshot-steps", "2")
    with DiskLayer(tmp_path / "experiments" / "a" / "incidents", Fault("full", 1)):
        code, out, err = train(*words, *(word for step in (7, 8, 9) for word in ("--inject", f"nan-gradient@{step}")))
    assert code == 2
    assert "12 of 12 steps" in out
    missing = next(line for line in out.splitlines() if line.startswith("the run folder is not complete: "))
    assert "incidents/1 is not whole" in missing
    assert f"sealegs train: {missing}" in err.splitlines()
    assert open_run(tmp_path / "experiments" / "a").events[-1].detail["reason"] == "finished"


@pytest.mark.parametrize("what", ["deleted", "moved", "replaced"])
def test_a_run_that_loses_its_folder_says_so_at_once_and_does_not_exit_with_0(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr("sealegs.record.writer.LOOK_EVERY_S", 0.0)
    folder, elsewhere = tmp_path / "experiments" / "a", tmp_path / "experiments" / "b"
    backward, steps = lab_train.backward, count()

    def disturbed(*arguments: Any) -> Any:
        if next(steps) == 3:
            folder.rename(elsewhere)
            if what == "deleted":
                shutil.rmtree(elsewhere)
            elif what == "replaced":
                shutil.copytree(elsewhere, folder)
        return backward(*arguments)

    monkeypatch.setattr(lab_train, "backward", disturbed)
    code, out, err = train("--run", "a", "--steps", "6", "--cadence.checkpoint-steps", "4")
    assert (code, out) == (2, "")
    lost = f"experiments/a: {'deleted' if what == 'deleted' else f'moved away to {elsewhere}'} while the run was"
    told = [line for line in err.splitlines() if lost in line]
    assert told[0].startswith(lost)
    assert ", the run goes on: checkpoint 4: " in told[1]
    assert told[-2].startswith("sealegs: the run folder is not complete: ")
    assert told[-1].startswith(f"sealegs train: {lost}")
    assert "Traceback" not in err
    assert folder.exists() == (what == "replaced")
    if what != "deleted":
        assert open_run(elsewhere).steps.tolist() == list(range(6))
    if what == "replaced":
        assert open_run(folder).steps.tolist() == list(range(3))
        assert not (folder / "checkpoints").exists()


# Signals.


def in_a_step_that_never_ends(pipe: Connection, folder: Path, words: list[str]) -> None:
    """The command in a process of its own; what it says goes into the pipe."""
    os.chdir(folder)

    def never_ends(*_: object) -> Any:
        os.write(pipe.fileno(), b"in the step\n")  # past the stream that a handler of signals writes to
        time.sleep(600)

    lab_train.backward = never_ends  # type: ignore[assignment]
    with os.fdopen(os.dup(pipe.fileno()), "w") as told, redirect_stderr(told):
        sys.exit(main(words))


@pytest.mark.xdist_group("ranks")
def test_a_second_ctrl_c_stops_at_once(tmp_path: Path, tokens_file: Path) -> None:
    """The first one waits for the end of a step; here the step never ends."""
    here, there = multiprocessing.Pipe()
    words = ["train", "--run", "a", *SMALL, "--data.sources", str(tokens_file)]
    child = start(in_a_step_that_never_ends, there, tmp_path, words)
    there.close()
    assert child.pid
    with os.fdopen(os.dup(here.fileno())) as said:
        try:
            assert "in the step\n" in iter(said.readline, "")
            os.kill(child.pid, signal.SIGINT)
            assert said.readline() == "\n"
            assert said.readline().startswith("stopping after this step")
            os.kill(child.pid, signal.SIGINT)
            child.join(timeout=60)
        finally:
            child.kill()
        assert (child.exitcode, said.read()) == (130, "sealegs train: interrupted\n")


IN_TURN = """
import sys
from sealegs.cli.main import main

for name in "ab":
    print(main([*sys.argv[1:], "--run", name]), flush=True)
sys.exit(main([*sys.argv[1:], "--run", "c"]))
"""
"""Three runs by the command, one after the other in one process: what costs time is to import torch."""


def test_a_signal_or_a_lost_terminal_saves_a_checkpoint_and_exits_cleanly(tmp_path: Path, tokens_file: Path) -> None:
    words = ["train", "--steps", "100000", *SMALL, "--data.sources", str(tokens_file)]
    child = subprocess.Popen(
        [sys.executable, "-c", IN_TURN, *words],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stderr
    assert child.stdout
    signals = {"a": signal.SIGINT, "b": signal.SIGTERM, "c": signal.SIGTERM}
    err = ""
    for name, number in signals.items():
        while not (line := child.stderr.readline()).startswith("step 0/100000"):
            assert line, err
            err += line
        if name == "c":  # the terminal has gone
            child.stderr.close()
        child.send_signal(number)
    assert child.wait(60) == 143
    assert "Traceback" not in err
    out = child.stdout.read()
    child.stdout.close()
    told = [out.index(f"go on with: sealegs train --run experiments/{name} --resume") for name in "abc"]
    assert told[0] < out.index("\n130\n") < told[1] < out.index("\n143\n") < told[2]
    for name, number in signals.items():
        run = open_run(tmp_path / "experiments" / name)
        done = int(run.steps[-1]) + 1
        assert (tmp_path / "experiments" / name / "checkpoints" / str(done)).is_dir()
        assert [event.kind for event in run.events][-1] == "end"
        assert run.events[-1].detail["reason"] == "interrupted"
        assert run.events[-1].detail["by"] == ("Ctrl-C" if number == signal.SIGINT else "SIGTERM")


def test_an_injected_fault_is_skipped_and_the_summary_says_so(train: Train, tmp_path: Path) -> None:
    code, out, err = train("--run", "a", "--steps", "14", "--inject", "nan-gradient@6", "--inject", "bit-flip@99")
    assert code == 0
    assert "step 6: nan-gradient@6 struck the gradient of " in err
    assert "step 6  SKIP  grad_norm is not finite: nan  in " in err
    assert "ok, 1 skipped" in err
    assert "\nskipped 1 of 14 steps (nonfinite 1), 7.1%, at step 6\n" in out
    assert "bit-flip@99 has not struck" in out
    run = open_run(tmp_path / "experiments/a")
    assert [event.step for event in run.events if event.kind == "skip"] == [6]
    end = next(event for event in run.events if event.kind == "end").detail
    assert end["skips"] == 1
    assert end["skipped"] == "1 of 14 steps (nonfinite 1), 7.1%, at step 6"
    assert np.isfinite(run.column("loss")[:14]).all()


def test_a_lost_warmup_is_in_the_record(train: Train, tmp_path: Path) -> None:
    code, _, err = train("--run", "a", "--steps", "6", "--inject", "warmup-lost:steps=2@2")
    assert code == 0
    assert "step 2: warmup-lost:steps=2@2 struck the learning rate: " in err
    rates = open_run(tmp_path / "experiments/a").column("lr")
    assert rates[2] == rates[3] == rates[:6].max() > rates[1]


def test_a_healthy_run_says_that_nothing_was_skipped(train: Train) -> None:
    assert "\nno step was skipped\n" in train("--run", "a", "--steps", "3")[1]


def test_a_run_that_is_halted_says_why_and_how_to_go_on(train: Train, tmp_path: Path) -> None:
    often = ("--cadence.checkpoint-steps", "4")
    code, out, err = train("--run", "a", "--steps", "40", "--inject", "nan-gradient:steps=30@5", *often)
    assert code == 1
    assert "sealegs train: the run is halted: step 15  HALT  steps in a row not finite: 11, expected below 10" in err
    assert out.startswith("skipped 11 of 16 steps (nonfinite 11), ")
    assert "sealegs train --run experiments/a --resume" in out
    last = open_run(tmp_path / "experiments/a").events[-1]
    assert (last.kind, last.detail["reason"]) == ("end", "halted")
    code, out, _ = train("--run", "b", "--steps", "40", "--inject", "nan-gradient:steps=30@5")
    assert (code, "there is no checkpoint yet" in out) == (1, True)


@pytest.mark.parametrize(
    ("fault", "parts"),
    [("nan-gradeint@3", ["nan-gradient"]), ("nan-gradient", ["@STEP"]), ("bit-flip:tensor=nowhere@3", ["nowhere"])],
)
def test_an_odd_fault_is_refused(train: Train, fault: str, parts: list[str]) -> None:
    code, _, err = train("--run", "a", "--steps", "5", "--inject", fault)
    assert code == 2
    assert all(part in err.splitlines()[-1] for part in parts)
    assert not Path("experiments").exists()
