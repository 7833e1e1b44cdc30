"""What the rows themselves prove, and what is asked about in any case."""

import math
from types import SimpleNamespace

import pytest

from sealegs.replay import fidelity
from sealegs.replay.arms import Arm, Kind
from sealegs.replay.experiment import Change, LossBefore, Outcome
from sealegs.replay.fidelity import Departure, _fitting_rate, departure, explained, ranks_apart
from sealegs.replay.subject import StepOutcome
from sealegs.replay.tested_causes import Tried, _is_open
from sealegs.vocabulary import Row


def row(step: int, differ: float | None, rank: int = 1, loss: float = 3.0) -> Row:
    compared = {} if differ is None else {"ranks_differ": differ, "differing_rank": float(rank)}
    return {"step": step, "loss": loss, **compared}


@pytest.mark.parametrize(("onset", "at"), [(0, 5), (5, 5), (6, None)])
def test_what_a_step_lacked_that_was_left_out_before_the_onset_is_of_another_incident(
    onset: int, at: int | None
) -> None:
    """Its update went nowhere, whether it was the first of the capsule or not."""
    rows = {step: {"loss": 3.0, "grad_norm": 1.5, "applied": 1} for step in range(5, 9)}
    rows[5] = {"loss": 3.0, "grad_norm": 1500.0, "applied": 0}
    rerun = SimpleNamespace(rows=rows, seen={step: StepOutcome(3.0, 1.5) for step in rows})
    found = departure(rerun, 0.0, onset)  # type: ignore[arg-type]
    assert (None if found is None else found.step) == at


def test_the_first_rank_with_other_weights_is_named() -> None:
    rows = [row(200, 0.0), row(299, None), row(300, 1.0), row(400, 1.0, rank=0)]
    told = ranks_apart(rows, 300)
    assert told is not None
    assert told.startswith("the ranks compared their weights at step 300, and rank 1 holds others than rank 0")
    first_is_odd = ranks_apart([row(300, 1.0, rank=0)], 300)
    assert first_is_odd is not None
    assert "rank 0 holds others than the rest" in first_is_odd


@pytest.mark.parametrize(
    "rows",
    [
        [row(200, 0.0), row(300, 0.0)],
        [row(200, 1.0), row(300, 1.0)],  # as ever
        [row(300, 1.0, loss=math.nan)],  # NaN of another pattern
        [row(299, None)],
    ],
    ids=["same", "before", "nan", "not compared"],
)
def test_ranks_that_are_the_same_or_were_others_before_explain_nothing(rows: list[Row]) -> None:
    assert ranks_apart(rows, 300) is None


def arm(cause: str, kind: Kind = "without") -> Arm:
    return Arm(name=cause, kind=kind, cause=cause, asks="damage", does=cause, change=Change())


def test_a_jump_of_the_rate_is_asked_about_also_where_other_batches_leave_nothing() -> None:
    """Batches from before were just learnt by heart, with that very rate: that they are cheap proves nothing."""
    high = Outcome(losses={}, grad_norms={}, height=30.0, damage=1.0)
    gone = Tried(arm=arm("bad-data-batch"), outcome=high, left=0.0, is_there=False, is_gone=True)
    assert _is_open(arm("lr-discontinuity"), high, None, [gone])
    assert _is_open(arm("lr-discontinuity", "with"), high, None, [gone])
    assert not _is_open(arm("lr-too-high"), high, None, [gone])


