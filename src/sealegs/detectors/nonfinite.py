"""Detects losses, gradients and weights that are NaN or infinite, and how often they are."""

import math
from dataclasses import dataclass
from typing import TypeAlias

from sealegs.errors import ConfigError
from sealegs.vocabulary import Finding, Row, Severity

State: TypeAlias = tuple[int, ...]
"""How many rows ago each non-finite one was, as far back as is counted; rows, since a log may have every tenth step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """A NaN or infinite loss or gradient spoils its step; if it is often, the training state is spoilt."""

    in_a_row: int = 3
    """This many in a row are an alarm."""
    window: int = 500
    share: float = 0.01
    """More than this share of the last ``window`` steps is an alarm too."""
    name: str = "nonfinite"

    def __post_init__(self) -> None:
        if self.in_a_row < 1 or self.window < 1 or not 0 < self.share <= 1:
            raise ConfigError(
                f"NonFinite(in_a_row={self.in_a_row}, window={self.window}, share={self.share}): "
                "whole numbers from 1, and a share above 0 and up to 1"
            )

    def init(self) -> State:
        """The state before the first row."""
        return ()

    def look(self, state: State, now: Row) -> Finding | None:
        """Judge a row. A parameter that is not finite halts the run: every later step would start from it."""
        signal = broken(now)
        if signal is None or overflows(now):
            return None
        step = int(now["step"])
        value = float(now[signal])
        if signal == "params_finite":
            return self._finding(step, Severity.HALT, signal, value, "a parameter is not finite")
        in_a_row, in_all = 1 + _right_before(state), 1 + len(state)
        why = ""
        if in_all > self.share * self.window:
            why = f", {in_all} times in {self.window} steps"
        elif in_a_row >= self.in_a_row:
            why = f", {in_a_row} in a row"
        severity = Severity.ALARM if why else Severity.GATE
        return self._finding(step, severity, signal, value, f"{signal} is not finite{why}")

    def learn(self, state: State, now: Row) -> State:
        """Count the row if it is not finite."""
        recent = tuple(ago + 1 for ago in state if ago + 1 < self.window) if state else ()
        return (*recent, 1) if broken(now) and not overflows(now) else recent

    def _finding(self, step: int, severity: Severity, signal: str, value: float, note: str) -> Finding:
        return Finding(
            detector=self.name,
            step=step,
            severity=severity,
            signal=signal,
            value=value,
            limit=math.inf,
            note=note,
        )


def _right_before(state: State) -> int:
    """How many rows right before this one were not finite.

    >>> _right_before((9, 2, 1)), _right_before((9, 2))
    (2, 0)
    """
    count = 0
    while count < len(state) and state[-1 - count] == count + 1:
        count += 1
    return count


def broken(now: Row) -> str | None:
    """The gravest signal of a row that is not finite, or whose flag says that something is not."""
    if "params_finite" in now and float(now["params_finite"]) != 1.0:  # NaN too
        return "params_finite"
    for signal in ("loss", "grad_norm"):
        if signal in now and not math.isfinite(float(now[signal])):
            return signal
    if "grads_finite" in now and float(now["grads_finite"]) != 1.0:
        return "grads_finite"
    return None


def overflows(now: Row) -> bool:
    """Whether only the gradients are not finite, under a loss scale that can be halved: a scaler in search of its
    scale.

    From 2**24 that takes six steps in a row or more, and is healthy; the overflow detector judges it.
    """
    scale = float(now.get("loss_scale", 0.0))
    loss = float(now.get("loss", 0.0))
    return broken(now) in ("grads_finite", "grad_norm") and 1 <= scale < math.inf and math.isfinite(loss)
