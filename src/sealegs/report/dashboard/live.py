"""Shows a page that follows runs under way."""

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bokeh.application import Application
from bokeh.application.handlers.function import FunctionHandler
from bokeh.document import Document
from bokeh.models import CustomJS, Div

from sealegs.errors import SealegsError
from sealegs.record.schema import EVENTS, METRICS
from sealegs.report.dashboard.columns import columns_of, log_span, span_of
from sealegs.report.dashboard.figures import Drawing, draw
from sealegs.report.dashboard.page import place, roots_of, summary, template, title_of, variables
from sealegs.report.dashboard.server import Keys, LiveServer
from sealegs.report.dashboard.values import DiagnosedRun, Page, page_of, see

EVERY_MS = 1000
SHARE = 0.2
"""Share of its time that a page may spend on reading: a long run is read less often."""
LIVE_BLOCKS = """
{% block postamble %}<link rel="icon" href="data:,">{% endblock %}
{% block js_resources %}{{ bokeh_js | replace("<script", '<script nonce="' ~ script_key ~ '"') }}{% endblock %}
{% block inner_body %}
{{ self.contents() }}
{{ plot_script | replace("<script", '<script nonce="' ~ script_key ~ '"') }}
{% endblock %}
"""
"""Bokeh's scripts with the mark by which a browser knows them: in a live page they hold no text of a run. An icon of
its own keeps a browser from asking for one without the key."""


class LiveRuns:
    """Runs that are read again when they have grown."""

    def __init__(self, named: Sequence[tuple[str, str]], say: Callable[[str], None]) -> None:
        self._named = named
        self._say = say
        self._stamps: list[Any] = [None] * len(named)
        self._seen: list[DiagnosedRun | None] = [None] * len(named)
        self._wait_until = 0.0
        self._complaint = ""
        self.page = self._read()

    def look(self) -> Page:
        """The newest page; the same as before while nothing has been written."""
        if time.monotonic() >= self._wait_until:
            try:
                self.page = self._read()
                self._complaint = ""
            except (SealegsError, OSError) as error:  # the folder may come back; the last page stays
                if str(error) != self._complaint:
                    self._say(str(error))
                self._complaint = str(error)
        return self.page

    def _read(self) -> Page:
        began = time.monotonic()
        stamps = [_stamp(source) for source, _ in self._named]
        changed = [number for number, stamp in enumerate(stamps) if stamp != self._stamps[number]]
        if not changed:
            return self.page
        for number in changed:
            self._seen[number] = see(*self._named[number], runs=len(self._named))
            self._stamps[number] = stamps[number]
        page = page_of([seen for seen in self._seen if seen is not None])
        self._wait_until = time.monotonic() + (time.monotonic() - began) / SHARE
        return page


def _stamp(source: str) -> tuple[tuple[int, int], ...]:
    """A value that changes when a run is written to."""
    path = Path(source)
    files = (path, path / METRICS, path / EVENTS, path / "incidents")
    return tuple((file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.exists())


def serve(named: Sequence[tuple[str, str]], say: Callable[[str], None], complain: Callable[[str], None]) -> None:
    """Show runs, by source and name, until Ctrl-C."""
    followed = LiveRuns(named, complain)
    server = server_of(followed)
    loop = server.io_loop
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: loop.add_callback_from_signal(loop.stop))
    server.start()
    say(f"{server.link}  follows {title_of(followed.page)}; Ctrl-C ends it")
    loop.start()
    server.stop()


def server_of(followed: LiveRuns) -> LiveServer:
    """The server of a page that follows runs; it has its port, and does not answer yet."""
    keys = Keys()
    shown = Application(FunctionHandler(lambda document: _show(document, followed, keys)))
    incidents = {_incidents(number): seen.run.folder for number, seen in enumerate(followed.page.seen, 1)}
    return LiveServer(shown, incidents, keys)


def _show(document: Document, followed: LiveRuns, keys: Keys) -> None:
    """Show one visitor's page, and keep it up to date."""
    page = followed.look()
    links = _links(page, keys)
    drawing = draw(page, links)
    words = Div(text=summary(page, links), name="summary", sizing_mode="stretch_width", tags=["shown"])
    words.js_on_change("tags", CustomJS(code="window.location.reload()"))
    place(roots_of(drawing) | {"summary": words}, document)
    document.template = template() + LIVE_BLOCKS
    document.template_variables.update(variables(page) | {"is_live": True, "script_key": keys.script})
    document.title = title_of(page)
    shown = [page]

    def renew() -> None:
        page = followed.look()
        if page is shown[0]:
            return
        links = _links(page, keys)
        if _skeleton(page) != _skeleton(shown[0]):
            words.tags = ["outgrown"]  # a new signal: the page is built anew
        else:
            _renew(page, links, drawing, shown[0])
            words.text = summary(page, links)
        shown[0] = page

    document.add_periodic_callback(renew, EVERY_MS)


def _renew(page: Page, links: Sequence[dict[int, str]], drawing: Drawing, before: Page) -> None:
    for name, columns in columns_of(page, links).items():
        drawing.sources[name].data = columns
    for panel in page.panels:
        log = drawing.log_ranges.get(f"panel-{panel.subject.number}")
        if log is not None:
            log.start, log.end = log_span(panel)
    start, end = span_of(page)
    if (drawing.x_range.start, drawing.x_range.end) == span_of(before):  # a viewer who has zoomed in stays there
        drawing.x_range.start, drawing.x_range.end = start, end
    drawing.x_range.reset_start, drawing.x_range.reset_end = start, end


def _skeleton(page: Page) -> tuple[set[str], list[Any]]:
    """The parts of a shown page that cannot change: its sources, and the lines of each panel."""
    lines = [(panel.missing, [(each.run, each.label) for each in panel.series]) for panel in page.panels]
    return set(columns_of(page, [{} for _ in page.seen])), lines


def _links(page: Page, keys: Keys) -> list[dict[int, str]]:
    return [
        {
            mark.number: f"/{keys.path}/{_incidents(run)}/{mark.number}/{mark.page.name}"
            for mark in marks
            if mark.page is not None
        }
        for run, marks in enumerate(page.all_marks, 1)
    ]


def _incidents(run: int) -> str:
    """The path of a run's incidents, from the root of the page."""
    return f"runs/{run}/incidents"
