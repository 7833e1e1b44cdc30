"""Reads an MLflow run: ``mlflow:RUN_ID`` through the client, or a bare ``mlruns`` folder."""

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from sealegs.errors import MissingExtra, SourceError
from sealegs.readers.names import listed
from sealegs.readers.place import Place
from sealegs.readers.sqlite import tables
from sealegs.readers.table import SeriesCollector, Table, number
from sealegs.record.reading import is_inside, read_bytes

FORMAT = "mlflow"
SCHEME = "mlflow:"
_META = "meta.yaml"
_LINE = re.compile(r"(?P<time>\d{1,18})\s+(?P<value>\S+)(?:\s+(?P<step>-?\d{1,18}))?")
_LARGEST = 1.797e308  # a SQLite store writes infinity as this

Point = tuple[int, int, str, float]
"""Time, step, name and value. Points sort in the order they were written."""


def recognises(place: Place) -> bool:
    """Whether it is ``mlflow:`` and a run id, a run of a file store, a folder of runs, or a store in one file."""
    if place.source.startswith(SCHEME):
        return True
    return bool(_runs(place.path)) if place.is_folder else "latest_metrics" in tables(place)


def read(place: Place) -> Table:
    """Read every metric as one run."""
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
    params = {
        file.name: _text(file, runs[0])[:500]
        for file in sorted((runs[0] / "params").glob("*"))
        if is_inside(file, runs[0]) and file.is_file()
    }
    return _table(place.source, _from_files(runs[0]), params)


def _runs(folder: Path) -> list[Path]:
    """The runs of a file store: the folder itself, or those in it or in its experiments."""
    for places in ([folder], folder.glob("*"), folder.glob("*/*")):
        found = [run for run in sorted(places) if (run / _META).is_file() and (run / "metrics").is_dir()]
        if found:
            return found
    return []


def _from_files(run: Path) -> Iterator[Point]:
    """Each file is a metric, each line ``time value step``."""
    files = (path for path in (run / "metrics").rglob("*") if is_inside(path, run) and path.is_file())
    for file in sorted(files):
        name = file.relative_to(run / "metrics").as_posix()
        for line in _text(file, run).splitlines():
            found = _LINE.fullmatch(line.strip())
            value = number(found["value"]) if found else None
            if found and value is not None:
                yield int(found["time"]), int(found["step"] or 0), name, value


def _text(file: Path, run: Path) -> str:
    return read_bytes(file, run).decode(errors="replace")


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
    series = SeriesCollector()
    for _, step, name, value in sorted(points):
        series.add(name, step, math.copysign(math.inf, value) if abs(value) > _LARGEST else value)
    if not len(series):
        raise SourceError(f"{source}: an MLflow run without a metric; give one that has logged something")
    return Table(FORMAT, series.columns(), known=params)
