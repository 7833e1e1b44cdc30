"""The text of a Page: for people who do not see the plots, and for people in a hurry."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sealegs.printable import printable
from sealegs.report.commands.check import VERDICTS, deeds
from sealegs.report.commands.check import whole as checked
from sealegs.report.commands.interventions import interventions
from sealegs.report.dashboard.batches import Cells
from sealegs.report.dashboard.marks import KINDS, PanelMark
from sealegs.report.dashboard.subjects import MEANINGS
from sealegs.report.dashboard.values import DiagnosedRun, Page, Panel, PanelLine
from sealegs.report.stability import told_of_tax

MOST_LISTED = 200
"""The most skips, checkpoints and other events that are listed of all runs together; the rest is counted."""
MOST_INCIDENTS = 1000
"""The most incidents, and the most interventions, that are listed of all runs together; the rest is counted."""
WIDTH, NARROW = 100, 62
"""Letters per line of an intervention, where a run has the page to itself and where it shares it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The summary of one run."""

    name: str
    place: str
    extent: str
    verdict: str
    """``HEALTHY``, ``WATCH``, ``ACT`` or ``CANNOT TELL``."""
    because: str
    done: tuple[str, ...]
    """Sentences about skipped steps and other interventions."""
    cost: tuple[str, ...]
    """What it cost to keep the run standing."""
    first_action: str
    incidents: tuple[PanelMark, ...]
    more_incidents: int
    """How many there are besides those that are listed."""
    interventions: tuple[tuple[int, list[str]], ...]
    """Number and lines of each."""
    more_interventions: int
    lists: tuple[tuple[str, str, tuple[str, ...]], ...]
    """Kind, heading and lines of what else happened."""
    everything: list[str]
    """The lines of ``sealegs check``; none on a page of many runs."""


def told(page: Page) -> tuple[RunSummary, ...]:
    """The summary of each run."""
    return tuple(_told(seen, marks, len(page.seen)) for seen, marks in zip(page.seen, page.all_marks, strict=True))


def described(panel: Panel, page: Page) -> str:
    """A panel in words: its ends, its extremes, and what is not finite."""
    if panel.is_empty:
        return wanted(panel)
    several = len(page.seen) > 1
    words = [_described(each, page.seen[each.run].name if several else "") for each in panel.series[:8]]
    words += [f"And {len(panel.series) - 8} more lines."] if len(panel.series) > 8 else []
    if panel.cells is not None:
        words.append(_of_tokens(panel.cells))
    if panel.subject.number == 10:
        words.append(_of_batches(panel))
    return " ".join(words)


def wanted(panel: Panel) -> str:
    """The signals that would fill an empty panel."""
    meanings = ((name, MEANINGS.get(name.partition("/")[0])) for name in panel.missing)
    texts = [f"`{name}` ({meaning})" if meaning else f"`{name}`" for name, meaning in meanings]
    beginning = "No data. This panel is filled by" if panel.is_empty else "Not logged:"
    said = [f"{beginning} {'; '.join(texts)}."] if texts else []
    if panel.not_drawn:
        said.append(f"{panel.not_drawn:,} more lines are not drawn.")
    return " ".join(said)


def _told(seen: DiagnosedRun, marks: Sequence[PanelMark], runs: int) -> RunSummary:
    findings, diagnosis, run = seen.findings, seen.diagnosis, seen.run
    listed, met = max(MOST_LISTED // runs, 3), max(MOST_INCIDENTS // runs, 3)
    incidents = [mark for mark in marks if mark.kind == "incident"]
    done = _interventions(seen, WIDTH if runs == 1 else NARROW)
    rows = f"{len(run.steps):,} rows, steps {run.steps[0]:,} to {run.steps[-1]:,}" if len(run.steps) else "no rows yet"
    again = f"; {run.superseded_rows:,} rows were gone through again" if run.superseded_rows else ""
    is_shadow = any(event.kind == "guard" and event.detail.get("act") is False for event in run.events)
    lists = []
    for kind in KINDS[2:]:
        texts = [mark.text for mark in marks if mark.kind == kind]
        skipped = "Steps that would have been skipped" if is_shadow else "Skipped steps"
        heading = {"skip": skipped, "checkpoint": "Checkpoints", "other": "Other events"}[kind]
        more = [f"and {len(texts) - listed:,} more"] if len(texts) > listed else []
        lists.append((kind, f"{heading}: {len(texts):,}", (*texts[:listed], *more)))
    return RunSummary(
        name=seen.name,
        place=seen.source,
        extent=rows + again,
        verdict=VERDICTS[findings.verdict if findings else "unknown"],
        because=findings.because if findings else "no loss has been logged yet",
        done=tuple(deeds(findings.done)) if findings else (),
        cost=tuple(told_of_tax(run)),
        first_action=diagnosis.first_action if diagnosis else "",
        incidents=tuple(incidents[:met]),
        more_incidents=max(len(incidents) - met, 0),
        interventions=tuple(done[:met]),
        more_interventions=max(len(done) - met, 0),
        lists=tuple(lists),
        everything=checked(printable(diagnosis)).split("\n") if diagnosis else [],
    )


def _interventions(seen: DiagnosedRun, width: int) -> list[tuple[int, list[str]]]:
    try:
        done = printable(interventions(seen.run.events))
        return [(int(each.decided.detail["number"]), each.told(width).split("\n")) for each in done]
    except (KeyError, TypeError, ValueError):  # events of another version: the marks still have them
        return []


def _described(series: PanelLine, run: str) -> str:
    line = series.line
    name = f"{run}, {series.label}" if run else series.label
    finite = np.flatnonzero(~np.isnan(line.values))
    broken = sum(each.rows for each in line.broken)
    lost = f" {broken:,} rows are not finite, the first at step {line.broken[0].first:,}." if broken else ""
    if not len(finite):
        return f"{name}: no finite value.{lost}"
    values, steps = line.values[finite], line.steps[finite]
    low, high = int(values.argmin()), int(values.argmax())
    text = (
        f"{name}: {number(values[0])} at step {steps[0]:,}, {number(values[-1])} at step {steps[-1]:,}, "
        f"lowest {number(values[low])} at {steps[low]:,}, highest {number(values[high])} at {steps[high]:,}."
    )
    return text + lost


def number(value: float) -> str:
    """A number in four digits.

    >>> number(2.98438), number(13.0), number(0.00006)
    ('2.984', '13', '6e-05')
    """
    return f"{value:.4g}" if math.isfinite(value) else str(value)


def _of_tokens(cells: Cells) -> str:
    worst = int(cells.top.argmax())
    return (
        f"The highest token losses: {cells.share[worst]:.2%} of the tokens at {cells.bottom[worst]:g} nats or more, "
        f"from step {cells.left[worst]:,.0f} on."
    )


def _of_batches(panel: Panel) -> str:
    if "batch_hash" in panel.missing:
        return ""
    first = f"; {panel.repeats[0][1].text}" if panel.repeats else ""
    return f"{len(panel.repeats):,} places at which a batch came twice{first}."
