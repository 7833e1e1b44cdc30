"""The frozen half, failures of precision, machines and kinds: written down before the rules were touched.

Do not read this module while you work on the diagnosis, and do not change it: the table that
`python bench/documented.py --half report` prints is all that is to be known of it. The modules `tune_*` are to work
with.
"""

import json
import math

import numpy as np
from bench.failures.building import (
    Evidence,
    Half,
    between,
    cosine,
    excursion,
    fairseq,
    falling,
    jsonl,
    llama_factory,
    megatron,
    noise,
    norms,
    ramp,
    steady,
    table,
    trainer_state,
    ultralytics,
    verl,
)

HALF = Half()
Generator = np.random.Generator


@HALF.failure(
    "precision",
    "BigScience 104B and OPT-175B logbooks; Megatron-DeepSpeed threads on a loss scale of 1",
    right=["fp16-overflow"],
    near=["numerical-cascade", "lr-too-high"],
)
def loss_scale_goes_to_one(rng: Generator) -> Evidence:
    """The loss scale is halved at each step until nothing is left of it, and the steps are skipped one after the other:
    activations overflow in half precision.
    """
    count, at = 2500, int(rng.integers(1200, 2200))
    scale = np.full(count, 65536.0) * np.where(rng.random(count) < 0.004, 0.5, 1)
    falls = np.maximum(65536.0 * 0.5 ** np.maximum(np.arange(count) - at, 0), 1.0)
    after = np.arange(count) >= at
    skipped = np.where(after & (rng.random(count) < 0.93), 1.0, 0.0)
    loss = (
        falling(count, 11, 2.9)
        * noise(rng, count, 0.012)
        * (1 + between(rng, 0.1, 0.9) * ramp(count, at - 15, at + 60))
    )
    columns = {
        "loss": loss,
        "grad_norm": norms(rng, count) * (1 + 30 * ramp(count, at - 20, at)),
        "loss_scale": np.where(after, falls, scale),
        "skipped": skipped,
        "lr": cosine(count, 1.2e-4),
    }
    arguments = {"fp16": True, "loss_scale": "None", "initial_loss_scale": 4294967296, "hysteresis": 2, "lr": 1.2e-4}
    return Evidence({"log.txt": megatron(range(1, count + 1), columns, arguments=arguments)}, "log.txt")


