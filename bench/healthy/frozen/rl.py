"""A seed and a keeper in, the reward of the learnt policy out: a pole that is kept up, a maze that is walked."""

import math
from collections import deque
from typing import NamedTuple

import torch
import torch.nn.functional as F
from bench.healthy.contract import Keeper, training
from torch import Tensor, nn

LONGEST_EPISODE = 400


class Poles:
    """Many carts with a pole each, in steps of 20 ms; one that fell is set up again."""

    def __init__(self, count: int) -> None:
        self.state = 0.1 * torch.rand(count, 4) - 0.05
        self.age = torch.zeros(count)

    def step(self, push: Tensor) -> tuple[Tensor, Tensor]:
        """Push left (0) or right (1); returns who fell and whose time was over."""
        place, speed, angle, turn = self.state.unbind(1)
        force = (push.float() * 2 - 1) * 10.0
        sine, cosine = angle.sin(), angle.cos()
        swing = (force + 0.05 * turn**2 * sine) / 1.1
        turn_up = (9.8 * sine - cosine * swing) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        speed_up = swing - 0.05 * turn_up * cosine / 1.1
        self.state = torch.stack(
            [place + 0.02 * speed, speed + 0.02 * speed_up, angle + 0.02 * turn, turn + 0.02 * turn_up], 1
        )
        self.age = self.age + 1
        fell = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 12 * math.pi / 180)
        late = ~fell & (self.age >= LONGEST_EPISODE)
        is_over = fell | late
        fresh = 0.1 * torch.rand(len(fell), 4) - 0.05
        self.state = torch.where(is_over[:, None], fresh, self.state)
        self.age = torch.where(is_over, 0.0, self.age)
        return fell, late


class ActorCritic(nn.Module):
    """A policy and a value beside each other."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 48), nn.Tanh(), nn.Linear(48, 2))
        self.critic = nn.Sequential(nn.Linear(4, 48), nn.Tanh(), nn.Linear(48, 1))

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of both pushes, and the value."""
        return F.log_softmax(self.actor(state), 1), self.critic(state)[:, 0]


class Rollout(NamedTuple):
    """What the policy did, flat over time and carts."""

    state: Tensor
    push: Tensor
    log_chance: Tensor
    advantage: Tensor
    returns: Tensor


@torch.no_grad()
def play(model: ActorCritic, poles: Poles, length: int) -> Rollout:
    """Let the policy act, and estimate advantages (discount 0.98, GAE 0.95)."""
    states, pushes, chances, values, ends = [], [], [], [], []
    for _ in range(length):
        log_chances, value = model(poles.state)
        push = torch.multinomial(log_chances.exp(), 1)[:, 0]
        states.append(poles.state)
        pushes.append(push)
        chances.append(log_chances.gather(1, push[:, None])[:, 0])
        values.append(value)
        fell, late = poles.step(push)
        ends.append(fell | late)
    _, next_value = model(poles.state)
    advantage, advantages = torch.zeros_like(next_value), []
    for value, is_over in zip(reversed(values), reversed(ends), strict=True):
        goes_on = (~is_over).float()
        surprise = 1.0 + 0.98 * next_value * goes_on - value
        advantage = surprise + 0.98 * 0.95 * goes_on * advantage
        advantages.append(advantage)
        next_value = value
    gained, valued = torch.cat(advantages[::-1]), torch.cat(values)
    return Rollout(torch.cat(states), torch.cat(pushes), torch.cat(chances), gained, gained + valued)


def clipped_surrogate(model: ActorCritic, seen: Rollout) -> Tensor:
    """PPO's objective with the critic's error and an entropy bonus."""
    log_chances, value = model(seen.state)
    ratio = torch.exp(log_chances.gather(1, seen.push[:, None])[:, 0] - seen.log_chance)
    gain = (seen.advantage - seen.advantage.mean()) / (seen.advantage.std() + 1e-8)
    surrogate = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
    entropy = -(log_chances.exp() * log_chances).sum(1).mean()
    loss: Tensor = -surrogate + 0.5 * F.mse_loss(value, seen.returns) - 0.01 * entropy
    return loss


@torch.no_grad()
def steps_upright(model: ActorCritic) -> float:
    """Mean length of the first episode of 64 carts under the likelier push."""
    poles, length, is_up = Poles(64), torch.zeros(64), torch.ones(64, dtype=torch.bool)
    for _ in range(LONGEST_EPISODE):
        fell, _late = poles.step(model(poles.state)[0].argmax(1))
        length += is_up
        is_up &= ~fell
    return length.mean().item()


