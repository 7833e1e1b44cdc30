"""States in, JSON out, and the same states back."""

import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sealegs.errors import ConfigError
from sealegs.state.serialization import live, plain

KEYS = st.one_of(st.text(max_size=3), st.sampled_from(["#tuple", "#tensor"]), st.integers(0, 5))
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5), st.binary()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=8,
)


def round_trip(value: Any) -> Any:
    return live(json.loads(json.dumps(plain(value, "it"))))


@given(VALUES)
def test_any_nest_of_plain_values_comes_back(value: Any) -> None:
    assert round_trip(value) == value


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6, dtype=torch.int64).reshape(2, 3),
        torch.arange(6.0).reshape(2, 3).T,
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.empty(0, 3),
    ],
)
def test_tensors_come_back(tensor: torch.Tensor) -> None:
    again = round_trip({"deep": [tensor]})["deep"][0]
    assert again.dtype == tensor.dtype
    assert again.shape == tensor.shape
    assert torch.equal(again, tensor)


@pytest.mark.parametrize("array", [np.arange(6, dtype=">u4").reshape(2, 3), np.array(2.5), np.empty((0, 2), np.int8)])
def test_arrays_come_back(array: np.ndarray[Any, Any]) -> None:
    again = round_trip(array)
    assert again.dtype == array.dtype
    assert again.shape == array.shape
    assert np.array_equal(again, array)
    assert again.flags.writeable


def test_generators_come_back_and_are_small() -> None:
    torch.set_rng_state(round_trip(torch.get_rng_state()))
    random.setstate(round_trip(random.getstate()))
    np.random.set_state(round_trip(np.random.get_state(legacy=False)))
    assert len(json.dumps(plain(torch.Generator().manual_seed(1).get_state(), "it"))) < 5000


@pytest.mark.parametrize("value", [object(), {"a": [object()]}, np.array([object()]), {1, 2}])
def test_what_is_no_state_is_refused_in_a_sentence(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"loader=Mine: its state has a \w+, which cannot be kept in a checkpoint"):
        plain(value, "loader=Mine")
