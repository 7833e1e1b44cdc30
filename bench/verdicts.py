"""What `sealegs check` says of public logs, against what a person said who looked at every column.

    python bench/verdicts.py FOLDER [--labels kinds|logs|fresh] [--half tune|report|both] [--each]

The labels are in bench/labels/: `kinds.csv` has runs whose loss tells little (policies, pairs, experts, two networks),
`logs.csv` logs of all kinds with the ranges of their events, `fresh.csv` more, gathered when the rules were made.
Each names the repository and the path of a log; the logs themselves are their authors', so fetch them into FOLDER under
the name in `file`. Halves are by repository. Rules were made with the first in view, and since 2026-11-19 with both
halves of `kinds.csv` and `logs.csv`. `fresh.csv` is only counted, so `--each` says nothing of it.

Right is the same verdict, or the next one where the person was not sure; a log that cannot be read is wrong. An
incident that overlaps a labelled range finds it, edges within a few logged points. False incidents are those of logs
that a person called healthy and in which nothing was marked.
"""

import argparse
import csv
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.check import NO_EVENT, is_found, share, table

from sealegs.cli.check import check
from sealegs.errors import SealegsError

LABELS = Path(__file__).with_name("labels")
SAID = ("healthy", "watch", "act", "unknown", "refused")
NEXT = {("healthy", "watch"), ("watch", "act"), ("unknown", "healthy"), ("unknown", "watch")}
"""Verdicts between which a person who was not sure might have chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A labelled log and what was said of it."""

    label: dict[str, str]
    verdict: str
    why: str
    kind: str = ""
    found: tuple[bool, ...] = ()
    """Which of the labelled ranges were found."""
    incidents: int = 0
    points: int = 0
    seconds: float = 0.0

    @property
    def is_right(self) -> bool:
        """Whether the verdict is the label's, or next to that of a person who was not sure."""
        pair = (self.label["verdict"], self.verdict)
        is_sure = self.label["confidence"] != "low"
        return pair[0] == pair[1] or (not is_sure and (pair in NEXT or pair[::-1] in NEXT))


def ranges_of(label: dict[str, str]) -> tuple[tuple[int, int], ...]:
    """The labelled ranges of steps.

    >>> ranges_of({"ranges": "3-9;20-20"})
    ((3, 9), (20, 20))
    """
    pairs = [part.rsplit("-", 1) for part in label.get("ranges", "").split(";") if part]
    return tuple((int(first), int(last)) for first, last in pairs)


def scored(path: Path, label: dict[str, str]) -> Scored:
    """Ask for the verdict on a log."""
    ranges = ranges_of(label)
    began = time.perf_counter()
    try:
        findings = check(str(path), metrics={}, pattern=None, rules="calibrated").findings
    except SealegsError as error:
        return Scored(label=label, verdict="refused", why=str(error), found=(False,) * len(ranges))
    seconds = time.perf_counter() - began
    events = [one for one in findings.incidents if one.kind not in NO_EVENT]
    has_loss = "loss" in findings.run.signals
    loss = findings.run.written("loss") if has_loss else None
    return Scored(
        label=label,
        verdict=findings.verdict,
        why=findings.because,
        kind="+".join((findings.kind.name, *findings.kind.traits)),
        found=tuple(loss is not None and is_found(one, events, loss.steps) for one in ranges),
        incidents=len(findings.incidents),
        points=0 if loss is None else int(np.isfinite(loss.values).sum()),
        seconds=seconds,
    )


def report(answers: Sequence[Scored]) -> str:
    """The answers as Markdown."""
    said = Counter((each.label["verdict"], each.verdict) for each in answers)
    rows = [[label, *(said[label, word] for word in SAID)] for label in SAID[:4]]
    lines = [table(["labelled", *SAID], rows), "", _by_class(answers), ""]
    right = [each for each in answers if each.label["verdict"] == each.verdict]
    trouble = [each for each in answers if each.label["verdict"] in ("watch", "act")]
    calm = [each for each in answers if each.label["verdict"] == "healthy"]
    unmarked = [each for each in calm if not each.found and each.label.get("class", "healthy") == "healthy"]
    hits = [hit for each in answers for hit in each.found]
    false, points = sum(each.incidents for each in unmarked), sum(each.points for each in unmarked)
    slowest = max(answers, key=lambda each: each.seconds)
    lines += [
        f"- verdict right, unreadable as wrong: {share(sum(each.is_right for each in answers), len(answers))};"
        f" the same verdict: {share(len(right), len(answers))}",
        f"- of logs with trouble: {share(sum(each.is_right for each in trouble), len(trouble))}",
        f"- healthy called healthy: {share(sum(each.verdict == 'healthy' for each in calm), len(calm))}",
        f"- ranges found: {share(sum(hits), len(hits))}",
        f"- false incidents: {false} in {points:,} points ({1e5 * false / max(points, 1):.1f} per 100k)",
        f"- unreadable: {sum(each.verdict == 'refused' for each in answers)}",
        f"- slowest: {slowest.seconds:.2f} s for {slowest.points:,} points",
    ]
    return "\n".join(lines)


def _by_class(answers: Sequence[Scored]) -> str:
    classes = sorted({each.label.get("class", each.label["kind"]) for each in answers})
    rows = []
    for name in classes:
        of = [each for each in answers if each.label.get("class", each.label["kind"]) == name]
        hits = [hit for each in of for hit in each.found]
        rows.append([name, len(of), share(sum(each.is_right for each in of), len(of)), share(sum(hits), len(hits))])
    return table(["class", "logs", "verdict right", "ranges found"], rows)


def main() -> None:
    """Print the tables."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("folder", type=Path)
    words.add_argument("--labels", choices=("kinds", "logs", "fresh"), default="kinds")
    words.add_argument("--half", choices=("tune", "report", "both"), default="both")
    words.add_argument("--each", action="store_true", help="a line for each log that is wrong, of those in view")
    chosen = words.parse_args()
    with (LABELS / f"{chosen.labels}.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if chosen.half in ("both", row["half"])]
    there = {path.name: path for path in sorted(chosen.folder.rglob("*"))}
    answers = [scored(there[row["file"]], row) for row in rows if row["file"] in there]
    kinds = sum(each.kind == each.label["kind"] for each in answers)
    print(f"{len(answers)} logs, {len(rows) - len(answers)} not there; kind as labelled: {kinds}\n")
    if answers:
        print(report(answers))
    for each in answers:
        if chosen.each and chosen.labels != "fresh" and not (each.is_right and all(each.found)):
            label = each.label
            reason = label.get("cause") or label.get("remark", "")
            wanted = f"{label['verdict']} ({reason}, {label['confidence']})"
            print(f"{label['file']}: {wanted}, said {each.verdict}: {each.why}")


if __name__ == "__main__":
    main()
