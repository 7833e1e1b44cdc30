"""``sealegs coordcheck``: trains a model at several widths, and says whether its activations keep their size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from sealegs.cli.output import show, show_json, tell
from sealegs.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    from sealegs.lab.settings import Settings
    from sealegs.preflight_check.coordcheck import Trial
    from sealegs.replay.subject import Subject

DESCRIPTION = """\
Does a learning rate that was found on a small model hold for a large one? Trains the same model at three widths for a
few steps and fits the size of every layer's activations against the width. Under muP they are flat; in the standard
parametrisation they are not.

CONFIG is a TOML of `sealegs train`; model.mup_base_width in it is what makes it muP. With --build it is your own model:
build(width) gives a sealegs.Subject with batches=.

exit code: 0 flat, 1 not flat, 2 it cannot be run.

examples:
  sealegs coordcheck mine.toml                               at 1, 2 and 4 times a small width; draws coordcheck.svg
  sealegs coordcheck mine.toml --widths 64 128 256 -o a.svg
  sealegs coordcheck --build train.py:build --widths 128 256 512
"""
WIDEST = 512
"""Largest default width: a wider model of the lab is checked from there downwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line can say."""

    config: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="CONFIG.toml")] = None
    """Settings of the lab's model."""
    build: Annotated[str | None, tyro.conf.arg(metavar="FILE.py:FUNCTION")] = None
    """What builds your own model, optimizer, loss and batches at a width."""
    widths: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N")] = ()
    """Widths to compare, rising; of the lab's model multiples of twice its heads."""
    steps: int = 10
    """Updates before the activations are looked at."""
    seeds: int = 5
    """Models of each width; sizes are averaged, and how they differ says what of a slope is chance."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="FILE.svg")] = Path("coordcheck.svg")
    """The picture."""
    json: bool = False
    """Print one JSON object, and nothing else; draw nothing."""


def main(arguments: Sequence[str]) -> int:
    """Train, compare, and print the report."""
    options = tyro.cli(Options, args=list(arguments), prog="sealegs coordcheck", description=DESCRIPTION)
    if options.steps < 1:
        raise ConfigError(f"--steps {options.steps}: at least 1")
    if options.seeds < 2:
        raise ConfigError(f"--seeds {options.seeds}: at least 2, since how they differ says what of a slope is chance")
    if (options.config is None) == (options.build is None):
        raise ConfigError("CONFIG.toml: give settings of the lab, or --build FILE.py:FUNCTION, one of them")
    try:
        from sealegs.preflight_check.coordcheck import coordinate_check
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtra("sealegs coordcheck", "PyTorch", "lab") from None
    from sealegs.report.commands.contracts import contract
    from sealegs.report.commands.coordcheck import draw, page
    from sealegs.report.postmortem.plots import can_draw

    if not options.json and not can_draw():
        raise MissingExtra("sealegs coordcheck", "matplotlib", "report")
    build, widths = _own(options) if options.build is not None else _lab(options)
    found = coordinate_check(
        build, widths, steps=options.steps, seeds=options.seeds, source=str(options.build or options.config)
    )
    if options.json:
        show_json(contract(found))
    else:
        draw(found, options.output)
        show(page, found)
        tell(f"drawn in {options.output}")
    return int(not found.flat)


def _own(options: Options) -> tuple["Callable[[int, int], Trial]", Sequence[int]]:
    import torch

    from sealegs.replay.subject import load_builder

    if not options.widths:
        raise ConfigError("--widths: say which, with --build: --widths 128 256 512")
    function = load_builder(str(options.build))

    def build(width: int, seed: int) -> "Trial":
        torch.manual_seed(seed)
        return _trial(function(width), options)

    return build, options.widths


def _lab(options: Options) -> tuple["Callable[[int, int], Trial]", Sequence[int]]:
    from sealegs.lab import config
    from sealegs.lab.sources import open_data
    from sealegs.lab.subject import subject_of
    from sealegs.lab.train import resolved

    settings = resolved(config.starting_point(config=options.config))
    # the peak rate from the first step on
    flat = replace(settings, optimizer=replace(settings.optimizer, warmup_steps=0, final_lr_share=1.0))
    data = open_data(flat, say=tell)
    batches = [data.training.batch(number) for number in range(options.steps + 1)]
    portions = [{"tokens": batch.tokens, "targets": batch.targets} for batch in batches]

    def build(width: int, seed: int) -> "Trial":
        subject = subject_of(replace(_at_width(flat, width), seed=seed))
        return _trial(replace(subject, batches=portions), options)

    return build, options.widths or _widths(settings)


def _widths(settings: "Settings") -> list[int]:
    unit = 2 * settings.model.heads
    least = settings.model.width if settings.model.width <= WIDEST // 4 else WIDEST // 4
    first = max(unit, least // unit * unit)
    return [first, 2 * first, 4 * first]


def _at_width(settings: "Settings", width: int) -> "Settings":
    """The settings at another width, with as many heads and an MLP in proportion."""
    hidden = max(1, round(settings.model.hidden * width / settings.model.width))
    return replace(settings, model=replace(settings.model, width=width, hidden=hidden))


def _trial(subject: "Subject", options: Options) -> "Trial":
    from sealegs.preflight_check.coordcheck import Trial
    from sealegs.replay.subject import ReplayLoop

    if subject.batches is None:
        raise ConfigError(f"--build {options.build}: it has no batches to train on; give it batches=loader")
    given = list(islice(subject.batches, options.steps + 1))
    if len(given) <= options.steps:
        raise ConfigError(f"--build {options.build}: {len(given)} batches, and --steps {options.steps} needs one more")
    loop, batches = ReplayLoop(subject, subject.clip), iter(given)
    return Trial(subject.model, lambda: loop.step([next(batches)]))
