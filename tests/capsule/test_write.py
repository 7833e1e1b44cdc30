"""What the flight recorder keeps, and that it is what was."""

import copy
import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.disk.layer import DiskLayer, Fault
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

import sealegs
from sealegs.capsule import write
from sealegs.capsule.batch_handle import BatchHandle
from sealegs.capsule.read import open_capsule
from sealegs.capsule.write import FlightRecorder
from sealegs.errors import SourceError
from sealegs.guard_options import Checkpointing
from sealegs.report.postmortem.markdown import draft
from sealegs.signals.collective import Collective
from sealegs.state import tensors
from sealegs.state.rng import rng_now
from sealegs.state.snapshots import Snapshots
from sealegs.state.training_state import TrainingState, scale_of
from sealegs.watch import Watch

SMALL = Checkpointing(snapshot_memory=2**20, snapshot_every=20)
OBSERVE: dict[str, Any] = {"playbook": sealegs.Playbook.observe(), "checkpoint_every": SMALL}


# the runs end in the middle of their incident
pytestmark = pytest.mark.filterwarnings("ignore::sealegs.errors.RunEndedBadly")


class Tied(nn.Module):
    """One weight under two names, a buffer, and a norm that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4, bias=False)
        self.down = nn.Linear(4, 4)
        self.down.weight = self.up.weight
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(self.up(x)))  # type: ignore[no-any-return]


def test_a_snapshot_is_what_a_checkpoint_of_that_step_would_have_been() -> None:
    torch.manual_seed(0)
    model = Tied()
    optimizers = [AdamW([model.up.weight], lr=0.1), SGD(model.norm.parameters(), lr=0.1, momentum=0.9)]
    schedulers = [LambdaLR(optimizer, lambda step: 0.9**step) for optimizer in optimizers]
    training = TrainingState(model=model, optimizers=optimizers, schedulers=schedulers)
    snapshots = Snapshots(model, optimizers, every=5, promote_after=1)

    def step() -> None:
        model(torch.randn(8, 4)).square().mean().backward()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    for _ in range(5):
        step()
    expected = training.capture()
    tensors = {name: tensor.clone() for name, tensor in expected.tensors.items()}
    states = [copy.deepcopy(scheduler.state_dict()) for scheduler in schedulers]
    snapshots.take(5, {"rng": rng_now(), "schedulers": states, "scaler": scale_of(None)})
    for _ in range(3):
        step()
    snapshots.healthy(5)
    (snapshot,) = filter(None, [snapshots.newest(before=8)])
    past = training.capture_past(snapshots, snapshot)
    assert past.step == 5
    assert past.plain == expected.plain
    assert past.own == expected.own
    assert past.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(past.tensors[name], tensor), name
    assert not torch.equal(past.tensors["model/up.weight"], model.up.weight), "training has gone on"


def test_the_state_of_a_snapshot_is_made_in_one_walk_over_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of thousands of layers, a walk for each tensor took half an hour."""
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(50)))
    training = TrainingState(model=model, optimizers=[SGD(model.parameters(), lr=0.1)])
    snapshots = Snapshots(model, training.optimizers, every=5, promote_after=1)
    snapshots.take(5, {"rng": rng_now(), "schedulers": [], "scaler": None})
    snapshots.healthy(5)
    (snapshot,) = filter(None, [snapshots.newest(before=8)])
    looked_at: list[Tensor] = []
    where = tensors._where

    def looking(part: Tensor) -> Any:
        looked_at.append(part)
        return where(part)

    monkeypatch.setattr(tensors, "_where", looking)
    assert len(training.capture_past(snapshots, snapshot).tensors) == 101
    assert len(looked_at) <= 4 * 100


@dataclass
class Batch:
    x: Tensor
    name: str


