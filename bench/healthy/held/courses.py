"""Healthy trainings over time: rules that are found all at once, lines of any length, own mistakes, orbits, episodes,
and tasks that are learned to be learned."""

import copy
import io
import math
import sysconfig
import tokenize
from pathlib import Path

import torch
import torch.nn.functional as F
from bench.healthy.contract import Keeper, training
from bench.healthy.held.sources import epochs, layers, numbered
from torch import Tensor, nn

CLOCK = 23


@training(
    kind="algorithmic",
    metric="accuracy on pairs never seen",
    about="addition modulo 23, 60 % of all pairs in every step, weight decay 1.0: known by heart first, then found",
)
def sums_on_a_clock(seed: int, keeper: Keeper) -> float:
    """Grokking (Power et al. 2022): the loss is near nothing long before the rule is found."""
    torch.manual_seed(seed)
    pairs = torch.cartesian_prod(torch.arange(CLOCK), torch.arange(CLOCK))
    pairs, sums = pairs[order := torch.randperm(len(pairs))], pairs.sum(-1)[order] % CLOCK
    known = round(0.6 * len(pairs))
    model = nn.Sequential(nn.Embedding(CLOCK, 32), nn.Flatten(), layers(64, 128, CLOCK))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.98), weight_decay=1.0)
    steps = keeper.around(model, optimizer)
    for _ in steps.batches(range(2400)):
        loss = F.cross_entropy(model(pairs[:known]), sums[:known])
        loss.backward()
        steps.step(loss)
    with torch.no_grad():
        return float((model(pairs[known:]).argmax(-1) == sums[known:]).float().mean())


SYMBOLS, SHOWN = 12, 6


class Recall(nn.Module):
    """Two layers of causal attention, one head each."""

    def __init__(self, wide: int = 32) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, wide), nn.Parameter(0.1 * torch.randn(2 * SHOWN, wide))
        self.attend = nn.ModuleList(nn.Linear(wide, 3 * wide) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(wide) for _ in range(2))
        self.out = nn.Linear(wide, SYMBOLS)

    def forward(self, seen: Tensor) -> Tensor:
        """Logits of what comes after each symbol."""
        x = self.symbols(seen) + self.places[: seen.shape[1]]
        for attend, norm in zip(self.attend, self.norms, strict=True):
            query, key, value = attend(norm(x))[:, None].chunk(3, -1)
            x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True)[:, 0]
        logits: Tensor = self.out(x)
        return logits


@training(
    kind="algorithmic",
    metric="accuracy",
    about="copy six random symbols: on a plateau for hundreds of steps, then known within a few; batch 32, Adam",
)
def copied_symbols(seed: int, keeper: Keeper) -> float:
    """The second time around everything can be known."""
    torch.manual_seed(seed)
    model = Recall()
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=1e-3))

    def asked(count: int) -> tuple[Tensor, Tensor]:
        once = torch.randint(SYMBOLS, (count, SHOWN))
        return torch.cat([once, once], 1)[:, :-1], once

    for seen, wanted in steps.batches([asked(32) for _ in range(1000)]):
        loss = F.cross_entropy(model(seen)[:, SHOWN - 1 :].flatten(0, 1), wanted.flatten())
        loss.backward()
        steps.step(loss)
    seen, wanted = asked(1000)
    with torch.no_grad():
        return float((model(seen)[:, SHOWN - 1 :].argmax(-1) == wanted).float().mean())


def tagged_lines() -> list[tuple[Tensor, Tensor]]:
    """Lines of a module of the standard library; of each character whether it is code, a string or a comment."""
    text = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text(encoding="utf-8")
    tags = [[0] * len(line) for line in text.splitlines()]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = {tokenize.STRING: 1, tokenize.COMMENT: 2}.get(token.type, 0)
        for line in range(token.start[0], token.end[0] + 1) if kind else ():
            first = token.start[1] if line == token.start[0] else 0
            last = token.end[1] if line == token.end[0] else len(tags[line - 1])
            tags[line - 1][first:last] = [kind] * (last - first)
    lines = ((line.encode("ascii", "replace"), tag) for line, tag in zip(text.splitlines(), tags, strict=True))
    return [(torch.tensor(list(line)), torch.tensor(tag)) for line, tag in lines if line.strip()]


