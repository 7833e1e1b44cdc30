"""Reads settings into a Plan: the lab's, Hugging Face's, and those of any manifest.

Only what is written is known. A missing key has a default, but which one depends on the version of the program.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from sealegs.diagnosis.settings import Known, frozen_share, known_of, precision
from sealegs.errors import ConfigError
from sealegs.preflight_check.plan import Plan, merged, plan_from
from sealegs.preflight_check.rule import NOT
from sealegs.record.manifest import Manifest, dotted
from sealegs.record.reading import parse_json
from sealegs.record.typed import fits


class Read(NamedTuple):
    """A plan, and the source's names of its fields."""

    plan: Plan
    names: Mapping[str, str]


LAB = {
    "steps": "steps",
    "price_per_hour": "price_per_hour",
    "optimizer.lr": "lr",
    "optimizer.eps": "eps",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.clip": "clip",
    "optimizer.warmup_steps": "warmup_steps",
    "optimizer.final_lr_share": "final_lr_share",
    "model.width": "width",
    "model.layers": "layers",
    "model.vocabulary": "vocabulary",
    "model.norm_position": "norm_position",
    "model.norm_eps": "norm_eps",
    "model.qk_norm": "qk_norm",
    "model.z_loss": "z_loss",
    "model.tied_head": "tied_head",
    "model.embedding_norm": "embedding_norm",
    "model.naive_softmax": "naive_softmax",
    "model.naive_log_loss": "naive_log_loss",
    "model.mup_base_width": "mup_base_width",
    "cadence.checkpoint_steps": "checkpoint_steps",
    "cadence.checkpoint_minutes": "checkpoint_minutes",
    "cadence.keep_checkpoints": "keep_checkpoints",
}
TRAINING_ARGUMENTS = {
    "learning_rate": "lr",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "eps",
    "weight_decay": "weight_decay",
    "max_grad_norm": "clip",
    "ignore_data_skip": "keeps_data_position",
    "save_only_model": "saves_optimizer",
    "save_total_limit": "keep_checkpoints",
    "logging_nan_inf_filter": "nan_filter",
    "group_by_length": "grouped_by_length",
    "dataloader_num_workers": "workers",
}
MODEL_CONFIG = {
    "hidden_size": "width",
    "n_embd": "width",
    "d_model": "width",
    "num_hidden_layers": "layers",
    "n_layer": "layers",
    "vocab_size": "vocabulary",
    "rms_norm_eps": "norm_eps",
    "layer_norm_eps": "norm_eps",
    "layer_norm_epsilon": "norm_eps",
    "initializer_range": "init_std",
    "tie_word_embeddings": "tied_head",
    "final_logit_softcapping": "logit_softcap",
    "attn_logit_softcapping": "attention_softcap",
    "_attn_implementation": "attention_kernel",
    "attn_implementation": "attention_kernel",
    "mup_base_width": "mup_base_width",
}
SCHEDULES = {
    "linear": ("linear", 0.0),
    "cosine": ("cosine", 0.0),
    "cosine_with_min_lr": ("cosine", None),
    "cosine_with_restarts": ("cosine-restarts", 0.0),
    "constant": ("constant", 1.0),
    "constant_with_warmup": ("constant", 1.0),
    "inverse_sqrt": ("inverse-sqrt", 0.0),
}
"""Hugging Face's names: our kind, and the share of the peak that is left."""
MODEL_TYPES: Mapping[str, tuple[str, bool]] = {
    "gpt2": ("pre", False),
    "gpt_neox": ("pre", False),
    "llama": ("pre", False),
    "mistral": ("pre", False),
    "qwen2": ("pre", False),
    "qwen3": ("pre", True),
    "gemma": ("pre", False),
    "gemma2": ("pre", False),
    "gemma3_text": ("pre", True),
    "olmo": ("pre", False),
    "olmo2": ("branch", True),
    "bert": ("post", False),
    "roberta": ("post", False),
}
"""Position of the norms in known models, and whether queries and keys have one: the configuration does not say."""


