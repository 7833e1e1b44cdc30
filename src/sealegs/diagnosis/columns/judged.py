"""A run in, what is out of the ordinary in any of its columns out: the module to start at.

Each column is judged by what it can be (``meaning.py``), against its own past (``levels.py``) and against its siblings
(``siblings.py``). Hundreds of columns must not mean many alarms: the chance that a finding is one of the column's own
ways is multiplied by the number of columns, so that the rate of false alarms is of the log.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sealegs.detectors.proportion import SMALLEST_SHARE
from sealegs.diagnosis.columns.levels import Change, Course, course_of, two_sided, values_of
from sealegs.diagnosis.columns.meaning import HELD_OUT, Nature, is_clock, is_share, is_whole, nature_of, words_of
from sealegs.diagnosis.columns.siblings import copies_part, families, leaps_alone, part
from sealegs.diagnosis.contract import ColumnFinding
from sealegs.diagnosis.curve.loss_curve import Floats, Indices, LossCurve
from sealegs.diagnosis.first_signals.judged import SIGNALS_OF
from sealegs.diagnosis.first_signals.reward import has_learned
from sealegs.diagnosis.kind import Kind
from sealegs.diagnosis.metrics import is_frozen
from sealegs.record.run import Run
from sealegs.record.schema import SIGNALS

ALARM = 0.01
"""The chance for all columns of a log together that one that is as ever is found out of the ordinary."""
FEW = 8
"""Values from which a column is known to stand still, to be off, or to turn."""

SUMMARY = 3
"""Fewer values are a summary at the end, and no column."""

LEAPS = {"level": 3.0, "trouble": 3.0, "weights": 3.0, "loss": 1.5, "cost": 1.5, "open": 5.0}
"""Times as high at once that is worth a word, where everything after is beyond everything before."""
RISES = {"level": 10.0, "trouble": 10.0, "weights": 2.5, "loss": 2.0, "cost": 1.5}
"""Times its lowest after the warm-up, however slowly."""
SQUARES = frozenset(["moment2", "sq", "variance", "var"])
"""Words in the names of what grows with the square of a gradient: four times as high is twice as high."""
MOST_PARTINGS = 1
"""Siblings of one family that are told one by one."""
FEW_SIBLINGS, FAR = 5, 4.0
"""Fewer siblings hardly say how far layers go from each other: one of them has to be so many times as high or low."""
SLOWED = 0.7
"""Share of the usual rate below which a run is slow."""
VANISHED = 200.0
"""How many times less is nothing, of what says how much there is of something."""
WORSE = 1.03
"""Times its lowest that a held-out error must be in the end to have turned."""
MUCH_WORSE = 1.05
"""The same for a run to be one to watch."""
LOST = 0.2
"""Share of what was gained that a held-out score must have lost."""
UNSLOWED = 0.85
"""Growth of the last third over that of the third before, from which on a norm of weights grows without an end."""
EXTREMES = frozenset(["min", "max", "best", "lowest", "highest"])
"""Words in the names of one value of many."""
LEARNED = 0.8
"""Times the first losses from which on something has been learned."""
BESIDE = {
    "policy-gradient": ("reward_std", "logp_gap_max", "importance_ratio_max", "policy_entropy", "kl", "cut_share"),
    "preference": ("chosen_logp", "rejected_logp", "policy_entropy", "token_accuracy"),
    "moe": ("router_z_loss",),
}
"""Signals of a kind that are judged with its first signals."""
LONG_STILL = 20
"""Rows in which a norm that never moves has not just been rounded."""
ADDED = frozenset(["lora", "adapter", "adapters", "prompt", "prefix"])
"""Words in the names of weights that are there to be trained."""
FULL = 0.99
"""A score that can hardly rise."""
QUARTER = 0.25
"""Share of a leap by which it is known to have begun."""
NOTHING = 2e-3
"""A score that is no more has never left 0."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the columns of a run show."""

    findings: tuple[ColumnFinding, ...] = ()
    """The gravest first, then in the order of steps."""
    judged: tuple[str, ...] = ()
    unjudged: tuple[str, ...] = ()
    """Columns that are not understood, or have too few values."""


