"""The guard in loops that are not ours: what README shows, on models and optimizers as people have them."""

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import sealegs
from sealegs import judge
from sealegs.errors import ConfigError, RunHalted
from sealegs.faults.injector import inject
from sealegs.faults.spec import parse
from sealegs.guard_options import LoopScheduler, Telemetry
from sealegs.judge import Detection
from sealegs.loop_port import LoopPort
from sealegs.recovery.playbook import Playbook
from sealegs.signals.collect import Collector
from sealegs.signals.groups import MOST_GROUPS
from sealegs.state import checkpoint_files
from sealegs.vocabulary import Row, Severity


class ConvNet(nn.Module):
    """A convolutional net with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
        self.head = nn.Linear(8, 4)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.features(images).mean((2, 3)))
        return scores


class Encoder(nn.Module):
    """A transformer encoder whose readout is its embedding, and whose first layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.readout = nn.Linear(16, 50, bias=False)
        self.readout.weight = self.embedding.weight
        for parameter in self.layers.layers[0].parameters():
            parameter.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.readout(self.layers(self.embedding(tokens)))
        return logits


Task = tuple[nn.Module, list[tuple[Tensor, Tensor]], Callable[[Tensor, Tensor], Tensor]]


def images(steps: int) -> Task:
    torch.manual_seed(0)
    batches = [(torch.randn(6, 3, 8, 8), torch.randint(4, (6,))) for _ in range(steps)]
    return ConvNet(), batches, F.cross_entropy


def texts(steps: int) -> Task:
    torch.manual_seed(0)
    batches = [(tokens := torch.randint(50, (4, 10)), tokens.roll(-1, 1)) for _ in range(steps)]
    return Encoder(), batches, lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten())


TASKS = {"conv-net": images, "encoder": texts}


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@cache
def weights_without_step_20(task: str) -> list[Tensor]:
    """What a loop without Sealegs leaves behind, in which step 20 updates nothing."""
    plain, batches, criterion = TASKS[task](30)
    optimizer = AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-3)
    for step, (inputs, wanted) in enumerate(batches):
        loss = criterion(plain(inputs), wanted)
        loss.backward()
        if step != 20:
            optimizer.step()
        optimizer.zero_grad()
    return weights(plain)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    "fault", ["nan-gradient@20", "inf-gradient@20", "gradient-scale:factor=1000@20", "bit-flip@20"]
)
@pytest.mark.integration("a loop of one's own")
@pytest.mark.conforms("nan", "spike")
def test_a_faulty_step_is_skipped_and_the_others_are_what_they_were(task: str, fault: str, tmp_path: Path) -> None:
    """Against the same loop without Sealegs, in which step 20 updates nothing: bit for bit."""
    model, batches, criterion = TASKS[task](30)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    with sealegs.Guard(model, optimizer, run=tmp_path / "a") as guard:
        with inject([parse(fault)], model, clock=lambda: guard.number) as injector:
            skipped = []
            for inputs, wanted in guard.batches(batches):
                loss = criterion(model(inputs), wanted)
                loss.backward()
                before = weights(model)
                verdict = guard.step(loss)
                assert verdict.go != same(before, weights(model))
                skipped += [] if verdict.go else [verdict]
        assert [verdict.step for verdict in skipped] == [20]
        assert injector.strikes[0].tensor in (skipped[0].culprit, "*")
    assert not injector.pending()

    assert same(weights(model), weights_without_step_20(task))

    run = sealegs.open_run(tmp_path / "a")
    assert [event.step for event in run.events if event.kind == "skip"] == [20]
    assert run.column("batch_index").tolist() == list(range(30))
    assert len(set(run.column("batch_hash"))) == 30
    (start,) = [event for event in run.events if event.kind == "guard"]
    assert bool(start.detail["not_undone_by_a_skip"]) == (task == "conv-net")


def small(**options: Any) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, AdamW(model.parameters(), **{"lr": 1e-3, **options})


def losses(model: nn.Module, steps: int, spoilt: dict[int, float] | None = None, first: int = 0) -> Iterator[Tensor]:
    """Backpropagated losses; those that are spoilt are multiplied by what is given."""
    for step in range(first, first + steps):
        torch.default_generator.manual_seed(step)  # the other would queue a traceback for each device
        loss = model(torch.randn(16, 4)).square().mean() + 0.5
        loss = loss * (spoilt or {}).get(step, 1.0)
        loss.backward()
        yield loss


def all_taken(guard: sealegs.Guard, losses: Iterator[Tensor]) -> None:
    for loss in losses:
        guard.step(loss)


@pytest.mark.parametrize(
    ("made", "is_normalised"), [(AdamW, True), (torch.optim.RMSprop, True), (SGD, False), (torch.optim.Adagrad, False)]
)
def test_the_first_gradient_of_something_new_is_applied_where_the_optimizer_bounds_it(
    made: Any, is_normalised: bool, tmp_path: Path
) -> None:
    model, _ = small()
    optimizer = made(model.parameters(), lr=1e-3)
    with sealegs.Guard(model, optimizer, run=tmp_path / "a") as guard:
        went = [guard.step(loss).go for loss in losses(model, 80, {60: 30.0, 70: 1e6})]
    assert [step for step, go in enumerate(went) if not go] == ([70] if is_normalised else [60, 70])
    assert ("normalised" in sealegs.open_run(tmp_path / "a").signals) == is_normalised


def test_the_rungs_agree(tmp_path: Path) -> None:
    """Watch with `if verdict.go`, and Guard: the same verdicts, the same weights."""
    spoilt = {15: math.nan, 40: 1e3, 41: 1e6, 70: math.inf}
    model, optimizer = small()
    seen = []
    with sealegs.Watch(tmp_path / "watch") as watch:
        for step, loss in enumerate(losses(model, 90, spoilt)):
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            verdict = watch.see(step, loss=loss, grad_norm=norm, clip_norm=1.0, normalised=1.0)
            if verdict.go:
                optimizer.step()
            optimizer.zero_grad()
            seen.append(verdict.word)
    guarded, optimizer = small()
    with sealegs.Guard(guarded, optimizer, run=tmp_path / "guard", clip=1.0) as guard:
        words = [guard.step(loss).word for loss in losses(guarded, 90, spoilt)]
    assert words == seen
    assert [step for step, word in enumerate(words) if word != "GO"] == sorted(spoilt)
    assert same(weights(guarded), weights(model))


