"""``sealegs gallery``: incidents that can be run again, with what came out of each."""

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from sealegs.cli.output import say, show, show_json, tell
from sealegs.cli.run_names import RUNS
from sealegs.errors import ConfigError, MissingExtra, SealegsError
from sealegs.gallery.definitions import Incident, incidents, named
from sealegs.record.files import whole_file, writing
from sealegs.report.commands.contracts import contract
from sealegs.report.commands.gallery import Gallery, IncidentShown, Outcome, listed, page

if TYPE_CHECKING:
    from sealegs.report.commands.replay import Replayed

DESCRIPTION = """\
Incidents of training that can be run again on a laptop: a healthy run, one with what went wrong, and the same under a
guard; then the verdict of its log, the replay, the post-mortem and the dashboard. Some are those that others have
written about, rebuilt small, and of some the cause is not found: their pages say so, and what to log.

ACTION is `list` (without any, too), `run NAME`, or `pages FOLDER`, which makes the pages of docs/gallery from what came
out last.

exit code: 0 done, and it came out as the page of the incident tells; 1 it came out otherwise; 2 it cannot be run.

examples:
  sealegs gallery list                               what there is, with the cause and what a guard does
  sealegs gallery list --json | jq '.incidents[].name'
  sealegs gallery run nan-gradient                   makes it in experiments/gallery/nan-gradient
  sealegs gallery run grpo-reward-hacking --out /tmp/hacked
  sealegs gallery pages docs/gallery --add /tmp/hacked      its page anew, from what came out there
"""
OUTCOME, VERDICT, DASHBOARD = "outcome.json", "verdict.json", "dashboard.html"
RESULTS = "outcomes"
"""The folder beside the pages with what came out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line can say."""

    action: Annotated[
        tyro.conf.Positional[Literal["list", "run", "pages"]], tyro.conf.arg(metavar="{list,run,pages}")
    ] = "list"
    """What to do."""
    what: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="NAME")] = None
    """Of `run`: the incident; of `pages`: the folder."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Of `run`: where everything is put, a new folder; without it experiments/gallery/NAME."""
    add: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FOLDER"), tyro.conf.UseAppendAction] = ()
    """Of `pages`: folders of `run` whose outcome takes the place of the former one; may be given several times."""
    json: bool = False
    """Print one JSON object, and nothing else."""


def main(arguments: Sequence[str]) -> int:
    """List the incidents, run one, or make the pages."""
    options = tyro.cli(Options, args=list(arguments), prog="sealegs gallery", description=DESCRIPTION)
    _refuse(options)
    if options.action == "run":
        return _run(options)
    if options.action == "pages":
        return _pages(options)
    shown = Gallery(incidents=[_shown(each) for each in incidents().values()])
    show_json(contract(shown)) if options.json else show(listed, shown)
    return 0


def _refuse(options: Options) -> None:
    """Refuse words that the action does not know, and what it lacks."""
    if options.action != "run" and options.out is not None:
        raise ConfigError(f"--out {options.out}: `{options.action}` has none; it is for `run NAME`")
    if options.action != "pages" and options.add:
        raise ConfigError(f"--add {options.add[0]}: `{options.action}` has none; it is for `pages FOLDER`")
    if options.action == "pages" and options.json:
        raise ConfigError("--json: `pages` prints nothing to read; leave it out")
    if options.action == "list" and options.what is not None:
        raise ConfigError(f"NAME={options.what!r}: `list` lists all; `sealegs gallery run {options.what}` runs one")
    if options.action == "run" and options.what is None:
        raise ConfigError("NAME: which incident? `sealegs gallery list` lists them")
    if options.action == "pages" and options.what is None:
        raise ConfigError("NAME: which folder? the pages of this repository lie in docs/gallery")


def _shown(each: Incident) -> IncidentShown:
    return IncidentShown(
        name=each.name,
        title=each.title,
        kind=each.kind,
        truth=each.truth,
        causes=list(each.cards),
        found=each.found,
        named=each.named or None,
        guard=each.guard,
        seconds=each.seconds,
        sources=list(each.sources),
    )


def _run(options: Options) -> int:
    assert options.what is not None
    incident = named(options.what)
    folder = options.out or RUNS / "gallery" / incident.name
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--out {folder}: there is something in it; name a new folder, or remove it")
    try:
        import sealegs.gallery.loops  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "tokenizers"):
            raise
        raise MissingExtra("sealegs gallery run", "PyTorch", "lab") from None
    with _new(folder):
        outcome = made(incident, folder)
    is_as_told = (outcome.found, outcome.cause or "", outcome.guard) == (incident.found, incident.named, incident.guard)
    if options.json:
        show_json(contract(outcome))
    else:
        show(page, outcome, incident.title, str(folder), is_as_told=is_as_told)
    return 0 if is_as_told else 1


