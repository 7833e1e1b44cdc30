"""Loss and gradient norm in, flags out: the rules that training tools ship today, at their defaults.

Written from the public descriptions and sources of each; nothing is copied. Each rule does with NaN what its original
does: a NaN in a window really poisons it. ``threshold`` is the number that a user would turn, and larger is always
stricter, so that the rules can be compared at equal false-alarm rate.

Left out: SPAM (g^2 > 5000 v for each single element: a norm does not have them), ``optax.skip_large_updates`` (an
absolute norm that the user must know).
"""

import math
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from copy import copy
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Protocol, Self

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Column = NDArray[np.float64]
Flags = NDArray[np.bool_]
Signals = Literal["loss", "grad_norm", "both"]


@dataclass(frozen=True, kw_only=True)
class Rule(ABC):
    """One rule at one threshold."""

    name: str
    threshold: float
    bracket: tuple[float, float] = (0.0, 1000.0)
    """Where a threshold for a given false-alarm rate is looked for."""
    memory: int | None = None
    """How many healthy steps before an event it takes to know what the rule would say; None: all of them."""
    signals: Signals = "loss"

    @abstractmethod
    def flags(self, loss: Column, grad_norm: Column | None) -> Flags:
        """Which steps the rule would act on."""

    def columns(self, loss: Column, grad_norm: Column | None) -> list[Column]:
        """The signals that this rule looks at, as far as the run has them."""
        wanted = [loss] if self.signals != "grad_norm" else []
        return wanted + ([grad_norm] if self.signals != "loss" and grad_norm is not None else [])


@dataclass(frozen=True, kw_only=True)
class Scored(Rule):
    """A rule whose memory does not depend on its own flags: a score a step, and a threshold."""

    nan_flags: ClassVar[bool] = False
    """What the comparison with NaN comes to: ``not x <= limit`` acts, ``x > limit`` does not."""

    @abstractmethod
    def score(self, values: Column) -> Column:
        """How far out each value of one signal is; NaN where the statistics are, -inf before they begin."""

    def scores(self, loss: Column, grad_norm: Column | None) -> Column:
        """The graver of the signals."""
        worst = np.full(len(loss), -np.inf)
        with np.errstate(all="ignore"):
            for values in self.columns(loss, grad_norm):
                worst = np.maximum(
                    worst, np.nan_to_num(self.score(values), nan=math.inf if self.nan_flags else -math.inf)
                )
        return worst

    def flags(self, loss: Column, grad_norm: Column | None) -> Flags:
        """Where the score is over the threshold."""
        flags: Flags = self.scores(loss, grad_norm) > self.threshold
        return flags


def rolling(values: Column, window: int) -> tuple[Column, Column, NDArray[np.int64]]:
    """Mean, sample deviation and number of up to ``window`` values before each; NaN where one is not finite.

    By running sums around the middle of the column: the same to ten digits as each window on its own.
    """
    finite = np.isfinite(values)
    middle = float(np.median(values[finite])) if finite.any() else 0.0
    filled = np.where(finite, values - middle, 0.0)
    ends = np.arange(len(values))
    starts = np.maximum(ends - window, 0)
    count = ends - starts

    def summed(column: Column) -> Column:
        total = np.concatenate([[0.0], np.cumsum(column)])
        difference: Column = total[ends] - total[starts]
        return difference

    with np.errstate(all="ignore"):
        mean = summed(filled) / count
        variance = (summed(filled**2) - count * mean**2) / (count - 1)
    poisoned = summed((~finite).astype(np.float64)) > 0
    mean, deviation = mean + middle, np.sqrt(np.maximum(variance, 0.0))
    mean[poisoned] = deviation[poisoned] = np.nan
    return mean, deviation, count


@dataclass(frozen=True, kw_only=True)
class Deviations(Scored):
    """More than so many standard deviations above the mean of the last values; outliers stay among them."""

    window: int
    least: int
    """Values before the current one from which it judges."""
    two_sided: bool = False

    def score(self, values: Column) -> Column:
        """Standard deviations above the mean; a constant past makes any rise infinite and anything else nothing."""
        mean, deviation, count = rolling(values, self.window)
        away = np.abs(values - mean) if self.two_sided else values - mean
        scores = np.where(deviation == 0, np.where(away > 0, np.inf, -np.inf), away / deviation)
        scores[count < self.least] = -np.inf
        return scores