def test_watching_changes_nothing(tmp_path: Path) -> None:
    results = []
    for watched in (False, True):
        model, optimizer = small()
        watch = sealegs.Watch(tmp_path / "a") if watched else None
        for step, loss in enumerate(losses(model, 20, {12: 1000.0})):
            if watch:
                watch.see(step, loss=loss, grad_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
        if watch:
            watch.close()
        results.append(weights(model))
    assert same(*results)


def test_shadow_mode_decides_and_never_acts(tmp_path: Path) -> None:
    plain, optimizer = small()
    for _ in losses(plain, 30, {20: 1000.0}):
        optimizer.step()
        optimizer.zero_grad()
    model, optimizer = small()
    with sealegs.Guard(model, optimizer, run=tmp_path / "a", act=False) as guard:
        words = [guard.step(loss).word for loss in losses(model, 30, {20: 1000.0})]
    assert words[20] == "SKIP"
    assert same(weights(model), weights(plain))
    (event,) = [event for event in sealegs.open_run(tmp_path / "a").events if event.kind == "skip"]
    assert event.detail["acted"] is False


def test_what_was_skipped_is_said_when_it_closes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def made(name: str, spoilt: dict[int, float], **options: Any) -> str:
        model, optimizer = small()
        with sealegs.Guard(model, optimizer, run=tmp_path / name, **options) as guard:
            all_taken(guard, losses(model, 30, spoilt))
            guard.watch.note("end", reason="finished")
        cost, *lines = capsys.readouterr().err.splitlines(keepends=True)
        assert cost.startswith(f"sealegs: {tmp_path / name}: stability cost ")
        return "".join(lines)

    assert made("plain", {}) == made("shadow", {20: 1000.0}, act=False) == ""
    said = made("skipped", {20: 1000.0, 25: math.nan})
    text = "2 of 30 steps (spike/grad_norm 1, nonfinite 1), 6.7%, the first at step 20, the last at 25"
    assert said == f"sealegs: {tmp_path / 'skipped'}: skipped {text}\n"
    events = [sealegs.open_run(tmp_path / name).events[-1] for name in ("plain", "skipped")]
    assert [event.detail.get("skipped") for event in events] == [None, text]


@pytest.mark.filterwarnings("ignore::sealegs.errors.RunEndedBadly")
def test_shadow_mode_does_not_halt() -> None:
    model, optimizer = small()
    with sealegs.Guard(model, optimizer, run=None, act=False) as guard:
        words = [guard.step(loss * math.nan).word for loss in losses(model, 30)]
    assert words[-1] == "HALT"


def struck(model: nn.Module, guard: sealegs.Guard, steps: int, at: int) -> None:
    """A loop in which, once and behind the guard's back, a weight becomes NaN."""
    is_due = True
    for batch in guard.batches([torch.randn(16, 4) for _ in range(steps)]):
        if guard.number == at and is_due:
            is_due = False
            with torch.no_grad():
                next(model.parameters())[0, 0] = math.nan
        loss = model(batch).square().mean() + 0.5
        loss.backward()
        guard.step(loss)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        pytest.param(
            {"act": False},
            "it would be halted: shadow mode, nothing is done",
            marks=pytest.mark.filterwarnings("ignore:the run ended badly. a weight is not finite"),
        ),
        ({"playbook": Playbook.standard(), "checkpoint_every": 4}, "playbook standard decides"),
    ],
)
def test_the_word_halt_is_kept_for_runs_that_are_halted(options: dict[str, Any], told: str, tmp_path: Path) -> None:
    model, optimizer = small()
    with sealegs.Guard(model, optimizer, run=tmp_path / "a", telemetry=Telemetry(sample_every=1), **options) as guard:
        struck(model, guard, 60, at=10)
        assert guard.number >= 12
    run = sealegs.open_run(tmp_path / "a")
    first = next(event for event in run.events if event.kind == "halt")
    assert first.detail["text"].startswith("step 10  ALARM  a parameter is not finite  ")
    assert first.detail["text"].endswith(f"  {told}")
    assert not any("HALT" in str(event.detail.get("text")) for event in run.events)


def test_the_word_halt_where_the_run_is_halted(tmp_path: Path) -> None:
    model, optimizer = small()
    guard = sealegs.Guard(model, optimizer, run=tmp_path / "a", telemetry=Telemetry(sample_every=1))
    with pytest.raises(RunHalted, match="the run is halted: step 10  HALT  a parameter is not finite  "):
        struck(model, guard, 60, at=10)
    guard.close()


def test_a_watch_says_whose_a_halt_is(tmp_path: Path) -> None:
    with sealegs.Watch(tmp_path / "a") as watch:
        verdict = [watch.see(step, loss=2.0 + 0.1 * step, params_finite=float(step < 10)) for step in range(11)][-1]
    assert verdict.word == "HALT"
    assert str(verdict) == "step 10  ALARM  a parameter is not finite  it should be halted, which is the loop's to do"


def test_a_budget_that_is_spent_halts_with_the_incident(tmp_path: Path) -> None:
    model, optimizer = small()
    detection = Detection(budget=sealegs.Budget(nonfinite_in_a_row=4))
    guard = sealegs.Guard(model, optimizer, run=tmp_path / "a", detection=detection)
    before = weights(model)
    with pytest.raises(RunHalted, match="steps in a row not finite: 5, expected below 4") as halt:
        all_taken(guard, (loss * math.nan for loss in losses(model, 30)))
    guard.close()
    assert guard.number == 5
    assert same(before, weights(model))
    assert halt.value.verdict.severity == Severity.HALT
    assert [verdict.step for verdict in halt.value.incident] == [0, 1, 2, 3, 4]
    kinds = [event.kind for event in sealegs.open_run(tmp_path / "a").events]
    assert kinds == ["guard", "skip", "skip", "alarm", "skip", "halt", "stability-tax"]


def test_weights_that_are_not_finite_halt() -> None:
    model, optimizer = small()
    guard = sealegs.Guard(model, optimizer, run=None, telemetry=Telemetry(sample_every=1))
    for loss in losses(model, 5):
        guard.step(loss)
    with torch.no_grad():
        next(model.parameters())[0, 0] = math.nan
    with pytest.raises(RunHalted, match="a parameter is not finite"):
        all_taken(guard, losses(model, 2))


def test_a_halt_after_a_leap_of_the_learning_rate_names_it(tmp_path: Path) -> None:
    model, optimizer = small()
    detection = Detection(budget=sealegs.Budget(nonfinite_in_a_row=4))
    guard = sealegs.Guard(model, optimizer, run=tmp_path / "a", detection=detection)
    rate = optimizer.param_groups[0]["lr"]

    def leaping() -> Iterator[Tensor]:
        for step, loss in enumerate(losses(model, 30)):
            optimizer.param_groups[0]["lr"] = 50 * rate if step >= 12 else rate
            yield loss * math.nan if step >= 15 else loss

    with pytest.raises(RunHalted, match=r"the learning rate leapt from .* at step 12, 7 steps before"):
        all_taken(guard, leaping())
    guard.close()
    told = [event for event in sealegs.open_run(tmp_path / "a").events if "learning rate" in str(event.detail)]
    assert [(event.kind, event.step) for event in told] == [
        ("remark", 12),
        *(("skip", 15), ("skip", 16), ("alarm", 17), ("skip", 18), ("halt", 19)),
    ]
    assert told[-1].detail["findings"][-1]["detector"] == "rate/lr"


