"""Which slow rises of the loss does the live judge find, at which noise? As a Markdown table.

    python bench/slow_rises.py [--seeds 10]

A curve that falls as losses do has independent log-normal noise. From step 1800 on it rises steadily, for 1200 steps;
the row without a rise is the control. A rise is found where an alarm opens an incident after its beginning.
"""

import argparse
from statistics import median
from typing import NamedTuple

import numpy as np

from sealegs import judge

STEPS, ONSET = 3000, 1800
NOISES = (0.02, 0.05, 0.1)
"""Standard deviations of the loss from step to step, as shares of it."""
RISES = (1.0, 1.1, 1.3, 1.65, 2.7, 7.4)
"""Factors by which the loss has risen at the end."""


class Found(NamedTuple):
    """What the judge said of the seeds of one cell."""

    steps_until: list[int]
    """Steps from the onset to the alarm, of those that had one."""
    seeds: int

    def __str__(self) -> str:
        """``7 of 10, after 512``"""
        after = f", after {median(self.steps_until):.0f}" if self.steps_until else ""
        return f"{len(self.steps_until)} of {self.seeds}{after}"


def first_alarm(noise: float, rise: float, seed: int) -> int | None:
    """The first step at which an incident opens after the onset."""
    random, step = np.random.default_rng(seed), np.arange(STEPS)
    level = (2.6 + 3.4 * (1 + step / 60) ** -0.6) * rise ** (np.maximum(step - ONSET, 0) / (STEPS - ONSET))
    losses = level * np.exp(noise * random.standard_normal(STEPS))
    norms = np.exp(0.15 * random.standard_normal(STEPS))
    detectors = judge.standard()
    state = judge.begin(detectors)
    for at, (loss, norm) in enumerate(zip(losses.tolist(), norms.tolist(), strict=True)):
        state, verdict = judge.fold(detectors, state, {"step": at, "loss": loss, "grad_norm": norm, "lr": 3e-4})
        if verdict.opens_incident and at >= ONSET:
            return at
    return None


def cell(noise: float, rise: float, seeds: int) -> Found:
    """One cell of the table."""
    alarms = (first_alarm(noise, rise, seed) for seed in range(seeds))
    return Found([at - ONSET for at in alarms if at is not None], seeds)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    seeds = parser.parse_args().seeds
    print("| loss, in 1200 steps |", " | ".join(f"noise {noise:.0%}" for noise in NOISES), "|")
    print("|---|" + "---|" * len(NOISES))
    for rise in RISES:
        cells = (str(cell(noise, rise, seeds)) for noise in NOISES)
        print(f"| x {rise:g} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
