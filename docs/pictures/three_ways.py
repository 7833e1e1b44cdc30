"""The folder of examples/three_ways.py in, a picture of its three endings out.

python docs/pictures/three_ways.py experiments/demo-... docs/pictures/demo.png
"""

import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

import sealegs

COLOURS = {"unguarded": "#d9772b", "clean": "#8a8f98", "guarded": "#2f6db0"}


def draw(folder: str, picture: str) -> None:
    """Loss of each ending; where the guarded run went back, what it left behind is dotted."""
    mpl.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    for name, colour in COLOURS.items():
        run = sealegs.open_run(Path(folder) / name)
        losses = run.logged("loss")
        axes.plot(run.steps[losses], run.column("loss")[losses], color=colour, linewidth=1, label=name)
    guarded = sealegs.open_run(Path(folder) / "guarded")
    written = guarded.written("loss")
    went_back = [event for event in guarded.events if event.kind == "intervention"]
    left = (written.segments == 0) & (written.steps >= went_back[0].detail["to_step"])
    axes.plot(written.steps[left], written.values[left], ":", color=COLOURS["guarded"], linewidth=1.2)
    for event in went_back:
        place = event.step, float(written.values[left][-1])
        text = f"guarded: back to step {event.detail['to_step']}"
        axes.annotate(text, place, (8, 4), textcoords="offset points", color=COLOURS["guarded"])
    axes.set_xlabel("step")
    axes.set_ylabel("loss of the batch, nats a token")
    axes.legend(frameon=False)
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    draw(*sys.argv[1:])
