"""What guarding a step costs, side by side in one run with what people write today.

    python bench/overhead.py [--only NAME ...] [--optimizer fused|muon|plain|fuse] [--out FILE.json]

On a CUDA device: the 49M-parameter x1 at 32k and 4k tokens a step, a 350M and a 1.3B one at 16k, bf16, compiled,
free-running. `muon`: torch's Muon on the matrices of the blocks beside a fused AdamW, and what it costs to look at the
attention logits too, for which every tenth step is not compiled; `plain`: AdamW as torch makes it;
`fuse`: the same, which a guard with `Skipping(fuse=True)` has fused, for all of the table.
On a CPU: the toy model. Blocks of steps of every variant are interleaved on one model, and each is compared with the
blocks of the first variant next to it; the median of those ratios is printed, with the interval that it lies in with
95 % confidence (from its rank among the blocks, whatever their distribution), and the quartiles. Beside it stands what
the guard itself counts as its stability tax. Needs torch and numpy alone.
"""

import argparse
import json
import math
import platform
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW, Muon, Optimizer

import sealegs
from sealegs.guard_options import Clipping, Telemetry
from sealegs.lab.model import Transformer
from sealegs.lab.settings import SIZES, ModelSettings
from sealegs.lab.train import build_optimizer
from sealegs.record.events import load_events
from sealegs.record.schema import EVENTS
from sealegs.signals.activations import ActivationSampler
from sealegs.step.skip_way import BEGIN, BLOCK, BLOCKS

X1 = SIZES["x1"].model
WARM_UP = BEGIN + BLOCKS * BLOCK + 5
"""Steps of each variant before anything is timed where a guard tries two ways: by then it has chosen."""
WAYS: tuple[Literal["device", "host"], ...] = ("device", "host")
CASES: dict[str, tuple[ModelSettings, int, int]] = {
    # model, rows a batch, steps a block
    "x1, 32k tokens": (X1, 32, 40),
    "350M, 16k tokens": (replace(X1, layers=24, width=1024, heads=16, hidden=2816), 16, 20),
    "1.3B, 16k tokens": (replace(X1, layers=24, width=2048, heads=16, hidden=5632), 16, 10),
    "x1, 4k tokens": (X1, 4, 10),  # one of them sampled; short, since a host that is the bottleneck wanders
    "toy on the CPU": (SIZES["toy"].model, 8, 20),
}


def fused(model: nn.Module) -> list[Optimizer]:
    """AdamW, fused where there is a device for it."""
    return [build_optimizer(model, replace(SIZES["x1"].optimizer, lr=1e-7))]


def plain(model: nn.Module) -> list[Optimizer]:
    """AdamW as torch makes it unless it is asked for a fused one."""
    return [AdamW(model.parameters(), lr=1e-7)]


def muon(model: nn.Module) -> list[Optimizer]:
    """Muon on the matrices of the blocks, fused AdamW on the rest."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name and "head" not in name]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [Muon(matrices, lr=1e-7), AdamW(rest, lr=1e-7, fused=True)]


OPTIMIZERS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "fused": fused,
    "plain": plain,
    "fuse": plain,
    "muon": muon,
}


@dataclass
class Subject:
    """A model in training; all variants work on the same one."""

    model: Transformer
    optimizers: list[Optimizer]
    backward: Callable[[], Tensor]

    def update(self) -> None:
        """What an unguarded loop does."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Likewise."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def make(settings: ModelSettings, rows: int, device: str, optimizer: str = "fused") -> Subject:
    """The model, and a function that does forward and backward on random tokens and gives the loss."""
    torch.manual_seed(0)
    model = Transformer(settings).to(device)
    # so slow that the one batch is not learned by heart: losses near zero jump about, and some would be skipped
    optimizers = OPTIMIZERS[optimizer](model)
    losses = torch.compile(model.losses) if device == "cuda" else model.losses
    tokens = torch.randint(settings.vocabulary, (rows, settings.context), device=device)
    targets = tokens.roll(-1, 1)

    def backward() -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = losses(tokens, targets).total / targets.numel()
        loss.backward()
        return loss

    return Subject(model, optimizers, backward)


def clip_only(subject: Subject) -> None:
    """What every variant is compared with."""
    subject.backward()
    clip_grad_norm_(subject.model.parameters(), 1.0)
    subject.update()
    subject.zero_grad()


def item_each_step(subject: Subject) -> None:
    """The check that most loops have: read loss and norm, branch."""
    loss = subject.backward()
    norm = clip_grad_norm_(subject.model.parameters(), 1.0)
    if torch.isfinite(loss).item() and norm.item() < 100.0:
        subject.update()
    subject.zero_grad()


