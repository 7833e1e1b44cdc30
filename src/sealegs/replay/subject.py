"""A model, its optimizer and its loss, run one step at a time: the loop of a run, without the run."""

import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import extract_tb
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sealegs.errors import ConfigError, SealegsError
from sealegs.signals.attention import HeadLogits
from sealegs.signals.norms import GradientReader
from sealegs.state.checkpoints import StoredState
from sealegs.state.frozen import FrozenWeights
from sealegs.state.training_state import TrainingState
from sealegs.step.qk_clip import QkClip
from sealegs.step.update import Update


class StepOutcome(NamedTuple):
    """What a step showed."""

    loss: float
    grad_norm: float
    """Gradient norm before clipping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A training setup that can be run again. The function that ``--build`` names makes it with the run's settings:

    .. code-block:: python

        def build() -> sealegs.Subject:
            model = Model()
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
            return sealegs.Subject(model=model, optimizers=[optimizer], loss=lambda batch: model(batch).loss)
    """

    model: nn.Module
    optimizers: Sequence[Optimizer]
    loss: Callable[[Any], Tensor]
    """Gives the loss of a batch as the capsule has it: as the loader gave it, with data classes as dicts."""
    schedulers: Sequence[LRScheduler] = ()
    scaler: GradScaler | None = None
    clip: float | None = None
    """The norm at which the loop clips; left out, the capsule knows."""
    backward: Callable[[Sequence[Any]], Tensor] | None = None
    """Makes the gradients of a step's batches, scaled by the scaler, and gives the loss of the step. Left out, the mean
    of their losses is backpropagated."""
    precision: Callable[[str], AbstractContextManager[object]] | None = None
    """A context in which everything is computed in another precision: ``fp32``."""
    text: "Text | None" = None
    """How to read the batches, where they are text."""
    batches: Iterable[Any] | None = None
    """The training batches from the first on, each time it is iterated: for ``sealegs drill``. A replay has its own."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module) or not all(isinstance(each, Optimizer) for each in self.optimizers):
            raise ConfigError("build: a Subject has a model, a list of optimizers and the loss of a batch")

    @property
    def training(self) -> TrainingState:
        """The training state, to capture and to restore."""
        return TrainingState(
            model=self.model, optimizers=self.optimizers, schedulers=self.schedulers, scaler=self.scaler, data=None
        )

    def gradients(self, batches: Sequence[Any]) -> Tensor:
        """Backpropagate the loss of a step."""
        if self.backward is not None:
            return self.backward(batches)
        total = torch.zeros(())
        for batch in batches:
            loss = self.loss(batch) / len(batches)
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            total = total.to(loss.device) + loss.detach()
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """How to find the tokens of a batch, leave them out, and print them."""

    targets: Callable[[Any], Tensor]
    """Token ids of shape (rows, positions); negative where there is none."""
    losses: Callable[[Any], Tensor]
    """The loss of each token, in the same shape."""
    without: Callable[[Any, Tensor], Any]
    """The batch without the targets that a mask of that shape marks."""
    counts: Tensor | None = None
    """How often each id occurs in the corpus, where that is known."""
    spell: Callable[[Sequence[int]], str] = lambda tokens: " ".join(map(str, tokens))
    """Token ids as text."""


class ReplayLoop:
    """Runs a subject step by step, as a guard's loop does: norms, clipping, update, schedule."""

    def __init__(self, subject: Subject, clip: float | None) -> None:
        self.subject = subject
        self.clip = subject.clip if subject.clip is not None else clip
        self.training = replace(subject.training, frozen=FrozenWeights(subject.model, subject.optimizers))
        self._update = Update(subject.optimizers, subject.schedulers, subject.scaler)
        self._reader = GradientReader(subject.model, subject.optimizers)
        self._heads: HeadLogits | None = None

    def step(
        self,
        batches: Sequence[Any],
        *,
        lr: float | None = None,
        applied: bool = True,
        qk_clip: float | None = None,
        before_update: Callable[[Subject], None] = lambda subject: None,
    ) -> StepOutcome:
        """Run one step. ``lr`` replaces the schedule's rate in the first group, and the others in proportion.
        ``qk_clip`` is the limit of attention logits, at a step at which they were looked at."""
        self.zero()
        loss = self._looked_at(batches, qk_clip)
        self._update.unscale()
        with torch.no_grad():
            gradients = self._reader.read()
            total = gradients.total()
            if self._update.scaler is not None:
                applied = applied and bool(total.isfinite())  # as a scaler decides, whatever the caller says
            if self.clip is not None and applied:
                gradients.clip(self.clip, total)
            before_update(self.subject)
            scheduled = self.subject.optimizers[0].param_groups[0]["lr"]
            self._update.factors = {} if lr is None or lr == scheduled else {"lr": lr / scheduled}
            self._update.apply(applied)
        return StepOutcome(float(loss), float(total))

    def _looked_at(self, batches: Sequence[Any], limit: float | None) -> Tensor:
        """The loss of a step; where attention logits are limited, what they were decides about the weights."""
        if limit is None:
            return self.subject.gradients(batches)
        self._heads = self._heads or HeadLogits(self.subject.model)
        self._heads.arm()
        try:
            loss = self.subject.gradients(batches)
        finally:
            self._heads.disarm()
        if (largest := self._heads.collect()) is not None:
            self._update.qk_clip = QkClip(limit, self._heads, largest)
        return loss

    def look(self, batches: Sequence[Any]) -> StepOutcome:
        """The loss of batches and the norm of its gradients; changes nothing."""
        self.zero()
        loss = self.subject.gradients(batches)
        self._update.unscale()
        total = float(self._reader.read().total())
        self._update.discard()
        return StepOutcome(float(loss), total)

    def zero(self) -> None:
        """Drop the gradients."""
        for optimizer in self.subject.optimizers:
            optimizer.zero_grad()

    def capture(self) -> StoredState:
        """Copy everything that decides what comes next."""
        state = self.training.capture()
        return replace(state, tensors={name: tensor.detach().clone() for name, tensor in state.tensors.items()})

    def restore(self, state: StoredState) -> None:
        """Go back to a captured state, as often as needed: the loop takes copies of it."""
        copies = {name: tensor.clone() for name, tensor in state.tensors.items()}
        self.training.restore(replace(state, tensors=copies))
        self.zero()


