"""Rows and events in, a run folder out."""

import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from bench.disk.layer import DiskLayer, Fault, Kind

from sealegs.errors import RunBusy, RunExists, SourceError, StorageError
from sealegs.record import manifest as manifests
from sealegs.record.files import UNTOUCHED_S
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


def test_a_clock_that_is_set_back_makes_no_row_or_event_earlier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds between two times are those that have passed; a clock that is set forward is believed."""
    passed = [0.0]
    told = {0: 1000.0, 1: 1000.0, 2: -2600.0, 3: -2600.0, 4: 5000.0}
    monkeypatch.setattr(time, "monotonic", lambda: passed[0])
    monkeypatch.setattr(time, "time", lambda: told[int(passed[0])] + passed[0])
    writer = new(tmp_path / "a")
    events = []
    for second in range(5):
        passed[0] = float(second)
        writer.row({"step": second, "loss": 1.0})
        passed[0] += 0.5
        events.append(writer.event("checkpoint", second).time)
    writer.close()
    assert open_run(tmp_path / "a").column("time").tolist() == [1000.0, 1001.0, 1002.0, 1003.0, 8604.0]
    assert events == [1000.5, 1001.5, 1002.5, 1003.5, 8604.5]


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


@pytest.mark.parametrize("kind", ["torn", "full", "error"])
def test_a_row_after_one_that_failed_is_a_line_of_its_own(tmp_path: Path, kind: Kind) -> None:
    """A disk may have taken half of a row before it said that it could not, and the run may go on after that."""
    with DiskLayer(tmp_path) as disk, new(tmp_path / "a") as writer:
        writer.row({"step": 0, "loss": 1.0})
        disk.strike(kind)
        with pytest.raises(StorageError, match="cannot be written"):
            writer.row({"step": 1, "loss": 2.0})
        disk.fault = None
        writer.row({"step": 2, "loss": 3.0})
        assert list(writer.missing) == ["a row, from step 1 on, could not be written"]
        writer.row({"step": 1, "loss": 2.0})
        assert list(writer.missing) == []
    assert open_run(tmp_path / "a").column("loss").tolist()[:2] == [1.0, 2.0]
    assert b'\n{"step":2' in (tmp_path / "a" / METRICS).read_bytes()


def test_a_disk_that_says_only_at_the_end_that_it_could_not_is_heard(tmp_path: Path) -> None:
    """As network file systems do."""
    with DiskLayer(tmp_path) as disk:
        writer = new(tmp_path / "a")
        writer.row({"step": 0, "loss": 1.0})
        disk.fault = Fault("error", len(disk.calls) + 2)  # the lock comes first
        with pytest.raises(StorageError, match=r"metrics\.jsonl: cannot be written"):
            writer.close()
        assert [call.kind for call in disk.calls[-4:]] == ["lock", "close"] * 2
    RunWriter.reopen(tmp_path / "a").close()


def test_a_folder_that_cannot_be_opened_is_let_go_of(tmp_path: Path) -> None:
    new(tmp_path / "a").close()
    (tmp_path / "a" / EVENTS).rename(tmp_path / "events")
    (tmp_path / "a" / EVENTS).mkdir()
    with pytest.raises(StorageError, match="cannot be written"):
        RunWriter.reopen(tmp_path / "a")
    (tmp_path / "a" / EVENTS).rmdir()
    RunWriter.reopen(tmp_path / "a").close()


# A folder that is gone.


def test_a_folder_that_was_deleted_is_missed(tmp_path: Path) -> None:
    with new(tmp_path / "a") as writer:
        writer.row({"step": 0, "loss": 1.0})
        assert not writer.look()
        shutil.rmtree(tmp_path / "a")
        assert "deleted while the run was writing to it" in writer.look()
        assert writer.missing == (writer.lost,)
        with pytest.raises(StorageError, match="deleted"):
            writer.amend(seed=1)
        assert not (tmp_path / "a").exists()


def test_a_folder_that_was_moved_is_missed_until_it_is_back(tmp_path: Path) -> None:
    with new(tmp_path / "a") as writer:
        writer.row({"step": 0, "loss": 1.0})
        (tmp_path / "a").rename(tmp_path / "b")
        assert f"moved away to {tmp_path / 'b'} while" in writer.look()
        writer.row({"step": 1, "loss": 2.0})
        (tmp_path / "b").rename(tmp_path / "a")
        assert not writer.look()
        assert not writer.missing
    assert open_run(tmp_path / "a").column("loss").tolist() == [1.0, 2.0]


def test_another_folder_of_that_name_is_not_taken_for_it(tmp_path: Path) -> None:
    with new(tmp_path / "a") as writer:
        writer.row({"step": 0, "loss": 1.0})
        (tmp_path / "a").rename(tmp_path / "b")
        shutil.copytree(tmp_path / "b", tmp_path / "a")
        writer.row({"step": 1, "loss": 2.0})
        assert "something else has its name" in writer.look()
        (tmp_path / "a" / METRICS).write_bytes((tmp_path / "b" / METRICS).read_bytes())
        assert "something else has its name" in writer.look(), "be it as long"
        before = (tmp_path / "a" / MANIFEST).read_bytes()
        with pytest.raises(StorageError, match="moved away"):
            writer.amend(seed=1)
        assert (tmp_path / "a" / MANIFEST).read_bytes() == before


def test_a_name_that_leads_elsewhere_since_the_loop_changed_its_folder_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with new(Path("a")) as writer:
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")
        assert "since the working folder was changed" in writer.look()
        monkeypatch.chdir(tmp_path)
        assert not writer.look()


def test_rows_look_now_and_then_whether_the_folder_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at every row: on a network file system a look takes a while."""
    with new(tmp_path / "a") as writer:
        shutil.rmtree(tmp_path / "a")
        writer.row({"step": 0, "loss": 1.0})
        assert not writer.lost
        monkeypatch.setattr("sealegs.record.writer.LOOK_EVERY_S", 0.0)
        writer.row({"step": 1, "loss": 1.0})
        assert writer.lost


