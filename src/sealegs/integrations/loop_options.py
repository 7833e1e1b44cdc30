"""The guard in a framework's loop: its options, its folder, and what it knows about a run that goes on."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict, get_type_hints

from sealegs.errors import ConfigError, RunExists
from sealegs.guard import Guard, watch_of
from sealegs.guard_options import Checkpointing, GuardOptions, Telemetry, has_begun, skip_ranges
from sealegs.judge import Detection
from sealegs.loop_port import LoopPort
from sealegs.recovery.playbook import Playbook


class GuardKeywords(TypedDict, total=False):
    """The options of a guard in a framework's loop. Each means what it means to ``sealegs.Guard``."""

    clip: float | None
    act: bool
    playbook: Playbook | None
    checkpoint_every: int | Checkpointing
    resume: bool | Literal["auto"]
    detection: Detection
    telemetry: Telemetry


class LoopOptions(GuardKeywords, total=False):
    """Those options, and the batches to leave out."""

    skip: Sequence[tuple[int, int]]
    """As in ``Guard.batches``."""


def refuse_options(options: Mapping[str, Any], own: Mapping[str, str]) -> None:
    """Refuse unknown options, and those that the framework owns: ``own`` says how to set them there."""
    for name, cure in own.items():
        if name in options:
            raise ConfigError(f"{name}={options[name]!r}: {cure}")
    if strange := sorted(options.keys() - get_type_hints(LoopOptions).keys()):
        raise ConfigError(f"{strange[0]}: a guard has no such option; see docs/guard.md")


def open_guard(
    model: Any,
    optimizer: Any,
    options: LoopOptions,
    *,
    run: str | Path | None,
    scheduler: Any,
    scaler: Any,
    goes_on: bool,
    settings: dict[str, Any],
) -> Guard:
    """A guard that records into a folder. A run that ``goes_on`` may have the folder already."""
    telemetry = options.get("telemetry", Telemetry())
    telemetry = replace(telemetry, settings=settings | (telemetry.settings or {}))
    given = GuardOptions(
        scheduler=scheduler,
        scaler=scaler,
        clip=options.get("clip"),
        act=options.get("act", True),
        playbook=options.get("playbook"),
        checkpoint_every=options.get("checkpoint_every", 0),
        telemetry=telemetry,
    )
    resume = goes_on and run is not None and has_begun(run)
    detection = options.get("detection", Detection())
    open_watch = partial(watch_of, run, resume=resume, detection=detection, telemetry=telemetry)
    try:
        loop = LoopPort(model, optimizer, given, open_watch, has_folder=run is not None)
    except RunExists:
        raise RunExists(
            f"run={run}: there is a run in it, and this one does not go on from a checkpoint; give another name, "
            "or move the folder away"
        ) from None
    skip_ranges(loop.data, options.get("skip", ()))
    return Guard.around(loop)


def forget_checkpoints(guard: Guard, why: str) -> None:
    """Forget the guard's own checkpoints from after the step that the framework went back to."""
    if guard.loop.checkpoints is not None:
        guard.loop.checkpoints.discard_after(guard.number, why)
