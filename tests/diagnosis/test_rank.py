"""How causes are weighed, and what is named as the first action."""

import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from tests.diagnosis.streams import CASES, Case, read_case, run_from

from sealegs.diagnosis.cause_cards import Cause, causes
from sealegs.diagnosis.contract import Diagnosis, Statement
from sealegs.diagnosis.facts import Facts
from sealegs.diagnosis.findings import look
from sealegs.diagnosis.kind import Kind, KindName
from sealegs.diagnosis.rank import diagnose, weigh
from sealegs.diagnosis.signs.data import eval_flat
from sealegs.diagnosis.signs.sign import Sign
from sealegs.errors import ConfigError
from sealegs.readers.read import read

CALM = {"loss": {"line": [[0, 6.0], [100, 3.0], [600, 2.5]], "noise": 0.01}}


def diagnosed(tmp_path: Path, rules: str = "calibrated", **stream: Any) -> Diagnosis:
    run = run_from(Case("rank", "", {"steps": 600, **stream}, {}), tmp_path)
    return diagnose(look(run, rules=rules), source="here", format="case", rules=rules)


def card(**signs: Any) -> Cause:
    return Cause(
        **{"kinds": ("any",)} | signs,
        name="a",
        title="A cause",
        mechanism="It does.",
        explains=("spike",),
        tests=(),
        remedies=(),
        references=(),
    )


# two specific signs off different signals, one more off the first of them, and two symptoms off different signals
RATE, EVAL, RATE_TOO = "lr-jumps", "eval-turns", "warmup-just-over"
LEAPS, NORM = "leaps-recur", "gradient-many-fold"


@pytest.mark.parametrize(
    ("signs", "grade"),
    [
        ({"decides": (RATE,)}, "established"),
        ({"decides": (RATE,), "against": (LEAPS,)}, "hypothesis"),
        ({"decides": (RATE,), "against": (LEAPS,), "strong": (EVAL,)}, "supported"),
        ({"decides": (RATE,), "rules_out": (LEAPS,)}, "hypothesis"),
        ({"strong": (RATE,), "fits": (EVAL,)}, "supported"),
        ({"strong": (RATE,), "fits": (LEAPS,)}, "supported"),
        ({"strong": (RATE,), "fits": (RATE_TOO,)}, "hypothesis"),  # one signal is one observation
        ({"strong": (LEAPS, NORM)}, "hypothesis"),  # symptoms, however many
        ({"strong": (RATE,)}, "hypothesis"),
        ({"strong": (RATE,), "fits": (EVAL,), "against": (LEAPS,)}, "hypothesis"),
        ({"strong": (RATE,), "against": (LEAPS,)}, None),
        ({"strong": (RATE,), "rules_out": (LEAPS,)}, "ruled out"),
        ({"opens": (RATE,), "fits": (EVAL,)}, "hypothesis"),
        ({"opens": (RATE,), "fits": (EVAL, LEAPS)}, "supported"),
        ({"fits": (RATE, EVAL, LEAPS)}, None),
        ({"decides": ("lr-rises",), "strong": ("moments-kept",)}, None),
    ],
)
def test_grades(signs: dict[str, tuple[str, ...]], grade: str | None) -> None:
    held = {name: Sign(True, f"{name} is so") for name in (RATE, EVAL, RATE_TOO, LEAPS, NORM)}
    said = held | {"lr-rises": Sign(False, "not so"), "moments-kept": Sign(None, missing="lr")}
    assert weigh(card(**signs), said).grade == grade


def test_what_is_stated_beside_the_numbers_counts_as_a_signal_of_its_own() -> None:
    said = {LEAPS: Sign(True, "so"), NORM: Sign(True, "so")}
    warned = Statement(cause="a", weight="strong", text="the log says so", source="lines")
    doubted = Statement(cause="a", weight="fits", text="the settings hint at it", source="settings")
    assert weigh(card(fits=(LEAPS,)), said, beside=[warned]).grade == "supported"
    assert weigh(card(), said, beside=[warned]).grade == "hypothesis"
    assert weigh(card(strong=(LEAPS,), fits=(NORM,)), said, beside=[doubted]).grade == "hypothesis"