class OwnRate(SGD):
    """As Hugging Face's Adafactor: it chooses its rate itself, and ``lr`` is None."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.01
        super().step(closure)
        for group in self.param_groups:
            group["lr"] = None


def test_an_optimizer_that_chooses_its_own_rate(tmp_path: Path) -> None:
    model, _ = small()
    optimizer = OwnRate(model.parameters(), lr=0.01)
    optimizer.param_groups[0]["lr"] = None
    with sealegs.Guard(model, optimizer, run=tmp_path / "a", telemetry=Telemetry(sample_every=2)) as guard:
        assert [guard.step(loss).word for loss in losses(model, 8)] == ["GO"] * 8
    run = sealegs.open_run(tmp_path / "a")
    assert "lr" not in run.signals
    assert "param_norm" in run.signals


def test_gradients_that_the_user_clips(tmp_path: Path) -> None:
    model, optimizer = small()
    with sealegs.Guard(model, optimizer, run=tmp_path / "a") as guard:
        for step, loss in enumerate(losses(model, 20)):
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            verdict = guard.step(loss, grad_norm=norm * (1000 if step == 15 else 1))
            assert verdict.go == (step != 15)
    assert sealegs.open_run(tmp_path / "a").column("grad_norm").min() > 0.01


@pytest.mark.integration("a loop of one's own")
@pytest.mark.conforms("accumulation")
def test_micro_batches_make_one_step() -> None:
    whole, optimizer = small()
    data = torch.randn(20, 12, 4)
    guard = sealegs.Guard(whole, optimizer, run=None, clip=0.5)
    for batch in data:
        loss = whole(batch).square().mean()
        loss.backward()
        guard.step(loss)
    parts, optimizer = small()
    guard = sealegs.Guard(parts, optimizer, run=None, clip=0.5)
    for batch in data:
        total = torch.zeros(())
        *first, last = batch.chunk(3)
        for micro in first:
            with guard.accumulate():
                loss = parts(micro).square().mean() / 3
                loss.backward()
            total += loss.detach()
        loss = parts(last).square().mean() / 3
        loss.backward()
        verdict = guard.step(total + loss)
        assert verdict.go
    for a, b in zip(weights(whole), weights(parts), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_two_optimizers_go_together_or_not_at_all() -> None:
    model, _ = small()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizers = [Muon(matrices, lr=0.01), SGD(vectors, lr=0.1, momentum=0.9)]
    schedulers = [LambdaLR(optimizer, lambda step: 0.9**step) for optimizer in optimizers]
    guard = sealegs.Guard(model, optimizers, run=None, scheduler=schedulers)
    for step, loss in enumerate(losses(model, 10)):
        if step == 6:
            bias = vectors[0].grad
            assert bias is not None
            bias[0] = math.nan
        before = weights(model)
        guard.step(loss)
        changed = [not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True)]
        assert changed == [step != 6] * 4
    assert [scheduler.last_epoch for scheduler in schedulers] == [10, 10]


def test_loss_scaling_finds_its_scale_without_an_alarm(tmp_path: Path) -> None:
    """From 2**40 the scaler needs many skips in a row to come down to where fp16 gradients are finite."""
    model, optimizer = small()
    scaler = GradScaler("cpu", init_scale=2.0**40)
    with sealegs.Guard(model, optimizer, run=tmp_path / "a", scaler=scaler, clip=1.0) as guard:
        verdicts = []
        for step in range(60):
            torch.default_generator.manual_seed(step)
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.randn(16, 4)).float().square().mean() + 0.5
            scaler.scale(loss).backward()
            verdicts.append(guard.step(loss))
    words = [verdict.word for verdict in verdicts]
    assert words.count("SKIP") > 10
    assert set(words) == {"SKIP", "GO"}
    assert words[-20:] == ["GO"] * 20
    run = sealegs.open_run(tmp_path / "a")
    assert run.column("loss_scale")[0] == 2.0**40
    assert 1 <= run.column("loss_scale")[-1] < 2.0**30
    assert math.isfinite(run.column("grad_norm")[-1])
    assert guard.watch.skips == 0, "they are the scaler's, and spend no budget"
    assert "underflow_share" in run.signals


def test_a_compiled_model_is_guarded() -> None:
    model, optimizer = small()
    compiled: Any = torch.compile(model, backend="aot_eager")
    guard = sealegs.Guard(compiled, optimizer, run=None, clip=1.0)
    for step in range(25):
        loss = compiled(torch.randn(16, 4)).square().mean() * (math.nan if step == 12 else 1.0)
        loss.backward()
        verdict = guard.step(loss)
        assert verdict.go == (step != 12)
    assert "_orig_mod" not in verdict.culprit


def test_compiled_code_is_not_asked_for_activations_for_ever(tmp_path: Path) -> None:
    """Hooks are not called in it; the loss of a compiled function gives no sign of that."""
    model, optimizer = small()
    compiled = torch.compile(lambda batch: model(batch).square().mean(), backend="aot_eager")
    with sealegs.Guard(model, optimizer, run=tmp_path / "a", telemetry=Telemetry(sample_every=1)) as guard:
        for step in range(8):
            loss = compiled(torch.randn(16, 4))
            loss.backward()
            guard.step(loss)
            assert bool(model[0]._forward_hooks) == (step < 3)  # type: ignore[index]
    assert not any(signal.startswith("activation_norm") for signal in sealegs.open_run(tmp_path / "a").signals)


@pytest.mark.filterwarnings("ignore::sealegs.errors.RunEndedBadly")
def test_an_announced_change_is_let_through(tmp_path: Path) -> None:
    results = {}
    for announced in (False, True):
        model, optimizer = small(lr=1e-5)
        guard = sealegs.Guard(model, optimizer, run=tmp_path / str(announced))
        surprises = 0
        for step, loss in enumerate(losses(model, 220)):
            if step == 170 and announced:
                guard.announce("new data")
            verdict = guard.step(loss * (1.8 if step >= 170 else 1.0))
            assert verdict.go
            surprises += verdict.severity is not None and verdict.severity >= Severity.GATE
        guard.close()
        events = sealegs.open_run(tmp_path / str(announced)).events
        results[announced] = surprises, any(event.kind == "alarm" for event in events)
    assert results[True] == (0, False)
    assert results[False][0] > 20
    assert results[False][1]
    run = sealegs.open_run(tmp_path / "True")
    assert run.column("announced")[170] == "new data"
    assert [(event.kind, event.detail["change"]) for event in run.events if event.kind == "announced"] == [
        ("announced", "new data")
    ]


SPOILT = {30: math.nan, 90: 1e4, 180: 1e5, 181: 1e6, 200: math.inf}
"""Each far beyond the largest so far, the one before among them."""


def all_but_speed(verdict: sealegs.Verdict) -> str:
    """A verdict without remarks on how long steps take, which no two runs share."""
    return repr(replace(verdict, findings=tuple(f for f in verdict.findings if f.detector != "throughput")))


def test_its_state_is_restored_bit_for_bit(tmp_path: Path) -> None:
    def run(folder: str, stops: tuple[int, ...] = ()) -> tuple[list[str], list[Tensor]]:
        model, optimizer = small()
        guard = sealegs.Guard(model, optimizer, run=tmp_path / folder, clip=1.0, telemetry=Telemetry(sample_every=5))
        said = []
        for step in range(260):
            if step in stops:
                saved = json.dumps(guard.state_dict())
                kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                guard.close()
                fresh, optimizer = small()
                fresh.load_state_dict(kept["model"])
                optimizer.load_state_dict(kept["optimizer"])
                model = fresh
                guard = sealegs.Guard(
                    model, optimizer, run=tmp_path / folder, clip=1.0, resume=True, telemetry=Telemetry(sample_every=5)
                )
                guard.load_state_dict(json.loads(saved))
            if step == 120:
                guard.announce("another mixture")
            (loss,) = losses(model, 1, SPOILT, first=step)
            said.append(all_but_speed(guard.step(loss)))
        tally = guard.state_dict()["watch"]["state"][1]
        said.append(json.dumps(tally[:6] + tally[7:]))  # remarks on speed are left out
        guard.close()
        return said, weights(model)

    expected, end = run("whole")
    said, weights_then = run("stopped", (31, 121, 181, 201))
    assert said == expected
    assert same(weights_then, end)
    whole, stopped = (sealegs.open_run(tmp_path / name) for name in ("whole", "stopped"))
    assert set(whole.signals) == set(stopped.signals)
    for signal in set(whole.signals) - {"time", "step_s"}:
        assert whole.column(signal).tobytes() == stopped.column(signal).tobytes(), signal


def test_a_recorded_stream_gives_the_recorded_verdicts(tmp_path: Path) -> None:
    model, optimizer = small()
    with sealegs.Guard(model, optimizer, run=tmp_path / "a", clip=1.0) as guard:
        said = []
        for step, loss in enumerate(losses(model, 260, SPOILT)):
            if step == 120:
                guard.announce("another mixture")
            said.append(guard.step(loss))
    again = list(judge.replay(sealegs.open_run(tmp_path / "a").rows()))
    assert list(map(repr, again)) == list(map(repr, said))  # NaN is not equal to itself
    assert sum(not verdict.go for verdict in again) == len(SPOILT)


def test_a_rule_of_the_users_own(tmp_path: Path) -> None:
    def too_warm(row: Row) -> str | None:
        return "the room is too warm" if float(row.get("celsius", 0)) > 30 else None

    model, optimizer = small()
    detection = Detection(detectors=[too_warm])
    with sealegs.Guard(model, optimizer, run=tmp_path / "a", detection=detection) as guard:
        words = [guard.step(loss, celsius=25.0 + step).word for step, loss in enumerate(losses(model, 10))]
    assert words == ["GO"] * 6 + ["ALARM"] * 4
    (event,) = [event for event in sealegs.open_run(tmp_path / "a").events if event.kind == "alarm"]
    assert "the room is too warm" in event.detail["text"]


def test_textbook_rules_are_chosen_by_name(tmp_path: Path) -> None:
    with sealegs.Watch(tmp_path / "a", detection=Detection(rules="textbook")) as watch:
        torch.manual_seed(0)
        words = [watch.see(step, loss=2.5 + 0.01 * float(torch.randn(()))).word for step in range(150)]
        assert watch.see(150, loss=2.6).word != "GO"
    assert words.count("GO") > 140
    with pytest.raises(ConfigError, match="rules='textbok': one of calibrated, textbook"):
        sealegs.Watch(None, detection=Detection(rules="textbok"))


def test_signals_of_a_sampled_step(tmp_path: Path) -> None:
    model, optimizer = small()
    token_losses = torch.tensor([0.0, 0.2, 0.3, 99.0, math.nan])
    with sealegs.Guard(model, optimizer, run=tmp_path / "a", clip=1.0, telemetry=Telemetry(sample_every=10)) as guard:
        for loss in losses(model, 101, {55: math.nan}):
            guard.step(loss, tokens=160, token_losses=token_losses)
    run = sealegs.open_run(tmp_path / "a")
    for signal in ("param_norm", "param_norm/0", "grad_norm/2", "moment1_norm", "moment2_norm", "params_finite"):
        assert run.steps[run.logged(signal)].tolist()[-3:] == [80, 90, 100], signal
    for signal in ("update_rms", "update_ratio/0", "update_ratio/2"):
        at_interval = [*range(1, 52, 10)]  # then step 55 is not finite, and it and ten more are sampled
        assert run.steps[run.logged(signal)].tolist() == [*at_interval, *range(56, 67), *range(71, 92, 10)], signal
    seen = [*range(10, 51, 10), *range(56, 66), *range(70, 101, 10)]
    assert run.steps[run.logged("activation_norm/1")].tolist() == seen
    assert (run.column("tokens_per_s")[run.logged("tokens_per_s")] > 0).all()
    assert run.steps[run.logged("token_loss_histogram")].tolist() == [0, 55, 100], (
        "kept now and then, and when it matters"
    )
    counts = [int(count) for count in run.column("token_loss_histogram")[55].split()]
    assert (counts[0], counts[31], counts[32], sum(counts)) == (2, 1, 1, 4)
    assert run.column("grads_finite").tolist() == [1.0] * 55 + [0.0] + [1.0] * 45
    groups = (run.column("grad_norm/0")[10] ** 2 + run.column("grad_norm/2")[10] ** 2) ** 0.5
    assert groups == pytest.approx(run.column("grad_norm")[10])


def test_a_weight_that_is_not_finite_shows_at_the_first_step_that_uses_it(tmp_path: Path) -> None:
    """All weights are looked at every tenth step. A broken one makes the loss or a gradient of its step so, unless the
    step has no use for it, and then the step harms no other: here the embedding of a token that does not come yet."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rare_at = 16

    def train() -> None:
        with sealegs.Guard(model, optimizer, run=tmp_path / "a", telemetry=Telemetry(sample_every=10)) as guard:
            while guard.number < 20:
                if guard.number == 12:
                    with torch.no_grad():
                        model[0].weight[2] = math.nan  # type: ignore[operator]
                tokens = torch.tensor([0, 1, 2 if guard.number == rare_at else 1])
                loss = model(tokens).square().mean()
                loss.backward()
                guard.step(loss)

    with pytest.raises(RunHalted, match="a parameter is not finite"):
        train()
    run = sealegs.open_run(tmp_path / "a")
    assert run.steps.tolist()[-1] == rare_at
    assert run.column("params_finite")[run.logged("params_finite")].tolist()[-1] == 0.0
    assert run.steps[run.logged("params_finite")].tolist()[-1] == rare_at
    others = [weight for name, weight in model.named_parameters() if name != "0.weight"]
    assert all(bool(torch.isfinite(weight).all()) for weight in others), "nothing was made of it"


