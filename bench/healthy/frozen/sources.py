"""What several of the frozen trainings learn from: handwritten digits, the text of the standard library, shuffles."""

import sysconfig
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from sklearn import datasets, metrics  # type: ignore[import-untyped,unused-ignore]
from torch import Tensor


class Split(NamedTuple):
    """Rows to learn from and rows held out."""

    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor


def split(inputs: Tensor, targets: Tensor, test_share: float) -> Split:
    """Hold a share of the rows out, drawn from torch's generator."""
    order = torch.randperm(len(inputs))
    held = round(test_share * len(inputs))
    test, train = order[:held], order[held:]
    return Split(inputs[train], targets[train], inputs[test], targets[test])


def standardized(whole: Split) -> Split:
    """The inputs in units of the training rows' own mean and deviation."""
    mean, deviation = whole.inputs.mean(0), whole.inputs.std(0).clamp_min(1e-6)
    return whole._replace(inputs=(whole.inputs - mean) / deviation, test_inputs=(whole.test_inputs - mean) / deviation)


def digits(test_share: float = 0.25) -> Split:
    """scikit-learn's 1,797 handwritten digits, 64 pixels each between 0 and 1."""
    pixels, labels = datasets.load_digits(return_X_y=True)
    return split(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels), test_share)


def diabetes() -> Split:
    """scikit-learn's 442 patients, ten columns; what is predicted is the disease a year later, raw."""
    columns, progression = datasets.load_diabetes(return_X_y=True)
    return split(torch.tensor(columns, dtype=torch.float32), torch.tensor(progression, dtype=torch.float32), 0.2)


def wine() -> Split:
    """scikit-learn's 178 wines of three growers."""
    columns, grower = datasets.load_wine(return_X_y=True)
    return split(torch.tensor(columns, dtype=torch.float32), torch.tensor(grower), 0.25)


def index_batches(rows: int, batch: int, steps: int) -> list[Tensor]:
    """Row numbers for so many steps: every epoch in a new order, its ragged end dropped."""
    batches: list[Tensor] = []
    while len(batches) < steps:
        order = torch.randperm(rows)
        batches.extend(order[start : start + batch] for start in range(0, rows - batch + 1, batch))
    return batches[:steps]


@lru_cache
def stdlib_text(*files: str) -> str:
    """The source of modules of the standard library, one after the other."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return "\n".join((root / file).read_text(encoding="utf-8") for file in files)


def average_precision(scores: Tensor, is_positive: Tensor) -> float:
    """Area under precision over recall."""
    return float(metrics.average_precision_score(is_positive.numpy(), scores.detach().numpy()))


def roc_auc(scores: Tensor, is_positive: Tensor) -> float:
    """Area under the receiver's curve."""
    return float(metrics.roc_auc_score(is_positive.numpy(), scores.detach().numpy()))


def macro_recall(predicted: Tensor, labels: Tensor) -> float:
    """Recall of every class, averaged."""
    return float(metrics.balanced_accuracy_score(labels.numpy(), predicted.numpy()))


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Share of rows whose largest logit is the label's."""
    return float((logits.argmax(-1) == labels).float().mean())


def r_squared(predicted: Tensor, wanted: Tensor) -> float:
    """Share of the targets' variance that is explained."""
    return 1.0 - float(((predicted - wanted) ** 2).mean() / wanted.var(correction=0))


def ranks_gini(predicted: Tensor, wanted: Tensor) -> float:
    """Gini index of targets ordered by prediction, as a share of what ordering by themselves would give."""

    def gini(order: Sequence[int]) -> float:
        share = np.cumsum(wanted.numpy()[order]) / float(wanted.sum())
        return float(0.5 - share.mean())

    by_prediction, by_target = np.argsort(predicted.detach().numpy()), np.argsort(wanted.numpy())
    return gini(by_prediction.tolist()) / gini(by_target.tolist())