@dataclass(frozen=True, kw_only=True)
class SkipStep(Deviations):
    """OLMo-core, Levanter, MaxText: the step goes through if ``x - mean <= 6 std``, which no NaN does."""

    nan_flags: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class RunningZ(Scored):
    """llm.c: z over the last 128 values with the current one among them, from sums that a NaN never leaves."""

    window: int = 128

    def score(self, values: Column) -> Column:
        """At most the root of 127, because the value itself is in the deviation."""
        mean, sample, _ = rolling(np.append(values, 0.0), self.window)
        deviation = sample[1:] * math.sqrt((self.window - 1) / self.window)
        scores = np.where(deviation > 0, (values - mean[1:]) / deviation, 0.0)
        scores[: self.window] = -np.inf
        broken = np.flatnonzero(~np.isfinite(values))
        scores[broken[0] if len(broken) else len(values) :] = np.nan
        return scores


@dataclass(frozen=True, kw_only=True)
class Hampel(Scored):
    """So many median absolute deviations above the median of the last 128, of the logarithm."""

    window: int = 128

    def score(self, values: Column) -> Column:
        """In MADs times 1.4826, as Hampel's filter counts them: standard deviations, if the noise is normal."""
        logs = np.log(values)
        scores = np.full(len(values), -np.inf)
        if len(values) <= self.window:
            return scores
        windows = sliding_window_view(logs, self.window)[:-1]
        for start in range(0, len(windows), 4096):  # a block a time: each median copies its windows
            block = windows[start : start + 4096]
            middle = np.median(block, axis=1)
            mad = np.median(np.abs(block - middle[:, None]), axis=1)
            now = slice(self.window + start, self.window + start + len(block))
            scores[now] = (logs[now] - middle) / (1.4826 * mad)
        return scores


@dataclass(frozen=True, kw_only=True)
class TimesFirstMax(Scored):
    """Megatron: so many times the largest of the first 100 finite values. What is not finite is another check's."""

    samples: int = 100

    def score(self, values: Column) -> Column:
        """In units of that largest value."""
        finite = np.flatnonzero(np.isfinite(values))
        if len(finite) <= self.samples:
            return np.full(len(values), -np.inf)
        largest = float(values[finite[: self.samples]].max())
        scores = np.where(np.isfinite(values), values / largest, -np.inf)
        scores[: finite[self.samples - 1] + 1] = -np.inf
        return scores


@dataclass(frozen=True, kw_only=True)
class InARow(Scored):
    """llm-foundry: five steps in a row at or above twice the mean of the window (5 % of the run, at least 100)."""

    row: int = 5

    def score(self, values: Column) -> Column:
        """The smallest of the last five ratios."""
        window = max(100, int(0.05 * len(values)))
        mean, _, count = rolling(values, window)
        ratio = np.where(count < window, -np.inf, values / mean)
        padded = np.concatenate([np.full(self.row - 1, -np.inf), ratio])
        smallest: Column = sliding_window_view(padded, self.row).min(axis=1)
        return smallest


@dataclass(frozen=True, kw_only=True)
class OverEwm(Scored):
    """metaseq: the loss over its exponentially weighted mean, the current value in it, as pandas computes it."""

    span: int = 9

    def score(self, values: Column) -> Column:
        """The ratio; NaN keeps the mean and ages it."""
        keep = 1 - 2 / (self.span + 1)
        weighted = weight = 0.0
        ratios = []
        for x in values.tolist():
            weighted, weight = weighted * keep, weight * keep
            if not math.isnan(x):
                weighted, weight = weighted + x, weight + 1
            ratios.append(x * weight / weighted if weighted else math.nan)
        return np.array(ratios)


