"""What ``sealegs gallery`` prints: the list of incidents, and what came out of one: as text, or as JSON."""

import math
import textwrap
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from sealegs.printable import counted
from sealegs.record.schema import unspell

WIDTH = 110
Found: TypeAlias = Literal["found", "not found", "wrong", "nothing wrong"]
"""Whether the cause was found; ``nothing wrong`` where there was none to find, and none was named."""
SAYS: dict[Found, str] = {
    "found": "found",
    "not found": "not found: what to log or to test is said instead",
    "wrong": "another cause was named",
    "nothing wrong": "there was none to find",
}


class IncidentShown(msgspec.Struct, frozen=True, kw_only=True):
    """An incident of the gallery."""

    name: str
    title: str
    """As people search for it."""
    kind: str
    """The kind of run."""
    truth: str
    """What is wrong."""
    causes: list[str]
    """Cards of causes that are right; empty where no card is, or nothing is wrong."""
    found: Found
    named: str | None
    """The cause that is named; null where none is."""
    guard: str
    """What the guard does."""
    seconds: int
    """CPU seconds."""
    sources: list[str]


class Gallery(msgspec.Struct, frozen=True, kw_only=True):
    """All incidents: ``sealegs gallery list --json``."""

    incidents: list[IncidentShown]


class Rerun(msgspec.Struct, frozen=True, kw_only=True):
    """One rerun of an incident with one thing changed."""

    name: str
    kind: str
    does: str
    shows: Literal["there", "partly", "gone"]
    left: float | str
    """Share of the incident that is left."""


class Weighed(msgspec.Struct, frozen=True, kw_only=True):
    """A cause that `sealegs check` weighed."""

    cause: str
    grade: str
    evidence: list[str]
    """What speaks for it."""


class RunShown(msgspec.Struct, frozen=True, kw_only=True):
    """One of the runs."""

    loss: float | str
    """How it ended; ``"NaN"`` where it was lost, or halted."""
    steps: list[int]
    curve: list[float | str]
    """The highest loss of each few steps."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came out of an incident: ``sealegs gallery run NAME --json``, and ``outcome.json`` in its folder."""

    name: str
    seed: int
    versions: dict[str, str]
    clean_loss: float | str
    unguarded: RunShown
    guarded: RunShown
    verdict: Literal["healthy", "watch", "act", "unknown"]
    """What `sealegs check` says of the unguarded run."""
    because: str
    weighed: list[Weighed]
    first_action: str
    log_next_time: list[str]
    reruns: list[Rerun]
    replay: str
    """What the reruns say, or why there are none."""
    cause: str | None
    """The cause that a replay established, or the first that `sealegs check` more than guesses at."""
    tested: bool
    """Whether a replay established it."""
    found: Found
    seen: int | None
    """The step of the guarded run's first skip or alarm, from the fault on."""
    guard: str
    done: list[str]
    """What the guard did, a sentence each."""
    postmortem: str
    """Its symptoms and its root cause, as Markdown; empty where there was no incident to write about."""
    files: list[str]
    """What lies in the folder, to look at."""
    seconds: int
    """CPU seconds that it took."""


def listed(gallery: Gallery) -> str:
    """The incidents as a table."""
    lines = [_row("name", "symptom", "kind of run", "cause", "the guard", "s")]
    for each in gallery.incidents:
        lines.append(_row(each.name, each.title, each.kind, cause_of(each), each.guard, str(each.seconds)))
    count = sum(each.found == "found" for each in gallery.incidents)
    return "\n".join(
        [
            *lines,
            "",
            f"{counted(len(gallery.incidents), 'incident')}; the cause is found in {count}. s: CPU seconds.",
            "sealegs gallery run NAME makes one again.",
        ]
    )


def cause_of(each: IncidentShown) -> str:
    """The cause in a cell: the one that is named, else the one that is not found."""
    if each.found == "nothing wrong":
        return "nothing is wrong"
    if each.named is not None:
        return f"{each.named.replace('-', ' ')}{' (wrong)' * (each.found == 'wrong')}"
    return f"not found: {each.causes[0].replace('-', ' ')}" if each.causes else "not found: there is no card"


def page(outcome: Outcome, title: str, folder: str, *, is_as_told: bool) -> str:
    """What came out, where it lies, and what to look at first."""
    cause = outcome.cause.replace("-", " ") if outcome.cause else "none"
    how = "tested by a replay" if outcome.tested else "by the log" if outcome.cause else "nothing more than a guess"
    lines = [
        f"{outcome.name}: {title}",
        "",
        f"  {'ends at':<9} {_loss(outcome.clean_loss)} healthy, {_loss(outcome.unguarded.loss)} without a guard, "
        f"{_loss(outcome.guarded.loss)} with one",
        *_wrapped("verdict", f"{outcome.verdict}: {outcome.because}"),
        *_wrapped("cause", f"{cause}, {how}; {SAYS[outcome.found]}"),
        *_wrapped("replay", outcome.replay),
        *_wrapped("guard", "; ".join([outcome.guard, *outcome.done])),
        "",
        f"In {folder}; look first at",
        *(f"  {file}" for file in outcome.files),
        f"  sealegs check {folder}/unguarded",
        f"  sealegs diff {folder}/clean {folder}/unguarded",
    ]
    if not is_as_told:
        lines += ["", "This is not what its page tells: the machine or a version differs, or something has changed."]
    return "\n".join(lines)


def _row(name: str, title: str, kind: str, cause: str, guard: str, seconds: str) -> str:
    return f"{name:<24} {_cut(title, 46):<46} {_cut(kind, 18):<18} {_cut(cause, 32):<32} {guard:<12} {seconds:>4}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _loss(value: float | str) -> str:
    number = float(unspell(value))
    return f"{number:.4g}" if math.isfinite(number) else "lost"


def _wrapped(name: str, text: str) -> Sequence[str]:
    if not text:
        return []
    return [textwrap.fill(text, WIDTH, initial_indent=f"  {name:<9} ", subsequent_indent=" " * 12)]
