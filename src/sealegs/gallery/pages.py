"""The pages of docs/gallery, as Markdown and a curve: from what an incident is, and what came out of it last."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sealegs.curve_picture import Band, Panel, picture
from sealegs.diagnosis.cause_cards import causes
from sealegs.diagnosis.symptoms import symptoms
from sealegs.errors import SourceError
from sealegs.gallery.definitions import Incident, incidents
from sealegs.printable import counted
from sealegs.record.reading import read_bytes
from sealegs.record.schema import unspell
from sealegs.report.commands.contracts import read_back
from sealegs.report.commands.gallery import SAYS, Found, Outcome, Rerun, RunShown
from sealegs.report.marked_text import cell_of, markdown_of

MADE = (
    "<!-- Made by `sealegs gallery pages docs/gallery` from src/sealegs/gallery/incidents.toml and from the "
    "outcomes beside it: change those. An outcome is renewed by `sealegs gallery run NAME --out FOLDER`, "
    "and `--add FOLDER` to `pages`. -->"
)
STYLE = "background: #fff; --line: #0060a8; --mark: #b00020; --edge: #d0d7de; font: 11px system-ui, sans-serif"
FOUND: dict[Found, str] = {
    "found": "The cause is found: {}.",
    "not found": "The cause is **not found**. What came out stands here as it is.",
    "wrong": "**Another cause is named**: {}. What came out stands here as it is.",
    "nothing wrong": "Nothing was wrong, and no cause was named.",
}


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What came out last of each incident, in files of a folder."""

    folder: Path

    def of(self, incident: Incident) -> Outcome:
        """What came out of an incident."""
        path = self.folder / f"{incident.name}.json"
        try:
            return read_back(read_bytes(path), Outcome)
        except (OSError, ValueError) as error:
            raise SourceError(
                f"{path}: {error}; make it: sealegs gallery run {incident.name} --out FOLDER, and "
                "sealegs gallery pages docs/gallery --add FOLDER"
            ) from None


def write(folder: Path, outcomes: Outcomes) -> int:
    """Write all pages and their index, and return how many incidents there are."""
    made = files(outcomes)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in made.items():
        (folder / name).write_text(text, encoding="utf-8")
    return len(incidents())


def files(outcomes: Outcomes) -> Mapping[str, str]:
    """What is to lie in the folder of the pages, by the names of the files."""
    made = {"README.md": f"{MADE}\n{index(outcomes)}\n"}
    for each in incidents().values():
        outcome = outcomes.of(each)
        made[f"{each.name}.md"] = f"{MADE}\n{page(each, outcome)}\n"
        made[f"{each.name}.svg"] = f"{curve(each, outcome)}\n"
    return made


def index(outcomes: Outcomes) -> str:
    """The list of all pages."""
    every = list(incidents().values())
    found = sum(each.found == "found" for each in every)
    unknown = [f"[{each.name}]({each.name}.md)" for each in every if each.found == "not found"]
    wrong = [f"[{each.name}]({each.name}.md)" for each in every if each.found == "wrong"]
    lines = [
        "# Incidents that can be run again",
        "",
        f"{len(every)} incidents of training: drills, and incidents that others have written about, rebuilt small.",
        "Each is made again on a laptop in under two minutes, without a GPU:",
        "",
        "```bash",
        "sealegs gallery list",
        "sealegs gallery run nan-gradient",
        "```",
        "",
        "That trains three runs: a healthy one, one with what went wrong, and the same under a guard with the standard",
        "playbook (of GRPO and GAN under one that skips and tells). Then it judges the log, replays the incident with",
        "one thing changed at a time, and writes the post-mortem and a dashboard of the three. Nothing is tuned until",
        "it fits: a page shows what came out.",
        "",
        f"The cause is found in {found} of {len(every)}.",
        *([f"It is not found in {_and(unknown)}."] if unknown else []),
        *([f"Another cause is named in {_and(wrong)}."] if wrong else []),
        "",
        "| incident | kind of run | what is wrong | cause | the guard |",
        "|---|---|---|---|---|",
        *(
            f"| [{each.title}]({each.name}.md) | {each.kind} | {cell_of(each.truth)} | {_said(each)} | {each.guard} |"
            for each in every
        ),
        "",
        "Pages by what one sees: [symptoms](../symptoms/README.md). To break a run of your own: [drills](../drill.md).",
    ]
    return "\n".join(lines)


