"""Compares two runs: their settings, their versions, and the first step at which each signal differs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sealegs.record.manifest import dotted
from sealegs.record.run import Run

CLEARLY = 4.0
"""Two values differ clearly if they are this many times the step-to-step noise apart."""
MANY, OF = 6, 8
"""Two signals differ by more than noise if they differ clearly at MANY of OF logged steps."""
FEWEST = 3
"""Steps at the end of a run that show more than noise, unless one of them is not finite."""
UNLIKE = frozenset({"time", "step_s", "saving", "tokens_per_s"})
"""Signals that no two runs have in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """The first difference between two runs in one signal."""

    signal: str
    first: int
    """The first step at which the values differ at all."""
    values: tuple[Any, Any]
    """The two values at that step."""
    beyond_noise: int | None
    """The first step from which on they differ by more than noise; None where they never do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How two runs differ."""

    settings: Mapping[str, tuple[Any, Any]]
    """Old and new value by dotted name; None where a run has no such setting."""
    versions: Mapping[str, tuple[Any, Any]]
    shared_steps: int
    partings: tuple[Parting, ...]
    """The signals that both runs have and that differ, the earliest first."""
    equal: tuple[str, ...]
    """The signals that are equal at every step that both runs have."""
    only_in: tuple[tuple[str, ...], tuple[str, ...]]
    """The signals that only one of the runs has."""

    @property
    def is_any(self) -> bool:
        """Whether the runs differ in anything."""
        return bool(self.settings or self.versions or self.partings)


def differ(a: Run, b: Run) -> Difference:
    """Compare two runs at the steps that both logged."""
    shared, in_a, in_b = np.intersect1d(a.steps, b.steps, assume_unique=True, return_indices=True)
    both = [name for name in a.signals if name in b.signals and name not in UNLIKE]
    partings, equal = [], []
    for name in both:
        parting = _parting(name, shared, *(_values(run, name, at) for run, at in ((a, in_a), (b, in_b))))
        if parting is None:
            equal.append(name)
        else:
            partings.append(parting)
    return Difference(
        settings=_changed(dict(dotted(a.manifest.settings)), dict(dotted(b.manifest.settings)))
        | _changed(
            {"seed": a.manifest.seed, "dtype": a.manifest.dtype}, {"seed": b.manifest.seed, "dtype": b.manifest.dtype}
        ),
        versions=_changed(dict(a.manifest.versions), dict(b.manifest.versions))
        | _changed({"git": (a.manifest.git or {}).get("commit")}, {"git": (b.manifest.git or {}).get("commit")}),
        shared_steps=len(shared),
        partings=tuple(sorted(partings, key=lambda parting: parting.first)),
        equal=tuple(equal),
        only_in=(
            tuple(name for name in a.signals if name not in b.signals),
            tuple(name for name in b.signals if name not in a.signals),
        ),
    )


def _changed(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (a.get(name), b.get(name)) for name in {**a, **b} if a.get(name) != b.get(name)}


def _values(run: Run, name: str, at: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    return run.column(name)[at], run.logged(name)[at]


def _parting(
    name: str,
    steps: NDArray[np.int64],
    a: tuple[NDArray[Any], NDArray[np.bool_]],
    b: tuple[NDArray[Any], NDArray[np.bool_]],
) -> Parting | None:
    logged = a[1] & b[1]
    steps, mine, other = steps[logged], a[0][logged], b[0][logged]
    is_number = mine.dtype.kind == "f" and other.dtype.kind == "f"
    apart = ~((mine == other) | (np.isnan(mine) & np.isnan(other))) if is_number else mine != other
    if not apart.any():
        return None
    first = int(np.argmax(apart))
    return Parting(
        signal=name,
        first=int(steps[first]),
        values=(mine[first].item(), other[first].item()),
        beyond_noise=_beyond_noise(steps, mine, other) if is_number else int(steps[first]),
    )


def _beyond_noise(steps: NDArray[np.int64], a: NDArray[np.float64], b: NDArray[np.float64]) -> int | None:
    """The first step from which on two signals differ by more than noise.

    The noise is the median step-to-step change of the quieter run: a run that blew up must not hide it. Of signals
    above 0 it is taken as a share, since the noise of a loss that falls falls with it.
    """
    if all(bool((values[np.isfinite(values)] > 0).all()) for values in (a, b)):
        a, b = np.log(a), np.log(b)
    changes = [np.abs(np.diff(values[np.isfinite(values)])) for values in (a, b)]
    noise = min((float(np.median(change)) for change in changes if len(change)), default=0.0)
    with np.errstate(invalid="ignore"):
        clear = ~(np.abs(a - b) <= CLEARLY * noise) & ~(np.isnan(a) & np.isnan(b))  # NaN in one is clear
    many = np.convolve(clear, np.ones(OF), "full")[OF - 1 :] if len(clear) else clear
    left = np.arange(len(clear), 0, -1)
    needed = np.minimum(MANY, left)  # fewer steps are left near the end, and one or two high losses are noise
    is_sure = (left >= min(FEWEST, len(clear))) | (np.isfinite(a) != np.isfinite(b))
    found = np.flatnonzero(clear & is_sure & (many >= needed))
    return int(steps[found[0]]) if len(found) else None
