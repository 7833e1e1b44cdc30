"""A seed and a keeper in, held-out quality out: symbols without alignment, lists to sort, loads to forecast, text."""

import math

import torch
import torch.nn.functional as F
from bench.healthy.contract import Keeper, training
from bench.healthy.frozen.sources import index_batches, stdlib_text
from torch import Tensor, nn

BLANK = 0


def utterances(count: int, shapes: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Words of two to six symbols; each is held for some frames of noise around its shape."""
    spoken = []
    for _ in range(count):
        word = torch.randint(1, len(shapes), (int(torch.randint(2, 7, ())),))
        held = torch.randint(2, 6, word.shape)
        frames = shapes[word].repeat_interleave(held, 0)
        pause = torch.zeros(int(torch.randint(0, 4, ())), frames.shape[1])
        frames = torch.cat([pause, frames, pause])
        spoken.append((frames + 0.6 * torch.randn_like(frames), word))
    return spoken


def edits(heard: list[int], said: list[int]) -> int:
    """Levenshtein's distance."""
    row = list(range(len(said) + 1))
    for number, symbol in enumerate(heard, 1):
        before, row[0] = row[0], number
        for place, wanted in enumerate(said, 1):
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, before + (symbol != wanted))
    return row[-1]


@training(
    kind="sequence",
    metric="symbol error rate",
    about="CTC on held symbols without alignment, repeats without a pause between, batch 8, Adam, clip 5.0",
    is_better_higher=False,
)
def unaligned_symbols(seed: int, keeper: Keeper) -> float:
    """A convolution over frames; repeated symbols need a blank that the signal does not always have."""
    torch.manual_seed(seed)
    shapes = torch.randn(7, 6)
    train, test = utterances(1500, shapes), utterances(200, shapes)
    model = nn.Sequential(
        nn.Conv1d(6, 32, 5, padding=2), nn.ReLU(), nn.Conv1d(32, 32, 5, padding=2), nn.ReLU(), nn.Conv1d(32, 7, 1)
    )
    criterion = nn.CTCLoss(blank=BLANK, zero_infinity=True)
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=3e-3), clip=5.0)
    for rows in steps.batches(index_batches(len(train), 8, 900)):
        frames, words = zip(*(train[row] for row in rows.tolist()), strict=True)
        padded = nn.utils.rnn.pad_sequence(list(frames), batch_first=True)
        log_chances = F.log_softmax(model(padded.mT), 1).permute(2, 0, 1)
        lengths = torch.tensor([len(each) for each in frames]), torch.tensor([len(word) for word in words])
        loss = criterion(log_chances, torch.cat(words), *lengths)
        loss.backward()
        steps.step(loss)
    wrong = 0
    with torch.no_grad():
        for signal, word in test:
            likeliest = model(signal.T[None])[0].argmax(0).unique_consecutive()
            wrong += edits(likeliest[likeliest != BLANK].tolist(), word.tolist())
    return wrong / sum(len(word) for _, word in test)


