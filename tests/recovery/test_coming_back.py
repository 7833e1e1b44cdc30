"""Trouble after a treatment, in small loops with a real guard: is it the same, has it helped, how far back to go?"""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from sealegs import Guard, Playbook
from sealegs.errors import ConfigError, RunHalted
from sealegs.guard_options import Checkpointing, Telemetry
from sealegs.record.events import load_events
from sealegs.recovery.actions import Rollback
from sealegs.recovery.evidence import HEALING
from sealegs.recovery.playbook import Rung
from sealegs.recovery.recurrence import Trigger

STANDARD: dict[str, Any] = {"playbook": Playbook.standard(), "telemetry": Telemetry(sample_every=0)}


def data(count: int = 1200) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(32, 8, generator=generator) for _ in range(count)]


def small(lr: float = 1e-3) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    wanted = batch.sum(1, keepdim=True) + 0.5 * torch.sin(9 * batch[:, :1])
    loss: Tensor = (model(batch) - wanted).square().mean()
    return loss


def train(guard: Guard, model: nn.Module, until: int, bad: Any = lambda guard: 1.0) -> None:
    """Up to a step; ``bad`` gives what a loss is multiplied with, unless a batch is only tried again."""
    for batch in guard.batches(data()):
        loss = loss_of(model, batch) * (1.0 if guard.loop.data.is_probe else bad(guard))
        loss.backward()
        guard.step(loss)
        if guard.number >= until:
            break


def once(*steps: int) -> Any:
    """NaN at these steps, when they come for the first time."""
    left = set(steps)

    def bad(guard: Guard) -> float:
        if guard.number not in left:
            return 1.0
        left.discard(guard.number)
        return math.nan

    return bad


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    return [
        {"kind": e.kind, "step": e.step, **e.detail} for e in load_events(folder / "events.jsonl") if e.kind in kinds
    ]


def rungs(folder: Path) -> list[str]:
    return [each["decided_by"].rpartition(" ")[2] for each in events(folder, "intervention")]


# Is it the same trouble?


def test_what_comes_long_after_a_recovery_is_new_trouble(tmp_path: Path) -> None:
    """Two bursts of NaN, four hundred healthy steps apart: each is worth a short way back, and no more."""
    model, optimizer = small()
    with Guard(model, optimizer, run=tmp_path / "a", **STANDARD) as guard:
        train(guard, model, 600, once(110, 111, 112, 520, 521, 522))
    assert rungs(tmp_path / "a") == ["3", "3"]
    assert all(each["step"] - each["to_step"] < 100 for each in events(tmp_path / "a", "intervention"))


def test_what_comes_again_and_again_is_a_pattern(tmp_path: Path) -> None:
    """The third burst like two before it, each within a thousand steps of the last, is no chance any more."""
    model, optimizer = small()
    with Guard(model, optimizer, run=tmp_path / "a", **STANDARD, checkpoint_every=50) as guard:
        train(guard, model, 750, once(110, 111, 112, 320, 321, 322, 530, 531, 532))
        assert guard.loop.recovery is not None
        assert [intervention.recovered is not None for intervention in guard.loop.recovery._ledger.history] == [
            True
        ] * 3
    assert rungs(tmp_path / "a") == ["3", "3", "4"]


def test_what_comes_back_before_the_run_has_recovered_is_the_same(tmp_path: Path) -> None:
    model, optimizer = small()
    with Guard(model, optimizer, run=tmp_path / "a", **STANDARD, checkpoint_every=50) as guard:
        train(guard, model, 230, once(210, 211, 212))
        train(guard, model, 300, once(235, 236, 237))
    assert rungs(tmp_path / "a") == ["3", "4"]


def one_ahead(batches: Iterable[Tensor]) -> Iterator[Tensor]:
    """A loop that reads a batch before it has trained on the last one: nothing can be tried in between."""
    yield from (earlier for earlier, _ in pairwise(batches))


