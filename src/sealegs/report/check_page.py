"""Writes a diagnosis as one self-contained HTML file: the page of ``sealegs check`` with the curve and its marks.

It opens no file and asks for none: the curve is an inline SVG, there is no script, and the page's own policy forbids
both. Text is text: ``curve_picture.escaped`` is the one place where it becomes HTML.
"""

from collections.abc import Sequence

from sealegs.curve_picture import Band, Panel, escaped, picture
from sealegs.diagnosis.contract import Diagnosis
from sealegs.printable import printable
from sealegs.report.commands.check import VERDICTS, headline, page, whole, why
from sealegs.report.commands.explain import explained
from sealegs.report.panel_names import TITLES, with_panel_names

DRAWN = (("loss", 1, 260), ("grad_norm", 3, 130), ("lr", 2, 90))
"""Signals that are drawn, their panels, and the height of each in pixels."""
PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #1f2328; --faint: #57606a; --edge: #d0d7de; --paper: #fff; --line: #0060a8;
  --mark: #b00020 }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e6edf3; --faint: #9aa4af; --edge: #3d444d; --paper: #0d1117;
  --line: #6cb6ff; --mark: #ff8f8f }} }}
body {{ margin: 0 auto; padding: 8px 20px 64px; max-width: 900px; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }}
h1 {{ font-size: 20px; line-height: 1.3 }} p {{ margin: 8px 0 }}
pre {{ font: 13px/1.45 ui-monospace, monospace; white-space: pre-wrap }}
svg {{ width: 100%; height: auto; display: block }} svg text {{ font: 11px system-ui, sans-serif; fill: var(--faint) }}
summary {{ cursor: pointer; margin: 12px 0 }}
</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def html_page(diagnosis: Diagnosis) -> str:
    """The page of a diagnosis."""
    shown: Diagnosis = printable(diagnosis)
    found = shown.findings
    verdict = f"{VERDICTS[found.verdict]}: {with_panel_names(found.because)}"
    text = page(shown).split("\n")[len(headline(shown)) : -2]  # the last line names a flag of the command
    everything = [*whole(shown).split("\n"), *explained(shown).split("\n")]
    parts = [
        f"<h1>{escaped(verdict)}</h1>",
        f"<p><strong>First action:</strong> {escaped(shown.first_action)}</p>",
        f"<p>{escaped(why(shown))}</p>",
        _curves(diagnosis),
        f"<pre>{_escaped_lines(text)}</pre>",
        "<details><summary>All of it, in plain words</summary>",
        f"<pre>{_escaped_lines(everything)}</pre></details>",
    ]
    return PAGE.format(title=escaped(f"{VERDICTS[found.verdict]}: {shown.source}"), body="\n".join(parts))


def _curves(diagnosis: Diagnosis) -> str:
    """The signals over the steps, one above the other, with the incidents as bands."""
    run = diagnosis.findings.run
    drawn = [each for each in DRAWN if each[0] in run.signals and run.has_numbers(each[0]) and len(run.steps)]
    if not drawn:
        return ""
    panels = [Panel(f"{TITLES[number]} (panel {number})", *run.series(name), height) for name, number, height in drawn]
    bands = [
        Band(f"{one.kind.replace('_', ' ')} at step {one.start}", one.start, one.end)
        for one in diagnosis.findings.incidents
    ]
    span = (int(run.steps[0]), max(int(run.steps[-1]), int(run.steps[0]) + 1))
    label = f"Curves of {diagnosis.source}; incidents are red bands, values that are not finite crosses."
    return picture(panels, bands, span, label)


def _escaped_lines(lines: Sequence[str]) -> str:
    return "\n".join(map(escaped, lines))