@dataclass(frozen=True)
class _Column:
    signal: str
    nature: Nature
    steps: Indices
    values: Floats
    """The finite ones."""
    course: Course | None


def judged(run: Run, curve: LossCurve, kind: Kind) -> Judgement:
    """What is out of the ordinary in the columns of a run, which of them were judged and which were not."""
    columns: list[_Column] = []
    unjudged: list[str] = []
    elsewhere = {
        signal for name in (kind.name, *kind.traits) for signal in (*SIGNALS_OF.get(name, ()), *BESIDE.get(name, ()))
    }
    found: list[ColumnFinding] = []
    for signal in run.signals:
        nature = nature_of(signal)
        if nature in ("judged elsewhere", "schedule", "clock") or signal.partition("/")[0] in elsewhere:
            continue
        steps, values = values_of(run, signal)
        if nature in ("unknown", "cost", "trouble") and len(values) > 2 and is_clock(values):
            continue
        if nature == "unknown" and len(values) > 2 and values.min() == values.max():
            continue
        if len(values) < SUMMARY:
            continue
        if len(values) < FEW:
            unjudged.append(signal)
            continue
        if nature == "unknown":
            unjudged.append(signal)
        columns.append(_Column(signal, nature, steps, values, course_of(signal, steps, values)))
    of = max(len(columns), 1)
    for column in columns:
        found += _of_column(column, curve, of)
        found += _not_finite(run, column)
    found = _weighed(found, columns, kind, learned=kind.name == "policy-gradient" and has_learned(run))
    found += _of_families(run, columns, of)
    found += _never_found(columns, curve)
    found += _still(columns, curve, kind)
    strongest: dict[str, ColumnFinding] = {}
    for one in sorted(found, key=lambda one: (not one.is_strong, one.step, one.signal not in SIGNALS)):
        strongest.setdefault(one.signal, one)
    slow = [one for one in strongest.values() if one.shows == "slower"]
    for one in slow[1:]:  # they all say the same
        del strongest[one.signal]
    names = tuple(column.signal for column in columns if column.nature != "unknown")
    return Judgement(tuple(strongest.values()), names, tuple(unjudged))


def _weighed(
    found: list[ColumnFinding], columns: Sequence[_Column], kind: Kind, *, learned: bool
) -> list[ColumnFinding]:
    """The findings, less strong where another column says more.

    A held-out error beside a score that is at its best is of a model too sure of itself; an agent is slowed down by
    episodes that get longer; a group that is hardly a part of the weights moves none of the others. Losses of a policy
    that has ``learned`` follow its reward, and so do scores in training; the least or the most of a batch is of one.
    """
    natures = {column.signal: column.nature for column in columns}
    turned = {one.signal for one in found if one.shows == "turns"}
    scores = [column for column in columns if column.nature == "score" and "train" not in words_of(column.signal)]
    is_at_best = bool(scores) and not any(column.signal in turned for column in scores)
    is_at_best &= any(column.values.max() > max(column.values[0], NOTHING) for column in scores)
    whole = next((float(np.median(one.values)) for one in columns if one.signal == "param_norm"), 0.0)
    small = {one.signal for one in columns if one.nature == "weights" and one.values[-1] < SMALLEST_SHARE * whole}

    def counts(one: ColumnFinding) -> bool:
        nature = natures[one.signal]
        words = set(words_of(one.signal))
        if one.signal in small or (nature == "loss" and words & EXTREMES):
            return False
        if learned and nature in ("loss", "score") and not words & HELD_OUT:
            return False
        return not (nature == "error" and is_at_best) and (nature not in ("rate", "cost") or kind.loss_measures)

    return [one if counts(one) else replace(one, is_strong=False) for one in found]


