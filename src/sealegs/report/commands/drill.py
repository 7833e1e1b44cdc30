"""The score card of ``sealegs drill``, as text or as JSON whose keys are a contract."""

import math
import textwrap
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import Literal, TypeAlias

import msgspec

from sealegs.record.schema import unspell

WIDTH = 110
Verdict: TypeAlias = Literal[
    "survived",
    "observed",
    "no effect",
    "harmless",
    "not struck",
    "left alone",
    "damaged",
    "stopped",
    "lost",
    "disturbed",
]
GOOD: tuple[Verdict, ...] = ("survived", "observed", "no effect", "harmless", "left alone")


class DrillShown(msgspec.Struct, frozen=True, kw_only=True):
    """One drill. Gaps are to the clean twin, in units of the clean spread; ``"NaN"`` where a run was lost."""

    name: str
    family: str
    what: str
    faults: list[str]
    """The faults, in the syntax of ``sealegs train --inject``."""
    settings: list[str]
    """The lab's settings that were changed."""
    verdict: Verdict
    unguarded: float | str
    """The gap of the run without the guard."""
    guarded: float | str
    """The gap of the run with the guard."""
    prevented: float | None
    """The share of the harm that the guard prevented; null if there was none."""
    seen: int | None
    """The step of the first skip or alarm; null if there was none."""
    latency: int | None
    """Steps from the first strike of the fault to that."""
    skipped: int
    done_again: int
    """Steps that were repeated after a rollback; skipped ones among them count here."""
    done: list[str]
    """The interventions."""
    cause: str | None
    """The tested root cause in the post-mortem of the unguarded run; of what no replay can test, that of `check`."""
    is_right: bool | None
    """Whether the cause is right; null where there was no incident, or no cause to find."""
    because: str
    """What the replay says, or why there was none."""
    ranks: int
    """Processes that the drill ran on."""
    rank: int | None
    """The rank that the first skip or alarm names. The verdict is right only if the fault struck that rank."""


class OnRanks(msgspec.Struct, frozen=True, kw_only=True):
    """The twins of drills that need several ranks, which train on the same batches in parts."""

    ranks: int
    clean_loss: float | str
    spread: float | str


class OfPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The twins of the policy-gradient loop. Their loss is the share of held-out answers that is wrong."""

    at: int
    last: int
    clean_loss: float | str
    spread: float | str


class Drilled(msgspec.Struct, frozen=True, kw_only=True):
    """A score card: ``sealegs drill --json``."""

    loop: str
    at: int
    """The step at which faults strike."""
    last: int
    """The step at which runs are compared."""
    clean_loss: float | str
    """Loss of the clean twin in one process, or on several ranks if all drills are."""
    spread: float | str
    """Spread of healthy twins that leave out batches around the clean one: root mean square."""
    placebos: list[int]
    """How many batches each of them leaves out."""
    close: float
    """Largest gap to the clean twin, in spreads, at which a run is as good."""
    drills: list[DrillShown]
    survived: bool
    """Whether nothing was lost, damaged, stopped or disturbed."""
    on_ranks: OnRanks | None
    """The twins of drills on several ranks; null where none was requested."""
    of_policy: OfPolicy | None = None
    """The twins of drills of the policy-gradient loop; null where none was requested."""


def page(drilled: Drilled) -> str:
    """The score card as text."""
    left_out = ", ".join(map(str, drilled.placebos))
    head = (
        f"{drilled.loop}: faults strike at step {drilled.at}, runs are compared at step {drilled.last}. The clean twin "
        f"ends at a loss of {_number(drilled.clean_loss):.4f}; gaps are to that, in units of what healthy twins "
        f"end from it by ({_number(drilled.spread):.2g}; without {left_out} batches). Up to "
        f"{drilled.close:g} is as good as it."
    )
    lines = [
        textwrap.fill(head, WIDTH),
        *_head_of_ranks(drilled),
        *_head_of_policy(drilled),
        "",
        _row("drill", "unguarded", "seen after", "guarded", "steps", "tested cause", ""),
    ]
    for family, drills in groupby(drilled.drills, key=lambda each: each.family):
        lines += [family, *(_line(each) for each in drills)]
    return "\n".join([*lines, "", *_summary(drilled)])


def _head_of_ranks(drilled: Drilled) -> Iterator[str]:
    """A heading for each of the two twins, where some drills run in one process and some on several ranks."""
    apart = drilled.on_ranks
    if apart is None or all(each.ranks > 1 for each in drilled.drills):
        return
    names = ", ".join(each.name for each in drilled.drills if each.ranks > 1)
    yield textwrap.fill(
        f"On {apart.ranks} ranks ({names}) the clean twin ends at {_number(apart.clean_loss):.4f}, healthy ones "
        f"{_number(apart.spread):.2g} from it.",
        WIDTH,
    )


def _head_of_policy(drilled: Drilled) -> Iterator[str]:
    """A heading for the twin of the policy-gradient loop, where there are other drills as well."""
    apart = drilled.of_policy
    if apart is None or all(each.family == "policy" for each in drilled.drills):
        return
    yield textwrap.fill(
        f"The policy-gradient loop is struck at step {apart.at} and compared at step {apart.last}. Its clean twin ends "
        f"with {_number(apart.clean_loss):.4f} of its held-out answers wrong, healthy ones {_number(apart.spread):.2g} "
        "from it.",
        WIDTH,
    )


def listed(drills: list[tuple[str, str, str, str]]) -> str:
    """The catalogue as text: family, name, description, and the fault to inject."""
    lines = []
    for family, each in groupby(drills, key=lambda row: row[0]):
        lines.append(family)
        for _, name, what, how in each:
            lines += [f"  {name:<22} {what}", *([f"{'':<24} {how}"] if how else [])]
    return "\n".join(lines)


def _row(name: str, unguarded: str, seen: str, guarded: str, steps: str, cause: str, verdict: str) -> str:
    return f"{name:<24} {unguarded:>9} {seen:>11} {guarded:>8} {steps:>6}  {cause:<33} {verdict}".rstrip()


def _line(each: DrillShown) -> str:
    seen = "" if each.latency is None else f"{each.latency} step{'' if each.latency == 1 else 's'}"
    asked = "" if each.is_right is None else ", right" if each.is_right else ", wrong" if each.cause else ""
    cause = each.cause.replace("-", " ") if each.cause else "not known" if each.is_right is False else ""
    if cause and each.ranks > 1:
        cause += f", rank {'?' if each.rank is None else each.rank}"
    steps = each.skipped + each.done_again
    return _row(
        f"  {each.name}",
        _gap(each.unguarded),
        seen,
        _gap(each.guarded),
        str(steps) if steps else "",
        f"{cause}{asked}",
        each.verdict,
    )


def _summary(drilled: Drilled) -> Iterator[str]:
    found = Counter(each.verdict for each in drilled.drills)
    yield f"{', '.join(f'{count} {verdict}' for verdict, count in found.most_common())}, of {len(drilled.drills)}."
    if asked := [each for each in drilled.drills if each.is_right is not None]:
        right = sum(bool(each.is_right) for each in asked)
        wrong = sum(each.is_right is False and each.cause is not None for each in asked)
        yield f"Tested causes: {right} of {len(asked)} right, {wrong} wrong, {len(asked) - right - wrong} not known."
    for each in drilled.drills:
        if each.verdict not in GOOD:
            skipped = [f"{each.skipped} step{'s' * (each.skipped != 1)} skipped"] if each.skipped else []
            done = "; ".join([*skipped, *each.done]) or "nothing"
            told = f"{each.name}, {each.verdict}: {each.what}. Done: {done}."
            yield textwrap.fill(told, WIDTH, subsequent_indent="  ")


def _gap(gap: float | str) -> str:
    value = _number(gap)
    if math.isnan(value):
        return "lost"
    return f"{value:+.1f}" if abs(value) < 1000 else f"{value:+.0e}"


def _number(value: float | str) -> float:
    return float(unspell(value))
