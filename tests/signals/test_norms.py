"""Norms of gradients before anything clips them."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, SparseAdam

from sealegs.signals.norms import GradientReader


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    model(torch.randn(3, 4)).square().sum().backward()
    return model


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_norms_and_their_total() -> None:
    model = network()
    read = GradientReader(model, [SGD(model.parameters())]).read()
    expected = [gradient.double().norm().item() for gradient in gradients_of(model)]
    assert read.names == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert read.norms.tolist() == pytest.approx(expected)
    assert read.total().item() == pytest.approx(math.hypot(*expected))
    assert read.worst().item() == expected.index(max(expected))
    assert read.norms.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("largest", [0.3, 1e9])
def test_clipping_is_torchs_to_the_last_bit(largest: float, dtype: torch.dtype) -> None:
    """Also where the optimizers have another order than the model, which is the one that loops clip in."""
    for seed in range(50):
        ours, theirs = network(), network()
        for model in (ours, theirs):
            model[2].bias = nn.Parameter(torch.zeros(2, dtype=dtype))
            torch.manual_seed(seed)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
        read = GradientReader(ours, [SGD(ours[2].parameters()), SGD(ours[0].parameters())]).read()
        assert read.names == ("0.weight", "0.bias", "2.weight", "2.bias")
        read.clip(largest, torch.zeros(()))
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), largest)
        assert all(map(torch.equal, gradients_of(ours), gradients_of(theirs)))


def test_ranks_that_hold_other_gradients_clip_by_the_norm_of_all() -> None:
    for is_alike in (True, False):
        ours, theirs = network(), network()
        read = GradientReader(ours, [SGD(ours.parameters())]).read()
        read.clip(1.0, torch.tensor(100.0, dtype=torch.float64), torch.tensor(is_alike))
        own = torch.nn.utils.get_total_norm(gradients_of(theirs))
        torch.nn.utils.clip_grads_with_norm_(theirs.parameters(), 1.0, own if is_alike else torch.tensor(100.0))
        assert all(map(torch.equal, gradients_of(ours), gradients_of(theirs)))


def test_small_gradients_are_left_as_they_are() -> None:
    ours = network()
    read = GradientReader(ours, [SGD(ours.parameters())]).read()
    before = [gradient.clone() for gradient in gradients_of(ours)]
    read.clip(1e9, read.total())
    assert all(torch.equal(a, b) for a, b in zip(before, gradients_of(ours), strict=True)), (
        "small ones stay as they are"
    )


def test_a_large_finite_gradient_is_finite() -> None:
    """Its square is beyond float32; in bf16 and fp16 too nothing overflows on the way."""
    for dtype, value in ((torch.float32, 1e25), (torch.bfloat16, 1e30), (torch.float16, 60000.0)):
        layer = nn.Linear(64, 64).to(dtype)
        layer.weight.grad = torch.full_like(layer.weight, value)
        read = GradientReader(layer, [SGD(layer.parameters())]).read()
        assert read.total().item() == pytest.approx(value * 64, rel=0.01)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_bad_element_names_its_tensor(value: float) -> None:
    model = network()
    gradient = gradients_of(model)[1]
    gradients_of(model)[2].mul_(1e6)
    gradient[3] = value
    read = GradientReader(model, [SGD(model.parameters())]).read()
    assert read.names[int(read.worst())] == "0.bias"
    assert not math.isfinite(read.total().item())


def test_mixed_dtypes_and_missing_gradients() -> None:
    model = network()
    model[2].double()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model[0].bias.grad = None
    model[2].weight.grad = torch.ones(2, 6, dtype=torch.float64)
    read = GradientReader(model, [SGD(model.parameters())]).read()
    assert read.names == ("0.weight", "2.weight", "2.bias")
    assert gradients["0.weight"] is not None
    assert read.norms.tolist()[:2] == pytest.approx([gradients["0.weight"].norm().item(), math.sqrt(12)])
    read.clip(1e-3, read.total())
    assert GradientReader(model, [SGD(model.parameters())]).read().total().item() == pytest.approx(1e-3, rel=1e-2)


def test_nothing_to_read() -> None:
    layer = nn.Linear(2, 2)
    read = GradientReader(layer, [SGD(layer.parameters())]).read()
    assert (read.names, read.total().item(), read.worst().item()) == ((), 0.0, 0)
    read.clip(1.0, read.total())


def test_sparse_gradients_have_the_norm_of_what_they_add_up_to() -> None:
    table = nn.Embedding(10, 3, sparse=True)
    table(torch.tensor([1, 1, 2])).sum().backward()
    read = GradientReader(table, [SparseAdam(list(table.parameters()))]).read()
    assert read.total().item() == pytest.approx(math.sqrt(3 * 4 + 3 * 1))
    read.clip(1.0, read.total())
    assert table.weight.grad is not None
    assert table.weight.grad.to_dense().norm().item() == pytest.approx(1.0, rel=1e-4)
