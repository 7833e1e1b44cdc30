"""Runs whose attention logits grow: queries and keys are rescaled, written down, and brought back like the rest."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW, Muon

import sealegs
from sealegs import Guard, Playbook, Subject
from sealegs.capsule.read import open_capsule
from sealegs.cli.main import main
from sealegs.errors import ConfigError
from sealegs.faults.practice import disturbed
from sealegs.faults.spec import parse
from sealegs.guard_options import Checkpointing, Clipping, Telemetry
from sealegs.lab.model import Transformer
from sealegs.lab.settings import SIZES, ModelSettings
from sealegs.lab.sources import open_data
from sealegs.lab.train import resolved, train
from sealegs.playbook import ClipQK, LowerLR, Rung, Trigger
from sealegs.replay.rerun import Rerun
from sealegs.signals.activations import ActivationSampler

LIMIT = 3.0
EVERY = 5
"""Steps between looks."""
SMALL = ModelSettings(width=32, layers=2, heads=4, hidden=48, context=12, vocabulary=64)


def model_of(**switches: Any) -> Transformer:
    """Whose logits are beyond the limit, in the second block alone."""
    torch.manual_seed(0)
    model = Transformer(replace(SMALL, **switches))
    with torch.no_grad():
        model.get_parameter("blocks.1.attention.query_key_value.weight")[:64].mul_(4)
    return model


def optimizer_of(model: Transformer) -> AdamW:
    return AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


def texts() -> list[Tensor]:
    return list(torch.randint(64, (400, 4, 13), generator=torch.Generator().manual_seed(7)))


def loss_of(model: Transformer, batch: Tensor) -> Tensor:
    return model.losses(batch[:, :-1], batch[:, 1:]).total / 48


def guarded(model: Transformer, optimizer: Any, folder: Path, **options: Any) -> Guard:
    usual: dict[str, Any] = {"telemetry": Telemetry(sample_every=EVERY), "qk_clip": LIMIT} | options
    clip = Clipping(norm=1.0, attention_logit=usual.pop("qk_clip"))
    return Guard(model, optimizer, run=folder, clip=clip, **usual)


def steps(guard: Guard, model: Transformer, last: int) -> Iterator[int]:
    """Before and after each step its number."""
    for batch in guard.batches(texts()):
        loss_of(model, batch).backward()
        yield guard.number
        guard.step(loss_of(model, batch).detach())
        if guard.number >= last:
            break


def run_to(guard: Guard, model: Transformer, last: int) -> None:
    for _ in steps(guard, model, last):
        pass


def events(folder: Path, kind: str) -> list[Any]:
    return [event for event in sealegs.open_run(folder).events if event.kind == kind]


def weights(model: Transformer) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def test_logits_are_kept_at_the_limit_and_each_rescaling_is_written_down(tmp_path: Path, capsys: Any) -> None:
    model = model_of()
    with guarded(model, optimizer_of(model), tmp_path / "a") as guard:
        run_to(guard, model, 41)
    run = sealegs.open_run(tmp_path / "a")
    looked = {int(step) for step, limit in zip(run.steps, run.column("qk_clip"), strict=True) if limit == LIMIT}
    assert looked == set(range(EVERY, 41, EVERY))
    logits = dict(zip(run.steps, run.column("attention_logit_max/blocks.1"), strict=True))
    assert logits[EVERY] > 1.3 * LIMIT
    shadow = model_of()
    with guarded(shadow, optimizer_of(shadow), tmp_path / "b", act=False) as guard:
        run_to(guard, shadow, 41)
    unlimited = sealegs.open_run(tmp_path / "b").column("attention_logit_max/blocks.1")
    later = [step for step in looked if step > EVERY]
    assert median(logits[step] for step in later) < 1.15 * LIMIT, "other batches, some updates further"
    assert median(unlimited[step] for step in later) > 1.3 * LIMIT
    done = events(tmp_path / "a", "qk-clip")
    assert done[0].step == EVERY
    assert {event.step for event in done} == {step for step in looked if logits[step] > LIMIT}
    assert [event.detail["number"] for event in done] == list(range(1, len(done) + 1))
    (module,) = done[0].detail["modules"]
    assert module["module"] == "blocks.1.attention"
    assert module["logit"] == logits[EVERY]
    assert f"the largest logit was {logits[EVERY]:.4g}, and 3 is the limit" in done[0].detail["text"]
    capsys.readouterr()
    assert main(["interventions", str(tmp_path / "a")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"blocks.1.attention: queries and keys of {len(module['heads'])} head" in said
    assert f"rescaled {len(done)} time" in said
    assert main(["interventions", str(tmp_path / "a"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["qk_clips"]
    assert [(each["step"], each["limit"]) for each in told] == [(event.step, LIMIT) for event in done]


def test_a_run_with_no_logit_over_the_limit_is_the_run_without_a_limit(tmp_path: Path) -> None:
    ends = []
    for name, limit in (("a", 1000.0), ("b", None)):
        model = model_of()
        with guarded(model, optimizer_of(model), tmp_path / name, qk_clip=limit) as guard:
            run_to(guard, model, 23)
        ends.append(weights(model))
    assert all(map(torch.equal, *ends))
    assert events(tmp_path / "a", "qk-clip") == []


@pytest.mark.parametrize("muon", [False, True])
def test_the_factor_is_exact_and_comes_after_the_update(muon: bool, tmp_path: Path) -> None:
    """Beside a twin whose limit is far away: the weights are the twin's, times the factor of each head."""
    both = {}
    for name, limit in (("a", LIMIT), ("b", 1000.0)):
        model = model_of()
        optimizers: Any = optimizer_of(model)
        if muon:
            hidden = [p for p in model.blocks.parameters() if p.ndim == 2]
            others = [p for p in model.parameters() if not any(p is each for each in hidden)]
            optimizers = [Muon(hidden, lr=1e-3), AdamW(others, lr=1e-3)]
        with guarded(model, optimizers, tmp_path / name, qk_clip=limit) as guard:
            run_to(guard, model, EVERY + 1)
        both[name] = dict(model.named_parameters())
    (done,) = events(tmp_path / "a", "qk-clip")
    changed = {name for name in both["a"] if not torch.equal(both["a"][name], both["b"][name])}
    assert changed == {"blocks.1.attention.query_key_value.weight"}
    (name,) = changed
    ratio = (both["a"][name] / both["b"][name])[:64].view(2, 4, -1)
    torch.testing.assert_close(ratio, ratio[:, :, :1].expand_as(ratio), rtol=1e-6, atol=0)
    assert torch.equal(both["a"][name][64:], both["b"][name][64:])
    of_heads = ratio[0, :, 0]
    torch.testing.assert_close(of_heads, ratio[1, :, 0], rtol=1e-6, atol=0)
    (module,) = done.detail["modules"]
    assert [head for head in range(4) if of_heads[head] < 1 - 1e-6] == module["heads"]
    assert float(of_heads.detach().min()) == pytest.approx(math.sqrt(LIMIT / module["logit"]), rel=1e-6)


