"""A generator in, the signals of a run that is broken in one way out: the healthy families, and what happens to them.

Each is broken from a step that is drawn from the seed on, and as badly as the seed says.
"""

from collections.abc import Callable, Mapping

import numpy as np
from tests.diagnosis.healthy_kinds import Floats, Signals, eight_bits, experts, gan, grpo, noisy, preference


def since(random: np.random.Generator, rows: int) -> Floats:
    """How far the fault has come, 0 to 1: from a third to two thirds of the log on, at once or within a tenth of it."""
    begin, long = random.uniform(0.3, 0.65), random.uniform(0.01, 0.1)
    return np.asarray(np.clip((np.linspace(0, 1, rows) - begin) / long, 0, 1))


def policy_collapse(random: np.random.Generator, rows: int) -> Signals:
    """Reward falls to where it began or below, entropy and divergence explode, and so does the gradient."""
    found, far = grpo(random, rows), since(random, rows)
    reward = found["reward"]
    low = float(np.quantile(reward, 0.02)) - random.uniform(0, 0.3) * float(np.ptp(reward))
    begun = int(np.argmax(far > 0))
    return found | {
        "reward": reward * (1 - far) + far * (low + (reward - np.mean(reward[: begun + 1])) * 0.3),
        "policy_entropy": found["policy_entropy"] * (1 - far) + far * noisy(random, np.full(rows, 5.0), 0.1),
        "kl": found["kl"] + far * noisy(random, np.full(rows, np.exp(random.uniform(2, 5))), 0.3),
        "grad_norm": found["grad_norm"] * (1 + random.uniform(8, 40) * far),
    }


def nothing_to_learn(random: np.random.Generator, rows: int) -> Signals:
    """Entropy to nothing, no group with a spread, no gradient; the reward stays where it is."""
    found, far = grpo(random, rows), since(random, rows)
    level, spread = float(np.mean(found["reward"][:3])), float(np.std(np.diff(found["reward"])))
    return found | {
        "reward": level + 0.1 * spread * random.standard_normal(rows),
        "policy_entropy": found["policy_entropy"] * np.exp(-far * random.uniform(6, 12)),
        "zero_spread_share": np.where(far >= 1, 1.0, found["zero_spread_share"]),
        "grad_norm": np.where(far >= 1, 0.0, found["grad_norm"]),
        "loss": np.where(far >= 1, 0.0, found["loss"]),
    }


def mismatch(random: np.random.Generator, rows: int) -> Signals:
    """The sampler's probabilities leave the trainer's, and then the reward falls."""
    found, far = grpo(random, rows), since(random, rows)
    reward = found["reward"]
    low = float(np.quantile(reward, 0.02)) - 0.2 * float(np.ptp(reward))
    return found | {
        "logp_gap": found["logp_gap"] * (1 + random.uniform(12, 60) * far),
        "importance_ratio_max": found["importance_ratio_max"] * (1 + random.uniform(20, 200) * far),
        "reward": reward * (1 - far) + far * (low + 0.3 * (reward - np.mean(reward))),
    }


def preference_lost(random: np.random.Generator, rows: int) -> Signals:
    """Pairs are told apart, and then they are not."""
    found, far = preference(random, rows), since(random, rows)
    right = np.clip(0.5 + 0.35 * np.minimum(np.linspace(0, 8, rows), 1) * (1 - far), 0, 1)
    return found | {"preference_accuracy": random.binomial(32, right) / 32, "loss": found["loss"] + 0.6 * far}


def router_collapse(random: np.random.Generator, rows: int) -> Signals:
    """One expert of each layer gets nearly everything; the loss is unmoved."""
    found, far = experts(random, rows), since(random, rows)
    names = [name for name in found if name.startswith("expert_load/")]
    taken = random.uniform(0.8, 0.98)
    for name in names:
        is_favourite = name.endswith(".1")
        found[name] = found[name] * (1 - far) + far * (taken if is_favourite else found[name] * (1 - taken))
    found["expert_violation"] = found["expert_violation"] + far * (taken * len(names) / 3)
    return found


def saturation(random: np.random.Generator, rows: int) -> Signals:
    """A tensor outgrows its format: more and more of its values are beyond the largest number."""
    found, far = eight_bits(random, rows), since(random, rows)
    return found | {"saturated_share/up": found["saturated_share/up"] + far * random.uniform(0.12, 0.5)}


def discriminator_wins(random: np.random.Generator, rows: int) -> Signals:
    """The discriminator's loss goes to nothing, the generator's to many times its own."""
    far = since(random, rows)
    while (found := gan(random, rows))["discriminator_loss"].min() < 0:
        continue
    return found | {
        "discriminator_loss": found["discriminator_loss"] * np.exp(-far * random.uniform(7, 12)),
        "generator_loss": found["generator_loss"] * (1 + random.uniform(3, 10) * far),
    }


SICK: Mapping[str, tuple[Callable[[np.random.Generator, int], Signals], str]] = {
    "policy-collapse": (policy_collapse, "reward-falls"),
    "nothing-to-learn": (nothing_to_learn, "nothing-to-learn"),
    "mismatch": (mismatch, "sampler-apart"),
    "preference-lost": (preference_lost, "preference-lost"),
    "router-collapse": (router_collapse, "router-collapses"),
    "saturation": (saturation, "values-saturate"),
    "discriminator-wins": (discriminator_wins, "discriminator-wins"),
}
"""How a run is broken, and what it must show."""
