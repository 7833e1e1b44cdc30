"""Queries and keys are rescaled on the device: by the exact factor, not where the gate is closed, and nobody waits."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Muon

import sealegs
from sealegs.guard_options import Clipping, Telemetry
from sealegs.lab.model import Transformer
from sealegs.lab.settings import ModelSettings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none here"),
]

LIMIT, EVERY = 3.0, 4
NAME = "blocks.1.attention.query_key_value.weight"


def trained(folder: Path, limit: float, steps: int, *, muon: bool, bad: int = -1, synced_from: int = 1000) -> Any:
    """The weights before and after each step."""
    torch.manual_seed(0)
    model = Transformer(ModelSettings(width=64, layers=2, heads=4, hidden=96, context=32, vocabulary=64)).cuda()
    with torch.no_grad():
        model.get_parameter(NAME)[:128].mul_(4)
    hidden = [p for p in model.blocks.parameters() if p.ndim == 2] if muon else []
    others = [p for p in model.parameters() if all(p is not each for each in hidden)]
    optimizers: list[Any] = [Muon(hidden, lr=1e-3)] if muon else []
    optimizers.append(AdamW(others, lr=1e-3, fused=True))
    batches = torch.randint(64, (steps, 8, 33), generator=torch.Generator().manual_seed(1)).cuda()
    seen = []
    with sealegs.Guard(
        model,
        optimizers,
        run=folder,
        clip=Clipping(norm=1.0, attention_logit=limit),
        act=sealegs.Skipping(way="device"),
        telemetry=Telemetry(sample_every=EVERY),
    ) as guard:
        for step in range(steps):
            with torch.autocast("cuda", torch.bfloat16):
                logits = model(batches[step, :, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batches[step, :, 1:].flatten())
            (loss * (math.nan if step == bad else 1.0)).backward()
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if step >= synced_from else "default")
            try:
                guard.step(loss)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            seen.append((before, {name: p.detach().clone() for name, p in model.named_parameters()}))
    return seen


@pytest.mark.parametrize("muon", [False, True])
def test_the_factor_is_exact_and_comes_after_the_update(muon: bool, tmp_path: Path) -> None:
    (_, limited), (_, free) = (trained(tmp_path / str(at), at, EVERY + 1, muon=muon)[-1] for at in (LIMIT, 1000.0))
    assert [name for name in limited if not torch.equal(limited[name], free[name])] == [NAME]
    ratio = (limited[NAME] / free[NAME])[:128].view(2, 4, -1)
    torch.testing.assert_close(ratio, ratio[:, :, :1].expand_as(ratio), rtol=1e-6, atol=0)
    (done,) = (e for e in sealegs.open_run(tmp_path / str(LIMIT)).events if e.kind == "qk-clip")
    (module,) = done.detail["modules"]
    assert float(ratio[:, :, 0].min()) == pytest.approx(math.sqrt(LIMIT / module["logit"]), rel=1e-6)
    assert [head for head in range(4) if ratio[0, head, 0] < 1 - 1e-6] == module["heads"]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("muon", [False, True])
def test_a_closed_gate_rescales_nothing_and_the_host_waits_for_no_look(muon: bool, tmp_path: Path) -> None:
    bad = 4 * EVERY
    seen = trained(tmp_path / "a", LIMIT, 6 * EVERY, muon=muon, bad=bad, synced_from=2 * EVERY + 1)
    same = [step for step, (before, after) in enumerate(seen) if all(torch.equal(after[n], before[n]) for n in before)]
    assert same == [bad]
    run = sealegs.open_run(tmp_path / "a")
    clipped = [event.step for event in run.events if event.kind == "qk-clip"]
    assert clipped[0] == EVERY
    assert bad not in clipped
