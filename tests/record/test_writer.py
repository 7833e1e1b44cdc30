"""Rows and events in, a run folder out."""

import json
import math
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from sealegs.errors import RunBusy, RunExists, StorageError
from sealegs.record import manifest as manifests
from sealegs.record.run import open_run
from sealegs.record.schema import EVENTS, MANIFEST, METRICS
from sealegs.record.writer import RunWriter


def new(folder: Path) -> RunWriter:
    return RunWriter.create(folder, manifests.describe(folder.name))


def test_a_row_is_readable_before_the_writer_lets_go(tmp_path: Path) -> None:
    writer = new(tmp_path / "a")
    writer.row({"step": 0, "loss": 2.5})
    assert open_run(tmp_path / "a").column("loss").tolist() == [2.5]
    writer.close()


def test_every_line_is_json_that_any_reader_takes(tmp_path: Path) -> None:
    writer = new(tmp_path / "a")
    writer.row({"step": 0, "loss": math.nan, "grad_norm": math.inf, "lr": -math.inf})
    writer.event("odd", 0, nested={"value": [math.nan]})
    writer.close()

    def no_constants(text: str) -> None:
        raise AssertionError(f"bare {text} is not JSON")

    row = json.loads((tmp_path / "a" / METRICS).read_text(), parse_constant=no_constants)
    event = json.loads((tmp_path / "a" / EVENTS).read_text(), parse_constant=no_constants)
    assert (row["loss"], row["grad_norm"], row["lr"]) == ("NaN", "Infinity", "-Infinity")
    assert event["nested"] == {"value": ["NaN"]}


def test_a_taken_name_is_refused_and_left_alone(tmp_path: Path) -> None:
    new(tmp_path / "a").close()
    before = (tmp_path / "a" / MANIFEST).read_bytes()
    with pytest.raises(RunExists, match="resume it"):
        new(tmp_path / "a")
    assert (tmp_path / "a" / MANIFEST).read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_of_many_that_start_at_once_one_gets_the_name(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import sys
        from pathlib import Path
        from sealegs.errors import RunExists
        from sealegs.record import manifest
        from sealegs.record.writer import RunWriter
        about = manifest.describe("a")
        for folder in sys.stdin.read().split():
            try:
                writer = RunWriter.create(Path(folder), about)
                writer.row({"step": 0, "loss": 1.0})
                print(folder)
            except RunExists:
                pass
    """)
    folders = [str(tmp_path / f"run{i}") for i in range(100)]
    children = [
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for child in children:
        assert child.stdin
        child.stdin.write("\n".join(folders))
        child.stdin.close()
    made = []
    for child in children:
        assert child.stdout
        made += child.stdout.read().split()
        child.stdout.close()
        assert child.wait() == 0
    assert sorted(made) == sorted(folders)
    assert all(open_run(folder).steps.tolist() == [0] for folder in folders)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(Path(folder).name for folder in folders)


def test_two_writers_are_refused(tmp_path: Path) -> None:
    first = new(tmp_path / "a")
    with pytest.raises(RunBusy, match="another process"):
        RunWriter.reopen(tmp_path / "a")
    first.close()
    RunWriter.reopen(tmp_path / "a").close()


def test_a_torn_line_is_ended_before_the_next_one(tmp_path: Path) -> None:
    writer = new(tmp_path / "a")
    writer.row({"step": 0, "loss": 1.0})
    writer.close()
    with (tmp_path / "a" / METRICS).open("ab") as file:
        file.write(b'{"step":1,"lo')
    writer = RunWriter.reopen(tmp_path / "a")
    writer.row({"step": 1, "loss": 2.0})
    writer.close()
    run = open_run(tmp_path / "a")
    assert run.column("loss").tolist() == [1.0, 2.0]
    assert run.damaged_lines == 1


def test_kill_9_loses_no_row_that_was_written(tmp_path: Path) -> None:
    """The child says what it has written only after writing it: all of that must be there after the kill."""
    program = textwrap.dedent("""
        import sys
        from pathlib import Path
        from sealegs.record import manifest
        from sealegs.record.writer import RunWriter
        writer = RunWriter.create(Path(sys.argv[1]), manifest.describe("a"))
        for step in range(10**9):
            writer.row({"step": step, "loss": step * 0.1, "batch_hash": "0123456789abcdef" * 20})
            sys.stdout.write(f"{step}\\n")
            sys.stdout.flush()
    """)
    child = subprocess.Popen([sys.executable, "-c", program, tmp_path / "a"], stdout=subprocess.PIPE, text=True)
    assert child.stdout
    for _ in range(500):
        said = child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    last = int((said + child.stdout.read()).split()[-1])
    child.wait()
    child.stdout.close()
    run = open_run(tmp_path / "a")
    assert run.steps[-1] >= last >= 499
    assert run.steps.tolist() == list(range(len(run.steps)))
    RunWriter.reopen(tmp_path / "a").close()


def test_a_file_that_may_not_grow_costs_one_sentence_and_no_half_row(tmp_path: Path) -> None:
    writer = new(tmp_path / "a")
    writer.row({"step": 0, "loss": 1.0})
    size = (tmp_path / "a" / METRICS).stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
        with pytest.raises(StorageError, match=r"metrics.jsonl: cannot be written \(.*\): .* and try again"):
            writer.row({"step": 1, "loss": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "a" / METRICS).stat().st_size == size
    writer.row({"step": 1, "loss": 2.0})
    writer.close()
    assert open_run(tmp_path / "a").column("loss").tolist() == [1.0, 2.0]


def test_a_folder_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="cannot be written"):
        new(tmp_path / "file" / "a")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_amending_the_manifest_keeps_the_rest(tmp_path: Path) -> None:
    writer = new(tmp_path / "a")
    writer.amend(tracker={"name": "mlflow", "uri": "mlflow:1"})
    writer.close()
    manifest = open_run(tmp_path / "a").manifest
    assert manifest.tracker == {"name": "mlflow", "uri": "mlflow:1"}
    assert manifest.run_id == writer.manifest.run_id


def test_rows_carry_the_time_they_were_written(tmp_path: Path) -> None:
    before = time.time()
    writer = new(tmp_path / "a")
    writer.row({"step": 0, "loss": 1.0})
    writer.close()
    assert before - 0.001 <= open_run(tmp_path / "a").column("time")[0] <= time.time() + 0.001


def test_the_lock_goes_with_the_process(tmp_path: Path) -> None:
    """No lock file is left over by a kill that a person would have to remove at night."""
    program = (
        "import sys, os; from pathlib import Path; from sealegs.record import manifest;"
        "from sealegs.record.writer import RunWriter;"
        "RunWriter.create(Path(sys.argv[1]), manifest.describe('a')); os.kill(os.getpid(), 9)"
    )
    code = subprocess.run([sys.executable, "-c", program, tmp_path / "a"], env=os.environ).returncode
    assert code == -signal.SIGKILL
    RunWriter.reopen(tmp_path / "a").close()
