"""Rows in, Verdicts out: every detector looks, one verdict is given, every detector learns.

    states, verdict = fold(detectors, states, row)

The same fold judges live, in replay and offline: same numbers in, same verdicts out.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from sealegs.detectors.contract import Detector
from sealegs.detectors.nonfinite import NonFinite
from sealegs.detectors.spike import Spike
from sealegs.vocabulary import Finding, Row, Severity, Verdict

Detectors: TypeAlias = Sequence[Detector[Any]]
States: TypeAlias = tuple[Any, ...]

YOUNG_STEPS = 1000
"""Steps in which the statistic knows its tail only roughly: one signal alone must then be surprising by ..."""
YOUNG_ALARM = 1e-6
"""... this much to be an alarm."""


def standard() -> tuple[Detector[Any], ...]:
    """The calibrated detectors. Two signals are looked at, so each has half of the chance of a false alarm."""
    return (
        NonFinite(),
        Spike(signal="loss", gate=0.5e-4, alarm=0.5e-5),
        Spike(signal="grad_norm", gate=0.5e-4, alarm=0.5e-5, young_factor=20.0, young_deviations=0.0),
    )


def begin(detectors: Detectors) -> States:
    """The states before the first step."""
    return tuple(detector.init() for detector in detectors)


def fold(detectors: Detectors, states: States, now: Row) -> tuple[States, Verdict]:
    """One step: look, decide, learn."""
    findings = tuple(f for d, s in zip(detectors, states, strict=True) if (f := d.look(s, now)))
    verdict = decide(int(now["step"]), findings)
    return tuple(d.learn(s, now) for d, s in zip(detectors, states, strict=True)), verdict


def decide(step: int, findings: tuple[Finding, ...]) -> Verdict:
    """One verdict of all findings, the gravest first."""
    surprised = [f for f in findings if f.p is not None and f.severity == Severity.ALARM]
    if step < YOUNG_STEPS and len(surprised) == 1 and not _is_certain(surprised[0]):
        findings = tuple(replace(f, severity=Severity.GATE) if f is surprised[0] else f for f in findings)
    return Verdict(step=step, findings=tuple(sorted(findings, key=lambda f: -f.severity)))


def _is_certain(finding: Finding) -> bool:
    return finding.p is not None and finding.p < YOUNG_ALARM
