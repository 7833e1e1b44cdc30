"""Measures a step: the loop's loss and gradients in, its signals out, with learning rate and pace."""

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sealegs.errors import ConfigError
from sealegs.signals.collect import Signal, waited_for
from sealegs.signals.meter import Meter, StepSignals
from sealegs.signals.norms import Gradients
from sealegs.signals.time_spent import TimeSpent
from sealegs.step.update import Update
from sealegs.vocabulary import Number

NO_STEP = -1
"""The step number of a measurement between two steps."""


class StepInputs:
    """Measures steps. It waits for a device only in a probe."""

    def __init__(self, meter: Meter, update: Update, spent: TimeSpent) -> None:
        self.pace = StepTimer()
        self._spent = spent
        self._meter = meter
        self._update = update

    def known_to_host(self, number: int, tokens: int | None) -> dict[str, Signal]:
        """What the host knows of a step without waiting for a device."""
        lr = self._update.optimizers[0].param_groups[0]["lr"]
        known: dict[str, Any] = {"lr": lr * self._update.factors["lr"] if "lr" in self._update.factors else lr}
        if self._update.scaler is not None:
            known["loss_scale"] = self._update.scaler.scale(torch.ones((), device=self._meter.device))
        if tokens is not None:
            self.pace.tokens += tokens
            if self._meter.is_sampled(number):
                known["tokens_per_s"] = self.pace.tokens_per_s()
        return known

    def measured(
        self,
        number: int,
        loss: Tensor | None,
        grad_norm: Tensor | float | None,
        token_losses: Tensor | None,
        known: dict[str, Signal],
        before: Gradients | None = None,
        logged: Mapping[str, Number] = MappingProxyType({}),
    ) -> StepSignals:
        """The signals of a step; adds its duration to ``known``.

        ``before`` holds the gradients as they were before the loop clipped them, ``logged`` what a framework has said
        on this rank.
        """
        step_s = self.pace.step_s()
        if step_s is not None and self._meter.ranks.world == 1:  # with several ranks, that of the slowest one
            known["step_s"] = step_s
        # gradients that were scaled down look like underflow
        scale: Any = known.get("loss_scale") if before is None else None
        gradients = before
        if before is None and grad_norm is None:
            with self._spent.of("own" if "clip_norm" in known else "signals"):  # whoever clips needs the norm
                gradients = self._meter.read()
        seen = self._meter.measure_step(
            number,
            self._loss(loss),
            None if grad_norm is None else self._number(grad_norm, "grad_norm").double(),
            gradients,
            step_s=step_s,
            token_losses=token_losses,
            loss_scale=scale,
            logged=logged,
        )
        if seen.gradients is not None and not seen.gradients.names:
            raise ConfigError("no parameter has a gradient: call loss.backward() before guard.step(loss)")
        return seen

    def probed(
        self, loss: Tensor | None, grad_norm: Tensor | float | None, before: Gradients | None
    ) -> tuple[float, float | None, list[float]]:
        """Loss and gradient norm of a probe batch, and the norm of each gradient where it is known."""
        # unscaling would count as a step for the scaler, and scaled gradients have no norm to compare
        is_scaled = grad_norm is None and before is None and self._update.scaler is not None
        given = 0.0 if is_scaled else grad_norm
        number = self._loss(loss)
        norm = None if given is None else self._number(given, "grad_norm").double()
        seen = self._meter.measure_step(NO_STEP, number, norm, before, token_losses=None, loss_scale=None)
        found = waited_for(torch.stack((seen.loss.double(), seen.grad_norm().double())))
        return found[0], None if is_scaled else found[1], waited_for(seen.norms)

    def _loss(self, loss: Tensor | None) -> Tensor | None:
        """The loss as a tensor of one number; on some ranks there may be none."""
        if loss is None and self._meter.ranks.world == 1:
            raise ConfigError("loss=None: only where several ranks train may some have none; give that of the step")
        return None if loss is None else self._number(loss, "loss")

    def _number(self, value: Tensor | float, name: str) -> Tensor:
        """A loss or norm as a tensor of one number."""
        if not isinstance(value, Tensor):
            return torch.full((), float(value), dtype=torch.float64, device=self._meter.device)
        if value.numel() != 1:
            raise ConfigError(f"{name} of shape {tuple(value.shape)}: give one number, that of the whole step")
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value  # clip_grad_norm_ gives a DTensor
        return whole.detach().reshape(())


class StepTimer:
    """Measures how fast steps and tokens go by, without pauses."""

    def __init__(self) -> None:
        self.tokens = 0
        """Tokens since the last call of ``tokens_per_s``."""
        self._tokens_since = time.perf_counter()
        self._last_step_at: float | None = None

    def step_s(self) -> float | None:
        """Seconds since the last step, if there was one; call it once a step."""
        before, self._last_step_at = self._last_step_at, time.perf_counter()
        return None if before is None else self._last_step_at - before

    def tokens_per_s(self) -> float:
        """Tokens per second since the last call."""
        now = time.perf_counter()
        speed = self.tokens / (now - self._tokens_since)
        self.tokens, self._tokens_since = 0, now
        return speed

    def paused(self, seconds: float) -> None:
        """Leave out so many seconds that were no training."""
        self._tokens_since += seconds
        if self._last_step_at is not None:
            self._last_step_at += seconds

    def forget_step(self) -> None:
        """Forget the last step: the next one does not follow it directly."""
        self._last_step_at = None
