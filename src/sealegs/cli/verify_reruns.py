"""Reruns an incident with remedies: from the capsule, or from the seed."""

import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sealegs.cli.replay import builder
from sealegs.cli.train import EXIT_CODES, stop_signals
from sealegs.errors import ConfigError, SourceError
from sealegs.lab import config
from sealegs.lab.settings import Settings
from sealegs.record import manifest as manifests
from sealegs.record.run import open_run
from sealegs.record.schema import TOKENIZER
from sealegs.report.fixes import Fix
from sealegs.report.postmortem.build import Case
from sealegs.report.postmortem.values import Promise
from sealegs.report.progress import progress

if TYPE_CHECKING:
    from sealegs.capsule.read import Capsule
    from sealegs.lab.sources import TokenSources
    from sealegs.replay.experiment import Experiment
    from sealegs.replay.remedy import Batches

RERUN = "rerun-{}"
"""The folder of a run from the seed with the remedy, inside the incident's."""
Say = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to run, and what the result must be."""

    case: Case
    folder: Path
    """The folder of the incident."""
    capsule: "Capsule"
    settings: Settings | None
    """The lab's settings, if `sealegs train` trained the run."""
    build: str | None
    fixes: tuple[Fix, ...]
    promises: tuple[Promise, ...]

    @property
    def last(self) -> int:
        """The last step that a promise is about."""
        return max(promise.last for promise in self.promises)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """The result of a rerun, by signal and step."""

    values: dict[str, dict[int, float]]
    first: int
    borrowed: int = 0
    folder: Path | None = None


def _with_settings(settings: Settings, fixes: Sequence[Fix], allowed: Callable[[str], bool], cure: str) -> Settings:
    """The settings with those fixes that are settings."""
    for fix in (fix for fix in fixes if fix.is_setting):
        if not allowed(fix.name):
            raise ConfigError(f"--fix {fix}: {fix.name} cannot be changed here; {cure}")
        try:
            values = tomllib.loads(f"{fix.name} = {fix.value}")
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"--fix {fix}: {fix.value} is no value of a setting, as TOML writes them") from error
        settings = config.overlaid(settings, values, where=f"--fix {fix}")
    return settings


# From the snapshot


def from_snapshot(task: Task, *, say: Say) -> Rerun:
    """Run from the state of the capsule."""
    from sealegs.replay.remedy import plan, rerun

    experiment, more = _experiment(task, say)
    for promise in task.promises:
        if promise.first < experiment.oldest:
            raise ConfigError(
                f"--expect {promise.signal} from step {promise.first} on: the state of the capsule is of step "
                f"{experiment.oldest}; begin there, or say --from-seed"
            )
    planned = plan(experiment, task.fixes, task.last, more)
    shown = rerun(experiment, task.fixes, planned, tell=say)
    return Rerun(values=shown.values, first=experiment.oldest, borrowed=more.taken if more.is_borrowed else 0)


class _Counted(Iterator["Batches"]):
    """Batches beyond the capsule's, and how many of them were used."""

    def __init__(self, batches: "Iterator[Batches]", *, is_borrowed: bool) -> None:
        self._batches = batches
        self.is_borrowed = is_borrowed
        self.taken = 0

    def __next__(self) -> "Batches":
        self.taken += 1
        return next(self._batches)


def _experiment(task: Task, say: Say) -> "tuple[Experiment, _Counted]":
    """The experiment, and the batches that follow those of the capsule."""
    from sealegs.replay.experiment import Experiment
    from sealegs.replay.remedy import borrowed

    capsule = task.capsule
    if task.settings is None:
        if wrong := next((fix for fix in task.fixes if fix.is_setting), None):
            raise ConfigError(f"--fix {wrong}: this is no run of `sealegs train`; change it in build()")
        experiment = Experiment(capsule, builder(capsule.folder, task.build)())
        return experiment, _Counted(borrowed(experiment), is_borrowed=True)
    from sealegs.lab.subject import subject_of
    from sealegs.lab.train import MAY_CHANGE_IN_MODEL

    cure = f"in a state that is there, only {', '.join(sorted(MAY_CHANGE_IN_MODEL))} can; say --from-seed"
    settings = _with_settings(task.settings, task.fixes, MAY_CHANGE_IN_MODEL.__contains__, cure)
    experiment = Experiment(capsule, subject_of(settings, capsule.folder / TOKENIZER))
    try:
        data = _data(task.settings, capsule)
    except SourceError as error:
        say(f"{error}: batches from before take the place of those that the capsule does not have")
        return experiment, _Counted(borrowed(experiment), is_borrowed=True)
    return experiment, _Counted(_following(data, experiment), is_borrowed=False)


def _data(settings: Settings, capsule: "Capsule") -> "TokenSources":
    """The data of the run, if they are unchanged."""
    from sealegs.lab.sources import changed_source, open_data

    data = open_data(settings)
    if name := changed_source(manifests.load(capsule.folder).data, data):
        raise SourceError(f"{name}: not the data that the run was trained on")
    return data


