"""The reference decoder, with a switch for each stability margin: logits and per-token losses from token ids."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sealegs.lab.data import IGNORED
from sealegs.lab.experts import Experts, Notes, stacked
from sealegs.lab.float8 import Float8Linear, name_quantisers
from sealegs.lab.settings import ModelSettings


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of one forward pass: sums, so that micro-batches add up and the caller chooses the denominator."""

    tokens: Tensor
    """Cross-entropy of each target token, (rows, context); 0 where the target is ignored."""
    total: Tensor
    """What to minimise: the sum over tokens, z-loss included. Divide by the number of targets of the whole batch."""
    beside: Mapping[str, Tensor] = field(default_factory=dict)
    """What the layers say beside their output, a row a layer: loads of experts and the like."""


class Transformer(nn.Module):
    """Embedding, blocks, norm, head."""

    loads: Tensor | None
    """What each expert got in the batch that the next update is of, (layers, experts); the trainer says it."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.settings = settings
        self.loads = None
        self.embedding = nn.Embedding(settings.vocabulary, settings.width)
        self.embedding_norm = norm(settings) if settings.embedding_norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        # post-norm blocks already end in a norm
        self.final_norm = norm(settings) if settings.norm_position == "pre" else nn.Identity()
        self.head = None if settings.tied_head else nn.Linear(settings.width, settings.vocabulary, bias=False)
        cosine, sine = rotary_table(settings)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)
        name_quantisers(self)
        self._initialise()

    def _initialise(self) -> None:
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                # what writes into the residual stream starts narrower, so that its variance does not grow with depth
                writes_residual = name.endswith((".attention.out", ".down"))
                depth_factor = 1 / math.sqrt(2 * self.settings.layers) if writes_residual else 1.0
                width_factor = 1 / math.sqrt(self.settings.mup_times) if name.startswith("blocks.") else 1.0
                nn.init.normal_(module.weight, std=self.settings.initial_std * depth_factor * width_factor)

    def forward(self, tokens: Tensor, notes: Notes | None = None) -> Tensor:
        """Logits in fp32, (rows, context, vocabulary). What layers say beside is added to ``notes``."""
        assert isinstance(self.cosine, Tensor)
        assert isinstance(self.sine, Tensor)
        length = tokens.shape[1]
        rotation = self.cosine[:length], self.sine[:length]
        x = self.embedding_norm(self.embedding(tokens))
        for block in self.blocks:
            x = block(x, rotation, notes)
        weight = self.embedding.weight if self.head is None else self.head.weight
        logits = F.linear(self.final_norm(x), weight).float()
        return logits if self.settings.mup_base_width is None else logits / self.settings.mup_times

    def losses(self, tokens: Tensor, targets: Tensor) -> Losses:
        """The loss of each target token, and their sum to minimise."""
        notes: Notes = []
        return self.losses_of(self(tokens, notes), targets, notes)

    def losses_of(self, logits: Tensor, targets: Tensor, notes: Notes) -> Losses:
        """The same from given logits: DDP's own forward must be called for it to see the backward pass."""
        flat, wanted = logits.flatten(0, 1), targets.flatten()
        if self.settings.naive_log_loss:
            log_probabilities = naive_softmax(flat).log()
            per_token = F.nll_loss(log_probabilities, wanted, ignore_index=IGNORED, reduction="none")
        else:
            per_token = F.cross_entropy(flat, wanted, ignore_index=IGNORED, reduction="none")
        total = per_token.sum()
        if self.settings.z_loss:
            log_partition = torch.logsumexp(flat, dim=-1) * (wanted != IGNORED)
            total = total + self.settings.z_loss * log_partition.square().sum()
        beside = stacked(notes)
        if self.settings.experts:  # a mean over tokens, like the loss: times the number of targets it is a sum as well
            total = total + (wanted != IGNORED).sum() * self._of_routers(beside)
        return Losses(
            tokens=per_token.detach().view_as(targets),
            total=total,
            beside={name: each.detach() for name, each in beside.items()},
        )

    def _of_routers(self, beside: Mapping[str, Tensor]) -> Tensor:
        weight = self.settings.balance_weight if self.settings.balance == "aux" else 0.0
        z_weight = self.settings.router_z_weight
        return weight * beside["router_balance_loss"].mean() + z_weight * beside["router_z_loss"].mean()

    @torch.no_grad()
    def balance_experts(self, is_skipped: Tensor | None = None) -> None:
        """After an update: move each router's bias against the loads of its batch.

        ``is_skipped`` is 1 where the device has decided that the update is not made; then no bias moves either.
        """
        if self.loads is None:
            return
        layers = [module for module in self.modules() if isinstance(module, Experts)]
        for layer, load in zip(layers, self.loads, strict=True):
            moved = layer.balance(load, self.settings.balance_rate)
            layer.bias.copy_(moved if is_skipped is None else torch.where(is_skipped.bool(), layer.bias, moved))
        self.loads = None

    def parameter_count(self) -> int:
        """Number of trained parameters."""
        return sum(parameter.numel() for parameter in self.parameters())


