"""A Page in, one HTML file out: whole, safe, readable."""

import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bokeh.document import Document
from bokeh.models import Div
from tests.report.runs import events, rows, troubled, write

from sealegs.report.dashboard.columns import RUN_COLOURS, columns_of
from sealegs.report.dashboard.figures import FAINT, MARK_COLOURS, TEXT, draw
from sealegs.report.dashboard.page import html_of, place, title_of
from sealegs.report.dashboard.values import page_of, see

pytestmark = pytest.mark.xdist_group("dashboard page")  # one drawing serves most

EVIL = "</script><img src=x onerror=alert(1)>"


class Parsed(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def ids(self) -> set[str | None]:
        return {attributes.get("id") for _, attributes in self.tags}


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return troubled(tmp_path_factory.mktemp("runs") / "night")


@pytest.fixture(scope="module")
def html(night: Path) -> str:
    return drawn(night)


def drawn(folder: Path, target: Path | None = None, name: str | None = None) -> str:
    return html_of(page_of([see(str(folder), name or folder.name)]), target or folder / "dashboard.html")


def test_the_file_needs_nothing_else(html: str) -> None:
    parsed = Parsed(html)
    for tag, attributes in parsed.tags:
        if tag in ("script", "img", "iframe"):
            assert "src" not in attributes
        assert tag != "link"
    assert {f"panel-{number}" for number in range(1, 11)} <= parsed.ids()


def test_the_headline_says_what_was_skipped(html: str) -> None:
    head = html.split("<header>")[1].split("</header>")[0]
    assert re.search(r'class="verdict">.*\n\s*<p class="done">Skipped 5 of 285 steps \(spike/loss 5\), 1\.8%', head)


def test_each_panel_has_its_words(html: str) -> None:
    described = [attributes["aria-label"] for _, attributes in Parsed(html).tags if attributes.get("role") == "img"]
    assert len(described) == 10
    assert all(described)


def losses_of(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows of which one panel is drawn: most of a page's time goes into the things that its panels are made of."""
    yield from ({name: each[name] for name in ("step", "loss")} for each in rows)


def test_text_of_a_run_is_never_markup(tmp_path: Path) -> None:
    events = [
        {"step": 3, "time": 0.0, "kind": "fault", "text": EVIL},
        {"step": 4, "time": 0.0, "kind": "alarm", "incident": 1, "text": EVIL},
    ]
    told = ({**each, f"param_norm/{EVIL}": 1.0, "sources": f"{EVIL.replace(' ', '')}=8"} for each in losses_of(rows()))
    html = drawn(write(tmp_path / "a", told, events), name=EVIL)
    assert not [attributes for tag, attributes in Parsed(html).tags if tag == "img"]
    assert EVIL not in html
    assert html.count("</script>") == html.count("<script")


def test_a_formula_in_the_text_of_a_live_page_is_text() -> None:
    words = Div(text="$$x$$")
    place({"summary": words}, Document())
    assert words.disable_math


def test_a_folder_whose_name_is_no_text_can_be_linked(tmp_path: Path) -> None:
    folder = write(Path(os.fsdecode(os.fsencode(tmp_path) + b"/night\xff")), losses_of(rows()), events())
    (folder / "incidents" / "1").mkdir(parents=True)
    (folder / "incidents" / "1" / "postmortem.html").write_text("")
    html = drawn(folder, tmp_path / "page.html")
    assert 'href="night%FF/incidents/1/postmortem.html"' in html
    assert "<h2>night\\udcff</h2>" in html


def test_a_mark_leads_to_its_post_mortem_or_to_the_summary(night: Path, html: str) -> None:
    page = page_of([see(str(night), "night")])
    urls = columns_of(page, [{1: "incidents/1/postmortem.html"}])["marks/incident"]["url"]
    assert urls == ["incidents/1/postmortem.html", "#run-1-incident-2"]
    ids = Parsed(html).ids()
    for kind in ("incident", "intervention", "skip", "checkpoint", "other"):
        for url in columns_of(page, [{}])[f"marks/{kind}"]["url"]:
            assert url.removeprefix("#") in ids


def test_links_are_relative_to_the_page(tmp_path: Path) -> None:
    folder = write(tmp_path / "my runs" / "night", losses_of(rows()), events())
    (folder / "incidents" / "1").mkdir(parents=True)
    (folder / "incidents" / "1" / "postmortem.html").write_text("")
    assert 'href="incidents/1/postmortem.html"' in drawn(folder)
    assert 'href="my%20runs/night/incidents/1/postmortem.html"' in drawn(folder, tmp_path / "both.html")


def test_sources_that_are_empty_are_not_drawn(night: Path) -> None:
    page = page_of([see(str(night), "night")])
    drawing = draw(page, [{}])
    assert drawing.sources.keys() == columns_of(page, [{}]).keys()
    names = [each.name for each in drawing.figures["panel-1"].renderers]
    assert names == ["marks/incident", "marks/intervention", "lines", "means", "left", "lone", "broken", "broken sign"]
    assert [each.name for each in drawing.figures["panel-9"].renderers].count("broken") == 0


def test_a_single_row_that_was_left_behind_is_a_dot(tmp_path: Path) -> None:
    losses = [2.0, 2.0, float("nan"), 9.0, float("nan")]
    told = [{"step": step, "loss": loss} for step, loss in enumerate(losses)]
    folder = write(tmp_path / "a", [*told, *({"step": step, "loss": 2.0} for step in range(2, 100))])
    dots = columns_of(page_of([see(str(folder), "a")]), [{}])["panel-1/left-axis/lone"]
    assert (dots["x"], dots["y"], dots["label"]) == ([3], [9.0], ["loss (left behind)"])


def test_numbers_too_large_for_four_bytes_keep_eight(tmp_path: Path) -> None:
    losses = [2.0, 1e39, 3.0, 1e-60]
    folder = write(tmp_path / "a", ({"step": step, "loss": loss} for step, loss in enumerate(losses)))
    data = columns_of(page_of([see(str(folder), "a")]), [{}])["panel-1/left-axis/lines"]
    assert data["ys"][0].tolist() == losses


@pytest.mark.parametrize(("highest", "axis"), [(50.0, "LinearAxis"), (1e37, "LogAxis")])
def test_a_panel_that_explodes_begins_with_a_log_scale(highest: float, axis: str, tmp_path: Path) -> None:
    norms = [*[0.8] * 50, highest]
    folder = write(tmp_path / "a", ({"step": step, "loss": 2.0, "grad_norm": norm} for step, norm in enumerate(norms)))
    drawing = draw(page_of([see(str(folder), "a")]), [{}])
    assert [type(each).__name__ for each in drawing.figures["panel-3"].left if each.visible] == [axis]


def test_two_hundred_runs_are_a_page_of_less_than_five_megabytes(night: Path) -> None:
    seen = see(str(night), "night", 200)
    page = page_of([replace(seen, name=f"night {number}") for number in range(200)])
    html = html_of(page, night / "dashboard.html")
    assert len(html) < 5e6
    assert html.count('<article class="run"') == 200
    assert html.count('"name":"LegendItem"') < 100, "a legend of two hundred would be longer than the panel is high"
    assert title_of(page).endswith("night 7 and 192 more - Sealegs")


def test_the_page_says_what_is_not_logged(tmp_path: Path) -> None:
    html = drawn(write(tmp_path / "a", ({"step": step, "loss": 2.0} for step in range(30))))
    assert "<code>loss_scale</code>" in html
    assert "<code>activation_norm/&lt;...&gt;</code>" in html
    assert json.dumps("panel_9") not in html


# Colours.


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast_on_white(colour: str) -> float:
    return 1.05 / (luminance(colour) + 0.05)


def test_text_and_lines_have_the_contrast_of_wcag_aa(night: Path) -> None:
    page = page_of([see(str(night), "night")])
    layers = columns_of(page, [{}])["panel-4/left-axis/lines"]["colour"]
    assert len(layers) == 12
    for colour in (TEXT, FAINT, *RUN_COLOURS, *MARK_COLOURS.values()):
        assert contrast_on_white(colour) >= 4.5, colour
    for colour in layers:
        assert contrast_on_white(colour) >= 3, colour  # graphics
    css = (Path(__file__).parents[3] / "src" / "sealegs" / "report" / "dashboard" / "page.html").read_text()
    assert all(contrast_on_white(colour) >= 4.5 for colour in re.findall(r"--(?:ink|faint|link): (#\w{6})", css))


# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB
DEFICIENT = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
}


@pytest.mark.parametrize("eyes", DEFICIENT)
def test_runs_are_told_apart_by_those_who_confuse_red_and_green(eyes: str) -> None:
    def seen(colour: str) -> Any:
        linear = [(int(colour[place : place + 2], 16) / 255) ** 2.2 for place in (1, 3, 5)]
        return np.clip(np.array(DEFICIENT[eyes]) @ linear, 0, 1) ** (1 / 2.2)

    for one, other in itertools.combinations(RUN_COLOURS, 2):
        assert np.linalg.norm(seen(one) - seen(other)) > 0.2, (one, other)
