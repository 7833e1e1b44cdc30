"""Loss and gradient norm in, what a loop does about them out: the rules of bench/survival.py that are not Sealegs.

A rule is asked before the update how large the gradient may be, or whether to skip; and after it whether to restart
from a checkpoint. Each does what its original does, with the defects that this has. What is a spike is said by
bench/peers.py, whose rules take whole columns: they are given all that the loop has seen and asked about the last.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from bench import peers

CLIP = 1.0
EVERY = 50
"""Steps between checkpoints."""
RESTARTS = 10
"""After so many, a person gives up."""
PALM_BACK, PALM_SKIP, PALM_DELAY = 100, 200, 20
"""Steps to go back before the spike, batches to pass over, steps until a person has seen it and has acted."""

PEERS = {rule.name: rule for rule in peers.RULES}


@dataclass(frozen=True)
class Restart:
    """Go on from a checkpoint."""

    before: int
    """The newest one of this step or an earlier one."""
    skip: int = 0
    """So many batches are passed over from there."""
    without: tuple[int, ...] = ()
    """These batches are never trained on again."""


class Rule:
    """What a loop does; this one clips, and does nothing else."""

    poisons = False
    """Whether a skip multiplies by 0 instead of leaving the update out: 0 * NaN is NaN."""

    def seen(self, loss: float, norm: float) -> None:
        """A step of the common beginning, in which no rule acts."""

    def limit(self, loss: float, norm: float) -> float | None:
        """The largest norm that the gradient of this step may have; None skips the update."""
        return CLIP

    def struck(self, step: int) -> None:
        """A fault struck in this step: what the person knows who looks at it later."""

    def after(self, step: int, batch: int, loss: float) -> Restart | None:
        """Asked after the step, whose update has been applied or skipped."""
        return None


class Nothing(Rule):
    """Neither clips nor looks."""

    def limit(self, loss: float, norm: float) -> float | None:
        """Any."""
        return math.inf


class NanSkip(Rule):
    """What GradScaler does, and loops that ask ``isfinite``: an update whose gradient is not finite is skipped."""

    def limit(self, loss: float, norm: float) -> float | None:
        """Of finite gradients."""
        return CLIP if math.isfinite(norm) else None


@dataclass
class Looking(Rule):
    """Remembers what was seen, for a rule that wants whole columns."""

    rule: peers.Rule
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def seen(self, loss: float, norm: float) -> None:
        """One value more of both."""
        self.losses.append(loss)
        self.norms.append(norm)

    def is_flagged(self) -> bool:
        """Whether the rule flags the last step."""
        return bool(self.rule.flags(np.array(self.losses), np.array(self.norms))[-1])


@dataclass
class OutlierSkip(Looking):
    """OLMo-core's and llm.c's: an update that the rule flags is skipped. What was flagged stays in the statistics."""

    poisons: bool = False

    def limit(self, loss: float, norm: float) -> float | None:
        """Of what is not flagged."""
        self.seen(loss, norm)
        return None if self.is_flagged() else CLIP


class ZClip(Looking):
    """Scales the gradient down to what is usual, and never above the plain limit. NaN goes through, and stays."""

    def limit(self, loss: float, norm: float) -> float | None:
        """As usual."""
        self.seen(loss, norm)
        assert isinstance(self.rule, peers.ZClip)
        usual = float(self.rule.clipped(np.array(self.norms))[-1])
        return min(CLIP, usual) if usual < norm else CLIP


class StopAndRestart(Looking):
    """Lightning's SpikeDetection, and a job that is started again: from the last checkpoint, without the batch at which
    it stopped and the one before. It looks after the update; what is not finite is a spike. A new process has new
    statistics."""

    def after(self, step: int, batch: int, loss: float) -> Restart | None:
        """The two batches are those that the callback writes down."""
        self.seen(loss, math.nan)
        if not self.is_flagged():
            return None
        self.losses, self.norms = [], []
        return Restart(before=step, without=(batch - 1, batch))


@dataclass
class Palm(Rule):
    """A person who sees every fault 20 steps after it struck and knows the step: restart from a checkpoint at least 100
    steps before it, pass over 200 batches. Kinder than life: a quiet fault is seen too, and no healthy run is touched.
    """

    onset: int | None = None

    def struck(self, step: int) -> None:
        """The first since the last restart."""
        self.onset = step if self.onset is None else self.onset

    def after(self, step: int, batch: int, loss: float) -> Restart | None:
        """Once the person is there."""
        if self.onset is None or step < self.onset + PALM_DELAY:
            return None
        restart = Restart(before=self.onset - PALM_BACK, skip=PALM_SKIP)
        self.onset = None
        return restart


RULES: Mapping[str, Callable[[], Rule]] = {
    "nothing": Nothing,
    "clip 1.0": Rule,
    "PyTorch NaN skip": NanSkip,
    "OLMo 6 sigma skip": lambda: OutlierSkip(PEERS["OLMo-core 6 sigma / 128"], poisons=True),
    "llm.c z > 3 skip": lambda: OutlierSkip(PEERS["llm.c z > 3 / 128"]),
    "ZClip 2.5": lambda: ZClip(PEERS["ZClip 2.5"]),
    "Lightning stop and restart": lambda: StopAndRestart(PEERS["Lightning 3x / 10"]),
    "PaLM restart and skip": Palm,
}
"""By the name that the table has."""
PLAIN, SEALEGS = "clip 1.0", "Sealegs"
