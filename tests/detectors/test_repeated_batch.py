"""A loader that gives one batch again and again."""

from collections.abc import Iterable

import numpy as np
import pytest

from sealegs.detectors.repeated_batch import BEFORE, FROM_THE_START, RepeatedBatch
from sealegs.errors import ConfigError
from sealegs.judge import begin, fold, standard
from sealegs.vocabulary import Finding, Row, Severity


def run(batches: Iterable[object]) -> dict[int, Finding]:
    detector = RepeatedBatch()
    state, out = detector.init(), {}
    for step, batch in enumerate(batches):
        row: Row = {"step": step, "batch_hash": str(batch)}
        if finding := detector.look(state, row):
            out[step] = finding
        state = detector.learn(state, row)
        assert len(state.before) <= BEFORE
    return out


def test_a_batch_that_comes_again_and_again_is_told_once() -> None:
    ((step, finding),) = run([*range(500), *[500] * 300, *range(501, 600)]).items()
    assert step == 504
    assert (finding.severity, finding.spoils_update) == (Severity.WATCH, False)
    assert str(finding) == "times that the loader has given one batch in a row: 5"
    assert list(run([*range(100), *[100] * 50, *range(101, 200), *[200] * 50])) == [104, 253]


@pytest.mark.parametrize(("few", "latest"), [(2, 12), (3, 16), (4, 20)])
def test_a_few_batches_in_turn_are_told_once(few: int, latest: int) -> None:
    turns = [500 + step % few for step in range(300)]
    ((step, finding),) = run([*range(500), *turns, *range(600, 700)]).items()
    assert 500 + few < step < 500 + latest
    assert (finding.severity, finding.spoils_update) == (Severity.WATCH, False)
    wanted = f"times that the loader has given one of the same {few} batches again, and no other: "
    assert str(finding).startswith(wanted)


@pytest.mark.parametrize(("batches", "epochs"), [(1, 4), (2, 4), (4, 4), (4, 10), (3, 5)])
def test_batches_that_are_gone_over_several_times_each_are_no_repetition(batches: int, epochs: int) -> None:
    """As in PPO, where each rollout is trained on for a few epochs; a habit is no fault."""
    told = run([batches * rollout + at for rollout in range(300) for _ in range(epochs) for at in range(batches)])
    assert all(step < 10 * batches * epochs for step in told), "only until the habit is known"


def test_the_judge_gives_a_notice_and_goes_on() -> None:
    detectors = standard()
    state, told = begin(detectors), []
    for step in range(200):
        row: Row = {"step": step, "loss": 2.0, "batch_hash": str(min(step, 150))}
        state, verdict = fold(detectors, state, row)
        assert verdict.go
        told += [finding.step for finding in verdict.findings if finding.detector == "repeated-batch"]
    assert told == [154]


@pytest.mark.parametrize("distinct", [2, 3, 10, 100])
@pytest.mark.parametrize("order", ["epochs", "shuffled epochs", "random"])
def test_data_of_few_batches_are_no_repetition(distinct: int, order: str) -> None:
    rng = np.random.default_rng(0)
    epochs = 20_000 // distinct
    if order == "random":
        batches = rng.integers(distinct, size=20_000)
    else:
        batches = np.concatenate(
            [rng.permutation(distinct) if order == "shuffled epochs" else np.arange(distinct) for _ in range(epochs)]
        )
    assert not run(batches)


def test_one_batch_that_is_overfitted_from_the_start_is_said_once_and_mildly() -> None:
    ((step, finding),) = run([0] * 1000).items()
    assert step == FROM_THE_START - 1
    assert "the only one since the start: 20" in str(finding)
    assert "expected" not in str(finding)


def test_rows_without_a_digest_tell_nothing() -> None:
    detector = RepeatedBatch()
    state = detector.init()
    for step in range(100):
        assert detector.look(state, {"step": step, "loss": 2.0}) is None
        state = detector.learn(state, {"step": step, "loss": 2.0})
    assert state == detector.init()


def test_a_chance_is_a_probability() -> None:
    with pytest.raises(ConfigError, match=r"RepeatedBatch\.chance=1"):
        RepeatedBatch(chance=1)
