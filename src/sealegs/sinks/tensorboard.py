"""Writes rows and events to a TensorBoard event file, through TensorBoard's own records; without TensorFlow."""

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from sealegs.errors import MissingExtra
from sealegs.record.manifest import dotted
from sealegs.report.marked_text import block_of, cell_of
from sealegs.sinks import tracker_values
from sealegs.vocabulary import Event, Row

FOLDER = "tensorboard"


class TensorboardSink:
    """The event files of one run, in ``tensorboard/`` beside the run's folder; a resumed run adds one.

    Signals become scalars of the same name, settings become hparams and a table under TEXT, events become texts
    (``events/skip`` and so on). TensorBoard keeps 32 bits of a number, and draws NaN as a triangle.
    """

    name = "tensorboard"

    def __init__(self) -> None:
        self._file: BinaryIO | None = None
        self._records: Any = None
        self._is_failed = False

    def start(self, manifest: Mapping[str, Any]) -> Mapping[str, Any]:
        """Start an event file with the settings at its head, and return where it is."""
        try:  # not at the top: the import takes half a second, and Sealegs works without it
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ModuleNotFoundError as error:
            raise MissingExtra("the tracker tensorboard", "tensorboard", "tensorboard") from error
        run = str(manifest["run_id"])
        logdir = Path(manifest["folder"]).absolute().parent / FOLDER / run
        logdir.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._file = (logdir / name).open("xb")
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        told = dict(dotted(tracker_values.settings(manifest)))
        self._write(summary=_session(started=told))
        self._write(summary=_text("settings", _table(told)))
        self._file.flush()
        return {"name": self.name, "run_id": run, "uri": str(logdir)}

    def row(self, row: Row) -> None:
        """Write the numbers of one step."""
        self.rows([row])

    def rows(self, rows: list[Row]) -> None:
        """Write the numbers of several steps."""
        for row in rows:
            self._scalars(int(row["step"]), tracker_values.numbers(row))
        self._flush()

    def event(self, event: Event) -> None:
        """Write an event as text, if a person should know of it, and its counts."""
        mark = tracker_values.mark(event)
        if event.kind == "end":
            self._is_failed = mark is not None and mark.level == "error"
        if numbers := tracker_values.counts(event):
            self._scalars(event.step, numbers)
        if mark is not None:
            self._write(
                step=event.step, wall_time=event.time, summary=_text(f"events/{event.kind}", block_of(mark.text))
            )
        self._flush()

    def close(self) -> None:
        """End the session and the file; it succeeded unless the ``end`` event says otherwise."""
        if self._file is None:
            return
        self._write(summary=_session(is_failed=self._is_failed))
        self._file.close()

    def _scalars(self, step: int, numbers: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._write(step=step, summary=Summary(value=values))

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record

        self._records.write(Record(**{"wall_time": time.time(), **fields}).SerializeToString())

    def _flush(self) -> None:
        assert self._file is not None
        self._file.flush()


def _text(tag: str, text: str) -> Any:
    """A text for TensorBoard's TEXT tab: Markdown, which keeps line breaks only in a table."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=shape)
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])


def _session(*, started: Mapping[str, Any] | None = None, is_failed: bool = False) -> Any:
    """The start of a session of the HPARAMS tab with its settings, or its end."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.api_pb2 import Status
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo

    if started is not None:
        info = SessionStartInfo(start_time_secs=time.time())
        for name, value in started.items():
            if isinstance(value, bool):
                info.hparams[name].bool_value = value
            elif isinstance(value, int | float):
                info.hparams[name].number_value = value
            else:
                info.hparams[name].string_value = tracker_values.plain_text(value)
        tag, data = metadata.SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=info)
    else:
        status = Status.STATUS_FAILURE if is_failed else Status.STATUS_SUCCESS
        end = SessionEndInfo(status=status, end_time_secs=time.time())
        tag, data = metadata.SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=end)
    value = Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(data), tensor=metadata.NULL_TENSOR)
    return Summary(value=[value])


def _table(values: Mapping[str, Any]) -> str:
    """
    >>> print(_table({"model.width": 64, "mix": ["prose", "a|b"]}))
    | setting | value |
    |---|---|
    | model.width | 64 |
    | mix | \\["prose", "a\\|b"\\] |
    """
    told = ((name, tracker_values.plain_text(value)) for name, value in values.items())
    cells = (map(cell_of, pair) for pair in told)
    return "\n".join(["| setting | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells)])
