"""Going back, in a small loop with a real guard: what comes back, what stays, what is refused, and what is written."""

import copy
import itertools
import json
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sealegs
from sealegs import Guard, Playbook
from sealegs.errors import ConfigError, RunHalted
from sealegs.guard_options import Checkpointing, Telemetry
from sealegs.judge import Detection
from sealegs.record.events import load_events
from sealegs.recovery.actions import LowerLR, Rollback, Stratify, SwapSource
from sealegs.recovery.adjustments import Adjustments
from sealegs.recovery.ledger import read_ledger
from sealegs.recovery.playbook import Rung
from sealegs.recovery.probe import MOST_TRIED
from sealegs.recovery.recurrence import Trigger

Bad = Callable[[Guard], float | None]


def data(batches: int = 600) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 4, generator=generator) for _ in range(batches)]


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = (model(batch) - batch.sum(1, keepdim=True)).square().mean() + 1
    return loss


def train(guard: Guard, model: nn.Module, until: int, bad: Bad = lambda guard: None, loader: Any = None) -> None:
    """Train up to a step; ``bad`` gives what a loss is multiplied with."""
    for batch in guard.batches(data() if loader is None else loader):
        factor = bad(guard)
        loss = loss_of(model, batch) * (1.0 if factor is None else factor)
        loss.backward()
        guard.step(loss)
        if guard.loop.checkpoints is not None:
            guard.loop.checkpoints.wait()  # so that none comes later than it is due, on a slow disk
        if guard.number >= until:
            break


def once(*steps: int, factor: float = math.nan) -> Bad:
    """Bad at these steps, when they come for the first time."""
    left = set(steps)

    def bad(guard: Guard) -> float | None:
        if guard.number not in left:
            return None
        left.discard(guard.number)
        return factor

    return bad


def exploding(first: int, last: int) -> Bad:
    """Each gradient twenty times the one before, at these steps when they come for the first time: all are skipped."""
    left = set(range(first, last))

    def bad(guard: Guard) -> float | None:
        if guard.number not in left or guard.loop._batches.is_probe:
            return None
        left.discard(guard.number)
        return 1e5 * 20.0 ** (guard.number - first)

    return bad


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    return [{"step": e.step, **e.detail} for e in load_events(folder / "events.jsonl") if e.kind in kinds]


STANDARD: dict[str, Any] = {"playbook": Playbook.standard(), "telemetry": Telemetry(sample_every=0)}


def test_a_lowered_rate_stays_lowered_before_the_step_it_was_lowered_at(tmp_path: Path) -> None:
    model, optimizer = small()
    with Guard(
        model, optimizer, run=tmp_path / "a", checkpoint_every=Checkpointing(snapshot_every=20), **STANDARD
    ) as guard:
        batches = data()
        train(guard, model, 100, loader=batches)
        guard.ask("lr", "0.5")
        train(guard, model, 110, loader=batches)
        guard.ask("rollback", "25")
        assert guard.number < 100
        before = copy.deepcopy(model.state_dict())
        train(guard, model, guard.number + 1, loader=batches)
        assert sealegs.open_run(tmp_path / "a").column("lr")[-1] == pytest.approx(0.5e-2)
        assert any(not torch.equal(before[name], now) for name, now in model.state_dict().items())


@pytest.mark.parametrize("memory", [None, 0], ids=["from memory", "from disk"])
def test_going_back_keeps_the_tally_and_the_healthy_checkpoint(tmp_path: Path, memory: float | None) -> None:
    model, optimizer = small()
    words = STANDARD | {"checkpoint_every": Checkpointing(every=100, snapshot_every=100, snapshot_memory=memory)}
    with Guard(model, optimizer, run=tmp_path / "a", **words) as guard:
        assert guard.loop.checkpoints is not None
        train(guard, model, 131, bad := once(110, 130, 131, 132))
        train(guard, model, 132, bad)
        before = guard.watch.skips
        train(guard, model, 100, bad)  # one more, and it goes back
        assert guard.number == 100
        assert guard.watch.skips == before + 1 == 4
        guard.loop.checkpoints.wait()
        assert guard.loop.checkpoints.tags() == {0: "healthy", 100: "healthy"}
        train(guard, model, 140, bad)
    (done,) = events(tmp_path / "a", "intervention")
    assert done["to_step"] == 100


@pytest.mark.filterwarnings("ignore::sealegs.errors.RunEndedBadly")  # once it has gone back
def test_there_is_always_the_beginning(tmp_path: Path) -> None:
    """Trouble before the first snapshot: from scratch, with half the learning rate, and it says so."""
    model, optimizer = small()
    first = copy.deepcopy(model.state_dict())
    seen: list[tuple[int, Tensor]] = []

    batches = data()
    with Guard(model, optimizer, run=tmp_path / "a", **STANDARD) as guard:
        bad = once(30, 31, 32)
        for batch in guard.batches(batches):
            if guard.number == 0 and guard.watch.skips:
                assert all(torch.equal(first[name], now) for name, now in model.state_dict().items())
                assert torch.equal(batch, batches[0])
            seen.append((guard.number, batch))
            loss = loss_of(model, batch) * (bad(guard) or 1.0)
            loss.backward()
            guard.step(loss)
            if len(seen) == 60:
                break
    assert [number for number, _ in seen[30:36]] == [30, 31, 32, 0, 1, 2]
    (done,) = events(tmp_path / "a", "intervention")
    assert "from scratch" in done["changed"]
    assert "0.5 of the learning rate" in done["changed"]
    assert sealegs.open_run(tmp_path / "a").column("lr")[20] == pytest.approx(0.5e-2)


