"""Reads the settings of a run from its live objects: what can be seen is written down, what cannot is left out.

Nothing is called that could change a run: no forward pass, no function of a schedule, no copy from a device.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedulers

from sealegs.signals.batch_hash import tensors_in
from sealegs.signals.batch_tokens import token_ids
from sealegs.signals.groups import find_layers
from sealegs.signals.low_precision import format_of
from sealegs.signals.routers import routers_of

DTYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
LIBRARIES = ("transformers", "lightning", "pytorch_lightning", "accelerate", "deepspeed", "trl", "torchtitan")
CONFIG = {
    "hidden_size": "width",
    "n_embd": "width",
    "d_model": "width",
    "num_hidden_layers": "layers",
    "n_layer": "layers",
    "num_attention_heads": "heads",
    "n_head": "heads",
    "vocab_size": "vocabulary",
}
"""Where a model has a ``config``, its names for what modules may not show."""
SCHEDULE_KINDS = {"linear": "linear", "cosine": "cosine", "constant": "constant", "inverse_sqrt": "inverse-sqrt"}
"""Words in the names of Hugging Face's functions of a step, and what they are."""


def optimizer_settings(optimizers: Sequence[Optimizer], model: nn.Module | None = None) -> dict[str, Any]:
    """Class, betas, rate and decay of the optimizers: of the group with the largest rate, and of each group."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    main = max(groups, key=lambda group: _rate(group) or 0.0)
    betas = main.get("betas")
    tables = {each.weight for each in _embeddings(model)}
    decayed = [each for group in groups if _number(group.get("weight_decay")) for each in group["params"]]
    kinds = [type(optimizer).__name__ for optimizer in optimizers]
    known = {
        "class": kinds[0] if len(kinds) == 1 else kinds,
        "optimizer": kinds[0].lower(),
        "lr": _rate(main) or None,
        "betas": [_number(each) for each in betas] if isinstance(betas, list | tuple) else None,
        "momentum": _number(main.get("momentum")),
        "eps": _number(main.get("eps")),
        "weight_decay": max(_number(group.get("weight_decay")) or 0.0 for group in groups),
        "decoupled": bool(main.get("decoupled_weight_decay", kinds[0] == "AdamW")),
        "decays_vectors": any(each.ndim < 2 for each in decayed),
        "decays_embeddings": any(each in tables for each in decayed) if tables else None,
        "clips_updates": any(map(_is_muon_of_deepspeed, optimizers)) or None,
        "groups": [_group(group, tables) for group in groups],
    }
    return _told(known)


def _is_muon_of_deepspeed(optimizer: Optimizer) -> bool:
    """One of those whose update is clipped after it was orthogonalised."""
    kind = type(optimizer)
    return kind.__module__.startswith("deepspeed.") and "muon" in kind.__name__.lower()


def _group(group: Mapping[str, Any], tables: set[Tensor]) -> dict[str, Any]:
    kinds = Counter(
        "embeddings" if each in tables else "vectors" if each.ndim < 2 else "matrices" for each in group["params"]
    )
    return _told(
        {
            "lr": _rate(group),
            "weight_decay": _number(group.get("weight_decay")),
            "tensors": dict(kinds),
            "parameters": sum(each.numel() for each in group["params"]),
        }
    )


def schedule_settings(found: Sequence[Any]) -> dict[str, Any]:
    """Classes and numbers of the schedules; warm-up, kind and length where these say them."""
    known: dict[str, Any] = {"class": [type(each).__name__ for each in found]}
    known["arguments"] = [_arguments(each) for each in found]
    if len(found) == 1:
        known |= _course(found[0])
    return _told(known)


def _arguments(schedule: Any) -> dict[str, Any]:
    """The numbers that a schedule was made with, by their names in it."""
    parts = list(getattr(schedule, "_schedulers", ()))
    told = {name: value for name, value in vars(schedule).items() if not name.startswith("_") and _is_plain(value)}
    for each in getattr(schedule, "lr_lambdas", ()):
        told |= {name: value for name, value in _keywords(each).items() if _is_plain(value)}
    for name in ("last_epoch", "verbose"):  # where it stands, which the rows tell
        told.pop(name, None)
    if milestones := getattr(schedule, "_milestones", None):
        told["milestones"] = list(milestones)
    if parts:
        told["parts"] = [{"class": type(each).__name__, **_arguments(each)} for each in parts]
    return told


def _course(schedule: Any) -> dict[str, Any]:
    """What a schedule is, under the names of a plan."""
    match schedule:
        case schedulers.SequentialLR():
            first, *others = schedule._schedulers
            warmup = _course(first).get("warmup_steps") if isinstance(first, schedulers.LinearLR) else None
            after = _course(others[0]) if len(others) == 1 and warmup is not None else {}
            if "decay_steps" in after:
                after["decay_steps"] += warmup
            return {**after, "warmup_steps": warmup}
        case schedulers.LinearLR() if schedule.start_factor < schedule.end_factor:
            return {"warmup_steps": schedule.total_iters}
        case schedulers.CosineAnnealingLR():
            peak = max(map(float, schedule.base_lrs))
            share = float(schedule.eta_min) / peak if peak else None
            end = int(schedule.T_max)
            return {"schedule": "cosine", "warmup_steps": 0, "decay_steps": end, "final_lr_share": share}
        case schedulers.LambdaLR():
            return _function_of_the_step(schedule.lr_lambdas[0])
    return {}


def _function_of_the_step(function: Any) -> dict[str, Any]:
    """What Hugging Face's functions of a step were made with."""
    said = _keywords(function)
    name = getattr(getattr(function, "func", None), "__name__", "")
    kind = next((ours for word, ours in SCHEDULE_KINDS.items() if f"_{word}_schedule" in name), None)
    whole = {"num_warmup_steps": "warmup_steps", "num_training_steps": "steps"}
    counts = {ours: said[theirs] for theirs, ours in whole.items() if isinstance(said.get(theirs), int)}
    return counts | ({"schedule": kind} if kind and counts else {})


