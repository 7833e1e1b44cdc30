"""Activations by layer, attention logits, underflow, token losses: against plain computations."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from sealegs.lab.model import Attention, Transformer, rotate
from sealegs.lab.settings import SIZES
from sealegs.signals.activations import (
    MULTIHEAD,
    ActivationSampler,
    QueryKey,
    token_loss_histogram,
    underflow_share,
)
from sealegs.signals.groups import find_layers

NANO = SIZES["nano"].model


def lab_model(**switches: Any) -> Transformer:
    torch.manual_seed(0)
    return Transformer(replace(NANO, **switches))


def tokens(rows: int = 3, length: int = 16) -> Tensor:
    return torch.randint(0, NANO.vocabulary, (rows, length))


def conv_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))


def read(sampler: ActivationSampler) -> dict[str, float]:
    names, values = sampler.collect()
    assert values.dtype == torch.float32
    assert values.ndim == 1
    return dict(zip(names, values.tolist(), strict=True))


def per_vector(outputs: list[Tensor], width: int) -> float:
    squares = sum(float(output.double().square().sum()) for output in outputs)
    return math.sqrt(squares / sum(output.numel() // width for output in outputs))


def block_outputs(model: Transformer, batch: Tensor) -> list[Tensor]:
    rotation = model.cosine[: batch.shape[1]], model.sine[: batch.shape[1]]  # type: ignore[index]
    x = model.embedding(batch)
    outputs = []
    for block in model.blocks:
        x = block(x, rotation)
        outputs.append(x.detach())
    return outputs


# Which layers.


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(4, 4), "h": nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))}
        )
        self.layers = nn.ModuleDict({"0": nn.Linear(4, 4), "1": nn.Linear(4, 4)})
        self.only = nn.ModuleList([nn.Linear(4, 4)])


class Unnumbered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


def test_layers_are_the_members_of_the_outermost_numbered_containers() -> None:
    assert list(find_layers(lab_model())) == [f"blocks.{n}" for n in range(NANO.layers)]
    assert list(find_layers(Nested())) == [*(f"transformer.h.{n}" for n in range(3)), "layers.0", "layers.1"]
    assert list(find_layers(conv_net())) == ["0", "1", "2", "3", "4"]


def test_a_model_without_any_has_its_children_also_inside_wrappers() -> None:
    assert list(find_layers(Unnumbered())) == ["first", "second"]
    wrapped = nn.Module()
    wrapped.add_module("module", whole(Unnumbered(), "eager")[0])
    assert list(find_layers(wrapped)) == ["module._orig_mod.first", "module._orig_mod.second"]
    assert find_layers(nn.Linear(2, 2)) == {}


# What is measured.


def test_the_norm_of_a_token_is_taken_over_all_micro_batches() -> None:
    model = lab_model()
    sampler = ActivationSampler(model)
    batches = [tokens(3), tokens(1)]  # of unequal size: a mean of means would be off
    with sampler.sampling():
        for batch in batches:
            model(batch).sum().backward()
    values = read(sampler)
    by_batch = [block_outputs(model, batch) for batch in batches]
    assert list(values) == [f"activation_norm/blocks.{n}" for n in range(NANO.layers)]
    for n in range(NANO.layers):
        wanted = per_vector([outputs[n] for outputs in by_batch], NANO.width)
        assert values[f"activation_norm/blocks.{n}"] == pytest.approx(wanted, rel=1e-5)
    assert read(sampler) == {}, "taken is forgotten"


def test_the_vector_of_an_image_is_its_channels() -> None:
    model = conv_net()
    sampler = ActivationSampler(model)
    images = torch.randn(4, 3, 8, 8)
    with sampler.sampling():
        model(images).sum().backward()
    values = read(sampler)
    assert values["activation_norm/0"] == pytest.approx(per_vector([model[0](images).detach()], 8), rel=1e-5)
    assert values["activation_norm/4"] == pytest.approx(per_vector([model(images).detach()], 10), rel=1e-5)


@pytest.mark.parametrize("kind", ["tuple", "list", "mapping", "none", "ids first", "empty"])
def test_outputs_of_every_shape(kind: str) -> None:
    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Any:
            outputs: dict[str, Any] = {
                "tuple": (x, None, x * 9),
                "list": [x],
                "mapping": OrderedDict(last_hidden_state=x, attentions=x * 9),
                "none": None,
                "ids first": (torch.arange(3), x),
                "empty": x[:0],
            }
            return outputs[kind]

    model = nn.Sequential(Layer(), nn.Identity())
    sampler = ActivationSampler(model)
    with sampler.sampling():
        model[0](torch.full((2, 5, 4), 3.0))
    values = read(sampler)
    assert values == ({} if kind in ("none", "empty") else {"activation_norm/0": pytest.approx(6.0)})


def test_layers_that_run_unequally_often_are_each_a_mean_of_their_own() -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    sampler = ActivationSampler(model)
    with sampler.sampling():
        model[0](torch.full((1, 4), 1.0))
        model[1](torch.full((1, 4), 2.0))
        model[1](torch.full((1, 4), 4.0))
        model[1](torch.full((2, 4), 0.0))
    assert read(sampler) == pytest.approx({"activation_norm/0": 2.0, "activation_norm/1": math.sqrt(20)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_low_precision_is_accumulated_in_float32(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    sampler = ActivationSampler(model)
    with sampler.sampling(), torch.autocast("cpu", torch.bfloat16):
        model(torch.full((1000, 250), 200.0, dtype=dtype))  # fp16 cannot hold the norm, bf16 only its first digits
    assert read(sampler)["activation_norm/1"] == pytest.approx(200 * math.sqrt(250), rel=1e-3)


def test_nan_shows() -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 4))
    sampler = ActivationSampler(model)
    nn.init.constant_(model.get_parameter("1.bias"), math.nan)
    with sampler.sampling():
        model(torch.ones(2, 4))
    values = read(sampler)
    assert values["activation_norm/0"] == pytest.approx(2.0)
    assert math.isnan(values["activation_norm/1"])


# When it is measured.


def test_only_armed_steps_have_hooks() -> None:
    model = lab_model()
    sampler = ActivationSampler(model, attention={Attention: read_lab})

    def hooks() -> int:
        return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())

    assert hooks() == 0
    sampler.arm()
    assert hooks() == 2 * NANO.layers
    sampler.arm()
    assert hooks() == 2 * NANO.layers, "arming twice is arming once"
    sampler.disarm()
    assert hooks() == 0
    with pytest.raises(ZeroDivisionError), sampler.sampling():
        raise ZeroDivisionError
    assert hooks() == 0
    model(tokens())
    assert read(sampler) == {}


def test_evaluations_are_passed_over() -> None:
    model = lab_model()
    sampler = ActivationSampler(model)
    with sampler.sampling():
        with torch.no_grad():
            model(tokens())
        with torch.inference_mode():
            model(tokens())
        assert read(sampler) == {}
        model(tokens()).sum().backward()
    assert len(read(sampler)) == NANO.layers


class Checkpointed(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2))
        self.how = how
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(partial(self.run, block), x, **self.how)
        return x

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        self.runs += 1
        return torch.sin(block(x)).exp()  # what comes after the block makes its second run a whole one


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_layer_counts_once(reentrant: bool) -> None:
    torch.manual_seed(0)
    model = Checkpointed(use_reentrant=reentrant)
    sampler = ActivationSampler(model)
    x = torch.randn(3, 8, requires_grad=True)
    with sampler.sampling():
        model(x).sum().backward()
        assert model.runs == 4
        assert [len(calls) for calls in sampler._norms.values()] == [1, 1]
    values = read(sampler)
    wanted = per_vector([model.blocks[0](x).detach()], 8)
    assert values["activation_norm/blocks.0"] == pytest.approx(wanted, rel=1e-5)


def test_selective_checkpointing_keeps_its_books_in_order() -> None:
    """It numbers operations; one more in the first run than in the second would hand out wrong tensors."""
    gradients = []
    for watched in (False, True):
        torch.manual_seed(0)
        saved = [torch.ops.aten.mm.default, torch.ops.aten.linalg_vector_norm.default, torch.ops.aten.addmm.default]
        model = Checkpointed(
            use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, saved), early_stop=False
        )
        sampler = ActivationSampler(model)
        if watched:
            sampler.arm()
        model(torch.ones(3, 8)).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        if watched:
            assert read(sampler) == {}
            assert set(sampler.left_out) == {"blocks.0", "blocks.1"}
        sampler.disarm()
    assert all(
        one is not None and other is not None and one.equal(other) for one, other in zip(*gradients, strict=True)
    )


def test_watching_changes_nothing() -> None:
    results = []
    for watched in (False, True):
        model = lab_model()
        sampler = ActivationSampler(model, attention={Attention: read_lab})
        if watched:
            sampler.arm()
        torch.manual_seed(1)
        logits = model(tokens())
        logits.square().sum().backward()
        results.append([logits.detach(), *(parameter.grad for parameter in model.parameters())])
        assert bool(read(sampler)) == watched
    assert all(one is not None and other is not None and one.equal(other) for one, other in zip(*results, strict=True))


# Compiled models.


def compile_counter(backend: str) -> Any:
    """Imported here, since every worker would pay for it, and one runs this."""
    from torch._dynamo.testing import CompileCounterWithBackend

    return CompileCounterWithBackend(backend)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def whole(model: nn.Module, backend: Any) -> tuple[nn.Module, Callable[..., Any]]:
    compiled = torch.compile(model, backend=backend)
    assert isinstance(compiled, nn.Module)
    return compiled, compiled


def in_place(model: nn.Module, backend: Any) -> tuple[nn.Module, Callable[..., Any]]:
    model.compile(backend=backend)
    return model, model


def function(model: nn.Module, backend: Any) -> tuple[nn.Module, Callable[..., Any]]:
    return model, torch.compile(model.forward, backend=backend)


def blocks_in_place(model: nn.Module, backend: Any) -> tuple[nn.Module, Callable[..., Any]]:
    for block in model.get_submodule("blocks").children():
        block.compile(backend=backend)
    return model, model


def blocks_replaced(model: nn.Module, backend: Any) -> tuple[nn.Module, Callable[..., Any]]:
    blocks = model.get_submodule("blocks")
    assert isinstance(blocks, nn.ModuleList)
    for n, block in enumerate(list(blocks)):
        compiled = torch.compile(block, backend=backend)
        assert isinstance(compiled, nn.Module)
        blocks[n] = compiled
    return model, model


class Plain(nn.Module):
    """As few operations as have an embedding and two blocks: a compiler takes its time with each."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NANO.vocabulary, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(NANO.layers))

    def forward(self, batch: Tensor) -> Tensor:
        x: Tensor = self.embedding(batch)
        for block in self.blocks:
            x = x + block(x)
        return x


