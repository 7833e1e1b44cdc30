"""Sampled signals on a device: none waits for it, and all are what the CPU computes."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from sealegs.signals.activations import MULTIHEAD, ActivationSampler, token_loss_histogram, underflow_share
from sealegs.signals.collect import Block
from sealegs.signals.tensor_norms import lengths
from sealegs.signals.weights import WeightSampler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none here"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=3)
        self.head = nn.Linear(64, 512, bias=False)
        self.head.weight = self.embedding.weight
        self.encoder.layers[0].requires_grad_(False)
        self.narrow = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)) * self.narrow)  # type: ignore[no-any-return]


def trained(device: str, steps: int, **how: Any) -> tuple[dict[str, float], list[Tensor]]:
    """The values of the last step, and its gradients. No step but the first may wait."""
    torch.manual_seed(0)
    model = Encoder().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    weights, activations = WeightSampler(model, [optimizer]), ActivationSampler(model, attention=MULTIHEAD)
    batches = [torch.randint(0, 512, (4, 32), generator=torch.Generator().manual_seed(n)) for n in range(steps)]
    batches = [batch.to(device) for batch in batches]

    def step(batch: Tensor) -> list[Block]:
        optimizer.zero_grad()
        with activations.sampling():
            F.cross_entropy(model(batch).flatten(0, 1), batch.flatten()).backward()
        before = weights.before_update()
        optimizer.step()
        return [weights.norms(before), weights.changes(weights.after_update()), activations.collect()]

    step(batches[0])
    if device == "cuda":
        torch.cuda.synchronize()
        with no_waiting():
            for batch in batches[1:]:
                blocks = step(batch)
    else:
        for batch in batches[1:]:
            blocks = step(batch)
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    row: dict[str, Any] = {}
    for names, values in blocks:
        numbers = values.tolist()
        row |= names(numbers) if callable(names) else dict(zip(names, numbers, strict=True))
    return row, grads


def test_a_sampled_step_never_waits_and_agrees_with_the_cpu() -> None:
    on_cuda, _ = trained("cuda", 5)
    on_cpu, _ = trained("cpu", 5)
    assert on_cuda == pytest.approx(on_cpu, rel=2e-2)
    assert {"moment1_norm", "update_ratio/encoder.layers.2", "attention_logit_max/encoder.layers.1"} <= set(on_cuda)
    assert "update_ratio/encoder.layers.0" not in on_cuda


def test_the_same_weights_give_the_same_bits() -> None:
    model = Encoder().cuda()
    sampler = WeightSampler(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    results = []
    for _ in range(10):
        results.append(sampler.before_update())
    assert all(result.equal(results[0]) for result in results)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of each cycle")  # of which there is one
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_are_exact_and_one_pass(dtype: torch.dtype) -> None:
    """Not a copy in float64 first: kernels a tensor would be hundreds, memory that of the largest tensor twice."""
    torch.manual_seed(0)
    tensors = [torch.randn(1000, 100, device="cuda").to(dtype) for _ in range(300)]
    if dtype != torch.float16:
        tensors[0][0, 0] = 1e25
    norms = lengths(tensors, tensors[0].device)
    wanted = torch.stack([tensor.double().norm() for tensor in tensors])
    assert norms.dtype == torch.float64
    assert torch.allclose(norms, wanted, rtol=1e-12)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        lengths(tensors, tensors[0].device)
        torch.cuda.synchronize()
    kernels = sum(event.device_type.name == "CUDA" for event in recorded.events())
    assert kernels < 60
    assert torch.cuda.max_memory_allocated() - held < 4_000_000


def test_underflow_and_histogram_never_wait() -> None:
    _, grads = trained("cuda", 2)
    losses = torch.rand(8, 1024, device="cuda") * 20
    losses[0, :3] = math.nan
    scale = torch.full((), 1024.0, device="cuda")
    with no_waiting():
        share = underflow_share(grads, scale)
        counts = token_loss_histogram(losses, losses > 1.0)
    assert float(share) == pytest.approx(float(underflow_share([grad.cpu() for grad in grads], 1024.0)))
    assert counts.tolist() == token_loss_histogram(losses.cpu(), losses.cpu() > 1.0).tolist()
