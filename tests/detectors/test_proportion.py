"""What should change slowly and did not."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from sealegs.detectors.proportion import Proportion
from sealegs.errors import ConfigError
from sealegs.vocabulary import Finding, Severity

Signals = Callable[[int], dict[str, float]]


def run(signals: Signals, steps: int = 2000, every: int = 10, **options: Any) -> dict[int, Finding]:
    detector = Proportion(**options)
    state, out = detector.init(), {}
    for step in range(0, steps, every):
        row = {"step": step} | signals(step)
        if finding := detector.look(state, row):
            out[step] = finding
        state = detector.learn(state, row)
    return out


def size(state: Any) -> int:
    return sum(map(size, state)) if isinstance(state, tuple) else 1


@pytest.mark.parametrize(("factor", "change"), [(2.1, "grown"), (1 / 2.1, "shrunk")])
@pytest.mark.parametrize("signal", ["param_norm", "param_norm/mlp"])
def test_weights_that_change_twofold_are_an_alarm_once(signal: str, factor: float, change: str) -> None:
    found = run(lambda step: {"param_norm": 30.0, signal: 25.0 * (factor if step >= 1500 else 1.0)})
    assert {step: f.severity for step, f in found.items()} == {1500: Severity.ALARM}
    assert found[1500].note == f"{signal} has {change} 2.1 times in 20 steps", "since the last sample"
    assert (found[1500].signal, found[1500].spoils_update, found[1500].lasts) == (signal, False, 20)


@pytest.mark.parametrize("every", [1, 10, 50, 65])
def test_the_change_counts_over_200_steps(every: int) -> None:
    """Twofold in 180 steps, and in 400."""
    fast = run(lambda step: {"param_norm": 30 * 2 ** (max(0, step - 1000) / 180)}, 1300, every)
    assert fast
    assert 1150 <= min(fast) < 1200 + every
    begun = min(fast) - next(iter(fast.values())).lasts
    assert 1000 - max(every, 20) <= begun <= 1000 + max(every, 20), "dated to when it began"
    assert run(lambda step: {"param_norm": 30 * 2 ** (max(0, step - 1000) / 400)}, 1300, every) == {}


def test_a_leap_is_dated_to_itself_however_the_norm_crept_before() -> None:
    found = run(lambda step: {"param_norm": 30 * (1 + step / 2000) * (2.2 if step >= 1500 else 1.0)})
    assert list(found) == [1500]
    assert found[1500].note == "param_norm has grown 2.2 times in 20 steps"


def test_a_new_norm_is_the_measure_after_a_window() -> None:
    found = run(lambda step: {"param_norm": 30 * 2.5 ** ((step >= 1000) + (step >= 1400))}, 2500)
    assert list(found) == [1000, 1400]


def test_growth_from_zero_in_warm_up_is_no_finding() -> None:
    """From zero with the square of the steps; and one that was young when it first came."""
    assert run(lambda step: {"param_norm": 1e-6 * step**2}) == {}
    assert run(lambda step: {"param_norm": 30.0} | ({"param_norm/late": 1e-6 * step**2} if step > 900 else {})) == {}
    assert run(lambda step: {"param_norm": 1e-6 * step**2}, young=300)


def test_a_small_group_may_do_what_it_likes() -> None:
    def passes_through_zero(size: float) -> Signals:
        return lambda step: {"param_norm": 30.0, "param_norm/gate": size * abs(math.sin(step / 100))}

    assert run(passes_through_zero(0.2)) == {}
    assert run(passes_through_zero(2.0))


def test_without_the_whole_the_groups_make_it() -> None:
    def signals(step: int) -> dict[str, float]:
        return {"param_norm/a": 30.0, "param_norm/gate": 0.1 if step < 1500 else 0.25}

    assert run(signals) == {}
    assert run(lambda step: {"param_norm/gate": signals(step)["param_norm/gate"]})


def test_many_groups_at_once_are_one_finding() -> None:
    found = run(lambda step: {f"param_norm/{i}": (1 + i / 10) ** (step >= 1500) * 3.0 for i in range(300)})
    assert list(found) == [1500]
    assert found[1500].note == "param_norm/299 has grown 30.9 times in 20 steps, and 277 more"


def test_memory_is_bounded_for_300_groups() -> None:
    detector = Proportion()
    groups = {f"{kind}/{i}": 1.0 for kind in ("param_norm", "update_ratio") for i in range(300)}
    state, sizes = detector.init(), []
    for step in range(0, 1200, 5):
        state = detector.learn(state, {"step": step, **groups})
        sizes.append(size(state))
    assert max(sizes[120:]) == max(sizes[:120]) <= 600 * 25


def test_an_update_out_of_proportion_is_worth_a_look() -> None:
    def signals(usual: float, now: float) -> Signals:
        return lambda step: {"update_ratio/head": now if step == 1500 else usual * (1 + step % 30 / 30)}

    found = run(signals(2e-3, 0.05))
    assert {step: f.severity for step, f in found.items()} == {1500: Severity.WATCH}
    assert found[1500].note == "updates of head 19 times their usual share of the weights"
    assert run(signals(2e-3, 0.01)) == {}
    assert run(signals(1e-4, 9e-3)) == {}  # far more than usual, and still nothing


def test_a_group_that_takes_nearly_the_whole_gradient_is_worth_a_look() -> None:
    def signals(usual: float, now: float) -> Signals:
        return lambda step: {"grad_norm": 40.0, "grad_norm/embedding": 40.0 * (now if step == 1500 else usual)}

    found = run(signals(0.2, 0.97))
    assert {step: f.severity for step, f in found.items()} == {1500: Severity.WATCH}
    assert found[1500].note == "embedding has 97% of the gradient norm, usually 20%"
    assert run(signals(0.2, 0.9)) == {}
    assert run(signals(0.6, 0.97)) == {}
    assert run(lambda step: {"grad_norm/embedding": 0.97 if step == 1500 else 0.2}) == {}


def test_attention_logits_that_double_are_worth_a_look_when_they_are_large() -> None:
    def signals(level: float) -> Signals:
        return lambda step: {"attention_logit_max/3": level * 2 ** (max(0, step - 1000) / 150)}

    found = run(signals(40.0), 1300)
    assert {f.severity for f in found.values()} == {Severity.WATCH}
    assert min(found) == 1160
    assert found[1160].note == "attention logits of 3 2.1 times what they were"
    assert run(signals(10.0), 1300) == {}
    assert run(lambda step: {"attention_logit_max/3": 500.0}) == {}


def test_an_alarm_comes_before_a_remark() -> None:
    def signals(step: int) -> dict[str, float]:
        odd = step >= 1500
        return {"param_norm": 75.0 if odd else 30.0, "update_ratio/a": 5.0 if odd else 1e-3}

    found = run(signals)
    assert found[1500].signal == "param_norm"
    assert found[1500].note.endswith(", and 1 more")


def test_the_first_window_is_left_alone() -> None:
    assert run(lambda step: {"update_ratio/a": 1e-3 if step < 190 else 5.0}, 200) == {}
    assert run(lambda step: {"update_ratio/a": 1e-3 if step < 200 else 5.0}, 210)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_what_cannot_be_compared_is_left_out(value: float) -> None:
    detector = Proportion()
    row = {"step": 0, "param_norm": value, "update_ratio/a": value, "grad_norm": 1.0, "grad_norm/a": value}
    assert detector.learn((), row) == ()
    assert detector.learn((), {"step": 0, "grad_norm": value, "grad_norm/a": 1.0}) == ()
    assert detector.learn((), {"step": 0, "grad_norm": 5e-324, "grad_norm/a": 1e300}) == ()


@pytest.mark.parametrize(
    "options",
    [
        {"window": 5},
        {"young": 100},
        {"norm_factor": 1.0},
        {"update_factor": math.nan},
        {"grad_share": 0.4},
        {"attention_logit": 0.0},
    ],
    ids=str,
)
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Proportion(**options)
