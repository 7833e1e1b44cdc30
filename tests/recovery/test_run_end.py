"""How a run ends: well, or with a warning that nobody overlooks and an exit status that says so."""

import contextlib
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import sealegs
from sealegs import Guard, Playbook, RunEndedBadly
from sealegs.cli import train as command
from sealegs.errors import RunHalted
from sealegs.guard_options import Telemetry
from sealegs.playbook import Rollback, Rung, Trigger
from sealegs.recovery.ledger import read_ledger


def data(count: int = 500) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(32, 8, generator=generator) for _ in range(count)]


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(guard: Guard, model: nn.Module, until: int, bad: Any = lambda guard: 1.0) -> None:
    for batch in guard.batches(data()):
        wanted = batch.sum(1, keepdim=True) + 0.5 * torch.sin(9 * batch[:, :1])
        loss = (model(batch) - wanted).square().mean() * bad(guard)
        loss.backward()
        guard.step(loss)
        if guard.number >= until:
            break


def ends(folder: Path) -> list[dict[str, Any]]:
    return [dict(event.detail) for event in sealegs.open_run(folder).events if event.kind == "end"]


def schedule(optimizer: torch.optim.Optimizer) -> LambdaLR:
    """With a bug: the rate is multiplied by 1000 from step 300 on."""
    return LambdaLR(optimizer, lambda step: 1000.0 if step >= 300 else 1.0)


@pytest.mark.parametrize("words", [{}, {"act": False}, {"playbook": Playbook.observe()}], ids=str)
def test_a_run_that_never_came_back_is_warned_of(words: dict[str, Any], tmp_path: Path) -> None:
    """Whatever is done about it, or is not: the loop goes on to its end, and nobody looks, unless somebody is told."""
    model, optimizer = small()
    told = tmp_path / "told"
    words = words | {"scheduler": schedule(optimizer), "telemetry": Telemetry(notify=["tee", "-a", str(told)])}
    with (
        pytest.warns(RunEndedBadly, match="the run ended badly"),
        Guard(model, optimizer, run=tmp_path / "a", **words) as guard,
    ):
        train(guard, model, 500)
    assert guard.ended_badly
    (end,) = ends(tmp_path / "a")
    assert (end["reason"], end["why"]) == ("ended-badly", guard.ended_badly)
    assert "a: ended-badly" in told.read_text()


def test_with_a_playbook_it_is_halted_before(tmp_path: Path) -> None:
    model, optimizer = small()
    playbook = Playbook(name="mine", rungs=(Rung({Trigger.DAMAGED}, (Rollback(),)),))
    words: dict[str, Any] = {"scheduler": schedule(optimizer), "playbook": playbook}
    with pytest.raises(RunHalted), Guard(model, optimizer, run=tmp_path / "a", **words) as guard:
        train(guard, model, 500)
    assert [end["reason"] for end in ends(tmp_path / "a")] == ["halted"]


def test_a_weight_that_is_not_finite_is_warned_of(tmp_path: Path) -> None:
    model, optimizer = small()
    guard = Guard(model, optimizer, run=None, telemetry=Telemetry(sample_every=0))
    train(guard, model, 20)
    with torch.no_grad():
        next(model.parameters())[0, 0] = math.inf
    with pytest.warns(RunEndedBadly, match="a weight is not finite"):
        guard.close()


def test_where_warnings_are_errors_the_folder_is_let_go_of_all_the_same(tmp_path: Path) -> None:
    model, optimizer = small()
    guard = Guard(model, optimizer, run=tmp_path / "a", scheduler=schedule(optimizer))
    train(guard, model, 500)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RunEndedBadly)
        with pytest.raises(RunEndedBadly):
            guard.close()
    with Guard(model, optimizer, run=tmp_path / "a", resume=True) as guard:  # nobody else is writing it
        guard.loop.resume_at(500)


@pytest.mark.parametrize(
    "bad",
    [
        lambda guard: 1.0,
        lambda guard: math.nan if guard.number == 269 else 1.0,
        lambda guard: 9.0 if 260 <= guard.number < 263 else 1.0,
        lambda guard: 9.0 if 170 <= guard.number < 182 else 1.0,
    ],
    ids=["healthy", "one NaN in the last step", "a burst at the end", "a burst long before"],
)
def test_a_run_that_is_well_ends_without_a_word(bad: Any, tmp_path: Path) -> None:
    model, optimizer = small()
    with Guard(model, optimizer, run=tmp_path / "a") as guard:
        train(guard, model, 270, bad)
    assert not guard.ended_badly
    assert not ends(tmp_path / "a")


def test_a_change_is_warned_of_unless_it_was_announced(tmp_path: Path) -> None:
    """A term whose weight grows faster than the model learns it."""
    ended = []
    for is_announced in (False, True):
        model, optimizer = small()
        with (
            contextlib.nullcontext() if is_announced else pytest.warns(RunEndedBadly),
            Guard(model, optimizer, run=tmp_path / str(is_announced)) as guard,
        ):
            train(guard, model, 170)
            if is_announced:
                guard.announce("another term")
            train(guard, model, 270, lambda guard: 6.0 * 1.04 ** (guard.number - 170))
        ended.append(guard.ended_badly)
    assert "never came back" in ended[0]
    assert ended[1] == ""


