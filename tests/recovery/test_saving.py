"""What a run says and does when its disk is full, or its folder is gone: it goes on, and never silently."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.disk.layer import DiskLayer, Fault
from torch import nn

import sealegs
from sealegs import FolderIncomplete, Guard, Playbook
from sealegs.errors import StorageError
from sealegs.guard_options import Telemetry
from sealegs.record import requests
from sealegs.record.events import load_events
from sealegs.recovery import requests as request_queue


class Guarded(Guard):
    """A guard that knows its model, so that tests need not."""

    def __init__(self, folder: Path, **how: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        super().__init__(self.model, optimizer, run=folder, **{"checkpoint_every": 4, **how})


def go_on(guard: Guarded, until: int) -> None:
    """Train to a step; whatever is being written is written before the next one."""
    for batch in guard.batches(torch.arange(400.0).reshape(100, 1, 4).sin()):
        loss = guard.model(batch).square().mean()
        loss.backward()
        guard.step(loss)
        assert guard.loop.checkpoints is not None
        guard.loop.checkpoints.wait()
        if guard.number >= until:
            break


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [dict(event.detail) for event in load_events(folder / "events.jsonl") if event.kind == kind]


def steps_on_disk(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdecimal())


# A full disk.


def test_checkpoints_that_could_not_be_written_are_told_of_at_the_end(tmp_path: Path) -> None:
    told = tmp_path / "told"
    guard = Guarded(tmp_path / "a", telemetry=Telemetry(notify=["tee", "-a", str(told)]))
    go_on(guard, 6)
    assert guard.missing == ""
    with DiskLayer(tmp_path / "a" / "checkpoints", Fault("full", 1)):
        go_on(guard, 13)
        with pytest.warns(FolderIncomplete, match="2 checkpoints could not be written, the last of step 12") as warned:
            guard.close()
    assert [Path(each.filename).name for each in warned] == ["test_saving.py"]
    missing = guard.missing
    assert missing == "2 checkpoints could not be written, the last of step 12; the newest on disk is of step 4"
    (end,) = events(tmp_path / "a", "end")
    assert (end["reason"], end["missing"]) == ("finished", missing)
    assert missing in told.read_text()
    assert sealegs.open_run(tmp_path / "a").steps.tolist() == list(range(13))
    assert steps_on_disk(tmp_path / "a") == [4]


def test_a_checkpoint_after_one_that_failed_makes_up_for_it(tmp_path: Path) -> None:
    guard = Guarded(tmp_path / "a")
    with DiskLayer(tmp_path / "a" / "checkpoints", Fault("full", 1)):
        go_on(guard, 6)
    go_on(guard, 9)
    assert steps_on_disk(tmp_path / "a") == [8]
    assert len(events(tmp_path / "a", "checkpoint-failed")) == 1
    guard.close()
    assert not guard.missing


def test_checkpoints_that_somebody_has_deleted_are_missed(tmp_path: Path) -> None:
    guard = Guarded(tmp_path / "a")
    go_on(guard, 6)
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    with pytest.warns(FolderIncomplete, match="the checkpoint of step 4 was written and is gone; there is none on"):
        guard.close()


def test_one_that_is_waited_for_and_fails_is_an_error_that_says_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train() -> None:
        with DiskLayer(tmp_path / "a" / "checkpoints") as disk, Guarded(tmp_path / "a") as guard:
            go_on(guard, 5)
            disk.strike("full")
            guard.checkpoint(wait=True)

    with pytest.raises(StorageError, match=r"checkpoints/5: cannot be written \(No space left"):
        train()
    told = "a checkpoint could not be written, the last of step 5; the newest on disk is of step 4"
    assert told in capsys.readouterr().err
    assert [(end["reason"], end["missing"]) for end in events(tmp_path / "a", "end")] == [("failed", told)]


def test_where_warnings_are_errors_the_folder_is_let_go_of_all_the_same(tmp_path: Path) -> None:
    guard = Guarded(tmp_path / "a")
    with DiskLayer(tmp_path / "a" / "checkpoints", Fault("full", 1)):
        go_on(guard, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FolderIncomplete)
        with pytest.raises(FolderIncomplete):
            guard.close()
    assert not requests.is_under_way(tmp_path / "a")


def test_the_last_one_is_tried_again_at_the_end_of_a_loop_that_asks_for_it(tmp_path: Path) -> None:
    guard = Guarded(tmp_path / "a")
    with DiskLayer(tmp_path / "a" / "checkpoints", Fault("full", 1)):
        go_on(guard, 4)
    guard.loop.save_last()
    guard.close()
    assert steps_on_disk(tmp_path / "a") == [4]


def test_a_slow_disk_holds_up_no_step(tmp_path: Path) -> None:
    guard = Guarded(tmp_path / "a", checkpoint_every=10**6)
    with DiskLayer(tmp_path / "a" / "checkpoints", Fault("slow", 1)):
        go_on(guard, 3)
        assert guard.checkpoint()
        assert guard.loop.checkpoints is not None
        while guard.loop.checkpoints.is_writing:
            loss = guard.model(torch.ones(1, 4)).square().mean()
            loss.backward()
            guard.step(loss)
        guard.close()
    assert guard.number > 20
    assert not guard.missing
    assert steps_on_disk(tmp_path / "a") == [3]
    assert sealegs.open_run(tmp_path / "a").steps.tolist() == list(range(guard.number))


def test_a_request_that_cannot_be_taken_out_of_its_folder_is_not_carried_out_and_stops_no_run(tmp_path: Path) -> None:
    """A disk that fails, or a folder of another user's."""
    guard = Guarded(tmp_path / "a", playbook=Playbook.observe())
    go_on(guard, 3)
    requests.leave(tmp_path / "a", ("lr", "0.5"))
    with DiskLayer(tmp_path / "a" / "requests", Fault("read-only", 1)):
        go_on(guard, 6)
    with DiskLayer(tmp_path / "a" / "requests", Fault("error", 1)):
        go_on(guard, 7)
    assert events(tmp_path / "a", "intervention") == []
    go_on(guard, 9)
    guard.close()
    assert len(events(tmp_path / "a", "intervention")) == 1


