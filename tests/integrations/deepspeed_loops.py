"""A Trainer and a loop of Accelerate, both over an engine of DeepSpeed: run by test_deepspeed_loops.py on two ranks."""

import json
import logging
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin
from tests.integrations import small
from tests.integrations.deepspeed_ranks import digest, held
from torch import nn

import sealegs
from sealegs.guard_options import Checkpointing
from sealegs.integrations import deepspeed as guarded
from sealegs.integrations import deepspeed_trainer
from sealegs.integrations.deepspeed_engine import loss_scale

STEPS, NAN, SPIKE, SAVED = 26, 12, 20, 10
ROWS = 16
"""Of a micro-batch of the loop."""
FAULTS = {NAN: math.nan, SPIKE: 3000.0}


def zero(stage: int, accumulation: int = 1, *, bf16: bool = True) -> dict[str, Any]:
    """Its settings; the Trainer takes no bf16 on a CPU that it is not told of, and DeepSpeed is not told so."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,
    }


@contextmanager
def looked_at(engine: Any, seen: dict[str, Any], faults: dict[int, float]) -> Iterator[None]:
    """Whether each step of an engine changes what it holds; a loss may be multiplied on rank 1."""
    step, backward = engine.step, engine.backward

    def watched(*args: Any, **kwargs: Any) -> None:
        number, before = engine.global_steps, held(engine)
        step(*args, **kwargs)
        if engine.global_steps > number and all(map(torch.equal, before, held(engine))):
            seen["unchanged"].append(number)

    def broken(loss: Any, *args: Any, **kwargs: Any) -> Any:
        factor = faults.get(engine.global_steps, 1.0) if dist.get_rank() == 1 else 1.0
        seen["losses"].append(float(loss))
        return backward(loss * factor, *args, **kwargs)

    engine.step, engine.backward = watched, broken
    yield
    engine.step, engine.backward = step, backward


def of_loop(
    out: Path,
    stage: int,
    *,
    run: str = "",
    faults: dict[int, float] | None = None,
    saving: str = "",
    resuming: str = "",
    steps: int = STEPS,
    damaged: int = -1,
    **options: Any,
) -> dict[str, Any]:
    """A loop of Accelerate's, of two micro-batches a step."""
    plugin = DeepSpeedPlugin(hf_ds_config=zero(stage, 2) | {"train_micro_batch_size_per_gpu": ROWS})
    accelerator = Accelerator(deepspeed_plugin=plugin)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.98)
    data: Any = torch.randn(32 * ROWS, 8, generator=torch.Generator().manual_seed(5))
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, torch.utils.data.DataLoader(data, batch_size=ROWS), schedule
    )
    seen: dict[str, Any] = {"unchanged": [], "losses": [], "numbers": []}
    guard = guarded.attach(model, run=out / run, resume=bool(resuming), **options) if run else None
    if resuming:
        accelerator.load_state(str(out / resuming))
    to_damage = [damaged]
    with looked_at(model, seen, faults or {}):
        while model.global_steps < steps:
            for batch in loader if guard is None else guard.batches(loader):
                if [model.global_steps] == to_damage:
                    to_damage.clear()
                    for each in guard.weights() if guard is not None else ():
                        each.data.mul_(30.0)
                with accelerator.accumulate(model):
                    batch = batch.bfloat16()
                    loss = (model(batch).float() - batch.float()[:, :4]).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    seen["numbers"].append(model.global_steps)
                    if saving and model.global_steps == SAVED:
                        accelerator.save_state(str(out / saving))
                if model.global_steps == steps:
                    break
    if guard is not None:
        guard.close()
    seen |= {"end": digest(model), "lr": model.get_lr(), "scale": loss_scale(model)}
    reset()
    return seen


def of_trainer(
    out: Path, stage: int, *, run: str = "", faults: dict[int, float] | None = None, resume: str = "", **more: Any
) -> dict[str, Any]:
    """A Trainer, whose schedule is its own."""
    settings: dict[str, Any] = {
        "deepspeed": zero(stage, bf16=False),
        "max_steps": STEPS,
        "optim": "adamw_torch",
        "use_cpu": False,
        "max_grad_norm": 1.0,
        "warmup_steps": 0,
        **more,
    }
    trainer = small.trainer(out / f"{run or 'plain'}-trainer", **settings)
    seen: dict[str, Any] = {"unchanged": [], "losses": []}
    if run:
        deepspeed_trainer.attach(trainer, run=out / run)
    prepare = trainer._prepare_for_training
    inside: list[Any] = []

    def prepared(*args: Any) -> Any:
        found = prepare(*args)
        inside.append(looked_at(trainer.model_wrapped, seen, faults or {}))
        inside[-1].__enter__()
        return found

    trainer._prepare_for_training = prepared
    trainer.train(resume_from_checkpoint=resume or None)
    engine = trainer.model_wrapped
    seen |= {"end": digest(engine), "lr": trainer.lr_scheduler.get_last_lr(), "steps": trainer.state.global_step}
    inside[-1].__exit__(None, None, None)
    seen["losses"] = seen["losses"][-STEPS:]
    reset()
    return seen


def reset() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()


def main(out: Path) -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "localhost", "ACCELERATE_USE_DEEPSPEED": "true"}
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=world)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    saw: dict[str, Any] = {}
    for stage in (2, 3):
        name = f"loop zero {stage}"
        saw[name] = of_loop(out, stage)
        saw[f"{name} guarded"] = of_loop(out, stage, run=f"loop-{stage}-guarded")
        saw[f"{name} faulted"] = of_loop(out, stage, run=f"loop-{stage}-faulted", faults=FAULTS)
        standard: Any = {
            "playbook": sealegs.Playbook.standard(),
            "checkpoint_every": Checkpointing(snapshot_every=20),
        }
        run, state = f"loop-{stage}-standard", f"loop-{stage}-state"
        saw[f"{name} standard"] = of_loop(out, stage, run=run, saving=state, **standard)
        saw[f"{name} resumed"] = of_loop(out, stage, run=run, resuming=state, **standard)
        saw[f"{name} damaged"] = of_loop(out, stage, run=f"loop-{stage}-damaged", steps=110, damaged=70, **standard)
        name = f"trainer zero {stage}"
        saw[name] = of_trainer(out, stage)
        saving: Any = {"save_strategy": "steps", "save_steps": SAVED}
        saw[f"{name} guarded"] = of_trainer(out, stage, run=f"trainer-{stage}-guarded", **saving)
        checkpoint = str(out / f"trainer-{stage}-guarded-trainer" / f"checkpoint-{SAVED}")
        saw[f"{name} resumed"] = of_trainer(out, stage, run=f"trainer-{stage}-guarded", resume=checkpoint)
        saw[f"{name} faulted"] = of_trainer(out, stage, run=f"trainer-{stage}-faulted", faults=FAULTS)
    (out / f"{rank}.json").write_text(json.dumps(saw))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
