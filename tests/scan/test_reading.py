"""Every format is read whole, in parts and in blocks of any size."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sealegs.lab.corpus import text_documents
from sealegs.scan import arrow_reader, blocks, id_reader, plan, text_reader
from sealegs.scan.blocks import End, Ids, Part, TextDocuments, Unreadable, Ways
from sealegs.scan.plan import READERS, planned


def read(parts: Iterable[Part], ways: Ways) -> tuple[dict[str, list[Any]], list[str]]:
    """The documents of each file in order, by the numbers that the readers give them; and what they could not read."""
    found: dict[str, dict[int, Any]] = {}
    troubles: list[str] = []
    before: dict[str, int] = {}
    for part in parts:
        first = before.get(part.file, 0)
        documents = found.setdefault(part.file, {})
        for block in READERS[part.format](part, ways):
            if isinstance(block, End):
                before[part.file] = first + block.numbers
            elif isinstance(block, Unreadable):
                troubles.append(f"{first + block.number}: {block.text}")
            else:
                data = block.data if isinstance(block, TextDocuments) else block.ids.tolist()
                edges = [*block.starts.tolist(), len(data)]
                for place, number in enumerate(block.numbers.tolist()):
                    documents[first + number] = data[edges[place] : edges[place + 1]]
    return {file: [each[number] for number in sorted(each)] for file, each in found.items()}, troubles


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts and blocks so small that everything is cut."""
    for module in (blocks, plan, text_reader, arrow_reader):
        if hasattr(module, "PART_BYTES"):
            monkeypatch.setattr(module, "PART_BYTES", 64)
        if hasattr(module, "BLOCK_BYTES"):
            monkeypatch.setattr(module, "BLOCK_BYTES", 16)
    monkeypatch.setattr(id_reader, "_PART_TOKENS", 20)
    monkeypatch.setattr(id_reader, "_BLOCK_TOKENS", 7)
    monkeypatch.setattr(arrow_reader, "_ROWS", 3)


PARAGRAPHS = st.lists(st.text("ab é\n\t\r", max_size=20), max_size=12)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PARAGRAPHS, st.sampled_from(["\n\n", "\n \t\n", "\n\n\n\n", "\r\n\r\n"]))
def test_paragraphs_are_the_documents_that_the_trainer_reads(
    small: None, tmp_path: Path, pieces: list[str], between: str
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(between.join(["First.", *pieces, "Last."]).encode())
    expected = [document.split() for document in text_documents(path)]
    found, troubles = read(planned([str(path)], Ways()), Ways())
    assert [document.decode().split() for document in found[str(path)]] == expected
    assert troubles == []


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_lines_are_numbered_through_and_broken_ones_are_named(small: None, tmp_path: Path, ending: str) -> None:
    lines = [json.dumps({"n": n, "text": f"Document {n} " + "é" * n}) for n in range(20)]
    lines[7], lines[13] = '{"text": "never ends', ""
    lines[15] = '{"text": "\\ud800"}'
    path = tmp_path / f"a.jsonl{ending}"
    raw = "\r\n".join(lines).encode()
    path.write_bytes(gzip.compress(raw) if ending else raw)
    parts = planned([str(path)], Ways())
    assert len(parts) == 1 if ending else len(parts) > 3
    found, troubles = read(parts, Ways())
    texts = [json.loads(line)["text"].encode() for n, line in enumerate(lines) if n not in (7, 13, 15)]
    assert found[str(path)] == texts
    assert [trouble.split(" ")[0] for trouble in troubles] == ["7:", "15:"]


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    from sealegs.scan.scan import scan_part

    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"Text. " * 1000)[:-30])
    (part,) = planned([str(path)], Ways())
    (problem,) = scan_part(part, Ways()).problems
    assert problem.text.startswith("damaged (")


def test_files_that_are_a_document_each_are_taken_together(tmp_path: Path) -> None:
    for name in ("a.py", "b.md", "sub/c.rst", "sub/.hidden", ".git/config"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"This is {name}.")
    parts = planned([str(tmp_path)], Ways())
    assert [part.source for part in parts] == [str(tmp_path), str(tmp_path / "sub")]
    assert [Path(file).name for part in parts for file in part.files] == ["a.py", "b.md", "c.rst"]


