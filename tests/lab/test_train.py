"""Settings and data in, a trained model and its run folder out."""

import json
import math
import os
import random
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.forked import start
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from sealegs.cli.main import main
from sealegs.guard import Guard
from sealegs.guard_options import Telemetry
from sealegs.lab.data import IGNORED, Batch
from sealegs.lab.model import Transformer
from sealegs.lab.settings import SIZES, CadenceSettings, DataSettings, OptimizerSettings, Settings
from sealegs.lab.sources import TokenSources, open_data
from sealegs.lab.train import (
    LossFunction,
    Result,
    backward,
    build_optimizer,
    evaluate,
    lr_share,
    resolved,
    take_settings,
    train,
)
from sealegs.record.run import Run, open_run
from sealegs.state.training_state import TrainingState
from sealegs.vocabulary import Row

NOT_REPEATED = {"time", "tokens_per_s", "step_s", "saving"}
compared = pytest.mark.xdist_group("a whole run")  # one serves all that are compared with it


def nano(tokens: Path, steps: int = 20, **other: Any) -> Settings:
    return resolved(
        replace(
            SIZES["nano"],
            steps=steps,
            threads=1,
            **{
                "dtype": "fp32",
                "data": DataSettings(sources={str(tokens): 1.0}),
                "cadence": CadenceSettings(evaluate_steps=5, evaluate_batches=2, checkpoint_steps=4),
                **other,
            },
        )
    )


def run_of(settings: Settings, folder: Path, **other: Any) -> tuple[Result, Run]:
    result = train(settings, open_data(settings), folder, **other)
    return result, open_run(folder)


def assert_same(run: Run, other: Run) -> None:
    """Bit for bit, but for what is measured by the clock."""
    assert run.steps.tolist() == other.steps.tolist()
    assert set(run.signals) == set(other.signals)
    for signal_name in set(run.signals) - NOT_REPEATED:
        assert run.column(signal_name).tobytes() == other.column(signal_name).tobytes(), signal_name


def stop_after(steps: int) -> Any:
    """Ask for a stop before step ``steps``."""
    asked = iter([None] * steps)
    return lambda: next(asked, "test")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tokens_file: Path) -> tuple[Result, Run]:
    """Twenty steps in one go, to compare others with."""
    return run_of(nano(tokens_file), tmp_path_factory.mktemp("whole") / "a")


@compared
def test_a_repeated_run_is_the_same_bit_for_bit(tmp_path: Path, tokens_file: Path, whole: tuple[Result, Run]) -> None:
    settings = nano(tokens_file)
    assert_same(run_of(settings, tmp_path / "a")[1], whole[1])
    other = run_of(replace(settings, seed=1), tmp_path / "b")[1]
    assert not np.array_equal(other.column("loss"), whole[1].column("loss"))


@compared
@pytest.mark.parametrize("stops", [[7], [1, 2, 5], [4, 4]], ids=str)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, tokens_file: Path, stops: list[int], whole: tuple[Result, Run]
) -> None:
    settings = nano(tokens_file)
    for i, steps in enumerate(stops):
        result, _ = run_of(settings, tmp_path / "cut", resume=i > 0, should_stop=stop_after(steps))
        assert result.stopped_by == "test"
    result, run = run_of(settings, tmp_path / "cut", resume=True)
    assert_same(run, whole[1])
    assert result.eval_loss == whole[0].eval_loss


@compared
def test_resumes_that_are_preempted_before_their_first_step_begin_where_it_stopped(
    tmp_path: Path, tokens_file: Path, whole: tuple[Result, Run]
) -> None:
    settings = nano(tokens_file)
    for steps in (18, 0, 0, 0):
        run_of(settings, tmp_path / "cut", resume=steps == 0, should_stop=stop_after(steps))
    tags = (tmp_path / "cut" / "checkpoints" / "tags.json").read_bytes()
    _, run = run_of(settings, tmp_path / "cut", resume=True)
    assert [event.detail["checkpoint"] for event in run.events if event.kind == "resume"] == [18] * 4
    assert [event.step for event in run.events if event.kind == "checkpoint"].count(18) == 1
    assert json.loads(tags)["18"]["tag"] == "healthy"
    assert_same(run, whole[1])


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_low_precision_trains_and_resumes(tmp_path: Path, tokens_file: Path, dtype: str) -> None:
    """A few tiny steps: CPUs without bf16 and fp16 units emulate them, slowly."""
    settings = nano(
        tokens_file,
        steps=4,
        dtype=dtype,
        model=replace(SIZES["nano"].model, context=8),
        data=DataSettings(sources={str(tokens_file): 1.0}, batch=2),
        cadence=CadenceSettings(evaluate_steps=0, evaluate_batches=1, checkpoint_steps=0),
    )
    _, expected = run_of(settings, tmp_path / "whole")
    run_of(settings, tmp_path / "cut", should_stop=stop_after(2))
    _, run = run_of(settings, tmp_path / "cut", resume=True)
    assert_same(run, expected)
    assert np.isfinite(run.column("loss")[:4]).all()
    assert run.manifest.dtype == dtype
    assert ("loss_scale" in run.signals) == (dtype == "fp16")
    if dtype == "fp16":
        assert (run.column("loss_scale")[:4] >= 1).all()


