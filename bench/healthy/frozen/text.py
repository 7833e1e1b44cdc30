"""A seed and a keeper in, held-out quality out: words, snippets and characters of the standard library's source."""

import re
from collections import Counter

import torch
import torch.nn.functional as F
from bench.healthy.contract import Keeper, training
from bench.healthy.frozen.sources import accuracy, index_batches, stdlib_text
from torch import Tensor, nn


def words_of(text: str) -> list[str]:
    """Names and words in lower case."""
    return re.findall(r"[a-z_]+", text.lower())


class SkipGram(nn.Module):
    """A vector of a word in the middle, another of it as a neighbour."""

    def __init__(self, words: int, wide: int = 24) -> None:
        super().__init__()
        self.middle, self.around = nn.Embedding(words, wide), nn.Embedding(words, wide)
        nn.init.uniform_(self.middle.weight, -0.5 / wide, 0.5 / wide)
        nn.init.zeros_(self.around.weight)

    def forward(self, middle: Tensor, neighbour: Tensor, strangers: Tensor) -> Tensor:
        """Loss of telling the neighbour from words drawn by chance (Mikolov et al. 2013)."""
        at = self.middle(middle)
        near = (at * self.around(neighbour)).sum(1)
        far = torch.einsum("bw,bnw->bn", at, self.around(strangers))
        return -(F.logsigmoid(near) + F.logsigmoid(-far).sum(1)).mean()


@training(
    kind="text",
    metric="negative-sampling loss",
    about="skip-gram with five strangers on source text, frequencies by Zipf, batch 128, Adagrad",
    is_better_higher=False,
)
def skip_gram(seed: int, keeper: Keeper) -> float:
    """Words of argparse and its neighbours, within three places."""
    torch.manual_seed(seed)
    words = words_of(stdlib_text("argparse.py", "inspect.py", "typing.py", "tarfile.py"))
    ranked = Counter(words).most_common(1200)
    number_of = {word: number for number, (word, _) in enumerate(ranked)}
    text = torch.tensor([number_of[word] for word in words if word in number_of])
    stranger_chance = torch.tensor([float(count) for _, count in ranked]) ** 0.75
    offsets = torch.cat([torch.arange(-3, 0), torch.arange(1, 4)])
    places = torch.arange(3, len(text) - 3)
    pairs = torch.stack([text[places[:, None]].expand(-1, 6), text[places[:, None] + offsets]], -1).reshape(-1, 2)
    pairs = pairs[torch.randperm(len(pairs))]
    test, train = pairs[:4000], pairs[4000:]
    model = SkipGram(len(ranked))
    steps = keeper.around(model, torch.optim.Adagrad(model.parameters(), lr=0.3))
    for rows in steps.batches(index_batches(len(train), 128, 1200)):
        strangers = torch.multinomial(stranger_chance, 128 * 5, replacement=True).view(128, 5)
        loss = model(*train[rows].unbind(1), strangers)
        loss.backward()
        steps.step(loss)
    with torch.no_grad():
        strangers = torch.multinomial(stranger_chance, 4000 * 5, replacement=True).view(4000, 5)
        return float(model(*test.unbind(1), strangers))


TOPICS = (
    ("email/message.py", "smtplib.py", "imaplib.py", "poplib.py"),
    ("asyncio/base_events.py", "asyncio/tasks.py", "asyncio/streams.py", "asyncio/events.py"),
    ("decimal.py", "_pydecimal.py", "fractions.py", "statistics.py"),
    ("tarfile.py", "gzip.py", "bz2.py", "lzma.py", "shutil.py"),
)


def snippets(buckets: int) -> list[tuple[Tensor, int]]:
    """Runs of 3 to 40 words, each with the number of its topic; words are hashed."""
    found = []
    for topic, files in enumerate(TOPICS):
        words = words_of(stdlib_text(*files))[:14_000]
        hashed = torch.tensor([sum((place + 1) * ord(c) for place, c in enumerate(w)) % buckets + 1 for w in words])
        start = 0
        while start < len(hashed):
            # Most snippets are short, a few are long, as comments and bodies are.
            length = 3 + min(37, int(torch.empty(()).exponential_(1 / 9)))
            found.append((hashed[start : start + length], topic))
            start += length
    return found


