"""Live objects in, a ``StoredState`` out, and back."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
)

from sealegs.errors import ConfigError, SourceError
from sealegs.state.checkpoints import Checkpoints, StoredState
from sealegs.state.training_state import TrainingState


class Position:
    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at = state["at"]


OPTIMIZERS: dict[str, Any] = {
    "AdamW fused": lambda groups: AdamW(groups, lr=0.1, betas=(0.9, 0.95), fused=True),
    "AdamW amsgrad": lambda groups: AdamW(groups, lr=0.1, amsgrad=True, foreach=True),
    "AdamW with an LR on the device": lambda groups: AdamW(groups, lr=torch.tensor(0.1), capturable=False, fused=True),
    "SGD momentum": lambda groups: SGD(groups, lr=0.1, momentum=0.9),
    "SGD": lambda groups: SGD(groups, lr=0.1),
}


def training(optimizer: str, width: int = 5, model: nn.Module | None = None) -> TrainingState:
    model = model or nn.Sequential(nn.Linear(3, width), nn.Dropout(0.5), nn.Linear(width, 1))
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    built: Optimizer = OPTIMIZERS[optimizer](
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    )
    return TrainingState(
        model=model,
        optimizers=[built],
        schedulers=[LambdaLR(built, lambda step: 1 / (1 + step))],
        scaler=GradScaler("cpu", enabled=True, init_scale=256.0, growth_interval=2),
        data=Position(),
    )


def train(subject: TrainingState, steps: int) -> list[float]:
    """Steps that draw from every generator there is."""
    scaler = subject.scaler or GradScaler("cpu", enabled=False)
    losses = []
    for _ in range(steps):
        batch = torch.randn(8, 3) * random.random() + float(np.random.random())  # noqa: S311
        loss = subject.model(batch).square().mean()
        scaler.scale(loss).backward()
        for optimizer in subject.optimizers:
            scaler.step(optimizer)
        scaler.update()
        for scheduler in subject.schedulers:
            scheduler.step()
        for optimizer in subject.optimizers:
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def scale(subject: TrainingState) -> float:
    assert subject.scaler is not None
    return subject.scaler.get_scale()


def bits(subject: TrainingState) -> dict[str, Any]:
    """Everything that has a state, in a form that can be compared."""
    state = subject.capture()
    tensors = {name: (tensor.dtype, tensor.tolist()) for name, tensor in state.tensors.items()}
    return {"tensors": tensors, "plain": state.plain, "own": state.own}


def seed(number: int) -> None:
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def there_and_back(
    folder: Path, build: Callable[[], TrainingState], past: int = 3
) -> tuple[TrainingState, TrainingState]:
    """A run that was saved on the way and went on, and one that goes on from there: they must not differ."""
    seed(0)
    subject = build()
    train(subject, past)
    checkpoints = Checkpoints(folder)
    checkpoints.save(past, subject.capture())
    before = bits(subject)
    expected = train(subject, 4)
    other = build()
    train(other, 2)  # one with a past of its own
    assert other.restore(checkpoints.load(past)) == []
    assert bits(other) == before
    assert train(other, 4) == expected
    assert bits(other) == bits(subject)
    return subject, other


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_restored_trainee_goes_on_bit_for_bit(tmp_path: Path, optimizer: str) -> None:
    subject, other = there_and_back(tmp_path, lambda: training(optimizer))
    assert scale(other) == scale(subject) > 256.0
    assert other.schedulers[0].get_last_lr() == subject.schedulers[0].get_last_lr()


SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "multi-step": lambda optimizer: MultiStepLR(optimizer, [2, 4]),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 10),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.1, 20),
    "warm-up, then cosine": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=4), CosineAnnealingLR(optimizer, 10)], [4]
    ),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # SequentialLR gives it itself
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedules_go_on_where_they_were(tmp_path: Path, scheduler: str) -> None:
    def build() -> TrainingState:
        model = nn.Linear(3, 1)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        return TrainingState(model=model, optimizers=[optimizer], schedulers=[SCHEDULERS[scheduler](optimizer)])

    there_and_back(tmp_path, build)


class Odd(nn.Module):
    """Tied, frozen and unused weights, buffers, state that is no tensor, and a part of a telling name."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.up = nn.Linear(4, 3, bias=False)
        self.tied = nn.Linear(4, 3)
        self.tied.weight = self.up.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "again": torch.tensor([self.calls])}

    def set_extra_state(self, state: Any) -> None:
        assert state["calls"] == int(state["again"])
        self.calls = state["calls"]

    def forward(self, rows: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.norm(self.module(rows))
        output: Tensor = self.up(hidden) + self.tied(hidden) + self.frozen(rows)
        return output


def odd() -> TrainingState:
    model = Odd()
    first, *rest = model.parameters()
    optimizers = [AdamW(rest, lr=0.1), SGD([first], lr=0.1, momentum=0.9)]
    return TrainingState(model=model, optimizers=optimizers, schedulers=[MultiStepLR(optimizers[1], [2])])


def test_odd_models_several_optimizers_and_nothing_beside_them(tmp_path: Path) -> None:
    subject, other = there_and_back(tmp_path, odd)
    assert isinstance(other.model, Odd)
    assert other.model.calls == 3 + 4
    assert subject.optimizers[0].state.keys() != set(subject.model.parameters()), "unused weights have no state"
    assert other.model.tied.weight is other.model.up.weight
    moments = {name for name in subject.capture().tensors if name.startswith("optimizer/")}
    assert {"optimizer/0/up.weight.exp_avg", "optimizer/1/module.weight.momentum_buffer"} < moments
    assert not {name for name in moments if "tied.weight" in name or "frozen" in name or "unused" in name}


def test_a_compiled_model_has_the_names_of_a_plain_one() -> None:
    subject = odd()
    model: Any = torch.compile(subject.model, backend="eager")
    compiled = replace(subject, model=model)
    assert compiled.capture().tensors.keys() == subject.capture().tensors.keys()
    train(subject, 1)
    assert compiled.restore(odd().capture()) == []


def test_before_the_first_step_an_optimizer_has_no_state(tmp_path: Path) -> None:
    subject = training("AdamW fused")
    calls: list[object] = []
    subject.optimizers[0].register_step_pre_hook(lambda *arguments: calls.append(arguments))
    Checkpoints(tmp_path).save(0, subject.capture())
    assert not subject.optimizers[0].state
    before = bits(subject)
    assert not [name for name in before["tensors"] if name.startswith("optimizer")]
    train(subject, 2)
    assert len(calls) == 2
    subject.restore(Checkpoints(tmp_path).load(0))
    assert len(calls) == 2, "the optimizer is not stepped to get at its state"
    assert not subject.optimizers[0].state
    assert bits(subject) == before


def test_into_an_optimizer_that_has_not_stepped(tmp_path: Path) -> None:
    subject = training("AdamW fused")
    train(subject, 3)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, subject.capture())
    fresh = training("AdamW fused")
    fresh.restore(checkpoints.load(3))
    mine, theirs = fresh.optimizers[0].state_dict(), subject.optimizers[0].state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    for index, entry in theirs["state"].items():
        assert all(torch.equal(mine["state"][index][name], value) for name, value in entry.items())


