"""What routers choose, seen from outside."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sealegs
from sealegs.record.run import open_run
from sealegs.signals.routers import MOST_LOADS, RouterSampler, routers_of

WIDTH, EXPERTS = 8, 4


class Router(nn.Module):
    """Gives logits, weights and indices, as those of transformers 5."""

    def __init__(self, experts: int = EXPERTS, chosen: int = 2) -> None:
        super().__init__()
        self.num_experts, self.top_k = experts, chosen
        self.weight = nn.Parameter(torch.randn(experts, WIDTH))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(tokens.reshape(-1, WIDTH), self.weight)
        weights, indices = logits.softmax(-1).topk(self.top_k, dim=-1)
        return logits, weights, indices


class Counting(nn.Module):
    """Scores, indices and counts, with a linear map inside, as torchtitan's."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.top_k = EXPERTS, 2
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores, indices = self.gate(tokens).sigmoid().topk(self.top_k, dim=-1)
        return scores, indices, torch.histc(indices.float(), bins=EXPERTS, min=0, max=EXPERTS)


class Told(nn.Module):
    """One's own, which says what it chose."""

    expert_counts: Tensor

    def __init__(self, *counts: float) -> None:
        super().__init__()
        self.counts = counts or (6.0, 2.0, 0.0, 0.0)
        self.mix = nn.Linear(WIDTH, EXPERTS)
        self.register_buffer("expert_counts", torch.zeros(EXPERTS), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        weights = self.mix(tokens).softmax(-1)
        self.expert_counts.copy_(torch.tensor(self.counts))
        return torch.sum(weights, -1, keepdim=True)


class Block(nn.Module):
    """Two experts a token, or the linear gate of older models."""

    def __init__(self, gate: nn.Module, **known: Any) -> None:
        super().__init__()
        self.gate = gate
        self.rest = nn.Linear(WIDTH, WIDTH)
        self.is_checkpointed = False
        for name, value in known.items():
            setattr(self, name, value)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.is_checkpointed:
            return checkpoint(self._forward, tokens, use_reentrant=False)  # type: ignore[no-any-return]
        return self._forward(tokens)

    def _forward(self, tokens: Tensor) -> Tensor:
        chosen = self.gate(tokens)
        share = (chosen[0] if isinstance(chosen, tuple) else chosen).float().sum(-1, keepdim=True)
        return torch.tanh(self.rest(tokens) + share.reshape(*tokens.shape[:-1], 1))


def linear_gate(seed: int = 0) -> Block:
    torch.manual_seed(seed)
    return Block(nn.Linear(WIDTH, EXPERTS, bias=False), num_experts=EXPERTS, top_k=2)


def stack(*blocks: nn.Module) -> Any:
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 1))


def signals(model: nn.Module, *batches: Tensor, sampler: RouterSampler | None = None) -> Mapping[str, Any]:
    sampler = sampler or RouterSampler(model)
    sampler.arm()
    for batch in batches:
        model(batch).sum().backward()
    sampler.disarm()
    routed = sampler.collect()
    if routed is None:
        return {}
    names, numbers = routed.named(routed.numbers)
    assert callable(names)
    return names(numbers.tolist())


@pytest.fixture
def tokens() -> Tensor:
    return torch.randn(6, 50, WIDTH, generator=torch.Generator().manual_seed(5))


def test_loads_are_the_shares_of_what_was_chosen(tokens: Tensor) -> None:
    torch.manual_seed(1)
    model = stack(Block(Router()), Block(Router()))
    found = signals(model, tokens)
    with torch.no_grad():
        chosen = model[0].gate(tokens)[2]
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).double()
    shares = [found[f"expert_load/0.{expert}"] for expert in range(EXPERTS)]
    assert shares == pytest.approx((counts / counts.sum()).tolist())
    loads = [[found[f"expert_load/{layer}.{expert}"] for expert in range(EXPERTS)] for layer in (0, 1)]
    assert found["expert_violation"] == pytest.approx(max(max(layer) for layer in loads) * EXPERTS - 1)
    assert found["dead_expert_share"] == sum(load < 0.1 / EXPERTS for layer in loads for load in layer) / 8


def test_entropy_and_z_are_those_of_the_logits(tokens: Tensor) -> None:
    model = stack(Block(Router()))
    found = signals(model, tokens)
    with torch.no_grad():
        logits = model[0].gate(tokens)[0]
    assert found["router_entropy"] == pytest.approx(
        torch.distributions.Categorical(logits=logits).entropy().mean().item()
    )
    assert found["router_z"] == pytest.approx(logits.logsumexp(-1).square().mean().item(), rel=1e-5)


def test_linear_gates_and_inner_ones_are_each_found_once(tokens: Tensor) -> None:
    model = stack(linear_gate(), Block(Counting()), Block(Told()), nn.Linear(WIDTH, WIDTH))
    assert [(each.layer, each.experts) for each in routers_of(model)] == [("0", 4), ("1", 4), ("2", 4)]
    found = signals(model, tokens)
    with torch.no_grad():
        inner = model[0](tokens)
        chosen = model[0].gate(tokens).topk(2, dim=-1).indices
        counted = model[1].gate(inner)[2]
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
    assert [found[f"expert_load/0.{e}"] for e in range(4)] == pytest.approx((counts / counts.sum()).tolist())
    assert [found[f"expert_load/1.{e}"] for e in range(4)] == pytest.approx((counted / counted.sum()).tolist())
    assert [found[f"expert_load/2.{e}"] for e in range(4)] == [0.75, 0.25, 0.0, 0.0]
    assert "dead_expert_share" not in found, "eight choices say nothing of four experts"