class Deep(nn.Module):
    """Many layers, of which the first hundred are frozen."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(2, 2)
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(layers))
        for layer in self.layers[:100]:
            layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = x + 0.01 * layer(x)
        return x


def test_a_row_of_a_model_with_very_many_layers_stays_small(tmp_path: Path) -> None:
    """What is measured is all there, a range of layers at a time, and means the same in every signal."""
    torch.manual_seed(0)
    model = Deep(300)
    telemetry = Telemetry(sample_every=2)
    with sealegs.Guard(model, SGD(model.parameters(), lr=0.1), run=tmp_path / "a", telemetry=telemetry) as guard:
        for _ in range(4):
            loss = model(torch.ones(4, 2)).square().mean()
            loss.backward()
            guard.step(loss)
    run = sealegs.open_run(tmp_path / "a")
    assert max(map(len, (tmp_path / "a" / "metrics.jsonl").read_bytes().splitlines())) < 64_000
    assert len(run.signals) <= 4 * MOST_GROUPS
    ranges = [f"layers.{n}-{n + 1}" for n in range(0, 300, 2)]
    for signal, groups in {
        "param_norm": ["embedding", *ranges],
        "grad_norm": ["embedding", *ranges[50:]],
        "update_ratio": ["embedding", *ranges[50:]],
        "activation_norm": ranges,
    }.items():
        assert {name for name in run.signals if name.startswith(f"{signal}/")} == {f"{signal}/{g}" for g in groups}
    for signal in ("param_norm", "grad_norm"):
        norms = [run.column(name)[2] for name in run.signals if name.startswith(f"{signal}/")]
        assert math.hypot(*norms) == pytest.approx(run.column(signal)[2], rel=1e-4)


def test_a_data_loader_goes_through(tmp_path: Path) -> None:
    model, optimizer = small()
    loader = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=8)
    with sealegs.Guard(model, optimizer, run=tmp_path / "a") as guard:
        for _ in range(2):
            for (batch,) in guard.batches(loader):
                loss = model(batch).square().mean()
                loss.backward()
                guard.step(loss)
    run = sealegs.open_run(tmp_path / "a")
    assert run.column("batch_index").tolist() == list(range(8))
    hashes = run.column("batch_hash").tolist()
    assert hashes[:4] == hashes[4:], "the second epoch brings the same batches"
    assert len(set(hashes)) == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [({"clip": 0.0}, "clip=0.0"), ({"clip": math.nan}, "clip=nan")],
    ids=str,
)
def test_impossible_options_are_refused(options: dict[str, Any], words: str) -> None:
    model, optimizer = small()
    with pytest.raises(ConfigError, match=words):
        sealegs.Guard(model, optimizer, run=None, **options)


def test_a_loss_that_is_not_one_number_is_refused() -> None:
    model, optimizer = small()
    guard = sealegs.Guard(model, optimizer, run=None)
    with pytest.raises(ConfigError, match=r"loss of shape \(16, 1\): give one number"):
        guard.step(model(torch.randn(16, 4)))


def test_a_loop_that_stands_still_is_noticed(tmp_path: Path) -> None:
    import time

    with sealegs.Watch(tmp_path / "a", detection=Detection(stalled_after_s=0.2)) as watch:
        watch.see(0, loss=1.0)
        time.sleep(0.6)
        watch.see(1, loss=1.0)
        time.sleep(0.02)
    events = sealegs.open_run(tmp_path / "a").events
    assert {event.kind for event in events} == {"stalled"}
    assert len([event for event in events if "time.sleep(0.6)" in event.detail["where"]]) == 1


def test_a_guarded_loop_that_stands_still_is_noticed_whatever_it_writes(tmp_path: Path) -> None:
    import time

    model, optimizer = small()
    detection = Detection(stalled_after_s=0.2)
    with sealegs.Guard(model, optimizer, run=tmp_path / "a", detection=detection, checkpoint_every=100) as guard:
        (loss,) = losses(model, 1)
        guard.step(loss)
        time.sleep(0.6)
    assert "stalled" in [event.kind for event in sealegs.open_run(tmp_path / "a").events]


def test_a_loop_on_one_batch_goes_on(tmp_path: Path) -> None:
    """Everyone's first check. A skipped step comes again exactly as it was; skipping it for ever would be the end."""
    model, optimizer = small(lr=3e-3)
    torch.manual_seed(0)
    batch, wanted = torch.randn(16, 4), torch.randn(16, 1)
    with sealegs.Guard(model, optimizer, run=tmp_path / "a", clip=1.0, telemetry=Telemetry(sample_every=0)) as guard:
        for _ in range(1100):
            loss = F.mse_loss(model(batch), wanted)
            loss.backward()
            guard.step(loss)
    losses = sealegs.open_run(tmp_path / "a").column("loss")
    assert losses[-1] < 0.5 * losses[0]


