"""``metrics.jsonl`` in, numpy columns out, through a cache that is never trusted over the file."""

import json
import math
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sealegs.record import columns
from sealegs.record.columns import Columns, read_columns
from sealegs.record.rows import is_sound_name, sound_name
from sealegs.record.schema import COLUMN_CACHE, METRICS, to_line

Rows = list[dict[str, Any]]

numbers = st.floats(allow_nan=True, allow_infinity=True)
rows = st.lists(
    st.dictionaries(st.sampled_from(["loss", "grad_norm", "lr", "param_norm/blocks.0"]), numbers), max_size=40
).map(lambda found: [{"step": step, **row} for step, row in enumerate(found)])


def write(folder: Path, content: Rows, name: str = METRICS) -> Path:
    path = folder / name
    path.write_bytes(b"".join(to_line(row) for row in content))
    return path


def check(found: Columns, expected: Rows) -> None:
    """Value by value: NaN, Inf and missing are three different things."""
    assert found.rows == len(expected)
    for name in {key for row in expected for key in row}:
        assert found.logged[name].tolist() == [name in row for row in expected]
        for value, row in zip(found.values[name].tolist(), expected, strict=True):
            wanted = row.get(name, math.nan)
            assert value == wanted or (math.isnan(value) and math.isnan(wanted))


@given(rows)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_was_written_is_what_is_read(tmp_path: Path, content: Rows) -> None:
    check(read_columns(write(tmp_path, content)), content)


@given(rows, st.integers(0, 200), st.binary(max_size=12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_torn_tail_costs_only_itself(tmp_path: Path, content: Rows, cut: int, junk: bytes) -> None:
    path = write(tmp_path, content)
    whole = path.read_bytes()
    kept = whole[: max(0, len(whole) - cut)]
    path.write_bytes(kept + junk.replace(b"\n", b""))
    check(read_columns(path), content[: kept.count(b"\n")])


@given(rows, rows)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_line_in_the_middle_is_counted_and_left_out(tmp_path: Path, first: Rows, second: Rows) -> None:
    path = write(tmp_path, first)
    with path.open("ab") as file:
        file.write(b'{"step":7,"lo\n' + b"[1]\n" + b'{"loss":1.0}\n' + b"\xff\xfe\n" + b'{"step":"x"}\n' + b"\n")
        file.write(b'{"step":1e300,"loss":1.0}\n')
        file.write(b"".join(to_line(row) for row in second))
    found = read_columns(path)
    check(found, first + second)
    assert found.damaged_lines == 6


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "a\0b", "a\u202eb", "\ud800", "x" * 300], ids=ascii)
def test_a_name_that_no_column_may_have_is_spelt_otherwise_and_costs_no_row(name: str, tmp_path: Path) -> None:
    """As older versions wrote them."""
    lines = [json.dumps({"step": step, "loss": 1.0, name: 2.0}) for step in range(5)]
    (tmp_path / METRICS).write_text("".join(f"{line}\n" for line in lines))
    found = read_columns(tmp_path / METRICS)
    if name == "\ud800":  # no reader of JSON takes it
        assert found.damaged_lines == 5
        return
    assert (found.rows, found.damaged_lines, found.left_out) == (5, 0, 0)
    assert found.values["loss"].tolist() == [1.0] * 5
    [other] = found.values.keys() - {"step", "loss"}
    assert found.values[other].tolist() == [2.0] * 5
    assert is_sound_name(other)
    assert other == sound_name(name)


@pytest.mark.parametrize("value", ["[1]", "{}", "true", "9" * 400, "1e999", "[" * 200 + "]" * 200, '"four"'])
def test_of_a_value_that_is_none_the_value_is_lost_and_not_the_row(value: str, tmp_path: Path) -> None:
    rows = [f'{{"step": {step}, "loss": 1.5, "grad_norm": {value if step % 2 else 3.5}}}\n' for step in range(6)]
    (tmp_path / METRICS).write_text("".join(rows))
    found = read_columns(tmp_path / METRICS)
    assert (found.rows, found.damaged_lines, found.left_out) == (6, 0, 3)
    assert found.values["loss"].tolist() == [1.5] * 6
    assert found.values["grad_norm"].dtype == np.float64
    assert found.logged["grad_norm"].tolist() == [True, False] * 3


