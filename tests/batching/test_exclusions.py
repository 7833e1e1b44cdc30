"""The list of documents that a trainer leaves out."""

from pathlib import Path
from typing import Any

import pytest

from sealegs.batching.exclusions import read_list, write_list
from sealegs.errors import SourceError


def written(path: Path, sizes: dict[str, int], *listed: Any) -> Path:
    with path.open("wb") as file:
        write_list(file, sizes, listed)
    return path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = written(
        tmp_path / "documents.jsonl",
        {"a.txt": 10, "b é.txt": 3},
        {"file": "a.txt", "document": 7, "action": "drop", "why": ["repeats: 1 word, 40 times on end"]},
        {"file": "a.txt", "document": 2, "action": "drop", "why": []},
        {"file": "b é.txt", "document": 0, "action": "defer", "why": []},
    )
    found = read_list(path)
    assert {name: (each.documents, each.dropped.tolist(), each.deferred.tolist()) for name, each in found.items()} == {
        "a.txt": (10, [2, 7], []),
        "b é.txt": (3, [], [0]),
    }


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", ""),
        ("no JSON", "line 1 is not one of a list of documents"),
        ('{"schema": 2, "files": {}}', "schema 2, this Sealegs reads up to 1"),
        ('{"schema": 1, "files": {"a": 3}}\n{"file": "a", "document": 3, "action": "drop"}', "line 2 is not"),
        ('{"schema": 1, "files": {"a": 3}}\n{"file": "b", "document": 0, "action": "drop"}', "line 2 is not"),
        ('{"schema": 1, "files": {"a": 3}}\n{"file": "a", "document": 0, "action": "burn"}', "line 2 is not"),
        ('{"schema": 1, "files": {"a": 3}}\n[]', "line 2 is not"),
    ],
)
def test_what_is_no_list_is_refused_with_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_text(text)
    if not sentence:
        assert read_list(path) == {}
        return
    with pytest.raises(SourceError, match=sentence):
        read_list(path)


def test_a_list_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"nowhere\.jsonl: cannot be read"):
        read_list(tmp_path / "nowhere.jsonl")
