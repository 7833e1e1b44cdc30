"""A run folder in, a ``Run`` out."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealegs.errors import SourceError
from sealegs.record import manifest as manifests
from sealegs.record.run import _newest_rows, open_run
from sealegs.record.schema import EVENTS, MANIFEST, METRICS, SCHEMA
from sealegs.record.writer import RunWriter


@pytest.fixture
def resumed(tmp_path: Path) -> Path:
    """Steps 0 to 5, then again from 3."""
    folder = tmp_path / "a"
    writer = RunWriter.create(folder, manifests.describe("a", seed=7, settings={"model": {"width": 96}}))
    for step in range(6):
        writer.row({"step": step, "loss": 10.0 + step, "sources": "grammar=8"})
    writer.event("resume", 5, checkpoint=3)
    for step in range(3, 8):
        writer.row({"step": step, "loss": 20.0 + step, "sources": "grammar=8"})
    writer.close()
    return folder


def test_the_newest_row_of_a_step_counts(resumed: Path) -> None:
    run = open_run(resumed)
    assert run.steps.tolist() == list(range(8))
    assert run.column("loss").tolist() == [10, 11, 12, 23, 24, 25, 26, 27]
    assert run.segments.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert run.superseded_rows == 3
    assert run.column("sources").tolist() == ["grammar=8"] * 8


def test_manifest_and_events_come_along(resumed: Path) -> None:
    run = open_run(str(resumed))
    assert run.manifest.seed == 7
    assert run.manifest.settings == {"model": {"width": 96}}
    assert [(event.kind, event.step, dict(event.detail)) for event in run.events] == [("resume", 5, {"checkpoint": 3})]


@given(st.lists(st.integers(0, 12), max_size=60))
def test_newest_rows_by_its_definition(steps: list[int]) -> None:
    """Replay: each row drops what was known of its step and of every later one."""
    known: dict[int, int] = {}
    for row, step in enumerate(steps):
        known = {earlier: at for earlier, at in known.items() if earlier < step} | {step: row}
    assert _newest_rows(np.array(steps, np.int64)).tolist() == list(known.values())


def test_a_run_without_rows_opens(tmp_path: Path) -> None:
    RunWriter.create(tmp_path / "a", manifests.describe("a")).close()
    for name in (METRICS, EVENTS):
        (tmp_path / "a" / name).unlink()
    run = open_run(tmp_path / "a")
    assert (len(run.steps), run.signals, run.events) == (0, (), ())


def test_a_signal_that_is_not_there_is_named(resumed: Path) -> None:
    with pytest.raises(SourceError, match="no signal 'los' was logged; it has loss, sources, time"):
        open_run(resumed).column("los")


def test_a_torn_event_is_left_out(resumed: Path) -> None:
    with (resumed / EVENTS).open("ab") as file:
        file.write(b'{"time":1.0,"step"')
    assert len(open_run(resumed).events) == 1


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (json.dumps({"schema": SCHEMA + 1, "run_id": "a"}), "schema 2, this Sealegs reads up to 1: pip install -U"),
        ("{", "cannot be read"),
        ("[]", "not a manifest"),
        ('{"run_id": "a"}', "not a manifest"),
        ('{"schema": "1", "run_id": "a"}', "not a manifest"),
        ('{"schema": 1, "run_id": "a", "settings": null}', "settings is not a table"),
    ],
)
def test_a_manifest_that_cannot_be_used_is_refused_in_a_sentence(resumed: Path, content: str, sentence: str) -> None:
    (resumed / MANIFEST).write_text(content)
    with pytest.raises(SourceError, match=sentence) as caught:
        open_run(resumed)
    assert "\n" not in str(caught.value)


def test_no_folder_and_no_manifest_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such run folder"):
        open_run(tmp_path / "nowhere")
    with pytest.raises(SourceError, match=r"there is no manifest.json in it"):
        open_run(tmp_path)


def test_a_manifest_of_this_schema_with_more_fields_is_read(resumed: Path) -> None:
    values = json.loads((resumed / MANIFEST).read_text())
    (resumed / MANIFEST).write_text(json.dumps(values | {"colour": "blue"}))
    assert open_run(resumed).manifest.run_id == values["run_id"]
