"""Says what a checkpoint holds and what a resume from it would lack: ours, a .pt file, or a folder of the HF Trainer.

Nothing is unpickled that could run code: ours are tensors and JSON, others are loaded with ``weights_only``.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sealegs.errors import SourceError
from sealegs.record import manifest as manifests
from sealegs.record.schema import MANIFEST
from sealegs.state import checkpoint_files
from sealegs.state.checkpoints import read_state
from sealegs.state.serialization import from_json

CLOSE = 20
"""Steps by which a schedule or an optimizer may be off: a loss scaler skips some."""


@dataclass(frozen=True, slots=True)
class Holding:
    """One thing that a run needs to resume."""

    name: str
    what: str | None
    """What the checkpoint has of it; None for nothing."""
    problem: str | None = None
    """What is wrong with it, or what a resume without it does."""


@dataclass(frozen=True, slots=True)
class OfOptimizer:
    """One optimizer, as far as it was saved."""

    groups: Sequence[Mapping[str, Any]]
    """Settings; ``params`` are names or numbers."""
    state: Mapping[Any, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The parts of a checkpoint, whoever wrote it."""

    kind: str
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    optimizers: Sequence[OfOptimizer] = ()
    schedules: Sequence[Mapping[str, Any]] = ()
    scaler: Mapping[str, Any] | None = None
    random: str | None = None
    also: Sequence[str] = ()
    """Names of the loop's own states."""
    data: str | None = None
    step: int | None = None
    versions: Mapping[str, str] | None = None
    fault: str | None = None
    """Why it cannot be trusted, such as a file that was changed."""


def open_checkpoint(path: Path) -> Contents:
    """Read a checkpoint, whoever wrote it."""
    if path.is_dir() and (path / checkpoint_files.DIGESTS).exists():
        return _ours(path)
    if path.is_dir() and ((path / "trainer_state.json").exists() or (path / "optimizer.pt").exists()):
        return _hugging_face(path)
    if path.is_file():
        return _in_file(_load(path), path.name)
    raise SourceError(
        f"{path}: no checkpoint that can be read; give a folder of checkpoints/, a .pt file or one of the Trainer"
    )


def holdings(found: Contents) -> Iterator[Holding]:
    """Everything that a run needs to resume, present or not."""
    if found.fault:
        yield Holding("files", "damaged", f"{found.fault}: use an older checkpoint")
        return
    yield _weights(found)
    yield from _optimizer(found)
    yield _step(found)
    yield _schedule(found)
    yield _scaler(found)
    yield Holding(
        "random state", found.random, None if found.random else "dropout and shuffling go on with other numbers"
    )
    yield from (Holding(f"also {name}", "a state of the loop's own") for name in found.also)
    yield Holding(
        "data position", found.data, None if found.data else "the data begin anew: what was seen is seen again"
    )
    yield _versions(found)


# What is said of each part.


def _weights(found: Contents) -> Holding:
    if not found.weights:
        return Holding("weights", None, "there is nothing to go on from")
    numbers = sum(each.numel() for each in found.weights.values())
    kinds = ", ".join(f"{count} {_dtype(kind)}" for kind, count in _dtypes(found.weights.values()).most_common())
    bad = [name for name, each in found.weights.items() if not bool(each.isfinite().all())]
    problem = f"not finite: {', '.join(bad[:3])}; an older checkpoint is needed" if bad else None
    return Holding("weights", f"{len(found.weights)} tensors ({kinds}), {numbers:,} numbers", problem)


