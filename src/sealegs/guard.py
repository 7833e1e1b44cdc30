"""The shell around the user's loop: takes what a step knows, passes it through the stages, owns the state.

``Watch`` is the first rung: it records, and cannot change the run.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Self

from sealegs.record import manifest as manifests
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
        run: str | Path | RunWriter,
        *,
        resume: bool = False,
        settings: dict[str, Any] | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        """Start the run in folder ``run``, or go on with it; a ``RunWriter`` is taken as it is.

        ``settings`` say what the run is; at a resume, what it is from now on.
        """
        if isinstance(run, RunWriter):
            self.record = run
        elif resume:
            self.record = RunWriter.reopen(Path(run))
        else:
            self.record = RunWriter.create(Path(run), manifests.describe(Path(run).name))
        if settings is not None:
            self.record.amend(settings=settings)
        self._collector = Collector()
        self._step = 0
        self._sinks: list[Sink] = []
        for sink in sinks:
            self._sinks.append(sink)
            self._tell(sink, partial(self._start, sink))

    def see(self, step: int, **signals: Signal) -> None:
        """Take what a step knows, by signal name: numbers, or tensors with one element, read when they are there.

        Steps go up by what you like; going back starts a new segment, and the newest row of a step counts.
        """
        self._step = step
        self._collector.put(step, signals)
        self._write(self._collector.ready())

    def announce(self, kind: str, /, *, step: int | None = None, **detail: Any) -> None:
        """Put something that happened into the record, at the last step that was seen or at the one given."""
        event = self.record.event(kind, self._step if step is None else step, **detail)
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
        if tracker := sink.start(asdict(self.record.manifest)):
            self.record.amend(tracker=tracker)

    def _tell(self, sink: Sink, call: Callable[[], None]) -> None:
        """Observing fails open: a sink that breaks costs one event and its place, never a step."""
        if sink not in self._sinks:  # it broke while another one's failure was told
            return
        try:
            call()
        except Exception as error:
            self._sinks.remove(sink)
            self.announce("sink-failed", sink=sink.name, reason=str(error) or type(error).__name__)
            with suppress(Exception):  # let go of what it holds, a terminal or a socket; it has failed already
                sink.close()
