"""Checkpoints and judged steps in, tags out: which checkpoints are proven to be good to go back to."""

import torch
from torch import nn

from sealegs.signals.collective import Together
from sealegs.state.checkpoints import Checkpoints

HEALTHY_AFTER = 16
"""Healthy steps after which a checkpoint is one to go back to."""


class Proofs:
    """Checkpoints that are not known to be healthy, and how many healthy steps have come of each."""

    def __init__(self, checkpoints: Checkpoints | None, model: nn.Module, ranks: Together) -> None:
        self._checkpoints = checkpoints
        self._model = model
        self._ranks = ranks
        self._steps: dict[int, int] = {}

    def saved(self, step: int, *, led_by: int) -> None:
        """A checkpoint is being written: one to go back to when healthy steps have come of it.

        That of step 0 is at once; so is one that enough healthy steps have led to, as they may have to the last of a
        run, if the weights in it are finite.
        """
        is_led = led_by >= HEALTHY_AFTER
        is_proven = step == 0 or (is_led and all(self._ranks.gather(is_finite(self._model))))
        self._steps[step] = HEALTHY_AFTER if is_proven else 0
        self._prove(step, 0)

    def healthy(self, step: int) -> None:
        """A step was: one more for all checkpoints up to it."""
        self._prove(step, 1)

    def doubtful(self) -> None:
        """A step was not, or an incident is open: it is counted anew."""
        self._steps = dict.fromkeys(self._steps, 0)

    def forget_after(self, step: int) -> None:
        """The run went back to a step: later ones will not be proven."""
        self._steps = {saved: count for saved, count in self._steps.items() if saved <= step}

    def _prove(self, step: int, healthy: int) -> None:
        for saved in [saved for saved in self._steps if saved <= step]:
            self._steps[saved] += healthy
            if self._steps[saved] >= HEALTHY_AFTER:
                assert self._checkpoints is not None
                self._checkpoints.tag(saved, "healthy")
                del self._steps[saved]


def is_finite(model: nn.Module) -> bool:
    """Whether all that this rank has of the weights is."""
    own = (getattr(parameter, "to_local", lambda p=parameter: p)() for parameter in model.parameters())
    return all(bool(torch.isfinite(weights).all()) for weights in own)
