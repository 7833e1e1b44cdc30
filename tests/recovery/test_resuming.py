"""Runs that are killed, preempted and interrupted again and again: where each goes on, and what it still knows."""

import json
import math
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import sealegs
from sealegs import Guard, Playbook
from sealegs.guard_options import Checkpointing, Telemetry
from sealegs.record.events import load_events
from sealegs.recovery.actions import Continue
from sealegs.recovery.playbook import Rung
from sealegs.recovery.recurrence import Trigger
from sealegs.state import checkpoint_files

Bad = Callable[[Guard], float]
PLAYBOOKS: dict[str, Callable[[], Playbook]] = {
    "standard": Playbook.standard,
    "observe": Playbook.observe,
    "for something else": lambda: Playbook(name="mine", rungs=(Rung({Trigger.SPOILT}, (Continue(),)),)),
}


def decayed(step: int) -> float:
    return 1 / (1 + step / 50)


def data() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 4, generator=generator) for _ in range(300)]


class Average:
    """What a loop keeps of its own."""

    def __init__(self) -> None:
        self.total = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


class Job:
    """A training that can be started, and started again, in one folder."""

    def __init__(self, folder: Path, *, playbook: str = "standard", every: int = 20, samples: int = 0) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.1))
        self.average = Average()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.guard = Guard(
            self.model,
            optimizer,
            run=folder,
            scheduler=LambdaLR(optimizer, decayed),
            resume="auto",
            playbook=PLAYBOOKS[playbook](),
            checkpoint_every=Checkpointing(every=every, keep=9, snapshot_every=20, also={"average": self.average}),
            telemetry=Telemetry(sample_every=samples),
        )
        self.began_at = self.guard.number

    def train(self, until: int, bad: Bad = lambda guard: 1.0, *, busy_from: int | None = None) -> None:
        """Up to a step; ``bad`` gives what a loss is multiplied with; ``busy_from`` is where the disk turns slow."""
        is_fast = True
        for batch in self.guard.batches(data()):
            is_fast = is_fast and self.guard.number != busy_from
            loss = (self.model(batch) - batch.sum(1, keepdim=True)).square().mean() + 1
            loss = loss * bad(self.guard)
            loss.backward()
            self.guard.step(loss)
            if not self.guard.is_probe:
                self.average.total += float(loss.detach())
            if is_fast:
                assert self.guard.loop.checkpoints is not None
                self.guard.loop.checkpoints.wait()  # as on a disk that is faster than the training
            if self.guard.number >= until:
                break

    def tags(self) -> dict[int, str]:
        assert self.guard.loop.checkpoints is not None
        return dict(self.guard.loop.checkpoints.tags())

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *error: Any) -> None:
        self.guard.__exit__(*error)


def kill(folder: Path) -> Path:
    """The folder as a kill would leave it at this moment, to go on in."""
    left = folder.with_name(f"{folder.name}-killed")
    shutil.copytree(folder, left)
    return left


def once(*steps: int) -> Bad:
    """NaN at these steps, when they come for the first time."""
    left = set(steps)

    def bad(guard: Guard) -> float:
        if guard.number not in left:
            return 1.0
        left.discard(guard.number)
        return math.nan

    return bad


def forget_proofs(folder: Path) -> None:
    """As if the process had been killed before any checkpoint but the first was proven."""
    tags = folder / "checkpoints" / "tags.json"
    known = json.loads(tags.read_text())
    tags.write_text(json.dumps({step: entry for step, entry in known.items() if step == "0"}))


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    return [{"step": e.step, **e.detail} for e in load_events(folder / "events.jsonl") if e.kind in kinds]


# Preempted before the first step.


@pytest.mark.parametrize("playbook", ["standard", "observe"])
def test_resumes_that_are_preempted_before_their_first_step_begin_at_the_same_one(
    tmp_path: Path, playbook: str
) -> None:
    """As a job does that saves when it is told to stop, four times: 60, 60, 60, 60, and not 60, 40, 0, 0."""
    with Job(tmp_path / "a", playbook=playbook) as job:
        job.train(60)
        job.guard.checkpoint(wait=True)
        before = job.weights()
    for _ in range(4):
        with Job(tmp_path / "a", playbook=playbook) as job:
            assert job.began_at == 60
            assert all(map(torch.equal, job.weights(), before))
            job.guard.checkpoint(wait=True)
            assert job.tags()[60] == "healthy"
    assert len(events(tmp_path / "a", "checkpoint-kept")) == 4
    assert [each["checkpoint"] for each in events(tmp_path / "a", "resume")] == [60] * 4


def test_lives_that_are_shorter_than_a_proof_come_forward_all_the_same(tmp_path: Path) -> None:
    """Ten steps each, then told to stop: the healthy steps of the lives before count."""
    began = []
    for _ in range(5):
        with Job(tmp_path / "a", every=1000) as job:
            began.append(job.began_at)
            job.train(job.began_at + 10)
            job.guard.checkpoint(wait=True)
            tags = job.tags()
    assert began == [0, 10, 20, 30, 40]
    assert tags[50] == "healthy"


def test_what_a_killed_process_has_counted_still_counts(tmp_path: Path) -> None:
    """Killed after twelve steps, twice: sixteen healthy steps have come of the first checkpoint all the same."""
    folder = tmp_path / "a"
    for began, last in ((0, 12), (10, 22)):
        job = Job(folder, every=5)
        assert job.began_at == began
        job.train(last)
        folder, tags = kill(folder), job.tags()
        job.guard.close()
    assert tags == {0: "healthy", 5: "healthy", 10: "candidate", 15: "candidate", 20: "candidate"}
    with Job(folder, every=5) as job:
        assert job.began_at == 5, "the newest that is proven"
        assert set(job.tags().values()) == {"healthy", "suspect"}, "later ones are of another line"