def test_a_document_that_is_too_large_is_cut(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_reader, "LARGEST_DOCUMENT", 100)
    path = tmp_path / "a.txt"
    path.write_text("First.\n\n" + "long " * 400 + "end\n\nLast.")
    documents = read(planned([str(path)], Ways()), Ways())[0][str(path)]
    assert [document.strip()[:6] for document in documents] == [b"First.", b"long l", b"Last."]
    assert len(documents[1]) < 200


IDS = [[5, 6, 0], [7, 0], [0], [8] * 30 + [0], [9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0], [1, 0]]


@pytest.mark.parametrize("how", ["end", "starts"])
@pytest.mark.parametrize("kind", [".npy", ".bin"])
def test_token_ids_are_cut_where_documents_end(small: None, tmp_path: Path, how: str, kind: str) -> None:
    path = tmp_path / f"a{kind}"
    flat = np.array([token for each in IDS for token in each], np.uint32)
    if kind == ".npy":
        np.save(path, flat)
    else:
        flat.tofile(path)
    if how == "starts":
        lengths = [len(each) for each in IDS]
        np.save(tmp_path / "a.starts.npy", np.cumsum(lengths) - lengths)
    ways = Ways(dtype="uint32", end=0 if how == "end" else None)
    parts = planned([str(path)], ways)
    assert len(parts) > 1
    assert read(parts, ways)[0][str(path)] == IDS


def test_without_documents_rows_are_taken_for_them(small: None, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(50, dtype=np.uint16))
    np.save(tmp_path / "b.npy", np.arange(50, dtype=np.uint16).reshape(10, 5))
    ways = Ways(row=8)
    found, _ = read(planned([str(tmp_path / "a.npy"), str(tmp_path / "b.npy")], ways), ways)
    assert [len(row) for row in found[str(tmp_path / "a.npy")]] == [8] * 6 + [2]
    assert found[str(tmp_path / "b.npy")] == np.arange(50).reshape(10, 5).tolist()


def test_offsets_of_ids_are_counted_from_the_part(small: None, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(50, dtype=np.uint16))
    for part in planned([str(tmp_path / "a.npy")], Ways(row=4)):
        for block in READERS["ids"](part, Ways(row=4)):
            if isinstance(block, Ids):
                assert block.ids[0] == part.start + block.offset


TEXTS = ["One.", "", "Zwei, für drei.", None, "日本", "Six"]


@pytest.mark.parametrize("kind", ["parquet", "stream", "file"])
@pytest.mark.parametrize("type_", [pa.string(), pa.large_string()])
def test_tables_give_a_column_of_text(small: None, tmp_path: Path, kind: str, type_: pa.DataType) -> None:
    table = pa.table({"text": pa.array(TEXTS * 3, type_), "n": range(18)})
    path = tmp_path / ("a.parquet" if kind == "parquet" else "a.arrow")
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=7)
    else:
        opened = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
        with pa.OSFile(str(path), "wb") as file, opened(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=4)
    found, troubles = read(planned([str(path)], Ways()), Ways())
    assert found[str(path)] == [(text or "").encode() for text in TEXTS * 3]
    assert troubles == []


def test_tables_give_a_column_of_token_ids(small: None, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"input_ids": IDS}), path, row_group_size=2)
    ways = Ways(field="input_ids")
    assert read(planned([str(path)], ways), ways)[0][str(path)] == IDS


@pytest.mark.parametrize(
    ("ways", "sentence"),
    [
        (Ways(field="body"), "no column 'body'; give --field, one of text, n"),
        (Ways(field="n"), "column of int64: documents are strings or lists of token ids; give --field"),
        (Ways(source="web"), "no column 'web'; give --source, one of text, n"),
    ],
)
def test_what_a_table_does_not_have_is_said(tmp_path: Path, ways: Ways, sentence: str) -> None:
    from sealegs.scan.scan import scan_part

    pq.write_table(pa.table({"text": ["a"], "n": [1]}), tmp_path / "a.parquet")
    (part,) = planned([str(tmp_path / "a.parquet")], ways)
    (problem,) = scan_part(part, ways).problems
    assert problem.text == sentence
