"""A guard for a loop over what ``accelerator.prepare`` gave, with Accelerate's backward, accumulation and clipping.

guard = accelerate.attach(accelerator, model, optimizer, scheduler=scheduler, run="experiments/a1")
for batch in guard.batches(loader):
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        guard.step(loss)  # instead of optimizer.step(), scheduler.step() and optimizer.zero_grad()
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Unpack, cast

from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from sealegs.errors import ConfigError, MissingExtra
from sealegs.integrations.patches import Patches
from sealegs.vocabulary import Verdict

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.utils import DistributedType

    from sealegs.integrations.accelerate_loader import handed_out
except ModuleNotFoundError as error:
    if error.name not in ("accelerate", "torch"):
        raise
    raise MissingExtra("sealegs.integrations.accelerate", "Accelerate", "accelerate") from None

from sealegs.guard import Guard
from sealegs.guard_options import RANGES, are_ranges, skip_ranges
from sealegs.integrations.loop_options import LoopOptions, refuse_options
from sealegs.signals.collect import Signal

T = TypeVar("T")
OWN = {
    "scaler": "it is the accelerator's: set Accelerator(mixed_precision='fp16')",
}
"""Options of a guard that Accelerate owns, and how to set them there."""


def attach(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: AcceleratedOptimizer | Sequence[AcceleratedOptimizer],
    *,
    run: str | Path | None,
    scheduler: AcceleratedScheduler | Sequence[AcceleratedScheduler] | None = None,
    **options: Unpack[LoopOptions],
) -> "AcceleratedGuard":
    """A guard for a loop over what ``accelerator.prepare`` gave; ``options`` are those of ``sealegs.Guard``.

    ``clip`` is for loops that do not call ``accelerator.clip_grad_norm_``. Attach on every process.
    """
    return AcceleratedGuard(accelerator, model, optimizer, run=run, scheduler=scheduler, **options)


class AcceleratedGuard(Guard):
    """A guard whose step ends when Accelerate's does: at the last accumulated micro-batch."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Any,
        *,
        run: str | Path | None,
        scheduler: Any,
        **options: Unpack[LoopOptions],
    ) -> None:
        refuse_foreign(accelerator)
        refuse_options(options, OWN)
        if not are_ranges(options.get("skip", ())):
            raise ConfigError(f"skip={options['skip']!r}: {RANGES}")
        self._accelerator = accelerator
        self._optimizers = [_prepared(each, AcceleratedOptimizer, "optimizer") for each in _several(optimizer)]
        schedulers = [_prepared(each, AcceleratedScheduler, "scheduler") for each in _several(scheduler)]
        for each in schedulers:
            if isinstance(each.scheduler, ReduceLROnPlateau):
                raise ConfigError(
                    "scheduler=ReduceLROnPlateau: it waits for a metric; leave it out, and step it yourself"
                )
        inside = [each.optimizer for each in self._optimizers]
        schedules: Any = [AcceleratedSchedule(each) for each in schedulers]
        others = cast(Any, {name: value for name, value in options.items() if name != "skip"})
        super().__init__(model, inside, run=run, scheduler=schedules, scaler=accelerator.scaler, **others)
        self._skip = options.get("skip", ())
        self._loss: Tensor | None = None
        self._tokens = 0
        self._patches = Patches()
        see_before_clipping(self._patches, accelerator, self, model)

    def batches(self, loader: Iterable[T], *, skip: Sequence[tuple[int, int]] = ()) -> Iterator[T]:
        """The batches of an epoch of a prepared loader, or of any other; see ``Guard.batches``."""
        skip_ranges(self.loop.data, [*self._skip, *skip])
        return handed_out(self, loader, by_ourselves=self.loop.goes_back)

    def step(
        self,
        loss: Tensor | None,
        *,
        grad_norm: Tensor | float | None = None,
        tokens: int | None = None,
        token_losses: Tensor | None = None,
        **signals: Signal,
    ) -> Verdict:
        """End a micro-batch after its backward pass, and with the last one the step; see ``Guard.step``.

        ``loss`` is the one given to ``accelerator.backward``. The loss of the step is the sum of what was
        backpropagated, which is the mean over the micro-batches. Until the step ends, the verdict is the previous
        step's. ``grad_norm`` is for loops that clip without the accelerator.
        """
        if loss is None:
            raise ConfigError("loss=None: with Accelerate every rank has a loss; give the one that was backpropagated")
        share = loss.detach() / self._accelerator.gradient_accumulation_steps
        self._loss = share if self._loss is None else self._loss + share
        self._tokens += tokens or 0
        if not self._accelerator.sync_gradients:
            return self.watch.verdict
        total, self._loss = self._loss, None
        seen, self._tokens = self._tokens, 0
        for each in self._optimizers:
            each._is_overflow = False  # the schedule counts attempts, and Accelerate's schedule checks this
        number = self.number
        verdict = super().step(
            total,
            grad_norm=grad_norm,
            tokens=None if tokens is None else seen,
            token_losses=token_losses,
            **signals,
        )
        tell_skipped(self._optimizers, is_skipped(verdict, number, self))
        return verdict

    def state_dict(self) -> dict[str, Any]:
        """The guard's state and the position in the data, for ``accelerator.register_for_checkpointing``."""
        return {"guard": super().state_dict(), "data": self.loop.data.position()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; with the data, too, if the loop uses ``batches``."""
        is_fresh = self.loop.data.number is None
        super().load_state_dict(state["guard"])
        if state["data"] and (is_fresh or self.loop.goes_back):
            self.loop.data.go_to(state["data"])

    def close(self) -> None:
        """Finish, release the folder, and leave the accelerator as it was."""
        self._patches.undo()
        super().close()


class AcceleratedSchedule:
    """A schedule that steps once per process, as Accelerate does; otherwise the user's own."""

    def __init__(self, accelerated: Any) -> None:
        self._accelerated = accelerated

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerated.scheduler, name)

    def step(self) -> None:
        """Step after an attempt."""
        self._accelerated.step()


