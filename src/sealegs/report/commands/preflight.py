"""The report of ``sealegs preflight``: findings about a run that has not begun, as text or JSON with fixed keys."""

import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec

WIDTH = 100
Grade: TypeAlias = Literal["error", "warning", "note"]
GRADES: tuple[Grade, ...] = ("error", "warning", "note")


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """What one rule found."""

    code: str
    grade: Grade
    title: str
    """The rule's title: what is wrong, in general."""
    found: str
    """What was found, with its numbers."""
    why: str
    """The mechanism, and the number that matters."""
    knob: str
    """The setting to change, by its name in the source."""
    value: str
    """The value to set it to."""
    sure: str
    """How certain the finding is, and about what."""
    reference: str
    margin: bool
    """Whether the finding is a missing stability margin."""


class MupRow(msgspec.Struct, frozen=True, kw_only=True):
    """What muP makes of one kind of tensor at this width."""

    tensors: str
    init_std: float
    standard_init_std: float
    lr: float | None
    standard_lr: float | None
    multiplier: float
    """Multiplier on the tensor's output."""
    wrong: str
    """What the standard parametrization would do at this width."""


class Mup(msgspec.Struct, frozen=True, kw_only=True):
    """muP at this width."""

    width: int
    base_width: int
    rows: list[MupRow]


class Advised(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is said before a run: ``sealegs preflight --json``."""

    source: str
    findings: list[Advice]
    """The findings, the gravest first."""
    asked: int
    """Rules that knew enough to answer."""
    unknown: list[str]
    """Codes of the rules that did not."""
    left_out: list[str] = msgspec.field(default_factory=list)
    """Codes of the rules about a run from random weights, where this model was trained before."""
    margins_missing: list[str]
    """Codes of the stability margins that this run lacks."""
    margins_there: list[str]
    """Codes of the stability margins that it has."""
    margins_unknown: list[str]
    """Codes of the stability margins about which nothing is known."""
    mup: Mup | None = None
    not_judged: str = ""
    """What was given and could not be judged, and what to pass so that it can."""

    @property
    def has_errors(self) -> bool:
        """Whether something is certain to go wrong."""
        return any(each.grade == "error" for each in self.findings)

    def __str__(self) -> str:
        return page(self)


def page(advised: Advised) -> str:
    """The gravest finding first, the count of missing margins last; one line where there is nothing to say."""
    if not advised.findings:
        line = f"{advised.source}: nothing to say. {_asked(advised)}; of the margins of stability {_tail(advised)}"
        return "\n".join([line, *_not_judged(advised), *_mup(advised.mup)])
    counts = Counter(each.grade for each in advised.findings)
    told = ", ".join(f"{counts[grade]} {grade}{'' if counts[grade] == 1 else 's'}" for grade in GRADES if counts[grade])
    lines = [
        f"{advised.source}: {told}. {_asked(advised)}.",
        *_not_judged(advised),
        *(line for each in advised.findings for line in _finding(each)),
        *_mup(advised.mup),
        "",
        *textwrap.wrap(_margins(advised), WIDTH),
    ]
    return "\n".join(lines)


def _not_judged(advised: Advised) -> Iterator[str]:
    if advised.not_judged:
        yield advised.not_judged


def _finding(each: Advice) -> Iterator[str]:
    yield ""
    yield f"{each.grade.upper():<8} {each.code:<6} {each.title}"
    told = {
        "found": each.found,
        "why": each.why,
        "set": f"{each.knob}: {each.value}",
        "sure": each.sure,
        "see": each.reference,
    }
    for name, text in told.items():
        yield from textwrap.wrap(text, WIDTH, initial_indent=f"  {name:<6} ", subsequent_indent=" " * 9)


def _margins(advised: Advised) -> str:
    missing = advised.margins_missing
    if not missing:
        return f"Margins of stability: none is missing, {_tail(advised)}"
    which = f"{_are(len(missing), 'missing')} ({', '.join(missing)})"
    advice = "One that is missing may be survived." if len(missing) == 1 else "One may be survived, two probably not."
    return f"Margins of stability: {which}, {_tail(advised)} {advice}"


def _tail(advised: Advised) -> str:
    return f"{_are(len(advised.margins_there), 'there')}, {_are(len(advised.margins_unknown), 'not known of')}."


def _asked(advised: Advised) -> str:
    unknown = len(advised.unknown)
    told = f"{advised.asked} rules were asked, {unknown} {'knows' if unknown == 1 else 'know'} too little"
    if not advised.left_out:
        return told
    return f"{told}, {_are(len(advised.left_out), 'about a run from random weights')}"


def _are(count: int, what: str) -> str:
    return f"{count} {'is' if count == 1 else 'are'} {what}"


def _mup(mup: Mup | None) -> Iterator[str]:
    if mup is None:
        return
    yield ""
    yield f"muP at width {mup.width}, {mup.width / mup.base_width:g} times the base of {mup.base_width}:"
    yield f"  {'':<26} {'init std':>10} {'(standard)':>11} {'peak LR':>10} {'(standard)':>11} {'output x':>9}"
    for row in mup.rows:
        rate, standard = ("" if value is None else f"{value:.3g}" for value in (row.lr, row.standard_lr))
        yield (
            f"  {row.tensors:<26} {row.init_std:>10.3g} {f'({row.standard_init_std:.3g})':>11} {rate:>10} "
            f"{f'({standard})' if standard else '':>11} {row.multiplier:>9.3g}"
        )
    for row in mup.rows:
        yield from textwrap.wrap(
            f"{row.tensors}: {row.wrong}", WIDTH, initial_indent="  standard ", subsequent_indent="    "
        )
