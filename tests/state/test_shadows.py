"""What follows the weights: averages, weights that are swapped for an evaluation, references and targets."""

import copy
import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import sealegs
from sealegs import Frozen, Guard, Playbook
from sealegs.errors import SourceError
from sealegs.guard_options import Checkpointing, Telemetry

QUIET = Telemetry(sample_every=0)


def data() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 4, generator=generator) for _ in range(300)]


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


class ScheduleFree(Optimizer):
    """Schedule-free SGD: trains at a point between the fast weights and their average, evaluates at the average."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "beta": 0.9, "step": 0, "train_mode": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["train_mode"], "it is at its evaluation weights"
            group["step"] += 1
            for weight in (each for each in group["params"] if each.grad is not None):
                state = self.state[weight]
                fast = state.setdefault("z", weight.clone())
                average = state.setdefault("x", weight.clone())
                fast.sub_(weight.grad, alpha=group["lr"])
                average.lerp_(fast, 1 / group["step"])
                weight.copy_(torch.lerp(fast, average, group["beta"]))

    @torch.no_grad()
    def turn(self, *, to_training: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != to_training:
                group["train_mode"] = to_training
                for weight in (each for each in group["params"] if "x" in self.state[each]):
                    state = self.state[weight]
                    to = torch.lerp(state["z"], state["x"], group["beta"]) if to_training else state["x"]
                    weight.copy_(to)


class Swapped:
    """An average of the weights that takes their place for an evaluation, as torch_ema does."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shadow = [each.detach().clone() for each in model.parameters()]

    @torch.no_grad()
    def update(self) -> None:
        for mine, weight in zip(self.shadow, self.model.parameters(), strict=True):
            mine.lerp_(weight, 0.1)

    @torch.no_grad()
    def swap(self) -> None:
        for mine, weight in zip(self.shadow, self.model.parameters(), strict=True):
            before = weight.clone()
            weight.copy_(mine)
            mine.copy_(before)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.shadow = list(state["shadow"])


class Job:
    """A training with something that follows it, made anew for each process."""

    def __init__(self, folder: Path, shadow: str, **more: Any) -> None:
        self.model = network()
        optimizer = ScheduleFree if shadow == "schedule-free" else partial(AdamW, lr=1e-2)
        self.optimizer: Any = optimizer(self.model.parameters())
        self.follows: Any = MAKE[shadow](self.model)
        also = {} if self.follows is None else {"shadow": self.follows}
        words: dict[str, Any] = {"playbook": Playbook.standard(), "telemetry": QUIET} | more
        keeps = Checkpointing(every=20, snapshot_every=20, also=also)
        self.guard = Guard(self.model, self.optimizer, run=folder, checkpoint_every=keeps, **words)

    def train(self, until: int, bad: set[int] | None = None) -> "Job":
        bad = set() if bad is None else bad
        for batch in self.guard.batches(data()):
            number = self.guard.number
            loss = F.mse_loss(self.model(batch), self.wanted(batch)) + 1
            loss = loss * (math.nan if number in bad else 1.0)
            bad.discard(number)
            loss.backward()
            self.guard.step(loss)
            if not self.guard.is_probe:
                self.follow()
            assert self.guard.loop.checkpoints is not None
            self.guard.loop.checkpoints.wait()
            if self.guard.number >= until and not bad:
                break
        return self

    def wanted(self, batch: Tensor) -> Tensor:
        """What is learned; of a target network, what it says."""
        wanted = batch[:, :2].clone()
        if isinstance(self.follows, nn.Sequential):
            wanted += 0.5 * self.follows(batch).detach()
        return wanted

    def follow(self) -> None:
        """What the loop does after each step."""
        if isinstance(self.follows, AveragedModel):
            self.follows.update_parameters(self.model)
        elif isinstance(self.follows, Swapped):
            self.follows.update()
            if self.guard.number % 10 == 0:  # an evaluation with the average
                self.follows.swap()
                self.follows.swap()
        elif isinstance(self.follows, nn.Sequential) and self.guard.number % 30 == 0:
            self.follows.load_state_dict(self.model.state_dict())
        elif isinstance(self.optimizer, ScheduleFree) and self.guard.number % 10 == 0:
            self.optimizer.turn(to_training=False)
            if self.guard.number != self.stays_at:
                self.optimizer.turn(to_training=True)

    stays_at: int | None = None
    """The step after which the loop is left at its evaluation weights."""

    def bits(self) -> Any:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        follows = self.follows.state_dict() if hasattr(self.follows, "state_dict") else {}
        return json.loads(json.dumps([state, follows], default=lambda each: each.tolist()))


MAKE: dict[str, Callable[[nn.Module], Any]] = {
    "EMA of torch": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
    "EMA that is swapped in": Swapped,
    "schedule-free": lambda model: None,
    "target network": lambda model: copy.deepcopy(model).requires_grad_(False),
    "reference of DPO": lambda model: Frozen(copy.deepcopy(model).requires_grad_(False)),
}


