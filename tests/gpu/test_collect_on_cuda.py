"""The door from device to host, on a device."""

import math

import pytest
import torch

from sealegs.signals.collect import Collector

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none here"),
]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")  # it misses some waits; none of ours
def test_putting_and_looking_never_wait_and_nothing_is_lost() -> None:
    collector = Collector()
    collector.put(-1, {"loss": torch.zeros((), device="cuda")})  # the first one allocates pinned memory
    assert collector.drain() == [{"step": -1, "loss": 0.0}]
    rows = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(50):
            torch.cuda._sleep(1_000_000)
            loss = torch.full((), float(step), device="cuda")
            collector.put(step, {"loss": loss, "norm": loss * math.inf, "half": loss.bfloat16(), "lr": 0.5})
            loss.fill_(-1.0)  # later kernels must not change what was sent
            rows += collector.ready()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(rows) < 50, "the host is ahead of the device"
    rows += collector.drain()
    assert [(row["step"], row["loss"]) for row in rows] == [(step, float(step)) for step in range(50)]


def test_whole_numbers_beyond_float32_stay_exact() -> None:
    collector = Collector()
    collector.put(0, {"count": torch.tensor(2**40 + 1, device="cuda"), "loss": torch.ones((), device="cuda")})
    assert collector.drain() == [{"step": 0, "count": 2**40 + 1, "loss": 1.0}]