class WideAdamW(AdamW):
    """Stands for another library's, whose moments have more digits than the weights."""


def wide_moments(optimizer: Callable[..., Optimizer]) -> TrainingState:
    model = nn.Linear(3, 4).bfloat16()
    subject = TrainingState(model=model, optimizers=[optimizer(model.parameters())])
    for parameter in model.parameters():
        moments = {name: torch.full(parameter.shape, 0.1) for name in ("exp_avg", "exp_avg_sq")}
        subject.optimizers[0].state[parameter] = {**moments, "step": torch.ones(())}
    return subject


def test_moments_keep_a_type_of_their_own() -> None:
    """torch rounds what it loads to the type of the weight."""
    subject = wide_moments(WideAdamW)
    subject.restore(subject.capture())
    for entry in subject.optimizers[0].state.values():
        assert torch.equal(entry["exp_avg"], torch.full(entry["exp_avg"].shape, 0.1))


@pytest.mark.parametrize("settings", [{}, {"fused": True}], ids=str)
def test_moments_of_a_type_that_the_optimizer_cannot_step_with_are_refused(settings: dict[str, bool]) -> None:
    subject = wide_moments(partial(AdamW, **settings))  # type: ignore[arg-type]
    with pytest.raises(SourceError, match="the checkpoint is damaged"):
        subject.restore(subject.capture())


