"""The door through which commands print."""

import io
import json
import math

import pytest

from sealegs.cli import output

HOSTILE = "a\x1b[2J\nb\u202e"


def test_a_line_stays_one(capsys: pytest.CaptureFixture[str]) -> None:
    output.say(HOSTILE)
    output.tell(HOSTILE)
    assert capsys.readouterr() == ("a\\x1b[2J\\nb\\u202e\n",) * 2


def test_the_lines_of_a_page_are_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    output.show(lambda names, end: "\n".join([*names, f"{end}\x07"]), [HOSTILE, "c"], end=HOSTILE)
    assert capsys.readouterr().out == "a\\x1b[2J\\nb\\u202e\nc\na\\x1b[2J\\nb\\u202e\\x07\n"


def test_json_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    output.show_json({HOSTILE: [HOSTILE, "\x7f\ud83d", math.nan]})
    out = capsys.readouterr().out
    assert json.loads(out) == {HOSTILE: [HOSTILE, "\x7f\ufffd", "NaN"]}, "half a letter is no text"
    assert out.isascii()
    assert out.replace("\n", "").isprintable()


def test_a_terminal_that_lacks_a_letter_gets_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    output.say("naïve")
    assert raw.getvalue() == b"na\\xefve\n"