def go_wrong(
    folder: Path,
    *,
    at: int = 300,
    factor: float = 50.0,
    make: Callable[[Tensor], Any] = lambda x: x,
    **how: Any,
) -> None:
    """Three hundred healthy steps, or so many as are said, then losses that are too high."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    with sealegs.Guard(model, optimizer, run=folder, clip=1.0, **{**OBSERVE, **how}) as guard:
        for batch in guard.batches([make(x) for x in torch.randn(at + 40, 16, 8)]):
            x = batch.x if isinstance(batch, Batch) else batch["x"] if isinstance(batch, dict) else batch
            loss = (model(x) - x[:, :4]).square().mean() * (factor if guard.number >= at else 1.0)
            loss.backward()
            guard.step(loss)
            if guard.number > at + 12:
                break


def go_wrong_soon(folder: Path, **how: Any) -> None:
    """A loss that is not finite needs no history to be an incident: for what does not depend on its kind."""
    go_wrong(folder, at=30, factor=math.nan, act=False, **how)


def test_an_incident_leaves_a_capsule(tmp_path: Path) -> None:
    go_wrong(tmp_path / "a", make=lambda x: Batch(x, "sea"))
    capsule = open_capsule(tmp_path / "a" / "incidents" / "1")
    assert capsule.incident.start == 300
    assert capsule.description.state == 280
    assert capsule.description.opened < 310
    assert capsule.steps() == range(280, 313)  # to the end: it came before all that is kept of what came after
    assert capsule.description.batches == len(capsule.batches) == 33
    torch.manual_seed(0)
    nn.Linear(8, 4)
    expected = torch.randn(340, 16, 8)
    for recorded in capsule.batches:
        assert recorded.number == recorded.step
        assert torch.equal(recorded.batch["x"], expected[recorded.step])
        assert recorded.batch["name"] == "sea"
    assert [row["step"] for row in capsule.rows][-1] == 312
    state = capsule.state()
    assert state.step == 280
    assert state.tensors["model/weight"].shape == (4, 8)
    (event,) = [event for event in sealegs.open_run(tmp_path / "a").events if event.kind == "capsule"]
    assert event.detail["state"] == 280
    assert json.loads((tmp_path / "a/incidents/1/incident.json").read_text())["start"] == 300
    written = (tmp_path / "a/incidents/1/postmortem.md").read_text()
    assert written.startswith("# Post-mortem: incident 1, ")
    assert "- onset: step 300" in written
    assert "EMPTY: not diagnosed yet: run `sealegs postmortem a#1`" in written


def test_a_post_mortem_that_was_completed_is_not_written_over(tmp_path: Path) -> None:
    go_wrong_soon(tmp_path / "a")
    folder = tmp_path / "a" / "incidents" / "1"
    (folder / "postmortem.md").write_text("complete")
    (folder / "replay.json").write_text("{}")
    incident = json.loads((folder / "incident.json").read_text())
    write.write_draft(folder, incident, ())
    assert (folder / "postmortem.md").read_text() == "complete"


def test_a_draft_knows_the_rows_that_the_run_went_back_over(tmp_path: Path) -> None:
    go_wrong_soon(tmp_path / "a")
    run, folder = tmp_path / "a", tmp_path / "a" / "incidents" / "1"
    incident = json.loads((folder / "incident.json").read_text())
    incident |= {"kind": "spike", "start": 60, "peak": 62, "peak_loss": 9.0, "end": 80, "trajectory": "fast"}
    incident["recovery_loss"] = 2.0
    rows = [
        {"step": step, "batch_index": step, "loss": 9.0 if step > 60 else 2.0, "grad_norm": 1.0} for step in range(65)
    ]
    again = [{"step": step, "batch_index": step + 10, "loss": 2.0, "grad_norm": 1.0} for step in range(50, 81)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (*rows, *again)))
    write.write_draft(folder, incident, again)
    written = (folder / "postmortem.md").read_text()
    assert "- batch index: 60 to 64 (steps 60 to 64)" in written
    assert "- loss 500 steps after the peak (mean of up to 10 rows): the record ends at step 80" in written


def test_a_batch_that_the_loop_has_changed_is_not_taken_for_the_one_it_got(tmp_path: Path) -> None:
    handed = BatchHandle(3, 3, torch.zeros(2), 8, (0,))
    assert handed.recorded()["batch"] is not None
    handed.batch.add_(1.0)
    assert handed.recorded()["batch"] is None


def test_without_snapshots_a_checkpoint_is_linked_and_outlives_its_rotation(tmp_path: Path) -> None:
    go_wrong(tmp_path / "a", checkpoint_every=Checkpointing(every=20, keep=1, snapshot_every=20))
    capsule = open_capsule(tmp_path / "a" / "incidents" / "1")
    state = capsule.description.state
    assert state is not None
    assert 20 <= state <= 300  # on a slow disk one is asked for again when the one before it is written
    for path in (tmp_path / "a" / "checkpoints").rglob("*"):
        if path.is_file():
            path.unlink()
    assert capsule.state().tensors["model/weight"].shape == (4, 8)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (replace(SMALL, snapshot_memory=None), "neither a snapshot nor a checkpoint from before step 30"),
        (replace(SMALL, capsule_bytes=1000.0), "4.0 KiB are more than is left of the budget"),
    ],
)
def test_what_cannot_be_kept_is_named(how: Checkpointing, why: str, tmp_path: Path) -> None:
    go_wrong_soon(tmp_path / "a", checkpoint_every=how)
    capsule = open_capsule(tmp_path / "a" / "incidents" / "1")
    assert why in capsule.description.without_state
    assert len(capsule.batches) > 30
    with pytest.raises(SourceError, match="cannot be run again"):
        capsule.state()


def test_none_is_written_where_none_is_wanted(tmp_path: Path) -> None:
    go_wrong_soon(tmp_path / "a", checkpoint_every=replace(SMALL, capsule_bytes=0))
    assert not (tmp_path / "a" / "incidents").exists()


def go_wrong_again_and_again(folder: Path, incidents: int, **how: Any) -> None:
    """An incident every 110 steps, by numbers that need no training."""
    model = nn.Linear(2, 2)
    budget = sealegs.Budget(total=10_000, share=1.0)
    options = {**OBSERVE, "detection": sealegs.Detection(budget=budget), "act": False} | how
    with sealegs.Guard(model, SGD(model.parameters(), lr=0.1), run=folder, **options) as guard:
        for step, _ in enumerate(guard.batches(list(torch.randn(110 * incidents, 64, 8)))):
            is_bad = 60 <= step % 110 < 64
            guard.step(torch.tensor(math.nan if is_bad else 2.0 + step % 7 / 100), grad_norm=1.0)


def test_what_all_capsules_take_is_bounded_however_many_incidents_there_are(tmp_path: Path) -> None:
    """Also by a process that goes on with the run; each incident still has its file and its draft."""
    bounded = replace(SMALL, capsule_bytes=2e5)
    go_wrong_again_and_again(tmp_path / "a", 3, checkpoint_every=bounded)
    folders = {int(path.name): path for path in (tmp_path / "a" / "incidents").iterdir()}
    assert sorted(folders) == [1, 2, 3]
    taken = {
        number: sum(p.stat().st_size for p in (path / "capsule").rglob("*") if p.is_file())
        for number, path in folders.items()
    }
    assert sum(taken.values()) < 2e5 + max(taken.values())
    assert taken[1] > 1e5 > 1e4 > taken[3]
    last = open_capsule(folders[3])
    assert (last.batches, last.rows, last.description.state) == ((), (), None)
    assert last.description.without_batches == "the bytes for capsules are spent"
    assert (folders[3] / "postmortem.md").read_text().startswith("# Post-mortem: incident 3, ")
    resumed = FlightRecorder(
        training=TrainingState(model=nn.Linear(1, 1), optimizers=[]),
        watch=Watch(tmp_path / "a", resume=True),
        snapshots=Snapshots(nn.Linear(1, 1), [], memory=0),
        checkpoints=None,
        ranks=Collective(),
        acts=False,
        budget=2e5,
    )
    assert not resumed._has_room()


def test_the_draft_of_a_post_mortem_reads_the_end_of_a_long_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_wrong_soon(tmp_path / "a")
    folder = tmp_path / "a" / "incidents" / "1"
    record = tmp_path / "a" / "events.jsonl"
    whole = record.read_bytes()
    record.write_bytes(b'{"time":1.0,"step":0,"kind":"checkpoint"}\n' * 1000 + whole)
    monkeypatch.setattr(write, "EVENTS_TAIL", len(whole) + 500)
    given: list[int] = []

    def counting(*args: Any, **options: Any) -> Any:
        given.append(len(args[3]))
        return draft(*args, **options)

    monkeypatch.setattr(write, "draft", counting)
    before = (folder / "postmortem.md").read_text()
    write.write_draft(folder, json.loads((folder / "incident.json").read_text()), ())
    assert given[0] < 20 + whole.count(b"\n")
    assert (folder / "postmortem.md").read_text().splitlines()[0] == before.splitlines()[0]


def test_a_batch_of_a_strange_type_costs_an_event_and_no_more(tmp_path: Path) -> None:
    go_wrong_soon(tmp_path / "a", make=lambda x: {"x": x, "iterator": object()})
    kinds = [event.kind for event in sealegs.open_run(tmp_path / "a").events]
    assert "capsule-failed" in kinds
    with pytest.raises(SourceError, match="no incident with a capsule"):
        open_capsule(tmp_path / "a" / "incidents" / "1")


def test_a_state_that_finds_no_room_is_named_in_the_capsule_and_at_the_end(tmp_path: Path) -> None:
    with (
        DiskLayer(tmp_path / "a" / "incidents" / "1" / "capsule" / f".state.{os.getpid()}.partial", Fault("full", 1)),
        pytest.warns(sealegs.FolderIncomplete, match="incidents/1 is not whole"),
    ):
        go_wrong_soon(tmp_path / "a")
    capsule = open_capsule(tmp_path / "a" / "incidents" / "1")
    assert capsule.description.state is None
    assert "no state: the state of step 1 could not be written" in capsule.description.without_state
    assert "No space left on device" in capsule.description.without_state
    assert len(capsule.batches) > 10
    kinds = [event.kind for event in sealegs.open_run(tmp_path / "a").events]
    assert "capsule-failed" in kinds
    assert "checkpoint-failed" not in kinds


def test_every_file_of_a_capsule_is_whole_or_not_there(tmp_path: Path) -> None:
    capsule = tmp_path / "a" / "incidents" / "1" / "capsule"
    with (
        DiskLayer(capsule / f".manifest.json.{os.getpid()}.partial", Fault("full", 1)),
        pytest.warns(sealegs.FolderIncomplete, match="incidents/1 is not whole"),
    ):
        go_wrong_soon(tmp_path / "a")
    assert not (capsule / "manifest.json").exists()
    assert not write.is_whole(capsule)


def test_checkpoints_that_cannot_be_listed_cost_a_capsule_its_state_and_a_run_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    how: dict[str, Any] = {**OBSERVE, "checkpoint_every": Checkpointing(every=20), "act": False}
    guard = sealegs.Guard(model, optimizer, run=tmp_path / "a", **how)
    with DiskLayer(tmp_path / "a" / "checkpoints") as disk:
        for x in guard.batches(list(torch.randn(60, 16, 8))):
            if guard.number >= 30 and not (tmp_path / "a" / "incidents").exists():
                assert guard.loop.checkpoints is not None
                guard.loop.checkpoints.wait()  # whose calls are not meant
                disk.strike("error")
            loss = (model(x) - x[:, :4]).square().mean() * (math.nan if guard.number >= 30 else 1.0)
            loss.backward()
            guard.step(loss)
            if guard.number > 36:
                break
        disk.fault = None
        with pytest.warns(sealegs.FolderIncomplete, match="incidents/1 is not whole"):
            guard.close()
    assert "checkpoints: cannot be listed" in open_capsule(tmp_path / "a" / "incidents" / "1").description.without_state


@pytest.mark.parametrize("left", ["capsule.json", "state"])
def test_a_capsule_that_a_kill_cut_short_is_written_anew(tmp_path: Path, left: str) -> None:
    """A resume from before the incident meets it again."""
    go_wrong_soon(tmp_path / "a")
    capsule = tmp_path / "a" / "incidents" / "1" / "capsule"
    assert open_capsule(capsule.parent).description.state == 1
    if left == "state":
        shutil.rmtree(capsule / "state")
    else:
        (capsule / "capsule.json").unlink()
    for name in ("metrics.jsonl", "events.jsonl"):
        (tmp_path / "a" / name).rename(tmp_path / name)
    go_wrong_soon(tmp_path / "a", resume=True)
    again = open_capsule(tmp_path / "a" / "incidents" / "1")
    assert again.description.state == 1
    assert again.state().step == 1


def test_a_line_that_was_torn_costs_a_capsule_no_more_than_that_line(tmp_path: Path) -> None:
    """A resume ends it with a line break: it is a line then, and no JSON."""
    go_wrong_soon(tmp_path / "a")
    run = tmp_path / "a"
    (run / "events.jsonl").write_bytes(b'{"kind":"sta\n' + (run / "events.jsonl").read_bytes())
    incident = json.loads((run / "incidents" / "1" / "incident.json").read_text())
    shutil.rmtree(run / "incidents")
    rows = [{"step": 30, "loss": 1.0}]
    (run / "metrics.jsonl").write_bytes(b'{"step":0,"loss":1.0}\n{"step":1,"lo\n{"step":2,"loss":3.0}\n{"step":3,"l')
    assert [row["step"] for row in write.rows_before(run / "metrics.jsonl", rows)] == [0, 2]
    (run / "incidents" / "1").mkdir(parents=True)
    write.write_draft(run / "incidents" / "1", incident, rows)
    assert (run / "incidents" / "1" / "postmortem.md").exists()


def test_an_early_incident_can_be_run_again(tmp_path: Path) -> None:
    go_wrong_soon(tmp_path / "a", checkpoint_every=replace(SMALL, snapshot_every=50))
    capsule = open_capsule(tmp_path / "a" / "incidents" / "1")
    assert (capsule.incident.kind, capsule.incident.start, capsule.description.state) == ("nonfinite", 30, 1)
    assert 30 in capsule.steps()


def test_a_capsule_ends_where_the_run_goes_back(tmp_path: Path) -> None:
    """What was trained on in another attempt is not what came of it."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    data = list(torch.randn(400, 16, 8))
    went_back_at = None
    with sealegs.Guard(model, optimizer, run=tmp_path / "a", **OBSERVE) as guard:
        for x in guard.batches(data):
            factor = 50.0 if went_back_at is None and guard.number >= 300 else 1.0
            loss = (model(x) - x[:, :4]).square().mean() * factor
            loss.backward()
            guard.step(loss)
            if went_back_at is None and (tmp_path / "a" / "incidents").exists():
                went_back_at = guard.number
                guard.ask("rollback")
                assert guard.number < 300
            if guard.number == 340:
                break
    capsule = open_capsule(tmp_path / "a" / "incidents" / "1")
    assert went_back_at is not None
    assert capsule.steps() == range(280, went_back_at)
    assert [row["step"] for row in capsule.rows] == list(range(went_back_at))


