"""Throws one case at the code and says what broke: the rules that hold for whatever is read."""

import io
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self

from bench.fuzzing.damage import SECRET
from bench.fuzzing.sample import Case

LONGEST_S = 20.0
"""CPU time that a case may take."""
LONGEST_WAIT_S, BUSY_S = 30.0, 0.2
"""Time in which a case must have done some work: what waits for a FIFO waits for ever, and does none."""
MOST_MIB = 600
"""Memory that a case may take beyond what the process held."""
MOST_DATA = 6 << 30
"""Memory that the process may ever ask for."""
READ_UP_TO = "64MiB"
"""The bound of the readers, so that small bombs are large enough."""
PROGRAMS = ("git",)
"""What may be called: the state of the repository goes into the versions that are compared."""
CODES = (0, 1, 2)


class Hang(BaseException):
    """Caught by nothing that catches an ``Exception``."""


class Finding(NamedTuple):
    """What broke."""

    site: str
    """What and where, the same for every case that breaks the same thing."""
    text: str


class Outcome(NamedTuple):
    """What came of a case."""

    code: int | None
    finding: Finding | None
    is_new: bool
    """Whether it went a way through the code that none went before."""


@dataclass
class Thrower:
    """A sandbox with a secret beside it, and what watches over both."""

    root: Path
    actions: dict[str, Callable[[Path], int]]
    """What is done with a sample by a word that begins with ``@``, in the place of a command."""
    beside: Mapping[str, bytes] = field(default_factory=dict)
    """Files that lie where a command is called, whatever it is called with."""

    def __enter__(self) -> Self:
        self.root.mkdir(parents=True, exist_ok=True)
        self._work, self._outside = self.root / "work", self.root / "outside"
        self._lay_secret()
        os.environ |= {
            "SEALEGS_READ_UP_TO": READ_UP_TO,
            "SEALEGS_CACHE": str(self.root / "cache"),
            "MPLCONFIGDIR": str(self.root / "cache"),
            "WANDB_MODE": "offline",
            "WANDB_CACHE_DIR": str(self.root / "cache"),
            "WANDB_CONFIG_DIR": str(self.root / "cache"),
            "TRACKIO_DIR": str(self.root / "cache"),
        }
        os.environ.pop("MLFLOW_TRACKING_URI", None)
        tempfile.tempdir = str(self.root / "cache")
        (self.root / "cache").mkdir(exist_ok=True)
        signal.signal(signal.SIGPROF, _too_long)
        signal.signal(signal.SIGALRM, _Waits())
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_DATA, MOST_DATA))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 43, 1 << 43))
        self._watch = _Watch((self._work, self.root / "cache"))
        self.ways = Ways()
        return self

    def __exit__(self, _: object, __: object, ___: TracebackType | None) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def _lay_secret(self) -> None:
        self._outside.mkdir(exist_ok=True)
        (self._outside / "secret").write_text(SECRET)
        self._there = _listed(self._outside)

    def throw(self, case: Case) -> Outcome:
        """One case."""
        if _listed(self._outside) != self._there:
            shutil.rmtree(self._outside)
            self._lay_secret()
        shutil.rmtree(self._work, ignore_errors=True)
        (self._work / "experiments").mkdir(parents=True)
        for name, content in self.beside.items():
            (self._work / name).write_bytes(content)
        path = self._work / "experiments" / "case"
        case.sample.write(path, self._outside)
        if any(isinstance(content, bytes) and content.startswith(b":W&B") for content in case.sample.files.values()):
            with suppress(ImportError):  # five seconds, of which the case is not to blame
                import wandb  # noqa: F401
        words = [word.replace("{}", str(path)) for word in case.command]
        out, err = io.StringIO(), io.StringIO()
        here = Path.cwd()
        known = len(self.ways.seen)
        _forget_peak()
        held, code, finding = _peak_mib(), None, None
        os.chdir(self._work)
        try:
            ways = self.ways if self.ways.is_cheap or case.target == "logs" else nullcontext()
            with redirect_stdout(out), redirect_stderr(err), self._limits(), self._watch, ways:
                code = self._do(words, path)
        except (Exception, SystemExit, Hang) as error:
            finding = _broken(error)
        finally:
            os.chdir(here)
        finding = finding or self._judged(words, code, out.getvalue(), err.getvalue())
        if _peak_mib() - held > MOST_MIB:
            finding = finding or Finding(f"memory-{case.command[0]}", f"more than {MOST_MIB} MiB")
        return Outcome(code, finding, len(self.ways.seen) > known)

    def _do(self, words: list[str], path: Path) -> int:
        if words[0].startswith("@"):
            return self.actions[words[0]](path)
        from sealegs.cli.main import main

        return main(words)

    @contextmanager
    def _limits(self) -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for category in (DeprecationWarning, PendingDeprecationWarning, ResourceWarning, ImportWarning):
                warnings.simplefilter("ignore", category)
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
            signal.setitimer(signal.ITIMER_PROF, LONGEST_S)
            signal.setitimer(signal.ITIMER_REAL, LONGEST_WAIT_S, LONGEST_WAIT_S)
            try:
                yield
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
                signal.setitimer(signal.ITIMER_REAL, 0)

    def _judged(self, words: list[str], code: int | None, out: str, err: str) -> Finding | None:
        """What is wrong with the way it ended, if anything."""
        name = words[0]
        if self._watch.violations:
            return Finding(f"{self._watch.violations[0].partition(':')[0]}-{name}", self._watch.violations[0])
        if code not in CODES:
            return Finding(f"code-{name}", f"exit code {code}: {err[-500:]}")
        if "Traceback (most recent call last)" in err + out:
            return Finding(f"traceback-{name}", err[-2000:])
        if code == 2 and not name.startswith("@"):
            said = [line for line in err.splitlines() if line.startswith(f"sealegs {name}: ")]
            last = err.rstrip("\n").rpartition("\n")[2]
            if said[-1:] != [last] or not last.isprintable() or len(last) > 3000:
                return Finding(f"sentence-{name}", f"not one sentence: {err[-500:]!r}")
            if "out of memory" in last:
                return Finding(f"memory-{name}", last)
        if (listed := _listed(self._outside)) != self._there:
            changed = sorted({path for path, _ in listed.items() ^ self._there.items()})
            return Finding(f"outside-{name}", f"changed beside the sandbox: {', '.join(changed)}")
        if SECRET in out + err or any(_holds_secret(file) for file in self._work.rglob("*")):
            return Finding(f"leak-{name}", "the content of a file beside the sandbox was shown")
        return None


