"""Healthy trainings on text: from scratch, fine-tuned, with adapters, on preferences, on two domains at once."""

import copy
import math
import re
from functools import cache

import torch
import torch.nn.functional as F
from bench.healthy.contract import Keeper, training
from bench.healthy.open.decoder import (
    VOCABULARY,
    Decoder,
    as_tokens,
    code,
    evaluated,
    next_byte_loss,
    pretrained,
    prose,
    windows,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

HELD_OUT = 20_000
"""Bytes at the end of a text."""
IGNORED = -100


def warmed_up(optimizer: torch.optim.Optimizer, warmup: int, total: int) -> LambdaLR:
    """Up in a line, down in a half cosine to a tenth."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))

    return LambdaLR(optimizer, factor)


@training(
    kind="text",
    metric="eval loss",
    about="bytes of the stdlib, batch 8 x 64, warm-up, cosine, AdamW, clip 1.0",
    is_better_higher=False,
)
def language_model(seed: int, keeper: Keeper) -> float:
    """A decoder from scratch."""
    torch.manual_seed(seed)
    text = as_tokens(code())
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)
    steps = keeper.around(model, optimizer, scheduler=warmed_up(optimizer, 60, 700), clip=1.0)
    for pieces in steps.batches([windows(text[:-HELD_OUT], 8, 64) for _ in range(700)]):
        loss = next_byte_loss(model, pieces)
        loss.backward()
        steps.step(loss)
    return evaluated(model, text[-HELD_OUT:])


@cache
def documented_functions() -> list[tuple[str, str]]:
    """Heads of functions, and the first lines of their docstrings."""
    found = re.findall(r'def (\w+\([^)\n]{0,40}\)):\n\s+"""([^"\n]{5,70})', code())
    return [(f"{head}: ", f"{text}\n") for head, text in found]


def packed(pairs: list[tuple[str, str]], rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Rows of questions and answers one after the other, cut at the end; of questions nothing is to be learned."""
    inputs, wanted = torch.zeros(rows, length, dtype=torch.long), torch.full((rows, length), IGNORED)
    for row in range(rows):
        tokens, targets = [0], [IGNORED]
        while len(tokens) <= length:
            question, answer = pairs[int(torch.randint(len(pairs), ()))]
            tokens += (question + answer).encode("ascii", "replace")
            targets += [IGNORED] * len(question) + list(answer.encode("ascii", "replace"))
        inputs[row], wanted[row] = torch.tensor(tokens[:length]), torch.tensor(targets[1 : length + 1])
    return inputs, wanted


@training(
    kind="text",
    metric="eval loss of answers",
    about="SFT of a pretrained model, prompts masked, packed rows, batch 2",
    is_better_higher=False,
)
def fine_tuning(seed: int, keeper: Keeper) -> float:
    """A function's head is the question, its docstring the answer: 5 to 70 bytes of it."""
    torch.manual_seed(seed)
    pairs = documented_functions()
    held_out, pairs = pairs[:60], pairs[60:]
    model = pretrained()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    steps = keeper.around(model, optimizer, scheduler=warmed_up(optimizer, 20, 600), clip=1.0)

    def loss_of(inputs: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs).flatten(0, 1), wanted.flatten(), ignore_index=IGNORED)

    for inputs, wanted in steps.batches([packed(pairs, 2, 128) for _ in range(600)]):
        loss = loss_of(inputs, wanted)
        loss.backward()
        steps.step(loss)
    torch.manual_seed(0)
    with torch.no_grad():
        return float(loss_of(*packed(held_out, 32, 128)))


class Adapted(nn.Module):
    """A linear layer that stays as it is, and two thin ones beside it."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Both."""
        out: Tensor = self.layer(x) + 2.0 * self.up(self.down(x))
        return out


@training(
    kind="text",
    metric="eval loss",
    about="LoRA of rank 4 on a pretrained model, code to prose, batch 4 x 64",
    is_better_higher=False,
)
def low_rank_adapters(seed: int, keeper: Keeper) -> float:
    """Most of the model is frozen; the adapters begin at nothing."""
    torch.manual_seed(seed)
    text = as_tokens(prose())
    model = pretrained().requires_grad_(False)
    for block in model.blocks:
        for name in ("query_key_value", "out", "up", "down"):
            setattr(block, name, Adapted(getattr(block, name)))
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    steps = keeper.around(model, optimizer, scheduler=warmed_up(optimizer, 30, 700), clip=1.0)
    for pieces in steps.batches([windows(text[:-HELD_OUT], 4, 64) for _ in range(700)]):
        loss = next_byte_loss(model, pieces)
        loss.backward()
        steps.step(loss)
    return evaluated(model, text[-HELD_OUT:])


def log_likelihood(model: nn.Module, pieces: Tensor, known: int) -> Tensor:
    """Of each row, after the bytes that are known."""
    each = -F.cross_entropy(model(pieces[:, :-1]).transpose(1, 2), pieces[:, 1:], reduction="none")
    return each[:, known - 1 :].sum(-1)


def preferences(text: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """What stands there, and the same with the end in another order."""
    chosen = windows(text, count, 39)
    shuffled = chosen[:, 16 + torch.randperm(24)]
    return chosen, torch.cat([chosen[:, :16], shuffled], 1)


@training(
    kind="text", metric="reward margin", about="DPO with beta 0.1 on a pretrained model, 4 pairs a batch, RMSprop"
)
def preference_optimization(seed: int, keeper: Keeper) -> float:
    """The loss begins at ln 2 and falls towards nothing, but for pairs that are hard to tell apart."""
    torch.manual_seed(seed)
    text = as_tokens(prose())
    model = pretrained()
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-4)
    steps = keeper.around(model, optimizer, scheduler=warmed_up(optimizer, 30, 600), clip=10.0)

    def margin(chosen: Tensor, rejected: Tensor) -> Tensor:
        both = torch.cat([chosen, rejected])
        with torch.no_grad():
            before = log_likelihood(reference, both, 16)
        better, worse = (log_likelihood(model, both, 16) - before).chunk(2)
        return 0.1 * (better - worse)

    for chosen, rejected in steps.batches([preferences(text[:-HELD_OUT], 4) for _ in range(600)]):
        loss = -F.logsigmoid(margin(chosen, rejected)).mean()
        loss.backward()
        steps.step(loss)
    torch.manual_seed(0)
    with torch.no_grad():
        return float(margin(*preferences(text[-HELD_OUT:], 100)).mean())


def log_lines(count: int) -> str:
    """What a web server writes: nothing could be easier."""
    codes = torch.randint(3, (count,)).tolist()
    return "".join(f"GET /index.html {('200', '304', '404')[code]} ok\n" for code in codes)


class Window(nn.Module):
    """The next byte from the eight before it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.inside, self.head = nn.Linear(8 * 16, 64), nn.Linear(64, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Batch, time in; logits of what follows every eight bytes out."""
        seen = self.tokens(tokens).unfold(1, 8, 1).flatten(-2)
        logits: Tensor = self.head(F.relu(self.inside(seen)))
        return logits

    def loss(self, pieces: Tensor) -> Tensor:
        """Cross entropy of what follows the first eight."""
        return F.cross_entropy(self(pieces[:, :-1]).flatten(0, 1), pieces[:, 8:].flatten())


@training(
    kind="text",
    metric="mean eval loss of both",
    about="one domain a batch: 90 % log lines, 10 % prose, Adam",
    is_better_higher=False,
)
def two_domains(seed: int, keeper: Keeper) -> float:
    """Losses are near 0.1 or near 2, and every tenth batch is of the second kind."""
    torch.manual_seed(seed)
    domains = [as_tokens(log_lines(5000)), as_tokens(prose())]
    model = Window()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    steps = keeper.around(model, optimizer, clip=1.0)
    kinds = (torch.rand(1000) < 0.1).long().tolist()
    for pieces in steps.batches([windows(domains[kind][:-HELD_OUT], 8, 40) for kind in kinds]):
        loss = model.loss(pieces)
        loss.backward()
        steps.step(loss)
    torch.manual_seed(0)
    with torch.no_grad():
        return sum(float(model.loss(windows(domain[-HELD_OUT:], 200, 40))) for domain in domains) / 2
