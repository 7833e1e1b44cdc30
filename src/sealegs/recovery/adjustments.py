"""Adjustments: factors and limits that recovery puts around the user's settings for the rest of a run.

Also here: the schedules of recent steps, so that skipped steps can be taken off the step count.
"""

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
"""How many steps back the schedules are kept."""


class _Schedules(NamedTuple):
    step: int
    schedulers: list[dict[str, Any]]
    groups: list[list[dict[str, Any]]]


class RecentSchedules:
    """Learning-rate schedules and optimizer settings as they were before each of the last steps."""

    def __init__(self, optimizers: Sequence[Optimizer], schedulers: Sequence[LRScheduler]) -> None:
        self._optimizers = optimizers
        self._schedulers = schedulers
        self._kept: deque[_Schedules] = deque(maxlen=KEPT)

    def remember(self, step: int) -> None:
        """Remember the schedules as they are before a step."""
        schedulers = [copy.deepcopy(scheduler.state_dict()) for scheduler in self._schedulers]
        groups = [
            [{name: _copied(value) for name, value in group.items() if name != "params"} for group in each.param_groups]
            for each in self._optimizers
        ]
        self._kept.append(_Schedules(step, schedulers, groups))

    def go_to(self, step: int) -> bool:
        """Restore the schedules of a step. False where they are no longer known; then nothing changes."""
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
                    _set_in_place(group, name, value)
        self.forget_from(step)
        return True

    def forget_from(self, step: int) -> None:
        """Forget this step and later ones: the run has gone back to it and will do them again."""
        self._kept = deque((kept for kept in self._kept if kept.step < step), maxlen=KEPT)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


@torch.no_grad()
def _set_in_place(group: dict[str, Any], name: str, value: Any) -> None:
    """Set a setting. A tensor is written in place, since a captured CUDA graph may read it."""
    if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
        group[name].copy_(value)
    else:
        group[name] = value


FROM_SCRATCH = 0.5
"""The share of its learning rate with which a run starts over from step 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustments:
    """Factors and limits around the user's settings; the user's schedules go on unchanged underneath."""

    lr: float = 1.0
    """Factor on the schedule's learning rate."""
    rewarm_from: int = 0
    rewarm_steps: int = 0
    """The learning rate rises from zero to its new value in this many steps, from step ``rewarm_from`` on."""
    weight_decay: float = 1.0
    clip: float | None = None
    """Norm that gradients are clipped to, where it is smaller than the guard's own."""
    clip_value: float | None = None
    """Largest element of a gradient; elements are clipped before the norm is."""
    qk_clip: float | None = None
    """Attention logit beyond which queries and keys are rescaled, where it is smaller than the guard's own."""
    bf16: bool = False
    """Whether the loop is to train in bf16 where it would in fp16."""

    def factors_at(self, step: int) -> dict[str, float]:
        """The factor on each setting of the optimizers in the update of a step, by name.

        >>> adjustments = Adjustments(lr=0.5, rewarm_from=100, rewarm_steps=5)
        >>> [adjustments.factors_at(step) for step in (90, 100, 102, 104, 500)]
        [{'lr': 0.5}, {'lr': 0.1}, {'lr': 0.3}, {'lr': 0.5}, {'lr': 0.5}]
        """
        is_warming = self.rewarm_from <= step < self.rewarm_from + self.rewarm_steps
        warmed = (step - self.rewarm_from + 1) / self.rewarm_steps if is_warming else 1.0
        factors = {"lr": self.lr * warmed, "weight_decay": self.weight_decay}
        return {name: factor for name, factor in factors.items() if factor != 1.0}

    def lowered(self, action: LowerLR, first: int) -> "Adjustments":
        """The adjustments with a lower learning rate that is warmed up again from step ``first`` on."""
        return replace(self, lr=self.lr * action.factor, rewarm_from=first, rewarm_steps=action.rewarm_steps)

    def tightened(self, action: Tighten) -> "Adjustments":
        """The adjustments with the fields that the action sets; the others stay."""
        return replace(
            self,
            clip=action.clip or self.clip,
            clip_value=action.clip_value or self.clip_value,
            weight_decay=self.weight_decay * (action.weight_decay or 1.0),
        )

    def from_scratch(self) -> "Adjustments":
        """The adjustments for a run that starts over, where the schedule has its own warm-up; a rate that was lowered
        so far before stays."""
        return replace(self, lr=min(self.lr, FROM_SCRATCH), rewarm_steps=0)
