"""Loops of Accelerate, with a guard in them."""

import json
import math
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations import small
from tests.integrations.loop import STEPS, loss_of, parts, trained
from tests.integrations.small import NAN, SPIKE
from torch.utils.data import DataLoader

import sealegs
from sealegs.errors import ConfigError
from sealegs.guard_options import Checkpointing, Telemetry

pytestmark = pytest.mark.xdist_group("transformers")  # which has imported accelerate already
STANDARD = sealegs.Playbook.standard()


def accelerator(**options: Any) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True, **options)


def guarded(accelerator: Any, made: tuple[Any, ...], run: Path | None, **options: Any) -> Any:
    from sealegs.integrations import accelerate

    model, optimizer, _, scheduler = made
    return accelerate.attach(accelerator, model, optimizer, scheduler=scheduler, run=run, **options)


def end_of(made: tuple[Any, ...]) -> tuple[str, list[float]]:
    model, optimizer, _, scheduler = made
    return small.digest(model, optimizer.optimizer), scheduler.get_last_lr()


@pytest.mark.parametrize("playbook", [None, STANDARD], ids=["none", "standard"])
@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.integration("Accelerate")
@pytest.mark.conforms("unchanged")
def test_where_nothing_happens_nothing_is_changed(accumulated: int, playbook: Any, tmp_path: Path) -> None:
    """Sixteen batches an epoch: of three micro-batches a step, the last of each epoch has one."""
    alone = accelerator(gradient_accumulation_steps=accumulated)
    made = parts(alone)
    trained(alone, made)
    beside = accelerator(gradient_accumulation_steps=accumulated)
    again = parts(beside)
    with guarded(beside, again, tmp_path / "run", playbook=playbook) as guard:
        trained(beside, again, guard)
    assert end_of(again) == end_of(made)
    run = sealegs.open_run(tmp_path / "run")
    assert run.steps.tolist() == list(range(STEPS))
    assert "clip_grad_norm_" not in vars(beside)


@pytest.mark.integration("Accelerate")
@pytest.mark.conforms("nan", "spike")
def test_a_skip_changes_no_bit_and_verdicts_are_those_of_a_loop_by_hand(tmp_path: Path) -> None:
    ours = accelerator()
    made = parts(ours)
    model, optimizer, loader, scheduler = made
    found: list[tuple[str, bool]] = []
    digests: list[str] = []
    with guarded(ours, made, tmp_path / "run") as guard, small.broken(model, lambda: guard.number):
        trained(
            ours,
            made,
            guard,
            before=lambda: digests.append(small.digest(model, optimizer.optimizer)),
            after=lambda: found.append((small.digest(model, optimizer.optimizer), ours.optimizer_step_was_skipped)),
        )
    assert [step for step, (after, _) in enumerate(found) if after == digests[step]] == [NAN, SPIKE]
    assert [step for step, (_, is_skipped) in enumerate(found) if is_skipped] == [NAN, SPIKE]
    assert scheduler.get_last_lr() == pytest.approx([1e-2 * 0.98**STEPS])

    theirs = accelerator()
    model, optimizer, loader, scheduler = parts(theirs)
    options: dict[str, Any] = {"scheduler": scheduler.scheduler, "run": tmp_path / "by-hand"}
    with sealegs.Guard(model, optimizer.optimizer, **options) as by_hand, small.broken(model, lambda: by_hand.number):
        while by_hand.number < STEPS:
            for batch in loader:
                loss = loss_of(model, batch)
                loss.backward()
                by_hand.before_clipping(0.5)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                by_hand.step(loss)
                if by_hand.number == STEPS:
                    break
    assert small.digest(model, optimizer.optimizer) == found[-1][0]
    assert set(sealegs.open_run(tmp_path / "run").column("clip_norm")) == {0.5}
    texts = [
        [event.detail["text"] for event in sealegs.open_run(tmp_path / name).events if "findings" in event.detail]
        for name in ("run", "by-hand")
    ]
    assert texts[0] == texts[1]
    assert [f"step {step}  SKIP" in text for step, text in zip((NAN, SPIKE), texts[0], strict=True)] == [True, True]