class OwnRate(torch.optim.Optimizer):
    """As Hugging Face's Adafactor has it: the rate is made in every step, of the weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for weight in self.param_groups[0]["params"]:
            weight -= 1e-2 * weight.grad.sign()


def test_a_rate_that_is_the_optimizer_s_own_is_not_lowered(tmp_path: Path) -> None:
    """The rung is passed over for the next one, a person is told why, and the run goes on; from scratch, too."""
    often = {Trigger.NONFINITE_OFTEN}
    rungs = Rung(often, (Rollback(back=0, skip=10), LowerLR(0.5))), Rung(often, (Rollback(back=0, skip=1),))
    model, _ = small()
    words: dict[str, Any] = {
        "playbook": Playbook(name="mine", rungs=rungs),
        "checkpoint_every": 500,
        "telemetry": Telemetry(sample_every=0),
    }
    with Guard(model, OwnRate(model), run=tmp_path / "a", **words) as guard:
        train(guard, model, 60, once(10, 11, 12))
        with pytest.raises(ConfigError, match=r"lr 0\.5: an optimizer has lr=None"):
            guard.ask("lr", "0.5")
        train(guard, model, 70)
    (passed,) = events(tmp_path / "a", "rung-passed-over")
    assert (passed["rung"], passed["reason"]) == (1, "an optimizer has lr=None: it makes its rate itself")
    (done,) = events(tmp_path / "a", "intervention")
    assert done["to_step"] == 0
    assert "from scratch" in done["changed"]
    assert "learning rate" not in done["changed"]


class Unwilling(list[Tensor]):
    """A loader that cannot change its mixture, though it seems to."""

    def reweight(self, source: str, weight: float) -> None:
        raise KeyError(source)


def test_a_rung_is_carried_out_whole_or_not_at_all(tmp_path: Path) -> None:
    rung = (SwapSource("web"), Rollback(back=0, skip=10), LowerLR(0.5))
    playbook = Playbook(name="mine", rungs=(Rung({Trigger.NONFINITE_OFTEN}, rung),))
    model, optimizer = small()
    with Guard(model, optimizer, run=tmp_path / "a", playbook=playbook, telemetry=Telemetry(sample_every=0)) as guard:
        with pytest.raises(RunHalted, match="not finite"):
            train(guard, model, 200, once(60, 61, 62), loader=Unwilling(data()))
        assert guard.loop.recovery is not None
        assert guard.loop.recovery.adjustments.lr == 1.0
    ledger = json.loads((tmp_path / "a" / "recovery.json").read_text())
    assert ledger["data"]["skipped"] == []
    (passed,) = events(tmp_path / "a", "rung-passed-over")
    assert "web" in passed["reason"]
    (halt,), (outcome,) = events(tmp_path / "a", "intervention"), events(tmp_path / "a", "outcome")
    assert (outcome["intervention"], outcome["result"]) == (halt["number"], "halted"), "known at once"


def test_a_halt_that_a_person_asks_for_leaves_no_outcome_open(tmp_path: Path) -> None:
    model, optimizer = small()
    with Guard(model, optimizer, run=tmp_path / "a", **STANDARD) as guard:
        train(guard, model, 60)
        guard.ask("lr", "0.5")
        with pytest.raises(RunHalted):
            guard.ask("halt")
    results = {each["intervention"]: each["result"] for each in events(tmp_path / "a", "outcome")}
    assert results == {1: "unknown", 2: "halted"}


def test_what_does_not_fit_any_more_is_passed_over_for_what_does(tmp_path: Path) -> None:
    """Parameters have joined since the snapshot: neither it nor a checkpoint fits, and the run says so."""
    model, optimizer = small()
    with Guard(model, optimizer, run=tmp_path / "a", **STANDARD) as guard:
        batches = data()
        train(guard, model, 80, loader=batches)
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        guard.ask("lr", "0.5")
        with pytest.raises(ConfigError, match="does not fit"):
            guard.ask("rollback", "10")
        assert guard.number == 80
        assert guard.loop.recovery is not None
        assert guard.loop.recovery.adjustments.lr == 0.5
        train(guard, model, 90, loader=batches)


def test_what_is_asked_for_wrongly_is_refused(tmp_path: Path) -> None:
    model, optimizer = small()
    with Guard(model, optimizer, run=None, playbook=Playbook.observe()) as guard:
        with pytest.raises(ConfigError, match="rolback"):
            guard.ask("rolback")
        with pytest.raises(ConfigError, match=r"guard\.batches"):
            guard.ask("skip", "10")


BAD_ARGUMENTS: dict[str, Any] = {"checkpoint_every": -5, "playbook": "standard", "clip": 0.0}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_a_wrong_argument_leaves_no_folder(name: str, tmp_path: Path) -> None:
    model, optimizer = small()
    with pytest.raises(ConfigError, match=f"^{name}="):
        Guard(model, optimizer, run=tmp_path / "a", **{name: BAD_ARGUMENTS[name]})
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [("snapshot_every", 0), ("snapshot_memory", -1), ("every", -5), ("keep", 0), ("capsule_bytes", -1)],
)
def test_a_wrong_option_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^Checkpointing\.{name}={value}: "):
        Checkpointing(**{name: value})


def test_ranges_to_skip_are_pairs() -> None:
    model, optimizer = small()
    wrong: Any = [5]
    with (
        Guard(model, optimizer, run=None) as guard,
        pytest.raises(ConfigError, match=r"^skip=\[5\]: pairs of batch numbers"),
    ):
        guard.batches([], skip=wrong)


def test_textbook_rules_are_for_looking(tmp_path: Path) -> None:
    model, optimizer = small()
    with pytest.raises(ConfigError, match="calibrated"):
        Guard(model, optimizer, run=tmp_path / "a", detection=Detection(rules="textbook"), **STANDARD)


@pytest.mark.filterwarnings("ignore::sealegs.errors.RunEndedBadly")
def test_in_shadow_mode_the_ladder_is_the_same(tmp_path: Path) -> None:
    model, optimizer = small()
    with Guard(model, optimizer, run=tmp_path / "a", **STANDARD, act=False) as guard:
        train(guard, model, 120, once(100, 101, 102, factor=1e30))
        before = guard.number
        train(guard, model, 130, lambda guard: math.nan if guard.number in (121, 122, 123) else None)
        assert guard.number > before
    decided = events(tmp_path / "a", "intervention")
    assert decided
    assert decided[0]["text"].startswith("roll back")
    assert not any(each["acted"] for each in decided)
    assert not events(tmp_path / "a", "rung-passed-over")


def test_outcomes_belong_to_their_interventions(tmp_path: Path) -> None:
    """With a rung in between that could not be carried out."""
    playbook = Playbook(
        name="mine",
        rungs=(
            Rung({Trigger.NONFINITE_OFTEN}, (Rollback(back=0, skip=1),)),
            Rung({Trigger.NONFINITE_OFTEN}, (SwapSource("web"),)),
            Rung({Trigger.NONFINITE_OFTEN}, (Rollback(back=0, skip=2),)),
        ),
    )
    model, optimizer = small()
    with Guard(
        model,
        optimizer,
        run=tmp_path / "a",
        playbook=playbook,
        telemetry=Telemetry(sample_every=0),
        checkpoint_every=Checkpointing(snapshot_every=20),
    ) as guard:
        batches = data()
        bad = once(60, 61, 62)
        train(guard, model, 61, bad, loader=batches)
        train(guard, model, 62, bad, loader=batches)
        train(guard, model, 61, bad, loader=batches)
        train(guard, model, 160, once(70, 71, 72), loader=batches)
    numbers = [each["number"] for each in events(tmp_path / "a", "intervention")]
    outcomes = {each["intervention"]: each["result"] for each in events(tmp_path / "a", "outcome")}
    assert numbers == [1, 2]
    assert outcomes == {1: "came back", 2: "helped"}


def test_a_request_is_no_trouble_of_the_one_before(tmp_path: Path) -> None:
    """Each has its own outcome: a rollback of 180 steps, and a lower rate soon after it."""
    model, optimizer = small()
    words = STANDARD | {"checkpoint_every": Checkpointing(every=20, snapshot_every=20, keep=20)}
    with Guard(model, optimizer, run=tmp_path / "a", **words) as guard:
        batches = data()
        train(guard, model, 200, loader=batches)
        guard.ask("rollback", "180")
        assert guard.number <= 20
        train(guard, model, 25, loader=batches)
        guard.ask("lr", "0.5")
        train(guard, model, 90, loader=batches)
        assert read_ledger(tmp_path / "a")["pending"] == [  # type: ignore[index]
            {"intervention": 1, "onset": 200, "is_asked": True, "in_incident": False, "made": None}
        ]
    (told,) = events(tmp_path / "a", "outcome")
    assert (told["intervention"], told["result"], told["step"]) == (2, "nothing to help", 75)
    words |= {"resume": True}
    model, optimizer = small()
    with Guard(model, optimizer, run=tmp_path / "a", **words) as guard:
        train(guard, model, 260, loader=data())
    first, second = sorted(events(tmp_path / "a", "outcome"), key=lambda told: told["intervention"])
    assert (first["result"], first["step"]) == ("nothing to help", 250)
    assert "50 steps after the request's step" in first["text"]
    assert second == told


@pytest.mark.filterwarnings("ignore::sealegs.errors.RunEndedBadly")  # once it has gone back
def test_trouble_after_a_request_is_told_of_each_by_its_own_onset(tmp_path: Path) -> None:
    """The playbook's rollback is pending, a person's rate too, when trouble comes back before the first onset."""
    rungs = (Rung({Trigger.NONFINITE_OFTEN}, (Rollback(skip=count),)) for count in (1, 2))
    words = STANDARD | {"playbook": Playbook(name="mine", rungs=tuple(rungs))}
    model, optimizer = small()
    with Guard(
        model, optimizer, run=tmp_path / "a", checkpoint_every=Checkpointing(snapshot_every=20), **words
    ) as guard:
        batches = data()
        train(guard, model, 62, bad := once(60, 61, 62), loader=batches)
        train(guard, model, 1, bad, loader=batches)  # one more, and it goes back
        assert guard.number < 50
        onset = guard.number + 2
        train(guard, model, onset, loader=batches)
        guard.ask("lr", "0.5")
        train(guard, model, onset + 2, again := once(onset, onset + 1, onset + 2), loader=batches)
        train(guard, model, 1, again, loader=batches)
    texts = {told["intervention"]: told["text"] for told in events(tmp_path / "a", "outcome")}
    before = 60 - (onset + 3)
    assert texts[1] == f"came back: trouble again, since step {onset}, {before} steps before the onset"
    assert texts[2] == f"came back: trouble again, since step {onset}, 3 steps after the request's step"


def test_a_trouble_that_never_went_away_did_not_come_back(tmp_path: Path) -> None:
    """The weights are harmed, and what is done about it does nothing: the loss is as high at the next look."""
    rungs = (Rung({Trigger.NOT_RECOVERING}, (LowerLR(0.5),)),)
    model, optimizer = small()
    with Guard(model, optimizer, run=tmp_path / "a", playbook=Playbook(name="mine", rungs=rungs)) as guard:
        train(guard, model, 200, loader=(batches := [torch.cat(data(64))] * 600))  # no noise: it does not come down
        with torch.no_grad():
            for weight in model.parameters():
                weight.neg_()
        optimizer.param_groups[0]["lr"] = 0.0
        with pytest.raises(RunHalted):
            train(guard, model, 500, loader=batches)
    lowered, halted = events(tmp_path / "a", "intervention")
    told, _ = events(tmp_path / "a", "outcome")
    assert (told["intervention"], told["result"]) == (1, "did not help")
    assert told["text"].startswith(f"did not help: the same trouble as before, since step {lowered['onset']}, ")
    assert halted["because"].endswith("rung 1 was the last for it, and has not cured it")


def test_an_incident_is_closed_with_what_it_has_cost(tmp_path: Path) -> None:
    model, optimizer = small()
    with Guard(
        model, optimizer, run=tmp_path / "a", checkpoint_every=Checkpointing(snapshot_every=50), **STANDARD
    ) as guard:
        train(guard, model, 300, once(230, 231, 232))
    (done,), (closed,) = events(tmp_path / "a", "intervention"), events(tmp_path / "a", "incident-closed")
    assert closed["cost"]["steps"] >= done["cost"]["steps"] > 0


def test_each_rollback_costs_what_was_done_since_the_state_it_went_to(tmp_path: Path) -> None:
    """To a snapshot twice, to a checkpoint, and to a checkpoint of the process before."""
    words = STANDARD | {"checkpoint_every": Checkpointing(every=60, snapshot_every=50, keep=9)}

    def back(guard: Guard, model: nn.Module, until: int, steps: str, batches: Any) -> None:
        for batch in guard.batches(batches):
            loss = loss_of(model, batch)
            loss.backward()
            guard.step(loss, tokens=256)
            assert guard.loop.checkpoints is not None
            guard.loop.checkpoints.wait()
            if guard.number >= until:
                break
        guard.ask("rollback", steps)

    began = time.monotonic()
    model, optimizer = small()
    with Guard(model, optimizer, run=tmp_path / "a", **words) as guard:
        batches = data()
        for until, steps in ((224, "50"), (283, "110"), (190, "100")):
            back(guard, model, until, steps, batches)
        train(guard, model, 125, loader=batches)
    with Guard(model, optimizer, run=tmp_path / "a", resume=True, **words) as guard:
        back(guard, model, 150, "80", data())
    done = events(tmp_path / "a", "intervention")
    assert [(each["step"], each["to_step"]) for each in done] == [(224, 150), (283, 150), (190, 60), (150, 60)]
    assert [each["cost"]["tokens"] for each in done] == [each["cost"]["steps"] * 256 for each in done]
    assert sum(each["cost"]["seconds"] for each in done) < time.monotonic() - began + 0.5, "rounded; none counts twice"


def test_a_resumed_run_has_the_incidents_of_its_checkpoint(tmp_path: Path) -> None:
    """One that was closed before the checkpoint is not opened again."""
    model, optimizer = small()
    words: dict[str, Any] = {"run": tmp_path / "a", **STANDARD, "checkpoint_every": 100}
    with Guard(model, optimizer, **words) as guard:
        train(guard, model, 300, once(130, 131, 132))
    model, optimizer = small()
    with Guard(model, optimizer, **words, resume=True) as guard:
        assert guard.number == 300 or guard.resumed is not None
        train(guard, model, 450)
    assert len(events(tmp_path / "a", "incident-closed")) == len(
        {each["number"] for each in events(tmp_path / "a", "incident-closed")}
    )


def test_a_resume_without_a_playbook_still_leaves_out_what_was_bad(tmp_path: Path) -> None:
    model, optimizer = small()
    with Guard(model, optimizer, run=tmp_path / "a", **STANDARD, checkpoint_every=50) as guard:
        train(guard, model, 60)
        guard.ask("skip", "10")
        train(guard, model, 101)
        guard.checkpoint(wait=True)
    model, optimizer = small()
    with Guard(model, optimizer, run=tmp_path / "a", checkpoint_every=50, resume=True) as guard:
        train(guard, model, guard.number + 20)
    assert events(tmp_path / "a", "margins-dropped")
    seen = sealegs.open_run(tmp_path / "a").column("batch_index")
    assert not set(seen.astype(int).tolist()) & set(range(60, 70))


def test_a_playbook_of_another_name_begins_its_own_ladder(tmp_path: Path) -> None:
    model, optimizer = small()
    words: dict[str, Any] = {"run": tmp_path / "a", "checkpoint_every": 50, "telemetry": Telemetry(sample_every=0)}
    with Guard(model, optimizer, playbook=Playbook.standard(), **words) as guard:
        train(guard, model, 200, once(130, 131, 132))
    model, optimizer = small()
    with Guard(model, optimizer, playbook=Playbook.palm(), **words, resume=True) as guard:
        first = guard.number + 20
        train(guard, model, first + 60, once(first, first + 1, first + 2))
    decided = events(tmp_path / "a", "intervention")
    assert [each["decided_by"] for each in decided] == ["playbook standard, rung 3", "playbook palm, rung 1"]


@pytest.mark.parametrize("ahead", ["not told", "prefetching", "varying"])
def test_where_nobody_knows_the_batches_of_a_step_there_is_no_probe(ahead: str, tmp_path: Path) -> None:
    model, optimizer = small()
    with Guard(model, optimizer, run=tmp_path / "a", **STANDARD) as guard:
        batches = guard.batches(data(4000))
        waiting = next(batches) if ahead == "prefetching" else None
        for _ in range(260):
            if ahead == "not told":
                loss_of(model, next(batches)).backward()
            if ahead == "varying" and guard.number % 50 == 49:
                with guard.accumulate():
                    loss_of(model, next(batches)).backward()
            batch, waiting = (next(batches), None) if waiting is None else (waiting, next(batches))
            factor = 9.0 if 220 <= guard.number < 235 else 1.0
            loss = loss_of(model, batch) * factor
            loss.backward()
            guard.step(loss)
    (said,) = events(tmp_path / "a", "no-probe")
    assert ("step 49 took 2 batches and those before it 1" if ahead == "varying" else "told of 1") in said["reason"]
    assert not events(tmp_path / "a", "probe")


@pytest.mark.filterwarnings("ignore::sealegs.errors.RunEndedBadly")  # once it has gone back
@pytest.mark.parametrize("is_damage", [False, True])
def test_the_batches_of_a_step_are_tried_again_together(is_damage: bool, tmp_path: Path) -> None:
    """Four of them are accumulated: at step 220 either the data are bad for a while, or the weights from then on."""
    model, optimizer = small()
    tried: list[Tensor] = []
    seen: list[Tensor] = []
    with Guard(model, optimizer, run=tmp_path / "a", **STANDARD) as guard:
        batches = guard.batches(data(4000))
        while guard.number <= 220 or not events(tmp_path / "a", "intervention" if is_damage else "probe"):
            assert guard.number < 260
            if is_damage and guard.number == 220:
                with torch.no_grad():
                    model.weight.data.add_(3.0)  # type: ignore[operator]
            total = torch.zeros(())
            for place in range(4):
                batch = next(batches)
                (tried if guard.is_probe else seen).append(batch.clone())
                with guard.accumulate() if place < 3 else nullcontext():
                    is_bad = guard.number >= 220 and not guard.is_probe and not is_damage
                    loss = loss_of(model, batch) / 4 * (9.0 if is_bad else 1.0)
                    loss.backward()
                    total += loss.detach()
            guard.step(total)
    assert len(tried) == 4 * MOST_TRIED * (1 + is_damage)
    for first in range(0, len(tried), 4):
        places = [next(at for at, batch in enumerate(seen) if torch.equal(batch, one)) for one in tried[first:][:4]]
        assert places == list(range(places[0], places[0] + 4))
        assert places[0] % 4 == 0
    assert {probe["is_condemned"] for probe in events(tmp_path / "a", "probe")} == {is_damage}
    assert len(events(tmp_path / "a", "skip", "alarm")) < 10
    if is_damage:  # from the first batch of the step before that of the onset
        (done,) = events(tmp_path / "a", "intervention")
        assert f"batches {4 * (done['onset'] - 1)} to " in done["changed"]


def is_bad(guard: Guard) -> bool:
    """Twelve batches in a row, wherever they come."""
    batch = guard.loop._batches.number
    return batch is not None and 220 <= batch < 232 and not guard.loop._batches.is_probe


def test_what_the_loop_does_to_a_batch_does_not_reach_the_probe(tmp_path: Path) -> None:
    model, optimizer = small()
    loader = [{"inputs": batch} for batch in data(800)]
    with Guard(model, optimizer, run=tmp_path / "a", **STANDARD) as guard:
        for batch in guard.batches(loader):
            inputs = batch.pop("inputs")
            loss = loss_of(model, inputs) * (9.0 if is_bad(guard) else 1.0)
            loss.backward()
            guard.step(loss)
            if guard.number >= 260:
                break
    assert [probe["is_condemned"] for probe in events(tmp_path / "a", "probe")] == [False] * 2, "while, and after"


def test_a_probe_leaves_the_scaler_as_it_was(tmp_path: Path) -> None:
    model, optimizer = small()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with Guard(model, optimizer, run=tmp_path / "a", **STANDARD, scaler=scaler) as guard:
        for batch in guard.batches(data(800)):
            loss = loss_of(model, batch) * (9.0 if is_bad(guard) else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            guard.step(loss, grad_norm=norm)
            if guard.number >= 260:
                break
    probes = events(tmp_path / "a", "probe")
    assert [probe["is_condemned"] for probe in probes] == [False] * 2, "while, and after"
    assert all(probe["grad_norm"] is not None for probe in probes)


@pytest.mark.parametrize(
    ("spread", "announced", "is_damage"),
    [(0.02, False, True), (0.3, False, False), (0.02, True, True)],
    ids=["quiet", "noisy", "not known after a change"],
)
def test_gradients_have_grown_where_that_is_more_than_their_noise(
    spread: float, announced: bool, is_damage: bool, tmp_path: Path
) -> None:
    """Nothing is learnt from steps whose gradients explode, so that nothing can have been forgotten."""
    model, optimizer = small()
    bad = exploding(220, 232)
    with Guard(model, optimizer, run=tmp_path / "a", **STANDARD) as guard:
        for batch in guard.batches(data(800)):
            if announced and guard.number == 210:
                guard.announce("other data")
            factor = bad(guard) or 1.0
            loss = loss_of(model, batch) * min(factor, 9.0)
            loss.backward()
            norm = torch.exp(spread * batch[0, 0]) * (2.6 if guard.loop._batches.is_probe else factor)
            guard.step(loss, grad_norm=norm)
            if guard.number >= 232 or (guard.number > 220 and events(tmp_path / "a", "probe")):
                break
    (probe,) = events(tmp_path / "a", "probe")
    assert probe["loss"] < probe["loss_limit"]
    assert probe["is_condemned"] == is_damage


def layered() -> nn.Module:
    """Eight tensors."""
    torch.manual_seed(0)
    widths = (4, 16, 16, 16)
    hidden = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(widths[-1], 1))


def test_gradients_scaled_for_a_few_steps_are_no_change_of_the_run(tmp_path: Path) -> None:
    """Announced, they would keep the statistic from judging for 500 steps."""
    model = layered()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with Guard(model, optimizer, run=tmp_path / "a", **STANDARD, clip=1.0) as guard:
        for batch in guard.batches(torch.randn(400, 256, 4)):
            loss = loss_of(model, batch)
            (loss * (8.0 if 220 <= guard.number < 223 else 1.0)).backward()
            guard.step(loss)
            if guard.number == 245:
                break
    (probe,) = events(tmp_path / "a", "probe")
    assert probe["factor"] == pytest.approx(8.0, rel=0.1)
    assert not events(tmp_path / "a", "announced")
    assert not events(tmp_path / "a", "intervention")


def test_weights_found_damaged_while_nothing_surprises_are_an_incident(tmp_path: Path) -> None:
    """After an announced change the statistic judges nothing, for 500 steps."""
    model = layered()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    left = {260}
    with Guard(model, optimizer, run=tmp_path / "a", **STANDARD, clip=1.0) as guard:
        for batch in guard.batches(data(400)):
            if guard.number == 180 and not guard.is_probe:
                guard.announce("a new mixture")
            if guard.number in left and not guard.is_probe:
                left.clear()
                model.get_parameter("6.weight").data.mul_(-1)
            loss = loss_of(model, batch)
            loss.backward()
            guard.step(loss)
            if guard.number >= 330:
                break
    (alarm,) = events(tmp_path / "a", "alarm")
    assert "weights are damaged" in alarm["text"]
    assert [capsule["incident"] for capsule in events(tmp_path / "a", "capsule")] == [1]
    (done,) = events(tmp_path / "a", "intervention")
    assert (done["trigger"], done["incident"], done["onset"]) == ("damaged", 1, 260)
    assert done["to_step"] <= 260


@pytest.mark.filterwarnings("ignore::sealegs.errors.RunEndedBadly")  # once it has gone back
def test_a_look_acts_where_the_loss_is_stuck_above_that_of_the_first_steps(tmp_path: Path) -> None:
    """Its own losses, which the statistic has taken for a new level, do not say that the loss of this run grows."""
    model = layered()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Guard(model, optimizer, run=tmp_path / "a", **STANDARD, clip=1.0) as guard:
        stream = iter(guard.batches(data(600)))
        ahead = next(stream)
        for _ in range(450):  # reads ahead, so that no batch can be tried again
            batch, ahead = ahead, next(stream)
            if guard.number == 180 and optimizer.param_groups[0]["lr"] == 1e-3:
                model.get_parameter("6.weight").data.mul_(-3)
                optimizer.param_groups[0]["lr"] = 1e-9
            loss = loss_of(model, batch)
            loss.backward()
            guard.step(loss)
            if events(tmp_path / "a", "intervention"):
                break
    (done,) = events(tmp_path / "a", "intervention")
    assert done["trigger"] == "not-recovering"
    assert abs(done["onset"] - 180) <= 8
    assert events(tmp_path / "a", "no-probe")
    assert not events(tmp_path / "a", "weights-set"), "whose weights nobody looks at any more"


@pytest.mark.parametrize("step", [40, 100])
def test_a_young_run_that_takes_damage_for_its_new_level_is_brought_back(step: int, tmp_path: Path) -> None:
    """All weights x30: four updates are skipped, the fifth is not, and nothing is surprised any more."""
    model = layered()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    left = {step}
    with Guard(model, optimizer, run=tmp_path / "a", **STANDARD, clip=1.0) as guard:
        for batch in guard.batches(data()):
            if guard.number in left and not guard.is_probe:
                left.clear()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.data.mul_(30)
            loss = loss_of(model, batch)
            loss.backward()
            guard.step(loss)
            if guard.number >= 200:
                break
    (done,) = events(tmp_path / "a", "intervention")
    assert (done["trigger"], done["onset"]) == ("damaged", step)
    assert done["step"] <= step + 30
    assert loss.item() < 10


@pytest.mark.filterwarnings("ignore::sealegs.errors.RunEndedBadly")  # once it has gone back
@pytest.mark.parametrize(
    ("measured", "is_damage"), [("by the guard", False), ("before clipping", False), ("by the loop", True)]
)
def test_summed_gradients_are_told_where_each_tensor_is_measured(
    measured: str, is_damage: bool, tmp_path: Path
) -> None:
    model = layered()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with Guard(model, optimizer, run=tmp_path / "a", **STANDARD, clip=1.0) as guard:
        for batch in guard.batches(torch.randn(400, 256, 4)):
            loss = loss_of(model, batch)
            (loss * (8.0 if guard.number >= 220 else 1.0)).backward()
            norm = None
            if measured == "before clipping":
                guard.before_clipping()
            if measured != "by the guard":
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            guard.step(loss, grad_norm=norm if measured == "by the loop" else None)
            if guard.number == 240 or (guard.number > 220 and events(tmp_path / "a", "intervention")):
                break
    probe, *_ = events(tmp_path / "a", "probe")
    assert probe["tried"] == MOST_TRIED
    assert probe["loss"] < probe["loss_limit"]
    assert probe["is_condemned"] == is_damage
    assert len(events(tmp_path / "a", "announced")) == (not is_damage)
    assert len(events(tmp_path / "a", "intervention")) == is_damage


@pytest.mark.filterwarnings("ignore::sealegs.errors.RunEndedBadly")
def test_a_last_checkpoint_with_a_bad_weight_is_not_healthy(tmp_path: Path) -> None:
    model, optimizer = small()
    with Guard(model, optimizer, run=tmp_path / "a", **STANDARD, checkpoint_every=20) as guard:
        train(guard, model, 55)
        guard.checkpoint(wait=True)
        with torch.no_grad():
            next(model.parameters())[0, 0] = math.nan
        guard.loop.number += 1
        guard.checkpoint(wait=True)
        assert guard.loop.checkpoints is not None
        tags = guard.loop.checkpoints.tags()
    assert (tags[55], tags[56]) == ("healthy", "candidate")


def test_a_loop_that_goes_back_by_itself_leaves_no_trace_of_the_other_line(tmp_path: Path) -> None:
    model, optimizer = small()
    with Guard(
        model, optimizer, run=tmp_path / "a", checkpoint_every=Checkpointing(snapshot_every=20), **STANDARD
    ) as guard:
        batches = data()
        train(guard, model, 100, loader=batches)
        guard.loop.resume_at(50)
        assert guard.loop.recovery is not None
        newest = guard.loop.recovery._restore_points.snapshots.newest(1000)
        assert newest is None or newest.step <= 50


def test_scattered_trouble_began_with_the_first_of_it(tmp_path: Path) -> None:
    model, optimizer = small()
    with Guard(model, optimizer, run=tmp_path / "a", **STANDARD) as guard:
        train(guard, model, 220, once(*range(100, 200, 10)))
    first = events(tmp_path / "a", "intervention")[0]
    assert first["trigger"] == "nonfinite-often"
    assert first["onset"] == 100
    assert first["step"] == 151, "the sixth, at step 150"
    assert "batches 149 to 158 are left out;" in first["changed"], "the ten that the rung asks for"


def test_the_batch_that_triggers_a_rollback_is_left_out_however_few_the_rung_leaves_out(tmp_path: Path) -> None:
    rung = Rung({Trigger.NONFINITE_OFTEN}, (Rollback(skip=2),))
    words = STANDARD | {"playbook": Playbook(name="mine", rungs=(rung,), nonfinite_in_a_row=5)}
    model, optimizer = small()
    with Guard(model, optimizer, run=tmp_path / "a", **words) as guard:
        train(guard, model, 120, once(*range(100, 105)))
    (done,) = events(tmp_path / "a", "intervention")
    assert "batches 99 to 104 are left out, as far as they were bad;" in done["changed"]


class Mixed(list[Tensor]):
    """A loader that can spread its rare tokens."""

    is_stratified = False

    def stratify(self) -> None:
        self.is_stratified = True


@pytest.mark.filterwarnings("ignore::sealegs.errors.RunEndedBadly")  # once it has gone back
def test_batches_are_stratified_where_the_loader_can(tmp_path: Path) -> None:
    rung = (Rollback(back=0, skip=1), Stratify())
    playbook = Playbook(name="mine", rungs=(Rung({Trigger.NONFINITE_OFTEN}, rung),))
    for loader in (Mixed(data()), data()):
        model, optimizer = small()
        folder = tmp_path / type(loader).__name__
        with Guard(
            model, optimizer, run=folder, playbook=playbook, checkpoint_every=50, telemetry=Telemetry(sample_every=0)
        ) as guard:
            if isinstance(loader, Mixed):
                train(guard, model, 100, once(60, 61, 62), loader=loader)
                assert loader.is_stratified
                assert "spread rare tokens" in events(folder, "intervention")[0]["changed"]
            else:
                with pytest.raises(RunHalted):
                    train(guard, model, 100, once(60, 61, 62), loader=loader)
                assert "list has no stratify()" in events(folder, "rung-passed-over")[0]["reason"]
    model, optimizer = small()
    with Guard(model, optimizer, run=tmp_path / "Mixed", playbook=playbook, checkpoint_every=50, resume=True) as guard:
        train(guard, model, guard.number + 5, loader=(again := Mixed(data())))
        assert again.is_stratified, "in another process, too"


def test_trouble_that_belongs_to_a_step_is_counted_back_once(tmp_path: Path) -> None:
    """Not to the data: what is bad at steps 220 to 231 is bad there again."""
    model, optimizer = small()

    def bad(guard: Guard) -> float | None:
        is_bad = 220 <= guard.number < 232 and not guard.loop._batches.is_probe
        return 1e5 * 20.0 ** (guard.number - 220) if is_bad else None

    with Guard(model, optimizer, run=tmp_path / "a", **STANDARD) as guard:
        train(guard, model, 300, bad, loader=data(900))
    (back,) = events(tmp_path / "a", "counted-back")
    assert (back["step"], back["to_step"]) == (233, 221)


class Counted(dict[str, Tensor]):
    """A batch that counts how often batches are copied."""

    copies = 0

    def __deepcopy__(self, _: Any) -> "Counted":
        Counted.copies += 1
        return Counted(self)


@pytest.mark.parametrize(
    ("playbook", "most"),
    [
        (Playbook.observe(), 0),
        (Playbook.standard(), 8),
        (Playbook(name="mine", rungs=(Rung({Trigger.SPOILT}, (Rollback(),)),)), 8),
    ],
    ids=["none", "some", "for what is spoilt"],
)
def test_batches_are_copied_where_one_may_be_tried_again(playbook: Playbook, most: int, tmp_path: Path) -> None:
    """A hundred steps: none of them pays for a probe that will not come, few for one that may."""
    model, optimizer = small()
    Counted.copies = 0
    with Guard(model, optimizer, run=tmp_path / "a", playbook=playbook, telemetry=Telemetry(sample_every=0)) as guard:
        for batch in guard.batches([Counted(inputs=inputs) for inputs in data(100)]):
            loss = loss_of(model, batch["inputs"])
            loss.backward()
            guard.step(loss)
    assert Counted.copies <= most
    assert (Counted.copies > 0) == (most > 0)


def test_batches_of_weights_that_are_gone_are_not_tried_again(tmp_path: Path) -> None:
    """They were learnt in steps that are to be done again, and cost the weights from before them more."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    nans, garbage = once(390, 391, 392), exploding(205, 211)
    is_over = False

    def bad(guard: Guard) -> float | None:
        nonlocal is_over
        factor = nans(guard)
        is_over |= factor is not None
        return garbage(guard) if is_over and factor is None else factor

    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(256, 4, generator=generator) for _ in range(600)]
    with Guard(
        model, optimizer, run=tmp_path / "a", checkpoint_every=Checkpointing(snapshot_every=200), **STANDARD
    ) as guard:
        train(guard, model, 400, bad, loader=batches)
    assert len(events(tmp_path / "a", "skip", "alarm")) >= 6
    assert [each["trigger"] for each in events(tmp_path / "a", "intervention")] == ["nonfinite-often"]


