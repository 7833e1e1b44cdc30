"""What recovery has tightened for the rest of a run: factors and limits around what the user's own loop sets."""

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sealegs.recovery.actions import LowerLR, Tighten

KEPT = 200
"""Steps that can be counted back."""


class _Then(NamedTuple):
    step: int
    schedulers: list[dict[str, Any]]
    groups: list[list[dict[str, Any]]]


class RecentSchedules:
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


FROM_SCRATCH = 0.5
"""The share of its learning rate that a run goes on with which has to begin anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustments:
    """Factors stand around the user's settings and schedules, which go on as if there were none."""

    lr: float = 1.0
    """The learning rate is the schedule's times this ..."""
    rewarm_from: int = 0
    rewarm_steps: int = 0
    """... reached in so many steps from that step on."""
    weight_decay: float = 1.0
    clip: float | None = None
    """Norm that gradients are clipped to, where that is less than the guard's own."""
    clip_value: float | None = None
    """What each element of a gradient is clipped to, before anything else."""

    def factors_at(self, step: int) -> dict[str, float]:
        """By name, what a setting of the optimizers is multiplied with in the update of a step.

        >>> margins = Adjustments(lr=0.5, rewarm_from=100, rewarm_steps=5)
        >>> [margins.factors_at(step) for step in (90, 100, 102, 104, 500)]
        [{'lr': 0.5}, {'lr': 0.1}, {'lr': 0.3}, {'lr': 0.5}, {'lr': 0.5}]
        """
        is_warming = self.rewarm_from <= step < self.rewarm_from + self.rewarm_steps
        warmed = (step - self.rewarm_from + 1) / self.rewarm_steps if is_warming else 1.0
        factors = {"lr": self.lr * warmed, "weight_decay": self.weight_decay}
        return {name: factor for name, factor in factors.items() if factor != 1.0}

    def lowered(self, action: LowerLR, first: int) -> "Adjustments":
        """With the learning rate lowered, and warmed up again from a step on."""
        return replace(self, lr=self.lr * action.factor, rewarm_from=first, rewarm_steps=action.rewarm_steps)

    def tightened(self, action: Tighten) -> "Adjustments":
        """With what the action has; the rest stays as it is."""
        return replace(
            self,
            clip=action.clip or self.clip,
            clip_value=action.clip_value or self.clip_value,
            weight_decay=self.weight_decay * (action.weight_decay or 1.0),
        )

    def from_scratch(self) -> "Adjustments":
        """For a run that begins anew, with a warm-up of its own."""
        return replace(self, lr=self.lr * FROM_SCRATCH, rewarm_steps=0)