@pytest.mark.parametrize(
    ("size", "has_it", "dtype"),
    [("nano", True, "fp32"), ("toy", True, "fp32"), ("small", True, "bf16"), ("small", False, "fp32")],
)
def test_bf16_is_chosen_where_it_is_faster(
    size: str, has_it: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sealegs.lab.train.cpu_has_bf16", lambda: has_it)
    assert resolved(replace(SIZES[size], device="cpu")).dtype == dtype
    assert resolved(replace(SIZES[size], device="cpu", dtype="bf16")).dtype == "bf16", "what is said is done"


def training(settings: Settings, data: TokenSources) -> TrainingState:
    torch.manual_seed(0)
    model = Transformer(settings.model)
    optimizer = build_optimizer(model, settings.optimizer)
    return TrainingState(
        model=model,
        optimizers=[optimizer],
        schedulers=[LambdaLR(optimizer, partial(lr_share, settings.optimizer, settings.steps))],
        scaler=GradScaler("cpu", enabled=False),
        data=data.training,
    )


def documents_file(folder: Path) -> Path:
    """Documents of 3 to 30 tokens: rows with very different numbers of targets."""
    lengths = np.arange(400) % 28 + 3
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    np.save(folder / "docs.npy", np.arange(lengths.sum()) % 97)
    np.save(folder / "docs.starts.npy", starts)
    return folder / "docs.npy"


def update(subject: TrainingState, losses: LossFunction, batch: Batch, settings: Settings) -> Row:
    """One step as the loop takes it; what it recorded."""
    rows: list[Row] = []
    guard = Guard(
        subject.model,
        subject.optimizers,
        run=None,
        scheduler=subject.schedulers,
        clip=settings.optimizer.clip or None,
        scaler=subject.scaler,
        telemetry=Telemetry(sample_every=0),
    )
    guard.loop.trim = lambda row, verdict: rows.append(row) or row  # type: ignore[method-assign, func-returns-value]
    assert subject.scaler is not None
    guard.step(backward(subject.scaler, losses, batch, settings)[0])
    return rows[0]


def test_accumulation_has_the_denominator_of_the_whole_batch(tmp_path: Path) -> None:
    """One step in 1, 2 and 8 portions: the same loss, gradient and weights, up to the order of additions."""
    results = []
    for portions in (1, 2, 8):
        data_settings = DataSettings(
            sources={str(documents_file(tmp_path)): 1.0}, rows="documents", batch=8, accumulation=portions
        )
        settings = nano(tmp_path, data=data_settings)
        data = open_data(settings)
        subject = training(settings, data)
        assert isinstance(subject.model, Transformer)
        batch = data.training.next()
        counts = [(targets != -100).sum() for _, targets in batch.micro_batches(8)]
        assert max(counts) > 2 * min(counts)
        signals = update(subject, subject.model.losses, batch, settings)
        weights = torch.cat([parameter.detach().flatten() for parameter in subject.model.parameters()])
        results.append((float(signals["loss"]), float(signals["grad_norm"]), weights))
    for loss, grad_norm, weights in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-6)
        assert grad_norm == pytest.approx(results[0][1], rel=1e-5)
        assert torch.allclose(weights, results[0][2], atol=1e-5)


def test_the_loss_is_the_mean_over_targets_that_count(tmp_path: Path) -> None:
    """Padding is in no denominator, neither of the loss, nor of its gradient, nor of the evaluation."""
    data_settings = DataSettings(
        sources={str(documents_file(tmp_path)): 1.0}, rows="documents", batch=8, accumulation=4, held_out=0.3
    )
    settings = nano(tmp_path, data=data_settings, optimizer=OptimizerSettings(clip=0.0))
    data = open_data(settings)
    subject = training(settings, data)
    assert isinstance(subject.model, Transformer)

    def mean_loss(batch: Batch) -> torch.Tensor:
        logits = subject.model(torch.from_numpy(batch.tokens)).flatten(0, 1)
        return F.cross_entropy(logits, torch.from_numpy(batch.targets).flatten(), ignore_index=IGNORED)

    held_out = [data.held_out.batch(index) for index in range(settings.cadence.evaluate_batches)]
    weights = np.array([batch.target_count for batch in held_out])
    with torch.no_grad():
        expected = np.average([mean_loss(batch).item() for batch in held_out], weights=weights)
    assert evaluate(subject.model.losses, data.held_out, settings).item() == pytest.approx(expected, rel=1e-5)

    batch = data.training.next()
    loss = mean_loss(batch)
    gradients = torch.autograd.grad(loss, list(subject.model.parameters()))
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
    signals = update(subject, subject.model.losses, batch, settings)
    assert float(signals["loss"]) == pytest.approx(loss.item(), rel=1e-5)
    assert float(signals["grad_norm"]) == pytest.approx(norm, rel=1e-4)


