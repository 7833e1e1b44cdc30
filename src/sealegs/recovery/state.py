"""Live objects in, a ``State`` out, and back: all that decides what the next steps will compute."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sealegs.errors import SourceError
from sealegs.recovery.checkpoints import State


class Positioned(Protocol):
    """Data that can say where it is and go there."""

    def state_dict(self) -> dict[str, Any]:
        """The position, as JSON values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainee:
    """What is being trained, and everything that has a state of its own beside it."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    scaler: GradScaler
    data: Positioned

    def capture(self) -> State:
        """The state as it is now. The tensors are the live ones: store or copy them before the next step."""
        weights, moments = dcp_state.get_state_dict(self.model, self.optimizer, options=_OPTIONS)
        both: dict[str, Any] = {f"model/{name}": value for name, value in weights.items()}
        both |= {f"optimizer/{name}": value for name, value in moments.items()}
        tensors = {name: value for name, value in both.items() if isinstance(value, Tensor)}
        return State(
            tensors=tensors | _torch_rng(),
            plain={
                "optimizer": {name: value for name, value in both.items() if name not in tensors},
                "scheduler": self.scheduler.state_dict(),
                "scaler": self.scaler.state_dict(),
                "data": self.data.state_dict(),
                "rng": _host_rng(),
            },
        )

    def restore(self, state: State) -> None:
        """Make the live objects what they were. A state of another model is refused before anything is changed."""
        self._refuse_other_model(state)
        both = {**state.tensors, **{name: _tupled(value) for name, value in state.plain["optimizer"].items()}}
        dcp_state.set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=_under("model/", both),
            optim_state_dict=_under("optimizer/", both),
            options=_OPTIONS,
        )
        self.scheduler.load_state_dict(dict(state.plain["scheduler"]))
        if self.scaler.is_enabled() and state.plain["scaler"]:  # a run may have changed to fp16, or away from it
            self.scaler.load_state_dict(dict(state.plain["scaler"]))
        self.data.load_state_dict(state.plain["data"])
        _restore_rng(state)

    def _refuse_other_model(self, state: State) -> None:
        stored = {name: tuple(tensor.shape) for name, tensor in _under("model/", state.tensors).items()}
        live = {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}
        for name in sorted(stored.keys() | live.keys()):
            if stored.get(name) != live.get(name):
                raise SourceError(
                    f"the checkpoint is of another model: {name} is {stored.get(name, 'absent')} there "
                    f"and {live.get(name, 'absent')} here; resume with the settings that it was trained with"
                )


_OPTIONS = dcp_state.StateDictOptions(flatten_optimizer_state_dict=True)


def _under(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def _tupled(value: Any) -> Any:
    """JSON has no tuples; optimizers give and take their betas as one."""
    return tuple(value) if isinstance(value, list) else value


def _torch_rng() -> dict[str, Tensor]:
    states = {"rng/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["rng/cuda"] = torch.cuda.get_rng_state()
    return states


def _host_rng() -> dict[str, Any]:
    """Python's and numpy's global generators: the lab draws from neither, a fork of it may."""
    numpy_state: Any = np.random.get_state(legacy=False)
    return {"python": random.getstate(), "numpy": numpy_state | {"state": _listed(numpy_state["state"])}}


def _listed(state: Mapping[str, Any]) -> dict[str, Any]:
    return {**state, "key": state["key"].tolist()}


def _restore_rng(state: State) -> None:
    torch.set_rng_state(state.tensors["rng/cpu"])
    if "rng/cuda" in state.tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(state.tensors["rng/cuda"])
    version, internal, gauss = state.plain["rng"]["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(state.plain["rng"]["numpy"])
