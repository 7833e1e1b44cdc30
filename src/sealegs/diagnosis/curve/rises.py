"""A whole curve in, its Rises out: where it went up, judged with everything before and after at hand.

The live statistic needs a positive per-step loss and 150 values to begin with. Foreign logs have 40 points, or one
every hundred steps, and losses of 0, of 1e18 or below zero. So here a value is compared with the median of the last few
that were not high themselves, in units of how far those are usually from theirs; once high, the level before is kept
until the curve is back. The same is asked of medians of 2 to 16 points, which see what noise hides from single ones,
and of 64 blocks of the whole curve, against the lowest so far, which see what comes slowly.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NEGLIGIBLE = 1e-3
"""Share of the first loss below which heights tell losses no longer apart: 1e-9 to 1e-6 is no rise after 1."""
NEGATIVE = 0.002
"""Share of negative values from which the curve is taken as it is, and not its logarithm."""
MOST = 16_384
"""Points looked at one by one; longer curves are looked at by medians of blocks."""
SCALES = (1, 2, 4, 8, 16)
"""Points to a median."""
FEWEST = 48
"""Medians that a scale needs to be asked."""
WARM = 8
"""Points before the first one that is judged by those before it alone."""
LEVEL = 12
"""Points whose median is the level."""
SPREAD = 32
"""Points whose median distance from the level is the usual one ..."""
TAIL = 1024
"""... unless the highest 5 % of so many, divided by what they are of t3 noise, say that it is more: heavy tails are
usual where they are usual."""
HEAVY = 2.0
HIGH = 4.5
"""Usual deviations above the level from which a point is high, if its neighbours are ..."""
ALONE = 6.5
"""... and if it is alone. Among more points a higher one comes by chance: times (points / 1000) ** 0.1."""
PAIR = 0.8
"""Share of that which two points need."""
BACK = 3.0
"""Usual deviations below which a point is no longer high; so many points end a rise:"""
CALM = 3
SMALLEST = 0.12
"""Least rise in height: 13 % where heights are logarithms."""
QUIETEST = 0.01
"""The least that is taken for a usual deviation: a smooth curve would make anything a surprise."""
BLOCKS = 64
"""Blocks of the whole curve in which slow rises are looked for."""
SLOW_HIGH = 6.0
SLOW_SMALLEST = 0.06
"""Least rise that is there at the end still; one that has come back must be as high as any other, and ..."""
SLOW_PASSED = 10.0
"""... higher above the noise. Those of the first tenth are left out: a rise while rates warm up is usual."""
SLOW_LEAST = 3
"""Blocks that it must last."""


class CurveRise(NamedTuple):
    """A stretch of a curve that is above where the curve was before."""

    first: int
    """Index of its first point."""
    last: int
    """Index of its last point; that of the curve, where it is not back."""
    deviations: float
    """How high, in usual deviations."""
    height: float
    """How high, in heights above the level before."""
    level: float
    """The height before."""
    is_slow: bool = False
    """Whether it is only seen in blocks of the whole curve."""


def heights_of(losses: Floats) -> Floats:
    """A scale on which rises of a curve can be compared: the logarithm, or shares of the range of a negative loss."""
    if np.mean(losses < 0) > NEGATIVE:
        low, high = np.quantile(losses, [0.1, 0.9])
        return np.asarray(losses / (2 * max(high - low, 1e-3 * abs(low), 1e-12 * float(np.abs(losses).max()))))
    floor = NEGLIGIBLE * max(losses[:3].max(), float(np.median(losses)), 1e-300)
    return np.asarray(np.log(np.maximum(losses, 0.0) + floor))


def rises_of(losses: Floats) -> list[CurveRise]:
    """All rises of a finite curve, in order. Those that overlap are one; slow ones stay where others explain little."""
    if len(losses) <= WARM:
        return []
    heights = heights_of(losses)
    quick = _joined([rise for scale in SCALES for rise in _at_scale(heights, scale)])
    quick = _faded(losses, [_trimmed(heights, rise) for rise in quick])
    slow = [rise for rise in (*_slow(heights), *_from_the_start(heights)) if not _explained(rise, quick)]
    return sorted(quick + [rise for at, rise in enumerate(slow) if not _explained(rise, slow[:at])])


def _at_scale(heights: Floats, scale: int) -> Iterator[CurveRise]:
    size = scale * -(-len(heights) // MOST)
    count = len(heights) // size
    if count < (FEWEST if scale > 1 else WARM + 1):
        return
    medians = np.median(heights[: count * size].reshape(count, size), axis=1) if size > 1 else heights
    alone = ALONE * max(1.0, count / 1000) ** 0.1
    for rise, points in (*_early(medians), *_walk(medians)):
        if points >= 3 or rise.deviations > (alone if points == 1 else PAIR * alone):
            last = len(heights) - 1 if rise.last == count - 1 else (rise.last + 1) * size - 1
            yield rise._replace(first=rise.first * size, last=last)


def _early(heights: Floats) -> Iterator[tuple[CurveRise, int]]:
    """Single high points among the first ones: above the one before and above what follows."""
    around = heights[: 2 * WARM]
    usual = max(1.05 * float(np.median(np.abs(np.diff(around)))), QUIETEST)
    for at in range(2, min(WARM, len(heights) - CALM)):
        level = max(float(np.median(heights[1:at])), float(np.median(heights[at + 1 : at + 1 + CALM])))
        if (above := float(heights[at]) - level) > max(SMALLEST, HIGH * usual):
            yield CurveRise(at, at, above / usual, above, level), 1


def _walk(heights: Floats) -> Iterator[tuple[CurveRise, int]]:
    """Rises against the level before each, with the number of points that were high."""
    level = usual = top = 0.0
    first = last = points = -1
    levels: list[float] = heights[:WARM].tolist()
    misses: list[float] = []
    since: list[tuple[float, float]] = []
    unseen = 0
    for at, height in enumerate(heights[WARM:].tolist(), WARM):
        if first < 0:
            level = _median(sorted(levels[-LEVEL:]))
            if unseen % (16 if len(misses) >= SPREAD else 4) == 0:  # it changes slowly, and takes the most time
                usual = _usual(levels, misses)
            unseen += 1
            above = height - level
            if not above > max(SMALLEST, HIGH * usual):
                levels.append(height)
                misses.append(above)
                if len(levels) > 2 * TAIL:
                    del levels[:TAIL], misses[:-TAIL]
                continue
            first = last = at
            points, top, since = 1, above, [(height, above)]
            continue
        above = height - level
        since.append((height, above))
        if above > max(SMALLEST / 2, BACK * usual):
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


def _usual(levels: list[float], misses: list[float]) -> float:
    """How far points are from their level, as a standard deviation."""
    if len(misses) < WARM:
        steps = sorted(abs(b - a) for a, b in pairwise(levels))
        return max(1.05 * _median(steps), QUIETEST)  # 1.4826 / sqrt(2)
    # Not about their middle: where a curve falls, misses are below zero, and it is less sure what is usual there.
    recent = misses[-SPREAD:] if len(misses) >= SPREAD else misses[len(misses) // 2 :]
    spread = _median(sorted(abs(miss) for miss in recent))
    high = sorted(misses[-TAIL:])
    return max(1.4826 * spread, high[int(0.95 * (len(high) - 1))] / HEAVY, QUIETEST)


def _slow(heights: Floats) -> Iterator[CurveRise]:
    """What is above the lowest level so far for several of 64 blocks."""
    size = max(1, len(heights) // BLOCKS)
    count = len(heights) // size
    if count < WARM:
        return
    skipped = len(heights) - count * size
    blocks = heights[skipped:].reshape(count, size)
    medians = np.median(blocks, axis=1)
    level = running_median(medians, 3)
    lowest = np.minimum.accumulate(level)
    within = float(np.median(np.abs(blocks - medians[:, None]))) * 1.25 / np.sqrt(size)
    between = 1.3 * float(np.median(np.abs(medians - running_median(medians, 5))))
    usual = max(1.4826 * within, 1.4826 * between, QUIETEST / 2)
    above = level - lowest
    enough = max(SLOW_SMALLEST, SLOW_HIGH * usual)
    for first, last in stretches(above > enough / 2):
        top = float(above[first : last + 1].max())
        is_open = last == count - 1
        is_warming_up = not is_open and first < count / 10
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
    """A curve that has never been back where it began: nine tenths of it are above the lowest of its first points."""
    start, later = float(heights[:CALM].min()), heights[max(len(heights) // 10, CALM) :]
    usual = max(1.4826 * float(np.median(np.abs(later - np.median(later)))), QUIETEST)
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
    """From its first high point to its last: medians are coarse."""
    enough = max(SMALLEST, BACK * rise.height / rise.deviations) / 2
    high = np.flatnonzero(heights[rise.first : rise.last + 1] - rise.level > enough)
    if not len(high):
        return rise
    last = rise.last if rise.last == len(heights) - 1 else rise.first + int(high[-1])
    return rise._replace(first=rise.first + int(high[0]), last=last)


def _faded(losses: Floats, rises: list[CurveRise]) -> list[CurveRise]:
    """With what fades out after each, as long again at the most: losses far below the first have hardly a height."""
    faded = []
    for rise, following in zip(rises, [*(one.first for one in rises[1:]), len(losses) - 1], strict=False):
        before = losses[max(rise.first - LEVEL, 0) : rise.first]
        after = losses[rise.last + 1 : min(2 * rise.last - rise.first + 2, following)]
        if len(before) and len(after) and float(np.median(before)) > 0:
            above = np.flatnonzero(after > np.exp(SMALLEST) * float(np.median(before)))
            back = np.flatnonzero(np.diff(above, prepend=-1) > CALM)  # so many in a row that were not
            above = above[: back[0]] if len(back) else above
            rise = rise._replace(last=rise.last + 1 + int(above[-1])) if len(above) else rise
        faded.append(rise)
    return faded


def _explained(slow: CurveRise, quick: list[CurveRise]) -> bool:
    """Whether other rises are a third of a slow one, and what is left at its end, if anything is, is theirs too."""
    shared = sum(max(0, min(slow.last, one.last) - max(slow.first, one.first) + 1) for one in quick)
    return 3 * shared > slow.last - slow.first + 1


def stretches(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """First and last index of each row of True.

    >>> stretches(np.array([True, False, True, True]))
    [(0, 0), (2, 3)]
    """
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return [(int(a), int(b) - 1) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def running_median(values: Floats, width: int) -> Floats:
    """The median of so many values around each; an odd number."""
    padded = np.pad(values, width // 2, mode="edge")
    return np.asarray(np.median(np.lib.stride_tricks.sliding_window_view(padded, width), axis=1))


def _median(ordered: list[float]) -> float:
    return 0.5 * (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2])
