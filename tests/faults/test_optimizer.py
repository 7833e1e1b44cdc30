"""Optimizers and Faults in, moments and learning rates that have gone wrong out. Sharded ones: test_gradient.py."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler

from sealegs.errors import ConfigError
from sealegs.faults.gradient import inject
from sealegs.faults.optimizer import moments_in
from sealegs.faults.spec import parse

Make = Callable[[nn.Sequential], Optimizer]
SPIKE = "lr-spike:factor=30,steps=3@4"


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def adam(model: nn.Sequential, **options: Any) -> AdamW:
    return AdamW(model.parameters(), **{"lr": 0.01} | options)


def one_rate_tensor(model: nn.Sequential) -> AdamW:
    """Two groups whose learning rate is one and the same tensor."""
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
    optimizer = AdamW(groups, lr=torch.tensor(0.01), capturable=False, foreach=False)
    assert optimizer.param_groups[0]["lr"] is optimizer.param_groups[1]["lr"]
    return optimizer


def constant(optimizer: Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: 1.0)


class Loop:
    """A loop that knows nothing of faults, and can be sent back."""

    def __init__(
        self,
        faults: Iterable[str] = (),
        make: Make = adam,
        schedule: Callable[[Optimizer], LRScheduler] = constant,
    ) -> None:
        self.model = net()
        self.optimizer = make(self.model)
        self.scheduler = schedule(self.optimizer)
        self.step = 0
        self.rates: list[list[float]] = []
        """After each step, of each group."""
        self.factors: dict[int, float] = {}
        """By hand: what the rates are multiplied by for the update of a step."""
        self.injector = inject(map(parse, faults), self.model, optimizers=self.optimizer, clock=lambda: self.step)

    def run(self, until: int, *, skip: Collection[int] = ()) -> "Loop":
        while self.step < until:
            loss_of(self.model, self.step).backward()
            if self.step not in skip:
                self.update()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.rates.append([float(group["lr"]) for group in self.optimizer.param_groups])
            self.step += 1
        return self

    def update(self) -> None:
        if self.step not in self.factors:
            self.optimizer.step()
            return
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.set_rates([rate * self.factors[self.step] for rate in rates])
        self.optimizer.step()
        self.set_rates(rates)

    def set_rates(self, rates: list[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def moments(self, name: str) -> list[Tensor]:
        return [self.optimizer.state[parameter][name].clone() for parameter in self.model.parameters()]

    def lines(self) -> list[str]:
        return list(map(str, self.injector.strikes))


def loss_of(model: nn.Module, step: int) -> Tensor:
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
    loss: Tensor = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    return loss


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# Learning rates.


@pytest.mark.parametrize("make", [adam, one_rate_tensor, lambda model: SGD(model.parameters(), lr=0.001)])
def test_the_rate_is_higher_for_the_updates_of_its_steps_and_the_schedules_own_after_them(make: Make) -> None:
    # of those that compute a rate from the last one: what is not taken back stays for ever
    decay = partial(CosineAnnealingLR, T_max=20)
    by_hand = Loop(make=make, schedule=decay)
    by_hand.factors = dict.fromkeys((4, 5, 6), 30.0)
    struck = Loop([SPIKE], make, decay).run(4)
    assert not struck.injector.strikes
    struck.run(10)
    assert same(struck.weights(), by_hand.run(10).weights())
    assert struck.rates == by_hand.rates == Loop(make=make, schedule=decay).run(10).rates
    assert not same(struck.weights(), Loop(make=make, schedule=decay).run(10).weights())
    assert [strike.step for strike in struck.injector.strikes] == [4, 5, 6]
    for strike in struck.injector.strikes:
        assert strike.before == struck.rates[strike.step - 1][0]
        assert strike.after == pytest.approx(30 * strike.before, rel=1e-6)
    assert not struck.injector.pending()


def test_a_strike_says_what_the_rate_was_and_is() -> None:
    assert Loop([SPIKE]).run(5).lines() == [f"step 4: {SPIKE} struck the learning rate: 0.01 became 0.3"]


def test_a_step_that_is_not_updated_for_is_not_struck() -> None:
    loop = Loop([SPIKE]).run(10, skip=[5])
    assert [strike.step for strike in loop.injector.strikes] == [4, 6]
    assert loop.injector.pending() == (parse(SPIKE),)


@pytest.mark.parametrize(
    ("until", "skip", "back"),
    [
        (5, [], 2),  # struck once
        (6, [5], 4),  # to the very step that was struck, after one that was not updated for
        (6, [], 5),  # to a step that was struck
        (9, [], 5),  # all of them were
        (9, [], 8),  # from after them
    ],
)
def test_a_rollback_ends_it(until: int, skip: list[int], back: int) -> None:
    loop = Loop([SPIKE]).run(until, skip=skip)
    strikes = list(loop.injector.strikes)
    assert strikes
    loop.step = back
    loop.run(12)
    assert loop.injector.strikes == strikes
    assert not loop.injector.pending()  # nor will it come


def test_a_rollback_before_it_began_leaves_it_to_come() -> None:
    loop = Loop([SPIKE]).run(7, skip=[4, 5, 6])
    loop.step = 1
    loop.run(9)
    assert [strike.step for strike in loop.injector.strikes] == [4, 5, 6]


def test_several_optimizers_are_struck_together_and_said_once() -> None:
    model = net()
    optimizers = [SGD(model[0].parameters(), lr=0.01), SGD(model[2].parameters(), lr=0.02)]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with inject([parse("lr-spike:factor=10@0")], model, optimizers=optimizers, clock=lambda: 0) as injector:
        loss_of(model, 0).backward()
        for optimizer in optimizers:
            optimizer.step()
    for parameter, old, rate in zip(model.parameters(), before, (0.1, 0.1, 0.2, 0.2), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.detach(), old - rate * parameter.grad)
    assert len(injector.strikes) == 1


def test_a_rate_that_the_log_shows_is_there_from_the_forward_pass_on() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.01)
    step = 0
    seen = []
    with inject(
        [parse("lr-spike:factor=10,steps=2,log=shows@1")], model, optimizers=[optimizer], clock=lambda: step
    ) as injector:
        for step in range(4):
            loss_of(model, step).backward()
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            assert optimizer.param_groups[0]["lr"] == 0.01
    assert seen == [0.01, pytest.approx(0.1), pytest.approx(0.1), 0.01]
    assert [strike.step for strike in injector.strikes] == [1, 2]


def test_an_update_that_fails_half_way_leaves_no_rate_behind() -> None:
    def fail(optimizer: Optimizer, *_: object) -> None:
        if loop.step == 4:
            raise KeyboardInterrupt

    for mend in ("detach", "go on"):
        loop = Loop([SPIKE]).run(4)
        hook = loop.optimizer.register_step_pre_hook(fail)  # after ours
        with pytest.raises(KeyboardInterrupt):
            loop.optimizer.step()
        hook.remove()
        assert loop.optimizer.param_groups[0]["lr"] == 0.3
        if mend == "detach":
            loop.injector.detach()
        else:
            loop.step = 5
            loop.optimizer.step()
            assert [strike.before for strike in loop.injector.strikes] == [0.01, 0.01]
        assert loop.optimizer.param_groups[0]["lr"] == 0.01


# Moments.


@pytest.mark.parametrize(("kind", "name"), [("moment1", "exp_avg"), ("moment2", "exp_avg_sq")])
def test_flips_a_bit_of_one_element_of_one_moment_before_the_step(kind: str, name: str) -> None:
    fault = f"bit-flip:in={kind},seed=1@4"
    clean, struck = Loop().run(4), Loop([fault]).run(4)
    assert same(clean.moments(name), struck.moments(name))
    with torch.no_grad():
        loss_of(struck.model, 0)  # an evaluation sees to it as well
    [strike] = struck.injector.strikes
    assert strike.element is not None
    names = [each for each, _ in struck.model.named_parameters()]
    for other in ("exp_avg", "exp_avg_sq"):
        for owner, before, after in zip(names, clean.moments(other), struck.moments(other), strict=True):
            places = (before != after).nonzero().tolist()
            assert places == ([list(strike.element)] if (other, owner) == (name, strike.tensor) else [])
            if places:
                assert (strike.before, strike.after) == (before[strike.element].item(), after[strike.element].item())
                assert math.isclose(strike.after, strike.before * 2.0**128, rel_tol=1e-6)
    assert same(clean.weights(), struck.weights())
    struck.run(6)
    assert len(struck.injector.strikes) == 1
    where = {"moment1": "first moment", "moment2": "second moment"}[kind]
    assert str(strike).startswith(f"step 4: {fault} struck the {where} of {strike.tensor}{list(strike.element)}: ")


def test_the_seed_chooses_among_what_the_optimizers_have() -> None:
    model = net()
    optimizer = AdamW(model[2].parameters())
    faults = [parse(f"bit-flip:in=moment1,seed={seed}@1") for seed in range(20)]
    step = 0
    with inject(faults, model, optimizers=[optimizer], clock=lambda: step) as injector:
        for step in range(2):
            loss_of(model, step).backward()
            optimizer.step()
    assert {strike.tensor for strike in injector.strikes} == {"2.weight", "2.bias"}
    assert len(injector.strikes) == 20
    with pytest.raises(ConfigError, match=r"tensor='0': of no optimizer that was given; give its optimizer"):
        inject([parse("bit-flip:in=moment1,tensor=0@1")], model, optimizers=optimizer, clock=lambda: 0)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (adam, ["exp_avg", "exp_avg_sq"]),
        (partial(adam, amsgrad=True), ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]),
        (lambda model: SGD(model.parameters(), lr=0.01, momentum=0.9), ["momentum_buffer"]),
        (lambda model: RMSprop(model.parameters(), lr=0.01, momentum=0.9), ["momentum_buffer", "square_avg"]),
    ],
)
def test_all_moments_are_zero_and_the_counters_stay(make: Make, names: list[str]) -> None:
    clean, struck = Loop(make=make).run(4), Loop(["moments-reset@4"], make).run(4)
    with torch.no_grad():
        loss_of(struck.model, 0)
    assert all(not moment.any() for name in names for moment in struck.moments(name))
    assert same(clean.weights(), struck.weights())
    norm = math.sqrt(sum(m.double().square().sum().item() for name in names for m in clean.moments(name)))
    assert struck.lines() == [f"step 4: moments-reset@4 struck the moments of *: norm {norm:.4g} became 0"]
    if "exp_avg" in names:
        assert {float(state["step"]) for state in struck.optimizer.state.values()} == {4.0}
    struck.run(6)
    assert len(struck.injector.strikes) == 1
    assert all(moment.any() for name in names for moment in struck.moments(name))


@pytest.mark.parametrize(("kind", "shape"), [(AdamW, ()), (NAdam, (2, 2))])
def test_what_an_optimizer_counts_is_no_moment(kind: type[AdamW | NAdam], shape: tuple[int, ...]) -> None:
    """A number's step counter has its shape, and the product of NAdam's momenta is a number."""
    parameter = nn.Parameter(torch.ones(shape))
    optimizer = kind([parameter])
    parameter.grad = torch.ones(shape)
    optimizer.step()
    state = optimizer.state[parameter]
    assert [id(moment) for moment in moments_in(optimizer)] == [id(state["exp_avg"]), id(state["exp_avg_sq"])]


@pytest.mark.parametrize(
    ("fault", "make"),
    [
        ("moments-reset@0", adam),  # no moments before the first update
        ("bit-flip:in=moment2@0", adam),
        ("bit-flip:in=moment2@3", lambda model: SGD(model.parameters(), lr=0.01, momentum=0.9)),
        ("moments-reset@3", lambda model: SGD(model.parameters(), lr=0.01)),
    ],
)
def test_a_moment_that_is_not_there_leaves_the_fault_pending(fault: str, make: Make) -> None:
    loop = Loop([fault], make).run(5)
    assert not loop.injector.strikes
    assert loop.injector.pending() == (parse(fault),)


@pytest.mark.parametrize("fault", [SPIKE, "moments-reset@4", "bit-flip:in=moment1@4"])
def test_needs_the_optimizers(fault: str) -> None:
    with pytest.raises(ConfigError, match="strikes what an optimizer has; give inject the optimizers too"):
        inject([parse(fault)], net(), clock=lambda: 0)


def test_all_kinds_are_attached_together_and_nothing_stays_behind() -> None:
    faults = [SPIKE, "moments-reset@4", "bit-flip:in=moment2@5", "weight-scale:factor=2@5", "nan-gradient:every=2@6"]
    loop = Loop(faults).run(9)
    kinds = [(strike.step, strike.fault.name) for strike in loop.injector.strikes]
    assert kinds == [
        (4, "moments-reset"),
        (4, "lr-spike"),
        (5, "bit-flip"),
        (5, "weight-scale"),
        (5, "lr-spike"),
        (6, "nan-gradient"),
        (6, "lr-spike"),
        (8, "nan-gradient"),
    ]
    assert loop.optimizer._optimizer_step_pre_hooks
    loop.injector.detach()
    hooks = loop.optimizer._optimizer_step_pre_hooks, loop.optimizer._optimizer_step_post_hooks
    assert not any([*hooks, loop.model._forward_pre_hooks, *(p._backward_hooks for p in loop.model.parameters())])


def test_a_fault_of_another_rank_leaves_this_one_alone() -> None:
    model = net()
    optimizer = adam(model)
    faults = [parse(f"{fault},rank=1@0") for fault in ("lr-spike:factor=2", "moments-reset:steps=1")]
    with inject(faults, model, optimizers=optimizer, clock=lambda: 0, rank=0) as injector:
        assert not optimizer._optimizer_step_pre_hooks
        assert not model._forward_pre_hooks
        assert not injector.pending()
    with inject(faults, model, optimizers=optimizer, clock=lambda: 0, rank=1) as injector:
        assert injector.pending() == tuple(faults)
