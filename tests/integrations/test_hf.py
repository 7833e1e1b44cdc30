"""The Trainer of transformers itself, with a guard in its loop."""

import errno
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations import small
from tests.integrations.small import NAN, SPIKE, STEPS

import sealegs
from sealegs.cli import check
from sealegs.errors import ConfigError, RunHalted, SourceError
from sealegs.guard_options import Checkpointing
from sealegs.record.requests import FOLDER as REQUESTS
from sealegs.recovery.ledger import read_ledger
from sealegs.recovery.requests import ASK_EVERY_S

pytestmark = pytest.mark.xdist_group("transformers")  # importing it takes ten seconds
PLAYBOOKS = {"none": None, "standard": sealegs.Playbook.standard()}
Digests = list[tuple[int, str, str, bool]]
FAULT_OF_SCALE = (f"gradient-scale:factor=1000@{SPIKE}",)


def watching(trainer: Any, found: Digests, act: Callable[[int], None] = lambda step: None) -> None:
    """Before and after each update: all that it may change, and whether the Trainer is told of a skip."""
    from transformers import TrainerCallback

    class Looking(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.before = ""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            act(state.global_step)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.before = small.digest(trainer.model, trainer.optimizer.optimizer)

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            after = small.digest(trainer.model, trainer.optimizer.optimizer)
            found.append((len(found), self.before, after, trainer.accelerator.optimizer_step_was_skipped))

    trainer.add_callback(Looking())


def noting_rates(trainer: Any) -> list[float]:
    """The learning rate, as it is told before each step."""
    from transformers import TrainerCallback

    rates: list[float] = []

    class Asking(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            rates.extend(trainer.lr_scheduler.get_last_lr()[:1])

    trainer.add_callback(Asking())
    return rates


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the Trainer does by itself."""
    trainer = small.trainer(tmp_path_factory.mktemp("plain"))
    trainer.rates = noting_rates(trainer)
    trainer.train()
    return trainer


@pytest.mark.parametrize("playbook", PLAYBOOKS)
@pytest.mark.integration("Hugging Face Trainer")
@pytest.mark.conforms("unchanged")
def test_where_nothing_happens_nothing_is_changed(playbook: str, plain: Any, tmp_path: Path) -> None:
    trainer = small.trainer(tmp_path / "out")
    before = set(vars(trainer))
    attached = small.attached(trainer, tmp_path / "run", playbook=PLAYBOOKS[playbook])
    rates = noting_rates(trainer)
    trainer.train()
    assert small.digest(trainer.model, trainer.optimizer.optimizer) == small.digest(
        plain.model, plain.optimizer.optimizer
    )
    assert small.logged(trainer) == small.logged(plain)
    assert rates == plain.rates
    assert trainer.state.epoch == plain.state.epoch
    assert trainer.lr_scheduler.state_dict() == plain.lr_scheduler.state_dict()
    attached.detach()
    assert not {name for name in set(vars(trainer)) - before if callable(vars(trainer)[name])}
    run = sealegs.open_run(tmp_path / "run")
    assert run.steps.tolist() == list(range(STEPS))
    assert not [event for event in run.events if event.kind in ("skip", "alarm", "step-incomplete")]


@pytest.fixture(scope="module")
def faulted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Digests]:
    """Thirty steps in order, with a NaN and a spike."""
    folder = tmp_path_factory.mktemp("faulted")
    trainer = small.trainer(folder / "out", train_sampling_strategy="sequential")
    attached = small.attached(trainer, folder / "run")
    found: Digests = []
    watching(trainer, found)
    with small.broken(trainer.model, lambda: attached.guard.number):
        trainer.train()
    return trainer, folder / "run", found


@pytest.mark.integration("Hugging Face Trainer")
@pytest.mark.conforms("nan", "spike")
def test_a_skip_changes_no_bit(faulted: tuple[Any, Path, Digests], plain: Any) -> None:
    trainer, _, found = faulted
    assert [step for step, before, after, _ in found if before == after] == [NAN, SPIKE]
    assert [step for step, *_, is_skipped in found if is_skipped] == [NAN, SPIKE]
    assert trainer.state.global_step == STEPS == len(found)
    assert trainer.lr_scheduler.last_epoch == plain.lr_scheduler.last_epoch, "the schedule counts attempts"


def test_the_run_folder_is_complete(faulted: tuple[Any, Path, Digests], capsys: pytest.CaptureFixture[str]) -> None:
    _, folder, _ = faulted
    run = sealegs.open_run(folder)
    assert run.steps.tolist() == list(range(STEPS))
    skips = {event.step: event.detail["text"] for event in run.events if event.kind == "skip"}
    assert list(skips) == [NAN, SPIKE]
    assert "grad_norm is not finite: nan  in model." in skips[NAN], "the tensor at fault is named"
    assert "grad_norm spike" in skips[SPIKE]
    assert math.isnan(run.column("grad_norm")[NAN])
    assert run.column("grad_norm")[SPIKE] > 50, "before clipping"
    assert run.column("lr")[:6] == pytest.approx([0, 2e-3, 4e-3, 6e-3, 8e-3, 1e-2])
    assert run.column("batch_index").tolist() == list(range(STEPS))
    assert (run.column("tokens_per_s")[run.logged("tokens_per_s")] > 0).all()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["settings"]["training_args"]["learning_rate"] == 1e-2
    framework = next(event for event in run.events if event.kind == "framework")
    assert framework.detail["name"] == "transformers.Trainer"
    assert check.main([str(folder)]) == 0
    assert f"not finite at step {NAN}" in " ".join(capsys.readouterr().out.split())


def test_verdicts_and_weights_are_those_of_a_loop_by_hand(faulted: tuple[Any, Path, Digests], tmp_path: Path) -> None:
    trainer, folder, _ = faulted
    model = small.llama().train()
    made = small.trainer(tmp_path / "out", model=model)
    optimizer = made.create_optimizer()
    scheduler = made.create_scheduler(STEPS, optimizer)
    batches = small.rows().split(4)
    by_hand = sealegs.Guard(model, optimizer, run=tmp_path / "run", scheduler=scheduler)
    with by_hand as guard, small.broken(model, lambda: guard.number):
        for step in range(STEPS):
            ids = batches[step % 16]
            loss = model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(ids[:, 1:].numel())).loss
            loss.backward()
            guard.before_clipping(1.0)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            guard.step(loss)
    assert small.digest(model, optimizer) == small.digest(trainer.model, trainer.optimizer.optimizer)
    texts = [
        [
            event.detail["text"]
            for event in sealegs.open_run(one).events
            if "findings" in event.detail and event.kind != "preflight"
        ]
        for one in (folder, tmp_path / "run")
    ]
    assert texts[0] == texts[1] != []
    assert [set(sealegs.open_run(one).column("clip_norm")) for one in (folder, tmp_path / "run")] == [{1.0}, {1.0}]


def test_a_step_is_decided_before_the_trainer_waits_for_its_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the host does after that wait, a device waits for."""
    trainer = small.trainer(tmp_path / "out", max_steps=3, logging_nan_inf_filter=True)
    attached = small.attached(trainer, tmp_path / "run")
    known: list[int] = []
    isnan = torch.isnan

    def asked(loss: Any) -> Any:
        if sys._getframe(1).f_globals["__name__"] == "transformers.trainer":
            known.append(attached.guard.watch.verdict.step)
        return isnan(loss)

    monkeypatch.setattr(torch, "isnan", asked)
    trainer.train()
    assert known == [0, 1, 2]


def remembered(guard: sealegs.Guard) -> dict[str, Any]:
    """All that the next verdicts depend on, but for how fast this machine was."""
    state = guard.state_dict()
    at = state["watch"]["detectors"].index("throughput")
    state["watch"]["state"][0].pop(at)
    del state["spent"]
    if (recovery := state.get("recovery")) is not None:
        del recovery["spent"]["seconds"]
    return state


@pytest.mark.parametrize(("playbook", "at"), [("none", 8), ("standard", 16), ("standard", 24)])
@pytest.mark.integration("Hugging Face Trainer")
@pytest.mark.conforms("resume")
def test_a_resume_goes_on_bit_for_bit(playbook: str, at: int, tmp_path: Path) -> None:
    """From the middle of an epoch, and from its end; the memory of the detectors too."""
    options: dict[str, Any] = {"playbook": PLAYBOOKS[playbook], "checkpoint_every": Checkpointing(snapshot_every=20)}
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 8, "logging_steps": 8}
    whole = small.trainer(tmp_path / "out", **settings)
    attached = small.attached(whole, tmp_path / "whole", **options)
    with small.broken(whole.model, lambda: attached.guard.number, (f"nan-gradient@{at - 4}",)):
        whole.train()
    state = remembered(attached.guard)

    half = small.trainer(tmp_path / "out", **settings)
    (tmp_path / "whole").rename(tmp_path / "resumed")
    attached = small.attached(half, tmp_path / "resumed", **options)
    half.train(resume_from_checkpoint=str(tmp_path / "out" / f"checkpoint-{at}"))
    assert small.digest(half.model, half.optimizer.optimizer) == small.digest(whole.model, whole.optimizer.optimizer)
    assert remembered(attached.guard) == state
    assert small.logged(half)[:-1] == small.logged(whole)[:-1]
    run = sealegs.open_run(tmp_path / "resumed")
    assert run.steps.tolist() == list(range(STEPS))
    resumed = next(event for event in run.events if event.kind == "resumed")
    assert (resumed.step, resumed.detail["with_guard"]) == (at, True)


def test_a_checkpoint_without_a_guard_is_gone_on_with(plain: Any, tmp_path: Path) -> None:
    """Also with a playbook, which has to know where the data are."""
    small_settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 20}
    small.trainer(tmp_path / "out", **small_settings).train()
    trainer = small.trainer(tmp_path / "out", **small_settings)
    attached = small.attached(trainer, tmp_path / "run", playbook=PLAYBOOKS["standard"])
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-20"))
    assert small.digest(trainer.model) == small.digest(plain.model)
    run = sealegs.open_run(tmp_path / "run")
    assert run.steps.tolist() == list(range(20, STEPS))
    assert run.column("batch_index").tolist() == list(range(20, STEPS))
    (tmp_path / "out" / "checkpoint-20" / "sealegs.json").write_text("[")
    attached.detach()
    again = small.trainer(tmp_path / "out", **small_settings)
    small.attached(again, tmp_path / "another")
    with pytest.raises(SourceError, match=r"sealegs\.json: cannot be read"):
        again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-20"))


