"""Optimizers of every make, as people train with them, to be skipped on the CPU and on CUDA."""

import importlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

Way = Literal["found_inf", "device", "host"]


def gradient(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad


def orthogonalised(update: Tensor) -> Tensor:
    """Newton and Schulz, five times: all singular values near 1."""
    x: Tensor = update / (update.norm() + 1e-7)
    x = x.mT if (is_tall := x.shape[0] > x.shape[1]) else x
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.mT if is_tall else x


class PublicMuon(Optimizer):
    """As public repositories write it: momentum with Nesterov's step, and a place in each group for updates."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.02, compiled: str = "") -> None:
        matrices = list(parameters)
        sizes = sorted({p.numel() for p in matrices})
        groups = [
            {"params": [p for p in matrices if p.numel() == size], "scratch": matrices[0].new_zeros(size).detach()}
            for size in sizes
        ]
        super().__init__(groups, {"lr": lr, "momentum": 0.95, "weight_decay": 0.01})
        self.orthogonalise = torch.compile(orthogonalised, backend=compiled) if compiled else orthogonalised

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.lerp_(gradient(p), 1 - group["momentum"])
                ahead = gradient(p).lerp(buffer, group["momentum"])
                group["scratch"].copy_(self.orthogonalise(ahead).reshape(-1))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                scale = max(1, p.shape[0] / p.shape[1]) ** 0.5
                p.add_(group["scratch"].view_as(p), alpha=-group["lr"] * scale)


class MuonWithAdam(Optimizer):
    """Both in one, by a flag of the group; Adam's part counts its steps in Python."""

    def __init__(self, model: nn.Module) -> None:
        groups = [{"params": part, "use_muon": n == 0} for n, part in enumerate(parts_of(model))]
        super().__init__(groups, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state, grad = self.state[p], gradient(p)
                if group["use_muon"]:
                    buffer = state.setdefault("momentum_buffer", torch.zeros_like(p)).lerp_(grad, 0.05)
                    p.add_(orthogonalised(buffer), alpha=-group["lr"])
                    continue
                state["step"] = state.get("step", 0) + 1
                mean = state.setdefault("exp_avg", torch.zeros_like(p)).lerp_(grad, 0.1)
                square = state.setdefault("exp_avg_sq", torch.zeros_like(p)).lerp_(grad.square(), 0.05)
                share = math.sqrt(1 - 0.95 ** state["step"]) / (1 - 0.9 ** state["step"])
                p.addcdiv_(mean, square.sqrt().add_(1e-8), value=-group["lr"] * share)


class Lion(Optimizer):
    """The sign of a momentum."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(mean.lerp(gradient(p), 0.1).sign_(), alpha=-group["lr"])
                mean.lerp_(gradient(p), 0.01)


class Preconditioned(Optimizer):
    """As SOAP and Shampoo remember: lists of matrices that are replaced now and then, a count, an order, a flag."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, counts_on_host: bool) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self._counts_on_host = counts_on_host

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self._step(p, self.state[p], group["lr"])

    def _step(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        grad = gradient(p).reshape(len(p), -1)
        if not state:
            state["GG"] = [torch.zeros(n, n, device=p.device) for n in grad.shape]
            state["Q"] = [torch.eye(n, device=p.device) for n in grad.shape]
            state["step"] = 0 if self._counts_on_host else torch.zeros((), dtype=torch.int64, device=p.device)
            state["order"] = torch.arange(grad.shape[1], device=p.device)
            state["is_begun"] = torch.zeros((), dtype=torch.bool, device=p.device)
            state["exp_avg"] = torch.zeros_like(grad)
        state["step"] += 1
        state["is_begun"].fill_(True)
        for n, product in enumerate((grad @ grad.mT, grad.mT @ grad)):
            state["GG"][n].lerp_(product, 0.1)
            state["Q"][n] = state["Q"][n] + 0.01 * state["GG"][n]  # another tensor in its place
        state["order"].copy_(state["GG"][1].diagonal().argsort())
        turned = state["Q"][0] @ grad @ state["Q"][1]
        state["exp_avg"].lerp_(turned[:, state["order"]], 0.1)
        p.add_(state["exp_avg"].sign().view_as(p), alpha=-lr)


class ScheduleFree(Optimizer):
    """AdamW without a schedule: weights are an average of two sequences, and swapped for evaluation."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr, "beta1": 0.9, "k": 0, "train_mode": False})

    @torch.no_grad()
    def _swap(self, share: float, *, train: bool) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["train_mode"] is not train else ():
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], share)
            group["train_mode"] = train

    def train(self) -> None:
        self._swap(0.1, train=True)

    def eval(self) -> None:
        self._swap(1 - 1 / 0.9, train=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["train_mode"], "as the package has it"
            group["k"] += 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["z"], state["exp_avg_sq"] = p.clone(), torch.zeros_like(p)
                square = state["exp_avg_sq"].lerp_(gradient(p).square(), 0.05)
                step = gradient(p) / (square.sqrt() / math.sqrt(1 - 0.95 ** group["k"]) + 1e-8)
                p.lerp_(state["z"], 1 / group["k"]).add_(step, alpha=-0.1 * group["lr"])
                state["z"].add_(step, alpha=-group["lr"])


def parts_of(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices, and the rest."""
    return [p for p in model.parameters() if p.ndim == 2], [p for p in model.parameters() if p.ndim != 2]


@dataclass(frozen=True, slots=True)
class Case:
    """Optimizers of a model, and how the guard skips them on CUDA."""

    make: Callable[[nn.Module], list[Optimizer]]
    way: Way
    """On CUDA. On the CPU the host always decides."""
    needs: str = ""
    """A package that is not always there."""
    swaps: bool = False
    """Whether its weights are swapped for evaluation."""


def with_adam(make: Callable[[list[nn.Parameter]], Optimizer]) -> Callable[[nn.Module], list[Optimizer]]:
    """One for the matrices, and fused AdamW for the rest."""
    return lambda model: [make(parts_of(model)[0]), AdamW(parts_of(model)[1], lr=1e-2, fused=True)]


def compiled_muon(matrices: list[nn.Parameter]) -> Optimizer:
    return PublicMuon(matrices, compiled="inductor" if matrices[0].is_cuda else "aot_eager")


def of_package(name: str, kind: str, **options: Any) -> Callable[[nn.Module], list[Optimizer]]:
    return lambda model: [getattr(importlib.import_module(name), kind)(model.parameters(), **options)]


def on_cuda(model: nn.Module) -> bool:
    return next(model.parameters()).is_cuda


CASES = {
    "AdamW, fused": Case(lambda model: [AdamW(model.parameters(), lr=1e-2, fused=True)], "found_inf"),
    "SGD with momentum, fused": Case(
        lambda model: [SGD(model.parameters(), lr=1e-2, momentum=0.9, dampening=0.1, fused=True)], "found_inf"
    ),
    "AdamW, default": Case(lambda model: [AdamW(model.parameters(), lr=1e-2)], "host"),
    "AdamW, capturable": Case(lambda model: [AdamW(model.parameters(), lr=1e-2, capturable=on_cuda(model))], "device"),
    "Muon of torch": Case(with_adam(lambda matrices: Muon(matrices, lr=1e-2)), "device"),
    "Muon, public": Case(with_adam(PublicMuon), "device"),
    "Muon, public, compiled": Case(with_adam(compiled_muon), "device"),
    "Muon with Adam in one": Case(lambda model: [MuonWithAdam(model)], "host"),
    "Lion": Case(lambda model: [Lion(model.parameters())], "device"),
    "Adafactor": Case(lambda model: [Adafactor(model.parameters(), lr=1e-2)], "host"),
    "Shampoo-like, counts on the device": Case(
        lambda model: [Preconditioned(model.parameters(), counts_on_host=False)], "device"
    ),
    "SOAP-like, counts on the host": Case(
        lambda model: [Preconditioned(model.parameters(), counts_on_host=True)], "host"
    ),
    "schedule-free": Case(lambda model: [ScheduleFree(model.parameters())], "host", swaps=True),
    "schedule-free, the package": Case(
        of_package("schedulefree", "AdamWScheduleFree", lr=1e-2), "host", "schedulefree", swaps=True
    ),
    "8 bits, bitsandbytes": Case(
        of_package("bitsandbytes.optim", "AdamW8bit", min_8bit_size=16), "host", "bitsandbytes"
    ),
    "8 bits, torchao": Case(of_package("torchao.optim", "AdamW8bit"), "host", "torchao"),
}


def model_of(device: str) -> nn.Module:
    """Wide enough for blocks of 8 bits."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64, bias=False), nn.LayerNorm(64)).to(device)


def backward(model: nn.Module, seed: int, *, is_bad: bool) -> Tensor:
    """Gradients, NaN in all of them where the step is bad; the loss."""
    device = next(model.parameters()).device
    inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)).to(device)
    loss: Tensor = (model(inputs) - inputs).square().mean() * (math.nan if is_bad else 1.0)
    loss.backward()
    return loss.detach()


def bits_of(value: Any) -> Any:
    """Everything in it, to the last bit: tensors of any type, in containers of any depth."""
    if isinstance(value, Tensor):
        if hasattr(value, "__tensor_flatten__"):
            return type(value).__name__, [bits_of(getattr(value, name)) for name in value.__tensor_flatten__()[0]]
        held = value.detach().cpu().contiguous().reshape(-1)
        return value.dtype, tuple(value.shape), held.view(torch.uint8).numpy().tobytes() if held.numel() else b""
    if isinstance(value, dict):
        return {name if isinstance(name, str) else n: bits_of(each) for n, (name, each) in enumerate(value.items())}
    if isinstance(value, list | tuple):
        return [bits_of(each) for each in value]
    return value if isinstance(value, int | float | bool | str | None) else type(value).__name__


def everything(model: nn.Module, optimizers: Iterable[Optimizer]) -> Any:
    """Weights, states in the order of the weights, settings and counters."""
    weights = list(model.parameters())
    states = [[bits_of(each.state.get(p)) for p in weights] for each in optimizers]
    kept = [
        {name: bits_of(own) for name, own in vars(each).items() if name not in ("state", "defaults") and name[0] != "_"}
        for each in optimizers
    ]
    return bits_of(weights), states, kept
