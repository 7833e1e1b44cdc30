"""Two torchrun agents, of which one is killed with its worker at random moments and comes back, again and again.

What is looked at: whether the job comes to its end, whether each sample of each epoch was used once or is named in the
record, and whether the loss at the end differs from that of an undisturbed run of the same seed by less than seeds
differ from each other (one standard deviation).

    python bench/elastic.py --kills 30 --jobs 3
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import stdev

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.elasticity import training
from bench.elasticity.account import Account, account_of
from bench.elasticity.kills import Killed, run_with_kills
from bench.elasticity.processes import start

EPOCHS_A_KILL = 6
STEPS_BETWEEN = 25, 60
"""Steps of ranks, the fewest and the most, before each kill and each return."""


def main() -> int:
    """Kill, account, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="of all jobs together")
    parser.add_argument("--jobs", type=int, default=3, help="jobs, one after the other, each with a seed of its own")
    parser.add_argument("--seeds", type=int, default=8, help="undisturbed runs to compare with")
    parser.add_argument("--wrapper", choices=["ddp", "fsdp2"], default="ddp", help="of the model, on two ranks")
    parser.add_argument("--keep", type=Path, help="a folder for the runs")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="elastic-"))
    kills = options.kills // options.jobs
    epochs = EPOCHS_A_KILL * kills
    if not 0 < options.jobs <= min(options.seeds, options.kills) or options.seeds < 2:
        parser.error("give as many seeds as jobs, at least 2, and a kill for each job")
    losses = {seed: undisturbed(folder / f"alone-{seed}", epochs, seed) for seed in range(options.seeds)}
    print(f"undisturbed: {min(losses.values()):.4f} to {max(losses.values()):.4f}", file=sys.stderr)
    rows = []
    for seed in range(options.jobs):
        out = folder / f"job-{seed}"
        out.mkdir(parents=True)
        killed = run_with_kills(
            start,
            out,
            kills=kills,
            epochs=epochs,
            seed=seed,
            pause_s=0.03,
            between=STEPS_BETWEEN,
            wrapper=options.wrapper,
        )
        rows.append((seed, killed, Account() if killed.died else account_of(out, epochs)))
        print(f"seed {seed}: {killed} {rows[-1][2]}", file=sys.stderr)
    print(table(rows, losses))
    spread = stdev(losses.values())
    is_well = all(
        not one.died and not of.lost and not of.twice and abs(one.loss - losses[seed]) < spread
        for seed, one, of in rows
    )
    return 0 if is_well else 1


def undisturbed(out: Path, epochs: int, seed: int) -> float:
    """The loss at the end of a run of one process that nobody kills."""
    out.mkdir(parents=True)
    process = start(training.main, out, epochs, seed, 0.0, "ddp")
    process.join()
    return float(json.loads((out / "end.json").read_text())["loss"])


def table(rows: list[tuple[int, Killed, Account]], losses: dict[int, float]) -> str:
    """In Markdown."""
    lines = [
        "| seed | kills | lives | of two ranks, of one | steps | made again | divided anew | named | lost | used twice "
        "| loss | the same seed, undisturbed | minutes |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for seed, killed, of in rows:
        lines.append(
            f"| {seed} | {killed.kills} | {of.lives} | {of.worlds.count(2)}, {of.worlds.count(1)} | {of.steps} | "
            f"{of.again} | {of.divided} | {of.named} | {len(of.lost)} | {len(of.twice)} | "
            f"{killed.died or f'{killed.loss:.4f}'} | {losses[seed]:.4f} | {killed.wall_s / 60:.1f} |"
        )
    spread = sorted(losses.values())
    lines.append(
        f"\nUndisturbed, {len(spread)} seeds: {spread[0]:.4f} to {spread[-1]:.4f}, "
        f"standard deviation {stdev(spread):.4f}."
    )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
