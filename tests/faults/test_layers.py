"""Routers and quantisers in, ones that have gone wrong out."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sealegs.errors import ConfigError
from sealegs.faults.injector import Injector, inject
from sealegs.faults.spec import parse
from sealegs.lab.float8 import LARGEST, Quantiser

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Routed(nn.Module):
    """A router, and a quantiser of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(4, 4, bias=False)
        self.inner = nn.ModuleDict({"gate": nn.Linear(4, 4, bias=False), "gate_proj": nn.Linear(4, 4)})
        self.rounded = Quantiser()

    def forward(self, x: Tensor) -> list[Tensor]:
        """What each gives."""
        return [self.router(x), self.inner["gate"](x), self.inner["gate_proj"](x), *self.rounded(x)]


def struck(fault: str, *inputs: Tensor) -> tuple[list[list[Tensor]], Injector]:
    """What the parts give in step after step."""
    model, seen, step = Routed(), [], 0
    with torch.no_grad(), inject([parse(fault)], model, clock=lambda: step) as injector:
        for step, x in enumerate(inputs):  # noqa: B007 - the clock reads it
            seen.append(model(x))
    assert not any(module._forward_hooks for module in model.modules())
    return seen, injector


@torch.no_grad()
def test_the_logits_of_the_named_experts_are_off_in_every_router_while_it_lasts() -> None:
    seen, injector = struck("router-bias:expert=1,experts=2,amount=5,steps=2@1", X, X, X, X)
    clean = Routed()(X)
    for step, given in enumerate(seen):
        for router in (0, 1):
            off = torch.tensor([0.0, 5.0, 5.0, 0.0]) if step in (1, 2) else torch.zeros(4)
            assert torch.equal(given[router], clean[router] + off)
        assert torch.equal(given[2], clean[2])  # a gated MLP's, which routes nothing
    assert [str(strike).partition(": ")[2] for strike in injector.strikes] == [
        f"{strike.fault} struck the logits of router+inner.gate: +5 for some experts" for strike in injector.strikes
    ]
    assert len(injector.strikes) == 2


def test_routers_are_named_by_pattern_and_what_is_none_is_refused() -> None:
    seen, _ = struck("router-bias:amount=5,module=inner.*@0", X)
    assert torch.equal(seen[0][0], Routed()(X)[0])
    assert not torch.equal(seen[0][1], Routed()(X)[1])
    for fault, told in [
        ("router-bias:amount=5,module=outer@0", "the model has no such module"),
        ("router-bias:amount=5,expert=4@0", "there are 4 experts"),
        ("stuck-scale:module=router@0", "the model has no such quantiser; .*rounded"),
    ]:
        with pytest.raises(ConfigError, match=told):
            struck(fault, X)
    with pytest.raises(ConfigError, match="no module is called router or gate"):
        inject([parse("router-bias:amount=5@0")], nn.Linear(4, 4), clock=lambda: 0)
    with pytest.raises(ConfigError, match=r"it has none; in the lab, --model\.float8 brings them"):
        inject([parse("stuck-scale@0")], nn.Linear(4, 4), clock=lambda: 0)


@torch.no_grad()
def test_a_stuck_scale_stays_that_of_the_first_step_times_its_factor() -> None:
    seen, injector = struck("stuck-scale:factor=4,steps=2@1", X, X, 100 * X, X)
    [(_, healthy), (values, first), (_, second), (_, after)] = [given[3:] for given in seen]
    usual = LARGEST / X.abs().max()
    scales = [float(measured[1]) for measured in (healthy, first, second, after)]
    assert scales == pytest.approx([float(usual), 4 * float(usual), 4 * float(usual), float(usual)])
    assert float(healthy[2]) == 0.0
    assert 0.0 < float(first[2]) < float(second[2])  # more is beyond the largest number as values grow
    assert float(values.abs().max()) == pytest.approx(float(X.abs().max()) / 4)
    assert str(injector.strikes[1]).endswith("struck the scale of rounded: 1.934 became 773.7")


def test_a_scale_far_too_low_makes_zeros_and_a_placebo_nothing() -> None:
    seen, _ = struck("stuck-scale:factor=1e-6@0", X)
    assert float(seen[0][4][3]) == 1.0
    placebo, injector = struck("stuck-scale:factor=1e-6,placebo=yes@0", X)
    clean: list[Any] = Routed()(X)
    assert all(torch.equal(one, other) for one, other in zip(placebo[0], clean, strict=True))
    assert str(injector.strikes[0]).endswith(": a placebo, nothing changed")
