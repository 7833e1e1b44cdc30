"""Compares the state in a checkpoint with the live state after a resume: what came back and what did not."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sealegs.signals.layout import local
from sealegs.signals.weights import flat
from sealegs.state.checkpoints import StoredState
from sealegs.state.rng import Rng, rng_now
from sealegs.state.serialization import from_json
from sealegs.state.tensors import ALSO

AS_SAVED = "as saved"
SETTINGS = ("lr", "betas", "eps", "weight_decay", "momentum")
"""Settings of a parameter group that decide about an update."""
WEIGHTS = "weights"
FROZEN = "frozen weights"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers by their size in bytes."""


def came_back(saved: StoredState, live: StoredState) -> dict[str, str]:
    """Per part of the state: ``as saved``, or how the live state differs from the saved one."""
    found: dict[str, list[str]] = {
        WEIGHTS: list(_tensors_differ(saved, live, "model/")),
        **_frozen_differ(saved, live),
        "moments": list(_tensors_differ(saved, live, "optimizer/")),
        "random state": list(_random_differs(saved, live)),
        "data position": _differs(_of(saved)["data"], _of(live)["data"]),
        "loss scale": _differs(saved.plain["scaler"], live.plain["scaler"]),
    }
    for name in (live.plain.get("also") or {}).keys() & (saved.plain.get("also") or {}).keys():
        told = list(_tensors_differ(saved, live, f"{ALSO}{name}."))
        found[f"also {name}"] = told + _differs(saved.plain["also"][name], live.plain["also"][name])
    groups = zip(_groups(saved), _groups(live), strict=True)
    found |= {name: [] for name in ("learning rate", "betas", "optimizer settings", "parameter groups", "schedule")}
    for number, (was, now) in enumerate(groups):
        if was["params"] != now["params"]:
            found["parameter groups"].append(f"group {number} has other parameters")
        for key in sorted(was["settings"].keys() | now["settings"].keys()):
            part = {"lr": "learning rate", "betas": "betas"}.get(key, "optimizer settings")
            there, here = was["settings"].get(key), now["settings"].get(key)
            found[part] += [f"{key} of group {number} was {there} and is {here}"] if there != here else []
    for was, now in zip(saved.plain["schedulers"], live.plain["schedulers"], strict=True):
        found["schedule"] += _differs(_place(was), _place(now))
    return {name: "; ".join(told[:3]) if told else AS_SAVED for name, told in found.items()}


class ResumeChanges:
    """What the loop changes between a resume and its first step, over what came back."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], schedulers: Sequence[LRScheduler]) -> None:
        self._model = model
        self._optimizers = optimizers
        self._schedulers = schedulers
        self._then = list(self._now())
        self._sums_then = self._bit_sums()
        self._random = _random_parts(rng_now())
        self._redrawn: list[str] | None = None

    def look_at_random(self) -> None:
        """The loop asks for its first batch: from here on the run itself draws, so the first call counts."""
        if self._redrawn is None:
            now = _random_parts(rng_now())
            self._redrawn = [name for name, state in self._random.items() if now.get(name) != state]

    def since(self) -> list[str]:
        """A sentence for each change."""
        pairs = zip(self._then, self._now(), strict=True)
        told = [f"{name} was {was} and is {now}" for (name, was), (_, now) in pairs if was != now]
        told += self._values_changed()
        return told + ([f"random state: {', '.join(self._redrawn)} drew or was seeded"] if self._redrawn else [])

    def _now(self) -> Iterator[tuple[str, Any]]:
        for number, optimizer in enumerate(self._optimizers):
            for place, group in enumerate(optimizer.param_groups):
                where = f"group {place}" if len(self._optimizers) == 1 else f"group {place} of optimizer {number}"
                yield from ((f"{key} of {where}", _plain(group[key])) for key in SETTINGS if key in group)
            yield f"moments of optimizer {number}", sum(bool(state) for state in optimizer.state.values())
        for number, scheduler in enumerate(self._schedulers):
            yield f"step of schedule {number}", scheduler.last_epoch

    def _values_changed(self) -> Iterator[str]:
        """A sentence for the weights, and for each kind of moment of an optimizer, whose values are others."""
        now = self._bit_sums()
        for kind, was in self._sums_then.items():
            there = now.get(kind, {})
            both = [name for name in was if name in there]
            changed = [name for name in both if was[name] != there[name]]
            if changed:
                is_now = "0" if not any(there[name] for name in changed) else "other values"
                named = f" ({', '.join(changed[:3])}{', ...' if changed[3:] else ''})" if kind == WEIGHTS else ""
                yield f"{kind}: {len(changed)} of {len(both)} tensors have been set to {is_now}{named}"

    def _bit_sums(self) -> dict[str, dict[str, int]]:
        """A number for each tensor of weights and moments, by kind; buffers are the forward pass's to change."""
        kinds: dict[str, dict[str, Tensor]] = {WEIGHTS: dict(self._model.named_parameters())}
        for number, optimizer in enumerate(self._optimizers):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for place, parameter in enumerate(parameters):
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        kinds.setdefault(f"{key} of optimizer {number}", {})[str(place)] = value
        return {kind: _bit_sum_of_each(tensors) for kind, tensors in kinds.items()}