def test_after_a_resume_a_capsule_has_the_rows_from_before(tmp_path: Path) -> None:
    """And the checkpoint that the run went on from: what goes wrong at a resume does so at once."""
    torch.manual_seed(0)
    data = list(torch.randn(400, 16, 8))

    def resume_at(last: int, *, factor: float = 1.0, **how: Any) -> None:
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = AdamW(model.parameters(), lr=1e-3)
        with sealegs.Guard(model, optimizer, run=tmp_path / "a", **{**OBSERVE, "act": False}, **how) as guard:
            for x in guard.batches(data):
                loss = (model(x) - x[:, :4]).square().mean() * factor
                loss.backward()
                guard.step(loss)
                if guard.number == last:
                    guard.checkpoint(wait=True)
                    break

    resume_at(300)
    resume_at(320, factor=50.0, resume=True)
    capsule = open_capsule(tmp_path / "a" / "incidents" / "1")
    assert capsule.description.state == 300
    assert capsule.incident.start == 300
    last = capsule.description.opened + write.AFTER
    assert [row["step"] for row in capsule.rows] == list(range(last + 1))
    assert capsule.steps() == range(300, last + 1)


def test_no_more_is_kept_than_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "BATCH_BYTES", 20 * 16 * 8 * 4)
    go_wrong_soon(tmp_path / "a")
    capsule = open_capsule(tmp_path / "a" / "incidents" / "1")
    assert sum(each.step <= capsule.description.opened for each in capsule.batches) == 20
    assert "are gone" in capsule.description.without_batches
    assert len(capsule.steps()) == 0


