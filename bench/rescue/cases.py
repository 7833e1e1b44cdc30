"""What every run of bench/survival.py has in common, what happens to each, and the batches that it then sees."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from bench.rescue.rules import EVERY

from sealegs.faults.batches import Spoiler
from sealegs.faults.data import DataFault
from sealegs.faults.spec import parse
from sealegs.lab.data import Batch, Stream
from sealegs.lab.settings import SIZES, DataSettings, Settings
from sealegs.lab.train import lr_share, resolved

BEFORE_FAULT = 30
"""Steps of a branch before its fault strikes."""
CONTROL_STEPS = 200
"""Steps of a benign control after its change."""
DECAY_STEPS = 100


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What every run of a benchmark has in common."""

    size: str = "nano"
    device: Literal["cpu", "cuda"] = "cpu"
    tokens: str | None = None
    """A file of token ids; without it, the lab's grammar."""
    batch: int = 8
    fork: int = 200
    """Steps of the beginning that all branches of a seed share."""
    after: int = 200
    """Steps after the fault."""
    compile: bool = False
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Muon has the matrices of the blocks, beside an AdamW for the rest."""

    @property
    def at(self) -> int:
        """The step of the fault."""
        return self.fork + BEFORE_FAULT

    @property
    def steps(self) -> int:
        """The last."""
        return self.at + self.after

    @property
    def guard_checkpoints(self) -> int:
        """Steps between those that the guard writes to disk; a large model's take seconds, and snapshots are nearer."""
        return EVERY if self.size in ("nano", "toy") else 5 * EVERY

    def settings(self, seed: int) -> Settings:
        """Of the lab."""
        size = SIZES[self.size]
        sources = {self.tokens: 1.0} if self.tokens else dict(size.data.sources)
        return resolved(
            replace(
                size,
                steps=self.steps,
                seed=seed,
                device=self.device,
                dtype="bf16" if self.device == "cuda" else "fp32",
                threads=1,
                data=DataSettings(sources=sources, batch=self.batch),
                cadence=replace(size.cadence, evaluate_batches=16 if self.size == "nano" else 6),
            )
        )

    def key(self) -> str:
        """Equal for plans whose cells can stand in one table."""
        plain = asdict(self) | {"tokens": self.tokens and Path(self.tokens).name}
        if self.optimizer == Plan.optimizer:  # as those were written that knew of no other
            del plain["optimizer"]
        return json.dumps(plain, sort_keys=True)

    def beginning(self, seed: int) -> str:
        """The name of the folder that a seed's beginning has."""
        return f"{self.size}-{seed}-{hashlib.sha256(self.key().encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Case:
    """What happens to a run: a fault, a healthy change, a batch that is left out, or nothing."""

    name: str
    fault: str = ""
    """As ``parse`` reads it, with ``{at}`` and ``{seed}``."""
    backwards: float = 0.0
    """This share of the rows of some batches reads backwards: another language of the same tokens."""
    batches: int = 10**9
    """Of how many batches."""
    decays: bool = False
    """Whether the learning rate begins to fall to nothing."""
    left_out: int = 0
    """So many healthy batches are passed over."""
    place: float = 0.0
    """Where that is, as a share of the steps after the fault's."""
    is_benign: bool = False
    is_announced: bool = False
    """Whether the guard is told; nobody else can be."""

    def last(self, plan: Plan) -> int:
        """The step at which it ends."""
        return min(plan.steps, plan.at + CONTROL_STEPS) if self.is_benign else plan.steps

    def without(self, plan: Plan) -> range:
        """The numbers of the healthy batches that are passed over."""
        first = plan.at + int(self.place * plan.after)
        return range(first, first + self.left_out)


CLEAN = Case("clean")
FAULTS = (
    Case("LR x30, 10 steps", "lr-spike:factor=30,steps=10@{at}"),
    Case("random shard, 40 batches", "random-shard:batches=40,seed={seed}@{at}"),
    Case("shifted labels, 10 batches", "shifted-labels:batches=10@{at}"),
    Case("NaN gradient, 3 times", "nan-gradient:every=50,times=3,seed={seed}@{at}"),
    Case("bit flip in a weight", "bit-flip:in=weight,seed={seed}@{at}"),
    Case("q, k weights x16", "weight-scale:factor=16,tensor=*.query_key_value,rows=2/3@{at}"),
)
CONTROLS = (
    Case("a hard batch", backwards=1.0, batches=1, is_benign=True),
    Case("domain switch", backwards=0.5, is_benign=True),
    Case("small domain switch", backwards=0.125, is_benign=True),
    Case("domain switch, announced", backwards=0.5, is_benign=True, is_announced=True),
    Case("LR decay begins", decays=True, is_benign=True),
)
PLACEBOS = tuple(Case(f"without batch {place:.0%} on", left_out=1, place=place) for place in (0.0, 0.2, 0.4, 0.6, 0.8))
MOVED = tuple(Case(f"{count} batches on", left_out=count) for count in (10, 20, 50, 100, 200))
CASES = {case.name: case for case in (CLEAN, *FAULTS, *CONTROLS, *PLACEBOS, *MOVED)}


class Feed:
    """The batches of a case by number, and one after the other: a loader that knows where it is."""

    def __init__(self, stream: Stream, case: Case, plan: Plan, seed: int, vocabulary: int) -> None:
        self.fault = parse(case.fault.format(at=plan.at, seed=seed)) if case.fault else None
        self.spoiler = Spoiler([self.fault] if isinstance(self.fault, DataFault) else [], vocabulary=vocabulary)
        self._stream = stream
        self._case = case
        self._plan = plan
        self._next = 0

    def batch(self, number: int) -> Batch:
        """The batch of a number."""
        without = self._case.without(self._plan)
        source = number + len(without) if number >= without.start else number
        batch = replace(self._stream.batch(source), index=number)
        case, first = self._case, self._plan.at
        if case.backwards and first <= number < first + case.batches:
            rows = slice(0, int(case.backwards * len(batch.tokens)))
            text = np.concatenate([batch.tokens, batch.targets[:, -1:]], axis=1)
            text[rows] = text[rows, ::-1]
            batch = replace(batch, tokens=text[:, :-1].copy(), targets=text[:, 1:].copy())
        return self.spoiler.apply(batch, number)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            batch = self.batch(self._next)
            self._next += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """The place."""
        return {"next_batch": self._next}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go there."""
        self._next = state["next_batch"]


def share(settings: Settings, case: Case, at: int, step: int) -> float:
    """The learning rate of a step as a share of the peak."""
    decay = max(0.0, 1 - (step - at) / DECAY_STEPS) if case.decays and step >= at else 1.0
    return lr_share(settings.optimizer, settings.steps, step) * decay
