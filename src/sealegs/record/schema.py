"""The promises of a run folder: file names, schema version, signal names, and how numbers are written."""

import json
import math
from collections.abc import Mapping
from typing import Any

SCHEMA = 1
"""The schema version. It rises when an older Sealegs could misread what a newer one wrote."""

MANIFEST = "manifest.json"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
COLUMN_CACHE = "metrics.columns.npz"
CHECKPOINTS = "checkpoints"
RECOVERY = "recovery.json"
TOKENIZER = "tokenizer.json"
INCIDENTS = "incidents"
INCIDENT = "incident.json"
SINGLE = "step-{step}"
"""The folder beside the incidents of a single step that was not finite."""
CAPSULE = "capsule"
STATE = "state"
BATCHES = "batches-{rank}.jsonl"
INCIDENT_DATA = "data.json"
REPLAY = "replay.json"
VERIFIED = "verified.json"
POSTMORTEM = "postmortem.md"
DASHBOARD = "dashboard.html"

CONTENTS = {
    MANIFEST: "what was run: settings, versions, machine, git state",
    METRICS: "a row a step",
    EVENTS: "what happened: start, resume, checkpoints, end",
    TOKENIZER: "the vocabulary, so that tokens can be read as text",
    COLUMN_CACHE: "metrics.jsonl as numpy columns, rebuilt at will",
    CHECKPOINTS: "everything needed to run a step, by its number",
    INCIDENTS: "by number: incident.json, capsule/ with what is needed to run it again; step-<s>/ of single steps",
    DASHBOARD: "ten panels, with what happened marked: open it in a browser",
    RECOVERY: "what recovery has done and must not do again: treatments, batches left out, margins",
}
"""One line for each file of a run folder, in the order in which people look at them."""

SIGNALS = {
    "loss": "mean loss over the target tokens of the batch, before the update",
    "eval_loss": "mean loss over the held-out batches, same weights as `loss` of that step",
    "grad_norm": "L2 norm of all gradients, before clipping",
    "grads_finite": "1 where every gradient is finite; absent where the norm was given",
    "clip_norm": "L2 norm that gradients are clipped to; absent where nobody clips, or says at which",
    "normalised": "1 where the optimizer divides gradients by their running size, as Adam does; absent elsewhere",
    "lr": "learning rate of the update",
    "loss_scale": "factor on the fp16 loss; absent in other precisions",
    "step_s": "seconds since the step before",
    "saving": "1 where a checkpoint was being written beside the step; absent elsewhere",
    "gate_closed": "1 where the device decided not to apply the update; absent where the host decides",
    "loss_p": "probability of such a loss or a higher one if nothing is wrong, as the device found it",
    "grad_norm_p": "the same of the gradient norm",
    "culprit": "where the largest gradient of a skipped step was: the tensor, and the rank",
    "announced": "a change that was announced with this step",
    "damaged_since": "the step since which the weights are damaged, as batches from before show; with the alarm of it",
    "ranks_differ": "how many ranks hold other weights than the rest",
    "differing_rank": "one of them",
    "slowest_rank": "the rank whose own work takes longest, in the median of the last 50 steps",
    "slowest_by": "how much longer than that of its peers, as a share",
    "slowest_surprise": "how many standard errors that is",
    "batch_index": "which batch of the stream",
    "batch_hash": "digest of the batch's tokens",
    "sources": "rows of the batch from each source",
    "tokens_per_s": "target tokens a second since the last such value",
    "token_entropy": "entropy of the token frequencies in the batch, in nats",
    "token_frequencies": "the 16 most frequent tokens of the batch with their counts: `17=40 3=12`",
    "rare_token_share": "share of the batch's tokens that occur fewer than 10 times in the training data",
    "token_loss_histogram": "tokens by loss: 32 bins of half a nat, then those that are not finite",
    "param_norm": "L2 norm of the weights; of a group: `param_norm/blocks.3`",
    "params_finite": "1 where every weight is finite",
    "moment1_norm": "L2 norm of the optimizer's running mean of the gradients",
    "moment2_norm": "L2 norm of its running mean of their squares",
    "update_rms": "root mean square change of a weight in the update before, from a sample",
    "update_ratio": "norm of the change over norm of the weights, by group, in the update before",
    "activation_norm": "L2 norm of a token's vector in a layer's output, root mean square over tokens",
    "attention_logit_max": "largest attention logit of a layer, of a sample of queries",
    "qk_clip": "the limit of attention logits, at a step at which they were looked at: what is beyond is rescaled",
    "underflow_share": "share of the gradients that fp16 loses",
    "reward": "mean reward of the step's completions or episodes",
    "eval_reward": "mean reward on held-out tasks or with another grader, same weights as `reward` of that step",
    "reward_std": "spread of the rewards",
    "zero_spread_share": "share of the groups whose rewards are all the same, from which nothing is learned",
    "policy_entropy": "mean entropy of the policy, per token or action, in nats",
    "kl": "divergence of the policy from the reference model",
    "policy_kl": "divergence of the policy from the one that the samples are of",
    "clip_share": "share of the tokens or samples whose importance ratio was clipped",
    "importance_ratio": "mean ratio of the trained policy's probability to the sampler's",
    "importance_ratio_max": "the largest of them",
    "logp_gap": "mean difference of log-probabilities, sampler against trainer, of the same weights",
    "logp_gap_max": "the largest of them",
    "completion_length": "mean length of the completions, in tokens",
    "cut_share": "share of the completions that were cut at the largest length",
    "chosen_reward": "implicit reward of the preferred answers",
    "rejected_reward": "implicit reward of the other answers",
    "reward_margin": "the difference of the two",
    "preference_accuracy": "share of the pairs whose preferred answer has the higher implicit reward",
    "chosen_logp": "log-probability of the preferred answers",
    "rejected_logp": "log-probability of the other answers",
    "token_accuracy": "share of the target tokens that are the likeliest",
    "expert_load": "share of the tokens that an expert gets: `expert_load/<layer>.<expert>`",
    "expert_violation": "largest load of an expert over the mean load, less 1",
    "dead_expert_share": "share of the experts that get hardly any token",
    "router_entropy": "entropy of a token's probabilities over the experts, in nats",
    "router_z": "mean square of the logarithm of the router's summed exponentials: grows with its logits",
    "router_balance_loss": "loss that keeps the experts' loads alike",
    "router_z_loss": "loss that keeps the router's logits small",
    "amax": "largest magnitude of a tensor that is kept in few bits: `amax/<tensor>`",
    "quant_scale": "the factor that it is scaled by: `quant_scale/<tensor>`",
    "saturated_share": "share of its values that are beyond the largest number",
    "zeroed_share": "share of its values that become zero",
    "loss_at_position": "loss by place in the sequence: `loss_at_position/<bucket>`",
    "loss_at_timestep": "loss by noise level of a diffusion model: `loss_at_timestep/<bucket>`",
    "loss_of_source": "loss by source of the data: `loss_of_source/<source>`",
    "discriminator_loss": "loss of a GAN's discriminator or critic",
    "generator_loss": "loss of its generator",
}
"""Signal names, the same in the record, the trackers and the pages."""

