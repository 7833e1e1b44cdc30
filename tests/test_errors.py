"""The tree of errors: one sentence each, and the page about it where there is one."""

import pickle
import traceback
from pathlib import Path

import pytest

from sealegs import errors
from sealegs.cli.main import main
from sealegs.errors import RankMissing, SealegsError, SourceError

ROOT = Path(__file__).parents[1]
ALL = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, SealegsError)]


def test_the_pages_that_errors_name_are_there() -> None:
    pages = {each.page for each in ALL if each.page}
    assert len(pages) == 6
    assert [page for page in pages if not (ROOT / page).is_file()] == []


def test_a_traceback_shows_the_page_below_the_sentence() -> None:
    error = pickle.loads(pickle.dumps(RankMissing("rank 1 is missing at step 7")))  # noqa: S301 our own
    assert str(error) == "rank 1 is missing at step 7"
    shown = traceback.format_exception_only(error)
    assert shown == ["sealegs.errors.RankMissing: rank 1 is missing at step 7\n", "see docs/ranks.md\n"]
    assert traceback.format_exception_only(SourceError("a.csv: no such file")) == [
        "sealegs.errors.SourceError: a.csv: no such file\n"
    ]


@pytest.mark.parametrize(
    ("sentence", "says"),
    [
        ("rank 1 is missing", "sealegs health: rank 1 is missing (docs/ranks.md)\n"),
        ("docs/ranks.md says how", "sealegs health: docs/ranks.md says how\n"),
    ],
)
def test_the_command_line_names_it_once(
    sentence: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failed(_: object) -> int:
        raise RankMissing(sentence)

    monkeypatch.setattr("sealegs.cli.health.main", failed)
    assert main(["health"]) == 2
    assert capsys.readouterr().err == says
