"""Every rule on the cases of its page: on one plan it speaks, and no other does; on the other nobody has a word."""

import json
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sealegs.cli.preflight import read
from sealegs.errors import ConfigError
from sealegs.preflight_check.plan import HOMES, Plan, plan_from
from sealegs.preflight_check.rule import PARTS, check
from sealegs.preflight_check.rules import FAMILIES, RULES
from sealegs.report.commands.contracts import contract
from sealegs.report.commands.preflight import page

DOCS = Path(__file__).parents[2] / "docs" / "preflight"
PART = re.compile(
    r"^## (?P<code>\w+): (?P<title>.+?)$\s+Speaks:\s+```(?P<kind>toml|json)\n(?P<speaks>.*?)^```$"
    r"\s+Silent:\s+```(?P=kind)\n(?P<silent>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Case(NamedTuple):
    code: str
    title: str
    kind: str
    speaks: str
    silent: str


CASES = [
    Case(found["code"], found["title"], found["kind"], found["speaks"], found["silent"])
    for family in FAMILIES
    for found in PART.finditer((DOCS / f"{family.about}.md").read_text())
]


def plan_of(case: Case, text: str, folder: Path) -> Plan:
    file = folder / f"case.{case.kind}"
    file.write_text(text)
    [found] = read(str(file))
    return found.plan


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.code)
def test_a_rule_speaks_where_it_should_and_nowhere_else(case: Case, tmp_path: Path) -> None:
    wrong = check(plan_of(case, case.speaks, tmp_path), "wrong", RULES)
    assert [each.code for each in wrong.findings] == [case.code]
    right = check(plan_of(case, case.silent, tmp_path), "right", RULES)
    assert [each.code for each in right.findings] == []
    assert case.code not in right.unknown, "it is silent because all is well, not because it was not asked"


@pytest.mark.parametrize(
    ("known", "value"),
    [
        ({"steps": 400}, "40, a tenth of the run"),
        ({"decay_steps": 400}, "40, a tenth of the run"),
        ({"steps": 100_000}, "2000 or more"),
        ({}, "2000 or more, or a tenth of a shorter run"),
    ],
    ids=["steps", "end of the schedule", "long", "unknown"],
)
def test_a_warmup_is_advised_that_fits_into_the_run(known: dict[str, int], value: str) -> None:
    plan = plan_from({"lr": 3e-4, "beta2": 0.999, "schedule": "cosine", "warmup_steps": 30, **known})
    [found] = [each for each in check(plan, "short", RULES).findings if each.code == "SCH2"]
    assert found.value == value


@pytest.mark.parametrize(
    ("optimizer", "value"),
    [
        ({"optimizer": "sgd"}, None),  # 0.1 at a rate of 0.1 would halve the weights in 70 steps
        ({"optimizer": "Adam", "decoupled": False}, "0.1, with decoupled_weight_decay=True"),
        ({"optimizer": "adam", "decoupled": True}, "0.1"),
        ({"optimizer": "lion"}, "0.1"),
        ({}, "0.1"),
    ],
)
def test_the_weight_decay_of_adamw_is_advised_to_its_kind_alone(optimizer: dict[str, Any], value: str | None) -> None:
    found = check(plan_from({"weight_decay": 0.0, **optimizer}), "plan", RULES)
    assert [each.value for each in found.findings if each.code == "OPT5"] == ([value] if value else [])
    assert ("OPT5" in found.margins_unknown) == (value is None), "nobody knows whether that margin is there"


def test_every_rule_has_its_page_and_its_cases() -> None:
    assert [(case.code, case.title) for case in CASES] == [(rule.code, rule.title) for rule in RULES]
    assert len(RULES) == 73
    for rule in RULES:
        assert all(rule.parts[part] for part in PARTS)
        assert rule.parts["sure"].split()[0].rstrip(",;:.") in ("established", "supported", "rule")


