"""``sealegs postmortem``: writes a document about each incident of a run."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from sealegs.cli.output import say
from sealegs.cli.run_names import place_of
from sealegs.errors import ConfigError, SourceError
from sealegs.readers.read import read
from sealegs.record.files import whole_file, writing
from sealegs.record.reading import is_number, read_bytes
from sealegs.record.run import open_run
from sealegs.record.schema import CAPSULE, INCIDENT, INCIDENTS, MANIFEST
from sealegs.report.marked_text import block_of, markdown_of
from sealegs.report.postmortem import numbers, plots
from sealegs.report.postmortem.build import (
    MILD,
    Case,
    folders_of,
    logged_incidents,
    open_data,
    open_incident,
    open_verified,
    postmortem_of,
)
from sealegs.report.postmortem.markdown import FILE, markdown
from sealegs.report.postmortem.page import page
from sealegs.report.postmortem.stretch import rows_about
from sealegs.report.postmortem.values import Picture, Postmortem

DESCRIPTION = """\
Write the post-mortem of an incident: what was observed, the causes weighed and, after `sealegs replay`, tested, what
was done, what it cost, what to change, and the numbers that the change must bring. As Markdown, as one HTML file, with
pictures. The lesson goes into lessons.md beside the run.

RUN is a run folder, or its name in experiments/; the folder of an incident; or any log that `sealegs check` reads.
Without #N every incident is written about that left a folder in the run; in a log, every one that is seen in it.

exit code: 0 written, or there is no incident; 2 it cannot be read.

examples:
  sealegs postmortem night                writes experiments/night/incidents/<n>/postmortem.md and .html
  sealegs replay night#2; sealegs postmortem night#2        with a cause that was tested
  sealegs postmortem train.log#1 -o spike.md                of any log, thinner: spike.md and spike.html