DYNAMO_LOOKS_AT_GRAD = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

WAYS = [whole, in_place, function, blocks_in_place, blocks_replaced]


def alternating(
    way: Callable[..., Any], backend: str, *, arm_first: bool, force_eager: bool = False
) -> tuple[ActivationSampler, list[int], list[int]]:
    """Six steps, every other one sampled: the sampler, how many layers each sampled step saw, compilations so far."""
    counter = compile_counter(backend)
    model, call = way(Plain(), counter)
    sampler = ActivationSampler(model, force_eager=force_eager)
    seen, compilations = [], []
    for step in range(6):
        if step % 2 != arm_first:
            sampler.arm()
        call(tokens()).sum().backward()
        if step % 2 != arm_first:
            sampler.disarm()
            seen.append(len(read(sampler)))
        compilations.append(counter.frame_count)
    return sampler, seen, compilations


@pytest.mark.usefixtures("fresh_compiler")
@DYNAMO_LOOKS_AT_GRAD
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_sampling_a_compiled_model_compiles_nothing_again(way: Callable[..., Any], backend: str) -> None:
    sampler, seen, compilations = alternating(way, backend, arm_first=False)
    assert compilations == [compilations[0]] * 6
    assert seen == ([NANO.layers] * 3 if way is blocks_replaced else [0] * 3)
    hidden = {f"blocks.{n}" for n in range(NANO.layers)} if way in (whole, in_place, blocks_in_place) else set()
    assert set(sampler.left_out) == hidden


