"""Saves and restores what a probe changes besides gradients: buffers, random state, and the loop's own state."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from sealegs.state.extra_state import load_states, states_of
from sealegs.state.rng import Rng, restore_rng, rng_now
from sealegs.state.training_state import TrainingState


class ProbeIsolation(NamedTuple):
    """The state of a run before a probe."""

    buffers: Mapping[str, Tensor]
    """Buffers of the model, such as the running statistics of BatchNorm."""
    rng: Rng
    also: Mapping[str, Any]

    @classmethod
    def of(cls, training: TrainingState) -> Self:
        """The state as it is now."""
        buffers = {name: buffer.detach().clone() for name, buffer in training.model.named_buffers()}
        return cls(buffers, rng_now(), states_of(training.also))

    @torch.no_grad()
    def put_back(self, training: TrainingState) -> None:
        """Restore the state; a probe leaves weights and moments alone anyway."""
        for name, buffer in training.model.named_buffers():
            if (before := self.buffers.get(name)) is not None and before.shape == buffer.shape:
                buffer.copy_(before)
        load_states(training.also, self.also)
        restore_rng(self.rng)
