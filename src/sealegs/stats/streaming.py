"""The streaming statistic: how surprising each value of a stream is, from about twenty floats of state.

The signal is the logarithm of something positive: log loss, log gradient norm. A signal of both signs has a scale that
is nearly linear around zero and a logarithm far from it, on either side. A value is first judged against the level,
slope and scale of its own past, and learned from after. The influence of one value is bounded, so an outlier cannot
hide the next one, and never zero, so a new level is accepted in the end.

    x = log(value)                   of a positive signal
    x = asinh(value / unit)          of one of both signs; the unit is fixed by its first values
    e = x - (level + slope)          what was not expected
    r = e / scale                    in units of the usual
    p = P(r or more)                 from tracked quantiles, and a generalised Pareto tail beyond the last of them

The statistic is written four times, and tests hold the four equal. Here: ``look`` and ``learn``, value by value, which
``detectors/spike.py`` uses live; and ``scan``, over whole curves, which ``diagnosis/curve/live_statistic.py`` uses
(``tests/stats/test_streaming.py``). On the device: ``step/gate.py`` in torch (``tests/step/test_gate.py``) and
``step/gate_triton.py`` as a kernel (``tests/gpu/test_gate_on_cuda.py``).
"""

import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

START = 32
"""Values that the first level and scale are taken from. Until then nothing is judged."""
SETTLED = 118
"""Values after the start from which quantiles and tail are learned. Before, the level is still catching up with a loss
that falls fast, and its residuals say nothing about noise (learned from them, a tail stayed ten times too wide)."""

LEVEL_RATE = 1 / 32
SLOPE_RATE = 1 / 2048
"""Slow, and from zero: a slope taken from the first steep steps overshoots, and the level is lost for hundreds."""
SCALE_RATE = 0.01
QUANTILE_RATE = 0.02
TAIL_RATE = 1 / 64
"""Per value beyond the last quantile: 64 of them are about 3200 steps."""

PATIENCE = 100
"""Suspicious values in a row that make up a burst at most. The last of them is taken as the new level."""
ACCEPTED_SPREAD = 0.1
"""Share of the way to a new level that counts as its scale at first: one value does not say where it will settle."""
WINSOR = 3.0
"""Residuals count for at most this many scales in level and slope; in a burst, for at most one."""
LARGEST_EXCESS = 8.0
"""The most that one value can teach the tail. With 20, the first value of a burst taught an uncalibrated tail that such
things happen: of 40 shifts of +40 % at step 800 half were let through within 83 steps, the first at once."""
SMALLEST_SCALE = 1e-3
"""The least that counts as noise: a signal that hardly moves would make anything a surprise."""
SMALLEST_SPREAD = 1e-6
NEARLY_LINEAR = 20.0
"""Spreads of the first values that make the unit of a signal of both signs. Usual values are then on a linear scale,
and what is far beyond on a logarithm, which draws heavy tails in. With 100 more of t3 noise has p < 5e-6 (6.7 in 100k,
not 5.0); with 5 a leap of 10 spreads is found in a tenth of normal noise, not in nine tenths."""
UNITS = (1e-100, 1e100)
"""The smallest and the largest unit: a value divided by it is finite."""
POSITIVE, NO_UNIT_YET = 0.0, -1.0
"""What stands for the unit of a positive signal, and of one of both signs that has not started."""
HEAVIEST_TAIL = 0.35
"""Largest shape of the Pareto tail."""
MEDIAN_OF_NORMAL = 0.6745
"""The median of |z| for a normal z: makes ``scale`` a standard deviation where the noise is normal."""

LEVELS = (0.2, 0.1, 0.02)
"""Upper probabilities of the tracked quantiles."""
LOG_LEVELS = (math.log(0.2), math.log(0.1), math.log(0.02))
# A run begins with the quantiles and tail of Student's t with 4 degrees of freedom, in units of its own scale: training
# losses have tails, and from the normal ones there were a third more false gates.
FIRST_QUANTILES = (0.87, 1.42, 2.8)
FIRST_EXCESS = (0.9, 2 * 0.9**2 * 1.3)
QUANTILE_GAP = 0.05


LARGEST = math.log(sys.float_info.max)
GROWN_UP = SETTLED + 30
"""Values after which every rate is at its final value."""