def test_a_scaler_and_a_norm_of_the_users_own() -> None:
    for unscaled in (True, False):
        model, optimizer = small()
        scaler = GradScaler("cpu", init_scale=1024.0)
        guard = sealegs.Guard(model, optimizer, run=None, scaler=scaler)
        loss = model(torch.randn(16, 4)).square().mean()
        scaler.scale(loss).backward()
        before = weights(model)
        if unscaled:
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert guard.step(loss, grad_norm=norm).go
            assert not same(before, weights(model))
        else:
            with pytest.raises(ConfigError, match="before you clip"):
                guard.step(loss, grad_norm=1.0)
            assert same(before, weights(model))


def test_gradients_that_the_user_has_unscaled_are_not_unscaled_again() -> None:
    model, optimizer = small()
    scaler = GradScaler("cpu", init_scale=1024.0)
    guard = sealegs.Guard(model, optimizer, run=None, scaler=scaler)
    loss = model(torch.randn(16, 4)).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    assert guard.step(loss).go


def test_shared_parameters_count_once() -> None:
    model, _ = small()
    optimizers = [SGD(model.parameters(), lr=1.0), SGD(model.parameters(), lr=0.0)]
    guard = sealegs.Guard(model, optimizers, run=None, clip=0.1)
    before = weights(model)
    (loss,) = losses(model, 1)
    guard.step(loss)
    change = torch.cat([(a - b).flatten() for a, b in zip(before, weights(model), strict=True)])
    assert change.norm().item() == pytest.approx(0.1, rel=1e-3)


def test_complex_parameters_are_guarded() -> None:
    weight = nn.Parameter(torch.randn(3, 3, dtype=torch.complex64))
    model = nn.Module()
    model.weight = weight
    guard = sealegs.Guard(model, SGD([weight], lr=0.1), run=None, clip=0.5, telemetry=Telemetry(sample_every=0))
    loss = (weight @ weight).abs().square().sum()
    loss.backward()
    norm = math.sqrt(float(weight.grad.abs().square().sum()))  # type: ignore[union-attr]
    before = weight.detach().clone()
    guard.step(loss)
    assert (weight - before).abs().square().sum().sqrt().item() == pytest.approx(0.1 * min(norm, 0.5), rel=1e-3)


