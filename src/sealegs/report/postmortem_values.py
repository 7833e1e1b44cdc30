"""What a post-mortem is made of: plain values, standard library only."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

PANELS = {
    1: "loss",
    2: "learning rate",
    3: "gradient norm before clipping",
    4: "activations per layer",
    5: "parameter norm",
    6: "optimizer moments",
    7: "loss of single tokens",
    8: "throughput",
    9: "loss scale",
    10: "batch composition",
}
"""The dashboard's, which hypotheses cite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class After:
    """The loss so many steps after the peak."""

    steps: int
    loss: float | None
    """Mean of up to ten rows; None where the run does not go so far."""
    is_back: bool | None = None
    """False where it did not recover; None where the run does not go so far."""
    ends_at: int | None = None
    """The last step, where the run does not go so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptoms:
    """What was observed: numbers, no theories. None is what was not logged, NaN what was not finite."""

    onset: int
    loss_before: float | None
    """Moving average over 50 steps."""
    peak_loss: float
    peak_step: int
    after: tuple[After, ...]
    grad_norm: float | None
    """The highest of the incident, before clipping."""
    grad_norm_step: int | None
    grad_norm_before: float | None
    """Mean of the 50 steps before."""
    lr: float | None
    dtype: str | None
    batches: tuple[int, int] | None
    """The first and the last with a loss above half of the rise."""
    batch_steps: tuple[int, int] | None
    unusual_tokens: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The activations of a layer."""

    name: str
    before: float | None
    at: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A file beside the document."""

    file: str
    """Relative to the document."""
    caption: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What there is to look at."""

    record: str
    """The run folder or log."""
    tracker: str | None = None
    """Where a tracker has the run too."""
    pictures: tuple[Picture, ...] = ()
    without_pictures: str = ""
    """Why there are none, or not all."""
    layers: tuple[Layer, ...] = ()
    texts: tuple[str, ...] = ()
    """What else was seen, a line each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A cause that comes into question."""

    cause: str
    """The name of its card."""
    title: str
    grade: str
    """``tested``, ``established``, ``supported``, ``hypothesis``, ``not supported`` or ``ruled out``."""
    panels: tuple[int, ...]
    evidence_for: tuple[str, ...] = ()
    evidence_against: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    next_test: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the incident took."""

    lost_steps: int
    counted: str
    """What these steps are."""
    seconds_per_step: float | None
    price_per_hour: float | None
    downtime_s: float = 0.0

    @property
    def seconds(self) -> float | None:
        """In all."""
        if self.seconds_per_step is None:
            return None
        return self.lost_steps * self.seconds_per_step + self.downtime_s

    @property
    def money(self) -> float | None:
        """In the currency of the price."""
        return None if self.seconds is None or not self.price_per_hour else self.seconds * self.price_per_hour / 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """A number that the remedy must bring."""

    signal: str
    first: int
    last: int
    below: float
    was: float | None
    mean_of: int = 1
    """Rows whose mean counts; of one, every row does."""

    def holds(self, values: tuple[float, ...]) -> bool:
        """Whether values of these steps, in order, keep it; NaN does not, and no value keeps nothing.

        >>> Promise(signal="loss", first=3, last=9, below=2.5, was=5.8).holds((2.4, math.nan))
        False
        """
        if self.mean_of > 1:
            values = (math.fsum(values[-self.mean_of :]) / min(self.mean_of, len(values)),) if values else ()
        return bool(values) and all(value < self.below for value in values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Postmortem:
    """The document. A section that has nothing in it is shown as empty, with the reason in ``why_empty``."""

    incident: int
    kind: str
    time: float | None
    """Of the onset: seconds since 1970."""
    run_id: str
    symptoms: Symptoms
    evidence: Evidence
    hypotheses: tuple[Hypothesis, ...] = ()
    """The likeliest first."""
    discriminating: tuple[str, ...] = ()
    root_cause: str = ""
    """One sentence."""
    classification: tuple[str, ...] = ()
    recovery: tuple[str, ...] = ()
    outcome: tuple[str, ...] = ()
    cost: Cost | None = None
    remediation: tuple[str, ...] = ()
    verification: str = ""
    """How to run it again."""
    promises: tuple[Promise, ...] = ()
    lesson: str = ""
    follow_ups: tuple[str, ...] = ()
    why_empty: Mapping[str, str] = field(default_factory=dict)
    """By the title of the section."""
