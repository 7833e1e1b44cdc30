"""After a skip with NaN gradients weights, state and counters are bitwise as before; each goes the way it should."""

import importlib.util
from pathlib import Path

import pytest
import torch
from tests.step.optimizers import CASES, backward, everything, model_of

import sealegs
from sealegs.guard_options import Telemetry

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none here"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of packages that are not ours
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

BAD = (0, 14, 15, 23)
STEPS = 30
SYNCED_FROM = 8
"""Memory is made in the first steps, and kernels are compiled."""


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("asked", ["device", "host"])
@pytest.mark.parametrize("name", CASES)
def test_a_skip_leaves_every_bit(name: str, asked: str, tmp_path: Path) -> None:
    case = CASES[name]
    if case.needs and importlib.util.find_spec(case.needs) is None:
        pytest.skip(f"{case.needs} is not installed")
    model = model_of("cuda")
    optimizers = case.make(model)
    way = sealegs.Skipping(way=asked)  # type: ignore[arg-type]
    waits_for_none = case.way == "found_inf" or (case.way == "device" and asked == "device")
    guard = sealegs.Guard(model, optimizers, run=tmp_path / "a", clip=1.0, act=way, telemetry=Telemetry(sample_every=0))
    with guard:
        for step in range(STEPS):
            if case.swaps:
                for each in optimizers:
                    each.eval()  # type: ignore[attr-defined]
                    each.train()  # type: ignore[attr-defined]
            loss = backward(model, step, is_bad=step in BAD)
            # a fused kernel that skips its first step makes zeros, which change nothing
            compared = [each for each in optimizers if step or not each.param_groups[0].get("fused")]
            before = everything(model, compared)
            torch.cuda.synchronize()
            is_held = waits_for_none and step >= SYNCED_FROM
            torch.cuda.set_sync_debug_mode("error" if is_held else "default")
            try:
                guard.step(loss)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert (everything(model, compared) == before) == (step in BAD), step
    run = sealegs.open_run(tmp_path / "a")
    assert [event.step for event in run.events if event.kind == "skip"] == list(BAD)
    said = [event.detail for event in run.events if event.kind == "skip-way"]
    if case.way == "device":
        assert [each["way"] for each in said] == [asked]
    elif case.way == "host" and asked == "device":
        assert said[-1]["way"] == "host"  # some show only in their first step that they count on the host
    is_gated = "gate_closed" in run.signals
    on_device = run.logged("gate_closed").sum() if is_gated else 0  # not logged where the host has decided
    assert (on_device > STEPS // 2) == waits_for_none
