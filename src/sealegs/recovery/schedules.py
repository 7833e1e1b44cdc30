"""Schedulers and optimizers in, the settings of the last steps out, and back: learning rates as at an earlier step."""

import copy
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

KEPT = 200
"""Steps that can be counted back."""


class _Then(NamedTuple):
    step: int
    schedulers: list[dict[str, Any]]
    groups: list[list[dict[str, Any]]]


class Schedules:
    """What the schedules were before each of the last steps."""

    def __init__(self, optimizers: Sequence[Optimizer], schedulers: Sequence[LRScheduler]) -> None:
        self._optimizers = optimizers
        self._schedulers = schedulers
        self._kept: deque[_Then] = deque(maxlen=KEPT)

    def note(self, step: int) -> None:
        """Remember them as they are before a step."""
        schedulers = [copy.deepcopy(scheduler.state_dict()) for scheduler in self._schedulers]
        groups = [
            [{name: _copied(value) for name, value in group.items() if name != "params"} for group in each.param_groups]
            for each in self._optimizers
        ]
        self._kept.append(_Then(step, schedulers, groups))

    def go_to(self, step: int) -> bool:
        """Make them what they were before a step. False, and nothing is changed, where that is not known any more."""
        then = next((kept for kept in self._kept if kept.step == step), None)
        fits = then is not None and all(
            len(groups) == len(each.param_groups) for groups, each in zip(then.groups, self._optimizers, strict=True)
        )
        if then is None or not fits:
            return False
        for scheduler, state in zip(self._schedulers, then.schedulers, strict=True):
            scheduler.load_state_dict(copy.deepcopy(state))
        for optimizer, groups in zip(self._optimizers, then.groups, strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                for name, value in settings.items():
                    _put(group, name, value)
        self.forget_from(step)
        return True

    def forget_from(self, step: int) -> None:
        """The run goes on from a step: what was known of it and of later ones is of another line."""
        self._kept = deque((kept for kept in self._kept if kept.step < step), maxlen=KEPT)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


@torch.no_grad()
def _put(group: dict[str, Any], name: str, value: Any) -> None:
    """Into the very same tensor where it is one: a captured graph may read it."""
    if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
        group[name].copy_(value)
    else:
        group[name] = value
