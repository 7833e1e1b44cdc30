"""A loss that rose and stays up in, whether the record clears it out: harder data raise a loss, too, and are no damage.

A loss is measured before the update of its step. So weights that make it rise were moved out of the ordinary before it,
or are being moved out of it, and a record of every step that has the norms of gradients and weights shows that. Where
such a record shows nothing, what changed is what was asked of the model: a curriculum, another domain, a term whose
weight grows, returns that do. A log without these norms cannot clear anything: there the loss alone decides.
"""

from dataclasses import dataclass, replace

import numpy as np

from sealegs.diagnosis.contract import Findings
from sealegs.diagnosis.curve.loss_curve import Floats, Indices
from sealegs.diagnosis.facts import LEAD, LIMITS, USUAL, Facts
from sealegs.diagnosis.signs.registry import SIGNS
from sealegs.incidents import Incident

RISES = ("spike", "level_shift", "drift")
"""Kinds of incidents that may be the data's; of a jump at a resume it is known what else has changed."""
ELSEWHERE = (
    *("ranks-differ", "attention-logits-grow", "lr-rises-throughout", "lr-falls-then-rises", "resumed-before"),
    *("eval-rises", "batch-repeats", "data-begins-again"),
)
"""Signs of damage in neither norms nor loss, among them the held-out loss, and a loader that repeats itself."""
ALL_BUT = 0.9
"""Share of the rows that must have a gradient norm."""
AROUND = 20
"""Steps on each side of the start within which the weights must have been measured."""
BLOCK = 10
"""Steps whose means are compared: as many as there usually are from one measurement of an update to the next."""
STEEPER = 3.0
"""Times the growth of the loss that gradients and updates may have: a harder task raises all three."""
LEAP = 0.1
"""Share by which a norm of weights changes from one measurement to the next that no update explains ..."""
ODD = 10.0
"""... if it is also so many times the usual change ..."""
EXPLAINED = 2.0
"""... and so many times what the updates in between come to, of which one is measured."""


def is_cleared(findings: Findings, incident: Incident) -> bool:
    """Whether nothing but the loss has risen, in a record that would show more."""
    if incident.kind not in RISES:
        return False
    facts = Facts(replace(findings, incidents=(incident,)))
    record = _Stretch(facts, incident.start, facts.last if incident.end is None else incident.end)
    shows_more = record.rate_leaps or record.weights_leap or record.is_steeper
    return record.would_show and not shows_more and not any(SIGNS[name](facts).holds for name in ELSEWHERE)


@dataclass(frozen=True)
class _Stretch:
    """The steps of a rise, in which damage would show wherever it is: the onset is not known to the step."""

    facts: Facts
    first: int
    last: int

    @property
    def would_show(self) -> bool:
        """Whether every step is there, with a gradient norm that can be believed, and the weights on both sides."""
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
        """Whether the norm of some weights leaps, or doubles or halves within 200 steps, as live in a grown run."""
        for name in self.facts.family("param_norm"):
            steps, norms = self.facts.series(name).finite.within(self.first - AROUND, self.last)
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

    def _updated(self, norm: str, steps: Indices) -> Floats:
        """By how much updates change a norm from each of the steps to the next, by the larger of the two measured about
        then; NaN where nobody knows. What has no updates of its own, as a target network, changes with the others."""
        of_group = norm.replace("param_norm", "update_ratio", 1)
        names = (of_group,) if of_group in self.facts.run.signals else self.facts.groups("update_ratio")
        largest = np.full(len(steps), np.nan)
        for name in names:
            at, ratios = self.facts.series(name).finite  # each of the update before
            place = np.searchsorted(steps, at - 1, side="right") - 1
            is_between = (place >= 0) & (place < len(largest))
            np.fmax.at(largest, place[is_between], ratios[is_between])
        return np.asarray(np.fmax(largest[:-1], largest[1:]) * np.diff(steps))

    @property
    def is_steeper(self) -> bool:
        """Whether gradients have grown several times as much as the loss has up to then, or updates more than that and
        beyond any before.

        Gradients stay high while a harder task is learned. A loss below zero has no size to compare them with.
        """
        loss = self._growth("loss")
        grown = [self._growth("grad_norm")] if np.isfinite(loss).any() else []
        for name in (*self.facts.family("update_rms"), *self.facts.groups("update_ratio")):
            grown.append(self._growth(name, of_largest=True))
        most = np.maximum.accumulate(np.fmax(loss, 1.0))
        return any(bool((growth > STEEPER * most).any()) for growth in grown)

    def _growth(self, signal: str, *, of_largest: bool = False) -> Floats:
        """The means of ten steps each over the mean before, or over the largest before; NaN where there is none."""
        series, begin = self.facts.series(signal).finite, self.first - LEAD
        usual = series.within(0, begin - 1).values[-USUAL:]
        if of_largest and len(usual):
            usual = series.within(0, begin - 1).values.max(keepdims=True)
        steps, values = series.within(begin, self.last)
        block, count = (steps - begin) // BLOCK, (self.last - begin) // BLOCK + 1
        sums, rows = np.bincount(block, values, count), np.bincount(block, minlength=count)
        level = float(usual.mean()) if len(usual) else np.nan
        return np.asarray(sums / np.where(rows, rows, np.nan) / (level if level > 0 else np.nan))
