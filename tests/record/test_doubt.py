"""Events in, the stretches out in which a saved state may be damaged."""

from pathlib import Path
from typing import Any

import pytest

from sealegs.errors import SourceError
from sealegs.record.doubt import BadStretch, Doubts, bad_stretches, stretches_of


def alarm(step: int, incident: int = 1, kind: str = "alarm", **more: Any) -> dict[str, Any]:
    return {"kind": kind, "step": step, "incident": incident, **more}


def skip(step: int) -> dict[str, Any]:
    return {"kind": "skip", "step": step, "findings": [{"lasts": 1}]}


def closed(step: int, start: int, loss: float | None) -> dict[str, Any]:
    return {"kind": "incident-closed", "step": step, "start": start, "recovery_loss": loss}


def test_an_incident_begins_with_the_skips_that_led_to_its_alarm() -> None:
    assert bad_stretches([skip(7), skip(50), skip(51), alarm(52)]) == [BadStretch(1, 50)]
    assert bad_stretches([alarm(52, findings=[{"lasts": 20}]), skip(53)]) == [BadStretch(1, 33)]
    assert bad_stretches([alarm(52, kind="halt")]) == [BadStretch(1, 52)]
    assert bad_stretches([alarm(52), {"kind": "intervention", "step": 60, "onset": 48}]) == [BadStretch(1, 48)]
    assert bad_stretches([skip(50), skip(51)]) == []


def test_it_ends_when_the_loss_is_back_and_not_before() -> None:
    healed, lingers = [alarm(52), closed(90, 50, 2.0)], [alarm(52), closed(90, 50, None)]
    assert bad_stretches(healed) == [BadStretch(1, 50, 90)]
    assert bad_stretches(lingers) == [BadStretch(1, 50)]
    assert bad_stretches([*healed, alarm(95)]) == [BadStretch(1, 50)], "which belongs to it"
    assert bad_stretches([*healed, alarm(95, 2)]) == [BadStretch(1, 50, 90), BadStretch(2, 95)]
    both = [alarm(52), alarm(80, 2), closed(90, 50, 2.0)]
    assert bad_stretches(both) == [BadStretch(1, 52, 90), BadStretch(2, 50, 90)], "the loss is back after both"
    ((stretch,)) = bad_stretches(healed)
    assert [step for step in (49, 50, 89, 90) if stretch.casts_doubt_on(step)] == [50, 89]


def test_ranks_that_differ_are_in_doubt_since_they_were_the_same_until_they_are_again() -> None:
    differ = [{"detector": "replicas", "lasts": 100}]
    first, second = alarm(300, findings=differ), alarm(400, findings=differ)
    assert stretches_of([first]) == stretches_of([first, second]) == [BadStretch(number=1, onset=201, end=None)]
    same_again = closed(500, 201, 2.5) | {"number": 1}
    assert stretches_of([first, second, same_again]) == [BadStretch(number=1, onset=201, end=500)]


def test_what_a_resumed_run_has_still_before_it_says_nothing() -> None:
    guard = {"kind": "guard", "step": 50}
    assert bad_stretches([alarm(30), alarm(52, 2), guard]) == [BadStretch(1, 30)]
    assert bad_stretches([skip(50), guard, alarm(51)]) == [BadStretch(1, 51)], "another process had skipped"


def test_events_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    lines = [
        b'{"time": 1, "kind": "alarm", "step": 12, "incident": 1, "findings": [3, {"lasts": "x"}]}',
        b'{"time": 1, "kind": "alarm", "step": "30", "incident": 2}',
        b'{"time": 1, "kind": "alarm", "step": 31, "incident": true}',
        b"[" * 100_000,
        b'{"time": 1, "kind": ["alarm"], "step": 1}',
        b"\xff\xfe",
        b"7",
        b'{"time": 1, "kind": "intervention", "step": 20, "onset": null}',
        b'{"time": 1, "kind": "incident-closed", "step": 40, "start": {}, "recovery_loss": null}',
        b'{"time": 1, "kind": "alarm", "step": 1',
    ]
    (tmp_path / "events.jsonl").write_bytes(b"\n".join(lines))
    doubts = Doubts(tmp_path)
    assert doubts.about(11) == ""
    assert doubts.about(12) == "not proven, and saved after the onset of an incident at step 12"
    assert Doubts(tmp_path / "nowhere").about(12) == ""


def test_a_record_that_cannot_be_read_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    with pytest.raises(SourceError, match=r"events\.jsonl: a folder, not a file"):
        Doubts(tmp_path).about(12)