def _keywords(function: Any) -> Mapping[str, Any]:
    return function.keywords if isinstance(function, partial) else {}


def _adapters(model: nn.Module) -> str | None:
    """What kinds of PEFT's adapters a model has: ``lora``."""
    told = [config for each in model.modules() if isinstance(config := getattr(each, "peft_config", None), Mapping)]
    kinds = {str(getattr(one.peft_type, "value", one.peft_type)).lower() for each in told for one in each.values()}
    return " ".join(sorted(kinds)) or None


def model_settings(model: nn.Module) -> dict[str, Any]:
    """The shape of a model, as its modules and its ``config`` show it."""
    layers = find_layers(model)
    is_numbered = any(name.rpartition(".")[2].isdecimal() for name in layers)
    known: dict[str, Any] = {
        "class": type(model).__name__,
        "parameters": sum(each.numel() for each in model.parameters()),
        "trained_parameters": sum(each.numel() for each in model.parameters() if each.requires_grad),
        "layers": len(layers) if is_numbered else None,
        "adapter": _adapters(model),
    }
    if tables := _embeddings(model):
        table = max(tables, key=lambda each: each.weight.numel())
        owners = sum(each is table.weight for module in model.modules() for each in module._parameters.values())
        if is_numbered:
            known["width"] = table.embedding_dim
        if owners > 1 or _has_head(model, table):  # else it may read tokens and predict something else
            known |= {"vocabulary": table.num_embeddings, "tied_head": owners > 1}
    heads = {each.num_heads for each in model.modules() if isinstance(each, nn.MultiheadAttention)}
    routers = tuple(routers_of(model))
    known["num_experts"] = max((router.experts for router in routers), default=None)
    known["experts_per_token"] = max((router.chosen for router in routers), default=0) or None
    known["heads"] = heads.pop() if len(heads) == 1 else None
    norms = [each for each in model.modules() if type(each).__name__.lower().endswith(("norm", "norm1d", "norm2d"))]
    known["norms"] = dict(Counter(type(each).__name__ for each in norms)) or None
    eps = [value for each in norms for name, value in vars(each).items() if "eps" in name and isinstance(value, float)]
    known["norm_eps"] = min(eps) if eps and len(eps) == len(norms) else None
    config: Any = getattr(model, "config", None)
    for theirs, ours in CONFIG.items():
        value = getattr(config, theirs, None)
        is_shown = ours in known or ours == "heads"  # of a vocabulary that is predicted, for one
        if is_shown and isinstance(value, int) and not isinstance(value, bool):
            known[ours] = value
    return _told(known)