@pytest.mark.integration("Accelerate")
@pytest.mark.conforms("accumulation")
def test_the_loss_of_a_step_is_the_mean_of_its_micro_batches(tmp_path: Path) -> None:
    ours = accelerator(gradient_accumulation_steps=2)
    made = parts(ours)
    with guarded(ours, made, tmp_path / "run", telemetry=Telemetry(sample_every=0)) as guard:
        means = []
        losses: list[float] = []
        for batch in guard.batches(made[2]):
            with ours.accumulate(made[0]):
                loss = loss_of(made[0], batch)
                ours.backward(loss)
                losses.append(loss.item())
                before = guard.number
                guard.step(loss, tokens=4, grad_norm=2.0, token_losses=torch.full((4,), 0.5))
                assert guard.number == before + ours.sync_gradients
            if ours.sync_gradients:
                means.append(sum(losses) / 2)
                losses.clear()
    run = sealegs.open_run(tmp_path / "run")
    assert run.column("loss").tolist() == pytest.approx(means, rel=1e-6)
    assert len(means) == 8
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {row["grad_norm"] for row in rows} == {2.0}
    assert sum(map(int, rows[0]["token_loss_histogram"].split())) == 4
    assert guard.loop._inputs.pace.tokens == 8 * 8, "of all micro-batches"


def by_value(ours: Any, model: Any) -> None:
    ours.clip_grad_value_(model.parameters(), 1e-4)


def in_several_calls(ours: Any, model: Any) -> None:
    for parameter in model.parameters():
        ours.clip_grad_norm_([parameter], 1e-4)


@pytest.mark.parametrize("clip", [by_value, in_several_calls])
def test_the_norm_is_that_of_gradients_before_they_are_clipped(clip: Any, tmp_path: Path) -> None:
    """Those of the guard's own model: another one's are clipped before it has any."""
    ours = accelerator()
    made = parts(ours)
    other = ours.prepare(torch.nn.Linear(4, 1))
    norms = []
    with guarded(ours, made, tmp_path / "run", telemetry=Telemetry(sample_every=0)) as guard:
        for batch in guard.batches(made[2]):
            with ours.accumulate(made[0]):
                ours.backward(other(torch.ones(4)).sum())
                ours.clip_grad_norm_(other.parameters(), 1.0)
                loss = loss_of(made[0], batch)
                ours.backward(loss)
                norms.append(float(torch.nn.utils.get_total_norm(p.grad for p in made[0].parameters())))
                clip(ours, made[0])
                guard.step(loss)
    run = sealegs.open_run(tmp_path / "run")
    assert run.column("grad_norm") == pytest.approx(norms, rel=1e-5)
    assert "clip_norm" not in run.signals, "nothing bounds all of them together"
    assert "clip_grad_value_" not in vars(ours)


@pytest.mark.parametrize("playbook", [None, STANDARD], ids=["none", "standard"])
def test_a_state_is_loaded_at_the_end_of_a_script(playbook: Any, tmp_path: Path) -> None:
    """The best one, to be evaluated."""
    ours = accelerator(project_dir=str(tmp_path))
    made = parts(ours)
    with guarded(ours, made, tmp_path / "run", playbook=playbook) as guard:
        ours.register_for_checkpointing(guard)

        def save() -> None:
            if guard.number == 10:
                ours.save_state(str(tmp_path / "saved"))

        trained(ours, made, guard, after=save)
        ours.load_state(str(tmp_path / "saved"))
        assert guard.number == 10