def test_what_a_file_comes_to_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text in one row makes all cells of its column as long, and a name in one row a cell in all of them."""
    monkeypatch.setenv("SEALEGS_READ_UP_TO", "1MiB")
    notes = ["x" * (50_000 if step == 7 else 1) for step in range(2000)]
    lines = [json.dumps({"step": step, "loss": 2.0, "note": note}) for step, note in enumerate(notes)]
    lines += [json.dumps({"step": 2000 + step, f"n{step}": 1.0}) for step in range(1000)]
    (tmp_path / METRICS).write_text("".join(f"{line}\n" for line in lines))
    found = read_columns(tmp_path / METRICS)
    assert found.rows == 3000
    assert found.values["loss"][:2000].tolist() == [2.0] * 2000
    assert found.values["note"][7].startswith(b"xxxx")
    assert sum(column.nbytes for column in found.values.values()) <= 2 << 20
    assert found.left_out > 900


def test_a_line_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "_LONGEST_LINE", 1 << 16)
    (tmp_path / METRICS).write_bytes(b'{"step": 1}\n' + b" " * (1 << 20))
    with pytest.raises(ValueError, match="have no line end"):
        read_columns(tmp_path / METRICS)


def test_every_float_comes_back_bit_for_bit(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    values = random.integers(0, 2**63, 20_000).view(np.float64)
    values = values[np.isfinite(values)]
    path = write(tmp_path, [{"step": i, "loss": float(value)} for i, value in enumerate(values)])
    assert read_columns(path).values["loss"].tobytes() == values.tobytes()


def test_a_signal_that_starts_late_or_turns_to_text_keeps_its_rows(tmp_path: Path, small_chunks: None) -> None:
    content: Rows = [{"step": i, "loss": 1.0 * i} for i in range(50)]
    content += [{"step": 50 + i, "loss": 1.0, "note": 3.0} for i in range(50)]
    content += [{"step": 100 + i, "loss": 1.0, "note": "später"} for i in range(50)]
    found = read_columns(write(tmp_path, content))
    assert found.logged["note"].tolist() == [False] * 50 + [True] * 100
    assert [found.values["note"][i].decode() for i in (0, 60, 120)] == ["", "3.0", "später"]


@pytest.mark.parametrize(
    "texts",
    [("0a1b", "ffff"), ("0a1b", "fff"), ("", ""), ("\u00e90", "ab"), ("a\0", "bc"), ("ab", None), ("ab", 1.0)],
    ids=["digests", "of other lengths", "empty", "not plain", "with a zero", "missing", "with a number"],
)
def test_texts_are_read_as_they_were_written(texts: tuple[str | float | None, ...], tmp_path: Path) -> None:
    path = tmp_path / METRICS
    path.write_bytes(b"".join(to_line({"step": i, "batch_hash": text}) for i, text in enumerate(texts * 40)))
    found = read_columns(path)
    wanted = ["" if text is None else str(text) for text in texts * 40]
    assert [cell.decode() for cell in found.values["batch_hash"]] == [text.rstrip("\0") for text in wanted]
    assert found.logged["batch_hash"].tolist() == [text is not None for text in texts * 40]


# Two processes.


def lines_of_everything(count: int) -> bytes:
    """Damaged lines, values that are none, signals that start late, that turn to text, or that are null at first."""
    lines = []
    for i in range(count):
        late = {"eval_loss": 1.0 * i} if i > 0.8 * count else {}
        new = {"second": 1.0, "first": 2.0} if i > 0.7 * count else {}
        note = {"note": "1e3" if i % 700 else "text"} if i % 3 else {"note": 4.0}
        row = {"step": i, "loss": math.nan if i % 997 == 5 else 0.1 * i, "batch_hash": i, **note, **new, **late}
        lines.append(b'{"step": 1, "lo\n' if i % 1013 == 7 else to_line(row))
    lines[count // 3] = b'{"step": 5, "loss": [1], "first": null, "odd\\"name": 2}\n'
    return b"".join(lines) + b'{"step": 99'


def one_and_two_processes(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Columns, Columns, float]:
    """What one process reads, what two read, and the share that this one parsed of the second reading."""
    monkeypatch.setattr(columns, "CACHE_FROM_BYTES", 1 << 40)
    one = read_columns(path)
    parsed = parsed_bytes(monkeypatch)
    monkeypatch.setattr(columns, "_LARGE_BYTES", 0)
    monkeypatch.setattr(columns, "may_call_beside", lambda: True)
    return one, read_columns(path), sum(parsed) / path.stat().st_size


def test_two_processes_read_what_one_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / METRICS
    path.write_bytes(lines_of_everything(25_000))
    one, two, share = one_and_two_processes(path, monkeypatch)
    assert share < 0.7
    assert list(one.values) == list(two.values)
    assert same(one, two)
    assert one.left_out == two.left_out == 1
    assert one.damaged_lines == two.damaged_lines > 20


def test_where_no_process_can_be_started_one_reads_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / METRICS
    path.write_bytes(lines_of_everything(9000))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    one, two, share = one_and_two_processes(path, monkeypatch)
    assert share > 0.9
    assert same(one, two)


def test_a_second_half_with_very_many_signals_is_read_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many signals are read in larger chunks, which two processes would cut otherwise."""
    path = tmp_path / METRICS
    wide = [{"step": i, f"own/{i % 400}": 1.0} for i in range(12_000)]
    path.write_bytes(lines_of_everything(9000)[:-11] + b"".join(map(to_line, wide)))
    one, two, share = one_and_two_processes(path, monkeypatch)
    assert share > 0.9
    assert list(one.values) == list(two.values)
    assert same(one, two)


