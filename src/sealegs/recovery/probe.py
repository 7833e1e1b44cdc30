"""Batches and judged rows in, a batch to try again out: is it the data that changed, or the weights?"""

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

from sealegs.vocabulary import Row

PROVEN_AFTER = 16
"""Healthy steps after which a batch is one to compare with."""
SCALES, SMALLEST_RISE = 2.0, math.log(1.03)
"""By how much the loss of a batch must have risen for the weights to be damaged: in scales of noise, and at least."""
GROWN_NORM = 1.5
"""By what factor the norm of its gradients."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A batch that can be handed out once more, and the step that it was trained on in."""

    step: int = -1
    batch: Any = None
    loss: float = math.nan
    """That it had then ..."""
    grad_norm: float = math.nan
    """... and the norm of its gradients."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a batch shows now."""

    loss: float
    loss_then: float
    """When it was trained on."""
    loss_limit: float
    grad_norm: float | None
    grad_norm_limit: float

    @property
    def rise(self) -> float:
        """Of its loss since then, as a logarithm; infinite where that is not finite."""
        return math.log(self.loss / self.loss_then) if 0 < self.loss < math.inf else math.inf

    @property
    def is_condemned(self) -> bool:
        """Whether the weights are not what they were."""
        has_grown = self.grad_norm is not None and not self.grad_norm <= self.grad_norm_limit
        return has_grown or not self.loss <= self.loss_limit

    def __str__(self) -> str:
        text = f"a loss of {self.loss:.4g}, expected below {self.loss_limit:.4g}"
        if self.grad_norm is None:
            return text
        return f"{text}, and a gradient norm of {self.grad_norm:.4g}, expected below {self.grad_norm_limit:.4g}"


class Probe:
    """Keeps a batch that was healthy when it was trained on. It is of use where each step takes one batch."""

    def __init__(self) -> None:
        self.why_none = ""
        """Why there will be none."""
        self._ready = Kept()
        self._next = Kept()
        """The one that takes its place, once it is proven."""
        self._newest = Kept()
        """Of the row that was followed last; without its batch."""
        self._batch: Any = None
        self._ahead = 0
        """Batches that were handed out, less steps that were done."""

    @property
    def batch(self) -> Any:
        """A copy of the one to try again; none yet, or none at all."""
        return None if self.why_none else _copied(self._ready.batch)

    def handed_out(self, batch: Any) -> None:
        """A batch is about to be handed out: the loop may change what it is given, so a copy is kept if one is due."""
        self._ahead += 1
        self._batch = _copied(batch) if self._next.batch is None else None

    def after_step(self, number: int, *, is_healthy: bool) -> None:
        """The step before ``number`` is done."""
        self._ahead -= 1
        if self._ahead and not self.why_none:
            self.why_none = (
                f"by step {number} the loop had taken {number + self._ahead} batches, and which one a step trained on "
                "is known only where it takes one at a time"
            )
        if self._next.batch is None and is_healthy:
            is_known = self._newest.step == number - 1  # on a device the row is still under way
            newest = self._newest if is_known else Kept()
            self._next = replace(newest, step=number - 1, batch=self._batch)

    def follow(self, row: Row, *, is_calm: bool, is_doubtful: bool) -> None:
        """A row has been judged."""
        step = int(row["step"])
        if is_doubtful:
            self._next = Kept()
        elif self._next.batch is not None and step >= self._next.step + PROVEN_AFTER:
            self._ready = self._next if math.isfinite(self._next.loss) else self._ready
            self._next = Kept()
        loss = float(row["loss"]) if is_calm else math.inf
        self._newest = Kept(step, None, loss, float(row.get("grad_norm", math.nan)))
        if step == self._next.step:
            self._next = replace(self._newest, batch=self._next.batch)

    def compared(self, loss: float, grad_norm: float | None, scale: float) -> Found:
        """What the batch shows now, beside what it showed then.

        Between batches losses differ by a ``scale`` or more, but one batch has much the same loss a few steps later: so
        little is needed to tell that the weights are not what they were.
        """
        then = self._ready
        loss_limit = then.loss * math.exp(max(SCALES * scale, SMALLEST_RISE))
        return Found(loss, then.loss, loss_limit, grad_norm, then.grad_norm * GROWN_NORM)


def _copied(batch: Any) -> Any:
    try:
        return copy.deepcopy(batch)
    except Exception:  # whatever it holds; then the batch itself has to do
        return batch
