"""What a guard can be asked for: typed values that refuse what cannot work, before there is a folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.amp.grad_scaler import GradScaler

from sealegs.capsule.write import BUDGET
from sealegs.data.position import Batches
from sealegs.detectors.spike import Spike
from sealegs.errors import ConfigError
from sealegs.record.schema import CHECKPOINTS, MANIFEST
from sealegs.recovery.playbook import Playbook
from sealegs.recovery.recovery import Recovery
from sealegs.signals.activations import ActivationSampler
from sealegs.signals.collective import Collective
from sealegs.signals.ranks import Ranks
from sealegs.sinks.notify import Where
from sealegs.state.checkpoints import Checkpoints
from sealegs.state.extra_state import Stateful, refuse_stateless
from sealegs.state.snapshots import Snapshots
from sealegs.state.training_state import TrainingState
from sealegs.vocabulary import Sink
from sealegs.watch import Watch


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """What is kept of a run to go back to, in the place of a number: ``checkpoint_every=Checkpointing(every=500)``."""

    every: int = 0
    """Steps between checkpoints in the run folder; 0 writes none."""
    keep: int = 3
    """How many of the newest checkpoints stay."""
    snapshot_every: int = 50
    """Steps between the copies in memory that a playbook goes back to, of which there are two."""
    snapshot_memory: float | None = None
    """Bytes that both copies may take together; None takes what is free, 0 keeps none."""
    capsule_bytes: float = BUDGET
    """Bytes on disk for the capsules of all incidents, from which ``sealegs replay`` runs them again; 0 writes none."""
    also: Mapping[str, Stateful] = field(default_factory=dict)
    """What the loop keeps of its own, ``{"ema": ema}``: anything with ``state_dict`` and ``load_state_dict``. It goes
    along in snapshots, rollbacks, checkpoints and a resume."""

    def __post_init__(self) -> None:
        refuse_stateless(self.also)
        for name, is_sound, cure in (
            ("every", self.every >= 0, "a number of steps, or 0 for never"),
            ("keep", self.keep >= 1, "how many of the newest, at least 1"),
            ("snapshot_every", self.snapshot_every >= 1, "a number of steps, at least 1"),
            ("snapshot_memory", (self.snapshot_memory or 0) >= 0, "bytes for both snapshots together"),
            ("capsule_bytes", self.capsule_bytes >= 0, "bytes on disk for all incidents, or 0 for none"),
        ):
            if not is_sound:
                raise ConfigError(f"Checkpointing.{name}={getattr(self, name)!r}: {cure}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """What is measured of a run besides every step's loss and norm, and who is told."""

    sample_every: int = 10
    """Steps between measurements of weights, moments, updates and activations; 0 never measures them."""
    activations: ActivationSampler | None = None
    """A sampler of activations with options of its own."""
    sinks: Sequence[Sink] = ()
    """Who gets every row and event besides the folder: ``sealegs.tracker("wandb")``."""
    notify: Where | None = None
    """Where a person is told when the run needs one; see ``Watch``."""
    settings: dict[str, Any] | None = None
    """What the run is, for its manifest."""
    ranks: Ranks | None = None
    """The timeout for ranks that do not come."""

    def __post_init__(self) -> None:
        if self.sample_every < 0:
            raise ConfigError(f"Telemetry.sample_every={self.sample_every}: a number of steps, or 0 for never")


