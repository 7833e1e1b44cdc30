"""Rare tokens that meet in a batch, and the same rows spread."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.rare_tokens import BEGINNING, nano, trained


def test_spread_over_batches_rare_tokens_raise_the_gradient_norm_far_less(tmp_path: Path) -> None:
    """A model that has learnt a little: 70 steps, the batch of rare tokens is that of step 60."""
    case = nano(seed=3, at=60, last=70)
    norms = {
        arm: trained(case, arm, tmp_path / arm).column("grad_norm")[BEGINNING : case.last]
        for arm in ("concentrated", "stratified")
    }
    assert norms["concentrated"].argmax() == case.at - BEGINNING
    assert norms["concentrated"].max() > 5 * norms["stratified"].max()
