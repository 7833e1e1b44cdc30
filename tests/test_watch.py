"""The shell around the user's loop."""

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench.disk.layer import DiskLayer
from tests.acting import Acting

import sealegs
from sealegs.errors import ConfigError, RunExists, StorageError
from sealegs.judge import Detection
from sealegs.vocabulary import Event, Row, Severity


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
        watch.note("note", text="hello")
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
        watch.note("note")
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
            watch.note("note")
    run = sealegs.open_run(tmp_path / "a")
    assert run.steps.tolist() == [0, 1, 2, 3]
    failures = [dict(event.detail) for event in run.events if event.kind == "sink-failed"]
    assert failures == [{"sink": "remembering", "reason": "no answer"}]
    assert [item for item in sound.got if isinstance(item, int)] == [0, 1, 2, 3]
    assert sound.got[-1] == "closed"
    if moment in ("row", "event"):
        assert "sink-failed" in sound.got


def test_two_sinks_that_break_at_once_cost_two_events(tmp_path: Path) -> None:
    with sealegs.Watch(tmp_path / "a", sinks=[Remembering("row"), Remembering("event"), Remembering("row")]) as watch:
        watch.see(0, loss=1.0)
        watch.see(1, loss=1.0)
    run = sealegs.open_run(tmp_path / "a")
    assert run.steps.tolist() == [0, 1]
    assert [event.kind for event in run.events] == ["sink-failed"] * 3


def test_a_sink_that_breaks_is_closed(tmp_path: Path) -> None:
    broken = Remembering("row")
    with sealegs.Watch(tmp_path / "a", sinks=[broken]) as watch:
        watch.see(0, loss=1.0)
        assert broken.got[-1] == "closed"


def test_closing_twice_is_no_error_and_seeing_afterwards_touches_no_other_file(tmp_path: Path) -> None:
    with sealegs.Watch(tmp_path / "a") as watch:
        watch.see(0, loss=1.0)
        watch.close()
    with (tmp_path / "mine.txt").open("w+") as mine:
        with pytest.raises(StorageError, match="the run is closed"):
            watch.see(1, loss=2.0)
        watch.close()
        assert mine.read() == ""
    assert (tmp_path / "mine.txt").read_text() == ""


def test_a_folder_that_is_gone_does_not_stop_a_loop_that_is_only_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sealegs.record.writer.LOOK_EVERY_S", 0.0)
    sink = Remembering()
    watch = sealegs.Watch(tmp_path / "a", sinks=[sink])
    watch.see(0, loss=1.0)
    shutil.rmtree(tmp_path / "a")
    for step in range(1, 5):
        assert watch.see(step, loss=1.0).go
    assert sink.got[1:] == [0, "folder-lost", 1, 2, 3, 4]
    told = f"{tmp_path / 'a'}: deleted while the run was writing to it: nothing more can be saved there"
    assert capsys.readouterr().err == f"sealegs: {told}\n"
    with pytest.warns(sealegs.FolderIncomplete, match="deleted while"):
        watch.close()
    assert watch.missing == told


