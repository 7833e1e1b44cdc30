"""Steps that a device takes back: nothing is left of them, and the host waits for none."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adafactor, AdamW, Muon, Optimizer

import sealegs
from sealegs.step.undo import Undo, prepare_in_torch, quickest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none here"),
]

_spec = importlib.util.spec_from_file_location("undo_cases", Path(__file__).parents[1] / "step" / "test_undo.py")
assert _spec is not None
assert _spec.loader is not None
cases: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cases)

ON_THE_DEVICE = ("lion", "replaces", "eight_bits", "transposed", "late")


def odd(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def test_the_kernel_puts_back_every_byte_or_none() -> None:
    torch.manual_seed(0)
    kept = [odd(3), odd(70_001, dtype=torch.bfloat16), odd(257, 129).t(), odd(1), odd(5, dtype=torch.float64)]
    kept += [torch.randint(-100, 100, (33_333,), device="cuda", dtype=torch.int8), odd(2000)[::2], odd(0)]
    prepare = quickest(torch.device("cuda"))
    assert prepare is not prepare_in_torch, "it is the kernel that is tested"
    for way in (prepare, prepare_in_torch):
        for flag in (0.0, 1.0, 0.0, 1.0):
            now = [torch.full_like(each, 7) for each in kept]
            way(list(zip(now, kept, strict=True)))(torch.tensor(flag, device="cuda"))
            for after, before in zip(now, kept, strict=True):
                assert torch.equal(after, before if flag else torch.full_like(before, 7))


@pytest.mark.parametrize("remember", ON_THE_DEVICE)
def test_a_step_that_is_taken_back_leaves_nothing(remember: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(40, 30, bias=False).cuda()
    optimizer = cases.Own(model.parameters(), lambda own, p, state: _on_cuda(remember, own, p, state))
    undo = Undo(optimizer)
    for step in range(6):
        assert undo.is_possible()
        model.zero_grad()
        model(torch.randn(5, 40, device="cuda")).square().mean().backward()
        before = cases.everything(model, optimizer)
        undo.step(torch.tensor(float(step % 2), device="cuda"))
        assert (cases.everything(model, optimizer) == before) == bool(step % 2)


def _on_cuda(remember: str, own: Any, p: Tensor, state: dict[str, Any]) -> None:
    with torch.device("cuda"):
        cases.REMEMBERS[remember](own, p, state)


@pytest.mark.parametrize("make", [AdamW, Adafactor])
def test_what_counts_on_the_host_is_left_to_it(make: Callable[[Iterator[nn.Parameter]], Optimizer]) -> None:
    model = nn.Linear(4, 4).cuda()
    undo = Undo(make(model.parameters()))
    ways = []
    for _ in range(3):
        ways.append(undo.is_possible())
        model(torch.randn(5, 4, device="cuda")).sum().backward()
        if ways[-1]:
            undo.step(torch.zeros((), device="cuda"))
    assert ways[-1] is False
    assert undo.why_not


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("way", ["device", "host"])
def test_muon_beside_adamw_skips_exactly_and_waits_for_nothing(way: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).cuda()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    optimizers = [Muon(matrices, lr=0.02), AdamW(vectors, lr=0.01, fused=True)]
    inputs = torch.randn(40, 16, 64, device="cuda")

    def everything(
        step: int,
    ) -> list[Any]:  # a fused kernel that skips its first step makes zeros, which change nothing
        return [cases.everything(model, each) for each in optimizers[: 1 if step == 0 else 2]]

    with sealegs.Guard(model, optimizers, run=tmp_path / "a", clip=1.0, act=sealegs.Skipping(way=way)) as guard:
        for step in range(40):
            loss = model(inputs[step]).square().mean()
            (loss * (float("nan") if step in (0, 20, 33) else 1.0)).backward()
            before = everything(step)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if way == "device" and step >= 5 else "default")
            try:
                guard.step(loss)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert (everything(step) == before) == (step in (0, 20, 33)), step
    skips = [event.step for event in sealegs.open_run(tmp_path / "a").events if event.kind == "skip"]
    assert skips == [0, 20, 33]


def test_the_cheaper_way_is_measured_and_said(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8))).cuda()
    inputs = torch.randn(64, 256, device="cuda")
    with sealegs.Guard(model, Muon(model.parameters(), lr=1e-3), run=tmp_path / "a", clip=1.0) as guard:
        for _ in range(80):
            loss = model(inputs).square().mean()
            loss.backward()
            guard.step(loss)
    (said,) = (event.detail for event in sealegs.open_run(tmp_path / "a").events if event.kind == "skip-way")
    assert said["way"] == ("device" if said["device_ms"] <= said["host_ms"] else "host")
    assert said.get("copied_bytes", 0) == (8 * 2 * 256 * 256 * 4 if said["way"] == "device" else 0)
