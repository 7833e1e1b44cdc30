"""The questions that people ask in issue threads: the page answers each, or says what it cannot know.

The incidents are those of ``tests/cases``; what is compared is what somebody reads.
"""

import re
from pathlib import Path

import numpy as np
import pytest
from tests.diagnosis.healthy_kinds import run_with
from tests.diagnosis.streams import CASES, read_case, run_from

from sealegs.diagnosis.diff import differ
from sealegs.diagnosis.findings import look
from sealegs.diagnosis.rank import diagnose
from sealegs.record.run import Run
from sealegs.report.commands.check import page
from sealegs.report.commands.diff import page as page_of_two

PATHS = {path.stem: path for path in CASES}


def asked(name: str, folder: Path) -> str:
    return _page(run_from(read_case(PATHS[name]), folder))


def _page(run: Run) -> str:
    text = page(diagnose(look(run), source="mine", format="case"))
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize(
    ("question", "case", "says", "never"),
    [
        (
            "1: loss 0.0 and grad_norm nan in a fine-tune",
            "zero-loss-nan-gradient",
            ["ACT", "zero loss nan gradient (established)", "one thing changed at a time", "eager attention"],
            ["masked labels (established)", "1. destructive update", "2. destructive update", "Reload"],
        ),
        (
            "2: NaN from the very first step",
            "first-row-nan-fp8",
            ["first forward nan (established)", "before any update", "fp32, then plain kernels"],
            ["1. destructive update", "2. destructive update", "Reload", "halve the LR"],
        ),
        ("3: is this spike normal", "hard-batch", ["WATCH", "fast", "Leave it: go on"], ["eload"]),
        (
            "4: it diverged, why, and what now",
            "lr-jump",
            ["ACT", "Reload the last checkpoint before step 700", "lr discontinuity (established)", "LR from 0.0022"],
            [],
        ),
        (
            "5: the loss jumps after a resume",
            "optimizer-reset",
            ["optimizer reset (established)", "second moment 0.0002 after the resume", "restore the optimizer's state"],
            [],
        ),
        (
            "6: stop before NaN is written",
            "clipped-infinity",
            ["from before the update of step 900", "skip updates that are not finite before clipping"],
            [],
        ),
        (
            "7: my GRPO run collapsed",
            "grpo-collapse",
            ["ACT: reward from", "reinforcement learning", "kl blow up (supported)", "halve the LR"],
            ["HEALTHY", "Leave it"],
        ),
        (
            "8: FP8 diverges",
            "fp8-saturation",
            ["ACT", "low precision saturation (established)", "norm.weight", "in bf16"],
            [],
        ),
        (
            "9: most tokens go to one expert",
            "moe-router-collapse",
            ["ACT: one expert of the 8 of layer 3 gets", "router collapse (established)", "balance by a bias"],
            ["HEALTHY", "Leave it"],
        ),
        ("10: which rank is bad", "corrupt-gradient", ["blocks.3.mlp.weight on rank 5"], []),
    ],
)
def test_the_page_answers(question: str, case: str, says: list[str], never: list[str], tmp_path: Path) -> None:
    text = asked(case, tmp_path)
    assert [words for words in says if words not in text] == [], (question, text)
    assert [words for words in never if words in text] == [], (question, text)


def test_fp8_diverges_and_bf16_does_not() -> None:
    """8, with both runs at hand: the signal of the format parts before the loss does."""
    random = np.random.default_rng(1)
    loss = 3 + 0.02 * random.standard_normal(400)
    climbs, beyond = np.maximum(np.arange(400) - 250, 0) * 0.02, np.where(np.arange(400) < 150, 1e-4, 0.3)
    fp8 = run_with({"loss": loss + climbs, "saturated_share/up": beyond}, settings={"precision": "fp8"})
    bf16 = run_with({"loss": loss, "saturated_share/up": np.full(400, 1e-4)}, settings={"precision": "bf16"})
    text = re.sub(r"\s+", " ", page_of_two(differ(fp8, bf16), ("fp8", "bf16")))
    assert "precision" in text
    partings = {each.signal: each.beyond_noise for each in differ(fp8, bf16).partings}
    assert partings["saturated_share/up"] == 150
    assert 251 < (partings["loss"] or 0) < 270


def test_which_rank_is_slow_is_declined() -> None:
    """10: a log without times by rank names no rank, and does not pretend to."""
    pace = np.where(np.arange(300) % 7 == 0, 9.0, 1.0)
    text = _page(run_with({"loss": np.linspace(4, 3, 300), "step_s": pace}))
    assert "rank" not in text
