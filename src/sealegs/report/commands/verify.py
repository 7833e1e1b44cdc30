"""The report of ``sealegs verify``: what a rerun with the remedy brought, as text or JSON with fixed keys."""

import textwrap
from collections.abc import Sequence
from typing import Literal

import msgspec

from sealegs.errors import ConfigError
from sealegs.record.schema import unspell
from sealegs.report.commands.contracts import read_back
from sealegs.report.fixes import Fix, in_words
from sealegs.report.fixes import parse as parse_fix
from sealegs.report.postmortem.blocks import measured as told
from sealegs.report.postmortem.values import Measured, Promise

WIDTH = 100


class FixShown(msgspec.Struct, frozen=True, kw_only=True):
    """One change."""

    name: str
    value: str
    does: str
    """The change in words."""


class PromiseShown(msgspec.Struct, frozen=True, kw_only=True):
    """A number that was promised, and the one that was measured."""

    signal: Literal["loss", "grad_norm", "clipped_norm"]
    """``grad_norm`` is before clipping, ``clipped_norm`` after it."""
    first: int
    last: int
    below: float | str
    or_equal: bool
    mean_of: int
    """Rows per mean: every mean of this many consecutive rows counts; with one, every row."""
    was: float | str | None
    """The value in the incident, where it is known."""
    measured: float | str | None
    """The highest value; null where the rerun does not have these steps."""
    step: int | None
    """The last step of that value."""
    kept: bool
    does: str
    """The promise in words."""


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a remedy: ``sealegs verify --json``, and ``verified.json`` beside the incident."""

    source: str
    incident: int
    kind: str
    onset: int
    cause: str | None
    """The tested cause, if there is one."""
    begun: Literal["snapshot", "seed"]
    first: int
    last: int
    """The last step that was run."""
    folder: str | None
    """The run folder, where a run was started from the seed."""
    borrowed: int
    """Steps at the end that ran on earlier batches, since the capsule has no more."""
    fixes: list[FixShown]
    promises: list[PromiseShown]
    kept: bool
    """Whether every promise was kept."""

    @property
    def results(self) -> tuple[Measured, ...]:
        """The results as the values of a post-mortem."""
        return tuple(_result(promise) for promise in self.promises)

    @property
    def how(self) -> str:
        """One sentence: where the rerun started, and with which change."""
        start = f"from step {self.first}, a state in the capsule," if self.begun == "snapshot" else "from the seed"
        fixes = [Fix(fix.name, fix.value) for fix in self.fixes]
        kept = sum(promise.kept for promise in self.promises)
        text = f"Run again {start} to step {self.last} with the change ({in_words(fixes)}): "
        text += f"{kept} of {len(self.promises)} promises are kept."
        if fixes and all(fix.is_as_recorded for fix in fixes):
            text += " What went wrong is no part of a rerun: it says that state and data are sound, if they are."
        if self.borrowed:
            text += f" The last {self.borrowed} steps had batches from before: the capsule has no more."
        return text


def promises_shown(results: Sequence[Measured]) -> list[PromiseShown]:
    """The results as plain values."""
    return [
        PromiseShown(
            signal=each.promise.signal,  # type: ignore[arg-type]
            first=each.promise.first,
            last=each.promise.last,
            below=each.promise.below,
            or_equal=each.promise.or_equal,
            mean_of=each.promise.mean_of,
            was=each.promise.was,
            measured=each.value,
            step=each.step,
            kept=each.is_kept,
            does=told(each),
        )
        for each in results
    ]


def _result(shown: PromiseShown) -> Measured:
    promise = Promise(
        signal=shown.signal,
        first=shown.first,
        last=shown.last,
        below=float(unspell(shown.below)),
        was=None if shown.was is None else float(unspell(shown.was)),
        mean_of=shown.mean_of,
        or_equal=shown.or_equal,
    )
    return Measured(
        promise=promise, value=None if shown.measured is None else float(unspell(shown.measured)), step=shown.step
    )


def read(content: bytes) -> Verified:
    """Read the object back; a ``ValueError`` refuses any other file."""
    found = read_back(content, Verified)
    for fix in found.fixes:
        try:
            parse_fix(f"{fix.name}={fix.value}")
        except ConfigError as error:
            raise ValueError(str(error)) from None
    return found


def page(verified: Verified) -> str:
    """The answer first, then the evidence for it."""
    title = (
        f"{verified.source}, incident {verified.incident}: {verified.kind.replace('_', ' ')} at step {verified.onset}"
    )
    answer = "KEPT" if verified.kept else "BROKEN"
    lines = [title, "", *_wrapped(f"{answer}: {verified.how}", "", "  "), ""]
    for each in verified.results:
        lines += _wrapped(told(each), "  ", "    ")
    if verified.folder:
        lines += ["", f"The run: {verified.folder}"]
    return "\n".join(lines)


def _wrapped(text: str, indent: str, then: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=then)
