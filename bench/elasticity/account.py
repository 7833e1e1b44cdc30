"""What each life says that it read in, which samples of each epoch the weights have seen out: once, twice, or never.

A step that a later life did again counts once: the weights of the end do not know of the first time.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.elasticity.training import SAMPLES

import sealegs


@dataclass
class Account:
    """Of a whole run."""

    lives: int = 0
    worlds: list[int] = field(default_factory=list)
    """The number of ranks of each life that made a step."""
    steps: int = 0
    again: int = 0
    """Steps that were made again, since a kill."""
    divided: int = 0
    """How often the rest of an epoch was divided anew."""
    named: int = 0
    """Samples that the record names as used twice or left out."""
    lost: list[str] = field(default_factory=list)
    """Samples that were not used in an epoch, and are not named."""
    twice: list[str] = field(default_factory=list)
    """Samples that were used more than once in an epoch, and are not named."""


def account_of(out: Path, epochs: int) -> Account:
    """Account for every sample of every epoch."""
    found = Account()
    made: dict[int, tuple[int, Counter[int]]] = {}
    for life, lines in _lives(out).items():
        found.lives += 1
        begins = lines[0][0]["begins"]
        found.again += sum(step >= begins for step in made)
        made = {step: samples for step, samples in made.items() if step < begins}
        steps: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
        for line in (line for of_rank in lines for line in of_rank[1:]):
            steps[line["step"]].append(line)
        if steps:
            found.worlds.append(lines[0][0]["ranks"])
        for step, of_ranks in steps.items():
            epochs_of_ranks = {line["epoch"] for line in of_ranks}
            assert len(epochs_of_ranks) == 1, f"life {life}, step {step}: ranks in epochs {epochs_of_ranks}"
            made[step] = epochs_of_ranks.pop(), Counter(sample for line in of_ranks for sample in line["samples"])
    assert sorted(made) == list(range(len(made))), "every step was made"
    found.steps = len(made)
    used: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for epoch, samples in made.values():
        used[epoch] += samples
    _compare(found, out, used, epochs)
    return found


def _compare(found: Account, out: Path, used: dict[int, Counter[int]], epochs: int) -> None:
    """With what the record names."""
    divided: dict[int, tuple[int, Mapping[str, Any]]] = {}
    shares: dict[int, int] = {1: 0}
    for event in sealegs.open_run(out / "run").events:
        if event.kind == "resume":  # from before a division: it did not come to be
            divided = {epoch: one for epoch, one in divided.items() if one[0] < event.step}
        elif event.kind == "data-recut":
            found.divided += 1
            divided[event.detail["epoch"]] = event.step, event.detail
        elif event.kind == "data-share":
            shares[event.detail["ranks"]] = event.detail["used_twice"]
    for epoch in range(epochs):
        twice, never = used[epoch] - Counter(range(SAMPLES)), Counter(range(SAMPLES)) - used[epoch]
        if epoch in divided:
            named_twice = Counter(divided[epoch][1]["used_twice"])
            named_never = Counter(divided[epoch][1]["left_out"])
        else:  # torch's own sampler uses some twice at the end of every epoch
            named_twice, named_never = (twice if twice.total() == max(shares.values()) else Counter()), Counter()
        found.named += (twice & named_twice).total() + (never & named_never).total()
        found.twice += [f"epoch {epoch}: {sample}" for sample in (twice - named_twice).elements()]
        found.lost += [f"epoch {epoch}: {sample}" for sample in (never - named_never).elements()]
        found.lost += [f"epoch {epoch}: {sample} named" for sample in (named_twice - twice).elements()]


def _lives(out: Path) -> dict[str, list[list[dict[str, Any]]]]:
    """The lines of each rank of each life, in the order in which they began; those that made none are left out."""
    lives: defaultdict[str, list[list[dict[str, Any]]]] = defaultdict(list)
    for path in sorted((out / "steps").iterdir()):
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        if lines:
            lives[path.stem.rpartition("-")[0]].append(lines)
    return dict(sorted(lives.items()))