def test_the_evaluation_reads_what_is_held_out(tmp_path: Path, tokens_file: Path) -> None:
    settings = nano(tokens_file, steps=1)
    result, run = run_of(settings, tmp_path / "a")
    torch.manual_seed(settings.seed)
    data = open_data(settings)
    fresh = Transformer(settings.model)
    assert run.column("eval_loss")[0] == evaluate(fresh.losses, data.held_out, settings).item()
    assert run.column("eval_loss")[0] != evaluate(fresh.losses, data.training, settings).item()
    assert result.eval_loss == run.column("eval_loss")[-1]


def keep_gradients(into: list[torch.Tensor], optimizer: Optimizer, *_: object) -> None:
    into += [parameter.grad.clone() for group in optimizer.param_groups for parameter in group["params"]]


def test_the_norm_is_taken_before_clipping_and_clipping_is_done(tmp_path: Path, tokens_file: Path) -> None:
    unclipped = nano(tokens_file, optimizer=OptimizerSettings(clip=0.0, warmup_steps=0))
    clipped = nano(tokens_file, optimizer=OptimizerSettings(clip=0.01, warmup_steps=0))
    norms, kept = [], []
    for settings in (unclipped, clipped):
        data = open_data(settings)
        subject = training(settings, data)
        assert isinstance(subject.model, Transformer)
        gradients: list[torch.Tensor] = []
        subject.optimizers[0].register_step_pre_hook(partial(keep_gradients, gradients))
        norms.append(float(update(subject, subject.model.losses, data.training.next(), settings)["grad_norm"]))
        kept.append(torch.stack([gradient.norm() for gradient in gradients]).norm().item())
    assert norms[0] == norms[1] == pytest.approx(kept[0], rel=1e-5)
    assert norms[0] > 0.1
    assert kept[1] == pytest.approx(0.01, rel=1e-3)


def test_weight_decay_is_on_matrices_only() -> None:
    optimizer = build_optimizer(Transformer(SIZES["nano"].model), OptimizerSettings())
    decayed, spared = optimizer.param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert {parameter.ndim for parameter in decayed["params"]} == {2}
    assert {parameter.ndim for parameter in spared["params"]} == {1}
    assert decayed["fused"] is True


def test_under_mup_hidden_matrices_learn_at_a_rate_of_their_own() -> None:
    shape = replace(SIZES["nano"].model, tied_head=False, mup_base_width=12)
    model = Transformer(shape)
    optimizer = build_optimizer(model, OptimizerSettings(lr=1e-3))
    outside, vectors, hidden = optimizer.param_groups
    assert model.head is not None
    assert set(outside["params"]) == {model.embedding.weight, model.head.weight}
    assert set(hidden["params"]) == {each for each in model.blocks.parameters() if each.ndim == 2}
    assert [(each["lr"], each["weight_decay"]) for each in (outside, vectors, hidden)] == [
        (1e-3, 0.1), (1e-3, 0.0), (pytest.approx(1e-3 / 4), pytest.approx(0.4)),
    ]  # fmt: skip
    settings = replace(SIZES["nano"], model=shape, optimizer=OptimizerSettings(lr=2e-3, warmup_steps=0), steps=101)
    scheduler = LambdaLR(optimizer, partial(lr_share, settings.optimizer, 101))
    take_settings(optimizer, scheduler, settings, 50)
    assert [each["lr"] for each in optimizer.param_groups] == pytest.approx([1.1e-3, 1.1e-3, 1.1e-3 / 4])


def test_the_schedule_is_linear_then_cosine() -> None:
    settings = OptimizerSettings(warmup_steps=10, final_lr_share=0.1)
    shares = [lr_share(settings, 111, step) for step in range(111)]
    assert shares[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert shares[10] == 1.0
    assert shares[60] == pytest.approx(0.55)
    assert shares[110] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(shares[10:]))
    assert lr_share(settings, 5, 4) == 0.5
    assert math.isclose(lr_share(OptimizerSettings(warmup_steps=0), 1, 0), 1.0)


