"""What a guard can be asked for: typed values that refuse what cannot work, before there is a folder."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from sealegs.capsule.write import BUDGET
from sealegs.data.position import Batches
from sealegs.errors import ConfigError
from sealegs.judge import CALIBRATED, Detection
from sealegs.record.schema import CHECKPOINTS, MANIFEST
from sealegs.recovery.actions import LOGIT, ClipQK, Rollback, is_number, is_whole, refuse_unless
from sealegs.recovery.global_batch import Rule
from sealegs.recovery.playbook import Playbook
from sealegs.recovery.recovery import Recovery
from sealegs.signals.activations import ActivationSampler
from sealegs.signals.collective import TIMEOUT_S, Collective
from sealegs.signals.ranks import Ranks
from sealegs.signals.routers import Finder
from sealegs.sinks.notify import Where
from sealegs.state.checkpoints import Checkpoints
from sealegs.state.extra_state import Stateful, refuse_stateless
from sealegs.state.frozen import FrozenWeights
from sealegs.state.snapshots import Snapshots
from sealegs.state.training_state import TrainingState
from sealegs.step.skip_way import Skipping
from sealegs.vocabulary import Sink
from sealegs.watch import PRICE, Watch, is_price

CLIP = "the largest gradient norm, above 0; leave it out to clip none"
EVERY = "a number of steps, or 0 for never"
RECOMPUTE = "True for every 500 steps, a number of steps, or False for never"
RANGES = "pairs of batch numbers, the first and one after the last"


def are_ranges(given: Any) -> bool:
    """Whether it is a list of pairs of whole numbers, each rising."""
    return isinstance(given, Sequence) and not isinstance(given, str) and all(map(_is_range, given))


def _is_range(given: Any) -> bool:
    is_pair = isinstance(given, Sequence) and len(given) == 2 and all(isinstance(number, int) for number in given)
    return is_pair and 0 <= given[0] < given[1]


def _is_size(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _is_sink(given: Any) -> bool:
    return all(hasattr(given, part) for part in ("name", "start", "row", "event", "close"))


def _is_json(settings: Any) -> bool:
    try:
        json.dumps(settings)
    except (TypeError, ValueError):
        return False
    return isinstance(settings, dict | None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipping:
    """What is kept small, in the place of a number: ``clip=Clipping(norm=1.0, attention_logit=100)``."""

    norm: float | None = None
    """The largest global gradient norm; None where the loop clips."""
    attention_logit: float | None = None
    """The largest attention logit of a head. Beyond it, on sampled steps, the head's queries and keys are rescaled."""

    def __post_init__(self) -> None:
        for name, limit, cure in (("norm", self.norm, CLIP), ("attention_logit", self.attention_logit, LOGIT)):
            is_sound = limit is None or (is_number(limit) and limit > 0)
            refuse_unless(is_sound, f"Clipping.{name}", limit, cure)


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
    with_frozen: bool = False
    """Whether snapshots and checkpoints hold frozen weights too, where these outweigh the trained ones. Else they have
    digests of them, and need the same base model again."""
    also: Mapping[str, Stateful] = field(default_factory=dict)
    """What the loop keeps of its own, ``{"ema": ema}``: anything with ``state_dict`` and ``load_state_dict``. It goes
    along in snapshots, rollbacks, checkpoints and a resume."""

    def __post_init__(self) -> None:
        refuse_stateless(self.also)
        memory = 0 if self.snapshot_memory is None else self.snapshot_memory
        for name, is_sound, cure in (
            ("every", is_whole(self.every, 0), EVERY),
            ("keep", is_whole(self.keep, 1), "how many of the newest, at least 1"),
            ("snapshot_every", is_whole(self.snapshot_every, 1), "a number of steps, at least 1"),
            ("snapshot_memory", _is_size(memory), "bytes for both snapshots together"),
            ("with_frozen", isinstance(self.with_frozen, bool), "True, or False to leave them out"),
            ("capsule_bytes", _is_size(self.capsule_bytes), "bytes on disk for all incidents, or 0 for none"),
        ):
            refuse_unless(is_sound, f"Checkpointing.{name}", getattr(self, name), cure)


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """What is measured of a run besides every step's loss and norm, and who is told."""

    sample_every: int = 10
    """Steps between measurements of weights, moments, updates and activations; 0 never measures them."""
    activations: ActivationSampler | None = None
    """A sampler of activations with options of its own."""
    routers: Finder | None = None
    """Gives the routers of a mixture of experts by name, for a model whose own are not found: see the guide."""
    sinks: Sequence[Sink] = ()
    """Who gets every row and event besides the folder: ``sealegs.tracker("wandb")``."""
    notify: Where | None = field(default=None, repr=False)
    """Where a person is told when the run needs one; see ``Watch``."""
    settings: dict[str, Any] | None = None
    """What the run is, for its manifest."""
    price_per_hour: float | None = None
    """What an hour of the run costs, on all its machines, in any currency: incidents and the stability tax then have
    their cost in money."""
    recompute: bool | int = False
    """Whether ranks compute each other's batches again now and then, to find hardware that computes wrongly: True for
    every 500 steps, which takes 0.2 % of the time at the most, or a number of steps. For DDP and FSDP2."""
    ranks: Ranks | None = None
    """The timeout for ranks that do not come: to a step, a checkpoint or a rollback."""

    def __post_init__(self) -> None:
        are_sinks = isinstance(self.sinks, Sequence) and not isinstance(self.sinks, str)
        for name, is_sound, cure in (
            ("sample_every", is_whole(self.sample_every, 0), EVERY),
            ("activations", isinstance(self.activations, ActivationSampler | None), "an ActivationSampler, or None"),
            ("routers", self.routers is None or callable(self.routers), "a function of the model, or None"),
            ("ranks", isinstance(self.ranks, Ranks | None), "Ranks(timeout_s=...), or None"),
            ("recompute", isinstance(self.recompute, bool) or is_whole(self.recompute, 1), RECOMPUTE),
            ("settings", _is_json(self.settings), "a dict of what JSON can hold"),
            ("price_per_hour", self.price_per_hour is None or is_price(self.price_per_hour), PRICE),
            ("sinks", are_sinks and all(map(_is_sink, self.sinks)), 'a list: [sealegs.tracker("wandb")]'),
        ):
            refuse_unless(is_sound, f"Telemetry.{name}", getattr(self, name), cure)

    @property
    def timeout_s(self) -> float:
        """How long the ranks wait for one of them."""
        return TIMEOUT_S if self.ranks is None else self.ranks.timeout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """A job that may go on with another number of ranks, in the place of ``resume="auto"``."""

    learning_rate: Rule = "keep"
    """How it follows the global batch, where that is another than at the beginning of the run: ``"keep"`` leaves it,
    ``"linear"`` and ``"sqrt"`` multiply it by the ratio of the two, or by its root."""

    def __post_init__(self) -> None:
        is_rule = self.learning_rate in get_args(Rule)
        refuse_unless(is_rule, "Elastic.learning_rate", self.learning_rate, '"keep", "linear", or "sqrt"')


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
    clip: float | Clipping | None = None
    act: bool | Skipping = True
    playbook: Playbook | None = None
    checkpoint_every: int | Checkpointing = 0
    resume: bool = False
    elastic: Elastic = Elastic()
    detection: Detection = Detection()  # noqa: RUF009 -- a frozen value
    telemetry: Telemetry = Telemetry()
    skip: Sequence[tuple[int, int]] = ()

    def __post_init__(self) -> None:
        every, clip = self.checkpoint_every, self.clip_norm
        can_step = all(callable(getattr(each, "step", None)) for each in self.schedulers)
        for name, is_sound, cure in (
            ("scheduler", can_step, "an LRScheduler, several, or one LoopScheduler of those that the loop steps"),
            ("scaler", self.scaler is None or hasattr(self.scaler, "is_enabled"), "a GradScaler, or None"),
            ("clip", clip is None or (is_number(clip) and clip > 0), CLIP),
            ("act", isinstance(self.act, bool | Skipping), "True, False for shadow mode, or a sealegs.Skipping"),
            ("playbook", isinstance(self.playbook, Playbook | None), "Playbook.standard(), or None"),
            ("checkpoint_every", isinstance(every, Checkpointing) or is_whole(every, 0), EVERY),
            ("detection", isinstance(self.detection, Detection), "sealegs.Detection(...)"),
            ("telemetry", isinstance(self.telemetry, Telemetry), "sealegs.Telemetry(...)"),
            ("skip", are_ranges(self.skip), RANGES),
        ):
            refuse_unless(is_sound, name, getattr(self, name), cure)
        if self.playbook is not None and self.playbook.rungs and self.detection.rules != CALIBRATED:
            raise ConfigError(
                f"playbook={self.playbook.name}: it goes by the calibrated rules; leave Detection.rules as it is"
            )

    @property
    def acts(self) -> bool:
        """Whether updates are skipped and runs halted, or that is only said."""
        return self.act is not False

    @property
    def skipping(self) -> Skipping:
        """Of True, as it comes."""
        return self.act if isinstance(self.act, Skipping) else Skipping()

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
    def backs(self) -> set[int]:
        """The numbers of steps that actions of the playbook ask to go back, at least."""
        rungs = () if self.playbook is None else self.playbook.rungs
        asked = {action.back for rung in rungs for action in rung.actions if isinstance(action, Rollback)}
        return asked - {0}

    @property
    def watches_heads(self) -> bool:
        """Whether attention logits of heads are looked at: where they are limited, or may come to be."""
        rungs = () if self.playbook is None else self.playbook.rungs
        may_be = any(isinstance(action, ClipQK) for rung in rungs for action in rung.actions)
        return self.largest_logit is not None or may_be

    @property
    def clip_norm(self) -> float | None:
        """The largest global gradient norm, where the guard is to clip."""
        return self.clip.norm if isinstance(self.clip, Clipping) else self.clip

    @property
    def largest_logit(self) -> float | None:
        """The largest attention logit of a head, where it is limited."""
        return self.clip.attention_logit if isinstance(self.clip, Clipping) else None

    @property
    def stores(self) -> bool:
        """Whether states are kept, in memory or on disk."""
        return bool(self.checkpointing.every) or self.playbook is not None

    def batches(self) -> Batches:
        """The data, as recovery needs them."""
        return Batches(skipped=self.skip, must_reposition=self.has_rungs)

    def frozen(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> FrozenWeights | None:
        """What states leave out, if there are any."""
        if not self.stores or self.checkpointing.with_frozen:
            return None
        return FrozenWeights(model, optimizers, timeout_s=self.telemetry.timeout_s)

    def snapshots(self, training: TrainingState) -> Snapshots:
        """Those in memory: where they are of no use to a playbook, only if memory is given for them."""
        asked = self.checkpointing
        is_used = self.has_rungs and self.acts
        memory = asked.snapshot_memory if is_used else asked.snapshot_memory or 0
        # where no checkpoint of step 0 is written, the first must be enough to run an early incident again
        return Snapshots(
            training.model,
            training.optimizers,
            also=training.also,
            frozen=training.frozen,
            every=asked.snapshot_every,
            soon=not self.has_rungs,
            memory=memory,
        )

    def checkpoints(self, watch: Watch) -> Checkpoints | None:
        """Those on disk."""
        if watch.folder is None or not self.stores:
            return None
        return Checkpoints(
            watch.folder / CHECKPOINTS,
            keep=self.checkpointing.keep,
            keep_first=self.has_rungs,
            backs=self.backs,
            proves=self.playbook is not None,
            lost=watch.lost_folder,
            timeout_s=self.telemetry.timeout_s,
        )

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
        return Recovery(
            playbook=self.playbook,
            training=training,
            watch=watch,
            batches=batches,
            snapshots=snapshots,
            checkpoints=checkpoints,
            folder=watch.folder if watch.record is not None else None,
            act=self.acts,
            capsule_bytes=self.checkpointing.capsule_bytes,
            timeout_s=self.telemetry.timeout_s,
        )


def has_begun(run: Any, timeout_s: float) -> bool:
    """Whether there is a run to go on with, as rank 0 sees it: which may be making one when another rank looks."""
    if not isinstance(run, str | Path):
        raise ConfigError(f"resume='auto' with run={run!r}: give the folder, which is looked at")
    return Collective(timeout_s).first(lambda: (Path(run) / MANIFEST).exists())


def skip_ranges(batches: Batches, ranges: Sequence[tuple[int, int]]) -> None:
    """Batches never to hand out, from the first number to one before the last of each range."""
    refuse_unless(are_ranges(ranges), "skip", ranges, RANGES)
    for first, end in ranges:
        batches.skip(first, end - first)


def several(one_or_more: Any) -> tuple[Any, ...]:
    """A tuple of what may be one, several or None."""
    if one_or_more is None:
        return ()
    return tuple(one_or_more) if isinstance(one_or_more, Sequence) else (one_or_more,)


def refuse_strangers(model: Any, optimizers: Sequence[Any]) -> None:
    """Refuse what is no model, no optimizer, or optimizers of other models; one may be of the loss's own parameters."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model={type(model).__name__}: give the torch.nn.Module that is trained")
    if not optimizers:
        raise ConfigError("optimizer: there is none; give the one that updates the model")
    trained = {id(parameter) for parameter in model.parameters()}
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise ConfigError(f"optimizer={type(each).__name__}: give a torch.optim.Optimizer, or several")
    held = (id(parameter) for each in optimizers for group in each.param_groups for parameter in group["params"])
    if trained.isdisjoint(held):
        raise ConfigError(f"optimizer={type(optimizers[0]).__name__}: none of its parameters is the model's")
