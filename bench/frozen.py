"""What states of a fine-tune weigh and cost, with the frozen base in them and without.

    python bench/frozen.py [--size 50M] [--rank 8] [--device cpu] [--dtype fp32] [--out FILE.json]

A transformer with random weights (50M or 1B) whose linear maps have LoRA beside them, AdamW on what is trained, some
steps of it. Then, each the median of several: a snapshot in memory, a checkpoint on disk, a rollback, a resume, the
look that each state takes at the frozen weights, and the digest of all of them, which is made once. Needs torch alone.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from sealegs.lab.model import Transformer
from sealegs.lab.settings import SIZES
from sealegs.state.checkpoints import Checkpoints
from sealegs.state.frozen import FrozenWeights
from sealegs.state.memory import in_words
from sealegs.state.snapshots import Snapshots
from sealegs.state.training_state import TrainingState

X1 = SIZES["x1"].model
MODELS = {"50M": X1, "1B": replace(X1, layers=24, width=2048, heads=16, hidden=5632)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STEPS, TIMES = 3, 5


class LoRA(nn.Module):
    """A frozen map with a trained one of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        like: dict[str, Any] = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features, **like) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, **like))

    def forward(self, rows: Tensor) -> Tensor:
        """Both, added up."""
        out: Tensor = self.base(rows) + rows @ self.down.T @ self.up.T
        return out


def fine_tuned(size: str, rank: int, device: str, dtype: torch.dtype) -> Transformer:
    """A frozen transformer, the same each time, with adapters on all maps of its blocks."""
    torch.manual_seed(0)
    model = Transformer(MODELS[size]).to(device, dtype).requires_grad_(False)
    inside = [
        (module, name)
        for module in model.blocks.modules()
        for name, each in module.named_children()
        if isinstance(each, nn.Linear)
    ]
    for module, name in inside:
        setattr(module, name, LoRA(getattr(module, name), rank))
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    """What the optimizer has."""
    return [each for each in model.parameters() if each.requires_grad]


def train(model: Transformer, optimizer: AdamW, steps: int) -> list[float]:
    """Some steps on random tokens."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(MODELS["50M"].vocabulary, (1, 129), generator=generator).to(device)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def timed(do: Callable[[], Any], device: str, times: int = TIMES) -> float:
    """The median of several times, in seconds, with all that the device does."""
    took = []
    for _ in range(times):
        synchronise(device)
        began = time.perf_counter()
        do()
        synchronise(device)
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def synchronise(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        torch.cuda.synchronize()


def measured(arguments: argparse.Namespace, folder: Path, *, leaves_out: bool) -> Iterator[tuple[str, float]]:
    """Names and values."""
    device, dtype = arguments.device, DTYPES[arguments.dtype]
    model = fine_tuned(arguments.size, arguments.rank, device, dtype)
    optimizer = AdamW(trained(model), lr=1e-4)
    frozen = FrozenWeights(model, [optimizer]) if leaves_out else None
    if frozen is not None:
        yield "digest of the base, once, s", timed(frozen.begin, device, 1)
    train(model, optimizer, STEPS)
    if frozen is not None:
        frozen.before_update()
        yield "look at the base, s", timed(lambda: frozen.settle(frozen.look()), device)
    training = TrainingState(model=model, optimizers=[optimizer], frozen=frozen)
    snapshots = Snapshots(model, [optimizer], frozen=frozen, promote_after=1)
    snapshots.take(STEPS, {})
    synchronise(device)
    yield "snapshot, bytes", snapshots.held_bytes / 2
    yield "snapshot, s", timed(lambda: snapshots.take(STEPS, {}), device)
    snapshots.healthy(STEPS)
    snapshot = snapshots.newest(STEPS)
    assert snapshot is not None
    after = train(model, optimizer, 2)
    yield "rollback, s", timed(lambda: snapshots.restore_tensors(snapshot), device)
    assert train(model, optimizer, 2) == after, "a rollback is exact"
    snapshots.restore_tensors(snapshot)
    checkpoints = Checkpoints(folder)
    yield "checkpoint, s", timed(lambda: checkpoints.save(STEPS, training.capture()), device, 3)
    yield "checkpoint, bytes", sum(file.stat().st_size for file in (folder / str(STEPS)).rglob("*") if file.is_file())
    other = fine_tuned(arguments.size, arguments.rank, device, dtype)
    its_own = AdamW(trained(other), lr=1e-4)
    anew = TrainingState(
        model=other, optimizers=[its_own], frozen=FrozenWeights(other, [its_own]) if leaves_out else None
    )
    yield (
        "resume, s",
        timed(lambda: anew.restore(checkpoints.load(STEPS, like=anew.capture(with_frozen=True))), device, 1),
    )
    assert train(other, its_own, 2) == after, "a resume is exact"


def main() -> None:
    """Measure both, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=MODELS, default="50M")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    model = fine_tuned(arguments.size, arguments.rank, arguments.device, DTYPES[arguments.dtype])
    numbers, of_them = (sum(each.numel() for each in those) for those in (model.parameters(), trained(model)))
    state = 3 * sum(each.nbytes for each in trained(model))
    del model
    with tempfile.TemporaryDirectory() as folder:
        whole, small = (
            dict(measured(arguments, Path(folder) / str(leaves_out), leaves_out=leaves_out))
            for leaves_out in (False, True)
        )
    print(f"{numbers:,} numbers, {of_them:,} of them trained ({of_them / numbers:.2%}); {torch.__version__}")
    print(f"trained state (weights and two moments): {state:,} bytes, {in_words(state)}")
    for name, value in small.items():
        before = whole.get(name)
        times = f"  {value / state:.3f} of the trained state" if "bytes" in name else ""
        said = "" if before is None else f"{before:,.0f} -> " if "bytes" in name else f"{before:.4f} -> "
        print(f"  {name:<28} {said}{value:,.{0 if 'bytes' in name else 4}f}{times}")
    if arguments.out is not None:
        found = {"numbers": numbers, "trained": of_them, "state": state, "whole": whole, "without_frozen": small}
        arguments.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
