"""Finds the rows and tokens that carry the loss of the batch at an onset, and shows them as text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sealegs.replay.arms import counts_of, tail_of
from sealegs.replay.experiment import Experiment
from sealegs.replay.subject import Text

MOST = 8
"""The most rows, and the most tokens, that are named."""
AROUND = 12
"""Tokens of text shown on either side of the highest-loss one."""
NGRAM = 4
"""Consecutive tokens that make a repetition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HighLossToken:
    """A token of the vocabulary whose loss is above that of the tokens before."""

    token: int
    text: str
    times: int
    """Occurrences in the batch."""
    before: int
    """Occurrences in the batches before, or in the corpus where its counts are known."""
    loss: float
    """Its mean loss."""
    share: float
    """Share of the batch's excess loss over the usual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HighLossRow:
    """A row of the batch."""

    row: int
    origin: str
    """The source of the row, where the batch names it."""
    loss: float
    grad_norm: float
    """Gradient norm of this row alone."""
    share: float
    """Share of the batch's excess loss over the usual."""
    repeated: float
    """Share of its 4-grams that occur more than once: near 1 for text that repeats itself."""
    rare: float
    """Share of its tokens that are rare."""
    text: str
    """The text around its highest-loss token, which is marked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spotlight:
    """The rows and tokens that make the loss of a batch high."""

    step: int
    loss: float
    usual: float
    """Mean loss of the tokens of batches before, with the same weights."""
    rows: tuple[HighLossRow, ...]
    tokens: tuple[HighLossToken, ...]
    histogram: tuple[int, ...]
    """Losses of the batch's tokens in bins of half a nat."""
    histogram_before: tuple[int, ...]
    """Losses of the tokens of batches before, in the same bins."""


def spotlight(experiment: Experiment, step: int) -> Spotlight | None:
    """Look at the batch of a step with the weights of that step; None where batches are not text."""
    text, before = experiment.loop.subject.text, experiment.before()
    if text is None or not before:
        return None
    experiment.go_to(step)
    with torch.no_grad():
        usual = torch.cat([_losses(text, batch) for batches in before[-4:] for batch in batches])
        batches = experiment.batches_of(step)
        losses = torch.cat([text.losses(batch).detach().float().cpu() for batch in batches])
        targets = torch.cat([text.targets(batch).cpu() for batch in batches])
    counts = counts_of(experiment)
    assert counts is not None
    counted = targets >= 0
    excess = torch.where(counted, losses - usual.mean(), 0.0)
    total = max(float(excess.clamp(min=0).sum()), 1e-12)
    experiment.steps_run += len(before[-4:]) + 1
    return Spotlight(
        step=step,
        loss=float(losses[counted].mean()),
        usual=float(usual.mean()),
        rows=_rows(experiment, text, batches, targets, losses, excess, total),
        tokens=_tokens(text, targets, losses, excess, total, counts),
        histogram=_histogram(losses[counted]),
        histogram_before=_histogram(usual),
    )


def has_no_target(experiment: Experiment, step: int) -> bool:
    """Whether every target of a step's batches is left out of the loss."""
    text = experiment.loop.subject.text
    return text is not None and not any(bool((text.targets(each) >= 0).any()) for each in experiment.batches_of(step))


def _losses(text: Text, batch: Any) -> Tensor:
    return text.losses(batch).detach().float().cpu()[text.targets(batch).cpu() >= 0]


def _tokens(
    text: Text, targets: Tensor, losses: Tensor, excess: Tensor, total: float, counts: Tensor
) -> tuple[HighLossToken, ...]:
    kinds, places = targets.clamp(min=0).unique(return_inverse=True)
    counted = (targets >= 0).flatten().float()
    cost = torch.zeros(len(kinds)).scatter_add_(0, places.flatten(), excess.flatten() * counted)
    times = torch.zeros(len(kinds)).scatter_add_(0, places.flatten(), counted)
    summed = torch.zeros(len(kinds)).scatter_add_(0, places.flatten(), losses.flatten() * counted)
    highest = [place for place in cost.argsort(descending=True)[:MOST].tolist() if cost[place] > 0]
    return tuple(
        HighLossToken(
            token=int(kinds[place]),
            text=text.spell([int(kinds[place])]),
            times=int(times[place]),
            before=int(counts[kinds[place]]) if kinds[place] < len(counts) else 0,
            loss=float(summed[place] / times[place]),
            share=float(cost[place]) / total,
        )
        for place in highest
    )


def _rows(
    experiment: Experiment,
    text: Text,
    batches: Sequence[Any],
    targets: Tensor,
    losses: Tensor,
    excess: Tensor,
    total: float,
) -> tuple[HighLossRow, ...]:
    of_rows = excess.sum(dim=1)
    tail = tail_of(experiment)
    found = []
    for row in of_rows.argsort(descending=True)[:MOST].tolist():
        if of_rows[row] <= 0:
            break
        counted = targets[row] >= 0
        ids = targets[row][counted]
        found.append(
            HighLossRow(
                row=row,
                origin=_origin(batches, row),
                loss=float(losses[row][counted].mean()),
                grad_norm=_alone(experiment, text, batches, row),
                share=float(of_rows[row]) / total,
                repeated=repetition(ids.tolist()),
                rare=0.0 if tail is None else float(tail.are_rare(ids).float().mean()),
                text=_excerpt(text, ids.tolist(), int(losses[row][counted].argmax())),
            )
        )
    return tuple(found)


def _alone(experiment: Experiment, text: Text, batches: Sequence[Any], row: int) -> float:
    """The gradient norm of one row: the other rows do not count."""
    for batch in batches:
        rows = len(text.targets(batch))
        if row < rows:
            others = torch.ones_like(text.targets(batch), dtype=torch.bool)
            others[row] = False
            experiment.steps_run += 1
            return experiment.loop.look((text.without(batch, others),)).grad_norm
        row -= rows
    raise AssertionError(row)


def repetition(ids: Sequence[int]) -> float:
    """The share of 4-grams that occur more than once.

    >>> repetition([1, 2, 3, 4, 5, 6, 7, 8]), repetition([1, 2] * 8)
    (0.0, 1.0)
    """
    runs = [tuple(ids[place : place + NGRAM]) for place in range(len(ids) - NGRAM + 1)]
    return sum(runs.count(run) > 1 for run in runs) / len(runs) if runs else 0.0


def _origin(batches: Sequence[Any], row: int) -> str:
    """What the lab's batches say about the source of a row; those of another loop may call anything ``rows``."""
    of_batches = (batch.get("rows") for batch in batches if isinstance(batch, dict))
    rows = [origin for origins in of_batches if isinstance(origins, list | tuple) for origin in origins]
    match rows[row : row + 1]:
        case [{"source": str(source), "documents": [int(first), int(after)]}]:
            return f"{source}, " + (f"document {first}" if after == first + 1 else f"documents {first} to {after - 1}")
    return ""


def _excerpt(text: Text, ids: Sequence[int], highest: int) -> str:
    before, after = ids[max(highest - AROUND, 0) : highest], ids[highest + 1 : highest + 1 + AROUND]
    return f"{text.spell(before)}[{text.spell([ids[highest]])}]{text.spell(after)}"


def _histogram(losses: Tensor) -> tuple[int, ...]:
    """Counts of losses in 32 bins of half a nat from 0 to 16; the 33rd has all above."""
    bins = (losses.nan_to_num(nan=99.0).clamp(min=0) * 2).long().clamp(max=32)
    return tuple(torch.bincount(bins, minlength=33).tolist())