@dataclass(frozen=True, kw_only=True)
class TwoWindows(Scored):
    """Marin: the smallest of the last 5 minutes against mean and deviation of the 55 before, at 10 seconds a step."""

    last: int = 30
    before: int = 330
    least_rise: float = 0.05

    def score(self, values: Column) -> Column:
        """Deviations of the smallest above the mean, if it is also 0.05 above."""
        scores = np.full(len(values), -np.inf)
        if len(values) < self.last + self.before:
            return scores
        smallest = sliding_window_view(values, self.last).min(axis=1)[self.before :]
        mean, deviation, _ = rolling(values, self.before)
        those = slice(self.before, len(values) - self.last + 1)
        rise = smallest - mean[those]
        scores[self.last + self.before - 1 :] = np.where(rise > self.least_rise, rise / deviation[those], -np.inf)
        return scores


@dataclass(frozen=True, kw_only=True)
class OverLastAccepted(Rule):
    """Lightning: at or above three times the mean of the last ten accepted values; what is not finite is a spike."""

    window: int = 10

    def flags(self, loss: Column, grad_norm: Column | None) -> Flags:
        """A spike never enters the mean."""
        recent: deque[float] = deque(maxlen=self.window)
        last = 0.0
        flags = []
        for x in loss.tolist():
            is_spike = bool(recent) and (
                not math.isfinite(x) or (x > last and x >= self.threshold * (sum(recent) / len(recent)))
            )
            flags.append(is_spike)
            if not is_spike:
                recent.append(x)
                last = x
        return np.array(flags)


@dataclass(frozen=True, kw_only=True)
class OverLastGood(Rule):
    """FlagScale: a fifth above the last value that was not flagged. NaN never is, and is forgotten after a step."""

    def flags(self, loss: Column, grad_norm: Column | None) -> Flags:
        """The last good value stays until one is good again."""
        good = loss[0]
        flags = np.zeros(len(loss), dtype=bool)
        for i, x in enumerate(loss.tolist()):
            if math.isnan(x) or math.isnan(good):
                good = x
            elif math.isinf(x) or math.isinf(good) or (x - good) / good >= self.threshold:
                flags[i] = True
            else:
                good = x
        return flags


@dataclass(frozen=True, kw_only=True)
class ZClip(Rule):
    """ZClip: z of the norm by running mean and variance; what it clips to, not what it saw, enters them."""

    keep: float = 0.97
    warmup: int = 25

    def flags(self, loss: Column, grad_norm: Column | None) -> Flags:
        """Where it clips harder than usual."""
        return np.zeros(len(loss), dtype=bool) if grad_norm is None else self.clipped(grad_norm) < grad_norm

    def clipped(self, grad_norm: Column) -> Column:
        """What it clips each norm to; the norm itself, where it does not. A NaN stays in mean and variance."""
        clipped = grad_norm.copy()
        if len(grad_norm) < self.warmup:
            return clipped
        mean, variance = float(grad_norm[: self.warmup].mean()), float(grad_norm[: self.warmup].var())
        for i, x in enumerate(grad_norm[self.warmup :].tolist(), self.warmup):
            deviation = math.sqrt(variance)
            z = (x - mean) / (deviation + 1e-6)
            if z > self.threshold:
                clipped[i] = x = mean + self.threshold**2 * deviation / z
            mean = self.keep * mean + (1 - self.keep) * x
            variance = self.keep * variance + (1 - self.keep) * (x - mean) ** 2
        return clipped


class Watcher(Protocol):
    """What a rule remembers of one signal."""

    def see(self, x: float) -> bool:
        """Judge the next value, and take it in."""

    def copy(self) -> Self:
        """The same memory again, to go on from here another way."""


@dataclass(frozen=True, kw_only=True)
class Stepwise(Rule):
    """A rule that remembers its whole past: value by value, so that events can go on from any step of a run."""

    @abstractmethod
    def begin(self) -> Watcher:
        """Before the first value of a signal."""

    def flags(self, loss: Column, grad_norm: Column | None) -> Flags:
        """The signals are watched one by one."""
        flags = np.zeros(len(loss), dtype=bool)
        for values in self.columns(loss, grad_norm):
            watcher = self.begin()
            flags |= np.array([watcher.see(x) for x in values.tolist()])
        return flags


