"""Descriptions of what can be done: as phrases, as JSON, and refused where they make no sense."""

import json
import math
from typing import Any

import pytest

from sealegs.errors import ConfigError, SourceError
from sealegs.recovery.actions import (
    ACTIONS,
    Action,
    ClipQK,
    Continue,
    CopyMajority,
    Halt,
    LowerLR,
    Rollback,
    SkipBatches,
    Stratify,
    SwapSource,
    Tighten,
    TightenByEvidence,
    UseBf16,
    actions_from,
    plain_actions,
)

PHRASES: list[tuple[Action, str]] = [
    (Continue(), "go on, skipping what is rejected"),
    (Rollback(), "roll back to the newest healthy state, skip 10 batches"),
    (Rollback(100, 1), "roll back to the newest healthy state at least 100 steps before the onset, skip 1 batch"),
    (Rollback(skip=0), "roll back to the newest healthy state, skip no batch"),
    (LowerLR(), "learning rate x 0.5, warmed up again over 50 steps"),
    (LowerLR(0.3, rewarm_steps=0), "learning rate x 0.3"),
    (Tighten(clip=0.5), "clip at 0.5"),
    (ClipQK(), "rescale queries and keys at logits of 100"),
    (ClipQK(30), "rescale queries and keys at logits of 30"),
    (TightenByEvidence(), "tighten what the evidence asks for"),
    (UseBf16(), "train in bf16 instead of fp16"),
    (Tighten(clip=0.5, clip_value=100, weight_decay=2), "clip at 0.5, clip elements at 100, weight decay times 2"),
    (SwapSource(), "take out the source that the evidence names"),
    (SwapSource("web", weight=0.25), "give source web the weight 0.25"),
    (Stratify(), "spread rare tokens over the batches"),
    (SkipBatches(20), "skip the next 20 batches"),
    (CopyMajority(), "copy the weights of the majority to the ranks that differ"),
    (Halt(), "halt"),
    (Halt("warm up longer"), "halt: warm up longer"),
]


@pytest.mark.parametrize(("action", "phrase"), PHRASES, ids=lambda value: str(value))
def test_an_action_prints_as_a_phrase_and_comes_back_from_a_file(action: Action, phrase: str) -> None:
    assert str(action) == phrase
    written = json.dumps(plain_actions((action,)), allow_nan=False)
    assert actions_from(json.loads(written)) == (action,)


def test_all_of_them_are_tried() -> None:
    assert {type(action) for action, _ in PHRASES} == set(ACTIONS)
    assert len({kind.kind for kind in ACTIONS}) == len(ACTIONS) == 12


@pytest.mark.parametrize(
    ("make", "options", "field"),
    [
        (Rollback, {"back": -1}, "Rollback.back=-1"),
        (Rollback, {"back": 1.5}, "Rollback.back=1.5"),
        (Rollback, {"skip": True}, "Rollback.skip=True"),
        (LowerLR, {"factor": 1.0}, "LowerLR.factor=1.0"),
        (LowerLR, {"factor": 0}, "LowerLR.factor=0"),
        (LowerLR, {"factor": math.nan}, "LowerLR.factor=nan"),
        (LowerLR, {"rewarm_steps": -5}, "LowerLR.rewarm_steps=-5"),
        (Tighten, {}, "Tighten="),
        (Tighten, {"clip": 0.0}, "Tighten.clip=0.0"),
        (Tighten, {"clip_value": math.inf}, "Tighten.clip_value=inf"),
        (Tighten, {"weight_decay": "2"}, "Tighten.weight_decay='2'"),
        (ClipQK, {"limit": 0}, "ClipQK.limit=0"),
        (ClipQK, {"limit": math.inf}, "ClipQK.limit=inf"),
        (SwapSource, {"source": ""}, "SwapSource.source=''"),
        (SwapSource, {"weight": -0.1}, "SwapSource.weight=-0.1"),
        (SkipBatches, {"count": 0}, "SkipBatches.count=0"),
        (Halt, {"advice": 5}, "Halt.advice=5"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_in_one_sentence(make: Any, options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make(**options)
    assert str(refused.value).startswith(f"{field}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("plain", "says"),
    [
        ({"action": "pray"}, "action 'pray': not one of continue, rollback, lower-lr, "),
        ({"back": 0, "skip": 10}, "action None: not one of "),
        ("rollback-now", "action 'rollback-now': not one of "),
        ({"action": ["halt"]}, r"action \['halt'\]: not one of "),
        ({"action": "rollback", "back": 0, "speed": 3}, "action 'rollback' has no 'speed'; "),
        ({"action": "rollback", "back": -3}, "action 'rollback': Rollback.back=-3: "),
        ({"action": "skip-batches"}, "action 'skip-batches': .*count"),
    ],
    ids=str,
)
def test_a_file_with_other_actions_is_refused_in_one_sentence(plain: Any, says: str) -> None:
    with pytest.raises(SourceError, match=says) as refused:
        actions_from([plain])
    assert "\n" not in str(refused.value)