def page(incident: Incident, outcome: Outcome) -> str:
    """The page of an incident."""
    named = "" if outcome.cause is None else outcome.cause.replace("-", " ")
    lines = [
        f"# {incident.title}",
        "",
        f"{incident.kind[:1].upper()}{incident.kind[1:]}. {incident.truth} {FOUND[outcome.found].format(named)}",
        "",
        "```bash",
        f"sealegs gallery run {incident.name}",
        "```",
        f"About {outcome.seconds} seconds of one core; everything then lies in `experiments/gallery/{incident.name}`.",
        "",
        "## What happened to others",
        incident.happened,
        "",
        *(f"- {source}" for source in incident.sources),
        "",
        "## What is rebuilt",
        incident.rebuilt,
        "",
        f"What differs: {incident.differs}",
        *_how(incident),
        "",
        "## What came out",
        f"![Loss without a guard and with one]({incident.name}.svg)",
        "",
        "| run | ends at |",
        "|---|---:|",
        f"| healthy | {_number(outcome.clean_loss)} |",
        f"| without a guard | {_number(outcome.unguarded.loss)} |",
        f"| with a guard | {_number(outcome.guarded.loss)} |",
        "",
        f"**Verdict** of `sealegs check` on the log of the run without a guard: {outcome.verdict}.",
        markdown_of(_sentence(outcome.because)),
        "",
        *_weighed(outcome),
        *_apart(incident, outcome),
        f"**First action**: {markdown_of(_sentence(outcome.first_action))}",
        "",
        *_log_next(outcome),
        "## The replay",
        *_replay(outcome),
        "",
        "## The guard",
        *_guard(incident, outcome),
        "",
        "## From the post-mortem",
        outcome.postmortem or "There is none: no incident was seen that one could be written about.",
        "",
        "## Where to read on",
        *(
            [f"- The symptom: [{symptoms()[incident.symptom].title}](../symptoms/{incident.symptom}.md)"]
            if incident.symptom
            else []
        ),
        *_card(incident, outcome),
        "- [All incidents](README.md) · [how a replay tests a cause](../replay.md) · [drills](../drill.md)",
        "",
        f"Seed {outcome.seed}; {', '.join(f'{name} {version}' for name, version in outcome.versions.items())}.",
    ]
    return "\n".join(lines)


def curve(incident: Incident, outcome: Outcome) -> str:
    """The losses of the run without a guard and of the one with it, as a file of its own."""
    runs = (("without a guard: loss", outcome.unguarded, 150), ("with a guard: loss", outcome.guarded, 110))
    panels = [_panel(title, run, height) for title, run, height in runs]
    last = max(int(panel.steps[-1]) for panel in panels)
    bands = [Band(f"step {fault.step}: {fault}", fault.step, None) for fault in incident.practice.struck(incident.at)]
    drawn = picture(panels, bands[:1], (0, last), f"Loss of {incident.name}, without a guard and with one", STYLE)
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)


def _panel(title: str, run: RunShown, height: int) -> Panel:
    values = np.array([float(unspell(value)) for value in run.curve], np.float64)
    return Panel(title, np.array(run.steps, np.int64), values, height)


def _how(incident: Incident) -> Iterator[str]:
    """The fault and the settings, as `sealegs train` takes them."""
    practice = incident.practice
    given = [*(str(fault) for fault in practice.struck(incident.at)), *practice.settings]
    if incident.program:
        given = [f"programs/{incident.program}", f"healthy: {incident.healthy}"]
    if given:
        yield ""
        yield f"In the words of the lab: {', '.join(f'`{each}`' for each in given)}; {incident.last} steps."


def _card(incident: Incident, outcome: Outcome) -> Iterator[str]:
    """The card of the cause: of those that are right the one that was named, if one was."""
    for name in [outcome.cause] if outcome.cause in incident.cards else incident.cards[:1]:
        card = causes()[name]
        yield f"- The cause: {card.title}. {card.mechanism}"


def _weighed(outcome: Outcome) -> Iterator[str]:
    if not outcome.weighed:
        return
    yield "| cause | grade | for it |"
    yield "|---|---|---|"
    for each in outcome.weighed:
        yield f"| {each.cause.replace('-', ' ')} | {each.grade} | {cell_of('; '.join(each.evidence)) or 'nothing'} |"
    yield ""


def _apart(incident: Incident, outcome: Outcome) -> Iterator[str]:
    """Where the log names a cause that is right, and the replay another one."""
    right = next(
        (each for each in outcome.weighed if each.cause in incident.cards and each.grade == "established"), None
    )
    if outcome.found == "wrong" and outcome.tested and outcome.cause is not None and right is not None:
        yield (
            f"The log by itself names {right.cause.replace('-', ' ')}, which is right. The replay names "
            f"{outcome.cause.replace('-', ' ')}, which is wrong, and the post-mortem goes by the replay."
        )
        yield ""


def _log_next(outcome: Outcome) -> Iterator[str]:
    if outcome.log_next_time and outcome.found != "found":
        yield f"**Log next time**: {markdown_of('; '.join(outcome.log_next_time))}."
        yield ""


def _replay(outcome: Outcome) -> Iterator[str]:
    if outcome.reruns:
        yield "| rerun | what it does | left of the incident |"
        yield "|---|---|---:|"
        for each in outcome.reruns:
            kind = " (placebo)" * (each.kind == "placebo")
            yield f"| {cell_of(each.name)}{kind} | {cell_of(each.does)} | {_left(each)} |"
        yield ""
    yield markdown_of(_sentence(outcome.replay))


def _left(rerun: Rerun) -> str:
    value = float(unspell(rerun.left))
    return f"{value:.0%}" if math.isfinite(value) else "not finite"


def _guard(incident: Incident, outcome: Outcome) -> Iterator[str]:
    after = None if outcome.seen is None or not incident.practice.faults else outcome.seen - incident.at
    since = "" if after is None else f", {counted(after, 'step')} after the fault" if after else ", that of the fault"
    yield (
        f"It sees something first at step {outcome.seen}{since}."
        if outcome.seen is not None
        else "It sees nothing, and does nothing."
    )
    yield from (f"- {markdown_of(each)}" for each in outcome.done)


def _said(each: Incident) -> str:
    """Whether the cause is found, and which one is named."""
    said = SAYS[each.found].partition(":")[0]
    return f"{said}: {each.named.replace('-', ' ')}" if each.named else said


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _number(value: float | str) -> str:
    number = float(unspell(value))
    return f"{number:.4g}" if math.isfinite(number) else "lost"


def _and(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