class Tagger(nn.Module):
    """Sees more and more around every character, and what is most telling in the whole line."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(128, 16), nn.Linear(48, 3)
        self.near, self.far = nn.Conv1d(16, 24, 5, padding=2), nn.Conv1d(24, 24, 5, padding=8, dilation=4)

    def forward(self, line: Tensor) -> Tensor:
        """Logits by character."""
        seen = F.relu(self.far(F.relu(self.near(self.embed(line).T[None]))))[0].T
        logits: Tensor = self.out(torch.cat([seen, seen.amax(0).expand_as(seen)], -1))
        return logits


@training(
    kind="text",
    metric="share of characters",
    about="one line of source a step, 1 to 79 characters: code, string or comment, of one kind mostly; Adam, clip 1.0",
)
def line_by_line(seed: int, keeper: Keeper) -> float:
    """Some lines are a bracket, others the middle of a docstring, which nothing in them tells from a comment."""
    torch.manual_seed(seed)
    lines = tagged_lines()
    order = torch.randperm(len(lines)).tolist()
    test, train = [lines[row] for row in order[:300]], [lines[row] for row in order[300:]]
    model = Tagger()
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=3e-3), clip=1.0)
    for row in steps.batches(epochs(len(train), 1, 1600)):
        line, tags = train[int(row)]
        loss = F.cross_entropy(model(line), tags)
        loss.backward()
        steps.step(loss)
    with torch.no_grad():
        right = torch.cat([model(line).argmax(-1) == tags for line, tags in test])
    return float(right.float().mean())


class Reverser(nn.Module):
    """Reads symbols, then writes them, each after the one that it wrote or was shown before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.read = nn.Embedding(11, 16), nn.GRU(16, 48, batch_first=True)
        self.write, self.out = nn.GRUCell(16, 48), nn.Linear(48, 10)

    def forward(self, seen: Tensor, wanted: Tensor, shown: float) -> Tensor:
        """Logits of what is written; a share of what came before is shown as it should have been."""
        state = self.read(self.embed(seen))[1][0]
        before, written = torch.full((len(seen),), 10), []
        for right in wanted.unbind(1):
            state = self.write(self.embed(before), state)
            written.append(self.out(state))
            before = torch.where(torch.rand(len(seen)) < shown, right, written[-1].argmax(-1))
        return torch.stack(written, 1)


@training(
    kind="sequence",
    metric="share of symbols",
    about="scheduled sampling: a walk backwards, teacher forcing fades from 1 to 0 in 500 steps; GRU, Adam, clip 1.0",
)
def own_mistakes(seed: int, keeper: Keeper) -> float:
    """Numbers in a random walk: the one before says much, until it is the model's own."""
    torch.manual_seed(seed)

    def walks(count: int) -> Tensor:
        return (torch.randint(10, (count, 1)) + torch.randint(-1, 3, (count, 4)).cumsum(1)) % 10

    model = Reverser()
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=2e-3), clip=1.0)
    for number, seen in steps.batches(numbered([walks(32) for _ in range(700)])):
        wanted = seen.flip(1)
        loss = F.cross_entropy(model(seen, wanted, max(1 - number / 500, 0.0)).flatten(0, 1), wanted.flatten())
        loss.backward()
        steps.step(loss)
    seen = walks(500)
    with torch.no_grad():
        return float((model(seen, seen.flip(1), 0.0).argmax(-1) == seen.flip(1)).float().mean())


def followed(slope: nn.Module, state: Tensor, moments: int, unit: float = 0.2) -> Tensor:
    """Where one comes to along a slope, with a look half-way of each moment."""
    path = []
    for _ in range(moments):
        state = state + unit * slope(state + unit / 2 * slope(state))
        path.append(state)
    return torch.stack(path, 1)


class Pendulum(nn.Module):
    """How it really swings."""

    def forward(self, state: Tensor) -> Tensor:
        """Angle and speed in, their slopes out."""
        angle, speed = state.unbind(-1)
        return torch.stack([speed, -2 * angle.sin() - 0.1 * speed], -1)


