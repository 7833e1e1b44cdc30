"""Finds what a run shows by itself: unreliable metrics, incidents, and a verdict on its loss curve.

A trajectory is told in steps, as in the live guard: `fast` is back within 50 steps, `slow` within 500. Where rows are
too far apart to say which, none is told. Whether a rise calls for action depends on the share of the log it lasted.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from sealegs.diagnosis import interventions, metrics
from sealegs.diagnosis.columns.judged import begun_first, judged
from sealegs.diagnosis.contract import ColumnFinding, Findings, Health, Problem, Standing
from sealegs.diagnosis.curve import live_statistic
from sealegs.diagnosis.curve.epochs import epoch_steps, is_at_boundaries
from sealegs.diagnosis.curve.few_rows import are_parted, falls, is_any_order
from sealegs.diagnosis.curve.held_out import goes_on_falling, learns_by_heart
from sealegs.diagnosis.curve.loss_curve import SHORTEST_PART, Floats, Indices, LossCurve, beside, curve_of, passing
from sealegs.diagnosis.curve.norm_leaps import norm_breaks, norm_leaps, norm_rise
from sealegs.diagnosis.curve.repeated import without_repeats
from sealegs.diagnosis.curve.rises import SMALLEST, heights_of, small_rises
from sealegs.diagnosis.curve.saw_tooth import SawTooth, is_of_the_tooth, saw_tooth
from sealegs.diagnosis.curve.stretches import (
    Stretch,
    flat,
    guessed,
    has_fallen,
    is_as_before,
    nonfinite,
    not_finite_rows,
    overflowed,
    risen,
)
from sealegs.diagnosis.damage import is_cleared, why_cleared
from sealegs.diagnosis.first_signals.judged import of_kind
from sealegs.diagnosis.first_signals.reward import FEWEST_RISING, has_learned
from sealegs.diagnosis.first_signals.track import in_words
from sealegs.diagnosis.incident_order import BENIGN, NUMERIC, PRIORITY, WATCHED, gravity
from sealegs.diagnosis.kind import Kind, kind_of, vocabulary
from sealegs.diagnosis.live_findings import constant_scale, stalls, standing
from sealegs.diagnosis.not_fallen import at_chance, is_warming_up, not_fallen, stands_still
from sealegs.errors import ConfigError
from sealegs.incidents import AVERAGED, BEFORE, FAST, FEWEST, SLOW, USUAL, Incident
from sealegs.record.columns import Mask
from sealegs.record.interventions import skipped_steps
from sealegs.record.run import Run

RULES = ("calibrated", "textbook")
SOON_AFTER = 64
"""Rows after an incident that are looked at first."""
FEWEST_POINTS = SHORTEST_PART
"""The fewest losses from which a curve can be called healthy: what is usual is not known from fewer."""
FEWEST_FALLING = 8
"""The fewest from which a curve that falls beyond doubt can."""
FEW_ROWS = 64
"""Losses below which a rise must be more than their order by chance, to ask for an action."""
GRADUAL, LITTLE = ("spike", "level_shift", "drift"), 0.06
"""Kinds of rises, and the height from which on one that stays calls for action."""
SURE, NORMAL = 4.0, 1.4826
"""Standard errors that a rise must be above the few rows before it to ask for an action, and what makes a median change
a deviation."""
UNHEARD_OF, BEYOND_ALL = 10.0, 2.0
"""Times the median before, and times the largest before, from which a leap of a loss that measures nothing counts."""
BLIND = ("constant", "hovers")
"""Problems with which a loss says nothing about a run."""
OVERCOME = "the run went back to before it and has passed it since: the present weights have not gone through it"
HELD = "the last update was skipped, and no weight has gone through it"
GIVEN_UP = "the attempt in which it happened was given up, and the last one has not come past that step yet"
CLEAR = math.log(2.0)
"""A leap of one row that the live statistic has no say in, and twice that of two rows: a hard batch leaps by less, and
comes alone."""
NO_WORSE = (
    "the held-out loss has gone on falling: harder data, or a loss that is made up otherwise, look so, and no damage"
)
QUARTER_MORE = 1.25
"""Times the loss before, up to which a rise is small enough for that."""
FALLING = 3
"""Rows that are the loss before where there are no ten."""
LEAD = 4
"""Rows by which a gradient norm may leap before the loss does."""
MOST_TOLD = 3
"""The most first signals whose course is told where nothing is wrong."""
MOST_NOTICES = 3
"""The most leaps of the gradient norm, and the most findings in columns, that are told one by one."""
IN_A_ROW = 3
"""Losses in a row, or with few between them, that are not finite and call for action: as many as in the live guard."""


@np.errstate(divide="ignore", invalid="ignore", over="ignore")  # NaN in, NaN out: the code below looks for NaN
def look(
    run: Run,
    *,
    rules: str = "calibrated",
    most_folded: int = live_statistic.MOST_FOLDED,
    kind: str | None = None,
) -> Findings:
    """Judge a run by what it shows by itself; by the whole fold if it has at most ``most_folded`` rows.

    ``kind`` is what the user says about it, where its signals do not tell.
    """
    if rules not in RULES:
        raise ConfigError(f"rules={rules!r}: one of {', '.join(RULES)}")
    whole = curve_of(run)
    curve = without_repeats(run, whole)
    known = kind_of(run, curve, said=kind)
    problems = tuple(one for one in metrics.problems_of(run, whole) if not _is_of_its_kind(one, known))
    found = _stretches(run, curve, rules, most_folded) if len(curve.losses) else []
    risen = len(found)
    if not (known.loss_measures or run.manifest.created):  # nobody has acted on its rises, as a guard may have
        found = [one for one in found if one.kind in NUMERIC or _is_unheard_of(curve, one)]
    columns = judged(run, curve, known)
    norms = beside(run, curve, "grad_norm")
    repeated = saw_tooth(run, curve)
    breaks = np.array([one.first for one in found if one.kind == "nonfinite"], dtype=np.int64)
    incidents = tuple(_incident(curve, norms, one, breaks, number) for number, one in enumerate(found, 1))
    findings = Findings(
        run=run,
        problems=problems,
        incidents=incidents,
        verdict="unknown",
        because="",
        notices=(*_notices(run, curve, incidents, repeated), *_of_columns(columns.findings)),
        standing=(*of_kind(run, known), *standing(run, _counting(incidents, known), lead=LEAD * curve.interval)),
        columns=columns.findings,
        judged=columns.judged,
        unjudged=columns.unjudged,
        unseen=(*_left_out(whole, curve), *_unseen(run, curve, rules)),
        done=interventions.done_in(run),
        kind=known,
        uncounted=risen - len(found),
    )
    tooth = repeated if _is_of_all(curve, found, repeated) else None
    grave = [] if tooth else _grave(findings, curve, found)
    cleared = tuple(incident for incident in grave if is_cleared(findings, incident))
    damage = [incident for incident in grave if incident not in cleared]
    periodic = str(tooth) if tooth is not None and not tooth.is_explained else ""
    findings = replace(findings, cleared=cleared, unlearned=_unlearned(findings, curve), periodic=periodic)
    verdict, because = interventions.weighed(_verdict(findings, curve, found, damage, tooth), findings.done)
    if findings.standing and verdict == "healthy" and not known.loss_measures:
        because = ""  # how its first signals went is what stands
    if any(one.is_grave for one in findings.standing) and verdict != "act":
        verdict, because = "act", "; ".join(filter(None, (_first_of(findings.standing), because)))
    elif findings.standing and verdict != "act":
        verdict, because = "watch", "; ".join(filter(None, (_first_of(findings.standing), because)))
    strong = tuple(one for one in findings.columns if one.is_strong)
    if strong and verdict in ("healthy", "unknown"):
        verdict, because = "watch", "; ".join(filter(None, (_strongest(strong), because)))
    elif strong:
        first = _before_the_loss(strong, incidents)
        because += (
            f"; first out of the ordinary: {first.signal} at step {first.step}"
            if first is not None
            else f"; beside the loss: {strong[0].text}"
        )
    if verdict == "healthy" and (lacking := findings.kind.lacks):
        verdict, because = "unknown", f"nothing out of the ordinary in what was logged, but {lacking}"
    in_columns = (Standing(signal=one.signal, step=one.step, text=one.text) for one in strong)
    return replace(findings, verdict=verdict, because=because, standing=(*findings.standing, *in_columns))


def _strongest(strong: Sequence[ColumnFinding]) -> str:
    """The first of the strong findings in columns, and how many there are."""
    others = len(strong) - 1
    more = f"; and {others} more column{'s' if others > 1 else ''} out of the ordinary" if others else ""
    return strong[0].text + more


def _before_the_loss(strong: Sequence[ColumnFinding], incidents: Sequence[Incident]) -> ColumnFinding | None:
    """The column that was first out of the ordinary, if it was before the loss."""
    first = begun_first(strong)
    onset = min((it.start for it in incidents if it.kind not in BENIGN), default=-1)
    return first if first is not None and first.step < onset else None


def _of_columns(columns: Sequence[ColumnFinding]) -> tuple[str, ...]:
    """What is told of columns beside the verdict: what is not strong."""
    told = [one.text for one in columns if not one.is_strong]
    more = f"; and {len(told) - MOST_NOTICES} more columns" if len(told) > MOST_NOTICES else ""
    return (*told[: MOST_NOTICES - 1], told[MOST_NOTICES - 1] + more) if len(told) >= MOST_NOTICES else tuple(told)


def _is_of_its_kind(problem: Problem, kind: Kind) -> bool:
    """Whether a loss that says nothing is what such a run has, and its first signals say how it is."""
    return problem.signal == "loss" and problem.kind in BLIND and not (kind.loss_measures or kind.missing)


def _counting(incidents: Sequence[Incident], kind: Kind) -> tuple[Incident, ...]:
    """The incidents that say something about the run: of a loss that measures nothing, what is not finite alone."""
    return tuple(it for it in incidents if kind.loss_measures or it.kind in NUMERIC)


def onsets(run: Run, whole: LossCurve, *, rules: str, rows: int) -> list[int]:
    """The steps at which incidents begin in the last ``rows`` rows of the curve: to compare sets of rules."""
    curve = LossCurve(whole.steps[-rows:], whole.segments[-rows:], whole.losses[-rows:])
    return [int(curve.steps[one.first]) for one in _stretches(run, curve, rules)] if len(curve.losses) else []


def closed(run: Run, incident: Incident) -> Incident:
    """An incident of hindsight, whose end is its last bad row, as the live guard would have it: its end is the last of
    the ten rows that show that the loss is back."""
    if incident.end is None or incident.recovery_loss is None:
        return incident
    after = run.steps > incident.end
    steps = run.steps[after][np.isfinite(run.column("loss", copy=False)[after])][:AVERAGED]
    return replace(incident, end=int(steps[-1])) if len(steps) else incident


def _stretches(run: Run, curve: LossCurve, rules: str, most_folded: int = live_statistic.MOST_FOLDED) -> list[Stretch]:
    bad = not_finite_rows(run, curve)
    broken = [_if_held(run, curve, one, bad) for one in nonfinite(run, curve)] + overflowed(run, curve)
    if rules == "textbook":
        return sorted(broken + live_statistic.by_the_book(curve))
    grown = [one for one in risen(run, curve) if not _is_below_before(curve, one)]
    surprising = [
        one
        for one in live_statistic.surprising(run, curve, most_folded)
        if not is_as_before(curve, one.first) and not _is_one_batch(curve, one)
    ]
    judged_from = live_statistic.judges_from(curve)
    sudden = [
        one
        for one in grown
        if one.first < judged_from
        or one.leap >= (CLEAR if one.first == one.last else CLEAR / 2)
        or one.kind == "resume_jump"
        or one.last - one.first + 1 >= live_statistic.SHORT
        or any(_overlap(one, other) for other in surprising)
    ]
    found = _joined([one for one in sudden if one.kind != "drift"] + surprising)
    found = [one for one in found if not any(_is_within(one, other) for other in broken)] + broken
    found += [one for one in sudden if one.kind == "drift"]
    if not any(one.is_open for one in found):
        found += flat(run, curve)
    return sorted([part for one in found for part in _by_attempt(curve, one)] + epoch_steps(run, curve))


def _if_held(run: Run, curve: LossCurve, one: Stretch, bad: Mask) -> Stretch:
    """A stretch of values that are not finite, marked where its updates are known to have been skipped, the weights are
    not known to be spoilt, and it has too few for an alarm."""
    if not one.is_open or _count(bad, one) >= IN_A_ROW:
        return one
    return one._replace(is_held=_is_kept_out(run, curve, one))


def _count(bad: Mask, one: Stretch) -> int:
    return int(np.count_nonzero(bad[one.first : one.last + 1]))


def _is_kept_out(run: Run, curve: LossCurve, one: Stretch) -> bool:
    """Whether all updates of a stretch are known to have been skipped, and no weight is known to be spoilt."""
    here = slice(one.first, one.last + 1)
    is_skipped = set(curve.steps[here].tolist()) <= set(skipped_steps(run.events))
    is_spoilt = np.isinf(beside(run, curve, "param_norm")[here])
    is_spoilt |= np.isin(beside(run, curve, "params_finite")[here], (0.0, np.inf))
    return is_skipped and not is_spoilt.any()


def _is_below_before(curve: LossCurve, one: Stretch) -> bool:
    """Whether a shift or a drift nowhere exceeds what stood before it, as where a few rows of a loss that falls were
    low: it has lost nothing."""
    if one.kind not in ("level_shift", "drift") or one.leap:
        return False
    before = curve.finite_before(one.first, USUAL)
    highest = float(np.nanmax(curve.losses[one.first : one.last + 1]))
    earlier = before[-2 * AVERAGED : -AVERAGED]  # where it falls they are higher still, and after a leap they are not
    if len(before) < FEWEST or (len(earlier) and highest > float(np.median(earlier))):
        return False
    return highest <= _level(before)[0]


def _is_unheard_of(curve: LossCurve, one: Stretch) -> bool:
    """Whether a loss leaps far beyond all that it has done so far. Whatever it measures, that is worth a look."""
    before = np.abs(_finite(curve.losses[: one.first]))
    if one.kind != "spike" or len(before) < FEWEST:
        return False
    peak = float(np.nanmax(np.abs(curve.losses[one.first : one.last + 1])))
    return peak >= max(UNHEARD_OF * float(np.median(before[-USUAL:])), BEYOND_ALL * float(before.max()))


def _is_one_batch(curve: LossCurve, one: Stretch) -> bool:
    """Whether a single row is a little higher than those beside it: a batch that is harder than most."""
    row = one.first
    beside = _finite(np.concatenate([curve.losses[max(row - AVERAGED, 0) : row], curve.losses[row + 1 :][:AVERAGED]]))
    if one.kind != "spike" or row != one.last or row == len(curve.losses) - 1 or not len(beside) or beside.min() <= 0:
        return False
    return bool(curve.losses[row] < math.exp(SMALLEST) * np.median(beside))


def _by_attempt(curve: LossCurve, one: Stretch) -> Iterator[Stretch]:
    """A stretch in parts, where the run went back behind its beginning: it did not heal because of that.

    The first rows of an attempt, by whose mean a stretch before it seems to end, are no part of their own.
    """
    first = one.first
    for row in (row for row in curve.resumes if one.first < row <= one.last and curve.steps[row] <= curve.steps[first]):
        yield Stretch(first, row - 1, one.kind)
        first = row
    is_own = one.is_open or one.kind == "nonfinite" or one.last - first + 1 >= AVERAGED
    if first == one.first or is_own:
        yield one._replace(first=first)


def _overlap(one: Stretch, other: Stretch) -> bool:
    return one.first <= other.last and other.first <= one.last


def _is_within(one: Stretch, other: Stretch) -> bool:
    """Whether it is another's doing: at no row that is not the other's, and of its kind, unless the other is not
    finite, from which anything follows. An overflow, or what is not finite, that the live statistic saw last longer is
    the same one."""
    if one.kind == other.kind and one.kind in ("overflow", "nonfinite"):
        return _overlap(one, other)
    is_alike = other.kind in (one.kind, "nonfinite")
    return is_alike and other.first <= one.first and one.last <= other.last


def _joined(found: Sequence[Stretch]) -> list[Stretch]:
    """Merge stretches that share rows."""
    joined: list[Stretch] = []
    for one in sorted(found):
        if joined and one.first <= joined[-1].last:
            before = joined.pop()
            kind = min(before.kind, one.kind, key=PRIORITY.index)
            one = Stretch(before.first, max(before.last, one.last), kind, before.is_open or one.is_open)
        joined.append(one)
    return joined


def _incident(curve: LossCurve, norms: Floats, one: Stretch, breaks: Indices, number: int) -> Incident:
    """The incident of a stretch, with what was usual before it and how it ended."""
    before = curve.finite_before(one.first, USUAL)
    after = _finite(curve.losses[curve.after(one.last, SOON_AFTER)])[:AVERAGED]
    within = slice(one.first, one.last + 1)
    losses = curve.losses[within]
    is_broken = one.kind == "nonfinite"
    peak = int(np.argmax(np.where(np.isfinite(losses), losses, -np.inf if not is_broken else np.inf)))
    pre_loss, usual, limit = _level(before)
    trajectory = _trajectory(curve, one, breaks, limit)
    is_back = not one.is_open and len(after) > 0 and one.kind not in ("plateau", "epoch_step")
    is_back = is_back and not _is_cut_off(curve, one)  # an attempt that was given up did not heal
    reached = norms[max(one.first - LEAD, 0) : one.last + 1]
    reached = reached[~np.isnan(reached)]
    return Incident(
        number=number,
        start=int(curve.steps[one.first]),
        kind=one.kind,
        pre_loss=pre_loss,
        usual=usual,
        limit=limit,
        peak=int(curve.steps[one.first + peak]),
        peak_loss=float(losses[peak]) if np.isfinite(losses[peak]) else math.nan,
        grad_norm_peak=float(reached.max()) if len(reached) else math.nan,
        end=None if one.is_open and trajectory is None else int(curve.steps[one.last]),
        trajectory=trajectory,
        recovery_loss=_mean(after) if is_back else None,
    )


def _level(before: Floats) -> tuple[float, float, float]:
    """The loss before, what was usual, and the limit below which it is again.

    Where the losses before fell, their mean is of a time long past, and may be above all that followed: then the last
    few count.
    """
    if len(before) < FEWEST:
        level = min(_mean(before), _mean(before[-FALLING:]))
        return level, level, math.nan
    recent, lately = before[-BEFORE:], float(np.median(before[-AVERAGED:]))
    noise = 1.4826 * float(np.median(np.abs(np.diff(recent)))) / math.sqrt(2)
    if float(recent.mean()) - lately > noise:
        return lately, lately, lately + 0.5 * float(np.std(before[-AVERAGED:]))
    return _mean(recent), _mean(before), _mean(before) + 0.5 * float(before.std())


def _trajectory(curve: LossCurve, one: Stretch, breaks: Indices, limit: float) -> str | None:
    if one.kind in ("plateau", "epoch_step", "overflow") or (not one.is_open and _is_cut_off(curve, one)):
        return None
    if one.is_held:
        return None
    is_back, shortest, longest = _steps_until_back(curve, one, limit)
    if one.is_open:
        if one.kind == "nonfinite" or _diverges(curve, one):
            return "divergent"
        return "lingering" if shortest > SLOW else None
    if np.any((breaks > one.last) & (breaks <= one.last + AVERAGED)):
        return "divergent"
    if is_back and longest <= FAST:
        return "fast"
    if is_back and shortest > FAST and longest <= SLOW:
        return "slow"
    return "lingering" if shortest > SLOW else None


def _is_cut_off(curve: LossCurve, one: Stretch) -> bool:
    """Whether the run went back before there were rows that show how it would have gone on."""
    end = int(np.searchsorted(curve.segments, curve.segments[one.last], side="right"))
    return end < len(curve.segments) and end - one.last - 1 < AVERAGED and curve.steps[end] <= curve.steps[one.first]


def _steps_until_back(curve: LossCurve, one: Stretch, limit: float) -> tuple[bool, int, int]:
    """Whether the mean of ten rows came back under the limit, and the fewest and the most steps that this took.

    What is between two rows is not known. Without a limit the end of the stretch counts.
    """
    apart = np.diff(curve.steps[one.first : one.last + 1])
    steps = int(apart[apart > 0].sum())  # a run may have gone back in it
    is_back = True
    if not one.is_open and not math.isnan(limit) and (row := _row_back(curve, one.last, limit)) is not None:
        is_back, at = row
        steps += max(int(curve.steps[at] - curve.steps[one.last]) - curve.interval, 0)
    return is_back, steps + 1, steps + 2 * curve.interval - 1


def _row_back(curve: LossCurve, last: int, limit: float) -> tuple[bool, int] | None:
    """Whether the mean of ten rows after a row came back under a limit, and the first of the ten; if it did not, the
    last row. None where there are fewer than ten."""
    most, after = SOON_AFTER, np.empty(0, np.int64)
    while len(rows := curve.after(last, most)) > len(after):  # it is back soon, mostly
        after = rows
        finite = after[np.isfinite(curve.losses[after])]
        if len(finite) >= AVERAGED:
            means = np.lib.stride_tricks.sliding_window_view(curve.losses[finite], AVERAGED).mean(axis=1)
            if (means <= limit).any():
                return True, int(finite[int(np.argmax(means <= limit))])
        most *= 8
    finite = after[np.isfinite(curve.losses[after])]
    return (False, int(finite[-1])) if len(finite) >= AVERAGED else None


def _is_lasting(curve: LossCurve, one: Stretch) -> bool:
    """Whether a rise lasted so long a part of the log that it is no passing one."""
    return one.last - one.first + 1 > passing(len(curve.losses))[1]


def _diverges(curve: LossCurve, one: Stretch) -> bool:
    """Whether a loss that is not back still climbs, or is above where the run began."""
    rows = curve.finite
    heights = heights_of(curve.losses[rows])
    inside = heights[(rows >= one.first) & (rows <= one.last)]
    third = len(inside) // 3
    if third < 1:
        return False
    end, begin = float(np.median(inside[-third:])), float(np.median(inside[:third]))
    is_long = len(inside) > passing(len(curve.losses))[0]
    is_above_start = end > float(heights[:3].max()) and one.first > 0
    return is_long and (is_above_start or end - begin > SMALLEST)


def _blind(findings: Findings) -> Problem | None:
    """The problem because of which the loss says nothing about the run, if there is one."""
    problems = findings.problems
    return next((problem for problem in problems if problem.signal == "loss" and problem.kind in BLIND), None)


def _is_of_all(curve: LossCurve, found: Sequence[Stretch], tooth: SawTooth | None) -> bool:
    """Whether all rises of a run, of which there are some, are part of a saw-tooth."""
    rises = [one for one in found if one.kind not in BENIGN]
    return bool(rises) and tooth is not None and is_of_the_tooth(curve, tooth, rises)


def _is_nothing(run: Run, signal: str) -> bool:
    """Whether a signal is exactly 0 wherever it was logged."""
    values = run.written(signal).values if signal in run.signals else np.empty(0)
    return len(values) > 0 and not values.any()


def _grave(findings: Findings, curve: LossCurve, found: Sequence[Stretch]) -> list[Incident]:
    """Incidents that call for action as far as the loss shows."""
    _, last = _ends(curve) if len(curve.finite) else (math.nan, math.nan)
    is_blind = _blind(findings) is not None or not findings.kind.loss_measures
    bad = not_finite_rows(findings.run, curve)
    pairs = zip(found, findings.incidents, strict=True)
    asking = [(one, it) for one, it in pairs if _asks_for_action(curve, one, it, last, bad, is_blind=is_blind)]
    asking = [(one, it) for one, it in asking if not _is_no_worse(findings.run, it)]
    asking = [(one, it) for one, it in asking if not _has_passed(findings.run, curve, one, it)]
    return [it for one, it in asking if one.kind not in GRADUAL or not _is_little(curve, one)]


def _has_passed(run: Run, curve: LossCurve, one: Stretch, incident: Incident) -> bool:
    """Whether values that were not finite were kept from the weights, and the loss is back where it was."""
    is_back = incident.recovery_loss is not None and not incident.recovery_loss > incident.limit
    return one.kind == "nonfinite" and not one.is_open and is_back and _is_kept_out(run, curve, one)


def _is_no_worse(run: Run, incident: Incident) -> bool:
    """Whether it is a small rise of the training loss alone: the model gets better on data that are always the same."""
    is_small = 0 < incident.peak_loss <= QUARTER_MORE * incident.pre_loss
    return incident.kind in ("level_shift", "drift") and is_small and goes_on_falling(run, incident.start)


def _verdict(
    findings: Findings, curve: LossCurve, found: Sequence[Stretch], damage: Sequence[Incident], tooth: SawTooth | None
) -> tuple[Health, str]:
    run, incidents, blind = findings.run, findings.incidents, _blind(findings)
    if damage:
        return "act", _told(damage)
    if not findings.kind.loss_measures:
        return _by_first_signals(findings)
    if any(one.kind == "plateau" for one in found) and (guess := guessed(curve, vocabulary(run))):
        told = f"loss stands at ln {guess:,} from the first row to the last: it guesses among {guess:,}"
        return ("watch", f"{told}; the learning rate still rises") if is_warming_up(run) else ("act", told)
    if blind is not None and _is_nothing(run, "loss") and _is_nothing(run, "grad_norm"):
        return "act", f"loss and gradient norm are exactly 0 on all {len(curve.losses)} rows: nothing is learned"
    if still := stands_still(run, curve):
        return "act", still
    if blind is not None:
        rises = [it for it in incidents if it.kind not in BENIGN + WATCHED]
        return ("watch", f"{blind.text}; {_told(rises)}") if rises else ("unknown", blind.text)
    if "loss" not in run.signals:
        return "unknown", "no column looks like a training loss; say which it is: --metric loss=NAME"
    rows = curve.parts[-1]
    is_leap = any(one.kind not in BENIGN + WATCHED and _is_beyond_doubt(curve, one) for one in found)
    if len(rows) < FEWEST_POINTS and not is_leap and (incidents or not falls(curve.losses[rows], FEWEST_FALLING)):
        attempt = " of the last attempt" if len(curve.parts) > 1 else ""
        told = f"1 loss{attempt} is" if len(rows) == 1 else f"{len(rows)} losses{attempt} are"
        return "unknown", f"{told} too few to say; {FEWEST_POINTS} are the least"
    doubtful = [it for it in incidents if it.kind not in BENIGN]
    if doubtful and all(_is_no_worse(run, it) for it in doubtful):
        return "healthy", f"{_told(doubtful)}; but {NO_WORSE}"
    if doubtful and is_at_boundaries(run, curve, [one for one in found if one.kind not in BENIGN]):
        return "healthy", f"all {len(doubtful)} short rises are at the end of an epoch or beside an evaluation"
    if tooth is not None:
        return "healthy" if tooth.is_explained else "watch", f"what rises does so in each period: {tooth}"
    if doubtful:
        changes = dict.fromkeys(why_cleared(findings, incident) for incident in findings.cleared)
        passed = [HELD] if any(one.is_held for one in found) else []
        if all(_is_given_up(curve, one) for one in found if one.kind not in BENIGN):
            is_past = all(_is_overcome(curve, one) for one in found if one.kind not in BENIGN)
            passed = [OVERCOME if is_past else GIVEN_UP]
        return "watch", "; but ".join([_told(doubtful), *changes, *passed])
    first, last = _ends(curve)
    if findings.unlearned:
        is_a_guess = guessed(curve, vocabulary(run)) or has_fallen(curve)
        return "watch" if is_a_guess else "unknown", findings.unlearned
    benign = "; the loss steps down at epochs, as memorised data does" if incidents else ""
    only = " in the loss" if findings.notices or findings.standing or findings.columns else ""
    notice = only + (f"; beside it: {findings.notices[0]}" if findings.notices else "")
    return (
        "healthy",
        f"loss {first:.4g} at first, {last:.4g} in the end, and nothing out of the ordinary{notice}{benign}",
    )


def _unlearned(findings: Findings, curve: LossCurve) -> str:
    """What says that nothing is learned, where nothing else is wrong; empty where something is, or nothing says so."""
    is_judged = findings.kind.loss_measures and not findings.incidents and _blind(findings) is None
    if not is_judged or len(curve.parts[-1]) < FEWEST_POINTS:
        return ""
    if has_fallen(curve):
        return at_chance(findings.run, curve)
    guess = guessed(curve, vocabulary(findings.run))
    return not_fallen(curve) + (f", where ln {guess:,} is that of a guess among {guess:,}" if guess else "")


def _is_beyond_doubt(curve: LossCurve, one: Stretch) -> bool:
    """Whether a few losses have leapt and stayed up beyond doubt: all are above the few before, by more than those
    differ."""
    before, within = curve.finite_before(one.first, FEWEST_FALLING), _finite(curve.losses[one.first : one.last + 1])
    if not one.is_open or len(before) < FEWEST_FALLING or len(within) < FALLING:
        return False
    return bool(within.min() - before.max() > max(before.max() - before.min(), SMALLEST * before.max()))


def _by_first_signals(findings: Findings) -> tuple[Health, str]:
    """The verdict on a run whose loss measures nothing, where nothing calls for action; what stands is told besides."""
    told = [text for name in findings.kind.first if (text := in_words(findings.run, name))]
    if not told and has_learned(findings.run):
        told = [in_words(findings.run, "reward", fewest=FEWEST_RISING)]
    doubtful = _counting(findings.incidents, findings.kind)
    if doubtful:
        return "watch", _told(doubtful)
    if not told:
        return "unknown", findings.kind.lacks or f"too few values of {' and '.join(findings.kind.first)} to say"
    if findings.kind.lacks:
        blind = _blind(findings)
        return "unknown", "; ".join([*told, f"but {findings.kind.lacks}", *([blind.text] if blind else [])])
    rises = findings.uncounted + len(findings.incidents)
    aside = f"; {rises} rise{'s' if rises > 1 else ''} of the loss, which is no measure here" if rises else ""
    notice = f"; beside it: {findings.notices[0]}" if findings.notices else ""
    return "healthy", f"{', '.join(told[:MOST_TOLD])}, and nothing out of the ordinary{aside}{notice}"


def _asks_for_action(
    curve: LossCurve, one: Stretch, incident: Incident, last: float, bad: Mask, *, is_blind: bool
) -> bool:
    """Whether an incident calls for action.

    One in an attempt that was given up does not: the present weights have not gone through it.
    A spike that came down by itself does not, however long it took, nor a shift that was back within 50 steps. Neither
    does a rise in a run that ends no higher than before it, as where tasks are learned one after the other, nor a rise
    of a loss that measures nothing.
    A loss of state at a resume does, even if the run has learned it again: the next resume will lose it again.
    """
    if _is_given_up(curve, one):
        return False
    if one.kind == "nonfinite":
        return (one.is_open and not one.is_held) or _count(bad, one) >= IN_A_ROW
    if one.kind == "overflow":
        return one.is_open or incident.trajectory == "divergent"
    deviation = 0.0 if math.isnan(incident.limit) else 2 * (incident.limit - incident.usual)
    is_back = last <= incident.pre_loss + deviation / math.sqrt(AVERAGED)  # a mean of so many rows is known to this
    is_closed = not one.is_open and (
        one.kind == "spike" or (one.kind == "level_shift" and incident.trajectory == "fast")
    )
    is_over = is_closed or (one.kind != "resume_jump" and is_back)
    if one.kind in BENIGN or one.kind in WATCHED or is_blind:
        return False
    if one.kind != "resume_jump" and (_is_noise(curve, one) or _is_chance(curve, one)):
        return False
    if incident.trajectory == "divergent":
        return True
    has_level = not math.isnan(incident.pre_loss)  # else there is nothing that it shifted from
    return _is_lasting(curve, one) and has_level and not is_over


def _is_noise(curve: LossCurve, one: Stretch) -> bool:
    """Whether a rise is no larger than the noise of its own rows, and of the few before it, makes likely: one low first
    row, or the last dozen of a short log, show no level."""
    begin, end = np.searchsorted(curve.finite, [one.first, one.last + 1])
    heights = heights_of(curve.losses[curve.finite])
    before, within = heights[max(begin - AVERAGED, 0) : begin], heights[begin:end]
    if not len(before) or len(within) < FEWEST:
        return False
    changes = np.abs(np.diff(heights[max(begin - USUAL, 0) : end]))
    noise = float(np.median(changes)) * NORMAL / math.sqrt(2)
    level = max(float(np.median(within)), float(np.median(within[-(len(within) // 3) :])))
    return level - float(np.median(before)) < SURE * noise * math.sqrt(1 / len(before) + 1 / len(within))


def _is_chance(curve: LossCurve, one: Stretch) -> bool:
    """Whether a rise in a short log is what its rows and as many before would show in any order: of a dozen noisy rows
    some are always higher than those before."""
    if len(curve.finite) >= FEW_ROWS:
        return False
    begin, end = np.searchsorted(curve.finite, [one.first, one.last + 1])
    losses = curve.losses[curve.finite]
    before, within = losses[max(begin - max(AVERAGED, end - begin), 0) : begin], losses[begin:end]
    is_parted = len(before) > 1 and len(within) > 1 and are_parted(before, within)
    return not is_parted and is_any_order(np.concatenate([before, within]))


def _is_given_up(curve: LossCurve, one: Stretch) -> bool:
    """Whether the run went back over all of an incident, and the last attempt is long enough to have a verdict of its
    own. A resume that loses state loses it again."""
    if one.kind == "resume_jump" or curve.stands[one.first : one.last + 1].any():
        return False
    return len(curve.segments) - int(np.searchsorted(curve.segments, curve.last_attempt)) >= AVERAGED


def _is_overcome(curve: LossCurve, one: Stretch) -> bool:
    """Whether the run went back over an incident and has passed it since."""
    if not _is_given_up(curve, one):
        return False
    return curve.standing_beyond(int(curve.steps[one.first : one.last + 1].max())) >= AVERAGED


def _is_little(curve: LossCurve, one: Stretch) -> bool:
    """Whether the medians of a stretch and of the end are near the level before: a few very high losses are no level,
    and a few percent are worth a look."""
    begin, end = np.searchsorted(curve.finite, [one.first, one.last + 1])
    heights = heights_of(curve.losses[curve.finite])
    most = USUAL if one.kind == "spike" else 2 * AVERAGED
    begun = begin if one.kind == "spike" else end - (end - begin) // 3  # the others may have risen slowly
    before, within, last = heights[max(begin - most, 0) : begin], heights[begun:end], heights[-most:]
    if len(before) < FEWEST or len(within) < (FEWEST if len(heights) >= FEWEST_POINTS else 1):
        return False
    return max(float(np.median(within)), float(np.median(last))) - float(np.median(before)) < LITTLE


def _told(incidents: Sequence[Incident]) -> str:
    gravest = min(incidents, key=gravity)
    name = "loss or gradients not finite" if gravest.kind == "nonfinite" else gravest.kind.replace("_", " ")
    course = f", {gravest.trajectory}" if gravest.trajectory else ""
    numbers = ""
    if math.isfinite(gravest.pre_loss) and math.isfinite(gravest.peak_loss) and gravest.kind != "nonfinite":
        numbers = f": loss {gravest.pre_loss:.4g} before, {gravest.peak_loss:.4g} at its highest"
    more = f"; and {len(incidents) - 1} more" if len(incidents) > 1 else ""
    return f"{name} at step {gravest.start}{course}{numbers}{more}"


def _first_of(standing: Sequence[Standing]) -> str:
    standing = sorted(standing, key=lambda one: not one.is_grave)
    more = f"; and {len(standing) - 1} more beside the loss" if len(standing) > 1 else ""
    return standing[0].text + more


def _notices(run: Run, curve: LossCurve, incidents: Sequence[Incident], tooth: SawTooth | None) -> tuple[str, ...]:
    """Leaps of the gradient norm that are no part of an incident; then what changes slowly beside the loss."""
    spans = [(it.start - LEAD * curve.interval, math.inf if it.end is None else it.end) for it in incidents]
    leaps = norm_leaps(run, curve)
    apart = [leap for leap in leaps if not any(leap.first <= end and begin <= leap.last for begin, end in spans)]
    more = f"; and {len(apart) - MOST_NOTICES} more such leaps" if len(apart) > MOST_NOTICES else ""
    told = [str(leap) for leap in apart[:MOST_NOTICES]]
    leapt = (*told[:-1], told[-1] + more) if told else ()
    slow = (
        norm_breaks(run, curve, spans),
        learns_by_heart(run, curve),
        None if incidents else norm_rise(run, curve),
        constant_scale(run),
        stalls(run),
        _small_rise(curve, spans),
        None if tooth is None else str(tooth),
    )
    return (*leapt, *(text for text in slow if text))


def _small_rise(curve: LossCurve, spans: Sequence[tuple[float, float]]) -> str | None:
    """The highest rise of the last start that is too small for an incident, and is over; not in one of these spans."""
    rows = curve.parts[-1]
    if not len(rows):
        return None
    found = [
        (rise.height, int(curve.steps[rows[rise.first]]), int(curve.steps[rows[rise.last]]))
        for rise in small_rises(heights_of(curve.losses[rows]))
    ]
    apart = [each for each in found if not any(each[1] <= end and begin <= each[2] for begin, end in spans)]
    if not apart:
        return None
    height, first, last = max(apart)
    return f"loss up by {math.expm1(height):.0%} about steps {first} to {last}, and back: too little for an incident"


def _ends(curve: LossCurve) -> tuple[float, float]:
    """The first loss of the last start, and the mean of the last tenth of its losses, at most ten."""
    losses = curve.losses[curve.parts[-1]]
    return float(losses[0]), float(losses[-min(AVERAGED, max(len(losses) // 10, 1)) :].mean())


def _left_out(whole: LossCurve, curve: LossCurve) -> Iterator[str]:
    """What is said of the rows of a loader that was stuck."""
    if left_out := len(whole.steps) - len(curve.steps):
        steps = np.setdiff1d(whole.steps, curve.steps)
        where = f"steps {int(steps[0])} to {int(steps[-1])}"
        yield f"{where}: {left_out} losses of a batch that came again and again are not judged"


def _unseen(run: Run, curve: LossCurve, rules: str) -> tuple[str, ...]:
    points, interval = len(curve.finite), curve.interval
    told = []
    if interval > 1:
        told.append(f"one row in {interval} steps: a spike that is back within {interval} steps can be missed")
    if 2 * interval > FAST:
        told.append(
            f"one row in {interval} steps: whether a rise was back within {FAST} steps, as `fast` means, is unknown"
        )
    _, lasting = passing(points)
    if points and lasting < SLOW:
        told.append(f"{points} rows are few: a rise is lasting from {lasting} rows on here, not from {SLOW} on")
    if rules == "calibrated" and 0 < points < live_statistic.LONG:
        told.append(
            f"{points} rows: rises of less than {math.expm1(SMALLEST):.0%} are not told from noise in so short a log"
        )
    if live_statistic.is_screened(curve):
        told.append(
            f"{points} rows: lasting rises are looked for in medians of {-(-points // 16384)}, single spikes "
            f"only around the {live_statistic.SCREENED} highest points"
        )
    if points and "grad_norm" not in run.signals:
        told.append("no gradient norm: whether the gradient grew before the loss did is unknown")
    return tuple(told)


def _finite(losses: Floats) -> Floats:
    return losses[np.isfinite(losses)]


def _mean(losses: Floats) -> float:
    return float(losses.mean()) if len(losses) else math.nan