def load_builder(place: str) -> Callable[..., Subject]:
    """Load the function that ``FILE.py:FUNCTION`` names. The file is run: it is the user's own, and finds its
    neighbours as ``python FILE.py`` would."""
    file, colon, name = place.rpartition(":")
    if not colon or not name.isidentifier():
        raise ConfigError(f"--build {place}: give a file and a function in it: train.py:build")
    path = Path(file)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"--build {place}: {path} is no Python file that can be read")
    module = importlib.util.module_from_spec(spec)
    if (beside := str(path.resolve().parent)) not in sys.path:
        sys.path.insert(0, beside)
    try:
        spec.loader.exec_module(module)
        function = getattr(module, name)
    except AttributeError as error:
        raise ConfigError(f"--build {place}: there is no {name} in {path}") from error
    except Exception as error:
        raise ConfigError(f"--build {place}: {path} fails ({type(error).__name__}: {error})") from error

    def build(*arguments: Any) -> Subject:
        try:
            made = function(*arguments)
        except SealegsError:
            raise
        except Exception as error:
            line = next((f.lineno for f in reversed(extract_tb(error.__traceback__)) if f.filename == str(path)), None)
            at = f" at line {line}" if line else ""
            raise ConfigError(f"--build {place}: it fails{at} ({type(error).__name__}: {error})") from error
        if not isinstance(made, Subject):
            raise ConfigError(f"--build {place}: it gives a {type(made).__name__}; let it give a sealegs.Subject")
        return made

    return build