class Sorter(nn.Module):
    """Numbers in, for every place the logits of the number that belongs there when sorted."""

    def __init__(self, wide: int = 32) -> None:
        super().__init__()
        self.number = nn.Embedding(10, wide)
        self.place = nn.Embedding(12, wide)
        self.mix = nn.TransformerEncoderLayer(wide, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.out = nn.Linear(wide, 10)

    def forward(self, numbers: Tensor) -> Tensor:
        """Logits by place."""
        logits: Tensor = self.out(self.mix(self.number(numbers) + self.place.weight[: numbers.shape[1]]))
        return logits


@training(
    kind="sequence",
    metric="accuracy",
    about="sorting lists of 3, then 6, 9 and 12 numbers: the loss steps up with every stage; transformer, AdamW",
)
def sorting_curriculum(seed: int, keeper: Keeper) -> float:
    """From short lists to long ones."""
    torch.manual_seed(seed)
    model = Sorter()
    steps = keeper.around(model, torch.optim.AdamW(model.parameters(), lr=3e-3), clip=1.0)
    batches = [torch.randint(0, 10, (32, length)) for length in (3, 6, 9, 12) for _ in range(200)]
    for numbers in steps.batches(batches):
        loss = F.cross_entropy(model(numbers).flatten(0, 1), numbers.sort(1).values.flatten())
        loss.backward()
        steps.step(loss)
    model.eval()
    asked = torch.randint(0, 10, (500, 12))
    with torch.no_grad():
        return float((model(asked).argmax(-1) == asked.sort(1).values).float().mean())


def load_curve(hours: int) -> Tensor:
    """A daily and a weekly rhythm with noise of heavy tails, and now and then a meter that reads nonsense."""
    hour = torch.arange(hours).float()
    rhythm = torch.sin(2 * math.pi * hour / 24) + 0.5 * torch.sin(2 * math.pi * hour / 168)
    tails = torch.distributions.StudentT(2.5).sample((hours,))
    nonsense = (torch.rand(hours) < 0.004) * 15 * torch.randn(hours)
    return rhythm + 0.15 * tails + nonsense


def pinball(predicted: Tensor, wanted: Tensor, quantiles: Tensor) -> Tensor:
    """Mean quantile loss over horizons and quantiles."""
    off = wanted[..., None] - predicted
    return torch.maximum(quantiles * off, (quantiles - 1) * off).mean()


@training(
    kind="time series",
    metric="pinball loss",
    about="six hours ahead at three quantiles, heavy tails and broken readings in inputs and targets, batch 16, Adam",
    is_better_higher=False,
)
def load_quantiles(seed: int, keeper: Keeper) -> float:
    """Forecasts from the last two days."""
    torch.manual_seed(seed)
    windows = load_curve(9000).unfold(0, 54, 1)
    train, test = windows[:6000], windows[6100:]
    quantiles = torch.tensor([0.1, 0.5, 0.9])
    model = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 18), nn.Unflatten(1, (6, 3)))
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    for rows in steps.batches(index_batches(len(train), 16, 1600)):
        loss = pinball(model(train[rows, :48]), train[rows, 48:], quantiles)
        loss.backward()
        steps.step(loss)
    with torch.no_grad():
        return pinball(model(test[:, :48]), test[:, 48:], quantiles).item()


class CharacterLstm(nn.Module):
    """Characters in, logits of the next ones out, with a state that is carried on."""

    def __init__(self, kinds: int, wide: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(kinds, 24)
        self.body = nn.LSTM(24, wide, batch_first=True)
        self.out = nn.Linear(wide, kinds)

    def forward(self, text: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits and the state after the last character."""
        out, (hidden, cell) = self.body(self.embed(text), (hidden, cell))
        return self.out(out), hidden.detach(), cell.detach()


class Carried(nn.Module):
    """The state between two windows of text."""

    hidden: Tensor
    cell: Tensor

    def __init__(self, streams: int, wide: int = 48) -> None:
        super().__init__()
        self.register_buffer("hidden", torch.zeros(1, streams, wide))
        self.register_buffer("cell", torch.zeros(1, streams, wide))


@training(
    kind="text",
    metric="nats a character",
    about="LSTM, truncated backpropagation over 16 characters, state carried on, SGD at rate 10, clip 0.25",
    is_better_higher=False,
)
def truncated_bptt(seed: int, keeper: Keeper) -> float:
    """Eight streams of source text, read in order."""
    torch.manual_seed(seed)
    text = stdlib_text("textwrap.py", "shlex.py", "fnmatch.py", "heapq.py", "bisect.py")
    kinds = sorted(set(text))
    codes = torch.tensor([kinds.index(letter) for letter in text])
    held, length = 8000, 16
    streams, test = codes[held:][: (len(codes) - held) // 8 * 8].view(8, -1), codes[None, :held]
    model, carried = CharacterLstm(len(kinds)), Carried(8)
    steps = keeper.around(model, torch.optim.SGD(model.parameters(), lr=10.0), clip=0.25, also={"carried": carried})
    windows = (streams.shape[1] - 1) // length
    for number in steps.batches(range(900)):
        start = number % windows * length
        seen, wanted = streams[:, start : start + length], streams[:, start + 1 : start + length + 1]
        logits, hidden, cell = model(seen, carried.hidden, carried.cell)
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        loss.backward()
        if not steps.is_probe:
            carried.hidden.copy_(hidden)
            carried.cell.copy_(cell)
        steps.step(loss)
    with torch.no_grad():
        logits, _, _ = model(test[:, :-1], torch.zeros(1, 1, 48), torch.zeros(1, 1, 48))
        return F.cross_entropy(logits[0], test[0, 1:]).item()
