"""Tells damage from harder data where a loss rose and stays up.

A loss is measured before the update of its step. If the weights make it rise, unusual updates moved them before that
step, or move them now. A record of every step with gradient and weight norms shows such updates. Where it shows none,
the task has changed: a curriculum, another domain, a loss term whose weight grows, rewards that grow. A log without
these norms can clear nothing: there the loss alone decides.
"""

from dataclasses import dataclass, replace

import numpy as np

from sealegs.detectors.spike import WIDENED_STEPS
from sealegs.diagnosis.contract import Findings
from sealegs.diagnosis.curve.loss_curve import Floats, Indices
from sealegs.diagnosis.facts import LEAD, LIMITS, USUAL, Facts, Series
from sealegs.diagnosis.signs.registry import SIGNS
from sealegs.incidents import Incident
from sealegs.record.run import Run

RISES = ("spike", "level_shift", "drift")
"""Kinds of incidents that harder data can explain. A jump at a resume is not one: other things have changed there."""
ELSEWHERE = (
    *("ranks-differ", "attention-logits-grow", "lr-rises-throughout", "lr-falls-then-rises", "resumed-before"),
    *("eval-rises", "batch-repeats", "data-begins-again"),
)
"""Signs of damage that shows neither in the norms nor in the training loss: a held-out loss, a loader that repeats."""
ALL_BUT = 0.9
"""Share of the rows that must have a gradient norm."""
AROUND = 20
"""Steps on each side of the start within which the weights must have been measured."""
BLOCK = 10
"""Steps that are averaged before they are compared: the usual distance between two measurements of an update."""
STEEPER = 3.0
"""Gradients and updates may grow by this many times the growth of the loss: a harder task raises all three."""
LEAP = 0.1
"""A weight norm leaps if it changes by more than this share from one block to the next: what is measured at every step,
as around an incident, would show each copy of a target network as a leap."""
TENTHS = 10
"""Parts of a rise that are compared."""
ODD = 10.0
"""The change must also be more than this many times the usual change."""
EXPLAINED = 2.0
"""The change must also be more than this many times what the measured updates in between add up to."""
UNDAMAGED = "gradients, weights and updates show no damage: harder data, or a loss that is made up otherwise, look so"
GROWN = "gradients have grown by no more than harder data make them grow, and weights and updates show no damage"


def is_cleared(findings: Findings, incident: Incident) -> bool:
    """Whether the rise was announced, or the record would show damage and shows that nothing but the loss has risen."""
    if incident.kind not in RISES:
        return False
    if announced_change(findings.run, incident):
        return True
    facts = Facts(replace(findings, incidents=(incident,)))
    last = facts.last if incident.end is None else incident.end
    record = _Stretch(facts, incident.start, max(incident.start, last))  # the run may have gone back since
    shows_more = record.rate_leaps or record.weights_leap or record.is_steeper
    shows_more |= record.rises_on and record.weights_double
    return record.would_show and not shows_more and not any(SIGNS[name](facts).holds for name in ELSEWHERE)


def why_cleared(findings: Findings, incident: Incident) -> str:
    """What clears a rise: the change that was announced, or what the record shows."""
    if change := announced_change(findings.run, incident):
        return change
    return GROWN if gradients_have_grown(findings, incident) else UNDAMAGED


def gradients_have_grown(findings: Findings, incident: Incident) -> bool:
    """Whether gradients grow with the loss, as a harder task makes them, and as divergence does."""
    return bool(SIGNS["gradients-grow"](Facts(replace(findings, incidents=(incident,)))).holds)


def announced_change(run: Run, incident: Incident) -> str:
    """The change that the user announced where a rise began, with its step; empty where there is none.

    A loss that goes on rising is nothing that anybody announces. What a probe found, and announced for the statistic to
    learn, nobody has meant.
    """
    if "announced" not in run.signals or incident.trajectory == "divergent":
        return ""
    found = [event.step for event in run.events if event.kind == "probe" and event.detail.get("factor") is not None]
    steps = np.setdiff1d(run.steps[run.logged("announced")], found)
    near = steps[(steps >= incident.start - WIDENED_STEPS) & (steps <= incident.start + AROUND)]
    if not len(near):
        return ""
    return f"{run.column('announced')[run.steps == near[-1]][0]!s} was announced at step {near[-1]}"


