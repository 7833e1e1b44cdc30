"""The names inside DeepSpeed that a guard goes by, and what it refuses: one process, no training."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sealegs
from sealegs.errors import ConfigError

deepspeed = pytest.importorskip(
    "deepspeed", reason="deepspeed is not installed: `make test-long` runs this in its own environment"
)
pytestmark = [
    pytest.mark.xdist_group("deepspeed"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # DeepSpeed's, when it makes an engine
    pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning"),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    store = tmp_path_factory.mktemp("group") / "store"
    patch = pytest.MonkeyPatch()
    patch.setenv("LOCAL_RANK", "0")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    yield
    patch.undo()
    dist.destroy_process_group()


def engine_of(*, stage: int = 2, **more: Any) -> Any:
    model = nn.Linear(4, 2)
    zero = {"stage": stage, **more.pop("zero", {})}
    config = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "zero_optimization": zero, **more}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def test_the_names_are_there() -> None:
    from sealegs.integrations.deepspeed_engine import INTERNALS

    looked_for = 0
    for where, names in INTERNALS.items():
        module, _, kind = where.partition(":")
        owner = getattr(import_module(module), kind) if kind else import_module(module)
        missing = [name for name in names if not hasattr(owner, name)]
        assert not missing, f"{where} has no {missing}"
        looked_for += len(names)
    assert looked_for > 30


def test_the_version_is_in_the_range() -> None:
    from sealegs.integrations import deepspeed as guarded

    now = tuple(map(int, deepspeed.__version__.split("+")[0].split(".")[:3]))
    assert guarded.OLDEST <= now < guarded.NEXT


@pytest.mark.usefixtures("alone")
def test_what_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from accelerate.utils import DistributedType

    from sealegs.integrations import accelerate, deepspeed_trainer
    from sealegs.integrations import deepspeed as guarded

    engine = engine_of()
    given: Any = {"run": tmp_path / "a"}
    refused: tuple[tuple[Any, str], ...] = (
        ({"clip": 1.0}, "clip=1.0: DeepSpeed clips: set gradient_clipping in its config"),
        ({"checkpoint_every": 5}, "checkpoint_every=5: the weights are divided by DeepSpeed"),
        ({"scheduler": None}, "scheduler=None: a guard has no such option"),
    )
    for options, says in refused:
        with pytest.raises(ConfigError, match=says):
            guarded.attach(engine, **given, **options)
    with pytest.raises(ConfigError, match=r"engine=Linear: give what deepspeed\.initialize or prepare made"):
        guarded.attach(engine.module, **given)
    with pytest.raises(ConfigError, match=r"trainer=object: give a transformers\.Trainer"):
        deepspeed_trainer.attach(object(), **given)
    other: Any = SimpleNamespace(distributed_type=DistributedType.DEEPSPEED)
    with pytest.raises(ConfigError, match=r"sealegs.integrations.deepspeed.attach\(model\)"):
        accelerate.refuse_foreign(other)
    monkeypatch.setattr(deepspeed, "__version__", "0.20.0")
    with pytest.raises(
        ConfigError, match=r"deepspeed 0.20.0: a guard goes by its internals, and knows those from 0.19.8"
    ):
        guarded.attach(engine, **given)
    monkeypatch.undo()
    without = engine_of(zero={"compute_grad_norm": False}, gradient_clipping=0.0)
    with pytest.raises(ConfigError, match="compute_grad_norm=false"):
        guarded.attach(without, **given)
    assert not (tmp_path / "a").exists()
    with guarded.attach(engine, **given), pytest.raises(ConfigError, match="attached to it already"):
        guarded.attach(engine, **given)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_shadow_mode_says_and_does_nothing(stage: int, tmp_path: Path) -> None:
    from sealegs.integrations import deepspeed as guarded

    torch.manual_seed(0)
    engine = engine_of(stage=stage)
    data = torch.randn(30, 4, 4, generator=torch.Generator().manual_seed(1)).bfloat16()
    with guarded.attach(engine, run=tmp_path / "a", act=False) as guard:
        for number, batch in enumerate(data):
            loss = engine(batch).float().square().mean() * (3000.0 if number == 25 else 1.0)
            engine.backward(loss)
            before = [each.clone() for each in guard.weights()]
            engine.step()
            assert not all(map(torch.equal, before, guard.weights()))
        with pytest.raises(ConfigError, match=r"call engine\.step\(\)"):
            guard.step(loss)
    run = sealegs.open_run(tmp_path / "a")
    assert [(event.step, event.detail["acted"]) for event in run.events if event.kind == "skip"] == [(25, False)]
    assert engine.global_steps == 30


@pytest.mark.usefixtures("alone")
def test_a_step_without_a_loss_is_one_sentence(tmp_path: Path) -> None:
    from sealegs.integrations import deepspeed as guarded

    engine = engine_of()
    with guarded.attach(engine, run=tmp_path / "a"):
        engine(torch.randn(4, 4).bfloat16()).float().sum().backward()
        with pytest.raises(ConfigError, match=r"no loss was seen in this step; call engine.backward\(loss\) before it"):
            engine.step()
