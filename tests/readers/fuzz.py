"""Throws damaged logs at ``sealegs check`` for as long as one likes, and keeps what breaks it.

    python -m tests.readers.fuzz --minutes 60 --found /tmp/found

Real files of every format (``samples.py``) are cut, doubled, swapped, spliced, flipped, and strewn with numbers, names
and characters that are hard to read. What takes the readers along lines of code in an order that none took before is
damaged further. Each log must be read and judged, or refused in one sentence, without a warning, within ``LONGEST_S``
and ``MOST_MIB``. Those that are not lie in ``--found`` with their traceback, one for each place in the code: mend the
cause, and keep a small one in ``test_damaged.py``. ``--seed`` makes another sequence.
"""

import argparse
import gzip
import io
import math
import random
import re
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from tests.readers.samples import KEPT, MAKE, rows
from tests.readers.test_text import CASES

from sealegs.cli.check import check
from sealegs.errors import SealegsError
from sealegs.readers.read import read

LONGEST_S = 20.0
MOST_MIB = 600
LONGEST_SEED = 64 << 10

HARD = [
    *b"nan NaN -inf Infinity 1e999 -1e308 1e-320 9007199254740993 18446744073709551616 -1 0.5 1_000 0x10 12%".split(),
    *b"1,234.5 00012 --5 +3 1e 1.2.3 . - , ; | \" ' { } [ ] {} [] null true None : = / # \\ \\u0000 \\ud800".split(),
    *(b"\t", b"\r", b"\r\n", b"\n\n", b" ", b"\0", b"\0" * 4, b"\x1b[31m", b"\x1b", b"\b", b"\xff", b"\xfe\xff"),
    *(b"\xef\xbb\xbf", b"\x1f\x8b", "\u0663\u066b\u0661".encode(), "\uff11\uff12".encode(), "\u00b2".encode()),
    *("\u2028".encode(), "\x85".encode(), "\u202e".encode(), "\u22125".encode(), "\U0001f642".encode()),
    *b"loss step epoch val_loss grad_norm lr global_step iter train/loss [0] 5/10 tensor( step:1/2 __MIN".split(),
    *(b"9" * 400, b"-" + b"9" * 30, b"[" * 3000, b'{"a":' * 3000, b"x" * 100_000, b"1," * 3000, b"\n" * 3000),
]

Damage = Callable[[random.Random, bytes], bytes]


def cut(chance: random.Random, data: bytes) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


def leave_out(chance: random.Random, data: bytes) -> bytes:
    at = chance.randrange(len(data) + 1)
    return data[:at] + data[at + chance.choice((1, 4, 40, 1000)) :]


def double(chance: random.Random, data: bytes) -> bytes:
    at = chance.randrange(len(data) + 1)
    return data[:at] + data[at : at + chance.choice((1, 40, 1000))] * chance.choice((2, 3, 50)) + data[at:]


def flip(chance: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 10)) if data else 0):
        changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def put_hard(chance: random.Random, data: bytes) -> bytes:
    at = chance.randrange(len(data) + 1)
    return data[:at] + chance.choice(HARD) + data[at:]


def put_any(chance: random.Random, data: bytes) -> bytes:
    at = chance.randrange(len(data) + 1)
    return data[:at] + chance.randbytes(chance.choice((1, 2, 8, 200))) + data[at:]


def other_numbers(chance: random.Random, data: bytes) -> bytes:
    """One number, some of them, or all of them, by another."""
    put, share = chance.choice(HARD), chance.choice((0.01, 0.1, 1))
    return re.sub(rb"\d+(?:\.\d+)?", lambda found: put if chance.random() < share else found[0], data)


def other_word(chance: random.Random, data: bytes) -> bytes:
    words = re.findall(rb"[\w/]{2,40}", data)
    return data.replace(chance.choice(words), chance.choice(HARD)) if words else data