def test_less_than_a_tenth_of_the_mean_is_dead(tokens: Tensor) -> None:
    found = signals(stack(Block(Told(600, 200, 176, 24)), Block(Told(600, 200, 174, 26))), tokens)
    assert found["dead_expert_share"] == 1 / 8


def test_a_model_without_experts_has_no_router() -> None:
    gate_of_a_perceptron = Block(nn.Linear(WIDTH, WIDTH), k=3)
    assert RouterSampler(stack(gate_of_a_perceptron, nn.MultiheadAttention(WIDTH, 2))).sizes == ()


def test_micro_batches_add_up_and_evaluations_do_not(tokens: Tensor) -> None:
    model = stack(Block(Router()))
    sampler = RouterSampler(model)
    whole = signals(model, tokens, sampler=sampler)
    sampler.arm()
    for part in tokens.split(2):
        model(part).sum().backward()
    with torch.no_grad():
        model(torch.randn(64, 50, WIDTH))
    sampler.disarm()
    routed = sampler.collect()
    assert routed is not None
    names, numbers = routed.named(routed.numbers)
    assert callable(names)
    assert dict(names(numbers.tolist())) == pytest.approx(dict(whole), rel=1e-5)


def test_a_checkpointed_layer_counts_once(tokens: Tensor) -> None:
    model = stack(Block(Router()))
    plain = signals(model, tokens)
    model[0].is_checkpointed = True
    assert signals(model, tokens) == plain


def test_many_experts_have_summaries_alone(tokens: Tensor) -> None:
    few, many = stack(Block(Router(MOST_LOADS))), stack(Block(Router(MOST_LOADS + 1)))
    assert sum(name.startswith("expert_load/") for name in signals(few, tokens)) == MOST_LOADS
    assert set(signals(many, tokens)) <= {"expert_violation", "dead_expert_share", "router_entropy", "router_z"}


def test_a_router_that_nobody_understands_costs_its_own_place(tokens: Tensor) -> None:
    class Odd(nn.Module):
        num_experts = EXPERTS

        def forward(self, tokens: Tensor) -> Tensor:
            return tokens.mean(-1, keepdim=True)

    torch.manual_seed(2)
    model = stack(Block(Odd()), Block(Router()))
    sampler = RouterSampler(model)
    found = signals(model, tokens, sampler=sampler)
    assert list(sampler.left_out) == ["0"]
    assert {name.split("/")[1][0] for name in found if "/" in name} == {"1"}


def guarded(model: nn.Module, folder: Path, tokens: Tensor, **telemetry: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    options = sealegs.Telemetry(sample_every=5, **telemetry)
    with sealegs.Guard(model, optimizer, run=folder, telemetry=options) as guard:
        for _ in range(31):
            with guard.accumulate():
                model(tokens).square().mean().backward()
            loss = model(tokens).square().mean()
            loss.backward()
            guard.step(loss)
    return open_run(folder)


def test_sampled_rows_of_a_guard_have_them_and_no_others(tokens: Tensor, tmp_path: Path) -> None:
    run = guarded(stack(Block(Router())), tmp_path / "run", tokens)
    rows = [step for step, there in enumerate(run.logged("expert_violation")) if there]
    assert rows == [5, 10, 15, 20, 25, 30]
    assert run.manifest.recorded["model"]["num_experts"] == EXPERTS


def test_routers_of_ones_own_are_named_by_a_function(tokens: Tensor, tmp_path: Path) -> None:
    class Mixer(Router):
        pass

    model = stack(Block(nn.Identity()))
    model[0].mixer = Mixer()
    model[0].gate = nn.Sequential(model[0].mixer)
    assert not any(True for _ in routers_of(model))
    run = guarded(model, tmp_path / "run", tokens, routers=lambda model: {"0.mixer": model[0].mixer})
    assert run.logged("expert_load/0.3").any()


def test_compiled_routers_are_said_once_to_be_unseen(tokens: Tensor, tmp_path: Path) -> None:
    model = stack(Block(Router()))
    model[0]._compiled_call_impl = model[0]._call_impl  # as Module.compile leaves it, without the compiler
    run = guarded(model, tmp_path / "run", tokens)
    (told,) = (event for event in run.events if event.kind == "routers-unseen")
    assert "compiled" in told.detail["reason"]
    assert "expert_violation" not in run.signals


TRANSFORMERS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 8, "decoder_sparse_step": 1},
    "olmoe": {"num_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "layer_types": ["full_attention"]},
    "deepseek_v2": {
        **dict.fromkeys(("qk_rope_head_dim", "v_head_dim", "qk_nope_head_dim", "moe_intermediate_size"), 8),
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "n_routed_experts"), 4),
        "first_k_dense_replace": 0,
    },
    "llama4_text": {"num_local_experts": 4, "moe_layers": [0], "intermediate_size_mlp": 8},
    "llama": {},
}


@pytest.mark.xdist_group("transformers")
@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_those_of_transformers_are_found(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    settings: dict[str, Any] = {**sizes, **heads, **ends, "num_experts_per_tok": 1 if kind == "llama4_text" else 2}
    config = AutoConfig.for_model(kind, **settings | TRANSFORMERS[kind])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    sampler = RouterSampler(model)
    ids = torch.randint(3, 32, (4, 32))
    sampler.arm()
    model(ids)
    routed = sampler.collect()
    if kind == "llama":
        assert routed is None
        return
    assert routed is not None
    assert sampler.sizes == (("model.layers.0", 4),)
    assert sampler.left_out == {}
    assert routed.numbers[3:].sum().item() == ids.numel() * settings["num_experts_per_tok"]
    assert routed.numbers[2].item() == ids.numel()