def stale(guard: sealegs.Guard) -> list[int]:
    """Checkpoints of the guard's own that it would not go back to."""
    assert guard.loop.checkpoints is not None
    return [step for step, tag in guard.loop.checkpoints.tags().items() if tag == "suspect"]


@pytest.mark.integration("Hugging Face Trainer")
@pytest.mark.conforms("rollback")
def test_damage_is_gone_back_behind(tmp_path: Path) -> None:
    """Over the ends of epochs; every step that was planned is made, and the Trainer's numbers are the guard's."""
    steps, damaged = 120, 70
    settings: dict[str, Any] = {"max_steps": steps, "learning_rate": 3e-3, "save_strategy": "steps", "save_steps": 40}
    settings["logging_steps"] = 7
    options: dict[str, Any] = {
        "playbook": PLAYBOOKS["standard"],
        "checkpoint_every": Checkpointing(every=40, snapshot_every=20),
    }
    trainer = small.trainer(tmp_path / "out", **settings)
    attached = small.attached(trainer, tmp_path / "run", **options)
    found: Digests = []
    numbers: list[int] = []

    def damage(step: int) -> None:
        if step == damaged and step not in numbers:
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    parameter.data.mul_(8.0)
        numbers.append(step)

    watching(trainer, found, damage)
    trainer.train()
    run = sealegs.open_run(tmp_path / "run")
    interventions = [event.detail for event in run.events if event.kind == "intervention"]
    assert [(each["trigger"], each["acted"]) for each in interventions] == [("damaged", True)]
    back = interventions[0]["to_step"]
    assert 0 < back < damaged
    assert any(event.kind == "probe" for event in run.events)
    assert trainer.state.global_step == attached.guard.number == steps
    assert (tmp_path / "out" / f"checkpoint-{steps}" / "sealegs.json").is_file()
    # the numbers are those of the guard's record, and what it went back to is what it was, to the bit
    assert any(after < before for before, after in pairwise(numbers))
    first, second = [at for at, number in enumerate(numbers) if number == back][:2]
    assert found[first][1] == found[second][1]
    assert trainer.lr_scheduler.last_epoch == steps
    assert run.column("loss")[-10:].mean() < run.column("loss")[:10].mean()
    told = [entry for entry in trainer.state.log_history if "loss" in entry]
    turn = next(at for at, (one, other) in enumerate(pairwise(told), 1) if other["step"] <= one["step"])
    assert back % 7, "in the middle of what is averaged"
    assert [entry["step"] for entry in told[turn:]] == [*range(back - back % 7 + 7, steps, 7)]
    means = [float(run.column("loss")[entry["step"] - 7 : entry["step"]].mean()) for entry in told[turn:]]
    assert [entry["loss"] for entry in told[turn:]] == pytest.approx(means, rel=1e-4)

    # a checkpoint from after the rollback: batches that were left out are not where the Trainer would look for them
    ledger = read_ledger(tmp_path / "run")
    assert ledger is not None
    assert ledger["interventions"] == 1
    resumed = small.trainer(tmp_path / "out", **settings)
    going_on = small.attached(resumed, tmp_path / "run", **options)
    known: list[Any] = []
    watching(
        resumed, [], lambda step: known.append((going_on.guard.loop.recovery.bookkeeping(), *stale(going_on.guard)))
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-80"))
    assert small.digest(resumed.model, resumed.optimizer.optimizer) == found[-1][2]
    assert known[0] == (ledger, steps), (
        "what was done is not forgotten, and what comes after step 80 is of another line"
    )


@pytest.mark.parametrize(("who", "at"), [("code", 12), ("a person", 19)])
def test_what_the_trainer_counts_and_logs_goes_back_with_it(who: str, at: int, tmp_path: Path) -> None:
    """Code asks in the middle of what is averaged for the log, a person at the last step; nothing is proven yet, so it
    begins again."""
    from transformers import TrainerCallback

    persons: list[subprocess.Popen[bytes]] = []
    begun: list[int] = []
    saved: list[int] = []

    class Asking(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            begun.append(state.global_step)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            saved.append(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if len(begun) != at:
                return
            if who == "code":
                attached.guard.ask("rollback", "10")
                return
            program = str(Path(sys.executable).with_name("sealegs"))
            persons.append(subprocess.Popen([program, "do", str(tmp_path / "run"), "rollback", "10"]))
            while not list((tmp_path / "run" / REQUESTS).glob("*.json")) and persons[0].poll() is None:
                time.sleep(0.01)
            time.sleep(ASK_EVERY_S)  # after which the folder is looked at

    trainer = small.trainer(tmp_path / "out", max_steps=20, save_strategy="steps", save_steps=4)
    attached = small.attached(trainer, tmp_path / "run", playbook=PLAYBOOKS["standard"])
    trainer.add_callback(Asking())
    trainer.train()
    assert [person.wait() for person in persons] == [0] * (who == "a person")
    turn = at if who == "code" else at + 1
    assert begun == [*range(turn), *range(20)]
    assert (trainer.state.global_step, trainer.state.epoch) == (20, 20 / 16)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == begun
    told = [entry for entry in trainer.state.log_history if "loss" in entry]
    before = range(5, turn, 5)  # what is given up is neither logged nor saved
    assert [entry["step"] for entry in told] == [*before, 5, 10, 15, 20]
    assert saved == [*range(4, turn, 4), 4, 8, 12, 16, 20]
    ends = [*before, *range(turn + 5, turn + 21, 5)]
    means = [sum(row["loss"] for row in rows[end - 5 : end]) / 5 for end in ends]
    assert [entry["loss"] for entry in told] == pytest.approx(means, rel=1e-4)
    in_all = sum(row["loss"] for row in rows[turn:]) / 20
    assert trainer.state.log_history[-1]["train_loss"] == pytest.approx(in_all, rel=1e-4)


def test_an_average_in_a_callback_is_named_or_goes_back_with_the_weights(tmp_path: Path) -> None:
    from torch.optim.swa_utils import AveragedModel
    from transformers import TrainerCallback

    class Averaging(TrainerCallback):  # type: ignore[misc]
        """Beside it what callbacks keep that follows nothing: scores, and their trainer."""

        def __init__(self, trainer: Any) -> None:
            self.trainer, self.best, self.losses = trainer, torch.tensor(1.0), [torch.zeros(7)]
            self.ema = AveragedModel(trainer.model)
            self.seen: list[tuple[int, str, str]] = []

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.seen.append((state.global_step, small.digest(self.trainer.model), small.digest(self.ema)))

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.ema.update_parameters(self.trainer.model)
            if len(self.seen) == 18:
                attached.guard.ask("rollback", "10")

    for is_kept in (False, True):
        trainer = small.trainer(tmp_path / "out", max_steps=20)
        trainer.add_callback(averaging := Averaging(trainer))
        keeps = Checkpointing(snapshot_every=4, also={"ema": averaging.ema} if is_kept else {})
        run = tmp_path / f"run-{is_kept}"
        attached = small.attached(trainer, run, playbook=PLAYBOOKS["standard"], checkpoint_every=keeps)
        trainer.train()
        told = [] if is_kept else ["Averaging, which is called by the trainer at each step"]
        (joined,) = [event.detail for event in sealegs.open_run(run).events if event.kind == "guard"]
        assert joined["not_restored"] == told
        advised = [each.found for each in attached.advice.findings if each.code == "STA9"]
        assert advised == [f"in no state: {each}" for each in told]
        before, after = averaging.seen[:18], averaging.seen[18:]
        back, weights, average = after[0]
        then = next(seen for seen in before if seen[0] == back)
        assert weights == then[1]
        assert (average == then[2]) == is_kept


def test_batches_that_are_left_out_cost_no_step(tmp_path: Path) -> None:
    """Fifteen micro-batches an epoch, four a step, one left out: two that make no whole step are no part of the next.
    Two epochs are one step short of what was planned, for which there is a third, in an order of its own."""
    data = [{"input_ids": row, "labels": row} for row in small.rows(60)]

    def hashes(name: str, max_steps: int, **options: Any) -> list[str]:
        trainer = small.trainer(tmp_path / "out", data=data, max_steps=max_steps, gradient_accumulation_steps=4)
        small.attached(trainer, tmp_path / name, **options)
        trainer.train()
        assert trainer.state.global_step == max_steps
        rows = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(row)["batch_hash"] for row in rows]

    whole = hashes("whole", 9)
    for name, playbook in PLAYBOOKS.items():
        assert hashes(name, 8, playbook=playbook, skip=((1, 2),))[3:] == whole[4:], "all of the epochs that come after"
        run = sealegs.open_run(tmp_path / name)
        assert run.column("batch_index").tolist() == [4, 8, 12, 18, 22, 26, 29, 33]
        (left,) = (event.detail for event in run.events if event.kind == "step-incomplete")
        assert (left["left_out"], left["of"]) == (2, 3)
        assert max(run.column("loss")) < 1.1 * run.column("loss")[0], "of its own micro-batches alone"


def test_steps_that_are_counted_back_are_made_after_all(tmp_path: Path) -> None:
    """Seven gradients that explode: a batch from before is tried, the weights are sound, and a fifth epoch has what is
    missing."""
    trainer = small.trainer(tmp_path / "out", max_steps=64, learning_rate=3e-3)
    attached = small.attached(trainer, tmp_path / "run", playbook=PLAYBOOKS["standard"])
    batch = lambda: -1 if attached.guard.loop.data.is_probe else attached.guard.loop.data.number  # noqa: E731
    exploding = tuple(f"gradient-scale:factor={500.0 ** (1 + step):g}@{50 + step}" for step in range(7))
    with small.broken(trainer.model, batch, exploding):
        trainer.train()
    (counted,) = (event for event in sealegs.open_run(tmp_path / "run").events if event.kind == "counted-back")
    assert counted.detail["steps"] == 7
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["batch_index"] for row in rows] == list(range(64 + 7)), "all of the data, in their order"
    assert [row["step"] for row in rows] == [*range(counted.step), *range(counted.step - 7, 64)]
    assert trainer.state.global_step == trainer.lr_scheduler.last_epoch == 64


@pytest.mark.parametrize("playbook", PLAYBOOKS)
@pytest.mark.integration("Hugging Face Trainer")
@pytest.mark.conforms("accumulation")
def test_accumulated_micro_batches_are_one_step(playbook: str, tmp_path: Path) -> None:
    """Fifteen micro-batches an epoch, four a step: the last step of each epoch has three."""
    data = [{"input_ids": row, "labels": row} for row in small.rows(60)]
    settings: dict[str, Any] = {"gradient_accumulation_steps": 4, "max_steps": 10, "logging_steps": 1}
    settings["bf16"] = playbook == "none"  # is slow on CPUs that have none
    alone = small.trainer(tmp_path / "alone", data=data, **settings)
    alone.train()
    settings |= {"save_strategy": "steps", "save_steps": 2}
    for checkpoint in (None, str(tmp_path / "out" / "checkpoint-2"))[: 1 + (playbook == "standard")]:
        trainer = small.trainer(tmp_path / "out", data=data, **settings)
        small.attached(trainer, tmp_path / "run", playbook=PLAYBOOKS[playbook])
        trainer.train(resume_from_checkpoint=checkpoint)
        assert small.digest(trainer.model, trainer.optimizer.optimizer) == small.digest(
            alone.model, alone.optimizer.optimizer
        )
        run = sealegs.open_run(tmp_path / "run")
        told = [entry["loss"] for entry in alone.state.log_history if "loss" in entry]
        assert run.column("loss").tolist() == pytest.approx(told, rel=1e-5), "their sum, as the Trainer scales them"
        assert run.column("batch_index").tolist() == [3, 7, 11, 14, 18, 22, 26, 29, 33, 37]


def test_a_scaler_overflows_and_the_guard_unscales_once(tmp_path: Path) -> None:
    """There is no scaler on a CPU: this is torch's own, put where Accelerate would have put it."""
    trainer = small.trainer(tmp_path / "out", max_steps=10)
    accelerator = trainer.accelerator
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=1000)
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    attached = small.attached(trainer, tmp_path / "run")
    with small.broken(trainer.model, lambda: attached.guard.number, ("gradient-scale:factor=1e38@6",)):
        trainer.train()
    run = sealegs.open_run(tmp_path / "run")
    assert run.column("loss_scale")[[0, 6, 7]].tolist() == [2.0**16, 2.0**16, 2.0**15]
    assert max(run.column("grad_norm")[:6]) < 100, "unscaled"
    assert "unscale_gradients" not in vars(accelerator)