def shuffle_lines(chance: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    first, last = sorted((chance.randrange(len(lines) + 1), chance.randrange(len(lines) + 1)))
    return b"".join(lines[:first] + chance.sample(lines[first:last], last - first) + lines[last:])


def other_ends(chance: random.Random, data: bytes) -> bytes:
    return data.replace(b"\n", chance.choice((b"\r\n", b"\r", b"\n\n", b"\n\r", b"\0\n", b"\x85", b"")))


def other_encoding(chance: random.Random, data: bytes) -> bytes:
    return data.decode(errors="replace").encode(chance.choice(("utf-16", "utf-16-be", "utf-8-sig", "utf-32", "utf-7")))


def zipped(chance: random.Random, data: bytes) -> bytes:
    return gzip.compress(data, 1)


def within_a_record(chance: random.Random, data: bytes) -> bytes:
    """Of an event file or a W&B run, digests made right again: else their readers stop there."""
    is_wandb = data.startswith(b":W&B")
    if not is_wandb and b"brain.Event:" not in data[:64]:
        return data
    records, at = [], 7 if is_wandb else 0
    while at < len(data):
        length = int.from_bytes(data[at + 4 : at + 6] if is_wandb else data[at : at + 8], "little")
        at += 7 if is_wandb else 12
        records.append(data[at : at + length])
        at += length + (0 if is_wandb else 4)
    changed = chance.randrange(len(records))
    records[changed] = chance.choice((flip, leave_out, double, put_any))(chance, records[changed])
    if is_wandb:
        sealed = (
            struct.pack("<IHB", zlib.crc32(one, zlib.crc32(b"\1")), len(one) & 0xFFFF, 1) + one for one in records
        )
        return data[:7] + b"".join(sealed)
    from tensorboard.summary.writer.record_writer import RecordWriter

    writer = RecordWriter(file := io.BytesIO())
    for one in records:
        writer.write(one)
    return file.getvalue()


DAMAGES: tuple[Damage, ...] = (
    cut, leave_out, double, flip, put_hard, put_hard, put_any, other_numbers, other_numbers, other_word, shuffle_lines,
    other_ends, other_encoding, zipped, within_a_record, within_a_record,
)  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """A log: its files by their paths, ``""`` where it is a single one."""

    format: str
    files: dict[str, bytes]

    def damaged(self, chance: random.Random, other: "Sample") -> "Sample":
        """With one of the files changed, now and then by the end of another log."""
        name = chance.choice(list(self.files))
        data = self.files[name]
        for _ in range(chance.choice((1, 1, 2, 3, 6))):
            data = chance.choice(DAMAGES)(chance, data)[: 4 * LONGEST_SEED]
        if chance.random() < 0.1:
            end = chance.choice(list(other.files.values()))
            data = cut(chance, data) + end[chance.randrange(len(end) + 1) :]
        return Sample(self.format, {**self.files, name: data})

    def write(self, path: Path) -> None:
        """As a file or a folder."""
        for name, data in self.files.items():
            file = path / name if name else path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)


def samples(folder: Path) -> Iterator[Sample]:
    """Of every format what ``samples.py`` makes, what its library made, and for text what programs print."""
    for name, make in MAKE.items():
        (folder / name).mkdir()
        yield _sample(name, make(folder / name, rows([*range(10), *range(6, 40)])))
    for name, paths in KEPT.items():
        yield from (_sample(name, path) for path in paths)
    yield from (Sample("text", {"": case[0].encode()}) for case in CASES.values())


def _sample(name: str, path: Path) -> Sample:
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return Sample(name, {"" if file == path else str(file.relative_to(path)): file.read_bytes() for file in files})


class Hang(BaseException):
    """Caught by nothing that catches an ``Exception``."""


