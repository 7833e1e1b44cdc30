"""Trains the runs of a drill: one that is only watched, one that is guarded, and their clean twin."""

import math
from ast import literal_eval
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import torch

from sealegs.data.loaders import cannot_reposition
from sealegs.drills.catalogue import Drill
from sealegs.drills.controls import altered
from sealegs.errors import ConfigError, RunHalted
from sealegs.faults.practice import disturbed, disturbed_policy
from sealegs.guard import Guard
from sealegs.guard_options import Checkpointing, Telemetry
from sealegs.lab.branches import begin, branch, stop_after
from sealegs.lab.policy_gradient import PolicySettings, train_policy
from sealegs.lab.settings import SIZES, Settings
from sealegs.lab.sources import open_data
from sealegs.lab.train import SNAPSHOT_BYTES, resolved, train
from sealegs.recovery.playbook import Playbook
from sealegs.replay.subject import Subject, load_builder
from sealegs.vocabulary import Event, Row

OTHER_TEXT = {"stdlib": 1.0}
"""A source that has nothing in common with the lab's grammar."""
Changeable = TypeVar("Changeable", Settings, PolicySettings)
LEAD = 30
"""Steps of a branch before a fault: by then it has resumed and gone on."""
PROBES = 8
"""Batches that measure how good the weights of a user's own loop are."""


