"""Fine-tunes of a small model that was trained before: a right one, and one with a mistake that people make."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from sealegs.lab.model import Transformer
from sealegs.lab.settings import ModelSettings
from sealegs.replay.subject import Subject

BOS, TOKENS, LENGTH, ROWS = 0, 48, 24, 8
MODEL = ModelSettings(vocabulary=TOKENS, context=LENGTH + 2, layers=2, width=32, heads=2, hidden=64)
BEFORE, STEPS = 150, 400
LR = 1e-4


def right() -> Subject:
    """One token at the beginning of a row, as before."""
    return _tuned(begins=1)


def doubled() -> Subject:
    """The chat template writes a token for the beginning, and the tokenizer adds its own."""
    return _tuned(begins=2)


def _tuned(*, begins: int) -> Subject:
    model = Transformer(MODEL)
    model.load_state_dict(_trained_before())
    batches = _batches(_chain(2, like=_chain(1)), STEPS, seed=2, begins=begins)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    return Subject(
        model=model, optimizers=[optimizer], loss=lambda batch: _loss(model, batch), clip=1.0, batches=batches
    )


@cache
def _trained_before() -> dict[str, Tensor]:
    """The weights that the fine-tune begins with."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():  # it may be asked for while a loss is measured
        torch.manual_seed(1)
        model = Transformer(MODEL)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
        for batch in _batches(_chain(1), BEFORE, seed=1, begins=1):
            _loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def _loss(model: Transformer, batch: dict[str, Any]) -> Tensor:
    tokens = batch["tokens"]
    logits = model(tokens[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _chain(seed: int, like: Tensor | None = None) -> Tensor:
    """Which token follows which, by chance; mostly as another chain, if one is given."""
    draws = torch.Generator().manual_seed(seed)
    odds = (3 * torch.randn(TOKENS, TOKENS, generator=draws)).softmax(1)
    return odds if like is None else 0.7 * like + 0.3 * odds


def _batches(odds: Tensor, count: int, *, seed: int, begins: int) -> list[dict[str, Any]]:
    """Rows of a chain, after so many tokens that say where a row begins."""
    draws = torch.Generator().manual_seed(seed)
    rows = [torch.randint(1, TOKENS, (count * ROWS,), generator=draws)]
    for _ in range(LENGTH - 1):
        rows.append(torch.multinomial(odds[rows[-1]], 1, generator=draws)[:, 0])
    tokens = torch.cat([torch.full((count * ROWS, begins), BOS), torch.stack(rows, 1)], 1)
    return [{"tokens": each} for each in tokens.split(ROWS)]