def test_a_run_that_goes_on_at_step_0_has_the_first_row_of_a_new_one(tmp_path: Path) -> None:
    for _ in range(2):
        job = Job(tmp_path / "a", samples=1)
        assert job.began_at == 0
        job.train(1)
        job.guard.loop.fail(KeyboardInterrupt())
        job.guard.close()
    first, second = (json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_bytes().splitlines())
    measured = {"time", "step_s", "saving"}
    assert {name: first[name] for name in first if name not in measured} == {
        name: second[name] for name in second if name not in measured
    }


# Where a resume begins, if nothing is proven.


def test_where_nothing_is_proven_the_newest_intact_one_is_taken_and_not_step_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path / "a")
    job.train(30)
    assert job.tags() == {0: "healthy", 20: "candidate"}
    left = kill(tmp_path / "a")
    job.guard.close()
    with Job(left) as job:
        assert job.began_at == 20
        (said,) = events(left, "resume")
        assert said["checkpoint"] == 20
        assert "no checkpoint is proven yet" in said["because"]
        assert "no checkpoint is proven yet" in capsys.readouterr().err
        job.train(40)
        assert job.tags()[20] == "healthy", "sixteen healthy steps have come of it, whoever saved it"


@pytest.mark.parametrize("playbook", ["observe", "for something else"])
def test_where_nothing_is_proven_it_is_one_from_before_the_trouble(tmp_path: Path, playbook: str) -> None:
    """A checkpoint that was saved after the onset of an incident is not gone on from, however often it is resumed."""
    job = Job(tmp_path / "a", playbook=playbook, every=15)
    job.train(47, once(37, 38, 39))
    assert len(events(tmp_path / "a", "alarm")) == 1
    folder = kill(tmp_path / "a")
    job.guard.close()
    forget_proofs(folder)
    for attempt in range(3):
        job = Job(folder, playbook=playbook, every=15)
        assert job.began_at == 30
        *_, said = events(folder, "resume")
        assert "no checkpoint is proven yet" in said["because"]
        assert ("after the onset of an incident at step 37" in said["passed_over"]["45"]) == (attempt == 0)
        folder = kill(folder)
        job.guard.close()


@pytest.mark.parametrize("has_first", [True, False])
def test_never_silently_from_step_0_nor_from_scratch(
    tmp_path: Path, has_first: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that there is was saved after the onset of an incident, or is step 0."""
    job = Job(tmp_path / "a", playbook="for something else", every=15)
    job.train(20, once(5, 6, 7))
    folder = kill(tmp_path / "a")
    job.guard.close()
    if not has_first:
        shutil.rmtree(folder / "checkpoints" / "0")
    capsys.readouterr()
    with Job(folder, playbook="for something else", every=15) as job:
        assert job.began_at == (0 if has_first else 15), "better than none"
    said = "no checkpoint after step 0 is to be trusted" if has_first else "all are from within an incident"
    assert said in capsys.readouterr().err
    assert said in events(folder, "resume")[0]["because"]


# What a rollback went to.


class Interruption:
    """NaN at steps 50 to 52, which bring the run back; then Ctrl-C, four steps later."""

    def __init__(self, let_go: Callable[[], None] = lambda: None) -> None:
        self.seen: list[int] = []
        self._bad = once(50, 51, 52)
        self._let_go = let_go

    def __call__(self, guard: Guard) -> float:
        self.seen.append(guard.number)
        if sorted(self.seen) != self.seen and len(self.seen) - self.seen.index(50) == 7:
            self._let_go()
            raise KeyboardInterrupt
        return self._bad(guard)


@pytest.mark.parametrize("is_busy", [False, True], ids=["at once", "after the checkpoint that is being written"])
def test_a_snapshot_that_the_run_went_back_to_survives_an_interruption(
    tmp_path: Path, is_busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a run has that was interrupted after a rollback, and gone on with, is what one has that was not."""
    with Job(tmp_path / "whole", every=45) as whole:
        whole.train(80, once(50, 51, 52))
    may_go_on, write = threading.Event(), checkpoint_files.write_tensors

    def write_later(folder: Path, *arguments: Any) -> None:
        if is_busy and folder.name.startswith(".45."):
            assert may_go_on.wait(60)
        write(folder, *arguments)

    monkeypatch.setattr(checkpoint_files, "write_tensors", write_later)
    with pytest.raises(KeyboardInterrupt), Job(tmp_path / "a", every=45) as job:
        job.train(80, Interruption(may_go_on.set), busy_from=45 if is_busy else None)
    (done,) = events(tmp_path / "a", "intervention")
    assert "the snapshot of step 20" in done["changed"]
    with Job(tmp_path / "a", every=45) as again:
        assert again.began_at == 20
        assert again.tags() == {0: "healthy", 20: "healthy", 45: "suspect"}
        again.train(80)
        assert all(map(torch.equal, again.weights(), whole.weights()))
        assert again.average.total == whole.average.total
    for signal in ("loss", "grad_norm", "lr", "batch_index"):
        columns = [sealegs.open_run(tmp_path / name).column(signal) for name in ("a", "whole")]
        assert columns[0].tobytes() == columns[1].tobytes(), signal


def test_a_run_without_checkpoints_writes_none_when_it_goes_back(tmp_path: Path) -> None:
    with Job(tmp_path / "a", every=0) as job:
        job.train(60, once(50, 51, 52))
        assert job.tags() == {0: "healthy"}