def _bit_sum_of_each(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The sum of each dense tensor's elements, their bits read as whole numbers: a change shows, and zeros give 0.

    It takes no copy, and waits for the device once: a resume has time for it.
    """
    parts = {name: local(tensor.detach()) for name, tensor in tensors.items()}
    dense = {name: part for name, part in parts.items() if type(part) is Tensor and _is_dense(part)}
    sums = [flat(part).view(_BITS[part.element_size()]).sum(dtype=torch.int64) for part in dense.values()]
    together = _plain(torch.stack([each.to(sums[0].device) for each in sums])) if sums else []
    return dict(zip(dense, together, strict=True))


def _is_dense(part: Tensor) -> bool:
    return part.layout == torch.strided and not (part.is_meta or part.is_quantized) and part.element_size() in _BITS


def _random_parts(rng: Rng) -> dict[str, Any]:
    of_torch, of_host = rng
    return {f"torch on {device}": state.tolist() for device, state in of_torch.items()} | dict(of_host or {})


def _plain(value: Any) -> Any:
    """The plain value of a tensor; waiting for a device is fine at a resume."""
    return value.detach().cpu().tolist() if isinstance(value, Tensor) else value


def _groups(state: StoredState) -> list[Mapping[str, Any]]:
    return [
        {"params": group["params"], "settings": from_json(group["settings"], state.tensors)}
        for optimizer in state.plain["optimizers"]
        for group in optimizer["groups"]
    ]


def _place(stored: Mapping[str, Any]) -> Any:
    inside = stored["state"]
    return inside.get("last_epoch") if isinstance(inside, Mapping) else inside


def _of(state: StoredState) -> Mapping[str, Any]:
    return state.own or state.plain


def _differs(was: Any, now: Any, name: str = "") -> list[str]:
    """What is not as it was; of settings that are nested, those alone that differ.

    >>> _differs({"epoch": 1, "loader": {"place": 4, "seed": 0}}, {"epoch": 1, "loader": {"place": 5, "seed": 0}})
    ['loader.place was 4 and is 5']
    >>> _differs({"next": 4}, {}), _differs(None, {})
    (['next was 4 and is not there'], ['was None and is {}'])
    """
    if was == now:
        return []
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        told = []
        for key in sorted(was.keys() | now.keys(), key=str):
            below = f"{name}.{key}" if name else str(key)
            if key not in now:
                told.append(f"{below} was {was[key]} and is not there")
            elif key not in was:
                told.append(f"{below} was not there and is {now[key]}")
            else:
                told += _differs(was[key], now[key], below)
        return told
    return [f"{name} was {was} and is {now}".lstrip()]


def _frozen_differ(saved: StoredState, live: StoredState) -> dict[str, list[str]]:
    """Of the weights that both leave out, those whose digests differ."""
    was, now = saved.plain.get("frozen") or {}, live.plain.get("frozen") or {}
    told = [f"{name} was {was[name]} and is {now[name]}" for name in was if was[name] != now.get(name, was[name])]
    return {FROZEN: told} if was else {}


def _tensors_differ(saved: StoredState, live: StoredState, prefix: str) -> Iterator[str]:
    names = {name for state in (saved, live) for name in state.tensors if name.startswith(prefix)}
    # left out by one of them: its digest was compared when the state was restored
    names -= {f"model/{name}" for state in (saved, live) for name in state.plain.get("frozen") or ()}
    for name in sorted(names):
        was, now = saved.tensors.get(name), live.tensors.get(name)
        if was is None or now is None:
            yield f"{name.removeprefix(prefix)} {'was not saved' if was is None else 'did not come back'}"
        elif was.dtype != now.dtype:
            yield f"{name.removeprefix(prefix)} was {was.dtype} and is {now.dtype}"
        elif not _equal(was, now):
            yield f"{name.removeprefix(prefix)} has other values"


def _random_differs(saved: StoredState, live: StoredState) -> Iterator[str]:
    for name in sorted(name for name in saved.tensors if name.startswith("rng/")):
        now = live.tensors.get(name)
        if now is None or not _equal(saved.tensors[name], now):
            yield f"torch on {name.rpartition('/')[2]} {'did not come back' if now is None else 'is another'}"
    if not saved.own:
        yield "this rank was not there"


def _equal(was: Tensor, now: Tensor) -> bool:
    """Whether two tensors agree to the last bit, NaN included; of shards, those of this rank."""
    was, now = (each.to_local() if isinstance(each, DTensor) else each for each in (was, now))
    there = was.to(now.device)
    return torch.equal(there, now) or (there.shape == now.shape and torch.allclose(there, now, 0, 0, equal_nan=True))
