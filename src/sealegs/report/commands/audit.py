"""What a checkpoint holds in, a page or a JSON object out: ``sealegs audit``."""

import textwrap
from typing import Any

import msgspec

WIDTH = 100


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a run needs to go on."""

    name: str
    what: str | None
    """What there is of it; null: nothing."""
    problem: str | None
    """What is wrong with it, or what a resume without it does."""


class Audited(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint: ``sealegs audit --json``."""

    source: str
    kind: str
    holds: list[Held]
    complete: bool
    """Whether a run goes on from it as if nothing had been."""


def contract(audited: Audited) -> dict[str, Any]:
    """As JSON values."""
    told: dict[str, Any] = msgspec.to_builtins(audited)
    return told


def schema() -> dict[str, Any]:
    """JSON Schema of the object."""
    return msgspec.json.schema(Audited)


def page(audited: Audited) -> str:
    """A line for each thing, and what is wrong with it below."""
    lines = [f"{audited.source}: {audited.kind}", ""]
    for held in audited.holds:
        mark = "!" if held.problem else " "
        head = f"{mark} {held.name:<17}"
        lines += textwrap.wrap(held.what or "-", WIDTH, initial_indent=head, subsequent_indent=" " * 19)
        lines += textwrap.wrap(held.problem or "", WIDTH, initial_indent=" " * 19, subsequent_indent=" " * 19)
    problems = sum(held.problem is not None for held in audited.holds)
    verdict = (
        "A run goes on from it as if nothing had been." if audited.complete else f"{problems} to mend or to know of."
    )
    return "\n".join([*lines, "", verdict])
