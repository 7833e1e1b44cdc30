"""What may be a stranger's is read as a file of a sane size inside its folder, or refused in one sentence."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from sealegs.errors import ConfigError, SourceError
from sealegs.record.reading import (
    DEEPEST_JSON,
    is_inside,
    most_bytes,
    open_file,
    parse_json,
    parse_toml,
    read_bytes,
    read_json,
    read_object,
    reading,
    shown,
)


def make_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(here)


def make_hole(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 42)


SPECIAL: dict[str, tuple[Callable[[Path], object], str]] = {
    "fifo": (os.mkfifo, "a FIFO, not a file"),
    "folder": (Path.mkdir, "a folder, not a file"),
    "socket": (make_socket, "a socket, not a file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "a device, not a file"),
    "hole": (make_hole, "it is a hole"),
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_file_is_refused_and_never_waited_for(kind: str, tmp_path: Path) -> None:
    make, why = SPECIAL[kind]
    make(tmp_path / "x")
    with pytest.raises(SourceError, match=why):
        open_file(tmp_path / "x")
    with pytest.raises(SourceError):
        read_json(tmp_path / "x", tmp_path)


@pytest.mark.parametrize("name", ["../secret", "link", "folder/secret", "/etc/hostname", "a\0b"])
def test_nothing_leads_out_of_a_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("{}")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link").symlink_to(tmp_path / "secret")
    (inside / "folder").symlink_to(tmp_path)
    with pytest.raises(SourceError, match=r"leads out of|not a name of a file"):
        read_json(inside / name, inside)
    assert not is_inside(inside / name, inside)


def test_a_link_that_stays_inside_and_one_that_the_user_gave_are_followed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "a").write_text("1")
    (tmp_path / "run" / "b").symlink_to("a")
    (tmp_path / "named").symlink_to(tmp_path / "run")
    assert read_bytes(tmp_path / "run" / "b", tmp_path / "run") == b"1"
    assert read_bytes(tmp_path / "named" / "b", tmp_path / "named") == b"1"
    assert read_bytes(tmp_path / "named" / "a") == b"1"


def test_a_missing_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "x", tmp_path)
    (tmp_path / "x").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "x", tmp_path)


def test_the_bound_can_be_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(b"x" * 2000)
    monkeypatch.setenv("SEALEGS_READ_UP_TO", "1k")
    with pytest.raises(SourceError, match=r"comes to 2,000 bytes, which is more than 1,024 bytes.*--read-up-to 8GiB"):
        read_bytes(tmp_path / "x")
    monkeypatch.setenv("SEALEGS_READ_UP_TO", "2 KiB")
    assert len(read_bytes(tmp_path / "x")) == 2000
    monkeypatch.delenv("SEALEGS_READ_UP_TO")
    assert most_bytes() == 2 << 30


@pytest.mark.parametrize("words", ["", "much", "-1", "1.5GiB", "9" * 100, "8 GB!"])
def test_a_size_that_is_none_is_refused(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEALEGS_READ_UP_TO", words)
    with pytest.raises(ConfigError, match=r"SEALEGS_READ_UP_TO=.*: a size, such as 8GiB"):
        most_bytes()


@pytest.mark.parametrize(
    "text",
    ["[" * 200_000, "[" * (DEEPEST_JSON + 1) + "]" * (DEEPEST_JSON + 1), '{"a":' * 500 + "1" + "}" * 500, "{", ""],
    ids=["brackets", "lists", "objects", "torn", "empty"],
)
def test_json_that_no_record_has_is_a_value_error(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - that nothing else is raised is what matters
        parse_json(text)
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(SourceError, match=r"x\.json: cannot be read \(.*\); restore it from a copy"):
        read_json(tmp_path / "x.json")


def test_json_is_as_deep_as_it_may_be() -> None:
    value = parse_json("[" * DEEPEST_JSON + "]" * DEEPEST_JSON)
    assert isinstance(value, list)


@pytest.mark.parametrize("digits", [21, 25, 400, 5000])
def test_an_integer_of_any_length_is_a_number(digits: int) -> None:
    value = parse_json("9" * digits)
    assert value == float("9" * digits)
    assert parse_json(str(2**63)) == 2**63, "a seed"
    assert isinstance(parse_json(str(2**64)), float)
    assert parse_json(str(2**100), exact_integers=True) == 2**100, "the state of a generator"


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 5000,
        "a = " + "[" * 200 + "]" * 200,
        "a = 0x" + "f" * 4000,
        f"a = {'9' * 5000}",
        f"a = {2**63}",
        "a",
    ],
    ids=["brackets", "deep", "hex", "digits", "65 bits", "torn"],
)
def test_toml_that_no_plan_has_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - as above
        parse_toml(text)


@pytest.mark.parametrize("value", ["[]", "1", "null", '"x"'])
def test_an_object_is_an_object(value: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(value)
    with pytest.raises(SourceError, match="no JSON object"):
        read_object(tmp_path / "x.json")


def test_what_goes_wrong_is_short() -> None:
    with pytest.raises(SourceError) as refused, reading(Path("x")):
        raise ValueError("y" * 10_000)
    assert len(str(refused.value)) < 300
    assert shown(int("9" * 400)).endswith("...")
    assert shown(10**5000) == "an integer of thousands of digits"
    assert json.loads(shown([1, 2])) == [1, 2]
