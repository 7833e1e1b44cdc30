"""Reads Trackio's store, one SQLite file per project. ``FILE.db#RUN`` names one of its runs."""

from typing import Any

from sealegs.errors import SourceError
from sealegs.readers.names import listed
from sealegs.readers.place import Place
from sealegs.readers.sqlite import opened, tables
from sealegs.readers.table import Gathered, Table
from sealegs.record.reading import parse_json

FORMAT = "trackio"


def recognises(place: Place) -> bool:
    """Whether it is a SQLite file with Trackio's tables."""
    return {"metrics", "system_metrics", "configs"} <= tables(place)


def read(place: Place) -> Table:
    """Read the rows of one run, in the order they came."""
    gathered = Gathered()
    with opened(place) as store:
        runs = store.execute("SELECT DISTINCT run_name FROM metrics WHERE typeof(run_name) = 'text' ORDER BY 1")
        run = _chosen(place, [name for (name,) in runs])
        rows = store.execute("SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY id", (run,))
        for step, metrics in rows:
            gathered.add({**_object(metrics), "step": step})
        configs = store.execute("SELECT config FROM configs WHERE run_name = ?", (run,)).fetchone()
    known = {name: value for name, value in _object(configs[0] if configs else "").items() if name[:1] != "_"}
    return Table(FORMAT, gathered.columns(), known=known)


def _chosen(place: Place, runs: list[str]) -> str:
    if not runs:
        raise SourceError(f"{place.source}: a Trackio project without a row; give one that has logged something")
    if not place.choice and len(runs) == 1:
        return runs[0]
    if place.choice not in runs:
        wrong = f"no run {place.choice!r} among" if place.choice else f"{len(runs)} runs:"
        raise SourceError(f"{place.source}: {wrong} {listed(runs)}; name one: {place.path}#{listed(runs[:1])}")
    return place.choice


def _object(text: Any) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except (TypeError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
