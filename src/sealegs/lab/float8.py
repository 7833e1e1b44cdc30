"""Matrix products of eight bits, in plain torch: what they read is rounded to E4M3 with one scale for each tensor."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sealegs.lab.experts import Notes

LARGEST = 448.0
"""The largest number of E4M3."""
MEASURED = ("amax", "quant_scale", "saturated_share", "zeroed_share")
PREFIX = "float8/"
"""Begins the names of notes about rounded tensors."""


class Quantiser(nn.Module):
    """Rounds a tensor to E4M3 and scales it back; the gradient passes as if it had not.

    The scale is made anew of each tensor's largest value, so that there is no history, which a skip could not undo.
    """

    name = ""
    """Of the tensor, in the signals."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The rounded tensor, and the numbers that ``MEASURED`` names."""
        return self.rounded(x, self.scale_of(x))

    def scale_of(self, x: Tensor) -> Tensor:
        """The factor that brings the largest value to the largest number."""
        return LARGEST / x.detach().float().abs().max().clamp(min=1e-12)

    def rounded(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """The same with a given scale."""
        values = x.detach().float()
        scaled = values * scale
        kept = scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float()
        lost = (scaled.abs() > LARGEST * 1.0001).float().mean()  # the largest value itself may be rounded up
        zeroed = ((kept == 0) & (values != 0)).float().mean()
        measured = torch.stack([values.abs().max(), scale, lost, zeroed])
        return x + ((kept / scale).to(x.dtype) - x).detach(), measured


class Float8Linear(nn.Linear):
    """A matrix product of a rounded input and a rounded weight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.of_input, self.of_weight = Quantiser(), Quantiser()

    def forward(self, x: Tensor, notes: Notes | None = None) -> Tensor:
        """The product, in the precision of the input."""
        rounded = []
        for quantiser, tensor in ((self.of_input, x), (self.of_weight, self.weight)):
            values, measured = quantiser(tensor)
            rounded.append(values)
            if notes is not None:
                notes.append((f"{PREFIX}{quantiser.name}", measured))
        return F.linear(*rounded)


def name_quantisers(model: nn.Module) -> None:
    """Give each quantiser the name of its tensor: ``blocks.0.mlp.up.input``."""
    for name, module in model.named_modules():
        if isinstance(module, Quantiser):
            module.name = name.replace(".of_", ".")


def float8_signals(beside: Mapping[str, Tensor], *, detailed: bool) -> dict[str, Tensor]:
    """The signals of a step's rounded tensors: the worst of each share; ``detailed`` adds all four of each tensor."""
    found = {name.removeprefix(PREFIX): each[0] for name, each in beside.items() if name.startswith(PREFIX)}
    if not found:
        return {}
    worst = torch.stack(list(found.values())).amax(0)
    signals = {name: each for name, each in zip(MEASURED, worst.unbind(), strict=True) if name.endswith("share")}
    if detailed:
        signals |= {
            f"{measure}/{tensor}": number
            for tensor, numbers in found.items()
            for measure, number in zip(MEASURED, numbers.unbind(), strict=True)
        }
    return signals
