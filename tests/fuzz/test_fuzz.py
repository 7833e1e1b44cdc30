"""What ``make fuzz`` has found is thrown again, and a little more; and its rules notice what breaks them."""

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from bench.fuzzing import throw
from bench.fuzzing.damage import SECRET
from bench.fuzzing.sample import SPECIALS, Case, Sample, Special
from bench.fuzzing.targets import TARGETS
from bench.fuzzing.throw import Thrower
from tests.forked import start

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def fuzz(*words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, whose memory and time are bounded."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, str(ROOT / "bench" / "fuzz.py"), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_what_broke_something_once_and_some_of_everything_break_nothing(tmp_path: Path) -> None:
    cases = sorted((HERE / "cases").glob("*.json"))
    assert len(cases) >= 66
    done = fuzz("--jobs", "1", "--cases", "1", "--seconds", "100", "--found", str(tmp_path), "--first", f"{HERE}/cases")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(": exit code ")[0] for line in done.stdout.splitlines()[: len(cases)]] == [c.name for c in cases]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["findings"] == []
    assert {name: tally["cases"] for name, tally in summary["targets"].items()} == dict.fromkeys(TARGETS, 1)
    assert "| all | " in done.stdout


def test_a_case_comes_back_from_its_file() -> None:
    seed = Sample("s", {"a": b"1", "b": b"2", "c": b"3"})
    sample = Sample("s", {"a": b"\xff" * 10, "b": b"2", "new": b"text", "fifo": Special("fifo")})
    case = Case("runs", sample, ("check", "{}"), "somewhere")
    assert Case.from_json(case.to_json(seed), {"s": seed}) == case
    assert "b" not in json.loads(case.to_json(seed))["changes"]


@pytest.mark.parametrize("special", SPECIALS, ids=str)
def test_what_is_no_file_can_be_made(special: Special, tmp_path: Path) -> None:
    Sample("s", {"x": special}).write(tmp_path / "sample", tmp_path)
    assert os.path.lexists(tmp_path / "sample" / "x")


def write_outside(path: Path) -> int:
    (path.parents[2] / "outside" / "new").write_text("x")
    return 0


def show_secret(path: Path) -> int:
    print((path.parents[2] / "outside" / "secret").read_text())
    return 0


def keep_secret(path: Path) -> int:
    (path.parent / "copy").write_text(SECRET)
    return 0


class Call:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.getcwd, ()  # type: ignore[return-value]


def unpickle(path: Path) -> int:
    pickle.loads(pickle.dumps(Call()))  # noqa: S301 - that is what must be noticed
    return 0


def spend(path: Path) -> int:
    while True:
        pass


def wait(path: Path) -> int:
    time.sleep(60)
    return 0


def fail(path: Path) -> int:
    raise KeyError("x")


def hold(path: Path) -> int:
    return len(b"x" * (700 << 20)) * 0


def write_through_a_link(path: Path) -> int:
    (path / "link").symlink_to(path.parents[2] / "outside" / "secret")
    (path / "link").write_text("x")
    return 0


BREAKS: dict[str, tuple[Callable[[Path], int], str]] = {
    "outside": (write_outside, "writes-@do"),
    "linked": (write_through_a_link, "outside-@do"),
    "shown": (show_secret, "leak-@do"),
    "kept": (keep_secret, "leak-@do"),
    "unpickled": (unpickle, "unpickles-@do"),
    "called": (lambda path: os.system("true"), "calls-@do"),  # noqa: S605 - that is what must be noticed
    "cpu": (spend, "Hang-"),
    "waits": (wait, "Hang-"),
    "raises": (fail, "KeyError-"),
    "memory": (hold, "memory-@do"),
    "code": (lambda path: 3, "code-@do"),
    "leaves": (lambda path: sys.exit(0), "SystemExit-"),
    "nothing": (lambda path: 1, "None"),
}


def thrown(folder: Path, name: str, told: Connection) -> None:
    if name == "cpu":
        throw.LONGEST_S = 0.5
    elif name == "waits":
        throw.LONGEST_WAIT_S = 1.5
    with Thrower(folder, {"@do": BREAKS[name][0], "@nothing": BREAKS["nothing"][0]}) as thrower:
        outcome = thrower.throw(Case("runs", Sample("s", {"a": b""}), ("@do", "{}")))
        after = thrower.throw(Case("runs", Sample("s", {"a": b""}), ("@nothing", "{}")))
    assert after.finding is None, "it is blamed for the one before"
    told.send(outcome.finding.site if outcome.finding else "None")


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("name", BREAKS)
def test_what_breaks_a_rule_is_found(name: str, tmp_path: Path) -> None:
    """Else a campaign without a finding would say nothing."""
    ours, theirs = Pipe()
    child = start(thrown, tmp_path / "sandbox", name, theirs)
    child.join()
    assert ours.poll(), f"died with {child.exitcode}"
    assert ours.recv().startswith(BREAKS[name][1])