def of_lab(settings: Mapping[str, Any], **more: Any) -> Read:
    """The settings of ``sealegs train``, nested as in its TOML and complete."""
    flat = dict(dotted(settings))
    known: dict[str, Any] = {ours: flat.get(theirs) for theirs, ours in LAB.items()}
    width, base, std = known["width"], known["mup_base_width"], flat["model.init_std"]
    if isinstance(std, str):
        std = math.sqrt(1 / (3 * width))
    elif base:
        std *= math.sqrt(base / width)
    dtype = None if flat["dtype"] == "auto" else flat["dtype"]
    known |= {
        "optimizer": "adamw",
        "decoupled": True,
        "beta1": flat["optimizer.betas"][0],
        "beta2": flat["optimizer.betas"][1],
        "decays_vectors": False,
        "decays_embeddings": True,
        "moments_dtype": "fp32",
        "clip_by": "norm",
        "schedule": "cosine",
        "dtype": dtype,
        "weights_dtype": "fp32",
        "scaler": None if dtype is None else dtype == "fp16",
        "gradient_dtype": "fp32",
        "addends": flat["data.accumulation"],
        "final_norm": known["norm_position"] == "pre",
        "gated_mlp": flat["model.activation"] == "swiglu",
        "init_std": std,
        "narrowed_residual": True,
        "parameters": _lab_parameters(flat),
        "batch_tokens": flat["data.batch"] * flat["model.context"],
        "shuffle": "all",
        "ranks": 1,
        "saves_optimizer": True,
        "keeps_data_position": True,
        "log_steps": 1,
        "nan_filter": False,
        **more,
    }
    names = {ours: theirs for theirs, ours in LAB.items()}
    names |= {"beta1": "optimizer.betas", "beta2": "optimizer.betas", "init_std": "model.init_std"}
    return Read(plan_from(known), names)


def _lab_parameters(flat: Mapping[str, Any]) -> int:
    width, hidden = flat["model.width"], flat["model.hidden"]
    mlp = width * hidden * (3 if flat["model.activation"] == "swiglu" else 2)
    if experts := flat["model.experts"]:
        mlp = experts * (mlp + width)
    heads = 1 if flat["model.tied_head"] else 2
    return int(flat["model.layers"] * (4 * width**2 + mlp) + heads * width * flat["model.vocabulary"])


OBJECTIVES: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset({"num_generations", "num_sample_generations", "reward_weights"}), "reward"),
    (frozenset({"precompute_ref_log_probs", "desirable_weight", "center_rewards_coefficient"}), "pairs"),
    (frozenset({"completion_only_loss", "assistant_only_loss", "dataset_text_field"}), "answers"),
)
"""Arguments that only a trainer of TRL's has, and what it trains for."""
STAGES = {"sft": "answers", "dpo": "pairs", "kto": "pairs", "rm": "pairs", "ppo": "reward"}
"""LLaMA-Factory's stages; ``pt`` is none of them."""
OF_AXOLOTL = {"lr_scheduler": "lr_scheduler_type", "optimizer": "optim"}
"""What Axolotl calls otherwise than Hugging Face."""


def of_training_arguments(values: Mapping[str, Any], where: str) -> Read:
    """``TrainingArguments.to_json_string()``, or a part of it."""
    known, names = _renamed(values, TRAINING_ARGUMENTS)
    for negated in ("keeps_data_position", "saves_optimizer"):
        if negated in known:
            known[negated] = not known[negated]
            names[negated] = NOT + names[negated]
    optim = str(values.get("optim", ""))
    if optim.startswith("adamw"):
        known |= {"optimizer": "adamw", "decoupled": True, "decays_vectors": False}
    if isinstance(deepspeed := values.get("deepspeed"), Mapping):
        known["clips_updates"] = _clips_updates(deepspeed)
    if "max_grad_norm" in values:
        known["clip_by"] = "norm"
    if objective := next((kind for names, kind in OBJECTIVES if names & values.keys()), None):
        known |= {"finetunes": True, "objective": objective}
    if any(isinstance(values.get(half), bool) for half in ("fp16", "bf16")):
        half = "fp16" if values.get("fp16") is True else "bf16" if values.get("bf16") is True else "fp32"
        known |= {"dtype": half, "scaler": half == "fp16"}
        names["dtype"] = half if half != "fp32" else "bf16"
    steps = _number(values, "max_steps")
    known["steps"] = total = int(steps) if steps is not None and steps > 0 else None
    names["steps"] = "max_steps"
    known |= _interval(values, "save_strategy", "save_steps", "checkpoint_steps", total)
    known |= _interval(values, "logging_strategy", "logging_steps", "log_steps", total)
    names |= {"checkpoint_steps": "save_steps", "log_steps": "logging_steps", "warmup_steps": "warmup_steps"}
    known |= _schedule(values, total, _number(values, "learning_rate"))
    names |= {"schedule": "lr_scheduler_type", "final_lr_share": "lr_scheduler_kwargs"}
    return Read(plan_from(known, where), names)


