"""Queries and keys of heads whose logits are too large: rescaled by the exact factor of each, and nothing else."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sealegs.errors import ConfigError
from sealegs.lab.model import Transformer, rotate
from sealegs.lab.settings import ModelSettings
from sealegs.signals.attention import HeadLogits
from sealegs.step.qk_clip import QkClip

pytestmark = pytest.mark.xdist_group("transformers")  # one process for all that imports it

HEADS, WIDTH, LENGTH, ROWS = 4, 8, 10, 3
HF: dict[str, Any] = {
    "hidden_size": HEADS * WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "vocab_size": 64,
}
FUTURE = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


class Attending(nn.Module):
    """torch's own attention in two layers."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, HEADS * WIDTH)
        self.layers = nn.ModuleList(nn.MultiheadAttention(HEADS * WIDTH, HEADS, batch_first=True, **how) for _ in "ab")

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        for layer in self.layers:
            other = x if layer.kdim == x.shape[-1] else x[..., : layer.kdim]
            x = x + layer(x, other, x, attn_mask=FUTURE)[0]
        return x


def lab(**switches: Any) -> Transformer:
    return Transformer(
        ModelSettings(width=32, layers=2, heads=HEADS, hidden=48, context=LENGTH, vocabulary=64, **switches)
    )


def llama(**settings: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    model: nn.Module = LlamaForCausalLM(LlamaConfig(**HF, pad_token_id=0, **settings))
    return model


def neox() -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    model: nn.Module = GPTNeoXForCausalLM(GPTNeoXConfig(**HF))
    return model


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0)
    model: nn.Module = GPT2LMHeadModel(settings)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lab": lab,
    "torch, packed": Attending,
    "torch, without biases": lambda: Attending(bias=False),
    "torch, apart": lambda: Attending(kdim=24),
    "llama, grouped keys and biases": lambda: llama(num_key_value_heads=2, attention_bias=True),
    "llama, a key for each head": llama,
    "gpt-neox, head by head": neox,
    "gpt-2, transposed": gpt2,
}


def made(name: str) -> nn.Module:
    """With biases that are not zero, and heads that differ."""
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


