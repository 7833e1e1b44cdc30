"""Makes one self-contained HTML file of a Page and its Drawing."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from bokeh.core.validation import silence
from bokeh.core.validation.warnings import MISSING_RENDERERS
from bokeh.document import Document
from bokeh.embed import file_html
from bokeh.model import Model
from bokeh.models import Div
from bokeh.resources import INLINE
from jinja2 import Environment
from markupsafe import Markup, escape

from sealegs.printable import visible
from sealegs.report.dashboard.columns import RUN_COLOURS
from sealegs.report.dashboard.figures import Drawing, draw
from sealegs.report.dashboard.summary import described, told, wanted
from sealegs.report.dashboard.values import Page

MOST_NAMED = 8
"""The most runs that a title names."""


def _shown(value: object) -> object:
    """What a template puts into the page: text can be seen, all of it, and ends no line."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


_ENVIRONMENT = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_shown)


def html_of(page: Page, target: Path) -> str:
    """The whole page, for the file ``target``."""
    links = links_from(page, target.parent)
    drawing = draw(page, links)
    values = variables(page) | {"summary": Markup(summary(page, links))}  # noqa: S704 - escaped by its template
    document = Document(title=title_of(page))
    place(roots_of(drawing), document)
    return str(file_html(document, INLINE, template=template(), template_variables=values))


def links_from(page: Page, folder: Path) -> list[dict[int, str]]:
    """For each run the existing post-mortems by incident, as links from a page in ``folder``."""
    return [
        {mark.number: quote(os.fsencode(os.path.relpath(mark.page, folder))) for mark in marks if mark.page is not None}
        for marks in page.all_marks
    ]


def template() -> str:
    """The page around the figures."""
    return Path(__file__).with_name("page.html").read_text()


def summary(page: Page, links: Sequence[Mapping[int, str]]) -> str:
    """The summary of each run, as HTML."""
    words = _ENVIRONMENT.from_string(Path(__file__).with_name("summary.html").read_text())
    colours = [RUN_COLOURS[number % len(RUN_COLOURS)] for number in range(len(page.seen))]
    return words.render(runs=told(page), pages=links, colours=colours)


def title_of(page: Page) -> str:
    """``night``, ``good, bad`` or ``a, b, c and 197 more``."""
    names, more = [seen.name for seen in page.seen[:MOST_NAMED]], len(page.seen) - MOST_NAMED
    return visible(f"{', '.join(names)}{f' and {more} more' if more > 0 else ''} - Sealegs")


def variables(page: Page) -> dict[str, Any]:
    """The variables of the template, besides the figures."""
    panels = [
        {
            "number": panel.subject.number,
            "title": panel.subject.title,
            "is_empty": panel.is_empty,
            "described": visible(described(panel, page)),
            "wanted": _coded(wanted(panel)),
        }
        for panel in page.panels
    ]
    return {"panels": panels, "is_live": False}


def roots_of(drawing: Drawing) -> dict[str, Model]:
    """The parts that the template places, by name. An empty panel has no figure."""
    switches = {str(switch.name): switch for switch in drawing.switches}
    return {**drawing.figures, "strip": drawing.strip, **switches}


def place(roots: Mapping[str, Model], document: Document) -> None:
    """Put the parts into a document."""
    silence(MISSING_RENDERERS, True)  # a run to which nothing has happened yet
    with document.models.freeze():  # otherwise each addition counts all models again
        for name, root in roots.items():
            root.name = name.replace("-", "_")  # as the template spells it
            if isinstance(root, Div):
                root.disable_math = True  # a formula in the text of a run would bring a program to set it
            document.add_root(root)


def _coded(text: str) -> Markup:
    """Text with names between backticks, as HTML."""
    parts = [escape(part) for part in text.split("`")]
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if place % 2 else part for place, part in enumerate(parts)
    )
