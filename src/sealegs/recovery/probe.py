"""Batches and judged rows in, batches to try again out: is it the data that changed, or the weights?"""

import copy
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, NamedTuple

from torch import Tensor

from sealegs.signals.collect import waited_for
from sealegs.vocabulary import Row

PROVEN_AFTER = 16
"""Healthy steps after which a batch is one to compare with."""
MOST_TRIED = 3
"""Batches that are tried again, and together tell more than one: by how much each has become dearer differs by 7 to
16 % of it (49M parameters, queries and keys x16)."""
APART = 6
"""Steps between the first of them; later ones replace the oldest, and are as far apart as it takes to prove one."""
SCALES, SMALLEST_RISE = 2.0, math.log(1.03)
"""By how much the loss of a batch must have risen for the weights to be damaged: in scales of noise, and at least."""
NORM_SCALES, GROWN_NORM = 3.0, math.log(1.5)
"""And the norm of its gradients: in scales of its own noise, and at least. At 49M parameters, 300 steps
old, a scale is 0.22 to 0.27; a healthy batch has up to 5 times the norm it had 12 to 30 steps before, three of them
together up to 1.55 (bf16, 180 trials of six seeds)."""
SAME_LOSS = 1.01
"""Up to so many times what it was the loss is as it was, and grown gradients may be gradients computed otherwise."""
FEWEST_TENSORS = 8
"""Of which it can be said that the gradients of all have grown alike ..."""
ALIKE = math.log(2.0)
"""... by how much, as a logarithm, the norm of one may have grown otherwise. Healthy weights of the lab's nano move by
0.49 at most while a batch waits to be tried again; where queries and keys are damaged, and the loss is as it was, one
is 0.95 off or more (``bench/probes.py``). And none may be nearer to what it was than to that factor: what comes after
the damage in the model keeps the gradients it had."""


class Noise(NamedTuple):
    """By how much signals differ in health, as logarithms: from step to step (their scales), and in the long run."""

    loss: float = 0.0
    grad_norm: float = 0.0
    wander_of_loss: float = 0.0
    wander_of_norm: float = 0.0

    @property
    def least_rise(self) -> float:
        """Of the loss of a batch that tells, as a logarithm."""
        return max(SCALES * self.loss, SMALLEST_RISE, self.wander_of_loss)

    @property
    def least_growth(self) -> float:
        """Of the norm of its gradients, likewise."""
        return max(NORM_SCALES * self.grad_norm, GROWN_NORM, self.wander_of_norm)


