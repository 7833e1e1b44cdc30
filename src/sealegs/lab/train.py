"""A small pretraining job, to be read top to bottom: trains a model on data, and writes its run folder.

Imports torch, numpy and the standard library alone, so that it runs in any training image.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from sealegs.errors import ConfigError, RunHalted, SourceError, StorageError
from sealegs.guard import Guard
from sealegs.guard_options import Checkpointing, Clipping, GuardOptions, Telemetry, skip_ranges
from sealegs.lab.data import Batch, Ints, Stream
from sealegs.lab.experts import router_signals
from sealegs.lab.float8 import float8_signals
from sealegs.lab.model import Losses, Transformer
from sealegs.lab.settings import ModelSettings, OptimizerSettings, Settings
from sealegs.lab.sources import TokenSources, changed_source
from sealegs.loop_port import LoopPort
from sealegs.record import manifest as manifests
from sealegs.record.files import whole_file, writing
from sealegs.record.manifest import Manifest
from sealegs.record.schema import CHECKPOINTS, TOKENIZER
from sealegs.record.writer import RunWriter
from sealegs.recovery.playbook import Playbook
from sealegs.signals.activations import ActivationSampler
from sealegs.state.checkpoints import Checkpoints
from sealegs.vocabulary import Sink
from sealegs.watch import Watch

Disturb: TypeAlias = Callable[
    [nn.Module, Optimizer, Stream, Callable[[], int], Callable[[str], None]], AbstractContextManager[Iterable[Batch]]
]
"""A context that disturbs a model, its optimizer and its batches while it is open. It gets a function for the number
of the step, and one that takes a line of text."""
Ranges: TypeAlias = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a run ended."""

    folder: Path
    steps: int
    """Steps done, in all."""
    stopped_by: str | None
    """The reason to stop before the last step, if there was one."""
    eval_loss: float | None
    """Loss of the last weights; None if the run was stopped."""
    unigram_entropy: float
    ended_badly: str = ""
    """Why it did not end well, in a sentence."""
    missing: str = ""
    """What its folder should have and does not."""


def undisturbed(_: nn.Module, __: Optimizer, stream: Stream, *___: object) -> AbstractContextManager[Stream]:
    """The data unchanged."""
    return nullcontext(stream)


def train(
    settings: Settings,
    data: TokenSources,
    folder: Path,
    *,
    resume: bool = False,
    sinks: Sequence[Sink] = (),
    should_stop: Callable[[], str | None] = lambda: None,
    skip: Ranges = (),
    disturb: Disturb = undisturbed,
) -> Result:
    """Train to the last step, or until ``should_stop`` gives a reason; either way leave a checkpoint.

    ``settings`` must be ``resolved``. A resumed run starts from its newest trusted checkpoint and computes what it
    would have computed without the interruption, on the CPU bit for bit. ``skip`` are ranges of batches never to train
    on. ``disturb`` is for drills.
    """
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    model = Transformer(settings.model).to(settings.device)
    optimizer = build_optimizer(model, settings.optimizer)
    scheduler = LambdaLR(optimizer, partial(lr_share, settings.optimizer, settings.steps))
    with disturb(model, optimizer, data.training, lambda: -1, lambda text: None):
        pass  # data that do not fit the model are refused here, before there is a folder
    scaler = GradScaler(settings.device, enabled=settings.dtype == "fp16")
    manifest = describe(settings, data, model, folder.name)
    with RunWriter.reopen(folder) if resume else RunWriter.create(folder, manifest) as record:
        changed = what_changed(record, settings, data) if resume else {}
        record.amend(settings=manifest.settings, dtype=manifest.dtype, price_per_hour=manifest.price_per_hour)
        options = GuardOptions(
            scheduler=scheduler,
            scaler=scaler,
            clip=Clipping(norm=settings.optimizer.clip or None, attention_logit=settings.optimizer.qk_clip or None),
            act=not settings.shadow,
            playbook=PLAYBOOKS[settings.playbook](),
            checkpoint_every=Checkpointing(
                every=settings.cadence.checkpoint_steps,
                keep=settings.cadence.keep_checkpoints,
                snapshot_every=settings.cadence.snapshot_steps,
                snapshot_memory=SNAPSHOT_BYTES,
            ),
            resume=resume,
            telemetry=Telemetry(sample_every=settings.cadence.detail_steps, activations=eager_sampler(model, settings)),
        )
        open_watch = partial(Watch, record, sinks=sinks)
        with Guard.around(LoopPort(model, optimizer, options, open_watch, has_folder=True)) as guard:
            watch = guard.watch
            skip_ranges(guard.loop.data, skip)
            try:
                begin(folder, guard, manifest, data, changed)
                if guard.number:
                    take_settings(optimizer, scheduler, settings, guard.number)
                with disturb(
                    model,
                    optimizer,
                    data.training,
                    lambda: guard.number,
                    lambda text: watch.note("fault", text=text),
                ) as batches:
                    result = run_steps(settings, data, model, scaler, guard, folder, should_stop, batches)
                guard.loop.finish()
            except BaseException as error:
                with suppress(StorageError):  # the disk may be what failed; the error itself says more
                    guard.loop.finish()
                    reason = "halted" if isinstance(error, RunHalted) else "failed"
                    watch.note("end", reason=reason, error=f"{type(error).__name__}: {error}")
                raise
            ended_badly = "" if result.stopped_by else guard.ended_badly
            result = replace(result, ended_badly=ended_badly, missing=guard.missing)
            how: dict[str, Any] = {"reason": "interrupted" if result.stopped_by else "finished"}
            if result.ended_badly:
                how = {"reason": "ended-badly", "why": result.ended_badly}
            watch.note("end", **how, by=result.stopped_by, eval_loss=result.eval_loss, skips=watch.skips)
    return result


