"""Detects what a loss does not show: a policy, a router or a number format that has collapsed.

These signals come as often as they are logged or sampled, every step or every tenth, so what is counted are values, not
steps. Each is compared with its own past, since no level is right for all runs: the entropy of a fine-tuned policy
begins where that of another ends. None of it is a fault of one step, so no update is left out for it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from sealegs.detectors.collapse_rules import (
    APART,
    APART_FLOOR,
    FEWEST_HELD_OUT,
    KL_FLOOR,
    LEAST_VIOLATION,
    LITTLE,
    MANY_DEAD,
    MANY_FOLD,
    MORE_DEAD,
    SOME_DEAD,
    VANISHED,
    VIOLATED,
    has_fallen,
    has_risen,
    is_unpaid,
    noise_about_a_trend,
)
from sealegs.errors import ConfigError
from sealegs.vocabulary import Finding, Row, Severity

Collapsed: TypeAlias = Literal[
    "entropy-collapse",
    "zero-spread",
    "held-out-falls",
    "kl-blow-up",
    "mismatch",
    "reward-collapse",
    "length-collapse",
    "cut-off",
    "router-collapse",
    "dead-experts",
    "saturation",
    "zero-scale",
    "no-gradient",
]
"""What can be found, under the name that its findings have."""

JUDGED = (
    *("reward", "reward_std", "zero_spread_share", "policy_entropy", "kl", "policy_kl", "importance_ratio", "logp_gap"),
    *("completion_length", "cut_share", "expert_violation", "dead_expert_share", "router_entropy"),
    *("saturated_share", "quant_scale", "eval_reward"),
)
"""The signals that are judged."""
_JUDGED = frozenset(JUDGED)

FIRST = 20
"""Values of a signal that say where it began."""
FEW = 5
"""The same of a signal that is sampled every tenth step."""
BLOCK = 10
"""Values whose mean or median is judged: no single one is."""
KEPT = 2 * BLOCK
"""Values that are kept."""
KEPT_LONG = 6 * BLOCK
"""The same of a signal that is compared with five blocks before, rather than with where it began."""
DIVERGENCES = tuple(KL_FLOOR)
APART_STEPS = 4
"""Steps between two values of a signal that is sampled, at the least: of one that comes oftener more are judged."""
FEW_MORE_DEAD = 0.1
"""Growth of the share of dead experts that is told where it has stayed for twice as long."""
AT_ONCE = 0.5
"""The largest share of groups without a spread before all are: where a task is solved, it comes slowly."""
BEYOND = 1e150
"""Stands for any larger value: sums and squares of a block of larger ones would be infinite."""
AGAIN = 200
"""Values in which nothing is named twice; what lasts longer is named again."""
ZEROS = 10
"""Steps in a row whose loss and gradient are exactly zero that are a notice."""
SAMPLED = frozenset(("expert_violation", "dead_expert_share", "router_entropy", "saturated_share", "quant_scale"))
OF_ROUTERS = frozenset(("expert_violation", "dead_expert_share", "router_entropy"))
"""Signals that are uneven for some steps while a router learns."""

ADVICE: Mapping[str, str] = MappingProxyType(
    {
        "entropy-collapse": "policy entropy has collapsed: nothing is explored any more; raise the upper clip or the "
        "temperature, leave out groups without spread, or stop if the reward is what was wanted",
        "zero-spread": "the rewards of nearly every group are all the same: nothing is learned from them; sample the "
        "tasks anew, neither solved nor hopeless, or stop",
        "held-out-falls": "the held-out reward falls while the other one rises: the policy pleases the scorer, and "
        "does the task less well; read some completions of the highest reward, stop by the held-out reward",
        "kl-blow-up": "the policy runs away from the one that it is compared with; lower the learning rate, or raise "
        "the KL coefficient",
        "mismatch": "sampler and trainer disagree about the same weights; same precision and kernels for both (fp16, "
        "an fp32 head), or truncated importance sampling",
        "reward-collapse": "the reward has fallen far below its best; keep the checkpoint of that time, lower the "
        "learning rate, raise the KL coefficient",
        "length-collapse": "completions have become short, and the reward fell with them; look at some",
        "cut-off": "nearly all completions are cut at the largest length, which they were not; look at some: repeated "
        "text, or a limit that is too low",
        "router-collapse": "the router sends nearly all tokens to a few experts; raise the balance loss or its bias "
        "rate, lower the router's learning rate",
        "dead-experts": "experts that had tokens get hardly any; raise the balance loss or its bias rate",
        "saturation": "values are beyond the largest number of their format; a fresh scale, or these layers in bf16",
        "zero-scale": "a scale is zero or not finite, so the tensor is lost; a floor under the scale, or this layer in "
        "bf16",
        "no-gradient": "loss and gradient are exactly zero: nothing is trained; all labels masked, or in reinforcement "
        "learning no group with a spread of rewards",
    }
)
"""What each means, and what to do about it."""

ALARMS = frozenset(
    (
        *("router-collapse", "dead-experts", "saturation", "zero-scale"),
        *("mismatch", "held-out-falls", "entropy-collapse", "zero-spread"),
    )
)
"""What opens an incident: there is something in the state of the run to look at again. Of the last two, only where the
reward does not say that the task is solved."""


class Track(NamedTuple):
    """The past of one signal."""

    signal: str
    seen: int = 0
    first: tuple[float, ...] = ()
    """Its first values; once they are enough, their median alone."""
    recent: tuple[float, ...] = ()
    """The last values."""
    blocks: tuple[float, ...] = ()
    """Means of the last two whole blocks."""
    reached: tuple[float, ...] = ()
    """Of the blocks before these: the highest mean, the lowest until then, and the lowest of all."""
    steps: tuple[int, ...] = ()
    """The steps of the first value and of the last one."""

    def after(self, value: float, step: int) -> "Track":
        """The past with one more value."""
        steps = (*self.steps[:1], step)
        kept = KEPT_LONG if self.signal in DIVERGENCES else KEPT
        seen, recent = self.seen + 1, (*self.recent, value)[-kept:]
        first = (*self.first, value) if seen <= self.few else self.first
        if seen == self.few:
            first = (median(first),)
        if seen % BLOCK:
            return Track(self.signal, seen, first, recent, self.blocks, self.reached, steps)
        blocks, reached = self.blocks, self.reached
        if len(blocks) == 2:
            old = blocks[0]
            best, low, lowest = reached or (old, old, old)
            lowest = min(lowest, old)
            reached = (old, lowest, lowest) if old > best else (best, low, lowest)
        blocks = (*blocks[-1:], math.fsum(recent[-BLOCK:]) / BLOCK)
        return Track(self.signal, seen, first, recent, blocks, reached, steps)

    @property
    def begin(self) -> float | None:
        """The level that it began with, once it has gone on for another block."""
        return self.first[0] if self.seen >= self.few + self.size else None

    @property
    def few(self) -> int:
        """How many of the first values are enough."""
        return FEW if self.signal in SAMPLED else FIRST

    @property
    def least(self) -> float | None:
        """The lowest level that it has had, or that it began with: of what comes down as a run goes on."""
        begin = self.begin
        return None if begin is None else min((begin, *self.reached[2:]))

    @property
    def size(self) -> int:
        """How many of the last values are judged."""
        if self.signal not in SAMPLED:
            return BLOCK
        return KEPT if self.signal in OF_ROUTERS and not self.is_sparse else FEW

    @property
    def is_sparse(self) -> bool:
        """Whether values come every few steps, so that some of them say what many would that come with each step."""
        return len(self.steps) > 1 and self.steps[-1] - self.steps[0] >= APART_STEPS * (self.seen - 1)

    @property
    def now(self) -> float:
        """Their median."""
        return median(self.recent[-self.size :])

    @property
    def lately(self) -> tuple[float, ...]:
        """The last of them, as many as are judged."""
        return self.recent[-self.size :]

    @property
    def mean(self) -> float:
        """The mean of the last block."""
        return math.fsum(self.recent[-BLOCK:]) / len(self.recent[-BLOCK:])

    @property
    def long_mean(self) -> float:
        """The mean of the last two blocks."""
        return math.fsum(self.recent[-KEPT:]) / len(self.recent[-KEPT:])

    @property
    def noise(self) -> float:
        """Standard deviation of a value around its level, by how neighbours differ."""
        apart = [abs(b - a) for a, b in zip(self.recent, self.recent[1:], strict=False)]
        return median(apart) / 0.954 if apart else 0.0


class CollapseState(NamedTuple):
    """The detector's state."""

    tracks: tuple[tuple[Any, ...], ...] = ()
    """A ``Track`` for each signal, as a plain tuple once it has been saved."""
    zeros: int = 0
    """Steps in a row with neither loss nor gradient."""
    told: tuple[tuple[str, int], ...] = ()
    """What was named, and how many values ago."""
    best: tuple[float, ...] = ()
    """The best held-out reward, and the reward in training at that time."""
    half: tuple[float, float] = (0.0, 0.0)
    """Whether half of the entropy is gone, and the reward where it went."""


