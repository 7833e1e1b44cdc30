"""An MLflow run in, by ``mlflow:RUN_ID`` through the client or from a bare ``mlruns`` folder, a Table out."""

import math
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path

from sealegs.errors import MissingExtra, SourceError
from sealegs.readers.names import listed
from sealegs.readers.place import Place
from sealegs.readers.table import Series, Table, number

FORMAT = "mlflow"
SCHEME = "mlflow:"
SQLITE = b"SQLite format 3\0"
_META = "meta.yaml"
_LARGEST = 1.797e308  # what a SQLite store makes of infinity

Point = tuple[int, int, str, float]
"""Time, step, name and value: in this order they sort as they were written."""


def recognises(place: Place) -> bool:
    """A run id with ``mlflow:`` before it, a run of a file store, a folder of those, or a store in one file."""
    if place.source.startswith(SCHEME):
        return True
    if place.is_folder:
        return bool(_runs(place.path))
    return place.head.startswith(SQLITE) and "latest_metrics" in tables(place.path)


def read(place: Place) -> Table:
    """Every metric, as one run."""
    if place.source.startswith(SCHEME):
        return _from_client(place.source.removeprefix(SCHEME))
    if not place.is_folder:
        uri = f"sqlite:///{place.path.absolute()}"
        raise SourceError(
            f"{place.source}: an MLflow store; give a run of it: MLFLOW_TRACKING_URI={uri} and mlflow:RUN_ID"
        )
    runs = _runs(place.path)
    if len(runs) > 1:
        inside = listed([str(run.relative_to(place.path)) for run in runs])
        raise SourceError(f"{place.source}: {len(runs)} MLflow runs in it ({inside}); give the folder of one")
    params = {file.name: file.read_text(errors="replace")[:500] for file in sorted((runs[0] / "params").glob("*"))}
    return _table(place.source, _from_files(runs[0]), params)


def tables(path: Path) -> set[str]:
    """The names of the tables in a SQLite file; none where it cannot be read."""
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    except sqlite3.Error:
        return set()
    try:
        return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.Error:
        return set()
    finally:
        connection.close()


def _runs(folder: Path) -> list[Path]:
    """The runs of a file store: the folder itself, or those in it or in its experiments."""
    for places in ([folder], folder.glob("*"), folder.glob("*/*")):
        found = [run for run in sorted(places) if (run / _META).is_file() and (run / "metrics").is_dir()]
        if found:
            return found
    return []


def _from_files(run: Path) -> Iterator[Point]:
    """Each file is a metric, each line ``time value step``."""
    for file in sorted(path for path in (run / "metrics").rglob("*") if path.is_file()):
        name = file.relative_to(run / "metrics").as_posix()
        for line in file.read_text(errors="replace").splitlines():
            cells = line.split()
            value = number(cells[1]) if len(cells) in (2, 3) else None
            step = cells[2] if len(cells) == 3 else "0"
            if value is not None and cells[0].isdecimal() and step.removeprefix("-").isdecimal():
                yield int(cells[0]), int(step), name, value


def _from_client(run_id: str) -> Table:
    try:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
    except ImportError as error:
        raise MissingExtra(f"reading {SCHEME}{run_id}", "mlflow", "mlflow") from error
    try:
        client = MlflowClient()
        run = client.get_run(run_id)
        points = [
            (point.timestamp, point.step, name, float(point.value))
            for name in run.data.metrics
            for point in client.get_metric_history(run_id, name)
        ]
    except MlflowException as error:
        reason = str(error).splitlines()[0][:200]
        raise SourceError(f"{SCHEME}{run_id}: {reason}; check the id and MLFLOW_TRACKING_URI") from error
    return _table(f"{SCHEME}{run_id}", points, dict(run.data.params))


def _table(source: str, points: Iterable[Point], params: dict[str, str]) -> Table:
    series = Series()
    for _, step, name, value in sorted(points):
        if abs(step) < 1 << 62:
            series.add(name, step, math.copysign(math.inf, value) if abs(value) > _LARGEST else value)
    if not len(series):
        raise SourceError(f"{source}: an MLflow run without a metric; give one that has logged something")
    return Table(FORMAT, series.columns(), known=params)
