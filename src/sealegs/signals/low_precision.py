"""Samples the scales of tensors that are kept in eight bits, where modules or tensors carry them.

Nothing is imported for it: what counts is which attributes there are. The names and releases below are from excerpts of
public sources; neither library has been run with it.

| library | attributes |
|---|---|
| TransformerEngine 0.x to 2.x, delayed scaling | ``module.fp8_meta["scaling_fwd"]`` and ``["scaling_bwd"]``, each with ``scale`` and ``amax_history`` |
| TransformerEngine 2.x, any scaling by tensor | ``module.quantizers["scaling_fwd"]``, a list, each with ``scale`` and ``amax`` |
| torchao 0.3 to 0.7, delayed scaling | buffers ``fp8_amax_input``, ``fp8_scale_input``; the same of ``weight`` and ``grad_output`` |
| weights in eight bits | ``weight._scale_inv`` (TransformerEngine), ``weight._scale`` or ``weight._precomputed_scale`` (torchao) |
| torchao from 0.8 on, dynamic scaling | a module of class ``Float8Linear``: nothing is kept, so the scale is that of its weight now |

Scales by block (MX, NVFP4) are not read.
"""  # noqa: E501 -- a table

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sealegs.signals.collect import Block
from sealegs.signals.groups import plain_name, shortened
from sealegs.signals.weights import flat, local, spacing

FORWARD = ("input", "weight", "output")
BACKWARD = ("grad_output", "grad_input")
"""What TransformerEngine scales, in its order, over and over where a module has several products."""
LARGEST = 448.0
"""The largest number of ``float8_e4m3fn``, which inputs and weights are kept in."""
SMALLEST = 2.0**-10
"""Half of its smallest: what is not above that becomes zero."""
MOST_TENSORS = 32
"""Tensors that a row names at most; of more there are only summaries."""
MOST_WEIGHTS = 4096
"""Values of a weight that are looked at, at most."""
SUMMARIES = ("amax", "quant_scale", "saturated_share", "zeroed_share")
ABSENT = -1.0
"""Stands for a summary that there is not."""


class Scaled(NamedTuple):
    """A tensor in few bits, as far as somebody carries its numbers."""

    name: str
    amax: Tensor | None
    scale: Tensor | None
    weight: Tensor | None = None
    """The values themselves, where they can be looked at."""


