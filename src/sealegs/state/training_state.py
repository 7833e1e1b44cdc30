"""The training state: all live objects that decide what the next steps compute, captured as a ``StoredState`` and
restored."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sealegs.errors import ConfigError, SourceError
from sealegs.state.checkpoints import StoredState
from sealegs.state.extra_state import Stateful, load_states
from sealegs.state.frozen import FrozenWeights, full_name
from sealegs.state.rng import host_rng, refuse_unsound_rng, restore_rng, seed_anew, torch_rng
from sealegs.state.serialization import from_json, to_json
from sealegs.state.snapshots import Snapshot, Snapshots
from sealegs.state.tensors import ALSO, walk


class Positioned(Protocol):
    """Data that can tell its position and go to one."""

    def state_dict(self) -> dict[str, Any]:
        """The position, as JSON values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """The model being trained, and everything beside it that has a state."""

    model: nn.Module
    """Plain, compiled, in DDP or sharded by FSDP2: its tensors have the same names in all of them."""
    optimizers: Sequence[Optimizer]
    schedulers: Sequence[LRScheduler] = ()
    scaler: GradScaler | None = None
    data: Positioned | None = None
    also: Mapping[str, Stateful] = field(default_factory=dict)
    """The loop's own objects. With several ranks: the same on all, or sharded tensors."""
    frozen: FrozenWeights | None = None
    """What its states leave out; None leaves out nothing."""

    def capture(self, *, with_frozen: bool = False) -> StoredState:
        """The state as it is now. The tensors are the live ones: store or copy them before the next step.

        An optimizer that has not stepped has no state, and gets none here. Frozen weights are left out, unless they are
        asked for.
        """
        rank, world = _rank_and_world()
        left_out: dict[str, str] = {}
        if self.frozen is not None and not with_frozen:
            self.frozen.settle(self.frozen.look(), together=True)
            left_out = self.frozen.described(self.frozen.left_out())
        weights, described = _parted(self._weights(), left_out)
        names = self._names()
        tensors = {f"model/{name}": value for name, value in weights.items() if isinstance(value, Tensor)}
        position = None if self.data is None else self.data.state_dict()
        plain = {
            "ranks": world,
            "extra": {
                name: to_json(value, f"extra/{name}", tensors)
                for name, value in weights.items()
                if not isinstance(value, Tensor)
            },
            "optimizers": [
                _of_optimizer(optimizer, names, f"optimizer/{number}", tensors)
                for number, optimizer in enumerate(self.optimizers)
            ],
            "schedulers": self._schedules([scheduler.state_dict() for scheduler in self.schedulers], tensors),
            "scaler": {} if self.scaler is None else self.scaler.state_dict(),
            "data": position,
            "also": {name: to_json(thing.state_dict(), f"{ALSO}{name}", tensors) for name, thing in self.also.items()},
            **described,
        }
        tensors |= {f"rng/{rank}/{device}": state for device, state in torch_rng().items()}
        return StoredState(tensors, plain, own={"data": position, "rng": host_rng()})

    def capture_past(self, snapshots: Snapshots, snapshot: Snapshot, *, whole: bool = False) -> StoredState:
        """The state at a snapshot, as a checkpoint of that step would hold it; the tensors are the snapshot's.

        Unless it is to be ``whole``, it lacks the data position and the loop's own objects, which no step reads.
        """
        rank, world = _rank_and_world()
        parts, moments, settings = snapshots.contents(snapshot)
        left_out = snapshots.left_out(snapshot)
        if self.frozen is not None:
            self.frozen.refuse_unless_agreed(left_out)
        named = self.frozen.named() if self.frozen is not None and left_out else {}
        live = walk(self.model, self.optimizers, left_out=[each for name, each in named.items() if name in left_out])
        if grown := sorted(live.weights.keys() - parts.keys()):
            raise SourceError(f"the state of step {snapshot.step} has no {grown[0]}: the model has grown since")
        weights, described = _parted(self._weights(), left_out)
        names = self._names()
        tensors = live.as_held({name: value for name, value in weights.items() if isinstance(value, Tensor)}, parts)
        extra = {
            name: to_json(value, f"extra/{name}", tensors)
            for name, value in weights.items()
            if not isinstance(value, Tensor)
        }
        optimizers = []
        for number, (optimizer, held) in enumerate(zip(self.optimizers, settings, strict=True)):
            if (sizes := [len(group["params"]) for group in optimizer.param_groups]) != held.sizes:
                raise SourceError(
                    f"the state of step {snapshot.step} is of an optimizer of {held.sizes} parameters, and it is of "
                    f"{sizes} now"
                )
            groups, states = held.as_held(moments)
            trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            then = SimpleNamespace(
                param_groups=[
                    {**group, "params": now["params"]}
                    for group, now in zip(groups, optimizer.param_groups, strict=True)
                ],
                state={trained[place]: state for place, state in states.items()},
            )
            stored = _of_optimizer(then, names, f"optimizer/{number}", tensors)
            optimizers.append(stored | {"kind": _kind(optimizer)})
        also = snapshots.also_at(snapshot) if whole else {}
        position = snapshot.plain["data"] if whole else None
        of_torch, of_host = snapshot.plain["rng"]
        tensors |= {f"rng/{rank}/{device}": state for device, state in of_torch.items()}
        plain = {
            "ranks": world,
            "extra": extra,
            "optimizers": optimizers,
            "schedulers": self._schedules(snapshot.plain["schedulers"], tensors),
            "scaler": _scaler_at(self.scaler, snapshot.plain["scaler"]),
            "data": position,
            "also": {name: to_json(state, f"{ALSO}{name}", tensors) for name, state in also.items()},
            **described,
        }
        return StoredState(tensors, plain, own={"data": position, "rng": of_host}, step=snapshot.step)

    def restore(self, state: StoredState) -> list[str]:
        """Restore the live objects. Gives sentences on what cannot be as it was.

        A state of another model, optimizer or schedule is refused before anything changes.
        """
        self._refuse_another(state)
        self._refuse_unsound(state)
        frozen, left_out = self.frozen or FrozenWeights(self.model, self.optimizers), _frozen_of(state)
        frozen.refuse_others(left_out)
        names, remarks = self._names(), list(self._remarks(state))
        if self.data is not None and (position := _position(state)) is not None:
            self.data.load_state_dict(position)  # first: it may refuse for its own reasons
        load_states(self.also, self.also_in(state))
        schedules = {str(number): each["state"] for number, each in enumerate(state.plain["schedulers"])}
        load_states(
            {str(number): scheduler for number, scheduler in enumerate(self.schedulers)},
            {number: from_json(stored, state.tensors) for number, stored in schedules.items()},
            name_of="schedule {}",
        )
        weights = _under("model/", state.tensors) | from_json(state.plain["extra"], state.tensors)
        frozen.before_loading(weights)
        options = dcp_state.StateDictOptions(strict=not left_out)
        dcp_state.set_model_state_dict(self.model, weights, options=options)
        frozen.bring_back(left_out)
        for optimizer, stored in zip(self.optimizers, state.plain["optimizers"], strict=True):
            _restore_optimizer(optimizer, names, stored, state.tensors)
        if self.scaler is not None and self.scaler.is_enabled() and state.plain["scaler"]:
            self.scaler.load_state_dict(dict(state.plain["scaler"]))
        _restore_rng(state)
        return remarks

    def also_in(self, state: StoredState) -> dict[str, Any]:
        """The states of the loop's own objects in a stored state."""
        stored = state.plain.get("also") or {}  # older checkpoints have none
        return {name: from_json(stored[name], state.tensors) for name in self.also if name in stored}

    def _weights(self) -> dict[str, Any]:
        """Parameters, buffers, and the modules' extra state."""
        return {full_name(self.model, key): value for key, value in self.model.state_dict().items()}

    def _schedules(self, states: Sequence[Any], tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
        return [
            {"kind": _kind(scheduler), "state": to_json(state, f"scheduler/{number}", tensors)}
            for number, (scheduler, state) in enumerate(zip(self.schedulers, states, strict=True))
        ]

    def _names(self) -> dict[Tensor, str]:
        """The parameters' names, as ``get_model_state_dict`` gives them."""
        return {
            parameter: next(iter(dcp_state._get_fqns(self.model, name)))
            for name, parameter in self.model.named_parameters()
        }

    def _refuse_another(self, state: StoredState) -> None:
        if "optimizers" not in state.plain:
            raise SourceError("the checkpoint is of an older Sealegs: finish the run with that one, or start another")
        here, _ = _parted(self._weights(), _frozen_of(state))
        there = _under("model/", state.tensors)
        for name in sorted(there.keys() | {name for name, value in here.items() if isinstance(value, Tensor)}):
            _refuse_unless_same("model", name, _shape(there.get(name)), _shape(here.get(name)))
            if isinstance(here[name], DTensor) and not isinstance(there[name], DTensor):
                raise SourceError(f"{name} is sharded here: load the checkpoint with like=training_state.capture()")
        extra = sorted(name for name, value in here.items() if not isinstance(value, Tensor))
        _refuse_unless_same("model", "the extra state", sorted(state.plain["extra"]), extra)
        stored = state.plain["optimizers"]
        _refuse_unless_same("run", "the optimizer", [one["kind"] for one in stored], [*map(_kind, self.optimizers)])
        for optimizer, one in zip(self.optimizers, stored, strict=True):
            _refuse_other_groups(optimizer, one, self._names())
        stored = state.plain["schedulers"]
        _refuse_unless_same("run", "the scheduler", [one["kind"] for one in stored], [*map(_kind, self.schedulers)])

    def _refuse_unsound(self, state: StoredState) -> None:
        """Refuse a state whose parts are not of the kind that the live ones are: torch would take any, and fail later.

        A part that torch cannot take fails here, on a copy.
        """
        try:
            from_json(state.plain["extra"], state.tensors)
            names = self._names()
            for number, (optimizer, stored) in enumerate(zip(self.optimizers, state.plain["optimizers"], strict=True)):
                moments = from_json(stored["state"], state.tensors)
                for live, group in zip(optimizer.param_groups, stored["groups"], strict=True):
                    settings = from_json(group["settings"], state.tensors)
                    _refuse_unlike(f"optimizer {number}", settings, live)
                    _refuse_other_moments(optimizer, {**live, **settings}, moments, names)
            for number, (scheduler, stored) in enumerate(zip(self.schedulers, state.plain["schedulers"], strict=True)):
                saved = from_json(stored["state"], state.tensors)
                _refuse_unlike(f"schedule {number}", saved, scheduler.state_dict())
            rank, _ = _rank_and_world()
            refuse_unsound_rng((_under(f"rng/{rank}/", state.tensors), state.own["rng"] if state.own else None))
        except (ValueError, TypeError, KeyError, RuntimeError, AttributeError, IndexError, OverflowError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise SourceError(f"the checkpoint is damaged ({reason:.200}); use another one") from error

    def _remarks(self, state: StoredState) -> Iterator[str]:
        """Sentences on what will not be as it was."""
        before, now = state.plain["ranks"], _rank_and_world()[1]
        if before < now:
            yield f"there were {before} ranks and are {now}: ranks from {before} on are seeded by seed, step and rank"
        if before > now:
            yield f"there were {before} ranks and are {now}: the random state of the others is not used"
        if self.data is None and state.plain["data"] is not None:
            yield "the place in the data is not restored: there are no data here that could go there"
        elif self.data is not None and state.plain["data"] is None:
            yield "the place in the data is not restored: the checkpoint does not hold one"
        elif self.data is not None and before != now and not _is_shared(state.plain["data"]):
            yield "every rank takes the place in the data that rank 0 had"
        is_scaled = self.scaler is not None and self.scaler.is_enabled()
        if bool(state.plain["scaler"]) != is_scaled:
            yield "the loss scale begins anew" if is_scaled else "the loss scale of the checkpoint is not used"
        stored = (state.plain.get("also") or {}).keys()
        for name in sorted(self.also.keys() - stored):
            yield f"also[{name!r}] is as the loop has made it: the checkpoint does not hold it"
        for name in sorted(stored - self.also.keys()):
            yield f"also[{name!r}] of the checkpoint is not used: it was not given here"
        if torch.cuda.is_initialized() and not any(name.endswith("/cuda") for name in state.tensors):
            yield "the random state of the CUDA device is made of seed, step and rank: the checkpoint does not hold one"
        here = self._weights()
        for name, weight in _under("model/", state.tensors).items():
            if weight.dtype != here[name].dtype:
                yield f"weights are converted: {name} was saved as {weight.dtype} and is {here[name].dtype} here"
                return


def scale_of(scaler: Any) -> tuple[Tensor, Tensor] | None:
    """The loss scale, as tensors: reading their numbers would wait for the device."""
    if scaler is None or scaler._scale is None:
        return None
    return scaler._scale.clone(), scaler._growth_tracker.clone()


def restore_scale(scaler: Any, scale: tuple[Tensor, Tensor] | None) -> None:
    """Restore the loss scale."""
    if scale is not None:
        scaler._scale.copy_(scale[0])
        scaler._growth_tracker.copy_(scale[1])


def _scaler_at(scaler: GradScaler | None, scale: tuple[Tensor, Tensor] | None) -> dict[str, Any]:
    if scaler is None or scale is None:
        return {}
    return scaler.state_dict() | {"scale": float(scale[0]), "_growth_tracker": int(scale[1])}


def _of_optimizer(
    optimizer: Any, names: Mapping[Tensor, str], prefix: str, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """Settings by group and state by parameter, as JSON; its tensors go to ``tensors``."""
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not all(parameter in names for parameter in trained):
        raise ConfigError(f"{prefix} trains a parameter that is not in the model: a checkpoint would lack it; add it")
    return {
        "kind": _kind(optimizer),
        "groups": [
            {
                "params": [names[parameter] for parameter in group["params"]],
                "settings": {key: to_json(group[key], f"{prefix}/{key}") for key in group if key not in _NOT_STORED},
            }
            for group in optimizer.param_groups
        ],
        "state": {
            names[parameter]: to_json(optimizer.state[parameter], f"{prefix}/{names[parameter]}", tensors)
            for parameter in trained
            if optimizer.state.get(parameter)
        },
    }


_NOT_STORED = frozenset({"params", "param_names", "fused", "foreach", "capturable", "differentiable"})
"""Left out of a group's settings: what is stored elsewhere, and how an update is computed, which is up to the
machine."""


def _restore_optimizer(
    optimizer: Optimizer, names: Mapping[Tensor, str], stored: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Restore through the optimizer's ``load_state_dict``; torch's ``set_optimizer_state_dict`` would step it first."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    of_parameters = {
        place: from_json(stored["state"][names[parameter]], tensors)
        for place, parameter in enumerate(parameters)
        if names[parameter] in stored["state"]
    }
    as_tensors = [
        {key: value for key, value in group.items() if isinstance(value, Tensor)} for group in optimizer.param_groups
    ]
    groups = optimizer.state_dict()["param_groups"]
    for group, before in zip(groups, stored["groups"], strict=True):
        group.update(from_json(before["settings"], tensors))
    optimizer.load_state_dict({"state": of_parameters, "param_groups": groups})
    for group, settings in zip(optimizer.param_groups, as_tensors, strict=True):
        for key, tensor in settings.items():  # a compiled step goes on reading this very tensor
            group[key] = tensor.fill_(group[key])
    for place, entries in of_parameters.items():
        live = optimizer.state[parameters[place]]
        for key, value in entries.items():
            if isinstance(value, Tensor) and (live[key] is value or live[key].dtype != value.dtype):
                # torch would share it with the state, or round it to the type of the weight
                live[key] = value.to(live[key].device, copy=True)


def _refuse_other_groups(optimizer: Optimizer, stored: Mapping[str, Any], names: Mapping[Tensor, str]) -> None:
    there = {name: number for number, group in enumerate(stored["groups"]) for name in group["params"]}
    here = {
        names.get(parameter, "a parameter that is not in the model"): number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    _refuse_unless_same("run", "the number of parameter groups", len(stored["groups"]), len(optimizer.param_groups))
    for name in sorted(there.keys() | here.keys()):
        _refuse_unless_same("run", f"the parameter group of {name}", there.get(name, "none"), here.get(name, "none"))


def _refuse_unless_same(of: str, what: str, there: object, here: object) -> None:
    if there != here:
        raise SourceError(
            f"the checkpoint is of another {of}: {what} is {there} there and {here} here; "
            "resume with the settings that it was trained with"
        )


def _refuse_unlike(what: str, saved: Any, live: Any, name: str = "") -> None:
    """Refuse a saved setting that is of another sort than the live one; what only one of them has does not matter."""
    if saved is None or live is None or _sort(live) == "something else":
        return
    if _sort(saved) != _sort(live):
        raise ValueError(f"{name or 'the state'} of {what} is {saved!a:.40}")
    if _sort(live) == "object":
        for key in saved.keys() & live.keys():
            _refuse_unlike(what, saved[key], live[key], str(key))
    elif _sort(live) == "list" and all(_sort(each) == "number" for each in live):
        for each in saved:
            _refuse_unlike(what, each, 0.0, name)


def _refuse_other_moments(
    optimizer: Optimizer, group: Mapping[str, Any], moments: Mapping[str, Any], names: Mapping[Tensor, str]
) -> None:
    """Refuse moments that are not what an optimizer of torch's would make for a parameter of that shape.

    What another library's optimizer keeps is not known, and its first step shall have no side effect here.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        return
    made: dict[tuple[int, torch.dtype, torch.device], Mapping[str, Any]] = {}
    stepped = set()
    for parameter in group["params"]:
        if (stored := moments.get(names[parameter])) is None:
            continue
        kind = parameter.ndim, parameter.dtype, parameter.device
        if kind not in made:
            made[kind] = _twin(type(optimizer), group, *kind)[1]
        for key, moment in made[kind].items():
            if moment is not None and not _is_like(stored.get(key), moment, parameter):
                raise ValueError(f"{key} of {names[parameter]} is {stored.get(key)!a:.40}")
        types = frozenset((key, stored[key].dtype) for key in made[kind] if isinstance(stored.get(key), Tensor))
        if (kind, types) not in stepped:
            stepped.add((kind, types))
            _step_with(types, *_twin(type(optimizer), group, *kind))


_SIDE = 2
"""The length of each dimension of a small parameter."""


def _twin(
    optimizer: type[Optimizer], group: Mapping[str, Any], ndim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Any, dict[str, Any]]:
    """An optimizer after one step of a small parameter, and what it keeps for it; nothing if it will not step."""
    settings = {key: value for key, value in group.items() if key not in _NOT_STORED or key in ("fused", "foreach")}
    try:
        small = torch.zeros((_SIDE,) * ndim, dtype=dtype, device=device, requires_grad=True)
        small.grad = torch.zeros_like(small)
        twin: Any = optimizer([{**settings, "params": [small]}])  # type: ignore[call-arg]
        twin.step()
    except (TypeError, ValueError, RuntimeError):  # it needs a closure, or other settings
        return None, {}
    return twin, twin.state[small]


def _step_with(types: Iterable[tuple[str, torch.dtype]], twin: Any, kept: dict[str, Any]) -> None:
    """See that moments of these types are ones that the optimizer can step with: torch raises where they are not."""
    for key, dtype in types:
        kept[key] = kept[key].to(dtype)
    if kept:
        twin.step()


def _is_like(stored: Any, made: Any, parameter: Tensor) -> bool:
    """Whether a stored moment is of the sort of one that was made, and of the shape that it would have."""
    if not isinstance(made, Tensor):
        return _sort(stored) == _sort(made)
    if not isinstance(stored, Tensor) or stored.is_floating_point() != made.is_floating_point():
        return False
    if made.shape == (_SIDE,) * parameter.ndim:
        return stored.shape == parameter.shape
    return stored.ndim == made.ndim and (stored.ndim > 0 or math.isfinite(float(stored)))


def _sort(value: Any) -> str:
    """What a value is, as far as a setting goes: a tensor stands for a number."""
    if isinstance(value, Tensor | int | float):
        return "number"
    if isinstance(value, list | tuple):
        return "list"
    return "object" if isinstance(value, Mapping) else "text" if isinstance(value, str) else "something else"


def _kind(thing: object) -> str:
    return type(thing).__name__


def _shape(value: Any) -> object:
    return tuple(value.shape) if isinstance(value, Tensor) else "absent"


def _parted(weights: Mapping[str, Any], left_out: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a state holds of the weights, and what it says of those that it leaves out: nothing if there are none."""
    held = {name: value for name, value in weights.items() if name not in left_out}
    described = {name: left_out[name] for name in weights if name in left_out}
    return held, {"frozen": described} if described else {}


def _frozen_of(state: StoredState) -> Mapping[str, str]:
    """What a state has left out, as a whole tensor is described; states of older versions have left out nothing."""
    left_out: Mapping[str, str] = state.plain.get("frozen") or {}
    return left_out


def _under(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def _rank_and_world() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _is_shared(position: Mapping[str, Any]) -> bool:
    """Whether it says how ranks share a batch, so that any number of them can go on from it."""
    return any(name in position.get("loader", ()) for name in ("share", "global_batch"))


def _position(state: StoredState) -> Mapping[str, Any] | None:
    """The data position of this rank; with another number of ranks, that of rank 0."""
    is_same_world = state.plain["ranks"] == _rank_and_world()[1]
    position: Mapping[str, Any] | None = (state.own if is_same_world else state.plain)["data"]
    return position


def _restore_rng(state: StoredState) -> None:
    rank, _ = _rank_and_world()
    stored = _under(f"rng/{rank}/", state.tensors)
    if len(stored) < len(torch_rng()):
        seed_anew(int(state.plain.get("seed", torch.initial_seed())), state.step or 0, rank)
    restore_rng((stored, state.own["rng"] if state.own else None))
