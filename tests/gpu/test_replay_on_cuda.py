"""An incident on a device: its capsule, and its replay there."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sealegs
from sealegs.capsule.read import open_capsule
from sealegs.guard_options import Checkpointing
from sealegs.replay.experiment import Experiment
from sealegs.replay.subject import Subject
from sealegs.replay.tested_causes import judge_causes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none here"),
]
STRUCK = 300


def subject(device: str) -> Subject:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.mse_loss(model(batch["x"].to(device)), batch["y"].to(device))

    return Subject(model=model, optimizers=[optimizer], loss=loss)


@pytest.mark.filterwarnings("ignore::sealegs.errors.RunEndedBadly")  # nobody treats it
@pytest.mark.parametrize("where", ["host", "device"])
def test_an_incident_on_a_device_is_run_again(where: str, tmp_path: Path) -> None:
    """Batches on the host or on the device; the state is a snapshot that lay on the device."""
    one = subject("cuda")
    torch.manual_seed(1)
    data = [{"x": x, "y": x[:, :4]} for x in torch.randn(STRUCK + 60, 16, 8)]
    for batch in data[STRUCK:]:
        batch["y"] = 20 * torch.randn(16, 4)
    if where == "device":
        data = [{name: part.cuda() for name, part in batch.items()} for batch in data]
    how: dict[str, Any] = {
        "playbook": sealegs.Playbook.observe(),
        "act": False,
        "clip": 1.0,
        "checkpoint_every": Checkpointing(snapshot_memory=2**30),
    }
    with sealegs.Guard(one.model, one.optimizers, run=tmp_path / "a", **how) as guard:
        for batch in guard.batches(data):
            loss = one.loss(batch)
            loss.backward()
            guard.step(loss)
            if guard.number == STRUCK + 40:
                break
    capsule = open_capsule(tmp_path / "a" / "incidents" / "1")
    assert capsule.incident.start == STRUCK
    experiment = Experiment(capsule, subject("cuda"))
    found = judge_causes(experiment)
    assert found.departure is None, found.departure
    assert found.cause == "bad-data-batch"
    for step, seen in experiment.seen.items():
        assert seen.loss == pytest.approx(float(experiment.rows[step]["loss"]), rel=1e-4)