def damaged(run: Path, worse: Callable[[int], float], until: int) -> Guard:
    """A run whose losses are multiplied from step 400 on, until it goes back."""
    model, optimizer = small()
    steps = 0
    with Guard(model, optimizer, run=run, **STANDARD, checkpoint_every=50) as guard:
        for batch in one_ahead(guard.batches(data(1400))):
            steps += 1
            has_gone_back = guard.number < steps - 1
            loss = loss_of(model, batch) * (worse(steps - 400) if steps > 400 and not has_gone_back else 1.0)
            loss.backward()
            guard.step(loss)
            if steps == until:
                break
    return guard


@pytest.mark.filterwarnings("ignore::sealegs.errors.RunEndedBadly")  # once it has gone back
def test_a_loss_that_comes_down_for_500_steps_and_is_still_above_the_beginning_is_not_waited_for_again(
    tmp_path: Path,
) -> None:
    """Nobody looks after that: the run would stay there to its end. And what the rollback has brought back has not
    come back by itself, so that no later rise is excused by it."""
    guard = damaged(tmp_path / "a", lambda since: 300 * 0.9992**since, 1150)
    assert guard.loop.recovery is not None
    assert guard.loop.recovery._tracker.evidence.wander[0] < math.log(10), "it rose 300-fold"
    looked = [each["text"].rpartition(", ")[2] for each in events(tmp_path / "a", "incident-look")]
    assert looked == ["is coming down: waited"] * 2
    (back,) = events(tmp_path / "a", "intervention")
    assert back["to_step"] <= 400 < 880 < back["step"]
    assert "comes down too slowly: it is above that of the run's beginning" in str(back)


@pytest.mark.filterwarnings("ignore::sealegs.errors.RunEndedBadly")  # once it has gone back
def test_what_an_earlier_probe_found_sound_does_not_excuse_a_leap_that_comes_after_it(tmp_path: Path) -> None:
    """Twelve batches cost more, and a probe acquits the weights. Eighty steps later the loop breaks them, so that no
    batch can be tried: that is another incident, and a loss that stays up is brought back."""
    model, optimizer = small()
    with Guard(model, optimizer, run=tmp_path / "a", **STANDARD) as guard:
        for batch in guard.batches(data()):
            if guard.number >= 400 and not guard.is_probe:
                with torch.no_grad():
                    for weight in model.parameters():
                        weight.fill_(2.0)
            loss = loss_of(model, batch) * (3.0 if 308 <= guard.number < 320 and not guard.is_probe else 1.0)
            loss.backward()
            before = guard.number
            guard.step(loss)
            if guard.number < before or guard.number >= 460:
                break
    first, second = events(tmp_path / "a", "alarm")
    assert (308 <= first["step"] < 320, second["step"]) == (True, 400)
    assert [probe["is_condemned"] for probe in events(tmp_path / "a", "probe") if probe["step"] < 400] == [False]
    done = events(tmp_path / "a", "intervention")
    assert [(each["trigger"], each["onset"]) for each in done] == [("not-recovering", 400)]


# Has it helped?


@pytest.mark.filterwarnings("ignore::sealegs.errors.RunEndedBadly")
def test_nothing_has_helped_while_the_loss_is_not_back(tmp_path: Path) -> None:
    """After the rollback the loss is nine times what it was, and is got used to: updates are applied, and that is no
    recovery."""
    model, optimizer = small()
    playbook = Playbook(name="mine", rungs=(Rung({Trigger.NONFINITE_OFTEN}, (Rollback(back=0, skip=5),)),))
    nans = once(310, 311, 312)

    def bad(guard: Guard) -> float:
        factor: float = nans(guard)
        has_gone_back = bool(guard.loop.recovery and guard.loop.recovery._ledger.history)
        return 9.0 if has_gone_back and guard.number >= 310 else factor

    with Guard(model, optimizer, run=tmp_path / "a", playbook=playbook, telemetry=Telemetry(sample_every=0)) as guard:
        train(guard, model, 500, bad)
    assert len(events(tmp_path / "a", "intervention")) == 1
    assert "helped" not in [each["result"] for each in events(tmp_path / "a", "outcome")]


# What it is, and where it goes back to.


