"""The cause cards: that the file is sound, says enough, and refuses what is not."""

import re
from importlib import resources

import pytest

from sealegs.diagnosis.cause_cards import causes, parsed
from sealegs.diagnosis.lines import known_kinds
from sealegs.diagnosis.signs.registry import SIGNS
from sealegs.diagnosis.signs.worth import GENERIC, SOURCES
from sealegs.errors import ConfigError

FILE = (resources.files("sealegs.diagnosis") / "causes.toml").read_text("utf-8")

WANTED = [
    "long-tail-token",
    "bad-data-batch",
    "badly-shuffled-data",
    "batch-and-state",
    "fp16-overflow",
    "fp16-underflow",
    "numerical-cascade",
    "lr-discontinuity",
    "upside-down-cosine",
    "endless-warmup",
    "misaligned-restart",
    "optimizer-reset",
    "lr-too-high",
    "stale-beta2",
    "duplicate-batch",
    "corrupt-gradient",
    "softmax-overflow",
    "zero-variance-norm",
    "log-of-zero",
    "inf-times-zero",
    "infinite-embedding-gradient",
    "gradient-explosion",
    "destructive-update",
    "init-too-wide",
    "weight-decay-low",
    "weight-decay-high",
    "attention-logit-growth",
    "output-logit-growth",
    "unknown",
    "resume-state-missing",
    "data-order",
    "masked-labels",
    "collapse",
    "accumulation-denominator",
    "ranks-out-of-step",
    "kernel-fault",
    "dependency-change",
    "metric-wrong",
    "unlogged-step-size",
    "hard-batch",
    "memorisation",
    "plateau",
    "schedule-ends-early",
    "nothing-is-updated",
]


def test_every_cause_has_a_card() -> None:
    assert set(WANTED) <= set(causes())


@pytest.mark.parametrize("name", [name for name in causes() if name != "unknown"])
def test_a_card_says_enough(name: str) -> None:
    card = causes()[name]
    assert len(re.findall(r"[.?!](?: |$)", card.mechanism)) == 2, "two sentences"
    assert card.explains
    of_lines = {cause for line in known_kinds() for cause in line.speaks_for if line.weight != "fits"}
    assert card.decides or card.strong or card.opens or name in of_lines, "or it could never be listed"
    assert card.tests
    assert card.references
    assert any(remedy.grade != "show-only" for remedy in card.remedies), "or there would be nothing to do"
    assert all(remedy.value for remedy in card.remedies)
    assert len(set(card.signs)) == len(card.signs), "a sign counts once"
    assert not GENERIC & set(card.decides), "a symptom decides nothing"


def test_every_sign_is_asked_for_and_says_what_it_is() -> None:
    named = {sign for card in causes().values() for sign in card.names}
    assert set(SIGNS) == named
    assert all(function.__doc__ for function in SIGNS.values())


def test_every_sign_is_read_off_one_signal() -> None:
    named = [sign for names in SOURCES.values() for sign in names.split()]
    assert sorted(named) == sorted(SIGNS)
    assert set(SIGNS) >= GENERIC


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (("gradient-many-fold", "gradient-many-folds"), "long-tail-token speaks of gradient-many-folds"),
        (('from = "bad-data-batch"', 'from = "bad-date-batch"'), "speaks of bad-date-batch, which does not exist"),
        (('grade = "safe"', 'grade = "free"'), "Invalid enum value 'free'"),
        (('kinds = ["any"]\n', ""), "missing required field `kinds`"),
        (('explains = ["spike"]', 'explains = ["leap"]'), "Invalid enum value 'leap'"),
        (("mechanism", "mechanics"), "unknown field `mechanics`"),
        (('name = "bad-data-batch"', 'name = "long-tail-token"'), "two cards are called long-tail-token"),
        (("[[cause]]", "[[cause"), "causes.toml: "),
    ],
)
def test_a_wrong_file_is_refused(edit: tuple[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        parsed(FILE.replace(*edit))
