"""Writes rows and events to a run of a local Trackio project."""

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from sealegs.errors import MissingExtra
from sealegs.record.schema import speakable
from sealegs.sinks import tracker_values
from sealegs.vocabulary import Event, Row

PROJECT = "sealegs"


class TrackioSink:
    """One Trackio run, continued when the training run is resumed. Always local: ``trackio sync`` publishes it.

    The sink writes to Trackio's store itself. ``trackio.init`` would end a run of the user's own code, print to stdout,
    and turn every failure into a warning, so that lost rows could not be reported.
    """

    name = "trackio"

    def __init__(self) -> None:
        self._store: Any = None
        self._run: dict[str, str] = {}
        self._config: dict[str, Any] = {}

    def start(self, manifest: Mapping[str, Any]) -> Mapping[str, Any]:
        """Make the project if it does not exist, and return where it is."""
        try:  # not at the top: the import takes most of a second, and Sealegs works without it
            from trackio.sqlite_storage import SQLiteStorage
            from trackio.utils import TRACKIO_DIR
        except ModuleNotFoundError as error:
            raise MissingExtra("the tracker trackio", "trackio", "trackio") from error
        self._store = SQLiteStorage
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        run = str(tracker_values.earlier(manifest, self.name).get("run_id") or manifest["run_id"])
        self._run = {"project": project, "run": run, "run_id": run}
        self._config = speakable(tracker_values.settings(manifest)) | {"_Created": _written(None)}
        self._store.init_db(project)
        return {"name": self.name, "run_id": run, "uri": f"{TRACKIO_DIR / project}.db#{run}", "project": project}

    def row(self, row: Row) -> None:
        """Write the numbers of one step."""
        self.rows([row])

    def rows(self, rows: list[Row]) -> None:
        """Write the numbers of several steps at once."""
        self._log([(int(row["step"]), tracker_values.numbers(row), _written(row.get("time"))) for row in rows])

    def event(self, event: Event) -> None:
        """Raise an alert, and write the event's counts."""
        mark = tracker_values.mark(event)
        if numbers := tracker_values.counts(event):
            self._log([(event.step, numbers, _written(event.time))])
        if mark is not None:
            self._store.bulk_alert(
                **self._run,
                titles=[mark.title],
                texts=[mark.text],
                levels=[mark.level],
                steps=[mark.step],
                timestamps=[_written(event.time)],
            )

    def close(self) -> None:
        """There is nothing to release."""

    def _log(self, rows: list[tuple[int, dict[str, float], str]]) -> None:
        steps, numbers, times = zip(*rows, strict=True)
        config, self._config = self._config, {}  # it belongs to the run, and comes with its first row
        self._store.bulk_log(
            **self._run, metrics_list=list(numbers), steps=list(steps), timestamps=list(times), config=config or None
        )


def _written(time: Any) -> str:
    """A time in Trackio's format."""
    now = datetime.now(UTC) if time is None else datetime.fromtimestamp(float(time), UTC)
    return now.isoformat()
