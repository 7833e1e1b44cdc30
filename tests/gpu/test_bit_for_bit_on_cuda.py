"""Untouched runs on a device are the same bit for bit, but where fused optimizers clip on the way."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.test_bit_for_bit import TRAININGS, Plain, adamw, differing, trained

import sealegs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none here"),
]
FUSED = replace(TRAININGS["many parameters in groups"], optimizers=partial(adamw, fused=True))
CASES: dict[str, Any] = {
    "decided by the host": (TRAININGS["many parameters in groups"], {}),
    "decided by the host, bf16": (TRAININGS["bf16 weights"], {}),
    "decided by the host, three precisions": (TRAININGS["three precisions"], {}),
    "decided by the host, scaled": (TRAININGS["fp16 autocast"], {}),
    "decided on the device, scaled, unclipped": (TRAININGS["fp16 autocast, fused, unclipped"], {}),
    "decided on the device, unclipped": (replace(FUSED, clip=None), {}),
    "in shadow mode": (FUSED, {"act": False}),
}


@pytest.fixture(autouse=True)
def every_sum_in_one_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Else two runs differ in the last bit, with a guard or without."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", CASES)
def test_an_untouched_run_is_the_same_bit_for_bit(case: str, tmp_path: Path) -> None:
    training, options = CASES[case]
    _, plain = trained(training, Plain, "cuda")
    guard, left = trained(training, partial(sealegs.Guard, run=tmp_path / "run", **options), "cuda")
    guard.close()
    assert guard.watch.skips == 0
    assert differing(left, plain) == []
