"""Scales of tensors in few bits, read from stand-ins that carry them as the libraries do, and from torchao where it is
installed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sealegs
from sealegs.record.run import open_run
from sealegs.signals.low_precision import MOST_TENSORS, ScaleSampler, format_of, together


class DelayedEngine(nn.Linear):
    """TransformerEngine 0.x to 2.x, delayed scaling: a tensor of scales, and a history with the newest row first."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__(8, 8)
        history = torch.zeros(16, 3)
        history[3] = torch.tensor([100.0, 3.0, 0.0])
        forward = SimpleNamespace(scale=torch.tensor([scale, 64.0, 1.0]), amax_history=history)
        backward = SimpleNamespace(scale=torch.tensor([512.0, 1.0]), amax_history=torch.full((16, 2), 0.5))
        self.fp8_meta = {"scaling_fwd": forward, "scaling_bwd": backward, "recipe": object(), "num_gemms": 1}


class CurrentEngine(nn.Linear):
    """TransformerEngine 2.x, scaling by what a tensor has now: quantizers with buffers of their own."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.fp8_meta: dict[str, Any] = {"scaling_fwd": object()}
        pairs = ((4.0, 112.0), (2.0, 224.0))
        made = [SimpleNamespace(amax=torch.tensor([amax]), scale=torch.tensor([scale])) for amax, scale in pairs]
        self.quantizers = {"scaling_fwd": made, "scaling_bwd": [None]}


class DelayedFloat8(nn.Linear):
    """torchao 0.3 to 0.7, delayed scaling: buffers by the name of what they are about."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        for part, (amax, scale) in {"input": (7.0, 64.0), "weight": (0.5, 896.0), "grad_output": (1e-3, 448e3)}.items():
            self.register_buffer(f"fp8_amax_{part}", torch.tensor([amax]))
            self.register_buffer(f"fp8_scale_{part}", torch.tensor([scale]))


class Float8Linear(nn.Linear):
    """torchao from 0.8 on: nothing is kept."""


class MXFP8Linear(nn.Linear):
    """torchao from 0.17 on: nothing is kept."""

    def __init__(self, scale_calculation_mode: str = "rceil") -> None:
        super().__init__(64, 8)
        self.scale_calculation_mode = scale_calculation_mode


class NVFP4Linear(nn.Linear):
    """torchao from 0.18 on: nothing is kept."""


class NVFP4BlockScaling:
    """A recipe of TransformerEngine 2.x."""


def read(model: nn.Module) -> dict[str, float]:
    found = ScaleSampler(model).read()
    assert found is not None
    names, numbers = ScaleSampler.named(*found)
    assert callable(names)
    return dict(names(numbers.tolist()))  # type: ignore[arg-type]


def test_what_transformer_engine_keeps_is_read_by_tensor() -> None:
    found = read(nn.Sequential(DelayedEngine()))
    assert found["amax/0.input"] == 100
    assert found["quant_scale/0.weight"] == 64
    assert found["quant_scale/0.grad_output"] == 512
    assert found["amax/0.grad_input"] == 0.5
    assert (found["amax"], found["quant_scale"]) == (100, 1)
    assert found["saturated_share"] == 0


def test_quantizers_are_read_where_there_is_no_history() -> None:
    found = read(nn.Sequential(CurrentEngine()))
    assert (found["amax/0.input"], found["quant_scale/0.weight"]) == (4, 224)


def test_what_torchao_keeps_is_read_by_tensor() -> None:
    found = read(nn.Sequential(DelayedFloat8()))
    assert {name: value for name, value in found.items() if name.startswith("quant_scale/")} == {
        "quant_scale/0.input": 64,
        "quant_scale/0.weight": 896,
        "quant_scale/0.grad_output": 448e3,
    }


def test_a_dynamic_scale_is_that_of_the_weight_now() -> None:
    model: Any = nn.Sequential(Float8Linear(8, 8))
    model[0].weight.data.fill_(1.0)
    model[0].weight.data[0] = 1e-7  # below half of the smallest of 448 to 1
    model[0].weight.data[1, 0] = -2.0
    found = read(model)
    assert (found["amax/0.weight"], found["quant_scale"]) == (2, 224)
    assert (found["saturated_share"], found["zeroed_share"]) == (0, 8 / 64)


def test_a_weight_beyond_its_old_scale_saturates() -> None:
    model: Any = nn.Sequential(DelayedFloat8())
    model[0].weight.data.fill_(0.1)
    model[0].weight.data[:4] = 0.6
    assert read(model)["saturated_share"] == 0.5


def test_weights_in_eight_bits_carry_their_scale() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    weight: Any = model[0].weight
    weight._scale_inv = torch.tensor([0.25])
    assert read(model) == {"quant_scale": 4, "quant_scale/0.weight": 4}


@pytest.mark.parametrize(("mode", "factor", "saturated"), [("rceil", 128, 0), ("floor", 256, 1 / 512)])
def test_a_block_of_mx_has_a_power_of_two_from_which_little_saturates(mode: str, factor: int, saturated: float) -> None:
    layer = MXFP8Linear(mode)
    layer.weight.data.fill_(2.0**-9)  # of two blocks in each row, each by itself
    layer.weight.data[0, 40] = 1.9  # 1.9 * 256 = 486 is beyond 448
    layer.weight.data[0, 41] = 2.0**-19  # below half of the smallest of that block
    layer.weight.data[1, 0] = 2.0**-19  # not small where all is small
    found = read(nn.Sequential(layer))
    assert (found["quant_scale"], found["saturated_share"], found["zeroed_share"]) == (factor, saturated, 1 / 512)
    assert format_of(layer) == "mxfp8 in MXFP8Linear"