def _of_column(column: _Column, curve: LossCurve, of: int) -> Iterator[ColumnFinding]:
    """What one column shows by itself."""
    course, nature = column.course, column.nature
    if nature in ("error", "score"):
        yield from _turns(column, of)
    elif nature == "trouble":
        yield from _from_nothing(column)
    elif nature in ("level", "weights"):
        yield from _to_nothing(column)
    if course is None:
        return
    if nature in ("level", "loss", "cost", "weights", "trouble"):
        yield from _higher(column, course, of)
    if nature == "rate" and course.is_positive:
        yield from _slower(column, course, of)
    if nature == "spread" and course.is_positive and (change := course.vanishes(times=VANISHED)) is not None:
        yield _finding(column, course, change, "vanishes", "next to nothing", is_strong=True)
    if nature in ("level", "weights") and course.is_positive:
        least = math.log(VANISHED)
        change = _surprising(course.leap(up=False, least=least), course.rise(up=False, least=least), of)
        if change is not None:
            yield _finding(column, course, change, "vanishes", "next to nothing", is_strong=False)
    if nature in ("spread", "open", "unknown") and course.is_positive:
        least = math.log(LEAPS["open"])
        for up in (True, False):
            change = _surprising(course.leap(up=up, least=least), None, of)
            if change is not None:
                yield _finding(column, course, change, "leaps", _times(change), is_strong=False)


def _higher(column: _Column, course: Course, of: int) -> Iterator[ColumnFinding]:
    """A column that is worse the higher, and is much higher in the end."""
    nature = column.nature
    power = 2 if nature == "level" and not SQUARES.isdisjoint(words_of(column.signal)) else 1
    leap_by, rise_by = LEAPS[nature] ** power, RISES[nature] ** power
    unit = math.log if course.is_positive else float
    leap, rise = course.leap(up=True, least=unit(leap_by)), course.rise(up=True, least=unit(rise_by))
    if nature == "weights" and rise is not None and not _unslowed(course):
        rise = None
    change = _surprising(leap, rise, of)
    if change is None:
        return
    shows = "leaps" if change is leap else "rises"
    yield _finding(column, course, change, shows, _times(change), is_strong=course.is_positive)


def _slower(column: _Column, course: Course, of: int) -> Iterator[ColumnFinding]:
    """A rate that has fallen by a third, for good or bit by bit."""
    least = -math.log(SLOWED)
    rise = course.rise(up=False, least=least)
    change = _surprising(course.leap(up=False, least=least), rise, of)
    if change is None:
        change = _surprising(course.early_fall(least=least), None, of)
    if change is not None:
        step = int(course.steps[change.row]) if change is rise else _step_of_fall(column, course, change)
        yield _finding(column, course, change, "slower", f"{1 - change.factor:.0%} less", is_strong=True, step=step)
        return
    change = course.decline(least=least)
    if change is not None and change.chance * of <= ALARM:
        step = int(course.steps[change.row])
        text = (
            f"{column.signal} {_number(change.before)} at step {step}, and down to {_number(change.after)} bit by bit"
        )
        yield ColumnFinding(signal=column.signal, step=step, shows="slower", text=text, is_strong=True, lasts=False)


def _unslowed(course: Course) -> bool:
    """Whether the last third grows no less than the one before it: what approaches a level slows."""
    third, last = (course.count - 3) // 3, course.count - 3
    a, b, c = (float(np.median(course.medians[at : at + 3])) for at in (last - 2 * third, last - third, last))
    return c - b >= UNSLOWED * (b - a)


def _surprising(leap: Change | None, rise: Change | None, of: int) -> Change | None:
    """The first of the two that the column's own ways do not bring about."""
    return next((one for one in (leap, rise) if one is not None and one.chance * of <= ALARM), None)


