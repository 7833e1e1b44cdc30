"""A batch that is tried again: what tells another way to compute gradients from damaged weights."""

import math

import pytest
import torch

from sealegs.recovery.probe import APART, MOST_TRIED, PROVEN_AFTER, Noise, Probe, ProbeResult, factor_of, together

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
            probe.consider(row | {"step": step}, is_calm=True, is_doubtful=False)
        probe.after_step(step + 1, is_healthy=True)
        norms *= 1.5  # as a captured graph writes the next ones over them
        if 0 < request.param <= step:
            probe.consider(row | {"step": step - request.param}, is_calm=True, is_doubtful=False)
    assert probe.begin() == ["batch 0"]
    return probe


def shown(probe: Probe, loss: float, norms: list[float]) -> ProbeResult:
    found = probe.compared(loss, math.hypot(*norms), norms, Noise(loss=0.01))
    assert found is not None, "the only batch"
    return found


@pytest.mark.parametrize(
    ("loss", "norms", "is_condemned"),
    [(3.0, times(8.0), False), (2.5, times(8.0), False), (3.05, times(8.0), True), (3.0, times(8.0, 1.0), True)],
    ids=["as it was", "lower", "a little dearer", "not alike"],
)
def test_a_common_factor_acquits_weights_only_where_the_loss_is_as_it_was(
    probe: Probe, loss: float, norms: list[float], is_condemned: bool
) -> None:
    found = shown(probe, loss, norms)
    assert loss < found.loss_limit
    assert found.is_condemned == is_condemned
    assert found.factor == (None if is_condemned else pytest.approx(8.0))
    assert ("8.0 times what they were, in every tensor alike" in found.change) != is_condemned


def test_a_norm_that_has_hardly_grown_is_no_change(probe: Probe) -> None:
    found = shown(probe, 3.0, times(1.3))
    assert (found.factor, found.change, found.is_condemned) == (None, "", False)


def test_a_norm_that_is_noise_says_nothing(probe: Probe) -> None:
    norms = times(1.9, 1.0)  # not in every tensor alike
    then, now = math.hypot(*THEN), math.hypot(*norms)
    assert 1.5 < now / then < 2
    quiet = probe.compared(3.0, now, norms, Noise(0.01, 0.1))
    assert quiet is not None
    assert quiet.is_condemned, "a norm that hardly moves by itself has grown by half"
    probe.begin()
    noisy = probe.compared(3.0, now, norms, Noise(0.01, 0.25))
    assert noisy is not None
    assert not noisy.is_condemned, "three scales are more"
    probe.begin()
    grown = probe.compared(3.0, 9 * now, times(17.1, 1.0), Noise(0.01, 0.25))
    assert grown is not None
    assert grown.is_condemned


def after(steps: int, *, doubtful: range = range(0), infinite: range = range(0)) -> Probe:
    """Batches that are numbers, and have a loss of 2 more than that."""
    probe = Probe()
    for step in range(steps):
        probe.handed_out(step)
        is_doubtful = step in doubtful
        row = {"step": step, "loss": step + 2.0, "grad_norm": 1.0}
        probe.consider(row, is_calm=step not in infinite, is_doubtful=is_doubtful)
        probe.after_step(step + 1, is_healthy=not is_doubtful)
    return probe


def test_the_first_batches_are_near_each_other_and_later_ones_take_the_place_of_the_oldest() -> None:
    assert after(PROVEN_AFTER).begin() == []
    assert after(PROVEN_AFTER + 1).begin() == [0]
    assert after(PROVEN_AFTER + 2 * APART + 1).begin() == [0, APART, 2 * APART]
    late = after(500).begin()
    assert len(late) == MOST_TRIED
    assert all(PROVEN_AFTER <= 499 - batch <= (1 + MOST_TRIED) * PROVEN_AFTER for batch in late)


def test_what_was_not_proven_before_doubt_never_is() -> None:
    probe = after(100, doubtful=range(APART + PROVEN_AFTER, 100))
    assert probe.begin() == [0], "the one that was"
    assert after(100, doubtful=range(APART, 60)).begin() == [60, 60 + APART, 60 + 2 * APART]
    assert 0 not in after(40, infinite=range(1)).begin(), "an incident was open"


