"""A generator in, the signals of a healthy run out: families of runs that are not judged by their loss.

Lengths, intervals, noise, scales and signs are drawn from the seed: nobody's runs, with what is usual in many of them.
"""

from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sealegs.record.columns import Columns
from sealegs.record.manifest import Manifest
from sealegs.record.run import Run, run_of

Floats: TypeAlias = NDArray[np.float64]
Signals: TypeAlias = dict[str, Floats]
Family: TypeAlias = Callable[[np.random.Generator, int], Signals]


def run_with(signals: Mapping[str, Any], *, every: int = 1, settings: Mapping[str, Any] | None = None) -> Run:
    """A run of these columns; NaN where a row lacks a signal, but for a value in every row of the loss."""
    rows = len(next(iter(signals.values())))
    values: dict[str, Any] = {"step": np.arange(rows) * float(every)}
    logged = {"step": np.ones(rows, bool)}
    for name, column in signals.items():
        values[name] = np.asarray(column, float)
        logged[name] = np.ones(rows, bool) if name in ("loss", "grad_norm") else ~np.isnan(values[name])
    return run_of(Path("made-up"), Manifest(run_id="made-up", settings=settings or {}), Columns(values, logged, rows))


def rows_of(random: np.random.Generator) -> int:
    """20 to 2000 rows, most of them few."""
    return int(np.exp(random.uniform(np.log(20), np.log(2000))))


def noisy(random: np.random.Generator, level: Floats, share: float) -> Floats:
    """Heavy-tailed noise, as a share of the value."""
    return level * np.exp(share * random.standard_t(5, len(level)))


def wander(random: np.random.Generator, rows: int, length: float) -> Floats:
    """Correlated noise of variance 1 that forgets within so many rows."""
    keep = float(np.exp(-1 / max(length, 0.5)))
    shocks = random.standard_normal(rows) * np.sqrt(1 - keep**2)
    shocks[0] = random.standard_normal()
    return np.fromiter(accumulate(shocks.tolist(), lambda level, shock: keep * level + shock), float, rows)


def ramp(random: np.random.Generator, rows: int) -> Floats:
    """From 0 to 1: at once, in the middle, steadily, or in the end."""
    time = np.linspace(0, 1, rows)
    begin, speed = random.uniform(-0.2, 0.7), random.uniform(3, 15)
    curve = 1 / (1 + np.exp(-speed * (time - begin)))
    return np.asarray((curve - curve[0]) / max(curve[-1] - curve[0], 1e-9))


def _policy(random: np.random.Generator, rows: int) -> Signals:
    """What goes with any policy gradient on text: none of it says that anything is wrong."""
    time = np.linspace(0, 1, rows)
    shrink, grow = random.uniform(0.12, 1.3), np.exp(random.uniform(np.log(0.4), np.log(6)))
    entropy = random.uniform(0.15, 2.5) * shrink ** ramp(random, rows)
    kl = np.exp(random.uniform(np.log(0.005), np.log(2))) * time ** random.uniform(0.5, 1.6) + 1e-5
    kl = noisy(random, kl, 0.25) * np.where(random.random(rows) < 0.02, 25, 1)
    spread = np.clip(random.uniform(0.05, 0.5) + random.uniform(-0.1, 0.3) * time + 0.1 * wander(random, rows, 3), 0, 1)
    length = noisy(random, np.exp(random.uniform(3.5, 7.5)) * grow ** ramp(random, rows), 0.08)
    gap = noisy(random, random.uniform(0.002, 0.03) * (1 + random.uniform(0, 1.5) * time), 0.15)
    ratio = 1 + random.uniform(0.3, 3) * np.exp(0.7 * random.standard_t(4, rows))
    return {
        "loss": random.uniform(0.001, 0.05) * random.standard_normal(rows) + random.choice([0.0, 0.01]) * time,
        "grad_norm": noisy(random, np.full(rows, random.uniform(0.05, 3)) * 0.6**time, 0.25),
        "policy_entropy": noisy(random, entropy, 0.08),
        "kl": kl,
        "policy_kl": noisy(random, np.full(rows, random.uniform(1e-4, 0.02)), 0.5),
        "zero_spread_share": spread,
        "completion_length": length,
        "cut_share": np.clip(random.uniform(0, 0.3) + 0.05 * wander(random, rows, 2), 0, 1),
        "clip_share": np.abs(random.uniform(0.001, 0.15) * (1 + 0.5 * random.standard_normal(rows))).clip(0, 1),
        "logp_gap": gap,
        "importance_ratio_max": ratio,
    }


