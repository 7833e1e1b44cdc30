"""Tokens in, a mixture of experts out; what keeps its loads alike moves with the update or not at all."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lab.test_train import assert_same, nano, run_of, stop_after
from torch import Tensor

from sealegs.errors import ConfigError
from sealegs.faults.practice import disturbed
from sealegs.faults.spec import parse
from sealegs.lab.experts import BOUND, Experts, router_signals
from sealegs.lab.model import Mlp, Transformer
from sealegs.lab.settings import SIZES, ModelSettings
from sealegs.lab.sources import open_data
from sealegs.lab.train import build_optimizer, train
from sealegs.record.run import Run, open_run

NANO = replace(SIZES["nano"].model, context=16, experts=4)


def layer(**switches: Any) -> Experts:
    torch.manual_seed(0)
    made = Experts(replace(NANO, **switches), Mlp)
    torch.nn.init.normal_(made.router.weight)
    return made


def by_hand(experts: Experts, token: Tensor, scores: Tensor) -> Tensor:
    """The output of one token, expert by expert."""
    chosen = sorted(range(4), key=lambda i: float(scores[i] + experts.bias[i]))[-2:]
    total = sum(scores[i] for i in chosen)
    return sum((experts.experts[i](token) * scores[i] / total for i in chosen), torch.zeros_like(token))


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
@torch.no_grad()
def test_the_output_is_that_of_each_tokens_best_experts_weighed_by_their_scores(router: Any) -> None:
    experts = layer(router=router)
    experts.bias.copy_(torch.tensor([0.3, 0.0, -0.2, 0.1]))
    x = torch.randn(2, 5, NANO.width)
    logits = experts.router(x)
    scores = logits.softmax(-1) if router == "softmax" else logits.sigmoid()
    expected = torch.stack([by_hand(experts, x[i, j], scores[i, j]) for i in range(2) for j in range(5)])
    assert torch.allclose(experts(x).flatten(0, 1), expected, atol=1e-6)


def test_loads_losses_and_entropy_are_those_of_the_definitions() -> None:
    model = Transformer(NANO)
    tokens = torch.randint(0, NANO.vocabulary, (4, 16))
    beside = model.losses(tokens, tokens).beside
    assert beside["expert_load"].shape == (2, 4)
    assert torch.allclose(beside["expert_load"].sum(1), torch.ones(2))
    all_on_two = {**beside, "expert_load": torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]])}
    signals = router_signals(all_on_two, detailed=True)
    assert float(signals["expert_violation"]) == 1.0
    assert float(signals["dead_expert_share"]) == 0.25
    assert float(signals["expert_load/0.1"]) == 0.5
    for experts in (module for module in model.modules() if isinstance(module, Experts)):
        torch.nn.init.zeros_(experts.router.weight)  # all scores alike
    even = model.losses(tokens, tokens).beside
    assert torch.allclose(even["router_entropy"], torch.log(torch.tensor(4.0)).expand(2))
    assert torch.allclose(even["router_balance_loss"], torch.ones(2))
    assert torch.allclose(even["router_z_loss"], torch.log(torch.tensor(4.0)).square().expand(2))


def test_the_balance_loss_trains_the_router_and_only_where_it_is_chosen() -> None:
    tokens = torch.randint(0, NANO.vocabulary, (4, 16))

    def gradient(**switches: Any) -> Tensor:
        torch.manual_seed(0)
        model = Transformer(replace(NANO, router_z_weight=0.0, **switches))
        model.losses(tokens, tokens).total.backward()
        [first, _] = [module for module in model.modules() if isinstance(module, Experts)]
        assert first.router.weight.grad is not None
        return first.router.weight.grad

    assert torch.equal(gradient(balance="none"), gradient(balance="bias"))
    assert not torch.allclose(gradient(balance="none"), gradient(balance="aux", balance_weight=1.0))


def test_the_bias_goes_to_who_gets_less_and_stays_bounded_around_zero() -> None:
    experts, load = layer(), torch.tensor([0.7, 0.3, 0.0, 0.0])
    moved = experts.balance(load, 0.01)
    assert moved[0] == moved[1] < 0 < moved[2] == moved[3]
    for _ in range(100):
        experts.bias.copy_(experts.balance(load, 0.1))
    assert experts.bias.abs().max() == BOUND
    assert abs(experts.bias.mean()) < 1e-6


@pytest.mark.parametrize("decided", ["on the host", "on the device, applied", "on the device, skipped"])
def test_the_bias_moves_with_the_update_or_not_at_all(decided: str) -> None:
    model = Transformer(replace(NANO, balance="bias", balance_rate=0.1))
    optimizer: Any = build_optimizer(model, SIZES["nano"].optimizer)
    tokens = torch.randint(0, NANO.vocabulary, (4, 16))
    for _ in range(2):
        losses = model.losses(tokens, tokens)
        losses.total.backward()
        model.loads = losses.beside["expert_load"]
        before = {name: value.clone() for name, value in model.state_dict().items()}
        if decided != "on the host":
            optimizer.found_inf = torch.tensor(float("skipped" in decided))
            optimizer.grad_scale = None
        optimizer.step()
    same = {name for name, value in model.state_dict().items() if torch.equal(value, before[name])}
    assert same == (set(before) if "skipped" in decided else set())


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory, tokens_file: Path) -> tuple[Any, Run]:
    """A whole run with every part of the switch, one of its steps skipped."""
    settings = nano(tokens_file, steps=12, model=replace(NANO, balance="bias", balance_rate=0.1))
    folder = tmp_path_factory.mktemp("experts") / "whole"
    train(settings, open_data(settings), folder, disturb=struck)
    return settings, open_run(folder)


def struck(model: Any, optimizer: Any, stream: Any, clock: Any, say: Any) -> Any:
    return disturbed([parse("nan-gradient@6")], NANO.vocabulary, model, optimizer, stream, clock, say)


def test_a_run_says_what_its_routers_do(biased: tuple[Any, Run]) -> None:
    _, run = biased
    names = {"expert_violation", "dead_expert_share", "router_entropy", "router_balance_loss", "router_z_loss"}
    assert all((run.column(name)[:12] >= 0).all() for name in names)
    assert run.column("expert_load/1.3")[0] > 0


def test_a_resumed_run_with_a_skip_is_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, biased: tuple[Any, Run]
) -> None:
    settings, whole = biased
    assert [event.step for event in whole.events if event.kind == "skip"] == [6]
    run_of(settings, tmp_path / "cut", should_stop=stop_after(8), disturb=struck)
    _, run = run_of(settings, tmp_path / "cut", resume=True, disturb=struck)
    assert_same(run, whole)


@pytest.mark.parametrize("settings", [{"experts": 2}, {"experts": -1}, {"experts": 4, "balance": "by hand"}])
def test_what_cannot_route_is_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"model\.(experts|balance)"):
        ModelSettings(**settings)
