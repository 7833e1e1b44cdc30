"""Chains in, tables in Markdown out."""

from collections import Counter
from collections.abc import Sequence

from bench.kills.chain import Chain
from bench.kills.moments import PHASES
from bench.kills.training import KINDS

FOUND = {
    "rows": "rows lost",
    "folder": "folders that did not open",
    "checkpoint": "checkpoints that are not whole, or less than they were",
    "start": "begun elsewhere than at the newest proven checkpoint, or without a word",
    "end": "ended otherwise than a run that nobody killed",
    "error": "errors",
    "hang": "hangs",
}
"""What problems are called, by their kind."""


def kills_of(chains: Sequence[Chain]) -> Counter[tuple[str, str]]:
    """By phase and signal."""
    kills: Counter[tuple[str, str]] = Counter()
    for chain in chains:
        kills += chain.kills
    return kills


def found_in(chains: Sequence[Chain]) -> dict[str, int]:
    """How many problems of each kind."""
    counts = Counter(problem.kind for chain in chains for _, problem in chain.problems)
    return {kind: counts[kind] for kind in FOUND}


def report(chains: Sequence[Chain]) -> str:
    """Kills by phase and signal, chains by what was trained, and what was found."""
    kills, names = kills_of(chains), ("SIGKILL", "SIGTERM", "SIGINT")
    lines = [f"| killed while | {' | '.join(names)} | in all |", "|---|---:|---:|---:|---:|"]
    for phase in PHASES:
        counts = [kills[phase, name] for name in names]
        lines.append(f"| {phase} | {' | '.join(map(str, counts))} | {sum(counts)} |")
    counts = [sum(kills[phase, name] for phase in PHASES) for name in names]
    lines.append(f"| **in all** | {' | '.join(map(str, counts))} | {sum(counts)} |")
    lines += ["", "| run | chains | kills | lives | ended as if nobody had killed it |", "|---|---:|---:|---:|---:|"]
    for kind in KINDS:
        if not (of_kind := [chain for chain in chains if chain.kind == kind]):
            continue
        compared = [chain for chain in of_kind if chain.is_compared]
        same = [chain for chain in compared if all(problem.kind != "end" for _, problem in chain.problems)]
        bits = f"{len(same)} of {len(compared)}" if kind.is_repeatable else "not promised"
        made, lives = kills_of(of_kind).total(), sum(chain.lives for chain in of_kind)
        lines.append(f"| {kind} | {len(of_kind)} | {made} | {lives} | {bits} |")
    lines += ["", "| found | |", "|---|---:|"]
    return "\n".join([*lines, *(f"| {FOUND[kind]} | {count} |" for kind, count in found_in(chains).items())])
