"""A loss that follows the order of the data is said to, and is no trouble; a real rise on top of it is."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sealegs.diagnosis.curve.loss_curve import Floats
from sealegs.diagnosis.findings import look
from sealegs.record.columns import Columns
from sealegs.record.manifest import Manifest
from sealegs.record.run import Run, run_of

STEPS = 400


def run(loss: Floats, settings: dict[str, Any] | None = None, **more: Floats) -> Run:
    values = {"step": np.arange(1.0, len(loss) + 1), "loss": loss, **more}
    logged = {name: np.ones(len(loss), dtype=bool) for name in values}
    return run_of(Path("log"), Manifest(run_id="log", settings=settings or {}), Columns(values, logged))


def sorted_by_length(seed: int, *, batch: int = 8, epochs: int = 2) -> Floats:
    """Losses of batches as Hugging Face's ``group_by_length`` makes them: the samples of fifty batches, long to short,
    and long ones are easier."""
    draw = np.random.default_rng(seed)
    lengths = np.clip(draw.lognormal(5, 0.8, STEPS * batch), 8, 2048)
    order = []
    for _ in range(epochs):
        shuffled = draw.permutation(lengths).reshape(-1, 50 * batch)
        order.append(-np.sort(-shuffled, axis=1).reshape(-1))
    mean = np.log(np.concatenate(order)).reshape(-1, batch).mean(axis=1)
    steps = np.arange(len(mean))
    falling = 1.2 + 1.5 * np.exp(-steps / 60)
    return np.asarray(falling * (1 - 0.12 * (mean - 5)) * np.exp(0.05 * draw.normal(size=len(mean))))


@pytest.mark.parametrize("setting", [{"group_by_length": True}, {"train_sampling_strategy": "group_by_length"}])
def test_batches_that_are_sorted_by_length_are_a_saw_tooth(setting: dict[str, Any]) -> None:
    found = look(run(sorted_by_length(0), settings=setting))
    assert found.verdict == "healthy"
    assert "in each 50 steps: group_by_length" in found.notices[0]


def test_without_the_setting_or_without_the_order_nothing_is_said() -> None:
    unsaid = look(run(sorted_by_length(0)))
    shuffled = np.random.default_rng(1).permutation(sorted_by_length(0)[STEPS:])
    unsorted = look(run(shuffled, settings={"group_by_length": True}))
    assert not any("group_by_length" in text for text in (unsaid.because, *unsaid.notices))
    assert not any("in each" in text for text in (unsorted.because, *unsorted.notices))


def in_the_same_order(*, epochs: int = 3, rows: int = 27) -> tuple[Floats, Floats]:
    draw = np.random.default_rng(5)
    batch = np.exp(0.02 * draw.normal(size=rows))
    batch[8:12] *= 0.75  # easy ones, and hard ones after them
    batch[12:] *= 1.2
    steps = np.arange(rows * epochs)
    loss = (1 + 2 * np.exp(-steps / 8)) * np.tile(batch, epochs)
    return loss, (steps + 1) / rows


def test_an_epoch_in_the_same_order_comes_back_and_is_no_shift() -> None:
    loss, epoch = in_the_same_order()
    found = look(run(loss, epoch=epoch))
    assert found.incidents, "else there is nothing that the period explains"
    assert found.verdict == "healthy"
    assert "in each 27 steps: each epoch has the same batches in the same order" in found.because


def test_a_rise_above_the_tooth_is_one() -> None:
    loss, epoch = in_the_same_order(epochs=6)
    loss[120:] *= 3
    assert look(run(loss, epoch=epoch)).verdict != "healthy"


def test_epochs_that_are_shuffled_anew_say_nothing() -> None:
    loss, epoch = in_the_same_order(epochs=6)
    draw = np.random.default_rng(7)
    shuffled = np.concatenate([draw.permutation(loss[at : at + 27]) for at in range(0, len(loss), 27)])
    assert any("same order" in text for text in look(run(loss, epoch=epoch)).notices)
    assert not any("same order" in text for text in look(run(shuffled, epoch=epoch)).notices)
