"""No sentence of a page is put together out of nothing: no empty brackets, no two blanks, no None, no nan."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.diagnosis.streams import CASES, Case, read_case, run_from

from sealegs.diagnosis.findings import look
from sealegs.diagnosis.rank import diagnose
from sealegs.report.commands.check import contract, page, whole
from sealegs.report.commands.explain import explained

OUT_OF_NOTHING = re.compile(
    r"(?<!\w)\(\)|\(\s|\s\)|(?<!are )\bNone\b|\bnan\b|nan%|inf%|  |: ;|; ;|, ,|\b1 (?:incidents|rows|columns)\b"
)
ON_A_PAGE = re.compile(r"(?<!\w)\(\)|(?<!are )\bNone\b|nan%|inf%")
"""The same where lines stand in columns."""
NAMES = ("cause", "kind", "source", "signal", "signals", "missing", "judged", "not_judged", "log_next_time", "format")
"""Keys whose texts are names."""


def sentences(told: Any, key: str = "") -> Iterator[str]:
    if isinstance(told, str) and key not in NAMES:
        yield told
    elif isinstance(told, dict):
        for name, value in told.items():
            yield from sentences(value, name)
    elif isinstance(told, list):
        for value in told:
            yield from sentences(value, key)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_no_sentence_is_put_together_out_of_nothing(path: Path, tmp_path: Path) -> None:
    case = read_case(path)
    found = diagnose(look(run_from(case, tmp_path)), source="log", format="case")
    assert not {text: out for text in sentences(contract(found)) if (out := OUT_OF_NOTHING.findall(text))}
    lines = "\n".join([page(found), whole(found), explained(found)]).split("\n")
    assert not {line: out for line in lines if (out := ON_A_PAGE.findall(line))}


def test_an_intervention_without_actions_leaves_no_empty_brackets(tmp_path: Path) -> None:
    """As a start from scratch, of which the event has no action."""
    over = {"step": 300, "kind": "intervention", "acted": True, "actions": [], "number": 1, "decided_by": "playbook"}
    over |= {"text": "begin anew", "trigger": "damaged", "onset": 250, "evidence": "the loss is high", "to_step": 0}
    signals = {"loss": {"line": [[0, 6.0], [600, 2.5]], "noise": 0.01}}
    run = run_from(Case("anew", "", {"steps": 600, "signals": signals, "events": [over]}, {}), tmp_path)
    found = diagnose(look(run), source="log", format="case")
    assert "Interventions: 1" in whole(found)
    assert "()" not in whole(found) + page(found) + explained(found)
