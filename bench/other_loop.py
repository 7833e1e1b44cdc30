"""A loop that is not the lab's, with one thing wrong with it: a small network that learns to be another one.

wrong = parsed("stale-beta2:strength=6,steps=9")
train(wrong, seed=3, folder=Path("run"))
subject = build(wrong, seed=3)
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import sealegs
from sealegs.faults.injector import inject
from sealegs.faults.spec import parse
from sealegs.guard_options import Checkpointing

AT, AT_GROWN, AFTER, FEATURES = 300, 1100, 40, 16
"""The step at which it goes wrong, and so many steps more. What only a batch's loss shows comes when the statistic is
grown: of a loss as noisy as this (15 to 20 %) a run of 300 steps takes seven times the usual for chance."""
USUAL = {
    "bad-data-batch": (4.0, 7),
    "hard-batch": (1.9, 6),
    "corrupt-weight": (12.0, 1),
    "corrupt-gradient": (700.0, 1),
    "lr-discontinuity": (50.0, 10),
    "optimizer-reset": (0.05, 1),
    "stale-beta2": (5.0, 8),
    "zero-variance-norm": (1.0, 1),
    "fp16-overflow": (500.0, 4),
    "log-of-zero": (500.0, 4),
    "": (1.0, 0),
}
"""What can be wrong, how much of it, and for how many steps; nothing at all, in the last."""


class Wrong(NamedTuple):
    """What is wrong with a run."""

    cause: str
    strength: float
    """Labels, features, weights, gradients or rates are so many times as large; or so many rows are constant; or the
    learning rate is this, for lost moments to show."""
    steps: int

    @property
    def at(self) -> int:
        """The first of them."""
        return AT_GROWN if self.cause in ("hard-batch", "bad-data-batch") else AT

    def lasts_at(self, step: int) -> bool:
        """Whether a step is one of them."""
        return self.at <= step < self.at + self.steps


def parsed(text: str) -> Wrong:
    """``stale-beta2:strength=6,steps=9``; as usual where it does not say.

    >>> parsed("hard-batch:steps=3")
    Wrong(cause='hard-batch', strength=1.9, steps=3)
    """
    cause, _, rest = text.partition(":")
    given = dict(option.split("=") for option in filter(None, rest.split(",")))
    strength, steps = USUAL[cause]
    return Wrong(cause, float(given.get("strength", strength)), int(given.get("steps", steps)))


class Gate(nn.Module):
    """Features by how large they are: their squares are beyond fp16 where they are beyond 256."""

    def forward(self, x: Tensor) -> Tensor:
        """The same features, weighed."""
        return 4 * x * torch.softmax(x.square() / 8, -1)


def build(wrong: Wrong, seed: int) -> sealegs.Subject:
    """Model, optimizer and loss."""
    torch.manual_seed(seed)
    cause = wrong.cause
    first = {"zero-variance-norm": nn.LayerNorm(FEATURES, eps=0.0), "fp16-overflow": Gate()}.get(cause, nn.Identity())
    model = nn.Sequential(first, nn.Linear(FEATURES, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=wrong.strength if cause == "optimizer-reset" else 3e-3,
        betas=(0.9, 0.999 if cause in ("stale-beta2", "optimizer-reset") else 0.95),
        weight_decay=0.0,
    )
    jump = wrong.strength if cause == "lr-discontinuity" else 1.0
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: jump if wrong.lasts_at(step) else 1.0)
    is_half = cause == "fp16-overflow"

    @contextmanager
    def precision(name: str) -> Iterator[None]:
        nonlocal is_half
        was, is_half = is_half, name == "fp16"
        try:
            yield
        finally:
            is_half = was

    def loss(batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.float16) if is_half else nullcontext():
            guess: Tensor = model(batch["x"].half() if is_half else batch["x"])
        if cause == "log-of-zero":
            return -(batch["y"].softmax(-1) * guess.softmax(-1).log()).sum(-1).mean()
        return (guess.float() - batch["y"]).square().mean()

    return sealegs.Subject(
        model=model,
        optimizers=[optimizer],
        schedulers=[schedule],
        loss=loss,
        scaler=torch.amp.grad_scaler.GradScaler("cpu", enabled=is_half),
        precision=precision,
    )


@torch.no_grad()
def batches(wrong: Wrong, seed: int) -> list[dict[str, Tensor]]:
    """What it learns from, with what is wrong about it."""
    random = torch.Generator().manual_seed(seed + 1000)
    teacher = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 4))
    for parameter in teacher.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=random) * (0.4 if parameter.ndim > 1 else 0.1))
    made = []
    for step in range(wrong.at + AFTER):
        x = torch.randn(32, FEATURES, generator=random)
        cause = wrong.cause if wrong.lasts_at(step) else ""
        if cause == "hard-batch":
            x *= wrong.strength  # further out than it has learnt yet, and right
        y, noise = teacher(x), torch.randn(32, 4, generator=random)
        y += 0.1 * noise
        if cause == "bad-data-batch":
            y = wrong.strength * noise
        elif cause == "stale-beta2":
            y *= wrong.strength
        elif cause == "zero-variance-norm":
            x[: int(wrong.strength)] = 0.0
        elif cause in ("fp16-overflow", "log-of-zero"):
            x[3] *= wrong.strength
        made.append({"x": x, "y": y})
    return made


def train(
    wrong: Wrong, seed: int, folder: Path, faults: Sequence[str] = (), *, until: int | None = None, resume: bool = False
) -> None:
    """A run that is watched, and that nobody helps; with faults as ``sealegs train --inject`` has them. It ends with a
    checkpoint ``until`` it is to ``resume``, in a folder to which that may have been copied."""
    subject, cause = build(wrong, seed), wrong.cause
    model, [optimizer], scaler = subject.model, subject.optimizers, subject.scaler
    first, last = model.get_parameter("1.weight"), model.get_parameter("3.weight")
    assert scaler is not None
    how: dict[str, Any] = {
        "playbook": sealegs.Playbook.observe(),
        "act": False,
        "checkpoint_every": Checkpointing(snapshot_memory=2**22),
        "resume": resume,
    }
    how |= {"scheduler": subject.schedulers, "clip": None if cause == "stale-beta2" else 1.0}
    how |= {"scaler": scaler} if scaler.is_enabled() else {}
    with (
        sealegs.Guard(model, optimizer, run=folder, **how) as guard,
        inject(map(parse, faults), model, optimizers=optimizer, clock=lambda: guard.number),
    ):
        for batch in guard.batches(batches(wrong, seed)):
            strikes = guard.number == wrong.at
            with torch.no_grad():
                if strikes and cause == "corrupt-weight":
                    first.data.mul_(wrong.strength)
                if strikes and cause == "optimizer-reset":
                    for moments in optimizer.state.values():
                        moments["exp_avg"].zero_()
                        moments["exp_avg_sq"].zero_()
            loss = subject.loss(batch)
            scaler.scale(loss).backward()
            if strikes and cause == "corrupt-gradient":
                assert last.grad is not None
                last.grad.mul_(wrong.strength)
            guard.step(loss)
            if guard.number == until:
                guard.checkpoint(wait=True)
                break
