"""From a source to a Log: where it is, what counts its steps, what it says when there is nothing to read."""

import gc
import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.readers.samples import MAKE, rows

from sealegs.errors import SourceError
from sealegs.readers.read import Log, read


def lines(tmp_path: Path, *rows: dict[str, Any], metrics: dict[str, str] | None = None) -> Log:
    (tmp_path / "log").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read(str(tmp_path / "log"), metrics=metrics)


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        SourceError, match="nowhere: no such file or folder; give a log, a run folder, or mlflow:RUN_ID"
    ):
        read(str(tmp_path / "nowhere"))


def test_the_garbage_collector_is_as_it_was(tmp_path: Path) -> None:
    path = MAKE["delimited"](tmp_path, rows(range(5)))
    read(str(path))
    assert gc.isenabled()
    gc.disable()
    try:
        read(str(path))
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(SourceError):
        read(str(tmp_path / "nowhere"))
    assert gc.isenabled()


def test_a_folder_with_several_runs_lists_them(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        MAKE["delimited"](tmp_path / name, rows(range(5)))
    with pytest.raises(SourceError, match=r"2 logs or runs in it \(a/table, b/table\); give one of them"):
        read(str(tmp_path))
    shutil.rmtree(tmp_path / "b")
    log = read(str(tmp_path))
    assert (log.source, log.remarks) == (str(tmp_path), ("read from a/table",))


def test_a_folder_without_a_log(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing here\n")
    with pytest.raises(SourceError, match="a folder without a training log in it"):
        read(str(tmp_path))


def test_what_is_no_file(tmp_path: Path) -> None:
    path = MAKE["delimited"](tmp_path, rows(range(5)))
    with pytest.raises(SourceError, match="table is one run; leave out #2"):
        read(f"{path}#2")
    with pytest.raises(SourceError, match="neither a file nor a folder; write what it gives to a file first"):
        read("/dev/zero")
    for impossible in ("a\0b", "x" * 5000, ""):
        with pytest.raises(SourceError, match="no such file or folder"):
            read(impossible)


@pytest.mark.parametrize(
    ("steps", "remark"),
    [
        ([None] * 4, "steps are row numbers: no step column"),
        ([7] * 4, "steps are row numbers: its step column does not count"),
        ([1e300, 2e300, 3e300, 4e300], "steps are row numbers: its step column does not count"),
        ([0.25, 0.5, 0.75, 1.0], "step has fractions: steps are its values in order"),
    ],
)
def test_steps_that_are_none(steps: list[Any], remark: str, tmp_path: Path) -> None:
    log = lines(tmp_path, *({"step": step, "loss": 1.5} for step in steps))
    assert log.run.steps.tolist() == [0, 1, 2, 3]
    assert log.remarks == (remark,)


def test_epochs_are_steps_where_there_is_nothing_else(tmp_path: Path) -> None:
    whole = lines(tmp_path, *({"epoch": epoch, "loss": 1.5} for epoch in (1, 2, 4)))
    assert whole.run.steps.tolist() == [1, 2, 4]
    parts = lines(tmp_path, *({"epoch": epoch, "loss": 1.5} for epoch in (0.25, 0.5, 0.25, 0.5, 0.75)))
    assert parts.run.steps.tolist() == [0, 1, 2]
    assert parts.run.segments.tolist() == [1, 1, 1]
    rounded = lines(tmp_path, *({"epoch": epoch, "loss": 1.5} for epoch in (0.01, 0.01, 0.02)))
    assert rounded.run.steps.tolist() == [0, 1, 2]


def test_steps_that_begin_anew_with_each_epoch_run_on(tmp_path: Path) -> None:
    log = lines(tmp_path, *({"epoch": epoch, "step": step, "loss": 1.5} for epoch in (0, 1, 2) for step in (0, 10, 20)))
    assert log.run.steps.tolist() == [0, 10, 20, 21, 31, 41, 42, 52, 62]
    assert log.remarks == ("step begins anew with each epoch: made to run on",)


def test_a_precision_in_each_row_is_a_setting(tmp_path: Path) -> None:
    """As words; a precision between 0 and 1 is a metric, and a file of settings knows better."""
    rows = [{"step": step, "loss": 2.5, "precision": "0.75", "dtype": "bf16"} for step in range(30)]
    found = lines(tmp_path, *rows)
    assert dict(found.run.manifest.settings) == {"dtype": "bf16"}
    assert set(found.run.signals) == {"loss", "precision"}
    (tmp_path / "log.json").write_text(json.dumps(rows))
    assert dict(read(str(tmp_path / "log.json")).run.manifest.settings) == {"dtype": "bf16"}
    table = "step,loss,precision,dtype\n" + "".join(f"{step},2.5,0.75,bf16\n" for step in range(30))
    (tmp_path / "log.csv").write_text(table)
    assert dict(read(str(tmp_path / "log.csv")).run.manifest.settings) == {"dtype": "bf16"}


def test_rows_of_evaluations_are_no_resume(tmp_path: Path) -> None:
    """An evaluation is logged under the step before, late, or without a step: the losses do not go back."""
    log = lines(
        tmp_path,
        {"val_loss": 9.0},
        {"step": 1, "loss": 5.0},
        {"step": 2, "loss": 4.0},
        {"step": 1, "val_loss": 8.0},
        {"step": 9, "loss": 3.0},
        {"step": 15, "val_loss": 7.0},
        {"step": 12, "accuracy": 0.5},
        {"step": 19, "loss": 2.0},
        {"val_loss": 6.0},
    )
    assert log.run.steps.tolist() == [1, 2, 9, 15, 19]
    assert log.run.segments.tolist() == [0] * 5
    assert log.run.column("eval_loss").tolist() == [9.0, 8.0, pytest.approx(np.nan, nan_ok=True), 7.0, 6.0]


def test_other_columns_keep_their_names(tmp_path: Path) -> None:
    log = lines(
        tmp_path,
        *({"global_step": i, "step": i % 2, "loss": 1.0, "objective": 2.0, "perf": {"mfu": 0.4}} for i in range(4)),
        metrics={"loss": "objective"},
    )
    assert log.mapping == {"loss": "objective", "step": "global_step"}
    assert log.run.column("loss").tolist() == [2.0] * 4
    assert sorted(log.run.signals) == ["loss", "loss (column)", "perf/mfu", "step (column)"]


def test_everything_nan_is_read(tmp_path: Path) -> None:
    log = lines(tmp_path, *({"step": i, "loss": float("nan")} for i in range(4)))
    assert np.isnan(log.run.column("loss")).all()
    assert log.run.logged("loss").all()


def test_a_run_folder_keeps_what_it_is(tmp_path: Path) -> None:
    path = MAKE["run_folder"](tmp_path, rows(range(3)))
    (path / "events.jsonl").write_text('{"kind": "start", "step": 0, "time": 1.0}\n')
    log = read(str(path), metrics={"loss": "grad_norm"})
    assert log.run.manifest.run_id == "ours"
    assert [event.kind for event in log.run.events] == ["start"]
    assert log.run.column("loss").tolist() == [1.0, 1.1, 1.2]
    (path / "metrics.jsonl").unlink()
    with pytest.raises(SourceError, match=r"no metrics\.jsonl yet"):
        read(str(path))


def test_a_torn_archive_is_read_up_to_there(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    text = "step,loss\n" + "".join(f"{i},{value}\n" for i, value in enumerate(random.random(5000)))
    (tmp_path / "log").write_bytes(gzip.compress(text.encode())[:-2000])
    log = read(str(tmp_path / "log"))
    assert 1000 < len(log.run.steps) < 5000
    assert log.run.steps.tolist() == list(range(len(log.run.steps)))
    assert "the archive is torn: read up to there" in log.remarks


def test_json_that_is_no_history_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model": {"width": 8}, "name": "x"}, indent=2))
    with pytest.raises(SourceError, match="JSON without a list of rows or columns of numbers"):
        read(str(tmp_path / "config.json"))
    (tmp_path / "half.json").write_text('{"history": [{"step": 1,\n "loss": ')
    with pytest.raises(SourceError, match="not whole as JSON"):
        read(str(tmp_path / "half.json"))


def test_a_list_of_rows_is_a_history(tmp_path: Path) -> None:
    (tmp_path / "log.json").write_text(json.dumps([{"step": i, "train": {"loss": 2.0}} for i in range(3)]))
    log = read(str(tmp_path / "log.json"))
    assert (log.format, log.mapping["loss"]) == ("json", "train/loss")


def test_names_without_end_do_not_fill_the_memory(tmp_path: Path) -> None:
    log = lines(tmp_path, *({"step": i, "loss": 1.0, f"only/{i}": 1.0} for i in range(12_000)))
    assert len(log.run.steps) == 12_000
    assert len(log.run.signals) <= 5_000
    assert "loss" in log.run.signals


@pytest.mark.parametrize(("name", "cells"), [("mlflow", 210), ("json_lines", 310)])
def test_what_is_logged_most_is_kept_where_all_is_too_much(
    name: str, cells: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = MAKE[name](tmp_path, rows(range(100)))
    if name == "mlflow":
        (source / "0" / "abc" / "metrics" / "acc").write_text("1700000000000 0.5 3\n")
    else:
        source.write_text(source.read_text() + '{"step": 100, "acc": 0.5}\n')
    assert "acc" in read(str(source)).run.signals
    monkeypatch.setattr("sealegs.readers.table.MOST_CELLS", cells)
    log = read(str(source))
    assert set(log.run.signals) == {"loss", "grad_norm"}
    assert log.run.column("loss")[:100].tolist() == [row["loss"] for row in rows(range(100))]


@pytest.mark.xdist_group("mlflow")  # which has imported it already
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated:DeprecationWarning")
def test_mlflow_by_its_run_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    client = MlflowClient(uri)
    run = client.create_run("0").info.run_id
    for step, value in enumerate([3.0, float("nan"), float("inf"), 2.0]):
        client.log_metric(run, "train/loss", value, step=step)
    log = read(f"mlflow:{run}")
    assert (log.format, log.run.steps.tolist()) == ("mlflow", [0, 1, 2, 3])
    np.testing.assert_array_equal(log.run.column("loss"), [3.0, np.nan, np.inf, 2.0])
    with pytest.raises(SourceError, match=r"mlflow:nope: .* check the id and MLFLOW_TRACKING_URI"):
        read("mlflow:nope")
    with pytest.raises(SourceError, match="an MLflow store; give a run of it: MLFLOW_TRACKING_URI="):
        read(f"{tmp_path}/mlflow.db")


def test_several_mlflow_runs_are_listed(tmp_path: Path) -> None:
    store = MAKE["mlflow"](tmp_path, rows(range(3)))
    shutil.copytree(store / "0" / "abc", store / "0" / "def")
    with pytest.raises(SourceError, match=r"2 MLflow runs in it .0/abc, 0/def.; give the folder of one"):
        read(str(store))
    assert len(read(str(store / "0" / "def")).run.steps) == 3


def test_several_event_files_are_one_run(tmp_path: Path) -> None:
    first = MAKE["tensorboard"](tmp_path, rows(range(10)))
    (tmp_path / "again").mkdir()
    second = MAKE["tensorboard"](tmp_path / "again", rows(range(5, 15)))
    shutil.copy(second, first.parent / "events.out.tfevents.9999999999.later")
    log = read(str(first.parent))
    assert log.run.steps.tolist() == list(range(15))
    assert log.run.superseded_rows == 5
    assert "2 event files read as one run" in log.remarks


def test_nothing_but_the_base_install_is_needed_until_it_is() -> None:
    code = "import sys, sealegs.readers.read; print(sorted({m.split('.')[0] for m in sys.modules} & set(sys.argv[1:])))"
    heavy = ["torch", "tensorboard", "mlflow", "wandb", "trackio", "pandas"]
    done = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_event_files_are_known_by_their_content_under_any_name(tmp_path: Path) -> None:
    """The framing of a record: its length, the checksum of that, and an event; no name and no version are needed."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    def written(path: Path, first: int, last: int) -> None:
        with path.open("wb") as file:
            writer = RecordWriter(file)
            for step in range(first, last):
                values = [Summary.Value(tag="loss", simple_value=3 - step / 100)]
                writer.write(Event(wall_time=1e9 + step, step=step, summary=Summary(value=values)).SerializeToString())

    (tmp_path / "folder").mkdir()
    written(tmp_path / "folder" / "train_a", 0, 30)
    (tmp_path / "folder" / "notes.txt").write_text("no event file\n")
    for source in (tmp_path / "folder" / "train_a", tmp_path / "folder"):
        log = read(str(source))
        assert (log.format, log.run.steps.tolist()) == ("tensorboard", list(range(30)))
    content = bytearray((tmp_path / "folder" / "train_a").read_bytes())
    content[9] ^= 1  # the checksum of the first length
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(SourceError, match="neither text nor a format that is known"):
        read(str(tmp_path / "other"))


def test_event_files_of_several_launches_are_attempts(tmp_path: Path) -> None:
    """Of a writer that goes on, goes back, and begins a file without a scalar of the loss."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    parts = [("a", "loss", 0, 50), ("b", "loss", 50, 80), ("c", "other", 0, 5), ("d", "loss", 60, 90)]
    for name, tag, first, last in parts:
        with (tmp_path / f"events.out.tfevents.{name}").open("wb") as file:
            writer = RecordWriter(file)
            for step in range(first, last):
                summary = Summary(value=[Summary.Value(tag=tag, simple_value=3 - step / 100)])
                writer.write(Event(wall_time=1e9, step=step, summary=summary).SerializeToString())
    run = read(str(tmp_path)).run
    assert [(one.first, one.last, one.begun_from, one.given_up_from) for one in run.attempts] == [
        (0, 49, None, None),
        (50, 79, 49, 60),
        (60, 89, 59, None),
    ]
    assert [one.told_by for one in run.attempts[1:]] == [f"events.out.tfevents.{name} begins" for name in "bd"]


def test_sources_of_a_log_of_json_lines_are_read(tmp_path: Path) -> None:
    rows = [{"step": i, "loss": 2.0, "sources": "web=6 books=2" if i % 2 else "web=8"} for i in range(30)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read(str(tmp_path / "log.jsonl")).run
    assert run.column("sources").tolist()[:2] == ["web=8", "web=6 books=2"]


def test_a_table_without_a_loss_is_read_where_none_is_needed(tmp_path: Path) -> None:
    """Text with numbers in it is no log: anything is that."""
    (tmp_path / "table.csv").write_text("step,val_acc,lr\n" + "".join(f"{n},{n / 50},0.1\n" for n in range(40)))
    (tmp_path / "log.txt").write_text("".join(f"step {n} reached {n / 50} of it\n" for n in range(40)))
    log = read(str(tmp_path / "table.csv"), needs_loss=False)
    assert log.run.signals == ("val_acc", "lr")
    assert log.run.steps.tolist() == list(range(40))
    assert log.remarks[0].startswith("no column looks like a training loss among step, val_acc, lr; say which it is")
    for name, needs_loss, says in (("table.csv", True, "no column looks"), ("log.txt", False, "no line names a loss")):
        with pytest.raises(SourceError, match=says):
            read(str(tmp_path / name), needs_loss=needs_loss)