def level_rate(age: int) -> float:
    """Rate of the level: from a quarter down to the final rate within 112 values."""
    return max(LEVEL_RATE, 1 / (age / 4 + 4))


def scale_rate(age: int) -> float:
    """Rate of the scale: down to the final rate within 90 values."""
    return max(SCALE_RATE, 1 / (age + 10))


def quantile_rate(age: int) -> float:
    """Rate of the quantiles, once they are learned: down to the final rate within 30 values."""
    return max(QUANTILE_RATE, 1 / (age - SETTLED + 20))


def tail_rate(beyond: int) -> float:
    """Rate of the tail, by the values beyond the last quantile so far; the first tail counts as sixteen."""
    return max(TAIL_RATE, 1 / (beyond + 17))


class StreamState(NamedTuple):
    """The state of a stream."""

    age: int = 0
    """Values learned since the start."""
    early: tuple[float, ...] = ()
    """The first values, until there are enough to start with."""
    level: float = 0.0
    slope: float = 0.0
    scale: float = 1.0
    q80: float = FIRST_QUANTILES[0]
    q90: float = FIRST_QUANTILES[1]
    q98: float = FIRST_QUANTILES[2]
    excess: float = FIRST_EXCESS[0]
    excess_squared: float = FIRST_EXCESS[1]
    beyond: int = 0
    """How many values the tail has been learned from."""
    burst: int = 0
    """Suspicious values in a row, up to the last. A burst teaches scale and tail only once."""
    unit: float = POSITIVE
    """What values of both signs are divided by, above 0 once that is known."""

    @property
    def has_started(self) -> bool:
        """Whether values can be judged yet."""
        return len(self.early) >= START


class Surprise(NamedTuple):
    """How surprising one value is."""

    r: float
    """Scales above what was expected."""
    p: float
    """Probability of such a value or a higher one, if nothing is wrong. 1 while there is nothing to compare with."""


NOTHING_YET = Surprise(0.0, 1.0)
SIGNED = StreamState(unit=NO_UNIT_YET)
"""The first state of a signal of both signs."""


def height(state: StreamState, value: float) -> float:
    """The number that stands for a value on the stream's scale. Until a signal of both signs has a unit, the value
    itself.

    >>> round(height(StreamState(), 2.0), 3), round(height(StreamState(unit=5.0), -1000.0), 3)
    (0.693, -5.991)
    """
    unit = state.unit
    if unit == POSITIVE:
        return math.log(value)
    return math.asinh(value / unit) if unit > 0 else value


def value_at(state: StreamState, x: float) -> float:
    """The value at a height, the inverse of ``height``; infinite beyond the largest float."""
    if x >= LARGEST:
        return math.inf
    return math.exp(x) if state.unit == POSITIVE else state.unit * math.sinh(x)


def look(state: StreamState, x: float) -> Surprise:
    """Judge a finite value against the state; change nothing."""
    if not state.has_started:
        return NOTHING_YET
    r = (x - (state.level + state.slope)) / state.scale
    return Surprise(r, probability(state, r))


def probability(state: StreamState, r: float) -> float:
    """P(r or more): log-linear between the tracked quantiles, Pareto beyond the last."""
    if r <= 0:
        return 1.0
    if r <= state.q80:
        return math.exp(LOG_LEVELS[0] * r / state.q80)
    if r <= state.q90:
        return math.exp(LOG_LEVELS[0] + (LOG_LEVELS[1] - LOG_LEVELS[0]) * (r - state.q80) / (state.q90 - state.q80))
    if r <= state.q98:
        return math.exp(LOG_LEVELS[1] + (LOG_LEVELS[2] - LOG_LEVELS[1]) * (r - state.q90) / (state.q98 - state.q90))
    return _beyond(r - state.q98, state.excess, state.excess_squared)


def limit(state: StreamState, p: float) -> float:
    """The value that has just this ``p``, for p up to the last quantile's: the inverse of ``look``.

    >>> state = StreamState(early=(0.0,) * START)
    >>> round(look(state, limit(state, 1e-5)).p, 9)
    1e-05
    """
    assert 0 < p <= LEVELS[2]
    shape, spread = _tail(state.excess, state.excess_squared)
    odds = LEVELS[2] / p
    y = spread * (math.log(odds) if shape == 0 else (odds**shape - 1) / shape)
    return state.level + state.slope + state.scale * (state.q98 + y)


