"""What each fault does to a run that nobody guards, as a Markdown table.

    python bench/faults.py [--only NAME ...]

One nano run is trained up to step 200. Each row of the table is a branch of it that goes on to step 400 with one fault,
and is compared with the branch that has none. Other branches leave out one healthy batch each, other runs have other
seeds: what they differ by is what a gap has to be compared with. Nobody guards: a plain loop with ``clip_grad_norm_``.
Needs torch, numpy and tokenizers. One thread, since nano's operations are too small to share.
"""

import argparse
import math
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from sealegs.faults.batches import Spoiler, Spoilt
from sealegs.faults.data import DataFault
from sealegs.faults.injector import inject
from sealegs.faults.spec import parse
from sealegs.lab.data import Batch
from sealegs.lab.model import Transformer
from sealegs.lab.settings import SIZES, DataSettings, Settings
from sealegs.lab.sources import TokenSources, open_data
from sealegs.lab.train import build_optimizer, lr_share

AT, STEPS, SEEDS, PLACEBOS, CLEAN_BATCHES = 200, 400, 5, 5, 2
NANO = replace(SIZES["nano"], steps=STEPS, device="cpu", dtype="fp32")
SETTINGS: dict[str, Settings] = {
    "as it is": NANO,
    "clip off, beta2 0.999": replace(NANO, optimizer=replace(NANO.optimizer, clip=0.0, betas=(0.9, 0.999))),
    "two sources": replace(NANO, data=DataSettings(sources={"grammar": 0.7, "stdlib": 0.3})),
}
FAULTS: dict[str, Sequence[str]] = {
    "as it is": (
        f"lr-spike:factor=30,steps=10@{AT}",
        f"lr-spike:factor=30@{AT}",
        f"lr-spike:factor=10,steps=10@{AT}",
        f"bit-flip:in=weight@{AT}",
        f"bit-flip:in=weight,seed=1@{AT}",
        f"bit-flip:in=moment1@{AT}",
        f"bit-flip:in=moment2@{AT}",
        f"bit-flip@{AT}",
        f"nan-gradient@{AT}",
        f"nan-gradient:every=50@{AT}",
        f"random-shard@{AT}",
        f"random-shard:batches=10@{AT}",
        f"random-shard:batches=40@{AT}",
        f"rare-tokens@{AT}",
        f"rare-tokens:batches=10@{AT}",
        f"shifted-labels:batches=10@{AT}",
        f"duplicate-batch:batches=20@{AT}",
        f"weight-scale:factor=16,tensor=*.query_key_value,rows=2/3@{AT}",
        f"moments-reset@{AT}",
    ),
    "clip off, beta2 0.999": (
        f"rare-tokens:batches=10@{AT}",
        f"random-shard:batches=10@{AT}",
        f"lr-spike:factor=30,steps=10@{AT}",
        f"moments-reset@{AT}",
    ),
    "two sources": (f"poisoned-source:source=stdlib@{AT}", f"random-shard:batches=40@{AT}"),
}


@dataclass
class Run:
    """A model in training, and what has been seen of it."""

    settings: Settings
    data: TokenSources
    held_out: list[Tensor]
    """Tokens and targets of a few rows of clean text."""
    model: Transformer
    optimizer: AdamW
    step: int
    losses: list[float]
    """Of each step's batch."""
    clean: list[float]
    """From step 200 on, before each: of held-out text, the same every time."""

    def branch(self) -> "Run":
        """The same run once more, to go its own way."""
        model, optimizer = deepcopy((self.model, self.optimizer))  # together: the copy updates the copy
        return replace(self, model=model, optimizer=optimizer, losses=list(self.losses), clean=list(self.clean))

    def to(self, last: int, faults: Sequence[str] = (), without: int | None = None) -> "Run":
        """Train up to a step, with faults, or without the batch of a number."""
        parsed = list(map(parse, faults))
        of_data = [fault for fault in parsed if isinstance(fault, DataFault)]
        spoiler = Spoiler(of_data, vocabulary=self.settings.model.vocabulary)
        loader = Spoilt(self.data.training, spoiler)
        for number in range(self.step if of_data else 0):
            loader.batch(number)  # what is rare is learned from what came before
        live = [fault for fault in parsed if not isinstance(fault, DataFault)]
        with inject(live, self.model, optimizers=self.optimizer, clock=lambda: self.step) as injector:
            while self.step < last:
                self._train_on(loader.batch(self.step + (without is not None and self.step >= without)))
        assert not injector.pending()
        assert not spoiler.pending()
        return self

    def _train_on(self, batch: Batch) -> None:
        wanted = self.settings.optimizer
        for group in self.optimizer.param_groups:
            group["lr"] = wanted.lr * lr_share(wanted, self.settings.steps, self.step)
        losses = self.model.losses(torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets))
        loss = losses.total / batch.target_count
        loss.backward()
        if wanted.clip:
            clip_grad_norm_(self.model.parameters(), wanted.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.step += 1
        if self.step >= AT:
            self.clean.append(self._loss_on_clean_text())

    @torch.no_grad()
    def _loss_on_clean_text(self) -> float:
        """What a bad batch does to its own loss is not what it does to the model."""
        return float(self.model.losses(*self.held_out).tokens.mean())

    @torch.no_grad()
    def evaluation(self) -> dict[str, float]:
        """The loss that a run of the lab ends with, under "all"; and what the rows of each source have in it."""
        rows: dict[str, list[float]] = {"all": []}
        for index in range(self.settings.cadence.evaluate_batches):
            batch = self.data.held_out.batch(index)
            losses = self.model.losses(torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets))
            for span, loss in zip(batch.spans, losses.tokens.mean(dim=1).tolist(), strict=True):
                rows["all"].append(loss)
                rows.setdefault(span.source.name, []).append(loss)
        return {name: statistics.fmean(losses) for name, losses in rows.items()}

    def without_source(self, name: str) -> "Run":
        """Take a source out of the data of this branch, from its next batch on."""
        self.data = replace(self.data, training=deepcopy(self.data.training))
        self.data.training.load_state_dict({"next_batch": self.step})
        self.data.training.reweight(name, 0.0)
        return self


