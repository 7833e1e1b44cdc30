"""How long it takes to spread the rare tokens of many rows over batches, and in how much memory.

    python bench/batches.py [--rows 10000000] [--row-tokens 64] [--batch 1024]

Rows of token ids in a memory map: 50,000 different ones, drawn as words fall in a text, and rare ones eight times each.
`sealegs batches`, as a command; then the ordering alone, in harder cases.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap

from sealegs.batching.batch_sampler import StratifiedBatchSampler
from sealegs.batching.stratified import RareRows, meetings, spread

PROGRAM = "from sealegs.cli.main import main\nraise SystemExit(main({words!r}))\n"
VOCABULARY, TIMES = 50_000, 8


def write_rows(path: Path, rows: int, width: int, rare: int) -> None:
    """Ids as words fall in a text."""
    draw = np.random.default_rng(0)
    tokens = open_memmap(path, "w+", np.uint16, (rows * width,))
    for first in range(0, len(tokens), 1 << 24):
        size = min(1 << 24, len(tokens) - first)
        tokens[first : first + size] = (VOCABULARY ** draw.random(size) - 1).astype(np.uint16)
    tokens[draw.choice(len(tokens), rare * TIMES, replace=False)] = VOCABULARY + np.arange(rare * TIMES) % rare
    tokens.flush()


def command(rows: int, width: int, batch: int) -> None:
    """From the memory map to the order on disk."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        write_rows(scratch / "a.npy", rows, width, 10_000)
        words = ["batches", "a.npy", "--row", str(width), "--batch", str(batch), "-o", "order.npy", "--json"]
        (scratch / "run.py").write_text(PROGRAM.format(words=words))
        began = time.perf_counter()
        run = subprocess.Popen([sys.executable, "run.py"], cwd=scratch, stdout=(scratch / "told").open("wb"))
        _, code, used = os.wait4(run.pid, 0)
        wall = time.perf_counter() - began
        assert code == 0, code
        told = json.loads((scratch / "told").read_text())
        print(
            f"`sealegs batches`: {told['rows']:,} rows of {width} tokens, batches of {batch}: {wall:.1f} s "
            f"(CPU {used.ru_utime + used.ru_stime:.1f} s), {used.ru_maxrss / 1e6:.2f} GB; {told['rare']:,} rare tokens "
            f"in {told['rare_rows']:,} rows; too many: {told['shuffled']:,} if only shuffled, {told['unmet']:,} after"
        )


def ordering(what: str, rows: int, batch: int, rare: int, *, times: int = 9, within: int | None = None) -> None:
    """The order of rows, of which it is known what they hold; ``within`` the first so many, unshuffled."""
    draw = np.random.default_rng(1)
    held = RareRows(rows, draw.integers(0, within or rows, rare * times), np.repeat(np.arange(rare), times))
    began = time.process_time()
    if within is None:
        before, order = (sampler := StratifiedBatchSampler(held, batch)).shuffled(), sampler.order()
    else:
        before, order = np.arange(rows), spread(np.arange(rows), held, batch)
    took = time.process_time() - began
    met, left = (meetings(each, held, batch).too_many for each in (before, order))
    print(f"| {what} | {rows:,} | {rows // batch:,} | {rare:,} | {took:.1f} s | {met:,} | {left:,} |", flush=True)


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--row-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1024)
    options = parser.parse_args()
    command(options.rows, options.row_tokens, options.batch)
    print("\n| ordering alone | rows | batches | rare tokens | CPU | too many before | after |")
    print("|---|---|---|---|---|---|---|")
    ordering("usual", options.rows, options.batch, 50_000)
    ordering("a rare token in every row", options.rows, options.batch, options.rows // 10)
    ordering("100 batches", 100_000, 1000, 20_000)
    ordering("10 batches", 10_000, 1000, 1000)
    ordering("5 batches: nine rows do not fit", 10_000, 2000, 1000)
    ordering("not shuffled, all in the first 1 %", options.rows, options.batch, 50_000, within=options.rows // 100)


if __name__ == "__main__":
    main()