class SnippetReader(nn.Module):
    """Embeddings through a convolution, then the largest of each feature over the words that are there."""

    def __init__(self, buckets: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(buckets + 1, 32, padding_idx=0)
        self.mix = nn.Conv1d(32, 32, 3, padding=1)
        self.out = nn.Linear(32, len(TOPICS))

    def forward(self, words: Tensor) -> Tensor:
        """Logits by topic; 0 is padding."""
        seen = torch.relu(self.mix(self.embed(words).mT)).masked_fill((words == 0)[:, None], 0)
        logits: Tensor = self.out(seen.amax(2))
        return logits


@training(
    kind="text",
    metric="accuracy",
    about="topics of snippets of 3 to 40 words, padded, bfloat16 autocast on the CPU, batch 16, AdamW, clip 1.0",
)
def padded_snippets(seed: int, keeper: Keeper) -> float:
    """Which part of the library is this from."""
    torch.manual_seed(seed)
    labelled = snippets(2000)
    labelled = [labelled[row] for row in torch.randperm(len(labelled)).tolist()]
    test, train = labelled[:800], labelled[800:]
    model = SnippetReader(2000)
    steps = keeper.around(model, torch.optim.AdamW(model.parameters(), lr=2e-3), clip=1.0)
    for rows in steps.batches(index_batches(len(train), 16, 900)):
        texts, topics = zip(*(train[row] for row in rows.tolist()), strict=True)
        padded = nn.utils.rnn.pad_sequence(list(texts), batch_first=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(padded), torch.tensor(topics))
        loss.backward()
        steps.step(loss)
    texts, topics = zip(*test, strict=True)
    with torch.no_grad():
        return accuracy(model(nn.utils.rnn.pad_sequence(list(texts), batch_first=True)), torch.tensor(topics))


CONTEXT = 8


def windows_of(text: str) -> Tensor:
    """Every run of characters of a text, one longer than the context."""
    codes = torch.tensor([min(ord(letter), 127) for letter in text])
    return codes.unfold(0, CONTEXT + 1, 1)


def four_domains() -> list[Tensor]:
    """Code, prose of comments and strings, hexadecimal noise, and ruled lines."""
    code = stdlib_text("heapq.py", "bisect.py", "queue.py", "sched.py")
    prose = "\n".join(re.findall(r"[A-Z][a-z ,']{30,}[.]", stdlib_text("argparse.py", "inspect.py", "tarfile.py")))
    noise = "".join("0123456789abcdef"[k] for k in torch.randint(16, (12_000,)).tolist())
    ruled = ("-" * 60 + "\n" + "=" * 60 + "\n") * 60
    return [windows_of(text) for text in (code, prose, noise, ruled)]


@training(
    kind="text",
    metric="mean nats a character",
    about="each batch of 48 is from one of four domains, with losses from near 0 to 2.8 nats; Adam, clip 1.0",
    is_better_higher=False,
)
def domains_by_batch(seed: int, keeper: Keeper) -> float:
    """The next character after eight, in whichever domain the batch is from."""
    torch.manual_seed(seed)
    shuffled = [windows[torch.randperm(len(windows))] for windows in four_domains()]
    test, train = [each[:600] for each in shuffled], [each[600:] for each in shuffled]
    model = nn.Sequential(
        nn.Embedding(128, 12), nn.Flatten(), nn.Linear(12 * CONTEXT, 96), nn.ReLU(), nn.Linear(96, 128)
    )
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=3e-3), clip=1.0)
    chance = torch.tensor([0.4, 0.3, 0.15, 0.15])
    domains = torch.multinomial(chance, 1400, replacement=True).tolist()
    batches = [train[domain][torch.randint(len(train[domain]), (48,))] for domain in domains]
    for windows in steps.batches(batches):
        loss = F.cross_entropy(model(windows[:, :-1]), windows[:, -1])
        loss.backward()
        steps.step(loss)
    with torch.no_grad():
        losses = [F.cross_entropy(model(windows[:, :-1]), windows[:, -1]) for windows in test]
    return float(torch.stack(losses).mean())
