"""Events of other versions and of damaged files have the types that their readers count on."""

import json
import math
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import sealegs
from sealegs.record.events import NEEDED, UNSAID, plain_events, read_event, read_events
from sealegs.record.run import open_run
from sealegs.report.commands.interventions import interventions
from sealegs.report.event_text import remarkable
from sealegs.vocabulary import Event

HEAD: dict[str, Any] = {"time": 1.0, "step": 5}
WRONG: list[Any] = [None, True, 5, 10**30, -1.5, "x", "NaN", [], [1], {}, {"a": 1}, [[1, 2]], {"a": [1, 2]}]


def event(kind: str, **detail: Any) -> Event:
    found = read_event(json.dumps({**HEAD, "kind": kind, **detail}).encode())
    assert found is not None
    return found


@pytest.mark.parametrize(
    "line",
    [
        b"", b"{", b"[]", b"5", b"\xff", b"[" * 100_000, b'{"kind": "start"}',
        b'{"kind": 5, "step": 1, "time": 1}', b'{"kind": "start", "step": "1", "time": 1}',
        b'{"kind": "start", "step": 1e30, "time": 1}', b'{"kind": "start", "step": 1, "time": "now"}',
        b'{"kind": "start", "step": 1, "time": 1e15}', b'{"kind": "start", "step": true, "time": 1}',
    ],
)  # fmt: skip
def test_a_line_without_kind_step_and_time_is_no_event(line: bytes) -> None:
    assert read_event(line) is None


def test_what_was_written_is_what_is_read() -> None:
    found = event("intervention", number=1, incident=None, text="halt", request=None, seconds=0.5, own={"a": [1]})
    assert found.detail == {
        "number": 1,
        "incident": None,
        "text": "halt",
        "request": None,
        "seconds": 0.5,
        "own": {"a": [1]},
    }
    assert (found.step, found.time) == (5, 1.0)
    assert event("probe", loss="NaN").detail["loss"] != 0
    assert event("alarm", text="NaN").detail["text"] == "NaN", "text that looks like a number stays text"
    assert event("preflight", findings=["a sentence"]).detail["findings"] == ["a sentence"]


@pytest.mark.parametrize("kind", NEEDED)
def test_a_field_that_the_kind_has_is_there_for_whoever_asks_and_nowhere_else(kind: str) -> None:
    found = event(kind)
    assert found.detail == {}
    assert dict(found.detail) == {}
    for name in NEEDED[kind]:
        assert found.detail.get(name) is None
        found.detail[name]
    with pytest.raises(KeyError):
        found.detail["never heard of"]


def spelt_out() -> list[str]:
    """Kinds that the code writes or tells of by their names."""
    texts = [file.read_text() for file in Path(sealegs.__file__).parent.rglob("*.py")]
    written = {kind for text in texts for kind in re.findall(r'\bnote\(\s*"([a-z-]+)"', text)}
    [told] = [text for text in texts if "def remarkable(" in text]
    cases = {kind for line in re.findall(r"case (.*):$", told, re.MULTILINE) for kind in re.findall(r'"(.*?)"', line)}
    assert {"resume", "checkpoint-failed"} <= written & cases
    return sorted(written | cases)


@pytest.mark.parametrize("kind", spelt_out())
def test_every_reader_of_an_event_can_read_one_whose_fields_are_missing_or_of_other_types(kind: str) -> None:
    remarkable(event(kind))
    names = {*NEEDED.get(kind, {}), "incident", "to_step", "findings", "actions", "cost", "seconds", "goes_on", "tried"}
    for name, wrong in product(sorted(names), WRONG):
        found = event(kind, **{name: wrong})
        remarkable(found)
        shown = interventions([found, event("outcome", **{name: wrong})])
        json.dumps([each.plain() for each in shown])
        "".join(map(str, shown))


def test_events_as_lines_have_the_same_fields() -> None:
    [line] = plain_events([event("outcome")])
    assert (line["kind"], line["step"], line["text"]) == ("outcome", 5, UNSAID)


def test_a_damaged_line_costs_itself_alone(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"schema": 1, "run_id": "a"}')
    lines = [json.dumps({**HEAD, "kind": "start"}), "[" * 1000, json.dumps({**HEAD, "kind": "stalled"}), '{"kind"']
    (tmp_path / "events.jsonl").write_text("\n".join(lines))
    run = open_run(tmp_path)
    assert [each.kind for each in run.events] == ["start", "stalled"]
    assert math.isnan(run.events[1].detail["seconds"])
    assert read_events([]) == ()
