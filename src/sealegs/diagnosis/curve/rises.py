"""Finds the rises of a whole curve, judged with everything before and after at hand.

The live statistic needs a positive per-step loss and 150 values to begin with. Foreign logs have 40 points, or one
every hundred steps, and losses of 0, of 1e18 or below zero. So a value is compared here with the level, the median of
the last few values that were not high, in units of the usual deviation of such values from their level. While a value
is high, the level before it is kept until the curve is back.

Medians of 2 to 16 points are judged in the same way: they show rises that noise hides in single points. The medians of
64 blocks of the whole curve are compared with the lowest so far: they show slow rises.
"""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sealegs.diagnosis.curve.leaps import leaps_of

Floats = NDArray[np.float64]

NEGLIGIBLE = 1e-4
"""Share of the first loss below which differences do not count: 1e-9 to 1e-6 is no rise after 1."""
NEGATIVE = 0.002
"""Share of negative values from which on the curve itself is used, not its logarithm."""
MOST = 16_384
"""The most points that are judged one by one; longer curves are judged by medians of blocks."""
SCALES = (1, 2, 4, 8, 16)
"""Points per median."""
COARSEST = 2 * SCALES[-1] + 1
"""Points that the first of a rise is looked for among: medians over the largest scale are no sharper."""
STEPPED = 0.9
"""Share of high points from which the loss has stepped up, and not just leapt a few times."""
FEWEST = 48
"""Fewest medians with which a scale is used."""
WARM = 8
"""Points before the first one that is judged by those before it alone."""
LEVEL = 12
"""Points whose median is the level."""
SPREAD = 32
"""Points whose median distance from the level gives the usual deviation."""
TAIL = 1024
"""Points whose highest 5 % may give a larger usual deviation, divided by HEAVY as for t3 noise: in a heavy-tailed
curve high values are usual."""
HEAVY = 2.0
HIGH = 4.5
"""Usual deviations above the level from which on a point is high, if its neighbours are, too."""
ALONE = 6.5
"""The same for a single high point. More points give a higher one by chance: times (points / 1000) ** 0.1."""
PAIR = 0.8
"""Share of that which two points need."""
BACK = 3.0
"""Usual deviations below which a point is no longer high. CALM such points end a rise."""
CALM = 3
SMALLEST = 0.12
"""Smallest rise in height: 13 % if heights are logarithms."""
LEAP = 0.16
"""Smallest leap above the trend."""
QUIETEST = 0.01
"""Smallest usual deviation: on a smooth curve everything would be a surprise."""
BLOCKS = 64
"""Blocks of the whole curve in which slow rises are looked for."""
SLOW_HIGH = 6.0
SLOW_SMALLEST = 0.03
"""Smallest slow rise that is still there at the end. One that has come back must reach SMALLEST."""
SLOW_PASSED = 10.0
"""Usual deviations that such a rise must reach, too. In the first tenth it does not count, since rates warm up there,
unless it lasts beyond the first third."""
SLOW_LEAST = 3
"""Fewest blocks that a slow rise lasts."""


class CurveRise(NamedTuple):
    """A stretch of a curve that is above where the curve was before."""

    first: int
    """Index of its first point."""
    last: int
    """Index of its last point; the curve's last if it is not back."""
    deviations: float
    """Its height in usual deviations."""
    height: float
    """Its height above the level before."""
    level: float
    """The level before."""
    is_slow: bool = False
    """Whether only the blocks of the whole curve show it."""
    leap: float = 0.0
    """How far it leaps above the trend, where it does."""


def heights_of(losses: Floats) -> Floats:
    """A scale on which rises can be compared: the logarithm, or shares of the range if the loss is negative."""
    if np.mean(losses < 0) > NEGATIVE:
        low, high = np.quantile(losses, [0.1, 0.9])
        return np.asarray(losses / (2 * max(high - low, 1e-3 * abs(low), 1e-12 * float(np.abs(losses).max()))))
    floor = NEGLIGIBLE * max(losses[:3].max(), float(median(losses)), 1e-300)
    return np.asarray(np.log(np.maximum(losses, 0.0) + floor))


