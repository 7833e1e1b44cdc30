"""Frozen weights on a device: one digest for CPU and device, and a look for which the host does not wait."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tests.state.adapters import adapted, loss_of, texts
from torch.optim import AdamW

from sealegs.state.frozen import FrozenWeights, digests
from sealegs.state.snapshots import Snapshots
from sealegs.state.training_state import TrainingState

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none here"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]


@contextmanager
def nobody_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("count", [3, 2**16 + 1, 2**24 + 5])
def test_a_digest_is_the_same_on_every_device(dtype: torch.dtype, count: int) -> None:
    tensor = (torch.randn(count, generator=torch.Generator().manual_seed(1)) * 9).to(dtype)
    assert digests(tensor.cuda()) == digests(tensor)


def test_a_look_waits_for_nothing_and_finds_what_was_written() -> None:
    model = adapted("LoRA").cuda()
    optimizer = AdamW([each for each in model.parameters() if each.requires_grad], fused=True)
    frozen = FrozenWeights(model, [optimizer])
    training = TrainingState(model=model, optimizers=[optimizer], frozen=frozen)
    snapshots = Snapshots(model, [optimizer], frozen=frozen, promote_after=1)
    for step, batch in enumerate(texts()[:4], start=1):
        loss_of(model, batch.cuda()).backward()
        frozen.before_update()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            model.inside.base.weight.data.mul_(0.5)
        if step == 1:
            snapshots.take(step, {})  # which makes room
        else:
            with nobody_waits():
                snapshots.take(step, {})
                snapshots.before_update()
        snapshots.healthy(step)
        assert (step in snapshots.steps) == (step != 3)
    assert "model/inside.base.weight" in training.capture().tensors
    assert "model/outside.base.weight" not in training.capture().tensors
