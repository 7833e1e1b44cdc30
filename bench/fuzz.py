"""Throws damaged and hostile input at everything that reads, for as long as one likes, and keeps what breaks it.

    python bench/fuzz.py --seconds 600 --jobs 16 --found experiments/fuzz [--seed 0] [--target logs --target runs]

Real files of every kind (`tests/readers/samples.py`, `tests/fuzz/`) are cut, flipped, strewn with values of other types
and sizes, and replaced by links, FIFOs and bombs; digests are made right again. What runs a line of Sealegs that none
ran before is damaged further. Each case must end with exit code 0, 1 or 2, the last with one sentence; without a
traceback, a warning or a hang, within the time and memory of `bench/fuzzing/throw.py`, and without writing, showing or
running anything that lies beside its sandbox. What breaks a rule lies in `--found` as a case, one for each place in the
code, made as small as it gets: mend the cause, and move the case to `tests/fuzz/cases`, where a test throws it again.

`--seconds` is CPU time of all jobs together, for each target; `--cases` ends each after so many, `--minutes` all of it
by the clock. However it ends, by Ctrl-C or SIGTERM too, it says what was thrown. `--again` throws one case again, or
all of a folder, and shows what comes of it; `--first` does so before anything new is thrown.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.fuzzing import page
from bench.fuzzing.sample import Case, Content, Sample
from bench.fuzzing.targets import TARGETS, Target, beside
from bench.fuzzing.throw import Finding, Outcome, Thrower, seconds

STUCK_S = 180.0
"""Time without a new case after which a job hangs where no signal reaches it."""
MOST_KEPT, LARGEST_KEPT = 2000, 512 << 10
"""Samples of a target that are damaged further, and the largest of them."""
TRIES = 40
"""Attempts to make a case smaller."""
MOST_UNDONE = 100
"""Samples in a row that a damage cannot be done to, after which it is the damage that is wrong."""


@dataclass
class Tally:
    """What was thrown at one target."""

    cases: int = 0
    seconds: float = 0.0
    codes: Counter[str] = field(default_factory=Counter)

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return {"cases": self.cases, "seconds": round(self.seconds, 1), "codes": dict(self.codes)}


class Fuzz:
    """One job: throws at some targets, at each for as long."""

    def __init__(self, targets: Sequence[str], thrower: Thrower, found: Path, seed: int) -> None:
        self._chance = random.Random(seed)  # noqa: S311 - no secret
        self._thrower = thrower
        self._found = found
        self.tallies = {name: Tally() for name in targets}
        self.seeds = {name: {sample.seed: sample for sample in TARGETS[name].seeds()} for name in targets}
        self._pools: dict[str, dict[str, list[Sample]]] = {
            name: {seed: [sample] for seed, sample in known.items()} for name, known in self.seeds.items()
        }
        self.findings: dict[str, Finding] = {}

    def one(self, name: str) -> Outcome:
        """One case of a target."""
        began = seconds()
        case = self.next_case(name)
        (self._found / "now.json").write_text(case.to_json(self.seeds[name][case.sample.seed]))
        outcome = self._thrower.throw(case)
        if outcome.finding is not None:
            self.keep(case, outcome.finding)
        pool = self._pools[name][case.sample.seed]
        if outcome.is_new and case.sample.size < LARGEST_KEPT and len(pool) < MOST_KEPT:
            pool.append(case.sample)
        tally = self.tallies[name]
        tally.cases += 1
        tally.seconds += seconds() - began
        tally.codes["broke" if outcome.finding else str(outcome.code)] += 1
        return outcome

    def next_case(self, name: str) -> Case:
        """A sample, damaged, and a command."""
        target: Target = TARGETS[name]
        weights, commands = zip(*target.commands, strict=True)
        [command] = self._chance.choices(commands, weights)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Case(name, self._damaged(target, self._pools[name]), command)

    def _damaged(self, target: Target, pools: dict[str, list[Sample]]) -> Sample:
        """A sample of the pools, damaged; what was damaged before does not bear every damage."""

        def attempt() -> Sample:
            one, other = (self._chance.choice(pools[self._chance.choice(list(pools))]) for _ in range(2))
            return target.damaged(self._chance, one, other)

        for _ in range(MOST_UNDONE):
            with suppress(Exception):
                return attempt()
        return attempt()  # whose error is the damage's own

    def keep(self, case: Case, finding: Finding) -> None:
        """Write the case down, as small as it gets, if none has broken at that place yet."""
        if finding.site in self.findings:
            return
        self.findings[finding.site] = finding
        print(f"found: {finding.site} ({case.target}: {' '.join(case.command)})", flush=True)
        case = self._smaller(case, finding)
        name = finding.site.replace("/", "_")[:120]
        text = replace(case, seen=finding.site).to_json(self.seeds[case.target][case.sample.seed])
        (self._found / f"{name}.json").write_text(text)
        (self._found / f"{name}.why").write_text(finding.text)

    def _smaller(self, case: Case, finding: Finding) -> Case:
        """The case with as much of its seed as it needs, and as little of what was changed."""
        if finding.site.startswith(("Hang", "memory")):
            return case  # each attempt takes as long
        seed = self.seeds[case.target][case.sample.seed]
        tries = iter(range(TRIES))
        for name, content in case.sample.changes(seed).items():
            files: dict[str, Content] = dict(case.sample.files)
            if name in seed.files:
                files[name] = seed.files[name]
            else:
                files.pop(name, None)
            case = self._if_same(case, files, finding)
            if isinstance(content, bytes) and case.sample.files.get(name) == content:
                case = self._shorter(case, name, content, finding, tries)
        return case

    def _shorter(self, case: Case, name: str, content: bytes, finding: Finding, tries: Any) -> Case:
        part = len(content) // 2
        while part > 8 and next(tries, None) is not None:
            for at in range(0, len(content), part):
                left = content[:at] + content[at + part :]
                smaller = self._if_same(case, {**case.sample.files, name: left}, finding)
                if smaller is not case:
                    case, content = smaller, left
                    break
                if next(tries, None) is None:
                    return case
            else:
                part //= 2
        return case

    def _if_same(self, case: Case, files: dict[str, Content], finding: Finding) -> Case:
        smaller = replace(case, sample=Sample(case.sample.seed, files))
        again = self._thrower.throw(smaller).finding
        return smaller if again is not None and again.site == finding.site else case


def work(targets: Sequence[str], budget_s: float, most: int, seed: int, found: Path, first: Path | None) -> int:
    """One job, in a process of its own: until each target has had its CPU time."""
    found.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started the jobs ends them, and says what they threw
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    from bench.fuzzing.actions import ACTIONS

    with tempfile.TemporaryDirectory() as folder, Thrower(Path(folder) / "sandbox", ACTIONS, beside()) as thrower:
        warm_up(thrower)
        fuzz = Fuzz(targets, thrower, found, seed)
        for case, outcome in throw_again(thrower, first):
            if outcome.finding is not None:
                fuzz.keep(case, outcome.finding)
        said = 0.0
        while left := [name for name, tally in fuzz.tallies.items() if tally.seconds < budget_s and tally.cases < most]:
            fuzz.one(min(left, key=lambda name: fuzz.tallies[name].seconds))
            if time.monotonic() - said > 5:
                said = time.monotonic()
                _write(found, fuzz)
        _write(found, fuzz)
    return 0


def warm_up(thrower: Thrower) -> None:
    """Import everything before it is measured, and draw nothing: pictures take longer than all else."""
    import torch

    from sealegs.report.postmortem import plots

    torch.set_num_threads(1)
    plots.can_draw = lambda: False
    for name in (
        "numpy",
        "msgspec",
        "tyro",
        "bokeh",
        "safetensors",
        "tensorboard",
        "markdown_it",
        "tokenizers",
    ):
        with suppress(ImportError):
            __import__(name)
    from bench.fuzzing.targets import run_folders

    for words in (("check", "{}"), ("dashboard", "{}"), ("audit", "{}"), ("postmortem", "{}")):
        thrower.throw(Case("runs", run_folders()[0], words))


def _write(found: Path, fuzz: Fuzz) -> None:
    about = {name: tally.plain() for name, tally in fuzz.tallies.items()}
    (found / "tally.json").write_text(json.dumps({"targets": about, "findings": sorted(fuzz.findings)}))


def run(
    targets: Sequence[str],
    budget_s: float,
    most: int,
    jobs: int,
    seed: int,
    found: Path,
    longest_s: float,
    first: Path | None,
) -> dict[str, Any]:
    """All jobs side by side. One that dies or hangs leaves its case as a finding, and another takes its place."""
    found.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + longest_s
    running: dict[int, tuple[subprocess.Popen[bytes], Path]] = {}
    broken: list[str] = []
    started = 0

    def start(share: Sequence[str], part_s: float) -> None:
        nonlocal started
        folder = found / f"job-{started}"
        folder.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, __file__, "--worker", "--seconds", str(part_s), "--seed", str(seed + started)]
        words += [
            "--cases",
            str(most),
            "--found",
            str(folder),
            *(word for name in share for word in ("--target", name)),
            *(("--first", str(first)) if first and not started else ()),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        running[started] = subprocess.Popen(words, env=environment), folder
        started += 1

    try:
        for _ in range(jobs):
            start(targets, budget_s / jobs)
        while running and time.monotonic() < until:
            time.sleep(1)
            for number, (process, folder) in list(running.items()):
                now = folder / "now.json"
                if process.poll() is None and now.exists() and time.time() - now.stat().st_mtime > STUCK_S:
                    process.kill()
                    process.wait()
                if process.poll() is None:
                    continue
                del running[number]
                if process.returncode:
                    broken.append(_keep_dead(found, folder, process.returncode))
                    left = _left(folder, targets, budget_s / jobs)
                    if left and len(broken) < 20 * jobs:
                        start(list(left), max(left.values()))
    except KeyboardInterrupt:
        print("stopped: this is what was thrown until then", flush=True)
    for process, _ in running.values():
        process.kill()
        process.wait()
    return _summed(found, broken)


def _interrupted(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _keep_dead(found: Path, folder: Path, code: int) -> str:
    """The case that a job died of."""
    name = f"died-{-code if code < 0 else code}"
    with suppress(OSError):
        text = (folder / "now.json").read_text()
        about = json.loads(text)
        name = f"{name}-{about['target']}-{about['command'][0].strip('@')}"
        (found / f"{name}.json").write_text(text)
    print(f"found: {name}", flush=True)
    return name


def _left(folder: Path, targets: Sequence[str], budget_s: float) -> dict[str, float]:
    try:
        told = json.loads((folder / "tally.json").read_text())["targets"]
    except (OSError, ValueError):
        return {}
    left = {name: budget_s - told.get(name, {}).get("seconds", 0.0) for name in targets}
    return {name: each for name, each in left.items() if each > 1}


def _summed(found: Path, broken: Sequence[str]) -> dict[str, Any]:
    targets: dict[str, Any] = {}
    findings = set(broken)
    for file in sorted(found.glob("job-*/tally.json")):
        told = json.loads(file.read_text())
        findings |= set(told["findings"])
        for name, tally in told["targets"].items():
            total = targets.setdefault(name, {"cases": 0, "seconds": 0.0, "codes": Counter()})
            total["cases"] += tally["cases"]
            total["seconds"] = round(total["seconds"] + tally["seconds"], 1)
            total["codes"].update(tally["codes"])
    summary = {"targets": targets, "findings": sorted(findings)}
    (found / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def table(summary: dict[str, Any]) -> str:
    """The counts as a Markdown table."""
    lines = ["| target | cases | CPU seconds | exit 0 | 1 | 2 | broke |", "|---|---:|---:|---:|---:|---:|---:|"]
    total = Tally()
    for name, each in summary["targets"].items():
        codes = [each["codes"].get(code, 0) for code in ("0", "1", "2", "broke")]
        lines.append(f"| {name} | {each['cases']:,} | {each['seconds']:,.0f} | {' | '.join(f'{n:,}' for n in codes)} |")
        total.cases, total.seconds = total.cases + each["cases"], total.seconds + each["seconds"]
        total.codes.update(each["codes"])
    codes = [total.codes.get(code, 0) for code in ("0", "1", "2", "broke")]
    lines.append(f"| all | {total.cases:,} | {total.seconds:,.0f} | {' | '.join(f'{n:,}' for n in codes)} |")
    return "\n".join([*lines, "", f"{len(summary['findings'])} findings", *summary["findings"]])


def throw_again(thrower: Thrower, place: Path | None) -> Iterator[tuple[Case, Outcome]]:
    """Throw one case, or all of a folder, and show what comes of each."""
    files = sorted(place.glob("*.json")) if place and place.is_dir() else filter(None, [place])
    for file in files:
        target = json.loads(file.read_text())["target"]
        if target not in TARGETS:
            print(f"{file.name}: passed over, its library is not installed")
            continue
        case = Case.from_json(file.read_text(), {sample.seed: sample for sample in TARGETS[target].seeds()})
        outcome = thrower.throw(case)
        told = f"exit code {outcome.code}" if outcome.finding is None else "\n".join(outcome.finding)
        print(f"{file.name}: {told}", flush=True)
        yield case, outcome


def again(place: Path) -> int:
    """Throw one case, or all of a folder, and nothing new."""
    from bench.fuzzing.actions import ACTIONS

    with tempfile.TemporaryDirectory() as folder, Thrower(Path(folder) / "sandbox", ACTIONS, beside()) as thrower:
        warm_up(thrower)
        broke = [outcome.finding is not None for _, outcome in throw_again(thrower, place)]
    print(f"{len(broke)} cases, {sum(broke)} broke a rule")
    return int(any(broke))


def main() -> int:
    """By hand, or `make fuzz`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of CPU time, for each target")
    parser.add_argument("--cases", type=int, default=sys.maxsize, help="the most for each target and job")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="by the clock, for all of it")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", action="append", choices=list(TARGETS))
    parser.add_argument("--found", type=Path, default=Path("experiments/fuzz"))
    parser.add_argument("--again", type=Path)
    parser.add_argument("--first", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    targets = options.target or list(TARGETS)
    if options.again:
        return again(options.again)
    if options.worker:
        return work(targets, options.seconds, options.cases, options.seed, options.found.resolve(), options.first)
    if not options.target and not page.is_there():
        print("page: passed over, bokeh is not installed", flush=True)
    signal.signal(signal.SIGTERM, _interrupted)
    found, longest_s = options.found.resolve(), 60 * options.minutes
    summary = run(targets, options.seconds, options.cases, options.jobs, options.seed, found, longest_s, options.first)
    print(table(summary))
    return int(bool(summary["findings"]))


if __name__ == "__main__":
    sys.exit(main())