def isnan_loop(subject: Subject) -> None:
    """The check that tutorials show: ask every parameter."""
    subject.backward()
    clip_grad_norm_(subject.model.parameters(), 1.0)
    if not any(bool(p.grad.isnan().any()) for p in subject.model.parameters() if p.grad is not None):
        subject.update()
    subject.zero_grad()


def raises_at_nan(subject: Subject) -> None:
    """PyTorch's own option."""
    subject.backward()
    clip_grad_norm_(subject.model.parameters(), 1.0, error_if_nonfinite=True)
    subject.update()
    subject.zero_grad()


def six_sigma_on_the_device() -> Callable[[Subject], None]:
    """OLMo-core's way: loss and norm against the mean and deviation of the last 128, with no host in it. Its optimizer
    is its own; here the fused one is told not to step as a loss scaler tells it."""
    losses: deque[Tensor] = deque(maxlen=128)
    norms: deque[Tensor] = deque(maxlen=128)

    def step(subject: Subject) -> None:
        loss = subject.backward().detach()
        norm = clip_grad_norm_(subject.model.parameters(), 1.0)
        losses.append(loss)
        norms.append(norm)
        if len(losses) >= 64:
            is_high = torch.zeros((), device=loss.device)
            for now, past in ((loss, losses), (norm, norms)):
                deviation, mean = torch.std_mean(torch.stack(list(past)[:-1]))
                is_high = torch.maximum(is_high, (now - mean > 6 * deviation).float())
            if loss.is_cuda:
                subject.optimizers[0].found_inf = is_high  # type: ignore[attr-defined]
        subject.update()
        subject.optimizers[0].found_inf = None  # type: ignore[attr-defined]
        subject.zero_grad()

    return step


def z_clip() -> Callable[[Subject], None]:
    """ZClip's way: the norm on the host, held against a running mean and variance, and clipped by that."""
    mean = variance = 0.0

    def step(subject: Subject) -> None:
        nonlocal mean, variance
        subject.backward()
        gradients = [p.grad for p in subject.model.parameters() if p.grad is not None]
        norm = get_total_norm(gradients)
        seen = norm.item()
        most = mean + 2.5 * math.sqrt(variance) if variance else seen
        if seen > most:
            clip_grads_with_norm_(subject.model.parameters(), most, norm)
        taken = min(seen, most)
        mean, variance = 0.97 * mean + 0.03 * taken, 0.97 * variance + 0.03 * (taken - mean) ** 2
        subject.update()
        subject.zero_grad()

    return step


def guarded(subject: Subject, folder: Path, **options: Any) -> tuple[Callable[[Subject], None], sealegs.Guard]:
    """The guard with its defaults, recording included."""
    guard = sealegs.Guard(subject.model, subject.optimizers, run=folder, **({"clip": 1.0} | options))

    def step(subject: Subject) -> None:
        guard.step(subject.backward())

    return step, guard


def watched(subject: Subject, folder: Path) -> tuple[Callable[[Subject], None], sealegs.Watch]:
    """The first rung: records and judges, never asks for the verdict."""
    watch = sealegs.Watch(folder)
    number = count()

    def step(subject: Subject) -> None:
        loss = subject.backward()
        norm = clip_grad_norm_(subject.model.parameters(), 1.0)
        watch.see(next(number), loss=loss, grad_norm=norm)
        subject.update()
        subject.zero_grad()

    return step, watch


