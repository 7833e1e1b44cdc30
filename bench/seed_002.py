"""The worked example of a loss spike: three sentences with one rare token in the batch of step 312.

    python bench/seed_002.py FOLDER [--margins off] [--rows 3] [--fault rare-tokens]

Trains the preset `seed-002` up to step 600 of its 2000, with nothing done about anything, into FOLDER; prints what the
loss and the gradient norm do about step 312. The token is the first of the tokenizer's merges that occurs five times in
the 240 sentences, as `tten` does in the example. `--margins off` clips nothing and has a beta2 of 0.999; `--fault
rare-tokens` fills the batch with rare tokens instead, as `sealegs train --inject rare-tokens@312` does. An incident can
then be run again: `sealegs replay FOLDER`, `sealegs verify FOLDER`.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tokenizers import Tokenizer

import sealegs
from sealegs.faults.batches import Spoiler, Spoilt
from sealegs.faults.practice import disturbed
from sealegs.faults.spec import parse
from sealegs.lab.data import IGNORED, Batch, Stream
from sealegs.lab.settings import PRESETS, Settings
from sealegs.lab.sources import TokenSources, open_data
from sealegs.lab.train import resolved, train

AT, LAST, OCCURRENCES = 312, 600, 5
T = TypeVar("T")


def settings_of(margins: str) -> Settings:
    """The preset; with its margins, or without the two that the example is about."""
    settings = resolved(replace(PRESETS["seed-002"], threads=1, shadow=True))
    if margins == "off":
        settings = replace(settings, optimizer=replace(settings.optimizer, clip=0.0, betas=(0.9, 0.999)))
    return settings


def sentences(stream: Stream, batch: int) -> dict[int, tuple[Any, Any]]:
    """Every sentence, by the place where it starts, as a row of tokens and one of targets."""
    found: dict[int, tuple[Any, Any]] = {}
    for number in range(-(-240 // batch)):
        made = stream.batch(number)
        found |= {
            span.start: row for span, row in zip(made.spans, zip(made.tokens, made.targets, strict=True), strict=True)
        }
    return found


def rare_token(rows: Iterable[tuple[Any, Any]], least: int) -> int:
    """The first merge that occurs five times, in so many sentences at least."""
    targets = [row[row != IGNORED] for _, row in rows]
    times = np.bincount(np.concatenate(targets))
    for token in range(257, len(times)):
        if times[token] == OCCURRENCES and sum(token in row for row in targets) >= least:
            return token
    raise SystemExit(f"no token occurs {OCCURRENCES} times in {least} sentences")


class Concentrated(Spoiler):
    """Puts rows into the batch of the step."""

    def __init__(self, rows: list[tuple[Any, Any]]) -> None:
        super().__init__([])
        self.rows = rows

    def apply(self, batch: T, number: int) -> T:
        """The batch, or a copy with these rows first."""
        if number != AT:
            return batch
        assert isinstance(batch, Batch)
        tokens, targets = batch.tokens.copy(), batch.targets.copy()
        for place, (row, wanted) in enumerate(self.rows):
            tokens[place], targets[place] = row, wanted
        return replace(batch, tokens=tokens, targets=targets)


@contextmanager
def concentrated(rows: list[tuple[Any, Any]], _: Any, __: Any, batches: Any, *___: Any) -> Iterator[Any]:
    """As ``train`` wants what disturbs it."""
    yield Spoilt(batches, Concentrated(rows))


def disturb_of(settings: Settings, data: TokenSources, fault: str | None, rows: int) -> Callable[..., Any]:
    """What is done to the batch of the step; says it."""
    if fault is not None:
        print(f"{fault}@{AT}")
        return partial(disturbed, [parse(f"{fault}@{AT}")], settings.model.vocabulary)
    known = sentences(data.training, settings.data.batch)
    token = rare_token(known.values(), rows)
    chosen = [row for row in known.values() if token in row[1]][:rows]
    assert data.tokenizer is not None
    text = Tokenizer.from_str(data.tokenizer.decode()).decode([token])
    print(f"token {token} {text!r}, {OCCURRENCES} times in {len(known)} sentences; {rows} of them in batch {AT}")
    return partial(concentrated, chosen)


def main() -> None:
    """Train, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--margins", choices=("on", "off"), default="on")
    parser.add_argument("--rows", type=int, default=3)
    parser.add_argument("--fault")
    options = parser.parse_args()
    settings = settings_of(options.margins)
    data = open_data(settings)
    left = iter(range(LAST))
    train(
        settings,
        data,
        options.folder,
        disturb=disturb_of(settings, data, options.fault, options.rows),
        should_stop=lambda: None if next(left, None) is not None else "enough",
    )
    run = sealegs.open_run(options.folder)
    loss, norm = run.column("loss"), run.column("grad_norm")
    print("| step | loss | gradient norm |\n|---|---|---|")
    for step in (AT - 2, AT - 1, AT, AT + 1, AT + 2, AT + 10, AT + 48, 500):
        print(f"| {step} | {loss[step]:.3f} | {norm[step]:.2f} |")
    print(f"mean of 50 before: loss {loss[AT - 50 : AT].mean():.3f}, norm {norm[AT - 50 : AT].mean():.2f}; ", end="")
    print(f"mean of 10 to step 361: {loss[AT + 40 : AT + 50].mean():.3f}, to 500: {loss[491:501].mean():.3f}")
    print(f"alarms: {[event.step for event in run.events if event.kind == 'alarm']}")


if __name__ == "__main__":
    main()