def of_deepspeed(values: Mapping[str, Any], where: str) -> Read:
    """A configuration of DeepSpeed's."""
    optimizer = values.get("optimizer")
    optimizer = optimizer if isinstance(optimizer, Mapping) else {}
    kind, given = str(optimizer.get("type", "")).lower(), optimizer.get("params")
    given = given if isinstance(given, Mapping) else {}
    known: dict[str, Any] = {name: _number(given, name) for name in ("lr", "eps", "weight_decay")}
    betas = given.get("betas")
    if isinstance(betas, list) and len(betas) == 2 and all(fits(beta, float) for beta in betas):
        known |= {"beta1": betas[0], "beta2": betas[1]}
    known |= {
        "optimizer": kind or None,
        "clip": _number(values, "gradient_clipping"),
        "clips_updates": _clips_updates(values),
    }
    names = {"clip": "gradient_clipping"} | dict.fromkeys(("beta1", "beta2"), "optimizer.params.betas")
    names |= {name: f"optimizer.params.{name}" for name in ("lr", "eps", "weight_decay")}
    return Read(plan_from(known, where), names)


def _clips_updates(values: Mapping[str, Any]) -> bool | None:
    """Whether DeepSpeed clips what Muon has orthogonalised: under ZeRO of any stage it does."""
    optimizer, zero = values.get("optimizer"), values.get("zero_optimization")
    if not isinstance(optimizer, Mapping) or "type" not in optimizer:
        return None
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    return "muon" in str(optimizer["type"]).lower() and stage in (1, 2, 3)


def of_adapter_config(values: Mapping[str, Any], where: str) -> Read:
    """PEFT's ``adapter_config.json``."""
    return Read(plan_from({"finetunes": True, "adapter": True}, where), {})


def of_llama_factory(values: Mapping[str, Any], where: str) -> Read:
    """The YAML of a LLaMA-Factory run: Hugging Face's arguments, and its own."""
    read = of_training_arguments(values, where)
    kind, stage = str(values.get("finetuning_type", "lora")), str(values.get("stage", "sft"))
    known = {
        "finetunes": True,
        "adapter": kind not in ("full", "freeze"),
        "objective": STAGES.get(stage),
        "quantised": _bits(values.get("quantization_bit")),
        "weights_dtype": "bf16" if values.get("pure_bf16") is True else None,
    }
    return Read(merged(read.plan, plan_from(known, where)), read.names)


def of_axolotl(values: Mapping[str, Any], where: str) -> Read:
    """The YAML of an Axolotl run."""
    read = of_training_arguments({OF_AXOLOTL.get(name, name): value for name, value in values.items()}, where)
    rl = str(values.get("rl") or "")
    bits = 4 if values.get("load_in_4bit") is True else 8 if values.get("load_in_8bit") is True else None
    known = {
        "finetunes": values.get("reinit_weights") is not True,
        "adapter": bool(values.get("adapter")),
        "objective": "answers" if not rl else "reward" if rl in ("grpo", "ppo") else "pairs",
        "quantised": _bits(bits),
    }
    ours = {theirs: own for own, theirs in OF_AXOLOTL.items()}
    names = {field: ours.get(name, name) for field, name in read.names.items()}
    return Read(merged(read.plan, plan_from(known, where)), names)


def _bits(count: Any) -> str | None:
    return {"4": "4-bit", "8": "8-bit"}.get(str(count))


def _interval(values: Mapping[str, Any], strategy: str, name: str, ours: str, total: int | None) -> dict[str, Any]:
    """Steps between two checkpoints, logs, ...: given as a number, or as a share of the run."""
    how, every = str(values.get(strategy, "steps")), _number(values, name)
    if how == "no":
        return {ours: 0} if ours == "checkpoint_steps" else {}
    if how != "steps" or every is None:
        return {}
    if 0 <= every < 1:
        return {} if total is None else {ours: math.ceil(every * total)}
    return {ours: int(every)}


