"""What a loss does not show: policies, routers and formats that collapse."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import pytest

from sealegs.detectors.collapse import ADVICE, ALARMS, JUDGED, WATCHED, Collapse, Collapsed
from sealegs.errors import ConfigError
from sealegs.judge import Detection, standard
from sealegs.record.schema import SIGNALS
from sealegs.vocabulary import Finding, Severity

Course = Callable[[int, np.random.Generator], Mapping[str, float]]


def found(course: Course, values: int = 400, seed: int = 0, every: int = 1, **options: Any) -> dict[int, Finding]:
    """The findings of a run whose signals come every so many steps, by the number of the value."""
    detector, rng = Collapse(**options), np.random.default_rng(seed)
    state, out = detector.init(), {}
    for step in range(values * every):
        row = {"step": step, "loss": 0.01, "grad_norm": 0.5}
        if step % every == 0:
            row |= {name: float(value) for name, value in course(step // every, rng).items()}
        if finding := detector.look(state, row):
            out[step // every] = finding
        state = detector.learn(state, row)
    return out


def names(findings: Mapping[int, Finding]) -> set[str]:
    return {finding.detector for finding in findings.values()}


def gone(step: int, at: int = 200, over: int = 60) -> float:
    """From 0 to 1 after something happens."""
    return min(max((step - at) / over, 0.0), 1.0)


def healthy_policy(step: int, rng: np.random.Generator) -> dict[str, float]:
    """A reward that is learned with much noise, an entropy that falls to a third, answers that grow."""
    learned = 1 - math.exp(-step / 120)
    return {
        "reward": 0.1 + 0.5 * learned + rng.normal(0, 0.1),
        "reward_std": 0.4 + rng.normal(0, 0.05),
        "zero_spread_share": float(np.clip(0.3 + rng.normal(0, 0.15), 0, 1)),
        "policy_entropy": 0.9 * math.exp(-learned * 1.1) * math.exp(rng.normal(0, 0.15)),
        "kl": 0.002 * step**0.7 * math.exp(rng.normal(0, 0.4)),
        "policy_kl": 0.003 * math.exp(rng.normal(0, 0.5)),
        "importance_ratio": 1 + rng.normal(0, 0.02),
        "logp_gap": 0.004 * math.exp(rng.normal(0, 0.3)),
        "completion_length": (120 + step) * math.exp(rng.normal(0, 0.1)),
        "cut_share": float(np.clip(0.1 + 0.0005 * step + rng.normal(0, 0.05), 0, 1)),
    }


def healthy_experts(step: int, rng: np.random.Generator) -> dict[str, float]:
    """Loads that even out, and a router that becomes surer."""
    return {
        "expert_violation": (0.4 + 2 * math.exp(-step / 50)) * math.exp(rng.normal(0, 0.2)),
        "dead_expert_share": float(np.clip(0.05 + 0.2 * math.exp(-step / 50) + rng.normal(0, 0.03), 0, 1)),
        "router_entropy": 2.0 - 0.5 * (1 - math.exp(-step / 200)) + rng.normal(0, 0.02),
    }


def broken(**change: Callable[[int, float], float]) -> Course:
    """A healthy policy with one signal that goes wrong."""

    def course(step: int, rng: np.random.Generator) -> dict[str, float]:
        values = healthy_policy(step, rng)
        return values | {name: move(step, values[name]) for name, move in change.items()}

    return course


FALLEN = {
    "entropy-collapse": broken(policy_entropy=lambda step, value: value * math.exp(-6 * gone(step))),
    "zero-spread": broken(
        zero_spread_share=lambda step, value: max(value, gone(step, over=1)),
        reward_std=lambda step, value: value * (1 - gone(step, over=1)),
    ),
    "kl-blow-up": broken(kl=lambda step, value: value * math.exp(6 * gone(step, over=20))),
    "mismatch": broken(logp_gap=lambda step, value: value + 0.3 * gone(step)),
    "reward-collapse": broken(reward=lambda step, value: value - 0.6 * gone(step)),
    "length-collapse": broken(
        completion_length=lambda step, value: value * (1 - 0.99 * gone(step)),
        reward=lambda step, value: value - 0.3 * gone(step),
    ),
    "cut-off": broken(cut_share=lambda step, value: max(value, 0.99 * gone(step))),
}


@pytest.mark.parametrize("mode", FALLEN)
def test_each_collapse_of_a_policy_is_told_once_and_changes_nothing(mode: str) -> None:
    for seed in range(3):
        findings = found(FALLEN[mode], seed=seed)
        ((step, finding),) = [(step, each) for step, each in findings.items() if each.detector == mode]
        assert 200 < step < 320
        severity = Severity.ALARM if mode in ALARMS else Severity.WATCH
        assert (finding.severity, finding.spoils_update, finding.lasts) == (severity, False, 1)
        assert finding.signal in WATCHED[mode]
        assert names(findings) - {mode} <= {"reward-collapse"}


@pytest.mark.parametrize("shift", [-1000.0, 0.0])
def test_a_reward_may_have_any_sign(shift: float) -> None:
    rewards = broken(reward=lambda step, value: shift / 1000 + value - 0.6 * gone(step))
    assert names(found(rewards)) == {"reward-collapse"}


@pytest.mark.parametrize("every", [1, 3])
def test_healthy_policies_get_no_word(every: int) -> None:
    assert [names(found(healthy_policy, 500, seed, every)) for seed in range(10)] == [set()] * 10


def test_a_policy_that_never_learns_and_one_of_few_rewards_get_no_word() -> None:
    def idle(step: int, rng: np.random.Generator) -> dict[str, float]:
        return healthy_policy(0, rng)

    def sparse(step: int, rng: np.random.Generator) -> dict[str, float]:
        solved = rng.binomial(64, 0.02 + 0.5 * gone(step, 0, 300)) / 64
        return {"reward": solved, "zero_spread_share": 0.9 - solved / 2, "policy_entropy": 0.5}

    assert [names(found(course, 500, seed)) for course in (idle, sparse) for seed in range(5)] == [set()] * 10


def test_a_text_that_is_learned_by_heart_is_no_collapse() -> None:
    def tuned(step: int, rng: np.random.Generator) -> dict[str, float]:
        return {"policy_entropy": 3.7 * math.exp(-step / 30), "token_accuracy": 1.0, "kl": math.exp(step / 100)}

    assert found(tuned) == {}


def test_a_collapse_from_the_first_value_on_is_judged_late_but_is() -> None:
    def dead(step: int, rng: np.random.Generator) -> dict[str, float]:
        return {"reward": 0.0, "zero_spread_share": 1.0}

    ((step, finding), *_) = found(dead, 100).items()
    assert (step, finding.detector, finding.severity) == (19, "zero-spread", Severity.ALARM)


def test_what_lasts_is_named_again_after_a_long_while() -> None:
    steps = [
        step for step, each in found(FALLEN["entropy-collapse"], 700).items() if each.detector == "entropy-collapse"
    ]
    assert [after - before for before, after in pairwise(steps)] == [200] * (len(steps) - 1)
    assert len(steps) > 1


def experts(**change: Callable[[int, float], float]) -> Course:
    def course(step: int, rng: np.random.Generator) -> dict[str, float]:
        values = healthy_experts(step, rng)
        return values | {name: move(step, values[name]) for name, move in change.items()}

    return course


def test_a_router_that_collapses_is_an_alarm() -> None:
    course = experts(
        expert_violation=lambda step, value: value + 6 * gone(step),
        dead_expert_share=lambda step, value: min(value + 0.7 * gone(step), 1.0),
    )
    findings = found(course, 400, every=3)
    router = next(each for each in findings.values() if each.detector == "router-collapse")
    assert (router.severity, router.spoils_update) == (Severity.ALARM, False)
    assert names(findings) == {"router-collapse", "dead-experts"}


@pytest.mark.parametrize(("more", "every"), [(0.35, 1), (0.35, 10), (0.15, 1), (0.15, 10)])
def test_experts_that_die_alone_are_an_alarm(more: float, every: int) -> None:
    course = experts(dead_expert_share=lambda step, value: min(value + more * gone(step, over=1), 1.0))
    (finding,) = found(course, 300, every=every).values()
    assert (finding.detector, finding.severity) == ("dead-experts", Severity.ALARM)


def test_half_of_the_experts_dead_is_a_collapse_whatever_the_largest_load() -> None:
    # of four experts of which each token takes two, the largest load is at most twice the mean
    course = experts(
        expert_violation=lambda step, value: min(value, 1.0), dead_expert_share=lambda step, value: 0.5 * (step >= 100)
    )
    assert names(found(course, 200)) == {"router-collapse", "dead-experts"}


def test_a_router_that_is_uneven_for_some_steps_while_it_learns_gets_no_word() -> None:
    def course(step: int, rng: np.random.Generator) -> dict[str, float]:
        uneven = 15 <= step < 33
        return {"expert_violation": 2.8 if uneven else 0.4, "dead_expert_share": 0.25 if uneven else 0.0}

    assert found(course, 200) == {}


def hacked(step: int, rng: np.random.Generator, *, held_out: float = -0.4, noise: float = 0.02) -> dict[str, float]:
    """The reward in training leaps; the one on held-out tasks, every tenth step, goes its own way."""
    values = healthy_policy(step, rng) | {"reward": 0.2 + 0.001 * step + 2 * gone(step) + rng.normal(0, 0.03)}
    if step % 10 == 0:
        values["eval_reward"] = 0.2 + 0.001 * min(step, 200) + held_out * gone(step) + rng.normal(0, noise)
    return values


def test_a_held_out_reward_that_falls_while_the_other_one_rises_is_an_alarm() -> None:
    for seed in range(3):
        ((step, finding),) = found(hacked, seed=seed).items()
        assert (finding.detector, finding.severity, finding.signal) == ("held-out-falls", Severity.ALARM, "eval_reward")
        assert 200 < step < 300


def test_a_held_out_reward_that_wanders_or_rises_less_gets_no_word() -> None:
    for seed in range(5):
        assert found(partial(hacked, held_out=0.05, noise=0.02), seed=seed) == {}
        assert found(partial(hacked, held_out=0.0, noise=0.1), seed=seed) == {}


def solved(step: int, rng: np.random.Generator) -> dict[str, float]:
    """A task that is solved: the reward comes to its end, groups lose their spread, and entropy goes to nothing."""
    far = gone(step, 50, 250)
    return {
        "reward": 0.1 + 0.9 * far + (1 - far) * rng.normal(0, 0.05),
        "policy_entropy": 2.0 * math.exp(-4.5 * far) * math.exp(rng.normal(0, 0.1)),
        "zero_spread_share": float(np.clip(1.02 * far**2 + (1 - far) * rng.normal(0, 0.05), 0, 1)),
    }


def test_a_policy_that_has_solved_its_task_is_noticed_and_is_no_alarm() -> None:
    for seed in range(5):
        assert {each.severity for each in found(solved, 600, seed).values()} == {Severity.WATCH}


def test_entropy_for_which_no_reward_was_won_is_an_alarm_before_it_is_nothing() -> None:
    course = broken(
        policy_entropy=lambda step, value: 0.9 * max(math.exp(-3 * gone(step, 150, 50)), 0.1),
        reward=lambda step, value: 0.3 + value / 10,
    )
    (first, *_) = found(course).values()
    assert (first.detector, first.severity) == ("entropy-collapse", Severity.ALARM)


@pytest.mark.parametrize("every", [1, 3])
def test_healthy_routers_get_no_word(every: int) -> None:
    assert [names(found(healthy_experts, 100, seed, every)) for seed in range(20)] == [set()] * 20


def test_saturation_and_a_lost_scale_are_alarms() -> None:
    def saturated(step: int, rng: np.random.Generator) -> dict[str, float]:
        return {"saturated_share": 0.001 + 0.1 * gone(step), "quant_scale": 0.0 if step >= 300 else 2.0}

    findings = list(found(saturated, 400, every=3).items())
    assert [(each.detector, each.severity) for _, each in findings] == [
        ("saturation", Severity.ALARM),
        ("zero-scale", Severity.ALARM),
    ]
    assert findings[1][0] == 300


def test_no_loss_and_no_gradient_is_told_after_ten_steps_and_again_when_it_comes_again() -> None:
    def masked(step: int, rng: np.random.Generator) -> dict[str, float]:
        return {"loss": 0.0, "grad_norm": 0.0} if 50 <= step < 70 or 90 <= step < 99 or step >= 150 else {}

    assert {step: each.detector for step, each in found(masked, 170).items()} == {59: "no-gradient", 159: "no-gradient"}


def test_an_announced_change_begins_anew() -> None:
    def course(step: int, rng: np.random.Generator) -> dict[str, Any]:
        lower = {"reward": 0.05, "policy_entropy": 0.01} if step >= 200 else {}
        return healthy_policy(step, rng) | lower

    detector, rng = Collapse(), np.random.default_rng(0)
    state = detector.init()
    for step in range(400):
        row: dict[str, Any] = {"step": step, "loss": 0.1, **course(step, rng)}
        row |= {"announced": "other tasks"} if step == 200 else {}
        assert detector.look(state, row) is None
        state = detector.learn(state, row)


def test_what_the_user_wants_to_halt_for_halts() -> None:
    halts = found(FALLEN["entropy-collapse"], halts=frozenset({"entropy-collapse"}))
    assert [each.severity for each in halts.values() if each.detector == "entropy-collapse"] == [Severity.HALT]
    detection = Detection(halt_on=["reward-collapse"])
    (collapse,) = (each for each in standard(detection.halt_on) if isinstance(each, Collapse))
    assert collapse.halts == {"reward-collapse"}


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"halt_on": ("entropy",)}, "'entropy' is nothing that can be found; one of entropy-collapse, zero-spread"),
        ({"halt_on": "mismatch"}, "Detection.halt_on='mismatch': a list of what the run is to be halted by"),
        ({"halt_on": 3}, "Detection.halt_on=3: a list"),
        ({"halt_on": ("mismatch",), "rules": "textbook"}, "only the calibrated rules find that"),
    ],
)
def test_what_cannot_be_halted_for_is_refused(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence.replace("(", r"\(")):
        Detection(**wrong)


def test_every_name_has_its_signals_and_its_advice() -> None:
    assert set(get_args(Collapsed)) == set(ADVICE) == set(WATCHED)
    assert set(JUDGED) <= set(SIGNALS)
    assert set().union(*WATCHED.values()) - {"grad_norm"} <= set(JUDGED)
