"""What a person has tried against trouble, and what came of it: words or TOML in, what it says of causes out.

The table ``attempts.toml`` knows what people try and which causes it would have cured. A remedy that helped speaks for
those, one that did not speaks against them.
"""

import re
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Annotated, Any

import msgspec

from sealegs.diagnosis.contract import Outcome, Tried
from sealegs.errors import ConfigError

OUTCOMES: dict[str, Outcome] = {
    **dict.fromkeys(("helped", "help", "fixed", "fixed it", "cured", "solved", "solved it", "better", "yes"), "helped"),
    **dict.fromkeys(
        ("no help", "did not help", "didn't help", "no effect", "no change", "same", "the same", "nothing", "none",
         "not better", "no", "failed", "came again", "again"),
        "no help",
    ),
    **dict.fromkeys(("worse", "made it worse", "worsened"), "worse"),
    **dict.fromkeys(("unclear", "unknown", "not sure", "maybe", "partly", "a little", "mixed"), "unclear"),
}  # fmt: skip
"""What came of an attempt, in a person's words and in ours."""
LIKE = '--tried "skip batches 400-450: no help"'
LONGEST = 300
_RANGE = re.compile(r"(?<!\d)(\d{1,15})\s*(?:-|to|until|\.\.)\s*(\d{1,15})(?!\d)")
_WORD = re.compile(r"[a-z0-9_.+-]+")


class Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that people try."""

    name: str
    says: tuple[str, ...]
    cures: tuple[str, ...]
    is_specific: bool = False

    def is_in(self, words: Sequence[str]) -> bool:
        """Whether an action, as its words in small letters, is of this kind."""
        return any(all(any(word.startswith(stem) for word in words) for stem in phrase.split()) for phrase in self.says)


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    attempt: tuple[Known, ...]


@cache
def known_attempts() -> tuple[Known, ...]:
    """Everything that people try and that is known."""
    text = (resources.files("sealegs.diagnosis") / "attempts.toml").read_text("utf-8")
    return msgspec.convert(tomllib.loads(text), _Table).attempt


def kinds_of(action: str) -> tuple[Known, ...]:
    """What an action in words does.

    >>> [each.name for each in kinds_of("halved the LR and skipped batches 400-450")]
    ['skip batches', 'lower the LR']
    """
    words = _WORD.findall(action.lower())
    return tuple(each for each in known_attempts() if each.is_in(words))


def tried_in_words(words: str) -> Tried:
    """An attempt from ``ACTION: OUTCOME``, or an error that says what is not understood."""
    action, colon, outcome = words.rpartition(":")
    if not colon or not action.strip():
        raise ConfigError(f"--tried {words[:LONGEST]!r}: an action, a colon and what came of it: {LIKE}")
    return _tried(action, outcome, f"--tried {words[:LONGEST]!r}")


def tried_in_toml(text: str, where: str) -> tuple[Tried, ...]:
    """The attempts of a file: tables ``[[tried]]`` with ``action`` and ``outcome``."""
    example = '[[tried]] with action = "skip batches 400-450" and outcome = "no help"'
    try:
        values: dict[str, Any] = tomllib.loads(text)
        found = msgspec.convert(values, _File, strict=True).tried
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: no TOML ({error!s:.100}); write tables {example}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error!s:.200}; write tables {example}") from error
    return tuple(_tried(each.action, each.outcome, f"{where}: {each.action!r}") for each in found)


class _One(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    action: Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST)]
    outcome: str


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tried: Annotated[tuple[_One, ...], msgspec.Meta(min_length=1, max_length=100)]


def _tried(action: str, outcome: str, where: str) -> Tried:
    said = " ".join(outcome.lower().strip(" .!").split())
    if said not in OUTCOMES:
        raise ConfigError(
            f"{where}: the outcome {outcome.strip()[:60]!r} is not understood; say helped, no help, worse or unclear: "
            f"{LIKE}"
        )
    action = " ".join(action.split())[:LONGEST]
    kinds = kinds_of(action)
    if not kinds:
        names = ", ".join(each.name for each in known_attempts())
        raise ConfigError(f"{where}: what was done is not understood; known are: {names}")
    between = _RANGE.search(action)
    span = (int(between[1]), int(between[2])) if between else None
    return Tried(action=action, outcome=OUTCOMES[said], kinds=tuple(each.name for each in kinds), between=span)
