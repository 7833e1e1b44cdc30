"""A run folder in, a ``Run`` out."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealegs.errors import SourceError
from sealegs.record import manifest as manifests
from sealegs.record.attempts import FEWEST_OF_HABIT, HABIT, attempts_of, standing_rows
from sealegs.record.run import Run, open_run
from sealegs.record.schema import EVENTS, MANIFEST, METRICS, SCHEMA, to_line
from sealegs.record.writer import RunWriter
from sealegs.vocabulary import Row


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


def test_what_a_resume_went_back_behind_is_kept(resumed: Path) -> None:
    steps, segments, losses = open_run(resumed).written("loss")
    assert steps.tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7]
    assert segments.tolist() == [0] * 6 + [1] * 5
    assert losses.tolist() == [10, 11, 12, 13, 14, 15, 23, 24, 25, 26, 27]
    assert open_run(resumed).written("sources").values.tolist() == ["grammar=8"] * 11


def without_a_resume(folder: Path) -> Run:
    writer = RunWriter.create(folder, manifests.describe("b"))
    for step in range(6):
        writer.row({"step": step, "loss": 10.0 + step, **({"eval_loss": 1.0 * step} if step % 2 else {})})
    writer.close()
    return open_run(folder)


@pytest.mark.parametrize("goes_back", [False, True])
def test_what_a_run_gives_can_be_written_to_and_leaves_the_run_alone(
    goes_back: bool, tmp_path: Path, resumed: Path
) -> None:
    run = open_run(resumed) if goes_back else without_a_resume(tmp_path / "b")
    for _ in range(2):
        given = [run.column("loss"), run.logged("loss"), *run.written("loss")]
        assert given[0][0] == given[-1][0] == 10.0
        assert given[1].all()
        for array in given:
            array[:] = 0


@pytest.mark.parametrize("goes_back", [False, True])
def test_without_a_copy_the_same_is_given(goes_back: bool, tmp_path: Path, resumed: Path) -> None:
    run = open_run(resumed) if goes_back else without_a_resume(tmp_path / "b")
    for signal in run.signals:
        logged = run.logged(signal)
        steps, values = run.series(signal)
        assert np.array_equal(run.column(signal, copy=False)[logged], run.column(signal)[logged])
        assert np.array_equal(run.logged(signal, copy=False), logged)
        assert (steps.tolist(), values.tolist()) == (run.steps[logged].tolist(), run.column(signal)[logged].tolist())
        for shared, own in zip(run.written(signal, copy=False), run.written(signal), strict=True):
            assert np.array_equal(shared, own)
    if not goes_back:
        assert not any(array.flags.writeable for array in (*run.written("loss", copy=False), *run.series("loss")))


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
    assert standing_rows(np.array(steps, np.int64)).tolist() == list(known.values())


def run_of(folder: Path, *rows: Row) -> Run:
    """A run with these rows, the n-th written at second n."""
    if not folder.exists():
        RunWriter.create(folder, manifests.describe("a")).close()
    (folder / METRICS).write_bytes(b"".join(to_line({**row, "time": float(n)}) for n, row in enumerate(rows)))
    return open_run(folder)


def test_rows_of_a_step_that_follow_each_other_are_one(tmp_path: Path) -> None:
    run = run_of(
        tmp_path / "a",
        {"step": 2, "loss": 2.6, "sources": "grammar=8"},
        {"step": 3, "loss": float("nan"), "sources": "grammar=6"},
        {"step": 3, "eval_loss": 2.4},
        {"step": 3, "batch_hash": "00ff"},
        {"step": 4, "loss": 2.3},
    )
    assert run.steps.tolist() == [2, 3, 4]
    assert (run.superseded_rows, run.segments.tolist()) == (0, [0, 0, 0])
    np.testing.assert_array_equal(run.column("loss"), [2.6, np.nan, 2.3])
    np.testing.assert_array_equal(run.column("eval_loss"), [np.nan, 2.4, np.nan])
    assert run.logged("loss").tolist() == [True, True, True]
    assert run.logged("eval_loss").tolist() == [False, True, False]
    assert run.column("sources").tolist() == ["grammar=8", "grammar=6", ""]
    assert run.column("batch_hash").tolist() == ["", "00ff", ""]
    assert run.column("time").tolist() == [0, 3, 4]
    assert [len(row) for row in run.rows()] == [4, 6, 3]


def test_a_resume_at_the_last_step_supersedes_it(tmp_path: Path) -> None:
    run = run_of(
        tmp_path / "a",
        {"step": 7, "loss": 17.0},
        {"step": 8, "loss": 18.0, "culprit": "head"},
        {"step": 8, "loss": 28.0},
        {"step": 9, "loss": 29.0},
    )
    assert run.column("loss").tolist() == [17, 28, 29]
    assert run.column("culprit").tolist() == ["", "", ""]
    assert (run.superseded_rows, run.segments.tolist()) == (1, [0, 1, 1])
    assert run.written("loss").segments.tolist() == [0, 0, 1, 1]


def test_several_processes_in_one_file_are_no_resumes(tmp_path: Path) -> None:
    run = run_of(tmp_path / "a", *({"step": step, "loss": 1.0 + rank} for step in range(30) for rank in range(2)))
    assert (run.superseded_rows, set(run.segments.tolist())) == (30, {0})
    assert run.column("loss").tolist() == [2.0] * 30


def test_an_attempt_is_seen_as_it_stood_and_goes_on_with_what_stands(resumed: Path) -> None:
    run = open_run(resumed)
    then = run.seen_from(0)
    assert then.steps.tolist() == list(range(8))
    assert then.column("loss").tolist() == [10, 11, 12, 13, 14, 15, 26, 27]
    assert then.segments.tolist() == [0] * 6 + [1] * 2
    assert run.seen_from(1) is run
    assert [row["loss"] for row in run.written_rows(3, 4)] == [13, 14, 23, 24]
    part = run.cut(0, 1, 4)
    assert (part.steps.tolist(), part.column("loss").tolist()) == ([1, 2, 3, 4], [11, 12, 13, 14])


def test_a_resume_at_the_last_step_supersedes_all_rows_of_it(tmp_path: Path) -> None:
    """No two neighbours share a signal here, and still the first two rows are the old ones."""
    run = run_of(
        tmp_path / "a",
        {"step": 8, "loss": 18.0, "culprit": "head"},
        {"step": 8, "eval_loss": 18.5},
        {"step": 8, "loss": 28.0},
        {"step": 8, "eval_loss": 28.5},
    )
    assert list(run.rows()) == [{"step": 8, "loss": 28.0, "eval_loss": 28.5, "time": 3.0}]
    assert run.superseded_rows == 2


def test_a_step_that_comes_again_later_supersedes_all_rows_of_it(tmp_path: Path) -> None:
    run = run_of(
        tmp_path / "a",
        {"step": 3, "loss": 13.0},
        {"step": 3, "eval_loss": 13.5},
        {"step": 4, "loss": 14.0},
        {"step": 3, "grad_norm": 1.0},
        {"step": 3, "eval_loss": 23.5},
    )
    assert list(run.rows()) == [{"step": 3, "grad_norm": 1.0, "eval_loss": 23.5, "time": 4.0}]
    assert (run.superseded_rows, run.segments.tolist()) == (3, [1])


def test_without_two_rows_of_a_step_in_a_row_nothing_is_looked_at() -> None:
    steps = np.array([0, 1, 2, 1, 2, 3])
    found = attempts_of(steps, {})
    assert found.begins is found.standing


_NUMBERS = st.sampled_from([0.0, 1.0, 2.0, float("nan"), float("inf")])
_TEXTS = st.sampled_from(["", "a", "bcd"])
_ROWS = st.fixed_dictionaries(
    {"step": st.integers(0, 3)},
    optional={"loss": _NUMBERS, "eval_loss": _NUMBERS, "lr": _NUMBERS, "sources": _TEXTS, "culprit": _TEXTS},
)


def read_slowly(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[int], int]:
    """The rows that count, their segments, and how many others there are."""
    known: dict[int, tuple[dict[str, Any], list[int]]] = {}
    went_back, came_twice, before = set(), set(), -1
    for time, row in enumerate(rows):
        step = row["step"]
        if step < before:
            went_back.add(time)
        whole, parts = known[step] if step == before else ({}, [])
        if row.keys() & whole.keys() - {"step", "time"}:
            came_twice.add(time)
            whole, parts = {}, []
        known = {other: kept for other, kept in known.items() if other < step}
        known[step] = (whole | row | {"time": float(time)}, [*parts, time])
        before = step
    is_habit = len(came_twice) >= max(FEWEST_OF_HABIT, HABIT * len(rows))
    begun = went_back if is_habit else went_back | came_twice
    segments = [sum(start <= parts[-1] for start in begun) for _, parts in known.values()]
    return [whole for whole, _ in known.values()], segments, len(rows) - sum(len(parts) for _, parts in known.values())


@given(st.lists(_ROWS, max_size=12), st.booleans())
def test_steps_in_several_rows_against_a_slow_reader(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], ordered: bool
) -> None:
    rows = sorted(rows, key=lambda row: row["step"]) if ordered else rows
    run = run_of(tmp_path_factory.getbasetemp() / "slow-reader", *rows)
    expected, segments, superseded = read_slowly(rows)
    assert repr([sorted(row.items()) for row in run.rows()]) == repr([sorted(row.items()) for row in expected])
    assert run.steps.tolist() == [row["step"] for row in expected]
    assert run.segments.tolist() == segments
    assert run.superseded_rows == superseded
    for name in run.signals:
        missing = "" if name in ("sources", "culprit") else np.nan
        np.testing.assert_array_equal(run.column(name), [row.get(name, missing) for row in expected])
        assert run.logged(name).tolist() == [name in row for row in expected]


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