def _following(data: "TokenSources", experiment: "Experiment") -> "Iterator[Batches]":
    """The batches after those of the capsule, made again from their numbers."""
    last = experiment.capsule.steps().stop - 1
    number = next(each.number for each in experiment.capsule.batches if each.step == last)
    number = last if number is None else number
    while True:
        number += 1
        yield (data.training.batch(number).recorded(),)


# From the seed


def from_seed(task: Task, *, is_named: bool, say: Say) -> Rerun | int:
    """Run from the first step, with the batches of the capsule where it has them; gives an exit code if stopped."""
    from sealegs.lab.train import train
    from sealegs.replay.remedy import plan

    if task.settings is None:
        raise ConfigError(f"{task.case.name}: not of `sealegs train`, so its seed is not known; leave out --from-seed")
    steps = task.settings.steps
    if is_named and task.last >= steps:
        raise ConfigError(f"--expect something at step {task.last}: the run has {steps} steps, the last is {steps - 1}")
    last = min(task.last, steps - 1)
    settings = _seed_settings(task.settings, task.fixes)
    experiment, more = _experiment(replace(task, fixes=tuple(fix for fix in task.fixes if not fix.is_setting)), say)
    planned = plan(experiment, task.fixes, last, more)
    taken = [entry.name for entry in task.folder.iterdir()]
    folder = task.folder / next(name for n in range(1, len(taken) + 2) if (name := RERUN.format(n)) not in taken)
    clipped: dict[int, float] = {}
    with stop_signals() as asked:
        left = iter(range(last + 1))
        result = train(
            settings,
            _data(settings, task.capsule),
            folder,
            sinks=[progress(last + 1)],
            should_stop=lambda: asked() or (None if next(left, None) is not None else "enough"),
            disturb=partial(_remedied, planned, task.fixes, clipped),
        )
    if code := EXIT_CODES.get(result.stopped_by or ""):
        return code
    run = open_run(folder)
    values = {
        name: dict(zip(run.steps.tolist(), run.column(name).tolist(), strict=True)) for name in ("loss", "grad_norm")
    }
    return Rerun(values={**values, "clipped_norm": clipped}, first=0, folder=folder)


def _seed_settings(settings: Settings, fixes: Sequence[Fix]) -> Settings:
    """The settings of the run with the remedy, in shadow mode, so that the remedy alone makes the difference."""
    for fix in fixes:
        optimizer = settings.optimizer
        if fix.name == "clip":
            settings = replace(settings, optimizer=replace(optimizer, clip=fix.number))
        elif fix.name == "beta2":
            settings = replace(settings, optimizer=replace(optimizer, betas=(optimizer.betas[0], fix.number)))
        elif fix.name == "dtype":
            settings = config.overlaid(settings, {"dtype": fix.value}, where=f"--fix {fix}")
        elif str(fix) == "lr=before":
            raise ConfigError(f"--fix {fix}: from the seed the schedule is the settings'; give optimizer.lr=0.001")
        elif fix.name == "lr" and fix.value != "logged":
            settings = replace(settings, optimizer=replace(optimizer, lr=optimizer.lr * fix.number))
    cure = "from the seed, those of model and optimizer can: another seed or other data are another run"
    settings = _with_settings(settings, fixes, lambda name: name.startswith(("model.", "optimizer.")), cure)
    cadence = replace(settings.cadence, evaluate_steps=0, checkpoint_steps=0, evaluate_batches=1)
    return replace(settings, shadow=True, cadence=cadence)


@contextmanager
def _remedied(
    planned: "dict[int, Batches]",
    fixes: Sequence[Fix],
    clipped: dict[int, float],
    model: Any,
    optimizer: Any,
    batches: Any,
    clock: Callable[[], int],
    _: Say,
) -> Iterator[Any]:
    """The planned batches. Norms are measured before updates, and some updates are left out."""
    from sealegs.faults.batches import Spoilt
    from sealegs.replay.remedy import norm_of

    gated = next((fix.steps for fix in fixes if fix.name == "gate"), range(0))

    def before_update(*__: Any) -> None:
        if clock() in gated:
            optimizer.zero_grad(set_to_none=True)  # without gradients nothing changes, and no step is counted
        else:
            clipped[clock()] = norm_of([optimizer])

    hook = optimizer.register_step_pre_hook(before_update)
    try:
        yield Spoilt(batches, _planner(planned))
    finally:
        hook.remove()


def _planner(planned: "dict[int, Batches]") -> Any:
    from sealegs.faults.batches import Spoiler
    from sealegs.lab.subject import whole

    class Planner(Spoiler):
        """Replaces batches by the planned ones."""

        def apply(self, batch: T, number: int) -> T:
            if number not in planned:
                return batch
            [recorded] = planned[number]
            known: Any = batch
            made: Any = replace(whole(recorded), index=number, spans=known.spans)
            return made  # type: ignore[no-any-return]

    return Planner([])
