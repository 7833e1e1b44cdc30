"""A seed in, streams out that carry their own truth: healthy runs of known noise, and what is done to a run.

An injection takes a healthy run and a step of it, and gives what the run shows from that step on, with the steps that
something is wrong with. Everything else of what it gives is the healthy run, untouched.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]
Random = np.random.Generator


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """What a run, or a part of one, shows, and the truth about it."""

    name: str
    loss: Column
    grad_norm: Column | None = None
    bad: tuple[int, ...] = ()
    """Steps that something is wrong with, counted from the first of this stream."""
    onset: int = 0
    """The step from which a flag counts as having found it."""
    peak: int | None = None
    """The step of the highest loss, where it comes after the onset. What is flagged before it is flagged in time."""

    def __len__(self) -> int:
        return len(self.loss)

    @property
    def seen(self) -> tuple[bytes, bytes]:
        """All that it shows, to compare by."""
        return self.loss.tobytes(), b"" if self.grad_norm is None else self.grad_norm.tobytes()

    def part(self, start: int, end: int) -> "Stream":
        """A copy of some of its steps, said to be healthy."""
        norm = None if self.grad_norm is None else self.grad_norm[start:end].copy()
        return Stream(name=self.name, loss=self.loss[start:end].copy(), grad_norm=norm)


def autoregressive(random: Random, steps: int) -> Column:
    """AR(1) with coefficient 0.5 and variance 1."""
    shocks = random.standard_normal(steps) * np.sqrt(0.75)
    noise = np.empty(steps)
    last = random.standard_normal()
    for i, shock in enumerate(shocks.tolist()):
        noise[i] = last = 0.5 * last + shock
    return noise


NOISES: dict[str, Callable[[Random, int], Column]] = {
    "Gaussian": lambda random, steps: random.standard_normal(steps),
    "t5": lambda random, steps: random.standard_t(5, steps) / np.sqrt(5 / 3),
    "t3": lambda random, steps: random.standard_t(3, steps) / np.sqrt(3),
    # both with a skewness of about 2
    "log-normal": lambda random, steps: (np.exp(0.551 * random.standard_normal(steps)) - 1.164) / 0.6935,
    "gamma": lambda random, steps: random.standard_gamma(1.0, steps) - 1.0,
    "AR(0.5)": autoregressive,
}
"""Noise by name, each with mean 0 and variance 1."""


def flat(steps: int) -> Column:
    """A loss that has stopped falling."""
    return np.full(steps, 3.3)


def power_law(steps: int) -> Column:
    """From 11 down to about 3.3, as fast as the public curves."""
    return 2.8 + 8.2 * (1 + np.arange(steps) / 15) ** -0.45


TRENDS = {"flat": flat, "power law": power_law}


def healthy(noise: str, trend: str, steps: int, random: Random, *, with_norm: bool = False) -> Stream:
    """A run that nothing is wrong with: noise of 1.2 % on the loss, and a gradient norm that is log-normal by 12 %."""
    level = TRENDS[trend](steps)
    loss = np.maximum(level * (1 + 0.012 * NOISES[noise](random, steps)), 0.05)
    norm = None
    if with_norm:
        norm = 0.27 * (level / level[-1]) * np.exp(0.12 * random.standard_normal(steps))
    return Stream(name=f"{noise}, {trend}", loss=loss, grad_norm=norm)


WORKED_STEP = 312


def worked_example(seed: int, *, spiked: bool = True) -> Stream:
    """A run of 500 steps: at step 312 the loss goes from 2.31 to 5.84, the norm from 0.6 to 47.2; 3.40 at step 360."""
    random = np.random.default_rng([2, seed])
    steps = np.arange(500)
    level = 1.6 + 5.3 * (1 + steps / 12) ** -0.62
    level *= 2.31 / level[WORKED_STEP]
    loss = level * (1 + 0.03 * random.standard_normal(500))
    norm = 0.6 * np.exp(0.2 * random.standard_normal(500))
    if not spiked:
        return Stream(name="worked example, healthy", loss=loss, grad_norm=norm)
    after = np.arange(500 - WORKED_STEP)
    loss[WORKED_STEP:] *= 1 + (3.40 / 2.31 - 1) * np.exp(-np.maximum(after - 48, 0) / 100)
    loss[WORKED_STEP:] += (5.84 - 3.40) * np.exp(-after / 10)
    norm[WORKED_STEP:] += 46.6 * np.exp(-after / 3)
    loss[WORKED_STEP], norm[WORKED_STEP] = 5.84, 47.2
    return Stream(name="worked example", loss=loss, grad_norm=norm, bad=tuple(range(WORKED_STEP, 500)))


Injection = Callable[[Stream, int], Stream]


def level_at(base: Stream, place: int) -> float:
    """The loss just before."""
    return float(np.median(base.loss[place - 50 : place]))


def nothing(base: Stream, place: int, *, reach: int) -> Stream:
    """The healthy control."""
    return base.part(place, place + reach)


def shocks(base: Stream, place: int, *, at: dict[int, tuple[float, float]], reach: int) -> Stream:
    """Single steps whose loss and norm are so many times as large; the last of them is the one to be found."""
    stream = base.part(place, place + reach)
    for step, (loss, norm) in at.items():
        stream.loss[step] *= loss
        if stream.grad_norm is not None:
            stream.grad_norm[step] *= norm
    return replace(stream, bad=tuple(at), onset=max(at, default=0))


def burst(
    base: Stream, place: int, *, steps: int, reach: int = 0, target: float | None = None, factor: float = 1.0
) -> Stream:
    """So many steps at another level of the loss, with the noise that they have; healthy ones after, if any."""
    stream = base.part(place, place + max(steps, reach))
    stream.loss[:steps] *= target / level_at(base, place) if target else factor
    return replace(stream, bad=tuple(range(steps)))


def drift(base: Stream, place: int, *, steps: int, factor: float, reach: int = 0) -> Stream:
    """A loss that rises evenly to so many times its level; of that the first steps, or all."""
    reach = reach or steps
    stream = base.part(place, place + reach)
    stream.loss[:] *= np.linspace(1.0, factor, steps + 1)[1 : reach + 1]
    return replace(stream, bad=tuple(range(reach)))


def nan_then_shocks(base: Stream, place: int, *, at: dict[int, tuple[float, float]], reach: int) -> Stream:
    """One step that is NaN in both signals, and later shocks."""
    stream = shocks(base, place, at=at, reach=reach)
    for column in (stream.loss, stream.grad_norm):
        if column is not None:
            column[0] = np.nan
    return replace(stream, bad=(0, *at), onset=0)


# Two public traces, relative to their own level before: BLOOM-176B from step 31214 on, BigScience 104B from 11446 on.
TRACES = {
    "BLOOM-176B": (
        np.array([2.199, 2.220, 2.595, 2.242, 2.345, 5.098, 3.492, 3.213, 2.805]) / 2.199,
        np.array([0.242, 0.947, 2.390, 15.9, 145, 960, 353, 379, 650]) / 0.242,
    ),
    # its published norms begin in the middle of the rise: the first one is taken as twice the level
    "BigScience 104B": (np.array([3.063, 3.114, 7.712]) / 3.063, np.array([12953, 262623, 254699]) / 12953 * 2),
}


def trace(base: Stream, place: int, *, name: str, reach: int) -> Stream:
    """One of the published traces on the level of this run, which goes on as it was after the last published step."""
    loss, norm = TRACES[name]
    stream = base.part(place, place + reach)
    stream.loss[: len(loss)] = loss * level_at(base, place)
    if stream.grad_norm is not None and base.grad_norm is not None:
        stream.grad_norm[: len(norm)] = norm * float(np.median(base.grad_norm[place - 50 : place]))
    return replace(stream, bad=tuple(range(1, len(loss))), onset=1, peak=int(loss.argmax()))


BURSTS: dict[str, Injection] = {
    f"{steps} steps {words}": partial(burst, steps=steps, target=target, factor=factor)
    for words, target, factor in (("to 9.0", 9.0, 1.0), ("of +40 %", None, 1.4))
    for steps in (30, 60, 100)
}
REACH = 202
"""Steps of an event, so that a fault that begins with its second one can be found for 200 more."""
NOTHING = "control: nothing"
KINDS: dict[str, dict[str, Injection]] = {
    "Published traces": {name: partial(trace, name=name, reach=REACH) for name in TRACES},
    "Loss, one step": {
        "loss +10 %, 1 step": partial(shocks, at={0: (1.10, 1.0)}, reach=REACH),
        "loss +25 %, 1 step": partial(shocks, at={0: (1.25, 1.0)}, reach=REACH),
        "loss +40 %, 40 after x3": partial(shocks, at={0: (3.0, 1.0), 40: (1.4, 1.0)}, reach=REACH + 40),
    },
    "Loss, bursts, shifts and drifts": {
        "loss +10 %, 30 steps": partial(burst, steps=30, factor=1.1, reach=REACH),
        "loss +40 %, 30 steps": partial(burst, steps=30, factor=1.4, reach=REACH),
        "loss to 9.0, 30 steps": partial(burst, steps=30, target=9.0, reach=REACH),
        "loss +10 % for good": partial(burst, steps=REACH, factor=1.1),
        "loss +40 % in 200 steps": partial(drift, steps=REACH, factor=1.4),
        "loss +40 % in 1000 steps": partial(drift, steps=1000, factor=1.4, reach=REACH),
    },
    "Gradient norm and NaN": {
        "norm x3, 1 step": partial(shocks, at={0: (1.0, 3.0)}, reach=REACH),
        "norm x10, 1 step": partial(shocks, at={0: (1.0, 10.0)}, reach=REACH),
        "norm x20, 40 after x1000": partial(shocks, at={0: (1.0, 1000.0), 40: (1.0, 20.0)}, reach=REACH + 40),
        "NaN, 1 step": partial(nan_then_shocks, at={}, reach=REACH),
    },
}
"""What is to be found, by kind and name."""
FAULTS: dict[str, Injection] = {name: fault for kind in KINDS.values() for name, fault in kind.items()}
EVENTS: dict[str, Injection] = {NOTHING: partial(nothing, reach=REACH), **FAULTS}
NAN_THEN: Injection = partial(nan_then_shocks, at={20: (2.0, 10.0), 500: (2.0, 10.0)}, reach=501)
SHIFT: Injection = partial(burst, steps=1500, factor=1.4)
DRIFT: Injection = partial(drift, steps=1000, factor=1.4)


def different(faults: Iterable[str], delay: int) -> int:
    """Of how many of the faults a rule has seen anything different, so many steps after their onset."""
    base = healthy("Gaussian", "flat", 500, np.random.default_rng(0), with_norm=True)
    injected = (FAULTS[fault](base, 100) for fault in faults)
    return len({stream.part(0, stream.onset + delay + 1).seen for stream in injected})
