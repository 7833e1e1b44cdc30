"""Reruns the steps around an onset from a capsule, each time with one thing changed."""

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sealegs.capsule.read import Capsule
from sealegs.errors import SourceError
from sealegs.replay.rerun import Rerun
from sealegs.replay.subject import StepOutcome, Subject
from sealegs.vocabulary import Row

LEAD = 4
"""Steps that are run before the onset."""
LENGTH, LONGEST = 8, 24
"""Steps that are run from the onset on: at least LENGTH, at most LONGEST, since the onset may be dated too early."""
USUAL, LATELY = 64, 16
"""Rows before the onset that show how much the loss varies, and the last of them that show its level."""
PROBES = 2
"""Batches from before the onset that show whether weights are damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The one thing that an arm changes. A field that is left out changes nothing."""

    batches: Callable[[int, tuple[Any, ...]], tuple[Any, ...]] = lambda step, batches: batches
    lr: Callable[[int, float], float] = lambda step, lr: lr
    before: Callable[[Subject], None] = lambda subject: None
    """Called on the subject before the first step."""
    before_update: Callable[[Subject], None] = lambda subject: None
    """Called before every update, with the gradients in place."""
    precision: str | None = None
    applied: Callable[[int], bool] = lambda step: True
    """Whether the update of a step is applied."""
    usual: "LossBefore | None" = None
    """The level that heights are measured against, if it is not the usual loss of the run."""
    first: int | None = None
    """The first step of the rerun, if it is not a few steps before the onset."""
    state_of: int | None = None
    """The step whose state the rerun starts from, if it is not the first step's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a rerun showed."""

    losses: dict[int, float]
    """Loss by step."""
    grad_norms: dict[int, float]
    height: float
    """Height of the highest loss from the onset on above the usual, in its standard deviations."""
    damage: float
    """Rise of the loss of earlier batches in the end, in the same standard deviations."""

    @property
    def size(self) -> float:
        """The larger of height and damage."""
        return max(self.height, self.damage)


@dataclass(frozen=True, slots=True)
class LossBefore:
    """The usual loss before the onset."""

    loss: float
    deviation: float
    grad_norm: float

    def above(self, loss: float) -> float:
        """Height of a loss in standard deviations; infinite for a loss that is not finite."""
        return (loss - self.loss) / self.deviation if math.isfinite(loss) else math.inf