@pytest.mark.usefixtures("fresh_compiler")
@DYNAMO_LOOKS_AT_GRAD
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_armed_at_the_very_first_step_a_compiled_function_is_compiled_once_more_and_no_other(
    way: Callable[..., Any],
) -> None:
    _, _, compilations = alternating(way, "eager", arm_first=True)
    assert compilations[1:] == [compilations[1]] * 5
    assert compilations[1] == compilations[0] + (way is function)


@pytest.mark.usefixtures("fresh_compiler")
@DYNAMO_LOOKS_AT_GRAD
@pytest.mark.parametrize("arm_first", [True, False])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_forced_to_be_eager_every_compiled_model_is_seen(way: Callable[..., Any], arm_first: bool) -> None:
    sampler, seen, compilations = alternating(way, "eager", arm_first=arm_first, force_eager=True)
    assert seen == [NANO.layers] * 3
    assert compilations[1:] == [compilations[1]] * 5
    assert sampler.left_out == {}


@pytest.mark.usefixtures("fresh_compiler")
def test_the_compiler_gets_its_stance_back() -> None:
    sampler = ActivationSampler(lab_model(), force_eager=True)
    counter = compile_counter("eager")
    double = torch.compile(lambda x: x * 2, backend=counter)
    with sampler.sampling():
        double(torch.ones(2))
        assert counter.frame_count == 0
    double(torch.ones(2))
    assert counter.frame_count == 1