@dataclass(frozen=True, slots=True)
class LoopScheduler:
    """A scheduler that the loop steps itself, after ``guard.step``: the guard only stores it and brings it back."""

    scheduler: Any
    """One, or several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardOptions:
    """Everything that a guard is asked for; ``Guard`` says what each means."""

    scheduler: Any = None
    scaler: GradScaler | None = None
    clip: float | None = None
    act: bool = True
    playbook: Playbook | None = None
    checkpoint_every: int | Checkpointing = 0
    resume: bool = False
    telemetry: Telemetry = Telemetry()

    def __post_init__(self) -> None:
        every = self.checkpoint_every
        for name, is_sound, cure in (
            (
                "clip",
                self.clip is None or self.clip > 0,
                "the largest gradient norm, above 0; leave it out to clip none",
            ),
            ("checkpoint_every", isinstance(every, Checkpointing) or every >= 0, "a number of steps, or 0 for never"),
            ("playbook", isinstance(self.playbook, Playbook | None), "Playbook.standard(), or None"),
        ):
            if not is_sound:
                raise ConfigError(f"{name}={getattr(self, name)!r}: {cure}")

    @property
    def checkpointing(self) -> Checkpointing:
        """Of a plain number, everything else as it comes."""
        every = self.checkpoint_every
        return every if isinstance(every, Checkpointing) else Checkpointing(every=every)

    @property
    def loop_steps_scheduler(self) -> bool:
        """Whether the loop does so itself."""
        return isinstance(self.scheduler, LoopScheduler)

    @property
    def schedulers(self) -> tuple[Any, ...]:
        """Whoever steps them."""
        return several(self.scheduler.scheduler if isinstance(self.scheduler, LoopScheduler) else self.scheduler)

    @property
    def has_rungs(self) -> bool:
        """Whether anything is to be done about an anomaly besides skipping."""
        return self.playbook is not None and bool(self.playbook.rungs)

    @property
    def stores(self) -> bool:
        """Whether states are kept, in memory or on disk."""
        return bool(self.checkpointing.every) or self.playbook is not None

    def batches(self) -> Batches:
        """The data, as recovery needs them."""
        return Batches(must_reposition=self.has_rungs)

    def snapshots(self, training: TrainingState) -> Snapshots:
        """Those in memory: where they are of no use to a playbook, only if memory is given for them."""
        asked = self.checkpointing
        is_used = self.has_rungs and self.act
        memory = asked.snapshot_memory if is_used else asked.snapshot_memory or 0
        # where no checkpoint of step 0 is written, the first must be enough to run an early incident again
        return Snapshots(
            training.model,
            training.optimizers,
            also=training.also,
            every=asked.snapshot_every,
            soon=not self.has_rungs,
            memory=memory,
        )

    def checkpoints(self, folder: Path | None) -> Checkpoints | None:
        """Those on disk."""
        if folder is None or not self.stores:
            return None
        return Checkpoints(folder / CHECKPOINTS, keep=self.checkpointing.keep, keep_first=self.has_rungs)

    def recovery(
        self,
        training: TrainingState,
        watch: Watch,
        batches: Batches,
        snapshots: Snapshots,
        checkpoints: Checkpoints | None,
    ) -> Recovery | None:
        """What goes by the playbook."""
        if self.playbook is None:
            return None
        if self.has_rungs and not watch.states_of(Spike):
            raise ConfigError(
                f"playbook={self.playbook.name}: it goes by the calibrated rules; leave Detection.rules as it is"
            )
        return Recovery(
            playbook=self.playbook,
            training=training,
            watch=watch,
            batches=batches,
            snapshots=snapshots,
            checkpoints=checkpoints,
            folder=watch.folder if watch.record is not None else None,
            act=self.act,
            capsule_bytes=self.checkpointing.capsule_bytes,
        )


def has_begun(run: Any) -> bool:
    """Whether there is a run to go on with, as rank 0 sees it: which may be making one when another rank looks."""
    if not isinstance(run, str | Path):
        raise ConfigError(f"resume='auto' with run={run!r}: give the folder, which is looked at")
    return Collective().first(lambda: (Path(run) / MANIFEST).exists())


def skip_ranges(batches: Batches, ranges: Sequence[tuple[int, int]]) -> None:
    """Batches never to hand out, from the first number to one before the last of each range."""
    if not all(map(_is_range, ranges)):
        raise ConfigError(f"skip={ranges!r}: pairs of batch numbers, the first and one after the last")
    for first, end in ranges:
        batches.skip(first, end - first)


def several(one_or_more: Any) -> tuple[Any, ...]:
    """A tuple of what may be one, several or None."""
    if one_or_more is None:
        return ()
    return tuple(one_or_more) if isinstance(one_or_more, Sequence) else (one_or_more,)


def _is_range(given: Any) -> bool:
    is_pair = isinstance(given, Sequence) and len(given) == 2 and all(isinstance(number, int) for number in given)
    return is_pair and 0 <= given[0] < given[1]
