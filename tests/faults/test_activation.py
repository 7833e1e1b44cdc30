"""A model in training and Faults in, outputs of one of its modules that have gone wrong out."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import pytest
import torch
from tests.faults.loops import loss_of, net
from torch import Tensor, nn

from sealegs.errors import ConfigError
from sealegs.faults.injector import Injector, inject
from sealegs.faults.spec import parse

SCALE = "activation-scale:factor=8,module=0,steps=2@1"
OVERFLOW = "fp16-overflow:module=0,factor=60000,steps=2@1"
FLIP = "bit-flip:in=activation,module=0,seed=3,steps=2@1"
INPUTS = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


def outputs(fault: str, *, passes: int = 1, model: nn.Module | None = None) -> tuple[list[Tensor], Injector]:
    """What the first layer gives, as what comes after it gets it, in each forward pass of four steps."""
    model = net() if model is None else model
    seen: list[Tensor] = []
    step = 0
    with inject([parse(fault)], model, clock=lambda: step) as injector:
        hook = model.get_submodule("1").register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
        for step in range(4):  # noqa: B007 - the clock reads it
            for _ in range(passes):
                model(INPUTS)
        hook.remove()
    assert not any(module._forward_hooks for module in model.modules())
    return seen, injector


def healthy() -> Tensor:
    with torch.no_grad():
        given: Tensor = net()[0](INPUTS)
    return given


def test_an_output_is_scaled_in_every_forward_pass_of_its_steps() -> None:
    seen, injector = outputs(SCALE, passes=2)
    for number, given in enumerate(seen):
        assert torch.equal(given, healthy() * (8 if number // 2 in (1, 2) else 1))
    assert [str(s) for s in injector.strikes] == [f"step {s}: {SCALE} struck the output of 0: times 8" for s in (1, 2)]
    assert not injector.pending()


def test_what_is_scaled_has_the_gradient_of_what_it_is() -> None:
    model, by_hand = net(), net()
    with inject([parse("activation-scale:factor=8,module=0@0")], model, clock=lambda: 0):
        loss_of(model, 0).backward()
    hidden = by_hand[0](torch.randn(16, 4, generator=torch.Generator().manual_seed(0))) * 8
    wanted = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)).sum(1, keepdim=True)
    (by_hand[2](by_hand[1](hidden)) - wanted).square().mean().backward()
    for one, other in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad, other.grad)


def test_an_output_goes_through_fp16_and_back() -> None:
    seen, injector = outputs(OVERFLOW, passes=2)
    rounded = (healthy() * 60000).half().float() / 60000
    assert 0 < rounded.isinf().sum() < rounded.numel()
    assert torch.equal(rounded.isinf(), healthy().abs() * 60000 >= 65520)  # what rounds to more than 65504
    for number, given in enumerate(seen):
        assert torch.equal(given, rounded if number // 2 in (1, 2) else healthy())
    largest = healthy().abs().max()
    assert [str(strike) for strike in injector.strikes] == [
        f"step {step}: {OVERFLOW} struck the output of 0: largest {largest:.4g} became inf" for step in (1, 2)
    ]


def test_a_factor_of_1_rounds_alone_and_lets_the_gradient_pass() -> None:
    model = nn.Linear(4, 4)
    inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    clean = model(inputs)
    with inject([parse("fp16-overflow:factor=1@0")], model, clock=lambda: 0) as injector:
        struck = model(inputs)
    assert torch.equal(struck, clean.half().float())
    assert not torch.equal(struck, clean)
    small = torch.full((3, 4), 1e-9)  # is nothing in fp16
    [one], [other] = (torch.autograd.grad(output, [inputs], small) for output in (clean, struck))
    assert torch.equal(one, other)
    assert "struck the output: largest" in str(injector.strikes[0])  # the whole model has no name


def test_one_element_is_flipped_in_the_first_forward_pass_of_a_step() -> None:
    seen, injector = outputs(FLIP, passes=2)
    places: list[tuple[int, ...]] = []
    for number, given in enumerate(seen):
        changed = (given != healthy()).nonzero().tolist()
        if number in (2, 4):
            strike = injector.strikes[len(places)]
            assert strike.element is not None
            assert changed == [list(strike.element)]
            assert (strike.tensor, strike.before) == ("0", healthy()[strike.element].item())
            assert strike.after == given[strike.element].item()
            top_bit = given.view(torch.int32) ^ healthy().view(torch.int32)
            assert top_bit[strike.element] == 1 << 30
            places.append(strike.element)
        else:
            assert not changed
    assert len(set(places)) == 2  # another one at each step
    assert str(injector.strikes[0]).startswith(f"step 1: {FLIP} struck the output of 0{list(places[0])}: ")
    assert not injector.pending()


def test_an_evaluation_is_not_what_a_bit_flips_in() -> None:
    model = net()
    with inject([parse("bit-flip:in=activation@0")], model, clock=lambda: 0) as injector:
        with torch.no_grad():
            model(INPUTS)
        assert not injector.strikes
        model(INPUTS)
    assert [strike.tensor for strike in injector.strikes] == ["2"]  # the last that has parameters


class Pair(NamedTuple):
    hidden: Tensor
    rest: str


@pytest.mark.parametrize(
    "wrap", [lambda x: (x, "rest"), lambda x: Pair(x, "rest"), lambda x: (x,)], ids=["tuple", "named", "one"]
)
@pytest.mark.parametrize("fault", [SCALE, OVERFLOW, FLIP])
def test_of_a_tuple_the_first_is_struck_and_the_rest_stays(fault: str, wrap: Callable[[Tensor], Any]) -> None:
    class Inner(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return wrap(super().forward(x))

    model = nn.Sequential(Inner(4, 8))
    with inject([parse(fault)], model, clock=lambda: 1):
        given = model(INPUTS)
    clean = model(INPUTS)
    assert type(given) is type(clean)
    assert given[1:] == clean[1:]
    assert not torch.equal(given[0], clean[0])


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        ({"hidden": torch.ones(2)}, "dict"),
        (torch.ones(2, dtype=torch.long), "Tensor"),
        ((None, torch.ones(2)), "tuple of NoneType"),
        ((), "tuple"),
        ([torch.ones(2)], "list"),
    ],
)
def test_other_outputs_are_refused_before_the_step_comes(output: object, kind: str) -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> object:
            return output

    model = nn.Sequential(Odd())
    with (
        inject([parse("activation-scale:factor=2,module=0@99")], model, clock=lambda: 0),
        pytest.raises(ConfigError, match=f"module='0': gives a {kind}, neither .*; name a module inside of it"),
    ):
        model(torch.ones(2))


@pytest.mark.parametrize("fault", ["fp16-overflow:module=blok@1", "bit-flip:in=activation,module=blok@1"])
def test_a_module_that_is_not_there_is_refused_with_near_ones(fault: str) -> None:
    model = nn.ModuleDict({"block": nn.Linear(2, 2)})
    with pytest.raises(ConfigError, match="module='blok': the model has no such module; near it are block"):
        inject([parse(fault)], model, clock=lambda: 0)
    with pytest.raises(ConfigError, match="no module of the model has parameters; name one"):
        inject([parse("fp16-overflow@1")], nn.Sequential(nn.Tanh()), clock=lambda: 0)
    assert not model["block"]._forward_hooks


def test_a_module_that_is_never_called_leaves_the_fault_pending() -> None:
    model = net()
    model.register_module("unused", nn.Linear(2, 2))
    model.forward = lambda x: model[0](x)  # type: ignore[method-assign]
    with inject([parse("fp16-overflow@0")], model, clock=lambda: 0) as injector:
        model(INPUTS)
    assert injector.pending() == (parse("fp16-overflow@0"),)


@pytest.mark.parametrize("fault", [SCALE, OVERFLOW, FLIP])
def test_inside_of_a_compiled_model_the_same_is_struck(fault: str) -> None:
    def run(is_compiled: bool) -> tuple[list[Tensor], list[Tensor], list[str]]:
        plain = net()
        model = cast(nn.Module, torch.compile(plain, backend="aot_eager")) if is_compiled else plain
        step = 0
        losses, gradients = [], []
        with inject([parse(fault)], model, clock=lambda: step) as injector:
            for step in range(4):  # noqa: B007 - the clock reads it
                loss = loss_of(model, 0)
                loss.backward()
                losses.append(loss.detach())
                gradients += [weight.grad.clone() for weight in plain.parameters() if weight.grad is not None]
                model.zero_grad()
        return losses, gradients, [str(strike) for strike in injector.strikes]

    plain, compiled = run(False), run(True)
    assert compiled[2] == plain[2]
    assert len(plain[2]) == 2
    for one, other in zip(plain[0] + plain[1], compiled[0] + compiled[1], strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
    assert not math.isclose(float(plain[0][0]), float(plain[0][1]))
    assert float(plain[0][0]) == float(plain[0][3])


def test_the_names_are_those_of_the_bare_model() -> None:
    model = nn.Sequential(cast(nn.Module, torch.compile(net(), backend="eager")))
    outside = cast(nn.Module, torch.compile(model, backend="eager"))
    inside = model.get_submodule("0._orig_mod.2")
    faults = [parse(f"activation-scale:factor=2,module={name}@1") for name in ("0", "0.2")]
    with inject(faults, outside, clock=lambda: 1):
        assert [bool(module._forward_hooks) for module in (model[0], inside, model)] == [True, True, False]
