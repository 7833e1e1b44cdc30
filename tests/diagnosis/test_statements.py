"""What pre-flight rules say counts in the ranking by its grade, for the causes whose cards name them."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from tests.diagnosis.streams import CASES, read_case, run_from

from sealegs.diagnosis.cause_cards import causes
from sealegs.diagnosis.contract import Advised
from sealegs.diagnosis.facts import Facts
from sealegs.diagnosis.findings import look
from sealegs.diagnosis.rank import rank
from sealegs.preflight_check.rules import RULES

PATHS = {path.stem: path for path in CASES}


@pytest.mark.parametrize(("grade", "more"), [("error", 2), ("warning", 1), ("note", 0)])
def test_a_rule_counts_by_its_grade(grade: Literal["error", "warning", "note"], more: int, tmp_path: Path) -> None:
    findings = look(run_from(read_case(PATHS["spikes-after-warmup"]), tmp_path))

    def weighed(*advised: Advised) -> tuple[int, tuple[str, ...]]:
        found = rank(Facts(replace(findings, advised=advised)))
        return next((one.points, one.hypothesis.evidence_for) for one in found if one.card.name == "lr-too-high")

    before, after = weighed(), weighed(Advised(code="SCH1", grade=grade, text="no warm-up"))
    assert after[0] == before[0] + more
    assert ("settings: no warm-up" in after[1]) == (more > 0)
    other = weighed(Advised(code="OPS2", grade="error", text="only the newest is kept"))
    assert other == before, "a rule of no card says nothing of a cause"


def test_cards_name_rules_that_exist() -> None:
    codes = {rule.code for rule in RULES}
    for card in causes().values():
        assert set(card.rules) <= codes, card.name
