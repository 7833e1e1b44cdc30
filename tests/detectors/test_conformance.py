"""What every detector promises, whichever it is: found by import, and counted."""

import importlib
import inspect
import json
import math
import pkgutil
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sealegs.detectors
from sealegs.detectors.contract import Detector
from sealegs.judge import thaw
from sealegs.vocabulary import Finding, Row, Severity

Rows = list[dict[str, float]]


def in_words(row: Row) -> str | None:
    """A user's rule, for ``CustomDetector``: the one detector that is nothing by itself."""
    return "the loss is high" if float(row.get("loss", 0.0)) > 45 else None


def found() -> list[Detector[Any]]:
    """One of each class in ``sealegs.detectors`` that looks and learns, with its defaults."""
    detectors: list[Detector[Any]] = []
    for entry in pkgutil.iter_modules(sealegs.detectors.__path__):
        module = importlib.import_module(f"sealegs.detectors.{entry.name}")
        for name, kind in inspect.getmembers(module, inspect.isclass):
            is_detector = all(hasattr(kind, part) for part in ("init", "look", "learn")) and kind is not Detector
            if is_detector and kind.__module__ == module.__name__:
                make: Any = kind
                detector: Detector[Any] = make(function=in_words) if name == "CustomDetector" else make()
                detectors.append(detector)
    return detectors


DETECTORS = {type(detector).__name__: detector for detector in found()}
GUARDS = {"NonFinite", "Spike"}
"""Find a sudden rise at every step that it lasts."""
SUDDEN = GUARDS | {"CustomDetector", "ThreeSigma"}
"""Find a sudden rise at its first step, and again."""
NOISY = {"ThreeSigma"}
"""Known to find health: held to what they are known to do, in tests of their own."""


def those(names: set[str]) -> pytest.MarkDecorator:
    assert names <= set(DETECTORS)
    return pytest.mark.parametrize("detector", [DETECTORS[name] for name in sorted(names)], ids=lambda d: d.name)


everyone = those(set(DETECTORS))


def test_the_suite_runs_over_all_of_them() -> None:
    names = (
        "Collapse CustomDetector Drift MonotonicRise NonFinite Overflow Proportion Rate RepeatedBatch Replicas Spike"
    )
    assert sorted(DETECTORS) == [*names.split(), "Straggler", "ThreeSigma", "Throughput"]
    assert len(found()) == len(DETECTORS) == 14


def autoregressive(random: np.random.Generator, steps: int) -> Any:
    kept, out = 0.0, np.empty(steps)
    for i, shock in enumerate(random.standard_normal(steps)):
        kept = out[i] = 0.5 * kept + shock
    return out


NOISES: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "t5": lambda random, steps: random.standard_t(5, steps),
    "t3": lambda random, steps: random.standard_t(3, steps),
    "skewed": lambda random, steps: random.gamma(4.0, 0.5, steps) - 2.0,
    "autoregressive": autoregressive,
}


