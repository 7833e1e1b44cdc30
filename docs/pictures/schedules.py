"""The cases of docs/preflight/schedule.md in, a picture of their learning rates out.

python docs/pictures/schedules.py docs/pictures/schedules.svg
"""

import re
import sys
import textwrap
import tomllib
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from sealegs.preflight_check.plan import written
from sealegs.preflight_check.schedule import RateCurve, curve_of
from sealegs.report.postmortem.plots import FAINT, INCIDENT, LINE, STYLE

CASES = Path(__file__).parents[1] / "preflight" / "schedule.md"
PART = re.compile(r"^## (\w+: .+?)$.*?```toml\n(.*?)^```$.*?```toml\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def curve(text: str) -> RateCurve | None:
    return curve_of(written(tomllib.loads(text)["plan"], "case").known())


def draw(into: str) -> None:
    found = [(title, curve(wrong), curve(right)) for title, wrong, right in PART.findall(CASES.read_text())]
    drawn = [(title, wrong, right) for title, wrong, right in found if wrong is not None and right is not None]
    with mpl.rc_context({**STYLE, "svg.hashsalt": "sealegs", "svg.fonttype": "none"}):
        figure = Figure(figsize=(11, 4), layout="constrained")
        for axes, (title, wrong, right) in zip(figure.subplots(2, 4).flat, drawn, strict=False):
            axes.plot(right.steps, right.rates, color=FAINT, ls=":", label="silent")
            axes.plot(wrong.steps, wrong.rates, color=INCIDENT, label="speaks")
            axes.set_title(textwrap.fill(title, 42), fontsize=7.5)
            if title.startswith(("SCH1", "SCH2")):
                axes.set_xlim(-10, 400)  # the beginning is what they are about
            axes.set_yticks([])
            axes.tick_params(labelsize=7)
        for axes in list(figure.axes)[len(drawn) :]:
            axes.axis("off")
        figure.axes[0].legend(fontsize=7, labelcolor=LINE)
        figure.savefig(into, format="svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    draw(sys.argv[1])
