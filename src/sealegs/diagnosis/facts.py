"""The numbers that questions and signs need about a run. Time is counted in rows, since logs skip steps."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from sealegs.detectors.proportion import Proportion
from sealegs.detectors.repeated_batch import FEW
from sealegs.diagnosis.attempts import Treatment, treatments, without_help
from sealegs.diagnosis.columns.judged import begun_first
from sealegs.diagnosis.columns.meaning import words_of
from sealegs.diagnosis.contract import ColumnFinding, Findings, Reruns, Standing
from sealegs.diagnosis.curve.loss_curve import Floats, Indices, LossCurve, curve_of, passing
from sealegs.diagnosis.curve.norm_changes import NormChange, norm_changes
from sealegs.diagnosis.curve.norm_leaps import norm_rise
from sealegs.diagnosis.curve.stretches import hidden
from sealegs.diagnosis.curve.warm_up_again import WarmUpAgain, warm_up_again
from sealegs.diagnosis.incident_order import NUMERIC, gravity
from sealegs.diagnosis.lines import KnownLine, known_lines
from sealegs.diagnosis.settings import Known, known_of
from sealegs.incidents import AVERAGED, SLOW, Incident
from sealegs.judge import culprit_in
from sealegs.record.interventions import skipped_steps
from sealegs.record.run import Run
from sealegs.vocabulary import Row

USUAL = 100
"""Logged values before the onset that define what is usual."""
LEAD = 4
"""Rows by which a gradient norm may rise before the loss does."""
NEAR = 10
"""Rows after the onset that still belong to it."""
SOON = 50
"""Rows after a resume or a jump of the learning rate in which an anomaly is attributed to it."""
LIMITS = Proportion()
"""The limits on slow changes, the same as in the live guard."""
DRIFT_STEPS = LIMITS.window
"""Steps of the window in which slow changes are looked for."""
LONGEST_STUCK = 10_000
"""Rows before the onset in which a stuck loader is followed back."""
JUDGED_WITH = ("loss", "grad_norm", "params_finite")
"""Signals that say whether the worst gradient of a step is a culprit."""
OUT_OF_USUAL = 5.0
"""Multiple of the usual gradient norm from which on, up to the onset, it is part of the trouble."""
CHAINED = ("spike", "level_shift", "resume_jump", "drift", "nonfinite")
"""Kinds of incidents of which one that is hardly over is the beginning of the next."""
LEAPS = ("spike", "level_shift", "resume_jump")
"""Kinds of incidents in which the loss goes up at once."""


class _Logged(NamedTuple):
    steps: Indices
    """Steps, strictly rising."""
    values: Floats


class Series(_Logged):
    """The logged values of one signal. They may be the run's own: not to be written to."""

    def within(self, first: float, last: float) -> "Series":
        """The values from one step to another, both included."""
        # an infinity would have numpy make floats of all steps
        begin = None if first == -math.inf else np.searchsorted(self.steps, first, side="left")
        end = None if last == math.inf else np.searchsorted(self.steps, last, side="right")
        return Series(self.steps[begin:end], self.values[begin:end])

    def at(self, steps: Indices) -> Floats:
        """The values at some rising steps; between two that were logged, on the line from one to the other."""
        begin = max(int(np.searchsorted(self.steps, steps[0], side="right")) - 1, 0)
        end = int(np.searchsorted(self.steps, steps[-1])) + 1
        return np.interp(steps, self.steps[begin:end], self.values[begin:end])

    @cached_property
    def finite(self) -> "Series":
        """The values without NaN and infinity."""
        chosen = np.isfinite(self.values)
        return self if chosen.all() else Series(self.steps[chosen], self.values[chosen])

    @property
    def is_empty(self) -> bool:
        """Whether nothing was logged."""
        return not len(self.values)


class Against(NamedTuple):
    """A value, and what was usual before it."""

    step: int
    value: float
    usual: float

    @property
    def ratio(self) -> float:
        """The value as a multiple of the usual one."""
        return self.value / self.usual if self.usual > 0 else math.inf if self.value > 0 else 1.0


class Jump(NamedTuple):
    """A sudden change of the learning rate."""

    step: int
    before: float
    after: float


