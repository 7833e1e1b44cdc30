"""A loop of Accelerate's, with a guard or without, in one process or in several."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

STEPS = 30


def parts(accelerator: Any, *, rows: int = 64, batch: int = 4, gamma: float = 0.98) -> tuple[Any, ...]:
    """Model, optimizer, loader and scheduler, prepared."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=gamma)
    torch.manual_seed(accelerator.process_index)  # as on ranks that nobody has seeded alike
    inputs = torch.randn(rows, 8, generator=torch.Generator().manual_seed(5))
    loader: DataLoader[Any] = DataLoader(inputs, batch_size=batch, shuffle=True)  # type: ignore[arg-type]
    prepared: tuple[Any, ...] = accelerator.prepare(model, optimizer, loader, scheduler)
    return prepared


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Some of the inputs are to come out again."""
    loss: torch.Tensor = (model(batch) - batch[:, :4]).square().mean()
    return loss


def trained(
    accelerator: Any,
    made: tuple[Any, ...],
    guard: Any = None,
    *,
    steps: int = STEPS,
    clip: float | None = 0.5,
    before: Callable[[], None] = lambda: None,
    after: Callable[[], None] = lambda: None,
    done: int = 0,
) -> int:
    """As Accelerate's documentation has it; gives the updates that were asked for."""
    model, optimizer, loader, scheduler = made
    updates = done
    while updates < steps:
        for batch in loader if guard is None else guard.batches(loader):
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients and clip is not None:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                before()
                if guard is None:
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                else:
                    guard.step(loss)
                after()
            updates = updates + accelerator.sync_gradients if guard is None else guard.number
            if updates >= steps:
                break
    return updates
