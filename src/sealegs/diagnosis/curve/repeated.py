"""Rows of a loader that gave one batch again and again: what a model learns by heart says nothing about the loss."""

from dataclasses import replace

import numpy as np

from sealegs.detectors.repeated_batch import BEFORE
from sealegs.diagnosis.curve.loss_curve import Indices, LossCurve
from sealegs.record.run import Run

IN_A_ROW = 5
"""Times that one batch comes in a row, where none of those before it was that one, which no shuffled data do."""


def without_repeats(run: Run, curve: LossCurve) -> LossCurve:
    """The curve without the steps whose batch was trained on just before, where the loader was stuck for a while."""
    steps = repeated_steps(run)
    if not len(steps):
        return curve
    left = ~(np.isin(curve.steps, steps) & curve.stands)
    return replace(curve, steps=curve.steps[left], segments=curve.segments[left], losses=curve.losses[left])


def repeated_steps(run: Run) -> Indices:
    """Steps that had the batch of the step before, without those of a loader that was stuck to the end."""
    signal = next((name for name in ("batch_hash", "batch_index") if name in run.signals), None)
    if signal is None:
        return np.empty(0, np.int64)
    logged = np.flatnonzero(run.logged(signal, copy=False))
    values = run.column(signal, copy=False) if run.has_numbers(signal) else run.undecoded(signal)
    steps, batches = run.steps[logged], values[logged]
    edges = np.flatnonzero(np.concatenate([[True], batches[1:] != batches[:-1], [True]]))
    stuck: list[Indices] = []
    for at in np.flatnonzero(np.diff(edges) >= IN_A_ROW).tolist():
        first, end = int(edges[at]), int(edges[at + 1])
        if first > 0 and end < len(batches) and batches[first] not in batches[max(first - BEFORE, 0) : first]:
            stuck.append(steps[first + 1 : end])
    return np.concatenate(stuck) if stuck else np.empty(0, np.int64)