def go_through(folder: Path, bad: Sequence[int], steps: int, **how: Any) -> Path:
    """Losses that need no training, NaN at some steps, through a guard that acts. Gives the folder of incidents."""
    model = nn.Linear(2, 2)
    with sealegs.Guard(model, SGD(model.parameters(), lr=0.1), run=folder, **{**OBSERVE, **how}) as guard:
        for step, _ in enumerate(guard.batches(list(torch.randn(steps, 2, 8)))):
            guard.step(torch.tensor(math.nan if step in bad else 2.0 + step % 7 / 100), grad_norm=1.0)
    return folder / "incidents"


def test_a_single_step_that_is_not_finite_leaves_a_capsule(tmp_path: Path) -> None:
    incidents = go_through(tmp_path / "a", [70], 100)
    assert [path.name for path in incidents.iterdir()] == ["step-70"]
    capsule = open_capsule(incidents / "step-70")
    assert (capsule.incident.number, capsule.incident.start, capsule.incident.kind) == (0, 70, "nonfinite")
    assert capsule.description.state == 60  # not proven yet, and a state of the run all the same
    assert 70 in capsule.steps()
    assert capsule.description.last == capsule.steps().stop - 1
    assert capsule.state().step == 60
    assert not (incidents / "step-70" / "postmortem.md").exists()
    (event,) = [event for event in sealegs.open_run(tmp_path / "a").events if event.kind == "capsule"]
    assert event.detail["text"] == "incidents/step-70/capsule: 12 batches, the state of step 60"
    assert "incident" not in event.detail


