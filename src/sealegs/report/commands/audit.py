"""The report of ``sealegs audit``: what a checkpoint holds and what came back of it, as text or JSON."""

import textwrap
from collections.abc import Iterator

import msgspec

WIDTH = 100


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a run needs to go on."""

    name: str
    what: str | None
    """What the checkpoint has of it; null if nothing."""
    problem: str | None
    """What is wrong with it, or what a resume without it does."""


class CameBack(msgspec.Struct, frozen=True, kw_only=True):
    """What the last resume brought back, as the run recorded it at the first step after it."""

    step: int
    checkpoint: int | str | None
    as_saved: list[str]
    """The parts that came back to the last bit."""
    not_as_saved: dict[str, str]
    """The parts that did not, with how they differ."""
    changed: list[str]
    """What the loop put over what came back before its first step, in sentences."""

    @property
    def is_whole(self) -> bool:
        """Whether the run went on with what was saved, and nothing else."""
        return not self.not_as_saved and not self.changed


class Audited(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint: ``sealegs audit --json``."""

    source: str
    kind: str
    holds: list[Held]
    complete: bool
    """Whether a run that resumes from it goes on as if it had never stopped."""
    resume: CameBack | None = None
    """The last resume from it, or of the run where that was named; null where none is recorded."""


def page(audited: Audited) -> str:
    """One line for each thing, and what is wrong with it below; then what came back."""
    lines = [f"{audited.source}: {audited.kind}", ""]
    for held in audited.holds:
        lines += _line(held.name, held.what or "-", is_marked=held.problem is not None)
        lines += textwrap.wrap(held.problem or "", WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
    problems = sum(held.problem is not None for held in audited.holds)
    verdict = (
        "A run goes on from it as if nothing had been." if audited.complete else f"{problems} to mend or to know of."
    )
    return "\n".join([*lines, "", verdict, *_came_back(audited.resume)])


INDENT = " " * 19


def _came_back(found: CameBack | None) -> Iterator[str]:
    if found is None:
        return
    yield ""
    yield f"What came back of checkpoint {found.checkpoint}, at the resume before step {found.step}:"
    yield ""
    if found.as_saved:
        yield from _line("as saved", ", ".join(found.as_saved))
    for name, difference in found.not_as_saved.items():
        yield from _line(name, difference, is_marked=True)
    for sentence in found.changed:
        yield from _line("changed since", sentence, is_marked=True)
    yield ""
    if found.is_whole:
        yield "The run went on with what was saved."
    else:
        yield "The run went on with something else than was saved: with that a curve may leap."


def _line(name: str, text: str, *, is_marked: bool = False) -> list[str]:
    head = f"{'!' if is_marked else ' '} {name:<17}"
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=INDENT)
