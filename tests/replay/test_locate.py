"""The first operation that makes NaN or infinity of finite numbers: in models as people write them, and in a run."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sealegs.capsule.read import open_capsule
from sealegs.cli.main import main
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