def _broken(error: BaseException) -> Finding:
    """An exception that should have been a sentence, named after the last place of ours that it went through."""
    stack = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in stack if "/sealegs/" in frame.filename] or list(stack)
    at = ours[-1]
    site = f"{type(error).__name__}-{Path(at.filename).stem}-{at.name.strip('<>')}"
    return Finding(site, "".join(stack.format()) + f"{type(error).__name__}: {str(error)[:500]}\n")


def _too_long(number: int, frame: FrameType | None) -> None:
    raise Hang(f"more than {LONGEST_S:g} s")


class _Waits:
    """Ends a case that has done next to nothing since the last look: it waits. On a busy machine others are slow."""

    def __init__(self) -> None:
        self._before = time.process_time()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.process_time()
        did, self._before = now - self._before, now
        if did < BUSY_S:
            raise Hang(f"it waits: {did:.2f} s of work in {LONGEST_WAIT_S:g} s")


def _listed(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(file): (file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(folder.rglob("*"))}


def _holds_secret(file: Path) -> bool:
    try:
        is_new = not file.is_symlink() and file.is_file() and file.stat().st_size < 64 << 20
        return is_new and SECRET.encode() in file.read_bytes()
    except OSError:
        return False


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak_mib() -> int:
    """The most memory that this process has held since it was made to forget it."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) >> 10 if found else 0


class _Watch:
    """Notes what is opened for writing, called, connected to or unpickled and must not be, by Python's audit events."""

    _CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")
    _UNPICKLED = ("os", "posix", "nt", "subprocess", "sys", "builtins", "__builtin__", "importlib", "runpy", "shutil")

    def __init__(self, allowed: tuple[Path, ...]) -> None:
        self._allowed = tuple(f"{os.path.realpath(path)}" for path in allowed)
        self._is_on = False
        self.violations: list[str] = []
        sys.addaudithook(self._heard)  # cannot be removed

    def __enter__(self) -> None:
        self.violations = []
        self._is_on = True

    def __exit__(self, *_: object) -> None:
        self._is_on = False

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_on:
            return
        if event == "open":
            path, mode, flags = arguments
            writes = (isinstance(mode, str) and set(mode) & set("wax+")) or (
                mode is None and isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            )
            if writes and isinstance(path, str | bytes) and not self._is_allowed(path):
                self.violations.append(f"writes: {path!r}")
        elif event in self._CHANGES:
            path = arguments[1] if event in ("os.rename", "os.link", "os.symlink") else arguments[0]
            if isinstance(path, str | bytes | os.PathLike) and not self._is_allowed(os.fspath(path)):
                self.violations.append(f"changes: {event} {path!r}")
        elif event == "subprocess.Popen":
            if arguments[0] not in PROGRAMS:
                self.violations.append(f"calls: {arguments[1]!r}")
        elif event in ("os.system", "os.exec", "os.posix_spawn", "pty.spawn"):
            if not (event == "os.posix_spawn" and Path(arguments[0]).name in PROGRAMS):
                self.violations.append(f"calls: {event} {arguments!r}"[:300])
        elif event == "socket.connect":
            if not (isinstance(arguments[1], tuple) and arguments[1][0] == "127.0.0.1"):  # the live page
                self.violations.append(f"calls: {event} {arguments[1]!r}"[:300])
        elif event == "pickle.find_class" and arguments[0] in self._UNPICKLED:
            self.violations.append(f"unpickles: {arguments!r}")

    def _is_allowed(self, path: str | bytes) -> bool:
        text = os.fsdecode(path)
        if not text.startswith("/"):
            text = os.path.join(os.getcwd(), text)  # noqa: PTH109, PTH118 - called for every file
        real = os.path.realpath(os.path.dirname(text))  # noqa: PTH120
        return real.startswith((*self._allowed, "/proc/self")) or text == os.devnull


class Ways:
    """The lines of Sealegs that have been run; what runs a new one is worth damaging further."""

    _TOOL = 3

    def __init__(self) -> None:
        self.seen: set[tuple[str, int]] = set()
        self._monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on, at no cost once a line was seen
        self.is_cheap = self._monitoring is not None
        self._before: Any = None
        self._steps = 0
        if self._monitoring is not None:
            self._monitoring.use_tool_id(self._TOOL, "fuzz")
            self._monitoring.register_callback(self._TOOL, self._monitoring.events.LINE, self._line)

    def __enter__(self) -> None:
        if self._monitoring is not None:
            self._monitoring.set_events(self._TOOL, self._monitoring.events.LINE)
        else:
            self._before, self._steps = sys.gettrace(), 200_000
            sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        if self._monitoring is not None:
            self._monitoring.set_events(self._TOOL, 0)
        else:
            sys.settrace(self._before)

    def _line(self, code: Any, line: int) -> Any:
        if "/sealegs/" in code.co_filename:
            self.seen.add((code.co_filename, line))
        return self._monitoring.DISABLE  # type: ignore[union-attr]

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        self._steps -= 1
        if "/sealegs/readers/" not in frame.f_code.co_filename or self._steps < 0:  # elsewhere it would take too long
            return None
        self.seen.add((frame.f_code.co_filename, frame.f_lineno))
        return self._trace


def seconds() -> float:
    """CPU time of this process and its children."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
