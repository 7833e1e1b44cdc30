"""Snapshots of what lies on a device: exact, in place, without waiting, and in the memory that was promised."""

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from sealegs.state import memory
from sealegs.state.snapshots import Snapshot, Snapshots

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none here"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

PLACES = ["device", "host"]
LARGE = 64 * 2**20
"""Elements of a tensor that takes milliseconds to leave the device."""


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.norm = nn.BatchNorm1d(256)
        self.narrow = nn.Parameter(torch.ones(256, dtype=torch.bfloat16))
        self.frozen = nn.Linear(256, 256).requires_grad_(False)
        self.last = nn.Linear(256, 64)
        self.register_buffer("turned", torch.randn(64, 32).T, persistent=False)

    def forward(self, batch: Tensor) -> Tensor:
        hidden = self.norm(self.first(batch)) * self.narrow
        return self.last(self.frozen(hidden)).square().mean()  # type: ignore[no-any-return]


OPTIMIZERS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "adamw-fused": lambda m: [AdamW(m.parameters(), lr=0.01, fused=True)],
    "adamw-steps-on-the-host": lambda m: [AdamW(m.parameters(), lr=0.01, foreach=True)],
    "adamw-capturable-tensor-lr": lambda m: [
        AdamW(m.parameters(), lr=torch.tensor(0.01, device="cuda"), foreach=True, capturable=True)
    ],
    "sgd-momentum-fused": lambda m: [SGD(m.parameters(), lr=0.01, momentum=0.9, fused=True)],
    "muon-and-adamw": lambda m: [
        Muon([p for p in m.parameters() if p.ndim == 2 and p.requires_grad], lr=0.02),
        AdamW([p for p in m.parameters() if p.ndim != 2 and p.requires_grad], lr=0.01, fused=True),
    ],
}


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def train(model: nn.Module, optimizers: list[Optimizer], seeds: range) -> None:
    for seed in seeds:
        torch.manual_seed(seed)
        model(torch.randn(32, 64, device="cuda")).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def tensors(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    for place, optimizer in enumerate(optimizers):
        for number, state in optimizer.state_dict()["state"].items():
            found |= {f"{place}.{number}.{key}": item for key, item in state.items() if isinstance(item, Tensor)}
        for number, group in enumerate(optimizer.param_groups):
            found |= {f"{place}.{number}.{key}": item for key, item in group.items() if isinstance(item, Tensor)}
    return found


def bits(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
    return {
        name: (tensor.dtype, tensor.device, tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).tolist())
        for name, tensor in tensors(model, optimizers).items()
    }


def addresses(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors(model, optimizers).items()}


def extremes(tensor: Tensor) -> tuple[float, float]:
    low, high = tensor.detach().aminmax()
    return low.item(), high.item()


def promote(snapshots: Snapshots, step: int) -> Snapshot:
    for healthy in range(step, step + 16):
        snapshots.healthy(healthy)
    newest = snapshots.newest(before=step)
    assert newest is not None
    return newest


def promoted(snapshots: Snapshots, step: int = 50) -> Snapshot:
    snapshots.take(step, {})
    return promote(snapshots, step)


def small() -> tuple[nn.Module, list[Optimizer]]:
    torch.manual_seed(0)
    model = Network().cuda()
    optimizers = OPTIMIZERS["adamw-fused"](model)
    train(model, optimizers, range(2))
    return model, optimizers


def large() -> tuple[nn.Module, list[Optimizer]]:
    """One weight and its momentum, a quarter of a gibibyte each."""
    model = nn.Module()
    weight = nn.Parameter(torch.full((LARGE,), 1.0, device="cuda"))
    model.register_parameter("weight", weight)
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    weight.grad = None
    return model, [optimizer]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_everything_comes_back_where_it_was(name: str, place: Any) -> None:
    torch.manual_seed(0)
    model = Network().cuda()
    optimizers = OPTIMIZERS[name](model)
    train(model, optimizers, range(3))
    snapshots = Snapshots(model, optimizers, place=place)
    then, where = bits(model, optimizers), addresses(model, optimizers)
    snapshot = promoted(snapshots)
    for _ in range(2):
        snapshots.before_update()
        train(model, optimizers, range(3, 6))
        assert bits(model, optimizers) != then
        snapshots.restore_tensors(snapshot)
        assert bits(model, optimizers) == then
        assert addresses(model, optimizers) == where
    for optimizer in optimizers:
        optimizer.state.clear()
    snapshots.restore_tensors(snapshot)
    assert bits(model, optimizers) == then
    assert snapshots.description.endswith({"device": "on the device", "host": "in pinned host memory"}[place])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_host_waits_for_nothing(name: str, place: Any) -> None:
    torch.manual_seed(0)
    model = Network().cuda()
    optimizers = OPTIMIZERS[name](model)
    train(model, optimizers, range(3))
    snapshots = Snapshots(model, optimizers, place=place)
    promoted(snapshots, 50)
    snapshot = promoted(snapshots, 100)
    torch.cuda.synchronize()
    with no_waiting():
        torch.cuda._sleep(1_000_000_000)
        snapshots.take(150, {})
        snapshots.before_update()
        snapshots.restore_tensors(snapshot)
    assert not torch.cuda.current_stream().query(), "the host is ahead of the device"


def test_a_copy_that_leaves_the_device_is_of_the_moment_it_was_asked_for() -> None:
    model, optimizers = large()
    weight = model.get_parameter("weight")
    snapshots = Snapshots(model, optimizers, place="host")
    promoted(snapshots, 50)
    for step in (100, 150):
        then = weight[0].item(), optimizers[0].state[weight]["momentum_buffer"][0].item()
        snapshots.take(step, {})
        snapshots.before_update()
        weight.grad = torch.ones_like(weight)
        optimizers[0].step()  # the device would change the weights while it copies them
        snapshot = promote(snapshots, step)
        snapshots.restore_tensors(snapshot)
        assert extremes(weight) == (then[0], then[0])
        assert extremes(optimizers[0].state[weight]["momentum_buffer"]) == (then[1], then[1])
        with torch.no_grad():
            weight.add_(1.0)


def test_what_a_forward_pass_changes_is_copied_before_it() -> None:
    model, optimizers = large()
    model.register_buffer("statistics", torch.ones(LARGE, device="cuda"))
    statistics = model.get_buffer("statistics")
    snapshots = Snapshots(model, optimizers, place="host")
    promoted(snapshots, 50)
    snapshots.take(100, {})
    statistics.add_(1.0)  # before_update comes later in a step
    snapshots.restore_tensors(promote(snapshots, 100))
    assert extremes(statistics) == (1.0, 1.0)


def test_memory_that_is_freed_while_it_is_copied_is_nobody_elses_yet() -> None:
    model, optimizers = large()
    weight = model.get_parameter("weight")
    snapshots = Snapshots(model, optimizers, place="host")
    promoted(snapshots, 50)
    momentum = optimizers[0].state[weight]["momentum_buffer"][0].item()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    snapshots.take(100, {})
    optimizers[0].state.clear()
    others = torch.full((LARGE,), 7.0, device="cuda")  # what was freed is what it would get
    snapshots.before_update()
    snapshots.restore_tensors(promote(snapshots, 100))
    assert extremes(optimizers[0].state[weight]["momentum_buffer"]) == (momentum, momentum)
    del others


def test_memory_on_the_device_is_what_was_promised() -> None:
    model, optimizers = large()
    before = torch.cuda.memory_allocated()
    snapshots = Snapshots(model, optimizers, place="device")
    assert torch.cuda.memory_allocated() == before
    snapshots.take(50, {})
    assert snapshots.held_bytes == 4 * 4 * LARGE
    assert snapshots.description == "2 x 0.50 GiB on the device"
    assert 0 <= torch.cuda.memory_allocated() - before - snapshots.held_bytes <= 2 * 2**21  # torch's own rounding
    promote(snapshots, 50)
    snapshot = promoted(snapshots, 100)
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    for step in (150, 200):
        promoted(snapshots, step)
    snapshots.take(250, {})
    found = snapshots.newest(before=249)
    assert found is not None
    snapshots.restore_tensors(found)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations
    del snapshot, found
    snapshots.drop()
    assert torch.cuda.memory_allocated() == before


def test_pinned_memory_is_what_was_promised_and_is_given_back() -> None:
    model, optimizers = small()
    allocated = torch.cuda.memory_allocated()
    snapshots = Snapshots(model, optimizers, place="host")
    snapshots.take(50, {})
    parts = [part for buffer in snapshots._buffers for part in buffer.parts.values()]
    assert all(part.is_pinned() for part in parts)
    blocks = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}
    assert (len(blocks), sum(blocks.values())) == (2, snapshots.held_bytes)
    assert torch.cuda.memory_allocated() == allocated
    snapshots.drop()
    assert not any(part.is_pinned() for part in parts)


