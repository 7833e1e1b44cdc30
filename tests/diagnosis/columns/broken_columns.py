"""Healthy columns in, the same with one trouble in one of them out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from tests.diagnosis.columns.healthy_columns import Random, by_rank, by_source, held_out, norms, of_training
from tests.diagnosis.healthy_kinds import Floats, Signals, noisy


@dataclass(frozen=True)
class Trouble:
    """One trouble, where it shows, and as what."""

    make: Callable[[Random, int, int], Signals]
    """The columns of a run of so many rows, with the trouble since a row."""
    signal: str
    shows: tuple[str, ...]


def since(rows: int, at: int, factor: float) -> Floats:
    """1, and another factor from a row on."""
    return np.where(np.arange(rows) < at, 1.0, factor)


def bit_by_bit(rows: int, at: int, factor: float) -> Floats:
    """1, and from a row on an exponential course to a factor in the end."""
    return np.asarray(factor ** np.clip((np.arange(rows) - at) / (rows - at), 0, 1))


def logits_leap(random: Random, rows: int, at: int) -> Signals:
    made = of_training(random, rows)
    return {**made, "max_attn_logits": made["max_attn_logits"] * since(rows, at, 12)}


def logits_grow(random: Random, rows: int, at: int) -> Signals:
    made = of_training(random, rows)
    return {**made, "max_attn_logits": made["max_attn_logits"] * bit_by_bit(rows, at, 60)}


def gradients_of_a_layer(random: Random, rows: int, at: int) -> Signals:
    made = norms(random, rows)
    return {
        "loss": noisy(random, np.ones(rows), 0.01),
        **made,
        "grad_norm/layer_1": made["grad_norm/layer_1"] * since(rows, at, 20),
    }


def weights_stand_still(random: Random, rows: int, at: int) -> Signals:
    made = norms(random, rows)
    return {"loss": noisy(random, np.ones(rows), 0.01), **made, "param_norm/layer_2": np.full(rows, 31.7)}


def slower(random: Random, rows: int, at: int) -> Signals:
    made = of_training(random, rows)
    return {**made, "tokens_per_s": made["tokens_per_s"] * since(rows, at, 0.4)}


def slower_and_slower(random: Random, rows: int, at: int) -> Signals:
    made = of_training(random, rows)
    return {**made, "tokens_per_s": made["tokens_per_s"] * bit_by_bit(rows, rows // 5, 0.45)}


def held_out_turns(random: Random, rows: int, at: int) -> Signals:
    every = max(rows // 25, 1)
    made = {**of_training(random, rows), **held_out(random, rows)}
    turned = 1.5 * np.exp(-2 * np.arange(rows) / rows) + 1.2 * bit_by_bit(rows, rows // 3, 1.8)
    turned *= np.exp(0.01 * random.standard_normal(rows))
    made = {name: values for name, values in made.items() if not name.startswith(("eval", "val"))}
    return {**made, "eval_loss": np.where(np.arange(rows) % every == 0, turned, np.nan)}


def a_source_rises(random: Random, rows: int, at: int) -> Signals:
    made = by_source(random, rows)
    return {**made, "loss_of_source/web": 2 * since(rows, at, 2.5) * noisy(random, np.ones(rows), 0.03)}


def steps_are_skipped(random: Random, rows: int, at: int) -> Signals:
    made = of_training(random, rows)
    return {**made, "skipped": np.where(np.arange(rows) < at, 0.0, 1 + (random.random(rows) < 0.3))}


def activations_not_finite(random: Random, rows: int, at: int) -> Signals:
    made = norms(random, rows)
    broken = np.where(np.arange(rows) < at, made["activation_norm/layer_0"], np.inf)
    return {"loss": noisy(random, np.ones(rows), 0.01), **made, "activation_norm/layer_0": broken}


def replicas_part(random: Random, rows: int, at: int) -> Signals:
    made = by_rank(random, rows)
    common = 1234.5 * (1 + 0.1 * np.linspace(0, 1, rows))
    for rank in range(4):
        off = 1 + 1e-3 * (rank == 3) * np.clip((np.arange(rows) - at + 1) / rows, 0, 1)
        made[f"param_checksum/rank_{rank}"] = common * off
    return made


def latents_unused(random: Random, rows: int, at: int) -> Signals:
    made = of_training(random, rows)
    return {**made, "train/kl_loss": noisy(random, np.full(rows, 12.0), 0.1) * bit_by_bit(rows, 0, 1e-9).clip(1e-4)}


def one_rank_slow(random: Random, rows: int, at: int) -> Signals:
    made = {name: values for name, values in by_rank(random, rows).items() if not name.startswith("step_time")}
    times = {f"step_time/rank_{rank}": noisy(random, np.full(rows, 0.4), 0.02) for rank in range(8)}
    times["step_time/rank_5"] = times["step_time/rank_5"] * since(rows, at, 2.5)
    return {**made, **times}


def one_rank_leaps(random: Random, rows: int, at: int) -> Signals:
    made = by_rank(random, rows)
    norm = noisy(random, np.ones(rows), 0.1)
    for rank in range(8):
        made[f"grad_norm/rank_{rank}"] = norm * noisy(random, np.ones(rows), 0.02)
    made["grad_norm/rank_6"][random.integers(at, rows, 6)] *= 60
    return made


def nothing_found(random: Random, rows: int, at: int) -> Signals:
    made = of_training(random, rows)
    return {**made, "metrics/mAP50(B)": np.where(random.random(rows) < 0.05, 1e-4, 0.0)}


TROUBLES: Mapping[str, Trouble] = {
    "attention logits leap": Trouble(logits_leap, "max_attn_logits", ("leaps", "rises")),
    "attention logits grow": Trouble(logits_grow, "max_attn_logits", ("leaps", "rises")),
    "gradients of one layer": Trouble(gradients_of_a_layer, "grad_norm/layer_1", ("leaps", "parts")),
    "weights of one layer stand still": Trouble(weights_stand_still, "param_norm/layer_2", ("never-moves",)),
    "throughput halves": Trouble(slower, "tokens_per_s", ("slower",)),
    "throughput bleeds": Trouble(slower_and_slower, "tokens_per_s", ("slower",)),
    "held-out loss turns": Trouble(held_out_turns, "eval_loss", ("turns",)),
    "one source gets worse": Trouble(a_source_rises, "loss_of_source/web", ("leaps", "rises", "parts")),
    "steps are skipped": Trouble(steps_are_skipped, "skipped", ("appears",)),
    "activations not finite": Trouble(activations_not_finite, "activation_norm/layer_0", ("not-finite",)),
    "replicas part": Trouble(replicas_part, "param_checksum/rank_3", ("copies-part",)),
    "latents not used": Trouble(latents_unused, "train/kl_loss", ("vanishes",)),
    "one rank is slow": Trouble(one_rank_slow, "step_time/rank_5", ("leaps", "parts")),
    "gradients of one rank leap": Trouble(one_rank_leaps, "grad_norm/rank_6", ("leaps-alone",)),
    "nothing is ever found": Trouble(nothing_found, "metrics/mAP50(B)", ("never-leaves-zero",)),
}