def test_a_trial_is_over_with_its_last_batch_and_each_is_compared_with_itself() -> None:
    probe = after(PROVEN_AFTER + 2 * APART + 1)
    batches = probe.begin()
    found = [probe.compared(1.5 * (batch + 2.0), 3.0, [3.0], Noise(loss=0.01)) for batch in batches]
    assert found[:-1] == [None, None]
    last = found[-1]
    assert last is not None
    assert last.tried == MOST_TRIED
    assert (last.rise, last.grad_norm) == pytest.approx((math.log(1.5), 3.0))
    assert last.is_condemned
    assert str(last).startswith("3 batches from before have a mean loss of ")
    assert probe.begin() == batches, "another trial begins anew"
    assert probe.compared(2.0, 1.0, [1.0], Noise(loss=0.01)) is None


def found(loss: float, norm: float | None = 1.0, factor: float | None = None) -> ProbeResult:
    return ProbeResult(loss, 3.0, 3.3, norm, 1.0, 1.5, factor)


def test_one_batch_of_three_does_not_condemn_and_one_that_is_not_finite_does() -> None:
    assert not together([found(3.0), found(2.9), found(3.4)]).is_condemned
    assert together([found(3.0), found(3.6), found(3.4)]).is_condemned
    for loss in (math.nan, math.inf):
        assert together([found(3.0), found(loss), found(3.0)]).is_condemned
    assert together([found(3.0), found(3.0, 1e6)]).norm_has_grown
    assert not together([found(3.0, 0.0), found(3.0, 0.0)]).norm_has_grown
    assert together([found(3.0), found(3.0, None)]).grad_norm is None


def test_most_batches_have_to_show_a_common_factor() -> None:
    summed, other = found(3.0, 8.0, 8.0), found(3.0, 8.0)
    assert together([summed, other, summed]).change
    assert not together([summed, other, summed]).is_condemned
    assert together([summed, other]).is_condemned
    assert together([other, other, summed]).is_condemned


def test_a_batch_whose_loss_or_gradient_is_gone_tells_nothing_beside_others() -> None:
    gone = ProbeResult(0.0, 0.01, 0.0103, 1.0, 1.0, 1.5, None)
    assert not together([gone, found(3.0), found(3.0)]).is_condemned
    assert together([gone, found(30.0), found(30.0)]).is_condemned
    without_gradient = ProbeResult(3.0, 3.0, 3.3, 0.0, 0.001, 0.0015, None)
    assert not together([without_gradient, found(3.0), found(3.0)]).is_condemned
    assert together([without_gradient, found(3.0, 9.0), found(3.0, 9.0)]).is_condemned


@pytest.mark.parametrize(("loss", "norm"), [(0.0, 1.0), (-1.0, 1.0), (3.0, 0.0)])
def test_a_batch_without_a_loss_or_a_gradient_is_none_to_compare_with(loss: float, norm: float) -> None:
    probe = Probe()
    for step in range(2 * PROVEN_AFTER):
        probe.handed_out(step)
        row = {"step": step, "loss": loss, "grad_norm": norm}
        probe.consider(row, is_calm=True, is_doubtful=False)
        probe.after_step(step + 1, is_healthy=True)
    assert probe.begin() == []


def test_batches_of_steps_that_are_to_be_done_again_are_forgotten() -> None:
    probe = after(100)
    kept = probe.begin()
    probe.forget_from(kept[1])
    assert probe.begin() == kept[:1]
    for step in range(kept[1], kept[1] + 60):
        probe.handed_out(f"again {step}")
        probe.consider({"step": step, "loss": 2.0, "grad_norm": 1.0}, is_calm=True, is_doubtful=False)
        probe.after_step(step + 1, is_healthy=True)
    assert all(str(batch).startswith("again") for batch in probe.begin())


@pytest.mark.parametrize(("loss", "is_gross"), [(1.01, True), (8.0, True), (30.0, False)])
def test_gradients_that_have_grown_less_than_the_loss_are_no_damage_of_their_own(loss: float, is_gross: bool) -> None:
    """Twenty times as large: of a loss that was next to nothing both grow by orders of magnitude."""
    found = ProbeResult(
        loss=loss, loss_then=1.0, loss_limit=1.1, grad_norm=20.0, grad_norm_then=1.0, grad_norm_limit=1.5, factor=None
    )
    assert found.norm_has_grown
    assert found.norm_is_gross == is_gross
