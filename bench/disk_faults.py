"""What becomes of a run folder when the n-th call to the disk fails, is torn, or is the last: for every n.

    python bench/disk_faults.py [--scenario NAME ...] [--fault KIND ...] [--every K] [--jobs N] [--out FILE.json]

A case is a short run (bench/disk/scenarios.py) on a disk with one fault (bench/disk/layer.py), in a process of its own;
then what it left is looked at, the run is started again on a disk that is well, and looked at once more
(bench/disk/soundness.py). Every K-th call is hit, by every kind of fault that does anything to it. Prints Markdown: per
kind of call, how many cases there were and how they ended; on stderr, each complaint with the words to run its case
again. Needs torch and numpy alone; without tyro, `sealegs train` and `sealegs check` are left out. TMPDIR=/dev/shm
saves the time of a real disk.
"""

import argparse
import gc
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.disk.layer import KILLED, KINDS, Call, DiskLayer, Fault, Kind, is_hit
from bench.disk.scenarios import RUN, SCENARIOS, Scenario, status_of
from bench.disk.soundness import Outcome, Reference, after_fault, checked, once_it_is_well, to_resume_from

FAULTS: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind != "slow")


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one case."""

    scenario: str
    fault: Kind
    at: int
    call: str
    """The kind of the call that was hit; empty where it was never made."""
    path: str
    status: int
    complaints: list[str]

    @property
    def words(self) -> str:
        """What to say to run it again."""
        return f"--scenario {self.scenario} --fault {self.fault} --only {self.at}"


def in_own_process(work: Callable[[], int], stderr: Path) -> int:
    """The exit status of a function in a process that is forked from this one, which writes to a file."""
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        status = 99
        try:
            handle = os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(handle, 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            status = work()
        except BaseException:
            traceback.print_exc()
        finally:
            with_flush(sys.stderr.flush)
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def imported(names: Sequence[str]) -> None:
    """Import what a run imports on its way: every process that is forked later has it."""
    for name in names:
        with suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what a search for garbage touches is copied


def with_flush(flush: Callable[[], None]) -> None:
    """The last words of a process, if somebody takes them."""
    try:
        flush()
    except (OSError, ValueError):
        return


def ran(scenario: Scenario, place: Path, fault: Fault | None, name: str) -> tuple[Outcome, list[Call], Call | None]:
    """Run a scenario in ``place/disk``: how it ended, the calls that it made if it came to an end, and the one hit."""
    told, hit, calls = (place / f"{name}.{what}" for what in ("told", "hit", "calls"))
    told.write_text("")
    handle = os.open(told, os.O_WRONLY | os.O_APPEND)

    def work() -> int:
        def note(call: Call) -> None:
            hit.write_text(json.dumps(asdict(call)))

        with DiskLayer(place / "disk", fault, told=note) as layer:
            status = status_of(scenario, place / "disk", lambda text: (os.write(handle, f"{text}\n".encode()), None)[1])
        calls.write_text(json.dumps([asdict(call) for call in layer.calls]))
        (place / f"{name}.modules").write_text(" ".join(sys.modules))
        return status

    status = in_own_process(work, place / f"{name}.err")
    os.close(handle)
    outcome = Outcome.of(status, told.read_text(), (place / f"{name}.err").read_text(errors="replace"))
    made = [Call(**call) for call in json.loads(calls.read_text())] if calls.exists() else []
    return outcome, made, Call(**json.loads(hit.read_text())) if hit.exists() else None


class Stage:
    """A scenario, prepared: what was there before, which calls it makes, and what it comes to."""

    def __init__(self, scenario: Scenario, place: Path) -> None:
        self.scenario = scenario
        self._before = place / "before" / "disk"
        self._before.mkdir(parents=True)

        def prepare() -> int:
            scenario.prepare(self._before)
            return 0

        if in_own_process(prepare, place / "prepare.err"):
            raise SystemExit(f"{scenario.name}: cannot be prepared: {(place / 'prepare.err').read_text()[-500:]}")
        whole = self._copied(place / "whole")
        outcome, self.calls, _ = ran(scenario, whole, None, "run")
        if outcome.status:
            raise SystemExit(f"{scenario.name}: ends with {outcome.status} on a good disk: {outcome.stderr[-500:]}")
        self.reference = Reference.of(whole / "disk")
        checked(whole / "disk" / RUN)
        imported((whole / "run.modules").read_text().split())

    def _copied(self, place: Path) -> Path:
        shutil.copytree(self._before.parent, place)
        return place

    def case(self, fault: Fault, place: Path) -> Result:
        """Run one case in a folder of its own, which is removed."""
        try:
            self._copied(place)
            outcome, _, hit = ran(self.scenario, place, fault, "run")
            complaints = after_fault(self.scenario, place / "disk", outcome, self.reference)
            for left in (place / "disk").rglob(".*.partial"):
                os.utime(left, (0, 0))  # a while later: who may be writing on another machine is given time
            trusted = to_resume_from(place / "disk")
            again, _, _ = ran(self.scenario, place, None, "again")
            complaints += once_it_is_well(self.scenario, place / "disk", outcome, again, self.reference, trusted)
        finally:
            shutil.rmtree(place, ignore_errors=True)
        kind, path = ("", "") if hit is None else (hit.kind, hit.path)
        return Result(self.scenario.name, fault.kind, fault.at, kind, path, outcome.status, complaints)

    def faults(self, kinds: Sequence[Kind], every: int) -> Iterator[Fault]:
        """Every fault that does anything, at every so-manieth call."""
        for at in range(1, len(self.calls) + 1, every):
            yield from (Fault(kind, at) for kind in kinds if is_hit(kind, self.calls[at - 1].kind))


def results_of(stage: Stage, faults: Sequence[Fault], jobs: int, place: Path) -> Iterator[Result]:
    """Run cases, so many at a time, each in a process of its own."""
    under_way: dict[int, Path] = {}
    waiting = list(enumerate(faults))[::-1]
    try:
        yield from _each(stage, waiting, under_way, jobs, place)
    finally:
        for child in under_way:  # whoever wants no more removes the folder in which they write
            os.waitpid(child, 0)


def _each(
    stage: Stage, waiting: list[tuple[int, Fault]], under_way: dict[int, Path], jobs: int, place: Path
) -> Iterator[Result]:
    while waiting or under_way:
        while waiting and len(under_way) < jobs:
            number, fault = waiting.pop()
            answer = place / f"{number}.json"
            if (child := os.fork()) == 0:
                try:
                    result = stage.case(fault, place / str(number))
                except BaseException:  # a case that cannot be looked at is one more to look at
                    reason = f"cannot be looked at: {traceback.format_exc()}"
                    result = Result(stage.scenario.name, fault.kind, fault.at, "", "", -1, [reason])
                answer.write_text(json.dumps(asdict(result)))
                os._exit(0)
            under_way[child] = answer
        child, status = os.wait()
        answer = under_way.pop(child)
        if status:
            raise SystemExit(f"a case has died with {status}")
        yield Result(**json.loads(answer.read_text()))
        answer.unlink()


def main(words: Sequence[str] | None = None) -> int:
    """Run the cases, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    possible = [name for name in SCENARIOS if name != "train" or find_spec("tyro") is not None]
    parser.add_argument("--scenario", nargs="+", choices=list(SCENARIOS), default=possible)
    parser.add_argument("--fault", nargs="+", choices=list(KINDS), default=list(FAULTS))
    parser.add_argument("--every", type=int, default=1, help="hit every so-manieth call")
    parser.add_argument("--only", type=int, help="hit this call alone")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--minutes", type=float, default=0, help="stop after so many, with what there is")
    parser.add_argument("--out", type=Path, help="all results, as JSON")
    options = parser.parse_args(words)
    found: list[Result] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        for name in options.scenario:
            stage = Stage(SCENARIOS[name], Path(place) / name)
            faults = list(stage.faults(options.fault, options.every))
            if options.only is not None:
                faults = [Fault(kind, options.only) for kind in options.fault]
            for done, result in enumerate(results_of(stage, faults, options.jobs, Path(place) / name), 1):
                found.append(result)
                for complaint in result.complaints:
                    print(f"{result.words}: {result.call} {result.path}: {complaint}", file=sys.stderr, flush=True)
                if done % 50 == 0 or done == len(faults):
                    bad = sum(bool(each.complaints) for each in found)
                    seconds = time.monotonic() - began
                    print(f"{name}: {done} of {len(faults)} cases, {bad} bad, {seconds:.0f} s", file=sys.stderr)
                if options.minutes and time.monotonic() - began > 60 * options.minutes:
                    break
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(result) for result in found], indent=1))
    print(report(found))
    return int(any(result.complaints for result in found))


HEAD = "cases | status 0 | 1 | 2 | killed | not sound"


def report(found: Sequence[Result]) -> str:
    """The results by fault and by kind of call, as Markdown."""
    rule = "--:|" * len(HEAD.split("|"))
    lines = [f"| scenario | fault | {HEAD} |", f"|---|---|{rule}"]
    for scenario, fault in sorted({(each.scenario, each.fault) for each in found}):
        chosen = [each for each in found if (each.scenario, each.fault) == (scenario, fault)]
        lines.append(f"| {scenario} | {fault} | {_counted(chosen)} |")
    lines += [f"| all | all | {_counted(found)} |", "", f"| call | {HEAD} |", f"|---|{rule}"]
    for call in sorted({each.call for each in found}):
        lines.append(f"| {call or '(not made)'} | {_counted([each for each in found if each.call == call])} |")
    return "\n".join(lines)


def _counted(found: Sequence[Result]) -> str:
    statuses = Counter(each.status for each in found)
    bad = sum(bool(each.complaints) for each in found)
    numbers = (len(found), *(statuses[status] for status in (0, 1, 2, KILLED)), bad)
    return " | ".join(f"{number:,}" for number in numbers)


if __name__ == "__main__":
    sys.exit(main())