def test_rows_that_were_refused_are_told_of_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With an error, which ends the loop; and where the loop has gone on in spite of it."""

    def watched(disk: DiskLayer) -> None:
        with sealegs.Watch(tmp_path / "a") as watch:
            watch.see(0, loss=1.0)
            disk.strike("full")
            watch.see(1, loss=1.0)

    with DiskLayer(tmp_path) as disk:
        with pytest.raises(StorageError):
            watched(disk)
        disk.fault = None
        assert capsys.readouterr().err.endswith("complete: a row, from step 1 on, could not be written\n")
        watch = sealegs.Watch(tmp_path / "b")
        disk.strike("error")
        with pytest.raises(StorageError):
            watch.see(0, loss=1.0)
        watch.see(1, loss=1.0)
    with pytest.warns(sealegs.FolderIncomplete, match="a row, from step 0 on, could not be written"):
        watch.close()
    assert sealegs.open_run(tmp_path / "b").steps.tolist() == [1]


def test_numbers_of_any_kind_are_taken(tmp_path: Path) -> None:
    signals = {
        "loss": np.float32(1.5),
        "grad_norm": np.float64("nan"),
        "count": np.int64(7),
        "grads_finite": True,
        "params_finite": torch.tensor(False),
    }
    with sealegs.Watch(tmp_path / "a", settings={"lr": np.float32(0.5), "clip": math.inf}) as watch:
        watch.see(np.int64(3), **signals)  # type: ignore[arg-type]
    run = sealegs.open_run(tmp_path / "a")
    assert run.steps.tolist() == [3]
    values = {name: run.column(name)[0] for name in signals}
    assert math.isnan(values.pop("grad_norm"))
    assert values == {"loss": 1.5, "count": 7, "grads_finite": 1, "params_finite": 0}
    assert run.manifest.settings == {"lr": 0.5, "clip": "Infinity"}
    assert run.damaged_lines == 0


def test_an_event_says_its_own_step_and_keeps_its_head(tmp_path: Path) -> None:
    with sealegs.Watch(tmp_path / "a") as watch:
        watch.note("lr-drop", step=3, time="noon", kind_of="rule")
    (event,) = sealegs.open_run(tmp_path / "a").events
    assert (event.kind, event.step, event.detail) == ("lr-drop", 3, {"kind_of": "rule"})


def test_an_exception_in_the_loop_passes_and_leaves_a_sound_folder(tmp_path: Path) -> None:
    def loop() -> None:
        with sealegs.Watch(tmp_path / "a") as watch:
            watch.see(0, loss=1.0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert sealegs.open_run(tmp_path / "a").steps.tolist() == [0]
    sealegs.Watch(tmp_path / "a", resume=True).close()


def test_a_verdict_is_there_when_it_is_asked_for(tmp_path: Path) -> None:
    with sealegs.Watch(tmp_path / "a") as watch:
        verdicts = [watch.see(step, loss=2.5 if step != 12 else math.nan, grad_norm=0.5) for step in range(20)]
        assert [verdict.step for verdict in verdicts] == list(range(20))
        assert [verdict.step for verdict in verdicts if not verdict.go] == [12]
        assert str(verdicts[12]) == "step 12  SKIP  loss is not finite: nan  rejected 1 of 10"
        assert (verdicts[12].word, verdicts[12].severity, len(verdicts[12].findings)) == ("SKIP", Severity.GATE, 1)
        assert watch.see(20, eval_loss=math.nan).go, "an evaluation is no step"
        assert watch.skips == 1
    (event,) = sealegs.open_run(tmp_path / "a").events
    assert (event.kind, event.step, event.detail["acted"]) == ("skip", 12, False)
    assert event.detail["findings"][0]["signal"] == "loss"


def test_what_is_said_when_it_closes_is_one_line_that_can_be_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with sealegs.Watch(tmp_path / "a\x1b[2J\n", observer=Acting(True)) as watch:
        for step in range(3):
            watch.see(step, loss=math.nan if step == 1 else 2.5, grad_norm=0.5)
        watch.catch_up()
    assert capsys.readouterr().err == (
        f"sealegs: {tmp_path}/a\\x1b[2J\\n: skipped 1 of 3 steps (nonfinite 1), 33.3%, at step 1\n"
    )


def test_what_is_hardly_learned_is_said_when_it_closes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two sources, one with a tenth of the steps and all of the skips; where nothing acts, nothing was lost."""
    for acts in (True, False):
        with sealegs.Watch(tmp_path / str(acts), observer=Acting(acts)) as watch:
            for step in range(400):
                loss = math.nan if step % 50 == 40 else 2.5
                watch.see(step, loss=loss, grad_norm=0.5, sources="wiki=4" if step % 10 == 0 else "books=4")
            watch.see(400, eval_loss=2.5)
            watch.catch_up()
            watch.note("end", reason="finished")
    told = "8 of 8 skipped steps were of wiki, 10.0% of the data: 20% of it was never learned"
    assert capsys.readouterr().err == f"sealegs: {tmp_path / 'True'}: skipped 8 of 400 steps (nonfinite 8), 2.0%, " + (
        f"the first at step 40, the last at 390; {told}\n"
    )
    *_, end = sealegs.open_run(tmp_path / "True").events
    assert end.detail["skipped"].endswith(told)


