"""Says what a checkpoint holds and what a resume from it would lack: ours, a .pt file, or a folder of the HF Trainer.

Nothing is unpickled that could run code: ours are tensors and JSON, others are loaded with ``weights_only``.
"""

import hashlib
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sealegs.errors import SourceError
from sealegs.record import manifest as manifests
from sealegs.record.checkpoint_tags import DIGESTS
from sealegs.record.reading import is_number, most_bytes, open_file, read_object, reading, spell_size, too_large
from sealegs.record.schema import MANIFEST
from sealegs.record.typed import fits
from sealegs.state import checkpoint_files
from sealegs.state.checkpoint_table import fault_in_archive, fault_in_pickles
from sealegs.state.checkpoints import read_state
from sealegs.state.plain_state import DESCRIBED, fault_in_plain
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
    frozen: Mapping[str, str] = field(default_factory=dict)
    """Type, shape and digest of the weights that it leaves out."""
    other_base: str = ""
    """Where another checkpoint of the run leaves out something else under the same name."""
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
    if path.is_dir() and (path / DIGESTS).exists():
        return _ours(path)
    if path.is_dir() and ((path / "trainer_state.json").exists() or (path / "optimizer.pt").exists()):
        return _hugging_face(path)
    if path.is_file():
        return _in_file(load_file(path), path.name)
    raise SourceError(
        f"{path}: no checkpoint that can be read; give a folder of checkpoints/, a .pt file or one of the Trainer"
    )


def holdings(found: Contents) -> Iterator[Holding]:
    """Everything that a run needs to resume, present or not."""
    if found.fault:
        yield Holding("files", "damaged", f"{found.fault}: use an older checkpoint")
        return
    yield _weights(found)
    if found.frozen:
        yield _frozen(found)
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
    bad = [name for name, each in found.weights.items() if not _is_finite(each)]
    problem = f"not finite: {', '.join(bad[:3])}; an older checkpoint is needed" if bad else None
    return Holding("weights", f"{len(found.weights)} tensors ({kinds}), {numbers:,} numbers", problem)


def _frozen(found: Contents) -> Holding:
    """What has to be there when a run goes on from it, and is not in it."""
    described = [match for each in found.frozen.values() if (match := DESCRIBED.fullmatch(each))]
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(each["dtype"] for each in described).most_common())
    numbers = sum(math.prod(int(side) for side in each["shape"].split(", ") if side) for each in described)
    digest = hashlib.blake2b(repr(sorted(found.frozen.items())).encode(), digest_size=8).hexdigest()
    what = f"{len(found.frozen)} tensors ({kinds}), {numbers:,} numbers, are left out: a resume compares their digests"
    return Holding("frozen weights", f"{what}, together {digest}", found.other_base or None)


def _optimizer(found: Contents) -> Iterator[Holding]:
    groups = [group for optimizer in found.optimizers for group in optimizer.groups]
    if not groups:
        anew = "begin anew, in mid-run: a leap of the loss in the first tens of steps"
        yield Holding("optimizer", None, f"settings and moments {anew}")
        return
    sizes = ", ".join(str(len(group["params"])) for group in groups)
    yield Holding("parameter groups", f"{len(groups)}, of {sizes} parameters")
    for name, key in (("learning rate", "lr"), ("betas", "betas"), ("weight decay", "weight_decay")):
        values = [group[key] for group in groups if key in group]
        if values:
            is_scheduled = name == "learning rate" and _may_be_zero(groups, found.schedules)
            told = ", ".join(dict.fromkeys(_spelt(value) for value in values))
            yield Holding(name, told, _odd(name, values, may_be_zero=is_scheduled))
    trained = sum(len(group["params"]) for group in groups)
    states = [state for optimizer in found.optimizers for state in optimizer.state.values()]
    moments = [value for state in states for value in state.values() if isinstance(value, Tensor) and value.ndim]
    if not states:
        yield Holding("moments", None, "Adam begins with an average of nothing, at a full learning rate")
        return
    kinds = ", ".join(_dtype(kind) for kind, _ in _dtypes(moments).most_common())
    problem = f"of {len(states)} of {trained} parameters only; the others begin anew" if len(states) < trained else None
    if (zero := _zero_throughout(states)) is not None:
        problem = f"{zero} is 0 throughout: the next updates are far too large; an older checkpoint is needed"
    if not all(map(_is_finite, moments)):
        problem = "some are not finite: an older checkpoint is needed"
    yield Holding("moments", f"of {len(states)} of {trained} parameters ({kinds or 'none'})", problem)


def _zero_throughout(states: Sequence[Mapping[str, Any]]) -> str | None:
    """A second moment by which every update is divided, and which is lost."""
    for name in ("exp_avg_sq", "square_avg"):
        found = [state[name] for state in states if isinstance(state.get(name), Tensor)]
        if found and not any(bool(tensor.any()) for tensor in found):
            return name
    return None


