"""Optimizers and Faults in, learning rates and betas that are others for some updates out."""

from functools import partial

import pytest
import torch
from tests.faults.loops import Loop, Make, adam, loss_of, net, one_rate_tensor, same, two_rates
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from sealegs.errors import ConfigError
from sealegs.faults.injector import inject
from sealegs.faults.spec import parse

SPIKE = "lr-spike:factor=30,steps=3@4"

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


# The schedule's peak.


def warmup(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: (step + 1) / 100)


@pytest.mark.parametrize("make", [adam, one_rate_tensor, two_rates])
def test_without_warmup_the_rate_is_the_peak_from_the_forward_pass_to_the_update(make: Make) -> None:
    fault = "warmup-lost:steps=3@4"
    loop, clean, by_hand = (
        Loop([fault], make, warmup),
        Loop(make=make, schedule=warmup),
        Loop(make=make, schedule=warmup),
    )
    by_hand.factors = {step: 100 / (step + 1) for step in (4, 5, 6)}
    seen = []
    loop.model.register_forward_hook(lambda *_: seen.append([float(g["lr"]) for g in loop.optimizer.param_groups]))
    loop.run(10)
    clean.run(10)
    peak = [float(group["initial_lr"]) for group in clean.optimizer.param_groups]
    before = [[rate / 100 for rate in peak], *clean.rates]
    for step in range(10):
        assert seen[step] == pytest.approx(peak if step in (4, 5, 6) else before[step], rel=1e-6)
    assert loop.rates == clean.rates  # and the schedule's own after each
    for one, other in zip(loop.weights(), by_hand.run(10).weights(), strict=True):
        torch.testing.assert_close(one, other)
    assert not same(loop.weights(), clean.weights())
    assert [strike.step for strike in loop.injector.strikes] == [4, 5, 6]
    assert loop.lines()[0] == f"step 4: {fault} struck the learning rate: {peak[0] / 20:.4g} became {peak[0]:.4g}"
    assert not loop.injector.pending()


@pytest.mark.parametrize("make", [adam, one_rate_tensor])
@pytest.mark.parametrize("skipped", [5, 6])
@pytest.mark.parametrize("fault", ["warmup-lost:steps=3@4", "lr-spike:factor=10,steps=3,log=shows@4"])
def test_the_schedule_goes_on_where_a_step_is_not_updated_for(fault: str, skipped: int, make: Make) -> None:
    loop, by_hand = Loop([fault], make, warmup), Loop(make=make, schedule=warmup)
    by_hand.factors = {step: 10.0 if "spike" in fault else 100 / (step + 1) for step in {4, 5, 6} - {skipped}}
    seen = []
    loop.model.register_forward_hook(lambda *_: seen.append(float(loop.optimizer.param_groups[0]["lr"])))
    loop.run(9, skip=[skipped])
    for one, other in zip(loop.weights(), by_hand.run(9, skip=[skipped]).weights(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    own = [0.01 * (step + 1) / 100 for step in range(9)]
    struck = [rate * 10 if "spike" in fault else 0.01 for rate in own]
    wanted = [struck[step] if step in (4, 5, 6) else own[step] for step in range(9)]
    assert seen == pytest.approx(wanted, rel=1e-6)


def test_where_no_scheduler_says_the_peak_it_is_refused_with_another_fault() -> None:
    model = net()
    with pytest.raises(ConfigError, match=r"warmup-lost@7: no scheduler has put initial_lr .* or use lr-spike:.*@7"):
        inject([parse("warmup-lost@7")], model, optimizers=adam(model), clock=lambda: 0)
    optimizer = AdamW(model[0].parameters())
    warmup(optimizer)
    optimizer.add_param_group({"params": list(model[2].parameters())})  # which the scheduler does not know
    with pytest.raises(ConfigError, match="no scheduler has put initial_lr"):
        inject([parse("warmup-lost@7")], model, optimizers=optimizer, clock=lambda: 0)
    assert not model._forward_pre_hooks


# Betas.


@pytest.mark.parametrize(
    ("given", "betas", "line"),
    [
        ("beta1=0.5", (0.5, 0.99), "first beta: 0.8 became 0.5"),
        ("beta2=0.5", (0.8, 0.5), "second beta: 0.99 became 0.5"),
        ("beta1=0,beta2=0.25", (0.0, 0.25), "second beta: 0.99 became 0.25"),
    ],
)
def test_betas_are_others_while_it_lasts_and_their_own_after_each_update(
    given: str, betas: tuple[float, float], line: str
) -> None:
    make = partial(adam, betas=(0.8, 0.99))
    fault = f"wrong-betas:{given},steps=3@4"
    loop, by_hand = Loop([fault], make), Loop(make=make)
    seen = []
    loop.model.register_forward_hook(lambda *_: seen.append(loop.optimizer.param_groups[0]["betas"]))
    for until in range(1, 11):
        by_hand.optimizer.param_groups[0]["betas"] = betas if until - 1 in (4, 5, 6) else (0.8, 0.99)
        by_hand.run(until)
        loop.run(until)
        assert loop.optimizer.param_groups[0]["betas"] == (0.8, 0.99)
        assert same(loop.weights(), by_hand.weights())
    assert seen == [betas if step in (4, 5, 6) else (0.8, 0.99) for step in range(10)]
    assert not same(loop.weights(), Loop(make=make).run(10).weights())
    assert loop.lines()[0] == f"step 4: {fault} struck the {line}"
    assert len(loop.injector.strikes) == 3


def test_betas_go_back_when_the_faults_are_taken_off_in_the_midst_of_a_step() -> None:
    loop = Loop(["wrong-betas:beta2=0.5,steps=3@4"]).run(4)
    loss_of(loop.model, 4)
    assert loop.optimizer.param_groups[0]["betas"] == (0.9, 0.5)
    loop.injector.detach()
    assert loop.optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert not [*loop.model._forward_pre_hooks, *loop.optimizer._optimizer_step_pre_hooks]


@pytest.mark.parametrize("fault", ["wrong-betas:beta2=0.5,steps=3@4", "warmup-lost:steps=3@4"])
def test_a_rollback_ends_what_a_config_has_brought(fault: str) -> None:
    loop = Loop([fault], schedule=warmup).run(6)
    loop.step = 3
    loop.run(9)
    assert [strike.step for strike in loop.injector.strikes] == [4, 5]
    assert not loop.injector.pending()


def test_optimizers_without_betas_are_left_as_they_are_or_refused() -> None:
    model = net()
    optimizers = [SGD(model[0].parameters(), lr=0.01), AdamW(model[2].parameters())]
    with inject([parse("wrong-betas:beta1=0.5@0")], model, optimizers=optimizers, clock=lambda: 0) as injector:
        loss_of(model, 0).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert [(strike.before, strike.after) for strike in injector.strikes] == [(0.9, 0.5)]
    with pytest.raises(ConfigError, match="no optimizer that was given has betas; give one that has, such as AdamW"):
        inject([parse("wrong-betas:beta1=0.5@0")], model, optimizers=optimizers[0], clock=lambda: 0)