@pytest.mark.parametrize("at", [10, 16])
@pytest.mark.integration("Accelerate")
@pytest.mark.conforms("resume")
def test_a_resume_goes_on_bit_for_bit(at: int, tmp_path: Path) -> None:
    """In the middle of an epoch, and at its end."""
    whole = accelerator(project_dir=str(tmp_path))
    made = parts(whole)
    kept: list[Any] = []

    def save() -> None:
        guard.loop.checkpoints.wait()  # so that none comes later than it is due, on a slow disk
        if guard.number == at:
            kept.append(guard.watch.state_dict())
            whole.save_state(str(tmp_path / "saved"))

    options: dict[str, Any] = {"playbook": STANDARD, "checkpoint_every": at + 2}
    with guarded(whole, made, tmp_path / "run", **options) as guard:
        whole.register_for_checkpointing(guard)
        trained(whole, made, guard, steps=at + 4, after=save)
    half = accelerator(project_dir=str(tmp_path))
    again = parts(half)
    with guarded(half, again, tmp_path / "run", resume=True, **options) as guard:
        half.register_for_checkpointing(guard)
        half.load_state(str(tmp_path / "saved"))
        assert guard.number == at
        assert guard.watch.state_dict() == kept[0], "the memory of the detectors too"
        assert guard.loop.checkpoints.tags()[at + 2] == "suspect", "of another line"
        trained(half, again, guard, done=at)
    uninterrupted = accelerator()
    alone = parts(uninterrupted)
    trained(uninterrupted, alone)
    assert end_of(again) == end_of(alone)
    assert sealegs.open_run(tmp_path / "run").column("batch_index").tolist() == list(range(STEPS))


class Counting:
    """A batch sampler that has another order each epoch, counts them by itself, and can be told them."""

    batch_size, drop_last = 4, False

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(64, generator=torch.Generator().manual_seed(self.epoch))
        yield from (indices.tolist() for indices in order.split(4))
        self.epoch += 1


def ordered(kind: str) -> Any:
    """Rows by number, in a loader that Accelerate has prepared; a divided one has half of them, as the second rank."""
    from accelerate.data_loader import prepare_data_loader

    rows: Any = torch.arange(64)
    torch.manual_seed(0)
    if kind == "divided":
        return prepare_data_loader(DataLoader(rows, batch_sampler=Counting()), num_processes=2, process_index=1)
    return prepare_data_loader(DataLoader(rows, 4, shuffle=True), use_seedable_sampler=True)