def _turns(column: _Column, of: int) -> Iterator[ColumnFinding]:
    """A held-out error that is far above its lowest in the end, or a score that lost much of what it had gained."""
    values = column.values
    is_error = column.nature == "error"
    if is_error and values.min() <= 0:
        return
    heights = np.log(values) if is_error else -values
    width = max(min(len(heights) // 10, 10), 3)
    levels = np.median(np.lib.stride_tricks.sliding_window_view(heights, width), axis=1)
    if len(levels) < 2 * width:
        return
    lowest = int(np.argmin(levels[:-width]))
    end = float(levels[-1])
    rise = end - float(levels[lowest])
    if is_error:
        least = math.log(WORSE)
    else:
        gained = float(levels[: lowest + 1].max()) - float(levels[lowest])
        least = max(LOST * gained, LOST / 4 * abs(float(levels[lowest])))
    second = np.diff(heights, 2)
    noise = max(1.4826 * float(np.median(np.abs(second))) / math.sqrt(6), 1e-3 * float(np.abs(heights).max()), 1e-9)
    chance = two_sided(rise / noise) * len(heights) / width
    if rise < least or rise <= 0 or chance * of > ALARM or (levels[-width:] < levels[lowest] + rise / 2).any():
        return
    began = lowest + int(np.argmax(levels[lowest:] >= levels[lowest] + rise / 4))
    best = int(np.argmin(heights))  # told are the values as they were logged; the medians are what is judged
    best_step = int(column.steps[best])
    text = f"{column.signal} {_number(values[best])} at its best, at step {best_step}, {_number(values[-1])} in the end"
    is_strong = not is_error or rise >= math.log(MUCH_WORSE)
    yield ColumnFinding(
        signal=column.signal, step=int(column.steps[began]), shows="turns", text=text, is_strong=is_strong, lasts=True
    )


def _from_nothing(column: _Column) -> Iterator[ColumnFinding]:
    """A count or share of what should not be, that was nothing for long and is there to the end."""
    values = column.values
    there = values > 0 if is_whole(values) else values > (0.01 if is_share(values) else 0)
    if not there.any():
        return
    first = int(np.argmax(there))
    lasting = max(len(values) // 10, FEW)
    if first < max(len(values) // 20, FEW) or len(values) - first < lasting or there[-lasting:].mean() < 0.8:
        return
    step, end = int(column.steps[first]), float(np.median(values[-lasting:]))
    text = f"{column.signal} 0 before step {step}, {_number(end)} in the end"
    yield ColumnFinding(signal=column.signal, step=step, shows="appears", text=text, is_strong=True, lasts=True)


def _to_nothing(column: _Column) -> Iterator[ColumnFinding]:
    """A size that is exactly 0 from a row to the end, and was not before."""
    there = np.flatnonzero(column.values != 0)
    lasting = max(len(column.values) // 10, FEW)
    if not len(there) or there[-1] + 1 > len(column.values) - lasting or len(there) < max(0.9 * (there[-1] + 1), FEW):
        return
    step = int(column.steps[there[-1] + 1])
    usual = float(np.median(column.values[: there[-1] + 1]))
    text = f"{column.signal} {_number(usual)} before step {step}, exactly 0 since"
    yield ColumnFinding(signal=column.signal, step=step, shows="vanishes", text=text, is_strong=True, lasts=True)


def _not_finite(run: Run, column: _Column) -> Iterator[ColumnFinding]:
    """Values that are NaN or infinite after finite ones; those of the gradient norm are incidents, or overflows."""
    if column.signal == "grad_norm":
        return
    steps, values = run.series(column.signal)
    bad = ~np.isfinite(values)
    if len(values) == len(column.values) or not bad.any():
        return
    first = int(np.argmax(bad))
    lasting = max(len(values) // 10, FEW)
    lasts = bool(bad[-min(lasting, 3) :].all())
    text = f"{column.signal} is not finite in {int(bad.sum()):,} of {len(bad):,} rows, first at step {steps[first]}"
    is_strong = lasts and bool(bad[-lasting:].mean() > 0.9) and first >= FEW
    is_strong |= column.nature == "error" and bool(bad[first:].all()) and first >= FEW  # the weights as they are now
    yield ColumnFinding(
        signal=column.signal,
        step=int(steps[first]),
        shows="not-finite",
        text=text,
        is_strong=is_strong,
        lasts=lasts,
    )


def _of_families(run: Run, columns: Sequence[_Column], of: int) -> Iterator[ColumnFinding]:
    """Siblings that part from the others, and those that leap alone."""
    natures = {column.signal: column.nature for column in columns}
    for family in families(run, [column.signal for column in columns if column.nature != "trouble"]):
        siblings = f"its {len(family.names) - 1} siblings"
        if (copy := copies_part(family)) is not None:
            step = int(family.steps[copy.row])
            text = f"{copy.signal} is not the same as {siblings} since step {step}: {copy.change.after:.2g} apart"
            yield ColumnFinding(
                signal=copy.signal, step=step, shows="copies-part", text=text, is_strong=True, lasts=True
            )
            continue
        partings = [one for one in part(family) if one.change.chance * of <= ALARM]
        for one in partings[:MOST_PARTINGS]:
            step = int(family.steps[one.row])
            more = f", and so do {len(partings) - 1} others" if len(partings) > 1 else ""
            text = f"{one.signal} parts from {siblings} about step {step}: {_times(one.change)} against them{more}"
            is_strong = natures[one.signal] not in ("unknown", "open", "score", "error") and family.is_numbered
            is_strong &= len(family.names) >= FEW_SIBLINGS or abs(math.log(one.change.factor)) >= math.log(FAR)
            yield ColumnFinding(signal=one.signal, step=step, shows="parts", text=text, is_strong=is_strong, lasts=True)
        is_of_sizes = natures[family.names[0]] in ("level", "weights", "cost", "rate")
        if is_of_sizes and (leaps := leaps_alone(family)) is not None:
            first = int(family.steps[leaps.rows[0]])
            text = (
                f"{leaps.signal} leaps alone in {len(leaps.rows)} rows, first at step {first}, up to "
                f"{leaps.highest:.3g} times as high against {siblings}"
            )
            lasts = bool(leaps.rows[-1] >= len(family.steps) - max(len(family.steps) // 10, FEW))
            yield ColumnFinding(
                signal=leaps.signal, step=first, shows="leaps-alone", text=text, is_strong=False, lasts=lasts
            )


def _still(columns: Sequence[_Column], curve: LossCurve, kind: Kind) -> Iterator[ColumnFinding]:
    """Norms of weights or updates that never move, and gradients that never come, while others do.

    In fine-tuning much is frozen on purpose, but not what was added.
    """
    norms = [column for column in columns if _should_move(column) and len(column.values) >= LONG_STILL]
    still = [column for column in norms if column.values.min() == column.values.max()]
    still = [column for column in still if column.nature == "weights" or column.values[0] == 0]
    others = len(norms) - len(still)
    for column in still:
        if others and column.signal in SIGNALS:  # of all weights: where a part moves, it is rounded
            continue
        if is_frozen(column.signal, [each.signal for each in columns]):
            continue
        is_added = not ADDED.isdisjoint(words_of(column.signal))
        may_be_still = kind.name in ("fine-tuning", "preference")
        is_strong = is_added or (not may_be_still and (others >= len(still) or not _has_learned(curve)))
        text = f"{column.signal} never moves: {_number(float(column.values[0]))} in all of {len(column.values):,} rows"
        if others:
            text += f", while {others} others do"
        yield ColumnFinding(
            signal=column.signal,
            step=int(column.steps[0]),
            shows="never-moves",
            text=text,
            is_strong=is_strong,
            lasts=True,
        )


def _should_move(column: _Column) -> bool:
    """Whether it is of weights, or of gradients of a part of them."""
    is_of_gradients = column.nature == "level" and not {"grad", "gradient", "gnorm"}.isdisjoint(words_of(column.signal))
    return column.nature == "weights" or (is_of_gradients and column.signal != "grad_norm")


def _has_learned(curve: LossCurve) -> bool:
    losses = curve.losses[curve.finite]
    tenth = max(len(losses) // 10, 1)
    return len(losses) > 0 and bool(np.median(losses[-tenth:]) < LEARNED * np.median(losses[:tenth]))


def _never_found(columns: Sequence[_Column], curve: LossCurve) -> Iterator[ColumnFinding]:
    """Scores that never leave 0, or where they began, all of them, while the loss falls."""
    scores = [column for column in columns if column.nature == "score" and len(column.values) >= 20]
    shares = [column for column in scores if is_share(column.values)]
    none = [column for column in shares if column.values.max() <= NOTHING or _is_stuck(column.values)]
    if not none or len(none) < len(shares) or not _has_learned(curve):
        return
    more = f", as {len(none) - 1} more" if len(none) > 1 else ""
    level = _number(float(np.median(none[0].values)))
    text = f"{none[0].signal} never leaves {level} while the loss falls{more}"
    yield ColumnFinding(
        signal=none[0].signal,
        step=int(none[0].steps[0]),
        shows="never-leaves-zero",
        text=text,
        is_strong=True,
        lasts=True,
    )


def _is_stuck(values: Floats) -> bool:
    """Whether a score never changes, and is no full one."""
    return bool(values.min() == values.max() and values[0] < FULL)


def _finding(
    column: _Column,
    course: Course,
    change: Change,
    shows: str,
    how: str,
    *,
    is_strong: bool,
    step: int | None = None,
) -> ColumnFinding:
    if step is None:
        step = _step_of_leap(column, course, change) if shows == "leaps" else int(course.steps[change.row])
    when = "in the end" if shows == "rises" else "since"
    text = f"{column.signal} {_number(change.before)} before step {step}, {_number(change.after)} {when}: {how}"
    return ColumnFinding(signal=column.signal, step=step, shows=shows, text=text, is_strong=is_strong, lasts=True)


def _step_of_leap(column: _Column, course: Course, change: Change) -> int:
    """The step at which a leap begins: the first of two rows in a row that are a quarter of the way, if there are."""
    first = int(np.searchsorted(column.steps, course.steps[max(change.row - 1, 0)]))
    values = column.values[first : first + (course.gap + 3) * course.size]
    before, after, heights = change.before, change.after, values
    if course.is_positive:
        before, after, heights = np.log(before), np.log(after), np.log(np.maximum(values, 1e-300))
    is_over = (heights - before) / (after - before) > QUARTER
    rows = np.flatnonzero(is_over[:-1] & is_over[1:])
    return int(column.steps[first + rows[0]]) if len(rows) else int(course.steps[change.row])


def _step_of_fall(column: _Column, course: Course, change: Change) -> int:
    """The step that parts the rows nearer to the level before from those nearer to the level after best: rates are
    noisy, and two rows in a row may be low by chance."""
    first = int(np.searchsorted(column.steps, course.steps[max(change.row - 1, 0)]))
    values = column.values[first : first + (2 * course.gap + 3) * course.size]
    before, after = math.log(change.before), math.log(change.after)
    ways = (np.log(np.maximum(values, 1e-300)) - before) / (after - before) - 0.5
    parted = np.cumsum(np.clip(ways, -0.5, 0.5))  # a stall is one row
    row = min(int(np.argmin(parted)) + 1, len(values) - 1) if parted.min() < 0 else 0
    return int(column.steps[first + row])


def _times(change: Change) -> str:
    if change.before <= 0 or change.after <= 0:
        return "never so before"
    factor = change.factor if change.factor > 1 else 1 / change.factor
    return f"{factor:.3g} times as {'high' if change.factor > 1 else 'low'}"


def _number(value: float) -> str:
    return f"{value:.4g}"


def begun_first(findings: Sequence[ColumnFinding]) -> ColumnFinding | None:
    """The first in time of those that were not so from the beginning."""
    begun = [one for one in findings if one.shows not in ("never-moves", "never-leaves-zero", "turns", "slower")]
    return min(begun, key=lambda one: one.step, default=None)
