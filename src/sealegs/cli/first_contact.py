"""A folder in, the commands that make sense in it out: what `sealegs` without arguments shows above its usage.

It goes by names, and opens nothing but small settings; it imports the standard library alone, so that it is quick.
"""

import os
import re
import shlex
import stat
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

MOST_COMMANDS = 5
MOST_ENTRIES = 1000
"""Entries of one folder that are looked at."""
MOST_FOLDERS = 200
"""Folders within one folder that are looked into."""
MOST_BYTES = 65_536
"""Of a file of settings: a larger one is not opened."""
_LOGS = (".log", ".out")
_HUGGING_FACE = {
    "training_args.json": re.compile(rb'"learning_rate"'),
    "adapter_config.json": re.compile(rb'"peft_type"'),
    "config.json": re.compile(rb'"model_type"'),
}
_SETTINGS = {
    ".toml": re.compile(rb"^\[(plan|cadence|data\.sources)\b", re.MULTILINE),
    ".yaml": re.compile(rb"^(base_model|model_name_or_path)\s*:", re.MULTILINE),
}
"""What files of settings have that `sealegs preflight` reads, and others of that name have not."""


class Suggestion(NamedTuple):
    """A command, and what it would say."""

    command: str
    what: str


class _Entry(NamedTuple):
    path: Path
    is_folder: bool
    size: int
    changed: float


def shown(suggestions: list[Suggestion]) -> str:
    """The suggestions as lines; empty if there are none."""
    if not suggestions:
        return ""
    width = max(len(each.command) for each in suggestions)
    return "\n".join(["in this folder:", *(f"  {each.command:<{width}}  {each.what}" for each in suggestions)])


def suggested(folder: Path) -> list[Suggestion]:
    """At most five commands for what lies there, the newest of each kind."""
    here = _entries(folder)
    sources = (
        _of_runs(folder),
        _of_trainers(folder, here),
        _of_trackers(folder, here),
        _of_files(here),
        _of_configs(here),
    )
    return list(islice(chain.from_iterable(sources), MOST_COMMANDS))


def _of_runs(folder: Path) -> Iterator[Suggestion]:
    """The newest run of experiments/, or the run that the folder is."""
    runs = [each.path for each in _newest(_entries(folder / "experiments")) if each.is_folder]
    run = next((path for path in runs[:MOST_FOLDERS] if (path / "manifest.json").is_file()), None)
    if run is None:
        if (folder / "manifest.json").is_file() and (folder / "metrics.jsonl").is_file():
            yield Suggestion("sealegs check .", "what went wrong in this run, and why")
            yield Suggestion("sealegs dashboard .", "draw it")
        return
    name = _word(run.name)
    yield Suggestion(f"sealegs check {name}", "what went wrong in the newest run of experiments/, and why")
    if any(each.is_folder and each.path.name.isdigit() for each in _entries(run / "incidents")):
        yield Suggestion(f"sealegs postmortem {name}", "a document about each of its incidents")
    else:
        yield Suggestion(f"sealegs dashboard {name}", "draw it")


def _of_trainers(folder: Path, here: list[_Entry]) -> Iterator[Suggestion]:
    """Hugging Face's Trainer: here, or in a folder of this one."""
    folders = [each for each in _newest(here) if each.is_folder][:MOST_FOLDERS]
    if (folder / "trainer_state.json").is_file() or any(_has_state(each) for each in folders):
        place: str | None = "."
    else:
        within = (each for each in folders if (each.path / "trainer_state.json").is_file())
        deeper = (each for each in folders if any(_has_state(one) for one in _newest(_entries(each.path))[:20]))
        found = next(chain(within, deeper), None)
        place = _word(found.path.name) if found else None
    if place is not None:
        yield Suggestion(f"sealegs check {place}", "is this fine-tune healthy? from trainer_state.json")


def _has_state(entry: _Entry) -> bool:
    return entry.path.name.startswith("checkpoint-") and (entry.path / "trainer_state.json").is_file()


def _of_trackers(folder: Path, here: list[_Entry]) -> Iterator[Suggestion]:
    """What TensorBoard, Lightning and W&B wrote, in the folders that they use."""
    runs = [each.path for each in _newest(_entries(folder / "runs"))[:20]]
    lightning = [each.path for each in _newest(_entries(folder / "lightning_logs"))[:20]]
    for place in (folder, *runs, *lightning):
        entries = here if place == folder else _entries(place)
        if any("tfevents" in each.path.name and each.size for each in entries):
            yield Suggestion(f"sealegs check {_inside(place, folder)}", "what TensorBoard's events tell")
            break
    csv = next((path / "metrics.csv" for path in (folder, *lightning) if (path / "metrics.csv").is_file()), None)
    if csv is not None:
        yield Suggestion(f"sealegs check {_inside(csv, folder)}", "is this curve normal?")
    offline = (each.path for each in _newest(_entries(folder / "wandb")) if each.path.name.startswith("offline-run-"))
    for path in islice(offline, 1):
        yield Suggestion(f"sealegs check {_inside(path, folder)}", "what the newest offline run of W&B tells")


def _of_files(here: list[_Entry]) -> Iterator[Suggestion]:
    """The newest log that is text."""
    logs = [each for each in _newest(here) if not each.is_folder and each.size and each.path.suffix in _LOGS]
    for each in logs[:1]:
        yield Suggestion(f"sealegs check {_word(each.path.name)}", "what went wrong in this log, and why")


def _of_configs(here: list[_Entry]) -> Iterator[Suggestion]:
    """Settings of a run that has yet to begin."""
    files = {each.path.name: each for each in _newest(here) if not each.is_folder}
    known = [name for name, mark in _HUGGING_FACE.items() if name in files and mark.search(_small(files[name]))]
    own = [name for name, each in files.items() if (mark := _mark(name)) and mark.search(_small(each))]
    for names in (known, own[:1]):
        if names:
            words = " ".join(_word(name) for name in names)
            yield Suggestion(f"sealegs preflight {words}", "what is wrong with these settings")


def _mark(name: str) -> re.Pattern[bytes] | None:
    return _SETTINGS.get(Path(name).suffix.replace(".yml", ".yaml"))


def _small(entry: _Entry) -> bytes:
    """What is in a small file; nothing of a large one, or of one that cannot be read."""
    try:
        return entry.path.read_bytes() if entry.size <= MOST_BYTES else b""
    except OSError:
        return b""


def _entries(folder: Path) -> list[_Entry]:
    """The files and folders of a folder; none where it cannot be listed."""
    found = []
    try:
        with os.scandir(folder) as listing:
            for each in islice(listing, MOST_ENTRIES):
                if not each.name.isprintable():  # no command that is shown could name it
                    continue
                try:
                    about = each.stat()
                except OSError:  # a link to nowhere
                    continue
                if stat.S_ISDIR(about.st_mode) or stat.S_ISREG(about.st_mode):
                    is_folder = stat.S_ISDIR(about.st_mode)
                    found.append(_Entry(Path(each.path), is_folder, about.st_size, about.st_mtime))
    except OSError:
        return []
    return found


def _newest(entries: list[_Entry]) -> list[_Entry]:
    return sorted(entries, key=lambda each: (-each.changed, each.path.name))


def _inside(path: Path, folder: Path) -> str:
    return _word(path.relative_to(folder).as_posix())


def _word(name: str) -> str:
    """A name as a word of a command line: quoted where the shell would not take it as it is."""
    return shlex.quote(name if not name.startswith("-") else f"./{name}")