class Excess(NamedTuple):
    """What was found, and by which value."""

    mode: str
    signal: str
    value: float
    limit: float
    is_grave: bool = True
    """Whether it is an alarm, where that is left to what goes with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collapse:
    """Finds signals that have left where they began, for good: each by the median of several values."""

    halts: frozenset[str] = frozenset()
    """What ends the run where it is found."""
    name: str = "collapse"

    def __post_init__(self) -> None:
        refuse_unknown(self.halts, "Collapse.halts")

    def init(self) -> CollapseState:
        """The state before the first row."""
        return CollapseState()

    def look(self, state: CollapseState, now: Row) -> Finding | None:
        """The first of what is found and was not named lately; the gravest come first."""
        if _JUDGED.isdisjoint(now) and now.get("loss") != 0.0:  # most rows
            return None
        if "announced" in now:
            state = CollapseState()
        named = dict(state.told)
        found = [each for each in self._found(self._with(state, now), now) if named.get(each.mode, AGAIN) >= AGAIN]
        if not found:
            return None
        first = found[0]
        return Finding(
            detector=first.mode,
            step=int(now["step"]),
            severity=self._severity(first),
            signal=first.signal,
            value=first.value,
            limit=first.limit,
            spoils_update=False,
            note=ADVICE[first.mode],
        )

    def learn(self, state: CollapseState, now: Row) -> CollapseState:
        """Remember the values, and what was named."""
        if "announced" in now:  # what it is from now on, it is on purpose
            state = CollapseState()
        if _JUDGED.isdisjoint(now) and now.get("loss") != 0.0:
            return _trained(state)
        after = self._with(state, now)
        named = dict(state.told)
        found = [each.mode for each in self._found(after, now)]
        fresh = next((mode for mode in found if named.get(mode, AGAIN) >= AGAIN), None)
        judged = {mode for mode in named if not WATCHED[mode].isdisjoint(now)}
        told = {mode: age + (mode in judged) for mode, age in named.items() if age < AGAIN}
        if fresh is not None:
            told[fresh] = 1
        return after._replace(told=tuple(sorted(told.items())))

    def _severity(self, found: Excess) -> Severity:
        if found.mode in self.halts:
            return Severity.HALT
        return Severity.ALARM if found.mode in ALARMS and found.is_grave else Severity.WATCH

    def _with(self, state: CollapseState, now: Row) -> CollapseState:
        zeros = state.zeros + 1 if now.get("loss") == 0.0 and now.get("grad_norm") == 0.0 else 0
        tracks = tracks_of(state)
        for signal in JUDGED:
            value = now.get(signal)
            if value is not None and not isinstance(value, str) and math.isfinite(value):
                value = min(max(float(value), -BEYOND), BEYOND)
                tracks[signal] = tracks.get(signal, Track(signal)).after(value, int(now["step"]))
        best, half = _best(state.best, now, tracks), _half(state.half, now, tracks)
        return CollapseState(tuple(tracks.values()), zeros, state.told, best, half)

    def _found(self, state: CollapseState, now: Row) -> list[Excess]:
        """All that is so after this row, the gravest first. Only what has a signal in the row is asked."""
        tracks = tracks_of(state)
        here = {signal: tracks[signal] for signal in JUDGED if signal in now and signal in tracks}
        found = [
            _zero_scale(now),
            _router(here, tracks),
            _grown(here, "saturation", "saturated_share", factor=5.0, least=0.01),
            _held_out(here, tracks, state.best),
            _reward(here),
            *((_entropy(here, tracks, state.half), _kl(here)) if "reward" in tracks else ()),
            _without_spread(here, tracks),
            _gap(here),
            _length(here, tracks),
            _cut(here),
            _dead(here),
            Excess("no-gradient", "grad_norm", 0.0, math.inf) if state.zeros >= ZEROS else None,
        ]
        return [each for each in found if each is not None]


WATCHED: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "entropy-collapse": frozenset(("policy_entropy",)),
        "zero-spread": frozenset(("zero_spread_share", "reward_std")),
        "held-out-falls": frozenset(("eval_reward",)),
        "kl-blow-up": frozenset(("kl", "policy_kl")),
        "mismatch": frozenset(("logp_gap", "importance_ratio")),
        "reward-collapse": frozenset(("reward",)),
        "length-collapse": frozenset(("completion_length",)),
        "cut-off": frozenset(("cut_share",)),
        "router-collapse": frozenset(("expert_violation", "dead_expert_share")),
        "dead-experts": frozenset(("dead_expert_share",)),
        "saturation": frozenset(("saturated_share",)),
        "zero-scale": frozenset(("quant_scale",)),
        "no-gradient": frozenset(("grad_norm",)),
    }
)
"""The signals by which each is judged."""


def tracks_of(state: CollapseState) -> dict[str, Track]:
    """The past of each signal."""
    return {entry[0]: Track(*entry) for entry in state.tracks}


def _trained(state: CollapseState) -> CollapseState:
    """The state after a step that had a loss, and nothing else that is judged."""
    if not state.zeros:
        return state
    return state._replace(zeros=0, told=tuple(each for each in state.told if each[0] != "no-gradient"))


def refuse_unknown(names: object, field: str) -> None:
    """Refuse what is no set of names of what can be found."""
    known = get_args(Collapsed)
    if isinstance(names, str) or not isinstance(names, Sequence | frozenset | set):
        raise ConfigError(f"{field}={names!r}: a list of what the run is to be halted by: {', '.join(known)}")
    for name in names:
        if name not in known:
            raise ConfigError(f"{field}: {name!r} is nothing that can be found; one of {', '.join(known)}")


def _zero_scale(now: Row) -> Excess | None:
    """A scale of zero, at once: whatever is divided by it is lost."""
    scale = now.get("quant_scale")
    if scale is None or isinstance(scale, str) or 0 < scale < math.inf:
        return None
    return Excess("zero-scale", "quant_scale", float(scale), math.inf)


def _best(best: tuple[float, ...], now: Row, tracks: Mapping[str, Track]) -> tuple[float, ...]:
    """The best held-out reward so far, and the reward in training at that time."""
    held_out, reward = tracks.get("eval_reward"), tracks.get("reward")
    if "eval_reward" not in now or held_out is None or reward is None:
        return best
    value = min(held_out.recent[-2:])  # of two in a row: the best of many single ones is high by chance
    return best if held_out.seen < 2 or (best and value <= best[0]) else (value, reward.mean)


def _half(half: tuple[float, float], now: Row, tracks: Mapping[str, Track]) -> tuple[float, float]:
    """The reward where half of the entropy was gone, for as long as it is."""
    entropy, reward = tracks.get("policy_entropy"), tracks.get("reward")
    if "policy_entropy" not in now or entropy is None or reward is None or entropy.begin is None:
        return half
    if entropy.now >= entropy.begin / 2:
        return (0.0, 0.0)
    return half if half[0] else (1.0, reward.mean)


def _router(here: Mapping[str, Track], tracks: Mapping[str, Track]) -> Excess | None:
    """Half of the experts without tokens, and more than there were. Or the largest load three times what it was, and
    twice the mean more: with experts that have died since, or a choice that is no longer one. Experts that specialise
    have neither."""
    dead, entropy = tracks.get("dead_expert_share"), tracks.get("router_entropy")
    if "dead_expert_share" in here and dead is not None and dead.least is not None:
        limit = max(MANY_DEAD, dead.least + MORE_DEAD)
        if min(dead.lately) >= limit:
            return Excess("router-collapse", dead.signal, dead.now, limit)
    load = here.get("expert_violation")
    if load is None or load.least is None:
        return None
    limit = max(VIOLATED * load.least, LEAST_VIOLATION)
    are_dead = dead is not None and dead.least is not None and dead.now >= dead.least + SOME_DEAD
    has_no_choice = entropy is not None and entropy.begin is not None and entropy.now < entropy.begin / 2
    is_so = min(load.lately) > limit and (are_dead or has_no_choice)
    return Excess("router-collapse", load.signal, load.now, limit) if is_so else None


def _dead(here: Mapping[str, Track]) -> Excess | None:
    """A quarter more of the experts without tokens; or a tenth more, for longer: one of eight."""
    share = here.get("dead_expert_share")
    if share is None or share.least is None:
        return None
    limit = share.least + SOME_DEAD
    if min(share.lately) >= limit:
        return Excess("dead-experts", share.signal, share.now, limit)
    limit = share.least + FEW_MORE_DEAD
    is_long = share.seen >= FIRST + KEPT and min(share.recent) >= limit
    return Excess("dead-experts", share.signal, share.now, limit) if is_long else None


def _grown(here: Mapping[str, Track], mode: str, signal: str, *, factor: float, least: float) -> Excess | None:
    """A share that is many times what it began as, and not small."""
    track = here.get(signal)
    if track is None or track.least is None:
        return None
    limit = max(factor * track.least, least)
    return Excess(mode, signal, track.now, limit) if min(track.lately) > limit else None


def _reward(here: Mapping[str, Track]) -> Excess | None:
    """Two blocks in a row that have lost more than half of all that was won, by far more than noise. A reward may have
    any sign, so it is measured by how far it has come; one that has won nothing, by a tenth of its size."""
    reward = here.get("reward")
    if reward is None or not reward.reached:
        return None
    best, low, _ = reward.reached
    limit = best - max((best - low) / 2, 4 * reward.noise, 0.1 * abs(best))
    value = max(reward.blocks)
    return Excess("reward-collapse", reward.signal, value, limit) if value < limit else None


def _held_out(here: Mapping[str, Track], tracks: Mapping[str, Track], best: tuple[float, ...]) -> Excess | None:
    """Two held-out rewards in a row far below their best, while the reward in training rose."""
    held_out, reward = here.get("eval_reward"), tracks.get("reward")
    if held_out is None or reward is None or not best or held_out.seen < FEWEST_HELD_OUT:
        return None
    value, (top, then) = max(held_out.recent[-2:]), best
    is_up = has_risen(then, reward.mean, reward.noise / math.sqrt(BLOCK))
    if not is_up or not has_fallen(top, value, noise_about_a_trend(held_out.recent)):
        return None
    return Excess("held-out-falls", held_out.signal, value, top)


def _entropy(here: Mapping[str, Track], tracks: Mapping[str, Track], half: tuple[float, float]) -> Excess | None:
    """A twentieth of what it began as; more than that where no reward was won for it. A policy that learns for reward
    becomes surer, and keeps some choice. A model that learns a text by heart keeps none, and that is well, so without a
    reward nobody asks."""
    entropy, reward = here.get("policy_entropy"), tracks.get("reward")
    if entropy is None or entropy.begin is None or entropy.begin <= 0 or reward is None:
        return None
    is_in_vain = half[0] > 0 and reward.begin is not None and is_unpaid(reward.begin, half[1], reward.long_mean)
    limit = VANISHED * entropy.begin
    if max(entropy.lately) < limit:
        return Excess("entropy-collapse", entropy.signal, entropy.now, limit, is_in_vain)
    limit = LITTLE * entropy.begin
    if is_in_vain and max(entropy.recent) < limit:
        return Excess("entropy-collapse", entropy.signal, entropy.now, limit)
    return None


def _without_spread(here: Mapping[str, Track], tracks: Mapping[str, Track]) -> Excess | None:
    """Two blocks in which hardly any group taught anything. Where the task is solved it comes slowly, at a reward that
    is at its best."""
    share, reward = here.get("zero_spread_share"), tracks.get("reward")
    is_low = reward is not None and len(reward.reached) > 0 and max(reward.blocks) < reward.reached[0] - reward.noise
    if share is not None and len(share.recent) >= 2 * BLOCK:
        mean = math.fsum(share.recent[-2 * BLOCK :]) / (2 * BLOCK)
        is_grave = is_low or not share.reached or share.reached[0] < AT_ONCE
        return Excess("zero-spread", share.signal, mean, 0.98, is_grave) if mean >= 0.98 else None
    spread = here.get("reward_std")
    if share is None and spread is not None and len(spread.recent) >= 2 * BLOCK:
        is_none = not any(spread.recent[-2 * BLOCK :])
        return Excess("zero-spread", spread.signal, 0.0, math.inf, is_low) if is_none else None
    return None


def _kl(here: Mapping[str, Track]) -> Excess | None:
    """A block far above all of the four that were before the last two. It grows from zero in health, but not by
    leaps."""
    for signal, floor in KL_FLOOR.items():
        track = here.get(signal)
        if track is not None and len(track.recent) == KEPT_LONG:
            limit = MANY_FOLD * max(*track.recent[: -2 * BLOCK], floor)
            if track.now > limit:
                return Excess("kl-blow-up", signal, track.now, limit)
    return None


def _gap(here: Mapping[str, Track]) -> Excess | None:
    """A gap that has grown: some is there from the first step, as kernels differ."""
    gap, ratio = here.get("logp_gap"), here.get("importance_ratio")
    if gap is not None and gap.begin is not None:
        limit = APART * max(abs(gap.begin), APART_FLOOR)
        if min(map(abs, gap.lately)) > limit:
            return Excess("mismatch", gap.signal, gap.now, limit)
    if ratio is not None and ratio.begin is not None and 0.8 <= ratio.begin <= 1.25:
        if max(ratio.lately) < 0.5:
            return Excess("mismatch", ratio.signal, ratio.now, 0.5)
        if min(ratio.lately) > 2.0:
            return Excess("mismatch", ratio.signal, ratio.now, 2.0)
    return None


def _length(here: Mapping[str, Track], tracks: Mapping[str, Track]) -> Excess | None:
    """A tenth of the length, and a reward that is below its best: short answers that are right are none."""
    length, reward = here.get("completion_length"), tracks.get("reward")
    if length is None or length.begin is None or reward is None or not reward.reached:
        return None
    limit = length.begin / 10
    has_lost = max(reward.blocks) < reward.reached[0] - 2 * reward.noise
    is_short = length.begin >= 10 and max(length.lately) < limit
    return Excess("length-collapse", length.signal, length.now, limit) if is_short and has_lost else None


def _cut(here: Mapping[str, Track]) -> Excess | None:
    cut = here.get("cut_share")
    if cut is None or cut.begin is None or cut.begin > 0.5:
        return None
    return Excess("cut-off", cut.signal, cut.now, 0.95) if math.fsum(cut.lately) / BLOCK >= 0.95 else None
