"""What a guard is asked for wrongly is one sentence with field, value and cure, and leaves nothing behind."""

import math
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sealegs
from sealegs.errors import ConfigError, RunExists, SourceError, StorageError
from sealegs.guard_options import Checkpointing, LoopScheduler, Telemetry
from sealegs.judge import Detection
from sealegs.loop_port import LoopPort


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model: nn.Module, factor: float = 1.0) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(3, 4)).square().mean() * factor
    loss.backward()
    return loss


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"run": 123}, "run=123: the path of the folder"),
    ({"run": ""}, "run='': the path of the folder"),
    ({"resume": "yes"}, "resume='yes': True, False, \"auto\", or sealegs.Elastic"),
    ({"clip": "1"}, "clip='1': the largest gradient norm"),
    ({"clip": True}, "clip=True: the largest gradient norm"),
    ({"act": "no"}, "act='no': True, False for shadow mode, or a sealegs.Skipping"),
    ({"checkpoint_every": "100"}, "checkpoint_every='100': a number of steps"),
    ({"checkpoint_every": None}, "checkpoint_every=None: a number of steps"),
    ({"checkpoint_every": 0.5}, r"checkpoint_every=0\.5: a number of steps"),
    ({"playbook": "standard"}, r"playbook='standard': Playbook\.standard\(\)"),
    ({"detection": "textbook"}, r"detection='textbook': sealegs\.Detection"),
    ({"telemetry": {"sinks": []}}, r"telemetry={'sinks': \[\]}: sealegs\.Telemetry"),
    ({"scheduler": "cosine"}, "scheduler='cosine': an LRScheduler"),
    ({"scheduler": [LoopScheduler(None)]}, r"scheduler=\[LoopScheduler.*one LoopScheduler of those"),
    ({"scaler": True}, "scaler=True: a GradScaler"),
]


@pytest.mark.parametrize(("options", "sentence"), WRONG, ids=lambda given: str(given)[:40])
def test_a_value_of_the_wrong_kind_is_named(options: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    model, optimizer = small()
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        sealegs.Guard(model, optimizer, **{"run": tmp_path / "a", **options})
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("kind", "options", "sentence"),
    [
        (Telemetry, {"sample_every": -1}, r"sample_every=-1: a number of steps"),
        (Telemetry, {"sinks": ["wandb"]}, r"sinks=\['wandb'\]: a list: \[sealegs\.tracker"),
        (Telemetry, {"sinks": "wandb"}, "sinks='wandb': a list"),
        (Telemetry, {"settings": {"a": object()}}, "settings=.*: a dict of what JSON can hold"),
        (Telemetry, {"price_per_hour": -1.0}, r"price_per_hour=-1\.0: what an hour"),
        (Telemetry, {"price_per_hour": "98"}, "price_per_hour='98': what an hour"),
        (Telemetry, {"ranks": 3}, "ranks=3: Ranks"),
        (Detection, {"rules": "textbok"}, "rules='textbok': one of calibrated, textbook"),
        (Detection, {"detectors": print}, "detectors=.*: a list of functions"),
        (Detection, {"budget": 5}, r"budget=5: sealegs\.Budget"),
        (Detection, {"stalled_after_s": 0}, "stalled_after_s=0: seconds, above 0"),
        (Checkpointing, {"keep": 0}, "keep=0: how many"),
        (Checkpointing, {"every": "1"}, "every='1': a number of steps"),
    ],
)
def test_an_option_value_refuses_what_cannot_work(kind: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{kind.__name__}\.{sentence}"):
        kind(**options)


@pytest.mark.parametrize(
    ("model", "optimizer", "sentence"),
    [
        (None, None, "model=NoneType: give the"),
        ("model", None, "optimizer: there is none"),
        ("model", [], "optimizer: there is none"),
        ("model", "parameters", "optimizer=generator: give a torch"),
        ("model", "another's", "optimizer=SGD: none of its parameters is the model's"),
    ],
)
def test_what_is_no_model_or_none_of_its_optimizers_is_refused(model: Any, optimizer: Any, sentence: str) -> None:
    ours, _ = small()
    _, theirs = small()
    known: dict[str, Any] = {"model": ours, "parameters": ours.parameters(), "another's": theirs}
    given = [known.get(each, each) if isinstance(each, str) else each for each in (model, optimizer)]
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        sealegs.Guard(*given, run=None)


def test_an_empty_folder_is_as_good_as_none(tmp_path: Path) -> None:
    model, optimizer = small()
    (tmp_path / "a").mkdir()
    with sealegs.Guard(model, optimizer, run=tmp_path / "a", resume="auto") as guard:
        guard.step(loss_of(model))
    assert len(sealegs.open_run(tmp_path / "a").steps) == 1
    with pytest.raises(RunExists, match="there is a run of that name"):
        sealegs.Guard(model, optimizer, run=tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").write_text("mine")
    with pytest.raises(RunExists, match="there is something else in it, and no run"):
        sealegs.Guard(model, optimizer, run=tmp_path / "b")


def test_a_batch_that_was_given_up_after_clipping_is_forgotten(tmp_path: Path) -> None:
    """Its gradients were looked at, and it ran out of memory: the next step has gradients of its own."""
    model, optimizer = small()
    with sealegs.Guard(model, optimizer, run=tmp_path / "a", clip=1.0) as guard:
        for number, factor in zip(guard.batches(range(3)), (1.0, 3.0, 50.0), strict=True):
            loss = loss_of(model, factor)
            if number == 1:
                guard.before_clipping(1.0)
                optimizer.zero_grad()
                continue
            (norm,) = [nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])]
            guard.step(loss)
    assert sealegs.open_run(tmp_path / "a").column("grad_norm")[-1] == pytest.approx(float(norm), rel=1e-6)


