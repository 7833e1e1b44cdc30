"""A small loop that knows nothing of faults, for the tests of what strikes it."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from sealegs.faults.injector import inject
from sealegs.faults.spec import parse

Make = Callable[[nn.Sequential], Optimizer]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def adam(model: nn.Sequential, **options: Any) -> AdamW:
    return AdamW(model.parameters(), **{"lr": 0.01} | options)


def one_rate_tensor(model: nn.Sequential) -> AdamW:
    """Two groups whose learning rate is one and the same tensor."""
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
    optimizer = AdamW(groups, lr=torch.tensor(0.01), capturable=False, foreach=False)
    assert optimizer.param_groups[0]["lr"] is optimizer.param_groups[1]["lr"]
    return optimizer


def two_rates(model: nn.Sequential) -> AdamW:
    """Two groups, each with a rate of its own."""
    groups: list[dict[str, Any]] = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
    return AdamW([groups[0], groups[1] | {"lr": 0.02}], lr=0.01)


def constant(optimizer: Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: 1.0)


class Loop:
    """A loop that knows nothing of faults, and can be sent back."""

    def __init__(
        self,
        faults: Iterable[str] = (),
        make: Make = adam,
        schedule: Callable[[Optimizer], LRScheduler] = constant,
        *,
        clip: float | None = None,
        micro_batches: int = 1,
        uncleared: Collection[int] = (),
    ) -> None:
        self.clip = clip
        self.micro_batches = micro_batches
        self.uncleared = uncleared
        """Steps after which the gradients are left as they are."""
        self.model = net()
        self.optimizer = make(self.model)
        self.scheduler = schedule(self.optimizer)
        self.step = 0
        self.rates: list[list[float]] = []
        """After each step, of each group."""
        self.factors: dict[int, float] = {}
        """By hand: what the rates are multiplied by for the update of a step."""
        self.injector = inject(map(parse, faults), self.model, optimizers=self.optimizer, clock=lambda: self.step)

    def run(self, until: int, *, skip: Collection[int] = ()) -> "Loop":
        while self.step < until:
            for micro_batch in range(self.micro_batches):
                loss_of(self.model, self.step + 100 * micro_batch).backward()
            if self.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            if self.step not in skip:
                self.update()
            if self.step not in self.uncleared:
                self.optimizer.zero_grad()
            self.scheduler.step()
            self.rates.append([float(group["lr"]) for group in self.optimizer.param_groups])
            self.step += 1
        return self

    def update(self) -> None:
        if self.step not in self.factors:
            self.optimizer.step()
            return
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.set_rates([rate * self.factors[self.step] for rate in rates])
        self.optimizer.step()
        self.set_rates(rates)

    def set_rates(self, rates: list[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def moments(self, name: str) -> list[Tensor]:
        return [self.optimizer.state[parameter][name].clone() for parameter in self.model.parameters()]

    def lines(self) -> list[str]:
        return list(map(str, self.injector.strikes))


def loss_of(model: nn.Module, step: int) -> Tensor:
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
    loss: Tensor = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    return loss


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