@dataclass(frozen=True, slots=True)
class Kept:
    """The batches of one step, most often one, which can be handed out once more, and that step."""

    step: int = -1
    batches: tuple[Any, ...] = ()
    loss: float = math.nan
    """That it had then ..."""
    grad_norm: float = math.nan
    """... and the norm of its gradients."""
    norms: Tensor | None = None
    """That of each of them, on the device: nobody waits for it before it is compared."""

    def compared(self, loss: float, grad_norm: float | None, norms: Sequence[float], noise: Noise) -> "ProbeResult":
        """What the batch shows now, beside what it showed then; ``norms`` are those of each gradient.

        Between batches losses differ by a scale or more, but one batch has much the same loss a few steps later: so
        little is needed to tell that the weights are not what they were.
        """
        loss_limit = self.loss * math.exp(noise.least_rise)
        grad_norm_limit = self.grad_norm * math.exp(noise.least_growth)
        has_grown = grad_norm is not None and grad_norm > grad_norm_limit
        factor = None
        if self.norms is not None and has_grown and loss <= self.loss * SAME_LOSS:
            factor = factor_of(waited_for(self.norms), norms)
        return ProbeResult(loss, self.loss, loss_limit, grad_norm, self.grad_norm, grad_norm_limit, factor)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a batch shows now, or several of them."""

    loss: float
    loss_then: float
    """When they were trained on."""
    loss_limit: float
    grad_norm: float | None
    grad_norm_then: float
    grad_norm_limit: float
    factor: float | None
    """By which the gradients of every tensor have grown alike, while the loss is what it was; None where not all have.
    Damaged weights do not do that, a sum instead of a mean does."""
    tried: int = 1
    """How many batches it is of."""

    @property
    def rise(self) -> float:
        """Of its loss since then, as a logarithm; infinite where that is not finite."""
        return math.log(self.loss / self.loss_then) if 0 < self.loss < math.inf else math.inf

    @property
    def shows_something(self) -> bool:
        """Not a loss or a gradient that is gone: of such a batch nobody can say by what factor it has changed."""
        return not self.loss <= 0 and self.grad_norm != 0

    @property
    def norm_has_grown(self) -> bool:
        """Whether the gradients are larger than they were, not just computed otherwise."""
        is_larger = self.grad_norm is not None and not self.grad_norm <= self.grad_norm_limit
        return is_larger and self.factor is None

    @property
    def norm_is_gross(self) -> bool:
        """Whether they have grown twice as far as they may, as a logarithm, and further than the loss: then it is
        damage, whatever the loss is. Of a loss that was next to nothing both grow by orders of magnitude."""
        grown = (self.grad_norm or 0.0) / max(self.grad_norm_then, 1e-300)
        is_far = not grown * self.grad_norm_then**2 <= self.grad_norm_limit**2
        return self.norm_has_grown and is_far and not math.log(max(grown, 1.0)) <= self.rise

    @property
    def is_condemned(self) -> bool:
        """Whether the weights are not what they were."""
        return self.norm_has_grown or not self.loss <= self.loss_limit

    @property
    def change(self) -> str:
        """Of how gradients are computed, in words; empty where that is not what is found."""
        if self.factor is None:
            return ""
        return (
            f"the gradients of a batch are {self.factor:.1f} times what they were, in every tensor alike, and its loss "
            "is what it was: how gradients are computed has changed (accumulation, loss scale, world size), not the "
            "weights"
        )

    def __str__(self) -> str:
        subject = "a batch from before has a" if self.tried == 1 else f"{self.tried} batches from before have a mean"
        text = f"{subject} loss of {self.loss:.4g}, expected below {self.loss_limit:.4g}"
        if self.grad_norm is None:
            return text
        return f"{text}, and a gradient norm of {self.grad_norm:.4g}, expected below {self.grad_norm_limit:.4g}"


class Probe:
    """Keeps batches that were healthy when they were trained on. It is of use where all steps take as many batches."""

    def __init__(self) -> None:
        self.unavailable_because = ""
        """Why there will be none."""
        self.norms: Tensor | None = None
        """Of each gradient of the step that is being done; one number where nobody has them all."""
        self._proven: deque[Kept] = deque(maxlen=MOST_TRIED)
        self._waiting: deque[Kept] = deque()
        """Those that are not proven yet."""
        self._since_kept = APART
        """Steps."""
        self._newest = Kept()
        """Of the row that was followed last; without its batch."""
        self._batches: list[Any] = []
        """Of the step that is being done, if it is to be kept."""
        self._is_due = False
        self._handed_out = 0
        """Batches since the last step."""
        self._a_step = 0
        """Batches that a step takes, once it is known."""
        self._trial: list[Kept] = []
        """Those that are being tried, and ..."""
        self._found: list[ProbeResult] = []
        """... what the first of them have shown."""

    def begin(self) -> list[Any]:
        """Copies of the batches to try again, whose losses are to be told to ``compared`` in this order; none yet, or
        none at all."""
        self._trial, self._found = [] if self.unavailable_because else list(self._proven), []
        return [_copied(batch) for kept in self._trial for batch in kept.batches]

    def handed_out(self, batch: Any) -> None:
        """A batch is about to be handed out: the loop may change what it is given, so a copy is kept if one is due."""
        if not self._handed_out:
            are_enough = len(self._proven) + len(self._waiting) >= MOST_TRIED
            self._is_due = self._since_kept >= (PROVEN_AFTER if are_enough else APART)
            self._batches = []
        self._handed_out += 1
        if self._is_due:
            self._batches.append(_copied(batch))

    def after_step(self, number: int, *, is_healthy: bool, batches: int = 1) -> None:
        """The step before ``number`` is done, of which the loop has said that it took so many batches."""
        handed_out, self._handed_out = self._handed_out, 0
        self._a_step = self._a_step or batches
        if not self.unavailable_because and (handed_out, batches) != (self._a_step, self._a_step):
            self.unavailable_because = self._why_unknown(number - 1, handed_out, batches)
            self._proven.clear()
            self._waiting.clear()
        self._since_kept += 1
        if self._batches and not self.unavailable_because and is_healthy:
            is_known = self._newest.step == number - 1  # on a device the row is still under way
            newest = self._newest if is_known else Kept()
            norms = None if self.norms is None else self.norms.clone()  # the next step may write over it
            self._waiting.append(replace(newest, step=number - 1, batches=tuple(self._batches), norms=norms))
            self._since_kept = 1
        self._batches = []

    def _why_unknown(self, step: int, handed_out: int, batches: int) -> str:
        if handed_out == batches:
            return (
                f"step {step} took {batches} batches and those before it {self._a_step}: what was handed out once more "
                "would be too much for a step, or too little"
            )
        return (
            f"at step {step} the loop had taken {handed_out} batches and told of {batches}: which of them a step "
            "trained on is known where it takes one at a time, or all but the last in `with guard.accumulate():`"
        )

    def follow(self, row: Row, *, is_calm: bool, is_doubtful: bool) -> None:
        """A row has been judged."""
        step = int(row["step"])
        if is_doubtful:
            self._waiting.clear()
        while self._waiting and step >= self._waiting[0].step + PROVEN_AFTER:
            kept = self._waiting.popleft()
            if 0 < kept.loss < math.inf and kept.grad_norm != 0:
                self._proven.append(kept)
        loss = float(row["loss"]) if is_calm else math.inf
        self._newest = Kept(step, (), loss, float(row.get("grad_norm", math.nan)))
        for place, kept in enumerate(self._waiting):
            if kept.step == step:
                self._waiting[place] = replace(self._newest, batches=kept.batches, norms=kept.norms)

    def forget_from(self, step: int) -> None:
        """The run goes on at a step: what later ones were trained on, or showed, belongs to another line."""
        self._proven = deque((kept for kept in self._proven if kept.step < step), MOST_TRIED)
        self._waiting = deque(kept for kept in self._waiting if kept.step < step)
        self._newest = Kept()
        self._since_kept = APART  # the first of the new line is kept, so that one is proven when trouble comes again

    def forget_all(self) -> None:
        """No batch from before can be tried again."""
        self.forget_from(-1)

    def compared(
        self, loss: float, grad_norm: float | None, norms: Sequence[float], noise: Noise
    ) -> ProbeResult | None:
        """What all batches of a trial show now, beside what they showed then; None where some are still to be tried."""
        self._found.append(self._trial[len(self._found)].compared(loss, grad_norm, norms, noise))
        return together(self._found) if len(self._found) == len(self._trial) else None


def together(tried: Sequence[ProbeResult]) -> ProbeResult:
    """What several batches show: the means of what each does, by its logarithm."""
    founds = [found for found in tried if found.shows_something] or tried
    norms = [found.grad_norm for found in founds if found.grad_norm is not None]
    factors = [found.factor for found in founds if found.factor is not None]
    return ProbeResult(
        loss=_mean([found.loss for found in founds]),
        loss_then=_mean([found.loss_then for found in founds]),
        loss_limit=_mean([found.loss_limit for found in founds]),
        grad_norm=_mean(norms) if len(norms) == len(founds) else None,
        grad_norm_then=_mean([found.grad_norm_then for found in founds]),
        grad_norm_limit=_mean([found.grad_norm_limit for found in founds]),
        factor=median(factors) if 2 * len(factors) > len(founds) else None,
        tried=len(founds),
    )


def _mean(values: Sequence[float]) -> float:
    are_positive = all(0 < value < math.inf for value in values)
    return math.exp(fmean(map(math.log, values))) if are_positive else fmean(values)


def factor_of(then: Sequence[float], now: Sequence[float]) -> float | None:
    """By which the norms of all tensors have grown alike; None where they have not, or nobody can say.

    >>> round(factor_of([1.0, 2.0, 0.5, 4.0] * 2, [8.0, 16.0, 4.0, 30.0] * 2), 6)
    8.0
    >>> factor_of([1.0, 2.0, 0.5, 4.0] * 2, [8.0, 16.0, 4.0, 4.0] * 2)
    """
    pairs = [pair for pair in zip(then, now, strict=False) if any(pair)]  # no gradient, then and now: says nothing
    are_known = len(then) == len(now) and all(0 < norm < math.inf for pair in pairs for norm in pair)
    if not are_known or len(pairs) < FEWEST_TENSORS:
        return None
    grown = [math.log(after) - math.log(before) for before, after in pairs]
    middle = median(grown)
    are_alike = max(abs(each - middle) for each in grown) < min(ALIKE, middle / 2)
    return math.exp(middle) if are_alike else None


def _copied(batch: Any) -> Any:
    try:
        return copy.deepcopy(batch)
    except Exception:  # whatever it holds; then the batch itself has to do
        return batch