def numbers(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("kind", ["seeded", "divided"])
def test_a_sampler_that_counts_epochs_is_told_where_a_resume_is(kind: str) -> None:
    """From the second epoch: the third has the order that it would have had."""
    ours = accelerator()
    made = parts(ours)
    alone = ordered(kind)
    epochs = [numbers(alone) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    with guarded(ours, made, None, playbook=STANDARD) as guard:
        loader = ordered(kind)
        assert numbers(guard.batches(loader)) == epochs[0]
        assert numbers(islice(guard.batches(loader), 3)) == epochs[1][:3]
        state = guard.state_dict()
    with guarded(ours, made, None, playbook=STANDARD) as guard:
        guard.load_state_dict(state)
        loader = ordered(kind)
        assert numbers(guard.batches(loader)) == epochs[1][3:]
        assert numbers(guard.batches(loader)) == epochs[2]


def test_a_loader_that_was_told_its_epoch_goes_on_from_there() -> None:
    """As by those who resume without the guard's state."""
    ours = accelerator()
    alone, loader = ordered("seeded"), ordered("seeded")
    alone.set_epoch(3)
    loader.set_epoch(3)
    with guarded(ours, parts(ours), None, playbook=STANDARD) as guard:
        for _ in range(2):
            assert numbers(guard.batches(loader)) == numbers(alone)
    assert loader.iteration == alone.iteration == 5


@pytest.mark.integration("Accelerate")
@pytest.mark.conforms("rollback")
def test_damage_is_gone_back_behind(tmp_path: Path) -> None:
    ours = accelerator()
    made = parts(ours)
    model = made[0]
    is_damaged = False

    def damage() -> None:
        nonlocal is_damaged
        if guard.number == 70 and not is_damaged:
            is_damaged = True
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.data.mul_(30.0)

    with guarded(
        ours, made, tmp_path / "run", playbook=STANDARD, checkpoint_every=Checkpointing(snapshot_every=20)
    ) as guard:
        trained(ours, made, guard, steps=110, after=damage)
    run = sealegs.open_run(tmp_path / "run")
    interventions = [event.detail for event in run.events if event.kind == "intervention"]
    assert [(each["trigger"], each["acted"]) for each in interventions] == [("damaged", True)]
    assert run.steps[-1] == 109
    assert run.column("loss")[-1] < run.column("loss")[0]
    assert made[3].get_last_lr() == pytest.approx([1e-2 * 0.98**110]), "the schedule went back, too"
    assert ours.gradient_state.active_dataloader is None, "no loader is gone through any more"


def scaling() -> Any:
    """Accelerate makes no scaler on a CPU: this is torch's own, put where Accelerate would have put it."""
    ours = accelerator()
    ours.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=1000)
    ours.native_amp, ours.state._mixed_precision = True, "fp16"
    return ours


def test_a_scaler_overflows_and_the_guard_unscales_once(tmp_path: Path) -> None:
    ours = scaling()
    made = parts(ours)
    fault = ("gradient-scale:factor=1e38@6",)
    with guarded(ours, made, tmp_path / "run") as guard, small.broken(made[0], lambda: guard.number, fault):
        trained(ours, made, guard, steps=12)
    run = sealegs.open_run(tmp_path / "run")
    assert not math.isfinite(run.column("grad_norm")[6])
    assert run.column("loss_scale")[[0, 6, 7]].tolist() == [2.0**16, 2.0**16, 2.0**15]
    assert "unscale_gradients" not in vars(ours)
    assert max(run.column("grad_norm")[:6]) < 100, "unscaled"


def trained_in_turn(*, has_guard: bool) -> list[str]:
    """One half of a GAN has a guard, the other is clipped and stepped as ever, before it."""
    ours = scaling()
    made = parts(ours)
    model, optimizer, loader, scheduler = made
    torch.manual_seed(1)
    other = torch.nn.Linear(3, 1)
    of_other = ours.prepare(torch.optim.AdamW(other.parameters()))
    with guarded(ours, made, None) if has_guard else nullcontext() as guard:
        for batch in loader:
            ours.backward(other(torch.ones(2, 3)).square().mean())
            assert ours.clip_grad_norm_(other.parameters(), 0.5) < 100, "unscaled"
            of_other.step()
            of_other.zero_grad()
            loss = loss_of(model, batch)
            ours.backward(loss)
            ours.clip_grad_norm_(model.parameters(), 0.5)
            if guard is not None:
                guard.step(loss)
            else:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return [small.digest(other, of_other.optimizer), small.digest(model, optimizer.optimizer)]


def test_optimizers_that_are_not_the_guards_are_unscaled_as_ever() -> None:
    assert trained_in_turn(has_guard=True) == trained_in_turn(has_guard=False)


def test_a_batch_that_is_tried_again_leaves_other_optimizers_their_loss_scale(tmp_path: Path) -> None:
    ours = scaling()
    made = parts(ours)
    model, _, loader, _ = made
    other = torch.nn.Linear(3, 1)
    of_other = ours.prepare(torch.optim.SGD(other.parameters(), lr=1e-3))
    norms = []
    with guarded(ours, made, tmp_path / "run", playbook=STANDARD) as guard:
        while guard.number < 240:
            for batch in guard.batches(loader):
                is_bad = 200 <= guard.number < 210 and not guard.loop.data.is_probe  # once a loss is judged
                loss = loss_of(model, batch) * (30.0 if is_bad else 1.0)
                ours.backward(loss)
                ours.clip_grad_norm_(model.parameters(), 0.5)
                guard.step(loss)
                ours.backward(other(torch.ones(2, 3)).square().mean())
                norms.append(float(ours.clip_grad_norm_(other.parameters(), 1e9)))
                of_other.step()
                of_other.zero_grad()
    assert any(event.kind == "probe" for event in sealegs.open_run(tmp_path / "run").events)
    assert max(norms) <= 1.01 * norms[0], "unscaled, each time"


def test_what_is_not_prepared_is_refused(tmp_path: Path) -> None:
    from sealegs.integrations import accelerate

    ours = accelerator()
    model, optimizer, _, scheduler = parts(ours)
    for odd, options, says in (
        (optimizer.optimizer, {}, "optimizer=AdamW: give what accelerator.prepare made of it"),
        (optimizer, {"scheduler": scheduler.scheduler}, "scheduler=StepLR: give what accelerator.prepare"),
        (optimizer, {"scaler": None}, "scaler=None: it is the accelerator's"),
        (optimizer, {"checkpoint_every": -1}, "checkpoint_every=-1"),
    ):
        with pytest.raises(ConfigError, match=says):
            accelerate.attach(ours, model, odd, run=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
    plateau = ours.prepare(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer.optimizer))
    with pytest.raises(ConfigError, match="scheduler=ReduceLROnPlateau: it waits for a metric"):
        accelerate.attach(ours, model, optimizer, run=None, scheduler=plateau)


def test_a_loop_that_fails_leaves_its_error_in_the_folder(tmp_path: Path) -> None:
    ours = accelerator()
    made = parts(ours)

    def stop() -> None:
        if guard.number == 3:
            raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"), guarded(ours, made, tmp_path / "run") as guard:
        trained(ours, made, guard, before=stop)
    end = sealegs.open_run(tmp_path / "run").events[-1]
    assert (end.kind, end.step, end.detail["reason"]) == ("end", 2, "failed")
    assert end.detail["error"] == "ValueError: no more"
    assert "clip_grad_norm_" not in vars(ours)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("DEEPSPEED", r"sealegs.integrations.deepspeed.attach\(model\)"),
        ("MEGATRON_LM", "its engine updates the weights out of a guard's reach"),
        ("XLA", "its engine updates the weights out of a guard's reach"),
    ],
)
def test_engines_that_update_by_themselves_are_refused(
    kind: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not installed: what an accelerator of theirs says of itself is all that is looked at."""
    from accelerate import DistributedType

    ours = accelerator()
    made = parts(ours)
    monkeypatch.setattr(ours.state, "distributed_type", DistributedType[kind])
    with pytest.raises(ConfigError, match=says):
        guarded(ours, made, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_two_guards_of_one_accelerator_see_their_own_gradients_and_leave_in_any_order(tmp_path: Path) -> None:
    """As a GAN has them: only one model is clipped, and gradients are zeroed in their place."""
    from sealegs.integrations import accelerate

    ours = accelerator()
    torch.manual_seed(0)
    models = [torch.nn.Linear(4, 2) for _ in range(2)]
    prepared = [ours.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    guards = [accelerate.attach(ours, *each, run=tmp_path / str(k)) for k, each in enumerate(prepared)]
    norms: list[list[float]] = [[], []]
    for step in range(3):
        for k, (guard, (model, optimizer)) in enumerate(zip(guards, prepared, strict=True)):
            loss = model(torch.ones(3, 4)).square().mean() * (2.0 ** (step + 1))
            ours.backward(loss)
            grads = [each.grad for each in model.parameters()]
            norms[k].append(float(torch.nn.utils.get_total_norm(grads)))
            if k == 0:
                ours.clip_grad_norm_(model.parameters(), 1.0)
            guard.step(loss)
            optimizer.zero_grad(set_to_none=False)
    for guard in guards:
        guard.close()
    for k in range(2):
        assert sealegs.open_run(tmp_path / str(k)).column("grad_norm").tolist() == pytest.approx(norms[k], rel=1e-5)
    loss = prepared[0][0](torch.ones(3, 4)).sum()
    ours.backward(loss)
    assert float(ours.clip_grad_norm_(prepared[0][0].parameters(), 1.0)) > 0, "nobody who has gone is asked"
