"""A way to build a model at any width in, how the size of its activations goes with the width out.

The coordinate check of Tensor Programs V (Yang et al. 2022, appendix D.1): train a few steps at several widths. Where
activations keep their size, what was found to be a good learning rate at a small width is one at a large width too;
where they grow, the large model is trained at a rate that is too high for it, however good it was.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from sealegs.errors import ConfigError
from sealegs.report.coordinated import FLAT, OUTPUT, START, Coordinated, Layer, Word
from sealegs.signals.activations import find_layers


class Trial(NamedTuple):
    """A model of some width, and what trains it one step further."""

    model: nn.Module
    step: Callable[[], object]


def coordinate_check(
    build: Callable[[int, int], Trial], widths: Sequence[int], *, steps: int, seeds: int, source: str
) -> Coordinated:
    """Train what ``build(width, seed)`` gives for some steps, and compare."""
    if len(widths) < 2 or any(wide <= narrow for narrow, wide in pairwise(widths)):
        raise ConfigError(f"--widths {' '.join(map(str, widths))}: two or more, rising; three are usual")
    sizes = [_mean([_sizes(build(width, seed), steps) for seed in range(seeds)]) for width in widths]
    for width, found in zip(widths, sizes, strict=True):
        if list(found) != list(sizes[0]):
            raise ConfigError(f"at width {width} the model has other layers than at {widths[0]}: build the same depth")
    layers = [_layer(name, [found[name] for found in sizes], widths) for name in sizes[0]]
    flat, because = _verdict(layers)
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
    """Of each layer in the forward pass after so many updates."""
    for _ in range(steps):
        trial.step()
    with _watched(trial.model) as seen:
        trial.step()
    if OUTPUT not in seen:
        raise ConfigError("the step does not call the model: give a loss that does")
    return {name: float(size) for name, size in seen.items()}


@contextmanager
def _watched(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The size of what embeddings, layers and the model give, in the order in which they are called."""
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


def _mean(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """The geometric mean over seeds."""
    names = found[0]
    return {name: math.exp(sum(_log(each[name]) for each in found) / len(found)) for name in names}


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf if value == 0 else math.nan


def _layer(name: str, sizes: Sequence[float], widths: Sequence[int]) -> Layer:
    if not all(math.isfinite(size) for size in sizes):
        word: Word = "not finite"
        slope = None
    elif min(sizes) <= 0:
        word, slope = "zero", None
    else:
        slope = float(np.polyfit(np.log(widths), np.log(sizes), 1)[0])
        word = "flat" if abs(slope) <= FLAT else "growing" if slope > 0 else "shrinking"
    return Layer(name=name, sizes=list(sizes), slope=slope, word=word)


def _verdict(layers: Sequence[Layer]) -> tuple[bool, str]:
    inner = [layer for layer in layers if layer.name != OUTPUT]
    [output] = [layer for layer in layers if layer.name == OUTPUT]
    broken = [layer for layer in layers if layer.word in ("not finite", "zero")]
    off = [layer for layer in inner if layer.word in ("growing", "shrinking")]
    off += [output] if output.slope is not None and not START <= output.slope <= FLAT else []
    if broken:
        return False, f"{broken[0].name} is {broken[0].word}"
    if off:
        worst = max(off, key=lambda layer: abs(layer.slope or 0.0))
        rest = f" and {len(off) - 1} more" if len(off) > 1 else ""
        return False, (
            f"{worst.name} is {worst.word}, with a slope of {worst.slope:+.2f}{rest}: a learning rate that is right at "
            "one width is wrong at another"
        )
    tail = (
        "; the output shrinks as its random start does, and what is learnt takes over" if output.word != "flat" else ""
    )
    return True, f"no slope beyond {FLAT:g}: what is found at a small width holds at a large one{tail}"