def test_a_state_can_be_restored_twice(tmp_path: Path) -> None:
    subject = training("AdamW amsgrad")
    train(subject, 2)
    Checkpoints(tmp_path).save(2, subject.capture())
    state = Checkpoints(tmp_path).load(2)
    subject.restore(state)
    before, losses = bits(subject), train(subject, 3)
    subject.restore(state)
    assert bits(subject) == before
    assert train(subject, 3) == losses


def test_an_lr_that_is_a_tensor_stays_that_tensor() -> None:
    subject = training("AdamW with an LR on the device")
    lr = subject.optimizers[0].param_groups[0]["lr"]
    state = subject.capture()
    assert isinstance(state.plain["optimizers"][0]["groups"][0]["settings"]["lr"], float)
    train(subject, 2)
    assert lr < 0.1
    subject.restore(state)
    assert subject.optimizers[0].param_groups[0]["lr"] is lr
    assert float(lr) == float(torch.tensor(0.1))


def test_how_an_update_is_computed_is_up_to_the_machine() -> None:
    slow = training("AdamW amsgrad")
    state = slow.capture()
    fast = replace(slow, optimizers=[AdamW(slow.optimizers[0].param_groups, lr=0.1, amsgrad=True, fused=True)])
    for group in fast.optimizers[0].param_groups:
        group.update(fused=True, foreach=None, lr=7.0)
    fast.restore(state)
    assert [group["fused"] for group in fast.optimizers[0].param_groups] == [True, True]
    assert [group["lr"] for group in fast.optimizers[0].param_groups] == [0.1, 0.1]


# Refusals: before anything is changed.


def wider() -> TrainingState:
    return training("AdamW fused", width=7)


def regrouped() -> TrainingState:
    subject = training("AdamW fused")
    matrices, vectors = subject.optimizers[0].param_groups
    vectors["params"].append(matrices["params"].pop())
    return subject


def of_another_kind() -> TrainingState:
    subject = training("AdamW fused")
    return replace(subject, optimizers=[Adam(subject.model.parameters())])


def on_another_schedule() -> TrainingState:
    subject = training("AdamW fused")
    return replace(subject, schedulers=[CosineAnnealingLR(subject.optimizers[0], 9)])


def with_two_schedules() -> TrainingState:
    subject = training("AdamW fused")
    return replace(subject, schedulers=[*subject.schedulers, CosineAnnealingLR(subject.optimizers[0], 9)])


OTHERS = {
    wider: r"another model: 0.bias is \(7,\) there and \(5,\) here; resume with the settings",
    regrouped: r"another run: the parameter group of 2.weight is 1 there and 0 here",
    of_another_kind: r"another run: the optimizer is \['Adam'\] there and \['AdamW'\] here",
    on_another_schedule: r"another run: the scheduler is \['CosineAnnealingLR'\] there and \['LambdaLR'\] here",
    with_two_schedules: r"the scheduler is \['LambdaLR', 'CosineAnnealingLR'\] there and \['LambdaLR'\] here",
}


@pytest.mark.parametrize("other", OTHERS, ids=[build.__name__ for build in OTHERS])
def test_another_state_is_refused_and_nothing_changes(other: Callable[[], TrainingState]) -> None:
    subject = training("AdamW fused")
    state = other().capture()
    train(subject, 2)
    before = bits(subject)
    with pytest.raises(SourceError, match=OTHERS[other]):
        subject.restore(state)
    assert bits(subject) == before


