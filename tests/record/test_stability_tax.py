"""What it cost to keep a run standing, in its record and in words."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealegs.record.stability_tax import PARTS, StabilityTax, spell_seconds, tax_of
from sealegs.vocabulary import Event

PAID = StabilityTax(
    whole_s=2460.0, steps=900, parts={"checkpoints": 108.0, "signals": 42.0, "probes": 0.0}, price_per_hour=12.0
)


def event(kind: str, **detail: Any) -> Event:
    return Event(kind=kind, step=1, time=1.0, detail=detail)


@given(
    st.floats(0, 1e9),
    st.integers(0, 10**9),
    st.dictionaries(st.sampled_from(sorted(PARTS)), st.floats(0, 1e9)),
    st.none() | st.floats(0, 1e4),
)
def test_it_comes_back_from_json(whole: float, steps: int, parts: dict[str, float], price: float | None) -> None:
    tax = StabilityTax(whole_s=whole, steps=steps, parts=parts, price_per_hour=price)
    again = StabilityTax.from_plain(json.loads(json.dumps(tax.to_plain())))
    assert again == tax
    assert str(again).startswith("stability cost ")


def test_the_sentence_has_the_total_each_part_and_the_money() -> None:
    assert str(PAID) == (
        "stability cost 6.1% (2.5 min of 41 min, 0.50 of money): checkpoints 1.8 min (4.39%), signals 42 s (1.71%)"
    )
    assert PAID.to_plain()["total_s"] == 150.0
    assert "money" not in StabilityTax(whole_s=1.0, steps=1, parts={}).to_plain()


@pytest.mark.parametrize(
    "wrong", [None, 5, "x", [], {}, {"whole_s": 1.0}, {"whole_s": math.nan, "steps": 1, "parts": {}}]
)
def test_what_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"no object|has no|whole_s is nan"):
        StabilityTax.from_plain(wrong)


def test_parts_of_other_names_and_types_are_left_out() -> None:
    plain = PAID.to_plain()
    plain["parts"] |= {"bribes": 5.0, "probes": "x", "recovery": -1.0, "skipped": math.inf}
    assert StabilityTax.from_plain(plain).parts == {"checkpoints": 108.0, "signals": 42.0}


def test_the_newest_that_can_be_read_counts() -> None:
    older, newer = PAID.to_plain(), {**PAID.to_plain(), "steps": 1000}
    events = [event("end", tax=older), event("end", tax=newer), event("skip"), event("stability-tax", tax={"a": 1})]
    found = tax_of(events)
    assert found is not None
    assert found.steps == 1000
    assert tax_of([event("skip")]) is None


def test_durations_are_spelt_in_the_unit_that_they_are_read_in() -> None:
    assert [*map(spell_seconds, (0.0, 0.5, 9.96, 59, 100_000))] == ["0.0 ms", "500 ms", "10.0 s", "59 s", "1.2 d"]
