"""What a clip of the gradients does where Muon trains the matrices: on the lab's nano model, beside AdamW for the rest.

    python bench/muon_clip.py [--seeds 3] [--steps 330] [--out FILE.json]

One run a seed and a rule: all gradients clipped by the norm of all, either optimizer's by their own, AdamW's alone,
none. Each once as it is, once with a batch whose gradients are twenty times as large at step 230, once with those of
the blocks alone twenty times as large there. Prints final evaluation losses, the share of steps in which AdamW's
gradients were clipped, and how far the weights are from the clean run's after that step and sixty later, in units of a
usual step. Needs torch and numpy alone.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.rescue.cases import Plan
from bench.rescue.loop import data_of, optimizers_of

from sealegs.lab.model import Transformer
from sealegs.lab.train import backward, evaluate, lr_share

CLIP, AT, TIMES, AFTER = 1.0, 230, 20.0, 60
Parts = tuple[Sequence[Tensor], Sequence[Tensor]]
"""What Muon trains, and what AdamW does."""


def together(parts: Parts) -> float:
    """Clip all by the norm of all; what is left of AdamW's gradients."""
    both = [*parts[0], *parts[1]]
    norm = get_total_norm([p.grad for p in both if p.grad is not None])
    clip_grads_with_norm_(both, CLIP, norm)
    return min(1.0, CLIP / float(norm))


def of_adamw(parts: Parts) -> float:
    """Clip AdamW's alone, by their own norm."""
    norm = get_total_norm([p.grad for p in parts[1] if p.grad is not None])
    clip_grads_with_norm_(parts[1], CLIP, norm)
    return min(1.0, CLIP / float(norm))


def each_alone(parts: Parts) -> float:
    """Clip either by its own norm."""
    return of_adamw((parts[0], parts[0])) and of_adamw(parts)


RULES: dict[str, Callable[[Parts], float]] = {
    "all": together,
    "either": each_alone,
    "AdamW's": of_adamw,
    "none": lambda parts: 1.0,
}
CASES = ("as it is", "a batch x20", "the blocks x20")


class Training:
    """One training, as far as it is."""

    def __init__(self, seed: int, steps: int, clip: Callable[[Parts], float]) -> None:
        plan = Plan(fork=0, after=steps - 30, optimizer="muon")
        self.settings = replace(plan.settings(seed), steps=steps)
        torch.manual_seed(seed)
        self.model = Transformer(self.settings.model)
        self.data: Any = data_of(plan, seed)
        self.optimizers = optimizers_of(plan, self.settings, self.model)
        self.clip = clip
        self.shares: list[float] = []
        self.states: dict[int, list[Tensor]] = {}

    def run(self, steps: range, case: str) -> None:
        """Some steps."""
        parts: Any = tuple([p for group in each.param_groups for p in group["params"]] for each in self.optimizers)
        chosen = self.settings.optimizer
        for step in steps:
            for group in (group for each in self.optimizers for group in each.param_groups):
                group["lr"] = chosen.lr * lr_share(chosen, self.settings.steps, step)
            backward(GradScaler(enabled=False), self.model.losses, self.data.training.batch(step), self.settings)
            if step == AT and case != CASES[0]:
                for p in parts[0] if case == CASES[2] else self.model.parameters():
                    assert p.grad is not None
                    p.grad.mul_(TIMES)
            self.shares.append(self.clip(parts))
            for optimizer in self.optimizers:
                optimizer.step()
            self.model.zero_grad()
            if step in (AT - 1, AT, AT + AFTER):
                self.states[step] = [torch.cat([p.detach().flatten() for p in part]) for part in parts]

    def ended(self, case: str) -> dict[str, Any]:
        """What becomes of a copy of it."""
        data, self.data = self.data, None  # which nobody changes
        branch = deepcopy(self)
        self.data = branch.data = data
        branch.run(range(AT, self.settings.steps), case)
        return {
            "eval_loss": float(evaluate(branch.model.losses, data.held_out, self.settings)),
            "clipped_share": sum(share < 1 for share in branch.shares) / self.settings.steps,
            "states": branch.states,
        }


def apart(struck: dict[str, Any], clean: dict[str, Any], step: int) -> list[float]:
    """How far two runs are from each other, in usual steps: what Muon trains, and what AdamW does."""
    usual = [float((clean["states"][AT][part] - clean["states"][AT - 1][part]).norm()) for part in (0, 1)]
    gaps = [float((struck["states"][step][part] - clean["states"][step][part]).norm()) for part in (0, 1)]
    return [round(gap / unit, 2) for gap, unit in zip(gaps, usual, strict=True)]


def main() -> None:
    """Measure, and print a table."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--seeds", type=int, default=3)
    words.add_argument("--steps", type=int, default=330)
    words.add_argument("--out", type=Path)
    chosen = words.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    print("| clipped | case | final loss, by seed | steps clipped | gap at the step: Muon's, AdamW's | 60 later |")
    print("|---|---|---|---|---|---|")
    for rule, clip in RULES.items():
        clean: list[dict[str, Any]] = []
        begun = [Training(seed, chosen.steps, clip) for seed in range(chosen.seeds)]
        for each in begun:
            each.run(range(AT), CASES[0])
        for case in CASES:
            done = [each.ended(case) for each in begun]
            clean = clean or done
            row: dict[str, Any] = {"rule": rule, "case": case, "losses": [round(each["eval_loss"], 4) for each in done]}
            row["clipped"] = round(statistics.mean(each["clipped_share"] for each in done), 3)
            for name, step in (("at", AT), ("later", AT + AFTER)):
                gaps = [apart(each, pure, step) for each, pure in zip(done, clean, strict=True)]
                row[name] = [round(statistics.mean(part), 2) for part in zip(*gaps, strict=True)]
            rows.append(row)
            losses = ", ".join(f"{loss:.4f}" for loss in row["losses"])
            gaps_told = " | ".join(f"{row[name][0]:.2f}, {row[name][1]:.2f}" for name in ("at", "later"))
            print(f"| {rule} | {case} | {losses} | {row['clipped']:.0%} | {gaps_told} |", flush=True)
    if chosen.out:
        chosen.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
