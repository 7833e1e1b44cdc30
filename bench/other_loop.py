"""A loop that is not the lab's, with one thing wrong with it: a small network that learns to be another one.

subject = build("stale-beta2", seed=3)
folder = train("stale-beta2", subject, seed=3, folder=Path("run"))
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sealegs

AT, STEPS, FEATURES = 300, 340, 16
HARDER = 1.9
CAUSES = (
    "bad-data-batch",
    "hard-batch",
    "corrupt-weight",
    "corrupt-gradient",
    "lr-discontinuity",
    "optimizer-reset",
    "stale-beta2",
    "zero-variance-norm",
    "fp16-overflow",
    "log-of-zero",
    "",
)
"""What can be wrong; nothing at all, in the last."""


class Gate(nn.Module):
    """Features by how large they are: their squares are beyond fp16 where they are beyond 256."""

    def forward(self, x: Tensor) -> Tensor:
        """The same features, weighed."""
        return 4 * x * torch.softmax(x.square() / 8, -1)


def build(cause: str, seed: int) -> sealegs.Subject:
    """Model, optimizer and loss."""
    torch.manual_seed(seed)
    first = {"zero-variance-norm": nn.LayerNorm(FEATURES, eps=0.0), "fp16-overflow": Gate()}.get(cause, nn.Identity())
    model = nn.Sequential(first, nn.Linear(FEATURES, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=5e-2 if cause == "optimizer-reset" else 3e-3,
        betas=(0.9, 0.999 if cause in ("stale-beta2", "optimizer-reset") else 0.95),
        weight_decay=0.0,
    )
    jump = 50.0 if cause == "lr-discontinuity" else 1.0
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: jump if AT <= step < AT + 10 else 1.0)
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
def batches(cause: str, seed: int) -> list[dict[str, Tensor]]:
    """What it learns from, with what is wrong about it."""
    random = torch.Generator().manual_seed(seed + 1000)
    teacher = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 4))
    for parameter in teacher.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=random) * (0.4 if parameter.ndim > 1 else 0.1))
    made = []
    for step in range(STEPS):
        x = torch.randn(32, FEATURES, generator=random)
        since = step - AT
        if cause == "hard-batch" and 0 <= since < 6:
            x *= HARDER  # further out than it has learnt yet, and right
        y, noise = teacher(x), torch.randn(32, 4, generator=random)
        y += 0.1 * noise
        if cause == "bad-data-batch" and 0 <= since < 7:
            y = 4 * noise
        elif cause == "stale-beta2" and 0 <= since < 8:
            y *= 5
        elif cause == "zero-variance-norm" and since == 0:
            x[3] = 0.0
        elif cause in ("fp16-overflow", "log-of-zero") and 0 <= since < 4:
            x[3] *= 500
        made.append({"x": x, "y": y})
    return made


def train(cause: str, seed: int, folder: Path) -> None:
    """A run that is watched, and that nobody helps."""
    subject = build(cause, seed)
    model, [optimizer], scaler = subject.model, subject.optimizers, subject.scaler
    first, last = model.get_parameter("1.weight"), model.get_parameter("3.weight")
    assert scaler is not None
    how: dict[str, Any] = {"playbook": sealegs.Playbook.observe(), "snapshot_memory": 2**22, "act": False}
    how |= {"scheduler": subject.schedulers, "clip": None if cause == "stale-beta2" else 1.0}
    how |= {"scaler": scaler} if scaler.is_enabled() else {}
    with sealegs.Guard(model, optimizer, run=folder, **how) as guard:
        for batch in guard.batches(batches(cause, seed)):
            strikes = guard.number == AT
            with torch.no_grad():
                if strikes and cause == "corrupt-weight":
                    first.mul_(12)
                if strikes and cause == "optimizer-reset":
                    for moments in optimizer.state.values():
                        moments["exp_avg"].zero_()
                        moments["exp_avg_sq"].zero_()
            loss = subject.loss(batch)
            scaler.scale(loss).backward()
            if strikes and cause == "corrupt-gradient":
                assert last.grad is not None
                last.grad.mul_(700)
            guard.step(loss)