class Experiment(Rerun):
    """Runs the steps around an onset, each time with one thing changed."""

    def __init__(self, capsule: Capsule, subject: Subject) -> None:
        state, there = capsule.state(), capsule.steps()
        super().__init__(capsule, subject, state, there)
        self.onset = capsule.incident.start
        if self.onset not in there:
            raise SourceError(
                f"{capsule.folder}: it cannot be run again from step {there.start} to the onset at {self.onset} "
                f"({capsule.description.without_batches or 'batches or rows in between are missing'})"
            )
        self.oldest = there.start
        self.first = max(there.start, self.onset - LEAD)
        found = min(capsule.description.opened + 1, self.onset + LONGEST)
        self.window = range(self.first, min(there.stop, max(self.onset + LENGTH, found)))
        self.peak = max((step for step in self.window if step >= self.onset), key=self._recorded_loss)
        """The step with the highest loss. It is the one to look at, because the onset is not known to the step."""
        self.repeated = repeated_in(capsule.rows, self.onset)
        """Steps whose batch came before. Their lower losses are not usual."""
        self.fresh = usual_of([row for step, row in self.rows.items() if step not in self.repeated], self.onset)
        """The usual loss on new batches."""
        self.was_stuck = len(self.repeated & set(range(self.onset - LATELY, self.onset))) > LATELY / 2
        """Whether the loss was low because the same batches came again: new ones look high against that."""
        self.usual = usual_of(list(self.rows.values()), self.onset) if self.was_stuck else self.fresh
        self.hold(self.first)
        self.probes = self.before()[-PROBES:] or ([] if self.was_stuck else [self.batches_of(self.first)])
        self.probed = self._probe()

    def _recorded_loss(self, step: int) -> float:
        loss = float(self.rows[step]["loss"])
        return loss if math.isfinite(loss) else math.inf

    def before(self) -> list[tuple[Any, ...]]:
        """The batches of the steps before the rerun, without those that came more than once."""
        again = {self.rows[step]["batch_hash"] for step in self.repeated}
        steps = range(self.oldest, self.first)
        return [self.batches_of(step) for step in steps if self.rows[step].get("batch_hash") not in again]

    def exactly(self) -> float:
        """Run the steps of the window unchanged, twice, and give the difference between the two.

        Updates that the run left out are left out again.
        """
        apart = 0.0
        for _ in range(2):
            self.go_to(self.first)
            before = dict(self.seen)
            for step in self.window:
                self.run_unchanged(step)
                if step in before and math.isfinite(before[step].loss) and math.isfinite(self.seen[step].loss):
                    apart = max(apart, abs(before[step].loss - self.seen[step].loss))
        return apart

    def run(self, change: Change = Change()) -> Outcome:  # noqa: B008
        """Run the steps of the window with a change, every update applied."""
        first = self.first if change.first is None else change.first
        subject = self.loop.subject
        self.hold(first if change.state_of is None else change.state_of)
        change.before(subject)
        seen: dict[int, StepOutcome] = {}
        with nullcontext() if change.precision is None else _precision(subject, change.precision):
            for step in range(first, self.window.stop):
                seen[step] = self.loop.step(
                    change.batches(step, self.batches_of(step)),
                    lr=change.lr(step, float(self.rows[step]["lr"])),
                    applied=change.applied(step),
                    qk_clip=self.qk_clip_at(step),
                    before_update=change.before_update,
                )
                self.steps_run += 1
            risen = self._probe() - self.probed
        usual = change.usual or self.usual
        return Outcome(
            losses={step: each.loss for step, each in seen.items()},
            grad_norms={step: each.grad_norm for step, each in seen.items()},
            height=max(usual.above(each.loss) for step, each in seen.items() if step >= self.onset),
            damage=self.usual.above(self.usual.loss + risen),
        )

    def look(self, step: int) -> float:
        """The loss of a step's batches, with the present weights."""
        self.steps_run += 1
        return self.loop.look(self.batches_of(step)).loss

    def _probe(self) -> float:
        """The mean loss of earlier batches; 0 where all of them were repetitions, since those show nothing."""
        self.steps_run += len(self.probes)
        return statistics.fmean(self.loop.look(batches).loss for batches in self.probes) if self.probes else 0.0


def repeated_in(rows: Sequence[Row], onset: int) -> set[int]:
    """Steps whose batch came at a step before, by its hash; none where few are new, as in a second epoch."""
    seen: set[str] = set()
    again: set[int] = set()
    for row in rows:
        if digest := str(row.get("batch_hash", "")):
            again |= {int(row["step"])} if digest in seen else set()
            seen.add(digest)
    new = sum(int(row["step"]) < onset and int(row["step"]) not in again for row in rows)
    return again if new >= LATELY else set()


def usual_of(rows: Sequence[Row], onset: int) -> LossBefore:
    """Loss, noise and gradient norm of the rows before an onset."""
    before = [row for row in rows if int(row["step"]) < onset][-USUAL:]
    losses = [float(row["loss"]) for row in before if math.isfinite(float(row["loss"]))]
    norms = [norm for row in before if math.isfinite(norm := float(row.get("grad_norm", math.nan)))]
    if len(losses) < 4:
        raise SourceError(f"{len(losses)} rows before the onset at step {onset}: too few to say what is usual")
    # differences from row to row: a slope or a shift of the level is not noise
    leaps = [abs(after - before) for before, after in pairwise(losses)]
    noise = 1.4826 * statistics.median(leaps) / math.sqrt(2)
    level = statistics.median(losses[-LATELY:])
    return LossBefore(level, max(noise, 1e-3 * abs(level), 1e-9), statistics.median(norms) if norms else math.nan)


def _precision(subject: Subject, name: str) -> Any:
    assert subject.precision is not None
    return subject.precision(name)
