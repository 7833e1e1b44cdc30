"""Files are written into nothing but themselves; a folder that cannot be listed is an error, and not an empty one."""

import os
from pathlib import Path
from typing import Any

import pytest

from sealegs.record.files import files_in, whole_file


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "plain/0", "plain/deep/1"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [str(file.relative_to(tmp_path)) for file in files_in(tmp_path)] == ["a", "plain/0", "plain/deep/1"]
    scandir = os.scandir

    def broken(place: Any) -> Any:
        if str(place).endswith("plain"):
            raise OSError(5, "Input/output error", place)
        return scandir(place)

    monkeypatch.setattr(os, "scandir", broken)
    with pytest.raises(OSError, match="Input/output error"):
        files_in(tmp_path)


@pytest.mark.parametrize("kind", ["link", "FIFO", "file"])
def test_nothing_that_lies_in_its_way_is_written_to(kind: str, tmp_path: Path) -> None:
    """The name of a file on its way can be guessed, and others may write to the folder."""
    other, way = tmp_path / "other", tmp_path / f".report.{os.getpid()}.partial"
    other.write_text("theirs")
    if kind == "link":
        way.symlink_to(other)
    elif kind == "FIFO":
        os.mkfifo(way)
    else:
        way.write_text("left by a process of this number, and longer")
    with whole_file(tmp_path / "report") as file:
        file.write(b"ours")
    assert other.read_text() == "theirs"
    assert (tmp_path / "report").read_text() == "ours"
    assert not (tmp_path / "report").is_symlink()
