"""Samples the scales of tensors that are kept or computed in eight bits or four, where modules or tensors carry them.

Nothing is imported for it: what counts is which attributes there are. torchao 0.18 has been run with it; all else is from
excerpts of public sources.

| library | attributes |
|---|---|
| TransformerEngine 0.x to 2.x, delayed scaling | ``module.fp8_meta["scaling_fwd"]`` and ``["scaling_bwd"]``, each with ``scale`` and ``amax_history`` |
| TransformerEngine 2.x, any scaling by tensor | ``module.quantizers["scaling_fwd"]``, a list, each with ``scale`` and ``amax`` |
| TransformerEngine 2.x, scaling by block | ``module.fp8_meta["recipe"]`` of a class that says MXFP8 or NVFP4: nothing is kept, so the scales are those of its weight now |
| torchao 0.3 to 0.7, delayed scaling | buffers ``fp8_amax_input``, ``fp8_scale_input``; the same of ``weight`` and ``grad_output`` |
| weights in few bits | ``weight._scale_inv`` (TransformerEngine), ``weight._scale`` or ``weight._precomputed_scale`` (torchao); ``weight.qdata`` with ``weight.scale``, of MX and NVFP4 too |
| torchao from 0.8 on, dynamic scaling | a module of class ``Float8Linear``, ``MXFP8Linear``, ``MXLinear`` or ``NVFP4Linear``: nothing is kept, so the scales are those of its weight now |
"""  # noqa: E501 -- a table

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from sealegs.signals.collect import Block
from sealegs.signals.groups import plain_name, shortened
from sealegs.signals.layout import local
from sealegs.signals.weights import flat, spacing

FORWARD = ("input", "weight", "output")
BACKWARD = ("grad_output", "grad_input")
"""What TransformerEngine scales, in its order, over and over where a module has several products."""
LARGEST = 448.0
"""The largest number of ``float8_e4m3fn``, which inputs and weights are kept in."""
SMALLEST = 2.0**-10
"""Half of its smallest: what is not above that becomes zero."""
LARGEST_FOUR, SMALLEST_FOUR = 6.0, 0.25
"""The same of ``float4_e2m1``, which NVFP4 keeps values in."""
MX_BLOCK, NVFP4_BLOCK = 32, 16
"""Values that have one scale."""
ROUNDED, ROUNDED_SCALE = 1.001, 1 + 2.0**-4
"""What is beyond the largest number by less is rounding: of the product, and of a scale that has eight bits itself."""
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
    cast: "_Cast | None" = None
    """Some of the values, where they can be looked at."""


class _Cast(NamedTuple):
    """Sizes of some values as they are cast, and the limits of what they are cast to."""

    sizes: Tensor
    largest: float = LARGEST * ROUNDED
    smallest: float = SMALLEST