def test_what_cannot_be_guarded_is_refused() -> None:
    model, optimizer = small()
    with pytest.raises(ConfigError, match="LBFGS"):
        sealegs.Guard(model, torch.optim.LBFGS(model.parameters()), run=None)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ConfigError, match="ReduceLROnPlateau"):
        sealegs.Guard(model, optimizer, run=None, scheduler=plateau)
    guard = sealegs.Guard(model, optimizer, run=None)
    with pytest.raises(ConfigError, match=r"call loss.backward\(\) before"):
        guard.step(model(torch.randn(16, 4)).mean())
    (loss,) = losses(model, 1)
    with pytest.raises(ConfigError, match=r"signals \['gate_closed', 'step'\]"):
        guard.step(loss, step=7, gate_closed=0.0)


def struck_at(model: nn.Module, guard: sealegs.Guard, steps: int, at: int) -> Iterator[int]:
    """A loop in which a weight becomes NaN, as ``struck``, that others can take turns with."""
    is_due = True
    for batch in guard.batches([torch.randn(16, 4) for _ in range(steps)]):
        if guard.number == at and is_due:
            is_due = False
            with torch.no_grad():
                next(model.parameters())[0, 0] = math.nan
        loss = model(batch).square().mean() + 0.5
        loss.backward()
        guard.step(loss)
        yield guard.number


@pytest.mark.parametrize("playbook", [None, Playbook.standard()])
def test_weights_that_were_loaded_broken_are_named(playbook: Playbook | None, tmp_path: Path) -> None:
    base = nn.Linear(4, 8).requires_grad_(False)
    base.weight.data[3, :2] = torch.nan
    model = nn.Sequential(base, nn.Linear(8, 1))
    guard = sealegs.Guard(model, AdamW(model[1].parameters()), run=tmp_path / "run", playbook=playbook)

    def train() -> None:
        with guard:
            for batch in guard.batches([torch.randn(2, 4)] * 20):
                loss = model(batch).square().mean()
                loss.backward()
                guard.step(loss)

    advice = "; halt: no update has been made: load or initialise other weights" if playbook else ""
    with pytest.raises(RunHalted, match=r"0\.weight \(2 of 32 values, frozen\)" + advice + "\nsee docs/recovery.md$"):
        train()
    (event,) = (event for event in sealegs.open_run(tmp_path / "run").events if event.kind == "weights-not-finite")
    assert event.detail["text"] == "0.weight (2 of 32 values, frozen)"


def two_guards(folder: Path) -> list[tuple[nn.Module, sealegs.Guard]]:
    """Of a training that has a playbook for either, as one of a GAN might have."""
    made = []
    for name in ("one", "other"):
        model, optimizer = small()
        options: dict[str, Any] = {
            "playbook": Playbook.standard(),
            "checkpoint_every": 4,
            "telemetry": Telemetry(sample_every=1),
        }
        made.append((model, sealegs.Guard(model, optimizer, run=folder / name, **options)))
    return made


def test_guards_that_take_turns_stand_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one loses the other wins, and one that goes back alone parts from the other: it is halted instead."""
    monkeypatch.setattr(LoopPort, "_newest", None)
    (model, guard), (its, other) = two_guards(tmp_path)
    assert [each.loop.goes_back for each in (guard, other)] == [True, True]
    turns = zip(struck_at(model, guard, 60, at=20), struck_at(its, other, 60, at=-1), strict=True)
    with pytest.raises(RunHalted, match="the run is halted: a weight is not finite"):
        for _ in turns:
            pass
    assert [each.loop.goes_back for each in (guard, other)] == [False, False]
    other.loop.end()
    for each in (guard, other):
        each.close()
    runs = [sealegs.open_run(tmp_path / name) for name in ("one", "other")]
    told = [[event.step for event in run.events if event.kind == "one-of-several"] for run in runs]
    assert told == [[9], [8]]
    done = [
        [action["action"] for action in event.detail["actions"]]
        for event in runs[0].events
        if "actions" in event.detail
    ]
    assert done == [["halt"]]
    assert not any(event.kind == "intervention" for event in runs[1].events)
    (halt,) = [event for event in runs[0].events if event.kind == "halt"]
    assert halt.detail["text"].startswith("step 20  HALT  a parameter is not finite"), "no playbook decides any more"
    assert runs[1].events[-1].detail["reason"] == "finished"


def test_a_loss_that_another_guard_drives_up_is_no_bad_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning of a run that ends badly is an error here; alone, this one is told to have."""
    monkeypatch.setattr(LoopPort, "_newest", None)
    for takes_turns in (False, True):
        model, optimizer = small(lr=1e-5)
        its, theirs = small(lr=1e-5)
        guard, other = sealegs.Guard(model, optimizer, run=None), sealegs.Guard(its, theirs, run=None)
        for step, loss in enumerate(losses(model, 230)):
            guard.step(loss * (3.0 if step >= 180 else 1.0))
            if takes_turns:
                all_taken(other, losses(its, 1, first=step))
        guard.loop.finish()
        assert guard.ended_badly == "" if takes_turns else "never came back" in guard.ended_badly