def refuse_foreign(accelerator: Accelerator) -> None:
    """Refuse accelerators whose updates happen where no guard can decide about them."""
    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        raise ConfigError(
            f"accelerator of {kind}: attach to what updates the weights, sealegs.integrations.deepspeed.attach(model) "
            "with the model that prepare gave, or sealegs.integrations.deepspeed_trainer.attach(trainer)"
        )
    if kind in (DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise ConfigError(
            f"accelerator of {kind}: its engine updates the weights out of a guard's reach; use DDP or FSDP2, or only "
            "watch the run with sealegs.Watch"
        )


def see_before_clipping(patches: Patches, accelerator: Accelerator, of: Guard, model: nn.Module) -> None:
    """Let a guard see gradients before the accelerator clips them."""

    def is_of_model(parameters: set[int]) -> bool:
        """Whether a guard that is still there has a part in these; another one may have the rest."""
        return not of.loop.is_finished and not parameters.isdisjoint(map(id, model.parameters()))

    def by_norm(clip: Any) -> Any:
        def seen_first(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            given = {id(each) for each in parameters}
            if accelerator.sync_gradients and is_of_model(given):
                trained = [id(each) for each in model.parameters() if each.requires_grad]
                of.before_clipping(max_norm if given.issuperset(trained) and norm_type == 2 else None)
            return clip(parameters, max_norm, norm_type)

        return seen_first

    def by_value(clip: Any) -> Any:
        def seen_first(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            if accelerator.sync_gradients and is_of_model({id(each) for each in parameters}):
                of.before_clipping()
            return clip(parameters, *args, **kwargs)

        return seen_first

    patches.put(accelerator, "clip_grad_norm_", by_norm)
    patches.put(accelerator, "clip_grad_value_", by_value)
    unscale_once(patches, accelerator, of)


def unscale_once(patches: Patches, accelerator: Accelerator, of: Guard) -> None:
    """Unscale gradients only once: a guard that has looked at them has removed the loss scale already.

    The accelerator may have more optimizers than the guard. Each call unscales those that it names.
    """

    def once(unscale: Any) -> Any:
        def unscaled(optimizer: Any = None) -> None:
            if accelerator.sync_gradients:
                of.loop.unscale(map(_bare, accelerator._optimizers if optimizer is None else _several(optimizer)))
            else:
                unscale(optimizer)

        return unscaled

    patches.put(accelerator, "unscale_gradients", once)


def is_skipped(verdict: Verdict, number: int, of: Guard) -> bool:
    """Whether the update of a step was skipped; False while the device's decision is not known yet."""
    return verdict.step == number and not verdict.go and of.loop.acts


def tell_skipped(optimizers: Iterable[Any], skipped: bool) -> None:
    """Set ``accelerator.optimizer_step_was_skipped`` from now on."""
    for each in optimizers:
        each._is_overflow = skipped


def _prepared(given: Any, kind: type, name: str) -> Any:
    if not isinstance(given, kind):
        raise ConfigError(f"{name}={type(given).__name__}: give what accelerator.prepare made of it, {kind.__name__}")
    return given


def _bare(optimizer: Any) -> Any:
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _several(one_or_more: Any) -> list[Any]:
    if one_or_more is None:
        return []
    return list(one_or_more) if isinstance(one_or_more, Sequence) else [one_or_more]