@pytest.mark.parametrize("name", list(causes()))
def test_no_card_is_sure_outside_the_kinds_that_it_was_written_for(name: str) -> None:
    """Whatever speaks for it: of a kind that is not known, and of one that it does not name."""
    every = {sign: Sign(True, f"{sign} is so") for sign in causes()[name].signs}
    alone = unopposed(causes()[name])
    for kind in (Kind(name=kind) for kind in get_args(KindName)):
        found = weigh(alone, every, is_known=alone.was_written_for(kind)).grade
        is_own = "any" in alone.kinds or kind.name in alone.kinds
        assert is_own or found in ("hypothesis", None)
        assert is_own or kind.name == "unknown" or not alone.is_for(kind)
    assert "any" not in alone.kinds or len(alone.kinds) == 1


def unopposed(one: Cause) -> Cause:
    """The card without what speaks against it."""
    return msgspec.structs.replace(one, against=(), rules_out=())


def test_a_remedy_is_ordered_only_where_its_sign_holds(tmp_path: Path) -> None:
    resumed: dict[str, Any] = {"resumes": [[300, 330]], "events": [{"kind": "resume", "step": 300}]}
    scale = {"line": [[0, 65536], [600, 256]], "set": [[50, 600, 256]]}
    begun_again = scale | {"after_resume": {"line": [[300, 65536], [600, 65536]]}}
    jump = CALM["loss"] | {"after_resume": {"line": [[300, 4.4], [600, 3.9]], "noise": 0.01}}
    scaler = diagnosed(tmp_path, **resumed, dtype="fp16", signals=CALM | {"loss_scale": begun_again})
    weights = diagnosed(
        tmp_path,
        **resumed,
        signals={"loss": jump, "lr": {"line": [[0, 1e-3], [600, 1e-3]]}, "batch_hash": {"batches": True}},
    )
    assert scaler.first_action == "Restore the scaler's state."
    assert "compare the weights" in weights.first_action
    assert "scaler" not in weights.first_action


def test_what_is_logged_too_rarely_is_not_named_as_if_it_were_not(tmp_path: Path) -> None:
    rising = {"line": [[0, 6.0], [100, 3.0], [500, 2.5], [510, 4.0], [600, 4.2]], "noise": 0.01}
    held_out = {"line": [[0, 6.0], [100, 3.0], [450, 2.5], [600, 2.5]], "every": 450}
    for signals, name in (({}, "eval_loss"), ({"eval_loss": held_out}, "eval_loss more often")):
        found = diagnosed(tmp_path, signals={"loss": rising, **signals}).findings
        assert found.incidents
        assert eval_flat(Facts(found, "calibrated")).missing == name


def test_what_is_not_logged_is_named(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, signals={"loss": CALM["loss"] | {"set": [[400, 401, 6.0]]}})
    assert {"grad_norm", "lr", "batch_hash", "token_loss_histogram"} <= set(found.log_next_time)


def test_a_calm_run_has_no_causes(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, signals=CALM)
    assert found.hypotheses == ()
    assert found.first_action == "Leave it: nothing asks for an action."


def test_too_short_a_log_is_not_called_calm(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, steps=5, signals=CALM)
    assert found.findings.verdict == "unknown"
    assert found.first_action.startswith("Cannot tell: ")


def test_the_page_says_how_the_rules_differ(tmp_path: Path) -> None:
    for rules in ("calibrated", "textbook"):
        (remark,) = diagnosed(tmp_path, rules, signals=CALM).remarks
        assert remark.startswith("calibrated rules: 0 incidents; textbook rules: ")


def test_rules_have_names(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, signals=CALM)
    with pytest.raises(ConfigError, match="rules='six sigma': one of calibrated, textbook"):
        diagnose(found.findings, source="", format="", rules="six sigma")


def test_weights_that_are_sound_are_not_reloaded(tmp_path: Path) -> None:
    case = next(read_case(path) for path in CASES if path.stem == "badly-shuffled")
    found = diagnose(look(run_from(case, tmp_path)), source="", format="")
    assert "eload" not in found.first_action


