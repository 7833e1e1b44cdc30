"""What eight bits or fewer lose in, what stands in it out: values beyond the range, values that become zero, scales."""

from collections.abc import Iterator

import numpy as np

from sealegs.diagnosis.contract import Standing
from sealegs.diagnosis.first_signals.track import Track, tracks_of
from sealegs.record.run import Run

SATURATED, FAR_SATURATED = 0.01, 0.1
"""Share of the values beyond the largest number: a few in ten thousand are usual."""
MORE = 5.0
"""Growth from the lowest level from which on it is a change, and no habit of this tensor."""
ZEROED, FAR_ZEROED = 0.5, 0.95
"""Share of the values that become zero: a third of the gradients is nothing unusual."""
MORE_ZEROED = 0.25
PERCENT = 1.5
"""A share above is a percentage."""
STUCK = 50
"""Rows for which the largest magnitude of a tensor is the same to all digits, where its history is not updated."""


def judged(run: Run) -> Iterator[Standing]:
    """What stands in the numbers of low precision, the gravest first."""
    found = [*_shares(run), *_scales(run), *_amax(run)]
    yield from sorted(found, key=lambda one: not one.is_grave)


def _shares(run: Run) -> Iterator[Standing]:
    """Shares of saturated and of zeroed values that grow and stay; of several tensors the worst."""
    saturated: list[tuple[float, Track, int, float]] = []
    zeroed: list[tuple[float, Track, int, float]] = []
    for signal, found in (("saturated_share", saturated), ("zeroed_share", zeroed)):
        for track in tracks_of(run, signal):
            unit = 100.0 if track.values.max() > PERCENT else 1.0
            level, lowest = track.level / unit, float(track.level[: track.rows - track.lasting].min()) / unit
            limit = max(SATURATED, MORE * lowest) if found is saturated else max(ZEROED, lowest + MORE_ZEROED)
            row = track.since(level >= limit)
            if row is not None and row > 0:
                found.append((track.end / unit, track, row, lowest))
    for found, words, shows, far in (
        (saturated, "beyond the largest number", "values-saturate", FAR_SATURATED),
        (zeroed, "become zero", "values-vanish", FAR_ZEROED),
    ):
        if found:
            end, track, row, lowest = max(found, key=lambda one: one[0])
            text = (
                f"{track.signal}: {end:.2%} of the values {words} since step {track.steps[row]}, {lowest:.2%} at best"
            )
            yield _standing(track, row, text, shows, is_grave=end >= far)


def _scales(run: Run) -> Iterator[Standing]:
    """A scale of 0, or one that is not finite: what it scales is 0, infinite or NaN."""
    for name in _names(run, "quant_scale"):
        steps, values = run.series(name)
        wrong = ~(np.isfinite(values) & (values != 0))
        if len(values) and wrong[-1] and not wrong.all():
            row = int(np.flatnonzero(~wrong)[-1]) + 1
            text = f"{name} is {values[row]:g} since step {steps[row]}: what it scales cannot be written"
            yield Standing(signal=name, step=int(steps[row]), text=text, shows="scale-of-zero", is_grave=True)
            return


def _amax(run: Run) -> Iterator[Standing]:
    """A largest magnitude that is not finite, is 0 since some step, or never changes while others do."""
    moving = False
    stuck: list[tuple[str, int]] = []
    for name in _names(run, "amax"):
        steps, values = run.series(name)
        if not len(values):
            continue
        broken = ~np.isfinite(values)
        if broken[-1]:
            row = int(np.flatnonzero(~broken)[-1]) + 1 if not broken.all() else 0
            text = f"{name} is not finite since step {steps[row]}"
            yield Standing(signal=name, step=int(steps[row]), text=text, shows="amax-not-finite", is_grave=True)
            return
        living = np.flatnonzero(values != 0)
        if len(living) and len(values) - 1 - living[-1] >= 8:
            row = int(living[-1]) + 1
            text = (
                f"{name} is 0 since step {steps[row]}, {np.median(values[living]):.3g} before: no scale is made of it"
            )
            yield Standing(signal=name, step=int(steps[row]), text=text, shows="amax-of-zero")
            return
        changed = np.flatnonzero(np.diff(values)) + 1
        last = int(changed[-1]) if len(changed) else 0
        moving |= len(changed) > len(values) // 2
        if len(values) - last >= STUCK and len(changed) > 0:
            stuck.append((name, int(steps[last])))
    if moving and stuck:
        name, step = stuck[0]
        text = f"{name} does not change any more since step {step}, while others do: its history is not updated"
        yield Standing(signal=name, step=step, text=text, shows="amax-stuck")


def _names(run: Run, signal: str) -> list[str]:
    return [name for name in run.signals if (name == signal or name.startswith(f"{signal}/")) and run.has_numbers(name)]


def _standing(track: Track, row: int, text: str, shows: str, *, is_grave: bool) -> Standing:
    return Standing(signal=track.signal, step=int(track.steps[row]), text=text, shows=shows, is_grave=is_grave)