def test_a_block_of_nvfp4_has_a_scale_of_eight_bits_within_that_of_the_tensor() -> None:
    layer = NVFP4Linear(32, 4)
    layer.weight.data.fill_(1.0)
    layer.weight.data[0, 0] = 6.0 * 448  # the scale of the tensor is 1, and that of its own block 448
    layer.weight.data[1, 3] = 0.01
    found = read(nn.Sequential(layer))
    assert found["quant_scale"] == pytest.approx(1 / 448)
    assert found["zeroed_share"] == (15 + 1) / 128
    assert found["saturated_share"] == 0
    engine: Any = nn.Linear(32, 4)
    engine.weight.data.copy_(layer.weight.data)
    engine.fp8_meta = {"recipe": NVFP4BlockScaling()}
    assert read(nn.Sequential(engine)) == found
    assert format_of(nn.Sequential(engine, layer)) == "nvfp4 in Linear, NVFP4Linear"


@pytest.mark.parametrize("width", [5, 33])
def test_rows_that_are_no_whole_number_of_blocks_are_read_as_far_as_they_are(width: int) -> None:
    layer = NVFP4Linear(width, 2)
    layer.weight.data.fill_(3.0)
    assert read(nn.Sequential(layer)) | {"zeroed_share": 0, "saturated_share": 0, "amax": 3} == read(
        nn.Sequential(layer)
    )
    layer.weight.data = torch.empty(0, width)
    assert ScaleSampler(nn.Sequential(layer)).read() is None


@pytest.mark.filterwarnings("ignore")  # torchao's own
def test_torchao_casts_as_it_is_read() -> None:
    name = "torchao.prototype.{}"
    linear, config, mx, nvfp4 = (
        pytest.importorskip(name.format(module), reason="torchao 0.18 is not installed")
        for module in (
            "moe_training.mxfp8_linear",
            "mx_formats.config",
            "mx_formats.mx_tensor",
            "mx_formats.nvfp4_tensor",
        )
    )
    layer: Any
    for mode in (config.ScaleCalculationMode.RCEIL, config.ScaleCalculationMode.FLOOR):
        layer = linear.MXFP8Linear(64, 32, scale_calculation_mode=mode)
        cast = mx.MXTensor.to_mx(layer.weight.detach(), torch.float8_e4m3fn, 32, scaling_mode=mode)
        least = float((1 / cast.scale.float()).min())
        kept: Any = nn.Linear(64, 32)
        kept.weight = nn.Parameter(cast, requires_grad=False)
        for each, name in ((layer, "mxfp8 in MXFP8Linear"), (kept, "mx in Linear")):
            assert (read(nn.Sequential(each))["quant_scale"], format_of(each)) == (least, name)
    layer = NVFP4Linear(64, 32)
    weight = layer.weight.detach()
    of_all = nvfp4.per_tensor_amax_to_scale(weight.abs().max())
    four = nvfp4.NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=of_all)
    found = read(nn.Sequential(layer))
    assert found["quant_scale"] == pytest.approx(float((1 / (four.scale.float() * of_all)).min()))
    lost = (four.dequantize(torch.float32) == 0) & (weight != 0)
    assert found["zeroed_share"] == pytest.approx(float(lost.float().mean()), abs=2 / 2048)


def test_many_tensors_have_summaries_alone() -> None:
    found = read(nn.Sequential(*(DelayedFloat8() for _ in range(MOST_TENSORS))))
    assert set(found) == {"amax", "quant_scale", "saturated_share", "zeroed_share"}


def test_ranks_take_the_largest_amax_and_the_smallest_scale_there_is() -> None:
    absent = [-1.0] * 4
    rows = torch.tensor([[3.0, 8.0, 0.25, 0.5], absent, [5.0, 2.0, 0.75, -1.0]])
    assert together(rows).tolist() == [5, 2, 0.5, 0.5]
    assert together(torch.tensor([absent, absent])).tolist() == absent


def test_a_run_says_that_it_is_in_eight_bits_and_that_a_scale_is_lost(tmp_path: Path) -> None:
    model = nn.Sequential(DelayedEngine(), nn.Linear(8, 1))
    engine: Any = model[0]
    assert format_of(nn.Linear(2, 2)) is None
    guard = sealegs.Guard(model, torch.optim.SGD(model.parameters(), 1e-3), run=tmp_path / "run")
    with guard:
        for step in range(25):
            if step == 15:
                engine.fp8_meta["scaling_fwd"].scale[0] = 0
            loss = model(torch.ones(2, 8)).square().mean()
            loss.backward()
            guard.step(loss)
    run = open_run(tmp_path / "run")
    assert run.manifest.recorded["precision"]["fp8"] == "fp8 in DelayedEngine"
    (alarm,) = (event for event in run.events if event.kind == "alarm")
    assert (alarm.step, alarm.detail["findings"][0]["detector"], alarm.detail["acted"]) == (20, "zero-scale", False)


def test_a_model_without_them_is_not_read_again() -> None:
    sampler = ScaleSampler(nn.Sequential(nn.Linear(2, 2), nn.Conv1d(1, 1, 1)))
    assert not sampler.has_any
    assert sampler.read() is None


@pytest.mark.parametrize("shape", [(4, 1), (0,)])
def test_scales_by_row_count_by_their_smallest_and_empty_ones_not_at_all(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    weight: Any = model[0].weight
    scale: Tensor = torch.arange(4.0)[: shape[0]].reshape(shape)
    weight._scale = scale
    found = read(model)
    assert found.get("quant_scale") == (0 if scale.numel() else None)
