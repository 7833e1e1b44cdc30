"""What a diagnosis is made of: plain values, the same in `sealegs check --json`, in post-mortems and on pages."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from sealegs.incidents import Incident
from sealegs.record.interventions import Done
from sealegs.record.run import Run

Health: TypeAlias = Literal["healthy", "watch", "act", "unknown"]
Grade: TypeAlias = Literal["established", "supported", "hypothesis", "ruled out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that is wrong with a metric, not with the run."""

    signal: str
    kind: str
    """What it is, in kebab case: ``constant``, ``quantised``, ``smoothed``, ..."""
    text: str
    """One sentence, with the numbers."""
    hides: str = ""
    """What cannot be told because of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a run shows by itself: whether its metrics can be believed, and what went wrong where."""

    run: Run
    problems: tuple[Problem, ...]
    incidents: tuple[Incident, ...]
    verdict: Health
    because: str
    """Why that, in one sentence."""
    cleared: tuple[Incident, ...] = ()
    """Rises that would ask for an action, if the record did not show that nothing but the loss has risen."""
    unseen: tuple[str, ...] = ()
    """What cannot be seen at the resolution of this log."""
    done: Done | None = None
    """What was done to the run; None where the log does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One question of the decision tree, as this run answers it."""

    question: str
    """``Q2.1``"""
    text: str
    answer: str
    """``yes``, ``no``, ``unknown``, or the value that was asked for."""
    evidence: str
    """The numbers."""
    next: str
    """The question that comes next, or ``end``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A cause, and what speaks for and against it."""

    cause: str
    """The name of its card in ``causes.toml``."""
    grade: Grade
    evidence_for: tuple[str, ...] = ()
    evidence_against: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """What would have to be logged."""
    next_test: str = ""
    """The cheapest test that splits it from its neighbours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Everything that is said about a run."""

    source: str
    format: str
    findings: Findings
    path: tuple[Answer, ...]
    hypotheses: tuple[Hypothesis, ...]
    """The likeliest first."""
    first_action: str
    log_next_time: tuple[str, ...]
    rules: str
    """``calibrated`` or ``textbook``."""
    mapping: Mapping[str, str]
    remarks: tuple[str, ...] = ()
