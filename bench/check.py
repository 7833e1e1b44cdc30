"""How often `sealegs check` is right about labelled logs: verdicts, ranges found, false incidents, by format.

    python bench/check.py FOLDER [--half tune|report|all] [--rules calibrated|textbook]

FOLDER has `labels.csv` with the columns file, format, label, spike_steps, and the logs it names. `healthy/`, where
there is one, has long healthy logs besides. The split is by a hash of the file's name: thresholds were chosen on
`tune`, and `report` is what is claimed. Where the steps of a log go back, its labelled ranges are numbers of rows.
"""

import argparse
import csv
import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sealegs.diagnosis.contract import Findings
from sealegs.diagnosis.findings import look
from sealegs.errors import SealegsError
from sealegs.incidents import Incident
from sealegs.readers.read import read

RIGHT = {
    "healthy": ("healthy", "watch"),
    "plateau": ("healthy", "watch"),
    "spikes": ("watch", "act"),
    "elevation": ("act",),
    "divergence": ("act",),
    "nan_loss": ("act",),
}
"""The verdicts that are right for a label; others are not scored."""
NO_EVENT = ("plateau", "epoch_step")
"""Kinds of incidents that find no labelled range: they span whole runs."""
NEAR = 3
"""Logged points by which an edge may be off."""
FLOORS = {"verdicts": 0.88, "ranges": 0.85, "false": 5.0}


@dataclass(frozen=True)
class Labelled:
    """A line of the table of labels."""

    path: Path
    format: str
    label: str
    ranges: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Scored:
    """A labelled log and what was found in it."""

    log: Labelled
    findings: Findings | None
    """None where the file was refused, for the reason:"""
    refused: str = ""
    found: tuple[bool, ...] = ()
    """Which of the ranges were found."""
    points: int = 0
    seconds: float = 0.0

    @property
    def is_right(self) -> bool:
        """Whether the verdict is one that the label allows."""
        return self.findings is not None and self.findings.verdict in RIGHT.get(self.log.label, ())


def half_of(name: str) -> str:
    """Which half a file belongs to, by its name alone.

    >>> half_of("run.csv") == half_of("run.csv")
    True
    """
    return ("tune", "report")[int(hashlib.sha256(name.encode()).hexdigest(), 16) % 2]


def labels_in(folder: Path) -> list[Labelled]:
    """Every labelled log, and the healthy ones that need no label."""
    logs = []
    with (folder / "labels.csv").open() as file:
        for line in csv.DictReader(file):
            ranges = [part.rsplit("-", 1) for part in line["spike_steps"].split(";") if part]
            numbers = tuple((int(float(first)), int(float(last))) for first, last in ranges)
            logs.append(Labelled(folder / line["file"], line["format"], line["label"], numbers))
    healthy = sorted((folder / "healthy").glob("*")) if (folder / "healthy").is_dir() else []
    return logs + [Labelled(path, "long healthy", "healthy") for path in healthy if path.stem.isdigit()]


def score(log: Labelled, rules: str) -> Scored:
    """Read a log, look at it, and compare with its label."""
    try:
        run = read(str(log.path)).run
    except SealegsError as error:
        return Scored(log, None, refused=str(error))
    began = time.perf_counter()
    findings = look(run, rules=rules)
    seconds = time.perf_counter() - began
    steps = run.written("loss").steps
    events = [one for one in findings.incidents if one.kind not in NO_EVENT]
    found = tuple(is_found(log_range, events, steps) for log_range in log.ranges)
    points = int(np.isfinite(run.written("loss").values).sum())
    return Scored(log, findings, found=found, points=points, seconds=seconds)