@pytest.mark.parametrize("pending", [3, 2, 1])
def test_a_request_in_the_middle_of_a_trial_ends_it(pending: int, tmp_path: Path) -> None:
    model, optimizer = small()
    asked, bad = False, exploding(200, 207)
    with Guard(model, optimizer, run=tmp_path / "a", **STANDARD) as guard:
        for batch in guard.batches(data(900)):
            loss = loss_of(model, batch) * (bad(guard) or 1.0)
            loss.backward()
            guard.step(loss)
            if not asked and guard.number > 200 and len(guard.loop._batches._probe) == pending:
                guard.ask("lr", "0.5")
                asked = True
            if guard.number >= 240:
                break
    assert asked
    assert [each["decided_by"] for each in events(tmp_path / "a", "intervention")] == ["person code"]


@pytest.mark.parametrize("limit", [None, 0.05])
def test_a_batch_that_is_tried_again_is_clipped_as_it_was(limit: float | None, tmp_path: Path) -> None:
    model, optimizer = small()
    rungs = (Rung({Trigger.NONFINITE_OFTEN, Trigger.DAMAGED}, (Rollback(back=0, skip=10),)),)
    words: dict[str, Any] = {
        "playbook": Playbook(name="mine", rungs=rungs),
        "telemetry": Telemetry(sample_every=0),
        "checkpoint_every": Checkpointing(snapshot_every=50),
    }
    nans, garbage = once(60, 61, 62), set(range(300, 312))
    with Guard(model, optimizer, run=tmp_path / "a", **words) as guard:
        for batch in guard.batches(data(900)):
            if guard.watch.skips == 3:  # since the rollback
                assert guard.loop.recovery is not None
                guard.loop.recovery._ledger.adjustments = Adjustments(clip_value=limit)
            noise = torch.sin(1e4 * batch.sum(1, keepdim=True))  # which nobody learns: gradients stay large
            loss = (model(batch) - batch.sum(1, keepdim=True) - noise).square().mean() + 1
            is_bad = guard.number in garbage and not guard.loop._batches.is_probe
            loss = loss * (1000.0 if is_bad else 1.0 if (factor := nans(guard)) is None else factor)
            loss.backward()
            guard.step(loss)
            if guard.number >= 330:
                break
    assert [each["is_condemned"] for each in events(tmp_path / "a", "probe")] == [False] * 2, "while, and after"