def test_a_captured_step_goes_on_from_what_was_restored() -> None:
    torch.manual_seed(0)
    model = Network().cuda()
    optimizers: list[Optimizer] = [AdamW(model.parameters(), lr=0.01, capturable=True)]
    batch = torch.randn(32, 64, device="cuda")
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            optimizers[0].zero_grad()
            model(batch).backward()
            optimizers[0].step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    optimizers[0].zero_grad()
    with torch.cuda.graph(graph):
        model(batch).backward()
        optimizers[0].step()
    snapshots = Snapshots(model, optimizers)
    snapshot = promoted(snapshots)
    then = bits(model, optimizers)
    for _ in range(3):
        graph.replay()
    later = bits(model, optimizers)
    assert later != then
    snapshots.restore_tensors(snapshot)
    assert bits(model, optimizers) == then
    for _ in range(3):
        graph.replay()
    assert bits(model, optimizers) == later


def test_the_place_is_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizers = small()
    first = Snapshots(model, optimizers)
    first.take(50, {})
    both = first.held_bytes
    assert first.description.endswith(" on the device")

    def where(on_cuda: int, on_cpu: int, limit: float | None = None) -> str:
        monkeypatch.setattr(memory, "free_bytes", lambda device: on_cuda if device.type == "cuda" else on_cpu)
        snapshots = Snapshots(model, optimizers, memory=limit)
        snapshots.take(50, {})
        assert snapshots.held_bytes in (0, both)
        return snapshots.description

    assert where(2 * both, 0).endswith(" on the device")
    assert where(2 * both - 1, 2 * both).endswith(" in pinned host memory")
    assert where(2 * both - 1, 0, limit=both).endswith(" in pinned host memory")
    assert where(2 * both, 2 * both, limit=both - 1).startswith("none: ")
    nowhere = where(2 * both - 1, 2 * both - 1)
    assert nowhere.startswith("none: ")
    assert "memory of the cuda:0 (" in nowhere
    assert "memory of the cpu (" in nowhere


