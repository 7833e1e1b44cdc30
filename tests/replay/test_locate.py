"""The first operation that makes NaN or infinity of finite numbers: in models as people write them, and in a run."""

import json
import math
import runpy
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sealegs
from sealegs.capsule.read import open_capsule
from sealegs.cli.main import main
from sealegs.faults.practice import disturbed
from sealegs.faults.spec import parse
from sealegs.guard_options import Checkpointing
from sealegs.lab.model import Transformer
from sealegs.lab.settings import SIZES
from sealegs.lab.sources import open_data
from sealegs.lab.train import resolved, train
from sealegs.replay.locate import Location, _Watch

NANO = SIZES["nano"]


class Model(nn.Module):
    """An embedding and a layer that does what the test says."""

    def __init__(self, does: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(4, 4)
        self.layer = Layer(does)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.embedding(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, does: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.does = does

    def forward(self, x: Tensor) -> Tensor:
        return self.does(x)


def looked_at(model: nn.Module, loss: Callable[[], Tensor]) -> Location | None:
    with _Watch(model) as watch:
        loss().backward()
    found: Location | None = watch.found
    return found


CASES: dict[str, tuple[Callable[[Tensor], Tensor], str, str, str | None]] = {
    "softmax by hand": (lambda x: (x * 1e3).exp() / (x * 1e3).exp().sum(), "forward", "exp", "softmax-overflow"),
    "log of zero": (lambda x: (x * 0).log(), "forward", "log", "log-of-zero"),
    "no epsilon": (
        lambda x: x * (x * 0).square().mean(-1, keepdim=True).rsqrt(),
        "forward",
        "rsqrt",
        "zero-variance-norm",
    ),
    "fp16": (lambda x: (x.half() * 6e4 * 3).float(), "forward", "mul", "fp16-overflow"),
    "divided by zero": (lambda x: x / (x * 0), "forward", "div", None),
    "root of zero": (lambda x: (x * 0).abs().sqrt(), "backward", "div", None),
    "too large for fp32": (lambda x: (x + 1e30) * 1e30, "forward", "mul", None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_operation_is_named(name: str) -> None:
    does, where, operation, cause = CASES[name]
    model = Model(does)
    found = looked_at(model, lambda: model(torch.ones(2, 4)).sum())
    assert found is not None
    assert (found.where, found.module, found.operation, found.cause) == (where, "layer", operation, cause)
    assert found.output is not None
    assert found.output.not_finite
    assert "not finite out" in str(found)


def test_masks_are_no_fault() -> None:
    """Attention writes minus infinity where it must not look, by hand and fused, and all is well."""
    for naive in (False, True):
        torch.manual_seed(0)
        model = Transformer(replace(NANO.model, naive_softmax=naive))
        tokens = torch.randint(0, NANO.model.vocabulary, (4, 32))
        assert looked_at(model, lambda model=model, tokens=tokens: model.losses(tokens, tokens).total) is None  # type: ignore[misc]


TRIANGLE = torch.ones(4, 4).triu(1)
LEAST = torch.finfo(torch.float32).min
MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "written": lambda x: x.masked_fill(TRIANGLE.bool(), -math.inf),
    "a logarithm of 0 and 1": lambda x: x + (1 - TRIANGLE).log(),
    "two, added up": lambda x: x + LEAST * TRIANGLE + LEAST * TRIANGLE,
    "in fewer bits": lambda x: x + (-1e9 * TRIANGLE).half(),
    "the other way round": lambda x: -(-x).masked_fill(TRIANGLE.bool(), math.inf),
}


@pytest.mark.parametrize("name", MASKS)
def test_what_a_softmax_takes_away_is_no_fault(name: str) -> None:
    """Then a fault after it is found: a division by zero, and not the mask."""
    model = Model(lambda x: MASKS[name](x).softmax(-1))
    assert looked_at(model, lambda: model(torch.ones(4, 4)).sum()) is None
    found = looked_at(model, lambda: (model(torch.ones(4, 4)) / 0.0).sum())
    assert found is not None
    assert (found.operation, found.module) == ("div", "")


def test_memory_that_nobody_has_written_to_is_no_fault() -> None:
    model = Model(lambda x: torch.empty_like(x).copy_(x))
    torch.use_deterministic_algorithms(True)  # which fills such memory with NaN
    try:
        assert looked_at(model, lambda: model(torch.ones(4, 4)).sum()) is None
    finally:
        torch.use_deterministic_algorithms(False)


FROM_MINUS_INFINITY: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "all of it masked": (
        lambda x: x.masked_fill(torch.ones(4, 4).bool(), -math.inf).softmax(-1),
        "_softmax",
        "every number of a row is minus infinity: all of it is masked",
    ),
    "entropy of what is masked": (lambda x: x.softmax(-1) * (x * 0).log() * 0, "log", "16 of the numbers are exactly"),
    "a loss of minus infinity": (lambda x: (x * 0).log(), "log", "16 of the numbers are exactly 0"),
    "overflow beside a mask": (
        lambda x: (x.masked_fill(TRIANGLE.bool(), -math.inf) + 500).exp(),
        "exp",
        "exp overflows above 88.7",
    ),
}


@pytest.mark.parametrize("name", FROM_MINUS_INFINITY)
def test_minus_infinity_is_followed_to_where_it_was_made(name: str) -> None:
    does, operation, because = FROM_MINUS_INFINITY[name]
    model = Model(does)
    found = looked_at(model, lambda: model(torch.ones(4, 4)).sum())
    assert found is not None
    assert (found.operation, found.module, found.where) == (operation, "layer", "forward")
    assert found.because.startswith(because)


def test_fused_attention_is_taken_apart() -> None:
    torch.manual_seed(0)
    model = Transformer(NANO.model)
    tokens = torch.randint(0, NANO.model.vocabulary, (4, 32))
    with torch.no_grad():
        attention = model.blocks[1].attention
        assert isinstance(attention, nn.Module)
        weight = attention.get_parameter("query_key_value.weight")
        weight.mul_(1e20)
    found = looked_at(model, lambda: model.losses(tokens, tokens).total)
    assert found is not None
    assert (found.module, found.operation) == ("blocks.1.attention", "bmm")


@pytest.mark.xdist_group("replay")
def test_softmax_that_overflows_in_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No fault was injected: a softmax without its maximum, a rate that grows and no clipping do it by themselves."""
    cadence = replace(NANO.cadence, evaluate_steps=0, checkpoint_steps=0, evaluate_batches=1)
    settings = replace(
        NANO,
        steps=400,
        threads=1,
        shadow=True,
        cadence=cadence,
        model=replace(NANO.model, naive_softmax=True),
        optimizer=replace(NANO.optimizer, lr=0.3, clip=0.0, warmup_steps=300),
    )
    left = iter(range(100))
    stop = lambda: None if next(left, None) is not None else "enough"  # noqa: E731
    train(resolved(settings), open_data(settings), tmp_path / "a", should_stop=stop)
    assert open_capsule(tmp_path / "a/incidents/1").incident.kind == "nonfinite"
    assert main(["locate", f"{tmp_path / 'a'}#1"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("exp in blocks.1.attention, in the forward pass")
    assert "exp overflows above 88.7" in said
    assert main(["replay", f"{tmp_path / 'a'}#1"]) == 0
    assert "TESTED CAUSE: softmax overflow" in capsys.readouterr().out
    assert main(["locate", f"{tmp_path / 'a'}#1", "--step", "3"]) == 2
    assert "not in the capsule" in capsys.readouterr().err


OWN = """
import torch
from torch import nn

import sealegs


class Logarithm(nn.Module):
    def forward(self, x):
        return x.abs().log()


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4, bias=False), Logarithm())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return sealegs.Subject(model=model, optimizers=[optimizer], loss=lambda x: (model(x) - 1).square().mean())
"""
SMALL = Checkpointing(snapshot_memory=2**20, snapshot_every=20)
SPIKE, STEPS = 170, 240
ZEROS, BROKEN = (9, 60, 215), 100
"""Steps whose batch is zeros, of which the logarithm is not finite: an early one, one by itself, and one that comes
more than 30 steps after an incident was found. And a step whose batch is not finite itself."""


def own_loop(folder: Path, zeros: tuple[int, ...], steps: int, **how: Checkpointing) -> None:
    """A loop that is not the lab's, in which single batches are zeros, and all are too large from step 170 on."""
    subject = runpy.run_path(str(folder.parent / "own.py"))["build"]()
    data = torch.randn(steps, 16, 8, generator=torch.Generator().manual_seed(1))
    data[SPIKE:] *= 1e4
    data[[step for step in zeros if step < steps]] = 0.0
    data[BROKEN : BROKEN + 1, 3] = math.nan
    options = {"playbook": sealegs.Playbook.observe(), "checkpoint_every": SMALL, **how}
    with sealegs.Guard(subject.model, subject.optimizers[0], run=folder, **options) as guard:  # type: ignore[arg-type]
        for batch in guard.batches(list(data)):
            loss = subject.loss(batch)
            loss.backward()
            guard.step(loss)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(OWN)
    with pytest.warns(sealegs.RunEndedBadly):
        own_loop(folder / "a", ZEROS, STEPS)
    return folder / "a"


