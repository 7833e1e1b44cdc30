"""What a rerun with the remedy brought in, a page for a person out; or one JSON object, whose keys are a contract."""

import textwrap
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from sealegs.record.schema import speakable, unspell
from sealegs.report.postmortem.markdown import measured as told
from sealegs.report.postmortem.values import Measured, Promise
from sealegs.report.remediation import Fix, in_words

WIDTH = 100


class FixShown(msgspec.Struct, frozen=True, kw_only=True):
    """One change."""

    name: str
    value: str
    does: str
    """In words."""


class PromiseShown(msgspec.Struct, frozen=True, kw_only=True):
    """A number that was promised, and the one that was measured."""

    signal: Literal["loss", "grad_norm", "clipped_norm"]
    """``grad_norm`` is before clipping, ``clipped_norm`` after it."""
    first: int
    last: int
    below: float | str
    or_equal: bool
    mean_of: int
    """Every mean of so many rows that follow each other; of one, every row."""
    was: float | str | None
    """In the incident, where that is known."""
    measured: float | str | None
    """The highest; null where the rerun does not have these steps."""
    step: int | None
    """The last of those that it is about."""
    kept: bool
    does: str
    """In words."""


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a remedy: ``sealegs verify --json``, and ``verified.json`` beside the incident."""

    source: str
    incident: int
    kind: str
    onset: int
    cause: str | None
    """The tested one, where one was."""
    begun: Literal["snapshot", "seed"]
    first: int
    last: int
    """The steps that were run."""
    folder: str | None
    """Of the run that was begun from the seed."""
    borrowed: int
    """Of the steps, those at the end that had batches from before, since the capsule has no more."""
    fixes: list[FixShown]
    promises: list[PromiseShown]
    kept: bool
    """All of them."""

    @property
    def results(self) -> tuple[Measured, ...]:
        """As values that a post-mortem is made of."""
        return tuple(_result(promise) for promise in self.promises)

    @property
    def how(self) -> str:
        """From where, with what; one sentence."""
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
    """As plain values."""
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


def contract(verified: Verified) -> dict[str, Any]:
    """As JSON values; NaN and the infinities as strings, as in the run folder."""
    plain: dict[str, Any] = speakable(msgspec.to_builtins(verified))
    return plain


def read(content: bytes) -> Verified:
    """The inverse; a file of something else is refused by msgspec."""
    return msgspec.json.decode(content, type=Verified)


def schema() -> dict[str, Any]:
    """JSON Schema of the object."""
    return msgspec.json.schema(Verified)


def page(verified: Verified) -> str:
    """The answer first, then what it rests on."""
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
