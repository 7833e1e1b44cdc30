"""Damaged logs: files of real libraries cut and flipped, and what ``make fuzz`` has found, each as small as it gets."""

import json
import math
import re
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tests.readers.samples import FILES, KEPT, MAKE, rows

from sealegs.diagnosis.findings import look
from sealegs.errors import SourceError
from sealegs.readers.read import read

FRAMED = {"wandb": KEPT["wandb"][1], "tensorboard": next((FILES / "tensorboard").iterdir())}


def cut(whole: bytes, at: int) -> bytes:
    return whole[:at]


def flipped(whole: bytes, at: int) -> bytes:
    return whole[:at] + bytes([whole[at] ^ 64]) + whole[at + 1 :]


@pytest.mark.parametrize("damaged", [cut, flipped])
@pytest.mark.parametrize("name", FRAMED)
def test_a_binary_log_is_read_up_to_its_damage(
    name: str, damaged: Callable[[bytes, int], bytes], tmp_path: Path
) -> None:
    """And that is said; but where it is cut between two records, which is how a run that is under way ends."""
    whole = FRAMED[name].read_bytes()
    half = len(whole) // 2
    path = tmp_path / FRAMED[name].name
    steps: list[int] = []
    unsaid = 0
    every = range(half, half + 400) if damaged is flipped else ()  # byte of one record at least
    for at in sorted({*range(100, len(whole), max(61, len(whole) // 150)), *every}):
        path.write_bytes(damaged(whole, at))
        try:
            log = read(str(path))
        except SourceError as error:
            assert not steps, "more of it is sound than of one that was read"
            assert "damaged at byte" in str(error)  # noqa: PT017
            continue
        steps.append(len(log.run.steps))
        assert log.run.steps.tolist() == list(range(1, steps[-1] + 1))
        np.testing.assert_allclose(log.run.column("loss")[:12], [4 - i / 10 for i in range(1, 13)][: steps[-1]], 1e-6)
        said = re.search(
            rf"{path.name} is torn or damaged at byte ([\d,]+) of [\d,]+: read up to there", str(log.remarks)
        )
        assert said is None or 0 <= at - int(said[1].replace(",", "")) < 500
        unsaid += said is None
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (1, 20)
    assert unsaid <= (10 if damaged is cut else 0)


def test_a_damaged_head_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.wandb").write_bytes(flipped(FRAMED["wandb"].read_bytes(), 5))
    with pytest.raises(SourceError, match="a W&B file whose head is damaged"):
        read(str(tmp_path / "a.wandb"))


def test_a_w_and_b_run_that_ends_within_a_long_record(tmp_path: Path) -> None:
    """Records longer than 32 KiB are written in blocks, of which here the last are missing."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    old, new = DataStore(), DataStore()
    old.open_for_scan(str(FRAMED["wandb"]))
    new.open_for_write(str(path := tmp_path / "long.wandb"))
    with closing(old), closing(new):
        while data := old.scan_data():
            new.write(Record.FromString(data))
        long = Record()
        long.config.update.add(key="long", value_json=json.dumps("x" * 100_000))
        new.write(long)
    assert read(str(path)).remarks == ()
    path.write_bytes(path.read_bytes()[: 2 << 15])
    log = read(str(path))
    assert len(log.run.steps) == 20
    assert log.remarks == ("long.wandb is torn or damaged at byte 7,020 of 65,536: read up to there",)


def test_tensors_that_are_no_scalars_are_passed_over(tmp_path: Path) -> None:
    """One value that stands for a billion, too few bytes, a type that nobody knows."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.summary.writer.record_writer import RecordWriter

    huge = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1 << 40)])
    tensors = [
        TensorProto(dtype=1, float_val=[1.0], tensor_shape=huge),
        TensorProto(dtype=1, tensor_content=b"abc"),
        TensorProto(dtype=99, float_val=[1.0]),
        TensorProto(dtype=7, string_val=[b"1.0"]),
    ]
    whole = FRAMED["tensorboard"].read_bytes()
    with (tmp_path / "events.out.tfevents.1").open("wb") as file:
        file.write(whole)
        for tensor in tensors:
            RecordWriter(file).write(
                Event(step=21, summary=Summary(value=[Summary.Value(tag="other", tensor=tensor)])).SerializeToString()
            )
    log = read(str(tmp_path))
    assert log.run.steps.tolist() == list(range(1, 21))
    assert log.remarks == ()


def test_an_integer_beyond_the_floats_is_infinite(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        "".join(f'{{"step": {i}, "loss": {"-9" if i else "9"}{"9" * 400}}}\n' for i in (0, 1))
    )
    assert read(str(tmp_path / "log")).run.column("loss").tolist() == [math.inf, -math.inf]


def test_a_number_of_thousands_of_digits_costs_its_line(tmp_path: Path) -> None:
    store = MAKE["mlflow"](tmp_path, rows(range(5)))
    with (store / "0" / "abc" / "metrics" / "loss").open("a") as file:
        file.writelines(
            f"{time} 3.5 {step}\n" for time, step in (("1", "9" * 5000), ("9" * 5000, "1"), ("9", "-" + "9" * 19))
        )
    assert read(str(store)).run.steps.tolist() == [0, 1, 2, 3, 4]


def test_steps_that_no_run_has_are_damaged_lines(tmp_path: Path) -> None:
    path = MAKE["run_folder"](tmp_path, rows(range(5)))
    with (path / "metrics.jsonl").open("a") as file:
        file.writelines(f'{{"step":{step},"loss":3.0}}\n' for step in ("-1e308", "1e300", "9e18", "5"))
    log = read(str(path))
    assert log.run.steps.tolist() == [0, 1, 2, 3, 4, 5]
    assert log.remarks == ("3 lines are no rows: left out",)


def test_a_name_that_no_signal_has_costs_no_row(tmp_path: Path) -> None:
    path = MAKE["run_folder"](tmp_path, rows(range(5)))
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step":5,"lo\\u0000ss":3.0}\n')
    log = read(str(path))
    assert log.run.steps.tolist() == [0, 1, 2, 3, 4, 5]
    assert log.remarks == ()
    assert all(name.isprintable() for name in log.run.signals)


def test_a_text_in_a_store_costs_itself_alone(tmp_path: Path) -> None:
    path = MAKE["trackio"](tmp_path, rows(range(5)))
    with closing(sqlite3.connect(path)) as store:
        store.execute("UPDATE metrics SET metrics = CAST(x'7bff' AS TEXT) WHERE step = 2")
        store.commit()
    assert read(str(path)).run.column("loss").tolist() == pytest.approx([4.0, 3.99, math.nan, 3.97, 3.96], nan_ok=True)


def test_a_store_whose_names_are_damaged_is_refused(tmp_path: Path) -> None:
    """SQLite quotes them in its error, which Python then cannot decode."""
    (whole,) = KEPT["trackio"]
    (tmp_path / "store").write_bytes(whole.read_bytes().replace(b"configs (", b"configs \xa0"))
    with pytest.raises(SourceError, match="neither text nor a format that is known"):
        read(str(tmp_path / "store"))


def test_a_signal_that_only_left_out_lines_have_is_none(tmp_path: Path) -> None:
    lines = "".join(f"step {i} loss {5 - i / 10}\n" for i in range(30))
    (tmp_path / "log").write_text(f"{lines}loss 3.1 grad norm 2.5\n")
    run = read(str(tmp_path / "log")).run
    assert run.signals == ("loss",)
    look(run)


def test_a_name_that_cannot_be_printed_is_not(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("step,\x1b[2J\u202eobjective\n1,2\n2,3\n3,4\n")
    with pytest.raises(SourceError, match="no column looks like a training loss") as refused:
        read(str(tmp_path / "log"))
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    "text",
    [
        ",".join(map(str, range(150_000))) + "\n" + "0," * 149_999 + "0\n",
        "".join(f"loss{f' 1.5 {word}' * 3000}\n" * 3 for word in ("a", "b", "c", "d", "e", "f", "g", "h")),
    ],
    ids=["columns", "numbers"],
)
def test_lines_without_end_are_no_hang(text: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(text)
    began = time.process_time()
    with pytest.raises(SourceError):
        read(str(tmp_path / "log"))
    assert time.process_time() - began < 5