def build_of(run: Path) -> list[str]:
    return ["--build", f"{run.parent / 'own.py'}:build"]


@pytest.mark.parametrize("step", ZEROS)
def test_a_step_that_was_skipped_is_located_whether_or_not_it_opened_an_incident(
    step: int, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["locate", f"{own}@{step}", "--json", *build_of(own)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == found["found"]["step"] == step
    assert (found["found"]["module"], found["found"]["operation"]) == ("1", "log")
    assert found["found"]["cause"] == "log-of-zero"


def test_a_batch_that_is_not_finite_itself_is_named(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["locate", f"{own}@{BROKEN}", *build_of(own)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("a batch of the step is not finite before any operation: float32 16x8, ")
    assert said.endswith("8 not finite\n")


def test_an_incident_is_searched_to_its_first_step_that_is_not_finite(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsule = open_capsule(own / "incidents" / "1")
    assert capsule.incident.kind == "spike"
    assert capsule.description.opened + 30 < ZEROS[-1] in capsule.steps()
    assert main(["locate", str(own), *build_of(own)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("log in 1, in the forward pass")
    assert f"step {ZEROS[-1]}:" in said.err


@pytest.mark.parametrize(
    ("step", "code", "says"),
    [
        ("61", 1, "step 61 was finite: loss "),
        ("9999", 2, f"no such step was logged; it has steps 0 to {STEPS - 1}"),
        ("x", 2, "after the @ comes the number of a step"),
        ("", 2, "after the @ comes the number of a step"),
        ("-3", 2, "after the @ comes the number of a step"),
        ("60 --step 60", 2, "names a step already"),
    ],
)
def test_a_step_that_is_none_or_was_finite_is_a_sentence(
    step: str, code: int, says: str, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["locate", *f"{own}@{step}".split(), *build_of(own)]) == code
    said = capsys.readouterr()
    assert says in (said.err if code == 2 else said.out)
    assert "Traceback" not in said.err


def test_nothing_follows_from_a_rerun_that_is_not_the_run(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(OWN.replace(".log()", ".clamp(min=1e-3).log()").replace("- 1)", "- 2)"))
    assert main(["locate", f"{own}@60", *build_of(tmp_path / "a")]) == 1
    said = capsys.readouterr().out
    assert said.startswith("all operations of step 60 are finite when they are run again; but step ")
    assert said.endswith("so that nothing follows from it\n")


def test_an_incident_and_a_step_are_not_named_together(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["locate", f"{own}#1@215", *build_of(own)]) == 2
    assert f"{own}#1 --step 215, or {own}@215" in capsys.readouterr().err


def test_a_step_that_cannot_be_reached_is_a_sentence_with_those_that_can(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "a"
    shutil.copytree(own, run)
    for single in (run / "incidents").glob("step-*"):
        shutil.rmtree(single)
    assert main(["locate", f"{run}@60", *build_of(own)]) == 2
    said = capsys.readouterr().err
    assert "it cannot be run again (no state from before it is kept together with the batches since)" in said
    state = open_capsule(run / "incidents" / "1").description.state
    assert f"these can be: {state} to " in said
    shutil.rmtree(run / "incidents" / "1" / "capsule" / "state")
    assert main(["locate", f"{run}@215", *build_of(own)]) == 2
    assert "it is damaged" in capsys.readouterr().err


def test_a_step_is_reached_from_a_checkpoint_that_is_too_large_to_hold_on_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One step is no reason to keep gigabytes: its batches are written, and the state is found while it is there."""
    (tmp_path / "own.py").write_text(OWN)
    how = Checkpointing(every=20, keep=2, snapshot_memory=0, capsule_bytes=60_000)
    own_loop(tmp_path / "a", (60,), 64, checkpoint_every=how)
    single = tmp_path / "a" / "incidents" / "step-60"
    described = open_capsule(single).description
    assert described.state is None
    assert "while that is kept" in described.without_state
    assert not (single / "capsule" / "state").exists()
    words = ["locate", f"{tmp_path / 'a'}@60", *build_of(tmp_path / "a")]
    assert main(words) == 0
    assert "log in 1" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    assert main(words) == 2
    assert "there is no step that can be" in capsys.readouterr().err


@pytest.mark.xdist_group("replay")
def test_a_gradient_that_was_struck_from_outside_is_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fault of the lab's is not in model and batches: rerun, the step is finite, and that is what it says."""
    cadence = replace(NANO.cadence, evaluate_steps=0, checkpoint_steps=0, evaluate_batches=1)
    settings = resolved(replace(NANO, steps=44, threads=1, cadence=cadence))
    disturb = partial(disturbed, [parse("nan-gradient@40")], settings.model.vocabulary)
    train(settings, open_data(settings), tmp_path / "a", disturb=disturb)
    assert main(["locate", str(tmp_path / "a")]) == 2
    assert f"sealegs locate {tmp_path / 'a'}@40" in capsys.readouterr().err
    assert main(["locate", f"{tmp_path / 'a'}@40"]) == 1
    said = capsys.readouterr()
    assert "all operations of step 40 are finite when they are run again, though grad" in said.out
    assert "embedding" in said.out
    assert "as in the record" not in said.err
