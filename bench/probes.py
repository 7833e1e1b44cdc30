"""Which damage a batch that is tried again shows, and whether summed gradients are told from it.

    python bench/probes.py [--size nano] [--seeds 501 502 503] [--steps 200] [--norm-noise 0.25] [--out FILE.json]
    python bench/probes.py --size x1 --tokens TOKENS.npy --context 256 --batch 4 --steps 150 --seeds 501 --threads 2

A model of the lab is trained; of five steps near the end the batch, its loss and the norm of each gradient are kept, as
a guard keeps them (``recovery/probe.py``). At the end each of them is tried again: with the weights as they are, with
gradients times a factor, and with weights that are damaged, one way after the other. Each is judged as the guard judges
it. Condemning sound weights costs a rollback, acquitting damaged ones the run.

*Off* is how far, as a logarithm, the tensor that has changed most otherwise than all is from their median.
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad_norm_

from sealegs.lab.data import Batch
from sealegs.lab.model import Transformer
from sealegs.lab.settings import SIZES, DataSettings, Settings
from sealegs.lab.sources import open_data
from sealegs.lab.train import backward, build_optimizer, lr_share, resolved
from sealegs.recovery.probe import PROVEN_AFTER, SAME_LOSS, Kept, Noise, ProbeResult
from sealegs.signals.tensor_norms import lengths
from sealegs.stats import streaming

BATCHES = 5
"""That are tried again; one every eight steps, the last of them as late as a guard would."""
EVERY = 8
FACTORS = (0.25, 2.0, 4.0, 8.0, 16.0, 32.0)
SUMS = (2.0, 3.0, 4.0, 8.0, 16.0, 64.0)
NOISE = (0.1, 0.3, 1.0)
EXPONENT_BIT = 30
"""The highest of a float32: below 2 it makes a number huge, above it tiny."""


@dataclass(frozen=True)
class Damage:
    """One way in which weights can be other than they were."""

    kind: str
    name: str
    strike: Callable[[dict[str, Tensor]], None]


def scaled(name: str, factor: float, thirds: tuple[int, int] = (0, 3)) -> Callable[[dict[str, Tensor]], None]:
    """The rows between two thirds of the tensors that end so."""

    def strike(weights: dict[str, Tensor]) -> None:
        for full_name, weight in weights.items():
            if full_name.endswith(name):
                first, end = (third * len(weight) // 3 for third in thirds)
                weight[first:end] *= factor

    return strike


def noisy(name: str, size: float) -> Callable[[dict[str, Tensor]], None]:
    """Added to the tensors that end so, as a share of their own root mean square."""

    def strike(weights: dict[str, Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)
        for full_name, weight in weights.items():
            if full_name.endswith(name):
                noise = torch.randn(weight.shape, generator=generator).to(weight)
                weight += noise * size * weight.square().mean().sqrt()

    return strike


def flipped(name: str) -> Callable[[dict[str, Tensor]], None]:
    """One bit of one number."""

    def strike(weights: dict[str, Tensor]) -> None:
        middle = weights[name].view(-1)[weights[name].numel() // 2 :]
        middle[:1].view(torch.int32).bitwise_xor_(1 << EXPONENT_BIT)

    return strike


def damages(layers: int) -> Iterator[Damage]:
    """All that are tried: in every block, in the first, one in the middle and the last."""
    attention = "attention.query_key_value.weight"
    parts = {
        "queries and keys": (attention, (0, 2)),
        "queries": (attention, (0, 1)),
        "values": (attention, (2, 3)),
        "attention out": ("attention.out.weight", (0, 3)),
        "mlp up": ("mlp.up.weight", (0, 3)),
        "mlp down": ("mlp.down.weight", (0, 3)),
        "norms before attention": ("attention_norm.weight", (0, 3)),
        "norms before the mlp": ("mlp_norm.weight", (0, 3)),
    }
    blocks = [f"blocks.{layer}." for layer in sorted({0, layers // 2, layers - 1})]
    for kind, (part, thirds) in parts.items():
        for block in ("", *blocks):
            for factor in FACTORS:
                name = f"{block or 'all blocks '}{kind} x{factor:g}"
                yield Damage(kind, name, scaled(f"{block}{part}", factor, thirds))
    for part in dict.fromkeys(part for part, _ in parts.values()):
        for block in ("", *blocks):
            for size in NOISE:
                yield Damage("noise", f"{block or 'all blocks '}{part} + {size:g}", noisy(f"{block}{part}", size))
        for block in blocks:
            yield Damage("one bit", f"{block}{part}", flipped(f"{block}{part}"))
    for name in ("embedding.weight", "final_norm.weight"):
        for factor in FACTORS:
            yield Damage("embedding and last norm", f"{name} x{factor:g}", scaled(name, factor))
        yield Damage("one bit", name, flipped(name))


def measured(model: Transformer, batch: Batch, settings: Settings) -> tuple[float, Tensor]:
    """The loss of a batch, and the norm of each gradient."""
    model.zero_grad()
    loss, *_ = backward(GradScaler(enabled=False), model.losses, batch, settings)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return float(loss), lengths(gradients, torch.device("cpu"))


def trained(settings: Settings) -> tuple[Transformer, list[tuple[Batch, Kept]], Noise]:
    """The model at the end, the batches that were kept on the way, and the noise of the run."""
    torch.manual_seed(settings.seed)
    model, data = Transformer(settings.model), open_data(settings)
    optimizer = build_optimizer(model, settings.optimizer)
    rates = [group["lr"] for group in optimizer.param_groups]
    kept = []
    streams = [streaming.StreamState(), streaming.StreamState()]
    last = settings.steps - PROVEN_AFTER - 1
    wanted = range(last - EVERY * (BATCHES - 1), last + 1, EVERY)
    for step in range(settings.steps):
        batch = data.training.batch(step)
        loss, norms = measured(model, batch, settings)
        if step in wanted:
            kept.append((batch, Kept(step, (), loss, float(norms.norm()), norms)))
        streams = [
            streaming.learn(stream, math.log(value))
            for stream, value in zip(streams, (loss, float(norms.norm())), strict=True)
        ]
        clip_grad_norm_(model.parameters(), 1.0)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * lr_share(settings.optimizer, 4 * settings.steps, step)  # far from its end
        optimizer.step()
        if sys.stderr.isatty() and step % 10 == 0:
            print(f"\rseed {settings.seed}: step {step} of {settings.steps}, loss {loss:.3f}", end="", file=sys.stderr)
    return model, kept, Noise(*(stream.scale for stream in streams))


@contextmanager
def damaged(model: Transformer, damage: Damage) -> Iterator[None]:
    """Until the end of the block."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        weights = {name: parameter.data for name, parameter in model.named_parameters()}
        damage.strike(weights)
        assert any(not torch.equal(before[name], weight) for name, weight in weights.items()), damage.name
    yield
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(before[name])


