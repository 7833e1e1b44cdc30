"""Accelerate keeps what it knows of the machine and of precision in places that all accelerators of a process share."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def own_accelerate_state() -> Iterator[None]:
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
