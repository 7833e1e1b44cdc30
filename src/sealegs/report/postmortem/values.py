"""The values of a post-mortem: plain, standard library only."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from sealegs.report.fixes import Fix


@dataclass(frozen=True, slots=True, kw_only=True)
class After:
    """The loss a number of steps after the peak."""

    steps: int
    loss: float | None
    """Mean of up to ten rows; None where the run does not go that far."""
    is_back: bool | None = None
    """Whether the loss recovered; None where the run does not go that far."""
    ends_at: int | None = None
    """The last step, where the run does not go that far."""
    has_gone_back: bool = False
    """Whether these are steps that were done again, after the run had gone back to before the incident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptoms:
    """What was observed: numbers, no theories. None means not logged, NaN not finite."""

    onset: int
    loss_before: float | None
    """Moving average over 50 steps."""
    peak_loss: float
    peak_step: int
    after: tuple[After, ...]
    grad_norm: float | None
    """The highest norm of the incident, before clipping."""
    grad_norm_step: int | None
    grad_norm_before: float | None
    """Mean of the 50 steps before."""
    lr: float | None
    dtype: str | None
    batches: tuple[int, int] | None
    """The first and the last batch with a loss above half of the rise."""
    batch_steps: tuple[int, int] | None
    unusual_tokens: tuple[str, ...] | None = None
    """Tokens that were hardly seen before; None where nobody has looked at any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerActivations:
    """The activations of a layer."""

    name: str
    before: float | None
    at: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture that was drawn for the document, and the file beside it that holds it, too."""

    file: str
    """Path relative to the document."""
    caption: str
    content: bytes = field(default=b"", repr=False)
    """The picture itself, as PNG. A page is made from it and not from the file, which may no longer be ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceFiles:
    """The files and places with evidence."""

    record: str
    """The run folder or log."""
    tracker: str | None = None
    """The place of the run in a tracker, if there is one."""
    pictures: tuple[Picture, ...] = ()
    without_pictures: str = ""
    """Why pictures are missing, all or some."""
    layers: tuple[LayerActivations, ...] = ()
    texts: tuple[str, ...] = ()
    """Further observations, a line each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateCause:
    """A cause that comes into question."""

    cause: str
    """The name of the cause's card."""
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
    """What the incident cost."""

    lost_steps: int
    counted: str
    """What the steps are: skipped, repeated, ..."""
    seconds_per_step: float | None
    price_per_hour: float | None
    downtime_s: float = 0.0

    @property
    def seconds(self) -> float | None:
        """Seconds in all."""
        if self.seconds_per_step is None:
            return None
        return self.lost_steps * self.seconds_per_step + self.downtime_s

    @property
    def money(self) -> float | None:
        """The cost in the currency of the price."""
        return None if self.seconds is None or not self.price_per_hour else self.seconds * self.price_per_hour / 3600


ROUNDING = 1e-6
"""Relative excess over the limit that a clipped norm may have: single precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """A number that the remedy must achieve."""

    signal: str
    """``loss``, ``grad_norm`` (before clipping) or ``clipped_norm`` (after it)."""
    first: int
    last: int
    below: float
    was: float | None
    mean_of: int = 1
    """Rows per mean: every mean of this many consecutive rows counts; with one, every row does."""
    or_equal: bool = False

    def highest(self, values: Mapping[int, float]) -> tuple[float, int] | None:
        """The highest value that counts, and the last step in it; NaN is above everything.

        >>> promise = Promise(signal="loss", first=3, last=5, below=2.5, was=5.8)
        >>> promise.highest({2: 9.0, 3: 2.0, 4: math.nan, 5: 2.1}), promise.highest({2: 9.0})
        ((nan, 4), None)
        """
        steps = [step for step in sorted(values) if self.first <= step <= self.last]
        of = min(self.mean_of, len(steps))
        ends = range(of, len(steps) + 1) if of else range(0)
        means = [(math.fsum(values[step] for step in steps[end - of : end]) / of, steps[end - 1]) for end in ends]
        return max(means, key=lambda mean: math.inf if math.isnan(mean[0]) else mean[0], default=None)

    def holds(self, value: float) -> bool:
        """Whether the highest value keeps the promise; NaN does not."""
        return value <= self.below * (1 + ROUNDING) if self.or_equal else value < self.below


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The result of a promise in a rerun with the remedy."""

    promise: Promise
    value: float | None
    """None where the rerun does not have these steps."""
    step: int | None = None
    """The last step of the value."""

    @property
    def is_kept(self) -> bool:
        """Whether the promise was kept. A promise that was not measured was not kept."""
        return self.value is not None and self.promise.holds(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Postmortem:
    """The document. An empty section is shown as empty, with the reason in ``why_empty``."""

    incident: int
    kind: str
    time: float | None
    """Time of the onset, in seconds since 1970."""
    run_id: str
    symptoms: Symptoms
    evidence: EvidenceFiles
    hypotheses: tuple[CandidateCause, ...] = ()
    """The hypotheses, the likeliest first."""
    discriminating: tuple[str, ...] = ()
    root_cause: str = ""
    """The root cause in one sentence."""
    classification: tuple[str, ...] = ()
    recovery: tuple[str, ...] = ()
    outcome: tuple[str, ...] = ()
    cost: Cost | None = None
    tax: tuple[str, ...] = ()
    """What it cost to keep the whole run standing, in sentences."""
    remediation: tuple[str, ...] = ()
    fixes: tuple[Fix, ...] = ()
    """The remediation as fixes for a rerun; empty where no cause was tested."""
    verification: str = ""
    """How to run it again, or how it was run."""
    promises: tuple[Promise, ...] = ()
    measured: tuple[Measured, ...] = ()
    """Measurements of `sealegs verify`. They replace the promises, which may have been others."""
    lesson: str = ""
    follow_ups: tuple[str, ...] = ()
    why_empty: Mapping[str, str] = field(default_factory=dict)
    """The reasons, by title of the section."""
