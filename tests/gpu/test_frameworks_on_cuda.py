"""Frameworks whose models are on a device, which decides about updates by itself where their optimizer is fused."""

import gc
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations import lightning_small, loop, small
from tests.integrations.small import NAN, SPIKE, STEPS

import sealegs
from sealegs.guard_options import Checkpointing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.xdist_group("transformers"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none here"),
]
PRECISIONS = ["fp32", "bf16", "fp16"]
MIXED = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
HOME = "lightning.pytorch"
WITHOUT_ADVICE = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.*:FutureWarning",  # of Lightning's, with torch 2.11
    "ignore:.*does not have many workers",
    "ignore::sealegs.integrations.preflight_advice.PreflightWarning",  # is another test's
)
Told = list[tuple[str, str]]
"""Digests before and after each update."""


@pytest.fixture(autouse=True)
def every_sum_in_one_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Else two runs differ in the last bit, with a guard or without."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    gc.collect()  # a loader that was not read to its end says so to the state that is about to go
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def unchanged(told: Told) -> list[int]:
    return [step for step, (before, after) in enumerate(told) if before == after]


def skips_of(folder: Path) -> list[int]:
    run = sealegs.open_run(folder)
    assert run.steps.tolist() == list(range(STEPS))
    return [event.step for event in run.events if event.kind == "skip"]


def hf_trainer(folder: Path, precision: str, **settings: Any) -> Any:
    model = small.llama()
    model.set_attn_implementation("eager")
    settings |= {} if precision == "fp32" else {precision: True}
    return small.trainer(folder, model=model, use_cpu=False, **settings)


