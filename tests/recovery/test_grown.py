"""Changes by intention: a model that is given more parameters on the way, and weights that the loop sets by itself."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sealegs
from sealegs import Guard, Playbook

AT, STEPS = 240, 400


class Heads(nn.Module):
    """Classes come later, two at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 32)
        self.heads = nn.ModuleList([nn.Linear(32, 2)])

    def forward(self, inputs: Tensor) -> Tensor:
        inside = torch.relu(self.body(inputs))
        return torch.cat([head(inside) for head in self.heads], -1)


def batches() -> list[tuple[int, Tensor, Tensor]]:
    """Of two classes, then of two others; they overlap, so that there is a loss to compare with."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(4, 6, generator=generator)
    labels = [2 * (step >= AT) + torch.randint(2, (256,), generator=generator) for step in range(STEPS)]
    return [(step, centres[y] + torch.randn(256, 6, generator=generator), y) for step, y in enumerate(labels)]


def test_a_model_that_grows_is_not_brought_back_and_what_it_was_is_not_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Heads()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with Guard(model, optimizer, run=tmp_path / "a", playbook=Playbook.standard(), checkpoint_every=50) as guard:
        for step, inputs, labels in guard.batches(batches()):
            if step == AT and not guard.is_probe:
                model.heads.append(nn.Linear(32, 2))
                model.heads[1].get_parameter("bias").data.fill_(-8.0)  # of which none has come yet
                optimizer.add_param_group({"params": list(model.heads[1].parameters())})
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            guard.step(loss)
            assert guard.loop.checkpoints is not None
            guard.loop.checkpoints.wait()  # or the snapshot may be given up before its turn to be written
        guard.loop.finish()
    events = sealegs.open_run(tmp_path / "a").events
    assert [event.detail["change"] for event in events if event.kind == "announced"] == [
        "the optimizer trains 2 more parameters than before"
    ]
    assert any(event.kind == "alarm" for event in events), "it is a surprise all the same"
    assert not any(event.kind == "intervention" for event in events)
    (failed,) = [event.detail["reason"] for event in events if event.kind == "capsule-failed"]
    assert "the model has grown since" in failed
    assert guard.number == STEPS


@pytest.mark.parametrize("is_meant", [True, False])
def test_weights_that_the_loop_has_set_are_meant_to_be_so(is_meant: bool, tmp_path: Path) -> None:
    """A head that begins anew is no damage. What torch has no word of is: so does memory that fails."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-2)
    head = model[2].get_parameter("weight")
    with Guard(model, optimizer, run=tmp_path / "a", playbook=Playbook.standard(), checkpoint_every=50) as guard:
        for _, inputs, labels in guard.batches(batches()):
            if guard.number == AT - 70 and not guard.is_probe:
                with torch.no_grad():
                    (head if is_meant else head.data).mul_(-20.0)
            loss = F.cross_entropy(model(inputs), labels % 2)
            loss.backward()
            guard.step(loss)
            if guard.number >= AT:
                break
        guard.loop.finish()
    kinds = [event.kind for event in sealegs.open_run(tmp_path / "a").events]
    assert "alarm" in kinds
    assert ("intervention" not in kinds) == ("weights-set" in kinds) == is_meant
