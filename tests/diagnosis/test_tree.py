"""The decision tree: that it has an end, that it is walked in its order, and that unknown does not stop it."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from tests.diagnosis.streams import CASES, Case, read_case, run_from

from sealegs.diagnosis.contract import Answer
from sealegs.diagnosis.facts import Facts
from sealegs.diagnosis.findings import look
from sealegs.diagnosis.questions import ANY, END, QUESTIONS, TREE, ending, walk

CALM = {"loss": {"line": [[0, 6.0], [100, 3.0], [600, 2.5]], "noise": 0.01}}


def facts_of(tmp_path: Path, rules: str = "calibrated", **stream: Any) -> Facts:
    run = run_from(Case("tree", "", {"steps": 600, **stream}, {}), tmp_path)
    return Facts(look(run, rules=rules), rules)


def walked(facts: Facts) -> dict[str, Answer]:
    return {answer.question: answer for answer in walk(facts)[0]}


def test_every_question_of_the_pages_is_there_and_leads_somewhere() -> None:
    sections = {5: 5, 6: 2, 7: 1, 1: 4, 2: 4, 3: 4, 4: 4}  # what is first for a kind is asked first
    wanted = ["Q0"] + [f"Q{section}.{number + 1}" for section, most in sections.items() for number in range(most)]
    assert [question.number for question in TREE] == wanted
    targets = itertools.chain.from_iterable((*question.then.values(), question.otherwise) for question in TREE)
    assert set(targets) <= {*wanted, END}
    assert all(ANY in question.then for question in TREE), "unknown leads somewhere"


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_walk_is_a_chain_that_asks_nothing_twice(path: Path, tmp_path: Path) -> None:
    facts = Facts(look(run_from(read_case(path), tmp_path)))
    answers, _ = walk(facts)
    kind = facts.findings.kind
    of_kind = {"policy-gradient": 5, "moe": 2, "low-precision": 1}
    of_its_kind = sum(count for name, count in of_kind.items() if name in (kind.name, *kind.traits))
    assert [answer.question for answer in answers].index("Q1.1") == 1 + of_its_kind
    is_measure = kind.name not in ("policy-gradient", "gan")
    assert is_measure or not any(answer.question.startswith(("Q2", "Q4")) for answer in answers)
    assert [answer.next for answer in answers] == [*(answer.question for answer in answers[1:]), END]
    assert len({answer.question for answer in answers}) == len(answers)
    assert all(answer.evidence and answer.text == QUESTIONS[answer.question].text for answer in answers)


def test_the_fp16_questions_are_for_fp16_alone(tmp_path: Path) -> None:
    for dtype, asked in (("bf16", False), ("fp32", False), ("fp16", True)):
        assert ("Q3.1" in walked(facts_of(tmp_path, dtype=dtype, signals=CALM))) is asked


def test_a_loss_scale_says_that_it_is_fp16(tmp_path: Path) -> None:
    signals = CALM | {"loss_scale": {"line": [[0, 65536], [600, 65536]]}}
    assert facts_of(tmp_path, signals=signals).dtype == "fp16"


def test_the_panels_are_read_for_a_spike_that_is_back_and_for_one_that_stays(tmp_path: Path) -> None:
    back = {"loss": CALM["loss"] | {"set": [[400, 402, 6.0]]}}
    stays = {"loss": CALM["loss"] | {"set": [[400, 600, 6.0]]}}
    first, second = walked(facts_of(tmp_path, signals=back)), walked(facts_of(tmp_path, signals=stays))
    assert (first["Q2.2"].answer, first["Q2.2"].next, first["Q2.3"].next) == ("yes", "Q2.3", "Q4.1")
    assert (second["Q2.2"].answer, second["Q2.2"].next, second["Q2.3"].next) == ("no", "Q2.3", "Q2.4")


def test_unknown_goes_on_and_into_what_to_log(tmp_path: Path) -> None:
    signals = {"loss": CALM["loss"] | {"set": [[400, 600, "NaN"]]}}
    answers, missing = walk(facts_of(tmp_path, signals=signals))
    assert [answer.answer for answer in answers] == ["unknown", "yes", "unknown", "unknown", "unknown"]
    assert {"the settings", "dtype", "activation_norm/<layer>"} <= set(missing)


def test_a_nan_in_fp16_goes_on_to_mixed_precision(tmp_path: Path) -> None:
    signals = {"loss": CALM["loss"] | {"set": [[400, 600, "NaN"]]}}
    answers = walked(facts_of(tmp_path, dtype="fp16", signals=signals))
    assert answers["Q1.2"].next == "Q3.1"
    assert "Q3.4" in answers


def test_an_fp16_run_that_goes_on_is_asked_for_spikes_afterwards(tmp_path: Path) -> None:
    signals = {"loss": CALM["loss"] | {"set": [[200, 203, "NaN"], [400, 402, 6.0]]}}
    answers = walked(facts_of(tmp_path, dtype="fp16", signals=signals))
    assert list(answers)[:4] == ["Q0", "Q1.1", "Q1.2", "Q3.1"]
    assert answers["Q3.4"].next == "Q2.1"
    assert answers["Q2.1"].answer == "yes"


def test_question_0_counts_the_margins_that_are_missing(tmp_path: Path) -> None:
    settings = {
        "betas": [0.9, 0.999],
        "max_grad_norm": 0,
        "weight_decay": 0.0,
        "init_method_std": 0.02,
        "hidden_size": 14336,
    }
    answer = walked(facts_of(tmp_path, settings=settings, signals=CALM))["Q0"]
    assert answer.answer == "no"
    assert answer.evidence.startswith("4 missing: beta2 0.999 averages about 1000 steps")
    assert "0.00482" in answer.evidence


@pytest.mark.parametrize(("rules", "said"), [("calibrated", "no"), ("textbook", "yes")])
def test_the_textbook_flags_what_the_calibrated_rule_does_not(rules: str, said: str, tmp_path: Path) -> None:
    signals = {"loss": {"line": [[0, 6.0], [100, 3.0], [2000, 2.6]], "noise": 0.015}}
    assert walked(facts_of(tmp_path, rules, steps=2000, signals=signals))["Q2.1"].answer == said


def test_the_textbooks_rise_is_one_without_a_break(tmp_path: Path) -> None:
    rising = {"loss": {"line": [[0, 6.0], [100, 3.0], [300, 2.6], [600, 3.4]]}}
    noisy = {"loss": {**rising["loss"], "noise": 0.01}}
    assert walked(facts_of(tmp_path, "textbook", signals=rising))["Q4.1"].answer == "yes"
    assert walked(facts_of(tmp_path, "textbook", signals=noisy))["Q4.1"].answer == "no"


@pytest.mark.parametrize(
    ("question", "answer", "level", "action"),
    [
        ("Q4.4", "yes", True, "halve the LR"),
        ("Q4.4", "no", True, "stop: the evaluation loss is level, too"),
        ("Q4.4", "no", False, "compare evaluation metrics: stop if they are level"),
        ("Q4.4", "unknown", True, ""),
        ("Q4.2", "yes", True, ""),
    ],
)
def test_silent_divergence_ends_in_the_first_action_of_the_tree(
    tmp_path: Path, question: str, answer: str, level: bool, action: str
) -> None:
    evals = {"every": 20, "line": [[0, 3.2], [600, 3.2 if level else 2.5]]}
    facts = facts_of(tmp_path, signals={**CALM, "eval_loss": evals})
    last = Answer(question=question, text="", answer=answer, evidence="", next=END)
    assert ending(facts, (last,)) == action


def test_what_was_above_for_longer_is_not_back_within_50_steps_however_it_ended(tmp_path: Path) -> None:
    """Nearly back when the log ends: slow or lingering, which nobody knows, and not fast, which is known."""
    loss = {"line": [[0, 6.0], [100, 2.6], [399, 2.5], [400, 4.0], [500, 3.5], [520, 2.57], [600, 2.57]], "noise": 0.01}
    facts = facts_of(tmp_path, signals={"loss": loss})
    assert (facts.focus is not None, facts.focus and facts.focus.trajectory) == (True, None)
    assert walked(facts)["Q2.2"].answer == "no"


def test_weights_and_gradients_that_grow_beside_a_loss_that_does_not_rise_are_asked_for(tmp_path: Path) -> None:
    """The verdict is about them, and they need not grow to the end: the path must come by them."""
    calm = {"loss": {"line": [[0, 6.0], [300, 3.0], [2500, 2.5]], "noise": 0.01}}
    weights = {"param_norm.blocks": {"line": [[0, 30], [1700, 31], [1900, 78], [2500, 79]], "every": 10}}
    gradients = {"grad_norm": {"line": [[0, 0.5], [1700, 0.45], [2500, 1.2]], "noise": 0.05}}
    grown = walked(facts_of(tmp_path, steps=2500, signals=calm | weights))
    risen = facts_of(tmp_path, steps=2500, signals=calm | gradients)
    neither = walked(facts_of(tmp_path, steps=2500, signals=calm))
    assert [name for name in grown if name.startswith("Q4")] == ["Q4.1", "Q4.3"]
    assert (grown["Q4.1"].answer, grown["Q4.3"].answer) == ("no", "yes")
    assert "param_norm/blocks has grown from 31" in grown["Q4.3"].evidence
    assert [name for name in walked(risen) if name.startswith("Q4")] == ["Q4.1", "Q4.4"]
    assert walked(risen)["Q4.4"].answer == "yes"
    assert "gradient norm rising since about step 1" in walked(risen)["Q4.4"].evidence
    assert ending(risen, walk(risen)[0]) == "", "which is no divergence"
    assert [name for name in neither if name.startswith("Q4")] == ["Q4.1"]


@pytest.mark.parametrize(("at_the_nan", "origin"), [("embed", "embed"), ("", "unknown")])
def test_the_tensor_of_an_earlier_alarm_is_no_origin_of_a_nan(at_the_nan: str, origin: str, tmp_path: Path) -> None:
    """A spike at 195, and a gradient that is not finite at 240, which was skipped."""
    loss = CALM["loss"] | {"set": [[195, 200, 6.0]]}
    norm = {"line": [[0, 0.5], [600, 0.5]], "noise": 0.05, "set": [[240, 240, "inf"]]}
    culprit = {"texts": {"195": "head", "196": "", "240": at_the_nan, "241": ""}}
    facts = facts_of(tmp_path, signals={"loss": loss, "grad_norm": norm, "culprit": culprit})
    assert (facts.onset, facts.culprits(190, 200)) == (195, {195: "head"})
    assert walked(facts)["Q1.3"].answer == origin


def test_weights_that_leapt_long_before_a_nan_are_not_its_origin(tmp_path: Path) -> None:
    def origin(broken: int) -> str:
        loss = CALM["loss"] | {"set": [[195, 200, 6.0]]}
        norm = {"line": [[0, 0.5], [600, 0.5]], "noise": 0.05, "set": [[broken, broken, "inf"]]}
        weights = {"line": [[0, 30], [194, 30], [195, 45], [600, 45]]}
        return walked(facts_of(tmp_path, signals={"loss": loss, "grad_norm": norm, "param_norm.head": weights}))[
            "Q1.3"
        ].answer

    assert (origin(198), origin(260)) == ("param_norm/head", "unknown")
