"""The report of ``sealegs audit A B``: where the tensors of two checkpoints differ, as text or JSON."""

import textwrap
from collections.abc import Iterator

import msgspec

WIDTH = 100
MOST = 10
"""Tensors that the page lists; JSON has all of them."""


class DifferingTensor(msgspec.Struct, frozen=True, kw_only=True):
    """How one tensor differs."""

    name: str
    what: str
    """``values``, ``shape`` or ``dtype``; of the last alone the values are the same."""
    sizes: list[str]
    largest: float | str | None
    """The largest difference of two numbers; null where shapes differ."""
    at: list[int]
    values: list[float | str] | None
    share: float | None
    """The share of the numbers that differ."""
    relative: float | str | None
    """The norm of the difference over the norm of the first."""
    rows: list[int] | None
    """First and last row that differ, where less than half of the rows do."""


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """Two checkpoints: ``sealegs audit A B --json``."""

    a: str
    b: str
    ranks: bool
    """Whether they are two ranks of one, of which only copies must be equal."""
    shared: int
    equal: int
    unjudged: int
    """Tensors of which each rank has its own part."""
    differing: list[DifferingTensor]
    only_in_a: list[str]
    only_in_b: list[str]
    alike: bool
    because: str
    """What follows, in one sentence."""


def page(found: Compared) -> str:
    """What follows, the first tensor that differs and by how much, then the others."""
    lines = textwrap.wrap(found.because, WIDTH, subsequent_indent="  ")
    lines.append(f"A {found.a}")
    lines.append(f"B {found.b}")
    judged = f"{found.shared} tensors in both, {found.equal} equal to the last bit"
    lines.append(judged + (f", {found.unjudged} not judged: each rank has its own part" if found.unjudged else ""))
    if found.differing:
        lines += ["", "Tensors that differ, in the order of A"]
        lines += [line for each in found.differing[:MOST] for line in _told(each)]
        more = len(found.differing) - MOST
        lines += [f"  and {more:,} more: --json has all of them"] if more > 0 else []
    for name, only in (("A", found.only_in_a), ("B", found.only_in_b)):
        if only:
            few = ", ".join(only[:MOST]) + (f", and {len(only) - MOST:,} more" if len(only) > MOST else "")
            lines += ["", *textwrap.wrap(f"Only in {name}: {few}", WIDTH, subsequent_indent="  ")]
    return "\n".join(lines)


def _told(each: DifferingTensor) -> Iterator[str]:
    if each.what == "shape":
        text = f"{each.name}: {each.sizes[0]} in A, {each.sizes[1]} in B"
    elif each.what == "dtype":
        text = f"{each.name}: the same numbers as {each.sizes[0]} in A and {each.sizes[1]} in B"
    else:
        parts = [f"{each.share or 0:.3%} of the numbers"]
        if isinstance(each.relative, float):
            parts.append(f"{each.relative:.3g} of its norm")
        if each.values is not None:
            one, other = (f"{value:.6g}" if isinstance(value, float) else value for value in each.values)
            parts.append(f"most at {each.at}: {one} in A, {other} in B")
        if each.rows is not None:
            parts.append(f"rows {each.rows[0]} to {each.rows[1]} alone")
        text = f"{each.name}: {'; '.join(parts)}"
    yield from textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")
