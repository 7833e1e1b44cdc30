"""Finds the few settings that a diagnosis needs in a manifest, whatever their program calls them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sealegs.record.manifest import Manifest, dotted

NAMES = {
    "lr": "lr learning_rate max_lr peak_lr",
    "beta2": "beta2 adam_beta2 beta_2",
    "weight_decay": "weight_decay wd",
    "clip": "clip max_grad_norm grad_clip clip_grad gradient_clip_val clip_grad_norm gradient_clipping",
    "warmup_steps": "warmup_steps warmup_iters lr_warmup_steps lr_warmup_iters num_warmup_steps warmup",
    "optimizer": "optimizer optim optimizer_name optimizer_type optim_type",
    "steps": "steps max_steps train_iters total_steps max_iters",
    "layers": "layers num_layers n_layer num_hidden_layers n_layers",
    "width": "width hidden_size n_embd d_model embedding_dim",
    "vocabulary": "vocabulary vocab_size padded_vocab_size n_vocab",
    "batch": "batch batch_size global_batch_size train_batch_size micro_batch_size",
    "accumulation": "accumulation gradient_accumulation_steps accumulate_grad_batches grad_accum_steps",
    "init_std": "init_std init_method_std initializer_range",
    "norm_eps": "norm_eps rms_norm_eps layer_norm_eps layernorm_epsilon",
    "norm_position": "norm_position",
    "naive_softmax": "naive_softmax",
    "naive_log_loss": "naive_log_loss",
    "dtype": "dtype precision mixed_precision torch_dtype",
}
"""Our name of a setting, and its names elsewhere: the last part of a dotted name."""

POST_NORM: Mapping[str, tuple[Any, ...]] = {
    "apply_residual_connection_post_layernorm": (True, "True", "true"),
    "post_norm": (True, "True", "true"),
    "norm_first": (False, "False", "false"),
    "normalize_before": (False, "False", "false"),
    "encoder_normalize_before": (False, "False", "false"),
    "decoder_normalize_before": (False, "False", "false"),
}
"""Switches of others for norms after the residual sum, and their values."""

LONG_RUN = 1000
"""Steps from which on a run without a warm-up is worth a notice."""


@dataclass(frozen=True, slots=True)
class Known:
    """The settings that were found."""

    values: dict[str, Any]

    def number(self, name: str) -> float | None:
        """A setting as a number, where it is one."""
        value = self.values.get(name)
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):  # an integer may be too large for a float
            return None
        return None if isinstance(value, bool) or math.isnan(number) else number

    def says(self, name: str) -> bool:
        """Whether a switch is on."""
        return self.values.get(name) in (True, "true", "True", 1)

    @property
    def dtype(self) -> str | None:
        """The precision: ``fp32``, ``bf16`` or ``fp16``."""
        return precision(self.values.get("dtype"))

    @property
    def init_std_from_width(self) -> float | None:
        """The recommended spread of the initial weights: sqrt(1 / (3 width))."""
        width = self.number("width")
        return math.sqrt(1 / (3 * width)) if width else None


def known_of(manifest: Manifest) -> Known:
    """The settings of a manifest under our names: what the user wrote, else what the guard has read from the run's
    objects."""
    found = _found(manifest.recorded) | _found(manifest.settings)
    if manifest.dtype:
        found["dtype"] = manifest.dtype
    return Known(found)


def frozen_share(recorded: Mapping[str, Any]) -> float:
    """The share of the weights that are frozen, as the guard has read it from the model; 0 where that is not known.

    >>> frozen_share({"model": {"parameters": 1000, "trained_parameters": 4}})
    0.996
    """
    model = recorded.get("model")
    if not isinstance(model, Mapping):
        return 0.0
    trained, total = model.get("trained_parameters"), model.get("parameters")
    if not isinstance(trained, int) or not isinstance(total, int) or not 0 < trained <= total:
        return 0.0
    return 1 - trained / total


def _found(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under our names; of several with one meaning, the first in the table."""
    leaves: dict[str, Any] = {}
    for name, value in dotted(settings):
        leaves.setdefault(name.rpartition(".")[2].lower().replace("-", "_"), value)
    found: dict[str, Any] = {}
    for ours, names in NAMES.items():
        told = [leaves[name] for name in names.split() if leaves.get(name) is not None]
        found |= {ours: told[0]} if told else {}
    betas = leaves.get("betas")
    if "beta2" not in found and isinstance(betas, list | tuple) and len(betas) > 1:
        found["beta2"] = betas[1]
    if "norm_position" not in found and any(leaves.get(name) in values for name, values in POST_NORM.items()):
        found["norm_position"] = "post"
    for switch in ("bf16", "fp16"):
        if leaves.get(switch) in (True, "true", "True"):
            found["dtype"] = switch
    return found


def precision(value: Any) -> str | None:
    """A precision under our name for it.

    >>> precision("torch.bfloat16"), precision("16-mixed"), precision("fp32"), precision(None)
    ('bf16', 'fp16', 'fp32', None)
    """
    word = str(value).lower().replace("torch.", "").removesuffix("-mixed").removesuffix("-true")
    names = {
        "bf16": ("bf16", "bfloat16"),
        "fp16": ("fp16", "float16", "half", "16"),
        "fp32": ("fp32", "float32", "32", "no"),
    }
    return next((ours for ours, theirs in names.items() if word in theirs), None)


def missing_margins(known: Known, *, is_trained_before: bool = False) -> Iterator[str]:
    """A sentence for each stability margin that the settings do without; of a model that was trained before, only for
    those that hold for it, too."""
    if not is_trained_before:
        yield from _margins_from_scratch(known)
    clip = known.number("clip")
    if clip is not None and not 0 < clip <= 1:
        yield f"gradients are clipped at {clip:g} (usual: 1.0)" if clip > 1 else "gradients are not clipped"
    if known.dtype == "fp16":
        yield "fp16, whose largest number is 65504 (bf16: 3e38)"
    if known.number("norm_eps") == 0:
        yield "norms without an epsilon"
    for switch, words in (("naive_softmax", "softmax without its maximum"), ("naive_log_loss", "log(softmax(x))")):
        if known.says(switch):
            yield words


def _margins_from_scratch(known: Known) -> Iterator[str]:
    beta2, decay = known.number("beta2"), known.number("weight_decay")
    steps, warmup, layers = known.number("steps"), known.number("warmup_steps"), known.number("layers")
    if beta2 is not None and beta2 > 0.98:
        yield f"beta2 {beta2:g} averages about {1 / max(1 - beta2, 1e-9):.0f} steps (0.95: 20)"
    if decay is not None and not 0.01 <= decay <= 0.5:
        yield f"weight decay {decay:g}, outside 0.01 to 0.5 (usual: 0.1)"
    if warmup is not None and warmup <= 0 and (steps or LONG_RUN) >= LONG_RUN:
        yield "no warm-up"
    if known.values.get("norm_position") == "post" and (layers or 0) >= 12:
        yield f"norms after the residual sum in {layers:g} layers"
    std, usual = known.number("init_std"), known.init_std_from_width
    if std is not None and usual is not None and std > 2 * usual:
        yield f"initial weights with std {std:g}, sqrt(1 / (3 width)) is {usual:.3g}"
