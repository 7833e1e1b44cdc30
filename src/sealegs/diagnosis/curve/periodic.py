"""A curve in, the period with which it goes up and down all along out, where there is one."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sealegs.diagnosis.curve.loss_curve import Floats

SHORTEST = 8
"""Points of the shortest period."""
FEWEST = 64
"""Points of the shortest curve in which a period is looked for."""
MOST = 4096
"""Points that are looked at: of a longer curve, means of as many stretches."""
CYCLES, MANY = 3.5, 6.0
"""Fewest periods in a curve, and those from which on chance makes none."""
FORETOLD, BY_FEW = 0.5, 0.7
"""Share of the variance about the trend that the period must foretell; and where there are few: in so long a wave noise
that wanders is like one."""
ALIKE = 0.6
"""Correlation of each single period with the shape of all of them."""
WAVES = 4
"""Harmonics of which the shape is made: enough for blocks."""
TREND = 4
"""Terms of the trend, in the logarithm of the row."""
EXTREME = (0.01, 0.99)
"""Quantiles beyond which a value counts no more: a spike is no wave."""
CANDIDATES, REFINED = 4, 9


class Period(NamedTuple):
    """How a curve repeats itself."""

    rows: float
    height: float
    """From the lowest to the highest of its shape, without noise."""


def period_of(heights: Floats) -> Period | None:
    """The period of a curve; None where it has none."""
    if len(heights) < FEWEST:
        return None
    size = -(-len(heights) // MOST)
    points = (
        np.clip(heights, *np.quantile(heights, EXTREME))[: len(heights) // size * size].reshape(-1, size).mean(axis=1)
    )
    count = len(points)
    trend = np.log1p(np.arange(count) + count / 20)[:, None] ** np.arange(TREND)
    axes = np.linalg.qr(trend)[0]
    rest = points - axes @ (axes.T @ points)
    power = np.abs(np.fft.rfft(rest * np.hanning(count))) ** 2
    power[: int(CYCLES)] = power[count // SHORTEST + 1 :] = 0.0
    best, foretold = 0.0, 0.0
    centres = np.argsort(power)[-CANDIDATES:]
    for reach in (0.5, 0.5 / REFINED):
        cycles = np.linspace(centres - reach, centres + reach, REFINED, axis=1).ravel()
        cycles = cycles[(cycles >= CYCLES) & (cycles <= count / SHORTEST)]
        shares = _shares(rest, axes, cycles)
        if len(shares) and shares.max() > foretold:
            best, foretold = float(cycles[shares.argmax()]), float(shares.max())
        centres = np.array([best])
    if not best or foretold < (FORETOLD if best >= MANY else BY_FEW):
        return None
    (waves,) = _waves(count, np.array([best])).transpose(0, 2, 1)
    shape = waves @ np.linalg.lstsq(np.hstack([trend, waves]), points, rcond=None)[0][TREND:]
    apart = points - _fitted(np.hstack([trend, waves]), points) + shape
    each = np.arange(count) * best // count
    alike = [_correlation(apart[each == cycle], shape[each == cycle]) for cycle in range(int(best))]
    return Period(size * count / best, float(np.ptp(shape))) if min(alike) >= ALIKE else None


def _shares(rest: Floats, axes: Floats, cycles: Floats) -> Floats:
    """The share of the variance about the trend that a wave with its harmonics foretells, for each number of cycles.

    ``axes`` are orthogonal and span the trend, which is not in ``rest`` any more: so the waves without it are enough.
    """
    without = float(rest @ rest)
    if not without > 0:
        return np.zeros(len(cycles))
    waves = _waves(len(rest), cycles)
    of_trend = waves @ axes
    products = waves @ waves.transpose(0, 2, 1) - of_trend @ of_trend.transpose(0, 2, 1)
    along = waves @ rest
    # the fourth harmonic of the shortest period has no sine: what is next to nothing there counts as nothing
    heights = np.linalg.pinv(products, rcond=1e-9, hermitian=True) @ along[:, :, None]
    return np.asarray((along * heights[:, :, 0]).sum(axis=1) / without)


def _waves(count: int, cycles: Floats) -> Floats:
    """Cosines and sines of all harmonics, point by point, for each number of cycles."""
    turns = np.empty((len(cycles), WAVES, count), dtype=np.complex128)
    np.exp(2j * np.pi / count * cycles[:, None] * np.arange(count), out=turns[:, 0])
    for harmonic in range(1, WAVES):
        np.multiply(turns[:, harmonic - 1], turns[:, 0], out=turns[:, harmonic])
    return np.concatenate([turns.real, turns.imag], axis=1)


def _fitted(terms: Floats, points: Floats) -> Floats:
    fitted: NDArray[np.float64] = terms @ np.linalg.lstsq(terms, points, rcond=None)[0]
    return fitted


def _correlation(one: Floats, other: Floats) -> float:
    """Of two stretches; 0 where one of them is level."""
    return float(np.corrcoef(one, other)[0, 1]) if len(one) > 2 and one.std() > 0 and other.std() > 0 else 0.0
