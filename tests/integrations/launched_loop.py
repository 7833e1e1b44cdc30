"""Loops of Accelerate that know of no guard, but for one: run by test_launch.py below `sealegs run`, also on ranks.

Prints the weights, moments and rate that each ended with, and whether it found its gradients after every update. The
bare ones are those of a process without guards.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from tests.integrations import small
from tests.integrations.loop import loss_of, parts, trained

from sealegs.integrations import accelerate

NAN = (f"nan-gradient@{small.NAN}",)


def end_of(faults: tuple[str, ...] = (), accumulation: int = 1) -> list[Any]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    made = model, optimizer, _, scheduler = parts(accelerator, batch=2)
    updates, kept = [0], []
    step = scheduler.step

    def look() -> None:
        kept.append(next(model.parameters()).grad is not None)
        step()

    scheduler.step = look

    def count() -> None:
        updates[0] += accelerator.sync_gradients

    with small.broken(model, lambda: updates[0], faults):
        trained(accelerator, made, after=count)
    if accelerator.num_processes == 1:  # else the ranks lose each other, and more is to come
        accelerator.end_training()
    return [small.digest(model, optimizer.optimizer), scheduler.get_last_lr(), all(kept)]


def end_of_attached() -> list[Any]:
    """The same loop, struck, with a guard of the program's own."""
    accelerator = Accelerator(cpu=True)
    made = model, optimizer, _, scheduler = parts(accelerator, batch=2)
    guard = accelerate.attach(accelerator, model, optimizer, scheduler=scheduler, run=None)
    with guard, small.broken(model, lambda: guard.number, NAN):
        trained(accelerator, made, guard)
    return [small.digest(model, optimizer.optimizer), scheduler.get_last_lr()]


def end_of_two() -> list[Any]:
    """Two optimizers, each with a loss of its own: nothing that one verdict could be about."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    models = [torch.nn.Linear(8, 4) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    models, optimizers = accelerator.prepare(*models), accelerator.prepare(*optimizers)
    for model, optimizer in zip(models, optimizers, strict=True):
        accelerator.backward(loss_of(model, torch.ones(2, 8)))
        optimizer.step()
    return [small.digest(model) for model in models]


@contextmanager
def unguarded() -> Iterator[None]:
    """Accelerate as it was imported."""
    bare: Any = Accelerator
    hooked = {name: getattr(bare, name) for name in ("backward", "end_training")}
    for name, method in hooked.items():
        setattr(bare, name, method.__wrapped__)
    yield
    for name, method in hooked.items():
        setattr(bare, name, method)


def main() -> None:
    found = {"healthy": end_of(), "accumulated": end_of(accumulation=2), "struck": end_of(NAN), "two": end_of_two()}
    found["attached"] = end_of_attached()
    with unguarded():
        found |= {"bare": end_of(), "bare accumulated": end_of(accumulation=2), "bare struck": end_of(NAN)}
        found["bare two"] = end_of_two()
    if Accelerator(cpu=True).is_main_process:
        print(json.dumps(found), flush=True)


def fail() -> None:
    """A loop that its own error ends."""
    accelerator = Accelerator(cpu=True)
    updates = iter(range(5))
    trained(accelerator, parts(accelerator), after=lambda: print(next(updates), file=sys.stderr))


if __name__ == "__main__":
    main()
    if "fail" in sys.argv:
        fail()
