"""What several of the late trainings learn from: scikit-learn's digits, rows by step, small networks."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from sklearn import datasets  # type: ignore[import-untyped,unused-ignore]
from torch import Tensor, nn

T = TypeVar("T")


class Split(NamedTuple):
    """Rows to learn from, and rows to be asked about afterwards."""

    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor


def halves_of(inputs: Tensor, targets: Tensor, test_share: float = 0.25) -> Split:
    """Another split for every seed."""
    order = torch.randperm(len(inputs))
    train, test = order[round(test_share * len(inputs)) :], order[: round(test_share * len(inputs))]
    return Split(inputs[train], targets[train], inputs[test], targets[test])


def digits() -> Split:
    """1,797 pictures of 64 pixels between 0 and 1, a quarter of them for the test."""
    pixels, labels = datasets.load_digits(return_X_y=True)
    return halves_of(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))


def epochs(rows: int, batch: int, steps: int) -> list[Tensor]:
    """Row numbers of so many batches: all rows once, in some order, then again in another."""
    whole = rows // batch
    orders = (torch.randperm(rows)[: whole * batch].view(whole, batch) for _ in range(-(-steps // whole)))
    return list(itertools.chain.from_iterable(orders))[:steps]


def numbered(batches: Sequence[T]) -> list[tuple[int, T]]:
    """With the step that each was made for: a batch that comes again gets what a schedule did to it."""
    return list(enumerate(batches))


def layers(*widths: int, between: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear ones, with an activation after each but the last."""
    pairs = ((nn.Linear(wide, next_wide), between()) for wide, next_wide in itertools.pairwise(widths))
    return nn.Sequential(*list(itertools.chain.from_iterable(pairs))[:-1])


def shifted(pixels: Tensor) -> Tensor:
    """Pictures one pixel aside or not, each its own way, with some noise."""
    square = torch.arange(8)
    down, right = ((square + torch.randint(-1, 2, (len(pixels), 1))) % 8 for _ in range(2))
    moved = pixels.view(-1, 8, 8)[torch.arange(len(pixels))[:, None, None], down[:, :, None], right[:, None, :]]
    return moved.flatten(1) + 0.1 * torch.randn_like(pixels)


@torch.no_grad()
def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Share of the rows whose largest logit is that of their label."""
    model.eval()
    return float((model(inputs).argmax(-1) == labels).float().mean())


@torch.no_grad()
def neighbour_accuracy(model: nn.Module, known: tuple[Tensor, Tensor], asked: tuple[Tensor, Tensor]) -> float:
    """Share of the rows whose nearest known one, by the angle, has the same label."""
    model.eval()
    ours, theirs = (nn.functional.normalize(model(inputs), dim=-1) for inputs in (known[0], asked[0]))
    return float((known[1][(theirs @ ours.T).argmax(-1)] == asked[1]).float().mean())


def r_squared(said: Tensor, wanted: Tensor) -> float:
    """Share of the variance that is explained."""
    return 1.0 - float((said - wanted).square().mean() / wanted.var(correction=0))
