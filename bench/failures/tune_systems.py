"""The half to work with, failures of precision, machines and kinds: rebuilt as what their teams could see.

Its twin, the modules `report_*`, is frozen and stays unread.
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
    megatron,
    noise,
    norms,
    ramp,
    steady,
    table,
    torchtitan,
    trainer_state,
    ultralytics,
    verl,
)

HALF = Half()
Generator = np.random.Generator


@HALF.failure(
    "precision",
    "T5 and mT5 in half precision; Hugging Face threads on `gradient overflow` and loss 0",
    right=["fp16-overflow"],
    near=["zero-loss-nan-gradient", "destructive-update", "masked-labels"],
)
def half_precision_of_a_model_made_for_bf16(rng: Generator) -> Evidence:
    """A model that was trained in bf16 is tuned in fp16. Its activations overflow, more and more rows have no finite
    gradient, and in the end the loss is 0 or NaN.
    """
    steps = np.arange(10, 2001, 10)
    count, at = len(steps), int(rng.integers(60, 150))
    share = 0.05 + 0.95 * ramp(count, at - 30, at)
    loss, gradients = falling(count, 2.6, 1.9, bend=0.1) * noise(rng, count, 0.03), norms(rng, count, 1.2)
    gradients[rng.random(count) < share] = math.nan
    loss[at:] = 0.0 if rng.random() < 0.5 else math.nan
    columns = {"loss": loss, "grad_norm": gradients, "lr": cosine(count, 1e-4)}
    arguments = json.dumps({"fp16": True, "bf16": False, "learning_rate": 1e-4, "max_grad_norm": 1.0})
    files = {"out/trainer_state.json": trainer_state(steps, columns), "out/training_args.json": arguments}
    return Evidence(files, "out/trainer_state.json", "out/training_args.json")


@HALF.failure(
    "precision",
    "MX formats: arXiv:2506.20752; pytorch/ao issue 3356",
    right=["low-precision-saturation"],
    near=["scale-of-zero", "lr-too-high"],
    verdicts=["act", "watch"],
)
def gains_of_a_norm_within_one_block(rng: Generator) -> Evidence:
    """The gains of a layer norm lie so close together that those of a block are all cut to the same value. The
    gradient is biased, and the loss turns from a step on that comes sooner at a higher rate.
    """
    count, at = 5000, int(rng.integers(2500, 4200))
    share = np.clip(between(rng, 0.1, 0.6) * ramp(count, at - 900, at + 500), 0, 1)
    columns = {
        "loss": falling(count, 10.9, 2.8) * noise(rng, count, 0.008) * (1 + between(rng, 0.1, 0.6) * ramp(count, at)),
        "grad_norm": norms(rng, count) * (1 + 8 * ramp(count, at - 200)),
        "lr": cosine(count, 6e-4),
        "saturated_share/layer_norm_weight": share * noise(rng, count, 0.1),
        "saturated_share/mlp": 0.0005 * noise(rng, count, 0.3),
        "zeroed_share/mlp": 0.02 * noise(rng, count, 0.2),
    }
    return Evidence({"metrics.jsonl": jsonl(range(count), columns, step_name="step")}, "metrics.jsonl")


@HALF.failure(
    "precision",
    "Threads on clipping that is left out by a wrapper after an update of a library",
    wrong=["data-order", "memorisation", "plateau", "accumulation-denominator", "metric-wrong", "masked-labels"],
    near=[
        "lr-too-high",
        "hard-batch",
        "gradient-explosion",
        "long-tail-token",
        "batch-and-state",
        "stale-beta2",
        "numerical-cascade",
    ],
    verdicts=["act", "watch"],
    column=["clip", "grad"],
)
def clipping_lost_at_a_restart(rng: Generator) -> Evidence:
    """After a restart gradients are not clipped any more. The printed share of clipped steps is 0 from there on,
    and every large gradient is now a spike of the loss.
    """
    count, at = 5000, int(rng.integers(1800, 3000))
    loss, gradients = falling(count, 10.8, 2.7) * noise(rng, count, 0.007), norms(rng, count)
    clipped = np.where(np.arange(count) < at, 4 + 6 * rng.random(count), 0)
    for place in np.sort(rng.integers(300, count - 100, 16)):
        gradients = gradients * excursion(count, int(place), between(rng, 8, 30), 3)
        if place > at:
            loss = loss * excursion(count, int(place) + 1, between(rng, 1.15, 1.8), 30)
    talk = {
        at: "2026-02-09 11:00:01 | INFO | metaseq.checkpoint_utils | Loaded checkpoint "
        f"ck/checkpoint_{at}.pt (epoch 1 @ {at} updates)"
    }
    columns = {"loss": loss, "grad_norm": gradients, "lr": cosine(count, 1.5e-4), "clip": clipped}
    return Evidence({"train.log": fairseq(range(1, count + 1), columns, chatter=talk)}, "train.log")


@HALF.failure(
    "units",
    "torch elastic and accelerate threads: accumulation that changes with the number of machines",
    right=["accumulation-denominator"],
    near=["misaligned-restart", "resume-state-missing"],
    verdicts=["act", "watch"],
)
def loss_times_accumulation_after_a_restart(rng: Generator) -> Evidence:
    """After a restart on fewer machines the batches are accumulated, and the loss is added up. From there on it is
    a whole multiple of what it was, and falls as before.
    """
    count, at, parts = 4000, int(rng.integers(1500, 2800)), int(rng.choice([2, 4, 8]))
    factor = np.where(np.arange(count) < at, 1, parts)
    columns = {
        "loss": falling(count, 10.9, 2.7) * noise(rng, count, 0.008) * factor,
        "grad_norm": norms(rng, count) * factor,
        "lr": cosine(count, 3e-4),
    }
    talk = {
        at: f"gradient_accumulation_steps: {parts}, world size: {64 // parts}\n"
        f" loading checkpoint from ck at iteration {at}"
    }
    return Evidence({"log.txt": megatron(range(1, count + 1), columns, chatter=talk)}, "log.txt")


@HALF.failure(
    "units",
    "Goyal et al., arXiv:1706.02677; Horovod's rate times the world size",
    right=["lr-discontinuity", "misaligned-restart", "lr-too-high"],
    verdicts=["act", "watch"],
)
def rate_times_the_world_size(rng: Generator) -> Evidence:
    """The rate is multiplied by the number of workers. A restart on more of them makes it leap, and the loss with
    it.
    """
    count, at, factor = 4000, int(rng.integers(1500, 2600)), int(rng.choice([4, 8]))
    rate = np.where(np.arange(count) < at, 1, factor) * cosine(count, 2e-4)
    loss = falling(count, 6.9, 2.0) * noise(rng, count, 0.015) * excursion(count, at + 4, between(rng, 1.3, 2), 900)
    columns = {
        "train_loss": loss,
        "lr": rate,
        "images_per_s": np.where(np.arange(count) < at, 1, factor) * steady(rng, count, 2900),
        "train_acc": np.clip(0.72 * ramp(count, 0) ** 0.4, 0, 1) / excursion(count, at + 4, 1.4, 900),
    }
    return Evidence({"history.csv": table(range(count), columns)}, "history.csv")


@HALF.failure(
    "units",
    "PyTorch CosineAnnealingLR with a T_max that is shorter than the run",
    right=["upside-down-cosine"],
    near=["lr-too-high", "lr-discontinuity"],
    verdicts=["act", "watch"],
)
def cosine_comes_up_again(rng: Generator) -> Evidence:
    """The period of the cosine is shorter than the run. After it the rate rises again, and the loss that was won
    is lost bit by bit.
    """
    count = 5000
    period = int(count * rng.uniform(0.55, 0.75))
    rate = 3e-4 * (0.01 + 0.99 * 0.5 * (1 + np.cos(np.pi * np.arange(count) / period)))
    back = np.clip((np.arange(count) - period) / (count - period), 0, 1)
    loss = falling(count, 10.9, 2.8) * noise(rng, count, 0.008) * (1 + between(rng, 0.03, 0.1) * back)
    columns = {"train_loss": loss, "lr-AdamW": rate, "grad_norm": norms(rng, count)}
    return Evidence({"metrics.csv": table(range(count), columns)}, "metrics.csv")


@HALF.failure(
    "memory of data",
    "Fine-tuning threads on a held-out loss that rises while the training loss falls",
    right=["memorisation"],
    verdicts=["act", "watch"],
)
def held_out_loss_turns(rng: Generator) -> Evidence:
    """The training loss falls without a flaw. The held-out loss has its lowest point early and rises for the rest
    of the run; nobody stopped.
    """
    count = 4000
    turn = int(rng.integers(900, 1800))
    held_out = falling(count, 2.2, 1.35, bend=0.05) + between(rng, 0.15, 0.6) * ramp(count, turn)
    columns = {
        "train_loss": falling(count, 2.2, 0.35, bend=0.3) * noise(rng, count, 0.04),
        "val_loss": held_out * noise(rng, count, 0.004),
        "lr": cosine(count, 1e-4),
        "val_acc": 0.6 + 0.1 * ramp(count, 0, turn) - 0.05 * ramp(count, turn),
    }
    return Evidence(
        {"metrics.csv": table(range(count), columns, sparse={"val_loss": 200, "val_acc": 200})}, "metrics.csv"
    )


@HALF.failure(
    "hardware",
    "MegaScale, arXiv:2402.15627; PyTorch threads on fragmentation and garbage collection that slow a run",
    wrong=["lr-too-high", "plateau", "data-order", "corrupt-gradient", "optimizer-reset", "hard-batch", "memorisation"],
    verdicts=["watch", "act"],
    column=["throughput", "tps", "tokens per", "slow", "step time", "seconds"],
)
def throughput_bleeds_away(rng: Generator) -> Evidence:
    """The throughput falls bit by bit to half within some thousand steps, and comes back at each restart. Loss and
    gradients are as they should be.
    """
    count, life = 6000, int(rng.integers(2200, 4500))
    age = np.arange(count) % life / life
    tps = 6200 * (1 - between(rng, 0.35, 0.6) * age) * noise(rng, count, 0.01)
    columns = {"loss": falling(count, 10.9, 2.6) * noise(rng, count, 0.008), "grad_norm": norms(rng, count), "tps": tps}
    return Evidence({"console.log": torchtitan(range(1, count + 1), columns)}, "console.log")


@HALF.failure(
    "hardware",
    "Llama 3, arXiv:2407.21783 (Xid and ECC errors); OPT-175B logbook",
    right=["corrupt-weight", "kernel-fault", "corrupt-gradient", "device-fault"],
    near=["destructive-update", "numerical-cascade"],
)
def memory_error_then_nan(rng: Generator) -> Evidence:
    """A card reports an uncorrectable memory error and goes on. From that step every loss is NaN; the same steps
    from an older checkpoint on other cards are fine.
    """
    count, at, back = 3000, int(rng.integers(1200, 2400)), 150
    columns = {
        "loss": falling(count, 10.8, 2.7) * noise(rng, count, 0.01),
        "grad_norm": norms(rng, count),
        "lr": cosine(count, 3e-4),
    }
    first = {name: values[: at + 25].copy() for name, values in columns.items()}
    first["loss"][at:], first["grad_norm"][at:] = math.nan, math.nan
    first["nans"] = np.where(np.arange(at + 25) >= at, 1, 0)
    error = {
        at + 1: "[1204411.2] NVRM: Xid (PCI:0000:9d:00): 63, pid=20711, Row Remapper: "
        "New row marked for remapping\n[1204411.2] NVRM: Xid (PCI:0000:9d:00): "
        "94, Contained ECC error"
    }
    text = megatron(range(1, at + 26), first, chatter=error)
    if rng.random() < 0.4:
        return Evidence({"train.log": text}, "train.log")
    second = {name: values[at - back : at + 60] for name, values in columns.items()}
    second["loss"] = np.where(np.arange(back + 60) < back, second["loss"], math.nan)
    again = f" loading checkpoint from ck at iteration {at - back}\n" + megatron(range(at - back + 1, at + 61), second)
    return Evidence({"train.log": text + again}, "train.log")


@HALF.failure(
    "hardware",
    "PyTorch threads on data-parallel replicas that part (buffers, seeds, a broadcast that is left out)",
    right=["ranks-out-of-step"],
    near=["corrupt-weight"],
    verdicts=["act", "watch"],
)
def replicas_part(rng: Generator) -> Evidence:
    """The replicas of a data-parallel run do not hold the same weights any more. A sum over the weights, printed
    for each rank, parts from some step on; the loss of rank 0 looks nearly as it should.
    """
    count, at = 4000, int(rng.integers(800, 2600))
    columns = {
        "loss": falling(count, 10.8, 2.8) * noise(rng, count, 0.008),
        "grad_norm": norms(rng, count),
        "lr": cosine(count, 3e-4),
    }
    common = 1844.3 * (1 + 0.1 * ramp(count, 0))
    for rank in range(4):
        columns[f"param_checksum/rank_{rank}"] = common + (0, 1.7, -0.9, 3.1)[rank] * between(rng, 0.5, 4) * ramp(
            count, at
        )
    return Evidence({"metrics.jsonl": jsonl(range(count), columns, step_name="step")}, "metrics.jsonl")


@HALF.failure(
    "hardware",
    "Threads on adapters whose gradient never arrives (checkpointing without input gradients, frozen by mistake)",
    wrong=[
        "lr-too-high",
        "corrupt-gradient",
        "memorisation",
        "data-order",
        "hard-batch",
        "weight-decay-high",
        "masked-labels",
    ],
    near=["plateau"],
    verdicts=["act", "watch"],
    column=["weight", "never", "constant", "unchanged", "move", "adapter", "lora", "grad"],
)
def adapter_never_moves(rng: Generator) -> Evidence:
    """No gradient arrives at the adapter: its norm is that of the first step for all of the run. The loss scatters
    about where it began.
    """
    count = 1200
    columns = {
        "loss": between(rng, 1.6, 2.3) * noise(rng, count, 0.06),
        "grad_norm": np.zeros(count),
        "lr": cosine(count, 2e-4),
        "lora_A_norm": np.full(count, 18.4413),
        "lora_B_norm": np.zeros(count),
    }
    return Evidence({"metrics.csv": table(range(count), columns)}, "metrics.csv")


@HALF.failure(
    "hardware",
    "Ma et al., arXiv:2502.12340 (silent data corruption in training)",
    right=["corrupt-gradient"],
    near=["kernel-fault", "corrupt-weight"],
    verdicts=["act", "watch"],
)
def gradient_of_one_rank(rng: Generator) -> Evidence:
    """One chip computes gradients that are now and then many times too large. The norm of that rank leaps alone;
    the loss follows some of the times.
    """
    count = 4000
    columns = {"loss": falling(count, 10.8, 2.7) * noise(rng, count, 0.008), "lr": cosine(count, 3e-4)}
    norm = norms(rng, count)
    ranks = {f"grad_norm/rank_{rank}": norm * noise(rng, count, 0.02) for rank in range(8)}
    bad = f"grad_norm/rank_{int(rng.integers(8))}"
    total = norm.copy()
    for at in np.sort(rng.integers(800, count - 50, int(rng.integers(5, 12)))):
        height = between(rng, 20, 400)
        ranks[bad][at] *= height
        total[at] *= height / 2.8
        if rng.random() < 0.5:
            columns["loss"] = columns["loss"] * excursion(count, int(at) + 1, between(rng, 1.05, 1.4), 20)
    return Evidence({"metrics.csv": table(range(count), {**columns, "grad_norm": total, **ranks})}, "metrics.csv")


@HALF.failure(
    "experts",
    "pytorch/torchtitan issue 1246; DeepSeek-V3, arXiv:2412.19437",
    right=["dead-experts"],
    near=["router-collapse"],
    verdicts=["act", "watch"],
)
def experts_die_one_by_one(rng: Generator) -> Evidence:
    """Experts are no longer chosen, one after the other, and never come back. The loss is a little worse than it should
    be, and nothing else tells.
    """
    count = 5000
    dead = np.zeros(count)
    for at in rng.integers(400, 3500, int(rng.integers(6, 20))):
        dead[int(at) :] += 1
    columns = {
        "loss": falling(count, 10.9, 2.9) * noise(rng, count, 0.009),
        "grad_norm": norms(rng, count),
        "lr": cosine(count, 4e-4),
        "num_dead_experts": dead,
        "load_balancing_loss": (1.02 + 0.01 * dead) * noise(rng, count, 0.01),
        "tokens_per_expert/min": np.where(dead > 0, 0, 310) * noise(rng, count, 0.1),
        "tokens_per_expert/max": (900 + 60 * dead) * noise(rng, count, 0.05),
    }
    return Evidence({"metrics.csv": table(range(count), columns)}, "metrics.csv")


@HALF.failure(
    "reward",
    "DAPO, arXiv:2503.14476; Cui et al., arXiv:2505.22617",
    right=["entropy-collapse"],
    near=["zero-reward-spread", "nothing-gained"],
    verdicts=["act", "watch"],
)
def entropy_falls_for_good(rng: Generator) -> Evidence:
    """The entropy of the policy falls to nothing within some tens of steps. The reward stands still from there on."""
    count, at = int(rng.integers(250, 450)), int(rng.integers(40, 90))
    entropy = 0.9 * np.exp(-between(rng, 3.5, 6) * ramp(count, 5, at)) * noise(rng, count, 0.06)
    columns = {
        "actor/entropy": entropy,
        "actor/pg_loss": 0.01 * rng.standard_normal(count),
        "actor/ppo_kl": 0.0006 * noise(rng, count, 0.3),
        "actor/pg_clipfrac": 0.002 * noise(rng, count, 0.3),
        "actor/grad_norm": 0.2 * (1 - 0.85 * ramp(count, 0, at)) * noise(rng, count, 0.2),
        "actor/lr": np.full(count, 1e-6),
        "critic/rewards/mean": (0.15 + 0.25 * ramp(count, 0, at)) * noise(rng, count, 0.05),
        "response_length/mean": 540 * (1 - 0.3 * ramp(count, 0, at)) * noise(rng, count, 0.05),
        "response_length/clip_ratio": 0.02 * noise(rng, count, 0.3),
    }
    return Evidence({"console.log": verl(range(1, count + 1), columns)}, "console.log")


@HALF.failure(
    "reward",
    "arXiv:2510.26788 and 2512.01374 (mismatch of rollout and training engines)",
    right=["sampler-trainer-mismatch"],
    near=["kl-blow-up", "reward-lost"],
)
def engines_do_not_agree(rng: Generator) -> Evidence:
    """The engine that samples and the one that trains give other probabilities to the same tokens. The difference
    grows, then the norm leaps and the reward falls.
    """
    count, at = 500, int(rng.integers(220, 360))
    apart = 0.004 * np.exp(between(rng, 2.5, 4.5) * ramp(count, 60, at)) * noise(rng, count, 0.1)
    goes = ramp(count, at, at + 60)
    columns = {
        "training/rollout_probs_diff_mean": apart,
        "training/rollout_probs_diff_max": np.minimum(apart * 40, 1),
        "training/rollout_actor_probs_pearson_corr": 0.999 - np.minimum(apart, 0.6),
        "actor/entropy": (0.5 + goes) * noise(rng, count, 0.06),
        "actor/grad_norm": 0.2 * (1 + between(rng, 8, 30) * goes) * noise(rng, count, 0.2),
        "actor/ppo_kl": 0.0005 * (1 + 30 * goes) * noise(rng, count, 0.3),
        "critic/rewards/mean": (0.2 + 0.4 * ramp(count, 0, at)) * (1 - 0.9 * goes) * noise(rng, count, 0.05),
        "actor/lr": np.full(count, 1e-6),
        "response_length/mean": 900 * noise(rng, count, 0.05),
    }
    return Evidence({"console.log": verl(range(1, count + 1), columns)}, "console.log")


@HALF.failure(
    "reward",
    "DAPO, arXiv:2503.14476 (overlong answers); huggingface/open-r1 issue 587",
    right=["completions-cut"],
    near=["reward-hacking", "nothing-gained", "reward-lost"],
    verdicts=["act", "watch"],
)
def answers_run_into_the_limit(rng: Generator) -> Evidence:
    """Answers grow until nearly all of them are cut at the largest length. What is cut has no reward, and the
    reward falls back to where it began.
    """
    steps = np.arange(1, 401)
    count, at = len(steps), int(rng.integers(120, 240))
    goes = ramp(count, 40, at)
    columns = {
        "loss": 0.01 * rng.standard_normal(count),
        "grad_norm": 0.3 * noise(rng, count, 0.25),
        "learning_rate": np.full(count, 1e-6),
        "reward": (0.3 + 0.2 * ramp(count, 0, 60)) * (1 - 0.85 * goes) * noise(rng, count, 0.06),
        "reward_std": 0.3 * (1 - 0.7 * goes) * noise(rng, count, 0.1),
        "completions/mean_length": (300 + 700 * goes) * noise(rng, count, 0.03),
        "completions/max_length": np.full(count, 1024.0),
        "completions/clipped_ratio": np.clip(0.03 + 0.95 * goes, 0, 1),
        "kl": 0.003 * (1 + 5 * goes) * noise(rng, count, 0.2),
    }
    return Evidence({"trainer_state.json": trainer_state(steps, columns)}, "trainer_state.json")


@HALF.failure(
    "vision",
    "ultralytics threads on a precision that stays 0 while the losses fall (labels of another format)",
    wrong=["lr-too-high", "fp16-overflow", "gradient-explosion", "collapse", "masked-labels"],
    near=["memorisation", "metric-wrong", "plateau"],
    verdicts=["act", "watch"],
    column=["map", "precision", "recall", "metrics/", "val"],
)
def nothing_is_ever_found(rng: Generator) -> Evidence:
    """The boxes of the validation set are in other units than those of the training set. All training losses fall, and
    precision and recall are 0 at every epoch.
    """
    count = int(rng.integers(50, 150))
    few = np.where(rng.random(count) < 0.05, 1e-4, 0)
    columns = {
        "train/box_loss": falling(count, 2.2, 0.8) * noise(rng, count, 0.01),
        "train/cls_loss": falling(count, 3.4, 0.6) * noise(rng, count, 0.012),
        "train/dfl_loss": falling(count, 1.7, 0.95) * noise(rng, count, 0.006),
        "metrics/precision(B)": few,
        "metrics/recall(B)": few,
        "metrics/mAP50(B)": few,
        "metrics/mAP50-95(B)": few,
        "val/box_loss": between(rng, 3.5, 5) * noise(rng, count, 0.02),
        "val/cls_loss": between(rng, 5, 12) * noise(rng, count, 0.03),
        "val/dfl_loss": 3.4 * noise(rng, count, 0.02),
        "lr/pg0": cosine(count, 0.01),
    }
    return Evidence({"results.csv": ultralytics(count, columns)}, "results.csv")


@HALF.failure(
    "vision",
    "Bowman et al., arXiv:1511.06349; He et al., arXiv:1901.05534 (posterior collapse)",
    wrong=["lr-too-high", "gradient-explosion", "memorisation", "data-order", "hard-batch", "kl-blow-up"],
    near=["plateau", "collapse"],
    verdicts=["act", "watch", "unknown"],
    column=["kl"],
)
def latent_space_is_not_used(rng: Generator) -> Evidence:
    """The divergence of a variational autoencoder falls to nothing within an epoch: the decoder does without the latent
    space. The loss falls a little and stands.
    """
    count, at = 3000, int(rng.integers(100, 500))
    kl = between(rng, 8, 30) * np.exp(-9 * ramp(count, 20, at)) * noise(rng, count, 0.1)
    recon = falling(count, 420, 190) * noise(rng, count, 0.01)
    columns = {"train/loss": recon + kl, "train/recon_loss": recon, "train/kl_loss": kl, "lr": np.full(count, 1e-3)}
    return Evidence({"metrics.csv": table(range(count), columns)}, "metrics.csv")


@HALF.failure(
    "harmless",
    "Questions of the kind `is this normal?`: group_by_length and epoch steps in fine-tuning threads",
    wrong=[
        "lr-too-high",
        "hard-batch",
        "data-order",
        "gradient-explosion",
        "stale-beta2",
        "bad-data-batch",
        "optimizer-reset",
        "corrupt-gradient",
    ],
    near=["badly-shuffled-data", "memorisation", "unknown"],
    verdicts=["healthy", "watch"],
)
def saw_tooth_of_lengths(rng: Generator) -> Evidence:
    """Samples are grouped by length, so that the loss goes in a saw-tooth all of the run. It looks alarming and is
    not.
    """
    steps = np.arange(10, 4001, 10)
    count, period = len(steps), int(rng.integers(20, 60))
    tooth = 1 + between(rng, 0.08, 0.3) * ((np.arange(count) % period) / period - 0.5)
    columns = {
        "loss": falling(count, 1.7, 1.05, bend=0.1) * tooth * noise(rng, count, 0.025),
        "grad_norm": norms(rng, count, 0.9, first=2),
        "lr": cosine(count, 1e-5),
    }
    arguments = json.dumps({"group_by_length": True, "learning_rate": 1e-5, "num_train_epochs": 3})
    return Evidence(
        {"out/trainer_state.json": trainer_state(steps, columns), "out/training_args.json": arguments},
        "out/trainer_state.json",
        "out/training_args.json",
    )
