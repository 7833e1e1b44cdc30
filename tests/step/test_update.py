"""A skip is exact: weights, moments and step counters keep every bit, whatever the optimizer, however it is decided."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Muon, NAdam, Optimizer, RAdam, RMSprop
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR

from sealegs.step.update import Update, fuse, reads_found_inf

Make = Callable[[nn.Module], list[Optimizer]]


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    """As they are used together: matrices to Muon, the rest to AdamW."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    return [Muon(matrices, lr=0.02), AdamW(vectors, lr=0.01)]


def two_fused(model: nn.Module) -> list[Optimizer]:
    first, *rest = model.parameters()
    return [AdamW([first], lr=0.01, fused=True), SGD(rest, lr=0.01, momentum=0.9, fused=True)]


OPTIMIZERS: dict[str, Make] = {
    "adamw-fused": lambda m: [AdamW(m.parameters(), lr=0.01, fused=True)],
    "adamw-fused-amsgrad-tensor-lr": lambda m: [
        AdamW(m.parameters(), lr=torch.tensor(0.01), fused=True, amsgrad=True, foreach=False)
    ],
    "adamw-foreach": lambda m: [AdamW(m.parameters(), lr=0.01, foreach=True)],
    "adamw-for-loop": lambda m: [AdamW(m.parameters(), lr=0.01, foreach=False)],
    "adam": lambda m: [Adam(m.parameters(), lr=0.01)],
    "adam-fused": lambda m: [Adam(m.parameters(), lr=0.01, fused=True)],
    "sgd-momentum": lambda m: [SGD(m.parameters(), lr=0.01, momentum=0.9)],
    "sgd-momentum-fused": lambda m: [SGD(m.parameters(), lr=0.01, momentum=0.9, dampening=0.1, fused=True)],
    "sgd-fused": lambda m: [SGD(m.parameters(), lr=0.01, fused=True)],
    "adagrad-fused": lambda m: [Adagrad(m.parameters(), lr=0.01, fused=True)],
    "adafactor": lambda m: [Adafactor(m.parameters())],
    "nadam": lambda m: [NAdam(m.parameters())],
    "radam": lambda m: [RAdam(m.parameters())],
    "rmsprop": lambda m: [RMSprop(m.parameters(), momentum=0.9)],
    "muon-and-adamw": muon_and_adamw,
    "two-fused": two_fused,
    "two-groups-fused": lambda m: [
        AdamW([{"params": [p], "weight_decay": 0.1 * i} for i, p in enumerate(m.parameters())], lr=0.01, fused=True)
    ],
}
FUSED = {
    "adamw-fused",
    "adamw-fused-amsgrad-tensor-lr",
    "adam-fused",
    "sgd-momentum-fused",
    "sgd-fused",
    "adagrad-fused",
    "two-fused",
    "two-groups-fused",
}


def bits(model: nn.Module, optimizers: list[Optimizer]) -> list[tuple[str, Any]]:
    """Weights and everything the optimizers remember. A state of zeros is one that is yet to be made."""

    def flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, Tensor):
            if value.any():
                yield name, value.detach().clone().contiguous().view(-1).view(torch.uint8).tolist()
        elif isinstance(value, dict):
            for key, item in value.items():
                yield from flat(f"{name}.{key}", item)
        elif value:
            yield name, repr(value)

    found = [item for name, p in model.named_parameters() for item in flat(name, p)]
    for place, optimizer in enumerate(optimizers):
        found += flat(f"optimizer {place}", optimizer.state_dict()["state"])
    return found


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))


def backward(model: nn.Module, scaler: GradScaler | None, *, seed: int, poison: bool, micro_batches: int = 1) -> None:
    torch.manual_seed(seed)
    for micro in range(micro_batches):
        loss = model(torch.randn(5, 6)).square().mean() / micro_batches
        (scaler.scale(loss) if scaler else loss).backward()
        if poison and micro == 0:
            (*_, last) = model.parameters()
            assert last.grad is not None
            last.grad.view(-1)[1] = float("nan")


