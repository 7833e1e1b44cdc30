"""The frozen half: documented failures that were written down before the rules were touched, and are never tuned to.

Do not read this module while you work on the diagnosis, and do not change it: `python bench/documented.py --half report`
prints the table, which is all that is to be known of it. What is worked with is in `tune_half.py`.
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
    ultralytics,
    verl,
)

HALF = Half()
Generator = np.random.Generator


@HALF.failure(
    "start",
    "BigScience, chronicles of the 104B runs; Megatron-LM --init-method-std",
    right=["init-too-wide"],
    verdicts=["act", "watch"],
)
def initial_weights_too_wide(rng: Generator) -> Evidence:
    """A model of many layers begins far above the loss of guessing, because its initial weights are too wide. It comes
    down, but late and with large gradients.
    """
    steps = np.arange(10, 6001, 10)
    count, begin = len(steps), between(rng, 25, 70)
    loss = falling(count, begin, 3.1, bend=0.006, power=0.9) * noise(rng, count, 0.012)
    columns = {
        "loss": loss,
        "grad_norm": norms(rng, count, 1.2, first=between(rng, 80, 900)),
        "lr": cosine(count, 6e-5),
    }
    arguments = {
        "num_layers": 64,
        "hidden_size": 11600,
        "init_method_std": round(between(rng, 0.02, 0.06), 4),
        "seq_length": 2048,
        "padded_vocab_size": 50432,
        "lr": 6e-5,
        "clip_grad": 1.0,
        "fp16": True,
        "adam_beta2": 0.95,
        "weight_decay": 0.1,
    }
    return Evidence({"main_log.txt": megatron(steps, columns, arguments=arguments)}, "main_log.txt")


@HALF.failure(
    "start",
    "Wortsman et al., arXiv:2309.14322 (small-scale proxies); nanoGPT issues on diverging runs",
    right=["lr-too-high"],
    near=["collapse", "gradient-explosion"],
)
def peak_rate_too_high(rng: Generator) -> Evidence:
    """The rate goes to its peak within a few steps. The loss stops falling there, climbs, and stays near the entropy of
    single tokens.
    """
    count = 3000
    peak, at = between(rng, 4e-3, 2e-2), int(rng.integers(160, 420))
    healthy = falling(count, 10.9, 3.4) * noise(rng, count, 0.012)
    broken = 3.4 + (between(rng, 6.2, 7.6) - 3.4) * ramp(count, at, at + int(rng.integers(40, 200)))
    loss = np.where(np.arange(count) < at, healthy, np.maximum(healthy, broken * noise(rng, count, 0.01)))
    gradients = norms(rng, count, 0.5) * (
        1 + between(rng, 8, 40) * ramp(count, at - 60, at + 60) * noise(rng, count, 0.3)
    )
    columns = {"loss": loss, "grad_norm": gradients, "lr": cosine(count, peak, warmup=0.1)}
    return Evidence({"console.log": torchtitan(range(1, count + 1), columns)}, "console.log")


@HALF.failure(
    "start",
    "TransformerEngine and torchtitan issue threads on NaN at step 1",
    right=["first-forward-nan"],
    near=["scale-of-zero", "softmax-overflow"],
)
def nothing_finite_from_the_first_row(rng: Generator) -> Evidence:
    """The very first loss is NaN, and everything after it: a fused kernel, or weights that were loaded wrong. No update
    had been made yet.
    """
    steps = np.arange(1, int(rng.integers(40, 200)))
    nothing = np.full(len(steps), math.nan)
    columns = {"loss": nothing, "grad_norm": nothing, "lr": cosine(len(steps), 3e-4, warmup=0.5)}
    return Evidence({"trainer_state.json": trainer_state(steps * 10, columns)}, "trainer_state.json")


@HALF.failure(
    "resume",
    "Megatron-LM --override-opt_param-scheduler threads; transformers issues on the scheduler after a resume",
    right=["misaligned-restart"],
    near=["lr-discontinuity", "optimizer-reset"],
    verdicts=["act", "watch"],
)
def scheduler_not_loaded(rng: Generator) -> Evidence:
    """After a restart the rate is back at its peak: the scheduler was not loaded. The loss leaps and takes long to
    return.
    """
    count = 4000
    at = int(rng.integers(2200, 3200))
    rate = cosine(count, 3e-4)
    rate[at:] = cosine(count, 3e-4)[: count - at] if rng.random() < 0.5 else 3e-4
    loss = falling(count, 10.8, 2.6) * noise(rng, count, 0.012) * excursion(count, at + 8, between(rng, 1.12, 1.4), 500)
    columns = {"loss": loss, "grad_norm": norms(rng, count) * excursion(count, at + 8, 3, 300), "lr": rate}
    talk = {at: f" loading checkpoint from /checkpoints/7b at iteration {at - 1}\n  successfully loaded checkpoint"}
    steps = range(1, count + 1)
    arguments = {"lr": 3e-4, "min_lr": 3e-5, "lr_decay_style": "cosine", "train_iters": count, "bf16": True}
    return Evidence({"train.log": megatron(steps, columns, arguments=arguments, chatter=talk)}, "train.log")


@HALF.failure(
    "resume",
    "Megatron-LM --no-load-optim; Hugging Face forum threads on a spike after resume",
    right=["optimizer-reset"],
    near=["resume-state-missing", "misaligned-restart"],
    verdicts=["act", "watch"],
)
def moments_begin_at_nothing(rng: Generator) -> Evidence:
    """A run is started again from weights alone. The moments begin at nothing, so the first updates are of full size in
    every direction: the loss leaps at the resume and heals within some hundred steps.
    """
    count, at = 3000, int(rng.integers(1200, 2400))
    height = between(rng, 1.15, 1.9)
    loss = (
        falling(count, 10.8, 2.7) * noise(rng, count, 0.012) * excursion(count, at + 3, height, between(rng, 40, 200))
    )
    columns = {"loss": loss, "grad_norm": norms(rng, count) * excursion(count, at, 4, 60), "lr": cosine(count, 2e-4)}
    talk = {
        at: f" > loading checkpoint from ckpts/iter_{at:07d}\nunable to load optimizer from checkpoint, exiting is off: --no-load-optim\n  successfully loaded checkpoint at iteration {at}"
    }
    arguments = {
        "no_load_optim": True,
        "no_load_rng": True,
        "lr": 2e-4,
        "optimizer": "adam",
        "adam_beta2": 0.95,
        "load": "ckpts",
    }
    return Evidence(
        {"train.log": megatron(range(1, count + 1), columns, arguments=arguments, chatter=talk)}, "train.log"
    )


@HALF.failure(
    "resume",
    "Pythia and OLMo notes on data order; nanotron and litgpt issues on skipping batches at a resume",
    right=["data-order"],
    near=["duplicate-batch", "memorisation"],
    verdicts=["act", "watch"],
)
def data_from_the_start_again(rng: Generator) -> Evidence:
    """After a restart the loader begins at the first document again. The loss is lower than before for as long as the
    data is known, and comes back to its curve where new data begins.
    """
    count, at = 5000, int(rng.integers(2000, 3000))
    drop = 1 - between(rng, 0.04, 0.12) * (ramp(count, at, at + 1) - ramp(count, 2 * at, 2 * at + 1))
    loss = falling(count, 10.9, 2.8) * noise(rng, count, 0.008) * drop
    talk = {
        at: f"resuming from checkpoint step-{at}.ckpt\ndataloader state not found in checkpoint, starting from the beginning of the dataset"
    }
    evals = {step: (float(loss[step]), float(falling(count, 10.9, 2.82)[step])) for step in range(0, count, 250)}
    return Evidence({"log.txt": nanogpt(range(count), {"loss": loss}, evals=evals, chatter=talk)}, "log.txt")


@HALF.failure(
    "resume",
    "DeepSpeed and FSDP threads on optimizer state saved in bf16",
    right=["resume-state-missing"],
    near=["optimizer-reset", "misaligned-restart"],
    verdicts=["act", "watch"],
)
def state_saved_in_half_precision(rng: Generator) -> Evidence:
    """Moments and master weights were saved in half precision. Each resume costs a small leap, and the curve between
    them falls less than before the first.
    """
    count = 6000
    stops = [int(at) for at in np.linspace(1500, 5200, 4) + rng.integers(-120, 120, 4)]
    loss = falling(count, 10.9, 2.7) * noise(rng, count, 0.008)
    for at in stops:
        loss = loss * excursion(count, at, between(rng, 1.03, 1.09), 400) * (1 + 0.006 * ramp(count, at, at + 1))
    talk = {
        at: f"2026-01-04 host-00 olmo.train:212 INFO Loading checkpoint from runs/1b/step{at}\n2026-01-04 host-00 olmo.checkpoint:88 WARNING exp_avg: checkpoint dtype torch.bfloat16, expected torch.float32, casting"
        for at in stops
    }
    columns = {
        "train/CrossEntropyLoss": loss,
        "train/Perplexity": np.exp(loss),
        "optim/total_grad_norm": norms(rng, count),
        "optim/learning_rate_group0": cosine(count, 4e-4),
        "throughput/device/tokens_per_second": steady(rng, count, 12100),
    }
    return Evidence({"olmo.log": olmo(range(1, count + 1), columns, chatter=talk)}, "olmo.log")


@HALF.failure(
    "resume",
    "transformers issues on tie_word_embeddings after a conversion",
    right=["resume-state-missing"],
    near=["init-too-wide", "optimizer-reset", "misaligned-restart"],
    verdicts=["act", "watch"],
)
def head_made_anew_at_the_load(rng: Generator) -> Evidence:
    """The output head is tied to the embedding; a conversion wrote it away untied and it was made anew at the load. The
    loss begins the second attempt above that of guessing and falls fast.
    """
    count, at = 1600, int(rng.integers(600, 1100))
    loss = falling(count, 11.0, 3.0) * noise(rng, count, 0.012)
    later = falling(count - at, between(rng, 10.9, 12.5), 3.3, bend=0.03) * noise(rng, count - at, 0.012)
    loss[at:] = np.maximum(later, loss[at:])
    talk = {
        at: "Some weights of LlamaForCausalLM were not initialized from the model checkpoint and are newly initialized: ['lm_head.weight']\nYou should probably TRAIN this model on a down-stream task to be able to use it for predictions and inference."
    }
    columns = {"loss": loss, "lr": cosine(count, 3e-4), "grad_norm": norms(rng, count) * excursion(count, at, 6, 60)}
    return Evidence(
        {"nemo_log_globalrank-0.txt": nemo(range(count), columns, chatter=talk)}, "nemo_log_globalrank-0.txt"
    )


@HALF.failure(
    "data",
    "trl DataCollatorForCompletionOnlyLM warnings; LLaMA-Factory and unsloth threads on loss 0",
    right=["masked-labels", "zero-loss-nan-gradient"],
)
def no_label_left(rng: Generator) -> Evidence:
    """No token of an example is left to learn from: the template of the answers is not found, so each label is -100.
    The loss is 0 and the gradient 0 or NaN.
    """
    steps = np.arange(10, 1501, 10)
    count, at = len(steps), int(rng.integers(0, 60))
    loss = falling(count, 1.8, 1.1) * noise(rng, count, 0.06)
    loss[at:] = 0.0
    gradients = norms(rng, count, 0.9)
    gradients[at:] = 0.0 if rng.random() < 0.5 else math.nan
    state = trainer_state(steps, {"loss": loss, "grad_norm": gradients, "lr": cosine(count, 2e-5)})
    said = (
        "UserWarning: Could not find response key `### Answer:` in the following instance: ... This instance will be ignored in loss calculation.\n"
        * 12
    )
    return Evidence(
        {"checkpoint-1500/trainer_state.json": state, "checkpoint-1500/stderr.txt": said},
        "checkpoint-1500/trainer_state.json",
    )


@HALF.failure(
    "data",
    "Hugging Face forum and LLaMA-Factory threads on a wrong tokenizer or chat template",
    wrong=[
        "lr-too-high",
        "lr-discontinuity",
        "hard-batch",
        "bad-data-batch",
        "long-tail-token",
        "accumulation-denominator",
        "plateau",
        "stale-beta2",
    ],
    near=["init-too-wide"],
    verdicts=["act", "watch", "unknown"],
    column=["start", "begin", "guess", "uniform", "vocab", "tokenizer", "first"],
)
def tokenizer_of_another_model(rng: Generator) -> Evidence:
    """A model is fine-tuned with the tokenizer of another one. The loss begins at 10 and more, where a model of that
    kind begins at 2, and falls as if it were trained from nothing.
    """
    steps = np.arange(10, 2001, 10)
    count = len(steps)
    loss = falling(count, between(rng, 9.5, 13), between(rng, 4.2, 5.5), bend=0.05) * noise(rng, count, 0.04)
    columns = {"loss": loss, "grad_norm": norms(rng, count, 3, first=40), "lr": cosine(count, 1e-5)}
    config = json.dumps(
        {"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "_name_or_path": "base-7b-chat"}
    )
    files = {"out/trainer_state.json": trainer_state(steps, columns), "out/config.json": config}
    return Evidence(files, "out/trainer_state.json", "out/config.json")


@HALF.failure(
    "data",
    "Hernandez et al., arXiv:2205.10487 (repeated data); Lee et al., arXiv:2107.06499 (deduplication)",
    right=["memorisation", "duplicate-batch"],
    near=["badly-shuffled-data", "data-order"],
    verdicts=["act", "watch"],
)
def documents_hundreds_of_times(rng: Generator) -> Evidence:
    """A part of the corpus stands in it hundreds of times. The training loss dives while those documents come again and
    again; the held-out loss turns up at the same time.
    """
    count, at = 5000, int(rng.integers(1800, 3000))
    depth = between(rng, 0.12, 0.35)
    loss = falling(count, 10.8, 2.9) * noise(rng, count, 0.012) * (1 - depth * ramp(count, at, at + 1200))
    held_out = (
        falling(count, 10.8, 2.95)
        * (1 + between(rng, 0.04, 0.12) * ramp(count, at, at + 1500))
        * noise(rng, count, 0.002)
    )
    columns = {
        "train/loss": loss,
        "val/loss": held_out,
        "train/grad_norm": norms(rng, count),
        "lr": cosine(count, 3e-4),
    }
    return Evidence(
        {"wandb-history.jsonl": jsonl(range(count), columns, sparse={"val/loss": 100})}, "wandb-history.jsonl"
    )


@HALF.failure(
    "data",
    "OLMo 2, arXiv:2501.00656 (repeated n-grams)",
    right=["bad-data-batch"],
    near=["hard-batch", "long-tail-token", "batch-and-state"],
    verdicts=["watch", "act"],
)
def batches_of_repeated_ngrams(rng: Generator) -> Evidence:
    """Stretches of one token again and again, thousands long, come in a batch. The loss and the norm leap in the rows
    that hold them and are back at once after them; with the filter in place they are gone.
    """
    count = 4000
    loss, gradients = falling(count, 10.9, 2.5) * noise(rng, count, 0.008), norms(rng, count)
    for at in rng.integers(900, count - 30, int(rng.integers(3, 7))):
        burst = int(rng.integers(2, 7))
        loss[at : at + burst] *= between(rng, 1.25, 1.9) * noise(rng, burst, 0.05)
        gradients[at : at + burst] *= between(rng, 6, 40)
    columns = {
        "train/CrossEntropyLoss": loss,
        "optim/total_grad_norm": gradients,
        "optim/learning_rate_group0": cosine(count, 4e-4),
        "data/repeated_ngram_share": np.where(gradients > 4 * np.median(gradients), 0.41, 0.0004)
        * noise(rng, count, 0.2),
    }
    return Evidence({"train.log": olmo(range(1, count + 1), columns)}, "train.log")


@HALF.failure(
    "instability",
    "Dehghani et al., arXiv:2302.05442 (ViT-22B); Zhai et al., arXiv:2303.06296 (entropy collapse of attention)",
    right=["attention-logit-growth"],
    near=["lr-too-high", "output-logit-growth"],
)
def attention_logits_grow_until_it_leaves(rng: Generator) -> Evidence:
    """Attention logits grow from layer to layer for thousands of steps while the loss is fine. Then softmax saturates
    and the loss leaves.
    """
    count, at = 6000, int(rng.integers(4200, 5300))
    logits = 9 * np.exp(math.log(between(rng, 60, 900)) * ramp(count, 600, at)) * noise(rng, count, 0.08)
    loss = (
        falling(count, 7.0, 2.4) * noise(rng, count, 0.008) * (1 + between(rng, 0.4, 1.4) * ramp(count, at, at + 300))
    )
    columns = {
        "train/loss": loss,
        "train/grad_norm": norms(rng, count) * (1 + 20 * ramp(count, at - 80, at + 200)),
        "train/max_attention_logit": logits,
        "train/attention_entropy": 4.2 * (1 - 0.95 * ramp(count, 600, at)) * noise(rng, count, 0.02),
        "train/learning_rate": cosine(count, 1e-3),
        "train/images_per_sec": steady(rng, count, 8400),
    }
    every = np.arange(0, count, 10)
    return Evidence(
        {"metrics.csv": table(every, {name: values[every] for name, values in columns.items()})}, "metrics.csv"
    )


@HALF.failure(
    "instability",
    "GLM-130B, arXiv:2210.02414 (embedding gradient shrink)",
    right=["long-tail-token"],
    near=["stale-beta2", "hard-batch", "lr-too-high", "infinite-embedding-gradient", "bad-data-batch"],
    verdicts=["act", "watch"],
)
def embedding_gradient_leads(rng: Generator) -> Evidence:
    """The gradient of the embedding leaps some steps ahead of each spike of the loss, and nothing else does so early.
    The team shrank that gradient and had peace.
    """
    count = 8000
    loss, total = falling(count, 10.5, 2.6) * noise(rng, count, 0.01), norms(rng, count)
    embedding, others = 0.3 * norms(rng, count), 0.9 * norms(rng, count)
    for at in np.sort(rng.integers(1500, count - 400, int(rng.integers(4, 8)))):
        height = between(rng, 1.2, 2.4)
        loss = loss * excursion(count, int(at) + 4, height, between(rng, 15, 120))
        embedding = embedding * excursion(count, int(at), between(rng, 25, 120), 12)
        total = total * excursion(count, int(at) + 1, between(rng, 5, 20), 12)
    columns = {
        "loss": loss,
        "grad_norm": total,
        "grad_norm/word_embeddings": embedding,
        "grad_norm/layers.0": others,
        "grad_norm/layers.69": others * noise(rng, count, 0.1),
        "lr": cosine(count, 8e-5),
        "loss_scale": steady(rng, count, 65536, 0),
    }
    return Evidence({"metrics.csv": table(range(count), columns)}, "metrics.csv")


@HALF.failure(
    "instability",
    "PaLM, arXiv:2204.02311, section 5.1",
    right=["lr-too-high", "batch-and-state", "unknown"],
    near=["stale-beta2", "hard-batch", "long-tail-token", "bad-data-batch"],
    verdicts=["act", "watch"],
)
def spikes_again_and_again(rng: Generator) -> Evidence:
    """Spikes come again and again over a whole run, in a large model at a high rate. To go back and skip the batches
    helps each time, but the same batches do no harm elsewhere.
    """
    count = 9000
    loss, gradients = falling(count, 10.4, 2.2) * noise(rng, count, 0.006), norms(rng, count)
    for at in np.sort(rng.integers(1200, count - 300, int(rng.integers(12, 22)))):
        loss = loss * excursion(count, int(at), between(rng, 1.15, 1.9), between(rng, 10, 60))
        gradients = gradients * excursion(count, int(at), between(rng, 4, 20), 10)
    columns = {"loss": loss, "grad_norm": gradients, "lr": cosine(count, 2.5e-4), "wps": steady(rng, count, 238000)}
    return Evidence({"train.log": fairseq(range(1, count + 1), columns)}, "train.log")


@HALF.failure(
    "instability",
    "Megatron-LM and timm threads on parameters without decay; OLMo 2 on embeddings without decay",
    right=["weight-decay-high"],
    near=["corrupt-weight", "lr-too-high"],
    verdicts=["act", "watch"],
)
def decay_on_the_gains_of_norms(rng: Generator) -> Evidence:
    """A decay of 0.1 and more is put on the gains of the norms and on biases, too. The gains shrink towards nothing
    over a long run and the loss turns up slowly.
    """
    count = 6000
    shrink = np.exp(-between(rng, 1.2, 3.5) * ramp(count, 200))
    loss = (
        falling(count, 10.8, 2.9) * noise(rng, count, 0.008) * (1 + between(rng, 0.05, 0.2) * ramp(count, 3200) ** 1.5)
    )
    columns = {
        "loss": loss,
        "grad_norm": norms(rng, count),
        "lr": np.full(count, 6e-4),
        "weight_norm": 310 * shrink * noise(rng, count, 0.002),
        "param_norm/layers.11.input_layernorm": 27.7 * shrink**1.4 * noise(rng, count, 0.004),
        "param_norm/layers.0.mlp": 88 * shrink**0.6 * noise(rng, count, 0.004),
    }
    settings = "optimizer:\n  name: adamw\n  lr: 6.0e-4\n  weight_decay: 1.0\n  no_decay_on_norm_and_bias: false\n  betas: [0.9, 0.95]\n"
    files = {"run/history.csv": table(range(count), columns, sparse={"weight_norm": 10}), "run/config.yaml": settings}
    return Evidence(files, "run/history.csv", "run/config.yaml")


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
    "Goyal et al., arXiv:1706.02677 (linear scaling); torch elastic threads on the rate after a change of the world size",
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
        at: f"[default0]:using world size: 32, data-parallel-size: 16, tensor-model-parallel size: 2\n loading checkpoint from ck at iteration {at - 1}"
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
    died = "[rank41]:[E ProcessGroupNCCL.cpp:616] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=88121, OpType=ALLREDUCE) ran for 600014 milliseconds before timing out.\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError\n"
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