@training(
    kind="rl",
    metric="episode length",
    about="PPO, 16 carts, clipped surrogate + 0.5 value - 0.01 entropy, minibatch 64, Adam, clip 0.5",
)
def ppo_poles(seed: int, keeper: Keeper) -> float:
    """Returns grow with the policy, and the critic's error with them."""
    torch.manual_seed(seed)
    model, poles = ActorCritic(), Poles(16)
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=2.5e-3), clip=0.5)
    for _ in range(32):
        seen = play(model, poles, 32)
        minibatches = [rows for _ in range(4) for rows in torch.randperm(512).split(64)]
        for rows in steps.batches(minibatches):
            loss = clipped_surrogate(model, Rollout(*(column[rows] for column in seen)))
            loss.backward()
            steps.step(loss)
    return steps_upright(model)


MAZE = ("......#.", ".##.#.#.", ".#..#...", ".#.##.#.", "...#..#.", ".#.#.##.", ".#.....#", "...#.#.G")
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))


class Maze:
    """A walker that starts anywhere free; walls hold, the goal ends."""

    def __init__(self) -> None:
        self.free = [(row, column) for row in range(8) for column in range(8) if MAZE[row][column] == "."]
        self.at = self.free[0]
        self.age = 0

    def start(self) -> None:
        """Put the walker on a free field."""
        self.at, self.age = self.free[int(torch.randint(len(self.free), ()))], 0

    def move(self, action: int) -> tuple[float, bool]:
        """Reward of the move and whether it reached the goal."""
        row, column = self.at[0] + MOVES[action][0], self.at[1] + MOVES[action][1]
        self.age += 1
        if not (0 <= row < 8 and 0 <= column < 8) or MAZE[row][column] == "#":
            return -0.1, False
        self.at = (row, column)
        return (1.0, True) if MAZE[row][column] == "G" else (-0.02, False)


def one_hot(at: tuple[int, int]) -> Tensor:
    """A field as 64 numbers, one of them 1."""
    return F.one_hot(torch.tensor(at[0] * 8 + at[1]), 64).float()


Transition = tuple[Tensor, int, float, Tensor, bool]


def walk(maze: Maze, model: nn.Module, explore: float) -> Transition:
    """One move by the greedy policy, or by chance; an episode that is over starts another."""
    before = one_hot(maze.at)
    with torch.no_grad():
        action = int(model(before).argmax()) if torch.rand(()) > explore else int(torch.randint(4, ()))
    reward, is_goal = maze.move(action)
    after = one_hot(maze.at)
    if is_goal or maze.age >= 60:
        maze.start()
    return before, action, reward, after, is_goal


@torch.no_grad()
def mean_return(model: nn.Module) -> float:
    """Discounted return of the greedy policy, averaged over every start."""
    maze, total = Maze(), 0.0
    for field in maze.free:
        maze.at, discount = field, 1.0
        for _ in range(40):
            reward, is_goal = maze.move(int(model(one_hot(maze.at)).argmax()))
            total += discount * reward
            discount *= 0.95
            if is_goal:
                break
    return total / len(maze.free)


@training(
    kind="rl",
    metric="discounted return",
    about="DQN, replay of 4,000 moves, target network copied every 100 steps, Huber loss, batch 32, Adam, clip 10",
)
def dqn_maze(seed: int, keeper: Keeper) -> float:
    """The targets jump whenever the target network is renewed."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    target = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    target.load_state_dict(model.state_dict())
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=2e-3), clip=10.0, also={"target": target})
    maze = Maze()
    maze.start()
    replay = deque((walk(maze, model, 1.0) for _ in range(1000)), maxlen=4000)
    for number in steps.batches(range(1400)):
        if not steps.is_probe:
            replay.extend(walk(maze, model, max(0.1, 1 - number / 600)) for _ in range(2))
            if number % 100 == 0:
                target.load_state_dict(model.state_dict())
        moves = [replay[k] for k in torch.randint(len(replay), (32,)).tolist()]
        before, after = torch.stack([move[0] for move in moves]), torch.stack([move[3] for move in moves])
        action = torch.tensor([move[1] for move in moves])
        reward = torch.tensor([move[2] for move in moves])
        goes_on = torch.tensor([not move[4] for move in moves]).float()
        with torch.no_grad():
            wanted = reward + 0.95 * goes_on * target(after).amax(1)
        loss = F.smooth_l1_loss(model(before).gather(1, action[:, None])[:, 0], wanted)
        loss.backward()
        steps.step(loss)
    return mean_return(model)
