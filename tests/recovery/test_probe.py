"""A batch that is tried again: what tells another way to compute gradients from damaged weights."""

import math

import pytest
import torch

from sealegs.recovery.probe import PROVEN_AFTER, Probe, factor_of

THEN = [1.0, 0.5, 3.0, 0.02, 1.0, 0.7, 2.0, 0.0, 5.0, 4.0]
"""One of them has no gradient."""


def times(*factors: float) -> list[float]:
    return [norm * factors[place % len(factors)] for place, norm in enumerate(THEN)]


@pytest.mark.parametrize("factor", [2.0, 8.0, 1e6])
def test_one_factor_in_every_tensor_is_found(factor: float) -> None:
    assert factor_of(THEN, times(factor)) == pytest.approx(factor)


def test_weights_move_a_little_meanwhile() -> None:
    assert factor_of(THEN, times(8 * 0.7, 8.0, 8 * 1.4)) == pytest.approx(8.0)


@pytest.mark.parametrize(
    "now",
    [
        times(1.0),
        times(0.125),
        [*times(8.0)[:-1], THEN[-1]],
        [*THEN[:-1], 8 * THEN[-1]],
        times(1.9, 2.0, 1.3),
        [*times(64.0)[:-1], 2.5 * 64.0 * THEN[-1]],
        [*times(8.0)[:-1], math.nan],
        [*times(8.0)[:-1], math.inf],
        [*times(8.0)[:-1], 0.0],
        times(8.0)[:-1],
        [32.0],
        [],
    ],
    ids=[
        "as it was",
        "smaller",
        "all but one",
        "only one",
        "twice, and one hardly",
        "one by far more",
        "nan",
        "inf",
        "gone",
        "another number of tensors",
        "one norm of all",
        "none",
    ],
)
def test_what_is_no_common_factor_is_none(now: list[float]) -> None:
    assert factor_of(THEN, now) is None


def test_what_was_not_finite_says_nothing() -> None:
    assert factor_of([*THEN, math.inf], [*times(8.0), math.inf]) is None


def test_few_tensors_say_nothing() -> None:
    assert factor_of(THEN[:7], times(8.0)[:7]) is None


@pytest.fixture(params=[0, 2], ids=["rows come at once", "rows come late"])
def probe(request: pytest.FixtureRequest) -> Probe:
    """Has a batch with a loss of 3, whose gradients had the norms above."""
    probe = Probe()
    norms = torch.tensor(THEN, dtype=torch.float64)
    row = {"loss": 3.0, "grad_norm": math.hypot(*THEN)}
    for step in range(1 + PROVEN_AFTER + request.param):
        probe.handed_out(f"batch {step}")
        probe.norms = norms
        if not request.param:
            probe.follow(row | {"step": step}, is_calm=True, is_doubtful=False)
        probe.after_step(step + 1, is_healthy=True)
        norms *= 1.5  # as a captured graph writes the next ones over them
        if 0 < request.param <= step:
            probe.follow(row | {"step": step - request.param}, is_calm=True, is_doubtful=False)
    assert probe.batch == "batch 0"
    return probe


@pytest.mark.parametrize(
    ("loss", "norms", "is_condemned"),
    [(3.0, times(8.0), False), (2.5, times(8.0), False), (3.05, times(8.0), True), (3.0, times(8.0, 1.0), True)],
    ids=["as it was", "lower", "a little dearer", "not alike"],
)
def test_a_common_factor_acquits_weights_only_where_the_loss_is_as_it_was(
    probe: Probe, loss: float, norms: list[float], is_condemned: bool
) -> None:
    found = probe.compared(loss, math.hypot(*norms), norms, 0.01)
    assert loss < found.loss_limit
    assert found.is_condemned == is_condemned
    assert found.factor == (None if is_condemned else pytest.approx(8.0))
    assert ("8.0 times what they were, in every tensor alike" in found.change) != is_condemned


def test_a_norm_that_has_hardly_grown_is_no_change(probe: Probe) -> None:
    found = probe.compared(3.0, math.hypot(*times(1.3)), times(1.3), 0.01)
    assert (found.factor, found.change, found.is_condemned) == (None, "", False)
