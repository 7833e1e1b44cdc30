"""GRPO on a task that anybody can check, guarded: ``python examples/grpo_toy.py --run experiments/grpo``.

The loop is ``sealegs.lab.policy_gradient``, one file to read top to bottom. To break it on purpose:

    python examples/grpo_toy.py --run experiments/hacked --inject hacked-reward:weight=2@80
    sealegs check experiments/hacked
"""

import argparse
from functools import partial

import torch

from sealegs.faults.practice import disturbed_policy
from sealegs.faults.spec import parse
from sealegs.lab.policy_gradient import PolicySettings, train_policy


def main() -> None:
    """Train, and print the reward on questions that were never trained on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", default=None, metavar="FOLDER", help="the run folder to record into")
    parser.add_argument("--steps", type=int, default=PolicySettings().steps)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inject", action="append", default=[], metavar="FAULT@STEP", help="as in `sealegs train`")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the tensors are small
    settings = PolicySettings(steps=options.steps, seed=options.seed)
    disturb = partial(disturbed_policy, [parse(text) for text in options.inject])
    reward = train_policy(settings, options.run, disturb=disturb)
    print(f"reward on held-out questions: {reward:.2f}")


if __name__ == "__main__":
    main()
