"""An Order in, what it changes in the data and the margins out, in words: everything but going back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch.optim import Optimizer

from sealegs.data.position import Batches
from sealegs.recovery.actions import (
    Action,
    Impossible,
    LowerLR,
    Rollback,
    SkipBatches,
    Stratify,
    SwapSource,
    Tighten,
)
from sealegs.recovery.evidence import Trouble
from sealegs.recovery.ledger import Books

A = TypeVar("A")

SHARP = 3
"""Steps by which the end of what lasted may be dated too early, and its beginning too late."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be done, and everything that its record says."""

    actions: tuple[Action, ...]
    trouble: Trouble
    number: int
    """The step that would come next."""
    who: str
    rung: int | None
    reason: str
    request: str | None = None

    def find(self, kind: type[A]) -> A | None:
        """The action of a kind; a rung has one at most."""
        return next((action for action in self.actions if isinstance(action, kind)), None)


def makes_its_rate(optimizer: Optimizer) -> bool:
    """Whether there is no learning rate to lower: Hugging Face's Adafactor makes its own of the weights."""
    return any(group["lr"] is None for group in optimizer.param_groups)


def refuse_idle(order: Order, batches: Batches, optimizers: Sequence[Optimizer]) -> None:
    """What would do nothing here."""
    if order.find(LowerLR) is not None and any(map(makes_its_rate, optimizers)):
        raise Impossible("an optimizer has lr=None: it makes its rate itself")
    if order.find(SkipBatches) is not None and batches.number is None:
        raise Impossible("no batch was handed out yet; use guard.batches(loader)")
    if order.find(Stratify) is not None and (refusal := batches.cannot_stratify()):
        raise Impossible(refusal)
    if (swap := order.find(SwapSource)) is None:
        return
    source = swap.source or order.trouble.source
    if source is None:
        raise Impossible("the evidence names no source")
    if refusal := batches.cannot_swap(source):
        raise Impossible(refusal)


def change_data(order: Order, batches: Batches) -> list[str]:
    """The part that the user's loader does, and may refuse: it comes first, and is not undone."""
    changed = []
    try:
        if (swap := order.find(SwapSource)) is not None:
            source = swap.source or order.trouble.source
            assert source is not None
            batches.swap(source, swap.weight)
            changed.append(f"source {source} has the weight {swap.weight:g}")
        if (stratify := order.find(Stratify)) is not None:
            batches.stratify()
            changed.append(str(stratify))
    except Exception as error:
        raise Impossible(str(error)) from error
    return changed


def change_books(
    order: Order, books: Books, batches: Batches, *, first: int, loop_clips: bool, batches_a_step: int = 1
) -> list[str]:
    """Batches that are left out, and margins, as of the ``first`` step to come: nothing of the training itself.

    ``loop_clips`` says that the user's loop does, so that no clipping of the guard's can be tightened.
    """
    changed = []
    for action in order.actions:
        match action:
            case Rollback(skip=count) if count and order.trouble.batch is not None:
                # the update that did it may have come of the step before; a row names the last batch of its step
                earliest = order.trouble.batch - (2 * batches_a_step - 1)
                lasted = (order.trouble.lasted + SHARP) * batches_a_step if order.trouble.lasted else 0
                changed.append(_leave_out(batches, max(earliest, 0), max(count, lasted)))
            case SkipBatches(count=count):
                assert batches.number is not None
                changed.append(_leave_out(batches, batches.number + 1, count))
            case LowerLR():
                books.margins = books.margins.lowered(action, first)
                changed.append(f"the learning rate is {books.margins.lr:g} of the schedule's")
            case Tighten(clip=clip):
                books.margins = books.margins.tightened(action)
                is_idle = clip is not None and loop_clips
                changed.append(f"{action}{' (but the loop clips by itself: tighten that)' if is_idle else ''}")
    return changed


def _leave_out(batches: Batches, first: int, count: int) -> str:
    batches.skip(first, count)
    return f"batches {first} to {first + count - 1} are left out"
