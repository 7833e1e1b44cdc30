"""Accelerate keeps what it knows of the machine and of precision in places that all accelerators of a process share."""

import sys
import time
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture(autouse=True)
def own_accelerate_state() -> Iterator[None]:
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@pytest.fixture
def pass_hours(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Sets the clock that steps are timed with forward, by more than any step takes on any machine."""
    ahead, real = [0.0], time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: real() + ahead[0])

    def later() -> None:
        ahead[0] += 7200

    return later
