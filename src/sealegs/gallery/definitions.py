"""The incidents of ``incidents.toml``: what happened elsewhere, what is run again, and what is to come out of it."""

import difflib
import tomllib
from collections import Counter
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Annotated, Literal, TypeAlias

import msgspec

from sealegs.diagnosis.cause_cards import Name, Words, causes
from sealegs.diagnosis.symptoms import symptoms
from sealegs.drills.catalogue import DRILLS, Drill
from sealegs.errors import ConfigError
from sealegs.report.commands.gallery import Found

Some = msgspec.Meta(min_length=1)
Runs: TypeAlias = Literal["the lab", "ranks", "policy gradient", "gan", "program"]


class Incident(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An incident: a page."""

    name: Name
    title: Words
    """As people search for it."""
    kind: Words
    """The kind of run."""
    happened: Words
    """Where it happened to others, and what they saw."""
    sources: Annotated[tuple[Words, ...], Some]
    rebuilt: Words
    """What is done here."""
    differs: Words
    """What is different from what happened to others."""
    symptom: Name | None = None
    """The page of the symptom."""
    drill: str = ""
    """A drill of the catalogue; or the next three, or a program."""
    faults: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    runs: Runs = "the lab"
    program: str = ""
    """A function in a file of ``programs``: ``finetune.py:doubled``."""
    healthy: str = ""
    """The same without the mistake."""
    at: int = 180
    """The step at which the fault strikes."""
    last: int = 300
    """The step at which the runs end."""
    seed: int = 0
    truth: Words
    """What is wrong, in a sentence."""
    cards: tuple[Name, ...] = ()
    """The causes that are right; none where no card is, or nothing is wrong."""
    found: Found
    """What came out last: whether the cause was found."""
    named: str = ""
    """The cause that was named, last; empty where none was."""
    guard: Words
    """What the guard did, last."""
    seconds: int
    """CPU seconds that it took."""

    @property
    def practice(self) -> Drill:
        """What is done to the run, as a drill."""
        if self.drill:
            return DRILLS[self.drill]
        where: Literal["ranks", "policy gradient", "the lab"] = (
            self.runs if self.runs in ("ranks", "policy gradient") else "the lab"
        )
        return Drill(
            name=self.name,
            family="your own",
            what=self.truth,
            faults=self.faults,
            settings=self.settings,
            causes=self.cards,
            where=where,
        )

    @property
    def healthy_twin(self) -> Drill | None:
        """The run without what is wrong: of a fault in a run of other settings, one of the same settings."""
        practice = self.practice
        return replace(practice, faults=()) if practice.settings and practice.faults else None


class Incidents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All incidents of the file."""

    incident: tuple[Incident, ...]


@cache
def incidents() -> dict[str, Incident]:
    """Every incident by its name, in the order of the file."""
    return parsed((resources.files("sealegs.gallery") / "incidents.toml").read_text("utf-8"))


def by_symptom() -> dict[str, list[tuple[str, str]]]:
    """Name and title of the incidents that show a symptom, by that of the symptom."""
    shown: dict[str, list[tuple[str, str]]] = {}
    for each in incidents().values():
        if each.symptom is not None:
            shown.setdefault(each.symptom, []).append((each.name, each.title))
    return shown


def named(name: str) -> Incident:
    """The incident of that name."""
    if name in incidents():
        return incidents()[name]
    near = difflib.get_close_matches(name, incidents(), n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else "see `sealegs gallery list`"
    raise ConfigError(f"NAME={name!r}: no incident is called that; {hint}")


def parsed(text: str) -> dict[str, Incident]:
    """Parse incidents from TOML, or raise an error that says what is wrong with them."""
    try:
        listed = msgspec.convert(tomllib.loads(text), Incidents).incident
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"incidents.toml: {error}") from error
    twice = [name for name, count in Counter(each.name for each in listed).items() if count > 1]
    if twice:
        raise ConfigError(f"incidents.toml: two incidents are called {twice[0]}; give one another name")
    for each in listed:
        _refuse_unsound(each)
    return {each.name: each for each in listed}


def _refuse_unsound(each: Incident) -> None:
    """Refuse names that lead nowhere, and faults that cannot be parsed."""
    strangers = [name for name in (*each.cards, *filter(None, [each.named])) if name not in causes()]
    if strangers:
        raise ConfigError(f"incidents.toml: {each.name} names {', '.join(strangers)}; causes.toml has no such card")
    if each.symptom is not None and each.symptom not in symptoms():
        raise ConfigError(f"incidents.toml: {each.name} has symptom {each.symptom}; symptoms.toml has no such symptom")
    if each.drill and (each.drill not in DRILLS or each.faults or each.settings or each.program):
        raise ConfigError(
            f"incidents.toml: {each.name} has drill {each.drill}; name one of the catalogue, and no fault"
        )
    if (each.runs == "program") != bool(each.program and each.healthy):
        raise ConfigError(f"incidents.toml: {each.name} runs {each.runs}; a program has `program` and `healthy`")
    if not each.at < each.last:
        raise ConfigError(f"incidents.toml: {each.name} has last={each.last}; let it end later than at={each.at}")
    each.practice.struck(each.at)