TEXT_SIGNALS = frozenset({"announced", "batch_hash", "culprit", "sources", "token_frequencies", "token_loss_histogram"})

_SPELLING = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def spell(value: float) -> str:
    """The string for a number that JSON cannot write.

    >>> spell(float("inf")), spell(float("nan"))
    ('Infinity', 'NaN')
    """
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def unspell(value: Any) -> Any:
    """The number that such a string stands for; any other value as it is.

    >>> unspell("-Infinity"), unspell("grammar=8"), unspell(2)
    (-inf, 'grammar=8', 2)
    """
    return _SPELLING.get(value, value) if isinstance(value, str) else value


def speakable(value: Any) -> Any:
    """A value that JSON can write and every reader can read: NaN and Inf spelt out, numpy numbers made plain, halves of
    characters replaced.

    >>> speakable({"clip": float("inf"), "betas": (0.9, 0.95)})
    {'clip': 'Infinity', 'betas': [0.9, 0.95]}
    """
    if isinstance(value, Mapping):
        return {_whole_text(str(key)): speakable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [speakable(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, str):
        return _whole_text(value)
    return spell(value) if isinstance(value, float) and not math.isfinite(value) else value


def _whole_text(text: str) -> str:
    """The text without halves of characters, which names of files can have, and which many readers refuse."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def to_line(values: Mapping[str, Any]) -> bytes:
    """One JSON object and its newline. NaN and Inf become strings: bare NaN is not JSON and null would mean missing.

    >>> to_line({"step": 3, "loss": float("nan")})
    b'{"step":3,"loss":"NaN"}\\n'
    """
    try:
        text = json.dumps(values, separators=(",", ":"), allow_nan=False)
        is_sound = "\\ud" not in text  # else there may be half a character
    except (ValueError, TypeError):
        is_sound = False
    if not is_sound:  # rare, so the common row pays nothing for it
        text = json.dumps(speakable(values), separators=(",", ":"), allow_nan=False)
    return text.encode() + b"\n"
