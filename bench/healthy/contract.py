"""What a healthy training is to ``bench/harm.py``: ordinary code that lets somebody else end its steps.

    @training(kind="tabular", metric="recall", about="one positive in a hundred, batch 16, AdamW")
    def rare_positives(seed: int, keeper: Keeper) -> float:
        ...
        steps = keeper.around(model, optimizer, clip=1.0)
        for inputs, wanted in steps.batches(loader):
            loss = F.cross_entropy(model(inputs), wanted)
            loss.backward()
            steps.step(loss)
        return recall(model)

The same function is trained plainly, under a guard, and under the rules of others: what differs is the keeper alone.
What a training returns is the number that its people would look at, so that harm shows where it hurts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

T = TypeVar("T")


class Steps(Protocol):
    """Ends the steps of one loop."""

    @property
    def is_probe(self) -> bool:
        """Whether the batch is only tried again: what the loop does once a step by itself (a target network, a buffer
        that is added to) is not for it."""

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """The batches of a loader that can be gone through again: a list, a range, a ``DataLoader``."""

    def accumulate(self) -> AbstractContextManager[None]:
        """Around every micro-batch but the last of a step."""

    def step(self, loss: Tensor) -> None:
        """After ``loss.backward()``, or ``scaler.scale(loss).backward()``: unscaling, clipping, optimizer, schedule,
        zeroed gradients."""


class Keeper(Protocol):
    """Whoever ends steps: nobody in particular, a guard, the rule of a peer."""

    def around(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        scheduler: LRScheduler | None = None,
        clip: float | None = None,
        scaler: GradScaler | None = None,
        reads_data: bool = True,
        also: dict[str, Any] | None = None,
    ) -> Steps:
        """What ends the steps of a loop over this model. Of several in one training (the two players of a GAN) one
        reads the data. ``also``: what else belongs to the state of the run (an EMA, a target network), by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One healthy training."""

    name: str
    kind: str
    """tabular, image, text, sequence, generative, rl, physics, recommendation, ..."""
    metric: str
    """What ``train`` returns: accuracy, recall, reward, evaluation loss."""
    about: str
    """What is particular about it: data, loss, batch, optimizer, precision."""
    is_better_higher: bool
    train: Callable[[int, Keeper], float]
    """Seed in, quality out. Seeds everything it draws from; the same seed and keeper give the same number."""


def training(
    *, kind: str, metric: str, about: str, is_better_higher: bool = True
) -> Callable[[Callable[[int, Keeper], float]], Training]:
    """Make a training of a function; its name is the function's, with dashes."""

    def made(train: Callable[[int, Keeper], float]) -> Training:
        return Training(
            name=train.__name__.replace("_", "-"),
            kind=kind,
            metric=metric,
            about=about,
            is_better_higher=is_better_higher,
            train=train,
        )

    return made
