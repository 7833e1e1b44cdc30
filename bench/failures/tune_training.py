"""The half to work with, failures of training itself: rebuilt as what their teams could see.

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
    llama_factory,
    megatron,
    nanogpt,
    nemo,
    noise,
    norms,
    olmo,
    ramp,
    steady,
    table,
    torchtitan,
    trainer_state,
)

HALF = Half()
Generator = np.random.Generator


@HALF.failure(
    "start",
    "Gradients of deep post-norm transformers: Liu et al., arXiv:2004.08249; BigScience notes on scaled initialisation",
    right=["gradient-explosion"],
    near=["init-too-wide", "lr-too-high", "numerical-cascade"],
)
def residuals_not_scaled_by_depth(rng: Generator) -> Evidence:
    """The weights of the residual branches are not scaled down by the depth. The gradient norm grows from the first
    hundred steps on, by a factor of the depth, and the loss leaves in the warm-up.
    """
    count, at = 2000, int(rng.integers(150, 500))
    grows = np.exp(between(rng, 2.5, 5) * ramp(count, 20, at + 40))
    loss = falling(count, 10.9, 3.0) * noise(rng, count, 0.01)
    loss = np.maximum(loss, between(rng, 7.2, 9) * ramp(count, at, at + 90) * noise(rng, count, 0.012))
    columns = {"loss": loss, "grad_norm": 1.8 * grows * noise(rng, count, 0.2), "lr": cosine(count, 3e-4, warmup=0.25)}
    arguments = {
        "num_layers": 72,
        "hidden_size": 3072,
        "init_method_std": 0.02,
        "apply_residual_connection_post_layernorm": True,
        "lr": 3e-4,
    }
    return Evidence({"log.txt": megatron(range(1, count + 1), columns, arguments=arguments)}, "log.txt")


@HALF.failure(
    "start",
    "nanoGPT and litgpt threads on runs without a warm-up; Ma and Yarats, arXiv:1910.04209",
    right=["lr-too-high"],
    near=["stale-beta2", "gradient-explosion"],
    verdicts=["act", "watch"],
)
def no_warm_up(rng: Generator) -> Evidence:
    """The rate is at its peak from the first step. The loss leaps within the first tens of steps, comes back, and stays
    worse than it should be.
    """
    count = 3000
    height = between(rng, 1.2, 1.8)
    loss = (
        falling(count, 10.9, between(rng, 4.2, 5.2), bend=0.05)
        * noise(rng, count, 0.012)
        * excursion(count, int(rng.integers(4, 30)), height, 60)
    )
    rate = cosine(count, 2e-3, warmup=0.0)
    talk = {0: "warmup_iters = 0\nlearning_rate = 0.002\nbeta2 = 0.95"}
    columns = {"loss": loss, "lr": rate}
    evals = {step: (float(loss[step]), float(loss[step]) * 1.01) for step in range(0, count, 500)}
    return Evidence({"out.log": nanogpt(range(count), columns, evals=evals, chatter=talk)}, "out.log")


@HALF.failure(
    "start",
    "pytorch forum and nanotron threads on NaN after the first updates; Micikevicius et al., arXiv:1710.03740",
    right=["destructive-update"],
    near=["fp16-overflow", "infinite-embedding-gradient", "inf-times-zero", "numerical-cascade"],
)
def one_update_writes_nan(rng: Generator) -> Evidence:
    """An infinite gradient comes once and nothing holds it back. The update writes NaN into the weights, and every loss
    from the next step on is NaN.
    """
    count, at = 1500, int(rng.integers(300, 1200))
    loss, gradients = falling(count, 10.9, 3.2) * noise(rng, count, 0.012), norms(rng, count)
    gradients[at] = math.inf
    loss[at + 1 :], gradients[at + 1 :] = math.nan, math.nan
    return Evidence(
        {"console.log": torchtitan(range(1, count + 1), {"loss": loss, "grad_norm": gradients})}, "console.log"
    )


@HALF.failure(
    "resume",
    "Megatron-LM and NeMo threads on arguments that win over the checkpoint's",
    right=["misaligned-restart", "lr-discontinuity"],
    near=["lr-too-high"],
    verdicts=["act", "watch"],
)
def rate_of_the_command_line(rng: Generator) -> Evidence:
    """A restart takes the rate of the command line, ten times that of the checkpoint. The loss leaps within some
    steps of the resume and a part of what was learned is lost.
    """
    count, at = 3000, int(rng.integers(1000, 2200))
    factor = between(rng, 4, 12)
    rate = cosine(count, 1e-4)
    rate[at:] *= factor
    loss = falling(count, 10.8, 2.6) * noise(rng, count, 0.01) * excursion(count, at + 5, 1 + 0.06 * factor, 900)
    columns = {"loss": loss, "lr": rate, "grad_norm": norms(rng, count) * excursion(count, at, factor / 2, 300)}
    talk = {
        at: "[NeMo I 2026-02-11 08:12:01 nemo_model_checkpoint:302] Restoring "
        f"states from the checkpoint path at results/checkpoints/step={at}.ckpt"
    }
    return Evidence({"nemo_log.txt": nemo(range(count), columns, chatter=talk)}, "nemo_log.txt")


@HALF.failure(
    "resume",
    "transformers threads on a missing optimizer.pt and FSDP checkpoints without optimizer state",
    right=["optimizer-reset"],
    near=["resume-state-missing", "misaligned-restart"],
    verdicts=["act", "watch"],
)
def optimizer_file_is_missing(rng: Generator) -> Evidence:
    """A fine-tune is resumed where the optimizer's file was deleted to save space. The gradient norm and the loss
    leap at the first rows after it, and come back.
    """
    steps = np.arange(10, 6001, 10)
    count = len(steps)
    at = int(rng.integers(200, 450))
    loss = (
        falling(count, 2.4, 1.5, bend=0.1)
        * noise(rng, count, 0.025)
        * excursion(count, at, between(rng, 1.2, 1.7), between(rng, 5, 20))
    )
    columns = {
        "loss": loss,
        "grad_norm": norms(rng, count, 0.8) * excursion(count, at, 4, 8),
        "lr": cosine(count, 2e-5),
    }
    warned = (
        "There were missing keys in the checkpoint model loaded: [].\nWARNING: "
        f"optimizer.pt not found in out/checkpoint-{steps[at]}, the optimizer "
        "starts anew\n"
    )
    files = {"out/trainer_state.json": trainer_state(steps, columns), "out/train.err": warned}
    return Evidence(files, "out/trainer_state.json")


@HALF.failure(
    "resume",
    "transformers --ignore_data_skip; lightning threads on samplers that begin again",
    right=["data-order"],
    near=["duplicate-batch", "memorisation"],
    verdicts=["act", "watch"],
)
def the_same_start_after_each_resume(rng: Generator) -> Evidence:
    """A job is stopped each few hours, and each time the loader begins at the same first sample. The loss right after
    each resume is lower than right before it, more so each time.
    """
    count, length = 6000, int(rng.integers(900, 1300))
    part = np.arange(count) // length
    depth = between(rng, 0.02, 0.05)
    loss = falling(count, 10.9, 2.9) * (1 - depth * part) * noise(rng, count, 0.008)
    talk = {
        k * length: f"2026-01-0{k} host-00 olmo.train:212 INFO Loading checkpoint from "
        f"runs/400m/step{k * length}\n2026-01-0{k} host-00 olmo.data:71 INFO "
        "Data loader start_index = 0"
        for k in range(1, int(part[-1]) + 1)
    }
    columns = {
        "train/CrossEntropyLoss": loss,
        "optim/total_grad_norm": norms(rng, count),
        "optim/learning_rate_group0": cosine(count, 4e-4),
        "eval/validation/CrossEntropyLoss": falling(count, 10.9, 2.95) * noise(rng, count, 0.001),
    }
    return Evidence({"train.log": olmo(range(1, count + 1), columns, chatter=talk)}, "train.log")


@HALF.failure(
    "resume",
    "transformers warning on newly initialized weights after a change of the head",
    right=["resume-state-missing"],
    near=["init-too-wide", "optimizer-reset", "misaligned-restart"],
    verdicts=["act", "watch"],
)
def weights_missing_in_the_file(rng: Generator) -> Evidence:
    """A part of the weights is not in the file that a run is continued from, and is made anew. The loss begins far
    above where it stopped, and needs thousands of steps to come back.
    """
    count, at = 4000, int(rng.integers(1500, 2600))
    height = between(rng, 1.5, 2.6)
    loss = falling(count, 11, 2.8) * noise(rng, count, 0.01) * excursion(count, at, height, between(rng, 150, 700))
    columns = {"loss": loss, "grad_norm": norms(rng, count) * excursion(count, at, 8, 100), "lr": cosine(count, 3e-4)}
    talk = {
        at: "Some weights of the model checkpoint were not used: ['model.layers.31.*']\n"
        "Some weights were newly initialized: ['model.layers.31.mlp.down_proj.weight', "
        f"...]\n loading checkpoint from ck at iteration {at}"
    }
    return Evidence({"log.txt": megatron(range(1, count + 1), columns, chatter=talk)}, "log.txt")


@HALF.failure(
    "data",
    "LLaMA-Factory threads on cutoff_len and train_on_prompt; unsloth notes on truncated answers",
    right=["masked-labels", "zero-loss-nan-gradient"],
)
def answers_cut_off(rng: Generator) -> Evidence:
    """Prompts are longer than the largest length, so that the answers are cut off whole. From the shard of long
    prompts on nothing has a label: the loss is 0.
    """
    steps = np.arange(5, 2001, 5)
    count, at = len(steps), int(rng.integers(40, 300))
    loss = falling(count, 1.7, 1.1, bend=0.1) * noise(rng, count, 0.05)
    loss[at:] = 0.0
    columns = {
        "loss": loss,
        "lr": cosine(count, 5e-5),
        "grad_norm": np.where(np.arange(count) < at, norms(rng, count, 0.7), 0.0),
    }
    settings = (
        "stage: sft\ncutoff_len: 512\ntemplate: default\nper_device_train_batch_size: "
        "2\ngradient_accumulation_steps: 8\n"
    )
    files = {"saves/trainer_log.jsonl": llama_factory(steps, columns), "saves/train.yaml": settings}
    return Evidence(files, "saves/trainer_log.jsonl", "saves/train.yaml")


@HALF.failure(
    "data",
    "Threads on datasets that are written source by source and not shuffled (streaming with a small buffer)",
    right=["badly-shuffled-data"],
    near=["data-order", "bad-data-batch"],
    verdicts=["act", "watch"],
)
def sources_one_after_the_other(rng: Generator) -> Evidence:
    """The corpus is streamed source by source with a small shuffle buffer. The training loss goes up and down in long
    steps as the sources change, and the held-out loss knows nothing of it.
    """
    count = 6000
    edges = np.sort(rng.integers(600, count - 300, int(rng.integers(4, 8))))
    level = np.ones(count)
    for at in edges:
        level[int(at) :] = between(rng, 0.82, 1.25)
    loss = falling(count, 10.8, 2.8) * level * noise(rng, count, 0.01)
    held_out = falling(count, 10.8, 2.85) * noise(rng, count, 0.001)
    columns = {
        "train/loss": loss,
        "val/loss": held_out,
        "train/lr": cosine(count, 3e-4),
        "train/grad_norm": norms(rng, count),
    }
    return Evidence({"metrics.csv": table(range(count), columns, sparse={"val/loss": 50})}, "metrics.csv")


@HALF.failure(
    "data",
    "Tokenizers whose new tokens have no trained embedding: Hugging Face threads on resize_token_embeddings",
    wrong=[
        "lr-discontinuity",
        "optimizer-reset",
        "accumulation-denominator",
        "plateau",
        "stale-beta2",
        "corrupt-gradient",
    ],
    near=["long-tail-token", "init-too-wide", "hard-batch", "bad-data-batch", "lr-too-high"],
    verdicts=["act", "watch", "unknown"],
    column=["embed", "token", "start", "first", "loss"],
)
def new_tokens_without_embeddings(rng: Generator) -> Evidence:
    """Special tokens are added and their embeddings made at random with another scale. The loss begins several
    times above that of the base model and is noisy wherever those tokens stand.
    """
    steps = np.arange(10, 3001, 10)
    count = len(steps)
    loss = falling(count, between(rng, 5, 8), 1.6, bend=0.03) * noise(rng, count, 0.05)
    columns = {
        "loss": loss,
        "grad_norm": norms(rng, count, 2, first=60, size=0.4),
        "lr": cosine(count, 2e-5),
        "grad_norm_embed": norms(rng, count, 1.8, first=58, size=0.4),
        "grad_norm_layers": norms(rng, count, 0.4, first=3),
    }
    return Evidence({"trainer_state.json": trainer_state(steps, columns)}, "trainer_state.json")


@HALF.failure(
    "data",
    "OPT-175B logbook and Gopher, arXiv:2112.11446 (data quality); mojibake and binary in web corpora",
    right=["bad-data-batch"],
    near=["hard-batch", "badly-shuffled-data", "long-tail-token"],
    verdicts=["watch", "act"],
)
def a_shard_of_binary(rng: Generator) -> Evidence:
    """A shard of the corpus holds binary that was read as text. The loss is higher for as many steps as the shard
    lasts, with large gradients, and is back on its curve after it.
    """
    count, at, length = 5000, int(rng.integers(1500, 4200)), int(rng.integers(20, 120))
    inside = (np.arange(count) >= at) & (np.arange(count) < at + length)
    loss = falling(count, 10.9, 2.7) * noise(rng, count, 0.008) * np.where(inside, between(rng, 1.3, 2), 1)
    gradients = norms(rng, count) * np.where(inside, between(rng, 3, 9), 1)
    columns = {"loss": loss, "grad_norm": gradients, "lr": cosine(count, 3e-4), "wps": steady(rng, count, 91000)}
    return Evidence({"train.log": fairseq(range(1, count + 1), columns)}, "train.log")


@HALF.failure(
    "instability",
    "Kimi K2, arXiv:2507.20534 (QK-clip)",
    right=["attention-logit-growth"],
    near=["lr-too-high"],
    verdicts=["act", "watch"],
)
def attention_logits_over_a_thousand(rng: Generator) -> Evidence:
    """With a matrix optimizer the largest attention logits grow beyond a thousand within some ten thousand steps.
    The loss does not show it yet.
    """
    count = 8000
    logits = (
        15
        * np.exp(math.log(between(rng, 40, 150)) * ramp(count, 500, int(rng.integers(5500, 7900))))
        * noise(rng, count, 0.06)
    )
    columns = {
        "loss": falling(count, 11, 2.3) * noise(rng, count, 0.007),
        "grad_norm": norms(rng, count),
        "lr": cosine(count, 2e-4),
        "max_attn_logits": logits,
        "tokens_per_s": steady(rng, count, 410000),
    }
    settings = "optimizer: muon\nlr: 2.0e-4\nweight_decay: 0.1\nqk_norm: false\n"
    return Evidence(
        {"run/wandb-history.jsonl": jsonl(range(count), columns), "run/config.yaml": settings},
        "run/wandb-history.jsonl",
        "run/config.yaml",
    )


@HALF.failure(
    "instability",
    "Molybog et al., arXiv:2304.09871; Wortsman et al., arXiv:2304.13013 (beta2 and spikes)",
    right=["stale-beta2"],
    near=["lr-too-high", "hard-batch", "batch-and-state"],
    verdicts=["act", "watch"],
)
def second_moment_of_long_ago(rng: Generator) -> Evidence:
    """A beta2 of 0.999 and more remembers the small gradients of a quiet time. When the signal changes the updates
    are many times too large: the loss spikes again and again, longer than a batch explains.
    """
    count = 8000
    loss, gradients, update = (
        falling(count, 10.8, 2.6) * noise(rng, count, 0.007),
        norms(rng, count),
        0.9 * noise(rng, count, 0.03),
    )
    for at in np.sort(rng.integers(1500, count - 300, int(rng.integers(5, 11)))):
        loss = loss * excursion(count, int(at) + 2, between(rng, 1.15, 1.7), between(rng, 30, 120))
        gradients = gradients * excursion(count, int(at), between(rng, 4, 12), 20)
        update = update * excursion(count, int(at), between(rng, 2.5, 6), 15)
    columns = {"loss": loss, "grad_norm": gradients, "lr": cosine(count, 3e-4), "update_rms": update}
    settings = json.dumps(
        {"optimizer": "adamw", "lr": 3e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
    )
    return Evidence(
        {"run/metrics.csv": table(range(count), columns), "run/config.json": settings},
        "run/metrics.csv",
        "run/config.json",
    )


@HALF.failure(
    "instability",
    "Chowdhery et al., arXiv:2204.02311 (z-loss); Wortsman et al., arXiv:2309.14322 (output logits drift)",
    right=["output-logit-growth"],
    near=["lr-too-high", "weight-decay-low"],
    verdicts=["act", "watch"],
)
def output_logits_drift(rng: Generator) -> Evidence:
    """Nothing holds the normaliser of the output near 1: the logits drift away over thousands of steps. Late in the run
    the gradients grow and the loss follows.
    """
    count, at = 7000, int(rng.integers(4800, 6300))
    columns = {
        "train/CrossEntropyLoss": falling(count, 10.9, 2.6)
        * noise(rng, count, 0.007)
        * (1 + between(rng, 0.1, 0.5) * ramp(count, at)),
        "train/ZLoss": 1e-4 * (3 + between(rng, 200, 900) * ramp(count, 800) ** 2) * noise(rng, count, 0.03),
        "train/logits_mean": -between(rng, 20, 60) * ramp(count, 300) * noise(rng, count, 0.01),
        "train/logits_max": 18 + between(rng, 80, 200) * ramp(count, 300) * noise(rng, count, 0.02),
        "optim/total_grad_norm": norms(rng, count) * (1 + 5 * ramp(count, at - 600)),
        "optim/learning_rate_group0": cosine(count, 1e-3),
    }
    return Evidence({"train.log": olmo(range(1, count + 1), columns)}, "train.log")


@HALF.failure(
    "instability",
    "Threads on weight norms without decay; Lyle et al., arXiv:2407.01800 (norm growth and the effective rate)",
    right=["weight-decay-low"],
    near=["output-logit-growth", "plateau"],
    verdicts=["act", "watch"],
)
def weights_grow_without_decay(rng: Generator) -> Evidence:
    """Without decay the norm of the weights grows without an end. The rate that works shrinks with it, and the
    loss falls less and less and turns at last.
    """
    count = 8000
    weights = 120 * (1 + between(rng, 4, 12) * ramp(count, 0) ** 0.8) * noise(rng, count, 0.001)
    loss = falling(count, 10.8, 3.0) * noise(rng, count, 0.007) * (1 + between(rng, 0.03, 0.12) * ramp(count, 5000))
    columns = {"loss": loss, "grad_norm": norms(rng, count), "params_norm": weights, "lr": np.full(count, 1e-3)}
    arguments = {"lr": 1e-3, "min_lr": 1e-3, "weight_decay": 0.0, "lr_decay_style": "constant", "adam_beta2": 0.95}
    return Evidence({"log.txt": megatron(range(1, count + 1), columns, arguments=arguments)}, "log.txt")