def measure(
    name: str, blocks: int, scratch: Path, optimizer: str = "fused", without: Sequence[str] = ()
) -> dict[str, Any]:
    """All variants of one case, but those that are left out."""
    settings, rows, steps = CASES[name]
    device = "cpu" if "CPU" in name else "cuda"
    subject = make(settings, rows, device, optimizer)
    variants: dict[str, Callable[[Subject], None]] = {"clip only": clip_only}
    step, guard = guarded(subject, scratch / "default", act=sealegs.Skipping(fuse=optimizer == "fuse"))
    variants["guard"] = step
    others: list[sealegs.Guard | sealegs.Watch] = [guard]
    if optimizer == "fused":
        no_samples, unsampled = guarded(subject, scratch / "unsampled", telemetry=Telemetry(sample_every=0))
        watching, watch = watched(subject, scratch / "watched")
        variants |= {"guard, gate only (no sampled signals)": no_samples, "watch only": watching}
        others += [unsampled, watch]
    elif optimizer == "muon":
        for way in WAYS:
            variants[f"guard, way={way}"], one = guarded(subject, scratch / way, act=sealegs.Skipping(way=way))
            others.append(one)
        variants["guard, way=device, logits of every 10th step"], one = guarded(
            subject,
            scratch / "logits",
            act=sealegs.Skipping(way="device"),
            clip=Clipping(norm=1.0, attention_logit=1e6),
            telemetry=Telemetry(activations=ActivationSampler(subject.model, force_eager=True)),
        )
        others.append(one)
    variants |= {".item() of loss and norm": item_each_step, "isnan loop over parameters": isnan_loop}
    if optimizer == "fused":
        variants |= {
            "PyTorch, error_if_nonfinite": raises_at_nan,
            "OLMo-core's way, 6 sigma on the device": six_sigma_on_the_device(),
            "ZClip's way": z_clip(),
        }
    variants["clip only, again (control)"] = clip_only
    for left_out in without:
        variants.pop(left_out, None)
    for variant, take_step in variants.items():
        for _ in range(WARM_UP if optimizer == "muon" and variant == "guard" else 25):
            take_step(subject)
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    paid_before = guard.watch.tax.total_s
    for block in range(blocks):
        order = list(variants)
        for variant in order[block % len(order) :] + order[: block % len(order)]:  # no variant has a place of its own
            wait(device)
            began = time.perf_counter()
            for _ in range(steps):
                variants[variant](subject)
            wait(device)
            seconds[variant].append((time.perf_counter() - began) / steps)
        if block % 10 == 9:
            print(f"{name}: block {block + 1} of {blocks}", flush=True)
    syncs = waits(subject, step) if device == "cuda" else None
    gated = guard.watch.skips
    paid = guard.watch.tax.total_s - paid_before
    by_its_count = 100 * paid / (sum(seconds["guard"]) * steps - paid)
    for each in others:
        each.close()
    said = [event.detail for event in load_events(scratch / "default" / EVENTS) if event.kind == "skip-way"]
    base = seconds["clip only"]
    table = {}
    for variant, measured in seconds.items():
        ratios = sorted(100 * (a / b - 1) for a, b in zip(measured, base, strict=True))
        quarter = len(ratios) // 4
        table[variant] = {
            "ms": 1000 * statistics.median(measured),
            "percent": statistics.median(ratios),
            "interval": interval(ratios),
            "quartiles": [ratios[quarter], ratios[-quarter - 1]],
        }
    parameters = subject.model.parameter_count()
    return {
        "variants": table,
        "by_its_own_count": by_its_count,
        "host_waits_in_30_steps": syncs,
        "skipped": gated,
        "parameters": parameters,
        "skip_way": said[0] if said else None,
    }


def interval(rising: list[float]) -> tuple[float, float]:
    """Between which of the numbers the median of what they are drawn from lies, with 95 % confidence."""
    middle, reach = (len(rising) - 1) / 2, 0.98 * math.sqrt(len(rising))
    return rising[max(0, math.floor(middle - reach))], rising[min(len(rising) - 1, math.ceil(middle + reach))]


def wait(device: str) -> None:
    """Until the device has done what it was told."""
    if device == "cuda":
        torch.cuda.synchronize()


def waits(subject: Subject, step: Callable[[Subject], None]) -> str:
    """Thirty guarded steps in a mode in which torch raises where the host would wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(30):
            step(subject)
    except RuntimeError as error:
        return f"waits: {error}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "none"


def printed(results: dict[str, Any]) -> str:
    """The table, as Markdown."""
    lines = []
    for name, result in results["cases"].items():
        lines += [f"### {name} ({result['parameters'] / 1e6:.1f}M parameters)", ""]
        lines += ["| | ms a step | against clip only | 95 % interval | quartiles |", "|---|---|---|---|---|"]
        for variant, row in result["variants"].items():
            spans = " | ".join("{:+.2f} to {:+.2f} %".format(*row[span]) for span in ("interval", "quartiles"))
            lines.append(f"| {variant} | {row['ms']:.2f} | {row['percent']:+.2f} % | {spans} |")
        lines += [
            "",
            f"host waits in 30 guarded steps: {result['host_waits_in_30_steps']}; skipped: {result['skipped']}; "
            f"the stability tax that the guard itself counts: {result['by_its_own_count']:+.2f} %",
            *(["", f"skip-way: {json.dumps(said)}"] if (said := result.get("skip_way")) else []),
            "",
        ]
    return "\n".join(lines)


def main() -> None:
    """Measure what this machine can."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(CASES))
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="fused")
    parser.add_argument("--without", nargs="*", default=[], help="variants to leave out, where time is short")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    possible = [name for name in CASES if ("CPU" in name) != torch.cuda.is_available() and "1.3B" not in name]
    torch.set_float32_matmul_precision("high")
    results: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "cases": {},
    }
    for name in arguments.only or possible:
        with tempfile.TemporaryDirectory() as scratch:
            results["cases"][name] = measure(
                name, arguments.blocks, Path(scratch), arguments.optimizer, arguments.without
            )
    print(printed(results))
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