def test_a_step_that_is_the_last_leaves_one_too(tmp_path: Path) -> None:
    assert 49 in open_capsule(go_through(tmp_path / "a", [49], 50) / "step-49").steps()


def test_steps_of_an_incident_leave_none_of_their_own(tmp_path: Path) -> None:
    incidents = go_through(tmp_path / "a", [40, 41, 42], 70)
    assert [path.name for path in incidents.iterdir()] == ["1"]


def test_a_capsule_is_extended_to_later_steps_for_as_long_as_its_state_reaches_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "EXTENSIONS", 2)
    incidents = go_through(tmp_path / "a", [40, 80, 120, 190], 220)
    assert [path.name for path in incidents.iterdir()] == ["step-40"]
    capsule = open_capsule(incidents / "step-40")
    assert capsule.steps() == range(20, 120 + write.AFTER + 1)
    assert capsule.description.batches == len(capsule.batches) == len(capsule.steps())


def test_single_steps_leave_few_capsules_and_the_newest_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "EXTENSIONS", 0)
    monkeypatch.setattr(write, "APART", 100)
    incidents = go_through(tmp_path / "a", [40, 90, 150, 260, 370], 400)
    assert {path.name for path in incidents.iterdir()} == {"step-150", "step-260", "step-370"}
    assert write.single_steps(incidents) == [150, 260, 370]


