"""torchtitan's optimizer container and mixture of experts under a guard of one's own: on a CPU, without its trainer.

Its trainer needs CUDA, and its language models FlexAttention, which has no backward pass on CPUs.
"""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import sealegs
from sealegs.faults.injector import inject
from sealegs.faults.spec import parse
from sealegs.guard import Guard
from sealegs.step.skip_way import Skipping

torchtitan = pytest.importorskip(
    "torchtitan.components.optimizer",
    reason="torchtitan is not installed: see docs/torchtitan.md",
    exc_type=ImportError,
)
pytestmark = [
    pytest.mark.xdist_group("deepspeed"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.integration("torchtitan"),
]
STEPS, NAN, SPIKE = 26, 12, 20


class Small(nn.Module):
    """A table, one block that is torchtitan's mixture of experts, and a head."""

    def __init__(self) -> None:
        super().__init__()
        from torchtitan.models.deepseek_v3 import model_registry

        with torch.device("meta"):
            debug = model_registry("debugmodel").model.build()
        debug.to_empty(device="cpu")
        torch.manual_seed(0)
        debug.init_weights(buffer_device=torch.device("cpu"))
        block = nn.Module()
        block.moe = next(each.moe for each in debug.layers.values() if getattr(each, "moe_enabled", False))
        block.moe_enabled = True  # type: ignore[assignment]
        self.layers = nn.ModuleDict({"0": block})
        self.table = nn.Embedding(32, 256)
        self.head = nn.Linear(256, 32)

    def forward(self, ids: Any) -> Any:
        inner: Any = self.layers["0"]
        hidden = self.table(ids)
        return self.head(hidden + inner.moe(hidden))

    @property
    def moe(self) -> Any:
        inner: Any = self.layers["0"]
        return inner.moe


@pytest.fixture(scope="module")
def made() -> Small:
    return Small()


def container_of(model: Small) -> Any:
    config = torchtitan.default_adamw(lr=1e-3)
    config.implementation = "foreach"
    return config.build(model_parts=[model])


def balanced(optimizers: Any, model: Small) -> None:
    """torchtitan's own hook."""
    alone: Any = SimpleNamespace(ep_enabled=False, tp=1, get_optional_mesh=lambda _: None)
    torchtitan.register_moe_load_balancing_hook(optimizers, [model], alone)


def loss_of(model: Small, step: int) -> Any:
    ids = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def held(model: Small, container: Any) -> list[Any]:
    """Weights, biases of the experts, and moments; not the counts, which a forward pass changes."""
    moments = [each for inner in container.optimizers for state in inner.state.values() for each in state.values()]
    return [each.clone() for each in (*model.parameters(), model.moe.expert_bias_E, *moments)]


def plain(made: Small, left_out: tuple[int, ...] = ()) -> list[Any]:
    model = copy.deepcopy(made)
    container = container_of(model)
    balanced(container, model)
    for step in range(STEPS):
        if step in left_out:
            continue
        loss_of(model, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        container.step()
        container.zero_grad()
    return held(model, container)


def guarded(made: Small, folder: Path, faults: tuple[str, ...] = ()) -> tuple[list[Any], list[int]]:
    model = copy.deepcopy(made)
    container = container_of(model)
    (inner,) = container.optimizers
    balanced(inner, model)  # of the optimizer that the guard calls, or does not
    unchanged = []
    with (
        Guard(model, inner, run=folder, clip=1.0, act=Skipping(way="host")) as guard,
        inject([parse(each) for each in faults], model, clock=lambda: guard.number),
    ):
        for step in range(STEPS):
            before = held(model, container)
            loss = loss_of(model, step)
            loss.backward()
            verdict = guard.step(loss)
            if not verdict.go:
                model.moe.tokens_per_expert_E.zero_()
            after = held(model, container)
            if len(before) == len(after) and all(map(torch.equal, before, after)):
                unchanged.append(step)
    return held(model, container), unchanged


@pytest.mark.conforms("unchanged")
def test_where_nothing_happens_nothing_is_changed(made: Small, tmp_path: Path) -> None:
    end, unchanged = guarded(made, tmp_path / "a")
    assert unchanged == []
    assert all(map(torch.equal, end, plain(made)))


@pytest.mark.conforms("nan", "spike")
def test_a_skip_leaves_the_biases_of_experts_alone_too(made: Small, tmp_path: Path) -> None:
    faults = (f"nan-gradient@{NAN}", f"gradient-scale:factor=3000@{SPIKE}")
    end, unchanged = guarded(made, tmp_path / "a", faults)
    assert unchanged == [NAN, SPIKE]
    assert all(map(torch.equal, end, plain(made, left_out=(NAN, SPIKE)))), "as if these batches had never been"
    assert {event.step for event in sealegs.open_run(tmp_path / "a").events if event.kind == "skip"} == {NAN, SPIKE}
