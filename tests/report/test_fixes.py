"""The change that each tested cause asks for, as a rerun can carry it out; and what a person may write."""

import re
from pathlib import Path
from typing import Any

import pytest

from sealegs.diagnosis.cause_cards import causes
from sealegs.errors import ConfigError
from sealegs.report.fixes import KINDS, Circumstances, Fix, in_words, parse, remediation

HERE = Circumstances(onset=312, last_bad=314, clip=1.0, usual_norm=0.6)
REPLAY = Path(__file__).parents[2] / "src" / "sealegs" / "replay"


@pytest.mark.parametrize(
    ("cause", "facts", "changes"),
    [
        ("bad-data-batch", {}, ["skip=312:315"]),
        ("batch-and-state", {"last_bad": 300}, ["skip=312:313"]),
        ("long-tail-token", {}, ["skip=312:315"]),
        ("long-tail-token", {"masking_helps": True}, ["rare=spread", "clip=0.5"]),
        ("long-tail-token", {"masking_helps": True, "clip": None}, ["rare=spread", "clip=0.6"]),
        ("long-tail-token", {"masking_helps": True, "clip": None, "usual_norm": None}, ["rare=spread"]),
        ("hard-batch", {}, []),
        ("lr-too-high", {}, ["lr=0.5"]),
        ("stale-beta2", {}, ["beta2=0.95"]),
        ("corrupt-gradient", {}, ["gate=312:313"]),
        ("softmax-overflow", {"settings": {"model.naive_softmax": True}}, ["model.naive_softmax=false"]),
        ("softmax-overflow", {"settings": {"model.naive_softmax": False}}, ["gate=312:313"]),
        ("zero-variance-norm", {"settings": {"model.norm_eps": 0.0}}, ["model.norm_eps=1e-6"]),
        ("log-of-zero", {}, ["gate=312:313"]),
    ],
)
def test_the_smallest_change(cause: str, facts: dict[str, object], changes: list[str]) -> None:
    known: dict[str, Any] = {name: facts.get(name, getattr(HERE, name)) for name in Circumstances.__dataclass_fields__}
    assert [str(fix) for fix in remediation(cause, Circumstances(**known))] == changes


def test_every_cause_that_a_replay_can_name_has_a_change_that_can_be_written() -> None:
    source = "".join(path.read_text() for path in REPLAY.glob("*.py"))
    named = set(re.findall(r'"([a-z0-9]+(?:-[a-z0-9]+)+)"', source)) & causes().keys()
    assert len(named) >= 14
    for cause in named:
        fixes = remediation(cause, HERE)
        assert all(parse(str(fix)) == fix for fix in fixes)
        assert bool(fixes) is (cause != "hard-batch")


def test_every_kind_has_words() -> None:
    values = {"skip": "3:4", "gate": "3:9", "clip": "0.5", "lr": "0.1", "beta2": "0.9"}
    for name, kind in KINDS.items():
        for value in (*kind.words, *([values[name]] if name in values else [])):
            assert len(parse(f"{name}={value}").words) > 10
    assert parse("gate=3:9").words == "skip the update of steps 3 to 8, exactly"
    assert parse("model.norm_eps=1e-6").words == "set model.norm_eps to 1e-6"
    assert in_words([]) == "change nothing: go on"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("clip", "a name, = and a value; names are skip, gate, clip"),
        ("clip=", "a name, = and a value"),
        ("clp=0.5", "a name, = and a value"),
        ("clip=-1", "-1 is not what clip can be: a norm above 0, such as 0.5"),
        ("clip=nan", "nan is not what clip can be"),
        ("lr=often", "often is not what lr can be: before or logged or a factor above 0"),
        ("skip=7", "7 is not what skip can be: the first step and the one after the last, such as 312:313"),
        ("skip=9:9", "9:9 is not what skip can be"),
        ("rare=gone", "gone is not what rare can be: spread or masked"),
        ("beta2=1", "1 is not what beta2 can be"),
    ],
)
def test_what_cannot_be_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--fix {text}: {sentence}")):
        parse(text)


def test_a_change_that_is_none_in_a_rerun_is_known() -> None:
    assert Fix("lr", "logged").is_as_recorded
    assert not Fix("lr", "0.5").is_as_recorded