@contextmanager
def _new(folder: Path) -> Iterator[None]:
    """A folder that is either made whole or, after Ctrl-C and errors, not there."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def made(incident: Incident, folder: Path) -> Outcome:
    """The runs of an incident, and everything about them, in a folder."""
    from sealegs.cli.check import check
    from sealegs.gallery.loops import loop_of
    from sealegs.gallery.outcome import outcome_of
    from sealegs.report.commands.check import contract as contract_of_check

    began, losses, practice = time.process_time(), [], incident.practice
    with loop_of(incident, folder) as loop:
        for number, (name, drill, is_guarded, what) in enumerate(
            (
                ("clean", incident.healthy_twin, True, "the healthy run"),
                ("unguarded", practice, False, "without a guard"),
                ("guarded", practice, True, "with a guard"),
            ),
            1,
        ):
            losses.append(loop.ending(folder / name, drill, guarded=is_guarded))
            tell(f"{number}/5  {time.process_time() - began:3.0f} s  {what}: ends at {losses[-1]:.4f}")
    unguarded = folder / "unguarded"
    replayed, because, document = _explained(incident, unguarded)
    tell(f"4/5  {time.process_time() - began:3.0f} s  the replay: {because}")
    diagnosis = check(str(unguarded), metrics={}, pattern=None, rules="calibrated")
    _put(folder / VERDICT, contract_of_check(diagnosis))
    _draw(folder)
    tell(f"5/5  {time.process_time() - began:3.0f} s  the verdict: {diagnosis.findings.verdict}")
    told = "" if document is None else _excerpt(document.read_text("utf-8"))
    outcome = outcome_of(
        incident,
        folder,
        losses,
        diagnosis,
        replayed,
        because,
        told,
        [str(file) for file in _to_look_at(folder, document)],
        time.process_time() - began,
    )
    _put(folder / OUTCOME, contract(outcome))
    return outcome


def _explained(incident: Incident, run: Path) -> "tuple[Replayed | None, str, Path | None]":
    """What the replay of the first incident says, and where its post-mortem is."""
    from sealegs.cli import postmortem
    from sealegs.cli.drill import explained
    from sealegs.cli.replay import builder
    from sealegs.gallery.loops import place_of
    from sealegs.record.schema import CAPSULE, INCIDENTS
    from sealegs.report.postmortem.build import open_incident
    from sealegs.report.postmortem.markdown import FILE

    build = place_of(incident.program) if incident.program else None
    folders = sorted((run / INCIDENTS).glob("[0-9]*"), key=lambda folder: int(folder.name))
    for folder in folders[:1]:
        if (folder / CAPSULE).is_dir():
            try:
                _, because, _ = explained(folder, builder(folder / CAPSULE, build)())
                return open_incident(folder)[1], because, folder / FILE
            except SealegsError as error:
                return None, f"none: {error}", _written(str(folder), folder / FILE)
    for case, place in postmortem.cases_of(str(run)):
        target = (place or run / INCIDENTS / f"seen-{case.incident.number}") / FILE
        postmortem.write(case, target)
        return None, "none: there is no capsule, since the guard that recorded it has no playbook", target
    return None, "none: no incident was seen", None


def _written(words: str, target: Path) -> Path:
    """The post-mortem of an incident that cannot be replayed."""
    from sealegs.cli import postmortem

    [(case, _)] = postmortem.cases_of(words)
    postmortem.write(case, target)
    return target


def _excerpt(document: str) -> str:
    """The symptoms and the root cause."""
    parts = document.split("\n## ")
    kept = [part for name in ("Symptoms", "Root cause") for part in parts if part.startswith(f"{name}\n")]
    return "\n\n".join(f"### {part.strip()}" for part in kept)


def _draw(folder: Path) -> None:
    """The dashboard of the three runs, where it can be drawn."""
    if find_spec("bokeh") is None:
        tell(f"no {DASHBOARD}: Bokeh is not installed: pip install 'sealegs[dashboard]'")
        return
    from sealegs.report.dashboard.page import html_of
    from sealegs.report.dashboard.values import page_of, see

    runs = ("clean", "unguarded", "guarded")
    target = folder / DASHBOARD
    with writing(target), whole_file(target) as file:
        drawn = page_of([see(str(folder / name), name, len(runs)) for name in runs])
        file.write(html_of(drawn, target).encode())


def _to_look_at(folder: Path, document: Path | None) -> Iterator[Path]:
    """What there is to look at, the first first."""
    if document is not None:
        yield document.with_suffix(".html").relative_to(folder)
    for name in (DASHBOARD, VERDICT):
        if (folder / name).exists():
            yield Path(name)


def _put(path: Path, value: object) -> None:
    with writing(path), whole_file(path) as file:
        file.write(json.dumps(value, indent=1).encode() + b"\n")


def _pages(options: Options) -> int:
    """Make the pages, after new outcomes have taken the place of former ones."""
    from sealegs.gallery.pages import Outcomes, write
    from sealegs.record.reading import read_bytes
    from sealegs.report.commands.contracts import read_back

    assert options.what is not None
    folder = Path(options.what)
    for place in options.add:
        source = place / OUTCOME
        try:
            outcome = read_back(read_bytes(source), Outcome)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--add {place}: {source} cannot be read ({error}); name a folder of `run`") from None
        (folder / RESULTS).mkdir(parents=True, exist_ok=True)
        _put(folder / RESULTS / f"{named(outcome.name).name}.json", contract(outcome))
    count = write(folder, Outcomes(folder / RESULTS))
    say(f"wrote {count} pages to {folder}")
    return 0