def rises_of(losses: Floats, heights: Floats) -> list[CurveRise]:
    """All rises of a finite curve, in order. Overlapping ones are merged; slow ones stay if others explain little."""
    if len(losses) <= WARM:
        return []
    quick = _with_leaps(_joined([rise for scale in SCALES for rise in _at_scale(heights, scale)]), heights)
    quick = _faded(losses, [_trimmed(heights, rise) for rise in quick])
    slow = [rise for rise in (*_slow(heights), *_from_the_start(heights)) if not _explained(rise, quick)]
    return sorted(quick + [rise for at, rise in enumerate(slow) if not _explained(rise, slow[:at])])


def _with_leaps(rises: list[CurveRise], heights: Floats) -> list[CurveRise]:
    """The rises, and the short leaps that a level before them does not show: where a curve falls, or leaps often."""
    found = list(rises)
    for leap in leaps_of(heights, smallest=LEAP, quietest=QUIETEST):
        inside = [at for at, one in enumerate(rises) if one.first <= leap.last and leap.first <= one.last]
        for at in inside:
            found[at] = found[at]._replace(leap=max(found[at].leap, leap.height))
        if not inside:
            last = len(heights) - 1 if len(heights) - 1 - leap.last < CALM else leap.last
            found.append(CurveRise(leap.first, last, leap.deviations, leap.height, leap.level, leap=leap.height))
    return sorted(found)


