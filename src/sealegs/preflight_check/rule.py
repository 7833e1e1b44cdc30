"""The contract of a pre-flight rule, and the check of a Plan by all of them.

A rule is a function whose parameters name what it needs: fields of a plan, or ``curve``, the simulated learning rate.
If one without a default is not known, the rule is not called. Its docstring is its page: what is wrong, then ``Why:``,
``Set:``, ``Sure:`` and ``See:``.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from sealegs.preflight_check.mup import mup_of
from sealegs.preflight_check.plan import HOMES, Plan
from sealegs.preflight_check.schedule import curve_of
from sealegs.report.commands.preflight import GRADES, Advice, Advised, Grade


class RuleFinding(NamedTuple):
    """What a rule found."""

    grade: Grade
    found: str
    knob: str
    """A field of the plan, or words if there is none."""
    value: str


Function: TypeAlias = Callable[..., RuleFinding | None]
USUAL_BETA1 = 0.9
PARTS = ("why", "set", "sure", "see")
NOT = "not "
"""Before a source's name of a field: there it is true where ours is false."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that can be wrong with a plan."""

    code: str
    function: Function
    margin: str
    """Code of the stability margin that a finding means is missing: its own or another rule's; empty if none is."""
    title: str
    from_scratch: bool
    """Whether it is about a run from random weights alone: of a model that was trained before it has nothing to say."""
    parts: Mapping[str, str]
    """``why``, ``set``, ``sure`` and ``see`` of its page."""

    @property
    def page(self) -> str:
        """The rule's documentation."""
        return f"{self.code}: {inspect.getdoc(self.function)}"

    def ask(self, known: Mapping[str, Any]) -> RuleFinding | None:
        """Call the rule; raises ``Unknown`` where the plan knows too little."""
        given = {}
        for name, parameter in inspect.signature(self.function).parameters.items():
            if name in known:
                given[name] = known[name]
            elif parameter.default is inspect.Parameter.empty:
                raise Unknown(name)
        return self.function(**given)


class Unknown(Exception):
    """A rule needs a field that the plan does not know."""


@dataclass(frozen=True, slots=True)
class Family:
    """Rules about one part of a run; their codes share a prefix."""

    prefix: str
    about: str
    rules: list[Rule] = field(default_factory=list)

    def rule(self, *, margin: bool | str = False, from_scratch: bool = False) -> Callable[[Function], Function]:
        """Add a function to the family. Codes are numbered in the order of the file.

        ``margin`` is True for a margin of its own, or the code of another's that such a finding leaves without use.
        ``from_scratch`` says that it is about a run from random weights alone.
        """

        def take(function: Function) -> Function:
            title, _, rest = (inspect.getdoc(function) or "").partition("\n")
            found = re.findall(r"^(\w+): (.*?)(?=\n\w+: |\Z)", rest.strip(), re.MULTILINE | re.DOTALL)
            parts = {name.lower(): " ".join(text.split()) for name, text in found}
            assert tuple(parts) == PARTS, f"{function.__name__}: its docstring has {tuple(parts)}"
            names = set(inspect.signature(function).parameters)
            assert names <= {*HOMES, "curve"}, f"{function.__name__}: no plan has {names - set(HOMES)}"
            code = f"{self.prefix}{len(self.rules) + 1}"
            of = margin if isinstance(margin, str) else code if margin else ""
            self.rules.append(Rule(code, function, of, title.rstrip("."), from_scratch, parts))
            return function

        return take


def check(
    plan: Plan,
    source: str,
    rules: list[Rule],
    names: Mapping[str, str] | None = None,
    *,
    not_judged: str = "",
) -> Advised:
    """Call every rule. ``names`` are the source's names of the plan's fields; ``not_judged`` is a sentence."""
    known = plan.known()
    if (curve := curve_of(known)) is not None:
        known["curve"] = curve
    left_out = [rule.code for rule in rules if rule.from_scratch and known.get("finetunes")]
    rules = [rule for rule in rules if rule.code not in left_out]
    findings: list[Advice] = []
    answered: list[Rule] = []
    for rule in rules:
        try:
            found = rule.ask(known)
        except Unknown:
            continue
        answered.append(rule)
        if found is not None:
            findings.append(_advice(rule, _of_pair(found, known, names or {}), names or {}))
    found_by = {each.code for each in findings}
    wanting = {rule.margin for rule in answered if rule.code in found_by}
    margins = [rule for rule in rules if rule.margin == rule.code]
    return Advised(
        source=source,
        findings=sorted(findings, key=lambda each: GRADES.index(each.grade)),
        asked=len(answered),
        unknown=[rule.code for rule in rules if rule not in answered],
        left_out=left_out,
        margins_missing=[rule.code for rule in answered if rule.margin and rule.code in found_by],
        margins_there=[rule.code for rule in margins if rule in answered and rule.code not in wanting],
        margins_unknown=[rule.code for rule in margins if rule not in answered and rule.code not in wanting],
        mup=mup_of(known),
        not_judged="" if "curve" in known else not_judged,
    )


def _of_pair(found: RuleFinding, known: Mapping[str, Any], names: Mapping[str, str]) -> RuleFinding:
    """Both values, where the source sets beta1 and beta2 at once."""
    if found.knob != "beta2" or "beta2" not in names or names.get("beta1") != names["beta2"]:
        return found
    beta2 = float(found.value.partition(",")[0])
    beta1 = known.get("beta1", USUAL_BETA1)
    return found._replace(value=f"({beta1 if beta1 < beta2 else USUAL_BETA1:g}, {beta2:g})")


def _advice(rule: Rule, found: RuleFinding, names: Mapping[str, str]) -> Advice:
    knob = names.get(found.knob) or (f"{HOMES[found.knob]}.{found.knob}" if found.knob in HOMES else found.knob)
    value = found.value
    if knob.startswith(NOT):
        knob, value = knob.removeprefix(NOT), {"true": "false", "false": "true"}[value]
    return Advice(
        code=rule.code,
        grade=found.grade,
        title=rule.title,
        found=found.found,
        why=rule.parts["why"],
        knob=knob,
        value=value,
        sure=rule.parts["sure"],
        reference=rule.parts["see"],
        margin=bool(rule.margin),
    )
