"""A seed and a keeper in, held-out quality out: discs to outline, shapes to find and name in drawn pictures."""

import itertools

import torch
import torch.nn.functional as F
from bench.healthy.contract import Keeper, training
from bench.healthy.frozen.sources import index_batches
from torch import Tensor, nn


def convolutions(*widths: int) -> nn.Sequential:
    """3 by 3 convolutions of these widths, with an activation after each but the last."""
    layers: list[nn.Module] = []
    for wide, next_wide in itertools.pairwise(widths):
        layers += [nn.Conv2d(wide, next_wide, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def scans(count: int, side: int = 20) -> tuple[Tensor, Tensor]:
    """Noisy pictures; six in ten show nothing, the others a disc of any size, which is faint."""
    across = torch.arange(side).float()
    middle = torch.rand(count, 2, 1, 1) * (side - 6) + 3
    radius = torch.rand(count, 1, 1) * 4 + 1.2
    inside = ((across[:, None] - middle[:, 0]) ** 2 + (across[None, :] - middle[:, 1]) ** 2) <= radius**2
    mask = (inside & (torch.rand(count, 1, 1) < 0.4)).float()[:, None]
    brightness = 0.9 + 0.6 * torch.rand(count, 1, 1, 1)
    return mask * brightness + 0.5 * torch.randn(count, 1, side, side), mask


def dice_and_entropy(logits: Tensor, mask: Tensor) -> Tensor:
    """Cross entropy of pixels and one minus the overlap of each picture."""
    chance = logits.sigmoid()
    overlap = (2 * (chance * mask).sum((1, 2, 3)) + 1) / ((chance + mask).sum((1, 2, 3)) + 1)
    return F.binary_cross_entropy_with_logits(logits, mask) + (1 - overlap).mean()


@training(
    kind="segmentation",
    metric="intersection over union",
    about="Dice and cross entropy, six pictures in ten without any object, batch 4, Adam",
)
def faint_discs(seed: int, keeper: Keeper) -> float:
    """Measured on pictures that have a disc."""
    torch.manual_seed(seed)
    (images, masks), (test_images, test_masks) = scans(1200), scans(300)
    model = convolutions(1, 8, 8, 1)
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=3e-3))
    for rows in steps.batches(index_batches(len(images), 4, 800)):
        loss = dice_and_entropy(model(images[rows]), masks[rows])
        loss.backward()
        steps.step(loss)
    has_disc = test_masks.sum((1, 2, 3)) > 0
    with torch.no_grad():
        found, mask = model(test_images[has_disc]) > 0, test_masks[has_disc] > 0
    union = (found | mask).sum((1, 2, 3)).clamp_min(1)
    return float(((found & mask).sum((1, 2, 3)) / union).mean())


SIDE, CELL = 16, 4
GRID = SIDE // CELL


def stamp(kind: int, size: int) -> Tensor:
    """A full square, an empty one, or a cross."""
    shape = torch.ones(size, size)
    if kind == 1:
        shape[1:-1, 1:-1] = 0
    elif kind == 2:
        shape = torch.eye(size) + torch.eye(size).flip(0)
    return shape.clamp(max=1)


def scene() -> tuple[Tensor, Tensor]:
    """A picture with none to four shapes; by cell: whether one has its middle there, where, how large, which."""
    picture, truth = 0.15 * torch.randn(SIDE, SIDE), torch.zeros(5, GRID, GRID)
    for _ in range(int(torch.randint(0, 5, ()))):
        kind, size = int(torch.randint(3, ())), int(torch.randint(3, 7, ()))
        top, left = torch.randint(0, SIDE - size + 1, (2,)).tolist()
        row, column = (top + size / 2) / CELL, (left + size / 2) / CELL
        at = min(int(row), GRID - 1), min(int(column), GRID - 1)
        picture[top : top + size, left : left + size] += stamp(kind, size)
        truth[:, at[0], at[1]] = torch.tensor([1.0, row - at[0], column - at[1], size / CELL, kind])
    return picture[None], truth


def detection_loss(said: Tensor, truth: Tensor) -> Tensor:
    """Objectness over all cells; boxes and classes over those that have an object, of which there may be none."""
    has_object = truth[:, 0] > 0
    objectness = F.binary_cross_entropy_with_logits(said[:, 0], truth[:, 0], reduction="sum") / len(said)
    cells, wanted = said.permute(0, 2, 3, 1)[has_object], truth.permute(0, 2, 3, 1)[has_object]
    box = F.smooth_l1_loss(cells[:, 1:4], wanted[:, 1:4], reduction="sum")
    named = F.cross_entropy(cells[:, 4:], wanted[:, 4].long(), reduction="sum")
    return objectness + (5 * box + named) / has_object.sum().clamp_min(1)


def detection_f1(said: Tensor, truth: Tensor) -> float:
    """A cell is right that says there is an object where there is one, and names it."""
    says, has_object = said[:, 0] > 0, truth[:, 0] > 0
    right = (says & has_object & (said[:, 4:].argmax(1) == truth[:, 4].long())).sum()
    return float(2 * right / (says.sum() + has_object.sum()))


@training(
    kind="detection",
    metric="F1",
    about="objectness + 5 box + class on a grid, none to four objects a picture, batch 4, AdamW, clip 10",
)
def shapes_in_cells(seed: int, keeper: Keeper) -> float:
    """One box a cell, as the first of the single-shot detectors did it."""
    torch.manual_seed(seed)
    images, truths = (torch.stack(each) for each in zip(*(scene() for _ in range(1600)), strict=True))
    model = nn.Sequential(
        convolutions(1, 12), nn.ReLU(), nn.MaxPool2d(2), convolutions(12, 24), nn.ReLU(), nn.MaxPool2d(2),
        convolutions(24, 32, 7),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    steps = keeper.around(model, optimizer, clip=10.0)
    for rows in steps.batches(index_batches(1200, 4, 1000)):
        loss = detection_loss(model(images[rows]), truths[rows])
        loss.backward()
        steps.step(loss)
    with torch.no_grad():
        return detection_f1(model(images[1200:]), truths[1200:])
