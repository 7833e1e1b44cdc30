"""Optimizers and Faults in, moments that have gone wrong out. Sharded ones: test_gradient.py."""

import math
from functools import partial

import pytest
import torch
from tests.faults.loops import Loop, Make, adam, loss_of, net, same
from torch import nn
from torch.optim import SGD, AdamW, NAdam, RMSprop

from sealegs.errors import ConfigError
from sealegs.faults.injector import inject
from sealegs.faults.optimizer import moments_in
from sealegs.faults.spec import parse

SPIKE = "lr-spike:factor=30,steps=3@4"


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


@pytest.mark.parametrize(
    ("kind", "names", "words"),
    [("moment1", ["exp_avg"], "first moments"), ("moment2", ["exp_avg_sq"], "second moments")],
)
def test_the_moments_of_one_kind_alone_are_zero(kind: str, names: list[str], words: str) -> None:
    fault = f"moments-reset:in={kind}@4"
    clean, struck = Loop().run(4), Loop([fault]).run(4)
    with torch.no_grad():
        loss_of(struck.model, 0)
    for name in ("exp_avg", "exp_avg_sq"):
        if name in names:
            assert not any(moment.any() for moment in struck.moments(name))
        else:
            assert same(clean.moments(name), struck.moments(name))
    norm = math.sqrt(sum(m.double().square().sum().item() for name in names for m in clean.moments(name)))
    assert struck.lines() == [f"step 4: {fault} struck the {words} of *: norm {norm:.4g} became 0"]


@pytest.mark.parametrize(
    ("make", "name"),
    [(adam, "exp_avg_sq"), (partial(adam, foreach=False), "exp_avg_sq"), (partial(adam, fused=True), "exp_avg_sq")],
)
def test_second_moments_stand_still_while_it_lasts(make: Make, name: str) -> None:
    fault = "frozen-moment2:steps=3@4"
    by_hand, struck = Loop(make=make).run(4), Loop([fault], make).run(4)
    assert same(struck.weights(), by_hand.weights())
    frozen = by_hand.moments(name)
    for step in (4, 5, 6):
        struck.run(step + 1)
        by_hand.run(step + 1)
        learned = by_hand.moments(name)
        for parameter, moment in zip(by_hand.model.parameters(), frozen, strict=True):
            by_hand.optimizer.state[parameter][name].copy_(moment)
        assert same(struck.moments(name), frozen)
        norms = [math.sqrt(sum(m.double().square().sum().item() for m in ms)) for ms in (learned, frozen)]
        assert struck.lines()[-1] == (
            f"step {step}: {fault} struck the second moments of *: norm {norms[0]:.4g} became {norms[1]:.4g}"
        )
    assert same(struck.run(9).weights(), by_hand.run(9).weights())
    assert not same(struck.moments(name), frozen)  # they learn again
    assert not same(struck.weights(), Loop(make=make).run(9).weights())
    assert len(struck.injector.strikes) == 3
    assert not struck.injector.pending()


def test_steps_that_come_again_after_a_rollback_are_not_frozen_again() -> None:
    loop = Loop(["frozen-moment2:steps=3@4"]).run(6)
    loop.step = 3
    loop.run(6)
    assert [strike.step for strike in loop.injector.strikes] == [4, 5]
    frozen = loop.run(7).moments("exp_avg_sq")
    assert [strike.step for strike in loop.injector.strikes] == [4, 5, 6]
    assert not same(loop.run(8).moments("exp_avg_sq"), frozen)


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
        ("moments-reset:in=moment2@3", lambda model: SGD(model.parameters(), lr=0.01, momentum=0.9)),
        ("frozen-moment2:steps=1@0", adam),
        ("frozen-moment2:steps=1@3", lambda model: SGD(model.parameters(), lr=0.01, momentum=0.9)),
    ],
)
def test_a_moment_that_is_not_there_leaves_the_fault_pending(fault: str, make: Make) -> None:
    loop = Loop([fault], make).run(5)
    assert not loop.injector.strikes
    assert loop.injector.pending() == (parse(fault),)


@pytest.mark.parametrize(
    "fault",
    [
        *(SPIKE, "warmup-lost@4", "wrong-betas:beta1=0.5@4"),
        *("moments-reset@4", "bit-flip:in=moment1@4", "frozen-moment2@4"),
        *("bf16-weights@4", "missing-zero-grad@4"),
    ],
)
def test_needs_the_optimizers(fault: str) -> None:
    with pytest.raises(ConfigError, match="strikes what an optimizer has; give inject the optimizers too"):
        inject([parse(fault)], net(), clock=lambda: 0)


def test_all_kinds_are_attached_together_and_nothing_stays_behind() -> None:
    faults = [
        *(SPIKE, "moments-reset@4", "bit-flip:in=moment2@5", "weight-scale:factor=2@5", "nan-gradient:every=2@6"),
        *("warmup-lost@99", "wrong-betas:beta1=0@99", "frozen-moment2@99", "scaler-off@99", "bf16-weights@99"),
        *("fp16-overflow@99", "activation-scale:factor=2,module=0@99", "bit-flip:in=activation@99"),
        "missing-zero-grad@99",
    ]
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
    hooks = [loop.optimizer._optimizer_step_pre_hooks, loop.optimizer._optimizer_step_post_hooks]
    hooks += [each for m in loop.model.modules() for each in (m._forward_pre_hooks, m._forward_hooks)]
    hooks += [each for p in loop.model.parameters() for each in (p._backward_hooks, p._post_accumulate_grad_hooks)]
    assert not any(hooks)


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