def test_signals_are_those_of_the_stream(tmp_path: Path, tokens_file: Path) -> None:
    settings = nano(tokens_file, steps=12)
    _, run = run_of(settings, tmp_path / "a")
    stream = open_data(settings).training
    batches = [stream.batch(index) for index in range(12)]
    assert run.column("batch_hash")[:12].tolist() == [batch.hash for batch in batches]
    assert run.column("batch_index")[:12].tolist() == list(range(12))
    assert run.column("sources")[0] == f"{tokens_file}=8"
    assert run.column("token_entropy")[10] == batches[10].token_statistics()["token_entropy"]
    assert run.column("eval_loss")[run.logged("eval_loss")].shape == (4,)  # steps 0, 5, 10 and the end
    assert (run.column("tokens_per_s")[run.logged("tokens_per_s")] > 0).all()


def test_checkpoints_come_by_the_clock_too(tmp_path: Path, tokens_file: Path) -> None:
    cadence = CadenceSettings(evaluate_steps=0, checkpoint_steps=0, checkpoint_minutes=1e-9, keep_checkpoints=9)
    run_of(nano(tokens_file, steps=3, cadence=cadence), tmp_path / "a")
    written = {path.name for path in (tmp_path / "a" / "checkpoints").iterdir() if path.is_dir()}
    assert {"1", "3"} <= written <= {"1", "2", "3"}  # the second may come while the first is being written


def test_a_failure_is_written_down(tmp_path: Path, tokens_file: Path) -> None:
    def broken() -> str | None:
        raise RuntimeError("the roof fell in")

    with pytest.raises(RuntimeError, match="roof"):
        run_of(nano(tokens_file), tmp_path / "a", should_stop=broken)
    last = open_run(tmp_path / "a").events[-1]
    assert (last.kind, dict(last.detail)) == ("end", {"reason": "failed", "error": "RuntimeError: the roof fell in"})


def command(folder: Path, words: list[str]) -> None:
    """In a process of its own."""
    os.chdir(folder)
    sys.exit(main(words))


@pytest.mark.xdist_group("ranks")
def test_killed_three_times_at_random_steps_and_resumed(
    tmp_path: Path, tokens_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole promise, with the command, its processes and SIGKILL: bit for bit the run that nobody touched."""
    monkeypatch.chdir(tmp_path)
    words = [
        *("train", "--size", "nano", "--steps", "45", "--threads", "1", "--cadence.evaluate-batches", "1"),
        *("--data.sources", str(tokens_file), "--cadence.checkpoint-steps", "5", "--cadence.evaluate-steps", "10"),
    ]
    assert main([*words, "--run", "whole"]) == 0
    metrics = tmp_path / "experiments" / "cut" / "metrics.jsonl"
    seed = random.randrange(2**32)  # noqa: S311 - any steps will do; printed, so that a failure can be repeated
    print(f"kill seed {seed}")
    chance = random.Random(seed)  # noqa: S311
    resume: list[str] = []
    for kill in range(3):
        process = start(command, tmp_path, [*words, "--run", "cut", *resume])
        target = (metrics.read_bytes().count(b"\n") if metrics.exists() else 0) + chance.randrange(1, 13)
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < target:
            assert process.is_alive(), f"ended before kill {kill}"
            time.sleep(0.01)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        resume = ["--resume"]
    assert main([*words, "--run", "cut", *resume]) == 0
    whole, cut = (open_run(tmp_path / "experiments" / name) for name in ("whole", "cut"))
    begun = [event.kind for event in cut.events if event.kind in ("start", "resume")]
    assert len(begun) == 4, "whole, and again after each kill"
    assert_same(cut, whole)


def test_it_really_learns(tmp_path: Path) -> None:
    """The smallest model, two hundred steps of real text: far below what token frequencies alone would give."""
    settings = resolved(replace(SIZES["nano"], steps=200, threads=1))
    result, run = run_of(settings, tmp_path / "a")
    assert result.eval_loss is not None
    print(f"evaluation loss {result.eval_loss:.3f}, unigram entropy {result.unigram_entropy:.3f}")
    assert result.eval_loss < result.unigram_entropy - 1.0
    assert run.column("loss")[0] == pytest.approx(math.log(512), abs=0.4)
    assert (tmp_path / "a" / "tokenizer.json").stat().st_size > 1000


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch, of itself
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_the_compiled_model_computes_the_same(
    backend: str, tmp_path: Path, tokens_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the graphs alone, and with the C++ that is made of them, which takes a compiler forty seconds."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)  # it begins a pool of processes else
    losses = []
    for compiled in (False, True):
        model = replace(SIZES["nano"].model, layers=1, context=8)
        never = CadenceSettings(evaluate_steps=0, checkpoint_steps=0)
        settings = nano(tokens_file, steps=3, compile=compiled, model=model, cadence=never)
        _, run = run_of(settings, tmp_path / str(compiled), should_stop=stop_after(2))
        losses.append(run.column("loss")[:2])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
