"""Norms that are as exact as they say, and finite where the tensor is."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sealegs.signals.tensor_norms import MOST_ADDED, lengths, total_of_torch

CPU = torch.device("cpu")


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(-40, 37), st.booleans()), max_size=4),
    st.integers(0, 2**32),
    st.booleans(),
)
@example([(MOST_ADDED, 0, False), (MOST_ADDED + 1, 0, False), (7, 25, False)], 0, True)
@example([(3, -30, False), (3, -14, True), (0, 0, False)], 0, True)
@example([(2, 20, False)], 0, False)
def test_norms_are_as_exact_as_they_say_at_every_size(
    made: list[tuple[int, int, bool]], seed: int, are_equal: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for size, exponent, is_double in made:
        numbers = torch.ones(size) if are_equal else torch.randn(size, generator=generator)
        tensors.append((numbers.double() * 10.0**exponent).to(torch.float64 if is_double else torch.float32))
    expected = [float(torch.linalg.vector_norm(tensor.double())) for tensor in tensors]
    norms = lengths(tensors, CPU)
    assert norms.dtype == torch.float64
    assert torch.equal(total_of_torch(tensors, norms), torch.nn.utils.get_total_norm(tensors)), "to the last bit"
    for norm, exact, tensor in zip(norms.tolist(), expected, tensors, strict=True):
        is_rough = tensor.dtype == torch.float32 and tensor.numel() <= MOST_ADDED
        assert norm == pytest.approx(exact, rel=4.3e-4 if is_rough else 1e-12, abs=0)


def test_more_numbers_than_float32_adds_are_added_exactly() -> None:
    numbers = torch.full((64 * MOST_ADDED,), 0.7)
    exact = math.sqrt(64 * MOST_ADDED) * float(numbers[0])
    assert float(torch._foreach_norm([numbers], 2)[0]) != pytest.approx(exact, rel=4.3e-4), "else this tests nothing"
    tensors = [numbers, numbers[:3]]
    norms = lengths(tensors, CPU)
    assert norms.tolist()[0] == pytest.approx(exact, rel=1e-9)
    assert torch.equal(total_of_torch(tensors, norms), torch.nn.utils.get_total_norm(tensors)), "which is not exact"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so_and_where_it_is(value: float) -> None:
    good, bad = torch.full((9,), 1e30), torch.ones(9)
    bad[4] = value
    norms = lengths([good, bad, torch.ones(4)], CPU).tolist()
    assert norms[0] == pytest.approx(3e30)
    assert not math.isfinite(norms[1])
    assert norms[2] == 2.0


def test_the_total_of_torch_is_found_without_a_second_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of gradients in float32 on a CPU; what float32 adds badly is added again."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator) for size in (1, 33, 4096, 7, MOST_ADDED, MOST_ADDED + 1)]
    expected, norms = torch.nn.utils.get_total_norm(tensors), lengths(tensors, CPU)
    monkeypatch.delattr(torch.nn.utils, "get_total_norm")
    assert torch.equal(total_of_torch(tensors, norms), expected)