@pytest.mark.parametrize("shadow", MAKE)
def test_a_resume_brings_the_shadow_back_bit_for_bit(shadow: str, tmp_path: Path) -> None:
    whole = Job(tmp_path / "b", shadow)
    with whole.guard:
        whole.train(75)
    part = Job(tmp_path / "c", shadow)
    with part.guard:
        part.train(40)
    again = Job(tmp_path / "c", shadow, resume=True)
    with again.guard:
        assert again.guard.number == 20, "that of step 40 is not proven yet"
        again.train(75)
    assert again.bits() == whole.bits()
    (audit,) = events(tmp_path / "c", "resume-audit")
    assert not audit["not_as_saved"]


@pytest.mark.parametrize("shadow", MAKE)
def test_a_rollback_brings_the_shadow_back(shadow: str, tmp_path: Path) -> None:
    job = Job(tmp_path / "a", shadow)
    with job.guard:
        seen = {}
        for until in range(1, 76):
            job.train(until)
            seen[job.guard.number] = job.bits()
        job.guard.ask("rollback", "20")
        to = job.guard.number
        assert 0 < to <= 55
        next(iter(job.guard.batches(data())))  # the loop asks for its next batch: the shadow is put back for good
        assert job.bits() == seen[to]


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    return [{"step": e.step, **e.detail} for e in sealegs.open_run(folder).events if e.kind in kinds]


def test_a_run_that_ends_at_its_evaluation_weights_goes_on_from_the_others(tmp_path: Path) -> None:
    """A schedule-free optimizer that nobody turned back: which weights are in force is part of its settings."""
    whole = Job(tmp_path / "a", "schedule-free", playbook=None)
    with whole.guard:
        whole.train(60)
    part = Job(tmp_path / "b", "schedule-free", playbook=None)
    part.stays_at = 40
    with part.guard:
        part.train(40)
        part.guard.checkpoint(wait=True)
    again = Job(tmp_path / "b", "schedule-free", playbook=None, resume=True)
    with again.guard:
        assert again.guard.number == 40
        assert not again.optimizer.param_groups[0]["train_mode"]
        again.optimizer.turn(to_training=True)
        again.train(60)
    assert again.bits() == whole.bits()


def test_another_reference_is_refused_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path / "a", "reference of DPO")
    with job.guard:
        job.train(20)
    stored = json.loads((tmp_path / "a" / "checkpoints" / "20" / "plain.json").read_text())["also"]["shadow"]
    assert stored["0.weight"].startswith("float32 [8, 4] ")
    with torch.no_grad():
        job.follows._model[2].bias[1] += 1.0
    monkeypatch.setitem(MAKE, "reference of DPO", lambda model: Frozen(job.follows._model))
    named = r"also\['shadow'\] does not take its state back: .*2\.bias was float32 \[2\]"
    with pytest.raises(SourceError, match=named):
        Job(tmp_path / "a", "reference of DPO", resume=True)


# What is seen, and cannot be brought back.


class Hooked(Swapped):
    """One that people hang on the optimizer."""

    def after(self, *_: Any) -> None:
        self.update()


@pytest.mark.parametrize("how", ["method", "closure", "partial", "forward"])
def test_what_follows_the_weights_and_is_in_no_state_is_named(how: str, tmp_path: Path) -> None:
    model = network()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    ema = Hooked(model)
    where = "AdamW at each step"
    if how == "method":
        optimizer.register_step_post_hook(ema.after)
    elif how == "closure":
        optimizer.register_step_post_hook(lambda *_: ema.update())
    elif how == "partial":
        optimizer.register_step_post_hook(partial(Hooked.after, ema))
    else:
        model[2].register_forward_hook(ema.after)  # type: ignore[index]
        where = "the forward pass of 2"
    told = f"Hooked, which is called by {where}"
    for name, also, wanted in (("a", {}, [told]), ("b", {"ema": ema}, [])):
        with Guard(model, optimizer, run=tmp_path / name, telemetry=QUIET, checkpoint_every=Checkpointing(also=also)):
            pass
        assert events(tmp_path / name, "guard")[0]["not_restored"] == wanted
        advised = sealegs.preflight(model, optimizer, also=also)
        assert [each.found for each in advised.findings if each.code == "STA9"] == [f"in no state: {w}" for w in wanted]


def test_nothing_of_torchs_or_of_ours_is_taken_for_a_shadow(tmp_path: Path) -> None:
    model = network()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for name in "ab":  # the second finds what the first has hung on the model
        guard = Guard(model, optimizer, run=tmp_path / name, scheduler=scheduler, telemetry=Telemetry(sample_every=1))
        assert events(tmp_path / name, "guard")[0]["not_restored"] == []
    guard.close()


def test_how_much_is_left_out_is_in_the_event(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 2))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for name, keeps, wanted in (
        ("a", Checkpointing(every=10), {"frozen_tensors": 2, "bytes": 4 * (64 * 64 + 64)}),
        ("b", Checkpointing(every=10, with_frozen=True), None),
        ("c", Checkpointing(), None),
    ):
        with Guard(model, optimizer, run=tmp_path / name, telemetry=QUIET, checkpoint_every=keeps):
            pass
        assert events(tmp_path / name, "guard")[0]["left_out_of_states"] == wanted