def test_a_step_that_was_skipped_and_counted_back_costs_once(tmp_path: Path) -> None:
    model, optimizer = small()
    with Guard(model, optimizer, run=tmp_path / "a", **STANDARD) as guard:
        train(guard, model, 330, exploding(220, 232), loader=data(900))
        assert guard.loop.recovery is not None
        guard.load_state_dict(json.loads(json.dumps(guard.state_dict())))
        assert guard.loop.recovery._tracker.evidence.is_sound, "what a probe has found survives a checkpoint"
    (back,), (closed,) = events(tmp_path / "a", "counted-back"), events(tmp_path / "a", "incident-closed")
    assert back["steps"] == closed["cost"]["steps"] == len(events(tmp_path / "a", "skip", "alarm"))


def test_a_look_that_waits_leaves_a_trace(tmp_path: Path) -> None:
    """A loss that leaps and comes down slowly by itself: after 50 steps the run waits on, and says why."""
    model, optimizer = small()
    noise = torch.randn(600, generator=torch.Generator().manual_seed(0)).mul(0.02).tolist()
    with Guard(model, optimizer, run=tmp_path / "a", playbook=Playbook.observe()) as guard:
        for step in range(420):
            high = 3.0 * max(1 - (step - 300) / 90, 0) if step >= 300 else 0.0
            guard.step(torch.tensor(2.0 + high + noise[step]), grad_norm=1.0 + noise[step])
    (looked,) = events(tmp_path / "a", "incident-look")
    assert 345 <= looked["step"] <= 350
    assert "is coming down: waited" in looked["text"]
    assert "to come below 2.0" in looked["text"]