@dataclass(frozen=True)
class Facts:
    """A run, and the incident to explain."""

    findings: Findings
    rules: str = "calibrated"
    is_cut_short: bool = False
    """Whether the run was cut where it went back over the incident."""

    @property
    def run(self) -> Run:
        """The run."""
        return self.findings.run

    @cached_property
    def known(self) -> Known:
        """The settings of the run."""
        return known_of(self.run.manifest)

    @cached_property
    def lines(self) -> tuple[KnownLine, ...]:
        """The lines of the log that are no numbers and whose meaning is known."""
        return known_lines(self.run)

    @cached_property
    def incidents(self) -> tuple[Incident, ...]:
        """The incidents that need a cause: of a loss that measures nothing, what is not finite alone."""
        measures = self.findings.kind.loss_measures
        return tuple(it for it in self.findings.incidents if measures or it.kind in NUMERIC)

    @cached_property
    def focus(self) -> Incident | None:
        """The incident to explain: the gravest, and of equals the first, since later ones may follow from it."""
        return min(self.incidents, key=gravity, default=None)

    @cached_property
    def reruns(self) -> Reruns | None:
        """What reruns said of the incident to explain, if it was run again."""
        found = (one for one in self.findings.reruns if self.is_of_the_focus(one.incident.start, one.incident.end))
        return next(found, None)

    def is_of_the_focus(self, first: int, last: int | None) -> bool:
        """Whether a span of steps, open where it has no end, meets the incident to explain."""
        if self.focus is None:
            return False
        ends = math.inf if last is None else last, math.inf if self.focus.end is None else self.focus.end
        return self.focus.start <= ends[0] and first <= ends[1]

    @cached_property
    def shown(self) -> Mapping[str, Standing]:
        """What stands in the first signals of its kind, by what it shows; of several the first."""
        return {one.shows: one for one in reversed(self.findings.standing) if one.shows}

    def in_columns(self, shows: str, *words: str) -> ColumnFinding | None:
        """The first finding in a column that shows this, and whose name has one of these words, if any are given."""
        found = (one for one in self.findings.columns if one.shows == shows)
        return next((one for one in found if not words or not set(words).isdisjoint(words_of(one.signal))), None)

    @cached_property
    def curve(self) -> LossCurve:
        """The losses of the run, those of every attempt."""
        return curve_of(self.run)

    @cached_property
    def line(self) -> Run:
        """The run with the attempt in which the incident happened, even if the run went back over it since.

        Beyond that attempt it has the rows that stand.
        """
        return self.run if self.focus is None else self.run.seen_from(self.curve.attempt_of(self.focus))

    @cached_property
    def untreated_until(self) -> float:
        """The last step before somebody did something about the incident: what follows is of their doing."""
        acted = (event for event in self.run.events if event.kind == "intervention" and event.detail.get("acted"))
        return min((event.step - 1 for event in acted if event.step >= self.onset), default=math.inf)

    @property
    def went_back(self) -> bool:
        """Whether the run went back over the incident, so that the course it would have taken is unknown."""
        return self.is_cut_short or self.line is not self.run

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of all incidents."""
        return frozenset(incident.kind for incident in self.incidents)

    @cached_property
    def dtype(self) -> str | None:
        """The precision. A loss scale in the log means fp16."""
        scale = self.series("loss_scale").finite.values
        return self.known.dtype or ("fp16" if len(scale) and scale.max() > 1 else None)

    def series(self, signal: str) -> Series:
        """The logged values of a signal; empty if it is text or was not logged."""
        if signal not in self._series:
            self._series[signal] = self.loss if signal == "loss" else _series(self.line, signal)
        return self._series[signal]

    def texts(self, signal: str, first: float = -math.inf, last: float = math.inf) -> dict[int, str]:
        """The texts of a signal, by step, from one step to another."""
        if signal not in self.run.signals:
            return {}
        return self.line.texts(signal, first, last)

    def culprits(self, first: float = -math.inf, last: float = math.inf) -> dict[int, str]:
        """Where the worst gradient was, by step, as far as a row can tell."""
        found = {}
        for step, text in self.texts("culprit", first, last).items():
            beside = {name: self.series(name).within(step, step).values for name in JUDGED_WITH}
            row: Row = {name: float(values[0]) for name, values in beside.items() if len(values)}
            if named := culprit_in({**row, "step": step, "culprit": text}):
                found[step] = named
        return found

    def groups(self, signal: str) -> tuple[str, ...]:
        """The names under which a signal was logged by group or layer."""
        return tuple(name for name in self.run.signals if name.startswith(f"{signal}/"))

    def family(self, signal: str) -> tuple[str, ...]:
        """The signal itself, if it was logged, and its names by group."""
        return tuple(name for name in (signal, *self.groups(signal)) if name in self.run.signals)

    @cached_property
    def _series(self) -> dict[str, Series]:
        return {}

    @cached_property
    def loss(self) -> Series:
        """The loss. A NaN that the logger wrote as 0 is NaN again."""
        loss, curve = self.written_loss, self.curve
        masked = hidden(self.run, curve) if len(curve.losses) else np.zeros(0, dtype=bool)
        if not masked.any():
            return loss
        return Series(loss.steps, np.where(np.isin(loss.steps, curve.steps[masked]), np.nan, loss.values))

    @property
    def written_loss(self) -> Series:
        """The loss as the log has it."""
        return _series(self.line, "loss")

    @cached_property
    def stride(self) -> int:
        """Steps from one logged loss to the next."""
        return max(int(np.median(np.diff(self.loss.steps))), 1) if len(self.loss.steps) > 1 else 1

    @cached_property
    def onset(self) -> int:
        """The step at which the anomaly begins, or the last step where there is none.

        Detection on means of several rows dates an incident up to sixteen rows too early. Its onset is then the first
        row above the noise before it.
        """
        focus = self.focus
        if focus is None or focus.kind not in LEAPS:
            return focus.start if focus else self.last
        before = self.loss.finite.within(-math.inf, focus.start - 1).values[-USUAL:]
        course = self.loss.finite.within(focus.start, focus.peak)
        if len(before) < NEAR or course.is_empty:
            return focus.start
        noise = float(np.std(np.diff(before))) / math.sqrt(2)
        height = max(4 * noise, 0.1 * (float(course.values.max()) - focus.usual))
        above = course.steps[course.values > float(before[-20:].mean()) + height]
        return int(above[0]) if len(above) else focus.start

    @cached_property
    def sound_before(self) -> int:
        """The step from which on nothing is sure to be sound: to go back too far costs less than to go back into it.

        What had leapt before, and was not over when the anomaly began, is part of it; so are gradients that were not
        finite before the loss, and a loader that was stuck.
        """
        focus = self.focus
        if focus is None or focus.kind not in (*LEAPS, "nonfinite"):
            return self.onset
        under_way = (
            incident.start
            for incident in self.incidents
            if incident.kind in CHAINED and incident.start < focus.start <= self._over_by(incident)
        )
        begun = min(self.onset, focus.start) if self.spoilt_update is None else self.spoilt_update + 1
        jump = self.lr_jump_at_onset()
        leapt = () if jump is None else (jump.step,)
        return int(
            min([begun, *under_way, *leapt, *self._stuck_before, *self._gradients_out_since, *self._parted_before])
        )

    def _over_by(self, incident: Incident) -> int:
        """The last step at which another trouble counts as the same chain: some rows after the end of an incident."""
        return (self.last if incident.end is None else incident.end) + NEAR * self.stride

    @property
    def _gradients_out_since(self) -> list[int]:
        """The step since which gradient norms were many times the usual, up to the onset."""
        norms = self.series("grad_norm").finite.within(-math.inf, self.onset - 1)
        usual = self.before("grad_norm").values
        if len(usual) < NEAR or len(norms.values) < NEAR:
            return []
        is_out = ~(norms.values <= OUT_OF_USUAL * float(np.median(usual)))
        place = len(is_out)
        while place > 0 and is_out[max(place - 1 - LEAD, 0) : place].any():  # it may come near the usual for some rows
            place -= 1
        since = int(np.argmax(is_out[place:])) + place if is_out[place:].any() else len(is_out)
        return [int(norms.steps[since])] if since < len(is_out) else []

    @property
    def _parted_before(self) -> list[int]:
        """The step since which a column was out of the ordinary, to the end, where that is not long before."""
        reach = max(SLOW, (self.onset - int(self.run.steps[0])) // 10 if len(self.run.steps) else 0)
        strong = [one for one in self.findings.columns if one.is_strong and one.lasts]
        first = begun_first([one for one in strong if self.onset - reach <= one.step < self.onset])
        return [] if first is None else [first.step]

    @cached_property
    def spoilt_update(self) -> int | None:
        """The first step about the onset whose gradient norm is not finite. Its loss was, so the weights were."""
        lead = self.series("grad_norm").within(self.onset - LEAD * self.stride, self.onset)
        broken = lead.steps[~np.isfinite(lead.values)]
        if not len(broken):
            return None
        first = int(broken[0])
        return first if np.isfinite(self.loss.within(first, first).values).all() else None

    @property
    def _stuck_before(self) -> list[int]:
        """The step since which a loader had given the same few batches, up to the onset."""
        signal = next((name for name in ("batch_hash", "batch_index") if name in self.run.signals), "")
        hashes = self.texts(signal, self.onset - LONGEST_STUCK * self.stride, self.onset - 1)
        steps, batches = list(hashes), list(hashes.values())
        place = len(batches) - 1
        while place >= FEW and batches[place] in batches[place - FEW : place]:
            place -= 1
        is_since = FEW <= place < len(batches) - FEW  # a run that has had only a few batches is not stuck
        return [steps[place]] if is_since else []

    @property
    def last(self) -> int:
        """The last step with a loss."""
        return int(self.loss.steps[-1]) if len(self.loss.steps) else 0

    @cached_property
    def leaps(self) -> bool:
        """Whether the loss of the incident rises at once."""
        return self.focus is not None and self.focus.kind in LEAPS

    @cached_property
    def persists(self) -> bool:
        """Whether the loss has not come back within 50 steps of the onset; in rows, where steps do not tell."""
        if self.focus is None or self.focus.trajectory == "fast":
            return False
        if self.focus.trajectory is not None:
            return True
        short, lasting = passing(len(self.loss.values))
        if self.focus.end is not None:
            return self._rows_of_focus > short
        is_long = len(self.loss.within(self.onset, self.last).values) > min(SOON, lasting)
        return self.focus.kind == "level_shift" or is_long

    @property
    def is_over(self) -> bool:
        """Whether the loss came back by itself, in a small part of the log."""
        if self.focus is None or self.focus.end is None or self.focus.trajectory == "divergent" or self.stays_bad:
            return False
        if self.focus.recovery_loss is None and self.curve.attempt_of(self.focus) < self.curve.last_attempt:
            return False  # the run went back: what was given up did not heal
        return self._rows_of_focus <= passing(len(self.loss.values))[1]

    @property
    def is_overcome(self) -> bool:
        """Whether the run went back over the incident, and has passed it since."""
        focus = self.focus
        if focus is None or focus.kind == "resume_jump" or not (self.curve.steps == focus.peak).any():
            return False
        is_given_up = not self.curve.stands[self.curve.row_of(focus.peak, focus.peak_loss)]
        return bool(is_given_up) and self.curve.standing_beyond(max(focus.start, focus.peak)) >= AVERAGED

    @property
    def _rows_of_focus(self) -> int:
        """The rows that the incident lasted."""
        assert self.focus is not None
        return len(self.loss.within(self.focus.start, self.last if self.focus.end is None else self.focus.end).values)

    @property
    def came_back(self) -> bool:
        """Whether the loss is back where it was, however long that took."""
        return self.focus is not None and self.focus.recovery_loss is not None

    @property
    def is_only_scale(self) -> bool:
        """Whether only the loss scale is bad: what overflows is not applied, and the loss is as before."""
        if self.focus is None or self.focus.kind != "overflow" or self.first_bad("loss") is not None:
            return False
        return bool(self.loss.values[-NEAR:].mean() <= self.focus.limit)

    # Usual values, and the values at the onset

    def before(self, signal: str) -> Series:
        """The last finite values well before the onset."""
        found = self.series(signal).finite.within(-math.inf, self.onset - 1 - LEAD * self.stride)
        return Series(found.steps[-USUAL:], found.values[-USUAL:])

    @cached_property
    def near_end(self) -> int:
        """The last step that belongs to the onset: ten rows after it, or the peak of the loss if that comes soon."""
        peak = self.focus.peak if self.focus else self.onset
        return max(self.onset + NEAR * self.stride, min(peak, self.onset + USUAL * self.stride) + 2 * self.stride)

    def near(self, signal: str) -> Series:
        """The values around the onset, from a little before it."""
        return self.series(signal).within(self.onset - LEAD * self.stride, self.near_end)

    def highest(self, signal: str) -> Against | None:
        """The highest value around the onset against the mean before it; None if either is missing."""
        near, before = self.near(signal), self.before(signal)
        if near.is_empty or before.is_empty:
            return None
        values = np.where(np.isfinite(near.values), near.values, np.inf)
        place = int(np.argmax(values))
        return Against(int(near.steps[place]), float(values[place]), float(before.values.mean()))

    @property
    def is_clipped_when_measured(self) -> bool:
        """Whether the gradient norm is that after clipping."""
        return any((one.signal, one.kind) == ("grad_norm", "clipped") for one in self.findings.problems)

    def clip_at(self, step: float) -> float | None:
        """The norm that gradients were clipped to at a step: as the rows say, else by the settings."""
        logged = self.series("clip_norm").finite.within(-math.inf, step).values
        return float(logged[-1]) if len(logged) else self.known.number("clip")

    def noise(self, signal: str) -> float:
        """Spread of the row-to-row differences before the onset, so that a trend does not count as noise."""
        values = self.before(signal).values
        return float(np.std(np.diff(values)) / math.sqrt(2)) if len(values) > 2 else math.nan

    # Values that are not finite

    def first_bad(self, signal: str) -> int | None:
        """The first step at which a signal was NaN or infinite."""
        series = self.series(signal)
        return None if series.finite is series else int(series.steps[np.argmin(np.isfinite(series.values))])

    @cached_property
    def first_bad_weight(self) -> int | None:
        """The first step at which the log shows a weight that is not finite."""
        flags = self.series("params_finite")
        steps = [int(flags.steps[flags.values == 0][0])] if (flags.values == 0).any() else []
        norms = (self.first_bad(name) for name in self.family("param_norm"))
        return min([*steps, *(step for step in norms if step is not None)], default=None)

    @property
    def first_nonfinite(self) -> int | None:
        """The first step of a value that is not finite: the loss, a weight, or a gradient that no scaler handles."""
        scaled = self.dtype == "fp16"
        firsts = (self.first_bad("loss"), self.first_bad_weight, None if scaled else self.first_bad("grad_norm"))
        return min((step for step in firsts if step is not None), default=None)

    @cached_property
    def starts_bad(self) -> bool:
        """Whether the first logged loss is not finite."""
        return len(self.loss.values) > 0 and not math.isfinite(self.loss.values[0])

    @cached_property
    def stays_bad(self) -> bool:
        """Whether the loss is not finite up to the last row, for at least three rows."""
        tail = self.loss.values[-3:]
        return len(tail) == 3 and not np.isfinite(tail).any()

    @property
    def ends_bad(self) -> bool:
        """Whether the loss of the last row is not finite."""
        return len(self.loss.values) > 0 and not math.isfinite(self.loss.values[-1])

    @property
    def is_held(self) -> bool:
        """Whether the log ends with the incident, whose updates were skipped."""
        focus = self.focus
        if focus is None or focus.kind != "nonfinite" or focus.end is not None or focus.trajectory is not None:
            return False
        return focus.start in skipped_steps(self.run.events)

    @cached_property
    def is_nonfinite(self) -> bool:
        """Whether loss or weights are ever not finite. Gradients count too, unless a scaler handles them."""
        bad = self.first_bad("loss") is not None or self.first_bad_weight is not None
        bad |= "nonfinite" in self.kinds  # includes an incident whose rows a resume replaced
        return bad or (self.dtype != "fp16" and self.first_bad("grad_norm") is not None)

    # The learning rate

    @cached_property
    def lr_jumps(self) -> tuple[Jump, ...]:
        """Steps at which the learning rate changes by a fifth, and by five times the usual change nearby."""
        steps, rates = self.series("lr").finite
        if len(rates) < 3:
            return ()
        change = np.diff(rates)
        size = np.abs(change)
        # A jump is compared with its neighbours: a warm-up doubles the rate in its second step.
        large = np.flatnonzero(size > 0.2 * np.minimum(rates[:-1], rates[1:]).clip(min=1e-30))
        found = []
        for place in large[:1000].tolist():
            around = np.delete(size[max(place - 20, 0) : place + 21], min(place, 20))
            # The rows of a short warm-up are large among flat ones, but each has another large one beside it.
            beside = np.delete(change[max(place - 1, 0) : place + 2], min(place, 1))
            onward = float((beside * np.sign(change[place])).max(initial=0.0))
            if size[place] > max(5 * np.median(around), 2 * onward):
                found.append(Jump(int(steps[place + 1]), float(rates[place]), float(rates[place + 1])))
        return tuple(found)

    def lr_jump_at_onset(self) -> Jump | None:
        """A jump of the learning rate upwards shortly before the onset."""
        steps = self.series("lr").steps
        begun = int(steps[NEAR]) if len(steps) > NEAR else math.inf  # in its first rows a rate has nothing to jump from
        first, last = max(self.onset - 2 * NEAR * self.stride, begun), self.onset + 2 * self.stride
        return next((jump for jump in self.lr_jumps if first <= jump.step <= last and jump.after > jump.before), None)

    @cached_property
    def warm_up_again(self) -> WarmUpAgain | None:
        """A warm-up in the middle of the run that nobody asked for."""
        asked = (event.detail.get("to_step", event.step) for event in self.run.events if event.kind == "intervention")
        return warm_up_again(*self.series("lr").finite, asked_at=asked)

    # The slow window

    @cached_property
    def slow_window(self) -> tuple[int, int]:
        """First and last step of the window in which slow changes are looked for."""
        focus = self.focus
        finite = self.loss.finite.steps
        end = int(finite[-1]) if len(finite) else self.last
        if focus is not None and focus.kind in ("drift", "plateau"):
            end = focus.end if focus.end is not None else end
            return min(focus.start, end - DRIFT_STEPS), end
        return end - DRIFT_STEPS, end

    @cached_property
    def norm_changes(self) -> tuple[NormChange, ...]:
        """Groups of weights that changed more than twofold in 200 steps, as the live guard finds them."""
        return norm_changes(self.run)

    @cached_property
    def norm_rise(self) -> str | None:
        """A sentence where the gradient norm has risen for good."""
        return norm_rise(self.run, self.curve)

    def change(self, signal: str) -> Against | None:
        """A signal at the end of the slow window against its beginning: means over a fifth of the window each."""
        series = self.series(signal).finite.within(*self.slow_window)
        count = max(len(series.values) // 5, 1)
        if len(series.values) < 2:
            return None
        begin, end = series.values[:count].mean(), series.values[-count:].mean()
        return Against(int(series.steps[-1]), float(end), float(begin))

    def trend(self, signal: str) -> float | None:
        """Share of block pairs in the slow window that rise, less the share that fall: 1 is a steady rise."""
        series = self.series(signal).finite.within(*self.slow_window)
        if len(series.values) < 8:
            return None
        means = np.array([block.mean() for block in np.array_split(series.values, 8)])
        signs = np.sign(means[None, :] - means[:, None])[np.triu_indices(8, 1)]
        return float(signs.mean())

    # Resumes

    @cached_property
    def resumes(self) -> tuple[int, ...]:
        """The first step after each resume that the log shows. A rollback by an intervention is none, nor is a run that
        begins anew: its first steps build on nothing that came before in the log."""
        turned = (step for step, attempt in _turns(self.run) if attempt not in self._begun_anew)
        told = {event.step for event in self.run.events if event.kind == "resume"}
        return tuple(sorted(told | (set(turned) - self._rolled_back_to)))

    @cached_property
    def _begun_anew(self) -> frozenset[int]:
        """The attempts that go on from none before: several runs in one log.

        So is one whose first row is the first that it could have written, where only its steps tell of a resume.
        """
        told = {event.step for event in self.run.events if event.kind == "resume"}
        steps, segments = self.curve.steps, self.curve.segments
        found = []
        for one in self.run.attempts:
            own = steps[segments == one.number]
            begins = len(own) > 1 and one.first <= int(np.median(np.diff(own)))
            is_guessed = one.told_by.startswith("steps go back") and one.first not in told
            if one.parent is None or (begins and is_guessed):
                found.append(one.number)
        return frozenset(found)

    @cached_property
    def _rolled_back_to(self) -> frozenset[int]:
        """The steps that interventions went back to, on purpose, and with other data or another learning rate."""
        acted = (event for event in self.run.events if event.kind == "intervention" and event.detail.get("acted"))
        to_steps = (event.detail.get("to_step") for event in acted)
        return frozenset(step for step in to_steps if isinstance(step, int))

    @cached_property
    def resumed_before(self) -> int | None:
        """The resume shortly before the onset: one that came after it, in time, is what was done about it."""
        if self.focus is None:
            return None
        first, last = self.onset - SOON * self.stride, self.onset + 2 * self.stride
        attempt = self.curve.attempt_of(self.focus)
        goes_on = [turn for turn in _turns(self.line) if turn[1] not in self._begun_anew]
        turns = {step for step, begun in goes_on if begun <= attempt} - self._rolled_back_to
        later = {step for step, begun in _turns(self.run) if begun > attempt} - turns
        return max((step for step in {*self.resumes, *turns} - later if first <= step <= last), default=None)

    @cached_property
    def treatments(self) -> tuple[Treatment, ...]:
        """What was changed from one attempt to the next, on purpose."""
        return treatments(self.run, self.curve, self.incidents)

    @cached_property
    def tried(self) -> Mapping[str, str]:
        """What was changed because of a trouble that came again, with a sentence each, by our name of the setting."""
        return without_help(self.curve, self.incidents, self.treatments)

    def again(self, signal: str, *, after_rollbacks: bool = False) -> Iterator[tuple[int, float | str, float | str]]:
        """Steps that the run went through twice, with the first and the last value of a signal.

        What a resume repeats should be as it was; what an intervention repeats need not be, and is asked for by
        ``after_rollbacks``.
        """
        if signal not in self.run.signals or not self.run.segments.any():
            return
        steps, segments, values = self.run.written(signal)
        begun = set(segments[np.isin(steps, list(self._rolled_back_to)) & (np.diff(segments, prepend=0) > 0)].tolist())
        seen: dict[int, tuple[int, float | str]] = {}
        for step, segment, value in zip(steps.tolist(), segments.tolist(), values.tolist(), strict=True):
            if segment in begun and not after_rollbacks:
                seen[step] = (segment, value)
            elif step in seen and seen[step][0] != segment:
                yield step, seen[step][1], value
            seen.setdefault(step, (segment, value))

    def losses_again(self, *, after_rollbacks: bool = False) -> list[tuple[int, float, float]]:
        """The same for the loss, at steps that saw the same batch both times."""
        hashes = self.again("batch_hash", after_rollbacks=after_rollbacks)
        same = {step for step, before, after in hashes if before == after}
        return [
            (step, before, after)
            for step, before, after in self.again("loss", after_rollbacks=after_rollbacks)
            if step in same and isinstance(before, float) and isinstance(after, float)
        ]

    @cached_property
    def checkpoint_before(self) -> int | None:
        """The last checkpoint before the onset that the log mentions."""
        return self.checkpoint_until(self.sound_before)

    def checkpoint_until(self, step: int) -> int | None:
        """The last checkpoint before a step that the log mentions."""
        saved = (event.step for event in self.run.events if event.kind == "checkpoint" and event.step < step)
        return max(saved, default=None)


def _turns(run: Run) -> list[tuple[int, int]]:
    """The first step after each step back or launch, and the number of the attempt that begins there."""
    at = np.flatnonzero(np.diff(run.segments)) + 1
    return list(zip(run.steps[at].tolist(), run.segments[at].tolist(), strict=True))


def _series(run: Run, signal: str) -> Series:
    if signal not in run.signals or not run.has_numbers(signal):
        return Series(np.empty(0, np.int64), np.empty(0))
    return Series(*run.series(signal))
