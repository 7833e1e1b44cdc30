"""Text of any origin in, text that can be seen out; and everywhere that such text is printed by itself."""

import unicodedata
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sealegs
from sealegs import errors
from sealegs.printable import printable, visible, visible_lines
from sealegs.vocabulary import Finding, Severity, Verdict

HOSTILE = "a\x1b[2J\n\r\t\x00\x7f\x85\x9b1m\u202e\u2066\u200b\ufeff\u2028\ud83d"
SEEN = r"a\x1b[2J\n\r\t\x00\x7f\x85\x9b1m\u202e\u2066\u200b\ufeff\u2028\ud83d"


@given(st.text())
def test_what_is_left_can_be_seen(text: str) -> None:
    shown = visible(text)
    assert {unicodedata.category(each) for each in shown} <= {
        *("Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po"),
        *("Sm", "Sc", "Sk", "So", "Zs"),
    }
    assert visible(shown) == shown
    assert "".join(visible_lines(text).split("\n")) == "".join(map(visible, text.split("\n")))


def test_what_people_write_stays() -> None:
    assert visible("naïve Σ 漢字 ✓ 1\u00a0000 עברית") == "naïve Σ 漢字 ✓ 1\u00a0000 עברית"
    assert visible(HOSTILE) == SEEN


class Pair(NamedTuple):
    name: str
    value: Any


@dataclass(frozen=True)
class Plain:
    text: str
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Slotted:
    text: str
    within: Plain


class Struct(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    items: list[Slotted]
    number: int = 3


def test_every_text_of_a_value_is_found_wherever_it_is() -> None:
    inner = Slotted(HOSTILE, Plain(HOSTILE, {HOSTILE: (HOSTILE, Pair(HOSTILE, [HOSTILE, None, 2.5]))}))
    value = {"struct": Struct(text=HOSTILE, items=[inner]), "of numpy": np.array([HOSTILE])[0]}
    shown = printable(value)
    assert shown == {
        "struct": Struct(text=SEEN, items=[Slotted(SEEN, Plain(SEEN, {SEEN: (SEEN, Pair(SEEN, [SEEN, None, 2.5]))}))]),
        "of numpy": SEEN,
    }
    assert inner.text == HOSTILE, "the value itself stays"


def test_a_value_that_can_be_seen_is_not_copied() -> None:
    value = {"a": [Struct(text="b", items=[])], "c": Plain("d", {"e": np.arange(3)})}
    assert printable(value) is value


# Whoever prints these: a user's own loop, an interpreter that ends with a traceback.


@pytest.mark.parametrize("kind", [errors.ConfigError, errors.SourceError, errors.StorageError, errors.SinkFailed])
def test_an_error_is_one_line_that_can_be_seen(kind: type[errors.SealegsError]) -> None:
    assert str(kind(f"{HOSTILE}: not a manifest")) == f"{SEEN}: not a manifest"


def test_a_warning_about_the_end_of_a_run_is_one_line() -> None:
    with pytest.warns(sealegs.RunEndedBadly) as told:
        warnings.warn(f"the run ended badly: {HOSTILE}", sealegs.RunEndedBadly, stacklevel=1)
    assert str(told[0].message) == f"the run ended badly: {SEEN}"


def test_a_verdict_is_one_line() -> None:
    finding = Finding(
        detector="spike", step=7, severity=Severity.GATE, signal=HOSTILE, value=9.0, limit=3.0, note=HOSTILE
    )
    verdict = Verdict(step=7, findings=(finding,), skips_in_a_row=1, skip_limit=3, culprit=HOSTILE)
    assert str(verdict) == f"step 7  SKIP  {SEEN}: 9, expected below 3  in {SEEN}  rejected 1 of 3"