def test_nobody_is_told_to_take_another_optimizer() -> None:
    told = " ".join(f"{rule.parts['set']} {rule.title}" for rule in RULES).lower()
    assert not re.search(r"(switch|change) (to|the) (another )?optimizer|use (lion|adafactor|shampoo|muon|sgd)", told)


def test_of_what_is_not_known_nothing_is_said() -> None:
    advised = check(Plan(), "nothing", RULES)
    assert advised.findings == []
    assert advised.unknown == [rule.code for rule in RULES]


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Whatever a field of this type may hold, the edges of its range among them."""
    [inside] = [each for each in get_args(kind) if each is not type(None)]
    limits: Any = get_args(inside)[1] if hasattr(inside, "__metadata__") else msgspec.Meta()
    plain = get_args(inside)[0] if hasattr(inside, "__metadata__") else inside
    if plain in (int, float):
        low, high = limits.ge if limits.ge is not None else limits.gt, limits.le or 10**12
        numbers = st.integers(low, high) if plain is int else st.floats(low, high)
        return numbers.filter(lambda value: limits.gt is None or value > limits.gt)
    if plain is bool:
        return st.booleans()
    if plain is str:
        return st.sampled_from(["", "adam", "sdpa", "eager"])
    if get_origin(plain) is Literal:
        return st.sampled_from(get_args(plain))
    assert get_origin(plain) is tuple
    return (
        st.lists(st.floats(0, 1), min_size=1, max_size=30).map(tuple) if limits.min_length else st.just(("a.weight",))
    )


FIELDS = {
    name: values_of(kind)
    for group in get_type_hints(Plan).values()
    for name, kind in get_type_hints(group, include_extras=True).items()
}


@given(st.fixed_dictionaries({}, optional=FIELDS))
@example({"checkpoint_minutes": 1000.0, "checkpoint_steps": 0, "seconds_per_step": 5e-324})
@example({"lr": 5e-324, "steps": 1, "schedule": "inverse-sqrt", "warmup_steps": 1000})
def test_no_rule_breaks_on_any_plan(known: dict[str, Any]) -> None:
    advised = check(plan_from(known), "any", RULES)
    assert advised.asked + len(advised.unknown) + len(advised.left_out) == len(RULES)
    assert set(advised.margins_missing) <= {each.code for each in advised.findings}
    assert json.loads(json.dumps(contract(advised), allow_nan=False))["source"] == "any"
    assert page(advised)


def test_the_plan_refuses_what_cannot_be() -> None:
    assert set(FIELDS) == set(HOMES)
    for known, told in (
        ({"beta2": 1.5}, r"mine: optimizer.beta2=1.5: Expected `float` <= 1.0"),
        ({"lr": float("nan")}, r"mine: optimizer.lr=nan: Expected `float` > 0.0"),
        ({"lr": float("inf")}, r"mine: optimizer.lr=inf: a finite number"),
        ({"steps": 0}, r"mine: schedule.steps=0: Expected `int` >= 1"),
        ({"dtype": "int4"}, r"mine: precision.dtype='int4': Invalid enum value"),
    ):
        with pytest.raises(ConfigError, match=told):
            plan_from(known, "mine")


@pytest.mark.parametrize(
    ("known", "code", "value"),
    [
        ({"warmup_steps": 0, "steps": 150}, "SCH1", "7"),
        ({"warmup_steps": 0, "steps": 100_000}, "SCH1", "2000"),
        ({"warmup_steps": 0}, "SCH1", "2000, or 5 % of a short run"),
        ({"warmup_steps": 5, "steps": 150, "beta2": 0.999}, "SCH2", "15, a tenth of the run"),
        ({"warmup_steps": 15, "steps": 150, "beta2": 0.999}, "SCH2", None),
        ({"warmup_steps": 500, "steps": 100_000, "beta2": 0.999}, "SCH2", "2000 or more"),
        ({"warmup_steps": 10, "steps": 150, "beta2": 0.95}, "SCH2", "15, a tenth of the run"),
        ({"warmup_steps": 10, "steps": 1000, "beta2": 0.95}, "SCH2", "40 or more"),
        ({"warmup_steps": 800_000, "steps": 1_000_000}, "SCH3", "2000"),
        ({"warmup_steps": 100, "steps": 150}, "SCH3", "7"),
    ],
)
def test_the_warm_up_that_is_asked_for_fits_into_the_run(known: dict[str, Any], code: str, value: str | None) -> None:
    plan = plan_from({"lr": 3e-4, "schedule": "cosine", **known})
    found = {each.code: each.value for each in check(plan, "a plan", RULES).findings}
    assert found.get(code) == value


@pytest.mark.parametrize(
    ("steps", "state"), [(90, "margins_unknown"), (100, "margins_missing"), (400, "margins_missing")]
)
def test_a_run_too_short_to_lack_a_warm_up_is_not_said_to_have_one(steps: int, state: str) -> None:
    advised = check(plan_from({"lr": 3e-4, "schedule": "cosine", "warmup_steps": 0, "steps": steps}), "plan", RULES)
    margins = ("margins_there", "margins_missing", "margins_unknown")
    assert [name for name in margins if "SCH1" in getattr(advised, name)] == [state]
    assert ("SCH1" in advised.unknown) == (state == "margins_unknown")


def test_a_whole_number_may_be_written_with_an_exponent() -> None:
    plan = plan_from({"parameters": 3e9, "steps": 2e5, "lr": 1.0})
    assert (plan.architecture.parameters, plan.schedule.steps, plan.optimizer.lr) == (3_000_000_000, 200_000, 1.0)
    with pytest.raises(ConfigError, match=r"schedule\.steps=1\.5: Expected `int"):
        plan_from({"steps": 1.5}, "mine")


def test_a_run_without_checkpoints_says_what_beginning_anew_would_cost() -> None:
    known = {"checkpoint_steps": 0, "seconds_per_step": 5.0, "price_per_hour": 98.0, "steps": 120_000}
    (found,) = (finding for finding in check(plan_from(known), "plan", RULES).findings if finding.code == "OPS1")
    assert found.found.endswith("costs up to 120000 steps, 166.7 hours, 16333.33 of money")


LONG = {"lr": 3e-4, "beta2": 0.95, "schedule": "cosine", "steps": 500_000}


@pytest.mark.parametrize(("warmup", "said"), [(20, ["SCH2"]), (150, ["SCH2"]), (250, []), (2000, [])])
def test_a_warm_up_in_a_long_run_is_no_leap_and_may_be_too_short(warmup: int, said: list[str]) -> None:
    advised = check(plan_from(LONG | {"warmup_steps": warmup}), "plan", RULES)
    assert [each.code for each in advised.findings if each.code.startswith("SCH")] == said
    assert ("SCH1" in advised.margins_there) == (not said)
    assert advised.margins_missing == said


def test_a_clip_that_never_clips_is_no_margin() -> None:
    advised = check(plan_from({"clip": 100.0}), "plan", RULES)
    assert (advised.margins_missing, advised.margins_there) == (["CLIP2"], [])
    assert [each.value for each in advised.findings] == ["1.0"]


def test_minutes_between_checkpoints_are_enough_to_ask() -> None:
    known = {"checkpoint_minutes": 600.0, "seconds_per_step": 2.0, "price_per_hour": 100.0}
    (finding,) = check(plan_from(known), "plan", RULES).findings
    assert (finding.code, finding.value) == ("OPS1", "30")
    assert "18000 steps, 10.0 hours, 1000.00 of money" in finding.found
    assert finding.knob.endswith("checkpoint_minutes")


def test_weights_that_are_kept_coarsely_need_no_learning_rate_to_be_told() -> None:
    (finding,) = check(plan_from({"dtype": "bf16", "weights_dtype": "bf16"}), "plan", RULES).findings
    assert (finding.code, finding.grade) == ("PRC4", "warning")