# The cache.


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files go through the cache and several chunks too."""
    monkeypatch.setattr(columns, "CACHE_FROM_BYTES", 1000)
    monkeypatch.setattr(columns, "_CHUNK_BYTES", 700)
    monkeypatch.setattr(columns, "_SAMPLE_BYTES", 100)


def content_of(count: int, loss: float = 1.0) -> Rows:
    return [
        {"step": i, "loss": math.nan if i % 7 == 3 else loss + i, "batch_hash": f"{i:016x}"}
        | ({"eval_loss": 2.0} if i % 10 == 0 else {})
        for i in range(count)
    ]


def same(a: Columns, b: Columns) -> bool:
    return (
        a.values.keys() == b.values.keys()
        and all(a.values[key].tobytes() == b.values[key].tobytes() for key in a.values)
        and all(np.array_equal(a.logged[key], b.logged[key]) for key in a.values)
        and (a.rows, a.damaged_lines, a.covered_bytes) == (b.rows, b.damaged_lines, b.covered_bytes)
    )


def parsed_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes of JSON each later call of ``read_columns`` has to parse."""
    seen: list[int] = []
    decode = columns._decode

    def counting(chunk: bytes, keys: tuple[str, ...]) -> Any:
        seen.append(len(chunk))
        return decode(chunk, keys)

    monkeypatch.setattr(columns, "_decode", counting)
    return seen


def test_the_second_reading_comes_from_the_cache(
    tmp_path: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, content_of(200))
    first = read_columns(path)
    parsed = parsed_bytes(monkeypatch)
    second = read_columns(path)
    assert parsed == []
    assert same(first, second)
    check(
        Columns({k: v for k, v in second.values.items() if k != "batch_hash"}, second.logged, second.rows),
        [{k: v for k, v in row.items() if k != "batch_hash"} for row in content_of(200)],
    )


def test_the_cache_of_a_large_file_is_saved_while_its_columns_are_used(
    tmp_path: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, content_of(200))
    monkeypatch.setattr(columns, "_LARGE_BYTES", 1000)
    monkeypatch.setattr(columns, "may_call_beside", lambda: False)
    with columns._saving:
        first = read_columns(path)
        assert not (tmp_path / COLUMN_CACHE).exists()
        path.rename(tmp_path / "older")  # a name may stand for another file by then
        write(tmp_path, content_of(200, loss=5.0))
    for thread in threading.enumerate():
        if thread.name == "column cache":
            thread.join(60)
    (tmp_path / "older").replace(path)
    parsed = parsed_bytes(monkeypatch)
    assert same(first, read_columns(path))
    assert parsed == []