# What dead processes have left.

NOBODY = 4_194_305
"""Beyond the largest number that a process can have."""


def leave(path: Path, *, age_s: float = 0.0) -> Path:
    """A file that somebody was writing, or a folder where it has a name that starts with a number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    inner = path / "half" if path.name[1].isdecimal() else path
    inner.parent.mkdir(exist_ok=True)
    inner.write_bytes(b"half of it")
    for each in (inner, path):
        os.utime(each, (time.time() - age_s,) * 2)
    return path


OWN = (
    ".manifest.json.{}.partial",
    ".recovery.json.{}.partial",
    "checkpoints/.24.{}.partial",
    "checkpoints/.8.partial",
    "checkpoints/.tags.json.{}.partial",
    "incidents/1/.incident.json.{}.partial",
    "incidents/1/capsule/.metrics.jsonl.{}.partial",
    "incidents/1/capsule/.0.{}.partial",
)
"""What the process that trains writes, and nobody else."""
SHARED = (
    ".dashboard.html.{}.partial",
    "requests/.1794970815-77.json.{}.partial",
    "incidents/1/.postmortem.md.{}.partial",
    "incidents/1/evidence/.loss.png.{}.partial",
)
"""What commands write, too."""


def test_what_a_dead_process_was_writing_is_removed_at_the_next_start(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    new(folder).close()
    (folder / "mine.partial").write_text("no leftover of ours: it does not begin with a dot")
    leave(folder / "checkpoints" / f".16.{NOBODY}.replaced.partial")  # it may be the only one of its step
    before = sorted(folder.rglob("*"))
    alive = os.getppid()  # whatever process of another machine had that number: the lock says that it is gone
    left = [leave(folder / name.format(number)) for name in OWN for number in (NOBODY, alive)]
    left += [leave(folder / name.format(NOBODY), age_s=2 * UNTOUCHED_S) for name in SHARED]
    RunWriter.reopen(folder).close()
    assert [path for path in left if path.exists()] == []
    assert set(before) <= {*folder.rglob("*")}


def test_what_a_live_process_may_be_writing_stays(tmp_path: Path) -> None:
    """A command of this machine, whose process can be seen; one of another machine, which was at it a moment ago."""
    folder = tmp_path / "a"
    new(folder).close()
    alive = os.getppid()
    kept = [leave(folder / name.format(alive), age_s=2 * UNTOUCHED_S) for name in SHARED]
    kept += [leave(folder / name.format(NOBODY)) for name in SHARED]
    RunWriter.reopen(folder).close()
    assert [path for path in kept if not path.exists()] == []


def test_nothing_is_removed_while_another_process_has_the_run(tmp_path: Path) -> None:
    with new(tmp_path / "a"):
        left = leave(tmp_path / "a" / "checkpoints" / f".24.{NOBODY}.partial")
        with pytest.raises(RunBusy):
            RunWriter.reopen(tmp_path / "a")
        assert left.exists()


def test_links_are_not_followed_to_what_others_write(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    new(folder).close()
    elsewhere = leave(tmp_path / "elsewhere" / f".8.{NOBODY}.partial", age_s=2 * UNTOUCHED_S)
    (folder / "incidents").mkdir()
    (folder / "incidents" / "1").symlink_to(tmp_path / "elsewhere")
    (folder / f".8.{NOBODY}.partial").symlink_to(tmp_path / "elsewhere")
    RunWriter.reopen(folder).close()
    assert (elsewhere / "half").exists()


@pytest.mark.parametrize("name", [METRICS, EVENTS])
def test_rows_are_not_written_through_a_strangers_link(tmp_path: Path, name: str) -> None:
    new(tmp_path / "run").close()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("mine\n")
    (tmp_path / "run" / name).unlink(missing_ok=True)
    (tmp_path / "run" / name).symlink_to(elsewhere)
    with pytest.raises(SourceError, match="leads out of"):
        RunWriter.reopen(tmp_path / "run")
    assert elsewhere.read_text() == "mine\n"


def test_rows_are_not_poured_into_a_pipe(tmp_path: Path) -> None:
    new(tmp_path / "run").close()
    (tmp_path / "run" / METRICS).unlink()
    os.mkfifo(tmp_path / "run" / METRICS)
    with pytest.raises(SourceError, match="a FIFO"):
        RunWriter.reopen(tmp_path / "run")


def test_a_run_that_could_not_begin_leaves_nothing_for_long(tmp_path: Path) -> None:
    left = leave(tmp_path / f".1.{NOBODY}.partial", age_s=2 * UNTOUCHED_S)
    others = leave(tmp_path / f".2.{NOBODY}.partial", age_s=2 * UNTOUCHED_S)
    new(tmp_path / "1").close()
    assert not left.exists()
    assert others.exists()
