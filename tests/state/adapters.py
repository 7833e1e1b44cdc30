"""Fine-tuning in small: a base that is frozen, and what people put beside it, written by hand."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, TOKENS = 48, 31


class Base(nn.Module):
    """A base model with a table that its readout shares, and a norm with running statistics."""

    def __init__(self, linear: type[nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)
        self.inside = linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.outside = linear(WIDTH, WIDTH)
        self.readout = nn.Linear(WIDTH, TOKENS, bias=False)
        self.readout.weight = self.table.weight
        self.register_buffer("angles", torch.linspace(0, 1, 2**15))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.outside(self.norm(torch.tanh(self.inside(self.table(tokens)))))
        logits: Tensor = self.readout(hidden)
        return logits


class LoRA(nn.Module):
    """A frozen map with a trained one of low rank beside it; with a trained length of each row, DoRA."""

    def __init__(self, base: Any, *, is_dora: bool = False) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, WIDTH) / WIDTH)
        self.up = nn.Parameter(torch.zeros(WIDTH, 2))
        self.lengths = nn.Parameter(base.weight.norm(dim=1).detach()) if is_dora else None

    def forward(self, rows: Tensor) -> Tensor:
        if self.lengths is None:
            out: Tensor = self.base(rows) + rows @ self.down.T @ self.up.T
            return out
        whole: Tensor = self.base.weight + self.up @ self.down
        return F.linear(rows, whole * (self.lengths / whole.norm(dim=1))[:, None])


class FourBit(nn.Module):
    """A map as bitsandbytes keeps it: a parameter of packed bytes, whose scales are only in the state of the module."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        codes = torch.randint(0, 256, (rows * width // 2, 1), dtype=torch.uint8)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.absmax = [torch.rand(rows)]  # hidden from torch, as an attribute of the parameter is
        self.shape = rows, width

    def forward(self, rows: Tensor) -> Tensor:
        codes = torch.cat([self.weight & 15, self.weight >> 4], 1).view(self.shape).float() / 7.5 - 1
        return F.linear(rows, codes * self.absmax[0][:, None] / self.shape[1] ** 0.5)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = self.absmax[0]

    def _load_from_state_dict(self, state: Any, prefix: str, *how: Any) -> None:
        self.absmax = [state.pop(f"{prefix}weight.absmax", self.absmax[0])]
        super()._load_from_state_dict(state, prefix, *how)


class Prompted(nn.Module):
    """A frozen base behind trained vectors that are put before each text."""

    def __init__(self, base: Base) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.prompt = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        rows = torch.cat([self.prompt, self.base.table(tokens)])
        hidden = self.base.outside(self.base.norm(torch.tanh(self.base.inside(rows))))
        logits: Tensor = self.base.readout(hidden)[3:]
        return logits


class Saved(nn.Module):
    """A module of which a trained copy takes the place (``modules_to_save``)."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original.requires_grad_(False)
        self.copy = nn.Linear(WIDTH, WIDTH)
        self.copy.load_state_dict(original.state_dict())

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.copy(rows)
        return out


def adapted(kind: str, seed: int = 0) -> Any:
    """A base of a seed, and what is trained of it."""
    torch.manual_seed(seed)
    base = Base(FourBit if kind == "QLoRA" else nn.Linear).requires_grad_(False)
    torch.manual_seed(77)
    if kind == "prompt tuning":
        return Prompted(base)
    base.inside = LoRA(base.inside, is_dora=kind == "DoRA")
    base.outside = Saved(base.outside) if kind == "modules_to_save" else LoRA(base.outside)
    return torch.compile(base, backend="eager") if kind == "compiled" else base


KINDS = ["LoRA", "DoRA", "QLoRA", "prompt tuning", "modules_to_save", "compiled"]


def texts(count: int = 400) -> list[Tensor]:
    """Batches of tokens, of which each one's target is the next number."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(TOKENS, (24,), generator=generator) for _ in range(count)]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss of a batch."""
    return F.cross_entropy(model(tokens), (tokens + 1) % TOKENS)


def trained_bytes(model: nn.Module) -> int:
    """The weights that are trained, and two moments of each."""
    return sum(3 * each.nbytes for each in model.parameters() if each.requires_grad)