def _optimizer(found: Contents) -> Iterator[Holding]:
    groups = [group for optimizer in found.optimizers for group in optimizer.groups]
    if not groups:
        anew = "begin anew, in mid-run: a leap of the loss in the first tens of steps"
        yield Holding("optimizer", None, f"settings and moments {anew}")
        return
    sizes = ", ".join(str(len(group.get("params", ()))) for group in groups)
    yield Holding("parameter groups", f"{len(groups)}, of {sizes} parameters")
    for name, key in (("learning rate", "lr"), ("betas", "betas"), ("weight decay", "weight_decay")):
        values = [group[key] for group in groups if key in group]
        if values:
            yield Holding(name, ", ".join(dict.fromkeys(_spelt(value) for value in values)), _odd(name, values))
    trained = sum(len(group.get("params", ())) for group in groups)
    states = [state for optimizer in found.optimizers for state in optimizer.state.values()]
    moments = [value for state in states for name, value in state.items() if isinstance(value, Tensor) and value.ndim]
    if not states:
        yield Holding("moments", None, "Adam begins with an average of nothing, at a full learning rate")
        return
    kinds = ", ".join(_dtype(kind) for kind, _ in _dtypes(moments).most_common())
    problem = f"of {len(states)} of {trained} parameters only; the others begin anew" if len(states) < trained else None
    if any(not bool(value.isfinite().all()) for value in moments):
        problem = "some are not finite: an older checkpoint is needed"
    yield Holding("moments", f"of {len(states)} of {trained} parameters ({kinds or 'none'})", problem)


def _odd(name: str, values: Sequence[Any]) -> str | None:
    if name == "learning rate" and not all(0 < float(value) < math.inf for value in values):
        return "a rate that trains nothing, or everything at once"
    return None


