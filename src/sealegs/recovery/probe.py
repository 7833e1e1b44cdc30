"""The probe: tries batches that were healthy a while ago once more, to tell changed data from changed weights.

It keeps copies of healthy batches as they come by, and compares their loss and gradient norms now with those then.
"""

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
"""Healthy steps after which a batch can be compared with."""
MOST_TRIED = 3
"""Batches per probe. Several tell more than one: their rises differ by 7 to 16 % (49M parameters, queries and keys
x16)."""
APART = 6
"""Steps between the first batches that are kept. Later ones replace the oldest, and are as far apart as proving one
takes."""
SCALES, SMALLEST_RISE = 2.0, math.log(1.03)
"""Rise of a batch's loss from which the weights are damaged: in scales of its noise, and at least this much."""
NORM_SCALES, GROWN_NORM = 3.0, math.log(1.5)
"""The same for the norm of its gradients. At 49M parameters and 300 steps a scale is 0.22 to 0.27; a healthy batch has
up to 5 times the norm of 12 to 30 steps before, three batches together up to 1.55 times (bf16, 180 trials of six
seeds)."""
SAME_LOSS = 1.01
"""Up to this factor the loss is unchanged, and grown gradients may be due to how they are computed."""
LASTING = 16
"""Steps in most of which gradients must be computed otherwise to be a change of the run, and no passing fault."""
FEWEST_TENSORS = 8
"""Tensors from which the gradients can be said to have grown alike."""
ALIKE = math.log(2.0)
"""How far, as a logarithm, one tensor's growth may be off the common factor. In the lab's nano, healthy weights are off
by at most 0.49 while a batch waits; with damaged queries and keys and an unchanged loss, one tensor is off by 0.95 or
more (``bench/probes.py``). No tensor may be nearer to its old norm than to the factor: layers after the damage keep
their gradients."""


class Noise(NamedTuple):
    """How much signals differ in health, as logarithms: scales from step to step, and how far they wander in the long
    run."""

    loss: float = 0.0
    grad_norm: float = 0.0
    wander_of_loss: float = 0.0
    wander_of_norm: float = 0.0

    @property
    def least_rise(self) -> float:
        """The smallest rise of a batch's loss that counts, as a logarithm."""
        return max(SCALES * self.loss, SMALLEST_RISE, self.wander_of_loss)

    @property
    def least_growth(self) -> float:
        """The smallest growth of its gradient norm that counts, as a logarithm."""
        return max(NORM_SCALES * self.grad_norm, GROWN_NORM, self.wander_of_norm)


