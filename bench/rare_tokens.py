"""What stratified batches do about rare tokens that meet in one batch: gradient norms beside the clean twin.

    python bench/rare_tokens.py [--at 230] [--last 300] [--seeds 3]

Eight rows, each made of the same 32 tokens in another order: ids that the lab's vocabulary has and its text never uses,
so that they occur eight times in all the data. *Concentrated*: the data has them side by side, and they are the batch
of one step. *Stratified*: the order of the same rows as `spread` mends it. *Clean*: the rows that they replace stay. On
nano, with nothing done about anything; with its margins, and without clipping and with a beta2 of 0.999. Last the
preset of the worked example, `seed-002`, at step 312 of its 2000; all runs end 70 to 90 steps later.
"""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import sealegs
from sealegs.batching.stratified import Ints, RareRows, spread
from sealegs.faults.batches import Spoiler, Spoilt
from sealegs.lab.data import IGNORED, Batch, Stream
from sealegs.lab.settings import PRESETS, SIZES, Settings
from sealegs.lab.sources import TokenSources, open_data
from sealegs.lab.train import resolved, train, undisturbed

ARMS = ("clean", "concentrated", "stratified")
BEGINNING = 50
"""Steps in which every norm is large."""
T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """A run, and the step whose batch is made of rare tokens."""

    settings: Settings
    at: int
    last: int

    @property
    def rows(self) -> int:
        """Rows of the run, one after the other."""
        return (self.last + 1) * self.settings.data.batch

    @property
    def planted(self) -> range:
        """Those of them that are of rare tokens."""
        return range(self.at * self.settings.data.batch, (self.at + 1) * self.settings.data.batch)


class Planted(Spoiler):
    """Rows of rare tokens among the others, in a given order of all."""

    def __init__(self, case: Case, stream: Stream, order: Ints, rare: Ints) -> None:
        super().__init__([])
        self._case, self._stream, self._order = case, stream, order
        draw = np.random.default_rng(case.settings.seed)
        self._planted = [draw.permutation(rare) for _ in case.planted]

    def apply(self, batch: T, number: int) -> T:
        """The batch of a step, put together from the rows that the order has in it."""
        assert isinstance(batch, Batch)
        tokens, targets = batch.tokens.copy(), batch.targets.copy()
        size = len(tokens)
        for place, row in enumerate(self._order[number * size : (number + 1) * size].tolist()):
            if row in self._case.planted:
                ids = self._planted[row - self._case.planted.start]
                tokens[place], targets[place] = 0, IGNORED
                tokens[place, : len(ids) - 1], targets[place, : len(ids) - 1] = ids[:-1], ids[1:]
            elif row != number * size + place:
                other = self._stream.batch(row // size)
                tokens[place], targets[place] = other.tokens[row % size], other.targets[row % size]
        return replace(batch, tokens=tokens, targets=targets)


@contextmanager
def planting(planted: Planted, _: Any, __: Any, batches: Any, *___: Any) -> Iterator[Any]:
    """As ``train`` wants what disturbs it."""
    yield Spoilt(batches, planted)


def unused(data: TokenSources, case: Case) -> Ints:
    """Ids that no text has."""
    seen = {int(token) for number in range(case.last) for token in np.unique(data.training.batch(number).tokens)}
    return np.array([token for token in range(1, 257) if token not in seen][: case.settings.model.context], np.int64)


def trained(case: Case, arm: str, folder: Path) -> sealegs.Run:
    """The run of an arm."""
    data = open_data(case.settings)
    tokens = unused(data, case)
    order = np.arange(case.rows)
    if arm == "stratified":
        held = np.repeat(np.array(case.planted), len(tokens))
        rare = RareRows(case.rows, held, np.tile(tokens, len(case.planted)))
        order = spread(order, rare, case.settings.data.batch, seed=case.settings.seed)
    left = iter(range(case.last))
    train(
        case.settings,
        data,
        folder,
        disturb=undisturbed if arm == "clean" else partial(planting, Planted(case, data.training, order, tokens)),
        should_stop=lambda: None if next(left, None) is not None else "enough",
    )
    return sealegs.open_run(folder)


def largest(run: sealegs.Run, signal: str, case: Case) -> float:
    """Of the run, but for its first steps."""
    return float(run.column(signal)[BEGINNING : case.last].max())


def compared(name: str, case: Case) -> None:
    """All arms, as a line of the table."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {arm: trained(case, arm, Path(folder) / arm) for arm in ARMS}
        norms = {arm: largest(run, "grad_norm", case) for arm, run in runs.items()}
        losses = {arm: largest(run, "loss", case) for arm, run in runs.items()}
        ends = {arm: float(run.column("loss")[case.last - 20 : case.last].mean()) for arm, run in runs.items()}
    cells = [f"{norms[arm]:.2f}" for arm in ARMS]
    cells += [f"{norms['concentrated'] / norms['stratified']:.1f}"]
    cells += [f"{losses[arm]:.2f}" for arm in ARMS] + [f"{ends[arm]:.3f}" for arm in ARMS]
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def nano(seed: int, at: int, last: int, *, margins: bool = True) -> Case:
    """The lab's smallest model, on all its sentences."""
    settings = resolved(replace(SIZES["nano"], seed=seed, threads=1, shadow=True))
    return Case(settings if margins else without_margins(settings), at, last)


def without_margins(settings: Settings) -> Settings:
    """No clipping, and a slow second moment."""
    return replace(settings, optimizer=replace(settings.optimizer, clip=0.0, betas=(0.9, 0.999)))


def main() -> None:
    """Train, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", type=int, default=230)
    parser.add_argument("--last", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    arms = " | ".join(ARMS)
    print(f"| | largest norm: {arms} | down by | largest loss: {arms} | mean of the last 20: {arms} |")
    print("|---" * 11 + "|")
    for margins in (True, False):
        for seed in range(options.seeds):
            case = nano(seed, options.at, options.last, margins=margins)
            compared(f"nano, seed {seed}, margins {'on' if margins else 'off'}", case)
    example = resolved(replace(PRESETS["seed-002"], threads=1, shadow=True))
    for settings in (example, without_margins(example)):
        name = "on" if settings.optimizer.clip else "off"
        compared(f"`seed-002`, margins {name}", Case(settings, 312, 400))


if __name__ == "__main__":
    main()
