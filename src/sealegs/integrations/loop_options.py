"""The guard in a framework's loop: its options, its folder, and what it knows about a run that goes on."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict, get_type_hints

from sealegs.errors import ConfigError, RunExists
from sealegs.guard import watch_of
from sealegs.guard_options import Checkpointing, Clipping, GuardOptions, Telemetry, has_begun
from sealegs.judge import Detection
from sealegs.loop_port import LoopPort
from sealegs.preflight_check.plan import Plan, plan_from
from sealegs.recovery.playbook import Playbook
from sealegs.signals.layout import Divided
from sealegs.state.extra_state import not_held


class LoopOptions(TypedDict, total=False):
    """The options of a guard in a framework's loop. Each means what it means to ``sealegs.Guard``."""

    clip: float | None
    attention_logit: float | None
    act: bool
    playbook: Playbook | None
    checkpoint_every: int | Checkpointing
    resume: bool | Literal["auto"]
    detection: Detection
    telemetry: Telemetry
    skip: Sequence[tuple[int, int]]
    """As in ``Guard.batches``."""


PLAYBOOKS = {"standard": Playbook.standard, "observe": Playbook.observe}


def named_options(*, act: bool, playbook: str | None) -> LoopOptions:
    """The options of those who can only name them: a command line, a file of settings."""
    if playbook is None:
        return {"act": act}
    if playbook not in PLAYBOOKS:
        raise ConfigError(f"playbook={playbook!r}: there are {', '.join(PLAYBOOKS)}")
    return {"act": act, "playbook": PLAYBOOKS[playbook]()}


def refuse_options(options: Mapping[str, Any], own: Mapping[str, str]) -> None:
    """Refuse unknown options, and those that the framework owns: ``own`` says how to set them there."""
    for name, cure in own.items():
        if name in options:
            raise ConfigError(f"{name}={options[name]!r}: {cure}")
    known = get_type_hints(LoopOptions).keys()
    for name in sorted(options.keys() - known):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known - own.keys()))}"
        raise ConfigError(f"{name}={options[name]!r}: a guard has no such option; {hint}")


def guard_options(options: LoopOptions, **of_framework: Any) -> GuardOptions:
    """All options of a guard: the user's, and those that the framework says. A wrong value is refused here."""
    if options.get("telemetry", Telemetry()).recompute:
        raise ConfigError(
            "Telemetry.recompute: a framework's loop counts each batch that it is given; leave it out, or use "
            "sealegs.Guard in a loop of your own"
        )
    given: Any = {name: value for name, value in options.items() if name != "resume"} | of_framework
    if (limit := given.pop("attention_logit", None)) is not None:
        given["clip"] = Clipping(norm=given.get("clip"), attention_logit=limit)
    return GuardOptions(**given)


def shadows_in_no_state(
    model: Any, optimizers: Sequence[Any], options: LoopOptions, callbacks: Sequence[object]
) -> Plan:
    """What follows the weights and is in no state, as far as a framework shows it: for the pre-flight check."""
    also = guard_options(options).checkpointing.also
    return plan_from({"not_held": tuple(not_held(model, optimizers, also, callbacks))})


def open_loop(
    model: Any,
    optimizer: Any,
    options: LoopOptions,
    *,
    run: str | Path | None,
    scheduler: Any,
    scaler: Any,
    goes_on: bool,
    settings: dict[str, Any],
    callbacks: Sequence[object],
    divided: Divided | None = None,
) -> LoopPort:
    """Open the guard's side of a framework's loop; the folder of a run that ``goes_on`` may be there already."""
    telemetry = options.get("telemetry", Telemetry())
    described = replace(telemetry, settings=settings | (telemetry.settings or {}))
    given = guard_options({**options, "telemetry": described}, scheduler=scheduler, scaler=scaler)
    resume = goes_on and run is not None and has_begun(run, described.timeout_s)
    try:
        return LoopPort(
            model,
            optimizer,
            given,
            partial(watch_of, run, given, resume=resume),
            has_folder=run is not None,
            callbacks=callbacks,
            divided=divided,
        )
    except RunExists:
        raise RunExists(
            f"run={run}: there is a run in it, and this one does not go on from a checkpoint; give another name, "
            "or move the folder away"
        ) from None