def eager_sampler(model: nn.Module, settings: Settings) -> ActivationSampler | None:
    """In compiled code nobody sees the attention logits that are to be limited: sampled steps run without it."""
    is_needed = settings.compile and settings.optimizer.qk_clip > 0
    return ActivationSampler(model, force_eager=True) if is_needed else None


SNAPSHOT_BYTES = 8 * 2**30
"""Memory for snapshots. They are also taken if nothing goes back to them: an incident is run again from them."""
PLAYBOOKS = {"observe": Playbook.observe, "standard": Playbook.standard, "palm": Playbook.palm}


def run_steps(
    settings: Settings,
    data: TokenSources,
    model: Transformer,
    scaler: GradScaler,
    guard: Guard,
    folder: Path,
    should_stop: Callable[[], str | None],
    batches: Iterable[Batch],
) -> Result:
    """The loop."""
    losses = torch.compile(model.losses) if settings.compile else model.losses
    cadence = settings.cadence
    last_save = time.monotonic()
    reason = should_stop()
    for batch in guard.batches(batches) if guard.number < settings.steps and not reason else ():
        signals: dict[str, Any] = {"batch_hash": batch.hash, "sources": batch.sources}
        if cadence.evaluate_steps and guard.number % cadence.evaluate_steps == 0:
            with guard.paused():
                signals["eval_loss"] = evaluate(losses, data.held_out, settings)

        if settings.dtype == "fp16" and guard.autocast_dtype(torch.float16) == torch.bfloat16:
            settings = replace(settings, dtype="bf16")
        loss, token_losses, beside = backward(scaler, losses, batch, settings)
        model.loads = beside.get("expert_load")
        signals |= signals_of(beside, detailed=guard.number % cadence.detail_steps == 0)
        guard.step(loss, tokens=batch.target_count, token_losses=token_losses, **signals)

        is_late = cadence.checkpoint_minutes and time.monotonic() - last_save > 60 * cadence.checkpoint_minutes
        if is_late and guard.checkpoint():
            last_save = time.monotonic()
        if guard.number >= settings.steps or (reason := should_stop()):
            break

    guard.loop.save_last()
    eval_loss = None
    if not reason:  # whoever asked for a stop is waiting
        last = evaluate(losses, data.held_out, settings)
        guard.watch.see(guard.number, eval_loss=last)
        eval_loss = float(last)
    return Result(
        folder=folder,
        steps=guard.number,
        stopped_by=reason,
        eval_loss=eval_loss,
        unigram_entropy=data.facts["unigram_entropy"],
    )


LossFunction: TypeAlias = Callable[[Tensor, Tensor], Losses]


class BatchLosses(NamedTuple):
    """The losses of a batch whose gradients are there."""

    loss: Tensor
    """Their mean over the targets."""
    tokens: Tensor
    """That of each token."""
    beside: dict[str, Tensor]
    """What layers said beside: the mean over micro-batches."""