def test_an_error_says_for_itself_how_it_ended(tmp_path: Path) -> None:
    model, optimizer = small()

    def fail_at_360(guard: Guard) -> float:
        return 1.0 / (guard.number - 360) if guard.number == 360 else 1.0

    with (
        pytest.raises(ZeroDivisionError),
        Guard(model, optimizer, run=tmp_path / "a", scheduler=schedule(optimizer)) as guard,
    ):
        train(guard, model, 500, fail_at_360)
    assert [end["reason"] for end in ends(tmp_path / "a")] == ["failed"]


def test_the_command_says_so_by_its_status(
    tmp_path: Path, tokens_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rate that is a thousand times too high for the rest of the run, and nothing that acts on it."""
    words = "--size nano --steps 260 --cadence.checkpoint-steps 0 --cadence.evaluate-steps 0 --shadow --threads 1"
    small = f"--data.sources {tokens_file} --model.vocabulary 64 --model.layers 1 --data.batch 4"
    fault = ["--inject", "lr-spike:factor=1000,steps=110@150"]
    status = command.main([*words.split(), *small.split(), "--run", str(tmp_path / "a"), *fault])
    assert status == 1
    assert "the run ended badly" in capsys.readouterr().err
    assert ends(tmp_path / "a")[0]["reason"] == "ended-badly"


def test_a_loss_of_both_signs_raises_an_alarm_and_the_run_goes_on(tmp_path: Path) -> None:
    """Where such a loss stands says nothing about the weights: a reward may be as good as ever. No batch is tried again
    for it, nothing is rolled back, and the end is no bad one."""
    model, optimizer = small()
    options: dict[str, Any] = {"playbook": Playbook.standard(), "run": tmp_path / "a"}
    with Guard(model, optimizer, **options) as guard:
        for batch in guard.batches(data(290)):
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean() - 30.0
            loss.backward()
            guard.step(loss + 60.0 * (guard.number >= 220))
    assert guard.ended_badly == ""
    events = sealegs.open_run(tmp_path / "a").events
    (alarm,) = (event for event in events if event.kind == "alarm")
    assert 220 <= alarm.step < 230
    assert {"probe", "rollback"}.isdisjoint(event.kind for event in events)
    excuses = [event.detail["reason"] for event in events if event.kind == "weights-excused"]
    assert excuses
    assert all("it takes both signs, so it is no measure of the weights" in reason for reason in excuses)


def test_a_loss_of_a_model_that_has_grown_does_not_have_to_come_back(tmp_path: Path) -> None:
    """As where classes are added one after the other: what was usual before is no level of the grown model's."""
    torch.manual_seed(0)
    head = nn.Linear(32, 1)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), head)
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=1e-3)
    with Guard(model, optimizer, run=tmp_path / "a", playbook=Playbook.standard(), checkpoint_every=50) as guard:
        for batch in guard.batches(data(300)):
            if guard.number == 220:
                optimizer.add_param_group({"params": list(head.parameters())})
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean() + 0.1
            loss.backward()
            guard.step(loss + 30.0 * (guard.number >= 220))
    events = sealegs.open_run(tmp_path / "a").events
    assert [event.step for event in events if event.kind == "alarm"][:1] == [220]
    assert not [event for event in events if event.kind in ("intervention", "rung-passed-over")]
    (excuse,) = {event.detail["reason"].partition(", but ")[2] for event in events if event.kind == "weights-excused"}
    assert excuse == "a change was announced since it began, so that its level is another one on purpose"


@pytest.mark.parametrize(("until", "is_short"), [(120, False), (100, False), (60, True)])
def test_a_run_that_ends_far_from_where_it_went_back_from_is_warned_of(
    until: int, is_short: bool, tmp_path: Path
) -> None:
    model, optimizer = small()
    playbook = Playbook(name="mine", rungs=(Rung({Trigger.NONFINITE_OFTEN}, (Rollback(back=60, skip=5),)),))
    guard = Guard(model, optimizer, run=tmp_path / "a", playbook=playbook, checkpoint_every=20)
    bad = {103, 104, 105}
    went_back = False
    for batch in guard.batches(data()):
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss = loss * math.nan if guard.number in bad else loss
        bad.discard(guard.number)
        before = guard.number
        loss.backward()
        guard.step(loss)
        went_back |= guard.number < before
        if went_back and guard.number >= until:
            break
    assert went_back
    with (
        pytest.warns(RunEndedBadly, match="ended at step 60 before it was there")
        if is_short
        else contextlib.nullcontext()
    ):
        guard.close()


def test_recovery_does_not_use_up_the_data(tmp_path: Path) -> None:
    """Gradients are infinite at the same three steps whenever they come: no batch is at fault."""
    model, optimizer = small()
    guard = Guard(model, optimizer, run=tmp_path / "a", playbook=Playbook.standard(), checkpoint_every=50)
    for batch in guard.batches(data(115)):
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        if guard.number in (100, 101, 102) and not guard.is_probe:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, math.inf)
        guard.step(loss)
    guard.close()
    made = [event for event in sealegs.open_run(tmp_path / "a").events if event.kind == "intervention"]
    ledger = read_ledger(tmp_path / "a")
    assert ledger is not None
    assert made
    assert sum(end - first for first, end in ledger["data"]["skipped"]) <= 10 + len(made) * 5
