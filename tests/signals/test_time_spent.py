"""Time is charged to the innermost part, once."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sealegs.record.stability_tax import PARTS, StabilityTax
from sealegs.signals.time_spent import Part, TimeSpent

PART = st.sampled_from(("signals", "verdicts", "snapshots", "checkpoints", "probes", "recovery", "own", "paused"))
SPANS: Any = st.recursive(
    st.lists(st.integers(0, 9), max_size=2),
    lambda inner: st.lists(st.integers(0, 9) | st.tuples(PART, inner), max_size=4),
    max_leaves=12,
)


class Clock:
    """Time that passes only where somebody spends it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        patch.setattr(time, "perf_counter", lambda: self.now)
        patch.setattr(time, "time", lambda: 1e9 + self.now)


def spend(spent: TimeSpent, clock: Clock, spans: list[Any], charged: dict[str, float], part: str) -> None:
    for each in spans:
        if isinstance(each, int):
            clock.now += each
            charged[part] = charged.get(part, 0.0) + each
        else:
            with spent.of(each[0]):
                spend(spent, clock, each[1], charged, each[0])


@given(SPANS)
def test_every_second_is_charged_once_and_to_the_innermost_part(spans: list[Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch)
        spent = TimeSpent()
        spent.begin_step()
        charged: dict[str, float] = {}
        spend(spent, clock, spans, charged, "loop")
        tax = spent.tax()
        assert tax.whole_s == pytest.approx(sum(charged.values()))
        assert {name: s for name, s in tax.parts.items() if s} == pytest.approx(
            {name: s for name, s in charged.items() if s and name in PARTS}
        )


def test_skipped_and_repeated_steps_count_what_a_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    spent = TimeSpent()
    for step in range(10):
        spent.begin_step()
        clock.now += 2.0
        spent.saw({"step": step, "loss": 1.0}, is_skipped=step == 3)
    with spent.of("checkpoints"):
        clock.now += 30.0  # is no part of a step
    spent.went_back(4)
    tax = spent.tax()
    assert (tax.whole_s, tax.steps) == (50.0, 10)
    assert {name: s for name, s in tax.parts.items() if s} == {"skipped": 2.0, "repeated": 8.0, "checkpoints": 30.0}


def test_a_thread_that_writes_a_checkpoint_costs_what_steps_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    spent = TimeSpent()
    for step in range(20):
        beside = {"saving": 1.0, "step_s": 3.5} if step in (10, 11) else {"step_s": 2.0}
        spent.saw({"step": step, "loss": 1.0, **beside}, is_skipped=False)
    assert spent.tax().parts["checkpoints"] == pytest.approx(3.0)
    spent.saw({"step": 20, "loss": 1.0, "saving": 1.0, "step_s": 0.0}, is_skipped=False)
    spent.saw({"step": 21, "loss": 1.0, "saving": 1.0, "step_s": 0.0}, is_skipped=False)
    assert spent.tax().parts["checkpoints"] == 0.0  # steps that are quicker by chance earn nothing


def test_another_process_goes_on_and_counts_what_was_lost_and_how_long_it_was_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    spent = TimeSpent()
    spent.begin_step()
    with spent.of("signals"):
        clock.now += 1.0
    state = spent.state_dict()  # saved here,
    clock.now += 7.0  # these steps are lost,
    left_off_at = time.time()
    clock.now += 60.0  # and nobody is there
    again = TimeSpent()
    again.load_state_dict(state, left_off_at, was_down=True)
    again.begin_step()
    clock.now += 2.0
    tax = again.tax()
    assert (tax.whole_s, tax.steps) == (70.0, 2)
    assert {name: s for name, s in tax.parts.items() if s} == {"signals": 1.0, "repeated": 7.0, "downtime": 60.0}
    before = again.tax()
    again.load_state_dict(state, left_off_at, was_down=True)  # of this process: it counts on
    assert again.tax() == before


@pytest.mark.parametrize("state", [{}, {"tax": None, "time": 1.0}, {"tax": {"whole_s": 1.0}, "time": "x"}])
def test_a_state_of_an_older_version_starts_from_nothing(state: dict[str, Any]) -> None:
    spent = TimeSpent()
    spent.load_state_dict(state, 5.0, was_down=True)
    assert spent.tax().steps == 0


class Stream:
    """A device that is ahead of nothing: an event has come to pass when the test says so."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_ms = 0.0
        self.is_done = False
        self.events = 0
        stream = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing
                stream.events += 1

            def record(self) -> None:
                self.at = stream.now_ms

            def query(self) -> bool:
                return stream.is_done

            def elapsed_time(self, other: "Event") -> float:
                return other.at - self.at

        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def on_a_device(patch: pytest.MonkeyPatch) -> tuple[TimeSpent, Stream, Callable[[Part, float], None]]:
    stream, spent = Stream(patch), TimeSpent()
    spent.follow(torch.device("cuda"))

    def does(part: Part, milliseconds: float) -> None:
        with spent.of(part):
            stream.now_ms += milliseconds

    return spent, stream, does


def test_on_a_device_some_steps_stand_for_all_and_rare_parts_are_all_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    spent, stream, does = on_a_device(monkeypatch)
    for step in range(700):
        spent.begin_step()
        with spent.of("signals"):
            stream.now_ms += 2.0
            does("own", 5.0)
            does("verdicts", 1.0)
        if step % 350 == 0:
            does("checkpoints", 100.0)
    assert stream.events < 1400, "of 700 steps with six events each"
    assert spent.tax().parts["signals"] == 0.0  # nothing has come to pass, and nobody waits for it
    stream.is_done = True
    spent.begin_step()
    parts = spent.tax().parts
    assert parts["signals"] == pytest.approx(1.4, rel=0.05)
    assert parts["verdicts"] == pytest.approx(0.7, rel=0.05)
    assert parts["checkpoints"] == pytest.approx(0.2)
    assert "own" not in parts


@pytest.mark.parametrize("steps", [30, 75, 90, 200, 1000])
def test_what_is_made_once_counts_once_however_short_the_run(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step compiles, the first that is sampled makes buffers, a copy is large: none stands for seven."""
    spent, stream, does = on_a_device(monkeypatch)
    stream.is_done = True
    paid_ms = 0.0
    for step in range(steps):
        spent.begin_step()
        once = {0: 900.0, 6: 300.0, 10: 400.0}.get(step, 0.0)
        does("signals", 2.0 + 3.0 * (step % 10 == 0) + once)
        paid_ms += 2.0 + 3.0 * (step % 10 == 0) + once
        does("verdicts", 1.0)
        paid_ms += 1.0
        if step % 77 == 76:
            with spent.of("verdicts"):
                does("copies", 500.0)
            paid_ms += 500.0
    spent.begin_step()
    tax = spent.tax()
    assert 1000 * tax.total_s == pytest.approx(paid_ms, rel=0.03)
    assert "copies" not in tax.parts


def test_a_rare_part_inside_a_step_that_is_not_timed_is_charged_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    spent, stream, does = on_a_device(monkeypatch)
    for _ in range(71):
        spent.begin_step()
    with spent.of("verdicts"):
        stream.now_ms += 1.0
        with spent.of("recovery"):
            stream.now_ms += 4.0
            does("verdicts", 8.0)
        stream.now_ms += 1.0
    stream.is_done = True
    spent.begin_step()
    assert {name: s for name, s in spent.tax().parts.items() if s} == {"recovery": 0.004}


def test_what_earlier_processes_paid_is_only_added() -> None:
    paid = StabilityTax(whole_s=10.0, steps=3, parts={"downtime": 4.0})
    spent = TimeSpent()
    spent.load_state_dict({"tax": paid.to_plain(), "time": time.time()}, None, was_down=True)
    tax = spent.tax(price_per_hour=3600.0)
    assert tax.parts["downtime"] == 4.0
    assert tax.whole_s >= 10.0
    assert tax.money == pytest.approx(4.0)
