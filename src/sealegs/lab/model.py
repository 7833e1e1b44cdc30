"""The reference decoder, with a switch for each stability margin: logits and per-token losses from token ids."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sealegs.lab.data import IGNORED
from sealegs.lab.settings import ModelSettings


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of one forward pass: sums, so that micro-batches add up and the caller chooses the denominator."""

    tokens: Tensor
    """Cross-entropy of each target token, (rows, context); 0 where the target is ignored."""
    total: Tensor
    """What to minimise: the sum over tokens, z-loss included. Divide by the number of targets of the whole batch."""


class Transformer(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.settings = settings
        self.embedding = nn.Embedding(settings.vocabulary, settings.width)
        self.embedding_norm = norm(settings) if settings.embedding_norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        # post-norm blocks already end in a norm
        self.final_norm = norm(settings) if settings.norm_position == "pre" else nn.Identity()
        self.head = None if settings.tied_head else nn.Linear(settings.width, settings.vocabulary, bias=False)
        cosine, sine = rotary_table(settings)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                # what writes into the residual stream starts narrower, so that its variance does not grow with depth
                writes_residual = name.endswith((".attention.out", ".mlp.down"))
                depth_factor = 1 / math.sqrt(2 * self.settings.layers) if writes_residual else 1.0
                width_factor = 1 / math.sqrt(self.settings.mup_times) if name.startswith("blocks.") else 1.0
                nn.init.normal_(module.weight, std=self.settings.initial_std * depth_factor * width_factor)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits in fp32, (rows, context, vocabulary)."""
        assert isinstance(self.cosine, Tensor)
        assert isinstance(self.sine, Tensor)
        length = tokens.shape[1]
        rotation = self.cosine[:length], self.sine[:length]
        x = self.embedding_norm(self.embedding(tokens))
        for block in self.blocks:
            x = block(x, rotation)
        weight = self.embedding.weight if self.head is None else self.head.weight
        logits = F.linear(self.final_norm(x), weight).float()
        return logits if self.settings.mup_base_width is None else logits / self.settings.mup_times

    def losses(self, tokens: Tensor, targets: Tensor) -> Losses:
        """The loss of each target token, and their sum to minimise."""
        return self.losses_of(self(tokens), targets)

    def losses_of(self, logits: Tensor, targets: Tensor) -> Losses:
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
        return Losses(tokens=per_token.detach().view_as(targets), total=total)

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
        self.mlp = Mlp(settings)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """One layer."""
        if self.post_norm:
            x = self.attention_norm(x + self.attention(x, rotation))
            return self.mlp_norm(x + self.mlp(x))  # type: ignore[no-any-return]
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


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
        self.up = nn.Linear(settings.width, settings.hidden * (2 if self.gated else 1), bias=False)
        self.down = nn.Linear(settings.hidden, settings.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Each position by itself."""
        hidden = self.up(x)
        if self.gated:
            gate, value = hidden.chunk(2, dim=-1)
            return self.down(F.silu(gate) * value)  # type: ignore[no-any-return]
        return self.down(F.gelu(hidden))  # type: ignore[no-any-return]


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
