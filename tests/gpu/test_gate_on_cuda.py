"""The gate as a kernel and as a captured graph: the decisions of the detectors on the host, and no waiting."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sealegs.step import gate as gates
from sealegs.step.gate import Gate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none here"),
]

_spec = importlib.util.spec_from_file_location("host_side", Path(__file__).parents[1] / "step" / "test_gate.py")
assert _spec is not None
assert _spec.loader is not None
host_side: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(host_side)


@pytest.fixture(params=["kernel", "graph"])
def gate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Gate:
    if request.param == "graph":
        monkeypatch.setitem(sys.modules, "sealegs.step.gate_triton", None)  # as where there is no Triton
    made = Gate(torch.device("cuda"), host_side.DETECTORS)
    assert ("_captured" in repr(made._decide)) == (request.param == "graph")
    assert bool(made.without_kernel) == (request.param == "graph"), made.without_kernel
    return made


@pytest.mark.parametrize(
    ("run", "clip_norm"), [("troubled", float("inf")), ("troubled", 1.0), ("signed", float("inf"))]
)
def test_it_decides_as_the_detectors_do(gate: Gate, run: str, clip_norm: float) -> None:
    values, announced = getattr(host_side, run)(2500, 0)
    expected, states = host_side.on_host(values, announced, clip_norm)
    rows = torch.empty(len(values), len(gates.ROW), dtype=torch.float64, device="cuda")
    on_device = torch.tensor(values, dtype=torch.float64, device="cuda")
    for step in range(len(values)):
        coarse = any(at <= step < at + host_side.WIDENED_STEPS for at in announced)
        told = gates.HostFacts(step in announced, coarse, clip_norm=clip_norm)
        rows[step] = gate.decide(on_device[step, 0], on_device[step, 1], told=told)
    found = rows.cpu().numpy()
    assert (found[:, 2] == [row[0] for row in expected]).all()
    np.testing.assert_allclose(found[:, 3:5], [row[1:] for row in expected], rtol=1e-9)
    for held, state in zip(gate.state.tolist(), states[-1], strict=True):
        np.testing.assert_allclose(held, gates.flat(state), rtol=1e-9)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_the_host_waits_for_nothing(gate: Gate) -> None:
    loss, norm = torch.full((), 2.0, device="cuda"), torch.full((), 0.5, device="cuda", dtype=torch.bfloat16)
    gate.decide(loss, norm)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        gate.decide(loss, norm)
        gate.decide(loss, norm, told=gates.HostFacts(announced=True, coarse=True, held=True))
        gate.decide(loss * float("nan"), norm)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert gate.found_inf.item() == 1.0


@pytest.mark.parametrize(
    ("norms", "worst"),
    [
        *([([3.0, 4.0], 1), ([2.0], 0), ([float("inf"), 1.0, float("nan")], 2)]),
        *([([1.0, float("inf"), 2.0], 1), ([0.1] * 700 + [0.2] + [0.1] * 700, 700)]),
    ],
)
def test_norms_of_all_gradients_make_one(gate: Gate, norms: list[float], worst: int) -> None:
    gate.clip.fill_(2.0)
    row = gate.decide(torch.full((), 2.0, device="cuda"), torch.tensor(norms, dtype=torch.float64, device="cuda"))
    total = float(np.linalg.norm(norms))
    assert row.tolist()[1] == pytest.approx(total, rel=1e-12, nan_ok=True)
    assert row.tolist()[5] == worst
    expected = max((total + 1e-6) / 2.0, 1.0) if np.isfinite(total) else 1.0
    assert gate.grad_scale.item() == pytest.approx(expected, rel=1e-6)
