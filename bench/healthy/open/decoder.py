"""A small language model over bytes, the text that every Python brings, and what the model knows before fine-tuning."""

import sysconfig
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 128
WIDTH, HEADS, LONGEST = 32, 2, 512
CODE = ("argparse", "ast", "calendar", "configparser", "datetime", "decimal", "doctest", "inspect", "pickle", "tarfile")


class Block(nn.Module):
    """Attention and a layer, each on what was normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_layer = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Batch, time, width."""
        parts = self.query_key_value(self.before_attention(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        out: Tensor = x + self.down(F.gelu(self.up(self.before_layer(x))))
        return out


class Decoder(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.Sequential(Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        for each in (self.tokens, self.places):
            nn.init.normal_(each.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Batch, time in; batch, time, vocabulary out."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def as_tokens(text: str) -> Tensor:
    """A byte a token; what is not ASCII is a question mark."""
    return torch.tensor(list(text.encode("ascii", "replace")))


@cache
def code() -> str:
    """Modules of the standard library, one after the other."""
    library = Path(sysconfig.get_path("stdlib"))
    return "".join((library / f"{name}.py").read_text() for name in CODE)


@cache
def prose() -> str:
    """The documentation that ``help()`` shows."""
    from pydoc_data.topics import topics

    return "\n".join(topics.values())


def windows(text: Tensor, count: int, length: int) -> Tensor:
    """Pieces of a text from anywhere, each with the byte after it."""
    starts = torch.randint(len(text) - length, (count, 1))
    return text[starts + torch.arange(length + 1)]


def next_byte_loss(model: nn.Module, pieces: Tensor) -> Tensor:
    """Cross entropy, in nats a byte."""
    return F.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


@torch.no_grad()
def evaluated(model: nn.Module, text: Tensor, length: int = 64) -> float:
    """The loss on a text that was held out, the same pieces every time."""
    whole = len(text) // (length + 1)
    return float(next_byte_loss(model, text[: whole * (length + 1)].view(whole, length + 1)[:200]))


@cache
def pretrained_weights() -> dict[str, Tensor]:
    """Of a model that has read some code: the same for every seed, as a checkpoint that was downloaded."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model, text = Decoder(), as_tokens(code())
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=600)
        for _ in range(600):
            loss = next_byte_loss(model, windows(text, 8, 64))
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return model.state_dict()


def pretrained() -> Decoder:
    """A copy of that model."""
    model = Decoder()
    model.load_state_dict({name: value.clone() for name, value in pretrained_weights().items()})
    return model
