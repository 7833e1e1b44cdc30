"""What a guard is asked for in, the parts that do it out, or a refusal: before there is a folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sealegs.data.position import Batches
from sealegs.detectors.spike import Spike
from sealegs.errors import ConfigError
from sealegs.record.schema import CHECKPOINTS, MANIFEST
from sealegs.recovery.playbook import Playbook
from sealegs.recovery.recovery import Recovery
from sealegs.signals.collective import Collective
from sealegs.state.checkpoints import Checkpoints
from sealegs.state.snapshots import Snapshots
from sealegs.state.training_state import TrainingState
from sealegs.watch import Watch


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardOptions:
    """How a guard guards; ``Guard`` says what each means."""

    clip: float | None
    sample_every: int
    checkpoint_every: int
    keep_checkpoints: int
    snapshot_every: int
    snapshot_memory: float | None
    capsule_bytes: float
    skip: Sequence[tuple[int, int]]
    playbook: Playbook | None
    act: bool

    def __post_init__(self) -> None:
        is_norm = self.clip is None or self.clip > 0
        for name, is_sound, cure in (
            ("clip", is_norm, "the largest gradient norm, above 0; leave it out to clip none"),
            ("sample_every", self.sample_every >= 0, "a number of steps, or 0 for never"),
            ("checkpoint_every", self.checkpoint_every >= 0, "a number of steps, or 0 for never"),
            ("keep_checkpoints", self.keep_checkpoints >= 1, "how many of the newest, at least 1"),
            ("snapshot_every", self.snapshot_every >= 1, "a number of steps, at least 1"),
            ("snapshot_memory", (self.snapshot_memory or 0) >= 0, "bytes for both snapshots together"),
            ("capsule_bytes", self.capsule_bytes >= 0, "bytes on disk for all incidents, or 0 for none"),
            ("skip", all(map(_is_range, self.skip)), "pairs of batch numbers, the first and one after the last"),
            ("playbook", isinstance(self.playbook, Playbook | None), "Playbook.standard(), or None"),
        ):
            if not is_sound:
                raise ConfigError(f"{name}={getattr(self, name)!r}: {cure}")

    @property
    def has_rungs(self) -> bool:
        """Whether anything is to be done about trouble besides skipping."""
        return self.playbook is not None and bool(self.playbook.rungs)

    @property
    def stores(self) -> bool:
        """Whether states are kept, in memory or on disk."""
        return bool(self.checkpoint_every) or self.playbook is not None

    def batches(self) -> Batches:
        """The data, as recovery needs them."""
        requeues = self.playbook is not None and self.playbook.requeues
        return Batches(skipped=self.skip, must_reposition=self.has_rungs, deferred=requeues)

    def snapshots(self, training: TrainingState) -> Snapshots:
        """Those in memory: where they are of no use to a playbook, only if memory is given for them."""
        is_used = self.has_rungs and self.act
        memory = self.snapshot_memory if is_used else self.snapshot_memory or 0
        # where no checkpoint of step 0 is written, the first must be enough to run an early incident again
        return Snapshots(
            training.model,
            training.optimizers,
            also=training.also,
            every=self.snapshot_every,
            soon=not self.has_rungs,
            memory=memory,
        )

    def checkpoints(self, folder: Path | None) -> Checkpoints | None:
        """Those on disk."""
        if folder is None or not self.stores:
            return None
        return Checkpoints(folder / CHECKPOINTS, keep=self.keep_checkpoints, keep_first=self.has_rungs)

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
            raise ConfigError(f"playbook={self.playbook.name}: it goes by the calibrated rules; leave rules= out")
        return Recovery(
            playbook=self.playbook,
            training=training,
            watch=watch,
            batches=batches,
            snapshots=snapshots,
            checkpoints=checkpoints,
            folder=watch.folder if watch.record is not None else None,
            act=self.act,
            capsule_bytes=self.capsule_bytes,
        )


def has_begun(run: Any) -> bool:
    """Whether there is a run to go on with, as rank 0 sees it: which may be making one when another rank looks."""
    if not isinstance(run, str | Path):
        raise ConfigError(f"resume='auto' with run={run!r}: give the folder, which is looked at")
    return Collective().first(lambda: (Path(run) / MANIFEST).exists())


def _is_range(given: Any) -> bool:
    is_pair = isinstance(given, Sequence) and len(given) == 2 and all(isinstance(number, int) for number in given)
    return is_pair and 0 <= given[0] < given[1]
