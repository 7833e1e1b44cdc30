"""The shell around the user's loop: takes what a step knows, passes it through the stages, owns the state.

``Watch`` is the first rung: it records, and cannot change the run.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Self

from sealegs.record import manifest as manifests
from sealegs.record.manifest import Manifest
from sealegs.record.writer import RunWriter
from sealegs.signals.collect import Collector, Signal
from sealegs.vocabulary import Row, Sink


class Watch:
    """Records a training run into a folder.

    >>> import sealegs, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with sealegs.Watch(f"{folder}/a1", settings={"lr": 3e-4}) as watch:
    ...         for step in range(3):
    ...             watch.see(step, loss=torch.tensor(2.5), grad_norm=0.5)
    ...     sealegs.open_run(f"{folder}/a1").column("loss").tolist()
    [2.5, 2.5, 2.5]
    """

    def __init__(
        self,
        run: str | Path,
        *,
        resume: bool = False,
        manifest: Manifest | None = None,
        settings: dict[str, Any] | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        """Start the run in folder ``run``, or go on with it.

        ``settings``, or a whole ``manifest``, say what it is. At a resume the manifest is there already; settings that
        are given then replace those in it.
        """
        folder = Path(run)
        if resume:
            self.record = RunWriter.reopen(folder)
            if settings is not None and settings != self.record.manifest.settings:
                self.record.amend(settings=settings)
        else:
            self.record = RunWriter.create(folder, manifest or manifests.describe(folder.name, settings=settings or {}))
        self._collector = Collector()
        self._sinks = list(sinks)
        self._step = 0
        for sink in sinks:
            self._start(sink)

    def see(self, step: int, **signals: Signal) -> None:
        """Take what a step knows, by signal name: numbers, or tensors with one element, read when they are there.

        Steps go up by what you like; going back starts a new segment, and the newest row of a step counts.
        """
        self._step = step
        self._collector.put(step, signals)
        self._write(self._collector.ready())

    def announce(self, kind: str, **detail: Any) -> None:
        """Put something that happened into the record."""
        event = self.record.event(kind, self._step, **detail)
        for sink in tuple(self._sinks):
            self._tell(sink, partial(sink.event, event))

    def sync(self) -> None:
        """Wait for every row so far and put it on disk, safe against a power cut: before a checkpoint."""
        self._write(self._collector.drain())
        self.record.sync()

    def close(self) -> None:
        """Write what is still under way and let go of the folder."""
        try:
            self._write(self._collector.drain())
            for sink in tuple(self._sinks):
                self._tell(sink, sink.close)
        finally:
            self.record.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, rows: list[Row]) -> None:
        for row in rows:
            self.record.row(row)
            for sink in tuple(self._sinks):
                self._tell(sink, partial(sink.row, row))

    def _start(self, sink: Sink) -> None:
        def start() -> None:
            if tracker := sink.start(asdict(self.record.manifest)):
                self.record.amend(tracker=tracker)

        self._tell(sink, start)

    def _tell(self, sink: Sink, call: Callable[[], None]) -> None:
        """Observing fails open: a sink that breaks costs one event and its place, never a step."""
        try:
            call()
        except Exception as error:
            self._sinks.remove(sink)
            self.announce("sink-failed", sink=sink.name, reason=str(error) or type(error).__name__)