def test_a_run_that_is_halted_ends_with_its_reason(tmp_path: Path) -> None:
    trainer = small.trainer(tmp_path / "out")
    attached = small.attached(trainer, tmp_path / "run")
    faults = ("nan-gradient:steps=20@5",)
    halts = pytest.raises(RunHalted, match=r"the run is halted: .*not finite")
    with small.broken(trainer.model, lambda: attached.guard.number, faults), halts:
        trainer.train()
    assert trainer.state.global_step < STEPS
    halt, end = sealegs.open_run(tmp_path / "run").events[-2:]
    assert (halt.kind, end.kind, end.detail["reason"]) == ("halt", "end", "halted")
    attached.detach()
    assert "Loop" not in repr(vars(trainer.optimizer).get("step"))


@pytest.mark.parametrize(
    ("error", "reason"), [(KeyboardInterrupt, "interrupted"), (ValueError, "failed"), (None, "finished")]
)
def test_however_a_training_ends_the_folder_says_so(
    error: type[BaseException] | None, reason: str, tmp_path: Path
) -> None:
    trainer = small.trainer(tmp_path / "out", max_steps=7)
    attached = small.attached(trainer, tmp_path / "run")

    def stop(*_: Any) -> None:
        if error is not None and attached.guard.number == 5:
            raise error

    with trainer.model.register_forward_pre_hook(stop), pytest.raises(error) if error else nullcontext():
        trainer.train()
    (end,) = (event for event in sealegs.open_run(tmp_path / "run").events if event.kind == "end")
    assert (end.step, end.detail["reason"]) == (4 if error else 7, reason)


