"""What a checkpoint beside the training costs: the guard's thread against torch's process.

    python bench/checkpoint_process.py [--device cuda] [--layers N] [--width N] [--rounds N]

Trains a transformer with AdamW, and saves weights and moments meanwhile, by the guard's ``Checkpoints`` or by
``async_save`` with ``AsyncCheckpointerType.PROCESS``: how long the loop stands still for the call, how much longer
steps take until all is written, and how long that is. Prints Markdown; a round of each way in turn.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from sealegs.state.checkpoints import Checkpoints, StoredState

BEFORE = 20
"""Steps without a checkpoint, before each."""


def main() -> None:
    """See the docstring of the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo" if asked.device == "cpu" else "cpu:gloo,cuda:nccl", rank=0, world_size=1)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(asked.width, asked.width // 64, 4 * asked.width, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, asked.layers, enable_nested_tensor=False).to(asked.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    batch = torch.randn(8, 512 if asked.device == "cuda" else 16, asked.width, device=asked.device)

    def step() -> float:
        began = time.perf_counter()
        with torch.autocast(asked.device, torch.bfloat16):
            loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if asked.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def tensors() -> dict[str, Tensor]:
        found = {f"model/{name}": value.detach() for name, value in model.named_parameters()}
        for name, value in model.named_parameters():
            held = optimizer.state[value]
            found |= {f"optimizer/{name}.{key}": held[key] for key in ("exp_avg", "exp_avg_sq")}
        return found

    folder = Path(tempfile.mkdtemp(prefix="checkpoint-process-"))
    checkpoints = Checkpoints(folder / "thread")

    def with_thread(number: int) -> Callable[[], bool]:
        checkpoints.save_soon(number, StoredState(tensors(), {}))
        checkpoints.before_update()
        return lambda: not checkpoints.is_writing

    def with_process(number: int) -> Callable[[], bool]:
        way = AsyncCheckpointerType.PROCESS
        place = str(folder / "process" / str(number))
        response: Any = async_save(tensors(), checkpoint_id=place, async_checkpointer_type=way)
        return lambda: bool(response.done())

    for _ in range(5):
        step()
    size = sum(tensor.nbytes for tensor in tensors().values())
    print(f"{size / 1e9:.1f} GB of weights and moments, torch {torch.__version__}\n")
    print("| way | the call, s | a step before, ms | a step meanwhile, ms | slower by | written after, s | cost, s |")
    print("|---|---|---|---|---|---|---|")
    number = 0
    for _ in range(asked.rounds):
        for name, save in (("thread", with_thread), ("process", with_process)):
            number += 1
            usual = median(step() for _ in range(BEFORE))
            began = time.perf_counter()
            is_done = save(number)
            called = time.perf_counter() - began
            during = []
            while not is_done():
                during.append(step())
            whole = time.perf_counter() - began
            slower = median(during) / usual - 1 if during else 0.0
            cost = called + sum(during) - usual * len(during)
            print(
                f"| {name} | {called:.2f} | {1e3 * usual:.0f} | {1e3 * median(during or [0.0]):.0f} | {slower:.1%} "
                f"| {whole:.1f} | {cost:.2f} |",
                flush=True,
            )
            checkpoints.wait()
            shutil.rmtree(folder / name, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
