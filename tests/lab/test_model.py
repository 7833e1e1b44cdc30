"""Token ids in, logits and per-token losses out."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sealegs.lab.data import IGNORED
from sealegs.lab.model import Block, Mlp, Transformer, naive_softmax, rotary_table, rotate
from sealegs.lab.settings import SIZES, ModelSettings

NANO = SIZES["nano"].model


def built(**switches: Any) -> Transformer:
    torch.manual_seed(0)
    return Transformer(replace(NANO, **switches))


def first_block(model: Transformer) -> Block:
    block = model.blocks[0]
    assert isinstance(block, Block)
    return block


def first_mlp(model: Transformer) -> Mlp:
    mlp = first_block(model).mlp
    assert isinstance(mlp, Mlp)
    return mlp


def batch(rows: int = 3, length: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(0, NANO.vocabulary, (rows, length + 1))
    return tokens[:, :-1], tokens[:, 1:].contiguous()


SWITCHES: list[dict[str, Any]] = [
    {},
    {"tied_head": False},
    {"norm": "layernorm"},
    {"norm_position": "post"},
    {"activation": "gelu"},
    {"qk_norm": True},
    {"z_loss": 1e-2},
    {"embedding_norm": True},
    {"naive_softmax": True},
    {"naive_log_loss": True},
    {"init_std": 0.02},
    {"mup_base_width": 12},
    {"experts": 4},
    {"float8": True},
]


@pytest.mark.parametrize("switches", SWITCHES, ids=lambda switches: "+".join(switches) or "defaults")
def test_every_switch_trains_all_its_parameters(switches: dict[str, Any]) -> None:
    model = built(**switches)
    losses = model.losses(*batch())
    losses.total.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    assert losses.tokens.shape == (3, 16)
    assert abs(losses.tokens.mean().item() - math.log(NANO.vocabulary)) < 1.0


def test_switches_change_what_is_computed() -> None:
    """All but the naive ones, which are the same function where nothing overflows."""
    outputs = [built(**switches)(batch()[0]) for switches in SWITCHES]
    for switches, logits in zip(SWITCHES[1:], outputs[1:], strict=True):
        same = torch.allclose(logits, outputs[0], atol=1e-5)
        assert same == (set(switches) <= {"naive_softmax", "naive_log_loss", "z_loss"}), switches


@torch.no_grad()
def test_no_position_sees_the_future() -> None:
    model = built()
    tokens, _ = batch()
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % NANO.vocabulary
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_losses_per_token_add_up_and_padding_does_not_count() -> None:
    model = built()
    tokens, targets = batch()
    targets[0, 5:] = IGNORED
    losses = model.losses(tokens, targets)
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    count = (targets != IGNORED).sum()
    assert torch.allclose(losses.tokens.sum() / count, expected)
    assert torch.allclose(losses.total / count, expected)
    assert (losses.tokens[0, 5:] == 0).all()


def test_z_loss_is_on_top_and_not_in_the_losses_of_the_tokens() -> None:
    tokens, targets = batch()
    plain, with_z = built().losses(tokens, targets), built(z_loss=0.1).losses(tokens, targets)
    log_partition = torch.logsumexp(built()(tokens), dim=-1)
    assert torch.equal(plain.tokens, with_z.tokens)
    assert torch.allclose(with_z.total - plain.total, 0.1 * log_partition.square().sum(), rtol=1e-4)


@torch.no_grad()
def test_the_margins_that_the_naive_forms_take() -> None:
    """88.7 is where exp overflows in fp32; a probability below 1e-45 is 0, and its logarithm -inf."""
    assert naive_softmax(torch.tensor([88.0, 0.0])).isfinite().all()
    assert naive_softmax(torch.tensor([89.0, 0.0])).isnan().any()
    assert naive_softmax(torch.tensor([0.0, -200.0])).log()[1] == -math.inf

    hot = built(init_std=1.0), built(init_std=1.0, naive_softmax=True), built(init_std=1.0, naive_log_loss=True)
    for model in hot:
        first_block(model).attention.query_key_value.weight.mul_(4)
        model.embedding.weight.mul_(40)
    assert [model.losses(*batch()).total.isfinite().item() for model in hot] == [True, False, False]


@torch.no_grad()
def test_the_margin_that_norm_eps_gives() -> None:
    for eps, finite in ((1e-6, True), (0.0, False)):
        model = built(norm_eps=eps)
        model.embedding.weight[7] = 0
        assert model(torch.tensor([[7, 7]])).isfinite().all().item() is finite


@torch.no_grad()
def test_qk_norm_bounds_the_attention_logits() -> None:
    largest = []
    for qk_norm in (False, True):
        model = built(qk_norm=qk_norm)
        attention = first_block(model).attention
        attention.query_key_value.weight.mul_(16)
        x = torch.randn(2, 8, NANO.width)
        query, key, _ = attention.query_key_value(x).view(2, 8, 3, NANO.heads, -1).permute(2, 0, 3, 1, 4)
        logits = attention.query_norm(query) @ attention.key_norm(key).transpose(-1, -2)
        largest.append(logits.abs().max().item() / math.sqrt(query.shape[-1]))
    assert largest[1] <= math.sqrt(NANO.width // NANO.heads) * 1.01 < largest[0]


def test_rotary_positions_are_relative() -> None:
    cosine, sine = rotary_table(NANO)
    torch.manual_seed(0)
    query, key = torch.randn(2, NANO.width // NANO.heads)

    def score(at: int, seen: int) -> float:
        turned = [rotate(x, (cosine[i], sine[i])) for x, i in ((query, at), (key, seen))]
        return float(turned[0] @ turned[1])

    assert score(9, 4) == pytest.approx(score(25, 20), abs=1e-4)
    assert abs(score(9, 4) - score(9, 5)) > 1e-3


def test_initial_weights_have_the_spread_that_was_asked_for() -> None:
    wide = ModelSettings(width=192, heads=4, layers=2, hidden=512)
    torch.manual_seed(0)
    model = Transformer(wide)
    std = math.sqrt(1 / (3 * 192))
    assert model.embedding.weight.std().item() == pytest.approx(std, rel=0.02)
    assert first_mlp(model).up.weight.std().item() == pytest.approx(std, rel=0.02)
    assert first_mlp(model).down.weight.std().item() == pytest.approx(std / math.sqrt(4), rel=0.02)
    assert Transformer(replace(wide, init_std=0.5)).embedding.weight.std().item() == pytest.approx(0.5, rel=0.02)


def test_under_mup_hidden_matrices_begin_narrower_and_logits_smaller() -> None:
    wide = {"width": 192, "hidden": 384, "tied_head": False}
    standard, mup = built(**wide), built(**wide, mup_base_width=48)
    assert mup.embedding.weight.std().item() == pytest.approx(math.sqrt(1 / (3 * 48)), rel=0.05)
    assert mup.head is not None
    assert mup.head.weight.std().item() == pytest.approx(math.sqrt(1 / (3 * 48)), rel=0.05)
    assert first_mlp(mup).up.weight.std().item() == pytest.approx(math.sqrt(1 / (3 * 192)), rel=0.05)
    assert built(**wide, mup_base_width=48, init_std=0.02).embedding.weight.std().item() == pytest.approx(
        0.02, rel=0.05
    )
    assert (first_block(standard).attention.scale, first_block(mup).attention.scale) == (1 / math.sqrt(48), 1 / 48)
    with torch.no_grad():
        for ours, theirs in zip(mup.parameters(), standard.parameters(), strict=True):
            ours.copy_(theirs)
    first_block(mup).attention.scale = first_block(standard).attention.scale
    mup.blocks[1].attention.scale = first_block(standard).attention.scale  # type: ignore[union-attr]
    tokens, _ = batch()
    assert torch.equal(mup(tokens), standard(tokens) / 4)


def test_the_first_loss_is_near_that_of_a_guess() -> None:
    for size in ("nano", "toy"):
        torch.manual_seed(0)
        model = Transformer(SIZES[size].model)
        loss = model.losses(*batch()).tokens.mean().item()
        assert loss == pytest.approx(math.log(512), abs=0.35)