def test_what_comes_back_at_the_same_step_is_asked_about_each_time(tmp_path: Path) -> None:
    """A schedule that multiplies the rate by 1000 from step 300 on: after a rollback it does so again. Weights that are
    damaged once more are found after a few steps, not after fifty, and the ladder ends in a halt."""
    model, optimizer = small()
    rungs_ = tuple(Rung({Trigger.DAMAGED}, (Rollback(back=back, skip=skip),)) for back, skip in ((0, 10), (100, 50)))
    words = STANDARD | {"playbook": Playbook(name="mine", rungs=rungs_)}
    schedule = LambdaLR(optimizer, lambda step: 1000.0 if step >= 300 else 1.0)
    words |= {"scheduler": schedule, "checkpoint_every": Checkpointing(every=50, keep=9)}
    with pytest.raises(RunHalted, match="damaged"), Guard(model, optimizer, run=tmp_path / "a", **words) as guard:
        train(guard, model, 800)
    done = events(tmp_path / "a", "intervention")
    assert [each["trigger"] for each in done] == ["damaged"] * len(done)
    assert len(events(tmp_path / "a", "probe")) == 2 * len(done) >= 6, "at the first surprise, and at the fifth"
    assert all(each["step"] <= 310 + HEALING for each in done)
    assert "helped" not in [each["result"] for each in events(tmp_path / "a", "outcome")]


@pytest.mark.parametrize("every", [0, 50], ids=["without checkpoints", "with checkpoints"])
def test_a_rung_goes_back_as_far_as_it_says_or_is_passed_over(every: int, tmp_path: Path) -> None:
    """NaN whenever step 310 comes: the second rung wants a hundred steps, and snapshots are never that old."""
    model, optimizer = small()
    rungs_ = [Rung({Trigger.NONFINITE_OFTEN}, (Rollback(back=back, skip=0),)) for back in (0, 100, 200)]
    playbook = Playbook(name="mine", rungs=tuple(rungs_))
    with (
        pytest.raises(RunHalted),
        Guard(
            model,
            optimizer,
            run=tmp_path / "a",
            playbook=playbook,
            checkpoint_every=every,
            telemetry=Telemetry(sample_every=0),
        ) as guard,
    ):
        train(guard, model, 400, lambda guard: math.nan if guard.number >= 310 else 1.0)
    done = [each for each in events(tmp_path / "a", "intervention") if each["text"].startswith("roll back")]
    passed = events(tmp_path / "a", "rung-passed-over")
    for each in done:
        assert each["onset"] - each["to_step"] > each["actions"][0]["back"]
    if every:
        assert [each["actions"][0]["back"] for each in done] == [0, 100, 200]
        assert not passed
    else:
        assert [each["rung"] for each in passed] == [2]
        assert "steps 0, 250, none but the very beginning is at least 100 steps before step 310" in passed[0]["reason"]
        assert [each["to_step"] for each in done] == [250, 0], "the beginning is less than twice as far as 200"


def test_each_restart_of_one_incident_goes_further_back_than_the_last(tmp_path: Path) -> None:
    """NaN whenever step 270 comes: the run is shorter than the thousand steps of the last rung, and begins anew."""
    model, optimizer = small()
    with (
        pytest.raises(RunHalted),
        Guard(model, optimizer, run=tmp_path / "a", checkpoint_every=50, **STANDARD) as guard,
    ):
        train(guard, model, 400, lambda guard: math.nan if guard.number >= 270 else 1.0)
    *done, halt = events(tmp_path / "a", "intervention")
    distances = [each["onset"] - each["to_step"] for each in done]
    assert len(distances) == 3
    assert distances == sorted(distances)
    assert distances[-1] == 270
    assert "goes back 270 steps instead of 1000: the run had 270 steps" in done[-1]["because"]
    assert "from scratch, since no later state is healthy and old enough" in done[-1]["changed"]
    assert halt["text"].startswith("halt")


def test_nobody_begins_anew_who_asks_for_a_hundred_steps(tmp_path: Path) -> None:
    """Step 0 is kept, and at step 350 it is far more than a hundred steps before."""
    model, optimizer = small()
    with Guard(model, optimizer, run=tmp_path / "a", **STANDARD) as guard:
        train(guard, model, 350)
        with pytest.raises(ConfigError, match="none but the very beginning is at least 100 steps before"):
            guard.ask("rollback", "100")
        assert guard.number == 350
        guard.ask("rollback", "300")
        assert guard.number == 0