@lru_cache(maxsize=64)
def columns(steps: int, seed: int, kind: str) -> tuple[dict[str, float], ...]:
    random = np.random.default_rng(seed)
    t = np.arange(steps)

    def noisy(size: float) -> Any:
        return np.exp(size * NOISES[kind](random, steps))

    every_step = {
        "step": t,
        "loss": (2.0 + 8.0 * (1 + t / 20) ** -0.6) * noisy(0.01),
        "grad_norm": 0.5 * noisy(0.2),
        "step_s": 0.1 * noisy(0.05) + 3.0 * (t % 100 == 99),  # an evaluation now and then
        "lr": 3e-4 * np.minimum(t / 200, 1.0) * (0.55 + 0.45 * np.cos(t % 1000 * np.pi / 1000)),  # warm restarts
        "loss_scale": 65536.0 * 2.0 ** (t // 2000),
        "grads_finite": np.ones(steps),
        "params_finite": np.ones(steps),
        "batch_hash": t,
    }
    now_and_then = {
        "param_norm": 30 * (1 + t / 500) ** 0.3,
        "param_norm/a": 20 * (1 + t / 500) ** 0.3,
        "param_norm/from_zero": 1e-3 * t,
        "param_norm/gate": 0.1 * np.abs(np.sin(t / 70)),  # one small weight that passes through zero
        "update_ratio/a": 1e-3 * noisy(0.1),
        "grad_norm/a": every_step["grad_norm"] * (0.3 + 0.1 * np.sin(t / 50)),
        "attention_logit_max/0": 5 + 10 * t / (t + 1000) * noisy(0.1),
        "underflow_share": 0.1 * noisy(0.1),
        "ranks_differ": np.zeros(steps),
        "differing_rank": np.zeros(steps),
        "slowest_rank": np.floor(t / 10) % 7,
        "slowest_by": 0.03 * noisy(0.1),
        "slowest_surprise": 1.5 * noisy(0.1),
        "reward": np.tanh(t / 3000) - 0.4 + 0.1 * (noisy(1.0) > 1),
        "zero_spread_share": np.full(steps, 0.3),
        "policy_entropy": (0.4 + 0.6 * np.exp(-t / 1000)) * noisy(0.1),
        "kl": 1e-4 * (1 + t) ** 0.5 * noisy(0.2),
        "logp_gap": 0.004 * noisy(0.2),
        "completion_length": (100 + t / 20) * noisy(0.1),
        "expert_violation": (0.5 + np.exp(-t / 200)) * noisy(0.1),
        "dead_expert_share": np.full(steps, 0.1),
        "router_entropy": 1.5 * noisy(0.02),
        "quant_scale": 2.0 ** (8 - t // 2000),
        "saturated_share": 1e-3 * noisy(0.2),
    }
    return tuple(
        {
            name: float(column[i])
            for name, column in ({**every_step, **now_and_then} if i % 10 == 0 else every_step).items()
        }
        for i in range(steps)
    )


def stream(steps: int, seed: int = 0, noise: str = "t5") -> Rows:
    """A healthy run with every signal that is looked at, and heavy-tailed noise."""
    return [row.copy() for row in columns(steps, seed, noise)]


def run(detector: Detector[Any], rows: Rows, state: Any = None) -> tuple[list[Finding | None], Any]:
    state = detector.init() if state is None else state
    findings = []
    for row in rows:
        findings.append(detector.look(state, row))
        state = detector.learn(state, row)
    return findings, state


def parts(state: Any) -> Iterator[Any]:
    """Every plain value in a state."""
    if isinstance(state, tuple):
        for part in state:
            yield from parts(part)
    else:
        yield state


ODD = {
    "loss": 99.0,
    "grad_norm": math.inf,
    "step_s": 9.0,
    "lr": 0.5,
    "loss_scale": 0.5,
    "param_norm": 1e6,
    "param_norm/a": 1e6,
    "update_ratio/a": 9.0,
    "attention_logit_max/0": 1e4,
    "quant_scale": 0.0,
}


@everyone
def test_looking_changes_nothing(detector: Detector[Any]) -> None:
    _, state = run(detector, stream(815))
    row: Row = {"step": 815, **ODD}
    before = json.dumps(state)
    first, second = detector.look(state, row), detector.look(state, row)
    assert (first, json.dumps(state)) == (second, before)
    assert detector.learn(state, row) == detector.learn(thaw(detector.init(), json.loads(before)), row)
    assert row == {"step": 815, **ODD}


@everyone
def test_a_nan_then_a_spike(detector: Detector[Any]) -> None:
    """What is not finite leaves the judgement of everything after it as it would be had nothing been measured."""
    with_nan, without = stream(1200), stream(1200)
    broken = (50, 600, 601)
    for at in broken:
        with_nan[at] = dict.fromkeys(with_nan[at], math.nan) | {"step": at}
        without[at] = {"step": at}
    for rows in (with_nan, without):
        rows[610]["loss"] = 50.0
    findings, expected = run(detector, with_nan)[0], run(detector, without)[0]
    assert [f for i, f in enumerate(findings) if i not in broken] == [
        f for i, f in enumerate(expected) if i not in broken
    ]


@those(SUDDEN)
def test_the_same_spike_twice(detector: Detector[Any]) -> None:
    rows = stream(1200)
    for at in (700, 740):
        rows[at] |= {"loss": 60.0, "grad_norm": 500.0, "grads_finite": 0.0}
        del rows[at]["loss_scale"]  # under one, gradients that are not finite are the scaler's business
    findings, _ = run(detector, rows)
    for at in (700, 740):
        finding = findings[at]
        assert finding is not None
        assert finding.severity >= Severity.GATE


@those(GUARDS)
def test_a_burst_is_found_at_every_step(detector: Detector[Any]) -> None:
    rows = stream(1200)
    for row in rows[800:860]:
        row |= {"loss": row["loss"] * 2.5, "grad_norm": row["grad_norm"] * 100, "grads_finite": 0.0}
        del row["loss_scale"]
    findings, _ = run(detector, rows)
    assert sum(finding is not None for finding in findings[800:860]) >= 57


@those(set(DETECTORS) - NOISY)
def test_a_new_level_is_accepted(detector: Detector[Any]) -> None:
    """Whatever is at a new level for good is not found for ever: 400 steps later all is well."""
    rows = stream(2400)
    for row in rows[800:]:
        for name in row.keys() - {"step", "grads_finite", "params_finite", "loss_scale", "underflow_share"}:
            row[name] *= 2.5
    findings, _ = run(detector, rows)
    assert sum(finding is not None for finding in findings[1200:]) <= 1


@everyone
def test_constant_input_is_no_finding(detector: Detector[Any]) -> None:
    constant = stream(1)[0] | {"loss": 2.7, "grad_norm": 0.3}
    findings, _ = run(detector, [constant | {"step": i, "batch_hash": i} for i in range(1500)])
    assert findings == [None] * 1500


@everyone
def test_signals_that_are_not_there_are_no_finding(detector: Detector[Any]) -> None:
    findings, state = run(detector, [{"step": i} for i in range(300)])
    assert findings == [None] * 300
    assert state == detector.init()


@everyone
def test_a_state_survives_being_written_and_a_replay_is_equal(detector: Detector[Any]) -> None:
    rows = stream(1300)
    rows[500]["loss"] = math.nan
    rows[700]["loss"] = 80.0
    rows[1000] |= ODD
    whole, last = run(detector, rows)
    done, state = 0, detector.init()
    for at in (5, 31, 149, 450, 701, 1001):
        _, state = run(detector, rows[done:at], state)
        done = at
        restored = thaw(detector.init(), json.loads(json.dumps(state)))
        assert restored == state
        rest, end = run(detector, rows[at:], restored)
        assert rest == whole[at:]
        assert end == last


@everyone
def test_memory_is_bounded(detector: Detector[Any]) -> None:
    rows = stream(3000)
    for row in rows[::3]:
        row["loss"] = math.nan
    for row in rows[1::3]:
        row["grad_norm"] = math.inf
    _, half = run(detector, rows[:1500])
    _, whole = run(detector, rows[1500:], half)
    sizes = [sum(1 for _ in parts(state)) for state in (half, whole)]
    assert sizes[1] <= sizes[0] <= 600


@pytest.mark.parametrize("noise", NOISES)
@those(set(DETECTORS) - NOISY)
def test_few_healthy_steps_are_found(detector: Detector[Any], noise: str) -> None:
    """20,000 healthy steps of each noise: at the gate's 1e-4 some 2 are expected."""
    findings = [f for seed in range(4) for f in run(detector, stream(5000, seed, noise))[0] if f is not None]
    assert len(findings) <= 12
    assert sum(finding.severity >= Severity.ALARM for finding in findings) <= 3


@those(NOISY)
def test_the_noisy_ones_are_as_noisy_as_known(detector: Detector[Any]) -> None:
    """20,000 healthy steps, 5000 of each noise: nominal are 27 for a normal one, and noise is not normal."""
    found = [f for noise in NOISES for f in run(detector, stream(5000, 0, noise))[0] if f is not None]
    assert 60 <= len(found) <= 150


@those(set(DETECTORS) - NOISY)
def test_a_young_run_is_left_alone(detector: Detector[Any]) -> None:
    assert [f for seed in range(30) for f in run(detector, stream(150, seed))[0] if f is not None] == []


@those({"NonFinite"})
def test_a_young_run_is_guarded(detector: Detector[Any]) -> None:
    rows = stream(60)
    rows[40] |= {"loss": 40.0, "grad_norm": 5000.0, "grads_finite": 0.0}
    del rows[40]["loss_scale"]
    assert run(detector, rows)[0][40] is not None


SIGNALS = sorted(stream(1)[0].keys() - {"step"})
anything = st.floats() | st.sampled_from([math.nan, math.inf, 0.0, 1.0, 1e308, 5e-324])
any_row = st.fixed_dictionaries({"step": st.integers(0, 5000)}, optional=dict.fromkeys(SIGNALS, anything))


@lru_cache
def grown(name: str) -> Any:
    return run(DETECTORS[name], stream(1600))[1]


@settings(max_examples=100)
@given(rows=st.lists(any_row, max_size=40), is_grown=st.booleans())
def test_no_row_breaks_one_and_nothing_but_numbers_enters_its_state(rows: Rows, is_grown: bool) -> None:
    """All of them in one test: to make up the rows takes longer than to look at them."""
    for name, detector in DETECTORS.items():
        findings, state = run(detector, rows, grown(name) if is_grown else None)
        assert all(isinstance(part, str) or math.isfinite(part) for part in parts(state)), name
        assert all(str(finding) for finding in findings if finding is not None), name