def _schedule(values: Mapping[str, Any], total: int | None, lr: float | None) -> dict[str, Any]:
    kind, floor = SCHEDULES.get(str(values.get("lr_scheduler_type", "")), (None, None))
    more = values.get("lr_scheduler_kwargs") or {}
    more = more if isinstance(more, Mapping) else {}
    if kind == "cosine" and floor is None:
        least = _number(more, "min_lr")
        floor = least / lr if least is not None and lr else _number(more, "min_lr_rate")
    warmup, ratio = _number(values, "warmup_steps"), _number(values, "warmup_ratio")
    if not warmup and ratio:
        warmup = ratio
    if isinstance(warmup, float) and 0 < warmup < 1:  # a share of the run
        warmup = None if total is None else math.ceil(warmup * total)
    known = {"schedule": kind, "final_lr_share": floor, "warmup_steps": None if warmup is None else int(warmup)}
    cycles = _number(more, "num_cycles")
    return known | ({"cycles": 1.0 if cycles is None else float(cycles)} if kind == "cosine-restarts" else {})


def _number(values: Mapping[str, Any], name: str) -> float | None:
    """A finite number; anything else is not known."""
    value: Any = values.get(name)
    return value if fits(value, float) and math.isfinite(value) else None


def of_model_config(values: Mapping[str, Any], where: str) -> Read:
    """A model's ``config.json``; of a nested one, the text model's part."""
    inner = values.get("text_config")
    inside: Mapping[str, Any] = inner if isinstance(inner, Mapping) else values
    known, names = _renamed(inside, MODEL_CONFIG)
    if inside is not values:
        names = {ours: f"text_config.{theirs}" for ours, theirs in names.items()}
        if (outer := values.get("final_logit_softcapping")) is not None:
            known["misplaced_softcap"] = outer
            names["logit_softcap"] = "text_config.final_logit_softcapping"
    for cap in ("logit_softcap", "attention_softcap"):
        if known.get(cap) is None and MODEL_CONFIG_CAPS[cap] in inside:
            known[cap] = 0.0  # null: no cap
    if placed := MODEL_TYPES.get(str(inside.get("model_type"))):
        known |= {"norm_position": placed[0], "qk_norm": placed[1]}
        if placed[0] == "pre":
            known["final_norm"] = True
    for name in ("use_qk_norm", "qk_layernorm"):
        if isinstance(inside.get(name), bool):
            known["qk_norm"] = inside[name]
            names["qk_norm"] = name
    width, base, std = (known.get(name) for name in ("width", "mup_base_width", "init_std"))
    if width and base and isinstance(std, float):  # the number is that of the base width
        known["init_std"] = std * math.sqrt(base / width)
    known |= _model_parameters(inside, known)
    known |= _quantised(values.get("quantization_config"))
    return Read(plan_from(known, where), names)


def _quantised(said: object) -> dict[str, Any]:
    """How a base is kept, by its ``quantization_config``."""
    if not isinstance(said, Mapping):
        return {}
    bits = 4 if said.get("load_in_4bit") is True else 8 if said.get("load_in_8bit") is True else said.get("bits")
    computes = precision(said.get("bnb_4bit_compute_dtype")) if said.get("load_in_4bit") is True else None
    return {"quantised": _bits(bits), "compute_dtype": computes}


MODEL_CONFIG_CAPS = {"logit_softcap": "final_logit_softcapping", "attention_softcap": "attn_logit_softcapping"}


