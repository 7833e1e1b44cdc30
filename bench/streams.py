"""A seed in, streams out that carry their own truth: healthy runs of known noise, and what is done to a run.

An injection takes a healthy run and a step of it, and gives what the run shows from that step on, with the steps that
something is wrong with. Everything else of what it gives is the healthy run, untouched.
"""

from collections.abc import Callable
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
    peak: int = 0
    """Of a trace: the step of the highest loss. What is flagged before it is flagged in time."""

    def __len__(self) -> int:
        return len(self.loss)

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
    """Single steps whose loss and norm are so many times as large."""
    stream = base.part(place, place + reach)
    for step, (loss, norm) in at.items():
        stream.loss[step] *= loss
        if stream.grad_norm is not None:
            stream.grad_norm[step] *= norm
    return replace(stream, bad=tuple(at))


def burst(base: Stream, place: int, *, steps: int, target: float | None = None, factor: float = 1.0) -> Stream:
    """So many steps at another level of the loss, with the noise that they have."""
    stream = base.part(place, place + steps)
    stream.loss[:] *= target / level_at(base, place) if target else factor
    return replace(stream, bad=tuple(range(steps)))


def drift(base: Stream, place: int, *, steps: int, factor: float) -> Stream:
    """A loss that rises evenly to so many times its level."""
    stream = base.part(place, place + steps)
    stream.loss[:] *= np.linspace(1.0, factor, steps + 1)[1:]
    return replace(stream, bad=tuple(range(steps)))


def nan_then_shocks(base: Stream, place: int, *, at: dict[int, tuple[float, float]], reach: int) -> Stream:
    """One step that is NaN in both signals, and later shocks."""
    stream = shocks(base, place, at=at, reach=reach)
    for column in (stream.loss, stream.grad_norm):
        if column is not None:
            column[0] = np.nan
    return replace(stream, bad=(0, *at))


# Two public traces, relative to their own level before: BLOOM-176B from step 31214 on, BigScience 104B from 11446 on.
TRACES = {
    "BLOOM-176B": (
        np.array([2.199, 2.220, 2.595, 2.242, 2.345, 5.098, 3.492, 3.213, 2.805]) / 2.199,
        np.array([0.242, 0.947, 2.390, 15.9, 145, 960, 353, 379, 650]) / 0.242,
    ),
    # its published norms begin in the middle of the rise: the first one is taken as twice the level
    "BigScience 104B": (np.array([3.063, 3.114, 7.712]) / 3.063, np.array([12953, 262623, 254699]) / 12953 * 2),
}


def trace(base: Stream, place: int, *, name: str) -> Stream:
    """One of the published traces, on the level of this run."""
    loss, norm = TRACES[name]
    norms = None
    if base.grad_norm is not None:
        norms = norm * float(np.median(base.grad_norm[place - 50 : place]))
    return Stream(
        name=name,
        loss=loss * level_at(base, place),
        grad_norm=norms,
        bad=tuple(range(1, len(loss))),
        peak=int(loss.argmax()),
    )


BURSTS: dict[str, Injection] = {
    f"{steps} steps {words}": partial(burst, steps=steps, target=target, factor=factor)
    for words, target, factor in (("to 9.0", 9.0, 1.0), ("of +40 %", None, 1.4))
    for steps in (30, 60, 100)
}
SPIKES: dict[str, Injection] = {
    "loss +10 %": partial(shocks, at={0: (1.10, 1.0)}, reach=1),
    "loss +25 %": partial(shocks, at={0: (1.25, 1.0)}, reach=1),
    "norm x3": partial(shocks, at={0: (1.0, 3.0)}, reach=1),
}
SECOND: dict[str, Injection] = {
    "norm x20, 40 steps after x1000": partial(shocks, at={0: (1.0, 1000.0), 40: (1.0, 20.0)}, reach=41),
    "loss +40 %, 40 steps after x3": partial(shocks, at={0: (3.0, 1.0), 40: (1.4, 1.0)}, reach=41),
}
NAN_THEN: Injection = partial(nan_then_shocks, at={20: (2.0, 10.0), 500: (2.0, 10.0)}, reach=501)
SHIFT: Injection = partial(burst, steps=1500, factor=1.4)
DRIFT: Injection = partial(drift, steps=1000, factor=1.4)