def test_evaluations_between_steps_do_not_break_a_row_of_skips(tmp_path: Path) -> None:
    with sealegs.Watch(tmp_path / "a") as watch:
        for step in range(3):
            verdict = watch.see(step, loss=math.nan)
            watch.see(step, eval_loss=2.0)
        assert verdict.word == "ALARM"
        assert verdict.verdict.skips_in_a_row == 3


def test_detectors_that_are_new_begin_anew_and_the_rest_goes_on(tmp_path: Path) -> None:
    with sealegs.Watch(tmp_path / "a") as watch:
        for step in range(5):
            watch.see(step, loss=math.nan)
        state = watch.state_dict()
    with sealegs.Watch(tmp_path / "b", detection=Detection(detectors=[lambda row: None])) as watch:
        watch.load_state_dict(state)
        assert watch.skips == 5
        assert watch.see(5, loss=math.nan).verdict.skips_in_a_row == 6
    (event, *_) = sealegs.open_run(tmp_path / "b").events
    assert (event.kind, event.detail["detectors"]) == ("detectors-begin-anew", ["<lambda>"])


@pytest.mark.parametrize("loss", [None, "2.5", torch.ones(3)], ids=["none", "text", "vector"])
def test_what_is_no_loss_is_refused(loss: Any, tmp_path: Path) -> None:
    with sealegs.Watch(tmp_path / "a") as watch, pytest.raises(ConfigError, match="give one number"):
        watch.see(0, loss=loss)


def test_what_a_rule_of_the_users_own_skips_is_skipped_however_often() -> None:
    """The guard doubts its own surprises where they come one at a time, and whoever gave it another rule does not."""

    def bad_shard(row: Row) -> sealegs.Finding | None:
        if int(row["step"]) % 50 != 49:
            return None
        told: dict[str, Any] = {"detector": "shard", "signal": "shard", "value": 1.0, "limit": 0.5, "note": "bad shard"}
        return sealegs.Finding(step=int(row["step"]), severity=Severity.GATE, **told)

    watch = sealegs.Watch(None, detection=Detection(detectors=[bad_shard]))
    noise = np.random.default_rng(0).normal(size=500)
    verdicts = [watch.see(step, loss=3 + 0.01 * noise[step], grad_norm=0.5) for step in range(500)]
    assert [verdict.step for verdict in verdicts if not verdict.go] == list(range(49, 500, 50))
    assert not any(finding.detector == "restraint" for verdict in verdicts for finding in verdict.findings)


@pytest.mark.parametrize("loss", [9.0, 90.0])
def test_a_high_loss_is_told_and_no_reason_to_skip(loss: float, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(size=400)
    with sealegs.Watch(tmp_path / "a") as watch:
        words = [
            watch.see(step, loss=loss if step == 300 else 3 + 0.01 * noise[step], grad_norm=0.5) for step in range(400)
        ]
        assert all(verdict.go for verdict in words)
        assert words[300].severity == Severity.ALARM
        assert "loss spike" in str(words[300])
    (alarm,) = [event for event in sealegs.open_run(tmp_path / "a").events if event.kind == "alarm"]
    assert (alarm.step, watch.skips) == (300, 0)


def test_corrected_thresholds_are_said_at_the_end(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    with sealegs.Watch(tmp_path / "a", detection=Detection(budget=sealegs.Budget(total=10_000))) as watch:
        for step, value in enumerate(2.5 * np.exp(0.05 * np.exp(1.5 * random.standard_normal(3000)))):
            watch.see(step, loss=float(value))
    last = sealegs.open_run(tmp_path / "a").events[-1]
    assert last.kind == "audit"
    assert last.detail["thresholds_divided_by"]["loss"] > 1