def test_the_state_of_a_single_step_takes_a_small_part_of_the_budget(tmp_path: Path) -> None:
    """A snapshot of more than that is not written, and without a checkpoint the step is given up, with a sentence."""
    incidents = go_through(tmp_path / "a", [40, 70], 90, checkpoint_every=replace(SMALL, capsule_bytes=20_000))
    assert not write.single_steps(incidents)
    (event,) = [event for event in sealegs.open_run(tmp_path / "a").events if event.kind == "capsule"]
    assert "step 40 is not finite, and cannot be run again: no state" in event.detail["text"]


def test_a_capsule_is_not_extended_with_another_attempt(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    with sealegs.Guard(model, optimizer, run=tmp_path / "a", **OBSERVE) as guard:
        has_gone_back = False
        for _ in guard.batches(list(torch.randn(200, 2, 8))):
            bad = guard.number == (80 if has_gone_back else 50)
            guard.step(torch.tensor(math.nan if bad else 2.0 + guard.number % 7 / 100), grad_norm=1.0)
            if guard.number == 60 and not has_gone_back:
                has_gone_back = True
                guard.ask("rollback")
                assert guard.number < 50
            if guard.number == 100:
                break
    capsule = open_capsule(tmp_path / "a" / "incidents" / "step-50")
    assert capsule.steps() == range(40, 60)
