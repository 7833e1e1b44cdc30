"""A function in, its result out of a process beside this one; None where there can be none."""

import os
import sys
import time
from pathlib import Path

import pytest

from sealegs.record.reading import parse_size
from sealegs.record.second_process import called_beside


def test_the_result_comes_from_another_process() -> None:
    with called_beside(os.getpid) as result:
        assert result() not in (None, os.getpid())


def test_a_call_that_fails_has_no_result() -> None:
    with called_beside(parse_size, "no size", "a test") as result:
        assert result() is None


@pytest.mark.parametrize("executable", ["/nonexistent", "/bin/true", "/bin/false"])
def test_without_an_interpreter_there_is_no_result(executable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    with called_beside(os.getpid) as result:
        assert result() is None


def test_a_call_ends_with_the_block_that_it_was_for() -> None:
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), called_beside(time.sleep, 600):
        raise KeyboardInterrupt
    assert time.monotonic() - began < 60


def test_nothing_of_the_folder_that_the_user_is_in_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pickle.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    with called_beside(os.getpid) as result:
        assert result() is not None