def off(then: Kept, norms: Tensor) -> float:
    """How far the tensor is from the median that is farthest from it."""
    assert then.norms is not None
    grown = [math.log(now / before) for before, now in zip(then.norms.tolist(), norms.tolist(), strict=True) if before]
    return max(abs(each - median(grown)) for each in grown)


def told(found: ProbeResult) -> str:
    """In a word, what a guard makes of it."""
    if not found.loss <= found.loss_limit:
        return "loss"
    if found.is_condemned:
        return "norm"
    return "sum" if found.change else "sound"


def judged(kind: str, name: str, then: Kept, loss: float, norms: Tensor, noise: Noise) -> dict[str, Any]:
    """One row."""
    found = then.compared(loss, float(norms.norm()), norms.tolist(), noise)
    has_old_loss = loss <= then.loss * SAME_LOSS
    has_grown = float(norms.norm()) > found.grad_norm_limit
    finite = math.isfinite(loss) and bool(norms.isfinite().all()) and bool((norms > 0).all())
    return {
        "kind": kind,
        "name": name,
        "told": told(found),
        "loss": loss / then.loss,
        "norm": float(norms.norm()) / then.grad_norm,
        "off": off(then, norms) if finite else None,
        "asked": has_old_loss and has_grown,
    }


def rows_of(settings: Settings, noise_of_norms: float | None) -> Iterator[dict[str, Any]]:
    """Of one seed."""
    model, kept, noise = trained(settings)
    print(
        f"seed {settings.seed}: scale of the loss {noise.loss:.3f}, of the norm {noise.grad_norm:.3f}", file=sys.stderr
    )
    if noise_of_norms is not None:
        noise = noise._replace(grad_norm=noise_of_norms)
    for batch, then in kept:
        loss, norms = measured(model, batch, settings)
        yield judged("nothing", "as it is", then, loss, norms, noise)
        for factor in SUMS:
            yield judged("gradients summed", f"x{factor:g}", then, loss, norms * factor, noise)
    batch, then = kept[-1]
    for damage in damages(settings.model.layers):
        with damaged(model, damage):
            loss, norms = measured(model, batch, settings)
        row = judged(damage.kind, damage.name, then, loss, norms, noise)
        if sys.stderr.isatty():
            print(f"\r\033[K{damage.name}: {row['told']}", end="", file=sys.stderr)
        yield row
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)


