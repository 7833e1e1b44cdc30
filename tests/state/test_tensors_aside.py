"""Values of state dicts in, JSON out, and back without a difference."""

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from sealegs.errors import ConfigError
from sealegs.state.serialization import from_json, to_json

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
keys = st.text(max_size=3) | st.integers() | st.sampled_from(["#tuple", "#mapping"])
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=12,
)


@example({"#tuple": [1, 2]})
@example({"#mapping": [], 3: {"#tensor": ("name",)}})
@given(values)
def test_nothing_changes_on_the_way(value: Any) -> None:
    back = from_json(json.loads(json.dumps(to_json(value, "value"))), {})
    assert back == value
    assert repr(back) == repr(value)  # True is 1, and no tuple is a list, but they are written differently


def test_counters_stay_counters() -> None:
    back = from_json(to_json({"milestones": Counter([30, 60, 60])}, "schedule"), {})
    assert isinstance(back["milestones"], Counter)
    assert back == {"milestones": Counter([30, 60, 60])}


def test_tensors_are_put_aside_and_come_back() -> None:
    tensors: dict[str, Tensor] = {}
    state = {"step": torch.ones(()), "factors": [{"row": torch.zeros(2)}, None], 3: (torch.ones(1),)}
    encoded = to_json(state, "optimizer/0/w", tensors)
    assert sorted(tensors) == ["optimizer/0/w.3.0", "optimizer/0/w.factors.0.row", "optimizer/0/w.step"]
    back = from_json(json.loads(json.dumps(encoded)), tensors)
    assert back["step"] is state["step"]
    assert back["factors"][0]["row"] is tensors["optimizer/0/w.factors.0.row"]
    assert back[3][0] is tensors["optimizer/0/w.3.0"]


def test_single_numbers_may_be_tensors() -> None:
    assert to_json([torch.tensor(0.5), np.float32(0.25), np.int64(3)], "rates") == [0.5, 0.25, 3]


@pytest.mark.parametrize("value", [{1, 2}, print, object()])
def test_what_json_cannot_hold_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"scheduler/0: its state has a \w+, which cannot be kept in a checkpoint"):
        to_json({"inner": value}, "scheduler/0")
