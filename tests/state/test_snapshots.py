"""Snapshots: bit for bit, in place, all or nothing; two buffers, and only what has proved healthy is given back."""

import copy
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.step.test_update import OPTIMIZERS, backward, network
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import TorchDispatchMode

from sealegs.errors import ConfigError, SourceError
from sealegs.state import memory
from sealegs.state.snapshots import Snapshot, Snapshots


class Odd(nn.Module):
    """Every kind of tensor that a model may have."""

    scratch: Tensor
    flags: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.narrow = nn.Parameter(torch.ones(6, dtype=torch.bfloat16))
        self.norm = nn.BatchNorm1d(6)
        self.picture = nn.Conv2d(2, 3, 2)
        self.picture.weight.data = self.picture.weight.data.contiguous(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(5, 6).T)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.other_object = nn.Parameter(self.embedding.weight.data)  # tied too
        self.register_buffer("scratch", torch.randn(3), persistent=False)
        self.register_buffer("nan", torch.tensor([-1, 0x7FC12345], dtype=torch.int32).view(torch.float32))
        self.register_buffer("expanded", torch.randn(3, 1).expand(3, 4))
        self.register_buffer("gaps", torch.randn(4, 4)[:, ::2])
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("rotation", torch.randn(2, dtype=torch.complex64))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("scalar", torch.tensor(1.5, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        self.scratch += 1.0
        self.flags.logical_not_()
        hidden = self.norm(self.frozen(self.embedding(tokens)) * self.narrow) @ self.turned @ self.turned.T
        logits: Tensor = self.head(hidden) + self.picture(torch.ones(1, 2, 3, 3)).sum()
        return logits.sum(-1) + self.other_object.sum()


def train(model: nn.Module, optimizers: list[Optimizer], seeds: range) -> None:
    for seed in seeds:
        if isinstance(model, Odd):
            torch.manual_seed(seed)
            model(torch.randint(0, 7, (8,))).square().mean().backward()
        else:
            backward(model, None, seed=seed, poison=False)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def tensors(model: nn.Module, optimizers: list[Optimizer]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor, found in another way than the one under test finds them."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for place, optimizer in enumerate(optimizers):
        for number, state in optimizer.state_dict()["state"].items():
            yield from ((f"{place}.{number}.{key}", item) for key, item in state.items() if isinstance(item, Tensor))
        for number, group in enumerate(optimizer.param_groups):
            yield from ((f"{place}.group {number}.{k}", item) for k, item in group.items() if isinstance(item, Tensor))


def bits(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
    """All that is held, to the last bit, and the rest as text."""
    found: dict[str, Any] = {}
    for name, tensor in tensors(model, optimizers):
        whole = tensor.detach().clone(memory_format=torch.contiguous_format)
        found[name] = tensor.dtype, tuple(tensor.shape), whole.view(-1).view(torch.uint8).tolist()
    for place, optimizer in enumerate(optimizers):
        found[f"{place}"] = repr(_without_tensors(optimizer.state_dict()))
    return found


def _without_tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_tensors(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_tensors(item) for item in value]
    return "tensor" if isinstance(value, Tensor) else value


def addresses(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, tuple[int, int, tuple[int, ...]]]:
    return {name: (id(t), t.data_ptr(), t.stride()) for name, t in tensors(model, optimizers)}


def promoted(snapshots: Snapshots, step: int = 50, **plain: Any) -> Snapshot:
    snapshots.take(step, plain)
    for healthy in range(step, step + 16):
        snapshots.healthy(healthy)
    newest = snapshots.newest(before=step)
    assert newest is not None
    return newest


def plain_network() -> tuple[nn.Module, list[Optimizer]]:
    model = network()
    return model, [AdamW(model.parameters(), lr=0.01, fused=True)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_that_goes_back_is_the_run_that_never_went_on(name: str) -> None:
    model = network()
    optimizers = OPTIMIZERS[name](model)
    schedulers = [LambdaLR(optimizer, lambda step: 1 / (1 + step)) for optimizer in optimizers]
    snapshots = Snapshots(model, optimizers)
    train(model, optimizers, range(3))
    then = bits(model, optimizers)
    snapshot = promoted(snapshots)
    train(model, optimizers, range(3, 6))
    later = bits(model, optimizers)
    where = addresses(model, optimizers)
    for _ in range(2):  # it stays valid
        for scheduler in schedulers:
            scheduler.step()
        train(model, optimizers, range(20, 23))
        assert bits(model, optimizers) != later
        snapshots.restore_tensors(snapshot)
        assert bits(model, optimizers) == then
        assert addresses(model, optimizers) == where
        train(model, optimizers, range(3, 6))
        assert bits(model, optimizers) == later


def odd_network() -> tuple[Odd, list[Optimizer]]:
    torch.manual_seed(0)
    model = Odd()
    weights = [model.embedding.weight, model.turned]
    return model, [
        AdamW([p for p in model.parameters() if p.requires_grad and all(p is not w for w in weights)], lr=0.01),
        SGD([{"params": [weights[0]], "lr": 0.1}, {"params": [weights[1]], "momentum": 0.5}], lr=torch.tensor(0.01)),
    ]


@pytest.mark.parametrize("place", ["auto", "device", "host"])
def test_all_kinds_of_tensors_come_back(place: Any) -> None:
    model, optimizers = odd_network()
    train(model, optimizers, range(3))
    snapshots = Snapshots(model, optimizers, place=place)
    then, where = bits(model, optimizers), addresses(model, optimizers)
    snapshot = promoted(snapshots)
    train(model, optimizers, range(3, 6))
    later = bits(model, optimizers)
    assert {key for key in then if then[key] != later[key]} >= {"embedding.weight", "scratch", "flags", "narrow"}
    with torch.no_grad():
        for _, tensor in tensors(model, optimizers):
            tensor[(0,) * tensor.ndim].fill_(7) if tensor.numel() else None  # expanded ones cannot be filled
    optimizers[1].param_groups[0].update(lr=0.7, momentum=0.3)
    snapshots.restore_tensors(snapshot)
    assert bits(model, optimizers) == then
    assert addresses(model, optimizers) == where
    train(model, optimizers, range(3, 6))
    assert bits(model, optimizers) == later


def test_what_is_tied_is_held_once() -> None:
    model, _ = odd_network()
    held = Snapshots(model, [])
    held.take(50, {})
    apart, _ = odd_network()
    apart.head.weight = nn.Parameter(model.head.weight.detach().clone())
    apart.other_object = nn.Parameter(model.head.weight.detach().clone())
    more = Snapshots(apart, [])
    more.take(50, {})
    assert len(held._buffers[0].parts) == len(more._buffers[0].parts) - 2
    assert held._buffers[0].parts["model/expanded"].shape == (3, 1)


def test_elements_lie_in_a_snapshot_as_they_do_in_the_model() -> None:
    """Else a device would copy tensor by tensor."""
    model, _ = odd_network()
    snapshots = Snapshots(model, [])
    snapshots.take(50, {})
    parts = snapshots._buffers[0].parts
    assert parts["model/turned"].stride() == model.turned.stride() == (1, 6)
    assert parts["model/picture.weight"].stride() == model.picture.weight.stride() != (8, 4, 2, 1)
    assert parts["model/gaps"].is_contiguous()
    assert all(part.data_ptr() % 64 == 0 for part in parts.values())


def test_parameters_that_only_an_optimizer_knows_are_held() -> None:
    model = network()
    master = nn.Parameter(torch.ones(3))
    optimizer = SGD([*model.parameters(), master], lr=0.1)
    snapshots = Snapshots(model, [optimizer])
    snapshot = promoted(snapshots)
    with torch.no_grad():
        master.zero_()
    snapshots.restore_tensors(snapshot)
    assert master.tolist() == [1.0] * 3


def test_state_that_did_not_exist_yet_is_removed() -> None:
    for name in OPTIMIZERS:
        model = network()
        optimizers = OPTIMIZERS[name](model)
        then = bits(model, optimizers)
        snapshots = Snapshots(model, optimizers)
        snapshot = promoted(snapshots, step=0)
        train(model, optimizers, range(3))
        later = bits(model, optimizers)
        snapshots.restore_tensors(snapshot)
        assert bits(model, optimizers) == then, name
        train(model, optimizers, range(3))
        assert bits(model, optimizers) == later, name


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_that_was_lost_is_made_again(name: str) -> None:
    model = network()
    optimizers = OPTIMIZERS[name](model)
    train(model, optimizers, range(3))
    then = bits(model, optimizers)
    snapshots = Snapshots(model, optimizers)
    snapshot = promoted(snapshots)
    for optimizer in optimizers:
        optimizer.state.clear()
    snapshots.restore_tensors(snapshot)
    assert bits(model, optimizers) == then
    train(model, optimizers, range(3))
    snapshots.restore_tensors(snapshot)
    assert bits(model, optimizers) == then, "what was made is not the snapshot itself"


def test_states_within_states_come_back() -> None:
    model, optimizers = plain_network()
    parameter = next(model.parameters())
    factors = [torch.ones(2), torch.full((3,), 2.0)]
    optimizers[0].state[parameter] = {"factors": factors, "rank": (4, None), "deep": {"step": torch.tensor(5)}}
    optimizers[0].state["calls"] = 3  # type: ignore[index]
    snapshots = Snapshots(model, optimizers)
    snapshot = promoted(snapshots)
    state = optimizers[0].state[parameter]
    factors[0].zero_()
    state["deep"]["step"].zero_()
    state["factors"].append(torch.ones(1))
    state["rank"] = (5, 6)
    del optimizers[0].state["calls"]  # type: ignore[arg-type]
    optimizers[0].state["new"] = 9  # type: ignore[index]
    snapshots.restore_tensors(snapshot)
    assert optimizers[0].state[parameter] is state
    assert [factor.tolist() for factor in state["factors"]] == [[1.0, 1.0], [2.0, 2.0, 2.0]]
    assert state["factors"][0] is factors[0]
    assert (state["rank"], state["deep"]["step"].item()) == ((4, None), 5)
    assert optimizers[0].state["calls"] == 3  # type: ignore[index]
    assert "new" not in optimizers[0].state


def _add_group(model: nn.Module, optimizers: list[Optimizer]) -> None:
    optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def _other_moment(model: nn.Module, optimizers: list[Optimizer]) -> None:
    optimizers[0].state[model.get_parameter("norm.bias")]["exp_avg"] = torch.ones(9)


DAMAGES: dict[str, tuple[Callable[[nn.Module, list[Optimizer]], Any], str]] = {
    "shape": (lambda m, o: setattr(m, "scratch", torch.ones(4)), r"model/scratch was float32 \(3,\) .* float32 \(4,\)"),
    "dtype": (lambda m, o: setattr(m, "scratch", torch.ones(3).double()), "model/scratch .* is float64"),
    "device": (lambda m, o: setattr(m, "scratch", torch.ones(3, device="meta")), "model/scratch is on the meta device"),
    "gone": (lambda m, o: setattr(m, "scratch", None), "model/scratch .* is absent"),
    "new": (lambda m, o: m.register_buffer("late", torch.ones(1)), "model/late was absent"),
    "untied": (lambda m, o: setattr(m.head, "weight", nn.Parameter(torch.ones(7, 6))), "head.weight was absent"),
    "group": (_add_group, r"optimizer 0 was of \[\d+\] parameters and is of \[\d+, 1\]"),
    "moment": (_other_moment, r"optimizer 0/\d+/exp_avg .* is float32 \(9,\)"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_does_not_fit_is_refused_and_nothing_is_changed(name: str) -> None:
    damage, message = DAMAGES[name]
    torch.manual_seed(0)
    model = Odd()
    optimizers: list[Optimizer] = [AdamW(model.parameters(), lr=0.01)]
    train(model, optimizers, range(3))
    snapshots = Snapshots(model, optimizers)
    snapshot = promoted(snapshots)
    train(model, optimizers, range(3, 5))
    damage(model, optimizers)
    with torch.no_grad():
        before, where = bits(*_on_the_cpu(model, optimizers)), addresses(model, optimizers)
        del optimizers[0].state[model.narrow]
        with pytest.raises((SourceError, ConfigError), match=message):
            snapshots.restore_tensors(snapshot)
        assert model.narrow not in optimizers[0].state
        after = bits(*_on_the_cpu(model, optimizers))
        assert {key: after[key] for key in after if key != "0"}.items() <= before.items()
        now = addresses(model, optimizers)
        assert {key: where[key] for key in now} == now


def _on_the_cpu(model: nn.Module, optimizers: list[Optimizer]) -> tuple[nn.Module, list[Optimizer]]:
    """Without what has no bits."""
    if isinstance(scratch := getattr(model, "scratch", None), Tensor) and scratch.is_meta:
        model = copy.copy(model)
        model._buffers = {name: buffer for name, buffer in model._buffers.items() if name != "scratch"}
    return model, optimizers


def test_a_snapshot_that_is_gone_is_refused() -> None:
    model, optimizers = plain_network()
    snapshots = Snapshots(model, optimizers)
    first = promoted(snapshots, 50)
    promoted(snapshots, 100)
    snapshots.take(150, {})
    with pytest.raises(SourceError, match="snapshot of step 50 is no longer held"):
        snapshots.restore_tensors(first)
    assert snapshots.candidate is not None
    with pytest.raises(SourceError, match="snapshot of step 150 is no longer held"):
        snapshots.restore_tensors(snapshots.candidate)


def test_ages_are_as_promised() -> None:
    model, optimizers = plain_network()
    snapshots = Snapshots(model, optimizers)
    newest, older = set(), set()
    for step in range(1000):
        if snapshots.due(step):
            snapshots.take(step, {})
        snapshots.healthy(step)
        if (found := snapshots.newest(before=step)) and step >= 200:
            newest.add(step + 1 - found.step)
            if second := snapshots.newest(before=found.step - 1):
                older.add(step + 1 - second.step)
    assert (min(newest), max(newest)) == (16, 65)
    assert (min(older), max(older)) == (66, 100)


def test_when_a_snapshot_is_due() -> None:
    model, optimizers = plain_network()
    snapshots = Snapshots(model, optimizers)
    assert [step for step in range(201) if snapshots.due(step)] == [50, 100, 150, 200]
    snapshots.take(50, {})
    assert not snapshots.due(100), "there is a candidate"
    snapshots.doubtful()
    assert not snapshots.due(100), "in doubt"
    snapshots.healthy(99)
    assert snapshots.due(100)
    promoted(snapshots, 100)
    assert not snapshots.due(100), "a run that went back there has it"
    snapshots.forget_after(99)
    assert snapshots.due(100)


def test_what_was_taken_after_a_step_is_forgotten() -> None:
    model, optimizers = plain_network()
    snapshots = Snapshots(model, optimizers)
    promoted(snapshots, 50)
    promoted(snapshots, 100)
    snapshots.forget_after(100)
    assert snapshots.newest(before=999) is snapshots.newest(before=100) is not None
    snapshots.forget_after(99)
    assert (snapshots.newest(before=999), snapshots.held_bytes > 0) == (snapshots.newest(before=50), True)
    snapshots.take(150, {})
    snapshots.forget_after(150)
    assert snapshots.candidate is not None
    snapshots.forget_after(149)
    assert [snapshots.candidate, snapshots.newest(before=999)] == [None, snapshots.newest(before=50)]
    snapshots.forget_after(49)
    assert snapshots.newest(before=999) is None


def test_verdicts_that_come_late_do_not_count_for_what_was_taken_after_their_step() -> None:
    model, optimizers = plain_network()
    snapshots = Snapshots(model, optimizers, promote_after=2)
    snapshots.take(50, {})
    for step in (48, 49, 50):
        snapshots.healthy(step)
        assert snapshots.newest(before=99) is None
    snapshots.healthy(51)
    assert snapshots.newest(before=99) is not None


def test_what_else_belongs_to_a_moment_may_come_late() -> None:
    model, optimizers = plain_network()
    snapshots = Snapshots(model, optimizers)
    given = {"batch": 3}
    snapshots.take(50, given)
    given["batch"] = 4
    assert snapshots.candidate is not None
    snapshots.candidate.plain["judge"] = [1, 2]
    for step in range(50, 66):
        snapshots.healthy(step)
    newest = snapshots.newest(before=50)
    assert newest is not None
    assert newest.plain == {"batch": 3, "judge": [1, 2]}
    assert snapshots.newest(before=49) is None


def test_a_third_snapshot_is_one_pass_and_allocates_nothing() -> None:
    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    seen: list[str] = []
    model, optimizers = plain_network()
    train(model, optimizers, range(2))
    snapshots = Snapshots(model, optimizers)
    promoted(snapshots, 50)
    promoted(snapshots, 100)
    with Operations():  # type: ignore[no-untyped-call]
        snapshots.take(150, {})
    assert seen == ["aten._foreach_copy_.default"]


def test_tensors_that_come_and_go_begin_anew() -> None:
    model = nn.Sequential(network(), nn.Linear(4, 2000))
    optimizers: list[Optimizer] = [AdamW(model.parameters(), lr=0.01)]
    snapshots = Snapshots(model, optimizers)
    promoted(snapshots, step=0)
    small = snapshots.held_bytes
    train(model, optimizers, range(1))
    snapshots.take(50, {})
    assert snapshots.newest(before=99) is None
    assert snapshots.held_bytes > small
    assert len(snapshots._buffers) == 2


def _two_bytes(model: nn.Module, optimizers: list[Optimizer]) -> int:
    snapshots = Snapshots(model, optimizers)
    snapshots.take(50, {})
    return snapshots.held_bytes


def test_the_budget_is_kept_to_the_byte() -> None:
    model, optimizers = plain_network()
    train(model, optimizers, range(1))
    both = _two_bytes(model, optimizers)
    exact = sum(t.nbytes for _, t in tensors(model, optimizers))
    assert 2 * exact <= both < 2 * (exact + 64 * 16 + mmap.PAGESIZE)
    enough = Snapshots(model, optimizers, memory=both)
    enough.take(50, {})
    assert enough.held_bytes == both
    assert enough.description == f"2 x {both / 2 / 1024:.1f} KiB in host memory"
    for too_little in (both - 1, both // 2, 1):
        none = Snapshots(model, optimizers, memory=too_little)
        assert none.description == "none yet"
        assert none.due(50)
        none.take(50, {})
        assert (none.held_bytes, none.candidate, none.due(100)) == (0, None, False)
        assert none.description == (
            f"none: 2 x {both / 2 / 1024:.1f} KiB are more than memory={too_little}; memory={both} is enough"
        )


@pytest.mark.parametrize("ranks", [1, 4])
def test_without_a_budget_it_is_half_of_what_is_free(ranks: int, tmp_path: Path, monkeypatch: Any) -> None:
    model, optimizers = plain_network()
    both = _two_bytes(model, optimizers)
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    wanted = 2 * both // 1024 * ranks
    for free, held in ((wanted, both), (wanted - 1, 0)):
        (tmp_path / "meminfo").write_text(
            f"MemTotal: 9999999 kB\nMemFree: 0 kB\nMemAvailable:    {free} kB\nBuffers: 0\n"
        )
        snapshots = Snapshots(model, optimizers)
        snapshots.take(50, {})
        assert snapshots.held_bytes == held
    assert "do not fit into half of the free memory of the cpu (" in snapshots.description
    given = Snapshots(model, optimizers, memory=both)
    given.take(50, {})
    assert given.held_bytes == both


def test_a_container_may_have_less_than_its_host(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    cpu = torch.device("cpu")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    assert memory.free_bytes(cpu) == memory._half_of_the_host() > 0, "no /proc/meminfo, as on a Mac"
    (tmp_path / "meminfo").write_text("MemTotal: 10 kB\n")
    assert memory.free_bytes(cpu) == memory._half_of_the_host()
    (tmp_path / "meminfo").write_text("MemAvailable: 100 kB\n")
    assert memory.free_bytes(cpu) == 102_400
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("50000\n")
    (tmp_path / "memory.stat").write_text("anon 20000\ninactive_file 10000\n")
    assert memory.free_bytes(cpu) == 102_400
    (tmp_path / "memory.max").write_text("60000\n")
    assert memory.free_bytes(cpu) == 20_000
    (tmp_path / "memory.max").write_text("30000\n")
    assert memory.free_bytes(cpu) == 0


def test_memory_that_cannot_be_had_does_not_end_the_run() -> None:
    model, optimizers = plain_network()
    # more than a process can address, as elements that share a little memory
    model.register_buffer("vast", torch.empty(2**25, dtype=torch.uint8).as_strided((2**24, 2**24), (1, 1)))
    snapshots = Snapshots(model, optimizers, memory=1e18)
    snapshots.take(50, {})
    assert snapshots.description.startswith("none: 2 x 262144.00 GiB in host memory could not be had (")
    assert (snapshots.held_bytes, snapshots.due(100), snapshots.newest(100)) == (0, False, None)
    snapshots.take(100, {})
    snapshots.healthy(100)
    snapshots.before_update()
    train(model, optimizers, range(1))


def test_all_memory_is_given_back() -> None:
    model, optimizers = plain_network()
    snapshots = Snapshots(model, optimizers)
    snapshot = promoted(snapshots)
    snapshots.drop()
    assert (snapshots.held_bytes, snapshots.description) == (0, "none yet")
    assert snapshots.newest(before=100) is None
    with pytest.raises(SourceError, match="no longer held"):
        snapshots.restore_tensors(snapshot)
    assert promoted(snapshots, 100)


class Opaque:
    """Something with a state that nobody knows how to copy."""


def test_what_cannot_be_held_is_refused_in_one_sentence() -> None:
    model, optimizers = plain_network()
    model.register_buffer("graph", torch.eye(3).to_sparse())
    with pytest.raises(ConfigError, match=r"model/graph is a tensor of torch.sparse_coo, torch.float32: .* memory=0 "):
        Snapshots(model, optimizers)
    assert Snapshots(model, optimizers, memory=0).description == "none: memory=0"
    del model.graph
    snapshots = Snapshots(model, optimizers)
    for value, said in ((torch.eye(3).to_sparse(), "a tensor of torch.sparse_coo"), (Opaque(), "a Opaque: ")):
        optimizers[0].state[next(model.parameters())]["odd"] = value
        with pytest.raises(ConfigError, match=f"optimizer 0/0/odd is {said}"):
            snapshots.take(50, {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0: "),
        ({"promote_after": 0}, "promote_after=0: "),
        ({"memory": -1}, "memory=-1: "),
        ({"memory": float("nan")}, "memory=nan: "),
        ({"place": "disk"}, "place='disk': "),
    ],
)
def test_settings_that_mean_nothing_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Snapshots(*plain_network(), **options)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("is_lost", [False, True], ids=["kept", "lost"])
def test_shards_come_back(is_lost: bool) -> None:
    def shards() -> dict[str, Any]:
        found = dict(tensors(model, optimizers))
        return {name: getattr(tensor, "_local_tensor", tensor).tolist() for name, tensor in found.items()}

    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizers: list[Optimizer] = [AdamW(model.parameters(), lr=0.01)]
    train(model, optimizers, range(3))
    snapshots = Snapshots(model, optimizers)
    then = shards()
    snapshot = promoted(snapshots)
    assert "model/0.weight/_local_tensor" in snapshots._buffers[0].parts
    train(model, optimizers, range(3, 6))
    later = shards()
    local = next(model.parameters())._local_tensor.data_ptr()  # type: ignore[attr-defined]
    if is_lost:
        optimizers[0].state.clear()
    snapshots.restore_tensors(snapshot)
    assert shards() == then
    assert next(model.parameters())._local_tensor.data_ptr() == local  # type: ignore[attr-defined]
    moment = optimizers[0].state[next(model.parameters())]["exp_avg"]
    assert type(moment) is type(next(model.parameters()))
    train(model, optimizers, range(3, 6))
    assert shards() == later


class Lifetimes(RuleBasedStateMachine):
    """Runs that go on, doubt and go back at will, against a plain account of what was taken and survived."""

    EVERY, PROMOTE_AFTER = 4, 2

    @initialize(late=st.integers(0, 2))
    def begin(self, late: int) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        optimizer = SGD(self.model.parameters(), lr=0.1)
        self.snapshots = Snapshots(self.model, [optimizer], every=self.EVERY, promote_after=self.PROMOTE_AFTER)
        self.late = late
        """So many steps after a step its verdict is known."""
        self.step = 0
        self.weight = 0.0
        self.is_in_doubt = False
        self.verdicts: list[tuple[int, bool]] = []
        self.taken: dict[int, float] = {}
        """Weights by step, of what no buffer was written over and no doubt has met."""
        self.survived: dict[int, int] = {}
        self.memory: set[tuple[int, ...]] = set()

    def proved(self) -> list[int]:
        return sorted(step for step in self.taken if self.survived[step] >= self.PROMOTE_AFTER)

    def lose(self, is_lost: Callable[[int], bool]) -> None:
        self.taken = {step: weight for step, weight in self.taken.items() if not is_lost(step)}

    @rule(
        steps=st.integers(0, 15),
        doubtful=st.sets(st.integers(0, 15), max_size=1),
        event=st.sampled_from(["nothing", "doubt", "forget", "go back"]),
        back=st.integers(0, 12),
    )
    def train(self, steps: int, doubtful: set[int], event: str, back: int) -> None:
        """The one rule there is: hypothesis leaves out some of several, and a run without steps shows nothing."""
        for number in range(steps):
            self.take_a_step(number not in doubtful)
            self.what_is_given_has_proved_healthy()
            self.there_are_two_buffers_from_the_first_to_the_last()
        if event == "doubt":
            self.doubt()
        elif event == "forget":
            self.forget(back)
        elif event == "go back":
            self.go_back(back)

    def take_a_step(self, is_healthy: bool) -> None:
        if self.snapshots.due(self.step):
            newest = max(self.proved(), default=None)
            self.lose(lambda step: step != newest)
            self.snapshots.take(self.step, {"weight": self.weight})
            self.taken[self.step], self.survived[self.step] = self.weight, 0
            self.memory.add((self.snapshots.held_bytes, *map(id, self.snapshots._buffers)))
        self.snapshots.before_update()
        self.weight += 1.0
        with torch.no_grad():
            self.model.weight.fill_(self.weight)
        self.verdicts.append((self.step, is_healthy))
        self.step += 1
        if len(self.verdicts) > self.late:
            judged, is_healthy = self.verdicts.pop(0)
            if is_healthy:
                self.snapshots.healthy(judged)
                self.is_in_doubt = False
                self.survived = {step: count + (judged >= step) for step, count in self.survived.items()}
            else:
                self.doubt()

    def doubt(self) -> None:
        self.snapshots.doubtful()
        self.is_in_doubt = True
        proved = self.proved()
        self.lose(lambda step: step not in proved)

    def forget(self, back: int) -> None:
        self.snapshots.forget_after(self.step - back)
        self.lose(lambda step: step > self.step - back)

    def go_back(self, back: int) -> None:
        self.doubt()
        if (snapshot := self.snapshots.newest(before=self.step - back)) is None:
            return
        assert snapshot.step <= self.step - back
        self.snapshots.restore_tensors(snapshot)
        assert self.model.weight.item() == self.taken[snapshot.step] == snapshot.plain["weight"]
        self.step, self.weight = snapshot.step, self.taken[snapshot.step]
        self.verdicts.clear()
        self.forget(0)

    @precondition(lambda self: hasattr(self, "snapshots"))
    @invariant()
    def what_is_given_has_proved_healthy(self) -> None:
        found = []
        before = self.step
        while (snapshot := self.snapshots.newest(before)) is not None:
            assert snapshot.step <= before
            assert self.taken[snapshot.step] == snapshot.plain["weight"]
            found.append(snapshot.step)
            before = snapshot.step - 1
        assert found[::-1] == self.proved()
        candidate = self.snapshots.candidate
        assert {*found, *([candidate.step] if candidate else [])} == set(self.taken)
        assert not (self.is_in_doubt and any(map(self.snapshots.due, range(self.step, self.step + self.EVERY))))

    @precondition(lambda self: hasattr(self, "snapshots"))
    @invariant()
    def there_are_two_buffers_from_the_first_to_the_last(self) -> None:
        assert len(self.memory) <= 1
        held = [id(held.buffer) for held in (*self.snapshots._kept, self.snapshots._candidate) if held]
        assert len(set(held)) == len(held) <= 2
        assert set(held) <= set(map(id, self.snapshots._buffers))


Lifetimes.TestCase.settings = settings(max_examples=60, stateful_step_count=12)
TestLifetimes = Lifetimes.TestCase