def is_found(labelled: tuple[int, int], incidents: Sequence[Incident], steps: NDArray[np.int64]) -> bool:
    """Whether an incident overlaps a labelled range, edges within a few logged points."""
    first, last = labelled
    is_by_row = bool((np.diff(steps) < 0).any())
    slack = NEAR * (1 if is_by_row or len(steps) < 2 else max(int(np.median(np.diff(steps))), 1))
    for one in incidents:
        end = int(steps.max()) if one.end is None else one.end
        if is_by_row:
            rows = np.flatnonzero(steps == one.start)
            if ((rows >= first - slack) & (rows <= last + slack)).any():
                return True
        elif one.start <= last + slack and end >= first - slack:
            return True
    return False


def table(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)


def share(part: int, whole: int) -> str:
    """``9 of 10 (90 %)``"""
    return f"{part} of {whole} ({part / whole:.0%})" if whole else "-"


def report(scores: Sequence[Scored]) -> str:
    """All tables."""
    read_ones = [one for one in scores if one.findings is not None]
    scored = [one for one in read_ones if one.log.label in RIGHT]
    formats = sorted({one.log.format for one in scores})
    lines = []
    for name in [*formats, "all"]:
        of = [one for one in scored if name in ("all", one.log.format)]
        healthy = [one for one in of if one.log.label == "healthy"]
        false = sum(len(one.findings.incidents) for one in healthy if one.findings)
        points = sum(one.points for one in healthy)
        hits = [hit for one in of for hit in one.found]
        rate = f"{false} in {points:,} ({1e5 * false / points:.1f})" if points else "-"
        lines.append(
            [name, len(of), share(sum(one.is_right for one in of), len(of)), share(sum(hits), len(hits)), rate]
        )
    head = ["format", "logs", "verdict right", "ranges found", "false incidents in healthy points (per 100k)"]
    text = [
        table(head, lines),
        "",
        f"Floors: {FLOORS['verdicts']:.0%}, {FLOORS['ranges']:.0%}, {FLOORS['false']:g}.",
        "",
    ]
    verdicts = ("healthy", "watch", "act", "unknown")
    counts = Counter((one.log.label, str(one.findings.verdict)) for one in read_ones if one.findings)
    labels = sorted({one.log.label for one in read_ones}, key=lambda name: (name not in RIGHT, name))
    text += [table(["label", *verdicts], [[label, *(counts[label, it] for it in verdicts)] for label in labels]), ""]
    for one in scores:
        text += _remark(one)
    slowest = max(read_ones, key=lambda one: one.seconds, default=None)
    if slowest is not None:
        text += ["", f"Slowest look: {slowest.seconds:.2f} s for {slowest.points:,} points."]
    return "\n".join(text)


def _remark(one: Scored) -> list[str]:
    name = one.log.path.name
    if one.findings is None:
        return [f"- refused: {name}: {one.refused}"]
    told = f"{one.log.label}, {one.findings.verdict}: {one.findings.because}"
    remarks = []
    if one.log.label in RIGHT and not one.is_right:
        remarks.append(f"- wrong verdict: {name}: {told}")
    missed = [f"{a}-{b}" for (a, b), hit in zip(one.log.ranges, one.found, strict=True) if not hit]
    if missed:
        apart = "" if one.log.label in RIGHT else f" ({one.log.label}, not scored)"
        remarks.append(f"- missed{apart}: {name}: {', '.join(missed)}")
    if one.log.label == "healthy" and one.findings.incidents:
        remarks.append(f"- false: {name}: {'; '.join(str(it) for it in one.findings.incidents)}")
    return remarks


def main() -> None:
    """Score a folder and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--half", choices=("tune", "report", "all"), default="report")
    parser.add_argument("--rules", choices=("calibrated", "textbook"), default="calibrated")
    options = parser.parse_args()
    logs = [log for log in labels_in(options.folder) if options.half in ("all", half_of(log.path.name))]
    print(f"## `sealegs check` on {len(logs)} labelled logs, half `{options.half}`, {options.rules} rules\n")
    print(report([score(log, options.rules) for log in logs]))


if __name__ == "__main__":
    main()
