"""What `sealegs check` says of public logs, against what a person said who looked at every column.

    python bench/verdicts.py FOLDER [--labels kinds|logs|fresh|finetunes] [--half tune|report|both] [--each] [--live]

The labels are in bench/labels/: `kinds.csv` has runs whose loss tells little (policies, pairs, experts, two networks),
`logs.csv` logs of all kinds with the ranges of their events, `fresh.csv` more, gathered when the rules were made,
`finetunes.csv` fine-tunes with gradient norms. Each names the repository and the path of a log; the logs themselves are
their authors', so fetch them into FOLDER under the name in `file`: of a fine-tune a folder, with the
`trainer_state.json` and the settings that lie beside it. Halves are by repository: rules were made with the first in
view, and since 2026-11-19 with both of `kinds.csv` and `logs.csv`. The second of the others is only counted, so
`--each` says nothing of it. Of `fresh.csv` the halves are by a hash of the repository's name (sha256, first byte even:
tune), drawn on 2026-11-19 before a rule had seen any of it.

`--live` also shows the rows of what a person saw no trouble in (class healthy: data that are learned by heart are no
trouble of an update) to the live detectors, one after the other.

Right is the same verdict, or the next one where the person was not sure; a log that cannot be read is wrong. An
incident that overlaps a labelled range finds it, edges within a few logged points. False incidents are those of logs
that a person called healthy and in which nothing was marked.
"""

import argparse
import csv
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.check import NO_EVENT, is_found, share, table
from bench.detection.measures import poisson

from sealegs import judge
from sealegs.cli.check import check
from sealegs.errors import SealegsError
from sealegs.readers.read import read

LABELS = Path(__file__).with_name("labels")
OPENED = ("kinds", "logs")
"""Labels of which both halves are in view."""
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


@dataclass(frozen=True, slots=True)
class Live:
    """What the live detectors would have made of a healthy run."""

    file: str
    stride: int
    """Steps from one row to the next: only with 1 did the detectors see what they would have seen live."""
    rows: int
    skips: tuple[int, ...]
    """Steps whose update they would have left out."""
    nonfinite: int
    """Those of them whose loss or gradient norm is not finite: their update would have broken the weights."""
    incidents: tuple[int, ...]


EARLY = 150
"""Rows before the statistic judges: until then only what is not finite and what is gross is found."""
FIRST, EVERY, WITHIN = 9, 7, 20
"""The first row that gets an injection, how many apart they are, and the rows in which it must be found."""
HARMS: dict[str, tuple[float, float, int]] = {
    "gradient x10 once: skipped": (10.0, 1.0, 1),
    "gradient x30 once: skipped": (30.0, 1.0, 1),
    "gradient x100 once: skipped": (100.0, 1.0, 1),
    "gradient x1000 once: skipped": (1000.0, 1.0, 1),
    "loss twice as high for good: alarm": (1.0, 2.0, WITHIN),
    "control: nothing, skip or alarm": (1.0, 1.0, WITHIN),
}
"""What is done to gradient norm and loss, and over how many rows it is looked at."""


def recalls(rows: Sequence[dict[str, float]], clip: float | None) -> dict[str, list[tuple[int, bool]]]:
    """At which rows of a run each harm was done, and whether it was found; ``clip`` is known to the guard."""
    detectors = judge.standard()
    state = judge.begin(detectors)
    found: dict[str, list[tuple[int, bool]]] = {name: [] for name in HARMS}
    known = {} if clip is None else {"clip_norm": clip}
    for at, row in enumerate(rows):
        if at >= FIRST and not (at - FIRST) % EVERY:
            for name, (gradient, loss, count) in HARMS.items():
                there, seen = state, False
                for now in rows[at : at + count]:
                    harmed = {"grad_norm": now["grad_norm"] * gradient, "loss": now["loss"] * loss}
                    there, verdict = judge.fold(detectors, there, {**now, **known, **harmed})
                    seen |= not verdict.go or (count > 1 and verdict.opens_incident)
                found[name].append((at, seen))
        state, _ = judge.fold(detectors, state, {**row, **known})
    return found


