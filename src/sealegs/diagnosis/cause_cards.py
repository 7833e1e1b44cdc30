"""The cause cards of ``causes.toml``: what each cause is, which signs speak for it, and what to do about it."""

import tomllib
from functools import cache
from importlib import resources
from typing import Annotated, Literal, TypeAlias

import msgspec

from sealegs.diagnosis.kind import Kind, KindName, Trait
from sealegs.diagnosis.signs.registry import SIGNS
from sealegs.errors import ConfigError

Situation: TypeAlias = Literal[
    "nonfinite",
    "spike",
    "elevation",
    "drift",
    "overflow",
    "resume",
    "plateau",
    "turns",
    "stuck",
    "memory",
    "metric",
    "ranks",
    "column",
    "schedule",
    "units",
    "policy-gradient",
    "preference",
    "gan",
    "moe",
    "low-precision",
    "stopped",
]
"""What a run can show that needs a cause; of a kind or trait, what stands in its first signals."""
Words: TypeAlias = Annotated[str, msgspec.Meta(min_length=2)]
Name: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[a-z0-9]+(-[a-z0-9]+)*$")]


class Remedy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing to do against a cause, with the setting to change and its value."""

    grade: Literal["safe", "opt-in", "show-only"]
    """``safe`` costs nothing if the cause is another one, ``opt-in`` changes the run, ``show-only`` is for a person."""
    do: Words
    """The remedy as an imperative: ``clip gradients at 0.5``."""
    knob: Words
    value: str
    unless: str = ""
    """A sign that makes the remedy pointless."""
    when: str = ""
    """A sign without which the remedy is pointless."""

    @property
    def clips_at(self) -> float | None:
        """The norm at which it clips all gradients; None if it is something else."""
        return float(self.value) if self.knob == "clip" and self.value.replace(".", "").isdigit() else None

    @property
    def lowers_the_rate(self) -> bool:
        """Whether it makes the learning rate smaller, which cures no rate that is tiny and no loss that never moved."""
        return self.knob == "lr" and self.value in ("x 0.5", "decay to 0")


class Test(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"apart_from": "from"}):
    """A test that tells a cause from one of its neighbours."""

    apart_from: Name
    do: Words
    unless: str = ""
    """A sign that makes the test pointless, or harmful."""
    when: str = ""
    """A sign without which the test is pointless."""


class Cause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cause card."""

    name: Name
    title: Words
    mechanism: Words
    """How the cause acts, in two sentences."""
    explains: tuple[Situation, ...]
    tests: tuple[Test, ...]
    remedies: tuple[Remedy, ...]
    references: tuple[str, ...]
    kinds: Annotated[tuple[KindName | Trait | Literal["any"], ...], msgspec.Meta(min_length=1)]
    """The kinds and traits of run that the card was written for, or ``any``. It is not weighed for others."""
    decides: tuple[str, ...] = ()
    """Signs of which one is enough to establish the cause."""
    strong: tuple[str, ...] = ()
    """Signs that count two points."""
    opens: tuple[str, ...] = ()
    """Settings of many runs, healthy ones too, without which the cause would be another; they count one point."""
    fits: tuple[str, ...] = ()
    """Signs that count one point."""
    against: tuple[str, ...] = ()
    """Signs that count minus two points."""
    rules_out: tuple[str, ...] = ()
    """Signs of which one is enough to drop the cause."""
    rules: tuple[str, ...] = ()
    """Pre-flight rules that speak for the cause, where no sign reads the same setting: an error counts two points, a
    warning one."""
    spares_weights: bool = False
    """Whether the cause leaves the weights sound, so that nothing has to be reloaded."""

    def is_for(self, kind: Kind) -> bool:
        """Whether it is weighed for such a run; of a run whose kind is not known any card comes into question."""
        return kind.name == "unknown" or self.was_written_for(kind)

    def was_written_for(self, kind: Kind) -> bool:
        """Whether it was written for such a run; for others the cause is a hypothesis at the most."""
        return "any" in self.kinds or not {kind.name, *kind.traits}.isdisjoint(self.kinds)

    @property
    def signs(self) -> tuple[str, ...]:
        """The signs that weigh for or against the cause."""
        return self.decides + self.strong + self.opens + self.fits + self.against + self.rules_out

    @property
    def names(self) -> tuple[str, ...]:
        """All signs that the card names, those of its remedies and tests included."""
        conditions: tuple[Remedy | Test, ...] = (*self.remedies, *self.tests)
        asked = (name for one in conditions for name in (one.unless, one.when))
        return (*self.signs, *filter(None, asked))


class Cards(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All cards of the file."""

    cause: tuple[Cause, ...]


@cache
def causes() -> dict[str, Cause]:
    """Every card by its name, in the order of the file: the more common cause first."""
    return parsed((resources.files("sealegs.diagnosis") / "causes.toml").read_text("utf-8"))


def parsed(text: str) -> dict[str, Cause]:
    """Parse cards from TOML, or raise an error that says what is wrong with them."""
    try:
        cards = msgspec.convert(tomllib.loads(text), Cards).cause
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"causes.toml: {error}") from error
    found = {card.name: card for card in cards}
    if len(found) < len(cards):
        twice = next(card.name for card in cards if sum(other.name == card.name for other in cards) > 1)
        raise ConfigError(f"causes.toml: two cards are called {twice}; give one another name")
    for card in cards:
        unknown = [sign for sign in card.names if sign not in SIGNS]
        strangers = [test.apart_from for test in card.tests if test.apart_from not in found]
        if unknown or strangers:
            raise ConfigError(
                f"causes.toml: {card.name} speaks of {', '.join(unknown + strangers)}, which does not exist"
            )
    return found