def test_only_what_was_appended_is_parsed(tmp_path: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = content_of(300)
    path = write(tmp_path, everything[:200])
    read_columns(path)
    parsed = parsed_bytes(monkeypatch)
    with path.open("ab") as file:
        added = b"".join(to_line(row) for row in everything[200:])
        file.write(added)
    found = read_columns(path)
    assert sum(parsed) == len(added)
    (tmp_path / COLUMN_CACHE).unlink()
    assert same(found, read_columns(path))


@pytest.mark.parametrize("keep_time", [True, False])
@pytest.mark.parametrize(
    "where", [5, -5, 3000], ids=["first row", "last row", "middle"]
)  # the middle is in no sample: only the whole digest sees it
def test_a_file_that_was_edited_in_place_is_read_anew(
    tmp_path: Path, small_chunks: None, where: int, keep_time: bool
) -> None:
    path = write(tmp_path, content_of(200))
    read_columns(path)
    stat = path.stat()
    whole = bytearray(path.read_bytes())
    at = whole.index(b'"loss":', where if where >= 0 else len(whole) - 80) + 7
    whole[at : at + 1] = b"9" if whole[at : at + 1] != b"9" else b"8"
    path.write_bytes(whole)
    if keep_time and where != 3000:  # same size, same time: the first and last bytes still tell
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    found = read_columns(path)
    (tmp_path / COLUMN_CACHE).unlink()
    assert same(found, read_columns(path))


def test_the_cache_of_another_file_is_not_believed(tmp_path: Path, small_chunks: None) -> None:
    (tmp_path / "other").mkdir()
    read_columns(write(tmp_path / "other", content_of(200, loss=5.0)))
    path = write(tmp_path, content_of(300))
    shutil.copy(tmp_path / "other" / COLUMN_CACHE, tmp_path / COLUMN_CACHE)
    assert np.nanmin(read_columns(path).values["loss"]) == 1.0


def test_a_file_that_was_cut_is_read_anew(tmp_path: Path, small_chunks: None) -> None:
    path = write(tmp_path, content_of(200))
    read_columns(path)
    write(tmp_path, content_of(150))
    assert read_columns(path).rows == 150


@pytest.mark.parametrize("cut", [0, 1, 10, 500, 3000])
def test_a_torn_cache_is_made_anew(tmp_path: Path, small_chunks: None, cut: int) -> None:
    path = write(tmp_path, content_of(200))
    first = read_columns(path)
    cache = tmp_path / COLUMN_CACHE
    whole = cache.read_bytes()
    cache.write_bytes(whole[: len(whole) - cut] if cut else b"")
    assert same(first, read_columns(path))
    assert len(cache.read_bytes()) == len(whole)


def test_no_flipped_byte_of_a_cache_is_believed(tmp_path: Path, small_chunks: None) -> None:
    path = write(tmp_path, content_of(60))
    first = read_columns(path)
    cache = tmp_path / COLUMN_CACHE
    whole = cache.read_bytes()
    for at in range(0, len(whole), 7):
        flipped = bytes([whole[at] ^ (1 << at % 8)])
        cache.write_bytes(whole[:at] + flipped + whole[at + 1 :])
        assert same(first, read_columns(path)), f"byte {at}"


class Opened:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_a_pickle_in_a_cache_is_not_opened(tmp_path: Path, small_chunks: None) -> None:
    path = write(tmp_path, content_of(200))
    first = read_columns(path)
    cache, mark = tmp_path / COLUMN_CACHE, tmp_path / "opened"
    with np.load(cache) as stored:
        members: Any = dict(stored)
    members["numbers/0"] = np.array([Opened(mark)], dtype=object)
    with cache.open("wb") as file:
        np.savez(file, **members)
    assert same(first, read_columns(path))
    assert not mark.exists()


# Many columns.


def wide_content() -> Rows:
    """A thousand layers, in three signals at every tenth row and in another at the next."""
    at_ten = {f"{name}/layers.{n}": n + 0.5 for n in range(1000) for name in ("param_norm", "grad_norm", "act")}
    at_eleven = {f"update_ratio/layers.{n}": n - 0.5 for n in range(1000)}
    return [{"step": i, "loss": 1.0 / (i + 1)} | {0: at_ten, 1: at_eleven}.get(i % 10, {}) for i in range(31)]


def test_thousands_of_columns_come_back_as_they_were_written(tmp_path: Path, small_chunks: None) -> None:
    content = wide_content()
    path = write(tmp_path, content)
    first = read_columns(path)
    check(first, content)
    assert list(first.values) == list(dict.fromkeys(name for row in content for name in row))
    assert same(first, read_columns(path)), "from the cache"


def test_what_opening_costs_grows_with_the_values_and_not_with_columns_times_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays are made a few times for each column, however many rows are as long as a chunk."""
    made = []
    spread = columns._spread

    def counting(rows: int, pieces: Any) -> Any:
        made.append(len(pieces))
        return spread(rows, pieces)

    monkeypatch.setattr(columns, "CACHE_FROM_BYTES", 1000)
    monkeypatch.setattr(columns, "_CHUNK_BYTES", 700)
    monkeypatch.setattr(columns, "_spread", counting)
    path = write(tmp_path, wide_content())
    found = read_columns(path)
    assert len(found.values) == 4002
    assert sum(made) <= 6 * len(found.values)
    with np.load(tmp_path / COLUMN_CACHE) as stored:
        assert len(stored.files) == 3, "what it is about, numbers, and where they are"


def test_a_folder_that_cannot_be_written_is_still_read(tmp_path: Path, small_chunks: None) -> None:
    path = write(tmp_path, content_of(200))
    (tmp_path / COLUMN_CACHE).mkdir()  # stands for any refusal: tests may run as root, who may write everywhere
    assert read_columns(path).rows == 200
