"""The gate on the device decides what the detectors on the host decide, of the same numbers."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from sealegs.detectors.nonfinite import NonFinite
from sealegs.detectors.spike import WIDENED_STEPS, Spike, SpikeState, heeding, usable
from sealegs.judge import Budget, begin, fold, standard
from sealegs.stats.streaming import LEVELS, PATIENCE, SIGNED, START
from sealegs.step.decision import UpdateDecision
from sealegs.step.gate import FIRST_STATE, ROW, SCALARS, Gate, HostFacts, flat
from sealegs.step.update import Update
from sealegs.watch import Watch

DETECTORS = [d for d in standard() if isinstance(d, Spike)]
CPU = torch.device("cpu")


def troubled(steps: int, seed: int = 0) -> tuple[list[tuple[float, float]], set[int]]:
    """A run with everything in it: a steep start, heavy tails, spikes, bursts, a new level, NaN, Inf, announcements."""
    random = np.random.default_rng(seed)
    loss = (2.5 + 8.5 * np.exp(-np.arange(steps) / 60)) * np.exp(0.01 * random.standard_t(5, steps))
    norm = 0.5 * np.exp(0.2 * random.standard_t(5, steps))
    for at in random.integers(5, steps, 8):
        loss[at] *= random.uniform(1.1, 4)
        norm[at] *= random.uniform(2, 1000)
    for at in random.integers(5, steps, 12):
        loss[at] = random.choice([math.nan, math.inf, 0.0])
    for at in random.integers(5, steps, 12):
        norm[at] = random.choice([math.nan, math.inf, 0.0])
    loss[750:790] *= 2.5
    loss[820:830], norm[820:830] = 60.0, 40.0  # the same step again and again
    loss[900 : 900 + PATIENCE + 10] *= 2.5  # accepted by a young run
    loss[1100:] *= 1.5
    for first in (300, 1050)[: 1 + (steps > 1100)]:
        norm[first : first + 5] = norm[first - 1] * np.array([4, 12, 80, 600, 5000])  # explodes
    loss[170] = math.nan  # announced at that very step
    loss[steps - 50] = -1.0  # and is judged on another scale from there on
    norm[1400 : 1400 + PATIENCE + 50] *= 1e9  # longer than patience: accepted
    return list(zip(loss.tolist(), norm.tolist(), strict=True)), {170, 1700}


def signed(steps: int, seed: int = 0) -> tuple[list[tuple[float, float]], set[int]]:
    """The same with a loss that falls through zero at step 150, and hovers about -3 from there on."""
    values, announced = troubled(steps, seed)
    random = np.random.default_rng(seed + 1000)
    loss, norm = np.array(values).T
    loss = 10 * np.exp(-np.arange(steps) / 110) - 3 + 0.2 * random.standard_t(5, steps)
    loss[20] = 0.0  # and nothing begins anew
    for at in random.integers(200, steps, 12):
        loss[at] = random.choice([math.nan, math.inf, -math.inf, 0.0])
    for at in random.integers(340, steps, 8):
        loss[at] += random.uniform(2, 400)
    loss[700 : 700 + PATIENCE + 30] += 9.0  # accepted
    loss[820:830], norm[820:830] = -60.0, 40.0
    return list(zip(loss.tolist(), norm.tolist(), strict=True)), announced & {1700} | {1000}


def on_host(
    values: Sequence[tuple[float, float]], announced: set[int], clip_norm: float = math.inf
) -> tuple[list[tuple[float, ...]], list[list[SpikeState]]]:
    """(closed, p of loss, p of norm) of each step by the judge, and the states of the detectors after it."""
    detectors: tuple[Any, ...] = (NonFinite(), *DETECTORS)
    state, out, states = begin(detectors), [], []
    for step, (loss, norm) in enumerate(values):
        row: dict[str, Any] = {"step": step, "loss": loss, "grad_norm": norm, "clip_norm": clip_norm}
        if step in announced:
            row["announced"] = "lr decay"
        before = [heeding(s, row) for s in state.detectors[1:]]
        ps = [
            1.0
            if usable(row, detector.signal, is_signed=s.is_signed) is None or (value < 0 and not s.is_signed)
            else detector.p(s, row, value)
            for detector, s, value in zip(DETECTORS, before, (loss, norm), strict=True)
        ]
        state, verdict = fold(detectors, state, row, Budget(in_a_row=10_000, nonfinite_in_a_row=10_000, total=10_000))
        state = state._replace(tally=state.tally._replace(lone_skips=0))  # restraint is the host's, and told
        out.append((float(not verdict.go), *ps))
        states.append(list(state.detectors[1:]))
    return out, states


def grown(steps: int) -> Gate:
    """A gate as after so many steps of a troubled run, with the states of the host: its own take longer to make."""
    gate = Gate(CPU, DETECTORS)
    gate.begin_from(on_host(troubled(1200)[0][:steps], set())[1][-1])
    return gate


def on_device(
    gate: Gate,
    values: Sequence[tuple[float, float]],
    announced: set[int],
    first: int = 0,
    clip_norm: float = math.inf,
) -> list[list[float]]:
    out = []
    for step, (loss, norm) in enumerate(values, first):
        coarse = any(at <= step < at + WIDENED_STEPS for at in announced)
        row = gate.decide(
            torch.tensor(loss, dtype=torch.float64),
            torch.tensor(norm, dtype=torch.float64),
            told=HostFacts(step in announced, coarse, clip_norm=clip_norm),
        )
        out.append(row.tolist())
    return out


@pytest.mark.parametrize("run", [troubled, signed])
def test_it_decides_as_the_detectors_do(run: Callable[[int], tuple[list[tuple[float, float]], set[int]]]) -> None:
    values, announced = run(1500)
    expected, states = on_host(values, announced)
    if run is signed:
        assert sum(row[1] < 1e-5 for row in expected[300:]) > 80, "and it is judged below zero"
        assert states[-1][0].stream.unit > 0
    gate = Gate(CPU, DETECTORS)
    rows = on_device(gate, values, announced)
    assert 20 < sum(row[0] for row in expected) < 100, "something is skipped, and not everything"
    np.testing.assert_allclose([row[2:5] for row in rows], expected, rtol=1e-9, atol=0)
    assert [row[2] for row in rows] == [row[0] for row in expected]
    for held, state in zip(gate.state.tolist(), states[-1], strict=True):
        np.testing.assert_allclose(held, flat(state), rtol=1e-9)


def troubled_stretches(expected: Sequence[tuple[float, ...]], announced: set[int]) -> list[range]:
    """The steps around whatever is no healthy step, and the first and last ones of a run."""
    odd = [step for step, row in enumerate(expected) if row[0] or min(row[1:]) < LEVELS[-1] or step in announced]
    steps = sorted({near for step in (0, *odd, len(expected)) for near in range(step - 3, step + 4)})
    steps = [step for step in steps if 0 <= step < len(expected)]
    begins = [step for step in steps if step - 1 not in set(steps)]
    ends = [step + 1 for step in steps if step + 1 not in set(steps)]
    return list(map(range, begins, ends))


@pytest.mark.parametrize(("seed", "clip_norm"), [(1, math.inf), (0, 1.0), (1, 20.0)])
def test_it_decides_as_the_detectors_do_in_each_trouble(seed: int, clip_norm: float) -> None:
    """Other runs, and gradients that are clipped. From one trouble to the next it goes on from the states of the host:
    in between there is nothing to decide, and a gate takes its time on a CPU.
    """
    values, announced = troubled(1500, seed)
    expected, states = on_host(values, announced, clip_norm)
    assert 20 < sum(row[0] for row in expected) < 100, "something is skipped, and not everything"
    stretches = troubled_stretches(expected, announced)
    assert sum(row[0] for row in expected) == sum(expected[step][0] for steps in stretches for step in steps)
    gate = Gate(CPU, DETECTORS)
    for steps in stretches:
        if steps.start:
            gate.begin_from(states[steps.start - 1])
        rows = on_device(gate, values[steps.start : steps.stop], announced, steps.start, clip_norm)
        wanted = expected[steps.start : steps.stop]
        np.testing.assert_allclose([row[2:5] for row in rows], wanted, rtol=1e-9, atol=0)
        assert [row[2] for row in rows] == [row[0] for row in wanted]
    for held, state in zip(gate.state.tolist(), states[-1], strict=True):
        np.testing.assert_allclose(held, flat(state), rtol=1e-9)


def test_what_is_clipped_to_a_size_that_is_known_is_let_through() -> None:
    values = [(2.0, 0.5)] * 20 + [(2.0, 10.0)]
    closed = [on_device(Gate(CPU, DETECTORS), values, set(), clip_norm=clip)[-1][2] for clip in (1.0, 6.0, math.inf)]
    assert closed == [0.0, 1.0, 1.0]


def test_a_closed_gate_is_what_optimizers_read() -> None:
    gate = Gate(CPU, DETECTORS)
    assert gate.decide(torch.tensor(2.0), torch.tensor(0.5))[2] == 0.0
    assert gate.found_inf == 0.0
    address = gate.found_inf.data_ptr()
    assert gate.decide(torch.tensor(math.nan), torch.tensor(0.5))[2] == 1.0
    assert (gate.found_inf.item(), gate.found_inf.dtype, gate.found_inf.shape) == (1.0, torch.float32, ())
    assert gate.found_inf.data_ptr() == address


def test_the_row_says_which_tensor_was_the_worst() -> None:
    gate = Gate(CPU, DETECTORS)
    row = dict(zip(ROW, gate.decide(torch.tensor(2.0), torch.tensor(0.5), torch.tensor(7)).tolist(), strict=True))
    assert row == {
        "loss": 2.0,
        "grad_norm": 0.5,
        "gate_closed": 0.0,
        "loss_p": 1.0,
        "grad_norm_p": 1.0,
        "worst_tensor": 7.0,
    }
    assert gate.decide(torch.tensor(2.0), torch.tensor(0.5))[5] == -1.0


@pytest.mark.parametrize(
    ("norms", "worst"),
    [([3.0, 4.0], 1), ([2.0], 0), ([math.inf, 1.0, math.nan], 2), ([1.0, math.inf, 2.0], 1), ([0.1] * 700, 0)],
)
def test_norms_of_all_gradients_make_one(norms: list[float], worst: int) -> None:
    gate = Gate(CPU, DETECTORS, clip=2.0)
    row = gate.decide(torch.tensor(2.0), torch.tensor(norms, dtype=torch.float64)).tolist()
    total = math.sqrt(sum(norm * norm for norm in norms))
    assert row[1] == pytest.approx(total, nan_ok=True)
    assert row[5] == worst
    assert gate.grad_norm.item() == pytest.approx(total, nan_ok=True)
    assert gate.grad_scale.item() == pytest.approx(max(total / 2.0, 1.0) if math.isfinite(total) else 1.0)


def test_without_a_limit_nothing_is_scaled() -> None:
    gate = Gate(CPU, DETECTORS)
    gate.decide(torch.tensor(2.0), torch.tensor(1e30))
    assert gate.grad_scale.item() == 1.0


def test_what_is_not_finite_leaves_the_state_as_it_was() -> None:
    gate = grown(400)
    before = gate.state.clone()
    for value in (math.nan, math.inf, -math.inf):
        gate.decide(torch.tensor(value), torch.tensor(value))
    assert torch.equal(gate.state, before)


def test_its_state_goes_through_json_bit_for_bit() -> None:
    values, _ = troubled(1200)
    whole, second = grown(690), Gate(CPU, DETECTORS)
    on_device(whole, values[690:700], set(), 690)
    second.load(json.loads(json.dumps(whole.state.tolist())), json.loads(json.dumps(whole.row.tolist())))
    expected = on_device(whole, values[700:1000], set(), 700)
    np.testing.assert_array_equal(on_device(second, values[700:1000], set(), 700), expected)
    assert torch.equal(second.state, whole.state)


def test_a_saved_gate_of_other_numbers_is_made_anew_from_the_host() -> None:
    """An older one said that a loss has been negative in place of its unit."""
    decision = UpdateDecision(Update([]), Watch(None), act=False, world=1)
    gate = Gate(CPU, DETECTORS)
    saved = {"gate": [gate.state.tolist(), gate.row.tolist()], "coarse_left": 7}
    decision.load_state_dict(saved)
    assert decision.state_dict() == {"gate": None, "scalars": list(SCALARS), "coarse_left": 7}
    decision.load_state_dict(saved | {"scalars": list(SCALARS)})
    assert decision.state_dict()["gate"] == saved["gate"]


def test_a_state_that_judged_no_more_begins_anew_on_the_device_too() -> None:
    gate = Gate(CPU, DETECTORS)
    _, states = on_host([(2.0, 0.5)] * 40, set())
    loss, norm = states[-1]
    gate.begin_from([loss._replace(is_signed=True), norm])
    assert gate.state[0].tolist() == flat(SpikeState(SIGNED))
    assert gate.state[1].tolist() == flat(norm)


def test_its_first_state_is_that_of_the_detectors() -> None:
    assert list(FIRST_STATE) == flat(DETECTORS[0].init())
    assert len(FIRST_STATE) == len(SCALARS) + START


def test_a_step_that_is_held_is_closed_unless_the_guard_has_learned_restraint() -> None:
    gate = Gate(CPU, DETECTORS)
    loss, norm = torch.tensor(2.0), torch.tensor(0.5)
    assert gate.decide(loss, norm, told=HostFacts(held=True))[2] == 1.0
    assert gate.decide(loss * 2, norm, told=HostFacts(held=True, restrained=True))[2] == 0.0
    assert gate.decide(loss * math.nan, norm, told=HostFacts(restrained=True))[2] == 1.0
    on_device(gate, [(2.0, 0.5)] * 10, set())
    assert gate.decide(loss, norm * 100)[2] == 1.0
    on_device(gate, [(2.0, 0.5)] * 10, set())
    assert gate.decide(loss, norm * 1e6, told=HostFacts(restrained=True))[2] == 0.0