def backward(scaler: GradScaler, losses: LossFunction, batch: Batch, settings: Settings) -> BatchLosses:
    """The gradients of one batch.

    Micro-batches may hold different numbers of targets, so their losses are summed and divided by the targets of the
    whole batch: a mean of the micro-batches' means would weigh tokens differently.
    """
    loss = torch.zeros((), device=settings.device)
    of_tokens = []
    beside: dict[str, Tensor] = {}
    for tokens, targets in batch.micro_batches(settings.data.accumulation):
        with precision(settings):
            micro = losses(on_device(tokens, settings), on_device(targets, settings))
        scaler.scale(micro.total / batch.target_count).backward()
        of_tokens.append(micro.tokens.detach())
        loss += of_tokens[-1].sum() / batch.target_count
        for name, each in micro.beside.items():
            beside[name] = beside.get(name, 0.0) + each / settings.data.accumulation
    return BatchLosses(loss, torch.cat(of_tokens), beside)


def signals_of(beside: Mapping[str, Tensor], *, detailed: bool) -> dict[str, Tensor]:
    """What layers said beside a batch's losses, as signals of its step."""
    return router_signals(beside, detailed=detailed) | float8_signals(beside, detailed=detailed)


@torch.no_grad()
def evaluate(losses: LossFunction, held_out: Stream, settings: Settings) -> Tensor:
    """Mean loss over the first held-out batches, which are the same every time."""
    total = torch.zeros((), device=settings.device)
    count = 0
    for index in range(settings.cadence.evaluate_batches):
        batch = held_out.batch(index)
        with precision(settings):
            micro = losses(on_device(batch.tokens, settings), on_device(batch.targets, settings))
        total += micro.tokens.sum()
        count += batch.target_count
    return total / count


def build_optimizer(model: nn.Module, settings: OptimizerSettings) -> AdamW:
    """AdamW with weight decay on matrices only: decay on norms and biases would pull at what sets the scale.

    Under muP the matrices inside the blocks are a third group, with a learning rate of their own.
    """
    shape = model.settings if isinstance(model, Transformer) else ModelSettings()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    parts = [matrices, vectors]
    if isinstance(model, Transformer) and shape.mup_base_width is not None:
        hidden = {parameter for parameter in model.blocks.parameters() if parameter.ndim >= 2}
        parts = [[each for each in matrices if each not in hidden], vectors, [*filter(hidden.__contains__, matrices)]]
    groups = [
        {"params": parameters, "lr": rate, "weight_decay": decay}
        for parameters, (rate, decay) in zip(parts, rates_and_decays(settings, shape), strict=True)
    ]
    optimizer = AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)
    if isinstance(model, Transformer) and shape.experts and shape.balance == "bias":
        # with the update or not at all: a skip on the host calls no optimizer, one on the device sets found_inf
        optimizer.register_step_post_hook(lambda done, *_: model.balance_experts(getattr(done, "found_inf", None)))
    return optimizer


def rates_and_decays(settings: OptimizerSettings, shape: ModelSettings) -> list[tuple[float, float]]:
    """Peak learning rate and weight decay of each group. muP keeps their product, by which a step decays a weight."""
    groups = [(settings.lr, settings.weight_decay), (settings.lr, 0.0)]
    if shape.mup_base_width is not None:
        groups.append((settings.lr / shape.mup_times, settings.weight_decay * shape.mup_times))
    return groups


def lr_share(settings: OptimizerSettings, steps: int, step: int) -> float:
    """The learning rate of a step as a share of the peak: linear warm-up, then cosine down to the last step."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, steps - 1 - settings.warmup_steps)
    floor = settings.final_lr_share
    return floor + (1 - floor) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


def precision(settings: Settings) -> AbstractContextManager[object]:
    """Autocast for the low precisions; the weights stay in fp32."""
    if settings.dtype == "fp32":
        return nullcontext()
    return torch.autocast(settings.device, torch.bfloat16 if settings.dtype == "bf16" else torch.float16)


def on_device(values: Ints, settings: Settings) -> Tensor:
    """Token ids on the model's device; the copy to a GPU overlaps with earlier kernels."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(settings.device, non_blocking=True) if settings.device == "cuda" else tensor


# Starting, stopping and resuming


BF16_PAYS_ON_CPU = 256
"""The width from which it does, where the CPU has it. Below, attention backwards in bf16 costs a multiple of what the
products save: a step of ``nano`` (48) takes 2.4 times as long as in fp32, one of ``toy`` (96) 1.3 times, one of
``small`` (320) half as long (torch 2.13, a Xeon with AMX)."""


