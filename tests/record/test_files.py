"""Files in a folder: a folder that cannot be listed is an error, and not an empty one."""

import os
from pathlib import Path
from typing import Any

import pytest

from sealegs.record.files import files_in


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
