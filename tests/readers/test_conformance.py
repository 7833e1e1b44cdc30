"""What every reader promises, whichever it is: found by import, and counted."""

import gzip
import importlib
import json
import math
import pkgutil
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.readers.samples import KEPT, MAKE, rows

import sealegs.readers
from sealegs.errors import MissingExtra, SealegsError, SourceError
from sealegs.readers.place import Place
from sealegs.readers.read import READERS, Log, read


def found() -> dict[str, Any]:
    """The modules of ``sealegs.readers`` that recognise and read."""
    modules = [
        importlib.import_module(f"sealegs.readers.{m.name}") for m in pkgutil.iter_modules(sealegs.readers.__path__)
    ]
    return {m.__name__.rpartition(".")[2]: m for m in modules if hasattr(m, "recognises") and hasattr(m, "read")}


FOUND = found()
IN_ONE_FILE = ["trainer_state", "json_lines", "json_file", "delimited", "text", "tensorboard"]
APPENDED = ["run_folder", "json_lines", "delimited", "text", "tensorboard", "trainer_state"]
"""Formats that are read up to where they are torn."""
everyone = pytest.mark.parametrize("name", sorted(MAKE))


def those(names: list[str]) -> pytest.MarkDecorator:
    assert set(names) <= set(MAKE)
    return pytest.mark.parametrize("name", names)


def test_the_suite_runs_over_all_of_them() -> None:
    assert sorted(map(str, FOUND.values())) == sorted(map(str, READERS))
    assert len(FOUND) == 10
    assert set(FOUND) == set(MAKE) | {"wandb"} == set(MAKE) | set(KEPT)


def recognised_by(path: Path) -> list[str]:
    return [name for name, reader in FOUND.items() if reader.recognises(Place(str(path), path))]


@everyone
def test_it_recognises_its_own_and_nobody_else_does(name: str, tmp_path: Path) -> None:
    assert recognised_by(MAKE[name](tmp_path, rows(range(5)))) == [name]


@pytest.mark.parametrize(("name", "path"), [(name, path) for name, paths in KEPT.items() for path in paths])
def test_it_recognises_what_the_library_wrote(name: str, path: Path) -> None:
    assert recognised_by(path) == [name]


@everyone
def test_it_reads_what_was_written(name: str, tmp_path: Path) -> None:
    log = read(str(MAKE[name](tmp_path, written := rows(range(0, 300, 3)))))
    assert log.run.steps.tolist() == [row["step"] for row in written]
    for signal in ("loss", "grad_norm"):
        np.testing.assert_allclose(log.run.column(signal), [row[signal] for row in written], rtol=1e-6)
    assert log.run.segments.tolist() == [0] * 100
    assert log.run.superseded_rows == 0
    assert log.mapping["loss"]
    assert not log.run.events
    assert log.run.manifest.run_id


@everyone
def test_nan_and_infinity_are_values(name: str, tmp_path: Path) -> None:
    written = rows(range(6))
    written[2]["loss"], written[3]["loss"], written[4]["grad_norm"] = math.nan, math.inf, -math.inf
    run = read(str(MAKE[name](tmp_path, written))).run
    np.testing.assert_allclose(run.column("loss"), [row["loss"] for row in written])
    assert run.logged("loss").all()
    assert run.column("grad_norm")[4] == -math.inf


@everyone
def test_steps_that_go_back_are_segments(name: str, tmp_path: Path) -> None:
    written = rows([*range(10), *range(6, 12)])
    log = read(str(MAKE[name](tmp_path, written)))
    assert log.run.steps.tolist() == list(range(12))
    assert log.run.segments.tolist() == [0] * 6 + [1] * 6
    assert log.run.superseded_rows == 4
    assert any("go back" in remark for remark in log.remarks)
    old = log.run.written("loss")
    assert old.steps.tolist() == [row["step"] for row in written]
    assert old.segments.tolist() == [0] * 10 + [1] * 6
    np.testing.assert_allclose(old.values, [row["loss"] for row in written], rtol=1e-6)


@those(sorted(set(MAKE) - {"run_folder"}))
def test_a_repeated_step_counts_once(name: str, tmp_path: Path) -> None:
    written = rows([0, 1, 2, 2, 2, 3])
    log = read(str(MAKE[name](tmp_path, written)))
    assert log.run.steps.tolist() == [0, 1, 2, 3]
    assert log.run.column("loss")[2] == pytest.approx(written[4]["loss"])


@those(APPENDED)
def test_a_torn_end_costs_the_last_row(name: str, tmp_path: Path) -> None:
    path = MAKE[name](tmp_path, rows(range(50)))
    file = path / "metrics.jsonl" if path.is_dir() else path
    ends = {"trainer_state": 40, "text": 25}.get(name, 9)
    file.write_bytes(file.read_bytes()[:-ends])
    log = read(str(path))
    assert log.run.steps.tolist() in (list(range(49)), list(range(50)))
    assert log.run.column("loss")[48] == pytest.approx(3.52)
    if name not in ("run_folder", "text"):
        assert any("torn" in remark for remark in log.remarks)