def grpo(random: np.random.Generator, rows: int) -> Signals:
    """Reward rises and wanders; every scale and sign."""
    scale, offset = np.exp(random.uniform(-3, 4)), random.choice([0.0, -1.0, 1.0])
    reward = random.uniform(0.05, 0.5) + random.uniform(0.05, 0.5) * ramp(random, rows)
    noise = random.uniform(0.01, 0.12)
    reward += noise * random.standard_normal(rows) + random.uniform(0, 0.7) * noise * wander(random, rows, rows / 15)
    return {**_policy(random, rows), "reward": scale * (reward + offset)}


def plateau(random: np.random.Generator, rows: int) -> Signals:
    """A reward that does not rise any more, and wanders as prompts come and go."""
    noise = random.uniform(0.02, 0.12)
    reward = random.uniform(0.3, 0.9) + 0.4 * noise * wander(random, rows, rows / random.uniform(8, 40))
    return {**_policy(random, rows), "reward": reward + noise * random.standard_normal(rows)}


def games(random: np.random.Generator, rows: int) -> Signals:
    """Returns of a game: from below zero, with falls that heal; the entropy of a density goes below zero."""
    low, high = -np.exp(random.uniform(2, 7)), np.exp(random.uniform(2, 7))
    reward = low + (high - low) * ramp(random, rows)
    for _ in range(random.integers(0, 3)):
        begin = int(random.uniform(0.2, 0.7) * rows)
        end = begin + max(int(0.12 * rows), 2)
        reward[begin:end] -= random.uniform(0.2, 0.8) * (reward[begin] - low)
    time = np.linspace(0, 1, rows)
    return {
        "loss": noisy(random, np.exp(random.uniform(-2, 6)) * (0.3 + ramp(random, rows)), 0.3),
        "reward": reward + 0.04 * (high - low) * random.standard_normal(rows),
        "policy_entropy": 8 - random.uniform(2, 14) * time + 0.1 * random.standard_normal(rows),
        "policy_kl": noisy(random, np.full(rows, 0.01), 0.4),
        "clip_share": (0.15 + 0.05 * random.standard_normal(rows)).clip(0, 1),
    }


