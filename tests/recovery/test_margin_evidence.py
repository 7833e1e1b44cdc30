"""Which margins are tightened, and on which evidence: rows in, actions and reasons out."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sealegs
from sealegs import Guard, Playbook
from sealegs.guard_options import Telemetry
from sealegs.recovery.actions import Action, LowerLR, Rollback, Tighten, TightenByEvidence, UseBf16
from sealegs.recovery.margin_evidence import YOUNG, Margin, MarginEvidence, Means
from sealegs.recovery.playbook import Rung
from sealegs.recovery.recurrence import Trigger
from sealegs.signals.groups import embedding_tables
from sealegs.vocabulary import Row, Verdict

BY_EVIDENCE = (Rollback(), TightenByEvidence())


def seen(
    steps: int = 200, of_step: Callable[[int], dict[str, Any]] = lambda step: {}, first: int = YOUNG
) -> MarginEvidence:
    evidence = MarginEvidence()
    noise = np.random.default_rng(0).lognormal(0, 0.1, steps)
    for step in range(steps):
        row: Row = {"step": first + step, "loss": 2.0, "grad_norm": float(noise[step]), **of_step(step)}
        evidence.observe(row, Verdict(step=first + step))
    return evidence


def led(evidence: MarginEvidence, *actions: Action, **means: Any) -> tuple[tuple[Action, ...], dict[str, Margin]]:
    found, margins = evidence.led(actions or BY_EVIDENCE, Means(**means))
    return found, {margin.margin: margin for margin in margins}


def test_a_healthy_run_is_asked_nothing() -> None:
    assert seen().led(BY_EVIDENCE, Means()) == ((Rollback(),), ())
    once_more_of_it = {"loss_scale": 2.0**16, "param_norm/blocks": 10.0}
    assert seen(of_step=lambda step: once_more_of_it).led(BY_EVIDENCE, Means()) == ((Rollback(),), ())


@pytest.mark.parametrize(
    ("norm", "now", "clip"),
    [(0.3, 1.0, 0.5), (1.5, None, 1.69), (1.5, 1.0, None), (1.5, 5.0, 1.69), (0.6, 1.0, 0.675)],
)
def test_a_clip_that_would_clip_most_steps_is_chosen_by_the_healthy_norms(
    norm: float, now: float | None, clip: float | None
) -> None:
    noise = np.random.default_rng(0).lognormal(0, 0.1, 200)
    evidence = seen(of_step=lambda step: {"grad_norm": norm * float(noise[step])})
    actions, margins = led(evidence, Rollback(), Tighten(clip=0.5), clip=now)
    found = [action.clip for action in actions if isinstance(action, Tighten)]
    assert found == ([] if clip is None else [pytest.approx(clip, rel=0.02)])
    assert margins["clip"].value == (found[0] if found else None)
    assert "of the healthy steps, whose median norm is" in margins["clip"].because


def test_a_clip_is_not_checked_by_a_few_norms_and_other_fields_stay() -> None:
    actions, margins = led(seen(5), Tighten(clip=0.5, weight_decay=2))
    assert actions == (Tighten(clip=0.5, weight_decay=2),)
    assert margins["clip"].because == "not checked: 5 norms of healthy steps are known"


@pytest.mark.parametrize(
    ("norm", "culprit", "limit"),
    [
        (math.inf, "tok_embeddings.weight", 100.0),
        (math.inf, "table.weight on rank 1", 100.0),
        (math.inf, "blocks.3.mlp.weight", None),
        (math.nan, "embed.w", None),
    ],
)
@pytest.mark.parametrize("actions", [(Tighten(clip_value=100.0), Rollback()), BY_EVIDENCE], ids=["asked for", "led"])
def test_elements_are_clipped_for_an_infinite_gradient_of_an_embedding_alone(
    norm: float, culprit: str, limit: float | None, actions: tuple[Action, ...]
) -> None:
    """Never for NaN, which clamping does not cure."""
    evidence = seen(of_step=lambda step: {"grad_norm": norm, "culprit": culprit} if step > 197 else {})
    table = embedding_tables(nn.ModuleDict({"table": nn.Embedding(3, 2), "head": nn.Linear(2, 3)}))
    found, _ = led(evidence, *actions, embeddings=table)
    assert found == ((Rollback(),) if limit is None else (Rollback(), Tighten(clip_value=limit)))


@pytest.mark.parametrize(("factor", "decay"), [(3.0, 2.0), (1.5, None), (1 / 3, 0.5)])
def test_weight_decay_follows_weights_that_grow_or_shrink_steadily(factor: float, decay: float | None) -> None:
    norms = {step: {"param_norm/blocks": 10.0 * factor ** (step / 199)} for step in range(0, 200, 10)}
    evidence = seen(of_step=lambda step: norms.get(step, {}))
    found, margins = led(evidence)
    assert found == ((Rollback(),) if decay is None else (Rollback(), Tighten(weight_decay=decay)))
    if decay is not None:
        assert "param_norm/blocks went from 10 to" in margins["weight_decay"].because
        found, margins = led(evidence, has_decay=False)
        assert found == (Rollback(),)
        assert margins["weight_decay"].value is None


def test_weights_that_grow_from_where_they_were_initialised_are_not_decayed() -> None:
    norms = {step: {"param_norm/head": 9.0 * 2.1 ** (step / 199)} for step in range(0, 200, 10)}
    assert led(seen(of_step=lambda step: norms.get(step, {}), first=0)) == ((Rollback(),), {})


def test_weights_that_leap_are_damaged_and_not_decayed() -> None:
    norms = {step: {"param_norm/blocks": 10.0 if step < 150 else 160.0} for step in range(0, 200, 10)}
    assert led(seen(of_step=lambda step: norms.get(step, {}))) == ((Rollback(),), {})


def test_the_rate_is_halved_where_the_gradient_norm_climbs_and_not_at_a_spike() -> None:
    noise = np.random.default_rng(1).lognormal(0, 0.3, 200)
    found, margins = led(seen(of_step=lambda step: {"grad_norm": float(noise[step]) * 4 ** (step / 200)}))
    assert found == (Rollback(), LowerLR(0.5))
    assert "the gradient norm has climbed" in margins["lr"].because
    assert led(seen(of_step=lambda step: {"grad_norm": float(noise[step]) * (50 if step > 190 else 1)}))[1] == {}
    climbing = seen(of_step=lambda step: {"grad_norm": 4.0 ** (step / 200)})
    assert led(climbing, has_rate=False)[0] == (Rollback(),)
    assert led(climbing, LowerLR(0.3), TightenByEvidence())[0] == (LowerLR(0.3),)


@pytest.mark.parametrize("can", [True, False])
def test_a_loss_scale_that_collapses_asks_for_half_the_rate_and_bf16(can: bool) -> None:
    evidence = seen(of_step=lambda step: {"loss_scale": 2.0 ** (16 - step / 10)})
    found, margins = led(evidence, can_use_bf16=can)
    assert found == ((Rollback(), LowerLR(0.5), UseBf16()) if can else (Rollback(), LowerLR(0.5)))
    assert "the loss scale has collapsed to" in margins["precision"].because
    assert ("guard.autocast_dtype" in margins["precision"].because) is not can


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(batch) - batch.sum(1, keepdim=True)).square().mean() + 1
    return loss


@pytest.mark.filterwarnings("ignore::sealegs.errors.RunEndedBadly")  # once it has gone back
@pytest.mark.parametrize("asks", [True, False], ids=["the loop asks", "it does not"])
def test_precision_is_changed_where_the_loop_asks_and_else_passed_over(asks: bool, tmp_path: Path) -> None:
    """And a clip that would clip everything is led by the norms; the event says on which evidence."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    rungs = (
        Rung({Trigger.NONFINITE_OFTEN}, (UseBf16(),)),
        Rung({Trigger.NONFINITE_OFTEN}, (Rollback(skip=1), Tighten(clip=1e-3))),
    )
    words: dict[str, Any] = {"playbook": Playbook(name="mine", rungs=rungs), "telemetry": Telemetry(sample_every=0)}
    dtypes = []
    with Guard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), run=tmp_path / "a", **words) as guard:
        for batch in guard.batches([torch.randn(8, 4) for _ in range(200)]):
            dtypes.append(guard.autocast_dtype(torch.float16) if asks else torch.float16)
            loss = loss_of(model, batch) * (math.nan if len(dtypes) in (51, 52, 53) else 1.0)
            loss.backward()
            guard.step(loss)
            if len(dtypes) == 60:
                break
        assert guard.autocast_dtype(torch.float32) == torch.float32
    told = sealegs.open_run(tmp_path / "a").events
    (done,) = (event.detail for event in told if event.kind == "intervention")
    passed = [event.detail["reason"] for event in told if event.kind == "rung-passed-over"]
    assert set(dtypes[53:]) == {torch.bfloat16 if asks else torch.float16}
    assert dtypes[52] == torch.float16
    if asks:
        assert (done["changed"], passed, done["margins"]) == ("train in bf16 instead of fp16", [], [])
    else:
        assert "autocast_dtype" in passed[0]
        (margin,) = done["margins"]
        assert margin["margin"] == "clip"
        assert margin["value"] > 1e-3
        assert f"clip at {margin['value']:g}" in done["changed"]
        assert "0.001 would clip 100% of the healthy steps" in done["evidence"]


def test_a_person_gets_the_clip_that_was_asked_for_and_is_told(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    words: dict[str, Any] = {"playbook": Playbook.standard(), "telemetry": Telemetry(sample_every=0)}
    with Guard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), run=tmp_path / "a", **words) as guard:
        for batch in guard.batches([torch.randn(8, 4) for _ in range(40)]):
            loss = loss_of(model, batch)
            loss.backward()
            guard.step(loss)
        guard.ask("clip", "0.001")
    (done,) = (event.detail for event in sealegs.open_run(tmp_path / "a").events if event.kind == "intervention")
    assert done["changed"] == "clip at 0.001"
    assert "0.001 would clip 100% of the healthy steps" in done["evidence"]
