"""What the loop gives of a step in, what is seen and known of it out: its loss, norms, learning rate and pace."""

import time
from typing import Any

import torch
from torch import Tensor

from sealegs.errors import ConfigError
from sealegs.signals.collect import Signal, waited_for
from sealegs.signals.measure import Meter, StepSignals
from sealegs.signals.norms import Gradients
from sealegs.step.update import Update

NO_STEP = -1
"""The number of what is measured between two steps."""


class Measurement:
    """Reads steps. Nobody waits for a device, but for a batch that is tried again."""

    def __init__(self, meter: Meter, update: Update) -> None:
        self.pace = StepTimer()
        self._meter = meter
        self._update = update

    def known(self, number: int, tokens: int | None) -> dict[str, Signal]:
        """What the host knows of a step without asking anyone."""
        lr = self._update.optimizers[0].param_groups[0]["lr"]
        known: dict[str, Any] = {"lr": lr * self._update.factors["lr"] if "lr" in self._update.factors else lr}
        if self._update.scaler is not None:
            known["loss_scale"] = self._update.scaler.scale(torch.ones((), device=self._meter.device))
        if tokens is not None:
            self.pace.tokens += tokens
            if self._meter.is_sampled(number):
                known["tokens_per_s"] = self.pace.tokens_per_s()
        return known

    def seen(
        self,
        number: int,
        loss: Tensor,
        grad_norm: Tensor | float | None,
        token_losses: Tensor | None,
        known: dict[str, Signal],
        before: Gradients | None = None,
    ) -> StepSignals:
        """What is measured of a step; how long it took is then known, too.

        ``before`` are the gradients as they were before the loop clipped them.
        """
        step_s = self.pace.step_s()
        if step_s is not None and self._meter.ranks.world == 1:  # else the slowest rank's
            known["step_s"] = step_s
        # what underflows is not to be told from gradients that were scaled down since
        scale: Any = known.get("loss_scale") if before is None else None
        seen = self._meter.see(
            number,
            self._number(loss, "loss"),
            None if grad_norm is None else self._number(grad_norm, "grad_norm").double(),
            before,
            step_s=step_s,
            token_losses=token_losses,
            loss_scale=scale,
        )
        if seen.gradients is not None and not seen.gradients.names:
            raise ConfigError("no parameter has a gradient: call loss.backward() before guard.step(loss)")
        return seen

    def probed(
        self, loss: Tensor, grad_norm: Tensor | float | None, before: Gradients | None
    ) -> tuple[float, float | None, list[float]]:
        """Loss and gradient norm of a batch that is tried again, and the norm of each gradient where it is known."""
        # to unscale is to count as a step for the scaler; gradients that are scaled have no norm to compare
        is_scaled = grad_norm is None and before is None and self._update.scaler is not None
        given = 0.0 if is_scaled else grad_norm
        number = self._number(loss, "loss")
        norm = None if given is None else self._number(given, "grad_norm").double()
        seen = self._meter.see(NO_STEP, number, norm, before, token_losses=None, loss_scale=None)
        found = waited_for(torch.stack((seen.loss.double(), seen.grad_norm().double())))
        return found[0], None if is_scaled else found[1], waited_for(seen.norms)

    def _number(self, value: Tensor | float, name: str) -> Tensor:
        """A loss or norm as a tensor of one number."""
        if not isinstance(value, Tensor):
            return torch.full((), float(value), dtype=torch.float64, device=self._meter.device)
        if value.numel() != 1:
            raise ConfigError(f"{name} of shape {tuple(value.shape)}: give one number, that of the whole step")
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value  # clip_grad_norm_ gives a DTensor
        return whole.detach().reshape(())


class StepTimer:
    """How fast steps and tokens go by, pauses apart."""

    def __init__(self) -> None:
        self.tokens = 0
        """Since it was last asked how fast they go."""
        self._tokens_since = time.perf_counter()
        self._last_step_at: float | None = None

    def step_s(self) -> float | None:
        """How long ago the last step was, if there was one; this is one."""
        before, self._last_step_at = self._last_step_at, time.perf_counter()
        return None if before is None else self._last_step_at - before

    def tokens_per_s(self) -> float:
        """How fast they went since this was last asked."""
        now = time.perf_counter()
        speed = self.tokens / (now - self._tokens_since)
        self.tokens, self._tokens_since = 0, now
        return speed

    def paused(self, seconds: float) -> None:
        """So long, which was no training."""
        self._tokens_since += seconds
        if self._last_step_at is not None:
            self._last_step_at += seconds

    def forget_step(self) -> None:
        """What comes next does not come after the last step."""
        self._last_step_at = None