def _tail(excess: float, excess_squared: float) -> tuple[float, float]:
    """Shape and spread of the Pareto tail, by moments."""
    variance = excess_squared - excess * excess
    shape = 0.5 * (1 - excess * excess / variance) if variance > 0 else 0.0
    shape = min(max(shape, 0.0), HEAVIEST_TAIL)
    return shape, max(excess * (1 - shape), SMALLEST_SPREAD)


def _beyond(y: float, excess: float, excess_squared: float) -> float:
    """P(more than y beyond the last quantile)."""
    shape, spread = _tail(excess, excess_squared)
    y /= spread
    return LEVELS[2] * (math.exp(-y) if shape == 0 else (1 + shape * y) ** (-1 / shape))


def is_suspicious(state: StreamState, p: float, limit: float) -> bool:
    """Whether a value begins a burst or continues one; to continue, it need not be as rare.

    Without the second half, a burst whose values lie around the limit ends at the first one above it, and the next one
    teaches scale and tail again.
    """
    return p < limit or (state.burst > 0 and p < LEVELS[2])


def is_accepted_next(state: StreamState) -> bool:
    """Whether one more suspicious value is taken as the new level."""
    return state.burst + 1 >= PATIENCE


def learn(state: StreamState, x: float, *, suspicious: bool = False) -> StreamState:
    """The state after a finite value."""
    if not state.has_started:
        early = (*state.early, x)
        if len(early) < START:
            return state._replace(early=early)
        return begun(early) if state.unit == POSITIVE else begun_signed(early)
    age, early, level, slope, scale, q80, q90, q98, excess, squared, beyond, burst, unit = state
    e = x - (level + slope)
    r = e / scale
    if suspicious and is_accepted_next(state):
        scale = max(scale, ACCEPTED_SPREAD * abs(e))
        return StreamState(age + 1, early, x, 0.0, scale, q80, q90, q98, excess, squared, beyond, 0, unit)
    in_burst = suspicious and burst > 0
    bounded = (1.0 if in_burst else -WINSOR if r < -WINSOR else WINSOR if r > WINSOR else r) * scale
    is_early = age < GROWN_UP
    by_level = level_rate(age) if is_early else LEVEL_RATE
    level, slope = level + slope + by_level * bounded, slope + SLOPE_RATE * bounded
    if not in_burst:
        by_scale = scale_rate(age) if is_early else SCALE_RATE
        scale *= math.exp(0.5 * by_scale if abs(e) > MEDIAN_OF_NORMAL * scale else -0.5 * by_scale)
        scale = max(scale, SMALLEST_SCALE)
    if age >= SETTLED and not in_burst:
        rate = quantile_rate(age) if is_early else QUANTILE_RATE
        if r > q98:
            y = min(r - q98, LARGEST_EXCESS)
            speed = tail_rate(beyond)
            beyond += 1
            excess += speed * (y - excess)
            squared += speed * (y * y - squared)
        q80 = max(q80 + rate * ((r > q80) - LEVELS[0]), QUANTILE_GAP)
        q90 = max(q90 + rate * ((r > q90) - LEVELS[1]), q80 + QUANTILE_GAP)
        q98 = max(q98 + rate * ((r > q98) - LEVELS[2]), q90 + QUANTILE_GAP)
    burst = burst + 1 if suspicious else 0
    return StreamState(age + 1, early, level, slope, scale, q80, q90, q98, excess, squared, beyond, burst, unit)


def begun(early: Sequence[float]) -> StreamState:
    """The first level and scale: medians, and the scale from differences, which neither trend nor outlier moves."""
    return StreamState(early=tuple(early), level=median(early[-9:]), scale=max(spread_of(early), SMALLEST_SCALE))


def begun_signed(early: Sequence[float]) -> StreamState:
    """The same for values of both signs, and their unit: large beside their noise, and no smaller than they are."""
    size, noise = median(map(abs, early)), NEARLY_LINEAR * spread_of(early)
    unit = min(max(noise if noise > size else size, UNITS[0]), UNITS[1])
    return begun([math.asinh(value / unit) for value in early])._replace(unit=unit)


