"""Trackio's store in, a SQLite file a project, a Table out. ``FILE.db#RUN`` names one of its runs."""

import json
import sqlite3
from typing import Any

from sealegs.errors import SourceError
from sealegs.readers.mlflow import SQLITE, tables
from sealegs.readers.names import listed
from sealegs.readers.place import Place
from sealegs.readers.table import Gathered, Table

FORMAT = "trackio"


def recognises(place: Place) -> bool:
    """A SQLite file with the tables that Trackio makes."""
    return place.head.startswith(SQLITE) and {"metrics", "system_metrics", "configs"} <= tables(place.path)


def read(place: Place) -> Table:
    """The rows of one run, in the order they came."""
    try:
        connection = sqlite3.connect(f"{place.path.absolute().as_uri()}?mode=ro", uri=True)
        try:
            found = connection.execute(
                "SELECT DISTINCT run_name FROM metrics WHERE typeof(run_name) = 'text' ORDER BY 1"
            )
            runs = [name for (name,) in found]
            run = _chosen(place, runs)
            gathered = Gathered()
            for step, metrics in connection.execute(
                "SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY id", (run,)
            ):
                gathered.add({**_object(metrics), "step": step})
            configs = connection.execute("SELECT config FROM configs WHERE run_name = ?", (run,)).fetchone()
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise SourceError(f"{place.source}: cannot be read as a Trackio store ({error})") from error
    known = {name: value for name, value in _object(configs[0] if configs else "").items() if name[:1] != "_"}
    return Table(FORMAT, gathered.columns(), known=known)


def _chosen(place: Place, runs: list[str]) -> str:
    if not runs:
        raise SourceError(f"{place.source}: a Trackio project without a row; give one that has logged something")
    if not place.choice and len(runs) == 1:
        return runs[0]
    if place.choice not in runs:
        wrong = f"no run {place.choice!r} among" if place.choice else f"{len(runs)} runs:"
        raise SourceError(f"{place.source}: {wrong} {listed(runs)}; name one: {place.path}#{runs[0]}")
    return place.choice


def _object(text: Any) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