class Rows(torch.utils.data.IterableDataset[Any]):
    """The same as a stream."""

    def __iter__(self) -> Iterator[Any]:
        yield from ({"input_ids": row, "labels": row} for row in small.rows(256))


@pytest.mark.parametrize(("kind", "every"), [("none", 1), ("rows", 1), ("rows", 3), ("stream", 1), ("asked", 1)])
def test_a_resume_knows_what_was_left_out(kind: str, every: int, tmp_path: Path) -> None:
    """No batch comes twice, none is missing, and each has its number; sixteen are an epoch, of which twelve stay."""
    from transformers import TrainerCallback

    left_out = {"none": [], "asked": [(3, 5)]}.get(kind, [(3, 5), (14, 18), (21, 22)])
    options: dict[str, Any] = {"playbook": sealegs.Playbook.observe()} if kind == "asked" else {"skip": left_out}
    attached: Any = None

    saved = (4, 12, 16)

    class Asking(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if kind == "asked" and state.global_step == 2:  # whose batch has been read
                attached.guard.ask("skip", "2")

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = state.global_step in saved

    def trained(at: int | None) -> tuple[list[int], str, float]:
        nonlocal attached
        data = Rows() if kind == "stream" else None
        trainer = small.trainer(tmp_path / "out", data=data, max_steps=20, gradient_accumulation_steps=every)
        attached = small.attached(trainer, tmp_path / "run", **options)
        trainer.add_callback(Asking())
        trainer.train(resume_from_checkpoint=None if at is None else str(tmp_path / "out" / f"checkpoint-{at}"))
        attached.detach()
        numbers = sealegs.open_run(tmp_path / "run").column("batch_index").tolist()
        return numbers, small.digest(trainer.model), trainer.state.epoch

    whole = trained(None)
    assert len(whole[0]) == 20
    assert not set(whole[0]) & {number for first, end in left_out for number in range(first, end)}
    for at in saved:
        assert trained(at) == whole, at


def test_a_training_ends_where_all_that_is_left_of_the_data_is_left_out(tmp_path: Path) -> None:
    trainer = small.trainer(tmp_path / "out")
    small.attached(trainer, tmp_path / "run", skip=((20, 10**6),))
    trainer.train()
    assert trainer.state.global_step == 20 < STEPS
    (end,) = (event for event in sealegs.open_run(tmp_path / "run").events if event.kind == "end")
    assert end.detail["reason"] == "finished"


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_checkpoint_of_a_line_that_was_given_up_is_not_resumed_from(
    is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that refuses to move one does not end the run: it is said."""
    from transformers import TrainerCallback

    class Going(TrainerCallback):  # type: ignore[misc]
        has_gone_back = False

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 14 and not self.has_gone_back:
                self.has_gone_back = True
                if is_refused:
                    monkeypatch.setattr(Path, "rename", refuse)
                attached.guard.ask("rollback", "10")
            elif self.has_gone_back and state.global_step == 6:
                raise KeyboardInterrupt

    rename = Path.rename

    def refuse(folder: Path, target: Path) -> Path:  # which root, as tests may be run by, is not by a folder's mode
        if folder.name.startswith("checkpoint-"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return rename(folder, target)

    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    trainer = small.trainer(tmp_path / "out", **settings)
    (tmp_path / "out" / "checkpoint-99").mkdir(parents=True)  # of some other run
    trainer.add_callback(Going())
    attached = small.attached(trainer, tmp_path / "run", playbook=PLAYBOOKS["standard"])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    (event,) = (each for each in sealegs.open_run(tmp_path / "run").events if each.kind == "checkpoints-given-up")
    kept = sorted(folder.name for folder in (tmp_path / "out").glob("checkpoint-*"))
    if is_refused:
        assert event.detail["left"] == [f"checkpoint-{step} (Read-only file system)" for step in (12, 4, 8)]
        assert "checkpoint-12" in kept
        return
    assert kept == ["checkpoint-4", "checkpoint-99"]
    assert [name.rpartition("-")[2] for name in event.detail["checkpoints"]] == ["12", "4", "8"]
    assert all((tmp_path / "out" / name / "model.safetensors").is_file() for name in event.detail["checkpoints"])


def test_a_loss_of_nan_is_in_the_log_once(tmp_path: Path) -> None:
    """The Trainer takes what it has logged from its sum, and NaN less NaN is NaN."""
    trainer = small.trainer(tmp_path / "out")
    attached = small.attached(trainer, tmp_path / "run")
    compute = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: (
        compute(*args, **kwargs) * (math.nan if attached.guard.number == NAN else 1.0)
    )
    ended = trainer.train()
    logged = {each["step"]: each["loss"] for each in trainer.state.log_history if "loss" in each}
    assert [step for step, loss in logged.items() if not math.isfinite(loss)] == [15]
    assert 1 < ended.training_loss < 5


@pytest.mark.parametrize("playbook", PLAYBOOKS)
def test_an_epoch_that_somebody_stops_is_not_made_up_for(playbook: str, tmp_path: Path) -> None:
    from transformers import TrainerCallback

    class Stopping(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_epoch_stop = state.global_step == 6

    trainer = small.trainer(tmp_path / "out", max_steps=-1, num_train_epochs=2)
    trainer.add_callback(Stopping())
    small.attached(trainer, tmp_path / "run", playbook=PLAYBOOKS[playbook])
    trainer.train()
    assert trainer.state.global_step == 6 + 16


def test_shadow_mode_leaves_the_run_alone(tmp_path: Path) -> None:
    ends = []
    for options in (None, {"act": False, "playbook": PLAYBOOKS["standard"]}):
        trainer = small.trainer(tmp_path / "out")
        number = lambda: trainer.state.global_step  # noqa: B023, E731
        if options is not None:
            small.attached(trainer, tmp_path / "run", **options)
        found: Digests = []
        watching(trainer, found)
        with small.broken(trainer.model, number, FAULT_OF_SCALE):
            trainer.train()
        ends.append(small.digest(trainer.model, trainer.optimizer.optimizer))
    assert ends[0] == ends[1]
    assert not any(is_skipped for *_, is_skipped in found)
    events = sealegs.open_run(tmp_path / "run").events
    assert [event.detail["acted"] for event in events if event.kind == "skip"] == [False]


def test_evaluations_are_recorded_and_their_time_is_not_the_steps(
    tmp_path: Path, pass_hours: Callable[[], None]
) -> None:
    from transformers import TrainerCallback

    class Slow(TrainerCallback):  # type: ignore[misc]
        def on_evaluate(self, *_: Any, **__: Any) -> None:
            pass_hours()

    data = [{"input_ids": row, "labels": row} for row in small.rows(8)]
    trainer = small.trainer(tmp_path / "out", max_steps=10)
    trainer.add_callback(Slow())
    trainer.eval_dataset = data
    trainer.args.eval_strategy, trainer.args.eval_steps = "steps", 5
    small.attached(trainer, tmp_path / "run")
    trainer.train()
    run = sealegs.open_run(tmp_path / "run")
    told = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    assert {step: float(run.column("eval_loss")[run.steps == step][0]) for step in (5, 10)} == pytest.approx(told)
    assert run.column("step_s")[run.steps == 5][0] < 3600


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([{"input_ids": row, "labels": row} for row in small.rows()])


def logging(trainer: Any, course: Callable[[int], dict[str, Any]]) -> Any:
    """A trainer that logs more of its own, as TRL's do."""
    log = trainer.log
    trainer.log = lambda logs, *times: log({**logs, **course(trainer.state.global_step)}, *times)
    return trainer


def test_what_a_trainer_logs_is_in_the_row_of_the_next_step(tmp_path: Path) -> None:
    def course(step: int) -> dict[str, Any]:
        told = {
            "kl": step / 100,
            "rewards/accuracies": 0.5,
            "mine/odd": 3,
            "text": "said",
            "none": None,
            "grad_norm": 1e9,
        }
        return told | {"tensor": torch.ones(())}

    trainer = logging(small.trainer(tmp_path / "out"), course)
    small.attached(trainer, tmp_path / "run", playbook=sealegs.Playbook.standard())
    trainer.train()
    run = sealegs.open_run(tmp_path / "run")
    there = run.logged("kl")
    assert run.steps[there].tolist() == [5, 10, 15, 20, 25, 30], "the last log in a row of its own"
    assert run.column("kl")[there].tolist() == [0.05, 0.1, 0.15, 0.2, 0.25, 0.3]
    assert set(run.column("preference_accuracy")[there]) == {0.5}
    assert set(run.column("mine/odd")[there]) == {3}
    assert {"text", "none", "tensor", "learning_rate", "epoch", "train_loss"}.isdisjoint(run.signals)
    assert run.column("grad_norm")[run.logged("grad_norm")].max() < 1e3, "the guard's own"
    assert run.logged("loss").sum() == STEPS
    assert not any(event.kind == "loss-is-no-measure" for event in run.events)
    assert run.manifest.settings["trainer"] == "Trainer"


def test_a_resume_has_what_was_logged_before_it(tmp_path: Path) -> None:
    def trained(name: str, **more: Any) -> Any:
        settings = {"save_strategy": "steps", "save_steps": 10, "logging_steps": 10}
        trainer = logging(small.trainer(tmp_path / "out", **settings), lambda step: {"reward": float(step)})
        small.attached(trainer, tmp_path / name)
        trainer.train(**more)
        return sealegs.open_run(tmp_path / name)

    whole = trained("whole")
    resumed = trained("resumed", resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-20"))
    found = {int(step): float(value) for step, value in zip(resumed.steps, resumed.column("reward"), strict=True)}
    assert found[20] == 20 == whole.column("reward")[whole.steps == 20][0]


def test_the_loss_of_a_policy_is_no_reason_to_go_back(tmp_path: Path) -> None:
    """The damage that is gone back behind elsewhere: here a reward is logged."""
    settings: dict[str, Any] = {"max_steps": 90, "learning_rate": 3e-3}
    trainer = logging(small.trainer(tmp_path / "out", **settings), lambda step: {"reward": 0.5})
    small.attached(trainer, tmp_path / "run", playbook=PLAYBOOKS["standard"], checkpoint_every=40)

    def damage(step: int) -> None:
        if step == 70:
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    parameter.data.mul_(8.0)

    watching(trainer, [], damage)
    trainer.train()
    run = sealegs.open_run(tmp_path / "run")
    losses = run.column("loss")[run.logged("loss")]
    assert losses[-5:].min() > 3 * losses[:70].max()
    assert not any(event.kind in ("probe", "intervention") for event in run.events)


def test_a_policy_skips_what_is_not_finite_and_halts_where_that_is_wished(tmp_path: Path) -> None:
    def course(step: int) -> dict[str, Any]:
        return {"reward": 1.0 if step % 2 else 0.0, "frac_reward_zero_std": 1.0}

    trainer = logging(small.trainer(tmp_path / "out", logging_steps=1), course)
    detection = sealegs.Detection(halt_on=["zero-spread"])
    small.attached(trainer, tmp_path / "run", playbook=sealegs.Playbook.standard(), detection=detection)
    faults = (f"nan-gradient@{NAN}",)
    sentence = "the run is halted: step 20  HALT  the rewards of nearly every group"
    with (
        small.broken(trainer.model, lambda: trainer.state.global_step, faults),
        pytest.raises(RunHalted, match=sentence),
    ):
        trainer.train()
    run = sealegs.open_run(tmp_path / "run")
    kinds = {event.kind: event for event in run.events}
    assert kinds["loss-is-no-measure"].detail["reason"] == "a reward is logged"
    assert kinds["skip"].step == NAN, "what is not finite is skipped as ever"
    assert {"probe", "intervention"}.isdisjoint(kinds)
    assert kinds["end"].detail["reason"] == "halted"


def test_a_stream_is_guarded_and_not_gone_back_in(tmp_path: Path) -> None:
    trainer = small.trainer(tmp_path / "out", data=Stream(), max_steps=20)
    small.attached(trainer, tmp_path / "run")
    trainer.train()
    assert sealegs.open_run(tmp_path / "run").column("batch_index").tolist() == list(range(20))
    trainer = small.trainer(tmp_path / "out", data=Stream(), max_steps=20)
    small.attached(trainer, tmp_path / "another", playbook=PLAYBOOKS["standard"])
    with pytest.raises(ConfigError, match="cannot be brought back to an earlier batch"):
        trainer.train()


def test_the_pre_flight_check_speaks_at_once(tmp_path: Path) -> None:
    from sealegs.integrations import hf
    from sealegs.integrations.preflight_advice import PreflightWarning

    risky = {"logging_nan_inf_filter": True, "warmup_steps": 0, "max_grad_norm": 0.0}
    trainer = small.trainer(tmp_path / "out", max_steps=-1, num_train_epochs=7, **risky)
    with pytest.warns(PreflightWarning) as warned:
        attached: Any = hf.attach(trainer, run=tmp_path / "run")
    (told,) = [str(each.message) for each in warned]
    for knob in ("logging_nan_inf_filter to false", "warmup_steps to", "max_grad_norm to"):
        assert f"set {knob}" in told
    assert warned[0].filename == __file__
    trainer.args.max_steps = 8
    with small.broken(
        trainer.model, lambda: attached.guard.number, ("nan-gradient:tensor=*.0.mlp.down_proj.weight@5",)
    ):
        trainer.train()
    events = sealegs.open_run(tmp_path / "run").events
    event = next(event for event in events if event.kind == "preflight")
    assert len(event.detail["findings"]) == len(attached.advice.findings)
    (skipped,) = (event for event in events if event.kind == "skip")
    assert "in model.layers.0.mlp.down_proj.weight" in skipped.detail["text"], (
        "what nobody clips is measured all the same"
    )
    assert trainer.state.global_step == 8


@pytest.mark.parametrize(
    ("settings", "options", "says"),
    [
        ({}, {"clip": 1.0}, "clip=1.0: the Trainer clips: set max_grad_norm"),
        ({}, {"resume": True}, r"resume=True: call trainer.train\(resume_from_checkpoint"),
        ({}, {"playbok": None}, "playbok=None: a guard has no such option; did you mean playbook"),
        ({"auto_find_batch_size": True}, {}, "auto_find_batch_size=True: it begins the run anew"),
        ({"optim": "adalomo"}, {}, "optim=.*: it updates during the backward pass"),
    ],
)
def test_what_cannot_be_guarded_is_refused(
    settings: dict[str, Any], options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    trainer = small.trainer(tmp_path / "out", **settings)
    with pytest.raises(ConfigError, match=says):
        small.attached(trainer, tmp_path / "run", **options)
    assert "training_step" not in vars(trainer)


def test_one_guard_a_trainer(tmp_path: Path) -> None:
    from sealegs.integrations import hf

    trainer = small.trainer(tmp_path / "out", max_steps=2)
    small.attached(trainer, tmp_path / "run")
    trainer.hp_search_backend = "optuna"  # as hyperparameter_search sets it
    with pytest.raises(ConfigError, match="hyperparameter_search: a guard records one run"):
        trainer.train()
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="attached to it already"):
        hf.attach(trainer, run=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"trainer=Linear: give a transformers\.Trainer"):
        hf.attach(torch.nn.Linear(1, 1), run=tmp_path / "run")


def test_attention_logits_are_limited_in_the_trainer_too(tmp_path: Path) -> None:
    model = small.llama()
    with torch.no_grad():
        for side in ("q_proj", "k_proj"):
            model.get_parameter(f"model.layers.0.self_attn.{side}.weight").mul_(20)
    trainer = small.trainer(tmp_path / "out", model=model, max_steps=12)
    small.attached(trainer, tmp_path / "run", attention_logit=2.0)
    trainer.train()
    done = [event for event in sealegs.open_run(tmp_path / "run").events if event.kind == "qk-clip"]
    assert [event.step for event in done][:1] == [10]
    assert {each["module"] for each in done[0].detail["modules"]} >= {"model.layers.0.self_attn"}