def can_be_decided_on_the_device(update: Update) -> bool:
    return update.reads_found_inf() or (update.is_taken_back() and update.can_be_taken_back())


def take_step(update: Update, model: nn.Module, decide: str, *, seed: int, poison: bool, micro_batches: int = 1) -> str:
    """One step, decided where it is asked to be if that is possible. Gives where it was decided."""
    backward(model, update.scaler, seed=seed, poison=poison, micro_batches=micro_batches)
    update.unscale()
    if decide == "device" and can_be_decided_on_the_device(update):
        update.apply_unless(torch.tensor(float(poison)))
        return "device"
    update.apply(not poison)
    return "host"


@pytest.mark.parametrize("name", ["adamw-fused", "adamw-fused-amsgrad-tensor-lr", "sgd-momentum"])
@pytest.mark.parametrize("decide", ["host", "device"])
def test_factors_stand_around_the_schedule(name: str, decide: str) -> None:
    """A factor of a half is a schedule at half the rate, and leaves the schedule alone."""
    weights = []
    for factor in (0.5, 1.0):
        model = network()
        optimizers = OPTIMIZERS[name](model)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * (0.5 / factor)
        scheduler = ExponentialLR(optimizers[0], 0.9)
        update = Update(optimizers, [scheduler])
        update.factors = {"lr": factor} if factor != 1.0 else {}
        for seed in range(4):
            rate = scheduler.get_last_lr()
            take_step(update, model, decide, seed=seed, poison=False)
            assert scheduler.get_last_lr() == [pytest.approx(0.9 * r) for r in rate]
        weights.append(nn.utils.parameters_to_vector(model.parameters()))
    assert torch.allclose(weights[0], weights[1], rtol=1e-6)


