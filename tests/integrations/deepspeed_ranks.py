"""Engines of DeepSpeed on two ranks, with and without a guard: run by test_deepspeed.py on each of them.

Writes to OUT/<rank>.json what each rank saw of each engine, or why that engine could not be made here.
"""

import hashlib
import json
import logging
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import sealegs
from sealegs.guard_options import Checkpointing
from sealegs.integrations import deepspeed as guarded
from sealegs.integrations.deepspeed_engine import inner_optimizer, loss_scale

STEPS, NAN, SPIKE, SAVED = 26, 12, 20, 10
BACK_STEPS, DAMAGED = 110, 70
AT_FAULT = 1

ENGINES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "zero 0 fp32": (0, "fp32", {}),
    "zero 0 bf16": (0, "bf16", {}),
    "zero 0 fp16": (0, "fp16", {}),
    "zero 1 bf16": (1, "bf16", {}),
    "zero 1 bf16, gradients added in fp32": (1, "bf16", {"data_types": {"grad_accum_dtype": "fp32"}}),
    "zero 1 fp16": (1, "fp16", {}),
    "zero 2 fp32": (2, "fp32", {}),
    "zero 2 bf16": (2, "bf16", {}),
    "zero 2 bf16, overflow not looked for": (2, "bf16", {"bf16": {"enabled": True, "check_grad_overflow": False}}),
    "zero 2 fp16": (2, "fp16", {}),
    "zero 2 bf16, two micro-batches": (2, "bf16", {"gradient_accumulation_steps": 2}),
    "zero 2 bf16, optimizer on the host": (2, "bf16", {"offload": ("offload_optimizer",)}),
    "zero 3 fp32": (3, "fp32", {}),
    "zero 3 bf16": (3, "bf16", {}),
    "zero 3 fp16": (3, "fp16", {}),
    "zero 3 bf16, two micro-batches": (3, "bf16", {"gradient_accumulation_steps": 2}),
    "zero 3 bf16, weights and optimizer on the host": (3, "bf16", {"offload": ("offload_optimizer", "offload_param")}),
}
GOING_BACK = (
    "zero 0 fp32",
    "zero 0 bf16",
    "zero 2 bf16",
    "zero 2 fp16",
    "zero 3 bf16",
    "zero 3 bf16, two micro-batches",
)
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def engine_of(stage: int, precision: str, more: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 40}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if precision == "fp16":
        config["fp16"] |= {"initial_scale_power": 3, "hysteresis": 1}  # so small that a spike is none of its overflows
    zero |= {name: {"device": "cpu"} for name in more.get("offload", ())}
    config |= {name: value for name, value in more.items() if name != "offload"}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=config,
        lr_scheduler=lambda inner: torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.98),
    )
    return engine


def loader() -> DataLoader[Any]:
    data: Any = torch.randn(192, 8, generator=torch.Generator().manual_seed(5))
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, seed=3))


def epochs(guard: Any) -> Iterator[Any]:
    batches = loader()
    while True:
        if guard is None:
            yield from batches
        else:
            yield from guard.batches(batches)


def held(engine: Any) -> list[Tensor]:
    """Copies of everything that an update changes, as this rank holds it."""
    optimizer = inner_optimizer(engine)
    masters = [each for group in optimizer.param_groups for each in group["params"]]
    weights = [getattr(each, "ds_tensor", each) for each in engine.module.parameters()]
    moments = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor)]
    return [each.detach().clone() for each in (*masters, *weights, *moments)]


def digest(engine: Any) -> str:
    found = hashlib.sha256()
    for each in held(engine):
        found.update(each.double().numpy().tobytes())
    return found.hexdigest()


def scale_of(engine: Any) -> float | None:
    return loss_scale(engine) if engine.fp16_enabled() else None