TOKENS = torch.randint(64, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def largest(heads: HeadLogits, model: nn.Module) -> Tensor:
    heads.arm()
    model(TOKENS)
    heads.disarm()
    found = heads.collect()
    assert found is not None, heads.refused
    return found


def rows_of(model: nn.Module, name: str) -> list[tuple[Tensor, Tensor]]:
    """For each head of the first layer the rows of its queries and of its keys, weights and biases side by side."""
    if name == "lab":
        whole = model.get_parameter("blocks.0.attention.query_key_value.weight")
        return list(zip(whole[:32].chunk(HEADS), whole[32:64].chunk(HEADS), strict=True))
    if name.startswith("torch"):
        each = model.get_submodule("layers.0")
        assert isinstance(each, nn.MultiheadAttention)
        packed: Tensor | None = each.in_proj_weight
        query, key = (each.q_proj_weight, each.k_proj_weight) if packed is None else packed.chunk(3)[:2]
        if each.in_proj_bias is not None:
            biases = each.in_proj_bias.chunk(3)
            query, key = (torch.cat((w, b[:, None]), 1) for w, b in ((query, biases[0]), (key, biases[1])))
        return list(zip(query.chunk(HEADS), key.chunk(HEADS), strict=True))
    if name.startswith("llama"):
        parts = []
        for side in ("q_proj", "k_proj"):
            each = model.get_submodule(f"model.layers.0.self_attn.{side}")
            assert isinstance(each, nn.Linear)
            bias: Tensor | None = each.bias
            parts.append(each.weight if bias is None else torch.cat((each.weight, bias[:, None]), 1))
        query, key = (part.split(WIDTH) for part in parts)
        return [(query[head], key[head * len(key) // HEADS]) for head in range(HEADS)]
    each = model.get_submodule(
        "gpt_neox.layers.0.attention.query_key_value" if "neox" in name else "transformer.h.0.attn.c_attn"
    )
    weight, bias = each.get_parameter("weight"), each.get_parameter("bias")
    both = torch.cat((weight if "neox" in name else weight.t(), bias[:, None]), 1).split(WIDTH)
    if "neox" in name:
        return [(both[3 * head], both[3 * head + 1]) for head in range(HEADS)]
    return [(both[head], both[HEADS + head]) for head in range(HEADS)]


@pytest.mark.parametrize("name", MODELS)
def test_each_head_over_the_limit_is_rescaled_by_its_own_factor_and_no_other(name: str) -> None:
    model = made(name)
    heads = HeadLogits(model)
    before = largest(heads, model)
    first = before[:HEADS]
    limit = float(first.sort().values[1:3].mean())  # two heads are above it, two below
    assert (first > limit).sum() == 2
    were = [(query.clone(), key.clone()) for query, key in rows_of(model, name)]
    untouched = {n: p.detach().clone() for n, p in model.named_parameters()}
    is_grouped = "grouped" in name
    QkClip(limit, heads, torch.cat((first, torch.full_like(before[HEADS:], -math.inf)))).apply()
    for head, ((query, key), (query_was, key_was)) in enumerate(zip(rows_of(model, name), were, strict=True)):
        share = min(1.0, limit / float(first[head]))
        torch.testing.assert_close(query, query_was * (share if is_grouped else math.sqrt(share)), rtol=2e-6, atol=0)
        torch.testing.assert_close(key, key_was * (1.0 if is_grouped else math.sqrt(share)), rtol=2e-6, atol=0)
        if share == 1.0:
            assert torch.equal(query, query_was)
            assert torch.equal(key, key_was)
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, untouched[n])}
    assert len(changed) in (1, 2, 3)  # weights and biases of one layer
    if "packed" in name or name == "lab":  # values lie in the same matrix
        (weight,) = (n for n in changed if n.endswith("weight"))
        assert torch.equal(model.get_parameter(weight)[64:], untouched[weight][64:])
    after = largest(heads, model)[:HEADS]
    torch.testing.assert_close(after, first.clamp(max=limit), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", MODELS)
def test_no_bit_changes_where_nothing_is_over_the_limit(name: str) -> None:
    model = made(name)
    heads = HeadLogits(model)
    found = largest(heads, model)
    before = [p.detach().clone() for p in model.parameters()]
    QkClip(float(found.max()), heads, found).apply()
    for nothing in (math.nan, math.inf, -math.inf):  # no size of a weight's
        QkClip(0.1, heads, torch.full_like(found, nothing)).apply()
    QkClip(0.1, heads, found).apply(torch.ones(()))  # the update is not made either
    assert all(map(torch.equal, model.parameters(), before))
    QkClip(0.1, heads, found).apply(torch.zeros(()))
    assert not all(map(torch.equal, model.parameters(), before))


def test_the_largest_logits_are_those_of_a_plain_computation() -> None:
    """After rotary positions, scaled, and of what a query sees alone."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    def of(query: Tensor, key: Tensor) -> Tensor:
        key = key.repeat_interleave(HEADS // key.shape[1], dim=1)
        return (query @ key.mT / math.sqrt(WIDTH)).masked_fill(FUTURE, -math.inf).amax(dim=(0, 2, 3))

    found: dict[str, Tensor] = {}

    def of_lab(module: Any, args: Any) -> None:
        x, rotation = args
        split = module.query_key_value(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        found["lab"] = of(rotate(split[0], rotation), rotate(split[1], rotation))

    def of_llama(module: Any, args: Any, kwargs: Any) -> None:
        x = kwargs["hidden_states"]
        query, key = (side(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for side in (module.q_proj, module.k_proj))
        found["llama"] = of(*apply_rotary_pos_emb(query, key, *kwargs["position_embeddings"]))

    def of_torch(module: Any, args: Any, kwargs: Any) -> None:
        weights, biases = module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3)
        query, key = (
            F.linear(args[0], w, b).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for w, b in list(zip(weights, biases, strict=True))[:2]
        )
        found["torch"] = of(query, key)

    model = made("lab")
    model.get_submodule("blocks.0.attention").register_forward_pre_hook(of_lab)
    torch.testing.assert_close(largest(HeadLogits(model), model)[:HEADS], found["lab"])
    model = made("llama, grouped keys and biases")
    model.get_submodule("model.layers.0.self_attn").register_forward_pre_hook(of_llama, with_kwargs=True)
    torch.testing.assert_close(largest(HeadLogits(model), model)[:HEADS], found["llama"])
    model = made("torch, packed")
    model.get_submodule("layers.0").register_forward_pre_hook(of_torch, with_kwargs=True)
    torch.testing.assert_close(largest(HeadLogits(model), model)[:HEADS], found["torch"])


class Own(nn.Module):
    """Attention as somebody wrote it, with names that say nothing of what is between the matrices and the product."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.heads, self.how = HEADS, how
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        query: Tensor
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if self.how == "normalised":
            query, key = F.rms_norm(query, (WIDTH,)), F.rms_norm(key, (WIDTH,))
        elif self.how == "one key normalised":
            key = F.normalize(key, dim=-1)
        elif self.how == "shifted":
            query = query + 1
        elif self.how == "by hand":
            by_hand: Tensor = torch.softmax(query @ key.mT, dim=-1) @ value
            return by_hand
        elif self.how == "twice":
            value = F.scaled_dot_product_attention(query, key, value)
        return F.scaled_dot_product_attention(2 * query if self.how == "scaled" else query, key, value)


NOT_UNDERSTOOD = {
    "normalised": "is there a norm",
    "one key normalised": "is there a norm",
    "shifted": "is there a norm",
    "by hand": "calls scaled_dot_product_attention 0 times",
    "twice": "calls scaled_dot_product_attention 2 times",
}


@pytest.mark.parametrize("how", [*NOT_UNDERSTOOD, "plain", "scaled"])
def test_what_is_between_the_matrices_and_the_product_is_found_out(how: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Own(how))
    heads = HeadLogits(model)
    heads.arm()
    model(torch.randn(ROWS, LENGTH, 32))
    heads.disarm()
    found = heads.collect()
    if how in NOT_UNDERSTOOD:
        assert found is None
        assert heads.refused.startswith("0: ")
        assert NOT_UNDERSTOOD[how] in heads.refused
    else:
        assert found is not None
        assert heads.refused == ""


def _with_lora() -> nn.Module:
    model = made("llama, a key for each head")
    for name, module in list(model.named_modules()):
        if name.endswith("self_attn"):
            module.q_proj = nn.Sequential(module.q_proj)  # as adapters wrap it
    return model


def _half_frozen() -> nn.Module:
    model = made("llama, a key for each head")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("k_proj" not in name)
    return model


def _with_tied_matrices() -> nn.Module:
    model = made("llama, a key for each head")
    each: Any = model.get_submodule("model.layers.0.self_attn")
    each.k_proj.weight = each.q_proj.weight
    return model


class Headless(Own):
    def __init__(self) -> None:
        super().__init__("plain")
        del self.heads


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "QK-norm": (lambda: lab(qk_norm=True), r"blocks\.0\.attention: it normalises queries and keys \(query_norm\)"),
    "no attention": (lambda: nn.Linear(2, 2), "no trained attention that is understood"),
    "adapters": (_with_lora, "no trained attention that is understood"),
    "keys frozen": (_half_frozen, "not all of what makes its queries and keys is trained"),
    "tied": (_with_tied_matrices, "queries and keys have one matrix"),
    "no number of heads": (lambda: nn.Sequential(Headless()), "does not say how many heads"),
    "a key of its own": (lambda: Attending(add_bias_kv=True), "a key that no matrix makes"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_attention_that_is_not_understood_is_refused_in_a_sentence(why: str) -> None:
    make, sentence = REFUSED[why]
    with pytest.raises(ConfigError, match=sentence):
        HeadLogits(make())


def test_frozen_attention_is_nobodys_to_rescale() -> None:
    model = made("lab")
    model.get_submodule("blocks.0").requires_grad_(False)
    assert [each.name for each in HeadLogits(model).attentions] == ["blocks.1.attention"]


def test_bf16_weights_are_rounded_once() -> None:
    model = made("lab").bfloat16()
    heads = HeadLogits(model)
    found = largest(heads, model)
    before = model.get_parameter("blocks.0.attention.query_key_value.weight").detach().clone()
    limit = 0.7 * float(found[:HEADS].min())
    QkClip(limit, heads, found).apply()
    after = model.get_parameter("blocks.0.attention.query_key_value.weight")
    shares = (limit / found[:HEADS]).sqrt().repeat_interleave(WIDTH)[:, None]
    assert torch.equal(after[:32], (before[:32].float() * shares).bfloat16())
    assert torch.equal(after[64:], before[64:])
