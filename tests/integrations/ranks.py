"""A Trainer and a loop of Accelerate on several ranks, with and without a guard: run by test_ranks.py on each of them.

Writes what each rank saw to OUT/<rank>.json. Then it runs the examples that need ranks, whose words it leaves to them.
"""

import hashlib
import inspect
import json
import os
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from tests.integrations import small
from tests.integrations.loop import parts, trained

import sealegs
from sealegs.guard_options import Checkpointing
from sealegs.integrations import accelerate

STEPS, DAMAGED = 110, 70
EXAMPLES = ("torchrun_ddp", "fsdp2")
FAULTS = ("nan-gradient:rank=1@12", "gradient-scale:factor=1000,rank=1@20")


def of_trainer(out: Path, name: str, *, guarded: bool, faults: tuple[str, ...] = (), **options: Any) -> dict[str, Any]:
    """Weights and moments at the end, and which steps the Trainer was told are skipped."""
    trainer = small.trainer(out / name, per_device_train_batch_size=2, ddp_find_unused_parameters=False)
    attached = small.attached(trainer, out / f"{name}-run", **options) if guarded else None
    log = trainer.log
    # what trainers of preferences and policies add of their own, each rank of its own completions
    trainer.log = lambda logs, *times: log({**logs, "reward": float(os.environ["RANK"]) - 2, "mine": 7}, *times)
    if attached is None or not faults:
        trainer.train()
    else:
        with small.broken(trainer.model, lambda: attached.guard.number, faults):
            trainer.train()
    end = small.digest(trainer.model, trainer.optimizer.optimizer)
    return {"end": end, "steps": trainer.state.global_step, "lr": trainer.lr_scheduler.get_last_lr()}


def of_loop(out: Path, name: str, *, guarded: bool, is_damaged: bool = False, **options: Any) -> dict[str, Any]:
    """The same of a loop of Accelerate's, whose ranks draw random numbers of their own; it may be damaged midway."""
    accelerator = Accelerator(cpu=True)
    made = parts(accelerator, batch=2, gamma=0.99)
    model, optimizer, _, scheduler = made
    if not guarded:
        trained(accelerator, made)
        return {"end": small.digest(model, optimizer.optimizer), "lr": scheduler.get_last_lr()}
    numbers: list[int] = []

    def damage() -> None:
        number = guard.number
        if is_damaged and number == DAMAGED and number not in numbers:
            for parameter in model.parameters():
                parameter.data.mul_(30.0)
        numbers.append(number)

    with accelerate.attach(
        accelerator, model, optimizer, run=out / f"{name}-run", scheduler=scheduler, **options
    ) as guard:
        trained(accelerator, made, guard, steps=STEPS if is_damaged else 30, after=damage)
    return {"end": small.digest(model, optimizer.optimizer), "lr": scheduler.get_last_lr(), "numbers": numbers}


def of_shards(out: Path, name: str, *, guarded: bool, faults: tuple[str, ...] = (), **options: Any) -> str:
    """Weights at the end of a loop of Accelerate's whose model is sharded (FSDP2)."""
    accelerator = Accelerator(cpu=True)
    shard_on_cpus(accelerator)
    made = model, optimizer, _, scheduler = parts(accelerator, batch=2, gamma=0.99)
    shard_on_cpus(accelerator)
    if guarded:
        guard = accelerate.attach(
            accelerator, model, optimizer, run=out / f"{name}-run", scheduler=scheduler, **options
        )
        with guard, small.broken(model, lambda: guard.number, faults):
            trained(accelerator, made, guard)
    else:
        trained(accelerator, made)
    weights = [parameter.full_tensor().detach().numpy().tobytes() for parameter in model.parameters()]
    return hashlib.sha256(b"".join(weights)).hexdigest()


def can_shard() -> bool:
    """Accelerate has FSDP2 from 1.6 on."""
    return "fsdp_version" in inspect.signature(FullyShardedDataParallelPlugin).parameters


def shard_on_cpus(accelerator: Accelerator) -> None:
    """Which Accelerate does on GPUs alone, and forgets after ``prepare``."""
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)


def example(out: Path, name: str, port: str) -> None:
    """As under torchrun; what it prints goes to OUT/<name>.txt."""
    os.environ |= {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    sys.argv = [name, "--steps", "30", "--run", str(out / name)]
    with (out / f"{name}-{os.environ['RANK']}.txt").open("w") as file, redirect_stdout(file):
        runpy.run_path(str(Path(__file__).parents[2] / "examples" / f"{name}.py"), run_name="__main__")


def main(out: Path, *ports: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "localhost"}  # as torchrun would have it
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=world)
    standard = sealegs.Playbook.standard()
    saw: dict[str, Any] = {
        "trainer": of_trainer(out, "trainer", guarded=False),
        "trainer guarded": of_trainer(out, "trainer-guarded", guarded=True, playbook=standard),
        "trainer faulted": of_trainer(out, "trainer-faulted", guarded=True, faults=FAULTS),
        "loop": of_loop(out, "loop", guarded=False),
        "loop guarded": of_loop(out, "loop-guarded", guarded=True),
        "loop standard": of_loop(out, "loop-standard", guarded=True, playbook=standard),
        "loop damaged": of_loop(
            out,
            "loop-damaged",
            guarded=True,
            is_damaged=True,
            playbook=standard,
            checkpoint_every=Checkpointing(snapshot_every=20),
        ),
    }
    if can_shard():
        saw |= {
            "shards": of_shards(out, "shards", guarded=False),
            "shards guarded": of_shards(out, "shards-guarded", guarded=True, playbook=standard),
            "shards faulted": of_shards(out, "shards-faulted", guarded=True, faults=FAULTS),
        }
    (out / f"{rank}.json").write_text(json.dumps(saw))
    dist.destroy_process_group()
    for name, port in zip(EXAMPLES, ports, strict=True):
        example(out, name, port)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
