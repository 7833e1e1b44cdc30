"""A run and its kind in, what stands in the first signals of that kind out: the module to start at."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from sealegs.diagnosis.contract import Standing
from sealegs.diagnosis.first_signals import experts, gan, low_precision, policy, preference
from sealegs.diagnosis.kind import Kind
from sealegs.record.run import Run

JUDGES: Mapping[str, Callable[[Run], Iterator[Standing]]] = {
    "policy-gradient": policy.judged,
    "preference": preference.judged,
    "gan": gan.judged,
    "moe": experts.judged,
    "low-precision": low_precision.judged,
}
"""By kind or trait. Of the others the loss is the first signal."""


def of_kind(run: Run, kind: Kind) -> tuple[Standing, ...]:
    """What stands in the first signals of a run, those that call for action first."""
    names = (name for name in (kind.name, *kind.traits) if name in JUDGES)
    found = [replace(one, of=name) for name in names for one in JUDGES[name](run)]
    return tuple(sorted(found, key=lambda one: not one.is_grave))