def test_a_skipped_step_rescales_nothing_and_a_shadow_only_says_so(tmp_path: Path) -> None:
    model = model_of()
    with guarded(model, optimizer_of(model), tmp_path / "a") as guard:
        for batch in guard.batches(texts()):
            loss = loss_of(model, batch) * (math.nan if guard.number == EVERY else 1.0)
            loss.backward()
            before = weights(model)
            is_skipped = guard.number == EVERY
            guard.step(loss)
            assert all(map(torch.equal, weights(model), before)) == is_skipped
            if guard.number > EVERY:
                break
    assert events(tmp_path / "a", "qk-clip") == []
    model = model_of()
    with guarded(model, optimizer_of(model), tmp_path / "b", act=False) as guard:
        run_to(guard, model, EVERY + 1)
    twin = model_of()
    with guarded(twin, optimizer_of(twin), tmp_path / "c", qk_clip=None) as guard:
        run_to(guard, twin, EVERY + 1)
    assert all(map(torch.equal, weights(model), weights(twin)))
    (said,) = events(tmp_path / "b", "qk-clip")
    assert said.detail["acted"] is False


@pytest.mark.parametrize("stopped_at", [14, 15, 16])
def test_a_run_that_is_resumed_goes_on_bit_for_bit(stopped_at: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint_every": 1000, "playbook": Playbook.observe()}
    straight = model_of()
    with guarded(straight, optimizer_of(straight), tmp_path / "a", **options) as guard:
        run_to(guard, straight, 31)
    model = model_of()
    with guarded(model, optimizer_of(model), tmp_path / "b", **options) as guard:
        run_to(guard, model, stopped_at)
        guard.checkpoint(wait=True)
    model = model_of()
    with guarded(model, optimizer_of(model), tmp_path / "b", resume=True, **options) as guard:
        run_to(guard, model, 31)
    assert all(map(torch.equal, weights(model), weights(straight)))
    assert [e.detail for e in events(tmp_path / "b", "qk-clip")] == [
        e.detail for e in events(tmp_path / "a", "qk-clip")
    ]


def test_a_rollback_brings_back_what_was_rescaled(tmp_path: Path) -> None:
    model, never = model_of(), Playbook(name="never", rungs=(Rung({Trigger.BUDGET_SPENT}, (LowerLR(0.5),)),))
    kept = Checkpointing(snapshot_every=3)
    with guarded(model, optimizer_of(model), tmp_path / "a", playbook=never, checkpoint_every=kept) as guard:
        seen: dict[int, list[Tensor]] = {}
        for number in steps(guard, model, 60):
            seen.setdefault(number, weights(model))
            if number == 50:
                break
        guard.loop._pending = None
        guard.ask("rollback")
        assert any(guard.number < event.step < 50 for event in events(tmp_path / "a", "qk-clip"))
        assert all(map(torch.equal, weights(model), seen[guard.number]))


RESCALING = Playbook(name="mine", rungs=(Rung({Trigger.NONFINITE_OFTEN}, (ClipQK(LIMIT),)),))


@pytest.mark.parametrize("is_over", [True, False])
def test_as_a_rung_it_needs_logits_that_were_over_the_limit(is_over: bool, tmp_path: Path) -> None:
    model = model_of()
    if not is_over:
        with torch.no_grad():
            model.get_parameter("blocks.1.attention.query_key_value.weight")[:64].mul_(1 / 4)
    with guarded(model, optimizer_of(model), tmp_path / "a", qk_clip=None, playbook=RESCALING) as guard:
        for batch in guard.batches(texts()):
            loss = loss_of(model, batch) * (math.nan if guard.number in (21, 22, 23) else 1.0)
            loss.backward()
            try:
                guard.step(loss)
            except sealegs.RunHalted:
                break
            if guard.number >= 41:
                break
    done = [event.detail for event in events(tmp_path / "a", "intervention")]
    clipped = [event.step for event in events(tmp_path / "a", "qk-clip")]
    if not is_over:
        assert clipped == []
        assert [each["actions"] for each in done if each["actions"][0]["action"] == "clip-qk"] == []
        (passed,) = events(tmp_path / "a", "rung-passed-over")
        assert "the largest attention logit of 200 steps was" in passed.detail["reason"]
        return
    (once,) = done
    assert once["actions"] == [{"action": "clip-qk", "limit": LIMIT}]
    assert once["changed"] == "rescale queries and keys at logits of 3"
    assert once["margins"][0]["margin"] == "qk_clip"
    assert "in blocks.1" in once["margins"][0]["because"]
    assert clipped
    assert clipped[0] in range(23, 31)
    assert guard.loop.recovery is not None
    assert guard.loop.recovery.adjustments.qk_clip == LIMIT


def test_a_person_can_ask_for_it_and_it_survives_the_process(tmp_path: Path) -> None:
    options: dict[str, Any] = {"qk_clip": None, "checkpoint_every": 1000, "playbook": Playbook.observe()}
    model = model_of()
    with guarded(model, optimizer_of(model), tmp_path / "a", **options) as guard:
        run_to(guard, model, 12)
        guard.ask("clip-qk", "3", by="me")
        run_to(guard, model, 14)
        guard.checkpoint(wait=True)
    assert events(tmp_path / "a", "qk-clip") == []
    model = model_of()
    with guarded(model, optimizer_of(model), tmp_path / "a", resume=True, **options) as guard:
        run_to(guard, model, 17)
    assert [event.step for event in events(tmp_path / "a", "qk-clip")] == [15]
    normed = model_of(qk_norm=True)
    with guarded(normed, optimizer_of(normed), tmp_path / "b", **options) as guard:
        run_to(guard, normed, 3)
        with pytest.raises(ConfigError, match="it normalises queries and keys"):
            guard.ask("clip-qk", "3", by="me")


def subject() -> Subject:
    model = model_of()
    return Subject(model=model, optimizers=[optimizer_of(model)], loss=lambda batch: loss_of(model, batch))


@pytest.mark.filterwarnings("ignore::sealegs.errors.RunEndedBadly")
def test_a_capsule_is_run_again_with_what_was_rescaled(tmp_path: Path) -> None:
    bad, model = 34, model_of()
    with guarded(
        model,
        optimizer_of(model),
        tmp_path / "a",
        playbook=Playbook.observe(),
        checkpoint_every=Checkpointing(snapshot_every=20, snapshot_memory=2**28),
    ) as guard:
        for batch in guard.batches(texts()):
            loss = loss_of(model, batch) * (math.nan if guard.number == bad else 1.0)
            loss.backward()
            guard.step(loss)
            if guard.number > bad + 20:
                break
    capsule = open_capsule(tmp_path / "a" / "incidents" / f"step-{bad}")
    rerun = Rerun(capsule, subject(), capsule.state(), capsule.steps())
    clipped = {event.step for event in events(tmp_path / "a", "qk-clip")}
    again = range(rerun.steps.start, bad)
    assert clipped & set(again[:-1]), "some of it is run again"
    rerun.go_to(bad)
    assert [rerun.seen[step].loss for step in again] == [rerun.rows[step]["loss"] for step in again]


def test_what_cannot_be_rescaled_is_refused_before_there_is_a_folder(tmp_path: Path) -> None:
    model = model_of(qk_norm=True)
    with pytest.raises(ConfigError, match="it normalises queries and keys"):
        guarded(model, optimizer_of(model), tmp_path / "a")
    model = model_of()
    with pytest.raises(ConfigError, match="attention_logit=3: only sampled steps look at logits"):
        guarded(model, optimizer_of(model), tmp_path / "a", telemetry=Telemetry(sample_every=0))
    with pytest.raises(ConfigError, match=r"Clipping\.attention_logit=-1: the largest attention logit"):
        guarded(model, optimizer_of(model), tmp_path / "a", qk_clip=-1)
    assert not (tmp_path / "a").exists()
    by_hand = model_of(naive_softmax=True)
    with guarded(by_hand, optimizer_of(by_hand), tmp_path / "b") as guard:
        with pytest.raises(
            ConfigError, match=r"attention_logit=3: blocks\.0\.attention: it calls scaled_dot_product_attention 0"
        ):
            run_to(guard, by_hand, 20)
        assert guard.number == EVERY


@pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.long)])
def test_in_compiled_code_there_is_nothing_to_see_unless_sampled_steps_run_without(eager: bool, tmp_path: Path) -> None:
    model = model_of()
    compiled = torch.compile(model.losses, backend="eager")

    def run(guard: Guard) -> None:
        for batch in guard.batches(texts()):
            loss = compiled(batch[:, :-1], batch[:, 1:]).total / 48
            loss.backward()
            guard.step(loss.detach())
            if guard.number > 4 * EVERY:
                break

    loss_of(model, texts()[0])
    compiled(texts()[0][:, :-1], texts()[0][:, 1:])  # compiled without hooks
    sampler = ActivationSampler(model, force_eager=True) if eager else None
    telemetry = Telemetry(sample_every=EVERY, activations=sampler)
    with guarded(model, optimizer_of(model), tmp_path / "a", telemetry=telemetry) as guard:
        if eager:
            run(guard)
            assert events(tmp_path / "a", "qk-clip")
        else:
            with pytest.raises(ConfigError, match=r"no forward pass of its attention was seen \(as in compiled code\)"):
                run(guard)
            assert guard.number == 3 * EVERY


