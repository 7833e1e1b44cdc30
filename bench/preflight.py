"""How long the pre-flight check takes: on files, a whole process each; on a live model of 49M parameters.

    python bench/preflight.py [--times 5]

To be under 1 s on a file and under 5 s on the live model. The step that ``loss=`` asks for is the user's own: here
one of 64 tokens.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR

import sealegs
from sealegs.lab.model import Transformer
from sealegs.lab.settings import PRESETS
from sealegs.lab.train import build_optimizer, lr_share

PUBLIC = Path(__file__).parents[1] / "tests" / "preflight_check" / "public"


def timed(what: str, times: int, run: Callable[[], object]) -> None:
    """Print the median of several runs, the slowest, and what the processor worked: less, where others work too."""
    took, worked = [], []
    for _ in range(times):
        began, before = time.perf_counter(), cpu_seconds()
        run()
        took.append(time.perf_counter() - began)
        worked.append(cpu_seconds() - before)
    print(
        f"{what:<50} {statistics.median(took):6.2f} s  (slowest {max(took):.2f}; CPU {statistics.median(worked):.2f})"
    )


def cpu_seconds() -> float:
    """Of this process and of those it has started."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def command(*sources: str) -> None:
    """One whole process."""
    program = "import sys; from sealegs.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", program, "preflight", *sources], capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr


def live(*, with_loss: bool) -> None:
    """The x1 preset's model, optimizer and schedule of 20,000 steps."""
    settings = PRESETS["x1"]
    torch.manual_seed(0)
    model = Transformer(settings.model)
    optimizer = build_optimizer(model, settings.optimizer)
    scheduler = LambdaLR(optimizer, partial(lr_share, settings.optimizer, settings.steps))
    tokens = torch.randint(settings.model.vocabulary, (1, 64))
    loss = (lambda: model.losses(tokens, tokens).total / 64) if with_loss else None
    name = f"live, {model.parameter_count() / 1e6:.0f}M parameters" + (", with one step tried" if with_loss else "")
    check = partial(sealegs.preflight, model, optimizer, scheduler, steps=settings.steps, clip=1.0, loss=loss)
    assert not check().findings
    timed(name, 3, check)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mine = Path(folder) / "mine.toml"
        mine.write_text('preset = "x1"\n')
        timed("TOML of the lab, 20,000 steps", options.times, lambda: command(str(mine)))
    timed("plan, 600,000 steps", options.times, lambda: command(str(PUBLIC / "nanogpt-gpt2-124m.toml")))
    timed("Hugging Face, two files, 250,000 steps", options.times, lambda: command(str(PUBLIC / "llama-7b")))
    live(with_loss=False)
    live(with_loss=True)