def _odd(name: str, values: Sequence[Any], *, may_be_zero: bool) -> str | None:
    if any(_spelt(value) == UNREADABLE for value in values):
        return "damaged: an older checkpoint is needed"
    if name != "learning rate":
        return None
    rates = [_number(value) or 0.0 for value in values]
    if not all(0 < rate < math.inf or (may_be_zero and rate == 0) for rate in rates):
        return "a rate that trains nothing, or everything at once"
    return None


def _may_be_zero(groups: Sequence[Mapping[str, Any]], schedules: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a schedule made a rate 0: at its end, or before its warm-up. One that is half way through made none."""
    if not any((_number(group.get("initial_lr")) or 0.0) > 0 for group in groups):
        return False
    for schedule in schedules:
        at = schedule.get("last_epoch")
        ends = [end for key in ("T_max", "total_steps", "total_iters") if isinstance(end := schedule.get(key), int)]
        if isinstance(at, int) and any(0 < at < end - 1 for end in ends):
            return False
    return True


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
    steps = [each["last_epoch"] for each in found.schedules if fits(each.get("last_epoch"), int)]
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
    scale = _number(found.scaler.get("scale"), math.nan)
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
    said = [_number(state.get("step")) for optimizer in found.optimizers for state in optimizer.state.values()]
    return max((int(step) for step in said if step is not None and math.isfinite(step)), default=None)


def _dtypes(tensors: Any) -> Counter[torch.dtype]:
    return Counter(each.dtype for each in tensors)


def _dtype(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


UNREADABLE = "unreadable"


def _spelt(value: Any) -> str:
    if isinstance(value, list | tuple):
        parts = [_spelt(each) for each in value]
        return UNREADABLE if UNREADABLE in parts else f"({', '.join(parts)})"
    number = _number(value)
    return UNREADABLE if number is None else f"{number:g}"


def _number(value: Any, otherwise: Any = None) -> Any:
    """A setting as a float; a tensor of one element stands for one."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError, NotImplementedError):
        return otherwise


def _is_finite(tensor: Tensor) -> bool:
    """Whether all numbers of a tensor are; of one that repeats its elements, each is looked at once."""
    try:
        shape = [
            min(size, 1) if not stride else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ]
        there = tensor.as_strided(shape, tensor.stride())
        return bool((there if there.dtype.is_complex or there.element_size() > 1 else there.float()).isfinite().all())
    except (RuntimeError, NotImplementedError) as error:  # sparse, quantised, on no device at all
        raise SourceError(f"a tensor of {tensor.dtype}, {tensor.layout} cannot be looked at ({error!s:.80})") from error


# How each format is read.


def _ours(folder: Path) -> Contents:
    kind = "checkpoint of Sealegs"
    if (fault := checkpoint_files.fault_in(folder)) is not None:
        return Contents(kind=kind, fault=fault)
    checkpoint_files.expect_to_be_alone()
    step = int(folder.name) if is_number(folder.name) else None
    state = read_state(folder, step or 0)
    plain = state.plain
    if "optimizers" not in plain:
        raise SourceError(f"{folder}: of an older Sealegs; audit it with that one")
    with reading(folder):
        stored = [
            OfOptimizer(
                [{**from_json(one["settings"], state.tensors), "params": one["params"]} for one in each["groups"]],
                from_json(each["state"], state.tensors),
            )
            for each in plain["optimizers"]
        ]
        schedules = [from_json(each["state"], state.tensors) for each in plain["schedulers"]]
    run = folder.parent.parent
    position = plain["data"]
    frozen = plain.get("frozen") or {}
    return Contents(
        kind=kind,
        weights={name: each for name, each in state.tensors.items() if name.startswith("model/")},
        frozen=frozen,
        other_base=_other_base(frozen, folder) if frozen and step is not None else "",
        optimizers=stored,
        schedules=[each for each in schedules if isinstance(each, Mapping)],
        scaler=plain["scaler"] or None,
        random="of " + ", ".join([*_rng(state.tensors), *sorted(state.own.get("rng") or ())]),
        also=sorted(plain.get("also") or ()),
        data=None if position is None else f"batch {_whole(position.get('next'), '?')} comes next",
        step=step,
        versions=manifests.load(run).versions if (run / MANIFEST).exists() else None,
    )


def _other_base(frozen: Mapping[str, str], folder: Path) -> str:
    """Where another checkpoint of the run has left out something else under the same name."""
    beside = sorted(int(entry.name) for entry in folder.parent.iterdir() if is_number(entry.name))
    for step in beside:
        with suppress(SourceError, OSError):
            plain, _ = checkpoint_files.read_plain(folder.parent / str(step), 0)
            if "optimizers" not in plain or fault_in_plain(plain, {}):
                continue
            others = [name for name, each in (plain.get("frozen") or {}).items() if frozen.get(name, each) != each]
            if others:
                return f"checkpoint {step} is of another base: {others[0]} is {plain['frozen'][others[0]]} there"
    return ""


def _rng(tensors: Mapping[str, Tensor]) -> list[str]:
    return [f"torch on {name.rpartition('/')[2]}" for name in tensors if name.startswith("rng/")]


_ARCHIVE = b"PK\3\4"


def load_file(path: Path, inside: Path | None = None) -> Any:
    """What is in a file of torch.save. Archives that unpack to more than they are were not written by torch."""
    with open_file(path, inside) as file:
        is_archive = file.read(len(_ARCHIVE)) == _ARCHIVE  # as torch tells them apart
        file.seek(0)
        if fault := fault_in_archive(file) if is_archive else fault_in_pickles(file):
            raise SourceError(f"{path}: it {fault}; give a file of torch.save")
        size = os.fstat(file.fileno()).st_size
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a stranger's file may raise anything
        named = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
        why = f"it names {named[1]}" if named else type(error).__name__
        raise SourceError(
            f"{path}: cannot be read without running what is in it ({why}); save plain tensors"
        ) from error
    for tensor in _tensors_in(value):
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise SourceError(f"{path}: it has a tensor of {tensor.layout}, {tensor.dtype}; save dense ones")
        if tensor.nbytes > max(size, most_bytes()):
            raise too_large(f"{path}: a tensor of {tensor.numel():,} numbers", spell_size(tensor.nbytes))
    return value


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors of a value, however deep."""
    level: list[Any] = [value]
    seen: set[int] = set()
    while level:
        level = [each for each in level if id(each) not in seen]  # a pickle can hold itself
        seen.update(map(id, level))
        yield from (each for each in level if isinstance(each, Tensor))
        level = [
            inner
            for outer in level
            if isinstance(outer, Mapping | list | tuple | set)
            for inner in (outer.values() if isinstance(outer, Mapping) else outer)
        ]


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
            found["optimizers"].append(_of_optimizer(part))
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
        elif fits(part, int) and lower in STEPS:
            found["step"] = part
        elif lower in ("versions", "torch_version") and isinstance(part, str | Mapping):
            said = part if isinstance(part, Mapping) else {"torch": part}
            found["versions"] = {str(name): version for name, version in said.items() if isinstance(version, str)}
    return Contents(kind="file of torch.save", **found)


STEPS = frozenset(("step", "global_step", "iter", "iter_num", "iteration", "steps", "num_steps", "update"))


def _is_weights(value: Mapping[Any, Any]) -> bool:
    return bool(value) and sum(isinstance(each, Tensor) for each in value.values()) > len(value) / 2


def _tensors(value: Mapping[Any, Any]) -> dict[str, Tensor]:
    return {str(name): each for name, each in value.items() if isinstance(each, Tensor)}


def _hugging_face(folder: Path) -> Contents:
    """A checkpoint folder of the Trainer."""
    trained = folder / "trainer_state.json"
    state = read_object(trained, folder) if trained.exists() else {}
    optimizer, scheduler, scaler = (_part(folder, name) for name in ("optimizer.pt", "scheduler.pt", "scaler.pt"))
    step = _whole(state.get("global_step"))
    return Contents(
        kind="checkpoint of Hugging Face's Trainer",
        weights=dict(_hugging_face_weights(folder)),
        optimizers=[_of_optimizer(optimizer)] if optimizer else [],
        schedules=[scheduler] if scheduler else [],
        scaler=scaler or None,
        random="a file" if any(folder.glob("rng_state*.pth")) else None,
        data=None if step is None else f"by passing over {step} steps",
        step=step,
    )


def _hugging_face_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        yield from load_safetensors(file, folder).items()
    for file in sorted(folder.glob("pytorch_model*.bin")):
        weights = load_file(file, folder)
        if not isinstance(weights, Mapping):
            raise SourceError(f"{file}: a {type(weights).__name__}, no weights; restore it from a copy")
        yield from _tensors(weights).items()


def load_safetensors(file: Path, folder: Path | None = None) -> dict[str, Tensor]:
    """The tensors of a file of safetensors."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file as loaded

    with open_file(file, folder):  # refuses what is no file
        pass
    try:
        return loaded(file)
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise SourceError(f"{file}: cannot be read ({error!s:.100}); restore it from a copy") from error


def _part(folder: Path, name: str) -> Mapping[str, Any] | None:
    """One of the Trainer's files, if it is there."""
    if not (folder / name).exists():
        return None
    value = load_file(folder / name, folder)
    if not isinstance(value, Mapping):
        raise SourceError(f"{folder / name}: a {type(value).__name__}, no state; restore it from a copy")
    return value


def _of_optimizer(saved: Mapping[str, Any]) -> OfOptimizer:
    """An optimizer's ``state_dict``, as far as it is one."""
    groups, state = saved.get("param_groups"), saved.get("state")
    return OfOptimizer(
        [
            {**group, "params": params if isinstance(params := group.get("params"), list | tuple) else ()}
            for group in (groups if isinstance(groups, list | tuple) else ())
            if isinstance(group, Mapping)
        ],
        {key: of_one for key, of_one in state.items() if isinstance(of_one, Mapping)}
        if isinstance(state, Mapping)
        else {},
    )


def _whole(value: Any, otherwise: Any = None) -> Any:
    return value if fits(value, int) else otherwise
