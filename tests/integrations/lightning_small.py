"""A Lightning module that learns in a few steps and breaks when it is told to, and a trainer that says nothing."""

import hashlib
import logging
import pickle
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

NAN, SPIKE, STEPS = 20, 25, 30
"""Steps with a NaN gradient, and with gradients times 10,000; and how many there are."""
ROWS, BATCH = 96, 8
PER_EPOCH = ROWS // BATCH
BROKEN = {NAN: float("nan"), SPIKE: 1e4}


def rate(step: int) -> float:
    """The schedule: a warm-up over five steps, and another rate at every step after that."""
    return min(1.0, (step + 1) / 5) * 0.999**step


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 1))


def loader(**options: Any) -> DataLoader[Any]:
    """A line to be learned, with noise; shuffled by the global generator, as most are."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, 8, generator=generator)
    targets = rows.sum(1) + 0.1 * torch.randn(ROWS, generator=generator)
    return DataLoader(TensorDataset(rows, targets), BATCH, shuffle=True, **options)


def held_out() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(2, 8), torch.ones(2)), 2)


def loss_of(net: nn.Module, batch: Any) -> Tensor:
    rows, targets = batch
    error: Tensor = net(rows).squeeze(-1) - targets
    return error.square().mean()


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, betas=(0.9, 0.95))


def spoil(net: nn.Module, factor: float) -> None:
    for parameter in net.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(factor)


def digest(net: nn.Module, *optimizers: torch.optim.Optimizer) -> str:
    """Of all that an update may change: weights, moments, counters."""
    state = [each.state_dict()["state"] for each in optimizers]
    tensors = [*net.state_dict().values(), *(v for each in state for of in each.values() for v in of.values())]
    return hashlib.sha256(pickle.dumps([tensor.tolist() for tensor in tensors])).hexdigest()


@cache
def module_class(home: str) -> Any:
    """Of ``lightning.pytorch`` or ``pytorch_lightning``, which have a base class each."""
    base: Any = import_module(home).LightningModule

    class Small(base):  # type: ignore[misc]
        def __init__(self, broken: dict[int, float] | None = None) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = network()
            self.broken = broken or {}
            self.damaged: set[int] = set()
            """Steps before which the weights are spoilt, once each."""
            self.digests: dict[int, str] = {}
            """Before each step."""
            self.seen: list[tuple[int, int, int]] = []
            """Step, epoch and place in it, of each batch."""
            self.told: list[tuple[str, int, int]] = []
            self.updated: list[str] = []
            """The optimizers whose updates Lightning has announced."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            step = self.trainer.global_step
            if step in self.damaged:
                self.damaged.remove(step)
                with torch.no_grad():
                    for parameter in self.parameters():
                        parameter.data.mul_(30)
            self.digests[step] = digest(self.net, *self.trainer.optimizers)
            self.seen.append((step, self.trainer.current_epoch, batch_idx))
            return loss_of(self.net, batch)

        def on_after_backward(self) -> None:
            if (step := self.trainer.global_step) in self.broken:
                spoil(self.net, self.broken[step])

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.updated.append(type(optimizer).__name__)

        def on_validation_start(self) -> None:
            self.told.append(("validation", self.trainer.global_step, self.trainer.current_epoch))

        def on_train_epoch_end(self) -> None:
            self.told.append(("end", self.trainer.global_step, self.trainer.current_epoch))

        def val_dataloader(self) -> Any:
            return held_out()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            loss_of(self.net, batch)

        def configure_optimizers(self) -> Any:
            optimizer = optimizer_of(self.net)
            return [optimizer], [{"scheduler": LambdaLR(optimizer, rate), "interval": "step"}]

    return Small


@cache
def manual_class(home: str) -> Any:
    """The same by manual optimization, with as many optimizers as there are layers, or one."""
    base: Any = module_class(home)

    class Manual(base):  # type: ignore[misc]
        def __init__(self, broken: dict[int, float] | None = None, several: bool = False) -> None:
            super().__init__(broken)
            self.automatic_optimization = False
            self.several = several

        def training_step(self, batch: Any, batch_idx: int) -> None:
            loss = super().training_step(batch, batch_idx)
            optimizers = self.optimizers()
            optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
            self.manual_backward(loss)
            for optimizer in optimizers:  # each with its own clipping, between the updates of others
                self.clip_gradients(optimizer, 1.0, "norm")
                optimizer.step()
                optimizer.zero_grad()
            for schedule in [self.lr_schedulers()]:
                schedule.step()

        def on_after_backward(self) -> None:
            step = self.trainer.global_step // (2 if self.several else 1)
            if step in self.broken:
                spoil(self.net, self.broken[step])

        def configure_optimizers(self) -> Any:
            if not self.several:
                return super().configure_optimizers()
            first = torch.optim.AdamW(self.net[0].parameters(), lr=1e-2)
            second = torch.optim.SGD(self.net[3].parameters(), lr=1e-2, momentum=0.9)
            return [first, second], [StepLR(first, 10)]

    return Manual


def trainer(home: str, *callbacks: Any, **options: Any) -> Any:
    """One that writes and prints nothing."""
    logging.getLogger(home).setLevel(logging.ERROR)
    given = {
        "max_steps": STEPS,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": any("Checkpoint" in type(each).__name__ for each in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return import_module(home).Trainer(callbacks=list(callbacks), **(given | options))


def fitted(module: Any, *callbacks: Any, home: str, loaders: Any = None, ckpt_path: Any = None, **options: Any) -> Any:
    """The trainer of a module that was fitted, from seed 1."""
    torch.manual_seed(1)
    made = trainer(home, *callbacks, **options)
    made.fit(module, loader() if loaders is None else loaders, ckpt_path=ckpt_path)
    return made
