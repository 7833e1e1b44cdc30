"""JSON becomes a dataclass of the right types, or an error that names the field."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import pytest

from sealegs.incidents import Incident
from sealegs.record.typed import fits, typed


@dataclass(frozen=True)
class Kept:
    number: int
    share: float
    name: str = "none"
    kind: Literal["a", "b"] = "a"
    table: Mapping[str, Any] = field(default_factory=dict)
    list: Sequence[int] = ()
    maybe: float | None = None


def test_what_fits_is_taken_and_what_is_unknown_left_alone() -> None:
    found = typed(Kept, {"number": 3, "share": "NaN", "name": "NaN", "maybe": "Infinity", "other": 5, "list": [1]})
    assert (found.number, found.name, found.maybe, found.list) == (3, "NaN", math.inf, [1])
    assert math.isnan(found.share)
    assert isinstance(typed(Kept, {"number": 3, "share": 1}).share, float)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ([], r"\[\] is no object"),
        ({"number": 1}, "it has no share"),
        ({"number": True, "share": 1.0}, "number is True"),
        ({"number": 1.0, "share": 1.0}, "number is 1.0"),
        ({"number": 10**30, "share": 1.0}, "number is 1000"),
        ({"number": 10**5000, "share": 1.0}, "number is an integer of thousands of digits"),
        ({"number": 1, "share": "x"}, "share is 'x'"),
        ({"number": 1, "share": 1.0, "kind": "c"}, "kind is 'c'"),
        ({"number": 1, "share": 1.0, "table": []}, r"table is \[\]"),
        ({"number": 1, "share": 1.0, "list": {}}, r"list is \{\}"),
        ({"number": 1, "share": 1.0, "name": None}, "name is None"),
    ],
)
def test_the_error_names_the_field(values: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        typed(Kept, values)


def test_a_wrong_field_can_count_as_missing() -> None:
    found = typed(Kept, {"number": 1, "share": 1.0, "name": 5, "table": None}, wrong_is_missing=True)
    assert (found.name, found.table) == ("none", {})
    with pytest.raises(ValueError, match="number is"):
        typed(Kept, {"number": "x", "share": 1.0}, wrong_is_missing=True)


def test_an_incident_comes_back() -> None:
    incident = Incident(
        number=1,
        start=5,
        kind="spike",
        pre_loss=1.0,
        usual=1.0,
        limit=math.inf,
        peak=6,
        peak_loss=9.0,
        grad_norm_peak=3.0,
        recovery_loss=1.0,
        end=8,
        trajectory="fast",
    )
    assert typed(Incident, asdict(incident) | {"limit": "Infinity"}) == incident
    assert fits(None, Any)