def test_a_checkpoint_is_reloaded_only_where_there_is_something_to_act_on(tmp_path: Path) -> None:
    """A rise that came down by itself, late, is no reason to give up what was learned since."""
    high = CALM["loss"] | {"line": [[0, 6.0], [100, 3.0], [299, 2.8], [300, 7.0], [400, 3.0], [420, 2.7], [600, 2.5]]}
    back = diagnosed(tmp_path, signals={"loss": high})
    assert back.findings.verdict == "watch"
    assert "eload" not in back.first_action
    stays = CALM["loss"] | {"line": [[0, 6.0], [100, 3.0], [299, 2.8], [300, 7.0], [400, 5.0], [600, 4.9]]}
    damaged = diagnosed(tmp_path, signals={"loss": stays})
    assert damaged.findings.verdict == "act"
    assert damaged.first_action.startswith("Reload the last checkpoint before step 300")


@pytest.mark.parametrize("then", [[], [[520, 599, "NaN"]]], ids=["rises", "breaks"])
def test_a_checkpoint_is_reloaded_from_before_all_of_it(then: list[Any], tmp_path: Path) -> None:
    """The loss rises faster and faster from step 400 on, and is not finite in the end."""
    loss = {"line": [[0, 6.0], [100, 3.0], [400, 2.7], [450, 3.0], [500, 4.5], [600, 12.0]], "noise": 0.005}
    found = diagnosed(tmp_path, signals={"loss": loss | {"set": then}}, checkpoints=20)
    begin = min(incident.start for incident in found.findings.incidents)
    assert 400 <= begin <= 470
    assert f"eload the last checkpoint before step {begin} (step {begin - 1 - (begin - 1) % 20})" in found.first_action


def test_gradients_that_break_before_the_loss_are_not_reloaded(tmp_path: Path) -> None:
    loss = CALM["loss"] | {"set": [[400, 599, "NaN"]]}
    norms = {"line": [[0, 1.0], [600, 1.0]], "noise": 0.01, "set": [[398, 599, "NaN"]]}
    found = diagnosed(tmp_path, signals={"loss": loss, "grad_norm": norms})
    assert found.first_action.startswith("Reload the last checkpoint from before the update of step 398")


@pytest.mark.parametrize(("few", "since"), [(1, 250), (2, 251), (600, 400)])
def test_a_checkpoint_is_not_reloaded_from_when_the_loader_was_stuck(few: int, since: int, tmp_path: Path) -> None:
    """The loss is back up where new batches come, at step 400."""
    lines = [[0, 6.0], [100, 3.0], [250, 2.8], [330, 0.5], [399, 0.4], [400, 4.5], [600, 4.4]]
    stuck = range(250, 400)
    again = [f"{250 + step % few if step in stuck and few < 600 else step:08d}" for step in range(600)]
    path = tmp_path / "log.jsonl"
    steps, levels = np.array(lines).T
    loss = np.interp(np.arange(600), steps, levels) + np.resize([0.01, -0.01, 0.005], 600)
    rows = ({"step": step, "loss": float(loss[step]), "batch_hash": again[step]} for step in range(600))
    path.write_text("\n".join(map(json.dumps, rows)))
    found = diagnose(look(read(str(path)).run), source="here", format="jsonl")
    assert found.first_action.startswith(f"Reload the last checkpoint before step {since}"), found.first_action


def test_a_loss_about_zero_is_no_reason_to_go_back(tmp_path: Path) -> None:
    loss = {"line": [[0, 0.0], [600, 0.0]], "noise": 0.0, "set": [[step, step + 1, -0.01] for step in range(0, 600, 2)]}
    found = diagnosed(tmp_path, signals={"loss": loss | {"line": [[0, 0.01], [600, 0.01]]}})
    assert found.findings.verdict == "unknown"
    assert "eload" not in found.first_action