def resolved(settings: Settings) -> Settings:
    """The settings with every ``auto`` resolved for this machine."""
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda': torch sees no CUDA device here; use device=cpu, or auto")
    dtype = settings.dtype
    if dtype == "auto":
        wide = settings.model.width >= BF16_PAYS_ON_CPU
        fast_bf16 = torch.cuda.is_bf16_supported() if device == "cuda" else wide and cpu_has_bf16()
        dtype = "bf16" if fast_bf16 else "fp32"
    return replace(settings, device=device, dtype=dtype, threads=settings.threads or cpu_count())


def cpu_count() -> int:
    """Cores that this process may use; ``OMP_NUM_THREADS`` limits them where several processes share a machine."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    if said.isdecimal() and int(said) > 0:
        return int(said)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bf16 in hardware; emulated, a step takes many times as long."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return not {"bf16", "avx512_bf16", "amx_bf16"}.isdisjoint(flags)


def describe(settings: Settings, data: TokenSources, model: Transformer, name: str) -> Manifest:
    """The manifest of a new run."""
    host: dict[str, object] = {"device": settings.device, "threads": settings.threads}
    if settings.device == "cuda":
        host["accelerator"] = torch.cuda.get_device_name()
    return manifests.describe(
        name,
        seed=settings.seed,
        dtype=settings.dtype,
        settings=asdict(settings),
        data=data.facts | {"parameters": model.parameter_count()},
        price_per_hour=settings.price_per_hour,
        host=host,
    )


MAY_CHANGE_IN_MODEL = {
    "model.z_loss",
    "model.norm_eps",
    "model.naive_softmax",
    "model.naive_log_loss",
    "model.init_std",
    "model.balance",
    "model.balance_weight",
    "model.balance_rate",
    "model.router_z_weight",
    "model.float8",
}
"""Stability margins. A change of anything else would make another function of the same weights."""


def what_changed(record: RunWriter, settings: Settings, data: TokenSources) -> dict[str, list[object]]:
    """Old and new value of each changed setting; refuses changes with which the run would not go on as it began."""
    before = record.manifest
    done = max(Checkpoints(record.folder / CHECKPOINTS).steps(), default=0)
    if settings.steps < done:
        raise ConfigError(f"steps={settings.steps}: the run has done {done} already; give at least as many")
    if name := changed_source(before.data, data):
        raise SourceError(f"{name}: not the data that {before.run_id} was trained on; bring that back to resume")
    changed = settings_changed(before, settings)
    for name in changed:
        in_model = name.startswith("model.") and name not in MAY_CHANGE_IN_MODEL
        if name == "seed" or name.startswith("data.") or in_model:
            raise ConfigError(f"{name}: changed since the run was started; it would be another run, so start another")
    return changed


def take_settings(optimizer: AdamW, scheduler: LambdaLR, settings: Settings, step: int) -> None:
    """Put the present settings into an optimizer that a checkpoint has restored with the settings of its time."""
    wanted = settings.optimizer
    share = lr_share(wanted, settings.steps, step)
    parts = rates_and_decays(wanted, settings.model)
    for group, (rate, decay) in zip(optimizer.param_groups, parts, strict=True):
        group.update(betas=wanted.betas, eps=wanted.eps, weight_decay=decay, initial_lr=rate, lr=rate * share)
    scheduler.base_lrs = [rate for rate, _ in parts]


def begin(folder: Path, guard: Guard, manifest: Manifest, data: TokenSources, changed: dict[str, list[object]]) -> None:
    """Put what a reader will need beside the manifest, and write the first event."""
    tokenizer = folder / TOKENIZER
    if data.tokenizer is not None and not tokenizer.exists():
        with writing(tokenizer), whole_file(tokenizer) as file:
            file.write(data.tokenizer)
    if guard.resumed is None:
        guard.watch.note("start", run_id=manifest.run_id)
        return
    here = {
        "versions": manifest.versions,
        "git": manifest.git,
        "host": manifest.host,
    }  # may differ from the start
    guard.loop.note_resume(changed=changed, **here)


def settings_changed(before: Manifest, settings: Settings) -> dict[str, list[object]]:
    """Old and new value of each setting that differs from the manifest, by dotted name."""
    old = dict(manifests.dotted(before.settings))
    new = dict(manifests.dotted(json.loads(json.dumps(asdict(settings)))))
    # a setting that an older Sealegs did not know was at its default; sources are names of the user's
    known = dict(manifests.dotted(json.loads(json.dumps(asdict(Settings())))))
    old = {name: value for name, value in known.items() if not name.startswith("data.sources.")} | old
    return {name: [old.get(name), new.get(name)] for name in old | new if old.get(name) != new.get(name)}