def _model_parameters(values: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """The approximate number of parameters, from the shapes; not for mixtures of experts."""
    width: Any
    width, layers, vocabulary = (known.get(name) for name in ("width", "layers", "vocabulary"))
    inner = values.get("intermediate_size") or values.get("n_inner") or (4 * width if isinstance(width, int) else None)
    heads = values.get("num_attention_heads") or values.get("n_head") or 1
    grouped = values.get("num_key_value_heads") or heads
    sizes = (width, layers, vocabulary, inner, heads, grouped)
    if not all(isinstance(size, int) and size > 0 for size in sizes) or any("expert" in name for name in values):
        return {}
    gated = str(values.get("hidden_act") or values.get("hidden_activation") or "") in ("silu", "gelu_pytorch_tanh")
    layer = (2 + 2 * grouped / heads) * width**2 + (3 if gated else 2) * width * inner
    tables = 1 if known.get("tied_head", "n_embd" in values) else 2
    return {"parameters": int(layers * layer + tables * width * vocabulary), "gated_mlp": gated}


def of_manifest(manifest: Manifest, rows: Mapping[str, float]) -> Read:
    """The manifest of a user's own loop, by the usual names of settings; and what its rows have shown."""
    known = {"price_per_hour": manifest.price_per_hour, **rows, **_recorded(manifest)}
    known |= {name: value for name, value in _named(manifest).items() if value is not None or name not in known}
    return Read(plan_from(known, manifest.run_id), {})


def _named(manifest: Manifest) -> dict[str, Any]:
    """The fields of a plan that have usual names."""
    found = known_of(manifest)
    known: dict[str, Any] = {"dtype": found.dtype}
    for name in ("lr", "beta2", "weight_decay", "clip", "init_std", "norm_eps"):
        known[name] = found.number(name)
    for name in ("warmup_steps", "steps", "layers", "width", "vocabulary"):
        known[name] = _whole(found, name)
    for name in ("naive_softmax", "naive_log_loss"):
        known[name] = found.says(name) if name in found.values else None
    return known


def of_log(manifest: Manifest) -> Read:
    """The settings of anybody's log, as far as they are understood: of a value that no plan can have, nothing is known.

    Tables that are Hugging Face's arguments or a model's config are read as such, everything else by its usual name.
    """
    known = _recorded(manifest)
    names: dict[str, str] = {}
    parts = [manifest.settings, *(each for each in manifest.settings.values() if isinstance(each, Mapping))]
    for values in parts:
        for keys, read in RECOGNISED:
            if len(keys & values.keys()) > 1:
                with suppress(ConfigError):
                    found = read(values, manifest.run_id)
                    known |= found.plan.known()
                    names |= found.names
    for name, value in _named(manifest).items():
        with suppress(ConfigError):
            known = plan_from({name: value}).known() | known
    return Read(plan_from(known, manifest.run_id), names)


def _recorded(manifest: Manifest) -> dict[str, Any]:
    """The fields of a plan among what the guard has read from the run's objects; what is not of their type is not
    known."""
    known: dict[str, Any] = {}
    for table in manifest.recorded.values():
        for name, value in table.items() if isinstance(table, Mapping) else ():
            with suppress(ConfigError):
                known |= plan_from({name: value}).known()
    optimizer = manifest.recorded.get("optimizer")
    betas = optimizer.get("betas") if isinstance(optimizer, Mapping) else None
    if isinstance(betas, list) and len(betas) > 1:
        known |= {"beta1": betas[0]}
    model = manifest.recorded.get("model")
    if isinstance(model, Mapping) and model.get("adapter"):
        known |= {"finetunes": True, "adapter": True}
    elif frozen_share(manifest.recorded) > 0.5:
        known |= {"finetunes": True}
    return known


def _whole(found: Known, name: str) -> int | None:
    value = found.number(name)
    return int(value) if value is not None and value == value // 1 and math.isfinite(value) else None


def _renamed(values: Mapping[str, Any], table: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    found = {theirs: ours for theirs, ours in table.items() if values.get(theirs) is not None}
    return {ours: values[theirs] for theirs, ours in found.items()}, {ours: theirs for theirs, ours in found.items()}


RECOGNISED: tuple[tuple[frozenset[str], Callable[[Mapping[str, Any], str], Read]], ...] = (
    (frozenset({"peft_type", "base_model_name_or_path", "target_modules"}), of_adapter_config),
    (frozenset({"finetuning_type", "cutoff_len", "preprocessing_num_workers", "stage"}), of_llama_factory),
    (frozenset({"base_model", "sequence_len", "micro_batch_size", "num_epochs"}), of_axolotl),
    (frozenset({"learning_rate", "per_device_train_batch_size", "lr_scheduler_type"}), of_training_arguments),
    (frozenset({"zero_optimization", "train_micro_batch_size_per_gpu", "gradient_clipping"}), of_deepspeed),
    (frozenset({"model_type", "hidden_size", "n_embd", "architectures", "text_config"}), of_model_config),
)
"""Keys of which one is enough, and the reader of an object that has it."""


def of_json(text: bytes, where: str) -> Read:
    """A JSON file of Hugging Face's; its keys tell which one."""
    try:
        values = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error})") from error
    return of_settings(values, where)


def of_settings(values: object, where: str) -> Read:
    """The settings of a program; its keys tell which one."""
    if isinstance(values, Mapping):
        for keys, read in RECOGNISED:
            if keys & values.keys():
                return read(values, where)
    raise ConfigError(
        f"{where}: neither training arguments (learning_rate, ...) nor a model's config (model_type, hidden_size, "
        "...), an adapter's, or the settings of Axolotl or LLaMA-Factory"
    )
