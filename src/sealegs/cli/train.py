"""``sealegs train``: trains a run of the lab into a run folder."""

import argparse
import shlex
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_origin

import tyro

from sealegs.cli.output import show, tell
from sealegs.cli.run_names import RUNS, named_folder
from sealegs.diagnosis.interventions import done_in
from sealegs.errors import ConfigError, MissingExtra, RunHalted
from sealegs.faults.spec import parse as parse_fault
from sealegs.lab import config
from sealegs.lab.settings import Settings
from sealegs.printable import printable
from sealegs.record.manifest import dotted
from sealegs.record.reading import is_number
from sealegs.record.run import open_run
from sealegs.record.schema import CHECKPOINTS, EVENTS
from sealegs.record.writer import INCOMPLETE, refuse_taken
from sealegs.report.event_text import remarkable
from sealegs.report.folder import contents
from sealegs.report.progress import progress
from sealegs.report.stability import told_of_tax
from sealegs.sinks.notify import Notifier, Notify
from sealegs.sinks.trackers import tracker
from sealegs.vocabulary import Sink

if TYPE_CHECKING:
    from sealegs.lab.train import Result

DESCRIPTION = """\
Pretrain a small language model and record everything into experiments/NAME.

Settings come from --preset or --size, then CONFIG.toml, then the flags below; `sealegs train --preset demo --help`
shows the values of that preset as defaults.

examples:
  sealegs train                                            the toy model on generated text, 400 steps
  sealegs train --size nano --steps 200 --run first        smaller, into experiments/first
  sealegs train --run first --resume                       go on after a kill, a crash or Ctrl-C
  sealegs train --data.sources grammar=0.7 stdlib=0.3      two sources, weighted
  sealegs train my.toml --optimizer.lr 1e-3                a file of settings, one of them overridden
  sealegs train --inject nan-gradient@120                  practise: see one step skipped, and the run go on
  sealegs train --playbook standard --inject lr-spike:factor=30,steps=10@200     practise: see it go back and recover
  sealegs train --tracker mlflow                           metrics to MLflow too (MLFLOW_TRACKING_URI, or local SQLite)
  sealegs train --tracker wandb --tracker tensorboard      to several at once (docs/trackers.md)
  sealegs train --notify '$SLACK_WEBHOOK'                  a message when the run needs a person (docs/notifications.md)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line can say."""

    config: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="CONFIG.toml")] = None
    """TOML file with settings, named and nested as the flags below; comes first."""
    run: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Name of the run, a folder in experiments/; or a path, with a slash. Default: preset or size, and the time."""
    size: Literal["nano", "toy", "small", "x1"] | None = None
    """Model of about 71k, 0.5M, 10M or 49M parameters, with data and learning rate to suit. Default: toy."""
    preset: Literal["demo", "x1", "seed-002"] | None = None
    """A whole run to start from."""
    resume: bool = False
    """Go on with the run from its newest intact checkpoint, with the settings that it was started with."""
    tracker: Annotated[tuple[Literal["mlflow", "wandb", "tensorboard", "trackio"], ...], tyro.conf.UseAppendAction] = ()
    """Send the metrics to a tracker too; may be given several times."""
    notify: Annotated[str | None, tyro.conf.arg(metavar="WHERE")] = None
    """Tell a person of halts, interventions, incidents and the end: the address of a webhook that takes {"text": ...},
    a command, or '$NAME' of an environment variable with either. `sealegs notify WHERE` tries it."""
    notify_page: Annotated[str | None, tyro.conf.arg(metavar="URL")] = None
    """Page that such messages lead to; {run} in it is the name of the run."""
    inject: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FAULT@STEP"), tyro.conf.UseAppendAction] = ()
    """Practise: nan-gradient@120, gradient-scale:factor=1000@200, bit-flip@50; may be given several times."""
    skip: Annotated[tuple[str, ...], tyro.conf.arg(metavar="A:B"), tyro.conf.UseAppendAction] = ()
    """Never train on batches A to B - 1; may be given several times."""
    settings: Annotated[Settings, tyro.conf.arg(name="")]


def main(arguments: Sequence[str]) -> int:
    """Parse, train, and print the summary."""
    options = parse(arguments)
    folder = run_folder(options)
    told = sinks_of(options)  # here, to refuse a wrong name before anything is read
    if not options.resume:
        refuse_taken(folder)  # checked again when the folder is made; here to save the wait
    if find_spec("torch") is None:
        raise MissingExtra("sealegs train", "PyTorch", "lab")
    from sealegs.faults.practice import disturbed
    from sealegs.lab.sources import open_data
    from sealegs.lab.train import resolved, train

    settings = resolved(options.settings)
    faults = [parse_fault(text) for text in options.inject]
    data = open_data(settings, say=tell)
    sinks = [progress(settings.steps), *told]
    with stop_signals() as should_stop:
        try:
            result = train(
                settings,
                data,
                folder,
                resume=options.resume,
                sinks=sinks,
                should_stop=should_stop,
                skip=ranges(options.skip),
                disturb=partial(disturbed, faults, settings.model.vocabulary),
            )
        except RunHalted as halt:
            tell(f"sealegs train: {halt}")
            show("\n".join, halted(folder))
            return 1
    if result.missing:
        tell(f"sealegs train: {INCOMPLETE}: {result.missing}")
    with suppress(BrokenPipeError):  # the run is done, whoever reads this
        show("\n".join, summary(result, settings, what_happened(folder)))
    if result.ended_badly:
        tell(f"sealegs train: the run ended badly: {result.ended_badly}")
        return 1
    return 2 if result.missing else EXIT_CODES.get(result.stopped_by or "", 0)


def ranges(texts: Sequence[str]) -> list[tuple[int, int]]:
    """The batches to leave out, from texts.

    >>> ranges(["14250:14280", "7:8"])
    [(14250, 14280), (7, 8)]
    """
    found = []
    for text in texts:
        first, colon, end = text.partition(":")
        if not colon or not is_number(first) or not is_number(end) or int(first) >= int(end):
            raise ConfigError(
                f"--skip {text}: the first batch, a colon, and one after it as the end: --skip 14250:14280"
            )
        found.append((int(first), int(end)))
    return found


def parse(arguments: Sequence[str]) -> Options:
    """The options, on top of the settings from preset, size, file or the run to resume."""
    words = list(arguments)
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("--run", "--size", "--preset"):
        peek.add_argument(name)
    peek.add_argument("--resume", action="store_true")
    try:
        seen, _ = peek.parse_known_args(words)
    except argparse.ArgumentError:  # a flag without its value: tyro reports it below, with the usage
        seen = peek.parse_args([])
    file = Path(words[0]) if words and not words[0].startswith("-") else None
    if seen.resume and seen.run:
        start = config.of_run(named_folder(seen.run), preset=seen.preset, size=seen.size, config=file)
    else:
        start = config.starting_point(preset=seen.preset, size=seen.size, config=file)
    _refuse_unseen(start)
    with _flags():
        options = tyro.cli(
            Options, args=words, default=Options(settings=start), prog="sealegs train", description=DESCRIPTION
        )
    if options.config != file:
        raise ConfigError(f"{options.config}: give the file of settings first: sealegs train {options.config} ...")
    return options


def _refuse_unseen(settings: Settings) -> None:
    """Refuse a file's settings that tyro would print as they are, among the defaults of its help and of its errors."""
    for name, value in dotted(asdict(settings)):
        if printable((name, value)) != (name, value):
            raise ConfigError(f"{name}={value!r}: it holds characters that cannot be seen; write it without them")


