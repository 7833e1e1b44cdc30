"""Rows in, a line on the terminal out."""

import io
import math
import re
from typing import Any

import pytest

from sealegs.report.event_text import remarkable
from sealegs.report.progress import LiveProgress, PlainProgress, progress
from sealegs.vocabulary import Event


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def row(step: int, **other: Any) -> dict[str, Any]:
    return {"step": step, "loss": 2.34567, "grad_norm": 0.5612, "lr": 3e-3, **other}


def event(kind: str, **detail: Any) -> Event:
    return Event(kind=kind, step=3, time=0.0, detail=detail)


def test_a_terminal_gets_the_bar_and_a_pipe_gets_lines() -> None:
    assert isinstance(progress(10, Terminal()), LiveProgress)
    assert isinstance(progress(10, io.StringIO()), PlainProgress)


def test_plain_lines_say_everything() -> None:
    out = io.StringIO()
    sink = PlainProgress(400, out, every_s=0.0)
    sink.start({})
    sink.row(row(0, tokens_per_s=10_240.0))
    sink.row(row(1))
    sink.row({"step": 400, "eval_loss": 2.0})
    sink.close()
    first, second = out.getvalue().splitlines()
    assert first == "step 0/400  ok  loss 2.3457  grad norm 0.561  lr 3.0e-03  10.2k tokens/s"
    assert re.fullmatch(
        r"step 1/400  ok  loss 2.3457  grad norm 0.561  lr 3.0e-03  10.2k tokens/s  \d:\d\d:\d\d left", second
    )


def test_plain_lines_are_few_and_the_last_step_has_one() -> None:
    out = io.StringIO()
    sink = PlainProgress(50, out, every_s=3600)
    for step in range(50):
        sink.row(row(step))
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["0/50", "49/50"]


@pytest.mark.parametrize(("name", "value"), [("loss", math.nan), ("grad_norm", math.inf)])
def test_what_is_not_a_number_is_seen(name: str, value: float) -> None:
    out = io.StringIO()
    PlainProgress(5, out).row(row(0) | {name: value})
    assert out.getvalue().startswith(f"step 0/5  {name} is {value}  loss ")


def test_a_narrow_terminal_still_shows_step_and_health(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    out = Terminal()
    sink = LiveProgress(100_000, out)
    sink.start({})
    sink.row(row(23_456, tokens_per_s=5.0) | {"loss": math.nan})
    sink.close()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert "step 23456/100000  loss is nan" in text


def test_the_bar_shows_the_last_row_and_sentences_above_it() -> None:
    out = Terminal()
    sink = LiveProgress(400, out)
    sink.start({})
    sink.row(row(41, tokens_per_s=5.0))
    sink.event(event("sink-failed", sink="mlflow", reason="[no] answer"))
    sink.event(event("checkpoint", checkpoint=40))
    sink.close()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert "mlflow is off from here on, the run goes on: [no] answer" in text
    assert "step 41/400  ok" in text
    assert "loss 2.3457" in text


@pytest.mark.parametrize("kind", [PlainProgress, LiveProgress])
def test_what_others_have_written_is_spelt_out(kind: type[PlainProgress | LiveProgress]) -> None:
    """Names of modules, sources and people, and what a library says that fails."""
    out = Terminal()
    sink = kind(400, out)
    sink.start({})
    text = "\x1b]0;owned\x07\x1b[2Jx\nstep 4/400  ok\r\u202e"
    sink.event(event("skip", text=text))
    sink.event(event("sink-failed", sink=text, reason=text))
    sink.event(event("resume", checkpoint=200, passed_over={text: text}, changed={text: [text, text]}))
    sink.event(event("stalled", seconds=9.0, where=text))
    sink.close()
    said = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\s", "", out.getvalue())
    assert said.count(r"\x1b]0;owned\x07\x1b[2Jx\nstep4/400ok\r\u202e") == 9
    assert "\x1b]" not in out.getvalue()
    assert "\x1b[2J" not in out.getvalue()
    assert "\u202e" not in out.getvalue()


def test_a_resume_says_where_it_goes_on_and_what_it_passed_over() -> None:
    sentence = remarkable(
        event("resume", checkpoint=200, passed_over={"400": "plain.json is missing"}, changed={"steps": [400, 800]})
    )
    assert (
        sentence
        == "passed over checkpoint 400: plain.json is missing; steps changed from 400 to 800; goes on at step 200"
    )
    assert remarkable(event("resume", checkpoint=None, passed_over={}, changed={})) == (
        "there is no checkpoint yet: starts anew"
    )


def test_steps_that_are_rejected_one_after_the_other_are_told_ever_less_often() -> None:
    out = io.StringIO()
    sink = PlainProgress(400, out)
    for step in (*range(100, 200), 300):
        sink.event(Event(kind="alarm", step=step, time=0.0, detail={"text": f"step {step}  ALARM", "acted": True}))
    sink.event(Event(kind="halt", step=301, time=0.0, detail={"text": "step 301  HALT", "acted": True}))
    told = [100, 101, 102, 103, 104, 107, 115, 131, 163, 300]
    assert out.getvalue().split("\n") == [*(f"step {step}  ALARM" for step in told), "step 301  HALT", ""]
    sink.row(row(302))
    assert "ok, 102 skipped" in out.getvalue()