@those(IN_ONE_FILE)
def test_gzip_is_undone_or_named(name: str, tmp_path: Path) -> None:
    path = MAKE[name](tmp_path, rows(range(50)))
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    if name == "tensorboard":
        with pytest.raises(SourceError, match="gunzip"):
            read(str(packed))
        return
    same(read(str(packed)), read(str(path)))


def same(one: Log, other: Log) -> None:
    assert (one.format, one.mapping) == (other.format, other.mapping)
    assert one.run.steps.tolist() == other.run.steps.tolist()
    np.testing.assert_array_equal(one.run.column("loss"), other.run.column("loss"))


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\0" * 5000, bytes(range(256)) * 40, b"PK\x03\x04" + bytes(200)])
def test_nobody_takes_junk(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(content)
    assert recognised_by(tmp_path / "junk") == []
    with pytest.raises(SourceError, match=r"empty|neither text"):
        read(str(tmp_path / "junk"))


def test_w_and_b_is_read_by_its_library_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for file in KEPT["wandb"]:
        check_kept(read(str(file)), steps=20)
    monkeypatch.setitem(sys.modules, "wandb.proto.wandb_internal_pb2", None)  # as where it is not installed
    with pytest.raises(MissingExtra, match=r"pip install 'sealegs\[wandb\]'"):
        read(str(file))


def check_kept(log: Log, steps: int) -> None:
    """What ``make.py`` wrote."""
    assert log.run.steps.tolist() == list(range(1, steps + 1))
    before = min(steps, 12)
    np.testing.assert_allclose(log.run.column("loss")[:before], [4 - i / 10 for i in range(1, before + 1)], rtol=1e-6)
    assert steps == 10 or math.isnan(log.run.column("loss")[12])
    assert log.run.logged("loss").all()
    assert log.run.steps[log.run.logged("eval_loss")].tolist() == [10, 20][: steps // 10]
    assert log.run.column("eval_loss")[9] == 3.5


@pytest.mark.parametrize(
    "source", ["tensorboard", "tensorboard_tensors", "lightning", "mlflow", "trackio/tiny.db#second", "transformers"]
)
def test_it_reads_what_the_library_wrote(source: str) -> None:
    check_kept(read(str(KEPT["mlflow"][0].parent / source)), steps=20)


def test_the_newest_checkpoint_has_the_whole_history(tmp_path: Path) -> None:
    shutil.copytree(KEPT["trainer_state"][0], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-20")
    log = read(str(tmp_path / "run"))
    check_kept(log, steps=10)
    assert log.run.manifest.settings["max_steps"] == 20


SAMPLES: dict[str, bytes] = {}


@pytest.fixture(scope="module", autouse=True)
def samples(tmp_path_factory: pytest.TempPathFactory) -> None:
    for name in [*IN_ONE_FILE, "trackio"]:
        SAMPLES[name] = MAKE[name](tmp_path_factory.mktemp("samples"), rows(range(30))).read_bytes()


def survives(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        log = read(str(path))
    except SealegsError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017 - either is right, and both are held to something
        return
    assert (np.diff(log.run.steps) > 0).all()
    assert len(log.run.column("loss")) == len(log.run.steps) > 0
    assert log.run.written("loss").steps.dtype == np.int64


@given(content=st.binary(max_size=400) | st.text(max_size=400).map(str.encode))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_read_or_refused(content: bytes, tmp_path: Path) -> None:
    survives(tmp_path / "any", content)


@given(
    name=st.sampled_from([*IN_ONE_FILE, "trackio"]),
    cut=st.floats(0, 1),
    length=st.integers(0, 40),
    put=st.binary(max_size=12)
    | st.sampled_from([b"NaN", b"1e999", b"-", b"\n", b",,", b'"', b"{", b"9" * 30, b"1e18"]),
)
@settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_is_read_over_or_refused(name: str, cut: float, length: int, put: bytes, tmp_path: Path) -> None:
    sound = SAMPLES[name]
    at = int(cut * len(sound))
    survives(tmp_path / name, sound[:at] + put + sound[at + length :])


Cell = (
    st.floats(width=32) | st.integers(-(2**70), 2**70) | st.none() | st.sampled_from(["NaN", "inf", "1,234", "x", ""])
)


@given(table=st.lists(st.fixed_dictionaries({}, optional={"step": Cell, "loss": Cell, "epoch": Cell}), max_size=30))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_cells_give_rising_steps(table: list[dict[str, Any]], tmp_path: Path) -> None:
    names = ("step", "loss", "epoch")
    lines = [",".join(names), *(",".join(f'"{row.get(name, "")}"' for name in names) for row in table)]
    survives(tmp_path / "table", "\n".join(lines).encode())
    survives(tmp_path / "lines", "\n".join(map(json.dumps, [{"loss": 1}, *table])).encode())