def curriculum(random: np.random.Generator, rows: int) -> Signals:
    """Tasks that get harder: the reward falls with each, and is learned again."""
    stages = int(random.integers(2, 5))
    place = np.arange(rows) * stages / rows
    level = random.uniform(0.3, 0.5) + random.uniform(0.2, 0.4) * (place % 1) - 0.03 * (place // 1)
    return {**_policy(random, rows), "reward": level + random.uniform(0.02, 0.08) * random.standard_normal(rows)}


def one_prompt(random: np.random.Generator, rows: int) -> Signals:
    """One prompt a step and eight answers: rewards in eighths, and a group that has a spread or none."""
    chance = random.uniform(0.1, 0.5) + random.uniform(0.0, 0.4) * ramp(random, rows)
    easy = random.beta(np.maximum(4 * chance, 0.2), np.maximum(4 * (1 - chance), 0.2))
    right = random.binomial(8, easy)
    alike = (right == 0) | (right == 8)
    found = _policy(random, rows) | {"reward": right / 8, "zero_spread_share": alike * 1.0}
    return found | {"grad_norm": np.where(alike, 0.0, found["grad_norm"])}


def preference(random: np.random.Generator, rows: int) -> Signals:
    """Pairs told apart better and better; both answers may become a little less likely."""
    up, time = ramp(random, rows), np.linspace(0, 1, rows)
    pairs = int(2 ** random.integers(2, 8))
    margin = random.uniform(0.3, 6) * up
    chosen = random.uniform(-0.35, 0.3) * margin
    right = 0.5 + random.uniform(0.1, 0.45) * up
    accuracy = random.binomial(pairs, right) / pairs
    accuracy[0] = random.choice([0.0, accuracy[0]])
    noise = random.uniform(0.05, 0.3)
    return {
        "loss": noisy(random, np.log(2) * (1 - random.uniform(0.1, 0.7) * up), 0.15),
        "grad_norm": noisy(random, 5 * (1 - 0.4 * time), 0.3),
        "preference_accuracy": accuracy,
        "reward_margin": margin + noise * random.standard_normal(rows) * (0.2 + margin),
        "chosen_reward": chosen + noise * random.standard_normal(rows),
        "rejected_reward": chosen - margin + noise * random.standard_normal(rows),
    }


def experts(random: np.random.Generator, rows: int) -> Signals:
    """Loads that are uneven at first and even out; a router that becomes surer of its choice."""
    count, layers = int(2 ** random.integers(2, 6)), int(random.integers(1, 4))
    time = np.linspace(0, 1, rows)
    late, early = random.uniform(0.05, 0.5), random.uniform(0.3, 2.0)
    spread = late + early * np.exp(-time * random.uniform(8, 40))
    found: Signals = {"loss": noisy(random, 2 + 8 * np.exp(-6 * time), 0.02)}
    for layer in range(layers):
        habits = random.standard_normal(count)
        logits = spread[:, None] * habits + 0.1 * random.standard_normal((rows, count))
        shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        found |= {f"expert_load/{layer}.{expert}": shares[:, expert] for expert in range(count)}
    most = np.max(np.stack([found[f"expert_load/0.{expert}"] for expert in range(count)]), axis=0)
    entropy = np.log(count) * (1 - random.uniform(0.1, 0.7) * ramp(random, rows))
    return found | {
        "expert_violation": most * count - 1,
        "router_entropy": noisy(random, entropy, 0.03),
        "router_balance_loss": noisy(random, 1 + 0.02 * early + 0.5 * early * np.exp(-20 * time), 0.01),
        "router_z_loss": noisy(random, np.exp(random.uniform(-6, 1)) * (1 + random.uniform(-0.6, 4) * time), 0.1),
    }


def eight_bits(random: np.random.Generator, rows: int) -> Signals:
    """A language model in fp8: a few values saturate, gradients lose some, scales follow the largest magnitude."""
    time = np.linspace(0, 1, rows)
    found: Signals = {"loss": noisy(random, 2 + 8 * np.exp(-6 * time), 0.02)}
    for name in ("qkv", "up", "down"):
        amax = noisy(random, np.exp(random.uniform(-4, 4)) * (1 + random.uniform(-0.5, 3) * time), 0.1)
        found |= {f"amax/{name}": amax, f"quant_scale/{name}": 2 ** np.floor(np.log2(448 / amax))}
        found[f"saturated_share/{name}"] = noisy(random, np.full(rows, np.exp(random.uniform(-12, -7))), 0.8)
        lost = random.uniform(0.01, 0.35) + random.uniform(-0.05, 0.15) * time + 0.02 * random.standard_normal(rows)
        found[f"zeroed_share/{name}"] = lost.clip(0, 1)
    return found


def gan(random: np.random.Generator, rows: int) -> Signals:
    """Two losses that take turns; or a critic's, of either sign."""
    swing = wander(random, rows, rows / 10) * 0.2
    if random.random() < 0.3:
        critic = random.uniform(-20, 5) * (1 - 0.7 * ramp(random, rows)) + random.standard_normal(rows)
        return {"discriminator_loss": critic, "generator_loss": 10 * swing + random.standard_normal(rows)}
    fall, rise = random.uniform(0.2, 1.0), random.uniform(1.0, 6.0)
    critic = noisy(random, 1.3 * fall ** ramp(random, rows) * np.exp(-swing), 0.25)
    generator = noisy(random, 0.8 * rise ** ramp(random, rows) * np.exp(swing), 0.2)
    return {"loss": critic + generator, "discriminator_loss": critic, "generator_loss": generator}


def diffusion(random: np.random.Generator, rows: int) -> Signals:
    """A loss that falls at once and is noisy for good, by noise level."""
    time = np.linspace(0, 1, rows)
    level = random.uniform(0.02, 0.2) * (1 + 6 * np.exp(-time * 40))
    found = {"loss": noisy(random, level, random.uniform(0.1, 0.3))}
    return found | {f"loss_at_timestep/{part}": noisy(random, level * (4 - part), 0.2) for part in range(4)}


FAMILIES: Mapping[str, Family] = {
    "grpo": grpo,
    "plateau": plateau,
    "games": games,
    "curriculum": curriculum,
    "one-prompt": one_prompt,
    "preference": preference,
    "experts": experts,
    "eight-bits": eight_bits,
    "gan": gan,
    "diffusion": diffusion,
}
