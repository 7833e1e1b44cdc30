"""What was tried, in words or as TOML: understood or refused, and what it does to the ranking."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.diagnosis.streams import CASES, read_case, run_from

from sealegs.diagnosis.cause_cards import causes
from sealegs.diagnosis.contract import Diagnosis, Tried
from sealegs.diagnosis.facts import Facts
from sealegs.diagnosis.findings import look
from sealegs.diagnosis.rank import diagnose, rank
from sealegs.diagnosis.tried import known_attempts, tried_in_toml, tried_in_words
from sealegs.errors import ConfigError

PATHS = {path.stem: path for path in CASES}


@pytest.mark.parametrize(
    ("words", "kinds", "outcome"),
    [
        ("skip batches 400-450: no help", ("skip batches",), "no help"),
        ("Halved the learning rate: Helped.", ("lower the LR",), "helped"),
        ("moved to another node: it came again", ("another machine",), None),
        ("bf16: the same", ("bf16",), "no help"),
        ("reloaded an earlier checkpoint at 12:30: worse", ("an earlier checkpoint",), "worse"),
        ("clip at 0.5 and lower LR: unclear", ("lower the LR", "clip harder"), "unclear"),
    ],
)
def test_words_are_understood(words: str, kinds: tuple[str, ...], outcome: str | None) -> None:
    if outcome is None:
        with pytest.raises(ConfigError, match=r"outcome 'it came again' is not understood; say helped"):
            tried_in_words(words)
        return
    one = tried_in_words(words)
    assert (one.kinds, one.outcome) == (kinds, outcome)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("skip batches", "an action, a colon and what came of it"),
        (": no help", "an action, a colon"),
        ("prayed: no help", "what was done is not understood; known are: skip batches"),
        ("clip: 0.5", "the outcome '0.5' is not understood"),
    ],
)
def test_what_is_not_understood_is_refused_in_one_sentence(words: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        tried_in_words(words)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_of_attempts() -> None:
    one, two = tried_in_toml(
        '[[tried]]\naction = "skip batches 400 to 450"\noutcome = "no help"\n'
        '[[tried]]\naction = "beta2 0.95"\noutcome = "helped"\n',
        "a.toml",
    )
    assert (one.between, one.outcome, two.kinds) == ((400, 450), "no help", ("lower beta2",))
    for text in ("tried = 3", "[[tried]]\naction = 'clip'\n", "[[attempt]]\naction = 'clip'\noutcome = 'helped'", "["):
        with pytest.raises(ConfigError, match=r"a\.toml: .*write tables \[\[tried\]\]"):
            tried_in_toml(text, "a.toml")


def test_the_table_names_causes_that_exist_and_each_entry_understands_itself() -> None:
    for known in known_attempts():
        assert set(known.cures) <= set(causes()), known.name
        assert all(known.is_in(phrase.split()) for phrase in known.says), known.name


def diagnosed(case: str, folder: Path, *tried: Tried) -> Diagnosis:
    findings = look(run_from(read_case(PATHS[case]), folder))
    return diagnose(replace(findings, tried=tried), source=case, format="case")


def points(case: str, cause: str, folder: Path, *tried: Tried) -> int:
    findings = look(run_from(read_case(PATHS[case]), folder))
    return next(one.points for one in rank(Facts(replace(findings, tried=tried))) if one.card.name == cause)


def test_a_remedy_without_help_speaks_against_what_it_would_have_cured(tmp_path: Path) -> None:
    case, words = "spikes-after-warmup", tried_in_words("halve the LR: no help")
    assert points(case, "lr-too-high", tmp_path, words) == points(case, "lr-too-high", tmp_path) - 2
    after = diagnosed(case, tmp_path, words)
    (cause,) = [each for each in after.hypotheses if each.cause == "lr-too-high"]
    assert "tried: halve the LR: no help" in cause.evidence_against
    assert "halve the LR" in diagnosed(case, tmp_path).first_action
    assert "halve the LR" not in after.first_action, "it is not advised again"


def test_one_that_helped_speaks_for_it(tmp_path: Path) -> None:
    case, words = "bad-shard", tried_in_words("took another shard: helped")
    assert points(case, "bad-data-batch", tmp_path, words) == points(case, "bad-data-batch", tmp_path) + 2
    several = tried_in_words("took another shard and went back: helped")  # of two things nobody knows which it was
    assert points(case, "bad-data-batch", tmp_path, several) == points(case, "bad-data-batch", tmp_path) + 1


def test_batches_that_have_nothing_to_do_with_it_show_nothing(tmp_path: Path) -> None:
    elsewhere = diagnosed("bad-shard", tmp_path, tried_in_words("skip batches 1-2: no help"))
    assert "so it shows nothing" in elsewhere.tried[0]
    assert not any("tried" in text for each in elsewhere.hypotheses for text in each.evidence_against)
