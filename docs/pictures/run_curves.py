"""A run folder in, a picture of its curves out.

python docs/pictures/run_curves.py experiments/demo docs/pictures/demo.png
"""

import sys

import matplotlib as mpl
import matplotlib.pyplot as plt

import sealegs

BLUE, ORANGE, GREY = "#2f6db0", "#d9772b", "#8a8f98"


def draw(folder: str, picture: str) -> None:
    """Loss over gradient norm over learning rate, as the run recorded them."""
    run = sealegs.open_run(folder)
    mpl.rcParams.update(
        {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "sealegs"}
    )
    figure, (top, middle, bottom) = plt.subplots(
        3, 1, figsize=(8, 5), sharex=True, height_ratios=(3, 1.4, 1), layout="constrained"
    )
    evaluated = run.logged("eval_loss")
    top.plot(run.steps, run.column("loss"), color=BLUE, linewidth=0.9, label="loss of the batch")
    top.plot(
        run.steps[evaluated],
        run.column("eval_loss")[evaluated],
        "o-",
        color=ORANGE,
        markersize=3,
        label="evaluation loss",
    )
    unigram = run.manifest.data["unigram_entropy"]
    top.axhline(unigram, color=GREY, linestyle="--", linewidth=0.9)
    top.annotate(
        f"unigram entropy {unigram:.2f}",
        (run.steps[-1], unigram),
        (0, 3),
        textcoords="offset points",
        ha="right",
        color=GREY,
    )
    top.set_ylabel("nats a token")
    top.legend(frameon=False)
    settings = run.manifest.settings
    parameters = run.manifest.data["parameters"]
    top.set_title(
        f"{run.manifest.run_id}: {parameters / 1e6:.2g}M parameters, {settings['steps']} steps, {run.manifest.dtype}, "
        f"on {run.manifest.host.get('accelerator', 'CPU')}",
        loc="left",
        fontsize=9,
    )
    middle.plot(run.steps, run.column("grad_norm"), color=BLUE, linewidth=0.9)
    middle.axhline(settings["optimizer"]["clip"], color=GREY, linestyle="--", linewidth=0.9)
    middle.set_ylabel("gradient norm\nbefore clipping")
    bottom.plot(run.steps, run.column("lr"), color=BLUE, linewidth=0.9)
    bottom.set_ylabel("learning rate")
    bottom.set_xlabel("step")
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    draw(*sys.argv[1:])