"""
LESSONS = "lessons.md"
LESSONS_TITLE = "# Lessons\n\nA line an incident, by `sealegs postmortem`.\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line can say."""

    incident: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN[#N]")]
    """A run or a log, and which of its incidents; all of them, if none is named."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"], metavar="FILE")] = None
    """The Markdown file; without it postmortem.md in the folder of the incident."""


def main(arguments: Sequence[str]) -> int:
    """Read the run, diagnose its incidents, and write the documents."""
    options = tyro.cli(Options, args=list(arguments), prog="sealegs postmortem", description=DESCRIPTION)
    cases = list(cases_of(options.incident))
    if not cases:
        say(f"{options.incident}: no incident is in it, so there is nothing to write")
    for case, folder in cases:
        target = _target(options.output, case, folder, is_one=len(cases) == 1)
        document, written = write(case, target)
        if document.lesson:
            is_ours = folder is not None or (case.run.folder / MANIFEST).is_file()
            written.append((case.run.folder if is_ours else target).parent / LESSONS)
            _learn(document, written[-1])
        for path in written:
            say(str(path))
    return 0


def cases_of(words: str) -> Iterator[tuple[Case, Path | None]]:
    """Each requested incident, and its folder if it has one."""
    name, mark, digits = words.rpartition("#")
    if not mark or Path(words).exists():
        name, digits = words, ""
    elif not is_number(digits):
        raise ConfigError(f"{words}: after the # comes the number of an incident: {name}#1")
    place = Path(place_of(name))
    if (place / INCIDENT).is_file():  # an incident folder without its run
        incident, replayed, has_capsule = open_incident(place)
        run = replace(open_run(place / CAPSULE), folder=place)
        case = Case(source=name, run=run, incident=incident, replayed=replayed, has_capsule=has_capsule)
        yield replace(case, verified=open_verified(place), data=open_data(place)), place
        return
    run = open_run(place) if (place / MANIFEST).is_file() else read(place_of(name)).run
    folders, seen = folders_of(run), logged_incidents(run)
    wanted = [int(digits)] if digits else list(folders)
    if folders and all(number in folders for number in wanted):
        known = {number: open_incident(folder) for number, folder in folders.items()}
        incidents = {number: incident for number, (incident, _, _) in known.items()}
    else:
        incidents = seen
        known = {number: open_incident(folders[number]) for number in wanted if number in folders}
        wanted = wanted or [number for number, each in incidents.items() if each.kind not in MILD]
    for number in wanted:
        if number not in incidents:
            there = f"there are {', '.join(map(str, incidents))}" if incidents else "there is none"
            raise SourceError(f"{words}: no such incident; {there}")
        incident, replayed, has_capsule = known.get(number, (incidents[number], None, False))
        others = tuple(other for other in seen.values() if other.number != number)
        case = Case(source=name, run=run, incident=incident, others=others, replayed=replayed, has_capsule=has_capsule)
        folder = folders.get(number)
        yield replace(case, verified=open_verified(folder), data=open_data(folder)), folder


def write(case: Case, target: Path) -> tuple[Postmortem, list[Path]]:
    """Write the document, its pictures and its page; gives the document and the files."""
    document = postmortem_of(case)
    folder = target.parent
    drawn, without = _drawn(case, target)
    document = replace(document, evidence=replace(document.evidence, pictures=drawn, without_pictures=without))
    written = [target]
    _put(target, markdown(document))
    written.append(target.with_suffix(".html"))
    _put(written[-1], page(document))
    return document, [*written, *(folder / picture.file for picture in drawn)]


def _drawn(case: Case, target: Path) -> tuple[tuple[Picture, ...], str]:
    """The pictures, or the reason why there are none."""
    if not plots.can_draw():
        return (), "none: matplotlib is not installed: `pip install 'sealegs[report]'`"
    met = numbers.met(asdict(case.incident), rows_about(case.run, case.incident))
    steps = [event.step for event in case.run.events if event.kind == "intervention"]
    into = plots.FOLDER if target.name == FILE else f"{target.stem}-{plots.FOLDER}"
    drawn = plots.draw(met, steps, case.unchanged_replay, target.parent, into)
    return drawn, "" if drawn else "none: nothing that could be drawn was logged"


def _target(output: Path | None, case: Case, folder: Path | None, *, is_one: bool) -> Path:
    """The Markdown file."""
    if output is None:
        is_run = (case.run.folder / MANIFEST).is_file()
        if folder is None and not is_run:
            raise ConfigError(f"{case.source}: not a run folder, so say where to write: -o FILE.md")
        # a folder with that number would pass for one of the guard's, and hide an incident
        return (folder or case.run.folder / INCIDENTS / f"seen-{case.incident.number}") / FILE
    if output.suffix.lower() != ".md":
        raise ConfigError(f"-o {output}: the name of a document ends in .md; its page is written beside it")
    if output.is_dir() or not output.parent.is_dir():
        reason = "is a folder; name a file in it" if output.is_dir() else "is in no folder that there is"
        raise ConfigError(f"-o {output}: {reason}")
    return output if is_one else output.with_stem(f"{output.stem}-{case.incident.number}")


def _learn(document: Postmortem, path: Path) -> None:
    """Write the lesson as one line into the file of lessons, in place of the incident's former one."""
    head = f"- {block_of(f'{document.run_id}#{document.incident}')}: "
    lines = _lessons(path)
    kept = [line for line in lines if not line.startswith(head)]
    place = next((place for place, line in enumerate(lines) if line.startswith(head)), len(kept))
    lines = [*kept[:place], f"{head}{markdown_of(document.lesson)}", *kept[place:]]
    _put(path, "\n".join(lines) + "\n")


def _lessons(path: Path) -> list[str]:
    """The lines of the file of lessons, which goes on as it is, whatever its letters are."""
    try:
        content = read_bytes(path, path.parent)  # nothing is copied from elsewhere
    except FileNotFoundError:
        content = LESSONS_TITLE.encode()
    return content.decode(errors="surrogateescape").removesuffix("\n").split("\n")


def _put(path: Path, text: str) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write(text.encode(errors="surrogateescape"))
