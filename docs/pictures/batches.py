"""Rare tokens of each batch in three orders: as the data lie, shuffled, and stratified.

python docs/pictures/batches.py docs/pictures/batches.svg [--vocabulary 16384] [--row 256] [--batch 32]

The data are the standard library's source, in tokens of the lab. Of each batch: how often a row of it has a rare token
(fewer than 10 times in the data) that another row of it has, too.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from sealegs.batching.batch_sampler import StratifiedBatchSampler
from sealegs.batching.stratified import meetings
from sealegs.batching.tokens import rare_rows
from sealegs.lab.settings import SIZES, DataSettings
from sealegs.lab.sources import open_sources

mpl.rcParams |= {"svg.hashsalt": "sealegs", "svg.fonttype": "none"}  # the same picture, the same bytes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--row", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    settings = SIZES["small"]
    settings = replace(
        settings,
        data=DataSettings(sources={"stdlib": 1.0}),
        model=replace(settings.model, vocabulary=options.vocabulary),
    )
    (source,), _ = open_sources(settings, print)
    rows = len(source.tokens) // options.row
    rare = rare_rows(source.tokens[: rows * options.row].reshape(rows, options.row))
    sampler = StratifiedBatchSampler(rare, options.batch)
    orders = {
        "as the data lie": np.arange(rows),
        "shuffled": sampler.shuffled(),
        "stratified": sampler.order(),
    }
    batches = -(-rows // options.batch)
    print(f"{rows:,} rows, {batches:,} batches, {len(np.unique(rare.tokens)):,} rare tokens")
    figure = Figure(figsize=(9, 2.8), layout="constrained")
    for axes, (name, order) in zip(figure.subplots(1, 3, sharey=True), orders.items(), strict=True):
        met = meetings(order, rare, options.batch)
        held = np.bincount(met.batches, weights=met.rows, minlength=batches)
        axes.vlines(np.flatnonzero(held), 0, held[held > 0], color="#a33", linewidth=1)
        axes.set_xlim(0, batches)
        axes.set_title(f"{name}: {np.count_nonzero(held)} batches, at most {held.max():.0f}", fontsize=9)
        axes.set_xlabel("batch")
        print(f"{name}: {met.too_many:,} rows too many, {np.count_nonzero(held):,} batches, at most {held.max():.0f}")
    figure.axes[0].set_ylabel("rare tokens that\nanother row has, too")
    figure.savefig(options.file, metadata={"Date": None})


if __name__ == "__main__":
    main()