def test_guards_one_after_the_other_are_not_taken_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model and then the next, to and fro a few times, too: each goes back as it would alone."""
    monkeypatch.setattr(LoopPort, "_newest", None)
    (model, guard), (its, other) = two_guards(tmp_path)
    loops = struck_at(model, guard, 60, at=20), struck_at(its, other, 60, at=-1)
    for _ in range(3):
        for loop in loops:
            for _, _ in zip(range(10), loop, strict=False):
                pass
    for loop in loops:
        for _ in loop:
            pass
    for each in (guard, other):
        assert each.loop.goes_back
        each.close()
    events = [event for name in ("one", "other") for event in sealegs.open_run(tmp_path / name).events]
    assert not any(event.kind == "one-of-several" for event in events)
    assert [event.step for event in events if event.kind == "intervention"], "the first was brought back"


def test_a_schedule_that_the_loop_steps_is_only_stored() -> None:
    model, optimizer = small()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    guard = sealegs.Guard(model, optimizer, run=None, scheduler=LoopScheduler(scheduler))
    began = scheduler.get_last_lr()
    all_taken(guard, losses(model, 3))
    assert scheduler.get_last_lr() == began


class Timm:
    """With the signatures of ``timm.scheduler.scheduler.Scheduler``: a warm-up of ten updates, or of ten epochs."""

    def __init__(self, optimizer: Optimizer, *, t_in_epochs: bool = False) -> None:
        self.optimizer = optimizer
        self.t_in_epochs = t_in_epochs
        self.told: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "optimizer"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.__dict__.update(state_dict)

    def step(self, epoch: int, metric: float | None = None) -> None:
        if self.t_in_epochs:
            self.set(epoch)

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        self.told = [*self.told, num_updates]
        if not self.t_in_epochs:
            self.set(num_updates)

    def set(self, t: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-3 * min(t / 10, 1.0)


def test_timms_schedules_are_told_how_many_updates_there_were(tmp_path: Path) -> None:
    model, optimizer = small()
    optimizer.param_groups[0]["lr"] = 0.0
    schedule: Any = Timm(optimizer)
    with sealegs.Guard(model, optimizer, run=tmp_path / "a", scheduler=schedule, checkpoint_every=4) as guard:
        all_taken(guard, losses(model, 4))
        own = guard.state_dict()
        all_taken(guard, losses(model, 2))
    assert schedule.told == [1, 2, 3, 4, 5, 6]
    rates = sealegs.open_run(tmp_path / "a").column("lr")
    assert rates.tolist() == pytest.approx([1e-4 * step for step in range(6)])

    model, optimizer = small()
    schedule = Timm(optimizer)
    with sealegs.Guard(
        model, optimizer, run=tmp_path / "a", scheduler=schedule, checkpoint_every=4, resume=True
    ) as guard:
        assert guard.number == 4
        all_taken(guard, losses(model, 2))
    assert schedule.told == [1, 2, 3, 4, 5, 6]

    schedule = Timm(optimizer)  # brought back by the loop, with a checkpoint of its own: timm does not save the count
    guard = sealegs.Guard(model, optimizer, run=None, scheduler=schedule)
    guard.load_state_dict(own)
    all_taken(guard, losses(model, 2))
    assert schedule.told == [5, 6]


def test_timms_schedules_by_epochs_stay_the_loops() -> None:
    model, optimizer = small()
    schedule: Any = Timm(optimizer, t_in_epochs=True)
    guard = sealegs.Guard(model, optimizer, run=None, scheduler=schedule)
    schedule.step(5)
    all_taken(guard, losses(model, 3))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(5e-4)


def test_a_schedule_whose_step_needs_something_is_refused_at_once() -> None:
    class ByMetric:
        def step(self, metric: float) -> None: ...

        def state_dict(self) -> dict[str, Any]:
            return {}

    model, optimizer = small()
    schedule: Any = ByMetric()
    with pytest.raises(
        ConfigError, match=r"scheduler=ByMetric: its step\(\) needs an argument .* scheduler=sealegs.LoopScheduler"
    ):
        sealegs.Guard(model, optimizer, run=None, scheduler=schedule)
    guard = sealegs.Guard(model, optimizer, run=None, scheduler=LoopScheduler(schedule))
    all_taken(guard, losses(model, 2))


def test_a_resumed_guard_must_know_its_step(tmp_path: Path) -> None:
    model, optimizer = small()
    with sealegs.Guard(model, optimizer, run=tmp_path / "a") as guard:
        all_taken(guard, losses(model, 3))
    with sealegs.Guard(model, optimizer, run=tmp_path / "a", resume=True) as guard:
        (loss,) = losses(model, 1)
        with pytest.raises(ConfigError, match=r"load_state_dict, or say its step with guard\.loop\.resume_at"):
            guard.step(loss)
        guard.loop.resume_at(3)
        guard.step(loss)
    assert sealegs.open_run(tmp_path / "a").steps.tolist() == [0, 1, 2, 3]


def test_a_model_is_left_as_it_was() -> None:
    model, optimizer = small()
    guard = sealegs.Guard(model, optimizer, run=None, telemetry=Telemetry(sample_every=1))
    all_taken(guard, losses(model, 2))
    assert model[0]._forward_hooks  # type: ignore[index]
    guard.close()
    assert not model[0]._forward_hooks  # type: ignore[index]


def test_a_detector_object_that_raises_costs_its_place_and_not_the_run(tmp_path: Path) -> None:
    class Broken:
        name = "broken"

        def init(self) -> tuple[()]:
            return ()

        def look(self, state: tuple[()], now: Row) -> None:
            raise KeyError("gpu")

        def learn(self, state: tuple[()], now: Row) -> tuple[()]:
            return ()

    model, optimizer = small()
    with sealegs.Guard(model, optimizer, run=tmp_path / "a", detection=Detection(detectors=[Broken()])) as guard:
        words = [guard.step(loss).word for loss in losses(model, 12, {10: math.nan})]
    assert words == ["GO"] * 10 + ["SKIP", "GO"]
    (event,) = [event for event in sealegs.open_run(tmp_path / "a").events if event.kind == "detector-failed"]
    assert event.detail["detectors"] == ["broken"]


def test_an_evaluation_is_no_stall(tmp_path: Path) -> None:
    import time

    model, optimizer = small()
    with sealegs.Guard(model, optimizer, run=tmp_path / "a", detection=Detection(stalled_after_s=0.2)) as guard:
        (loss,) = losses(model, 1)
        guard.step(loss)
        with guard.paused():
            time.sleep(0.5)
    # a machine that is too busy for the step itself is another matter
    where = [event.detail["where"] for event in sealegs.open_run(tmp_path / "a").events if event.kind == "stalled"]
    assert not [place for place in where if "time.sleep(0.5)" in place]


class Clock:
    """Stands still unless somebody moves it."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in ("sealegs.loop_port", "sealegs.step.step_inputs"):
        monkeypatch.setattr(f"{module}.time", clock)
    return clock


