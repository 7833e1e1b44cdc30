"""Reads Hugging Face's ``trainer_state.json``, or a folder of checkpoints that have it."""

import json
import re
from pathlib import Path

from sealegs.errors import SourceError
from sealegs.readers.place import Place
from sealegs.readers.table import Gathered, Table
from sealegs.record.reading import is_inside, is_number, parse_json

FORMAT = "trainer_state"
_FILE = "trainer_state.json"
_HISTORY = re.compile(r'\s*\{.*"log_history"\s*:', re.DOTALL)
_SETTINGS = ("max_steps", "num_train_epochs", "train_batch_size", "logging_steps", "eval_steps", "save_steps")


def recognises(place: Place) -> bool:
    """Whether it is the file, a folder that has it, or a folder of checkpoints that do."""
    if place.is_folder:
        return _newest(place.path) is not None
    return place.is_text and _HISTORY.match(place.head_text) is not None


def read(place: Place) -> Table:
    """Read the history of a run. Each checkpoint repeats it from the start, so the newest has all of it."""
    newest = _newest(place.path) if place.is_folder else None
    file = Place(place.source, newest, inside=place.path) if newest else place
    text = file.whole()
    try:
        state = parse_json(text)
        remarks = []
    except ValueError:
        state, remarks = _whole_rows(text), ["the file is torn: read up to there"]
    history = state.get("log_history") if isinstance(state, dict) else None
    gathered = Gathered()
    for row in history if isinstance(history, list) else []:
        if isinstance(row, dict):
            gathered.add(row)
    if not gathered.rows:
        raise SourceError(f"{place.source}: its log_history has no rows yet; set logging_steps, or give a later one")
    if newest:
        remarks.append(f"read from {newest.relative_to(place.path)}")
    known = {name: state[name] for name in _SETTINGS if isinstance(state.get(name), int | float)}
    return Table(FORMAT, gathered.columns(), tuple(remarks + file.remarks), known)


def _newest(folder: Path) -> Path | None:
    if is_inside(folder / _FILE, folder):
        return folder / _FILE
    found = (path for path in folder.glob(f"checkpoint-*/{_FILE}") if is_inside(path, folder))
    checkpoints = [path for path in found if is_number(path.parent.name[11:])]
    return max(checkpoints, key=lambda path: int(path.parent.name[11:]), default=None)


def _whole_rows(text: bytes) -> dict[str, object]:
    """The whole rows of a file that ends in the middle of one."""
    decoder = json.JSONDecoder()
    content = text.decode(errors="replace")
    start = re.search(r'"log_history"\s*:\s*\[', content)
    rows: list[object] = []
    at = start.end() if start else len(content)
    while (at := content.find("{", at)) >= 0:
        try:
            row, at = decoder.raw_decode(content, at)
        except (ValueError, RecursionError):
            break
        rows.append(row)
    return {"log_history": rows}