def _at_scale(heights: Floats, scale: int) -> Iterator[CurveRise]:
    size = scale * -(-len(heights) // MOST)
    count = len(heights) // size
    if count < (FEWEST if scale > 1 else WARM + 1):
        return
    medians = median(heights[: count * size].reshape(count, size)) if size > 1 else heights
    alone = ALONE * max(1.0, count / 1000) ** 0.1
    for rise, points in (*_early(medians), *_walk(medians)):
        if points >= 3 or rise.deviations > (alone if points == 1 else PAIR * alone):
            last = len(heights) - 1 if rise.last == count - 1 else (rise.last + 1) * size - 1
            yield rise._replace(first=rise.first * size, last=last)


def _early(heights: Floats) -> Iterator[tuple[CurveRise, int]]:
    """Single high points among the first ones: above the one before and above what follows."""
    around: list[float] = heights[: 2 * WARM].tolist()
    usual = max(1.05 * _median(sorted(abs(b - a) for a, b in pairwise(around))), QUIETEST)
    for at in range(2, min(WARM, len(heights) - CALM)):
        level = max(_median(sorted(around[1:at])), _median(sorted(around[at + 1 : at + 1 + CALM])))
        if (above := around[at] - level) > max(SMALLEST, HIGH * usual):
            yield CurveRise(at, at, above / usual, above, level), 1


def small_rises(heights: Floats) -> Iterator[CurveRise]:
    """Rises that are too small for an incident and beyond doubt, in medians of the most points, and are over again."""
    size = SCALES[-1] * -(-len(heights) // MOST)
    count = len(heights) // size
    if count < FEWEST:
        return
    medians = median(heights[: count * size].reshape(count, size))
    for rise, points in _walk(medians, SLOW_SMALLEST):
        if points >= SLOW_LEAST and rise.last < count - CALM and rise.height < SMALLEST:
            yield rise._replace(first=rise.first * size, last=(rise.last + 1) * size - 1)


def _walk(heights: Floats, smallest: float = SMALLEST) -> Iterator[tuple[CurveRise, int]]:
    """Rises against the level before each, with the number of high points."""
    level = usual = top = 0.0
    first = last = points = -1
    levels: list[float] = heights[:WARM].tolist()
    misses: list[float] = []
    in_order: list[float] = []
    since: list[tuple[float, float]] = []
    unseen = known = 0
    for at, height in enumerate(heights[WARM:].tolist(), WARM):
        if first < 0:
            level = _median(sorted(levels[-LEVEL:]))
            if unseen % (16 if len(misses) >= SPREAD else 4) == 0:  # it changes slowly, and takes the most time
                _take_in(in_order, misses, known)
                usual, known = _usual(levels, misses, in_order), len(misses)
            unseen += 1
            above = height - level
            if not above > max(smallest, HIGH * usual):
                levels.append(height)
                misses.append(above)
                continue
            first = last = at
            points, top, since = 1, above, [(height, above)]
            continue
        above = height - level
        since.append((height, above))
        if above > max(smallest / 2, BACK * usual):
            last, points, top = at, points + 1, max(top, above)
        elif at - last >= CALM:
            yield CurveRise(first, last, top / usual, top, level), points
            levels += [value for value, _ in since[-CALM:]]
            misses += [miss for _, miss in (since if len(since) <= 2 * CALM else since[-CALM:])]
            first, unseen = -1, 0
    if first >= 0:
        yield (
            CurveRise(first, last if len(heights) - 1 - last >= CALM else len(heights) - 1, top / usual, top, level),
            points,
        )


def _take_in(in_order: list[float], misses: list[float], known: int) -> None:
    """Make of the last TAIL of the ``known`` misses, in order, the last of all: to sort anew took most of the time.

    >>> misses, in_order = np.random.default_rng(0).standard_normal(3000).tolist(), []
    >>> for known in range(0, 3000, 500):
    ...     _take_in(in_order, misses[: known + 500], known)
    >>> in_order == sorted(misses[-TAIL:])
    True
    """
    in_order += misses[known:]
    in_order.sort()
    for old in misses[max(known - TAIL, 0) : max(len(misses) - TAIL, 0)]:
        del in_order[bisect_left(in_order, old)]


def _usual(levels: list[float], misses: list[float], in_order: list[float]) -> float:
    """The usual distance of points from their level, as a standard deviation."""
    if len(misses) < WARM:
        steps = sorted(abs(b - a) for a, b in pairwise(levels))
        return max(1.05 * _median(steps), QUIETEST)  # 1.4826 / sqrt(2)
    # Not around their median: where a curve falls, misses are negative, and what is usual is less certain.
    recent = misses[-SPREAD:] if len(misses) >= SPREAD else misses[len(misses) // 2 :]
    spread = _median(sorted(map(abs, recent)))
    return max(1.4826 * spread, in_order[int(0.95 * (len(in_order) - 1))] / HEAVY, QUIETEST)


def _slow(heights: Floats) -> Iterator[CurveRise]:
    """Rises above the lowest level so far that last several of 64 blocks."""
    size = max(1, len(heights) // BLOCKS)
    count = len(heights) // size
    if count < WARM:
        return
    skipped = len(heights) - count * size
    blocks = heights[skipped:].reshape(count, size)
    medians = median(blocks)
    level = running_median(medians, 3)
    lowest = np.minimum.accumulate(level)
    within = float(median(np.abs(blocks - medians[:, None]).ravel())) * 1.25 / np.sqrt(size)
    between = 1.3 * float(np.median(np.abs(medians - running_median(medians, 5))))
    usual = max(1.4826 * within, 1.4826 * between, QUIETEST / 2)
    above = level - lowest
    enough = max(SLOW_SMALLEST, SLOW_HIGH * usual)
    for first, last in stretches(above > enough / 2):
        top = float(above[first : last + 1].max())
        is_open = last == count - 1
        is_warming_up = not is_open and first < count / 10 and last < count / 3
        least = enough if is_open else max(enough, SMALLEST, SLOW_PASSED * usual)
        if last - first + 1 >= SLOW_LEAST and top > least and not is_warming_up:
            yield CurveRise(
                skipped + first * size,
                skipped + (last + 1) * size - 1,
                top / usual,
                top,
                float(lowest[first]),
                is_slow=True,
            )


def _from_the_start(heights: Floats) -> Iterator[CurveRise]:
    """A curve that never came back to its start: nine tenths of it are above the lowest of its first points."""
    start, later = float(heights[:CALM].min()), heights[max(len(heights) // 10, CALM) :]
    usual = max(1.4826 * float(median(np.abs(later - median(later)))), QUIETEST)
    lowest = float(np.quantile(later, 0.1)) - start
    if lowest > max(SMALLEST, CALM * usual):
        first = int(np.argmax(heights > start + lowest / 2))
        top = float(later.max()) - start
        yield CurveRise(first, len(heights) - 1, top / usual, top, start, is_slow=True)


def _joined(rises: list[CurveRise]) -> list[CurveRise]:
    joined: list[CurveRise] = []
    for rise in sorted(rises):
        if joined and rise.first <= joined[-1].last + 1:
            before = joined[-1]
            higher = max(before, rise, key=lambda one: one.height)
            joined[-1] = higher._replace(
                first=before.first,
                last=max(before.last, rise.last),
                deviations=max(before.deviations, rise.deviations),
            )
        else:
            joined.append(rise)
    return joined


def _trimmed(heights: Floats, rise: CurveRise) -> CurveRise:
    """A rise from its first high point to its last: medians are coarse."""
    enough = max(SMALLEST, BACK * rise.height / rise.deviations) / 2
    high = np.flatnonzero(heights[rise.first : rise.last + 1] - rise.level > enough)
    if not len(high):
        return rise
    last = rise.last if rise.last == len(heights) - 1 else rise.first + int(high[-1])
    first = _first_of(high, last - rise.first + 1)
    top = int(np.argmax(heights[rise.first : last + 1]))
    return rise._replace(first=rise.first + min(first, max(top, int(high[0]))), last=last)


def _first_of(high: NDArray[np.int_], rows: int) -> int:
    """The first of the high points of a rise. Where the loss has stepped up and stays there, chance has raised a point
    or two among the low ones before the step: the rise begins where fewest points lie on the wrong side."""
    near = high[high < COARSEST]
    if rows < COARSEST or not len(near):
        return int(high[0])
    is_high = np.zeros(COARSEST, dtype=bool)
    is_high[near] = True
    wrong = [int(is_high[:at].sum() + (~is_high[at:]).sum()) for at in near.tolist()]
    first = int(near[int(np.argmin(wrong))])
    is_step = is_high[first:].mean() >= STEPPED and 2 * is_high[:first].sum() < first
    return first if is_step and COARSEST - first >= LEVEL else int(high[0])


def _faded(losses: Floats, rises: list[CurveRise]) -> list[CurveRise]:
    """Rises with their fading ends, at most as long again: losses far below the first have hardly any height."""
    faded = []
    for rise, following in zip(rises, [*(one.first for one in rises[1:]), len(losses) - 1], strict=False):
        before = losses[max(rise.first - LEVEL, 0) : rise.first]
        after = losses[rise.last + 1 : min(2 * rise.last - rise.first + 2, following)]
        if len(before) and len(after) and float(np.median(before)) > 0:
            above = np.flatnonzero(after > np.exp(SMALLEST) * float(np.median(before)))
            back = np.flatnonzero(np.diff(above, prepend=-1) > CALM)  # CALM in a row that were not above
            above = above[: back[0]] if len(back) else above
            rise = rise._replace(last=rise.last + 1 + int(above[-1])) if len(above) else rise
        faded.append(rise)
    return faded


def _explained(slow: CurveRise, quick: list[CurveRise]) -> bool:
    """Whether quick rises cover more than a third of a slow one."""
    shared = sum(max(0, min(slow.last, one.last) - max(slow.first, one.first) + 1) for one in quick)
    return 3 * shared > slow.last - slow.first + 1


def stretches(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """First and last index of each run of True.

    >>> stretches(np.array([True, False, True, True]))
    [(0, 0), (2, 3)]
    """
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return [(int(a), int(b) - 1) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def median(values: Floats) -> Floats:
    """The median along the last axis, for millions of values: in a third of the time, since numpy's own partitions them
    at three places.

    >>> float(median(np.array([4.0, 1.0, 3.0, 2.0]))), median(np.array([[2.0, np.nan, 1.0], [7.0, 5.0, 6.0]])).tolist()
    (2.5, [nan, 6.0])
    """
    half = values.shape[-1] // 2
    parted = np.partition(values, half)
    middle = parted[..., half]
    if values.shape[-1] % 2 == 0:
        middle = (parted[..., :half].max(axis=-1) + middle) / 2
    return np.where(np.isnan(parted[..., half:].max(axis=-1)), np.nan, middle)  # NaN comes last


def running_median(values: Floats, width: int) -> Floats:
    """The median of ``width`` values around each; ``width`` is odd."""
    padded = np.pad(values, width // 2, mode="edge")
    return np.asarray(np.median(np.lib.stride_tricks.sliding_window_view(padded, width), axis=1))


def _median(ordered: list[float]) -> float:
    return 0.5 * (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2])