def test_a_checkpoint_that_is_written_beside_the_loop_is_no_slow_stretch(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every 60 steps a disk takes 15 steps for one, and the steps beside it take three times as long."""
    may_end, write = threading.Event(), checkpoint_files.write_tensors

    def slowly(*words: Any) -> None:
        may_end.wait(60)
        write(*words)

    monkeypatch.setattr(checkpoint_files, "write_tensors", slowly)
    model, optimizer = small()
    with sealegs.Guard(model, optimizer, run=tmp_path / "a", checkpoint_every=60) as guard:
        assert guard.loop.checkpoints is not None
        for loss in losses(model, 400):
            since = guard.number % 60 if guard.number >= 60 else 60
            clock.now += 0.3 if since < 15 else 0.1
            if since == 15:
                may_end.set()
                guard.loop.checkpoints.wait()
                may_end.clear()
            guard.step(loss)
        may_end.set()
    run = sealegs.open_run(tmp_path / "a")
    assert len([event for event in run.events if event.kind == "checkpoint"]) == 6
    assert [event.detail["text"] for event in run.events if event.kind == "remark"] == []
    saving = [int(step) % 60 for step in run.steps[run.logged("saving")] if step >= 60]
    assert set(saving) == set(range(16))
    assert run.column("step_s")[65] == pytest.approx(0.3)


@pytest.mark.parametrize("end", ["well", "with an error", "with a halt"])
def test_a_checkpoint_that_was_put_off_is_made_when_the_run_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """That of step 8 was due while the one of step 4 was being written."""
    may_end, write = threading.Event(), checkpoint_files.write_tensors

    def slowly(*words: Any) -> None:
        may_end.wait(60)
        write(*words)

    monkeypatch.setattr(checkpoint_files, "write_tensors", slowly)
    model, optimizer = small()
    guard = sealegs.Guard(model, optimizer, run=tmp_path / "a", checkpoint_every=4)
    for loss in losses(model, 9):
        guard.step(loss)
    with suppress(RunHalted):
        for loss in losses(model, 100 if end == "with a halt" else 0):
            guard.step(loss * math.nan)
    may_end.set()
    with suppress(KeyError), closing(guard):
        if end == "with an error":
            raise KeyError
    told = [event.step for event in sealegs.open_run(tmp_path / "a").events if event.kind == "checkpoint"]
    assert guard.loop.checkpoints is not None
    assert guard.loop.checkpoints.steps() == told == ([4, 9] if end == "well" else [4])


def test_a_slow_stretch_between_checkpoints_is_one(clock: Clock, tmp_path: Path) -> None:
    model, optimizer = small()
    with sealegs.Guard(model, optimizer, run=tmp_path / "a", checkpoint_every=60) as guard:
        assert guard.loop.checkpoints is not None
        for loss in losses(model, 230):
            clock.now += 0.3 if guard.number >= 200 else 0.1
            guard.step(loss)
            guard.loop.checkpoints.wait()
    events = sealegs.open_run(tmp_path / "a").events
    assert [event.step // 10 for event in events if event.kind == "remark"] == [21]


def test_a_pause_in_a_pause_counts_once(clock: Clock, tmp_path: Path) -> None:
    model, optimizer = small()
    with sealegs.Guard(model, optimizer, run=tmp_path / "a", checkpoint_every=100) as guard:
        for loss in losses(model, 4):
            clock.now += 1.0
            guard.step(loss)
            with guard.paused():
                clock.now += 5.0
                with guard.paused():
                    clock.now += 7.0
                guard.checkpoint(wait=True)
    assert sealegs.open_run(tmp_path / "a").column("step_s")[1:].tolist() == [1.0, 1.0, 1.0]


def test_a_loop_that_clips_by_itself_has_its_gradients_seen_before(tmp_path: Path) -> None:
    """The norm and the tensor at fault are those of the whole gradient, also where clipping has made all of it NaN."""
    model, optimizer = small()
    *_, (name, bias) = model.named_parameters()
    norms = []
    with sealegs.Guard(model, optimizer, run=tmp_path / "a", clip=1e-9) as guard:
        for loss in losses(model, 4):
            assert bias.grad is not None
            bias.grad.mul_(math.nan if guard.number == 3 else 1.0)
            norms.append(
                float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
            )
            guard.before_clipping()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            gradient = bias.grad.clone()
            optimizer.register_step_pre_hook(lambda *_, was=gradient: check_equal(was, bias.grad))
            verdict = guard.step(loss)
            optimizer._optimizer_step_pre_hooks.clear()
    assert sealegs.open_run(tmp_path / "a").column("grad_norm").tolist() == pytest.approx(norms, rel=1e-5, nan_ok=True)
    assert (verdict.go, verdict.culprit) == (False, name)


def test_a_step_in_two_halves_is_a_step(tmp_path: Path) -> None:
    """The loop may clip between them, and spoil the gradients: what they were is decided upon."""
    ended = {}
    for name in ("whole", "halves"):
        model, optimizer = small()
        with sealegs.Guard(model, optimizer, run=tmp_path / name) as guard:
            for loss in losses(model, 40):
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad.mul_(math.nan if guard.number == 20 else 1e4 if guard.number == 36 else 1.0)
                guard.before_clipping()
                if name == "halves":
                    guard.loop.decide(loss, tokens=3)
                    before = [parameter.detach().clone() for parameter in model.parameters()]
                    assert guard.watch.verdict.step == guard.number, "it is known before the weights change"
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                number = guard.number
                verdict = guard.loop.update() if name == "halves" else guard.step(loss, tokens=3)
                if name == "halves":
                    is_as_before = all(map(torch.equal, before, model.parameters()))
                    assert is_as_before != verdict.go
                assert (verdict.step, guard.number) == (number, number + 1)
        run = sealegs.open_run(tmp_path / name)
        skipped = [event.step for event in run.events if event.kind in ("alarm", "skip")]
        ended[name] = skipped, [p.tolist() for p in model.parameters()], run.column("grad_norm").tolist()
    assert ended["halves"][0] == [20, 36]
    assert repr(ended["halves"]) == repr(ended["whole"])  # NaN is as long as NaN


@pytest.mark.parametrize("how", ["tried again", "gone on from"])
def test_a_step_that_was_decided_and_never_updated_is_decided_anew(how: str) -> None:
    """It was not skipped yet: to take it for a step that comes a second time would be to let it through."""
    model, optimizer = small()
    guard = sealegs.Guard(model, optimizer, run=None)
    all_taken(guard, losses(model, 40))
    (loss,) = losses(model, 1, {40: 1e5}, first=40)
    guard.loop.decide(loss)
    assert not guard.watch.verdict.go
    if how == "gone on from":  # a checkpoint that an exception wrote
        state = json.loads(json.dumps(guard.state_dict()))
        guard = sealegs.Guard(model, optimizer, run=None)
        guard.load_state_dict(state)
    optimizer.zero_grad()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    (loss,) = losses(model, 1, {40: 1e5}, first=40)
    verdict = guard.step(loss)
    assert (verdict.step, verdict.go) == (40, False)
    assert all(map(torch.equal, before, model.parameters()))


def test_nobody_goes_back_in_the_middle_of_a_step(tmp_path: Path) -> None:
    model, optimizer = small()
    with sealegs.Guard(model, optimizer, run=tmp_path / "a", playbook=sealegs.Playbook.observe()) as guard:
        (loss,) = losses(model, 1)
        guard.loop.decide(loss)
        with pytest.raises(ConfigError, match="ask rollback 0: a step is decided and not updated yet"):
            guard.ask("rollback", "0")
        guard.loop.resume_at(7)  # wherever that is, the decision was another step's
        with pytest.raises(ConfigError, match="no step is decided"):
            guard.loop.update()


def test_an_update_that_nobody_has_decided_is_refused(tmp_path: Path) -> None:
    model, optimizer = small()
    with sealegs.Guard(model, optimizer, run=None) as guard:
        (loss,) = losses(model, 1)
        guard.step(loss)
        with pytest.raises(ConfigError, match=r"call decide\(loss\)"):
            guard.loop.update()
        (loss,) = losses(model, 1)
        guard.loop.decide(loss)
        with pytest.raises(ConfigError, match="give others"):
            guard.loop.decide(loss, grad_norm_p=0.0)
        with pytest.raises(ConfigError, match=r"call decide\(loss\)"):  # what was decided before was another step
            guard.loop.update()


def check_equal(one: Tensor, other: Tensor | None) -> None:
    """The guard has clipped nothing."""
    assert other is not None
    assert torch.equal(one, other)


def test_a_device_that_is_lost_does_not_hide_what_went_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for it raises, too: of CUDA there is none here, so the waiting is what is replaced."""
    model = nn.Linear(4, 1)

    def lost(_: Collector) -> list[Row]:
        raise RuntimeError("CUDA error: device-side assert triggered")

    guard = sealegs.Guard(model, SGD(model.parameters(), lr=0.1), run=tmp_path / "a")
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    guard.step(loss)
    monkeypatch.setattr(Collector, "drain", lost)
    with pytest.raises(ValueError, match="the first"), guard:
        raise ValueError("the first")
    end = sealegs.open_run(tmp_path / "a").events[-1]
    assert (end.kind, end.detail["reason"], end.detail["error"]) == ("end", "failed", "ValueError: the first")