class ScaleSampler:
    """Reads amax and scale of each tensor, on the steps that ask for it.

    - ``amax/<tensor>`` and ``quant_scale/<tensor>``, of up to 32 tensors, and ``amax``, the largest, and
      ``quant_scale``, the smallest of all.
    - ``saturated_share`` and ``zeroed_share``: of a sample of the weights that are kept in more bits and cast with a
      known scale, the share that is beyond the largest number, and the share that becomes zero.

    Where each block of a tensor has a scale, ``quant_scale`` is the smallest of those that were looked at.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(name, module) for name, module in model.named_modules() if _may_have_scales(module)]

    @property
    def has_any(self) -> bool:
        """Whether the model has anything in eight bits or four."""
        return bool(self._modules)

    @torch.no_grad()
    def read(self) -> tuple[tuple[str, ...], Tensor] | None:
        """The summaries, in their order, then amax and scale of each tensor that is named; with the names of these.
        None where nothing has been scaled yet."""
        found = [scaled for name, module in self._modules for scaled in _scaled(shortened(plain_name(name)), module)]
        if not found:
            return None
        home = next(each for one in found for each in (one.amax, one.scale) if each is not None).device
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
    """What is in few bits, in words; None where nothing is."""
    kinds = sorted({(_bits(module), type(module).__name__) for module in model.modules() if _may_have_scales(module)})
    return (
        "; ".join(f"{bits} in {', '.join(name for its, name in kinds if its == bits)}" for bits in dict(kinds)) or None
    )


def _bits(module: nn.Module) -> str:
    kept = type(local(weight)).__name__ if (weight := module._parameters.get("weight")) is not None else ""
    return _blocks_of(module) or next((name for name in ("nvfp4", "mx") if name in kept.lower()), "fp8")


def _may_have_scales(module: nn.Module) -> bool:
    has_state = isinstance(getattr(module, "fp8_meta", None), dict) or "fp8_scale_weight" in module._buffers
    is_dynamic = type(module).__name__ == "Float8Linear" or _blocks_of(module) is not None
    return has_state or is_dynamic or _scale_of(module._parameters.get("weight")) is not None


def _blocks_of(module: nn.Module) -> Literal["mxfp8", "nvfp4"] | None:
    """How a module scales the blocks of what it multiplies, where it does so anew each time."""
    meta = getattr(module, "fp8_meta", None)
    told = type(meta.get("recipe") if isinstance(meta, dict) else module).__name__
    if told in ("MXFP8BlockScaling", "MXFP8Linear", "MXLinear"):
        return "mxfp8"
    return "nvfp4" if told in ("NVFP4BlockScaling", "NVFP4Linear") else None


def _scale_of(weight: Any) -> Tensor | None:
    """The factors that a weight was multiplied by."""
    if weight is None:
        return None
    whole = getattr(weight, "_local_tensor", weight)
    inverse = getattr(whole, "_scale_inv", None)
    if isinstance(inverse, Tensor) and inverse.is_floating_point():
        return inverse.float().reciprocal()
    for name in ("_precomputed_scale", "_scale"):
        if isinstance(scale := getattr(whole, name, None), Tensor):
            return scale
    values, inverse = (getattr(whole, name, None) for name in ("qdata", "scale"))
    if isinstance(values, Tensor) and isinstance(inverse, Tensor) and _is_eight_bits(values, inverse):
        of_all = getattr(whole, "per_tensor_scale", None)
        return (inverse.float() if of_all is None else inverse.float() * of_all).reciprocal()
    return None


def _is_eight_bits(values: Tensor, scale: Tensor) -> bool:
    """Whether values are kept in eight bits, or in four with scales of eight; not as whole numbers."""
    return any(each.is_floating_point() and each.element_size() == 1 for each in (values, scale))


def _scaled(name: str, module: nn.Module) -> Iterator[Scaled]:
    weight = module._parameters.get("weight")
    values = None if weight is None or type(local(weight)) not in (Tensor, nn.Parameter) else local(weight)
    is_told = False
    for direction, parts in (("scaling_fwd", FORWARD), ("scaling_bwd", BACKWARD)):
        for place, (amax, scale) in enumerate(_of_engine(module, direction)):
            is_told = True
            part, times = parts[place % len(parts)], place // len(parts)
            of_weight = values if part == "weight" and not times else None
            yield Scaled(f"{name}.{part}{times or ''}", amax, scale, _by_tensor(of_weight, scale))
    for part in ("input", "weight", "grad_output"):
        amax, scale = (module._buffers.get(f"fp8_{kind}_{part}") for kind in ("amax", "scale"))
        if amax is not None or scale is not None:
            is_told = True
            yield Scaled(f"{name}.{part}", amax, scale, _by_tensor(values if part == "weight" else None, scale))
    if is_told:
        return
    if (scale := _scale_of(weight)) is not None:
        yield Scaled(f"{name}.weight", None, scale)
    elif values is not None and values.numel() and (blocks := _blocks_of(module)):
        amax = values.abs().amax().float()
        mode = str(getattr(module, "scale_calculation_mode", "")).lower()
        scale, cast = _by_block(values, amax, blocks, floors="floor" in mode)
        yield Scaled(f"{name}.weight", amax, scale, cast)
    elif type(module).__name__ == "Float8Linear" and values is not None and values.numel():
        amax = values.abs().amax().float()
        scale = LARGEST / amax.clamp(min=1e-12)
        yield Scaled(f"{name}.weight", amax, scale, _by_tensor(values, scale))


def _by_tensor(values: Tensor | None, scale: Tensor | None) -> _Cast | None:
    """Some values of a tensor that has one scale."""
    if values is None or scale is None or scale.numel() != 1:
        return None
    elements = flat(values)
    some = elements[:: spacing(len(elements), MOST_WEIGHTS)].float()
    return _Cast(some.abs() * scale.to(some))


def _by_block(values: Tensor, amax: Tensor, kind: str, *, floors: bool) -> tuple[Tensor, _Cast]:
    """The scales of some blocks of a weight, and the values in them, by the rules of MX and of NVFP4.

    A block is of neighbours in a row. An MX scale is a power of two, from which nothing saturates unless it is rounded
    down (``floors``); an NVFP4 scale is a number of eight bits, relative to one for the whole tensor.
    """
    length = MX_BLOCK if kind == "mxfp8" else NVFP4_BLOCK
    rows = values.reshape(-1, values.shape[-1])
    whole = rows[:, : rows.shape[1] // length * length]
    blocks = whole.reshape(-1, length) if whole.numel() else rows
    some = blocks[:: spacing(len(blocks), MOST_WEIGHTS // length)].float().abs()
    largest = some.amax(1, keepdim=True).clamp(min=2.0**-100)
    if kind == "mxfp8":
        exponent = largest.log2().floor() - 8 if floors else (largest / LARGEST).log2().ceil()
        scale = torch.exp2(-exponent)
        return scale, _Cast(some * scale)
    of_all = amax.to(some).clamp(min=2.0**-100) / (LARGEST_FOUR * LARGEST)
    in_eight_bits = (largest / LARGEST_FOUR / of_all).clamp(min=2.0**-9).to(torch.float8_e4m3fn).float()
    scale = (in_eight_bits * of_all).reciprocal()
    return scale, _Cast(some * scale, LARGEST_FOUR * ROUNDED_SCALE, SMALLEST_FOUR)


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
        if each.cast is None:
            continue
        sizes = each.cast.sizes.to(home)
        beyond.append((sizes > each.cast.largest).sum())
        lost.append(((sizes <= each.cast.smallest) & (sizes > 0)).sum())
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