def begun(settings: Settings) -> Run:
    """A run before its first step."""
    torch.manual_seed(settings.seed)
    model = Transformer(settings.model)
    optimizer = build_optimizer(model, settings.optimizer)
    data = open_data(settings)
    rows = [data.held_out.batch(index) for index in range(CLEAN_BATCHES)]
    held_out = [torch.from_numpy(np.concatenate([getattr(b, name) for b in rows])) for name in ("tokens", "targets")]
    return Run(settings, data, held_out, model, optimizer, 0, [], [])


@dataclass(frozen=True)
class Effect:
    """What a fault did to a branch."""

    peak: float
    """The highest loss on clean text, by what it was before the fault."""
    steps: int | None
    """After so many, that loss is back; none where it is not at the end."""
    gaps: dict[str, float]
    """Final evaluation loss, less the clean twin's: of all rows, and of those of each source."""

    def __str__(self) -> str:
        steps = "never" if self.steps is None else str(self.steps)
        whole, *parts = (f"{name} {gap:+.3f}" for name, gap in self.gaps.items())
        gap = whole.removeprefix("all ") + (f" ({', '.join(parts)})" if len(parts) > 1 else "")
        return f"{self.peak:.2f} | {steps} | {gap}".replace("+nan", "NaN").replace("nan", "NaN")


def effect(run: Run, twin: Run) -> Effect:
    """Back is: no higher than before by more than half the spread of the batches' losses over 100 steps."""
    before, after = run.clean[0], run.clean[1:]
    recent = run.losses[AT - 100 : AT]
    limit = before * (1 + statistics.pstdev(recent) / statistics.mean(recent) / 2)
    above = [step for step, loss in enumerate(after, start=1) if not loss <= limit]  # NaN too
    peak = max(after) / before if all(map(math.isfinite, after)) else math.nan
    steps = 0 if not above else None if above[-1] == len(after) else above[-1]
    clean = twin.evaluation()
    return Effect(peak, steps, {name: loss - clean[name] for name, loss in run.evaluation().items()})


def table(name: str, settings: Settings) -> Iterator[str]:
    """The rows of one setting, as they become known."""
    prefix = begun(settings).to(AT)
    twin = prefix.branch().to(STEPS)
    yield f"\n### {name}\n"
    yield "| fault | peak / before | steps to recover | gap |\n|---|---|---|---|"
    yield f"| none: evaluation loss {twin.evaluation()['all']:.3f} | {effect(twin, twin)} |"
    for fault in FAULTS[name]:
        yield f"| `{fault}` | {effect(prefix.branch().to(STEPS, [fault]), twin)} |"
    for source in list(settings.data.sources)[1:]:
        without = prefix.branch().without_source(source).to(STEPS)
        yield f"| none, but `{source}` taken out from batch {AT} on | {effect(without, twin)} |"
    if name == next(iter(SETTINGS)):
        yield from spreads(prefix, twin.evaluation()["all"])


def spreads(prefix: Run, twin: float) -> Iterator[str]:
    """What final losses of healthy runs differ by."""
    dropped = [AT + number * (STEPS - AT) // PLACEBOS for number in range(PLACEBOS)]
    placebos = [prefix.branch().to(STEPS, without=number).evaluation()["all"] - twin for number in dropped]
    yield f"\nClean spread, one healthy batch left out (number {', '.join(map(str, dropped))}): gaps"
    yield f"{', '.join(f'{gap:+.4f}' for gap in placebos)}, standard deviation {statistics.stdev(placebos):.4f}."
    runs = (begun(replace(prefix.settings, seed=seed)).to(STEPS) for seed in range(1, SEEDS))
    losses = [twin, *(run.evaluation()["all"] for run in runs)]
    yield f"\nClean spread, seeds 0 to {SEEDS - 1}: evaluation losses"
    yield f"{', '.join(f'{loss:.3f}' for loss in losses)}, standard deviation {statistics.stdev(losses):.4f}."


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, one thread")
    for name in chosen.only:
        for line in table(name, SETTINGS[name]):
            print(line, flush=True)
    print(f"\n{time.perf_counter() - began:.0f} s, of which {time.process_time():.0f} s on the CPU")


if __name__ == "__main__":
    main()