def _flags() -> AbstractContextManager[Any]:
    """The rule for weighted sources; tyro 0.8 takes none, and there a file alone can say them."""
    if not hasattr(tyro, "constructors"):
        return nullcontext()
    rules = tyro.constructors.ConstructorRegistry()
    rules.primitive_rule(_weights)
    return rules


def _weights(
    info: "tyro.constructors.PrimitiveTypeInfo",
) -> "tyro.constructors.PrimitiveConstructorSpec[Mapping[str, float]] | None":
    """Weighted sources as ``NAME[=WEIGHT] ...``: tyro would make a flag of each existing name."""
    if get_origin(info.type) is not Mapping:
        return None

    def parse_weights(words: list[str]) -> dict[str, float]:
        pairs = [word.rsplit("=", 1) if "=" in word else [word, "1"] for word in words]
        return {name: float(weight) for name, weight in pairs}

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME[=WEIGHT]",
        instance_from_str=parse_weights,
        is_instance=lambda value: isinstance(value, Mapping),
        str_from_instance=lambda weights: [f"{name}={weight:g}" for name, weight in weights.items()],
    )


def run_folder(options: Options) -> Path:
    """The folder of the run."""
    if options.run is not None:
        if not Path(options.run).name or Path(options.run).name.startswith("."):
            raise ConfigError(f"--run {options.run!r}: give a name that does not start with a dot")
        return named_folder(options.run)
    if options.resume:
        raise ConfigError("--resume: say which run with --run NAME")
    now = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{token_hex(2)}"  # two may start in one second
    return RUNS / f"{options.preset or options.size or 'run'}-{now}"