def recall_report(runs: Sequence[Sequence[dict[str, float]]]) -> str:
    """How much of what is done to healthy runs would have been found live, early and later, as Markdown."""
    lines = []
    for words, clip in (("", None), (", clipped at 1", 1.0)):
        all_found = [recalls(rows, clip) for rows in runs]
        for name in HARMS:
            hits = [hit for found in all_found for hit in found[name]]
            early, late = ([seen for at, seen in hits if (at >= EARLY) is is_late] for is_late in (False, True))
            lines.append([name + words, share(sum(early), len(early)), share(sum(late), len(late))])
    return table([f"{len(runs)} runs of every step", f"rows {FIRST} to {EARLY}", f"from row {EARLY} on"], lines)


def rows_of(path: Path) -> list[dict[str, float]]:
    """The rows of a log as the guard would have seen them."""
    run = read(str(path)).run
    columns = {name: run.written(name) for name in ("loss", "grad_norm", "lr") if name in run.signals}
    by_step: dict[int, dict[str, float]] = {}
    for name, column in columns.items():
        for step, value in zip(column.steps.tolist(), column.values.tolist(), strict=True):
            by_step.setdefault(step, {"step": step})[name] = value
    return [row for _, row in sorted(by_step.items()) if "loss" in row]


def live(path: Path, label: dict[str, str]) -> Live:
    """Show a log to the live detectors."""
    rows = rows_of(path)
    verdicts = list(judge.replay(rows))
    skipped = [row for row, verdict in zip(rows, verdicts, strict=True) if not verdict.go]
    broken = [row for row in skipped if not all(math.isfinite(row.get(name, 0.0)) for name in ("loss", "grad_norm"))]
    return Live(
        label["file"],
        int(np.median(np.diff([row["step"] for row in rows]))),
        len(rows),
        tuple(int(row["step"]) for row in skipped),
        len(broken),
        tuple(verdict.step for verdict in verdicts if verdict.opens_incident),
    )


def live_report(seen: Sequence[Live]) -> str:
    """What the live detectors would have made of healthy runs, as Markdown."""
    rows = []
    for words, of in (("every step logged", [one for one in seen if one.stride <= 1]), ("all", seen)):
        count = sum(one.rows for one in of)
        false = sum(len(one.skips) - one.nonfinite for one in of)
        alarms = sum(len(one.incidents) for one in of)
        most = poisson(false)[1] / max(count, 1)
        broken = sum(one.nonfinite for one in of)
        rate = f"{1000 * alarms / max(count, 1):.2f}"
        rows.append([words, len(of), f"{count:,}", false, f"1 in {1 / most:,.0f}", broken, alarms, rate])
    head = ["healthy logs", "logs", "rows", "false skips", "95 % bound", "not finite, skipped", "alarms", "per 1,000"]
    return table(head, rows)


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
    words.add_argument("--labels", choices=("kinds", "logs", "fresh", "finetunes"), default="kinds")
    words.add_argument("--half", choices=("tune", "report", "both"), default="both")
    words.add_argument("--each", action="store_true", help="a line for each log that is wrong, of those in view")
    words.add_argument("--live", action="store_true", help="also what the live detectors make of calm ones")
    chosen = words.parse_args()
    with (LABELS / f"{chosen.labels}.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if chosen.half in ("both", row["half"])]
    there = {path.name: path for path in sorted(chosen.folder.rglob("*"))}
    answers = [scored(there[row["file"]], row) for row in rows if row["file"] in there]
    kinds = sum(each.kind == each.label["kind"] for each in answers)
    print(f"{len(answers)} logs, {len(rows) - len(answers)} not there; kind as labelled: {kinds}\n")
    if answers:
        print(report(answers))
    if chosen.live and answers:
        calm = [row for row in rows if row["file"] in there and row.get("class", row["verdict"]) == "healthy"]
        seen = [live(there[row["file"]], row) for row in calm]
        runs = [rows_of(there[one.file]) for one in seen if one.stride <= 1 and not one.skips]
        print("", live_report(seen), "", recall_report(runs), "", sep="\n")
    for each in answers:
        label = each.label
        is_in_view = label["half"] == "tune" or chosen.labels in OPENED
        if chosen.each and is_in_view and not (each.is_right and all(each.found)):
            reason = label.get("cause") or label.get("remark", "")
            wanted = f"{label['verdict']} ({reason}, {label['confidence']})"
            print(f"{label['file']}: {wanted}, said {each.verdict}: {each.why}")


if __name__ == "__main__":
    main()
