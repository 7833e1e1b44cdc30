"""The coordinate check: what it sees of a muP that lacks one scale, and what it makes of chance."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sealegs.lab.model import Transformer
from sealegs.lab.settings import SIZES
from sealegs.lab.sources import open_data
from sealegs.lab.subject import subject_of
from sealegs.lab.train import resolved
from sealegs.preflight_check.coordcheck import Trial, coordinate_check
from sealegs.replay.subject import ReplayLoop
from sealegs.report.commands.coordcheck import Coordinated

BASE, WIDTHS, STEPS = 32, (32, 128), 6
Broken = Callable[[Transformer, torch.optim.Optimizer, float], None]
"""Takes one scale of muP from a model, or from its optimizer, that is so many times the base width."""


def nothing(*_: object) -> None:
    pass


def rate(_: Transformer, optimizer: torch.optim.Optimizer, times: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = optimizer.param_groups[0]["lr"]


def hidden_init(model: Transformer, _: torch.optim.Optimizer, times: float) -> None:
    with torch.no_grad():
        for weight in model.blocks.parameters():
            weight.mul_(math.sqrt(times) if weight.ndim >= 2 else 1.0)


def embedding_init(model: Transformer, _: torch.optim.Optimizer, times: float) -> None:
    with torch.no_grad():
        model.embedding.weight.div_(math.sqrt(times))


def readout(model: Transformer, _: torch.optim.Optimizer, times: float) -> None:
    model.register_forward_hook(lambda *call: call[-1] * times)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (nothing, {"embedding": "flat", "blocks.0": "flat", "blocks.1": "flat", "output": "shrinking"}),
        (rate, {"embedding": "flat", "blocks.0": "growing", "blocks.1": "growing"}),
        (hidden_init, {"embedding": "flat", "blocks.0": "growing", "blocks.1": "growing"}),
        (embedding_init, {"embedding": "shrinking"}),
        (readout, {"embedding": "flat", "output": "growing"}),
    ],
)
def test_one_scale_that_is_missing_is_seen(broken: Broken, words: dict[str, str], tokens_file: Path) -> None:
    nano = SIZES["nano"]
    flat = replace(nano.optimizer, warmup_steps=0)
    shape = replace(nano.model, heads=2, context=16, mup_base_width=BASE)
    settings = resolved(
        replace(nano, model=shape, optimizer=flat, data=replace(nano.data, sources={str(tokens_file): 1.0}))
    )
    stream = open_data(settings, say=print).training
    batches = [stream.batch(number) for number in range(STEPS + 1)]

    def build(width: int, seed: int) -> Trial:
        wide = replace(settings.model, width=width, hidden=2 * width)
        subject = subject_of(replace(settings, model=wide, seed=seed))
        model, [optimizer] = subject.model, subject.optimizers
        assert isinstance(model, Transformer)
        broken(model, optimizer, width / BASE)
        loop, data = ReplayLoop(replace(subject, schedulers=[]), None), iter(batches)
        return Trial(model, lambda: loop.step([{"tokens": (batch := next(data)).tokens, "targets": batch.targets}]))

    found = coordinate_check(build, WIDTHS, steps=STEPS, seeds=3, source="nano")
    assert {layer.name: layer.word for layer in found.layers if layer.name in words} == words
    assert found.flat == (broken is nothing), found.because


class Sized(nn.Module):
    """Gives values of a size that is known, in each layer and as a whole."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity(), nn.Identity()])
        self.size = torch.full((4,), size)

    def forward(self) -> Tensor:
        value: Tensor = self.layers[1](self.layers[0](self.size))
        return value


def check_of_noise(slope: float, noise: float, *, seeds: int = 3, draw: int = 0) -> Coordinated:
    """Of models whose sizes have this slope, but for chance."""
    random = np.random.default_rng(draw)

    def build(width: int, _: int) -> Trial:
        model = Sized(math.exp(slope * math.log(width) + random.normal(0, noise)))
        return Trial(model, model)

    return coordinate_check(build, (64, 128, 256), steps=1, seeds=seeds, source="noise")


def test_a_slope_is_one_where_chance_would_not_make_it() -> None:
    sure, unsure, flat = check_of_noise(0.15, 0.001), check_of_noise(0.15, 0.15, draw=1), check_of_noise(0.09, 0.001)
    assert [found.layers[0].word for found in (sure, unsure, flat)] == ["growing", "unclear", "flat"]
    assert [found.flat for found in (sure, unsure, flat)] == [False, True, True]
    assert unsure.because.startswith("as far as 3 seeds tell. layers.0 has a slope of +0.")
    assert check_of_noise(-0.15, 0.001).layers[0].word == "shrinking"


@pytest.mark.parametrize("seeds", [2, 5])
def test_the_interval_of_a_slope_holds_it_19_times_of_20(seeds: int) -> None:
    layers = [check_of_noise(0.1, 0.1, seeds=seeds, draw=draw).layers[0] for draw in range(200)]
    held = [abs((layer.slope or 0.0) - 0.1) <= (layer.within or 0.0) for layer in layers]
    assert 0.91 <= sum(held) / len(held) <= 0.99  # 0.95, with a standard error of 0.015
    # at the very limit, which is the worst that is still flat
    assert sum(layer.word == "growing" for layer in layers) / len(layers) <= 0.05
