"""Fixes: the smallest change against a tested cause, in a form that a rerun can carry out, such as ``clip=0.5``.

A fix is the one thing that a rerun changes. Standard library only.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sealegs.errors import ConfigError
from sealegs.record.reading import is_number

HALF = 0.5
SHORT_BETA2 = 0.95
"""Averages over 20 steps, so that the second moment soon forgets."""


@dataclass(frozen=True, slots=True)
class Fix:
    """One change. Prints as the text that ``parse`` reads."""

    name: str
    value: str

    def __str__(self) -> str:
        """``clip=0.5``"""
        return f"{self.name}={self.value}"

    @property
    def number(self) -> float:
        """The value as a number."""
        return float(self.value)

    @property
    def steps(self) -> range:
        """The value as a range of steps."""
        first, _, end = self.value.partition(":")
        return range(int(first), int(end))

    @property
    def is_setting(self) -> bool:
        """Whether it is a setting of `sealegs train`, by its dotted name."""
        return self.name not in KINDS

    @property
    def is_as_recorded(self) -> bool:
        """Whether the rerun stays as recorded: the cause is not in the record that the rerun starts from."""
        return (self.name, self.value) in AS_RECORDED

    @property
    def knob(self) -> str:
        """The name of the setting on cause cards."""
        return KNOBS.get(self.name, self.name.rpartition(".")[2])

    @property
    def words(self) -> str:
        """The change in words, for a person."""
        if self.is_setting:
            return f"set {self.name} to {self.value}"
        kind = KINDS[self.name]
        if self.value in kind.words:
            return kind.words[self.value]
        shown = self.value
        if kind.values == STEPS:
            first, last = self.steps.start, self.steps.stop - 1
            shown = f"step {first}" if first == last else f"steps {first} to {last}"
        return kind.does.format(shown)


@dataclass(frozen=True, slots=True)
class FixKind:
    """What can be changed under one name."""

    does: str
    """The change in words, with a place for the number or the steps."""
    values: str
    """The values that may be given, in words, besides ``words``."""
    fits: Callable[[str], bool] = lambda value: False
    words: Mapping[str, str] = field(default_factory=dict)
    """Words that may be given, and their meaning."""


def _is_number(low: float, high: float) -> Callable[[str], bool]:
    def fits(value: str) -> bool:
        try:
            return low < float(value) < high
        except ValueError:
            return False

    return fits


def _are_steps(value: str) -> bool:
    first, colon, end = value.partition(":")
    return bool(colon) and is_number(first) and is_number(end) and int(first) < int(end)


STEPS = "the first step and the one after the last, such as 312:313"
KINDS = {
    "skip": FixKind("leave out the batches of {}", STEPS, _are_steps),
    "gate": FixKind("skip the update of {}, exactly", STEPS, _are_steps),
    "clip": FixKind("clip gradients at {}", "a norm above 0, such as 0.5", _is_number(0, math.inf)),
    "lr": FixKind(
        "the learning rate times {}",
        "a factor above 0, such as 0.5",
        _is_number(0, math.inf),
        {
            "before": "the learning rate from before its jump",
            "logged": "the learning rate as it was logged, at the update itself",
        },
    ),
    "beta2": FixKind("a beta2 of {}", "a number between 0 and 1, such as 0.95", _is_number(0, 1)),
    "rare": FixKind(
        "",
        "",
        words={
            "spread": "spread rows with the same rare token over batches",
            "masked": "leave out targets that are rare",
        },
    ),
    "repeated": FixKind("", "", words={"out": "leave out batches that came before"}),
    "moments": FixKind("", "", words={"restored": "the optimizer's moments as they were"}),
    "weights": FixKind("", "", words={"restored": "the weights as they were before they changed"}),
    "dtype": FixKind("", "", words={"fp32": "compute everything in fp32"}),
}
"""The kinds by name. Any other name has a dot in it and is a setting of `sealegs train`."""
AS_RECORDED = {("lr", "logged"), ("moments", "restored"), ("weights", "restored")}
KNOBS = {"rare": "batches", "repeated": "loader", "moments": "optimizer", "weights": "rollback"}
"""Names on cause cards that differ from ours."""

SETTINGS = {
    "softmax-overflow": ("model.naive_softmax", True, "false"),
    "log-of-zero": ("model.naive_log_loss", True, "false"),
    "zero-variance-norm": ("model.norm_eps", 0.0, "1e-6"),
}
"""Settings of `sealegs train` that give up a stability margin: the change is to restore it."""
OF_THE_BATCHES = ("bad-data-batch", "batch-and-state")
ALWAYS: Mapping[str, Fix | None] = {
    "hard-batch": None,
    "duplicate-batch": Fix("repeated", "out"),
    "lr-discontinuity": Fix("lr", "before"),
    "unlogged-step-size": Fix("lr", "logged"),
    "lr-too-high": Fix("lr", str(HALF)),
    "stale-beta2": Fix("beta2", str(SHORT_BETA2)),
    "optimizer-reset": Fix("moments", "restored"),
    "corrupt-weight": Fix("weights", "restored"),
    "fp16-overflow": Fix("dtype", "fp32"),
}
"""Causes whose change is the same in every run; None if the run is best left alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What the choice of a change depends on."""

    onset: int
    last_bad: int
    """The last step whose loss is above half of the rise, or that of batches that the model has begun to learn."""
    clip: float | None = None
    """The clipping norm of the run."""
    usual_norm: float | None = None
    """The usual gradient norm before the onset."""
    masking_helps: bool = False
    """Whether the incident was gone when rare targets did not count."""
    settings: Mapping[str, Any] | None = None
    """The settings of the run by their dotted names."""


def remediation(cause: str, facts: Circumstances) -> tuple[Fix, ...]:
    """The smallest change against a tested cause, in a rerun.

    Where the cause is not in the record and nothing can be changed (hardware spoilt a gradient), the bad update is
    skipped.
    """
    bad = f"{facts.onset}:{max(facts.last_bad, facts.onset) + 1}"
    if cause == "long-tail-token" and facts.masking_helps:
        # a text batch with rare words: the words are wanted, but not together
        return Fix("rare", "spread"), *_tighter(facts)
    if cause in OF_THE_BATCHES or cause == "long-tail-token":
        return (Fix("skip", bad),)
    if cause in ALWAYS:
        fix = ALWAYS[cause]
        return () if fix is None else (fix,)
    if cause in SETTINGS:
        name, without, value = SETTINGS[cause]
        if (facts.settings or {}).get(name) == without:
            return (Fix(name, value),)
    return (Fix("gate", f"{facts.onset}:{facts.onset + 1}"),)


def _tighter(facts: Circumstances) -> Iterable[Fix]:
    """Half of the clipping norm, or the usual gradient norm if there was no clipping."""
    clip = HALF * facts.clip if facts.clip else facts.usual_norm
    return () if clip is None else (Fix("clip", f"{clip:.3g}"),)


def parse(text: str) -> Fix:
    """A change from the text that a person writes.

    >>> parse("clip=0.5"), parse("skip=312:313").words
    (Fix(name='clip', value='0.5'), 'leave out the batches of step 312')
    """
    name, mark, value = text.partition("=")
    if not mark or not value or (name not in KINDS and "." not in name):
        known = ", ".join(KINDS)
        raise ConfigError(f"--fix {text}: a name, = and a value; names are {known}, or a setting with a dot in it")
    fix = Fix(name, value)
    if not fix.is_setting:
        kind = KINDS[name]
        if value not in kind.words and not kind.fits(value):
            choices = " or ".join(filter(None, (*kind.words, kind.values)))
            raise ConfigError(f"--fix {text}: {value} is not what {name} can be: {choices}")
    return fix


def in_words(fixes: Iterable[Fix]) -> str:
    """All fixes in words."""
    return "; ".join(fix.words for fix in fixes) or "change nothing: go on"
