"""``sealegs dashboard``: draws runs as one HTML file, or as a page that follows them."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import tyro

from sealegs.cli.output import say, tell
from sealegs.cli.run_names import place_of
from sealegs.errors import ConfigError, MissingExtra
from sealegs.record.files import whole_file, writing
from sealegs.record.schema import DASHBOARD, MANIFEST

DESCRIPTION = """\
Draw a run: loss, learning rate, gradient norm, activations, weights, moments, token losses, throughput, loss scale and
batches, with incidents, skips, interventions and checkpoints marked. One HTML file that opens anywhere, offline.

RUN is a run folder, or its name in experiments/; or any log that `sealegs check` reads. Several are drawn in one page.

examples:
  sealegs dashboard night                 writes experiments/night/dashboard.html
  sealegs dashboard good bad -o both.html two runs in one page
  sealegs dashboard night --serve         prints a link to a page that follows a run; Ctrl-C ends it
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line can say."""

    runs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN [RUN ...]")] = ()
    """The runs, or logs."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"], metavar="FILE")] = None
    """The page; without it dashboard.html in the run's folder, of several runs or of a foreign log in this one."""
    serve: bool = False
    """Show the page on this machine, growing as rows arrive, to whoever has the link that is printed."""


def main(arguments: Sequence[str]) -> int:
    """Read the runs, and write the page or serve it."""
    options = tyro.cli(Options, args=list(arguments), prog="sealegs dashboard", description=DESCRIPTION)
    named = _named([place_of(run) for run in options.runs])
    target = _target(options, [source for source, _ in named])
    if find_spec("bokeh") is None:
        raise MissingExtra("a page", "Bokeh", "dashboard")
    if target is None:
        return _serve(named)
    from sealegs.report.dashboard.page import html_of
    from sealegs.report.dashboard.values import page_of, see

    page = html_of(page_of([see(source, name, len(named)) for source, name in named]), target).encode()
    with writing(target), whole_file(target) as file:
        file.write(page)
    say(f"{target}  {len(page) / 1e6:.1f} MB")
    return 0


def _serve(named: Sequence[tuple[str, str]]) -> int:
    from sealegs.report.dashboard.live import serve

    try:
        serve(named, say, lambda text: tell(f"sealegs dashboard: {text}"))
    except KeyboardInterrupt:  # while it was still reading
        say("")
    return 0


def _named(sources: Sequence[str]) -> list[tuple[str, str]]:
    """Each source with its name on the page: a short one if that tells them apart."""
    if not sources:
        raise ConfigError("which run? give its name in experiments/, its folder, or a log")
    for source in sources:
        if sources.count(source) > 1:
            raise ConfigError(f"{source}: given twice; a page has each run once")
    short = [Path(source).name or source for source in sources]
    return [(source, name if short.count(name) == 1 else source) for source, name in zip(sources, short, strict=True)]


def _target(options: Options, sources: Sequence[str]) -> Path | None:
    """The file to write; None to serve."""
    if options.serve:
        if options.output is not None:
            raise ConfigError(f"--serve writes no file: leave out -o {options.output}, or --serve")
        return None
    if options.output is None:
        is_one_run = len(sources) == 1 and (Path(sources[0]) / MANIFEST).is_file()
        return Path(sources[0]) / DASHBOARD if is_one_run else Path(DASHBOARD)
    if options.output.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"-o {options.output}: the name of a page ends in .html")
    if options.output.is_dir() or not options.output.parent.is_dir():
        reason = "is a folder; name a file in it" if options.output.is_dir() else "is in no folder that there is"
        raise ConfigError(f"-o {options.output}: {reason}")
    return options.output