@dataclass(frozen=True, slots=True)
class Kept:
    """The batches of one healthy step, most often one, and what they showed."""

    step: int = -1
    batches: tuple[Any, ...] = ()
    loss: float = math.nan
    """Loss of that step."""
    grad_norm: float = math.nan
    """Gradient norm of that step."""
    norms: Tensor | None = None
    """Norm of each gradient, left on the device until it is compared."""

    def compared(self, loss: float, grad_norm: float | None, norms: Sequence[float], noise: Noise) -> "ProbeResult":
        """Compare the batch now with the batch then; ``norms`` are those of each gradient.

        Between batches losses differ by a scale or more, but one batch has much the same loss a few steps later. So a
        small rise tells that the weights have changed.
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
    """What one batch shows now, or several together."""

    loss: float
    loss_then: float
    """Loss at the step that trained on them."""
    loss_limit: float
    grad_norm: float | None
    grad_norm_then: float
    grad_norm_limit: float
    factor: float | None
    """The factor by which the gradients of every tensor have grown, with an unchanged loss; None where they have not
    grown alike. Damaged weights do not do that; a sum instead of a mean does."""
    tried: int = 1
    """How many batches it is about."""

    @property
    def rise(self) -> float:
        """Rise of the loss, as a logarithm; infinite where the loss is not finite."""
        return math.log(self.loss / self.loss_then) if 0 < self.loss < math.inf else math.inf

    @property
    def shows_something(self) -> bool:
        """Whether loss and gradients are above zero; a batch where they vanish has no factor of change."""
        return not self.loss <= 0 and self.grad_norm != 0

    @property
    def norm_has_grown(self) -> bool:
        """Whether the gradients are larger, and not just computed otherwise."""
        is_larger = self.grad_norm is not None and not self.grad_norm <= self.grad_norm_limit
        return is_larger and self.factor is None

    @property
    def norm_is_gross(self) -> bool:
        """Whether the gradients have grown twice as far as they may, as a logarithm, and further than the loss: then it
        is damage, whatever the loss. Where a loss was next to nothing, both grow by orders of magnitude."""
        grown = (self.grad_norm or 0.0) / max(self.grad_norm_then, 1e-300)
        is_far = not grown * self.grad_norm_then**2 <= self.grad_norm_limit**2
        return self.norm_has_grown and is_far and not math.log(max(grown, 1.0)) <= self.rise

    @property
    def is_condemned(self) -> bool:
        """Whether the weights have changed for the worse."""
        return self.norm_has_grown or not self.loss <= self.loss_limit

    @property
    def change(self) -> str:
        """A sentence on how the computation of gradients has changed; empty where it has not."""
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


class NewScale(NamedTuple):
    """Gradients that a probe found to be computed otherwise, with the norms of the steps since."""

    change: str
    """The change in a sentence."""
    limit: float
    """Norms above it are nearer to the new scale than to the old one."""
    norms: tuple[float, ...] = ()

    @classmethod
    def of(cls, found: ProbeResult) -> "NewScale":
        """What a probe has found."""
        assert found.grad_norm is not None
        return cls(found.change, math.sqrt(found.grad_norm * found.grad_norm_then))

    def after(self, norm: float) -> "NewScale":
        """The same after one more step."""
        return self._replace(norms=(*self.norms, norm))

    @property
    def is_known(self) -> bool:
        """Whether enough steps have followed to tell whether it lasts."""
        return len(self.norms) >= LASTING

    @property
    def lasts(self) -> bool:
        """Whether most of the steps since have had gradients of the new scale."""
        return 2 * sum(norm > self.limit for norm in self.norms) > len(self.norms)


class Probe:
    """Keeps batches from healthy steps. It works where every step takes the same number of batches."""

    def __init__(self) -> None:
        self.unavailable_because = ""
        """Why no probe is possible; empty where one is."""
        self.norms: Tensor | None = None
        """Norm of each gradient of the current step, or one number for all."""
        self._proven: deque[Kept] = deque(maxlen=MOST_TRIED)
        self._waiting: deque[Kept] = deque()
        """Batches that are not proven yet."""
        self._since_kept = APART
        """Steps since a batch was kept."""
        self._newest = Kept()
        """Values of the row that was followed last, without its batch."""
        self._batches: list[Any] = []
        """Copies of the current step's batches, if they are to be kept."""
        self._is_due = False
        self._handed_out = 0
        """Batches handed out since the last step."""
        self._a_step = 0
        """Batches per step, once known."""
        self._trial: list[Kept] = []
        """The batches of the probe under way."""
        self._found: list[ProbeResult] = []
        """Results of the batches probed so far."""

    @property
    def oldest(self) -> int:
        """The step of the oldest batch of the probe under way."""
        return min((kept.step for kept in self._trial), default=-1)

    def begin(self) -> list[Any]:
        """Begin a probe: copies of the batches to try, whose losses go to ``compared`` in this order. Empty where there
        are none."""
        self._trial, self._found = [] if self.unavailable_because else list(self._proven), []
        return [_copied(batch) for kept in self._trial for batch in kept.batches]

    def handed_out(self, batch: Any) -> None:
        """Keep a copy of a batch that is about to be handed out, if one is due; the loop may change the batch
        itself."""
        if not self._handed_out:
            are_enough = len(self._proven) + len(self._waiting) >= MOST_TRIED
            self._is_due = self._since_kept >= (PROVEN_AFTER if are_enough else APART)
            self._batches = []
        self._handed_out += 1
        if self._is_due:
            self._batches.append(_copied(batch))

    def after_step(self, number: int, *, is_healthy: bool, batches: int = 1) -> None:
        """Note that the step before ``number`` is done. The loop says that it took so many ``batches``."""
        handed_out, self._handed_out = self._handed_out, 0
        self._a_step = self._a_step or batches
        if not self.unavailable_because and (handed_out, batches) != (self._a_step, self._a_step):
            self.unavailable_because = self._why_unknown(number - 1, handed_out, batches)
            self._proven.clear()
            self._waiting.clear()
        self._since_kept += 1
        if self._batches and not self.unavailable_because and is_healthy:
            is_known = self._newest.step == number - 1  # on a device the row is not there yet
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

    def consider(self, row: Row, *, is_calm: bool, is_doubtful: bool) -> None:
        """Follow one judged row."""
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
        """Forget this step and later ones: the run has gone back and will do them again."""
        self._proven = deque((kept for kept in self._proven if kept.step < step), MOST_TRIED)
        self._waiting = deque(kept for kept in self._waiting if kept.step < step)
        self._newest = Kept()
        self._since_kept = APART  # keep the next batch, so that one is proven when the anomaly comes again

    def forget_all(self) -> None:
        """Forget every batch."""
        self.forget_from(-1)

    def compared(
        self, loss: float, grad_norm: float | None, norms: Sequence[float], noise: Noise
    ) -> ProbeResult | None:
        """Compare one batch of the probe. Gives the result of all once the last is compared, None before."""
        self._found.append(self._trial[len(self._found)].compared(loss, grad_norm, norms, noise))
        return together(self._found) if len(self._found) == len(self._trial) else None


def together(tried: Sequence[ProbeResult]) -> ProbeResult:
    """The result of several batches: geometric means."""
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
    """The factor by which the norms of all tensors have grown alike; None where they have not, or cannot be compared.

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
