"""What every detector promises, whichever it is: found by import, and counted."""

import importlib
import inspect
import json
import math
import pkgutil
from typing import Any

import numpy as np
import pytest

import sealegs.detectors
from sealegs.detectors.contract import Detector
from sealegs.vocabulary import Finding, Row, Severity


def found() -> list[Detector[Any]]:
    """One of each class in ``sealegs.detectors`` that looks and learns, with its defaults."""
    detectors: list[Detector[Any]] = []
    for entry in pkgutil.iter_modules(sealegs.detectors.__path__):
        module = importlib.import_module(f"sealegs.detectors.{entry.name}")
        for _, kind in inspect.getmembers(module, inspect.isclass):
            is_detector = all(hasattr(kind, name) for name in ("init", "look", "learn")) and kind is not Detector
            if is_detector and kind.__module__ == module.__name__:
                detector: Any = kind()
                detectors.append(detector)
    return detectors


DETECTORS = found()
everyone = pytest.mark.parametrize("detector", DETECTORS, ids=lambda detector: detector.name)


def test_the_suite_runs_over_all_of_them() -> None:
    assert sorted(type(detector).__name__ for detector in DETECTORS) == ["NonFinite", "Spike"]


def stream(steps: int, seed: int = 0) -> list[dict[str, float]]:
    """A healthy run with heavy-tailed noise."""
    random = np.random.default_rng(seed)
    loss = (2.0 + 8.0 * (1 + np.arange(steps) / 20) ** -0.6) * np.exp(0.01 * random.standard_t(5, steps))
    norm = 0.5 * np.exp(0.2 * random.standard_t(5, steps))
    return [{"step": i, "loss": float(loss[i]), "grad_norm": float(norm[i])} for i in range(steps)]


def run(detector: Detector[Any], rows: list[dict[str, float]], state: Any = None) -> tuple[list[Finding | None], Any]:
    state = detector.init() if state is None else state
    findings = []
    for row in rows:
        findings.append(detector.look(state, row))
        state = detector.learn(state, row)
    return findings, state


def size(state: Any) -> int:
    return sum(map(size, state)) if isinstance(state, tuple) else 1


@everyone
def test_looking_changes_nothing(detector: Detector[Any]) -> None:
    rows = stream(400)
    _, state = run(detector, rows)
    odd: Row = {"step": 400, "loss": 99.0, "grad_norm": math.inf}
    assert detector.look(state, odd) == detector.look(state, odd)
    assert detector.learn(state, odd) == detector.learn(state, odd)


@everyone
def test_a_nan_then_a_spike(detector: Detector[Any]) -> None:
    """What is not finite leaves the judgement of everything after it as it was."""
    rows = stream(1200)
    for at in (50, 600, 601):
        rows[at] |= {"loss": math.nan, "grad_norm": math.nan}
    rows[610]["loss"] = 50.0
    findings, _ = run(detector, rows)
    without = [row for i, row in enumerate(rows) if i not in (50, 600, 601)]
    assert [f for i, f in enumerate(findings) if i not in (50, 600, 601)] == run(detector, without)[0]


@everyone
def test_the_same_spike_twice(detector: Detector[Any]) -> None:
    rows = stream(1200)
    for at in (700, 740):
        rows[at] |= {"loss": 60.0, "grad_norm": 500.0, "grads_finite": 0.0}
    findings, _ = run(detector, rows)
    for at in (700, 740):
        finding = findings[at]
        assert finding is not None
        assert finding.severity >= Severity.GATE


@everyone
def test_a_burst_is_found_at_every_step(detector: Detector[Any]) -> None:
    rows = stream(1200)
    for row in rows[800:860]:
        row |= {"loss": row["loss"] * 2.5, "grad_norm": row["grad_norm"] * 100, "grads_finite": 0.0}
    findings, _ = run(detector, rows)
    assert sum(finding is not None for finding in findings[800:860]) >= 57


@everyone
def test_a_new_level_is_accepted(detector: Detector[Any]) -> None:
    rows = stream(2000)
    for row in rows[800:]:
        row |= {"loss": row["loss"] * 1.4, "grad_norm": row["grad_norm"] * 1.4}
    findings, _ = run(detector, rows)
    assert sum(finding is not None for finding in findings[1100:]) <= 1


@everyone
def test_constant_input_is_no_finding(detector: Detector[Any]) -> None:
    findings, _ = run(detector, [{"step": i, "loss": 2.5, "grad_norm": 0.5} for i in range(1000)])
    assert findings == [None] * 1000


@everyone
def test_signals_that_are_not_there_are_no_finding(detector: Detector[Any]) -> None:
    findings, state = run(detector, [{"step": i} for i in range(300)])
    assert findings == [None] * 300
    assert state == detector.init()


@everyone
def test_a_state_survives_being_written_and_a_replay_is_equal(detector: Detector[Any]) -> None:
    rows = stream(900)
    rows[500]["loss"] = math.nan
    rows[700]["loss"] = 80.0
    whole, last = run(detector, rows)
    for at in (5, 31, 149, 450, 701):
        _, state = run(detector, rows[:at])
        written = json.loads(json.dumps(state))
        restored = restore(state, written)
        assert restored == state
        rest, end = run(detector, rows[at:], restored)
        assert rest == whole[at:]
        assert end == last


def restore(like: Any, written: Any) -> Any:
    """JSON has no tuples: put back the types that the state had."""
    if not isinstance(like, tuple):
        return written
    parts = [restore(a, b) for a, b in zip(like, written, strict=True)]
    return type(like)(*parts) if hasattr(like, "_fields") else tuple(parts)


@everyone
def test_memory_is_bounded(detector: Detector[Any]) -> None:
    rows = stream(3000)
    for row in rows[::3]:
        row["loss"] = math.nan
    sizes = [size(run(detector, rows[:steps])[1]) for steps in (1500, 3000)]
    assert sizes[1] <= sizes[0] <= 600


@everyone
def test_few_healthy_steps_are_found(detector: Detector[Any]) -> None:
    """30,000 healthy steps with heavy tails: at the gate's 1e-4 some 3 are expected."""
    findings = [f for seed in range(6) for f in run(detector, stream(5000, seed))[0] if f is not None]
    assert len(findings) <= 12
    assert sum(finding.severity >= Severity.ALARM for finding in findings) <= 3


@everyone
def test_a_young_run_is_left_alone_and_guarded(detector: Detector[Any]) -> None:
    quiet = [f for seed in range(30) for f in run(detector, stream(150, seed))[0] if f is not None]
    assert quiet == []
    rows = stream(60)
    rows[40] |= {"loss": 40.0, "grad_norm": 5000.0, "grads_finite": 0.0}
    assert run(detector, rows)[0][40] is not None
