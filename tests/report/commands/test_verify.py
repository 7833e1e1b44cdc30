"""What came of a remedy, as a page and as an object."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sealegs.report.commands import verify
from sealegs.report.commands.contracts import contract
from sealegs.report.commands.verify import FixShown, Verified, promises_shown
from sealegs.report.postmortem.values import Measured, Promise

RESULTS = (
    Measured(promise=Promise(signal="loss", first=312, last=312, below=2.5, was=math.nan), value=2.4, step=312),
    Measured(promise=Promise(signal="grad_norm", first=300, last=400, below=3.0, was=47.2), value=math.inf, step=320),
)


def made(**changes: Any) -> Verified:
    known: dict[str, Any] = {
        "source": "night", "incident": 2, "kind": "spike", "onset": 312, "cause": "long-tail-token",
        "begun": "snapshot", "first": 300, "last": 400, "folder": None, "borrowed": 0, "kept": False,
        "fixes": [FixShown(name="clip", value="0.5", does="clip gradients at 0.5")],
        "promises": promises_shown(RESULTS),
    }  # fmt: skip
    return Verified(**known | changes)


PAGE = """\
night, incident 2: spike at step 312

BROKEN: Run again from step 300, a state in the capsule, to step 400 with the change (clip gradients
  at 0.5): 1 of 2 promises are kept.

  loss at step 312 below 2.5 (it was not finite): 2.4, kept
  gradient norm before clipping at steps 300 to 400 below 3 (it was 47.2): not finite at step 320,
    broken"""


def test_the_page() -> None:
    assert verify.page(made()) == PAGE


def test_the_object_is_read_as_it_was_written() -> None:
    written = contract(made())
    assert (written["promises"][0]["was"], written["promises"][1]["measured"]) == ("NaN", "Infinity")
    again = verify.read(msgspec.json.encode(written))
    assert verify.page(again) == PAGE
    assert [(each.is_kept, each.step) for each in again.results] == [(True, 312), (False, 320)]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"begun": "seed", "folder": "night/incidents/2/rerun-1"}, "Run again from the seed to step 400"),
        ({"borrowed": 7}, "The last 7 steps had batches from before: the capsule has no more."),
        ({"fixes": [FixShown(name="lr", value="logged", does="")]}, "What went wrong is no part of a rerun"),
        ({"fixes": []}, "with the change (change nothing: go on)"),
    ],
)
def test_what_a_reader_must_know(changes: dict[str, Any], told: str) -> None:
    assert told in made(**changes).how
    assert told not in made().how


def test_the_object_has_the_schema_that_is_promised() -> None:
    promised = json.loads((Path(__file__).parents[3] / "docs" / "verify.schema.json").read_text())
    assert promised == msgspec.json.schema(Verified)