def spread_of(early: Sequence[float]) -> float:
    """The noise of the first values, as a standard deviation."""
    differences = [after - before for before, after in pairwise(early)]
    drift = median(differences)
    spread = median(abs(difference - drift) for difference in differences) / MEDIAN_OF_NORMAL
    return spread / math.sqrt(2)


def scan(
    values: NDArray[np.float64], *, limit: float, is_signed: bool = False
) -> tuple[NDArray[np.float64], StreamState]:
    """p of each value of a finished stream, and the state after it: ``look`` and ``learn`` written out in one loop.

    Values are heights, or bare values if the signal ``is_signed``. They are suspicious by ``is_suspicious``; those that
    are not finite are left out and have p = 0. It is more than twice as fast as the fold, and equal to it
    (tests/stats/test_streaming.py).
    """
    p_of = np.ones(len(values))
    state = SIGNED if is_signed else StreamState()
    stream = iter(enumerate(values.tolist()))
    for i, x in stream:
        if not math.isfinite(x):
            p_of[i] = 0.0
            continue
        state = learn(state, x)
        if state.has_started:
            break
    age, early, level, slope, scale, q80, q90, q98, excess, squared, beyond, burst, unit = state
    low, middle, high = LEVELS
    exp, is_finite = math.exp, math.isfinite
    up, down = exp(0.5 * SCALE_RATE), exp(-0.5 * SCALE_RATE)
    log_low, log_middle, log_high = LOG_LEVELS
    for i, x in stream:
        if not is_finite(x):
            p_of[i] = 0.0
            continue
        if is_signed:
            x = math.asinh(x / unit)
        e = x - (level + slope)
        r = e / scale
        if r <= 0:
            p = 1.0
        elif r <= q80:
            p = exp(log_low * r / q80)
        elif r <= q90:
            p = exp(log_low + (log_middle - log_low) * (r - q80) / (q90 - q80))
        elif r <= q98:
            p = exp(log_middle + (log_high - log_middle) * (r - q90) / (q98 - q90))
        else:
            p = _beyond(r - q98, excess, squared)
        p_of[i] = p
        suspicious = p < limit or (burst > 0 and p < high)

        if suspicious and burst + 1 >= PATIENCE:
            level, slope, scale, burst = x, 0.0, max(scale, ACCEPTED_SPREAD * abs(e)), 0
            age += 1
            continue
        in_burst = suspicious and burst > 0
        bounded = (1.0 if in_burst else -WINSOR if r < -WINSOR else WINSOR if r > WINSOR else r) * scale
        is_early = age < GROWN_UP
        by_level = level_rate(age) if is_early else LEVEL_RATE
        level, slope = level + slope + by_level * bounded, slope + SLOPE_RATE * bounded
        if not in_burst:
            is_surprised = abs(e) > MEDIAN_OF_NORMAL * scale
            if is_early:
                scale *= exp((0.5 if is_surprised else -0.5) * scale_rate(age))
            else:
                scale *= up if is_surprised else down
            if scale < SMALLEST_SCALE:
                scale = SMALLEST_SCALE
        if age >= SETTLED and not in_burst:
            rate = quantile_rate(age) if is_early else QUANTILE_RATE
            if r > q98:
                y = min(r - q98, LARGEST_EXCESS)
                speed = tail_rate(beyond)
                beyond += 1
                excess += speed * (y - excess)
                squared += speed * (y * y - squared)
            q80 += rate * ((r > q80) - low)
            if q80 < QUANTILE_GAP:
                q80 = QUANTILE_GAP
            q90 += rate * ((r > q90) - middle)
            if q90 < q80 + QUANTILE_GAP:
                q90 = q80 + QUANTILE_GAP
            q98 += rate * ((r > q98) - high)
            if q98 < q90 + QUANTILE_GAP:
                q98 = q90 + QUANTILE_GAP
        burst = burst + 1 if suspicious else 0
        age += 1
    return p_of, StreamState(age, early, level, slope, scale, q80, q90, q98, excess, squared, beyond, burst, unit)
