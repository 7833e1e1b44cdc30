"""The shell around the user's loop."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import sealegs
from sealegs.errors import RunExists
from sealegs.vocabulary import Event, Row


class Remembering:
    """A sink that keeps what it is given, and breaks where it is told to."""

    name = "remembering"

    def __init__(self, breaks_at: str = "") -> None:
        self.breaks_at = breaks_at
        self.got: list[Any] = []

    def _take(self, what: str, value: Any) -> None:
        if what == self.breaks_at:
            raise ConnectionError("no answer")
        self.got.append(value)

    def start(self, manifest: Mapping[str, Any]) -> Mapping[str, Any] | None:
        self._take("start", manifest["run_id"])
        return {"name": self.name, "uri": "somewhere"}

    def row(self, row: Row) -> None:
        self._take("row", row["step"])

    def event(self, event: Event) -> None:
        self._take("event", event.kind)

    def close(self) -> None:
        self._take("close", "closed")


def test_a_loop_is_recorded(tmp_path: Path) -> None:
    with sealegs.Watch(tmp_path / "a", settings={"lr": 0.1}) as watch:
        for step in range(5):
            watch.see(step, loss=torch.tensor(1.0 / (step + 1)), grad_norm=0.5)
        watch.announce("note", text="hello")
    run = sealegs.open_run(tmp_path / "a")
    assert run.column("loss").tolist() == [torch.tensor(1.0 / (step + 1)).item() for step in range(5)]
    assert run.manifest.settings == {"lr": 0.1}
    assert [(event.kind, event.step) for event in run.events] == [("note", 4)]


def test_resume_goes_on_in_the_same_folder(tmp_path: Path) -> None:
    with sealegs.Watch(tmp_path / "a") as watch:
        watch.see(0, loss=1.0)
    with pytest.raises(RunExists):
        sealegs.Watch(tmp_path / "a")
    with sealegs.Watch(tmp_path / "a", resume=True) as watch:
        watch.see(1, loss=2.0)
    assert sealegs.open_run(tmp_path / "a").column("loss").tolist() == [1.0, 2.0]
    with sealegs.Watch(tmp_path / "a", resume=True, settings={"lr": 0.2}):
        pass
    assert sealegs.open_run(tmp_path / "a").manifest.settings == {"lr": 0.2}


def test_sinks_get_everything_and_the_manifest_keeps_the_tracker(tmp_path: Path) -> None:
    sink = Remembering()
    with sealegs.Watch(tmp_path / "a", sinks=[sink]) as watch:
        watch.see(0, loss=1.0)
        watch.announce("note")
        watch.see(1, loss=1.0)
    run = sealegs.open_run(tmp_path / "a")
    assert sink.got == [run.manifest.run_id, 0, "note", 1, "closed"]
    assert run.manifest.tracker == {"name": "remembering", "uri": "somewhere"}


@pytest.mark.parametrize("moment", ["start", "row", "event", "close"])
def test_a_sink_that_breaks_costs_one_event_and_no_step(tmp_path: Path, moment: str) -> None:
    broken, sound = Remembering(breaks_at=moment), Remembering()
    with sealegs.Watch(tmp_path / "a", sinks=[broken, sound]) as watch:
        for step in range(4):
            watch.see(step, loss=1.0)
            watch.announce("note")
    run = sealegs.open_run(tmp_path / "a")
    assert run.steps.tolist() == [0, 1, 2, 3]
    failures = [dict(event.detail) for event in run.events if event.kind == "sink-failed"]
    assert failures == [{"sink": "remembering", "reason": "no answer"}]
    assert [item for item in sound.got if isinstance(item, int)] == [0, 1, 2, 3]
    assert sound.got[-1] == "closed"
    if moment != "close":
        assert "sink-failed" in sound.got


def test_an_exception_in_the_loop_passes_and_leaves_a_sound_folder(tmp_path: Path) -> None:
    def loop() -> None:
        with sealegs.Watch(tmp_path / "a") as watch:
            watch.see(0, loss=1.0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert sealegs.open_run(tmp_path / "a").steps.tolist() == [0]
    sealegs.Watch(tmp_path / "a", resume=True).close()
