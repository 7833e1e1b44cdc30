"""The report of ``sealegs audit``: what a checkpoint holds, as text or JSON."""

import textwrap

import msgspec

WIDTH = 100


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a run needs to go on."""

    name: str
    what: str | None
    """What the checkpoint has of it; null if nothing."""
    problem: str | None
    """What is wrong with it, or what a resume without it does."""


class Audited(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint: ``sealegs audit --json``."""

    source: str
    kind: str
    holds: list[Held]
    complete: bool
    """Whether a run that resumes from it goes on as if it had never stopped."""


def page(audited: Audited) -> str:
    """One line for each thing, and what is wrong with it below."""
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