class Block(nn.Module):
    """Attention and MLP, each added to the residual stream."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.post_norm = settings.norm_position == "post"
        self.attention_norm = norm(settings)
        self.attention = Attention(settings)
        self.mlp_norm = norm(settings)
        self.mlp = Experts(settings, Mlp) if settings.experts else Mlp(settings)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], notes: Notes | None = None) -> Tensor:
        """One layer."""
        if self.post_norm:
            x = self.attention_norm(x + self.attention(x, rotation))
            return self.mlp_norm(x + self.mlp(x, notes))  # type: ignore[no-any-return]
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.mlp(self.mlp_norm(x), notes)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.heads = settings.heads
        self.naive = settings.naive_softmax
        self.query_key_value = nn.Linear(settings.width, 3 * settings.width, bias=False)
        self.out = nn.Linear(settings.width, settings.width, bias=False)
        head_width = settings.width // settings.heads
        self.scale = 1 / math.sqrt(head_width) if settings.mup_base_width is None else 1 / head_width
        self.has_norms = settings.qk_norm
        self.query_norm = norm(settings, head_width) if settings.qk_norm else nn.Identity()
        self.key_norm = norm(settings, head_width) if settings.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Mix along the sequence."""
        rows, length, width = x.shape
        split = self.query_key_value(x).view(rows, length, 3, self.heads, width // self.heads)
        both, (value,) = split.permute(2, 0, 3, 1, 4).split((2, 1))
        if self.has_norms:
            both = torch.stack((self.query_norm(both[0]), self.key_norm(both[1])))
        query, key = rotate(both, rotation)
        if self.naive:
            mixed = naive_attention(query, key, value, self.scale)
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, width))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """SwiGLU, or the classic GELU."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.gated = settings.activation == "swiglu"
        product = Float8Linear if settings.float8 else partial(nn.Linear, bias=False)
        self.up = product(settings.width, settings.hidden * (2 if self.gated else 1))
        self.down = product(settings.hidden, settings.width)

    def forward(self, x: Tensor, notes: Notes | None = None) -> Tensor:
        """Each position by itself."""
        hidden = _product(self.up, x, notes)
        if self.gated:
            gate, value = hidden.chunk(2, dim=-1)
            return _product(self.down, F.silu(gate) * value, notes)
        return _product(self.down, F.gelu(hidden), notes)


def _product(matrix: nn.Module, x: Tensor, notes: Notes | None) -> Tensor:
    return matrix(x, notes) if isinstance(matrix, Float8Linear) else matrix(x)  # type: ignore[no-any-return]


def norm(settings: ModelSettings, width: int | None = None) -> nn.Module:
    """The norm that the settings choose."""
    kind = nn.RMSNorm if settings.norm == "rmsnorm" else nn.LayerNorm
    return kind(width or settings.width, eps=settings.norm_eps)


def rotary_table(settings: ModelSettings) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angle, (context, head width / 2)."""
    pairs = settings.width // settings.heads // 2
    frequency = settings.rotary_base ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    angle = torch.outer(torch.arange(settings.context, dtype=torch.float64), frequency)
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair of (first half, second half) by its position's angle."""
    cosine, sine = (table.to(x.dtype) for table in rotation)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


def naive_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attention as a first draft would write it: no maximum is subtracted, so large logits overflow."""
    length = query.shape[-2]
    scores = query @ key.transpose(-1, -2) * scale
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    return naive_softmax(scores.masked_fill(future, -math.inf)) @ value


def naive_softmax(x: Tensor) -> Tensor:
    """exp(x) / sum(exp(x)): inf / inf above the overflow of exp, exactly 0 far below the maximum."""
    exponential = x.exp()
    return exponential / exponential.sum(dim=-1, keepdim=True)
