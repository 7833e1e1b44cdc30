"""Passes rows and events to a slow sink: later, in another thread, in the same order."""

from collections import deque
from collections.abc import Mapping
from threading import Condition, Thread
from typing import Any, Protocol, runtime_checkable

from sealegs.errors import SealegsError, SinkFailed
from sealegs.vocabulary import Event, Row, Sink


@runtime_checkable
class TakesManyRows(Protocol):
    """A sink that is cheaper to call once for many rows."""

    def rows(self, rows: list[Row]) -> None:
        """Take several steps, oldest first."""


class BackgroundSink:
    """A slow sink that never holds up the run: ``row`` and ``event`` only put things into a bounded queue.

    The next call from the training side raises an error of the thread, once. After that the sink ignores everything,
    unless the error says that it goes on.
    """

    def __init__(
        self, sink: Sink, *, capacity: int = 10_000, gather_s: float = 1.0, close_within_s: float = 10.0
    ) -> None:
        self.name = sink.name
        self._sink = sink
        self._capacity = capacity
        self._gather_s = gather_s
        self._close_within_s = close_within_s
        self._thread: Thread | None = None
        # Guards everything below, and is never held while the inner sink works. Its lock is reentrant: a signal handler
        # may log an event while the same thread is inside `row`.
        self._changed = Condition()
        self._waiting: deque[Row | Event] = deque()
        self._offered = self._delivered = self._dropped = 0
        self._failure: BaseException | None = None
        self._stumble: SinkFailed | None = None  # raised like a failure, but the sink goes on
        self._over = False  # closed, or the failure has been raised: nothing is accepted any more

    def start(self, manifest: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Start the inner sink at once, so that a wrong address shows before the first step."""
        started = self._sink.start(manifest)
        self._thread = Thread(target=self._deliver, name=f"sealegs-{self.name}", daemon=True)
        self._thread.start()
        return started

    def row(self, row: Row) -> None:
        """Queue one step."""
        self._offer(row)

    def event(self, event: Event) -> None:
        """Queue one event."""
        self._offer(event)

    def close(self) -> None:
        """Wait for the queue to empty and the inner sink to close, but no longer than ``close_within_s``."""
        with self._changed:
            told_already, self._over = self._over, True
            self._changed.notify()
        if told_already or self._thread is None:
            return
        self._thread.join(self._close_within_s)
        with self._changed:
            if self._failure is not None:
                raise self._told() from self._failure
            if self._thread.is_alive():
                raise self._told(f"not done within {self._close_within_s:g} s of the end of the run")
            self._tell_stumble()
            if self._dropped:
                raise self._told("too slow for this run")

    def _offer(self, item: Row | Event) -> None:
        with self._changed:
            if self._over:
                return
            self._offered += 1
            if self._failure is not None:
                self._over = True
                raise self._told() from self._failure
            if len(self._waiting) >= self._capacity:
                self._dropped += 1
                if not isinstance(item, Event):
                    return
                self._waiting.popleft()  # events are few and say how the run ended: the oldest row makes room
            self._waiting.append(item)
            self._changed.notify()
            self._tell_stumble()

    def _tell_stumble(self) -> None:
        stumble, self._stumble = self._stumble, None
        if stumble is not None:
            raise stumble

    def _deliver(self) -> None:
        try:
            while batch := self._take():
                self._hand_over(batch)
            self._sink.close()
        except BaseException as failure:  # even SystemExit: a thread that ends silently would lose rows
            with self._changed:
                self._failure = failure

    def _take(self) -> list[Row | Event]:
        """The items of ``gather_s`` seconds from the first one on; empty once the queue is closed and empty.

        One request per row would take time from the training thread: both share one interpreter.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._over)
            self._changed.wait_for(lambda: self._over, timeout=self._gather_s)
            batch = list(self._waiting)
            self._waiting.clear()
            return batch

    def _hand_over(self, batch: list[Row | Event]) -> None:
        rows: list[Row] = []
        for item in batch:
            if isinstance(item, Event):
                self._hand_over_rows(rows)
                rows = []
                self._hand_over_event(item)
            else:
                rows.append(item)
        self._hand_over_rows(rows)

    def _hand_over_event(self, event: Event) -> None:
        try:
            self._sink.event(event)
        except SinkFailed as stumble:
            if not stumble.goes_on:
                raise
            with self._changed:
                self._stumble = stumble
        else:
            self._arrived(1)

    def _hand_over_rows(self, rows: list[Row]) -> None:
        if rows and isinstance(self._sink, TakesManyRows):
            self._sink.rows(rows)
            self._arrived(len(rows))
            return
        for row in rows:
            self._sink.row(row)
            self._arrived(1)

    def _arrived(self, count: int) -> None:
        with self._changed:
            self._delivered += count

    def _told(self, reason: str = "") -> SinkFailed:
        if isinstance(self._failure, SealegsError):
            reason = str(self._failure)
        elif self._failure is not None:
            reason = f"{type(self._failure).__name__}: {self._failure}".splitlines()[0]
        told = f"{self.name}: {reason}; {self._delivered} rows and events delivered"
        if lost := self._offered - self._delivered:
            told += f", {lost} not"
        if self._dropped:
            told += f" ({self._dropped} of them because the queue of {self._capacity} was full)"
        return SinkFailed(told)
