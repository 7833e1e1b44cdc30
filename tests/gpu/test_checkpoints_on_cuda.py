"""Checkpoints of what is on a device: copied beside the training, without a wait."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from sealegs.state.checkpoints import Checkpoints, StoredState
from sealegs.state.training_state import TrainingState

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none here"),
]


def training(*, fused: bool = True, sharded: bool = False) -> TrainingState:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 8)).cuda()
    if sharded:
        fully_shard(model)
    optimizer = AdamW(model.parameters(), lr=0.01, fused=fused, foreach=None if fused else True)
    return TrainingState(
        model=model,
        optimizers=[optimizer],
        schedulers=[LambdaLR(optimizer, lambda step: 1 / (1 + step))],
        scaler=GradScaler("cuda", init_scale=256.0, growth_interval=2),
    )


def train(subject: TrainingState, steps: int) -> list[float]:
    """Steps that draw from the device's generator."""
    assert subject.scaler is not None
    losses = []
    for _ in range(steps):
        loss = subject.model(torch.randn(16, 64, device="cuda")).square().mean()
        subject.scaler.scale(loss).backward()
        subject.scaler.step(subject.optimizers[0])
        subject.scaler.update()
        subject.schedulers[0].step()
        subject.optimizers[0].zero_grad()
        losses.append(loss.item())
    return losses


def bits(subject: TrainingState) -> dict[str, Any]:
    tensors = subject.capture().tensors
    whole = {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}
    return {name: (tensor.dtype, tensor.tolist()) for name, tensor in whole.items()}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_the_host_does_not_wait_and_the_device_copies_before_it_changes(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    weights = {f"model/{name}": torch.zeros(1 << 20, device="cuda") for name in "abc"}
    checkpoints.save_soon(0, StoredState(weights, {}))  # the first one allocates pinned memory
    checkpoints.wait()
    busy = torch.cuda.Event()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(1_000_000_000)  # half a second
        for tensor in weights.values():
            tensor.fill_(1.0)  # the copy comes after what is under way,
        busy.record()
        assert checkpoints.save_soon(1, StoredState(weights, {}))
        checkpoints.before_update()
        for tensor in weights.values():
            tensor.fill_(2.0)  # and before what comes next
        assert not busy.query(), "the host is ahead of the device"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    checkpoints.wait()
    assert checkpoints.failure() is None
    assert all(room.is_pinned() for room in checkpoints._staging._rooms.values())
    for tensor in checkpoints.load(1).tensors.values():
        assert tensor.unique().tolist() == [1.0]
    assert all(tensor.unique().tolist() == [2.0] for tensor in weights.values())


@pytest.mark.parametrize("fused", [True, False])
def test_a_restored_trainee_goes_on_bit_for_bit(tmp_path: Path, fused: bool) -> None:
    torch.manual_seed(0)
    subject = training(fused=fused)
    train(subject, 3)
    checkpoints = Checkpoints(tmp_path)
    before = bits(subject)
    assert checkpoints.save_soon(3, subject.capture())
    checkpoints.before_update()
    expected = train(subject, 4)
    checkpoints.wait()
    assert checkpoints.failure() is None
    other = training(fused=fused)
    train(other, 2)
    assert other.restore(checkpoints.load(3)) == []
    assert bits(other) == before
    assert train(other, 4) == expected
    assert bits(other) == bits(subject)


def test_shards_on_a_device_go_there_and_back(tmp_path: Path) -> None:
    """One rank in a group of its own: the checkpoint does not touch the group that trains."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        subject = training(sharded=True)
        train(subject, 3)
        checkpoints = Checkpoints(tmp_path / "checkpoints")
        before = bits(subject)
        assert checkpoints.save_soon(3, subject.capture())
        checkpoints.before_update()
        expected = train(subject, 4)
        checkpoints.wait()
        assert checkpoints.failure() is None
        other = training(sharded=True)
        other.restore(checkpoints.load(3, like=other.capture()))
        assert bits(other) == before
        assert train(other, 4) == expected
        plain = training()
        plain.restore(checkpoints.load(3))
        assert bits(plain) == before
    finally:
        dist.destroy_process_group()
