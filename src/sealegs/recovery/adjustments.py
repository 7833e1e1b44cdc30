"""What recovery has tightened for the rest of a run: factors and limits around what the user's own loop sets."""

from dataclasses import dataclass, replace

from sealegs.recovery.actions import LowerLR, Tighten

FROM_SCRATCH = 0.5
"""The share of its learning rate that a run goes on with which has to begin anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Margins:
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

        >>> margins = Margins(lr=0.5, rewarm_from=100, rewarm_steps=5)
        >>> [margins.factors_at(step) for step in (90, 100, 102, 104, 500)]
        [{'lr': 0.5}, {'lr': 0.1}, {'lr': 0.3}, {'lr': 0.5}, {'lr': 0.5}]
        """
        is_warming = self.rewarm_from <= step < self.rewarm_from + self.rewarm_steps
        warmed = (step - self.rewarm_from + 1) / self.rewarm_steps if is_warming else 1.0
        factors = {"lr": self.lr * warmed, "weight_decay": self.weight_decay}
        return {name: factor for name, factor in factors.items() if factor != 1.0}

    def lowered(self, action: LowerLR, first: int) -> "Margins":
        """With the learning rate lowered, and warmed up again from a step on."""
        return replace(self, lr=self.lr * action.factor, rewarm_from=first, rewarm_steps=action.rewarm_steps)

    def tightened(self, action: Tighten) -> "Margins":
        """With what the action has; the rest stays as it is."""
        return replace(
            self,
            clip=action.clip or self.clip,
            clip_value=action.clip_value or self.clip_value,
            weight_decay=self.weight_decay * (action.weight_decay or 1.0),
        )

    def from_scratch(self) -> "Margins":
        """For a run that begins anew, with a warm-up of its own."""
        return replace(self, lr=self.lr * FROM_SCRATCH, rewarm_steps=0)