def sinks_of(options: Options) -> list[Sink]:
    """The requested trackers, each behind its queue, and the notifier."""
    said = config.told(options.config)
    in_file = (said.tracker,) if isinstance(said.tracker, str) else said.tracker
    found = [tracker(name) for name in dict.fromkeys(options.tracker or in_file)]
    if (where := options.notify or said.notify) is not None:
        found.append(Notifier(Notify(where, page=options.notify_page or said.notify_page)))
    return found


EXIT_CODES = {"Ctrl-C": 130, "SIGTERM": 143}


@contextmanager
def stop_signals() -> Iterator[Callable[[], str | None]]:
    """At Ctrl-C or SIGTERM, let the step end and a checkpoint be written; a second signal stops at once."""
    asked: list[str] = []

    def ask(number: int, _: object) -> None:
        asked.append("Ctrl-C" if number == signal.SIGINT else "SIGTERM")
        # not the former handler: a background job starts with SIGINT ignored, and could not be stopped
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        with suppress(OSError):  # a terminal that has gone must not cost the checkpoint
            tell("")
            tell("stopping after this step, with a checkpoint (once more to stop at once)")

    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, ask)
    try:
        yield lambda: asked[0] if asked else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


SHOWN = 20


def what_happened(folder: Path) -> list[str]:
    """Every skipped step and every notice as lines; of many, the last ones."""
    kinds = ("fault", "skip", "alarm", "halt", "remark", "stalled")
    run = open_run(folder)
    events = [event for event in run.events if event.kind in kinds]
    done = done_in(run)
    tax = told_of_tax(run)
    if done is None or not events:
        return ["no step was skipped", *tax, ""]
    lines = [remarkable(event) or event.kind for event in events]
    if len(lines) > SHOWN:
        lines = [f"... {len(lines) - SHOWN} earlier ones in {folder / EVENTS}", *lines[-SHOWN:]]
    skipped = f"skipped {done.told_of_skips}" if done.skips.count else "no step was skipped"
    return [skipped, *(f"  {line}" for line in lines), *tax, ""]


def halted(folder: Path) -> list[str]:
    """What led to a halt, and the checkpoint to go on from."""
    again = f"go on from the last checkpoint with: sealegs train --run {shlex.quote(str(folder))} --resume"
    if not any(folder.glob(f"{CHECKPOINTS}/*")):
        again = "there is no checkpoint yet: mend the cause and start again"
    return [*what_happened(folder), *contents(folder), "", again]


def summary(result: "Result", settings: Settings, happened: Sequence[str]) -> list[str]:
    """The end of a run: numbers, folder, and how to go on."""
    early = f", stopped by {result.stopped_by}" if result.stopped_by else ""
    lines = [f"{result.steps} of {settings.steps} steps{early}"]
    if result.eval_loss is not None:
        gained = result.unigram_entropy - result.eval_loss
        lines.append(
            f"evaluation loss {result.eval_loss:.3f}, "
            f"{gained:.3f} nats under the unigram entropy of {result.unigram_entropy:.3f}"
        )
    if result.missing:
        lines.append(f"{INCOMPLETE}: {result.missing}")
    lines += ["", *happened, *contents(result.folder)]
    if result.stopped_by:
        lines += ["", f"go on with: sealegs train --run {shlex.quote(str(result.folder))} --resume"]
    return lines
