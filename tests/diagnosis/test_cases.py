"""The incidents of ``tests/cases``, each as it is told there: looked at, walked through, weighed, and compared."""

import re
from pathlib import Path

import pytest
from tests.diagnosis.streams import CASES, Case, read_case, run_from

from sealegs.diagnosis.cause_cards import causes
from sealegs.diagnosis.contract import Diagnosis
from sealegs.diagnosis.findings import look
from sealegs.diagnosis.rank import diagnose
from sealegs.diagnosis.symptoms import symptoms
from sealegs.report.commands.check import whole


def diagnosis_of(case: Case, folder: Path) -> Diagnosis:
    rules = case.expect.get("rules", "calibrated")
    return diagnose(look(run_from(case, folder), rules=rules), source=case.name, format="case", rules=rules)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case(path: Path, tmp_path: Path) -> None:
    case = read_case(path)
    expect = case.expect
    found = diagnosis_of(case, tmp_path)
    likely = [hypothesis for hypothesis in found.hypotheses if hypothesis.grade != "ruled out"]
    told = "\n".join([found.findings.because, *map(str, found.findings.incidents), *map(str, found.hypotheses)])

    assert found.findings.verdict == expect["verdict"], told
    if "kind" in expect:
        assert expect["kind"] in {incident.kind for incident in found.findings.incidents}, told
    if "trajectory" in expect:
        assert expect["trajectory"] in {incident.trajectory for incident in found.findings.incidents}, told
    assert (likely[0].cause if likely else "none") == expect["cause"], told
    if "grade" in expect:
        assert likely[0].grade == expect["grade"], told
    ruled_out = {hypothesis.cause for hypothesis in found.hypotheses if hypothesis.grade == "ruled out"}
    assert set(expect.get("ruled_out", [])) <= ruled_out, told
    assert set(expect.get("also", [])) <= {hypothesis.cause for hypothesis in likely}, told
    answers = {answer.question: answer.answer for answer in found.path}
    assert {number: answers.get(number) for number in expect.get("answers", {})} == expect.get("answers", {}), (
        found.path
    )
    for words in expect.get("action", []):
        assert words in found.first_action
    for words in expect.get("lacks", []):
        assert words in found.findings.because
    for words in expect.get("says", []):
        assert words in " ".join(likely[0].evidence_for), told
    text = re.sub(r"\s+", " ", whole(found)).lower()
    for symptom in (each for each in symptoms().values() if each.case == case.name):
        quoted = [words for words in re.findall(r"`([^`]+)`", symptom.tells) if not words.startswith("sealegs")]
        assert not quoted or any(words.lower() in text for words in quoted), f"{symptom.name}: {quoted}"


def test_every_card_has_a_case_and_every_case_a_source() -> None:
    cases = [read_case(path) for path in CASES]
    assert all(re.search(r"^Source: ", case.prose, re.MULTILINE) for case in cases), "each says where it comes from"
    assert {case.expect["cause"] for case in cases} == {*causes(), "none"}
