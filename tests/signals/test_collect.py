"""Device scalars in, host rows out."""

import math

import pytest
import torch

from sealegs.signals.collect import Collector


def test_rows_come_in_the_order_of_their_steps_with_names_in_place() -> None:
    collector = Collector()
    collector.put(0, {"loss": torch.tensor(2.5, requires_grad=True), "lr": 0.1, "sources": "grammar=8"})
    collector.put(1, {"loss": torch.tensor([math.nan]), "lr": 0.2})
    first, second = collector.ready()
    assert first == {"step": 0, "loss": 2.5, "lr": 0.1, "sources": "grammar=8"}
    assert list(first) == ["step", "loss", "lr", "sources"]
    assert second["step"] == 1
    assert math.isnan(float(second["loss"]))
    assert collector.ready() == []


def test_a_tensor_is_read_as_it_was() -> None:
    collector = Collector()
    loss = torch.tensor(1.0)
    collector.put(0, {"loss": loss})
    loss.fill_(9.0)
    assert collector.drain() == [{"step": 0, "loss": 1.0}]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_every_dtype_arrives_as_a_number(dtype: torch.dtype) -> None:
    collector = Collector()
    collector.put(0, {"value": torch.tensor(1, dtype=dtype)})
    (row,) = collector.ready()
    assert row == {"step": 0, "value": 1}
    assert type(row["value"]) in (int, float)  # JSON's true is no number
