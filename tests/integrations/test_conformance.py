"""Every integration keeps every promise, by a test that ran, or a reason is given; the page shows that and no more."""

import re
from pathlib import Path
from pkgutil import iter_modules

import pytest
from tests import conformance

import sealegs.integrations

ROOT = Path(__file__).parents[2]


def test_every_integration_that_can_be_attached_is_in_the_suite() -> None:
    sources = {module.name: Path(sealegs.integrations.__path__[0]) / f"{module.name}.py"
               for module in iter_modules(sealegs.integrations.__path__) if not module.ispkg}  # fmt: skip
    attaches = {name for name, path in sources.items() if re.search(r"^def attach\(", path.read_text(), re.MULTILINE)}
    covered = {one.module for one in conformance.INTEGRATIONS if one.module}
    assert attaches == covered
    assert len(covered) == 6


@pytest.mark.parametrize("one", conformance.INTEGRATIONS, ids=lambda one: one.name)
def test_each_promise_was_shown_or_a_reason_is_given(one: conformance.Integration) -> None:
    reports = conformance.stored()
    assert set(one.cannot) <= conformance.FEATURES.keys()
    for feature in conformance.FEATURES:
        here = conformance.found(reports, one.name, feature)
        assert not here.failed, f"{one.name}: {feature}"
        assert (here.passed > 0) != (feature in one.cannot), f"{one.name}: {feature}: {here}"


def test_the_tests_of_the_reports_are_still_there() -> None:
    named = {result["test"].partition("[")[0] for report in conformance.stored() for result in report["results"]}
    assert len(named) > 25
    for test in named:
        file, _, function = test.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text(), test


def test_the_page_has_the_matrix_of_the_reports() -> None:
    text = conformance.PAGE.read_text()
    assert text == conformance.page_with(text, conformance.matrix(conformance.stored())), "python -m tests.conformance"


def test_a_version_that_is_accepted_is_that_of_the_extra() -> None:
    extras = (ROOT / "pyproject.toml").read_text()
    for one in conformance.INTEGRATIONS:
        if one.module or one.package == "torch":
            assert re.search(rf'"{re.escape(one.package + one.versions)}["; ]', extras), one.name