def settings_of(chosen: argparse.Namespace, seed: int) -> Settings:
    """Of the lab."""
    size = SIZES[chosen.size]
    sources = {chosen.tokens: 1.0} if chosen.tokens else dict(size.data.sources)
    return resolved(
        replace(
            size,
            steps=chosen.steps,
            seed=seed,
            device="cpu",
            dtype="fp32",
            threads=chosen.threads,
            model=replace(size.model, context=chosen.context or size.model.context),
            data=DataSettings(sources=sources, batch=chosen.batch),
        )
    )


def main() -> None:
    """Train, damage, print."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--size", choices=SIZES, default="nano")
    words.add_argument("--seeds", type=int, nargs="+", default=[501, 502, 503])
    words.add_argument("--steps", type=int, default=200)
    words.add_argument("--batch", type=int, default=8)
    words.add_argument("--context", type=int, help="tokens of a row, if not those of the size")
    words.add_argument("--tokens", help="a file of token ids; without it, the lab's grammar")
    words.add_argument("--threads", type=int, default=1)
    words.add_argument("--norm-noise", type=float, help="the scale of the norm's noise, if not that of the run")
    words.add_argument("--out", type=Path)
    chosen = words.parse_args()
    torch.set_num_threads(chosen.threads)
    rows = [
        {"seed": seed, **row} for seed in chosen.seeds for row in rows_of(settings_of(chosen, seed), chosen.norm_noise)
    ]
    by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_kind[row["kind"]].append(row)
    print("| | cases | rejected: loss | rejected: norm | called sound | called a sum | off, where that decides |")
    print("|---|---|---|---|---|---|---|")
    for kind, some in by_kind.items():
        counts = " | ".join(str(sum(row["told"] == word for row in some)) for word in ("loss", "norm", "sound", "sum"))
        offs = [row["off"] for row in some if row["off"] is not None and (row["asked"] or kind == "nothing")]
        print(f"| {kind} | {len(some)} | {counts} | {f'{min(offs):.2f} to {max(offs):.2f}' if offs else ''} |")
    for row in rows:
        if row["told"] == "sum" and row["kind"] not in ("nothing", "gradients summed"):
            print(f"acquitted: seed {row['seed']}, {row['name']}: loss x{row['loss']:.3f}, norm x{row['norm']:.2f}")
    if chosen.out:
        chosen.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