def _step(found: Contents) -> Holding:
    taken = _optimizer_step(found)
    if found.step is None and taken is None:
        return Holding("step", None, "the schedule and the log begin at 0 again")
    if found.step is None:
        return Holding("step", f"{taken}, by the optimizer")
    problem = None
    if taken is not None and abs(taken - found.step) > max(CLOSE, found.step // 100):
        problem = f"the optimizer says {taken}: they are of different checkpoints, or moments were lost on the way"
    return Holding("step", str(found.step), problem)


def _schedule(found: Contents) -> Holding:
    steps = [int(each["last_epoch"]) for each in found.schedules if isinstance(each.get("last_epoch"), int)]
    if not found.schedules:
        return Holding("schedule", None, "the warm-up comes again, unless the loop works the rate out of the step")
    at, wanted = ", ".join(map(str, steps)) or "unknown", found.step
    problem = None
    if wanted is not None and any(abs(step - wanted) > max(CLOSE, wanted // 100) for step in steps):
        problem = f"the checkpoint is of step {wanted}: the learning rate leaps at a resume"
    return Holding("schedule", f"at step {at}", problem)


def _scaler(found: Contents) -> Holding:
    if not found.scaler:
        return Holding("loss scale", "none, as bf16 and fp32 have it")
    scale = float(found.scaler.get("scale", math.nan))
    return Holding("loss scale", f"{scale:g}", "collapsed: gradients overflow" if not scale >= 1 else None)


def _versions(found: Contents) -> Holding:
    if not found.versions:
        return Holding("versions", None)
    here = manifests.describe("here").versions
    other = [
        f"{name} {was} there, {here[name]} here" for name, was in found.versions.items() if here.get(name, was) != was
    ]
    told = ", ".join(f"{name} {was}" for name, was in found.versions.items())
    return Holding("versions", told, f"{'; '.join(other)}: not bit for bit the same" if other else None)


def _optimizer_step(found: Contents) -> int | None:
    steps = [
        int(state["step"]) for optimizer in found.optimizers for state in optimizer.state.values() if "step" in state
    ]
    return max(steps, default=None)


def _dtypes(tensors: Any) -> Counter[torch.dtype]:
    return Counter(each.dtype for each in tensors)


def _dtype(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def _spelt(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"({', '.join(_spelt(each) for each in value)})"
    return f"{float(value):g}"


# How each format is read.


def _ours(folder: Path) -> Contents:
    kind = "checkpoint of Sealegs"
    if (fault := checkpoint_files.fault_in(folder)) is not None:
        return Contents(kind=kind, fault=fault)
    checkpoint_files.expect_to_be_alone()
    step = int(folder.name) if folder.name.isdecimal() else None
    state = read_state(folder, step or 0)
    plain = state.plain
    stored = [
        OfOptimizer(
            [{**from_json(group["settings"], state.tensors), "params": group["params"]} for group in each["groups"]],
            from_json(each["state"], state.tensors),
        )
        for each in plain["optimizers"]
    ]
    run = folder.parent.parent
    return Contents(
        kind=kind,
        weights={name: each for name, each in state.tensors.items() if name.startswith("model/")},
        optimizers=stored,
        schedules=[from_json(each["state"], state.tensors) for each in plain["schedulers"]],
        scaler=plain["scaler"] or None,
        random="of " + ", ".join([*_rng(state.tensors), *sorted(state.own.get("rng") or ())]),
        also=sorted(plain.get("also") or ()),
        data=None if plain["data"] is None else f"batch {plain['data'].get('next', '?')} comes next",
        step=step,
        versions=manifests.load(run).versions if (run / MANIFEST).exists() else None,
    )


def _rng(tensors: Mapping[str, Tensor]) -> list[str]:
    return [f"torch on {name.rpartition('/')[2]}" for name in tensors if name.startswith("rng/")]


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a stranger's file may raise anything
        named = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
        why = f"it names {named[1]}" if named else type(error).__name__
        raise SourceError(
            f"{path}: cannot be read without running what is in it ({why}); save plain tensors"
        ) from error


def _in_file(value: Any, name: str) -> Contents:
    """A dict of dicts; the contents of each tell what it is."""
    if not isinstance(value, Mapping):
        raise SourceError(
            f"{name}: a {type(value).__name__}, not a checkpoint; give the file that the loop resumes from"
        )
    if _is_weights(value):
        return Contents(kind="weights", weights=_tensors(value))
    found: dict[str, Any] = {"optimizers": [], "schedules": []}
    for key, part in value.items():
        lower = str(key).lower()
        if isinstance(part, Mapping) and {"state", "param_groups"} <= part.keys():
            found["optimizers"].append(OfOptimizer(part["param_groups"], part["state"]))
        elif isinstance(part, Mapping) and "last_epoch" in part:
            found["schedules"].append(part)
        elif isinstance(part, Mapping) and {"scale", "growth_factor"} <= part.keys():
            found["scaler"] = part
        elif "rng" in lower or "random" in lower:
            found["random"] = f"as {key}"
        elif isinstance(part, Mapping) and _is_weights(part):
            found.setdefault("weights", _tensors(part))
        elif any(word in lower for word in ("sampler", "loader", "data", "position")):
            found["data"] = f"as {key}"
        elif isinstance(part, int) and not isinstance(part, bool) and lower in STEPS:
            found["step"] = part
        elif lower in ("versions", "torch_version") and isinstance(part, str | Mapping):
            found["versions"] = part if isinstance(part, Mapping) else {"torch": part}
    return Contents(kind="file of torch.save", **found)


STEPS = frozenset(("step", "global_step", "iter", "iter_num", "iteration", "steps", "num_steps", "update"))


def _is_weights(value: Mapping[Any, Any]) -> bool:
    return bool(value) and sum(isinstance(each, Tensor) for each in value.values()) > len(value) / 2


def _tensors(value: Mapping[Any, Any]) -> dict[str, Tensor]:
    return {str(name): each for name, each in value.items() if isinstance(each, Tensor)}


def _hugging_face(folder: Path) -> Contents:
    """A checkpoint folder of the Trainer."""
    trained = folder / "trainer_state.json"
    try:
        state = json.loads(trained.read_bytes()) if trained.exists() else {}
    except ValueError as error:
        raise SourceError(f"{trained}: not JSON ({error})") from error
    optimizer = _load(folder / "optimizer.pt") if (folder / "optimizer.pt").exists() else None
    scheduler = _load(folder / "scheduler.pt") if (folder / "scheduler.pt").exists() else None
    step = state.get("global_step")
    return Contents(
        kind="checkpoint of Hugging Face's Trainer",
        weights=dict(_hugging_face_weights(folder)),
        optimizers=[OfOptimizer(optimizer["param_groups"], optimizer["state"])] if optimizer else [],
        schedules=[scheduler] if scheduler else [],
        scaler=_load(folder / "scaler.pt") if (folder / "scaler.pt").exists() else None,
        random="a file" if any(folder.glob("rng_state*.pth")) else None,
        data=None if step is None else f"by passing over {step} steps",
        step=step,
    )


def _hugging_face_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        from safetensors.torch import load_file

        yield from load_file(file).items()
    for file in sorted(folder.glob("pytorch_model*.bin")):
        yield from _load(file).items()