@pytest.mark.parametrize("name", sorted(FUSED))
def test_gradients_divided_on_the_way_are_clipped_gradients(name: str) -> None:
    weights = []
    for on_the_way in (True, False):
        model = network()
        update = Update(OPTIMIZERS[name](model))
        for seed in range(5):
            backward(model, None, seed=seed, poison=False)
            if on_the_way and update.reads_found_inf():
                norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
                update.apply_unless(torch.tensor(0.0), torch.clamp((norm + 1e-6) / 0.05, min=1.0))
            else:
                assert nn.utils.clip_grad_norm_(model.parameters(), 0.05) > 0.05
                update.apply(True)
        weights.append(nn.utils.parameters_to_vector(model.parameters()))
    assert torch.allclose(weights[0], weights[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("first", [True, False], ids=["first-step", "later"])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaler"])
@pytest.mark.parametrize("micro_batches", [1, 3], ids=["whole", "accumulated"])
def test_nothing_changes_on_a_skipped_step(name: str, first: bool, scaled: bool, micro_batches: int) -> None:
    for decide in ("host", "device"):
        model = network()
        optimizers = OPTIMIZERS[name](model)
        scaler = GradScaler("cpu", init_scale=8.0) if scaled else None
        schedulers = [LambdaLR(optimizer, lambda step: 1 / (1 + step)) for optimizer in optimizers]
        update = Update(optimizers, schedulers, scaler)
        if not first:
            for seed in range(3):
                take_step(update, model, decide, seed=seed, poison=False, micro_batches=micro_batches)
        before = bits(model, optimizers)
        where = take_step(update, model, decide, seed=7, poison=True, micro_batches=micro_batches)
        assert bits(model, optimizers) == before
        on_device = decide == "device" and not (first and name in FIRST_ON_HOST)
        assert where == ("device" if on_device else "host")
        assert all(parameter.grad is None for parameter in model.parameters())
        assert schedulers[0].last_epoch == (1 if first else 4), "the schedule counts attempts"
        if scaler:
            assert scaler.get_scale() == 4.0, "the scaler has seen the overflow"
        take_step(update, model, decide, seed=8, poison=False, micro_batches=micro_batches)
        assert bits(model, optimizers) != before, "the next step is taken"


FIRST_ON_HOST = {"sgd-momentum-fused", "two-fused"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_with_a_skip_is_the_run_without_that_batch(name: str) -> None:
    """Nothing hidden stays behind either: what comes after is bit for bit what comes without the poisoned batch."""
    results = []
    skip = -1
    for steps in ([0, 1, 2, 3], [0, 1, skip, 2, 3], [skip, 0, 1, 2, 3]):
        for decide in ("host", "device"):
            model = network()
            optimizers = OPTIMIZERS[name](model)
            update = Update(optimizers)
            for seed in steps:
                take_step(update, model, decide, seed=seed, poison=seed == skip)
            results.append(bits(model, optimizers))
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("decide", ["host", "device"])
def test_a_checkpoint_that_turns_fused_off_is_noticed(decide: str) -> None:
    model, other = network(), network()
    plain = AdamW(other.parameters(), lr=0.01)
    take_step(Update([plain]), other, "host", seed=0, poison=False)
    fused = AdamW(model.parameters(), lr=0.01, fused=True)
    assert reads_found_inf(fused)
    fused.load_state_dict(copy.deepcopy(plain.state_dict()))
    model.load_state_dict(other.state_dict())
    assert not reads_found_inf(fused)
    before = bits(model, [fused])
    assert take_step(Update([fused]), model, decide, seed=1, poison=True) == decide, "it is taken back instead"
    assert bits(model, [fused]) == before


def test_a_subclass_is_not_trusted() -> None:
    class Mine(AdamW):
        pass

    assert not reads_found_inf(Mine(network().parameters(), fused=True))
    assert not reads_found_inf(NAdam(network().parameters()))


def test_the_tensor_is_taken_away_again() -> None:
    model = network()
    optimizer = AdamW(model.parameters(), fused=True)
    take_step(Update([optimizer]), model, "device", seed=0, poison=False)
    assert not hasattr(optimizer, "found_inf")


def test_as_ever_is_what_the_loop_would_have_done() -> None:
    """Shadow mode: a poisoned gradient goes where it would have gone, and only a scaler stops it."""
    model = network()
    update = Update([AdamW(model.parameters())])
    backward(model, None, seed=0, poison=True)
    update.apply_as_ever()
    assert any(parameter.isnan().any() for parameter in model.parameters())
    model = network()
    before = bits(model, [])
    scaler = GradScaler("cpu", init_scale=8.0)
    update = Update([AdamW(model.parameters())], scaler=scaler)
    backward(model, scaler, seed=0, poison=True)
    update.unscale()
    update.apply_as_ever()
    assert bits(model, []) == before
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("name", ["adamw-foreach", "adam", "sgd-momentum"])
@pytest.mark.parametrize("first", [True, False], ids=["first-step", "later"])
def test_fused_by_the_guard_it_goes_on_as_a_fused_one(name: str, first: bool) -> None:
    """Nothing that was learned is lost, only the last bits are others; and its kernels read ``found_inf`` now."""
    found = []
    for is_fused_later in (False, True):
        model = network()
        optimizers = OPTIMIZERS[name](model)
        if not first:
            take_step(Update(optimizers), model, "host", seed=0, poison=False)
        if is_fused_later:
            assert fuse(optimizers) == [type(optimizers[0]).__name__]
            assert fuse(optimizers) == []
        update = Update(optimizers)
        for seed in range(1, 5):
            take_step(update, model, "host", seed=seed, poison=False)
        assert update.reads_found_inf() == is_fused_later
        found.append(nn.utils.parameters_to_vector(model.parameters()))
    assert torch.allclose(found[0], found[1], rtol=1e-5)
    before = bits(model, optimizers)
    update.unscale()
    backward(model, None, seed=7, poison=True)
    update.apply_unless(torch.tensor(1.0))
    assert bits(model, optimizers) == before


def test_what_has_no_fused_kernel_is_left_as_it_is() -> None:
    assert fuse(muon_and_adamw(network())) == ["AdamW"]
    assert fuse([NAdam(network().parameters()), AdamW(network().parameters(), differentiable=True)]) == []
