"""A model in training and Faults in, weights that have gone wrong out. Sharded ones: test_gradient.py."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tests.faults.loops import Loop, same
from torch import Tensor, nn

from sealegs.errors import ConfigError
from sealegs.faults.injector import Injector, inject
from sealegs.faults.spec import parse
from sealegs.lab.model import Transformer
from sealegs.lab.settings import SIZES

NANO = SIZES["nano"].model
WIDTH = NANO.width


def transformer() -> Transformer:
    torch.manual_seed(0)
    return Transformer(replace(NANO, layers=2))


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def forward(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.long))


def factors_after(fault: str, model: nn.Module) -> tuple[dict[str, float], Injector]:
    """By which factor each tensor that is not as it was has changed, all of it, after one forward pass of step 5."""
    before = copies(model)
    with inject([parse(fault)], model, clock=lambda: 5) as injector:
        forward(model)
    factors = {}
    for name, weight in copies(model).items():
        if not torch.equal(weight, before[name]):
            factors[name] = (weight / before[name]).mean().item()
            torch.testing.assert_close(weight, before[name] * factors[name])
    return factors, injector


@pytest.mark.parametrize(
    ("tensor", "struck", "label"),
    [
        ("blocks.0.mlp.up.weight", ["blocks.0.mlp.up.weight"], "blocks.0.mlp.up.weight"),
        ("blocks.1.mlp", ["blocks.1.mlp.up.weight", "blocks.1.mlp.down.weight"], "blocks.1.mlp.*"),
        ("blocks.*.mlp.up", ["blocks.0.mlp.up.weight", "blocks.1.mlp.up.weight"], "blocks.*.mlp.up.*"),
        ("*.up", ["blocks.0.mlp.up.weight", "blocks.1.mlp.up.weight"], "*.up.*"),
        (
            "*.up+blocks.1.attention.out",
            ["blocks.0.mlp.up.weight", "blocks.1.attention.out.weight", "blocks.1.mlp.up.weight"],
            "*.up.*+blocks.1.attention.out.*",
        ),
        ("embedding+embedding.weight", ["embedding.weight"], "embedding.weight"),
    ],
)
def test_scales_the_weights_that_are_named(tensor: str, struck: list[str], label: str) -> None:
    factors, injector = factors_after(f"weight-scale:factor=16,tensor={tensor}@5", transformer())
    assert factors == dict.fromkeys(struck, 16.0)
    [strike] = injector.strikes
    assert (strike.tensor, strike.element, strike.before, strike.after) == (label, None, 1.0, 16.0)
    assert str(strike) == f"step 5: weight-scale:factor=16,tensor={tensor}@5 struck the weight of {label}: times 16"
    assert not injector.pending()


def test_without_a_name_all_that_is_trained_is_scaled() -> None:
    model = transformer()
    model.blocks[0].requires_grad_(False)
    factors, injector = factors_after("weight-scale:factor=-0.5@5", model)
    trained = {name: -0.5 for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert factors == trained
    assert injector.strikes[0].tensor == "*"
    named, _ = factors_after("weight-scale:factor=2,tensor=blocks.0.attention@5", model)  # frozen, but asked for
    assert named == {f"blocks.0.attention.{name}.weight": 2.0 for name in ("query_key_value", "out")}


def test_a_share_of_the_rows_is_queries_and_keys_without_values() -> None:
    model = transformer()
    before = copies(model)
    with inject([parse("weight-scale:factor=16,tensor=*.query_key_value,rows=2/3@5")], model, clock=lambda: 5):
        forward(model)
    after = copies(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"blocks.{block}.attention.query_key_value.weight" for block in range(2)}
    for name in changed:
        queries, keys, values = before[name].split(WIDTH)
        assert torch.equal(after[name], torch.cat((16 * queries, 16 * keys, values)))
    hidden = torch.randn(1, 3, WIDTH)
    name = "blocks.0.attention.query_key_value.weight"
    old, new = (F.linear(hidden, weights[name]).view(1, 3, 3, WIDTH) for weights in (before, after))
    torch.testing.assert_close(new, old * torch.tensor([16.0, 16.0, 1.0]).view(1, 1, 3, 1))


def test_is_done_once_before_the_first_forward_pass_of_its_step_and_stays() -> None:
    model = transformer()
    clean = copies(model)
    step = 4
    with inject([parse("weight-scale:factor=2,tensor=blocks.1@5")], model, clock=lambda: step) as injector:
        forward(model)
        assert all(torch.equal(weight, clean[name]) for name, weight in copies(model).items())
        assert injector.pending()
        for step in (5, 5, 6, 3, 4, 5, 6):  # noqa: B007 - the clock reads it; a rollback among them
            forward(model)
        assert len(injector.strikes) == 1
    for name, weight in copies(model).items():
        assert torch.equal(weight, clean[name] * (2 if name.startswith("blocks.1.") else 1)), name


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("weight-scale:factor=2,tensor=*.up+*.q_proj@5", r"tensor='\*.q_proj': the model has no such parameter"),
        ("weight-scale:factor=2,tensor=blocks.9@5", "tensor='blocks.9': the model has no such parameter"),
        (
            "weight-scale:factor=2,tensor=blocks.0.attention_norm,rows=5/7@5",
            r"rows=5/7: blocks.0.attention_norm.weight is \(48,\), and that share of it no whole rows",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_attached(fault: str, sentence: str) -> None:
    model = transformer()
    with pytest.raises(ConfigError, match=sentence):
        inject([parse(fault)], model, clock=lambda: 5)
    assert not model._forward_pre_hooks


def test_a_name_with_odd_characters_is_still_a_name() -> None:
    model = nn.Identity()
    model.of = nn.ParameterDict({name: nn.Parameter(torch.ones(2)) for name in ("a+b", "a", "b*")})
    with inject([parse("weight-scale:factor=3,tensor=of.a+b@5")], model, clock=lambda: 5) as injector:
        model(None)
    assert [strike.tensor for strike in injector.strikes] == ["of.a+b"]
    assert {name: weight.tolist() for name, weight in model.of.items()} == {"a+b": [3, 3], "a": [1, 1], "b*": [1, 1]}


# Rounded after an update.


def test_weights_are_rounded_to_bf16_after_each_update_while_it_lasts() -> None:
    fault = "bf16-weights:steps=3@4"
    by_hand, struck = Loop(), Loop([fault])
    for step in range(9):
        by_hand.run(step + 1)
        if step in (4, 5, 6):
            with torch.no_grad():
                for weight in by_hand.model.parameters():
                    weight.copy_(weight.to(torch.bfloat16).to(torch.float32))
        assert same(struck.run(step + 1).weights(), by_hand.weights()), step
        is_rounded = same(struck.weights(), [weight.bfloat16().float() for weight in struck.weights()])
        assert is_rounded == (step in (4, 5, 6))
    assert struck.lines() == [f"step {step}: {fault} struck the weights of *: 32 bits became 16" for step in (4, 5, 6)]
    assert not struck.injector.pending()


def test_steps_that_come_again_after_a_rollback_are_not_rounded_again() -> None:
    loop = Loop(["bf16-weights:steps=2@4"]).run(7)
    loop.step = 4
    loop.run(7)
    assert [strike.step for strike in loop.injector.strikes] == [4, 5]