def test_what_the_run_needs_again_is_not_free() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    activations = torch.empty(2**30, dtype=torch.uint8, device=device)
    del activations
    between_steps = memory.free_bytes(device)
    torch.cuda.reset_peak_memory_stats()
    assert memory.free_bytes(device) - between_steps >= 2**30


def test_memory_that_cannot_be_had_does_not_end_the_run() -> None:
    model, optimizers = large()
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**24) / total)
    try:
        snapshots = Snapshots(model, optimizers, place="device")
        snapshots.take(50, {})
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert snapshots.description == "none: 2 x 0.50 GiB on the device could not be had (CUDA out of memory)"
    assert (snapshots.held_bytes, snapshots.due(100)) == (0, False)
    snapshots.before_update()
    with torch.no_grad():
        assert model.get_parameter("weight").zero_().sum().item() == 0.0


def test_memory_that_cannot_be_pinned_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizers = small()
    mapping = mmap.mmap(-1, 2**24)
    monkeypatch.setattr(mmap, "mmap", lambda *_: mapping)  # CUDA refuses to pin the same memory twice
    snapshots = Snapshots(model, optimizers, place="host")
    snapshots.take(50, {})
    assert " in pinned host memory could not be had (pinning it failed with CUDA error " in snapshots.description
    assert snapshots.held_bytes == 0
    train(model, optimizers, range(1))  # CUDA has forgotten its error
    torch.cuda.synchronize()
