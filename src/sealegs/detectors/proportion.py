"""Detects weights, updates, gradients and logits out of proportion to what they were a while ago.

These signals come every few steps and change slowly, so one sample in twenty steps is remembered, over a window.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from sealegs.errors import ConfigError
from sealegs.vocabulary import Finding, Row, Severity

SAMPLES = 10
"""Samples of a signal that are kept in a window: 300 groups are some 30,000 numbers."""
SMALLEST_SHARE = 0.01
"""A group with less than this share of the weights' norm is not judged. A single gate that passes through zero changes
by any factor, and means nothing."""
USUAL_SHARE = 0.5
"""A group with less than this share of the gradient norm is not one that usually has nearly all of it."""
HARMLESS_UPDATE = 0.01
"""An update below this share of the weights does no harm in one step, whatever it was before."""

Track: TypeAlias = tuple[str, int, int, tuple[int, ...], tuple[float, ...]]
"""One signal: its name, its first step, the step until which it is not reported again; steps and values of its
samples."""
State: TypeAlias = tuple[Track, ...]


class Sample(NamedTuple):
    """One signal at one step."""

    signal: str
    value: float
    weight: float = 1.0
    """Norm of the group as a share of all weights."""


class Excess(NamedTuple):
    """A signal out of proportion."""

    severity: Severity
    factor: float
    """How far out of proportion: the largest is named first."""
    signal: str
    value: float
    limit: float
    note: str
    lasts: int
    """Steps in which it has become so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proportion:
    """Finds what should change slowly and did not. None of it is a fault of this very step."""

    window: int = 200
    """Steps to look back."""
    young: int = 700
    """Steps after a group is first seen in which its norm is not judged. A norm that grows from zero with the square of
    the steps, as in a warm-up of the learning rate, doubles within 200 steps until step 683."""
    norm_factor: float = 2.0
    """A weight norm that changes by more than this factor, up or down, is an alarm."""
    update_factor: float = 5.0
    """An update this many times its usual share of the weights gives a notice."""
    grad_share: float = 0.95
    """A group with more than this share of the gradient norm, and usually less than half, gives a notice."""
    attention_logit: float = 50.0
    """An attention logit above this that has doubled gives a notice: attention is then on one token."""
    name: str = "proportion"

    def __post_init__(self) -> None:
        if self.window < SAMPLES or self.young < self.window:
            raise ConfigError(
                f"Proportion(window={self.window}, young={self.young}): at least {SAMPLES} steps, and young no less"
            )
        if not (self.norm_factor > 1 and self.update_factor > 1 and self.attention_logit > 0):
            raise ConfigError(
                f"Proportion(norm_factor={self.norm_factor}, update_factor={self.update_factor}, "
                f"attention_logit={self.attention_logit}): factors above 1, and a logit above 0"
            )
        if not self.grad_share > USUAL_SHARE:
            raise ConfigError(f"Proportion.grad_share={self.grad_share}: a share of the norm above {USUAL_SHARE}")

    def init(self) -> State:
        """The state before the first row."""
        return ()

    def look(self, state: State, now: Row) -> Finding | None:
        """The gravest of what is out of proportion; the note says how many signals are."""
        found = self._excesses(state, now)
        if not found:
            return None
        worst = max(found, key=lambda excess: (excess.severity, excess.factor))
        others = f", and {len(found) - 1} more" if len(found) > 1 else ""
        return Finding(
            detector=self.name,
            step=int(now["step"]),
            severity=worst.severity,
            signal=worst.signal,
            value=worst.value,
            limit=worst.limit,
            spoils_update=False,
            lasts=worst.lasts,
            note=worst.note + others,
        )

    def learn(self, state: State, now: Row) -> State:
        """Keep a sample now and then. What was reported is not repeated for a window; by then it is the usual."""
        samples = sampled(now)
        if not samples:
            return state
        step, apart = int(now["step"]), self.window / SAMPLES
        reported = {excess.signal for excess in self._excesses(state, now)}
        tracks = {track[0]: track for track in state}
        for signal, value, _ in samples:
            _, first, silent_until, steps, values = tracks.get(signal, (signal, step, 0, (), ()))
            if steps and steps[-1] >= step:  # the run went back: start over
                steps, values = (), ()
            if not steps or step - steps[-1] >= apart:
                # by the time that the next sample is judged, the oldest one kept is as old as the window
                old = bisect_left(steps, step - self.window + apart)
                steps, values = (*steps[old:], step), (*values[old:], value)
            tracks[signal] = (signal, first, step + self.window if signal in reported else silent_until, steps, values)
        return tuple(tracks.values())

    def _excesses(self, state: State, now: Row) -> list[Excess]:
        samples = sampled(now)
        if not samples or not state:
            return []
        step = int(now["step"])
        tracks = {track[0]: track for track in state}
        found = []
        for sample in samples:
            if (track := tracks.get(sample.signal)) is None:
                continue
            _, first, silent_until, steps, values = track
            age = step - first
            begin = bisect_left(steps, step - self.window)
            if begin == len(steps) or steps[-1] >= step or age < self.window or step < silent_until:
                continue
            if not sample.signal.startswith("param_norm"):
                excess = self._excess(sample, values[begin:])
            elif age >= self.young:
                excess = self._norm_excess(sample, step, steps[begin:], values[begin:])
            else:
                continue
            found += [excess] if excess else []
        return found

    def _excess(self, sample: Sample, before: tuple[float, ...]) -> Excess | None:
        """What is out of proportion to the samples before."""
        kind, _, group = sample.signal.partition("/")
        values = sorted(before)
        value, low, usual = sample.value, values[0], values[len(values) // 2]
        match kind:
            case "update_ratio":
                limit = max(self.update_factor * usual, HARMLESS_UPDATE)
            case "grad_norm":
                limit = self.grad_share if usual < USUAL_SHARE else math.inf
            case _:
                limit = max(2 * low, self.attention_logit)
        if value <= limit:
            return None
        note = {
            "update_ratio": f"updates of {group} {value / usual:.0f} times their usual share of the weights",
            "grad_norm": f"{group} has {value:.0%} of the gradient norm, usually {usual:.0%}",
            "attention_logit_max": f"attention logits of {group} {value / low:.1f} times what they were",
        }[kind]
        return Excess(Severity.WATCH, value / limit, sample.signal, value, limit, note, self.window)

    def _norm_excess(
        self, sample: Sample, step: int, steps: tuple[int, ...], before: tuple[float, ...]
    ) -> Excess | None:
        value, low, high = sample.value, min(before), max(before)
        factor = max(value / low, high / value)
        if factor <= self.norm_factor or sample.weight * max(1.0, high / value) < SMALLEST_SHARE:
            return None
        has_grown = value / low >= high / value
        limit = self.norm_factor * low if has_grown else high / self.norm_factor
        changed = [
            (step - at, value / norm if has_grown else norm / value) for at, norm in zip(steps, before, strict=True)
        ]
        # the shortest stretch that is an alarm: norms may have crept before they leapt
        lasts, factor = min((back, times) for back, times in changed if times > self.norm_factor)
        change, span = "grown" if has_grown else "shrunk", "a step" if lasts == 1 else f"{lasts} steps"
        note = f"{sample.signal} has {change} {factor:.1f} times in {span}"
        return Excess(Severity.ALARM, factor, sample.signal, value, limit, note, lasts)


def sampled(now: Row) -> list[Sample]:
    """The signals of a row that should keep their proportion, where they are positive; gradients as shares of all."""
    if "param_norm" not in now and "/" not in "".join(now):
        return []  # most rows
    values = {
        signal: float(value) for signal, value in now.items() if not isinstance(value, str) and 0 < value < math.inf
    }
    groups = [value for signal, value in values.items() if signal.startswith("param_norm/")]
    weights = values.get("param_norm") or math.hypot(*groups) or 1.0
    gradients = values.get("grad_norm", math.inf)
    out = []
    for signal, value in values.items():
        kind, slash, _ = signal.partition("/")
        if kind == "param_norm":
            out.append(Sample(signal, value, value / weights))
        elif kind in ("update_ratio", "attention_logit_max"):
            out.append(Sample(signal, value))
        elif kind == "grad_norm" and slash and 0 < value / gradients < math.inf:
            out.append(Sample(signal, value / gradients))
    return out
