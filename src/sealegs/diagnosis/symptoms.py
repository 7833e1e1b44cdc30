"""The symptoms of ``symptoms.toml``: what people see and search for, with the cause cards that bring it.

From the words of a question to the page that answers it: ``found``.
"""

import math
import re
import tomllib
from collections import Counter
from functools import cache
from importlib import resources
from typing import Annotated

import msgspec

from sealegs.diagnosis.cause_cards import Name, Words, causes
from sealegs.errors import ConfigError

Some = msgspec.Meta(min_length=1)
SAME = {
    "gradient": "grad",
    "eval": "val",
    "evaluation": "val",
    "validat": "val",
    "validation": "val",
    "infinity": "inf",
    "infinite": "inf",
    "restart": "resum",
    "restor": "resum",
    "zero": "0",
    "lr": "rate",
    "explosion": "explod",
    "hang": "timeout",
    "stuck": "plateau",
    "iteration": "step",
    "increas": "ris",
}
"""Words that people use for the same thing."""
SAY_NOTHING = frozenset(
    re.findall(
        r"\w+",
        """
        a about after all am an and any are as at be but by can do does for from get getting go have how i if in is it
        its me model my no now of on or our run runs running so that the then there this to train training want was we
        what when where which while why with you your goes going
        """,
    )
)
ENDINGS = ("ing", "ed", "es", "s", "e")


class Reason(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What brings a symptom and is no cause of a broken run, so that no card is about it."""

    title: Words
    mechanism: Words
    test: Words
    """How it is told from the others of the page."""
    do: Words
    """What to do about it, as an imperative."""


class Symptom(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A symptom: one page."""

    name: Name
    title: Words
    searched: Annotated[tuple[Words, ...], Some]
    """Other words that people search for it with."""
    usually: Words
    causes: tuple[Name, ...]
    """The cards that bring it, the most common first."""
    command: Words
    tells: Words
    """What to read in the answer of the command."""
    by_hand: Annotated[tuple[Words, ...], Some]
    first: Words
    """What to do first."""
    reasons: tuple[Reason, ...] = ()
    """What else brings it; it stands before the cards."""
    snippet: str = ""
    """Python that measures it, by hand."""
    known: str = ""
    """How well the rules behind the command are known, where that is little."""
    see: str = ""
    """A page of the docs with more about it, as a link."""
    case: str = ""
    """An incident of ``tests/cases`` that shows it."""


class Symptoms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All symptoms of the file."""

    symptom: tuple[Symptom, ...]


@cache
def symptoms() -> dict[str, Symptom]:
    """Every symptom by its name, in the order of the file."""
    return parsed((resources.files("sealegs.diagnosis") / "symptoms.toml").read_text("utf-8"))


def parsed(text: str) -> dict[str, Symptom]:
    """Parse symptoms from TOML, or raise an error that says what is wrong with them."""
    try:
        listed = msgspec.convert(tomllib.loads(text), Symptoms).symptom
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"symptoms.toml: {error}") from error
    twice = [name for name, count in Counter(each.name for each in listed).items() if count > 1]
    if twice:
        raise ConfigError(f"symptoms.toml: two symptoms are called {twice[0]}; give one another name")
    for each in listed:
        if not each.causes and not each.reasons:
            raise ConfigError(f"symptoms.toml: {each.name} has neither causes nor reasons; name what brings it")
        strangers = [name for name in each.causes if name not in causes()]
        if strangers:
            raise ConfigError(f"symptoms.toml: {each.name} names {', '.join(strangers)}; causes.toml has no such card")
    return {each.name: each for each in listed}


def symptom_of(cause: str) -> Symptom | None:
    """The symptom that a cause most often shows itself as; None of a cause that no page names."""
    naming = [each for each in symptoms().values() if cause in each.causes]
    return min(naming, key=lambda each: each.causes.index(cause), default=None)


def found(question: str, most: int = 5) -> list[Symptom]:
    """The symptoms that share words with a question, the best first: rare words count more, and a title's double.

    A question that says just what a page says that people search for counts threefold there.
    """
    asked = tuple(sorted(set(_words(question))))
    scores = {
        name: sum(worth[word] for word in asked if word in worth) * (3 if asked in phrases()[name] else 1)
        for name, worth in worth_of_words().items()
    }
    ranked = sorted((name for name in scores if scores[name] > 0), key=lambda name: -scores[name])
    return [symptoms()[name] for name in ranked][:most]


@cache
def phrases() -> dict[str, tuple[tuple[str, ...], ...]]:
    """The words of each title and of all that is searched for; ``docs/site/finder.js`` goes by them, too."""
    return {
        each.name: tuple(
            dict.fromkeys(filter(None, (tuple(sorted(set(_words(text)))) for text in (each.title, *each.searched))))
        )
        for each in symptoms().values()
    }


@cache
def worth_of_words() -> dict[str, dict[str, float]]:
    """What each word of a question speaks for a symptom that has it; ``docs/site/finder.js`` goes by it, too."""
    return {
        name: {word: weight * _rarity(word) for word, weight in weights.items()} for name, weights in _weights().items()
    }


@cache
def _weights() -> dict[str, dict[str, float]]:
    """What each word of a symptom counts for: in the title, in what is searched for, or in the text."""
    table = {}
    for each in symptoms().values():
        weights = dict.fromkeys(_words(each.usually), 0.2)
        weights |= dict.fromkeys(_words(" ".join(each.searched)), 1.0)
        table[each.name] = weights | dict.fromkeys(_words(each.title), 2.0)
    return table


@cache
def _rarity(word: str) -> float:
    """How much it says that a page has the word: nothing where all have it."""
    having = sum(weights.get(word, 0) >= 1 for weights in _weights().values())
    return math.log((len(_weights()) + 1) / (having + 1))


def _words(text: str) -> list[str]:
    """The words of a text that say something, in one spelling."""
    spelt = re.findall(r"[a-z]+\d*|\d+(?:\.\d+)?", text.lower().replace("_", " ").replace("learning rate", "lr"))
    stems = (_stem(word) for word in spelt if word not in SAY_NOTHING)
    return [word for stem in stems if (word := SAME.get(stem, stem)) not in SAY_NOTHING]


def _stem(word: str) -> str:
    """A word without its ending: spiking, spiked and spikes are spik, 0.0 is 0."""
    if word[0].isdigit():
        return re.sub(r"\.0+$", "", word)
    for ending in ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 3 and not word.endswith("ss"):
            word = word.removesuffix(ending)
            break
    return re.sub(r"([^aeiouls])\1$", r"\1", word)