def test_the_labs_logits_that_a_fault_makes_grow_come_back_to_the_limit(tmp_path: Path) -> None:
    nano = SIZES["nano"]
    cadence = replace(nano.cadence, evaluate_steps=0, checkpoint_steps=0, evaluate_batches=2)
    fault = "weight-scale:factor=12,tensor=blocks.0.attention.query_key_value.weight,rows=2/3@41"
    settings = replace(nano, steps=71, threads=1, cadence=cadence, playbook="observe")
    settings = resolved(replace(settings, optimizer=replace(nano.optimizer, qk_clip=30.0)))
    largest = {}
    for shadow in (False, True):
        disturb = partial(disturbed, [parse(fault)], settings.model.vocabulary)
        here = tmp_path / str(shadow)
        train(replace(settings, shadow=shadow), open_data(settings), here, disturb=disturb)
        run = sealegs.open_run(here)
        column = run.column("attention_logit_max/blocks.0")
        largest[shadow] = dict(zip(run.steps.tolist(), column.tolist(), strict=True))
        first = events(here, "qk-clip")[0]
        assert first.step in range(42, 51)
        assert first.detail["acted"] is not shadow
        assert [each["module"] for each in first.detail["modules"]] == ["blocks.0.attention"]
    assert largest[True][40] == largest[False][40] < 30
    assert min(largest[True][step] for step in (50, 60, 70)) > 90
    assert max(largest[False][step] for step in (60, 70)) < 45, "and grows again between two looks"