def test_what_is_wrong_with_a_metric_is_not_over_when_the_loss_is_back(tmp_path: Path) -> None:
    about_zero = [[step, step, -0.01] for step in range(0, 600, 2)]
    beyond_all = [300, 306, 9.0]  # of a loss that measures nothing no other leap is an incident
    loss = {"line": [[0, 0.01], [600, 0.01]], "noise": 0.1, "set": [*about_zero, beyond_all]}
    beside = {name: {"line": [[0, 0.5], [600, 0.5]], "noise": 0.1} for name in ("policy_loss", "value_loss")}
    found = diagnosed(tmp_path, signals={"loss": loss, **beside})
    assert "fast" in [incident.trajectory for incident in found.findings.incidents]
    assert found.first_action.startswith("Go by the reward, not by this loss")


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_every_hypothesis_names_a_card_and_says_why(path: Path, tmp_path: Path) -> None:
    found = diagnose(look(run_from(read_case(path), tmp_path)), source="", format="")
    grades = [hypothesis.grade for hypothesis in found.hypotheses]
    order = ["established", "supported", "hypothesis", "ruled out"]
    assert grades == sorted(grades, key=order.index)
    for hypothesis in found.hypotheses:
        assert hypothesis.cause in causes()
        assert hypothesis.evidence_against if hypothesis.grade == "ruled out" else hypothesis.evidence_for
        assert all(hypothesis.evidence_for + hypothesis.evidence_against), "no empty sentence"
        assert hypothesis.grade == "ruled out" or hypothesis.cause == "unknown" or hypothesis.next_test
    assert found.first_action.endswith(".")


def broken(loss: int, gradient: int, weight: int, **more: Any) -> dict[str, Any]:
    """A run whose loss, gradients and weights are not finite from these steps on; weights are seen at every step."""
    return {
        "dtype": "fp32",
        "signals": {
            "loss": CALM["loss"] | {"set": [[loss, 599, "NaN"]]},
            "grad_norm": {"line": [[0, 1.0], [600, 1.0]], "noise": 0.05, "set": [[gradient, 599, "NaN"]]},
            "grad_norm.embedding": {"line": [[0, 0.5], [600, 0.5]], "noise": 0.05, "set": [[gradient, 599, "NaN"]]},
            "params_finite": {"line": [[0, 1], [600, 1]], "set": [[weight, 599, 0]]},
            "lr": {"line": [[0, 1e-4], [600, 1e-4]]},
        },
        **more,
    }


@pytest.mark.parametrize(
    ("loss", "gradient", "weight", "grade"),
    [
        (301, 301, 300, "hypothesis"),  # the weights break while loss and gradients are finite: no update is known to
        (300, 300, 300, "hypothesis"),  # and all at once after a finite update
        (301, 300, 301, "established"),  # a gradient breaks at a finite loss, and the update writes it
        (300, 300, 301, "hypothesis"),  # the forward pass breaks at sound weights: what follows is a consequence
    ],
)
def test_an_update_is_to_blame_for_a_nan_only_where_the_loss_was_finite_before_it(
    loss: int, gradient: int, weight: int, grade: str, tmp_path: Path
) -> None:
    found = diagnosed(tmp_path, **broken(loss, gradient, weight))
    assert {"destructive-update": grade}.items() <= {it.cause: it.grade for it in found.hypotheses}.items()
    assert not {"corrupt-weight", "masked-labels"} & {it.cause for it in found.hypotheses if it.grade == "ruled out"}


def test_a_nan_of_the_forward_pass_is_no_fault_of_the_embedding_nor_of_a_setting_that_most_runs_have(
    tmp_path: Path,
) -> None:
    settings = {"optimizer": {"beta2": 0.999}}
    found = diagnosed(tmp_path, **broken(300, 300, 301, settings=settings))
    listed = {it.cause for it in found.hypotheses if it.grade != "ruled out"}
    assert not listed & {"stale-beta2", "infinite-embedding-gradient"}
    assert {"Q1.4": "unknown"}.items() <= {it.question: it.answer for it in found.path}.items()
    gradient = broken(301, 300, 301, settings=settings)
    for value, is_listed in (("inf", True), ("NaN", False)):  # NaN may be from anywhere, and a clamp does not cure it
        for name in ("grad_norm", "grad_norm.embedding"):
            gradient["signals"][name]["set"] = [[300, 599, value]]
        causes = {it.cause for it in diagnosed(tmp_path, **gradient).hypotheses if it.grade != "ruled out"}
        assert ("infinite-embedding-gradient" in causes) is is_listed