def trained(
    engine: Any,
    guard: Any,
    dtype: torch.dtype,
    *,
    steps: int = STEPS,
    faults: dict[int, float] | None = None,
    damage: bool = False,
    save: Path | None = None,
) -> dict[str, Any]:
    """Train, with losses that are multiplied on one rank at some steps; what was seen at each step."""
    seen: dict[str, Any] = {"unchanged": [], "scale": [], "lr": [], "norm": [], "numbers": [], "losses": []}
    is_damaged = False
    batches = epochs(guard)
    while engine.global_steps < steps:
        number = engine.global_steps
        if save is not None and number == SAVED and not (save / "latest").exists():
            engine.save_checkpoint(str(save))
        if damage and number == DAMAGED and not is_damaged:
            is_damaged = True
            for group in inner_optimizer(engine).param_groups:
                for each in group["params"]:
                    each.data.mul_(30.0)
        before, scale = held(engine), scale_of(engine)
        while True:
            batch = next(batches).to(dtype)
            loss = (engine(batch).float() - batch.float()[:, :4]).square().mean()
            if dist.get_rank() == AT_FAULT and faults and number in faults:
                loss = loss * faults[number]
            seen["losses"].append(float(loss))
            engine.backward(loss)
            is_last = engine.is_gradient_accumulation_boundary()
            engine.step()
            if is_last:
                break
        after = held(engine)
        if engine.global_steps == number + 1:
            if len(before) == len(after) and all(map(torch.equal, before, after)):
                seen["unchanged"].append(number)
            seen["scale"].append((scale, scale_of(engine)))
            seen["lr"].append(engine.get_lr()[0])
            seen["norm"].append(float(engine.get_global_grad_norm() or 0.0))
        seen["numbers"].append(engine.global_steps)
    batches.close()  # type: ignore[attr-defined]
    return seen | {"end": digest(engine)}


def saw_of(out: Path, name: str) -> dict[str, Any]:
    stage, precision, more = ENGINES[name]
    dtype, folder = TYPES[precision], out / name.replace(" ", "-").replace(",", "")
    try:
        engine = engine_of(stage, precision, more)
    except (ValueError, RuntimeError, AssertionError, NotImplementedError) as error:
        return {"cannot": f"{type(error).__name__}: {str(error).splitlines()[0]:.160}"}
    saw: dict[str, Any] = {"optimizer": type(engine.optimizer).__name__, "plain": trained(engine, None, dtype)}
    engine = engine_of(stage, precision, more)
    with guarded.attach(engine, run=folder / "guarded") as guard:
        saw["guarded"] = trained(engine, guard, dtype, save=folder / "saved")
    saw["left alone"] = "step" not in vars(engine) and "backward" not in vars(engine)
    engine = engine_of(stage, precision, more)
    with guarded.attach(engine, run=folder / "guarded", resume=True) as guard:
        engine.load_checkpoint(str(folder / "saved"))
        saw["resumed"] = trained(engine, guard, dtype) | {"at": guard.number}
    engine = engine_of(stage, precision, more)
    with guarded.attach(engine, run=folder / "faulted") as guard:
        saw["faulted"] = trained(engine, guard, dtype, faults={NAN: math.nan, SPIKE: 3000.0})
    if name in GOING_BACK:
        engine = engine_of(stage, precision, more)
        options: dict[str, Any] = {
            "playbook": sealegs.Playbook.standard(),
            "checkpoint_every": Checkpointing(snapshot_every=20),
        }
        with guarded.attach(engine, run=folder / "damaged", **options) as guard:
            saw["damaged"] = trained(engine, guard, dtype, steps=BACK_STEPS, damage=True)
    return saw


def main(out: Path, *names: str) -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    get_accelerator().is_fp16_supported = lambda: True  # torch computes in fp16 on CPUs, and DeepSpeed says no
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "localhost"}
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=world)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    for name in names or ENGINES:
        saw = saw_of(out, name)
        (out / f"{rank}-{name}.json").write_text(json.dumps(saw))
        if rank == 0:
            print(name, saw.get("cannot", "done"), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