@HALF.failure(
    "precision",
    "PyTorch AMP notes (unscale_ before clipping) and forum threads on clipping of scaled gradients",
    wrong=[
        "gradient-explosion",
        "lr-too-high",
        "numerical-cascade",
        "stale-beta2",
        "long-tail-token",
        "lr-discontinuity",
        "hard-batch",
        "bad-data-batch",
    ],
    near=["plateau", "fp16-overflow"],
    verdicts=["watch", "act", "unknown"],
    column=["grad", "clip", "scale"],
)
def clipped_in_scaled_units(rng: Generator) -> Evidence:
    """Gradients are clipped at 1 while they still carry the loss scale. Norms of ten thousand are printed, each update
    is a hair, and the loss falls at a crawl.
    """
    count = 4000
    scale = 2.0 ** np.minimum(14 + np.arange(count) // 2000, 16)
    loss = falling(count, 10.9, between(rng, 7.6, 8.6), bend=0.4) * noise(rng, count, 0.01)
    columns = {
        "loss": loss,
        "grad_norm": norms(rng, count, 0.9, first=3) * scale,
        "loss_scale": scale,
        "lr": cosine(count, 3e-4),
        "clip": np.full(count, 100.0),
    }
    return Evidence({"train.log": fairseq(range(1, count + 1), columns)}, "train.log")


@HALF.failure(
    "precision",
    "Fishman et al., arXiv:2409.12517 (FP8 at trillion tokens); TransformerEngine issue 841",
    right=["low-precision-saturation"],
    near=["scale-of-zero", "lr-too-high"],
)
def outliers_beyond_eight_bits(rng: Generator) -> Evidence:
    """Training in eight bits is fine for long. Then an outlier of the activations grows, a scale that was made of older
    values cuts it, and the loss leaves that of bf16.
    """
    count, at = 7000, int(rng.integers(4000, 5600))
    outlier = 40 * np.exp(between(rng, 2.2, 4) * ramp(count, 1500, at)) * noise(rng, count, 0.1)
    share = np.clip((outlier / 448 - 1) * 0.02, 0, 0.4) * noise(rng, count, 0.15)
    loss = (
        falling(count, 11, 2.4) * noise(rng, count, 0.006) * (1 + between(rng, 0.15, 0.8) * ramp(count, at, at + 900))
    )
    columns = {
        "train/loss": loss,
        "train/grad_norm": norms(rng, count) * (1 + 6 * ramp(count, at)),
        "train/lr": cosine(count, 3e-4),
        "fp8/layers.30.mlp.fc2/amax": outlier,
        "fp8/layers.30.mlp.fc2/saturated_share": share,
        "fp8/layers.2.mlp.fc2/saturated_share": 0 * share,
    }
    settings = "fp8: hybrid\nfp8_amax_history_len: 1024\nfp8_amax_compute_algo: max\nlr: 3.0e-4\n"
    return Evidence(
        {"run/wandb-history.jsonl": jsonl(range(count), columns), "run/config.yaml": settings},
        "run/wandb-history.jsonl",
        "run/config.yaml",
    )


@HALF.failure(
    "units",
    "transformers, gradient accumulation fix of October 2024; unsloth's note on it",
    right=["accumulation-denominator"],
    near=["init-too-wide"],
    verdicts=["act", "watch"],
)
def sums_for_means(rng: Generator) -> Evidence:
    """The loss of accumulated batches is added up and not averaged. It begins at a whole multiple of the loss of
    guessing, and falls in the same shape.
    """
    steps = np.arange(5, 3001, 5)
    count, parts = len(steps), int(rng.choice([4, 8, 16]))
    loss = parts * falling(count, math.log(50257), 3.6) * noise(rng, count, 0.012)
    columns = {"loss": loss, "grad_norm": parts * norms(rng, count), "lr": cosine(count, 5e-4)}
    config = json.dumps({"model_type": "gpt2", "vocab_size": 50257, "n_layer": 12})
    arguments = json.dumps(
        {"gradient_accumulation_steps": parts, "per_device_train_batch_size": 8, "learning_rate": 5e-4}
    )
    files = {
        "out/trainer_state.json": trainer_state(steps, columns),
        "out/config.json": config,
        "out/training_args.json": arguments,
    }
    return Evidence(files, "out/trainer_state.json", "out/training_args.json")


@HALF.failure(
    "units",
    "Goyal et al., arXiv:1706.02677 (linear scaling); torch elastic threads "
    "on the rate after a change of the world size",
    wrong=[
        "corrupt-gradient",
        "ranks-out-of-step",
        "bad-data-batch",
        "long-tail-token",
        "optimizer-reset",
        "stale-beta2",
        "attention-logit-growth",
    ],
    near=["lr-too-high", "plateau", "data-order", "misaligned-restart"],
    verdicts=["watch", "act", "unknown"],
    column=["batch", "world", "noise", "scatter"],
)
def half_the_machines_and_the_same_rate(rng: Generator) -> Evidence:
    """A job was started again on half the machines with the rate as it was. The batch is half as large, the loss
    scatters more and falls less.
    """
    count, at = 5000, int(rng.integers(2000, 3200))
    after = np.arange(count) >= at
    steady_noise, wide = noise(rng, count, 0.006), noise(rng, count, 0.006 * between(rng, 1.8, 3))
    loss = (
        falling(count, 10.9, 2.6)
        * np.where(after, wide, steady_noise)
        * (1 + between(rng, 0.02, 0.06) * ramp(count, at, at + 300))
    )
    columns = {
        "loss": loss,
        "grad_norm": norms(rng, count) * np.where(after, 1.6, 1),
        "lr": cosine(count, 4e-4),
        "batch": np.where(after, 256, 1024),
    }
    talk = {
        at: "[default0]:using world size: 32, data-parallel-size: 16, tensor-model-parallel "
        f"size: 2\n loading checkpoint from ck at iteration {at - 1}"
    }
    arguments = {"world_size": 128, "data_parallel_size": 64, "lr": 4e-4, "bf16": True}
    return Evidence({"log.txt": megatron(range(1, count + 1), columns, arguments=arguments, chatter=talk)}, "log.txt")


@HALF.failure(
    "units",
    "nanoGPT lr_decay_iters and max_iters; Hoffmann et al., arXiv:2203.15556 (cosine length)",
    right=["plateau"],
    near=["lr-too-high"],
    verdicts=["watch", "act"],
)
def schedule_ends_at_half(rng: Generator) -> Evidence:
    """The schedule was made for half the steps that are run. From the middle on the rate is at its floor and the curve
    is flat: half of the budget is spent for nothing.
    """
    count = 6000
    at = int(count * rng.uniform(0.35, 0.6))
    rate = cosine(count, 6e-4, total=at, floor=0.001)
    loss = np.where(np.arange(count) < at, falling(at, 10.9, 3.3)[np.minimum(np.arange(count), at - 1)], 3.3) * noise(
        rng, count, 0.008
    )
    columns = {"train_loss_step": loss, "lr-AdamW": rate, "grad_norm": norms(rng, count)}
    every = np.arange(0, count, 10)
    return Evidence(
        {"metrics.csv": table(every, {name: values[every] for name, values in columns.items()})}, "metrics.csv"
    )


@HALF.failure(
    "memory of data",
    "Muennighoff et al., arXiv:2305.16264; fine-tuning threads on stairs in the loss",
    right=["memorisation"],
    verdicts=["act", "watch"],
)
def stairs_of_epochs(rng: Generator) -> Evidence:
    """A small corpus is read again and again. The training loss falls in stairs, one at each epoch, and the held-out
    loss turns up after the second.
    """
    per_epoch, epochs = int(rng.integers(120, 260)), int(rng.integers(4, 8))
    count = per_epoch * epochs
    epoch = np.arange(count) // per_epoch
    loss = (falling(count, 1.9, 1.5) - between(rng, 0.2, 0.35) * np.minimum(epoch, 4)).clip(0.03) * noise(
        rng, count, 0.06
    )
    turn = int(rng.integers(1, 3))
    evals = {
        per_epoch * (k + 1): {"eval_loss": float(1.5 - 0.1 * min(k, turn) + 0.14 * max(k - turn, 0))}
        for k in range(epochs)
    }
    columns = {"loss": loss, "grad_norm": norms(rng, count, 1.1, first=2), "lr": cosine(count, 2e-5)}
    return Evidence(
        {"trainer_state.json": trainer_state(range(1, count + 1), columns, evals=evals, per_epoch=per_epoch)},
        "trainer_state.json",
    )


@HALF.failure(
    "hardware",
    "Llama 3, arXiv:2407.21783, section 3.3.4; MegaScale, arXiv:2402.15627 (stragglers)",
    wrong=["lr-too-high", "plateau", "data-order", "corrupt-gradient", "optimizer-reset", "hard-batch", "memorisation"],
    verdicts=["watch", "act"],
    column=["throughput", "tokens per", "slow", "elapsed", "step time", "time per", "step_time", "seconds"],
)
def one_slow_node(rng: Generator) -> Evidence:
    """One node of many is slow from some step on: every step takes half as long again, and no loss says so."""
    count, at = 4000, int(rng.integers(1500, 3200))
    elapsed = steady(rng, count, 2100, 0.015) * (1 + (between(rng, 1.4, 2.4) - 1) * ramp(count, at, at + 1))
    columns = {
        "loss": falling(count, 10.8, 2.6) * noise(rng, count, 0.008),
        "grad_norm": norms(rng, count),
        "lr": cosine(count, 3e-4),
        "elapsed": elapsed,
    }
    return Evidence({"train.log": megatron(range(1, count + 1), columns)}, "train.log")


@HALF.failure(
    "hardware",
    "OPT-175B logbook; BLOOM-176B chronicles",
    wrong=[
        "data-order",
        "lr-too-high",
        "optimizer-reset",
        "duplicate-batch",
        "corrupt-weight",
        "misaligned-restart",
        "memorisation",
        "plateau",
        "metric-wrong",
    ],
    verdicts=["healthy", "watch"],
)
def collective_timed_out(rng: Generator) -> Evidence:
    """A collective times out, all ranks die, and the job is started again from a checkpoint some hundred steps back. It
    runs the same steps again with the same losses: nothing is wrong with the training.
    """
    count, at, back = 3000, int(rng.integers(1200, 2600)), int(rng.integers(60, 240))
    loss = falling(count, 10.8, 2.7) * noise(rng, count, 0.01)
    columns = {"loss": loss, "grad_norm": norms(rng, count), "lr": cosine(count, 3e-4)}
    first = {name: values[:at] for name, values in columns.items()}
    second = {
        name: values[at - back :] * (noise(rng, count - at + back, 0.0006) if name == "loss" else 1)
        for name, values in columns.items()
    }
    died = (
        "[rank41]:[E ProcessGroupNCCL.cpp:616] Watchdog caught collective "
        "operation timeout: WorkNCCL(SeqNum=88121, OpType=ALLREDUCE) ran for "
        "600014 milliseconds before timing out.\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError\n"
    )
    text = megatron(range(1, at + 1), first) + died + f" loading checkpoint from /ck at iteration {at - back}\n"
    return Evidence({"train.log": text + megatron(range(at - back + 1, count + 1), second)}, "train.log")


@HALF.failure(
    "hardware",
    "BLOOM-176B chronicles (layer norms out of step in bf16)",
    right=["ranks-out-of-step"],
    near=["corrupt-weight", "resume-state-missing"],
    verdicts=["act", "watch"],
)
def copies_of_a_norm_part(rng: Generator) -> Evidence:
    """The copies of a layer norm that each tensor-parallel rank holds are no longer equal after a load. The loss creeps
    up over thousands of steps; the norms of the copies part.
    """
    count, at = 6000, int(rng.integers(1500, 3000))
    apart = between(rng, 0.02, 0.15) * ramp(count, at) ** 0.7
    loss = falling(count, 10.8, 2.6) * noise(rng, count, 0.006) * (1 + between(rng, 0.03, 0.12) * ramp(count, at + 300))
    columns = {"loss": loss, "grad_norm": norms(rng, count), "lr": cosine(count, 6e-5)}
    for rank in range(4):
        columns[f"weight_norm/input_layernorm/tp_rank_{rank}"] = (
            41.2 * (1 + 0.02 * ramp(count, 0)) * (1 + apart * (0, 1, -0.7, 2)[rank])
        )
    talk = f" loading checkpoint from /ck at iteration {at}"
    every = np.arange(0, count, 5)
    files = {
        "metrics.csv": table(every, {name: values[every] for name, values in columns.items()}),
        "notes.txt": talk + "\n",
    }
    return Evidence(files, "metrics.csv")


@HALF.failure(
    "hardware",
    "Dixit et al., arXiv:2102.11245 (silent data corruption); Llama 3, arXiv:2407.21783; Ma et al., arXiv:2502.12340",
    right=["corrupt-weight"],
    near=["kernel-fault", "corrupt-gradient"],
)
def weight_leaps_by_a_power_of_two(rng: Generator) -> Evidence:
    """A chip computes wrongly without a word. The weights of one group leap at one step by a power of two, the loss
    leaps with them and stays high.
    """
    count, at = 4000, int(rng.integers(1500, 3300))
    height = between(rng, 1.3, 2.4)
    loss = falling(count, 10.8, 2.6) * noise(rng, count, 0.008) * excursion(count, at, height, between(rng, 500, 3000))
    group = 61.0 * (1 + 0.2 * ramp(count, 0)) * noise(rng, count, 0.001)
    group[at:] *= 2.0 ** int(rng.integers(2, 6))
    columns = {
        "loss": loss,
        "grad_norm": norms(rng, count) * excursion(count, at, 5, 200),
        "lr": cosine(count, 3e-4),
        "weight_norm/layers.17.mlp": group,
        "weight_norm/layers.16.mlp": 60.2 * noise(rng, count, 0.001),
        "weight_norm/embedding": 212 * noise(rng, count, 0.001),
    }
    return Evidence({"metrics.jsonl": jsonl(range(count), columns, step_name="step")}, "metrics.jsonl")


@HALF.failure(
    "hardware",
    "Megatron-LM and DeepSpeed threads on parameter groups that miss parameters",
    wrong=["lr-too-high", "plateau", "weight-decay-high", "attention-logit-growth", "corrupt-gradient", "data-order"],
    verdicts=["watch", "act"],
    column=["layernorm", "layer_norm", "never moves", "does not move", "constant", "unchanged", "norm.weight"],
)
def norms_left_out_of_the_optimizer(rng: Generator) -> Evidence:
    """The gains of the layer norms were left out of the optimizer. Every other weight moves; theirs are what they were
    at the first step, and the loss is a little worse than it should be.
    """
    count = 3000
    columns = {
        "loss": falling(count, 10.9, 3.0) * noise(rng, count, 0.01),
        "grad_norm": norms(rng, count),
        "lr": cosine(count, 3e-4),
        "weight_norm/attention": 71 * (1 + 0.5 * ramp(count, 0) ** 0.5) * noise(rng, count, 0.0006),
        "weight_norm/mlp": 104 * (1 + 0.4 * ramp(count, 0) ** 0.5) * noise(rng, count, 0.0006),
        "weight_norm/layernorm": np.full(count, 45.2548),
        "update_norm/attention": 0.02 * noise(rng, count, 0.1),
        "update_norm/layernorm": np.zeros(count),
    }
    return Evidence({"metrics.csv": table(range(count), columns)}, "metrics.csv")


@HALF.failure(
    "experts",
    "pytorch/torchtitan issue 1246; Wang et al., arXiv:2408.15664",
    right=["router-collapse"],
    near=["dead-experts"],
)
def load_goes_to_a_few_experts(rng: Generator) -> Evidence:
    """The load goes to a few experts within some hundred steps and stays there. The loss falls on as if nothing were
    wrong.
    """
    count, at = 3000, int(rng.integers(300, 1500))
    goes = ramp(count, at, at + int(rng.integers(200, 700)))
    uneven = (0.3 + between(rng, 4, 14) * goes) * noise(rng, count, 0.08)
    columns = {
        "loss": falling(count, 10.9, 2.9) * noise(rng, count, 0.01),
        "grad_norm": norms(rng, count),
        "lr": cosine(count, 4e-4),
        "moe/max_violation": uneven,
        "moe/router_entropy": 2.7 * (1 - 0.85 * goes) * noise(rng, count, 0.02),
        "moe/load_balancing_loss": (1 + 3 * goes) * noise(rng, count, 0.01),
        "moe/dead_experts": np.round(38 * goes),
    }
    return Evidence({"wandb-history.jsonl": jsonl(range(count), columns)}, "wandb-history.jsonl")


@HALF.failure(
    "reward",
    "verl issue 2738; Schulman et al., arXiv:1707.06347",
    right=["kl-blow-up"],
    near=["reward-lost", "sampler-trainer-mismatch"],
)
def divergence_explodes(rng: Generator) -> Evidence:
    """The policy runs far from what its samples were drawn of: the divergence grows many-fold within some steps, the
    norm with it, and the reward is gone.
    """
    count, at = int(rng.integers(220, 420)), int(rng.integers(110, 180))
    goes = ramp(count, at, at + 25)
    columns = {
        "actor/entropy": (0.55 + between(rng, 2, 5) * goes) * noise(rng, count, 0.08),
        "actor/pg_loss": 0.01 * rng.standard_normal(count),
        "actor/ppo_kl": 0.0006 * np.exp(between(rng, 5, 8) * goes) * noise(rng, count, 0.3),
        "actor/kl_loss": 0.002 * np.exp(between(rng, 5, 7.5) * goes) * noise(rng, count, 0.2),
        "actor/pg_clipfrac": np.clip(0.002 + 0.3 * goes, 0, 1) * noise(rng, count, 0.2),
        "actor/grad_norm": 0.22 * (1 + between(rng, 15, 60) * goes) * noise(rng, count, 0.2),
        "actor/lr": np.full(count, 1e-6),
        "critic/rewards/mean": ((0.2 + 0.45 * ramp(count, 0, at)) * (1 - 0.95 * goes)) * noise(rng, count, 0.06),
        "response_length/mean": 620 * (1 + 0.8 * goes) * noise(rng, count, 0.06),
        "perf/throughput": 2210 * noise(rng, count, 0.05),
    }
    return Evidence({"console.log": verl(range(1, count + 1), columns)}, "console.log")


@HALF.failure(
    "reward",
    "DAPO, arXiv:2503.14476 (dynamic sampling); trl issues on a reward spread of 0",
    right=["zero-reward-spread"],
    near=["entropy-collapse", "nothing-gained"],
)
def every_group_the_same(rng: Generator) -> Evidence:
    """Every answer of a group gets the same reward, so that no group has an advantage. Nothing is learned any more; the
    norm is 0.
    """
    steps = np.arange(1, 501)
    count, at = len(steps), int(rng.integers(60, 220))
    goes = ramp(count, at, at + 40)
    columns = {
        "loss": 0.01 * rng.standard_normal(count) * (1 - goes),
        "grad_norm": 0.4 * (1 - goes) * noise(rng, count, 0.3),
        "lr": np.full(count, 1e-6),
        "reward": (0.25 + 0.1 * ramp(count, 0, at)) * (1 - goes) + (0.0 if rng.random() < 0.5 else 1.0) * goes,
        "reward_std": 0.31 * (1 - goes) * noise(rng, count, 0.1),
        "frac_reward_zero_std": np.clip(0.3 + 0.7 * goes, 0, 1),
        "completions/mean_length": 210 * noise(rng, count, 0.08),
        "kl": 0.004 * noise(rng, count, 0.2),
    }
    return Evidence({"trainer_state.json": trainer_state(steps, columns)}, "trainer_state.json")


@HALF.failure(
    "reward",
    "Razin et al., arXiv:2410.08847; Pal et al., arXiv:2402.13228",
    right=["likelihood-displacement"],
    near=["preference-overfit"],
    verdicts=["act", "watch"],
)
def both_answers_become_unlikely(rng: Generator) -> Evidence:
    """Pairs are pushed apart by making both answers unlikely: the margin grows, the loss falls, and the preferred
    answers lose likelihood all the while.
    """
    steps = np.arange(10, 1501, 10)
    count = len(steps)
    goes, depth = ramp(count, 8) ** 0.6, between(rng, 120, 500)
    chosen, rejected = -210 - depth * goes, -240 - 1.9 * depth * goes
    columns = {
        "loss": 0.693 * (1 - 0.9 * goes) * noise(rng, count, 0.06),
        "grad_norm": norms(rng, count, 2, first=9),
        "lr": cosine(count, 5e-6),
        "logps/chosen": chosen * noise(rng, count, 0.02),
        "logps/rejected": rejected * noise(rng, count, 0.02),
        "rewards/chosen": -0.1 * depth * goes,
        "rewards/rejected": -0.19 * depth * goes - 0.1,
        "rewards/margins": 0.09 * depth * goes * noise(rng, count, 0.05),
        "rewards/accuracies": np.clip(0.5 + 0.46 * goes, 0, 0.99),
    }
    return Evidence({"trainer_state.json": trainer_state(steps, columns)}, "trainer_state.json")


@HALF.failure(
    "vision",
    "ultralytics issues on NaN validation losses with AMP on some cards",
    wrong=["lr-too-high", "masked-labels", "destructive-update", "memorisation", "plateau", "gradient-explosion"],
    near=["first-forward-nan", "fp16-overflow", "kernel-fault"],
    verdicts=["act", "watch"],
    column=["val", "nan"],
)
def only_validation_is_nan(rng: Generator) -> Evidence:
    """The losses of the training set fall as they should, and those of the validation are NaN from the first epoch:
    half precision of some cards breaks the evaluation alone.
    """
    count = int(rng.integers(60, 160))
    since = 0 if rng.random() < 0.6 else int(rng.integers(3, 20))
    broken = np.arange(count) >= since
    columns = {
        "time": 41.0 * np.arange(1, count + 1),
        "train/box_loss": falling(count, 2.4, 0.9) * noise(rng, count, 0.01),
        "train/cls_loss": falling(count, 3.6, 0.6) * noise(rng, count, 0.012),
        "train/dfl_loss": falling(count, 1.7, 1.0) * noise(rng, count, 0.006),
        "metrics/precision(B)": np.where(broken, 0, 0.4),
        "metrics/recall(B)": np.where(broken, 0, 0.4),
        "metrics/mAP50(B)": np.where(broken, 0, 0.3),
        "metrics/mAP50-95(B)": np.where(broken, 0, 0.2),
        "val/box_loss": np.where(broken, math.nan, 2.0),
        "val/cls_loss": np.where(broken, math.nan, 2.6),
        "val/dfl_loss": np.where(broken, math.nan, 1.8),
        "lr/pg0": cosine(count, 0.01),
    }
    return Evidence({"results.csv": ultralytics(count, columns)}, "results.csv")


@HALF.failure(
    "vision",
    "Arjovsky and Bottou, arXiv:1701.04862",
    right=["discriminator-wins"],
)
def discriminator_never_wrong(rng: Generator) -> Evidence:
    """The discriminator is never wrong any more. Its loss is nothing, and that of the generator grows for the rest of
    the run.
    """
    steps = np.arange(0, 20000, 50)
    count, at = len(steps), int(rng.integers(80, 240))
    goes = ramp(count, at, at + 60)
    columns = {
        "d_loss": (1.2 * (1 - goes) + 0.002) * noise(rng, count, 0.15),
        "g_loss": (1.1 + between(rng, 6, 16) * goes) * noise(rng, count, 0.12),
        "d_real": np.clip(0.62 + 0.37 * goes, 0, 1) * noise(rng, count, 0.01),
        "d_fake": np.clip(0.36 - 0.355 * goes, 0, 1) * noise(rng, count, 0.05),
    }
    return Evidence({"gan_log.csv": table(steps, columns)}, "gan_log.csv")


@HALF.failure(
    "harmless",
    "Questions of the kind `is this spike normal?` in issue threads of nanoGPT and litgpt",
    right=["hard-batch"],
    near=["bad-data-batch", "batch-and-state", "long-tail-token", "unknown"],
    verdicts=["watch", "healthy"],
)
def one_hard_batch(rng: Generator) -> Evidence:
    """A batch that is hard is in the data. The loss leaps for one row and is back in the next; nothing else moves, and
    nothing is to be done.
    """
    steps = np.arange(5, 3001, 5)
    count = len(steps)
    loss = falling(count, 1.6, 0.95) * noise(rng, count, 0.05)
    loss[int(rng.integers(200, count - 50))] *= between(rng, 1.9, 3)
    columns = {"loss": loss, "lr": cosine(count, 1e-5)}
    return Evidence({"trainer_log.jsonl": llama_factory(steps, columns)}, "trainer_log.jsonl")
