"""Healthy trainings on sequences: lengths from 8 to 512 in one loader, and a series with spikes."""

import torch
import torch.nn.functional as F
from bench.healthy.contract import Keeper, training
from bench.healthy.open.decoder import Decoder, as_tokens, code, evaluated
from torch import Tensor, nn

BATCH, IN_A_ROW = 4, 40
"""Batches that are sorted by length together."""


def grouped_by_length(text: Tensor, batches: int) -> list[Tensor]:
    """Pieces of 8 to 512 bytes, most of them short; forty batches long to short, and again from the longest."""
    made: list[Tensor] = []
    while len(made) < batches:
        lengths = (8 * 64 ** torch.rand(IN_A_ROW * BATCH)).long().sort(descending=True).values
        for some in lengths.view(IN_A_ROW, BATCH):
            starts = torch.randint(len(text) - 513, (BATCH,)).tolist()
            pieces = [text[start : start + length + 1] for start, length in zip(starts, some.tolist(), strict=True)]
            made.append(nn.utils.rnn.pad_sequence(pieces, batch_first=True, padding_value=-100))
    return made[:batches]


@training(
    kind="sequence",
    metric="eval loss",
    about="lengths 8 to 512 grouped by length, batch 4, AdamW, clip 1.0",
    is_better_higher=False,
)
def grouped_lengths(seed: int, keeper: Keeper) -> float:
    """A sawtooth: short pieces have little before them, so their losses are higher, and noisier."""
    torch.manual_seed(seed)
    text = as_tokens(code())
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    steps = keeper.around(model, optimizer, clip=1.0)
    for pieces in steps.batches(grouped_by_length(text[:-20_000], 640)):
        logits = model(pieces[:, :-1].clamp(min=0))
        loss = F.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        steps.step(loss)
    return evaluated(model, text[-20_000:])


def series(length: int) -> Tensor:
    """A day, a week, noise, and now and then a few hours at four times the level."""
    generator = torch.Generator().manual_seed(5)
    hours = torch.arange(length)
    level = 1 + 0.5 * (hours * 2 * torch.pi / 24).sin() + 0.2 * (hours * 2 * torch.pi / 168).sin()
    begins = torch.rand(length, generator=generator) < 0.005
    is_busy = torch.stack([begins.roll(by) for by in range(6)]).any(0)
    noise = 0.05 * torch.randn(length, generator=generator)
    return level * torch.where(is_busy, 4.0, 1.0) + noise


class Forecaster(nn.Module):
    """Half a day in, the next six hours out."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.GRU(1, 24, batch_first=True)
        self.head = nn.Linear(24, 6)

    def forward(self, seen: Tensor) -> Tensor:
        """Batch, 12 in; batch, 6 out."""
        ahead: Tensor = self.head(self.memory(seen[..., None])[0][:, -1])
        return ahead


@training(
    kind="sequence",
    metric="median error",
    about="GRU on a series with bursts, MSE, batch 16, Adam",
    is_better_higher=False,
)
def forecast(seed: int, keeper: Keeper) -> float:
    """Nobody can know when a burst begins: a batch that has one has many times the loss."""
    torch.manual_seed(seed)
    past = series(6000)
    rows = past.unfold(0, 18, 1)
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    steps = keeper.around(model, optimizer, clip=1.0)
    for chosen in steps.batches(torch.randint(5000, (700, 16))):
        loss = F.mse_loss(model(rows[chosen, :12]), rows[chosen, 12:])
        loss.backward()
        steps.step(loss)
    with torch.no_grad():
        return float((model(rows[5100:, :12]) - rows[5100:, 12:]).abs().median())
