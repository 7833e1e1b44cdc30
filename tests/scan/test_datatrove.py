"""Steps for a datatrove pipeline: what a document shows by itself is said of it, and what is named is left out."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datatrove", reason="these are steps of datatrove, of the extra `cluster`")

from datatrove.data import Document

from sealegs.cli.main import main
from sealegs.errors import SourceError
from sealegs.scan.datatrove import LeaveOut, Scan

SOUND = "A sound document, as there are many of them."
LONG = " ".join(f"{SOUND} {number}" for number in range(40))
SICK = {3: "go on " * 60, 40: "One.\ufffd", 77: "", 1500: "x" * 2000, 2100: f"{LONG}\ufffd{LONG}"}


def documents() -> list[Document]:
    return [Document(SICK.get(number, f"{SOUND} {number}"), f"here/{number}") for number in range(2200)]


def test_what_is_wrong_with_a_document_is_said_of_it_and_nothing_of_others() -> None:
    seen = list(Scan().run(documents()))
    assert [each.id for each in seen] == [each.id for each in documents()]
    said: dict[int, Any] = {number: each.metadata["sealegs"] for number, each in enumerate(seen) if each.metadata}
    assert said == {
        3: {"action": "drop", "why": ["repeats: 2 words, 60 times on end"]},
        40: {"action": "drop", "why": ["replaced: replacement character: 1 in 7 bytes"]},
        77: {"action": "drop", "why": ["empty: no text"]},
        1500: {"action": "drop", "why": ["unbroken: 2,000 characters without a space"]},
        2100: {"action": "defer", "why": ["replaced: replacement character: 1 in 3,821 bytes"]},
    }
    again = list(Scan(longest=3).run(seen[:2]))
    assert [each.metadata["sealegs"]["why"] for each in again] == [["over-long: 12 words"]] * 2
    assert "sealegs" not in next(iter(Scan().run(again))).metadata  # what an earlier one said is gone


def numbers(found: Iterable[Document]) -> set[int]:
    return set(range(2200)) - {int(each.id.partition("/")[2]) for each in found}


def test_what_the_step_named_is_left_out() -> None:
    seen = list(Scan().run(documents()))
    assert numbers(LeaveOut().run(iter(seen))) == {3, 40, 77, 1500}
    assert numbers(LeaveOut(deferred=True).run(iter(seen))) == {3, 40, 77, 1500, 2100}


def test_what_the_list_names_is_left_out_of_the_files_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By datatrove's own executor, and its reader's way to number documents."""
    monkeypatch.chdir(tmp_path)
    draw = random.Random(2)  # noqa: S311 - no secrets
    Path("corpus").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        texts = [SOUND, *(f"{SOUND} {draw.random()}" for _ in range(8)), "go on " * 60, SOUND]
        Path("corpus", name).write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    assert main(["scan", "corpus", "--jobs", "1", "-o", "out"]) == 1

    def read(data: object, rank: int, world: int) -> Iterable[Document]:
        for path in sorted((tmp_path / "corpus").iterdir())[rank::world]:
            for number, line in enumerate(path.read_text().splitlines()):
                yield Document(json.loads(line)["text"], f"{path.name}/{number}", metadata={"file_path": str(path)})

    stayed: list[str] = []

    def keep(data: Iterable[Document], rank: int, world: int) -> None:
        stayed.extend(each.id for each in data)

    from sealegs.scan.local_executor import QuietLocalExecutor

    QuietLocalExecutor([read, LeaveOut("out/documents.jsonl"), keep], tasks=2, workers=1, logging_dir="logs").run()
    gone = {"a.jsonl/9", "a.jsonl/10", "b.jsonl/0", "b.jsonl/9", "b.jsonl/10"}
    assert set(stayed) == {f"{name}.jsonl/{number}" for name in "ab" for number in range(11)} - gone

    step = LeaveOut("out/documents.jsonl")
    with pytest.raises(SourceError, match=r"other\.jsonl: is not in out/documents\.jsonl; scan these files"):
        step.filter(Document("", "0/0", metadata={"file_path": "other.jsonl"}))
    with pytest.raises(SourceError, match="its number in the file is not known"):
        step.filter(Document("", "abc", metadata={"file_path": "corpus/a.jsonl"}))
