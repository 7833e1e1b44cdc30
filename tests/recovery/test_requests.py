"""Whatever lies in ``requests/``, the run goes on, says what it refused, and is not fooled about who asked."""

import json
import os
import pwd
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch

import sealegs
from sealegs.record import requests
from sealegs.record.requests import Inbox
from sealegs.record.run import open_run
from sealegs.recovery import requests as queue

ME = pwd.getpwuid(os.getuid()).pw_name
SOUND = {"id": "1", "by": "somebody else", "words": ["lr", "0.5"]}


def brackets(path: Path) -> None:
    path.write_bytes(b"[" * 200_000)


def deep(path: Path) -> None:
    path.write_bytes(b"[" * 2000 + b"]" * 2000)


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def words_of(words: object) -> Callable[[Path], None]:
    return lambda path: path.write_text(json.dumps({"words": words}))  # type: ignore[return-value]


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "brackets": (brackets, "more than 4096 bytes"),
    "deep": (deep, "nested"),
    "a terabyte": (huge, "more than 4096 bytes"),
    "fifo": (os.mkfifo, "a FIFO, not a file"),
    "folder": (Path.mkdir, "a folder, not a file"),
    "link": (link, "a link, not a file"),
    "empty": (Path.touch, "Expecting value"),
    "a number": (lambda path: path.write_text("1" * 4000), "no request"),
    "no words": (lambda path: path.write_text('{"by": "ana"}'), "no request"),
    "a word alone": (words_of("halt"), "no request"),
    "words that are none": (words_of([["halt"]]), "no request"),
    "a long word": (words_of(["lr", "9" * 300]), "no request"),
    "many words": (words_of(["halt"] * 9), "more than 8 words"),
}


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """What waits for a FIFO waits for ever."""

    def hang(number: int, frame: FrameType | None) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / requests.FOLDER).mkdir()
    return tmp_path


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_request_is_moved_aside_and_the_next_is_taken(name: str, folder: Path) -> None:
    make, why = BAD[name]
    make(folder / requests.FOLDER / "1.json")
    (folder / requests.FOLDER / "2.json").write_text(json.dumps(SOUND))
    inbox = Inbox(folder)
    found, [refused] = inbox.take()
    assert (refused.id, refused.by) == ("1", ME)
    assert why in refused.reason
    assert found is not None
    assert (found.id, found.words) == ("2", ("lr", "0.5"))
    assert [path.name for path in (folder / requests.FOLDER).iterdir()] == [requests.REFUSED]
    assert inbox.take() == (None, [])


def test_the_name_is_that_of_the_owner(folder: Path) -> None:
    (folder / requests.FOLDER / "1.json").write_text(json.dumps(SOUND))
    found, _ = Inbox(folder).take()
    assert found is not None
    assert found.by == ME


@pytest.mark.parametrize("name", ["a\x1b[2Jb", "\n", "x" * 200, "a b", os.fsdecode(b"\xff"), "<b>"])
def test_a_name_that_is_no_id_goes_into_the_event_spelt_out(name: str, folder: Path) -> None:
    (folder / requests.FOLDER / f"{name}.json").write_text(json.dumps(SOUND))
    found, [refused] = Inbox(folder).take()
    assert found is None
    assert refused.id.isascii()
    assert refused.id.isprintable()
    assert len(refused.id) <= 80
    assert "no id" in refused.reason


def test_a_request_that_cannot_be_removed_is_not_carried_out_again_and_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / requests.FOLDER / "1.json").write_text(json.dumps(SOUND))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "unlink", refuse)  # as on a folder that another user owns; a test may run as root
    monkeypatch.setattr(os, "replace", refuse)
    inbox = Inbox(folder)
    found, [refused] = inbox.take()
    assert (found, refused.reason) == (None, "not yet: Operation not permitted")
    assert inbox.take() == (None, []), "said once"
    monkeypatch.undo()
    found, refused_then = inbox.take()
    assert found is not None
    assert refused_then == []


@pytest.mark.parametrize("at", [requests.FOLDER, f"{requests.FOLDER}/{requests.REFUSED}"])
def test_no_file_is_moved_through_a_link(at: str, tmp_path: Path) -> None:
    """Else a stranger would have the training process move files of its user."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "theirs.json").write_text("{")
    (tmp_path / "run" / at).parent.mkdir(parents=True)
    (tmp_path / "run" / at).symlink_to(tmp_path / "elsewhere")
    if at != requests.FOLDER:
        (tmp_path / "run" / requests.FOLDER / "bad.json").write_text("{")
    inbox = Inbox(tmp_path / "run")
    found, [_] = inbox.take()
    assert found is None
    assert inbox.take() == (None, []), "said once"
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["theirs.json"]


def test_a_flood_of_files_is_looked_at_in_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MOST_FILES", 3)
    for number in range(10):
        (folder / requests.FOLDER / f"{number}.json").touch()
    inbox = Inbox(folder)
    assert [len(inbox.take()[1]) for _ in range(5)] == [3, 3, 3, 1, 0]


def test_a_run_goes_on_beside_all_of_them_and_so_does_its_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "ASK_EVERY_S", 0.0)
    run = tmp_path / "run"
    for resume in (False, True):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with sealegs.Guard(model, optimizer, run=run, resume=resume, playbook=sealegs.Playbook.observe()) as guard:
            (run / requests.FOLDER).mkdir(exist_ok=True)
            for place, (make, _) in enumerate(BAD.values()):
                make(run / requests.FOLDER / f"{place}-{resume}.json")
            (run / requests.FOLDER / f"z-{resume}.json").write_text(json.dumps(SOUND))
            for _ in range(3):
                model(torch.ones(4, 2)).square().mean().backward()
                guard.step(model(torch.ones(4, 2)).square().mean())
    events = open_run(run).events
    refused = [event for event in events if event.kind == "request-refused"]
    assert len(refused) == 2 * len(BAD)
    assert {event.detail["by"] for event in refused} == {ME}
    done = [event for event in events if event.kind == "intervention"]
    assert [event.detail["request"] for event in done] == ["z-False", "z-True"]
    assert all(ME in str(event.detail["decided_by"]) for event in done)
