"""The JSON contract of ``sealegs check --json``. New keys may come, none is ever removed."""

from typing import Any, Literal, TypeAlias, TypedDict

Number: TypeAlias = float | str
"""A number, or the string for one that JSON cannot write: ``NaN``, ``Infinity``, ``-Infinity``."""


class MetricProblem(TypedDict):
    """A metric that cannot be believed."""

    signal: str
    kind: str
    text: str
    hides: str


class Incident(TypedDict):
    """Something that went wrong, and how it went on."""

    start: int
    peak: int
    end: int | None
    kind: str
    trajectory: Literal["fast", "slow", "lingering", "divergent"] | None
    pre_loss: Number
    peak_loss: Number
    recovery_loss: Number | None
    grad_norm_peak: Number


class GoesOnFrom(TypedDict):
    """Where an attempt begins: after a step of an earlier one."""

    attempt: int
    step: int


class Changed(TypedDict):
    """A setting before and after; of any type."""

    before: Any
    after: Any


class Attempt(TypedDict):
    """A stretch of a run from a launch, or a step back, to the next. ``goes_on_from`` is null if it begins anew."""

    number: int
    first: int
    last: int
    goes_on_from: GoesOnFrom | None
    told_by: str
    given_up_from: int | None
    changed: dict[str, Changed]


class Answer(TypedDict):
    """A question of the decision tree."""

    question: str
    text: str
    answer: str
    evidence: str
    next: str


Hypothesis = TypedDict(  # `for` is a word of Python
    "Hypothesis",
    {
        "cause": str,
        "grade": Literal["established", "supported", "hypothesis", "ruled out"],
        "for": list[str],
        "against": list[str],
        "missing": list[str],
        "next_test": str,
    },
)


class Unlearned(TypedDict):
    """A source of data that has far more than its share of the skips."""

    source: str
    skipped: int
    skips: int
    data: float
    lost: float


class Skips(TypedDict):
    """Steps whose update was not applied."""

    count: int
    share: float
    reasons: dict[str, int]
    first: int | None
    last: int | None
    finite: int
    not_acted: int
    unlearned: Unlearned | None


class Interventions(TypedDict):
    """What else was done to the run."""

    count: int
    by_action: dict[str, int]
    outcomes: dict[str, int]


class Kind(TypedDict):
    """The kind of run, and the signals that it is judged by first."""

    name: str
    traits: list[str]
    because: str
    first_signals: list[str]
    missing: list[str]


class ColumnFinding(TypedDict):
    """Something out of the ordinary in a column beside the loss."""

    signal: str
    step: int
    shows: str
    text: str
    is_strong: bool
    lasts: bool


class JudgedColumns(TypedDict):
    """Which columns were judged, which were not, and what was found in them."""

    judged: list[str]
    not_judged: list[str]
    findings: list[ColumnFinding]


class Setting(TypedDict):
    """What a pre-flight rule says of the settings of the run."""

    code: str
    grade: Literal["error", "warning", "note"]
    text: str


class Tried(TypedDict):
    """What a person has tried against the trouble, and what came of it."""

    action: str
    outcome: Literal["helped", "no help", "worse", "unclear"]


class Checked(TypedDict):
    """Everything that is said about a log. What was done to the run is null where the log does not tell."""

    source: str
    format: str
    steps: int
    signals: list[str]
    kind: Kind
    verdict: Literal["healthy", "watch", "act", "unknown"]
    because: str
    skips: Skips | None
    interventions: Interventions | None
    metric_problems: list[MetricProblem]
    incidents: list[Incident]
    columns: JudgedColumns
    attempts: list[Attempt]
    path: list[Answer]
    hypotheses: list[Hypothesis]
    first_action: str
    log_next_time: list[str]
    rules: str
    mapping: dict[str, str]
    remarks: list[str]
    lines: list[str]
    settings: list[Setting]
    tried: list[Tried]
