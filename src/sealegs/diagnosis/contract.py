"""The parts of a diagnosis: plain values, the same in `sealegs check --json`, in post-mortems and on pages."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from sealegs.curve_picture import Band, table
from sealegs.diagnosis.kind import UNKNOWN, Kind
from sealegs.incidents import Incident
from sealegs.record.interventions import Done
from sealegs.record.run import Run, curves_of

Health: TypeAlias = Literal["healthy", "watch", "act", "unknown"]
Outcome: TypeAlias = Literal["helped", "no help", "worse", "unclear"]
Grade: TypeAlias = Literal["established", "supported", "hypothesis", "ruled out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that is wrong with a metric, not with the run."""

    signal: str
    kind: str
    """The kind of problem in kebab case: ``constant``, ``quantised``, ``smoothed``, ..."""
    text: str
    """The problem in one sentence, with the numbers."""
    hides: str = ""
    """What the log cannot show because of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A finding beside the loss, of the live guard or of hindsight, that nothing in the curve clears or explains."""

    signal: str
    step: int
    text: str
    """The finding in one sentence, with the numbers."""
    is_grave: bool = False
    """Whether it calls for action by itself, as a policy that has collapsed does."""
    shows: str = ""
    """What it shows of the first signals of a kind, in kebab case: ``entropy-vanishes``; empty of other findings."""
    of: str = ""
    """The kind or trait whose first signal it is of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnFinding:
    """Something out of the ordinary in a column beside the loss, by its own past or by its siblings."""

    signal: str
    step: int
    """The step since which it shows."""
    shows: str
    """In kebab case: ``leaps``, ``rises``, ``slower``, ``vanishes``, ``turns``, ``appears``, ``not-finite``, ``parts``,
    ``never-moves``, ``never-leaves-zero``."""
    text: str
    """The finding in one sentence, with the numbers."""
    is_strong: bool
    """Whether a run with it is at least one to watch."""
    lasts: bool
    """Whether it is so to the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advised:
    """What a pre-flight rule says of the settings of a run."""

    code: str
    """The rule: ``OPT1``."""
    grade: Literal["error", "warning", "note"]
    text: str
    """What was found, in one sentence, with the rule's title."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What a person has tried against the trouble, and what came of it."""

    action: str
    """The action, in the person's words."""
    outcome: Outcome
    kinds: tuple[str, ...]
    """The entries of ``attempts.toml`` that the action is of."""
    between: tuple[int, int] | None = None
    """The steps or batches that the action names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reruns:
    """What the reruns of an incident say of its cause."""

    incident: Incident
    """As the run folder has it."""
    cause: str | None
    """The tested root cause; None where the reruns establish none."""
    because: str
    is_by_exclusion: bool = False
    """Whether the cause is merely what is left."""
    not_needed: tuple[str, ...] = ()
    """Causes without which the incident is there all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """What a setting, a line of the log or an attempt says of a cause."""

    cause: str
    weight: Literal["tested", "decides", "strong", "fits", "against", "rules_out"]
    """As the signs on a card; ``tested`` establishes the cause, whatever else is said."""
    text: str
    source: str
    """What it is a statement of: ``settings``, ``lines``, ``attempts``, ``replay`` or ``recovery``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a run shows by itself: whether its metrics can be believed, and what went wrong where."""

    run: Run
    problems: tuple[Problem, ...]
    incidents: tuple[Incident, ...]
    verdict: Health
    because: str
    """The reason for the verdict, in one sentence."""
    uncounted: int = 0
    """Rises of a loss that measures nothing: they are no incidents."""
    unlearned: str = ""
    """What says that nothing is learned, where nothing else is wrong with the loss."""
    periodic: str = ""
    """The period that explains all rises, where it is not known what repeats."""
    cleared: tuple[Incident, ...] = ()
    """Rises that would call for action, had they not been announced, or if more than the loss had risen."""
    notices: tuple[str, ...] = ()
    """What is out of the ordinary and no incident: leaps of the gradient norm that leave the loss alone."""
    kind: Kind = UNKNOWN
    """The kind of run, which says by which signals it is judged first."""
    standing: tuple[Standing, ...] = ()
    """Findings beside the loss that hindsight neither clears nor explains."""
    columns: tuple[ColumnFinding, ...] = ()
    """What is out of the ordinary in the columns, the strong ones first, then in the order of steps."""
    judged: tuple[str, ...] = ()
    """The columns that were judged."""
    unjudged: tuple[str, ...] = ()
    """The columns that are not understood, or have too few values."""
    unseen: tuple[str, ...] = ()
    """What the resolution of this log does not show."""
    done: Done | None = None
    """The interventions in the run; None where the log does not tell."""
    advised: tuple[Advised, ...] = ()
    """What the pre-flight rules say of the settings: `cli` asks them, which stand above this package."""
    tried: tuple[Tried, ...] = ()
    """What a person has tried."""
    reruns: tuple[Reruns, ...] = ()
    """What reruns said of the incidents in the run folder: `cli` reads them, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One question of the decision tree, as this run answers it."""

    question: str
    """The number of the question, such as ``Q2.1``."""
    text: str
    answer: str
    """``yes``, ``no``, ``unknown``, or the value that the question asks for."""
    evidence: str
    """The numbers behind the answer."""
    next: str
    """The number of the next question, or ``end``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A cause, and what speaks for and against it."""

    cause: str
    """The name of the cause's card in ``causes.toml``."""
    grade: Grade
    evidence_for: tuple[str, ...] = ()
    evidence_against: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """Signals that the log lacks and that would tell more."""
    next_test: str = ""
    """The cheapest test that tells this cause from its neighbours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Everything that Sealegs says about a run."""

    source: str
    format: str
    findings: Findings
    path: tuple[Answer, ...]
    hypotheses: tuple[Hypothesis, ...]
    """The hypotheses, the likeliest first."""
    first_action: str
    log_next_time: tuple[str, ...]
    rules: str
    """The set of rules that found the incidents: ``calibrated`` or ``textbook``."""
    mapping: Mapping[str, str]
    remarks: tuple[str, ...] = ()
    compared: str = ""
    """The remark that says what the other set of rules would have found."""
    lines: tuple[str, ...] = ()
    """Lines of the log that are no numbers and whose meaning is known, a sentence each."""
    settings: tuple[str, ...] = ()
    """What the pre-flight rules say of the settings, a sentence each, the gravest first."""
    tried: tuple[str, ...] = ()
    """What a person has tried, and what that says, a sentence each."""

    def _repr_html_(self) -> str:
        """What a notebook shows: the curves with the incidents marked, the verdict, the first action and the causes."""
        found = self.findings
        incidents = [Band(str(each), each.start, each.end) for each in found.incidents]
        causes = [
            (f"{each.cause.replace('-', ' ')} ({each.grade})", "; ".join(each.evidence_for))
            for each in self.hypotheses
            if each.grade != "ruled out"
        ]
        first = [("verdict", f"{found.verdict}: {found.because}"), ("first action", self.first_action)]
        return curves_of(found.run, incidents) + table([*first, *causes])