@pytest.mark.parametrize("factor", [0.3, 7.0, 41.0, 300.0])
def test_the_rate_that_was_used_is_found_though_larger_ones_lower_the_loss_first(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty times the rate is the best there is here, so most losses are those of two rates: the norm tells which."""

    def shown(rate: float) -> StepOutcome:
        return StepOutcome(3.6 + 0.002 * (rate - 20) ** 2, 1.0 + 0.05 * rate)

    monkeypatch.setattr(fidelity, "_after", lambda experiment, step, *, factor: shown(factor))
    was = shown(factor)
    experiment = SimpleNamespace(rows={8: {"loss": was.loss, "grad_norm": was.grad_norm}}, seen={8: shown(1.0)})
    left = Departure(step=8, signal="loss", was=was.loss, now=shown(1.0).loss, agreed=7)
    assert _fitting_rate(experiment, left) == pytest.approx(factor, rel=0.05)  # type: ignore[arg-type]


class Descent:
    """Gradient descent on x^2 / 2 + x^3 / 30, and a record of it in which step 7 had another rate, as had perhaps all
    after it; or in which it was as if, because somebody moved the weights, and did so again at step 8."""

    def __init__(self, *, rate: float, then: float = 1.0, moved_again: float = 0.0) -> None:
        self.loop, self.subject, self.steps_run = self, None, 0
        self.rows: dict[int, Row] = {}
        self.seen: dict[int, StepOutcome] = {}
        for step in range(10):
            self.go_to(step)
            self.seen[step] = self.look([])
        self.go_to(0)
        for step in range(10):
            loss, norm = self.look([])
            self.rows[step] = {"step": step, "loss": loss, "grad_norm": norm, "lr": 0.1, "applied": 1}
            self.step([], lr=0.1 * (rate if step == 7 else then if step > 7 else 1.0))
            self.x += moved_again if step == 8 else 0.0

    def batches_of(self, step: int) -> list[object]:
        return []

    def go_to(self, step: int) -> None:
        self.x = 8.0
        for _ in range(step):
            self.step([], lr=0.1)

    def step(self, batches: list[object], *, lr: float, applied: bool = True) -> None:
        self.x -= lr * (self.x + self.x**2 / 10) * applied

    def look(self, batches: list[object]) -> StepOutcome:
        return StepOutcome(1 + self.x**2 / 2 + self.x**3 / 30, abs(self.x + self.x**2 / 10))


@pytest.mark.parametrize(
    ("record", "factor"),
    [
        (Descent(rate=4.0), 4.0),
        (Descent(rate=4.0, then=4.0), 4.0),
        (Descent(rate=4.0, moved_again=3.0), None),
    ],
    ids=["of one step", "of all from there on", "weights that somebody moves"],
)
def test_a_rate_that_was_fitted_to_one_step_must_give_the_next_one_too(record: Descent, factor: float | None) -> None:
    was = float(record.rows[8]["loss"])
    left = Departure(step=8, signal="loss", was=was, now=record.seen[8].loss, agreed=7)
    found = _fitting_rate(record, left)  # type: ignore[arg-type]
    assert found == (factor if factor is None else pytest.approx(factor, abs=0.1))


@pytest.mark.parametrize(
    ("times", "later", "cause"),
    [
        (8.0, 7.1, "accumulation-denominator"),
        (8.0, 1.0, "corrupt-gradient"),
        (8.01, 8.0, "corrupt-gradient"),
        (1000.0, 1000.0, "corrupt-gradient"),
        (math.inf, math.nan, "corrupt-gradient"),
    ],
    ids=["summed", "of one step", "no whole number", "too many parts", "not finite"],
)
def test_a_gradient_of_whole_times_the_right_one_is_a_sum(times: float, later: float, cause: str) -> None:
    experiment = SimpleNamespace(
        rows={9: {"loss": 3.1, "grad_norm": 1.5 * later}},
        seen={8: StepOutcome(3.0, 1.25), 9: StepOutcome(3.0, 1.5)},
    )
    left = Departure(step=8, signal="grad_norm", was=1.25 * times, now=1.25, agreed=7)
    assert explained(experiment, left)[0] == cause  # type: ignore[arg-type]


@pytest.mark.parametrize(("off", "cause"), [(0.003, None), (0.5, "corrupt-weight"), (math.nan, "corrupt-weight")])
def test_a_loss_that_some_rate_explains_and_a_norm_that_none_does_is_no_other_rate(
    off: float, cause: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with gradients of the other sign: the loss goes up a little, and the norm, by a little, the wrong way."""

    def shown(rate: float) -> StepOutcome:
        return StepOutcome(3.0 + 0.01 * (1 - rate), 1.0 - 0.01 * (1 - rate))

    def after(experiment: object, step: int, *, factor: float = 1.0, before: object = None) -> StepOutcome:
        return shown(factor)

    monkeypatch.setattr(fidelity, "_after", after)
    experiment = SimpleNamespace(
        rows={8: {"loss": 3.0 + off, "grad_norm": 1.004}},
        seen={8: shown(1.0)},
        usual=LossBefore(3.0, 0.1, 1.0),
        hold=lambda step: None,
    )
    left = Departure(step=8, signal="loss", was=3.0 + off, now=3.0, agreed=7)
    found, because = explained(experiment, left)  # type: ignore[arg-type]
    assert found == cause
    assert ("by less than the noise of the loss" in because) == (cause is None)
