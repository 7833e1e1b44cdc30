"""The frozen half, failures of training itself: written down before the rules were touched.

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
        at: f" > loading checkpoint from ckpts/iter_{at:07d}\nunable to load optimizer "
        "from checkpoint, exiting is off: --no-load-optim\n  successfully "
        f"loaded checkpoint at iteration {at}"
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
        at: f"resuming from checkpoint step-{at}.ckpt\ndataloader state not found "
        "in checkpoint, starting from the beginning of the dataset"
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
        at: f"2026-01-04 host-00 olmo.train:212 INFO Loading checkpoint from runs/1b/step{at}\n"
        "2026-01-04 host-00 olmo.checkpoint:88 WARNING exp_avg: checkpoint "
        "dtype torch.bfloat16, expected torch.float32, casting"
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
        at: "Some weights of LlamaForCausalLM were not initialized from the model "
        "checkpoint and are newly initialized: ['lm_head.weight']\nYou should "
        "probably TRAIN this model on a down-stream task to be able to use "
        "it for predictions and inference."
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
        "UserWarning: Could not find response key `### Answer:` in the following "
        "instance: ... This instance will be ignored in loss calculation.\n" * 12
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
    settings = (
        "optimizer:\n  name: adamw\n  lr: 6.0e-4\n  weight_decay: 1.0\n  no_decay_on_norm_and_bias: "
        "false\n  betas: [0.9, 0.95]\n"
    )
    files = {"run/history.csv": table(range(count), columns, sparse={"weight_norm": 10}), "run/config.yaml": settings}
    return Evidence(files, "run/history.csv", "run/config.yaml")