@dataclass(frozen=True)
class _Stretch:
    """The steps of a rise. Damage may show anywhere in them, because the onset is not known to the step."""

    facts: Facts
    first: int
    last: int

    @property
    def would_show(self) -> bool:
        """Whether the log has every step, a gradient norm that can be believed, and weight norms on both sides."""
        norms, weights = (self.facts.series(name).finite for name in ("grad_norm", "param_norm"))
        is_believed = not any(problem.signal == "grad_norm" for problem in self.facts.findings.problems)
        sides = weights.within(self.first - AROUND, self.first - 1), weights.within(self.first, self.first + AROUND)
        is_measured = len(norms.steps) > ALL_BUT * len(self.facts.loss.steps) and not any(x.is_empty for x in sides)
        return self.facts.stride == 1 and is_believed and is_measured

    @property
    def rate_leaps(self) -> bool:
        """Whether the learning rate leaps up."""
        jumps = self.facts.lr_jumps
        return any(jump.after > jump.before and self.first - AROUND <= jump.step <= self.last for jump in jumps)

    @property
    def weights_leap(self) -> bool:
        """Whether some weight norm leaps, or doubles or halves within 200 steps once the run is calibrated."""
        for name in self.facts.family("param_norm"):
            measured = self.facts.series(name).finite.within(self.first - AROUND, self.last)
            firsts = np.unique(measured.steps // BLOCK, return_index=True)[1]
            steps, norms = measured.steps[firsts], measured.values[firsts]
            if len(norms) < 2:
                continue
            change = np.abs(np.diff(norms)) / np.maximum(norms[:-1], 1e-30)
            is_leap = change > np.maximum(LEAP, ODD * float(np.median(change)))
            is_leap &= ~(change <= EXPLAINED * self._updated(name, steps))
            since = norms[np.searchsorted(steps, steps - LIMITS.window)]
            grown = (np.maximum(norms, since) / np.maximum(np.minimum(norms, since), 1e-30))[steps >= LIMITS.young]
            if is_leap.any() or (grown > LIMITS.norm_factor).any():
                return True
        return False

    @property
    def rises_on(self) -> bool:
        """Whether the loss goes on rising: by tenths of the stretch, up to the end of the record, hardly one is lower
        than the one before."""
        losses = self.facts.loss.finite.within(self.first, self.last).values
        if self.last < self.facts.last or len(losses) < TENTHS * BLOCK:
            return False
        levels = np.array([np.median(part) for part in np.array_split(losses, TENTHS)])
        return bool(np.argmax(levels) == TENTHS - 1 and (np.diff(levels) < 0).sum() <= 2)

    @property
    def weights_double(self) -> bool:
        """Whether some weight norm doubles or halves over the whole rise, however slowly."""
        series = (self.facts.series(name).finite for name in self.facts.family("param_norm"))
        measured = (each.within(self.first - AROUND, self.last).values for each in series)
        return any(len(v) and v.max() > LIMITS.norm_factor * max(v.min(), 1e-30) for v in measured)

    def _updated(self, norm: str, steps: Indices) -> Floats:
        """The relative change of a norm that updates explain, from each step to the next; NaN where none was measured.

        The larger of the two measured updates counts. Weights without updates of their own, such as a target network,
        change with the others.
        """
        of_group = norm.replace("param_norm", "update_ratio", 1)
        names = (of_group,) if of_group in self.facts.run.signals else self.facts.groups("update_ratio")
        largest = np.full(len(steps), np.nan)
        for name in names:
            at, ratios = self.facts.series(name).finite  # each measures the update before its step
            place = np.searchsorted(steps, at - 1, side="right") - 1
            is_between = (place >= 0) & (place < len(largest))
            np.fmax.at(largest, place[is_between], ratios[is_between])
        return np.asarray(np.fmax(largest[:-1], largest[1:]) * np.diff(steps))

    @property
    def is_steeper(self) -> bool:
        """Whether gradients outgrow the loss several times, or updates do so from the largest before.

        Both stay high while the model learns a harder task. Gradients of a size that the run has learned with before
        are no damage; but while the loss goes on rising, those of the first steps say nothing: every run begins with
        large ones. A negative loss has no size to compare them with.
        """
        loss = self._growth("loss")
        most = np.maximum.accumulate(np.fmax(loss, 1.0))
        updates = (*self.facts.family("update_rms"), *self.facts.groups("update_ratio"))
        is_steep = [self._growth(name, of_largest=True) > STEEPER * most for name in updates]
        if np.isfinite(loss).any():
            begun = self._tenth_before if self.rises_on else 0
            is_new = self._growth("grad_norm", of_largest=True, since=begun) > most
            is_steep.append(is_new & (self._growth("grad_norm") > STEEPER * most))
        return bool(np.any(is_steep))

    @property
    def _tenth_before(self) -> int:
        """The step after the first tenth of what was logged before the rise."""
        begun = int(self.facts.loss.steps[0])
        return begun + (self.first - begun) // TENTHS

    def _growth(self, signal: str, *, of_largest: bool = False, since: int = 0) -> Floats:
        """Means of ten steps over the mean before the rise, or over the largest of them before it; NaN without one."""
        series, begin, level = self.facts.series(signal).finite, self.first - LEAD, np.nan
        before = series.within(0, begin - 1)
        if not before.is_empty:
            level = float(np.nanmax(_means(series, since, begin - 1)) if of_largest else before.values[-USUAL:].mean())
        return _means(series, begin, self.last) / (level if level > 0 else np.nan)


def _means(series: Series, first: int, last: int) -> Floats:
    """Means of ten steps each, from one step to another; NaN for those of which nothing was logged."""
    steps, values = series.within(first, last)
    block, count = (steps - first) // BLOCK, (last - first) // BLOCK + 1
    rows = np.bincount(block, minlength=count)
    return np.asarray(np.bincount(block, values, count) / np.where(rows, rows, np.nan))