@dataclass
class Fuzz:
    """What was thrown so far, and what came of it."""

    folder: Path
    found: Path
    thrown: int = 0
    read: int = 0
    findings: set[str] = field(default_factory=set)
    _ways: set[tuple[str, int, int]] = field(default_factory=set)
    """Pairs of lines of a reader that were run one after the other."""
    _last_line: dict[str, int] = field(default_factory=dict)

    def throw(self, sample: Sample) -> bool:
        """One log. Whether the readers went a way that is new."""
        path = self.folder / "log"
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        sample.write(path)
        ways, tracer = len(self._ways), sys.gettrace()
        self.thrown += 1
        Path("/proc/self/clear_refs").write_text("5")  # forget the most memory held
        held = peak_mib()
        signal.setitimer(signal.ITIMER_PROF, LONGEST_S)  # of CPU time: others may use the machine
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.showwarning = lambda message, *_: self._keep(sample, message, traceback.extract_stack())
                self._check(path)
        except SealegsError as error:
            if not str(error).isprintable():
                self._keep(sample, error, traceback.extract_tb(error.__traceback__))
        except (Exception, Hang) as error:
            self._keep(sample, error, traceback.extract_tb(error.__traceback__))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            sys.settrace(tracer)
        if peak_mib() - held > MOST_MIB:
            self._keep(sample, MemoryError(f"more than {MOST_MIB} MiB"), traceback.StackSummary())
        return len(self._ways) > ways

    def _check(self, path: Path) -> None:
        sys.settrace(self._trace)
        log = read(str(path))
        sys.settrace(None)
        assert (np.diff(log.run.steps) > 0).all(), "steps rise"
        assert len(log.run.column("loss")) == len(log.run.steps) > 0, "a loss a step"
        assert all(len(log.run.written(name).steps) for name in log.run.signals), "no signal without a value"
        self.read += 1
        check(str(path), metrics={}, pattern=None, rules="calibrated")

    def _trace(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        name, line = frame.f_code.co_filename, frame.f_lineno
        if "/sealegs/readers/" not in name:
            return None
        self._ways.add((name, self._last_line.get(name, 0), line))
        self._last_line[name] = line
        return self._trace

    def _keep(self, sample: Sample, what: Warning | BaseException | str, stack: traceback.StackSummary) -> None:
        ours = [frame for frame in stack if "/sealegs/" in frame.filename]
        place = f"{Path(ours[-1].filename).stem}-{ours[-1].name}-{ours[-1].lineno}" if ours else str(what)[:40]
        title = f"{type(what).__name__}-{place}".replace("/", "_")
        if title in self.findings:
            return
        self.findings.add(title)
        sample.write(self.found / f"{title}.{sample.format}")
        (self.found / f"{title}.why").write_text("".join(stack.format()) + f"{type(what).__name__}: {what}\n")
        print(f"found: {title} ({sample.format}): {str(what)[:200]!r}", flush=True)


def peak_mib() -> int:
    """The most memory that this process has held since it was made to forget it."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) >> 10 if found else 0


def run(minutes: float, found: Path, seed: int = 0, most: float = math.inf) -> Fuzz:
    """Throw until that much CPU time is spent, or so many are thrown."""
    chance = random.Random(seed)  # noqa: S311
    found.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        known: dict[str, list[Sample]] = defaultdict(list)
        for sample in samples(Path(folder)):
            known[sample.format].append(sample)
        fuzz = Fuzz(Path(folder), found)
        signal.signal(signal.SIGPROF, _hang)
        began = said = time.process_time()
        while (now := time.process_time()) - began < 60 * minutes and fuzz.thrown < most:
            one, other = (chance.choice(known[chance.choice(list(known))]) for _ in range(2))
            damaged = one.damaged(chance, other)
            if fuzz.throw(damaged) and sum(map(len, damaged.files.values())) < LONGEST_SEED:
                known[damaged.format].append(damaged)
            if now - said > 60:
                said = now
                print(_summary(fuzz, known, now - began), flush=True)
        print(_summary(fuzz, known, time.process_time() - began), flush=True)
    return fuzz


def _summary(fuzz: Fuzz, known: dict[str, list[Sample]], seconds: float) -> str:
    return (
        f"{seconds / 60:.1f} min of CPU: {fuzz.thrown} logs, {fuzz.read} of them read, "
        f"{sum(map(len, known.values()))} to damage further, {len(fuzz.findings)} findings"
    )


def _hang(number: int, frame: FrameType | None) -> None:
    raise Hang(f"more than {LONGEST_S} s")


def main() -> int:
    """By hand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="of CPU time")
    parser.add_argument("--found", type=Path, default=Path("/tmp/sealegs-fuzz"))  # noqa: S108
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    return int(bool(run(options.minutes, options.found, options.seed).findings))


if __name__ == "__main__":
    sys.exit(main())
