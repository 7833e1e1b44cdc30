import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from sealegs.errors import SinkFailed
from sealegs.sinks.background import BackgroundSink
from sealegs.vocabulary import Event, Row, Sink

PATIENCE_S = 10.0
"""How long a thread may take before a test calls it stuck. No test that passes waits for it."""


class Inner:
    """A sink that remembers, and that can be held at the door."""

    name = "inner"

    def __init__(self) -> None:
        self.got: list[Any] = []
        self.entered = threading.Event()
        self.door = threading.Event()
        self.door.set()

    def start(self, manifest: Mapping[str, Any]) -> Mapping[str, Any] | None:
        return {"started": manifest["run_id"], "thread": threading.get_ident()}

    def row(self, row: Row) -> None:
        self.entered.set()
        assert self.door.wait(PATIENCE_S)
        self.got.append(row["step"])

    def event(self, event: Event) -> None:
        self.got.append(event.kind)

    def close(self) -> None:
        self.got.append("closed")


class InnerOfMany(Inner):
    def rows(self, rows: list[Row]) -> None:
        self.entered.set()
        assert self.door.wait(PATIENCE_S)
        self.got.append([row["step"] for row in rows])


class Broken(Inner):
    name = "broken"

    def row(self, row: Row) -> None:
        if row["step"] == 2:
            raise OSError("the wire is cut\nand more that nobody wants in a log line")
        super().row(row)


def happened(kind: str) -> Event:
    return Event(kind=kind, step=0, time=0.0)


def started(inner: Inner, **options: Any) -> BackgroundSink:
    sink = BackgroundSink(inner, gather_s=0.0, **options)
    sink.start({"run_id": "a1"})
    return sink


def with_one_row_held_at_the_door(inner: Inner, **options: Any) -> BackgroundSink:
    """From here on what is queued stays queued, until the door opens."""
    inner.door.clear()
    sink = started(inner, **options)
    sink.row({"step": 0})
    assert inner.entered.wait(PATIENCE_S)
    return sink


def test_is_a_sink_with_the_name_of_the_inner_one() -> None:
    sink: Sink = BackgroundSink(Inner())
    assert sink.name == "inner"


def test_start_is_the_inner_ones_in_the_calling_thread() -> None:
    sink = BackgroundSink(Inner())
    assert sink.start({"run_id": "a1"}) == {"started": "a1", "thread": threading.get_ident()}
    sink.close()


def test_a_start_that_fails_is_told_at_once_and_leaves_nothing_to_wait_for() -> None:
    sink = BackgroundSink(Inner(), close_within_s=PATIENCE_S)
    with pytest.raises(KeyError):
        sink.start({})
    sink.row({"step": 0})
    sink.close()


def test_rows_and_events_arrive_in_order_and_close_comes_last() -> None:
    inner = Inner()
    sink = started(inner)
    for step in range(100):
        sink.row({"step": step})
        if step % 40 == 0:
            sink.event(happened(f"after-{step}"))
    sink.close()
    assert inner.got == [0, "after-0", *range(1, 41), "after-40", *range(41, 81), "after-80", *range(81, 100), "closed"]


def test_what_waits_is_handed_over_at_once_where_the_inner_sink_can_take_it() -> None:
    inner = InnerOfMany()
    sink = with_one_row_held_at_the_door(inner)
    for step in (1, 2, 3):
        sink.row({"step": step})
    sink.event(happened("checkpoint"))
    sink.row({"step": 4})
    inner.door.set()
    sink.close()
    assert inner.got == [[0], [1, 2, 3], "checkpoint", [4], "closed"]


def test_a_full_queue_drops_the_newest_rows_and_close_says_how_many() -> None:
    inner = Inner()
    sink = with_one_row_held_at_the_door(inner, capacity=3)
    for step in range(1, 6):
        sink.row({"step": step})
    inner.door.set()
    with pytest.raises(SinkFailed) as told:
        sink.close()
    assert inner.got == [0, 1, 2, 3, "closed"]
    assert str(told.value) == (
        "inner: too slow for this run; 4 rows and events delivered, 2 not (2 of them because the queue of 3 was full)"
    )


def test_an_event_takes_the_place_of_the_oldest_row_in_a_full_queue() -> None:
    inner = Inner()
    sink = with_one_row_held_at_the_door(inner, capacity=2)
    sink.row({"step": 1})
    sink.row({"step": 2})
    sink.event(happened("end"))
    inner.door.set()
    with pytest.raises(SinkFailed, match="3 rows and events delivered, 1 not"):
        sink.close()
    assert inner.got == [0, 2, "end", "closed"]


@pytest.mark.parametrize(
    "call", [lambda sink: sink.row({"step": 3}), lambda sink: sink.event(happened("checkpoint"))], ids=["row", "event"]
)
def test_a_failure_is_raised_by_the_next_call_and_only_by_that(call: Callable[[BackgroundSink], None]) -> None:
    inner = Broken()
    sink = started(inner)
    for step in range(3):
        sink.row({"step": step})
    for thread in threading.enumerate():
        if thread.name == "sealegs-broken":  # it ends when the inner sink fails
            thread.join(PATIENCE_S)
    with pytest.raises(SinkFailed) as told:
        call(sink)
    assert str(told.value) == "broken: OSError: the wire is cut; 2 rows and events delivered, 2 not"
    assert isinstance(told.value.__cause__, OSError)
    sink.row({"step": 4})
    sink.event(happened("end"))
    sink.close()
    assert inner.got == [0, 1]


def test_a_failure_that_no_row_followed_is_raised_by_close_and_only_once() -> None:
    sink = started(Broken())
    sink.row({"step": 2})
    with pytest.raises(SinkFailed, match="broken: OSError: the wire is cut; 0 rows and events delivered, 1 not"):
        sink.close()
    sink.close()


def test_a_failure_of_the_inner_close_is_raised_by_close() -> None:
    class Unclosable(Inner):
        def close(self) -> None:
            raise SystemExit("no")

    sink = started(Unclosable())
    sink.row({"step": 0})
    with pytest.raises(SinkFailed, match=r"inner: SystemExit: no; 1 rows and events delivered\n"):
        sink.close()


def test_a_hung_sink_is_given_up_at_close() -> None:
    inner = Inner()
    sink = with_one_row_held_at_the_door(inner, close_within_s=0.05)
    sink.row({"step": 1})
    before = time.monotonic()
    with pytest.raises(SinkFailed) as told:
        sink.close()
    assert time.monotonic() - before < PATIENCE_S / 2
    assert str(told.value) == (
        "inner: not done within 0.05 s of the end of the run; 0 rows and events delivered, 2 not"
    )
    assert inner.got == []
    inner.door.set()


def test_rows_gather_before_they_are_handed_over() -> None:
    class Counting(Inner):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[int] = []

        def rows(self, rows: list[Row]) -> None:
            self.calls.append(len(rows))

    inner = Counting()
    sink = BackgroundSink(inner, gather_s=PATIENCE_S)
    sink.start({"run_id": "a1"})
    for step in range(50):
        sink.row({"step": step})
    sink.close()  # ends the gathering
    assert inner.calls == [50]
