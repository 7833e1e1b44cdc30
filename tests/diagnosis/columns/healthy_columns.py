"""A generator in, the columns of a healthy run out: dozens of them, of every nature, none of which means anything.

Lengths, levels, noise and courses are drawn from the seed. Noise is heavy-tailed, remembers itself and wanders;
warm-ups, schedules, decays, stalls of the machine and evaluations now and then are all there.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
from tests.diagnosis.healthy_kinds import Floats, Signals, noisy, wander

Random: TypeAlias = np.random.Generator


def rows_of(random: Random) -> int:
    """40 to 6000 rows, most of them few."""
    return int(np.exp(random.uniform(np.log(40), np.log(6000))))


def falling(random: Random, rows: int) -> Floats:
    """A curve that falls to a floor, fast at first."""
    time = np.linspace(0, 1, rows)
    low, high = random.uniform(0.3, 3), random.uniform(1.5, 4)
    return low * (1 + (high - 1) * np.exp(-random.uniform(3, 20) * time))


def schedule(random: Random, rows: int) -> Floats:
    """A warm-up and a cosine."""
    time = np.linspace(0, 1, rows)
    warm = random.uniform(0.005, 0.08)
    return np.minimum(time / warm, 1) * (random.uniform(0.05, 0.3) + 0.5 * (1 + np.cos(np.pi * time))) + 1e-3


def noise(random: Random, level: Floats) -> Floats:
    """Heavy tails, memory, and a slow wandering, as a share of the value."""
    share, slow = np.exp(random.uniform(np.log(0.005), np.log(0.3))), random.uniform(0, 0.15)
    rows = len(level)
    memory = 0.5 * share * wander(random, rows, random.uniform(1, 20))
    drift = slow * wander(random, rows, rows / random.uniform(5, 20))
    return np.asarray(noisy(random, level, share) * np.exp(memory + drift))


def norms(random: Random, rows: int) -> Signals:
    """Norms of gradients, activations, updates and weights by layer, as they go in training from scratch."""
    time = np.linspace(1e-3, 1, rows)
    count = int(random.integers(3, 40))
    shared = noise(random, np.ones(rows))
    rate, grown = schedule(random, rows), random.uniform(0.5, 3)
    made: Signals = {"grad_norm": random.uniform(0.1, 3) * shared * (1 + 4 * np.exp(-30 * time))}
    for layer in range(count):
        depth = np.exp(random.normal(0, 0.5))
        own = noise(random, np.full(rows, depth))
        made[f"grad_norm/layer_{layer}"] = shared * own * (1 + random.uniform(0, 10) * np.exp(-40 * time))
        made[f"activation_norm/layer_{layer}"] = noise(random, depth * (1 + grown * time**0.4))
        made[f"param_norm/layer_{layer}"] = depth * 30 * (1 + random.uniform(0.1, 2) * time**0.5)
        made[f"update_ratio/layer_{layer}"] = 1e-3 * rate * noise(random, np.full(rows, depth))
    return made


def of_training(random: Random, rows: int) -> Signals:
    """What frameworks write besides: auxiliary losses, logits, moments, counts, pace, memory."""
    time = np.linspace(0, 1, rows)
    stalls = np.where(random.random(rows) < 0.01, random.uniform(2, 30, rows), 1)
    pace = noisy(random, np.full(rows, 0.4), 0.02) * stalls
    logits = random.uniform(3, 12) * (1 + random.uniform(0, 3) * (1 - np.exp(-random.uniform(2, 8) * time)))
    return {
        "loss": noisy(random, falling(random, rows), 0.01),
        "train/z_loss": noise(random, 1e-4 * falling(random, rows)),
        "train/mtp_loss": noise(random, falling(random, rows)),
        "max_attn_logits": noise(random, logits),
        "logits_std": noise(random, 1 + random.uniform(0, 2) * time**0.5),
        "moment2_norm": noise(random, falling(random, rows) * 1e-4),
        "num_zeros": np.round(noise(random, np.full(rows, random.uniform(10, 1e5)))),
        "token_entropy": random.uniform(3, 6) + 0.05 * random.standard_normal(rows),
        "step_s": pace,
        "tokens_per_s": 1e5 / pace,
        "memory_gib": 40 + np.cumsum(random.random(rows) < 3 / rows) * random.uniform(0, 2),
        "lr": 3e-4 * schedule(random, rows),
        "clip_frac": np.clip(random.uniform(0, 0.3) + 0.05 * random.standard_normal(rows), 0, 1),
        "beta_schedule": np.minimum(time * 3, 1),
        "consumed_samples": np.arange(rows) * 512.0,
        "skipped": (random.random(rows) < random.choice([0.0, 0.005])).astype(float),
        "some_statistic": np.cumsum(random.standard_normal(rows)),
        "other": noise(random, np.full(rows, random.uniform(0.1, 100))),
    }


def held_out(random: Random, rows: int) -> Signals:
    """Evaluations: each so many rows, with scores that rise and errors that fall to where they stay."""
    every = max(rows // int(random.integers(8, 60)), 1)
    is_there = np.arange(rows) % every == 0
    time = np.linspace(0, 1, rows)
    accuracy = random.uniform(0.3, 0.9) * (1 - np.exp(-random.uniform(2, 10) * time))
    size = random.uniform(0.002, 0.02)
    made = {
        "eval_loss": falling(random, rows) * np.exp(size * random.standard_normal(rows)),
        "eval/accuracy": np.clip(accuracy + size * random.standard_normal(rows), 0, 1),
        "eval/perplexity": np.exp(falling(random, rows)) * np.exp(2 * size * random.standard_normal(rows)),
        "val/f1": np.clip(0.8 * accuracy + 2 * size * random.standard_normal(rows), 0, 1),
    }
    return {name: np.where(is_there, values, np.nan) for name, values in made.items()}


def by_rank(random: Random, rows: int) -> Signals:
    """What each rank logs of its own: alike, but for noise, with one that is a little slower."""
    count = int(random.integers(2, 17))
    gradient, slow = noise(random, np.ones(rows)), random.uniform(1, 1.2, count)
    made: Signals = {"loss": noisy(random, falling(random, rows), 0.01)}
    for rank in range(count):
        made[f"grad_norm/rank_{rank}"] = gradient * noisy(random, np.ones(rows), random.uniform(0.01, 0.1))
        made[f"step_time/rank_{rank}"] = noisy(random, np.full(rows, 0.4 * slow[rank]), 0.02)
        made[f"loss_rank_{rank}"] = noisy(random, made["loss"], 0.03)
    return made


def by_source(random: Random, rows: int) -> Signals:
    """Losses by source and by position, each with a level and a pace of its own."""
    made: Signals = {"loss": noisy(random, falling(random, rows), 0.01)}
    for source in ("web", "code", "books", "math", "wiki", "papers")[: int(random.integers(3, 7))]:
        made[f"loss_of_source/{source}"] = noise(random, falling(random, rows))
    for place in range(int(random.integers(2, 6))):
        made[f"loss_at_position/{place}"] = noisy(random, falling(random, rows), 0.05)
    return made


def all_of_them(random: Random, rows: int) -> Signals:
    """Everything at once: two hundred columns."""
    parts = (by_rank, by_source, norms, held_out, of_training)
    return {name: values for part in parts for name, values in part(random, rows).items()}


FAMILIES: Mapping[str, Callable[[Random, int], Signals]] = {
    "norms": lambda random, rows: {**of_training(random, rows), **norms(random, rows)},
    "training": of_training,
    "held-out": lambda random, rows: {**of_training(random, rows), **held_out(random, rows)},
    "ranks": by_rank,
    "sources": by_source,
    "everything": all_of_them,
}
