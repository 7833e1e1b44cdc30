"""The report of ``sealegs replay``: what the reruns of an incident showed, as text or JSON with fixed keys."""

import textwrap
from typing import Literal

import msgspec

from sealegs.record.schema import unspell
from sealegs.report.commands.contracts import read_back

WIDTH = 100


class ArmShown(msgspec.Struct, frozen=True, kw_only=True):
    """One rerun."""

    name: str
    kind: Literal["placebo", "without", "with"]
    """``placebo`` changes nothing that matters, ``without`` takes a cause away, ``with`` adds one to healthy steps."""
    cause: str
    does: str
    left: float | str
    """Share of the incident that is left."""
    shows: Literal["there", "partly", "gone"]
    height: float | str
    """The highest loss from the onset on, in standard deviations above the usual."""
    damage: float | str
    """The rise of the loss of earlier batches, in the same standard deviations."""


class TokenShown(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of token that is dear at the onset."""

    token: int
    text: str
    times: int
    """Occurrences in the batch."""
    before: int
    """Occurrences in the batches before, or in the corpus where its counts are known."""
    loss: float | str
    share: float | str
    """Share of the batch's excess loss over the usual."""


class RowShown(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the batch of the onset, the dearest first."""

    row: int
    origin: str
    loss: float | str
    grad_norm: float | str
    """Gradient norm of this row alone."""
    share: float | str
    repeated: float | str
    """Share of its 4-grams that occur more than once."""
    rare: float | str
    """Share of its tokens that are rare."""
    text: str


class UsualShown(msgspec.Struct, frozen=True, kw_only=True):
    """What was usual before the onset."""

    loss: float | str
    """Median of the last 16 rows."""
    deviation: float | str
    """Deviation of the loss from one row to the next, in the last 64."""
    grad_norm: float | str
    """Median over the same rows."""


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the reruns of an incident say: ``sealegs replay --json``, and ``replay.json`` beside it."""

    source: str
    incident: int
    kind: str
    onset: int
    steps: int
    """Steps run in all."""
    apart: float | str
    """Difference between two equal reruns."""
    usual: UsualShown | None = None
    """Null in files of older versions."""
    departure: str | None
    """The step at which the record differs from the reruns, if it does."""
    height: float | str
    damage: float | str
    arms: list[ArmShown]
    causes: dict[str, Literal["necessary and sufficient", "necessary", "sufficient", "not needed", "unknown"]]
    unasked: list[str] = []
    """Arms for which there was no time."""
    rows: list[RowShown] = []
    """The highest-loss rows, where batches are text."""
    tokens: list[TokenShown] = []
    histogram: list[int] = []
    """Losses of the tokens of the onset in bins of half a nat."""
    histogram_before: list[int] = []
    """Losses of earlier tokens with the same weights, in the same bins."""
    location: str | None
    """The first operation that gives a number that is not finite, if one does."""
    cause: str | None
    """The tested root cause; null where the reruns establish none."""
    because: str

    @property
    def is_by_exclusion(self) -> bool:
        """Whether the cause is what is left where the record differs from the reruns, and nothing that was tried tells
        why: then a log that shows what it was knows better."""
        return self.departure is not None and self.cause == "corrupt-weight"


def read(content: bytes) -> Replayed:
    """Read the object back; a ``ValueError`` refuses any other file."""
    return read_back(content, Replayed)


def page(replayed: Replayed) -> str:
    """The answer first, then the evidence for it."""
    title = (
        f"{replayed.source}, incident {replayed.incident}: {replayed.kind.replace('_', ' ')} at step {replayed.onset}"
    )
    answer = f"TESTED CAUSE: {replayed.cause.replace('-', ' ')}" if replayed.cause else "NOT KNOWN YET"
    lines = [title, "", *_wrapped(f"{answer}: {replayed.because}", "", "  ")]
    lines += ["", "Run again", *_wrapped(_again(replayed), "  ", "  ")]
    if replayed.location:
        lines += ["", "The first operation that is not finite", *_wrapped(replayed.location, "  ", "  ")]
    if replayed.arms:
        lines += ["", f"{'One thing changed at a time':<56} what is left of the incident"]
        for arm in replayed.arms:
            first, *rest = _wrapped(f"{arm.name}: {arm.does}", "  ", "    ", width=56)
            lines += [f"{first:<56} {_share(arm.left):>6}  {arm.shows}", *rest]
    if replayed.unasked:
        lines += _wrapped(f"no time was left for: {', '.join(replayed.unasked)} (--minutes)", "  ", "    ")
    if replayed.tokens:
        lines += ["", "The dearest tokens of the onset             in the batch  before    loss   of the excess"]
        for each in replayed.tokens:
            costs = f"{float(unspell(each.loss)):>8.2f} {_share(each.share):>15}"
            lines.append(f"  {each.text!r:<42} {each.times:>12} {each.before:>7} {costs}")
        lines += ["", "Its dearest rows"]
        for row in replayed.rows[:3]:
            what = f"loss {float(unspell(row.loss)):.2f}, gradient norm {float(unspell(row.grad_norm)):.3g} alone"
            lines += _wrapped(
                f"row {row.row} ({row.origin or 'origin not recorded'}): {what}: {row.text!r}", "  ", "    "
            )
    if replayed.causes:
        lines += ["", "What the incident takes"]
        lines += [f"  {_changed(cause):<24} {standing}" for cause, standing in replayed.causes.items()]
        if replayed.cause not in (None, *replayed.causes):
            lines += _wrapped(f"{str(replayed.cause).replace('-', ' ')}: what is said at the top of them", "  ", "    ")
    return "\n".join([*lines, "", f"{replayed.steps} steps were run."])


def _changed(cause: str) -> str:
    """What the arms of a cause change: those of bad data show that it is these batches, and not what is wrong in them.

    >>> _changed("bad-data-batch"), _changed("lr-too-high")
    ('these batches', 'lr too high')
    """
    return "these batches" if cause == "bad-data-batch" else cause.replace("-", " ")


def _again(replayed: Replayed) -> str:
    if replayed.departure:
        return f"from the same state and data, {replayed.departure}"
    apart = f"two reruns are {unspell(replayed.apart):.2g} apart" if replayed.apart else "bit for bit"
    return (
        f"from the same state and data it comes out as it was ({apart}): the loss rises "
        f"{_deviations(replayed.height)} above the usual, that of batches from before by {_deviations(replayed.damage)}"
    )


def _deviations(value: float | str) -> str:
    number = float(unspell(value))
    return f"{number:.1f} standard deviations" if abs(number) < 1e6 else "without bound"


def _share(value: float | str) -> str:
    number = float(unspell(value))
    return f"{number:.0%}" if number < 10 else "more"


def _wrapped(text: str, indent: str, then: str, width: int = WIDTH) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=then)
