"""A run and its kind in, what stands in the first signals of that kind out: the module to start at."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from sealegs.diagnosis.contract import Standing
from sealegs.diagnosis.first_signals import experts, gan, low_precision, policy, preference
from sealegs.diagnosis.kind import EXPERTS, LOW_PRECISION, POLICY, PREFERENCE, Kind
from sealegs.record.run import Run

JUDGES: Mapping[str, Callable[[Run], Iterator[Standing]]] = {
    "policy-gradient": policy.judged,
    "preference": preference.judged,
    "gan": gan.judged,
    "moe": experts.judged,
    "low-precision": low_precision.judged,
}
"""By kind or trait. Of the others the loss is the first signal."""
SIGNALS_OF: Mapping[str, tuple[str, ...]] = {
    "policy-gradient": POLICY,
    "preference": PREFERENCE,
    "gan": ("discriminator_loss", "generator_loss"),
    "moe": EXPERTS,
    "low-precision": LOW_PRECISION,
}
"""What such a run has besides a loss."""


def of_kind(run: Run, kind: Kind) -> tuple[Standing, ...]:
    """What stands in the first signals of a run, those that call for action first."""
    names = (name for name in (kind.name, *kind.traits) if name in JUDGES)
    found = [replace(one, of=name) for name in names for one in (*JUDGES[name](run), *_not_finite(run, name))]
    return tuple(sorted(found, key=lambda one: not one.is_grave))


def _not_finite(run: Run, name: str) -> Iterator[Standing]:
    """A signal that was NaN or infinite in some rows: the first of them, since the others follow from it."""
    broken = []
    for signal in run.signals:
        if signal.partition("/")[0] in SIGNALS_OF[name] and run.has_numbers(signal):
            steps, values = run.series(signal)
            bad = ~np.isfinite(values)
            if bad.any():
                broken.append((int(steps[np.argmax(bad)]), signal, int(bad.sum()), len(bad)))
    if broken:
        step, signal, count, of = min(broken)
        text = f"{signal} is not finite in {count} of {of} rows, first at step {step}"
        yield Standing(signal=signal, step=step, text=text)