class ScaleSampler:
    """Reads amax and scale of each tensor, on the steps that ask for it.

    - ``amax/<tensor>`` and ``quant_scale/<tensor>``, of up to 32 tensors, and ``amax``, the largest, and
      ``quant_scale``, the smallest of all.
    - ``saturated_share`` and ``zeroed_share``: of a sample of the weights that are kept in more bits and cast with a
      known scale, the share that is beyond the largest number, and the share that becomes zero.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(name, module) for name, module in model.named_modules() if _may_have_scales(module)]

    @property
    def has_any(self) -> bool:
        """Whether the model has anything in eight bits."""
        return bool(self._modules)

    @torch.no_grad()
    def read(self) -> tuple[tuple[str, ...], Tensor] | None:
        """The summaries, in their order, then amax and scale of each tensor that is named; with the names of these.
        None where nothing has been scaled yet."""
        found = [scaled for name, module in self._modules for scaled in _scaled(shortened(plain_name(name)), module)]
        if not found:
            return None
        home = next(each for one in found for each in (one.amax, one.scale, one.weight) if each is not None).device
        pairs = [(_one(each.amax, home, largest=True), _one(each.scale, home, largest=False)) for each in found]
        amax, scale = (torch.stack(column) for column in zip(*pairs, strict=True))
        known = [one for one, each in zip(scale.unbind(), found, strict=True) if each.scale is not None]
        least = torch.stack(known).amin() if known else scale.new_full((), ABSENT)
        saturated, zeroed = _shares(found, home)
        summaries = torch.stack((amax.amax(), least, saturated, zeroed))
        if len(found) > MOST_TENSORS:
            return (), summaries
        return tuple(each.name for each in found), torch.cat((summaries, amax, scale))

    @staticmethod
    def named(tensors: tuple[str, ...], numbers: Tensor) -> Block:
        """The signals of what ``read`` gives."""
        return partial(_signals, tensors), numbers


def together(rows: Tensor) -> Tensor:
    """The summaries of several ranks: largest amax, smallest scale, and the means of the shares."""
    amax, scale, *shares = rows[:, : len(SUMMARIES)].unbind(1)
    least = torch.where(scale != ABSENT, scale, torch.inf).amin()
    least = torch.where((scale == ABSENT).all(), ABSENT, least)
    return torch.stack((amax.amax(), least, *map(_mean, shares)))


def _mean(share: Tensor) -> Tensor:
    count = (share != ABSENT).sum()
    return torch.where(count > 0, torch.where(share != ABSENT, share, 0.0).sum() / count, ABSENT)


def format_of(model: nn.Module) -> str | None:
    """What is in eight bits, in words; None where nothing is."""
    kinds = sorted({type(module).__name__ for module in model.modules() if _may_have_scales(module)})
    return f"fp8 in {', '.join(kinds)}" if kinds else None


def _may_have_scales(module: nn.Module) -> bool:
    has_state = isinstance(getattr(module, "fp8_meta", None), dict) or "fp8_scale_weight" in module._buffers
    return (
        has_state or type(module).__name__ == "Float8Linear" or _scale_of(module._parameters.get("weight")) is not None
    )


def _scale_of(weight: Any) -> Tensor | None:
    """The factor that a weight was multiplied by."""
    if weight is None:
        return None
    whole = getattr(weight, "_local_tensor", weight)
    inverse = getattr(whole, "_scale_inv", None)
    if isinstance(inverse, Tensor) and inverse.is_floating_point():
        return inverse.float().reciprocal()
    for name in ("_precomputed_scale", "_scale"):
        if isinstance(scale := getattr(whole, name, None), Tensor):
            return scale
    return None


def _scaled(name: str, module: nn.Module) -> Iterator[Scaled]:
    weight = module._parameters.get("weight")
    values = None if weight is None or type(local(weight)) not in (Tensor, nn.Parameter) else local(weight)
    is_told = False
    for direction, parts in (("scaling_fwd", FORWARD), ("scaling_bwd", BACKWARD)):
        for place, (amax, scale) in enumerate(_of_engine(module, direction)):
            is_told = True
            part, times = parts[place % len(parts)], place // len(parts)
            of_weight = values if part == "weight" and not times else None
            yield Scaled(f"{name}.{part}{times or ''}", amax, scale, of_weight)
    for part in ("input", "weight", "grad_output"):
        amax, scale = (module._buffers.get(f"fp8_{kind}_{part}") for kind in ("amax", "scale"))
        if amax is not None or scale is not None:
            is_told = True
            yield Scaled(f"{name}.{part}", amax, scale, values if part == "weight" else None)
    if is_told:
        return
    if (scale := _scale_of(weight)) is not None:
        yield Scaled(f"{name}.weight", None, scale)
    elif type(module).__name__ == "Float8Linear" and values is not None and values.numel():
        amax = values.abs().amax().float()
        yield Scaled(f"{name}.weight", amax, LARGEST / amax.clamp(min=1e-12), values)


def _of_engine(module: nn.Module, direction: str) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """Amax and scale of what TransformerEngine keeps, tensor by tensor."""
    meta = (getattr(module, "fp8_meta", None) or {}).get(direction)
    scales, history = getattr(meta, "scale", None), getattr(meta, "amax_history", None)
    if isinstance(scales, Tensor):
        largest = history.amax(0) if isinstance(history, Tensor) and history.ndim == 2 else None
        for place in range(scales.numel()):
            yield (None if largest is None else largest[place]), scales.reshape(-1)[place]
        return
    kept = getattr(module, "quantizers", None)
    for quantizer in (kept.get(direction) or ()) if isinstance(kept, Mapping) else ():
        amax, scale = getattr(quantizer, "amax", None), getattr(quantizer, "scale", None)
        if isinstance(scale, Tensor) or isinstance(amax, Tensor):
            yield amax, scale


def _one(value: Tensor | None, home: torch.device, *, largest: bool) -> Tensor:
    """One number for a tensor, which may have one for each row."""
    if value is None or not value.numel():
        return torch.full((), ABSENT, device=home)
    number = value.float().amax() if largest else value.float().amin()
    return number.to(home)


def _shares(found: list[Scaled], home: torch.device) -> tuple[Tensor, Tensor]:
    """Of sampled weights that are cast with a scale that is known: those beyond the largest number, those that become
    zero though they are not."""
    beyond, lost, count = [], [], 0
    for each in found:
        if each.weight is None or each.scale is None or each.scale.numel() != 1:
            continue
        elements = flat(each.weight)
        some = elements[:: spacing(len(elements), MOST_WEIGHTS)].float()
        sizes = (some.abs() * each.scale.to(some)).to(home)
        beyond.append((sizes > LARGEST * 1.001).sum())  # rounding is no saturation
        lost.append(((sizes <= SMALLEST) & (sizes > 0)).sum())
        count += sizes.numel()
    if not count:
        absent = torch.full((), ABSENT, device=home)
        return absent, absent
    return torch.stack(beyond).sum() / count, torch.stack(lost).sum() / count


def _signals(tensors: tuple[str, ...], numbers: list[float]) -> dict[str, float]:
    found = dict(zip(SUMMARIES, numbers, strict=False))
    amaxes, scales = numbers[len(SUMMARIES) :][: len(tensors)], numbers[len(SUMMARIES) + len(tensors) :]
    found |= {f"amax/{name}": value for name, value in zip(tensors, amaxes, strict=True)}
    found |= {f"quant_scale/{name}": value for name, value in zip(tensors, scales, strict=True)}
    return {name: value for name, value in found.items() if value != ABSENT}