MOMENTS: dict[str, tuple[str, Any]] = {
    "missing": ("exp_avg", None),
    "of another shape": ("exp_avg", torch.zeros(5, 2)),
    "complex": ("exp_avg_sq", torch.zeros(5, 3, dtype=torch.complex64)),
    "text": ("exp_avg_sq", "x"),
    "a step that is no number": ("step", torch.tensor(float("nan"))),
    "a step for each": ("step", torch.zeros(3)),
}


@pytest.mark.parametrize("what", MOMENTS)
def test_moments_that_the_optimizer_could_not_step_with_are_refused_and_nothing_changes(what: str) -> None:
    """A checkpoint with right digests may be a stranger's; torch takes any, and fails at the first step."""
    subject = training("AdamW fused")
    train(subject, 2)
    key, put = MOMENTS[what]
    stored, before = subject.capture(), bits(subject)
    of_weight = stored.plain["optimizers"][0]["state"]["0.weight"]
    del of_weight[key]
    tensors = dict(stored.tensors)
    if isinstance(put, Tensor):
        tensors["put"] = put
        of_weight[key] = {"#aside": "put"}
    elif put is not None:
        of_weight[key] = put
    with pytest.raises(SourceError, match=f"the checkpoint is damaged .{key} of 0.weight is .*; use another one"):
        subject.restore(replace(stored, tensors=tensors))
    assert bits(subject) == before


def test_data_that_refuse_leave_everything_as_it_was() -> None:
    class Gone(Position):
        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            raise SourceError("the shard is gone")

    subject = training("AdamW fused")
    state = subject.capture()
    train(subject, 2)
    before = bits(subject)
    with pytest.raises(SourceError, match="the shard is gone"):
        replace(subject, data=Gone()).restore(state)
    assert bits(subject) == before


def test_a_state_of_an_older_format_is_refused() -> None:
    with pytest.raises(SourceError, match="of an older Sealegs"):
        training("SGD").restore(StoredState({}, {"optimizer": {}}))


def test_what_a_checkpoint_cannot_hold_is_refused_at_the_first_capture() -> None:
    subject = training("SGD")
    subject.schedulers[0].__dict__["shape"] = lambda step: step
    with pytest.raises(
        ConfigError, match="scheduler/0: its state has a function, which cannot be kept in a checkpoint"
    ):
        subject.capture()
    stray = replace(training("SGD"), optimizers=[SGD([nn.Parameter(torch.ones(2))], lr=0.1)])
    with pytest.raises(ConfigError, match="optimizer/0 trains a parameter that is not in the model"):
        stray.capture()


# What cannot be as it was is said.


def test_what_is_not_restored_is_said() -> None:
    full = training("SGD")
    bare = replace(full, scaler=None, data=None)
    assert bare.restore(full.capture()) == [
        "the place in the data is not restored: there are no data here that could go there",
        "the loss scale of the checkpoint is not used",
    ]
    assert full.restore(bare.capture()) == [
        "the place in the data is not restored: the checkpoint does not hold one",
        "the loss scale begins anew",
    ]


def test_weights_of_another_type_are_said_to_be_converted() -> None:
    state = training("SGD").capture()
    half = training("SGD", model=nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 1)).bfloat16())
    (remark,) = half.restore(state)
    assert remark == "weights are converted: 0.weight was saved as torch.float32 and is torch.bfloat16 here"


def test_a_rank_that_was_not_there_is_seeded_by_seed_step_and_rank() -> None:
    """As on a rank of a larger job: nothing of its own, and no random state."""
    subject = training("SGD")
    state = subject.capture()
    tensors = {name: tensor for name, tensor in state.tensors.items() if not name.startswith("rng/")}

    def draws(**changes: Any) -> tuple[float, ...]:
        plain = {**state.plain, "ranks": 8, "seed": changes.pop("seed", 1)}
        remarks = subject.restore(StoredState(tensors, plain, step=changes.pop("step", 10)))
        assert "there were 8 ranks and are 1: the random state of the others is not used" in remarks
        return float(torch.rand(())), random.random(), float(np.random.random())  # noqa: S311

    assert draws() == draws()
    assert len({draws(), draws(seed=2), draws(step=11)}) == 3