def flipped(**more: Any) -> dict[str, Any]:
    """A weight of the embedding that is suddenly enormous from step 300 on; the loss is infinite with it."""
    names = ("param_norm.embedding", "param_norm.blocks_0", "param_norm.head")
    norms = {name: {"line": [[0, 20.0], [600, 26.0]], "every": 10} for name in names}
    norms[names[0]] |= {"set": [[300, 599, 1e37]]}
    loss = CALM["loss"] | {"set": [[300, 599, "inf"]]}
    return {"dtype": "fp32", "signals": {"loss": loss, "lr": {"line": [[0, 1e-4], [600, 1e-4]]}, **norms}, **more}


def test_a_weight_that_leaps_alone_is_the_cause_of_an_infinite_loss_and_not_its_logarithm(tmp_path: Path) -> None:
    sound = {"model": {"naive_log_loss": False}}
    for settings, grade in ((None, "supported"), (sound, "hypothesis")):
        found = diagnosed(tmp_path, **flipped(**({"settings": settings} if settings else {})))
        assert (found.hypotheses[0].cause, found.hypotheses[0].grade) == ("corrupt-weight", "supported")
        grades = {it.cause: it.grade for it in found.hypotheses}
        assert grades.get("log-of-zero", "hypothesis") == "hypothesis", grade
        answers = {it.question: it.answer for it in found.path}
        assert answers["Q1.3"] == "param_norm/embedding"
        assert answers["Q1.4"] == "go back to before the weights leapt"


def test_where_all_gradients_are_nan_at_once_the_first_of_the_list_is_no_origin(tmp_path: Path) -> None:
    groups = {
        name: {"line": [[0, 0.5], [600, 0.5]], "noise": 0.05, "set": [[300, 599, "NaN"]]}
        for name in ("grad_norm", "grad_norm.embedding", "grad_norm.blocks_0", "grad_norm.head")
    }
    loss = CALM["loss"] | {"set": [[300, 599, "NaN"]]}
    culprit = {"texts": {"300": "embedding.weight", "301": ""}}
    found = diagnosed(tmp_path, signals={"loss": loss, **groups, "culprit": culprit})
    assert {it.question: it.answer for it in found.path}["Q1.3"] == "unknown"


def test_the_checkpoint_to_reload_lies_before_the_jump_of_the_learning_rate(tmp_path: Path) -> None:
    loss = {"line": [[0, 6.0], [100, 3.0], [401, 2.7], [402, 4.2], [600, 3.6]], "noise": 0.005}
    rate = {"line": [[0, 3e-4], [399, 3e-4], [400, 2.4e-3], [600, 2.4e-3]]}
    found = diagnosed(tmp_path, signals={"loss": loss, "lr": rate})
    assert found.first_action.startswith("Reload the last checkpoint before step 400,")


def test_weights_that_double_while_the_loss_rises_are_an_answer_of_the_tree(tmp_path: Path) -> None:
    loss = {"line": [[0, 6.0], [300, 2.4], [1700, 2.3], [2000, 3.2]], "noise": 0.005}
    norm = {"line": [[0, 30.0], [1700, 45.0], [1900, 118.0], [2000, 118.0]], "every": 10}
    found = diagnosed(tmp_path, steps=2000, signals={"loss": loss, "param_norm.blocks_3": norm})
    answers = {it.question: it.answer for it in found.path}
    assert {"Q4.1": "yes", "Q4.3": "yes"}.items() <= answers.items()


def test_a_climb_over_a_hundred_rows_is_no_corrupt_weight(tmp_path: Path) -> None:
    loss = {"line": [[0, 7.8], [100, 3.0], [300, 2.5], [420, 7.7], [600, 7.7]], "noise": 0.005}
    norm = {"line": [[0, 1.0], [300, 0.8], [420, 5.0], [600, 5.0]], "noise": 0.05}
    found = diagnosed(tmp_path, signals={"loss": loss, "grad_norm": norm})
    listed = [it.cause for it in found.hypotheses if it.grade != "ruled out"]
    assert listed[0] == "lr-too-high"
    assert "corrupt-weight" not in listed