# Attention.


def read_lab(module: Attention, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> QueryKey:
    x, rotation = args
    split = module.query_key_value(x[:4]).unflatten(-1, (3, module.heads, -1)).permute(2, 0, 3, 1, 4)
    query, key = rotate(module.query_norm(split[0]), rotation), rotate(module.key_norm(split[1]), rotation)
    return QueryKey(query, key, causal=True)


def test_the_largest_logit_of_the_lab_model() -> None:
    model = lab_model()
    with torch.no_grad():
        for block in model.blocks:
            block.get_parameter("attention.query_key_value.weight").mul_(8)
    wanted: dict[str, float] = {}

    def spy(layer: str, module: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        query, key, *_ = read_lab(module, args, kwargs)
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        wanted[f"attention_logit_max/{layer}"] = float(scores.detach().masked_fill(future, -math.inf).max())

    for n, block in enumerate(model.blocks):
        block.get_submodule("attention").register_forward_pre_hook(partial(spy, f"blocks.{n}"), with_kwargs=True)
    sampler = ActivationSampler(model, attention={Attention: read_lab})
    with sampler.sampling():
        model(tokens(4, 16)).sum().backward()  # 16 queries: all are looked at
    values = read(sampler)
    assert {name: value for name, value in values.items() if name in wanted} == pytest.approx(wanted, rel=1e-5)
    assert len(values) == 2 * NANO.layers


def test_of_many_queries_some_are_looked_at_the_last_among_them() -> None:
    query, key = torch.zeros(1, 1, 100, 4), torch.ones(1, 1, 100, 4)
    query[..., -1, :] = 7.0
    model = nn.Sequential(nn.Identity(), nn.Identity())
    for causal in (True, False):
        sampler = ActivationSampler(
            model, attention={nn.Identity: lambda *_, causal=causal: QueryKey(query, key, causal=causal)}
        )
        with sampler.sampling():
            model(torch.ones(1, 4))
            model[1](torch.ones(1, 4))
        values = read(sampler)
        assert values["attention_logit_max/0"] == values["attention_logit_max/1"] == 14.0


PADDING = torch.arange(6) >= torch.tensor([[2], [6], [3], [5]])
MASKS: list[dict[str, Tensor]] = [
    {},
    {"attn_mask": torch.ones(6, 6, dtype=torch.bool).triu(1)},
    {"attn_mask": torch.full((6, 6), -math.inf).triu(1)},
    {"attn_mask": torch.ones(6, 6, dtype=torch.bool).triu(1).expand(8, 6, 6)},
    {"key_padding_mask": PADDING},
    {
        "key_padding_mask": PADDING,
        "attn_mask": torch.ones(6, 6, dtype=torch.bool).triu(1),
    },
]


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("how", [{"batch_first": True}, {}, {"bias": False}, {"kdim": 8, "vdim": 8}])
def test_the_largest_logit_of_torchs_attention(how: dict[str, Any], masks: dict[str, Tensor]) -> None:
    """Against the weights that it gives: their logarithms differ from the logits by a constant of each query."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 2, **how)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"attention": attention}), nn.Identity()])})
    key = torch.randn(4, 6, how.get("kdim", 16)) * 4
    query = torch.randn(4, 6, 16) * 4
    shaped = [side if how.get("batch_first") else side.transpose(0, 1) for side in (query, key, key)]
    sampler = ActivationSampler(model, attention=MULTIHEAD)
    with sampler.sampling():
        _, weights = attention(*shaped, **masks, average_attn_weights=False)
    weight = attention.in_proj_weight
    heads = []
    for side, rows, bias in (
        (query, attention.q_proj_weight if weight is None else weight[:16], slice(0, 16)),
        (key, attention.k_proj_weight if weight is None else weight[16:32], slice(16, 32)),
    ):
        offset = 0.0 if attention.in_proj_bias is None else attention.in_proj_bias[bias]
        heads.append((side @ rows.T + offset).view(4, 6, 2, 8).transpose(1, 2))
    logits = (heads[0] @ heads[1].transpose(-1, -2) / math.sqrt(8)).masked_fill(weights == 0, -math.inf)
    assert read(sampler) == {"attention_logit_max/layers.0": pytest.approx(float(logits.detach().max()), rel=1e-5)}


def test_attention_without_a_batch_and_inside_an_encoder() -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), num_layers=2)
    sampler = ActivationSampler(encoder, attention=MULTIHEAD)
    with sampler.sampling():
        encoder(torch.randn(9, 5, 16)).sum().backward()
        encoder(torch.randn(5, 16)).sum().backward()
    names = [f"{kind}/layers.{n}" for kind in ("activation_norm", "attention_logit_max") for n in range(2)]
    assert list(read(sampler)) == names


# Gradients.


def test_elements_that_fp16_loses_are_counted() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(300, 400) * 1e-8
    for scale in (1.0, 4.0, 64.0):
        lost = float(((gradient * scale).half() == 0).float().mean())
        assert float(underflow_share([gradient], torch.tensor(scale))) == pytest.approx(lost, abs=0.02)
        assert float(underflow_share([gradient.T, gradient[:, ::2]], scale)) == pytest.approx(lost, abs=0.02)
    assert float(underflow_share([gradient], 65536.0)) < 0.01


def test_rows_of_zeros_are_no_underflow_but_nothing_but_zeros_is() -> None:
    embedding = torch.zeros(1000, 64)
    embedding[::7] = 1.0
    assert float(underflow_share([embedding])) == 0.0
    embedding[::7, ::2] = 0.0
    assert float(underflow_share([embedding])) == 0.5
    assert float(underflow_share([torch.zeros(1000)])) == 1.0
    assert float(underflow_share([torch.zeros(64), torch.ones(64)])) == 0.5, "of two layers one has no gradient left"


def test_non_finite_gradients_are_not_lost() -> None:
    gradient = torch.full((64,), math.nan)
    gradient[::2] = math.inf
    assert float(underflow_share([gradient], 0.0 + 2.0)) == 0.0


def test_small_and_sparse_gradients_are_passed_over() -> None:
    sparse = torch.zeros(40, 40).to_sparse()
    assert float(underflow_share([torch.zeros(31), sparse])) == 0.0
    assert float(underflow_share([torch.zeros(31), torch.zeros(32)])) == 1.0
    assert float(underflow_share([])) == 0.0


def test_underflow_in_fp16_backward_shows() -> None:
    """A real backward pass in half precision, without and with a loss scale."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64).half()
    shares = []
    for scale in (1.0, 65536.0):
        model.zero_grad()
        loss = model(torch.randn(8, 64).half()).float().mean() * 3e-5
        (loss * scale).backward()
        assert model.weight.grad is not None
        shares.append(float(underflow_share([model.weight.grad.float() / scale], scale)))
    assert shares[0] > 0.1
    assert shares[1] < 0.01


# Token losses.


def test_every_loss_has_its_bin() -> None:
    losses = torch.tensor([[0.0, 0.49, 0.5, 15.9], [16.0, 1e9, math.nan, math.inf], [-math.inf, -1e-7, 3.2, 3.3]])
    counts = token_loss_histogram(losses)
    assert counts.dtype == torch.float32
    wanted = [0] * 33
    for place, count in {0: 3, 1: 1, 31: 3, 6: 2, 32: 3}.items():
        wanted[place] = count
    assert counts.tolist() == wanted


def test_positions_without_a_target_are_not_counted() -> None:
    losses = torch.tensor([0.0, 0.0, 1.2, math.nan])
    counts = token_loss_histogram(losses, torch.tensor([True, False, True, False]))
    assert counts.sum() == 2
    assert counts[0] == counts[2] == 1


def test_against_numpys_histogram_in_low_precision_too() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        losses = (torch.rand(4, 2048) * 15.9).to(dtype)
        wanted = torch.histc(losses.float(), bins=32, min=0, max=16)
        assert token_loss_histogram(losses).tolist() == [*wanted.tolist(), 0.0]


def test_gradients_of_single_rows_are_passed_over() -> None:
    """``torch.func`` runs the module on tensors that must not be kept."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    sampler = ActivationSampler(model)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def of_row(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        outputs: Tensor = torch.func.functional_call(model, weights, (row,))
        return outputs.square().sum()

    rows = torch.randn(5, 4)
    with sampler.sampling():
        torch.func.vmap(torch.func.grad(of_row), in_dims=(None, 0))(weights, rows)
    assert sampler.collect()[0] == ()
    assert sampler.left_out["0"] == "inside a function transform (vmap, grad)"
    with sampler.sampling():
        model(rows)
    assert len(sampler.collect()[0]) == 3
