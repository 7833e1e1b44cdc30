"""Notifies a person of the few events that need one: a halt, an intervention, an incident, the end."""

import atexit
import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import Any, TypeAlias

from sealegs.errors import ConfigError, SinkFailed
from sealegs.sinks import delivery
from sealegs.sinks.background import BackgroundSink
from sealegs.sinks.delivery import Delivery, Undelivered
from sealegs.sinks.messages import Message, Messenger
from sealegs.vocabulary import Event, Row

CLOSE_WITHIN_S = 20.0


@dataclass(frozen=True, slots=True)
class Notify:
    """Where notifications go, and how often."""

    where: str | Sequence[str] = field(repr=False)
    """The address of a webhook, a command (text, or a list of words), or ``$NAME`` of a variable with either."""
    page: str | None = None
    """Address of the page that a message leads to; ``{run}`` in it is the run's name. Default: its place on disk."""
    at_most: int = 10
    """The most messages in ``per_s`` seconds. Further ones are counted, and the count comes with the next message."""
    per_s: float = 600.0
    again_after_s: float = 3600.0
    """Seconds after which a message may be repeated."""

    def __post_init__(self) -> None:
        if self.at_most < 1:
            raise ConfigError(f"Notify.at_most={self.at_most}: at least 1; leave notify out to be told nothing")
        for name in ("per_s", "again_after_s"):
            if not getattr(self, name) >= 0:  # NaN too
                raise ConfigError(f"Notify.{name}={getattr(self, name)}: seconds, not negative")


Where: TypeAlias = str | Sequence[str] | Notify


class Notifier:
    """A sink that notifies a person of the few events that need one, and reports once when it cannot.

    Rows cost nothing: only messages go into the bounded queue, from which another thread delivers them.
    """

    name = "notify"

    def __init__(self, notify: Where) -> None:
        self._options = notify if isinstance(notify, Notify) else Notify(notify)
        self._way = delivery.opened(self._options.where)  # refused here, before there is a run folder
        self._messenger = Messenger(Path())
        self._queue = BackgroundSink(_Sender(self._way), capacity=100, gather_s=0.0, close_within_s=CLOSE_WITHIN_S)
        self._lock = RLock()  # the watchdog's thread and signal handlers send messages, too
        self._sent: deque[float] = deque()
        self._said: dict[tuple[Any, ...], float] = {}
        self._held_back = 0
        self._process = 0

    def start(self, manifest: Mapping[str, Any]) -> None:
        """Get ready. Nothing is sent: `sealegs notify` tests whether messages arrive."""
        self._messenger = Messenger(Path(manifest["folder"]), self._options.page)
        self._queue.start(manifest)
        self._process = os.getpid()
        atexit.register(self._at_exit)

    def row(self, row: Row) -> None:
        """Remember the state of the run."""
        self._messenger.saw(row)

    def event(self, event: Event) -> None:
        """Send a message, if a person should know."""
        with self._lock:
            message = self._messenger.message(event)
            text = None if message is None else self._allowed(message)
        self._queue_up(message, text)

    def close(self) -> None:
        """Say that the run is over, if no event has, and wait shortly for messages on their way."""
        self._end(self._messenger.closed())

    def _at_exit(self) -> None:
        """Report a process that ends without closing its run, with its error: what its user most wants to know."""
        if os.getpid() == self._process:
            error = getattr(sys, "last_value", None)
            self._end(self._messenger.closed("failed" if error else "ended without being closed", error))

    def _end(self, message: Message | None) -> None:
        atexit.unregister(self._at_exit)
        with self._lock:
            text = None if message is None else self._allowed(message)
        try:
            self._queue_up(message, text)
        finally:
            self._queue.close()

    def _queue_up(self, message: Message | None, text: str | None) -> None:
        if message is not None and text is not None:
            detail = {"message": message, "text": text}
            self._queue.event(Event(kind=message.kind, step=message.step, time=0.0, detail=detail))

    def _allowed(self, message: Message) -> str | None:
        """The text to send, with the count of messages held back since the last; None if this one is held back, too."""
        now = time.monotonic()
        said = self._said.get(message.key)
        while self._sent and now - self._sent[0] > self._options.per_s:
            self._sent.popleft()
        is_repeated = said is not None and now - said < self._options.again_after_s
        is_too_many = len(self._sent) >= self._options.at_most and not message.is_last
        if is_repeated or is_too_many:
            self._held_back += 1
            return None
        self._said[message.key] = now
        self._sent.append(now)
        held_back, self._held_back = self._held_back, 0
        return message.text + (f"\n({held_back} more since the last message were held back)" if held_back else "")


class _Sender:
    """The end of the queue: delivers messages, and reports the first of several failures in a row."""

    name = Notifier.name

    def __init__(self, way: Delivery) -> None:
        self._way = way
        self._lost = 0

    def start(self, manifest: Mapping[str, Any]) -> None:
        """There is nothing to prepare."""

    def row(self, row: Row) -> None:
        """No row comes here."""

    def event(self, event: Event) -> None:
        """Deliver one message. After a failure, later messages have one attempt each until one arrives."""
        text = event.detail["text"]
        if self._lost:
            text += f"\n({self._lost} earlier message{'s' * (self._lost > 1)} did not arrive)"
        try:
            delivery.delivered(self._way, event.detail["message"], text, waits_s=() if self._lost else delivery.WAITS_S)
        except Undelivered as failure:
            self._lost += 1
            if self._lost == 1:
                told = f"notify: a message did not arrive at {self._way.shown}: {failure}; the next ones are tried"
                raise SinkFailed(told, goes_on=True) from None
        else:
            self._lost = 0

    def close(self) -> None:
        """There is nothing to release."""
