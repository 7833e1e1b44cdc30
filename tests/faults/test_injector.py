"""A model in training and Faults in, Strikes out.

Run as a program, this file is one rank of the two-process runs: see ``ranks``.
"""

import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from tests.ranks.launch import launch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from sealegs.errors import ConfigError
from sealegs.faults.contract import Fault
from sealegs.faults.injector import inject
from sealegs.faults.live import GradientScale, NanGradient
from sealegs.faults.spec import parse
from sealegs.faults.strikes import Strike
from sealegs.faults.targets import flip_top_exponent_bit, named_targets, select
from sealegs.lab.model import Transformer
from sealegs.lab.settings import SIZES

NANO = SIZES["nano"].model
STEPS = 4
MICRO_BATCHES = 2
UP = "blocks.1.mlp.up.weight"

Gradients = list[dict[str, Tensor]]


def transformer(**switches: Any) -> Transformer:
    torch.manual_seed(0)
    return Transformer(replace(NANO, layers=2, **switches))


class Autoencoder(nn.Module):
    """Two convolutions with one weight, a frozen scale and a branch that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Conv2d(3, 8, 3)
        self.decode = nn.ConvTranspose2d(8, 3, 3)
        self.decode.weight = self.encode.weight
        self.frozen = nn.Parameter(torch.ones(3, 1, 1), requires_grad=False)
        self.branch = nn.Conv2d(3, 3, 1)
        self.uses_branch = True

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.decode(F.gelu(self.encode(x))) * self.frozen
        return out + self.branch(x) if self.uses_branch else out


def autoencoder() -> Autoencoder:
    torch.manual_seed(0)
    return Autoencoder()


def conv_loss(model: nn.Module, step: int, micro_batch: int = 0) -> Tensor:
    images = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(10 * step + micro_batch))
    return F.mse_loss(model(images), images)


def token_loss(model: nn.Module, step: int, micro_batch: int = 0, rank: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + micro_batch)
    tokens = torch.randint(0, NANO.vocabulary, (2, 9), generator=generator)
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(
    model: nn.Module,
    faults: Sequence[str],
    loss: Callable[..., Tensor] = token_loss,
    *,
    micro_batches: int = MICRO_BATCHES,
    skip: Sequence[int] = (),
    **options: Any,
) -> tuple[Gradients, list[Strike], tuple[Fault, ...]]:
    """A loop that knows nothing of faults: the gradient of each step; updates, except at steps to skip."""
    seen: Gradients = []
    step = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with inject(list(map(parse, faults)), model, clock=lambda: step, **options) as injector:
        while step < STEPS:
            for micro_batch in range(micro_batches):
                loss(model, step, micro_batch).backward()
            seen.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
            if step not in skip:
                optimizer.step()
            optimizer.zero_grad()
            step += 1
    return seen, injector.strikes, injector.pending()


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, list[list[int]]]:
    """Where two sets of tensors are not the same, bit for bit."""
    assert one.keys() == other.keys()
    bits = {name: (one[name].view(torch.int32), other[name].view(torch.int32)) for name in one}
    return {name: (a != b).nonzero().tolist() for name, (a, b) in bits.items() if not torch.equal(a, b)}


@pytest.mark.parametrize("fault", ["nan-gradient", "inf-gradient", "bit-flip"])
def test_strikes_one_element_of_one_gradient_and_nothing_else(fault: str) -> None:
    clean, nothing, _ = train(transformer(), [], skip=[2])
    struck, [strike], pending = train(transformer(), [f"{fault}@2"], skip=[2])
    assert not nothing
    assert not pending
    assert strike.element is not None
    assert [differing(a, b) for a, b in zip(clean, struck, strict=True)] == [
        {},
        {},
        {strike.tensor: [list(strike.element)]},
        {},
    ]
    value = struck[2][strike.tensor][strike.element].item()
    for number in (value, strike.after):
        wanted = {
            "nan-gradient": math.isnan(number),
            "inf-gradient": number == math.inf,
            "bit-flip": abs(number) > 1e30,
        }
        assert wanted[fault], number


def test_reports_what_was_there_and_what_is() -> None:
    clean, _, _ = train(transformer(), [], micro_batches=1)
    said: list[str] = []
    struck, [strike], _ = train(transformer(), ["bit-flip:tensor=blocks.0@1"], micro_batches=1, say=said.append)
    assert strike.step == 1
    assert strike.fault == parse("bit-flip:tensor=blocks.0@1")
    assert strike.tensor.startswith("blocks.0.")
    assert strike.element is not None
    assert strike.before == clean[1][strike.tensor][strike.element].item()
    assert strike.after == struck[1][strike.tensor][strike.element].item()
    assert said == [str(strike)]
    assert said[0] == (
        f"step 1: bit-flip:tensor=blocks.0@1 struck the gradient of {strike.tensor}{list(strike.element)}: "
        f"{strike.before:.4g} became {strike.after:.4g}"
    )


@pytest.mark.parametrize(
    ("options", "label", "is_scaled"),
    [
        ("", "*", lambda name: True),
        (",tensor=blocks.1", "blocks.1.*", lambda name: name.startswith("blocks.1.")),
        (f",tensor={UP}", UP, lambda name: name == UP),
    ],
)
def test_scales_what_is_accumulated(options: str, label: str, is_scaled: Callable[[str], bool]) -> None:
    clean, _, _ = train(transformer(), [], skip=[1, 2])
    fault = f"gradient-scale:factor=1024{options},steps=2@1"
    struck, strikes, pending = train(transformer(), [fault], skip=[1, 2])
    for step, (before, after) in enumerate(zip(clean, struck, strict=True)):
        factors = {name: 1024 if step in (1, 2) and is_scaled(name) else 1 for name in before}
        assert not differing({name: factors[name] * gradient for name, gradient in before.items()}, after), step
    # one for each step, however many tensors and micro-batches there were
    assert [(s.step, s.tensor, s.element, s.before, s.after) for s in strikes] == [
        (1, label, None, 1.0, 1024.0),
        (2, label, None, 1.0, 1024.0),
    ]
    assert str(strikes[0]) == f"step 1: {fault} struck the gradient of {label}: times 1024"
    assert not pending


def test_gradients_go_through_fp16_without_a_scaler() -> None:
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(6)) for name in "ab"})
    true = torch.tensor([1e-8, -2.9e-8, 6e-8, 0.1, 65504.0, -7e4])
    step = 0
    with inject([parse("scaler-off:tensor=a,steps=2@1")], model, clock=lambda: step) as injector:
        for step in range(4):
            for _ in range(MICRO_BATCHES):
                ((model["a"] + model["b"]) * true).sum().backward()
            wanted = torch.tensor([0.0, 0.0, 2.0**-24, float(torch.tensor(0.1).half()), 65504.0, -math.inf])
            assert torch.equal(model["a"].grad, MICRO_BATCHES * (wanted if step in (1, 2) else true)), step
            assert torch.equal(model["b"].grad, MICRO_BATCHES * true)
            model.zero_grad()
    assert [str(strike) for strike in injector.strikes] == [
        f"step {step}: scaler-off:tensor=a,steps=2@1 struck the gradient of a: 32 bits became 16" for step in (1, 2)
    ]
    assert not injector.pending()


def test_an_element_is_struck_in_the_first_micro_batch_alone() -> None:
    [first], [second] = ([train_one(model, part)] for model, part in ((transformer(), 0), (transformer(), 1)))
    struck, [strike], _ = train(transformer(), [f"bit-flip:tensor={UP}@0"])
    assert strike.element is not None
    assert strike.before == first[strike.element].item()
    assert struck[0][UP][strike.element] == strike.after + second[strike.element]


def train_one(model: nn.Module, micro_batch: int) -> Tensor:
    token_loss(model, 0, micro_batch).backward()
    gradient = model.get_parameter(UP).grad
    assert gradient is not None
    return gradient


def test_several_steps_take_several_elements_of_one_tensor() -> None:
    _, strikes, pending = train(transformer(), ["nan-gradient:steps=3@1"], skip=[1, 2, 3])
    assert [strike.step for strike in strikes] == [1, 2, 3]
    assert len({strike.tensor for strike in strikes}) == 1
    assert len({strike.element for strike in strikes}) == 3
    assert not pending


def test_comes_again_and_again() -> None:
    _, strikes, pending = train(
        transformer(), ["nan-gradient:every=2@0", "inf-gradient:every=2,times=2@1"], skip=range(STEPS)
    )
    assert [(strike.step, strike.fault.name) for strike in strikes] == [
        (0, "nan-gradient"),
        (1, "inf-gradient"),
        (2, "nan-gradient"),
        (3, "inf-gradient"),
    ]
    assert not pending
    _, strikes, pending = train(transformer(), ["nan-gradient:every=2,times=3@0", "nan-gradient:every=2@9"])
    assert [strike.step for strike in strikes] == [0, 2]
    assert len(pending) == 2  # one lacks a time, the other all of them
    _, strikes, pending = train(transformer(), ["nan-gradient:every=50@3"])
    assert len(strikes) == 1
    assert not pending  # there is no end that could be waited for


def test_the_seed_chooses_and_repeats() -> None:
    def places(seed: int) -> list[tuple[str, tuple[int, ...] | None]]:
        _, strikes, _ = train(transformer(), [f"nan-gradient:seed={seed}@0"], skip=range(STEPS), micro_batches=1)
        return [(strike.tensor, strike.element) for strike in strikes]

    chosen = [places(seed) for seed in range(6)]
    assert len({str(place) for place in chosen}) == 6
    assert chosen[3] == places(3)
    model = transformer()
    tensors = {select(model, NanGradient(step=0, seed=seed))[0].name for seed in range(300)}
    assert tensors == {name for name, _ in model.named_parameters()}  # none is out of reach


def test_the_choice_is_the_same_in_every_version() -> None:
    [strike] = train(transformer(), ["nan-gradient@0"], skip=range(STEPS), micro_batches=1)[1]
    assert (strike.tensor, strike.element) == ("embedding.weight", (405, 19))


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        (torch.float32, torch.int32),
        (torch.bfloat16, torch.int16),
        (torch.float16, torch.int16),
        (torch.float64, torch.int64),
    ],
)
def test_flips_the_top_exponent_bit(dtype: torch.dtype, bits: torch.dtype) -> None:
    values = torch.tensor([0.0, 1.0, -0.375, 3.0, -2.0], dtype=dtype)
    flipped = values.clone()
    for index in range(len(flipped)):
        flip_top_exponent_bit(flipped[index])
    top = torch.finfo(dtype).max
    assert flipped[0] == 2
    assert flipped[1] == math.inf
    assert -top <= flipped[2] < -math.sqrt(top) / 16
    assert 0 < flipped[3] < 4 / math.sqrt(top)
    assert flipped[4] == 0  # exponent and mantissa are now all zero
    changed = flipped.view(bits) ^ values.view(bits)
    assert changed.tolist() == [1 << (8 * dtype.itemsize - 2)] * 5


def test_a_weight_is_struck_once_before_the_first_forward_pass_of_its_step() -> None:
    model = transformer()
    clean = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    step = 4
    with inject([parse("bit-flip:in=weight,seed=2@5")], model, clock=lambda: step) as injector:
        with torch.no_grad():
            token_loss(model, 0)
        assert not injector.strikes
        step = 5
        with torch.inference_mode():  # an evaluation sees the weights of its step
            token_loss(model, 0)
        [strike] = injector.strikes
        assert strike.element is not None
        for micro_batch in range(3):
            token_loss(model, 0, micro_batch).backward()
        assert injector.strikes == [strike]
        assert not injector.pending()
    now = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert differing(clean, now) == {strike.tensor: [list(strike.element)]}
    assert (strike.before, strike.after) == (
        clean[strike.tensor][strike.element].item(),
        now[strike.tensor][strike.element].item(),
    )
    assert "struck the weight of" in str(strike)


def test_a_tied_weight_is_one_tensor_with_two_names() -> None:
    clean, _, _ = train(autoencoder(), [], conv_loss, skip=[1])
    for name in ("encode.weight", "decode.weight"):
        struck, [strike], _ = train(autoencoder(), [f"gradient-scale:factor=4,tensor={name}@1"], conv_loss, skip=[1])
        assert strike.tensor == "encode.weight"
        assert torch.equal(struck[1]["encode.weight"], 4 * clean[1]["encode.weight"])
        assert differing(clean[1], struck[1]).keys() == {"encode.weight"}
    [*others] = select(autoencoder(), GradientScale(step=0, factor=2))
    assert [target.name for target in others] == [
        "encode.weight",
        "encode.bias",
        "decode.bias",
        "branch.weight",
        "branch.bias",
    ]


def test_what_is_frozen_has_no_gradient_to_strike() -> None:
    model = autoencoder()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {select(model, NanGradient(step=0, seed=seed))[0].name for seed in range(100)} == trained
    with pytest.raises(ConfigError, match=r"tensor='frozen': frozen, or not of floats; name one that is trained"):
        inject([parse("nan-gradient:tensor=frozen@1")], model, clock=lambda: 0)
    # but a bit can flip in it
    _, [strike], _ = train(model, ["bit-flip:in=weight,tensor=frozen@1"], conv_loss)
    assert (strike.tensor, strike.before, strike.after) == ("frozen", 1.0, math.inf)


def test_a_tensor_without_gradient_stays_pending_until_it_has_one() -> None:
    model = autoencoder()
    model.uses_branch = False
    _, strikes, pending = train(model, ["nan-gradient:tensor=branch,steps=2@1"], conv_loss)
    assert not strikes
    assert pending == (parse("nan-gradient:tensor=branch,steps=2@1"),)

    def loss(model: nn.Module, step: int, micro_batch: int) -> Tensor:
        assert isinstance(model, Autoencoder)
        model.uses_branch = step == 2
        return conv_loss(model, step, micro_batch)

    _, [strike], pending = train(autoencoder(), ["nan-gradient:tensor=branch,steps=2@1"], loss)
    assert strike.step == 2
    assert pending == (parse("nan-gradient:tensor=branch,steps=2@1"),)


def test_a_step_that_never_comes_is_pending() -> None:
    late = ["nan-gradient@9999", "bit-flip:in=weight@9999", "gradient-scale:factor=2,steps=2@3"]
    _, strikes, pending = train(transformer(), [*late, "inf-gradient@3"], micro_batches=1)
    assert pending == tuple(map(parse, late))
    assert [strike.fault.name for strike in strikes].count("gradient-scale") == 1


@pytest.mark.parametrize(
    "fault",
    [
        *("nan-gradient@2", "gradient-scale:factor=8@2", "bit-flip:in=weight@2", "scaler-off:steps=1@2"),
        *("fp16-overflow:module=blocks.1@2", "activation-scale:factor=2,module=embedding@2"),
        "bit-flip:in=activation@2",
    ],
)
def test_a_step_that_comes_again_after_a_rollback_is_healthy(fault: str) -> None:
    model = transformer()
    now = 0
    with inject([parse(fault)], model, clock=lambda: now) as injector:
        for now in (0, 1, 2, 3, 1, 2, 3):  # noqa: B007 - the clock reads it
            token_loss(model, 0).backward()
    assert len(injector.strikes) == 1


def test_a_name_that_is_not_there_is_refused_with_near_ones() -> None:
    for fault in (
        "nan-gradient:tensor=block.1.mlp.up.weight@1",
        "gradient-scale:factor=2,tensor=block.1.mlp.up.weight@1",
    ):
        with pytest.raises(ConfigError) as refusal:
            inject([parse(fault)], transformer(), clock=lambda: 0)
        assert "tensor='block.1.mlp.up.weight': the model has no such parameter" in str(refusal.value)
        assert "near it are blocks.1.mlp.up.weight" in str(refusal.value)
    with pytest.raises(ConfigError, match=r"tensor='zzz'.* it has embedding.weight, "):
        inject([parse("nan-gradient:tensor=zzz@1")], transformer(), clock=lambda: 0)


def test_a_dotted_beginning_ends_at_a_dot() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(11)))
    [*chosen] = select(model, GradientScale(step=0, factor=2, tensor="1"))
    assert [target.name for target in chosen] == ["1.weight"]


def test_refuses_what_could_only_disappoint() -> None:
    model = transformer()
    with pytest.raises(ConfigError, match="rank=1: this run has ranks 0 to 0"):
        inject([parse("nan-gradient@2"), parse("nan-gradient:rank=1@2")], model, clock=lambda: 0)
    with pytest.raises(ConfigError, match="nan-gradient@2: is given twice"):
        inject(map(parse, ["nan-gradient@2", "inf-gradient@2", "nan-gradient@2"]), model, clock=lambda: 0)
    with pytest.raises(ConfigError, match="strikes neither model nor optimizer"):
        inject([Other(step=1)], model, clock=lambda: 0)
    assert not hooks_on(model)  # refused before anything was attached


class Other(Fault):
    name = "other"


def test_a_fault_of_another_rank_leaves_this_one_alone() -> None:
    model = transformer()
    faults = [parse("gradient-scale:factor=2,rank=1@0"), parse("bit-flip:in=weight,rank=1@0")]
    with inject(faults, model, clock=lambda: 0, rank=0) as injector:
        assert not hooks_on(model)
        assert not injector.pending()
    with inject(faults, model, clock=lambda: 0, rank=1) as injector:
        assert hooks_on(model)
        assert injector.pending() == tuple(faults)


def hooks_on(model: nn.Module) -> int:
    modules = sum(len(module._forward_pre_hooks) for module in model.modules())
    return modules + sum(len(parameter._backward_hooks or ()) for parameter in model.parameters())


def test_nothing_stays_behind() -> None:
    model = transformer()
    faults = [parse("gradient-scale:factor=2@0"), parse("bit-flip:in=weight@0"), parse("nan-gradient@0")]

    def fail() -> None:
        with inject(faults, model, clock=lambda: 0):
            assert hooks_on(model) == len(list(model.parameters())) + 2
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert not hooks_on(model)
    injector = inject(faults, model, clock=lambda: 0)
    injector.detach()
    token_loss(model, 0).backward()
    assert not injector.strikes
    assert injector.pending() == tuple(faults)


def test_the_gradient_that_autograd_shares_is_not_written_to() -> None:
    model = nn.ParameterDict({"a": nn.Parameter(torch.ones(3)), "b": nn.Parameter(torch.ones(3))})
    with inject([parse("nan-gradient:tensor=a@0")], model, clock=lambda: 0):
        (model["a"] + model["b"]).sum().backward()  # one expanded number, for both
    assert model["a"].grad is not None
    assert model["a"].grad.isnan().sum() == 1
    assert torch.equal(model["b"].grad, torch.ones(3))


def test_what_is_differentiated_twice_still_is() -> None:
    model = nn.ParameterDict({"a": nn.Parameter(torch.full((3,), 2.0))})
    faults = [parse("gradient-scale:factor=10@0"), parse("inf-gradient@0")]
    with inject(faults, model, clock=lambda: 0) as injector:
        [first] = torch.autograd.grad((model["a"] ** 3).sum(), [model["a"]], create_graph=True)
    [second] = torch.autograd.grad(first.sum(), [model["a"]])
    assert sorted(first.tolist()) == [120.0, 120.0, math.inf]
    assert second.tolist() == [120.0, 120.0, 120.0]
    assert len(injector.strikes) == 2


def test_strikes_sparse_gradients_and_single_numbers() -> None:
    model = nn.Embedding(50, 4, sparse=True)
    model.temperature = nn.Parameter(torch.ones(()))
    rows = torch.tensor([7, 7, 31])
    faults = [
        "nan-gradient:tensor=weight@0",
        "gradient-scale:factor=2,tensor=weight@0",
        "inf-gradient:tensor=temperature@0",
    ]
    with inject(map(parse, faults), model, clock=lambda: 0) as injector:
        (model(rows).sum() * model.temperature).backward()
    gradient = model.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    dense = gradient.to_dense()
    [place] = dense.isnan().nonzero().tolist()
    strikes = {strike.fault.name: strike for strike in injector.strikes}
    assert list(strikes["nan-gradient"].element or ()) == place
    assert dense[31].nansum() in (8.0, 6.0)
    assert strikes["inf-gradient"].element == ()
    assert model.temperature.grad == math.inf


def test_compiled_models_are_struck_under_the_same_names() -> None:
    def run(is_compiled: bool, *faults: str) -> tuple[Gradients, list[Strike]]:
        model: nn.Module = autoencoder()
        if is_compiled:
            model = cast(nn.Module, torch.compile(model, backend="aot_eager"))
        seen, strikes, pending = train(model, faults, conv_loss, skip=[1])
        assert not pending
        return [{name.removeprefix("_orig_mod."): g for name, g in step.items()} for step in seen], strikes

    faults = ("nan-gradient:seed=3@1", "bit-flip:in=weight,seed=3@2")
    clean, _ = run(True)
    struck, strikes = run(True, *faults)
    _, plain = run(False, *faults)
    assert [(s.tensor, s.element) for s in strikes] == [(s.tensor, s.element) for s in plain]
    assert strikes[0].element is not None
    changed = [differing(a, b) for a, b in zip(clean, struck, strict=True)]
    assert changed[:2] == [{}, {strikes[0].tensor: [list(strikes[0].element)]}]
    assert changed[2]  # of the flipped weight


# Two processes: DDP and FSDP2.

RANKS = 2
NAN = f"nan-gradient:tensor={UP},rank=1@2"
SCALE = "gradient-scale:factor=1000,rank=1@2"
FLIP = "bit-flip:in=weight,tensor=embedding.weight,rank=1@2"
FLIP_INSIDE = f"bit-flip:in=weight,tensor={UP},rank=1@2"
BOTH_RANKS = f"inf-gradient:tensor={UP}@2"
QUERIES_AND_KEYS = "weight-scale:factor=16,tensor=*.query_key_value,rows=2/3@2"
HALF_OF_ONE_SHARD = "weight-scale:factor=4,tensor=embedding,rank=1@3"
MOMENT = f"bit-flip:in=moment1,tensor={UP},rank=1@2"
RESET = "moments-reset:rank=0@3"
RUNS = {
    "clean": [],
    "nan": [NAN],
    "scale": [SCALE],
    "flip": [FLIP, FLIP_INSIDE],
    "all": [BOTH_RANKS],
    "weights": [QUERIES_AND_KEYS, HALF_OF_ONE_SHARD],
    "moments": [MOMENT, RESET],
}


def wrapped(how: str) -> nn.Module:
    model = transformer()
    if how == "ddp":
        return DistributedDataParallel(model)
    for block in model.blocks:
        fully_shard(block)
    return cast(nn.Module, fully_shard(model))


def twice_wrapped() -> nn.Module:
    inner = cast(nn.Module, torch.compile(transformer()))
    return cast(nn.Module, torch.compile(DistributedDataParallel(inner)))


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def rank_run(how: str, rank: int, faults: list[str]) -> dict[str, Any]:
    """As ``train``, on one of two ranks with data of its own; the reduced gradients, and all weights at the end."""
    model = wrapped(how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 * any("moment" in fault for fault in faults))
    seen: Gradients = []
    step = 0
    with inject(map(parse, faults), model, optimizers=optimizer, clock=lambda: step) as injector:
        while step < STEPS:
            for micro_batch in range(MICRO_BATCHES):
                is_last = micro_batch == MICRO_BATCHES - 1
                if how == "fsdp":
                    cast(FSDPModule, model).set_requires_gradient_sync(is_last)
                alone = isinstance(model, DistributedDataParallel) and not is_last
                with cast(DistributedDataParallel, model).no_sync() if alone else nullcontext():
                    token_loss(model, step, micro_batch, rank).backward()
            gradients = {
                n.removeprefix("module."): whole(p.grad) for n, p in model.named_parameters() if p.grad is not None
            }
            seen.append(gradients)
            if step < 2:  # the weights of the step that is struck are those at the end
                optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                token_loss(model, step, rank=rank)  # leaves FSDP2's outermost unit unsharded
            step += 1
    if how == "fsdp":
        cast(FSDPModule, model).reshard()
    weights = {name.removeprefix("module."): whole(p) for name, p in model.named_parameters()}
    strikes = [(s.step, str(s.fault), s.tensor, s.element, s.before, s.after) for s in injector.strikes]
    moments = {
        name.removeprefix("module."): whole(optimizer.state[p]["momentum_buffer"])
        for name, p in model.named_parameters()
        if "momentum_buffer" in optimizer.state[p]
    }
    pending = list(map(str, injector.pending()))
    return {"gradients": seen, "weights": weights, "strikes": strikes, "pending": pending, "moments": moments}


def rank_main(rank: int, folder: Path) -> None:
    """All runs of one rank, in one process."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    results = {(how, name): rank_run(how, rank, faults) for how in ("ddp", "fsdp") for name, faults in RUNS.items()}
    refusal = ""
    try:
        inject([parse("nan-gradient:rank=2@1")], transformer(), clock=lambda: 0)
    except ConfigError as error:
        refusal = str(error)
    names = [list(named_targets(model)) for model in (wrapped("fsdp"), twice_wrapped())]
    torch.save({"runs": results, "refusal": refusal, "names": names}, folder / f"{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw, in one launch."""
    folder = tmp_path_factory.mktemp("ranks")
    launch(Path(__file__), RANKS, str(folder))
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


both_ways = pytest.mark.parametrize("how", ["ddp", "fsdp"])
one_launch = pytest.mark.xdist_group("ranks")


@one_launch
@both_ways
def test_nan_on_one_rank_reaches_all_through_the_reduction(ranks: list[dict[str, Any]], how: str) -> None:
    assert [[s[:3] for s in rank["runs"][how, "nan"]["strikes"]] for rank in ranks] == [[], [(2, NAN, UP)]]
    element = ranks[1]["runs"][how, "nan"]["strikes"][0][3]
    for rank in ranks:
        clean, struck = rank["runs"][how, "clean"], rank["runs"][how, "nan"]
        changed = [differing(a, b) for a, b in zip(clean["gradients"], struck["gradients"], strict=True)]
        assert changed == [{}, {}, {UP: [list(element)]}, {}]
        assert struck["gradients"][2][UP][element].isnan()
        assert not differing(clean["weights"], struck["weights"])
        assert not struck["pending"]


@one_launch
@both_ways
def test_a_factor_on_one_rank_scales_its_part_of_the_mean(ranks: list[dict[str, Any]], how: str) -> None:
    parts = []
    for rank in range(RANKS):
        model = transformer()
        model.load_state_dict(weights_at_step_2(ranks, how), strict=False)
        for micro_batch in range(MICRO_BATCHES):
            token_loss(model, 2, micro_batch, rank).backward()
        parts.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for rank_result in ranks:
        struck = rank_result["runs"][how, "scale"]["gradients"]
        for name, gradient in struck[2].items():
            torch.testing.assert_close(gradient, (parts[0][name] + 1000 * parts[1][name]) / 2, rtol=1e-4, atol=1e-4)
        clean = rank_result["runs"][how, "clean"]["gradients"]
        assert [bool(differing(a, b)) for a, b in zip(clean, struck, strict=True)] == [False, False, True, False]
    assert [s[:4] for s in ranks[1]["runs"][how, "scale"]["strikes"]] == [(2, SCALE, "*", None)]
    assert not ranks[0]["runs"][how, "scale"]["strikes"]


def weights_at_step_2(ranks: list[dict[str, Any]], how: str) -> dict[str, Tensor]:
    """Two updates by the gradients that were seen."""
    gradients = ranks[0]["runs"][how, "clean"]["gradients"]
    return {
        name: p.detach() - 0.1 * (gradients[0][name] + gradients[1][name])
        for name, p in transformer().named_parameters()
    }


@one_launch
@both_ways
def test_a_fault_without_rank_strikes_every_rank_in_the_same_place(ranks: list[dict[str, Any]], how: str) -> None:
    first, second = ([s[:4] for s in rank["runs"][how, "all"]["strikes"]] for rank in ranks)
    assert first == second
    assert [s[:3] for s in first] == [(2, BOTH_RANKS, UP)]
    for rank in ranks:
        assert rank["runs"][how, "all"]["gradients"][2][UP].isinf().nonzero().tolist() == [list(first[0][3])]


@one_launch
def test_a_weight_flipped_on_one_replica_stays_there(ranks: list[dict[str, Any]]) -> None:
    [first, second] = (rank["runs"]["ddp", "flip"] for rank in ranks)
    clean = ranks[0]["runs"]["ddp", "clean"]["weights"]
    assert not first["strikes"]
    assert not differing(clean, first["weights"])
    assert [s[:3] for s in second["strikes"]] == [(2, FLIP, "embedding.weight"), (2, FLIP_INSIDE, UP)]
    places = {tensor: [list(element)] for _, _, tensor, element, _, _ in second["strikes"]}
    assert differing(clean, second["weights"]) == places


@one_launch
def test_a_weight_flipped_in_one_shard_is_gathered_by_all(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["runs"]["fsdp", "flip"] for rank in ranks)
    clean = ranks[0]["runs"]["fsdp", "clean"]
    assert not first["strikes"]
    assert not first["pending"]
    assert [s[:3] for s in second["strikes"]] == [(2, FLIP, "embedding.weight"), (2, FLIP_INSIDE, UP)]
    places = {}
    for _, _, tensor, (row, *rest), before, after in second["strikes"]:
        place = (clean["weights"][tensor].shape[0] // RANKS + row, *rest)  # rank 1 has the second half of the rows
        places[tensor] = [list(place)]
        assert (clean["weights"][tensor][place].item(), first["weights"][tensor][place].item()) == (before, after)
    for run in (first, second):
        assert differing(clean["weights"], run["weights"]) == places
        changed = [bool(differing(a, b)) for a, b in zip(clean["gradients"], run["gradients"], strict=True)]
        assert changed == [False, False, True, True]  # computed with from the very step on


@one_launch
@both_ways
def test_rows_are_counted_over_all_shards(ranks: list[dict[str, Any]], how: str) -> None:
    for number, rank in enumerate(ranks):
        clean, struck = (rank["runs"][how, run] for run in ("clean", "weights"))
        for name, weight in clean["weights"].items():
            factors = torch.ones(len(weight))
            if "query_key_value" in name:
                factors[: 2 * NANO.width] = 16
            # the second half of a sharded weight is rank 1's; replicas have it all, each for itself
            if name == "embedding.weight" and (how == "fsdp" or number == 1):
                factors[len(weight) // 2 if how == "fsdp" else 0 :] = 4
            assert torch.equal(struck["weights"][name], weight * factors.view(-1, *([1] * (weight.ndim - 1)))), name
        changed = [bool(differing(a, b)) for a, b in zip(clean["gradients"], struck["gradients"], strict=True)]
        assert changed == [False, False, True, True]
        struck_here = [(2, QUERIES_AND_KEYS), (3, HALF_OF_ONE_SHARD)][: 1 + number]
        assert [s[:2] for s in struck["strikes"]] == struck_here
        assert not struck["pending"]


@one_launch
@both_ways
def test_moments_are_struck_on_one_rank(ranks: list[dict[str, Any]], how: str) -> None:
    first, second = (rank["runs"][how, "moments"] for rank in ranks)
    assert [s[1] for s in first["strikes"]] == [RESET]
    [(step, fault, tensor, element, _, after)] = second["strikes"]
    assert (step, fault, tensor) == (2, MOMENT, UP)
    assert not first["pending"] + second["pending"]
    if how == "ddp":
        assert not any(moment.any() for moment in first["moments"].values())
        assert second["moments"][UP][element].item() == after
        assert all(moment.any() for moment in second["moments"].values())
    else:  # one moment, of which each rank has its part
        assert not differing(first["moments"], second["moments"])
        assert not any(moment.chunk(RANKS)[0].any() for moment in first["moments"].values())
        assert all(moment.chunk(RANKS)[1].any() for moment in first["moments"].values())
        assert first["moments"][UP].chunk(RANKS)[1][element].item() == after


@one_launch
def test_a_rank_that_the_run_does_not_have_is_refused_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["refusal"] == "nan-gradient:rank=2@1: rank=2: this run has ranks 0 to 1; take one of them"


@one_launch
def test_no_wrapper_changes_a_name(ranks: list[dict[str, Any]]) -> None:
    plain = [name for name, _ in transformer().named_parameters()]
    assert [rank["names"] for rank in ranks] == [[plain, plain]] * RANKS


if __name__ == "__main__":
    rank_main(int(os.environ["RANK"]), Path(sys.argv[1]))