def test_one_of_several_optimizers_may_be_of_the_losss_own_parameters() -> None:
    model, optimizer = small()
    weight = nn.Parameter(torch.zeros(()))
    with sealegs.Guard(model, [optimizer, torch.optim.SGD([weight], lr=0.1)], run=None) as guard:
        loss = model(torch.ones(3, 4)).square().mean() * weight.exp()
        loss.backward()
        assert guard.step(loss).go
    assert weight.item() < 0


def test_a_signal_that_comes_now_and_then_ends_no_run() -> None:
    """A loop that logs the rate every third step, from the second on, is healthy."""
    model, optimizer = small()
    with sealegs.Guard(model, optimizer, run=None) as guard:
        for number in guard.batches(range(9)):
            more: dict[str, Any] = {"lr": 0.1, "tokens_per_s": 5.0} if number % 3 == 1 else {}
            assert guard.step(loss_of(model), tokens=4, **more).go
    assert guard.number == 9


def test_a_constructor_that_fails_late_lets_go_of_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = small()
    threads = threading.active_count()

    def broken(self: LoopPort) -> None:
        raise StorageError("the disk is full")

    monkeypatch.setattr(LoopPort, "_say_what_is_guarded", broken)
    with pytest.raises(StorageError, match="full"):
        sealegs.Guard(model, optimizer, run=tmp_path / "a")
    assert threading.active_count() == threads
    monkeypatch.undo()
    with sealegs.Guard(model, optimizer, run=tmp_path / "a", resume=True) as guard:  # nobody holds the folder
        guard.loop.resume_at(0)


def test_an_end_that_fails_lets_go_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = small()
    guard = sealegs.Guard(model, optimizer, run=tmp_path / "a")
    threads = threading.active_count()

    def broken(self: LoopPort) -> None:
        raise StorageError("the disk is full")

    monkeypatch.setattr(LoopPort, "_save_what_was_put_off", broken)
    with pytest.raises(StorageError, match="full"):
        guard.close()
    assert threading.active_count() == threads - 1


@pytest.mark.parametrize("how", ["with", "close"])
def test_a_bad_end_is_warned_of_where_the_loop_is(how: str, tmp_path: Path) -> None:
    model, optimizer = small()

    def train() -> None:
        if how == "with":
            with sealegs.Guard(model, optimizer, run=tmp_path / "a", act=False) as guard:
                guard.step(loss_of(model, math.nan))
        else:
            guard = sealegs.Guard(model, optimizer, run=tmp_path / "a", act=False)
            guard.step(loss_of(model, math.nan))
            guard.close()

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        train()
    assert [(Path(each.filename).name, each.category) for each in warned] == [
        (Path(__file__).name, sealegs.RunEndedBadly)
    ]


def test_a_state_that_is_none_of_a_guards_is_refused() -> None:
    model, optimizer = small()
    with (
        sealegs.Guard(model, optimizer, run=None) as guard,
        pytest.raises(SourceError, match="there is no 'meter' in it; give what state_dict"),
    ):
        guard.load_state_dict({})
