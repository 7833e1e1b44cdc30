"""Detects a loss scaler of an fp16 run that does not do what it should; silent in rows without a loss scale."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from sealegs.detectors.nonfinite import overflows
from sealegs.errors import ConfigError
from sealegs.vocabulary import Finding, Row, Severity


class OverflowState(NamedTuple):
    """The detector's state: the history of a scaler."""

    overflowed: tuple[int, ...] = ()
    """The steps whose gradients overflowed, as far back as is counted."""
    scale: float = 0.0
    """The last scale; 0 before there was one."""
    steady_since: int = 0
    """The step since which the scale is unchanged and nothing has overflowed."""
    is_steady_told: bool = False
    owed_below: float = 0.0
    """After an overflow, the scale that the scaler must go below; 0 once it has."""
    owed_rows: int = 0
    """Rows since that overflow."""
    thin_samples: int = 0
    """Samples in a row, up to the last, with too large a share of underflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overflow:
    """An overflow that halves the scale is healthy; a scale that collapses, stands still or is not halved is not."""

    window: int = 500
    share: float = 0.05
    """Overflows in more than this share of the last ``window`` steps are an alarm."""
    patience: int = 2
    """Rows after an overflow by which the scale must be lower. A scaler with hysteresis needs more."""
    growth_interval: int = 2000
    """Clean steps after which the scaler doubles; half as many again without a doubling give a notice."""
    underflow: float = 0.5
    """Share of the gradients that may be zero or subnormal."""
    underflow_samples: int = 3
    """Samples in a row above that share that give a notice."""
    name: str = "overflow"

    def __post_init__(self) -> None:
        if min(self.window, self.patience, self.growth_interval, self.underflow_samples) < 1:
            raise ConfigError(
                f"Overflow(window={self.window}, patience={self.patience}, growth_interval={self.growth_interval}, "
                f"underflow_samples={self.underflow_samples}): whole numbers from 1"
            )
        if not (0 < self.share < 1 and 0 < self.underflow <= 1):
            raise ConfigError(f"Overflow(share={self.share}, underflow={self.underflow}): shares, above 0 and up to 1")

    def init(self) -> OverflowState:
        """The state before the first row."""
        return OverflowState()

    def look(self, state: OverflowState, now: Row) -> Finding | None:
        """Judge the scale of this step, and the gradients under it."""
        if "loss_scale" not in now:
            return None
        step, scale = int(now["step"]), float(now["loss_scale"])
        spoilt = overflows(now)
        after = self.learn(state, now)
        if not 1 <= scale < math.inf:  # NaN too
            is_news = after.scale != state.scale or not 0 < scale < math.inf
            limit = 1.0 if scale < 1 else math.inf
            return self._alarm(now, "loss_scale", scale, limit, "loss scale collapsed") if is_news else None
        if after.owed_rows >= self.patience and (spoilt or after.owed_rows == self.patience):
            note = f"loss scale {spelt(scale)} not lowered after an overflow"
            return self._alarm(now, "loss_scale", scale, state.owed_below, note, spoils_update=spoilt)
        if spoilt and len(after.overflowed) > self.share * self.window:
            note = (
                f"gradients overflow at loss scale {spelt(scale)}, {len(after.overflowed)} times in {self.window} steps"
            )
            return self._alarm(now, "grad_norm", math.inf, math.inf, note, spoils_update=True)
        if spoilt:
            note = f"gradients overflow at loss scale {spelt(scale)}"
            return self._finding(now, Severity.GATE, "grad_norm", math.inf, math.inf, note, spoils_update=True)
        if after.is_steady_told and not state.is_steady_told:
            steps = step - after.steady_since
            note = f"loss scale constant at {spelt(scale)} for {steps} clean steps"
            return self._finding(now, Severity.WATCH, "loss_scale", steps, 1.5 * self.growth_interval, note)
        if after.thin_samples == self.underflow_samples > state.thin_samples:
            value = float(now["underflow_share"])
            return self._finding(now, Severity.WATCH, "underflow_share", value, self.underflow, "gradients underflow")
        return None

    def learn(self, state: OverflowState, now: Row) -> OverflowState:
        """Follow the scale, its overflows and its underflows."""
        if "loss_scale" not in now:
            return state
        step, scale = int(now["step"]), float(now["loss_scale"])
        if not math.isfinite(scale):
            return state
        spoilt = overflows(now)
        is_same = scale == state.scale and not spoilt and step >= state.steady_since
        since = state.steady_since if is_same else step
        is_owed = 0 < state.owed_below <= scale
        is_lowered_at_once = scale < state.scale and not state.owed_below  # some logs have the scale after the step
        recent = tuple(earlier for earlier in state.overflowed if step - self.window < earlier < step)
        return OverflowState(
            overflowed=(*recent, step) if spoilt else recent,
            scale=scale,
            steady_since=since,
            is_steady_told=step - since > 1.5 * self.growth_interval,
            owed_below=state.owed_below if is_owed else scale if spoilt and not is_lowered_at_once else 0.0,
            owed_rows=state.owed_rows + 1 if is_owed else 0,
            thin_samples=self._thin(state, now),
        )

    def _thin(self, state: OverflowState, now: Row) -> int:
        if "underflow_share" not in now:
            return state.thin_samples
        is_thin = not float(now["underflow_share"]) <= self.underflow  # NaN too
        return min(state.thin_samples + 1, self.underflow_samples) if is_thin else 0

    def _alarm(
        self, now: Row, signal: str, value: float, limit: float, note: str, *, spoils_update: bool = False
    ) -> Finding:
        return self._finding(now, Severity.ALARM, signal, value, limit, note, spoils_update=spoils_update)

    def _finding(
        self,
        now: Row,
        severity: Severity,
        signal: str,
        value: float,
        limit: float,
        note: str,
        *,
        spoils_update: bool = False,
    ) -> Finding:
        return Finding(
            detector=self.name,
            step=int(now["step"]),
            severity=severity,
            signal=signal,
            value=value,
            limit=limit,
            spoils_update=spoils_update,
            note=note,
        )


def spelt(scale: float) -> str:
    """A loss scale as people write it.

    >>> spelt(65536.0), spelt(2.0**24), spelt(0.25)
    ('65536', '16777216', '0.25')
    """
    return f"{scale:.0f}" if scale >= 1 else f"{scale:g}"