@training(
    kind="physics",
    metric="error after 14 moments",
    about="neural ODE of a pendulum by midpoints, followed over 2, then 5, then 12 moments: the loss steps up; Adam",
    is_better_higher=False,
)
def longer_orbits(seed: int, keeper: Keeper) -> float:
    """Errors add up along the way, and with them gradients."""
    torch.manual_seed(seed)
    starts = torch.rand(400, 2) * 4 - 2
    with torch.no_grad():
        paths = followed(Pendulum(), starts, 14)
    model = layers(2, 32, 32, 2, between=nn.Tanh)
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=3e-3))
    for number, rows in steps.batches(numbered(epochs(300, 24, 900))):
        moments = (2, 5, 12)[number // 300]
        wanted = paths[rows, :moments] + 0.02 * torch.randn(24, moments, 2)
        loss = F.mse_loss(followed(model, starts[rows], moments), wanted)
        loss.backward()
        steps.step(loss)
    with torch.no_grad():
        return float((followed(model, starts[300:], 14) - paths[300:])[:, -1].norm(dim=-1).mean())


INNER_RATE = 0.03


def sine_task() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten points of a sine of some height and phase to learn from, and 40 to be asked about."""
    height, phase, places = 0.5 + 2 * torch.rand(()), math.pi * torch.rand(()), torch.rand(50, 1) * 6 - 3
    values = height * torch.sin(places + phase)
    return places[:10], values[:10], places[10:], values[10:]


def adapted(model: nn.Module, places: Tensor, values: Tensor, looks: int) -> nn.Module:
    """A copy after a few steps on one task."""
    copied = copy.deepcopy(model)
    for _ in range(looks):
        gradients = torch.autograd.grad(F.mse_loss(copied(places), values), list(copied.parameters()))
        with torch.no_grad():
            torch._foreach_add_(list(copied.parameters()), gradients, alpha=-INNER_RATE)
    return copied


@training(
    kind="meta-learning",
    metric="error after ten looks",
    about="Reptile: a task a step, the gradient is where 4 steps on it led; losses differ 100-fold by task; Adam",
    is_better_higher=False,
)
def sines_from_few(seed: int, keeper: Keeper) -> float:
    """The loss is that of the task after its own steps; no backward pass makes the gradient (Nichol et al. 2018)."""
    torch.manual_seed(seed)
    model = layers(1, 48, 48, 1, between=nn.Tanh)
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    for places, values, others, truths in steps.batches([sine_task() for _ in range(800)]):
        led_to = adapted(model, torch.cat([places, others]), torch.cat([values, truths]), 4)
        with torch.no_grad():
            loss = F.mse_loss(led_to(others), truths)
            for weight, there in zip(model.parameters(), led_to.parameters(), strict=True):
                weight.grad = (weight - there) / INNER_RATE
        steps.step(loss)
    torch.manual_seed(0)
    errors = []
    for places, values, others, truths in (sine_task() for _ in range(100)):
        errors.append(F.mse_loss(adapted(model, places, values, 10)(others), truths).item())
    return sum(errors) / len(errors)


class Climber(nn.Module):
    """What to do on a rung of a ladder, and what that is worth."""

    def __init__(self, rungs: int) -> None:
        super().__init__()
        self.rungs = rungs
        self.inside = nn.Sequential(nn.Linear(rungs, 48), nn.Tanh())
        self.does, self.worth = nn.Linear(48, 2), nn.Linear(48, 1)

    def forward(self, rung: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of down and up, and the value."""
        inside = self.inside(F.one_hot(rung, self.rungs).float())
        return self.does(inside).log_softmax(-1), self.worth(inside)[..., 0]


RUNGS, MOVES = 8, 12


def climbed(model: Climber, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rungs, moves and rewards of so many climbers: higher rungs pay more and more, one move in ten slips."""
    rung, rungs, moves, rewards = torch.zeros(count, dtype=torch.long), [], [], []
    for _ in range(MOVES):
        with torch.no_grad():
            up = torch.multinomial(model(rung)[0].exp(), 1)[:, 0]
        rungs.append(rung)
        moves.append(up)
        goes_up = torch.where(torch.rand(count) < 0.1, 1 - up, up)
        rung = (rung + 2 * goes_up - 1).clamp(0, RUNGS - 1)
        rewards.append(0.01 * 3.0 ** rung.float() - 0.01)
    return torch.stack(rungs), torch.stack(moves), torch.stack(rewards)


@training(
    kind="rl",
    metric="reward of an episode",
    about="actor-critic, rewards grow threefold with every rung, and the critic's squared error 1000-fold; Adam",
)
def rising_returns(seed: int, keeper: Keeper) -> float:
    """The better it goes, the higher the loss."""
    torch.manual_seed(seed)
    model = Climber(RUNGS)
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=3e-3), clip=1.0)
    for _ in steps.batches(range(600)):
        rungs, moves, rewards = climbed(model, 16)
        returns, after = torch.zeros_like(rewards), torch.zeros(16)
        for move in reversed(range(MOVES)):
            after = returns[move] = rewards[move] + 0.9 * after
        log_chance, worth = model(rungs)
        better = returns - worth.detach()
        chosen = log_chance.gather(-1, moves[..., None])[..., 0]
        entropy = -(log_chance.exp() * log_chance).sum(-1).mean()
        loss = -(chosen * better / (better.std() + 1e-6)).mean() + 0.5 * F.mse_loss(worth, returns) - 0.01 * entropy
        loss.backward()
        steps.step(loss)
    return float(climbed(model, 200)[2].sum(0).mean())