def watched(trainer: Any) -> Told:
    from transformers import TrainerCallback

    told: Told = []

    class Looking(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.before = small.digest(trainer.model, trainer.optimizer.optimizer)

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            told.append((self.before, small.digest(trainer.model, trainer.optimizer.optimizer)))

    trainer.add_callback(Looking())
    return told


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_trainer_is_as_ever_until_something_happens(precision: str, tmp_path: Path) -> None:
    plain = hf_trainer(tmp_path / "plain", precision)
    alone = watched(plain)
    plain.train()
    trainer = hf_trainer(tmp_path / "out", precision)
    small.attached(trainer, tmp_path / "run", playbook=sealegs.Playbook.standard())
    told = watched(trainer)
    trainer.train()
    assert told == alone
    assert small.logged(trainer) == small.logged(plain)
    assert skips_of(tmp_path / "run") == []


@pytest.mark.parametrize("optimizer", ["adamw_torch_fused", "adamw_torch"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_trainer_skips_exactly(precision: str, optimizer: str, tmp_path: Path) -> None:
    trainer = hf_trainer(tmp_path / "out", precision, optim=optimizer)
    attached = small.attached(trainer, tmp_path / "run")
    told = watched(trainer)
    with small.broken(trainer.model, lambda: attached.guard.number):
        trainer.train()
    assert unchanged(told) == [NAN, SPIKE]
    assert skips_of(tmp_path / "run") == [NAN, SPIKE]
    run = sealegs.open_run(tmp_path / "run")
    said = next(event.detail for event in run.events if event.kind == "guard")
    assert said["skips_on_the_device"] == (optimizer == "adamw_torch_fused")
    nan = next(event.detail["text"] for event in run.events if event.step == NAN and event.kind == "skip")
    assert "in model." in nan, "the tensor at fault is named"


def test_the_trainer_goes_back_behind_damage(tmp_path: Path) -> None:
    steps, damaged = 120, 70
    trainer = hf_trainer(tmp_path / "out", "bf16", max_steps=steps, learning_rate=3e-3)
    options: dict[str, Any] = {
        "playbook": sealegs.Playbook.standard(),
        "checkpoint_every": Checkpointing(snapshot_every=20),
    }
    small.attached(trainer, tmp_path / "run", **options)
    from transformers import TrainerCallback

    class Damaging(TrainerCallback):  # type: ignore[misc]
        is_done = False

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == damaged and not self.is_done:
                self.is_done = True
                with torch.no_grad():
                    for parameter in trainer.model.parameters():
                        parameter.data.mul_(8.0)  # damage, not a loop that sets its weights

    trainer.add_callback(Damaging())
    trainer.train()
    assert trainer.state.global_step == steps
    run = sealegs.open_run(tmp_path / "run")
    (intervention,) = [event.detail for event in run.events if event.kind == "intervention"]
    assert intervention["acted"]
    assert 0 < intervention["to_step"] < damaged
    losses, epoch = run.column("loss"), 16
    assert losses[-epoch:].mean() < losses[damaged - epoch : damaged].mean(), "and goes on learning"


def lightning_options(precision: str) -> dict[str, Any]:
    """The scale that torch begins with would overflow in the first steps, guarded or not."""
    options: dict[str, Any] = {"accelerator": "gpu", "limit_val_batches": 0}
    if precision != "fp16":
        return options | {"precision": "32-true" if precision == "fp32" else "bf16-mixed"}
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    return options | {"plugins": [import_module(HOME).plugins.MixedPrecision("16-mixed", "cuda", scaler=scaler)]}


def accelerated(run: Path | None, precision: str) -> Told:
    """A loop of Accelerate's: with faults, if there is a guard."""
    from accelerate import Accelerator

    from sealegs.integrations import accelerate

    accelerator = Accelerator(mixed_precision=MIXED[precision])
    made = loop.parts(accelerator)
    model, optimizer, _, scheduler = made
    told: Told = []
    before: list[str] = []

    def look() -> None:
        before.append(small.digest(model, optimizer.optimizer))

    def compare() -> None:
        told.append((before[-1], small.digest(model, optimizer.optimizer)))

    if run is None:
        loop.trained(accelerator, made, before=look, after=compare)
        return told
    with accelerate.attach(accelerator, model, optimizer, scheduler=scheduler, run=run) as guard:
        faults = small.FAULTS if run.name == "broken" else ()
        with small.broken(model, lambda: guard.number, faults):
            loop.trained(accelerator, made, guard, before=look, after=compare)
    return told


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_loop_of_accelerate_is_as_ever_and_skips_exactly(precision: str, tmp_path: Path) -> None:
    alone = accelerated(None, precision)
    assert accelerated(tmp_path / "whole", precision) == alone
    assert skips_of(tmp_path / "whole") == []
    assert unchanged(accelerated(tmp_path / "broken", precision)) == [NAN, SPIKE]
    assert skips_of(tmp_path / "broken") == [NAN, SPIKE]


@WITHOUT_ADVICE
@pytest.mark.parametrize("precision", PRECISIONS)
def test_lightning_is_as_ever_and_skips_exactly(precision: str, tmp_path: Path) -> None:
    from sealegs.integrations.lightning import Guarded

    ends = []
    for callbacks in ((), (Guarded(run=tmp_path / "whole", playbook=sealegs.Playbook.standard()),)):
        module = lightning_small.module_class(HOME)()
        trainer = lightning_small.fitted(
            module, *callbacks, home=HOME, gradient_clip_val=0.5, **lightning_options(precision)
        )
        ends.append((lightning_small.digest(module.net, *trainer.optimizers), module.digests))
    assert ends[0] == ends[1]
    assert skips_of(tmp_path / "whole") == []
    broken = lightning_small.module_class(HOME)(lightning_small.BROKEN)
    guarded = Guarded(run=tmp_path / "broken")
    lightning_small.fitted(broken, guarded, home=HOME, gradient_clip_val=0.5, **lightning_options(precision))
    same = [step for step in range(STEPS - 1) if broken.digests[step] == broken.digests[step + 1]]
    assert same == [lightning_small.NAN, lightning_small.SPIKE] == skips_of(tmp_path / "broken")


@WITHOUT_ADVICE
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_fused_optimizer_of_lightning_is_decided_about_on_the_device(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And clipped for by the guard, as Lightning refuses to in mixed precision."""
    from sealegs.integrations.lightning import Guarded

    def fused(net: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(net.parameters(), lr=1e-2, betas=(0.9, 0.95), fused=True)

    monkeypatch.setattr(lightning_small, "optimizer_of", fused)
    module = lightning_small.module_class(HOME)(lightning_small.BROKEN)
    guarded = Guarded(run=tmp_path / "run", clip=0.5)
    lightning_small.fitted(module, guarded, home=HOME, **lightning_options(precision))
    same = [step for step in range(STEPS - 1) if module.digests[step] == module.digests[step + 1]]
    assert same == [lightning_small.NAN, lightning_small.SPIKE] == skips_of(tmp_path / "run")
    run = sealegs.open_run(tmp_path / "run")
    assert next(event.detail for event in run.events if event.kind == "guard")["skips_on_the_device"]
    assert max(run.column("grad_norm")[:10]) > 0.5, "there was something to clip"