@dataclass(frozen=True, kw_only=True)
class HistoryPercentile(Stepwise):
    """AutoClip: clips to the 10th percentile of every norm so far; one NaN makes it NaN, and every later gradient."""

    def begin(self) -> "History":
        """No norm yet."""
        return History(self.threshold)


@dataclass
class History:
    """Every value so far, in order of size."""

    threshold: float
    values: list[float] = field(default_factory=list)
    is_broken: bool = False

    def see(self, x: float) -> bool:
        """Whether its percentile among all so far, itself included, is above the threshold: 100 for a new record."""
        self.is_broken |= math.isnan(x)
        if self.is_broken:
            return True
        rank = bisect_left(self.values, x)
        self.values.insert(rank, x)
        return len(self.values) > 1 and 100 * rank / (len(self.values) - 1) > self.threshold

    def copy(self) -> "History":
        """With a list of its own."""
        return replace(self, values=self.values.copy())


@dataclass(frozen=True, kw_only=True)
class Spot(Stepwise):
    """SPOT, or with ``depth`` DSPOT: peaks over the 98 % quantile, a Pareto tail by likelihood, alarms left out.

    ``threshold`` is -log10 of the risk q. Calibrated on the first 1000 values after ``depth``.
    """

    depth: int = 0
    """Values whose mean is taken off each value first."""
    calibrate: int = 1000
    level: float = 0.98

    def begin(self) -> "Peaks":
        """Not calibrated yet."""
        return Peaks(self)


