"""After a skip with NaN gradients weights, state and counters are bitwise as before, first step included: every make.

``tests/gpu/test_optimizers_on_cuda.py`` has the same cases on CUDA, and holds the table of docs/guard.md to the ways.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.step.optimizers import CASES, Case, backward, everything, model_of

import sealegs
from sealegs.guard_options import Telemetry
from sealegs.step.undo import Undo

BAD = (0, 5, 6)
STEPS = 12

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of packages that are not ours
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def case_of(name: str) -> Case:
    case = CASES[name]
    if case.needs and importlib.util.find_spec(case.needs) is None:
        pytest.skip(f"{case.needs} is not installed")
    return case


def swap(optimizers: Any, mode: str) -> None:
    for each in optimizers:
        getattr(each, mode)()


@pytest.mark.parametrize("name", CASES)
def test_the_host_leaves_every_bit(name: str, tmp_path: Path) -> None:
    case = case_of(name)
    ends = []
    for skips in (True, False):  # and the run is the one that never had these steps
        model = model_of("cpu")
        optimizers = case.make(model)
        guard = sealegs.Guard(model, optimizers, run=None, clip=1.0, telemetry=Telemetry(sample_every=3))
        with guard:
            for step in range(STEPS):
                if case.swaps:  # which rounds, each time
                    swap(optimizers, "eval")
                    swap(optimizers, "train")
                if step in BAD and not skips:
                    continue
                loss = backward(model, step, is_bad=step in BAD)
                before = everything(model, optimizers)
                verdict = guard.step(loss)
                assert verdict.go != (step in BAD)
                assert (everything(model, optimizers) == before) == (step in BAD), step
        ends.append(everything(model, optimizers))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_taken_back_to_the_last_bit_or_refused(name: str) -> None:
    """What a device would do, here on the CPU: what cannot be taken back says so before anything has changed."""
    case = case_of(name)
    model = model_of("cpu")
    optimizers = case.make(model)
    undos = [Undo(each) for each in optimizers]
    if case.swaps:
        swap(optimizers, "train")
    taken_back = 0
    for step in range(STEPS):
        model.zero_grad()
        backward(model, step, is_bad=step in BAD)
        before = everything(model, optimizers)
        is_possible = all(undo.is_possible() for undo in undos)
        for undo, each in zip(undos, optimizers, strict=True):
            if is_possible:
                undo.step(torch.tensor(float(step in BAD)))
            elif step not in BAD:
                each.step()
        taken_back += is_possible
        assert (everything(model, optimizers) == before) == (step in BAD), step
    if case.way == "device":
        assert taken_back == STEPS, [undo.why_not for undo in undos]
    elif taken_back < STEPS:
        assert case.way == "host"
        assert any(undo.why_not for undo in undos)


def test_the_table_of_the_guide_has_a_row_for_each() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guard.md").read_text()
    table = page[page.index("### Which optimizer goes which way") :].partition("\n\n## ")[0]
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:2] == "| "
    ]
    told = {name: cells[1] for cells in rows for name in cells[0].split("; ")}
    assert {name: case.way for name, case in CASES.items()} == {name: told.get(name) for name in CASES}
