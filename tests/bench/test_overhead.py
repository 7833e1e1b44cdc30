"""The measurement of the overhead runs where torch and numpy are all that is installed, as it says."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.forked import start

NOT_NEEDED = ("msgspec", "rich", "tyro", "tokenizers")


def measure_a_small_case(scratch: Path) -> None:
    """In a process of its own: two blocks of two steps, without the libraries of the reasoning half."""
    assert not set(NOT_NEEDED) & set(sys.modules)
    sys.modules |= dict.fromkeys(NOT_NEEDED)  # type: ignore[arg-type]  # None: an import raises ModuleNotFoundError
    from bench import overhead
    from sealegs.lab.settings import SIZES

    overhead.CASES["nano on the CPU"] = (replace(SIZES["nano"].model, layers=1), 2, 2)
    result = overhead.measure("nano on the CPU", 2, scratch)
    said = overhead.printed({"cases": {"nano on the CPU": result}})
    assert "| guard |" in said
    assert "host waits in 30 guarded steps" in said


@pytest.mark.trains
def test_it_needs_torch_and_numpy_alone(tmp_path: Path) -> None:
    process = start(measure_a_small_case, tmp_path)
    process.join(60)
    assert process.exitcode == 0