class Unseen:
    """Stands for a terminal: what a run says of itself would drown the card."""

    name = "terminal"

    def start(self, manifest: Mapping[str, Any]) -> None:
        """Nothing is drawn."""

    def row(self, row: Row) -> None:
        """Nobody looks."""

    def event(self, event: Event) -> None:
        """Nobody looks."""

    def close(self) -> None:
        """There is nothing to close."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabLoop:
    """Branches of one run of the lab; whole runs if a drill changes settings."""

    place: Path
    """The folder of what branches share."""
    size: str
    seed: int
    at: int
    """The step at which faults strike."""
    last: int
    """The step at which runs are compared."""
    device: Literal["auto", "cpu"] = "auto"
    whole: bool = False
    """Every run from its first step, in one piece: faults may strike from there on, and no record has a resume."""
    ranks: ClassVar[int] = 1

    def __str__(self) -> str:
        return f"lab, {self.size}, seed {self.seed}"

    @property
    def fork(self) -> int:
        """The step that all branches begin with."""
        return self.at - LEAD

    def prepare(self) -> None:
        """Train the part before the fork."""
        if self.whole:
            return
        settings = self.settings(None, guarded=True)
        begin(settings, open_data(settings), self.place / "beginning", steps=self.fork, sinks=[Unseen()])

    def ending(self, folder: Path, drill: Drill | None, *, guarded: bool, without: int = 0) -> float:
        """The final loss on clean batches, NaN if the run was halted. A placebo runs ``without`` some batches."""
        settings = self.settings(drill, guarded=guarded)
        data = open_data(settings)
        how: dict[str, Any] = {"disturb": self._disturb(drill, settings), "sinks": [Unseen()]}
        how |= {"skip": [(self.at, self.at + without)]} if without else {}
        try:
            if self.whole or (drill is not None and drill.settings):
                result = train(settings, data, folder, **how)
            elif drill is not None and drill.control == "clean-resume":
                branch(settings, data, self.place / "beginning", folder, should_stop=stop_after(LEAD), **how)
                result = train(settings, data, folder, resume=True, **how)
            else:
                result = branch(settings, data, self.place / "beginning", folder, **how)
        except RunHalted:
            return math.nan
        assert result.eval_loss is not None
        return result.eval_loss

    def settings(self, drill: Drill | None, *, guarded: bool) -> Settings:
        """The settings of a run."""
        base = SIZES[self.size]
        cadence = replace(base.cadence, evaluate_steps=0, checkpoint_steps=0, evaluate_batches=16)
        settings = replace(
            base,
            steps=self.last,
            seed=self.seed,
            device=self.device,
            threads=1,
            playbook="standard",
            cadence=cadence,
        )
        return resolved(replace(changed(settings, drill.settings if drill else ()), shadow=not guarded))

    def _disturb(self, drill: Drill | None, settings: Settings) -> Callable[..., AbstractContextManager[Any]]:
        if drill is not None and drill.control:
            other = replace(settings, data=replace(settings.data, sources=OTHER_TEXT))
            return altered(drill.control, self.at, open_data(other).training)
        return partial(disturbed, drill.struck(self.at) if drill else [], settings.model.vocabulary)


def changed(settings: Changeable, changes: Sequence[str]) -> Changeable:
    """Settings with changes in the form of flags: ``optimizer.clip=0``, ``dtype='fp16'``."""
    for change in changes:
        name, _, text = change.partition("=")
        part, dot, field = name.partition(".")
        value: Any = literal_eval(text)
        settings = replace(settings, **{part: replace(getattr(settings, part), **{field: value}) if dot else value})
    return settings


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLoop:
    """A user's own model, optimizer, loss and batches, in a plain guarded loop. Every run starts at step 0."""

    place: str
    """``train.py:build``"""
    seed: int
    at: int
    last: int
    ranks: ClassVar[int] = 1

    def __str__(self) -> str:
        return f"{self.place}, seed {self.seed}"

    def prepare(self) -> None:
        """Runs of a user's own loop share nothing."""
        self._made()

    def _made(self) -> Subject:
        torch.manual_seed(self.seed)
        subject = load_builder(self.place)()
        if subject.batches is None:
            raise ConfigError(f"--build {self.place}: the Subject has no batches to train on; give it batches=loader")
        if refusal := cannot_reposition(subject.batches):
            raise ConfigError(f"--build {self.place}: {refusal}")
        return subject

    def ending(self, folder: Path, drill: Drill | None, *, guarded: bool, without: int = 0) -> float:
        """The final loss on clean batches, NaN if the run was halted. A placebo runs ``without`` some batches."""
        subject = self._made()
        assert subject.batches is not None
        playbook = Playbook.standard() if guarded else Playbook.observe()
        faults = drill.struck(self.at) if drill else []
        try:
            with Guard(
                subject.model,
                subject.optimizers,
                run=folder,
                scheduler=subject.schedulers,
                scaler=subject.scaler,
                clip=subject.clip,
                playbook=playbook,
                act=guarded,
                checkpoint_every=Checkpointing(every=self.at // 2 if guarded else 0, snapshot_memory=SNAPSHOT_BYTES),
                telemetry=Telemetry(sinks=[Unseen()]),
            ) as guard:
                with disturbed(
                    faults,
                    None,
                    subject.model,
                    subject.optimizers,
                    subject.batches,
                    lambda: guard.number,
                    lambda text: guard.watch.note("fault", text=text),
                ) as batches:
                    while guard.number < self.last:
                        for batch in guard.batches(batches, skip=[(self.at, self.at + without)] if without else []):
                            guard.step(subject.gradients([batch]))
                            if guard.number >= self.last:
                                break
                guard.loop.finish()
                guard.watch.note("end", reason="finished")  # broken on purpose: the score says how well it ended
        except RunHalted:
            return math.nan
        return self._loss(subject)

    @torch.no_grad()
    def _loss(self, subject: Subject) -> float:
        """The loss on the first batches, which are the same in all runs."""
        batches = self._made().batches
        assert batches is not None
        probes = list(islice(iter(batches), PROBES))
        subject.model.eval()
        return sum(float(subject.loss(batch)) for batch in probes) / len(probes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoop:
    """The lab's policy-gradient loop. Every run starts at step 0; twins differ in their samples."""

    seed: int
    at: int
    last: int
    ranks: ClassVar[int] = 1

    def __str__(self) -> str:
        return f"the lab's policy-gradient loop, seed {self.seed}"

    def prepare(self) -> None:
        """Its runs share nothing."""

    def ending(self, folder: Path, drill: Drill | None, *, guarded: bool, without: int = 0) -> float:
        """The share of held-out answers that is wrong at the end; NaN if the run was halted."""
        settings = PolicySettings(steps=self.last, seed=self.seed, samples_seed=without)
        settings = changed(settings, drill.settings if drill else ())
        disturb = partial(disturbed_policy, drill.struck(self.at) if drill else [])
        try:
            return 1 - train_policy(settings, folder, disturb=disturb, act=guarded, sinks=[Unseen()])
        except RunHalted:
            return math.nan


Loop: TypeAlias = LabLoop | OwnLoop | PolicyLoop
"""Something that can be trained again and again in the same way."""
