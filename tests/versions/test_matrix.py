"""The table of versions is that of the reports, and the reports are of the ranges that are accepted today."""

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from tests import matrix


def test_the_page_has_the_table_of_the_reports() -> None:
    text = matrix.PAGE.read_text()
    assert text == matrix.page_with(text, matrix.table(matrix.stored())), "python -m tests.matrix --table"


@pytest.mark.parametrize("framework", matrix.FRAMEWORKS, ids=lambda one: one.package)
def test_both_ends_of_a_range_were_run_and_nothing_failed(framework: matrix.Framework) -> None:
    within = matrix.accepted(framework.package, framework.extra)
    found = [one for one in matrix.stored() if one["package"] == framework.package and one["version"] in within]
    assert {end for one in found for end in one["which"].split(" and ")} == {"oldest", "newest"}
    for one in found:
        assert "trouble" not in one, one["trouble"]
        assert (one["accepted"], one["counts"]["failed"]) == (matrix.spelt(within), 0), "make matrix"
        assert one["counts"]["passed"] > 1
    oldest = min(Version(one["version"]) for one in found)
    floor = next(each.version for each in within if each.operator == ">=")
    if framework.package != "torch":  # of which there is one build to be had
        assert oldest.release[: len(Version(floor).release)] == Version(floor).release


def test_what_a_report_says_stands_in_the_table() -> None:
    told = {"accepted": ">=2.5", "date": "2030-01-02T03:04:05+00:00", "python": "3.11.7", "torch": "2.13.0", "with": []}
    counts = {"passed": 7, "failed": 2, "skipped": 1}
    ran = {"version": "2.5.1", "which": "oldest", "counts": counts, "failed": ["a", "b"], "skipped": {"c": "no GPU"}}
    not_made = {"version": "2.7.0", "which": "newest", "trouble": "no wheel"}
    other = {"version": "2.6.0", "which": "newest", "counts": counts, "failed": [], "skipped": {}}
    results = [{"package": "lightning", **told, **one} for one in (ran, other, not_made)]
    made = matrix.table(results).splitlines()
    assert "| lightning | >=2.5 | 2.5.1: 7 passed, **2 failed**, 1 skipped [1] | 2.7.0: **not run** [2] |" in made
    assert "| trl | >=1.16 | not run | not run |" in made
    assert made[-1].endswith("[1] no GPU. [2] no wheel.")


def test_the_ends_of_a_range_are_what_the_registry_has_of_it() -> None:
    offered = ["2.0.0rc1", "1.9.0", "1.2.0", "0.9", "1.1.0"]
    assert matrix.ends(offered, SpecifierSet(">=1.1,<3")) == ("1.1.0", "1.9.0")
    with pytest.raises(AssertionError, match="no version is within >=3"):
        matrix.ends(offered, SpecifierSet(">=3"))
