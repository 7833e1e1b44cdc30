"""Measures how the size of a model's activations changes with its width.

This is the coordinate check of Tensor Programs V (Yang et al. 2022, appendix D.1): train a few steps at several widths.
If activations keep their size, a learning rate that is good at a small width is good at a large one. If they grow, it
is too high for the large model.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import NormalDist
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from sealegs.errors import ConfigError
from sealegs.report.commands.coordcheck import FLAT, OUTPUT, START, Coordinated, Layer, Word, told_slope
from sealegs.signals.groups import find_layers

Floats: TypeAlias = NDArray[np.float64]


class Trial(NamedTuple):
    """A model of some width, and a function that trains it for one step."""

    model: nn.Module
    step: Callable[[], object]


def coordinate_check(
    build: Callable[[int, int], Trial], widths: Sequence[int], *, steps: int, seeds: int, source: str
) -> Coordinated:
    """Train what ``build(width, seed)`` gives for some steps, and compare."""
    assert seeds >= 2
    if len(widths) < 2 or any(wide <= narrow for narrow, wide in pairwise(widths)):
        raise ConfigError(f"--widths {' '.join(map(str, widths))}: two or more, rising; three are usual")
    found = [[_sizes(build(width, seed), steps) for seed in range(seeds)] for width in widths]
    names = list(found[0][0])
    for width, of_seeds in zip(widths, found, strict=True):
        if any(list(each) != names for each in of_seeds):
            raise ConfigError(f"at width {width} the model has other layers than at {widths[0]}: build the same depth")
    layers = [_layer(name, [[each[name] for each in of_seeds] for of_seeds in found], widths) for name in names]
    flat, because = _verdict(layers, seeds)
    return Coordinated(
        source=source,
        widths=list(widths),
        steps=steps,
        seeds=seeds,
        layers=layers,
        flat=flat,
        because=because,
    )


def _sizes(trial: Trial, steps: int) -> dict[str, float]:
    """The size of each layer's output in the forward pass after ``steps`` updates."""
    for _ in range(steps):
        trial.step()
    with _watched(trial.model) as seen:
        trial.step()
    if OUTPUT not in seen:
        raise ConfigError("the step does not call the model: give a loss that does")
    return {name: float(size) for name, size in seen.items()}


@contextmanager
def _watched(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The sizes of what embeddings, layers and the model give, in the order of their calls."""
    seen: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def take(_: nn.Module, __: Any, output: Any) -> None:
            tensor = _first(output)
            if tensor is not None:
                seen[name] = tensor.detach().float().square().mean().sqrt()

        return take

    tables = {name: each for name, each in model.named_modules() if isinstance(each, nn.Embedding)}
    watched = {**tables, **find_layers(model), OUTPUT: model}
    handles = [each.register_forward_hook(hook(name)) for name, each in watched.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _first(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return next((found for value in values if (found := _first(value)) is not None), None)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf if value == 0 else math.nan


def _layer(name: str, sizes: Sequence[Sequence[float]], widths: Sequence[int]) -> Layer:
    """One layer, from the sizes of all seeds at each width."""
    logs = np.array([[_log(size) for size in of_seeds] for of_seeds in sizes])
    means = [float(np.exp(mean)) for mean in logs.mean(axis=1)]  # geometric
    slope = within = None
    if not all(math.isfinite(mean) for mean in means):
        word: Word = "not finite"
    elif min(means) <= 0:
        word = "zero"
    else:
        slope, within = _slope(logs, np.log(widths))
        word = _word(slope, within)
    return Layer(name=name, sizes=list(means), slope=slope, within=within, word=word)


def _slope(logs: Floats, x: Floats) -> tuple[float, float]:
    """The slope of the means against the width, and half of its 95 % interval.

    The interval comes from the spread of the seeds at each width, taken over all widths. The distance of the means from
    a straight line is left out: three of them do not show whether that is chance.
    """
    widths, seeds = logs.shape
    away = x - x.mean()
    slope = float(away @ logs.mean(axis=1) / (away @ away))
    error = math.sqrt(logs.var(axis=1, ddof=1).mean() / seeds / (away @ away))
    return slope, _student(widths * (seeds - 1)) * error


def _student(freedom: int) -> float:
    """The bound that holds 95 % of Student's t (Abramowitz and Stegun 26.7.5; 3 % short at 2 degrees of freedom)."""
    z = NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, start=1))


def _word(slope: float, within: float) -> Word:
    """The word for a slope. Growing and shrinking need a whole interval beyond the limit."""
    if abs(slope) <= FLAT:
        return "flat"
    if abs(slope) - within <= FLAT:
        return "unclear"
    return "growing" if slope > 0 else "shrinking"


def _verdict(layers: Sequence[Layer], seeds: int) -> tuple[bool, str]:
    random = [layer for layer in layers if _shrinks_as_at_random(layer)]
    rest = sorted((layer for layer in layers if layer not in random), key=_steepness, reverse=True)
    broken = [layer for layer in layers if layer.word in ("not finite", "zero")]
    off = [layer for layer in rest if layer.word in ("growing", "shrinking")]
    unclear = [layer for layer in rest if layer.word == "unclear"]
    if broken:
        return False, f"{broken[0].name} is {broken[0].word}"
    if off:
        return False, (
            f"{off[0].name} is {off[0].word}, with a slope of {told_slope(off[0])}{_more(off)}: a learning rate that "
            "is right at one width is wrong at another"
        )
    tail = "; the output shrinks as its random start does, and what is learnt takes over" if random else ""
    if unclear:
        return True, (
            f"as far as {seeds} seeds tell. {unclear[0].name} has a slope of {told_slope(unclear[0])}{_more(unclear)}, "
            f"which may be chance: more --seeds say whether it is, larger --widths whether it lasts{tail}"
        )
    return True, f"no slope beyond {FLAT:g}: what is found at a small width holds at a large one{tail}"


def _shrinks_as_at_random(layer: Layer) -> bool:
    slope, within = layer.slope, layer.within
    return layer.name == OUTPUT and slope is not None and within is not None and START - within <= slope < -FLAT


def _steepness(layer: Layer) -> float:
    return abs(layer.slope or 0.0)


def _more(layers: Sequence[Layer]) -> str:
    return f" and {len(layers) - 1} more" if len(layers) > 1 else ""
