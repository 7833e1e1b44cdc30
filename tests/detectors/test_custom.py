"""A user's own rule."""

from typing import Any

import pytest

from sealegs.detectors.custom import CustomDetector, as_detector
from sealegs.detectors.spike import Spike
from sealegs.errors import ConfigError
from sealegs.vocabulary import Finding, Row, Severity


def hot(row: Row) -> str | None:
    return "too hot" if float(row.get("celsius", 0)) > 90 else None


def broken(row: Row) -> str | None:
    return str(row["no such signal"])


def silent(row: Row) -> str | None:
    raise ValueError


def careless(row: Row) -> Any:
    return 1.0


def greedy(row: Any) -> None:
    row["loss"] = 0.0


def look(function: Any, row: Row) -> Finding | None:
    detector = as_detector(function)
    return detector.look(detector.init(), row)


def test_what_it_says_is_an_alarm_that_spoils_no_update() -> None:
    finding = look(hot, {"step": 7, "celsius": 95})
    assert finding is not None
    assert (finding.step, finding.note, finding.detector) == (7, "too hot", "hot")
    assert (finding.severity, finding.spoils_update) == (Severity.ALARM, False)
    assert look(hot, {"step": 7, "celsius": 85}) is None
    assert str(finding).startswith("too hot")


def test_a_finding_is_passed_on_as_it_is() -> None:
    own = Finding(detector="mine", step=3, severity=Severity.HALT, signal="x", value=2.0, limit=1.0)
    assert look(lambda row: own, {"step": 3}) is own


@pytest.mark.parametrize(
    ("function", "note"),
    [
        (broken, "broken failed: KeyError: 'no such signal'"),
        (silent, "silent failed: ValueError"),
        (careless, "careless gave a float, not a text, a Finding or None"),
        (greedy, "greedy failed: TypeError: 'mappingproxy' object does not support item assignment"),
    ],
)
def test_one_that_breaks_is_a_remark(function: Any, note: str) -> None:
    row = {"step": 4, "loss": 2.0}
    finding = look(function, row)
    assert finding is not None
    assert (finding.severity, finding.note, finding.spoils_update) == (Severity.WATCH, note, False)
    assert row == {"step": 4, "loss": 2.0}


def test_a_stop_that_somebody_asked_for_is_not_swallowed() -> None:
    def interrupted(row: Row) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        look(interrupted, {"step": 0})


def test_it_can_have_a_name_of_its_own() -> None:
    assert CustomDetector(function=hot, name="heat").name == "heat"
    assert CustomDetector(function=hot).name == "hot"
    assert CustomDetector(function=hot) == CustomDetector(function=hot)


def test_a_detector_stays_what_it_is() -> None:
    spike = Spike()
    assert as_detector(spike) is spike


@pytest.mark.parametrize(
    ("value", "words"),
    [(3, "3 is no detector"), ("loss", "'loss' is no detector"), (Spike, r"Spike is a class.*Spike\(")],
)
def test_anything_else_is_refused(value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        as_detector(value)
    with pytest.raises(ConfigError, match=r"CustomDetector\.function=3"):
        CustomDetector(function=3)  # type: ignore[arg-type]