def _has_head(model: nn.Module, table: nn.Embedding) -> bool:
    shape = table.weight.shape
    return any(isinstance(each, nn.Linear) and each.weight.shape == shape for each in model.modules())


def precision_settings(model: nn.Module, scaler: Any = None) -> dict[str, Any]:
    """Formats of the weights; and the scaler, where one was given."""
    dtypes = {DTYPES.get(each.dtype) for each in model.parameters() if each.is_floating_point()}
    known: dict[str, Any] = {"weights_dtype": dtypes.pop() if len(dtypes) == 1 else sorted(map(str, dtypes))}
    known["fp8"] = format_of(model)
    if scaler is not None:
        known["scaler"] = bool(scaler.is_enabled())
        known["growth_interval"] = scaler.get_growth_interval() if scaler.is_enabled() else None
    return _told(known)


def autocast_settings(seen: torch.dtype | None, weights: Any) -> dict[str, Any]:
    """The precision of a forward pass: that of autocast, or without it that of the weights."""
    dtype = weights if seen is None else DTYPES.get(seen)
    return _told({"autocast": seen is not None, "dtype": dtype if isinstance(dtype, str) else None})


def environment() -> dict[str, Any]:
    """The device, and the switches of torch that decide how numbers are computed."""
    has_cuda = torch.cuda.is_available()
    libraries = [name for name in LIBRARIES if name in sys.modules]
    return _told(
        {
            "cuda": torch.version.cuda if has_cuda else None,
            "cudnn": torch.backends.cudnn.version() if has_cuda else None,
            "accelerator": torch.cuda.get_device_name() if has_cuda else None,
            "threads": torch.get_num_threads(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "libraries": {name: version for name in libraries if (version := _version(name))} or None,
        }
    )


def _version(library: str) -> str | None:
    try:
        return metadata.version(library.replace("_", "-"))
    except metadata.PackageNotFoundError:
        return None


def _embeddings(model: nn.Module | None) -> list[nn.Embedding]:
    return [] if model is None else [each for each in model.modules() if isinstance(each, nn.Embedding)]


def _rate(group: Mapping[str, Any]) -> float | None:
    return _number(group.get("initial_lr", group.get("lr")))


def _number(value: Any) -> float | None:
    """A setting as a number. A tensor on a device is left out: reading it would mean waiting."""
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.device.type != "cpu"):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))


def _told(known: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in known.items() if value is not None}


class RecordedSettings:
    """What was read of a run, table by table. Observing fails open: what cannot be read costs an event, never a run."""

    def __init__(self, write: Callable[[Mapping[str, Any]], None], say: Callable[[str], None]) -> None:
        """``write`` puts tables into the manifest, ``say`` takes a sentence about what could not be read."""
        self._write = write
        self._say = say
        self._tables: dict[str, dict[str, Any]] = {}

    def add(self, table: str, read: Callable[[], Mapping[str, Any]]) -> None:
        """Read a table, or more of it."""
        try:
            found = read()
        except Exception as error:
            self._say(f"{table}: {type(error).__name__}: {error}")
            return
        if found:
            self._tables[table] = {**self._tables.get(table, {}), **found}

    def add_objects(
        self,
        model: nn.Module | None = None,
        optimizers: Sequence[Optimizer] = (),
        schedules: Sequence[Any] = (),
        scaler: Any = None,
        clip: float | None = None,
    ) -> None:
        """Read everything that these objects show."""
        if optimizers:
            self.add("optimizer", lambda: optimizer_settings(optimizers, model))
        if clip is not None:
            self.add("optimizer", lambda: {"clip": clip, "clip_by": "norm"})
        if schedules:
            self.add("schedule", lambda: schedule_settings(schedules))
        if model is not None:
            self.add("model", lambda: model_settings(model))
            self.add("precision", lambda: precision_settings(model, scaler))
        self.add("environment", environment)

    def write(self) -> None:
        """Put all of it into the manifest."""
        self._write(self._tables)


def batch_settings(batch: Any) -> dict[str, Any]:
    """The shape of a batch: rows, and tokens a row where it has token ids."""
    if (ids := token_ids(batch)) is not None:
        return {"batch": ids.shape[0], "sequence_length": ids.shape[1]}
    tensor = next(tensors_in(batch), None)
    return {} if tensor is None or not tensor.ndim else {"batch": tensor.shape[0]}