# A folder that is gone.


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sealegs.record.writer.LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(request_queue, "ASK_EVERY_S", 0.0)


def test_a_folder_that_is_deleted_is_told_of_at_once_and_not_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = tmp_path / "told"
    guard = Guarded(tmp_path / "a", telemetry=Telemetry(notify=["tee", "-a", str(told)]))
    go_on(guard, 5)
    shutil.rmtree(tmp_path / "a")
    go_on(guard, 6)
    gone = f"{tmp_path / 'a'}: deleted while the run was writing to it"
    assert capsys.readouterr().err.startswith(f"sealegs: {gone}")
    go_on(guard, 13)
    assert not (tmp_path / "a").exists()
    with pytest.warns(FolderIncomplete, match="2 checkpoints could not be written, the last of step 12; there is none"):
        guard.close()
    assert guard.missing.startswith(gone)
    assert guard.number == 13
    assert "a: its folder is gone (step 5)" in told.read_text()


def test_a_folder_that_comes_back_is_written_to_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    guard = Guarded(tmp_path / "a")
    go_on(guard, 5)
    (tmp_path / "a").rename(tmp_path / "b")
    go_on(guard, 9)
    (tmp_path / "b").rename(tmp_path / "a")
    go_on(guard, 13)
    guard.close()
    assert not guard.missing
    assert steps_on_disk(tmp_path / "a") == [4, 12]
    (lost,), (back,) = events(tmp_path / "a", "folder-lost"), events(tmp_path / "a", "folder-back")
    assert f"moved away to {tmp_path / 'b'}" in lost["text"]
    assert "is back" in back["text"]
    *said, cost = capsys.readouterr().err.splitlines()
    assert said == [f"sealegs: {lost['text']}", f"sealegs: {back['text']}"]
    assert "stability cost" in cost


def test_another_run_in_its_place_is_neither_written_to_nor_obeyed_nor_gone_back_to(tmp_path: Path) -> None:
    """The stranger has a checkpoint that is newer, and a request that waits."""
    other = Guarded(tmp_path / "other", playbook=Playbook.standard())
    go_on(other, 9)
    other.close()
    requests.leave(tmp_path / "other", ("halt",))
    guard = Guarded(tmp_path / "a", playbook=Playbook.standard())
    go_on(guard, 5)
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "other").rename(tmp_path / "a")
    before = {path: path.read_bytes() for path in sorted((tmp_path / "a").rglob("*")) if path.is_file()}
    go_on(guard, 10)
    assert guard.loop.checkpoints is not None
    assert guard.loop.checkpoints.newest_intact() == (None, [])
    with pytest.raises(StorageError, match="something else has its name"):
        guard.ask("lr", "0.5")  # what it does could not be written down, so that it is not done
    assert guard.loop.recovery is not None
    with pytest.warns(FolderIncomplete, match="something else has its name"):
        guard.close()
    assert {path: path.read_bytes() for path in sorted((tmp_path / "a").rglob("*")) if path.is_file()} == before
    assert sealegs.open_run(tmp_path / "b").steps.tolist() == list(range(10))
    assert json.loads((tmp_path / "b" / "events.jsonl").read_text().splitlines()[-1])["kind"] == "end"


@pytest.mark.parametrize("every", [20, 7], ids=["begun at the last step", "begun by the end"])
def test_the_last_checkpoint_is_judged_by_the_steps_before_it_whoever_began_it(every: int, tmp_path: Path) -> None:
    """One that was due at the last step is being written when the loop comes to its end."""
    with Guarded(tmp_path / "a", checkpoint_every=every, playbook=sealegs.Playbook.observe()) as guard:
        go_on(guard, 20)
        guard.loop.save_last()
    tags = json.loads((tmp_path / "a" / "checkpoints" / "tags.json").read_text())
    assert tags["20"]["tag"] == "healthy"
