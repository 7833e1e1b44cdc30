"""Sends rows and events to an MLflow run: on the server that ``MLFLOW_TRACKING_URI`` names, or in a SQLite file."""

import fcntl
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sealegs.errors import MissingExtra, SinkFailed
from sealegs.record.manifest import dotted
from sealegs.record.schema import spell
from sealegs.sinks import tracker_values
from sealegs.vocabulary import Event, Row

EXPERIMENT = "sealegs"

_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",  # MLflow's own 120 s and 7 retries take many minutes to notice a dead server
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # stdout is for results, and that URL has the password in it
    "MLFLOW_DISABLE_TELEMETRY": "true",  # a training run reports to nobody its user did not name
}
"""Our settings of MLflow where the user has made none. It reads these from the environment only."""

_STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
_LONGEST_NAME = 230  # MLflow takes 250, of which `nonfinite.<signal>.count` needs some
_LONGEST_PARAM = 6000  # MLflow's limit
_LONGEST_EVENT = 500
_NUMBERED_EVENTS = 100
_NOT_IN_NAMES = re.compile(r"[^\w./ -]")


class MlflowSink:
    """One MLflow run, continued when the training run is resumed.

    Signals become metrics of the same name, settings become params, events become tags (``event.001`` and so on).
    MLflow keeps both values of a step that a resumed run repeats: the run folder knows which one counts.
    """

    name = "mlflow"

    def __init__(self) -> None:
        self._client: Any = None
        self._store = Path()
        self._run_id = ""
        self._status = _STATUS["finished"]
        self._events = 0
        self._nonfinite: dict[str, int] = {}
        self._is_embedded = False
        self._shown_uri = ""
        self._secrets: list[str] = []

    def start(self, manifest: Mapping[str, Any]) -> Mapping[str, Any]:
        """Make the MLflow run, or continue the one that the manifest names, and return where it is."""
        for variable, value in _DEFAULTS.items():
            os.environ.setdefault(variable, value)
        try:  # not at the top: the import takes seconds, and Sealegs works without it
            from mlflow.tracking import MlflowClient
        except ModuleNotFoundError as error:
            raise MissingExtra("the tracker mlflow", "mlflow", "mlflow") from error
        folder = Path(manifest["folder"]).absolute()
        self._store = folder.parent
        server = os.environ.get("MLFLOW_TRACKING_URI")
        self._is_embedded = not server
        uri = server or f"sqlite:///{self._store.as_posix()}/mlflow.db"
        self._shown_uri, self._secrets = _split_uri(uri)
        with self._secrets_kept():
            if self._is_embedded:
                self._store.mkdir(parents=True, exist_ok=True)
                with _one_at_a_time(self._store / ".mlflow.lock"):  # two that make the tables at once break each other
                    self._client = MlflowClient(uri)
            else:
                self._client = MlflowClient(uri)
            run = self._earlier_run(manifest) or self._client.create_run(self._experiment(), run_name=folder.name)
            self._run_id = run.info.run_id
            self._take_up(run.data.tags)
            self._log_params(_params(manifest), run.data)
        has_pages = self._shown_uri.startswith(("http://", "https://"))
        page = f"{self._shown_uri.rstrip('/')}/#/experiments/{run.info.experiment_id}/runs/{self._run_id}"
        return {
            "name": self.name,
            "run_id": self._run_id,
            "uri": page if has_pages else f"mlflow:{self._run_id}",
            "tracking_uri": self._shown_uri,
        }

    def row(self, row: Row) -> None:
        """Send the numbers of one step."""
        self.rows([row])

    def rows(self, rows: list[Row]) -> None:
        """Send the numbers of several steps in as few requests as MLflow allows."""
        from mlflow.entities import Metric

        metrics = []
        tags: dict[str, str] = {}
        for row in rows:
            step = int(row["step"])
            time_ms = int(float(row.get("time", time.time())) * 1000)
            for signal, value in tracker_values.numbers(row).items():
                name = _name(signal)
                metrics.append(Metric(name, value, time_ms, step))
                if not math.isfinite(value):
                    tags |= self._count_nonfinite(name, step, value)
        self._log(metrics=metrics, tags=tags)

    def event(self, event: Event) -> None:
        """Write one event and its counts as tags: the first hundred by number, later ones over the last."""
        from mlflow.entities import Metric

        if event.kind == "end":
            self._status = _STATUS.get(event.detail.get("reason", ""), "FAILED")
        self._events += 1
        tag = f"event.{self._events:03}" if self._events <= _NUMBERED_EVENTS else "event.newest"
        words = [f"step {event.step} {event.kind}"]
        words += [f"{key}={tracker_values.plain_text(value)}" for key, value in event.detail.items()]
        text = tracker_values.plain_text(" ".join(words))
        self._log(
            metrics=[
                Metric(*count, int(event.time * 1000), event.step) for count in tracker_values.counts(event).items()
            ],
            tags={tag: text[:_LONGEST_EVENT], "event.count": str(self._events)},
        )

    def close(self) -> None:
        """Give the MLflow run its end time, and the status from the ``end`` event."""
        with self._secrets_kept():
            self._client.set_terminated(self._run_id, self._status)

    def _earlier_run(self, manifest: Mapping[str, Any]) -> Any:
        """The MLflow run that this training run had before it stopped, if this store still has it."""
        from mlflow.exceptions import MlflowException

        tracker = tracker_values.earlier(manifest, self.name)
        if not tracker.get("run_id"):
            return None
        try:  # instead of comparing addresses: run ids are unique, and a store may have moved
            run = self._client.get_run(tracker["run_id"])
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        if run.info.lifecycle_stage != "active":  # the user deleted it
            return None
        self._client.update_run(run.info.run_id, status="RUNNING")
        return run

    def _experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(EXPERIMENT)
        if found is None:
            artifacts = (self._store / "artifacts").as_uri() if self._is_embedded else None
            try:
                return str(self._client.create_experiment(EXPERIMENT, artifact_location=artifacts))
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            found = self._client.get_experiment_by_name(EXPERIMENT)  # another run was quicker
        return str(found.experiment_id)

    def _take_up(self, tags: Mapping[str, str]) -> None:
        """Continue the counts of an earlier part of the run."""
        self._status = _STATUS["finished"]
        self._events = int(tags.get("event.count", 0))
        self._nonfinite = {
            tag.removeprefix("nonfinite.").removesuffix(".count"): int(count)
            for tag, count in tags.items()
            if tag.startswith("nonfinite.") and tag.endswith(".count")
        }

    def _log_params(self, params: Mapping[str, str], earlier: Any) -> None:
        """Log params. MLflow never changes one, so values that differ in a resumed run go into a tag."""
        changed = {
            f"changed.{name}": value
            for name, value in params.items()
            if earlier.params.get(name, value) != value or f"changed.{name}" in earlier.tags
        }
        self._log(params={name: value for name, value in params.items() if name not in earlier.params}, tags=changed)

    def _count_nonfinite(self, name: str, step: int, value: float) -> dict[str, str]:
        """Count values that are not finite as tags: a SQL store turns infinity into 1.8e308, charts leave NaN out."""
        count = self._nonfinite[name] = self._nonfinite.get(name, 0) + 1
        first = {f"nonfinite.{name}": f"step {step}: {spell(value)}"} if count == 1 else {}
        return {**first, f"nonfinite.{name}.count": str(count)}

    def _log(
        self, *, metrics: list[Any] | None = None, params: Mapping[str, str] | None = None, tags: Mapping[str, str]
    ) -> None:
        from mlflow.entities import Param, RunTag

        with self._secrets_kept():
            self._client.log_batch(  # splits itself into requests of the size that servers accept
                self._run_id,
                metrics=metrics or [],
                params=[Param(*param) for param in (params or {}).items()],
                tags=[RunTag(*tag) for tag in tags.items()],
                synchronous=True,  # whatever the environment says: a failure must show here
            )

    @contextmanager
    def _secrets_kept(self) -> Iterator[None]:
        """Keep secrets out of errors: MLflow puts the tracking URI and its password there, and errors become events."""
        try:
            yield
        except Exception as error:
            told = str(error)
            for secret in self._secrets:
                told = told.replace(secret, "")
            if told == str(error):
                raise
            raise SinkFailed(f"{type(error).__name__}: {told}") from None


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _params(manifest: Mapping[str, Any]) -> dict[str, str]:
    """The params by which people compare runs.

    >>> _params({"settings": {"model": {"width": 64}}, "seed": 1, "run_id": "a1", "versions": {"torch": "2.9"}})
    {'model.width': '64', 'versions.torch': '2.9', 'seed': '1', 'run_id': 'a1'}
    """
    return {
        _name(name): tracker_values.plain_text(value)[:_LONGEST_PARAM]
        for name, value in dotted(tracker_values.settings(manifest))
    }


def _name(name: str) -> str:
    """The name without the characters that MLflow refuses: one odd signal must not cost the run its tracker.

    >>> _name("grad_norm/blocks[0]")
    'grad_norm/blocks_0_'
    """
    return _NOT_IN_NAMES.sub("_", name)[:_LONGEST_NAME]


def _split_uri(uri: str) -> tuple[str, list[str]]:
    """A tracking URI as it may be shown, and its parts that may not.

    >>> _split_uri("https://ann:secret@host:5000/mlflow")
    ('https://host:5000/mlflow', ['ann:secret@'])
    >>> _split_uri("postgresql://host/runs?password=secret")
    ('postgresql://host/runs', ['?password=secret'])
    >>> _split_uri("sqlite:////home/ann@lab/mlflow.db")
    ('sqlite:////home/ann@lab/mlflow.db', [])
    """
    scheme, separator, rest = uri.partition("://")
    if not separator or rest.startswith("/"):  # a file: it needs no login
        return uri, []
    login, at, place = rest.rpartition("@")  # the last @, in case the password has one unescaped
    place, mark, query = place.partition("?")
    return f"{scheme}://{place}", [piece for piece in (login + at, mark + query) if piece]