class Peaks:
    """What SPOT remembers: the peaks and the tail fitted to them, and of DSPOT the last values."""

    def __init__(self, rule: Spot) -> None:
        self.rule = rule
        self.first: list[float] = []
        self.peaks: list[float] = []
        self.recent: deque[float] = deque()
        self.total = self.high = self.limit = 0.0
        self.seen = self.fitted = 0
        self.tail = (0.0, 0.0)

    def see(self, x: float) -> bool:
        """Neither the tail nor the local mean learns from an alarm."""
        depth = self.rule.depth
        if not self.seen:
            self.first.append(x)
            if len(self.first) == depth + self.rule.calibrate:
                self._calibrate(np.array(self.first))
            return False
        y = x - self.total / depth if depth else x
        if y > self.limit:
            return True
        self.seen += 1
        if y > self.high:
            self.peaks.append(y - self.high)
            if len(self.peaks) > 1.05 * self.fitted:  # a fit for every single peak says the same, and takes minutes
                self._fit()
            self._set_limit()
        if depth:
            self.recent.append(x)
            self.total += x - self.recent.popleft()
            if math.isnan(self.total):  # until the NaN has left
                self.total = sum(self.recent)
        return False

    def copy(self) -> "Peaks":
        """With lists of its own."""
        other = copy(self)
        other.first, other.peaks, other.recent = self.first.copy(), self.peaks.copy(), self.recent.copy()
        return other

    def _calibrate(self, values: Column) -> None:
        depth = self.rule.depth
        start = values[depth:] - (rolling(values, depth)[0][depth:] if depth else 0.0)
        self.high = float(np.nanquantile(start, self.rule.level))
        self.peaks = [x - self.high for x in start.tolist() if x > self.high]
        self.recent = deque(values[len(values) - depth :].tolist())
        self.total, self.seen = sum(self.recent), self.rule.calibrate
        self._fit()
        self._set_limit()

    def _fit(self) -> None:
        self.fitted = len(self.peaks)
        self.tail = pareto(np.array(self.peaks[:: 1 + len(self.peaks) // 1000]))

    def _set_limit(self) -> None:
        shape, spread = self.tail
        odds = 10**-self.rule.threshold * self.seen / len(self.peaks)
        self.limit = self.high + (-spread * math.log(odds) if shape == 0 else spread / shape * (odds**-shape - 1))


def pareto(excess: Column) -> tuple[float, float]:
    """Shape and spread of the generalised Pareto tail of the greatest likelihood, on a grid of their ratio."""
    mean = float(excess.mean())
    ratios = np.concatenate([-np.linspace(0.02, 0.98, 25) / excess.max(), np.geomspace(0.01, 10, 30) / mean])
    shapes = np.log1p(ratios[:, None] * excess).mean(axis=1)
    with np.errstate(invalid="ignore"):
        likelihood = -np.log(shapes / ratios) - shapes - 1
    likelihood[shapes < -0.5] = -np.inf  # below, the likelihood has no maximum
    best = int(np.argmax(likelihood))
    if likelihood[best] <= -math.log(mean) - 1:
        return 0.0, mean
    return float(shapes[best]), float(shapes[best] / ratios[best])


@dataclass(frozen=True, kw_only=True)
class NotFinite(Rule):
    """What is NaN or infinite, and nothing else; after ``patience`` in a row it is let through."""

    patience: float = math.inf

    def flags(self, loss: Column, grad_norm: Column | None) -> Flags:
        """Either signal."""
        broken = ~np.isfinite(loss) if grad_norm is None else ~(np.isfinite(loss) & np.isfinite(grad_norm))
        row = 0
        flags = np.zeros(len(loss), dtype=bool)
        for i in np.flatnonzero(broken):
            row = row + 1 if i and broken[i - 1] else 1
            flags[i] = row <= self.patience
        return flags


@dataclass(frozen=True, kw_only=True)
class Chance(Rule):
    """The control: flags one step in a hundred, whatever it sees."""

    def flags(self, loss: Column, grad_norm: Column | None) -> Flags:
        """Drawn anew for each column, and the same for the same one."""
        flags: Flags = np.random.default_rng(zlib.crc32(loss.tobytes())).random(len(loss)) < self.threshold
        return flags


RULES: tuple[Rule, ...] = (
    Deviations(name="3 sigma / 100", threshold=3, window=100, least=100, memory=200),
    SkipStep(name="OLMo-core 6 sigma / 128", threshold=6, window=128, least=63, memory=256, signals="both"),
    Deviations(name="OLMo 2 score 7 sigma / 1000", threshold=7, window=1000, least=1000, two_sided=True, memory=1100),
    RunningZ(name="llm.c z > 3 / 128", threshold=3, memory=256, signals="both"),
    RunningZ(name="llm.c z > 5 / 128", threshold=5, memory=256, signals="both"),
    TimesFirstMax(name="Megatron 10x", threshold=10),
    InARow(name="llm-foundry 2x, 5 in a row", threshold=2),
    OverLastAccepted(name="Lightning 3x / 10", threshold=3, bracket=(1.0, 100.0), memory=100),
    OverEwm(name="metaseq 1.1", threshold=1.1, memory=200),
    OverEwm(name="metaseq 1.25", threshold=1.25, memory=200),
    OverLastGood(name="FlagScale 0.2", threshold=0.2, bracket=(0.0, 100.0), memory=100),
    TwoWindows(name="Marin 6 sigma, 30 after 330", threshold=6, memory=500),
    Hampel(name="Hampel 6 MAD / 128", threshold=6, memory=200),
    Hampel(name="Hampel 6 MAD / 128, both signals", threshold=6, memory=200, signals="both"),
    Spot(name="SPOT 1e-4", threshold=4, bracket=(1.8, 12.0)),
    Spot(name="SPOT 1e-5", threshold=5, bracket=(1.8, 12.0)),
    Spot(name="DSPOT 1e-4", threshold=4, depth=50, bracket=(1.8, 12.0)),
    Spot(name="DSPOT 1e-5", threshold=5, depth=50, bracket=(1.8, 12.0)),
    Spot(name="DSPOT 1e-4, both signals", threshold=4, depth=50, bracket=(1.8, 12.0), signals="both"),
    ZClip(name="ZClip 2.5", threshold=2.5, memory=1000, signals="grad_norm"),
    HistoryPercentile(name="AutoClip p10", threshold=10, bracket=(0.0, 99.999), signals="grad_norm"),
    NotFinite(name="optax apply_if_finite(5)", threshold=0, patience=5, memory=10, signals="both"),
    NotFinite(name="PyTorch GradScaler", threshold=0, memory=10, signals="both"),
    Chance(name="control: by chance", threshold=0.01, memory=10),
)
