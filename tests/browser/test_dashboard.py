"""What a person sees of the page, and what it does when it is used."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser
from tests.browser.conftest import Tab, new_tab
from tests.report.runs import SPIKE, append, row, troubled, write

from sealegs.cli.main import main
from sealegs.record.columns import Columns
from sealegs.record.manifest import Manifest
from sealegs.record.run import run_of
from sealegs.report.dashboard.page import html_of
from sealegs.report.dashboard.values import DiagnosedRun, page_of, see

pytestmark = pytest.mark.xdist_group("browser")  # one browser serves all

VIEW = "const view = Bokeh.index.find_one(Bokeh.documents[0].get_model_by_name(name))"
INK = (
    "async name => {"
    + VIEW
    + """
  const {left, top, width, height} = view.frame.bbox, {ctx} = view.canvas_view.primary
  const box = [left, top, width, height].map(length => length * devicePixelRatio)
  const pixels = () => ctx.getImageData(...box).data
  const names = ["lines", "lone", "left", "cells"]
  const curves = view.model.renderers.filter(each => names.includes(each.name))
  const show = async is_shown => {
    for (const curve of curves) curve.visible = is_shown
    await new Promise(done => setTimeout(done, 150))
  }
  const before = pixels()
  await show(false)
  const after = pixels()
  await show(true)
  let changed = 0
  for (let at = 0; at < before.length; at += 4)
    if (before[at] != after[at] || before[at + 1] != after[at + 1] || before[at + 2] != after[at + 2]) changed++
  return changed
}"""
)
"""How many pixels of a figure its curves and boxes colour."""
PLACE = (
    "([name, x, y, on]) => {"
    + VIEW
    + """
  view.el.scrollIntoView({block: "center"})
  const at = view.el.getBoundingClientRect(), frame = view.frame
  const up = y == null ? frame.bbox.top + frame.bbox.height / 2 : frame.y_scales.get(on).compute(y)
  return [at.left + frame.x_scales.get("default").compute(x), at.top + up]
}"""
)
"""Where in the window a step and a value of a figure are; without a value, half way up."""
X_RANGE = "name => { const {start, end} = Bokeh.documents[0].get_model_by_name(name).x_range; return [start, end] }"
PANELS = [f"panel_{number}" for number in range(1, 11)]


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = troubled(tmp_path_factory.mktemp("experiments") / "night")
    (folder / "incidents" / "1").mkdir(parents=True)
    (folder / "incidents" / "1" / "postmortem.html").write_text("<title>Post-mortem of incident 1</title>")
    assert main(["dashboard", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def shown(browser: Browser, night: Path) -> Iterator[Tab]:
    """The page, opened once for all tests that stay on it."""
    with new_tab(browser) as tab:
        tab.open(night / "dashboard.html")
        yield tab


def place(tab: Tab, figure: str, x: float, y: float | str | None = None, on: str = "default") -> tuple[float, float]:
    across, down = tab.page.evaluate(PLACE, [figure, x, y, on])
    return across, down


def click(tab: Tab, figure: str, x: float, y: float | str | None = None) -> None:
    tab.page.wait_for_timeout(400)  # Bokeh takes two clicks within 300 ms, wherever they are, for a double one
    tab.page.mouse.click(*place(tab, figure, x, y))


def test_every_panel_is_painted_and_nothing_is_fetched(shown: Tab, night: Path) -> None:
    for number in range(1, 11):
        assert shown.page.locator(f"#title-{number}").is_visible()
        assert shown.page.evaluate(INK, f"panel_{number}") > 100, number
    assert shown.errors == []
    assert shown.asked == [(night / "dashboard.html").as_uri()]


def test_the_headline_says_what_was_skipped(shown: Tab) -> None:
    told = shown.page.locator("header .verdict ~ .done")
    assert told.first.is_visible()
    assert "Skipped 5 of 285 steps (spike/loss 5)" in told.first.inner_text()


def test_hover_says_step_and_value(shown: Tab) -> None:
    shown.page.mouse.move(*place(shown, "panel_1", 100))
    tooltip = shown.page.locator(".bk-Tooltip").get_by_text("loss", exact=True)
    tooltip.wait_for()
    assert shown.page.locator(".bk-Tooltip").get_by_text("100", exact=True).count() >= 1


EVIL = '$$\\frac{1}{2}$$ <img src=http://127.0.0.1:9/x onerror="window.came=1"> @{url} \u202e'


def test_text_of_a_run_is_text_wherever_it_is_shown(tab: Tab, tmp_path: Path) -> None:
    """In tooltips and legends too, which scripts fill; and no formula has a program fetched to set it."""
    events = [{"step": SPIKE, "time": 0.0, "kind": "alarm", "incident": 1, "text": EVIL}]
    name = EVIL.replace('"', "").replace("\\", "").removesuffix("\u202e")
    told = ({**row(step), f"param_norm/{name}": 1.0, "sources": f"{name.replace(' ', '')}=8"} for step in range(250))
    run = write(tmp_path / "a", told, events)
    seen = [see(str(run), EVIL), see(str(run), "$$x$$")]
    (tmp_path / "page.html").write_text(html_of(page_of(seen), tmp_path / "page.html"))
    tab.open(tmp_path / "page.html")
    for figure, y in (("events", "incident"), ("panel_1", None), ("panel_5", 1.0), ("panel_10", None)):
        tab.page.mouse.move(*place(tab, figure, SPIKE, y))
        tab.page.wait_for_timeout(300)
    tab.page.mouse.move(*place(tab, "events", SPIKE, "incident"))
    shown = f"incident 1: {EVIL[:-1]}\\u202e"
    tab.page.locator(".bk-Tooltip").get_by_text(f"{EVIL[:-1]}\\u202e: {shown}").first.wait_for()
    assert tab.page.locator("img").count() == 0
    assert tab.page.evaluate("window.came") is None
    assert tab.asked == [(tmp_path / "page.html").as_uri()]
    assert tab.errors == []


def test_hover_over_a_nan_says_so(shown: Tab) -> None:
    shown.page.mouse.move(*place(shown, "panel_1", 140, 0.03, "floor"))
    shown.page.get_by_text("loss is NaN at steps 140 to 142 (3 rows)").wait_for()


def test_hover_over_an_incident_says_what_happened(shown: Tab) -> None:
    shown.page.mouse.move(*place(shown, "events", SPIKE, "incident"))
    shown.page.locator(".bk-Tooltip").get_by_text("incident 1: spike").wait_for()


def test_a_zoom_is_a_zoom_of_all_and_reset_undoes_it(shown: Tab) -> None:
    whole = shown.page.evaluate(X_RANGE, "panel_1")
    across, down = place(shown, "panel_3", 100)
    shown.page.mouse.move(across, down)
    shown.page.mouse.down()
    shown.page.mouse.move(place(shown, "panel_3", 200)[0], down, steps=4)
    shown.page.mouse.up()
    for figure in (*PANELS, "events"):
        start, end = shown.page.evaluate(X_RANGE, figure)
        assert (start, end) == (pytest.approx(100, abs=2), pytest.approx(200, abs=2))
    shown.page.locator(".bk-tool-icon-reset").first.click()
    assert shown.page.evaluate(X_RANGE, "panel_8") == whole


def test_the_cursor_is_seen_in_every_panel(shown: Tab) -> None:
    shown.page.mouse.move(*place(shown, "panel_2", 120))
    shown.page.mouse.move(*place(shown, "panel_2", 125))
    cursor = "view.model.toolbar.tools.find(tool => tool.type == 'CrosshairTool').overlay.location"
    script = f"name => {{ {VIEW}; return {cursor} }}"
    assert {round(shown.page.evaluate(script, figure)) for figure in ("panel_1", "panel_10")} == {125}


def test_a_click_leads_to_the_summary_and_to_the_post_mortem(tab: Tab, night: Path) -> None:
    tab.open(night / "dashboard.html")
    click(tab, "panel_2", 141)  # the band of an incident without a post-mortem
    tab.page.wait_for_url("**#run-1-incident-2")
    click(tab, "events", 210, "intervention")
    tab.page.wait_for_url("**#run-1-intervention-1")
    assert tab.page.locator("#run-1-intervention-1").is_visible()
    click(tab, "events", SPIKE, "incident")
    tab.page.wait_for_url("**/incidents/1/postmortem.html")
    assert tab.page.title() == "Post-mortem of incident 1"


def test_the_switches_change_scale_and_lines(shown: Tab) -> None:
    pictures = [shown.page.locator("#panel-1").screenshot()]
    for switch in ("Log scale", "Smoothed"):
        shown.page.get_by_role("button", name=switch).click()
        shown.page.wait_for_timeout(200)
        pictures.append(shown.page.locator("#panel-1").screenshot())
    assert len(set(pictures)) == 3
    curves = "view.model.renderers.filter(each => ['lines', 'means'].includes(each.name))"
    state = f"name => {{ {VIEW}; return {curves}.map(each => [each.name, each.y_range_name, each.visible]) }}"
    assert shown.page.evaluate(state, "panel_1") == [["lines", "log", True], ["means", "log", True]]
    script = f"name => {{ {VIEW}; return view.model.left.filter(axis => axis.visible).map(axis => axis.type) }}"
    assert shown.page.evaluate(script, "panel_1") == ["LogAxis"]
    shown.page.get_by_role("button", name="Log scale").click()
    assert shown.page.evaluate(script, "panel_1") == ["LinearAxis"]
    assert shown.errors == []


def test_several_runs_are_in_one_page(tab: Tab, night: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "clean", (row(step, attempt=1) for step in range(200)))
    assert main(["dashboard", str(night), str(other), "-o", str(tmp_path / "both.html")]) == 0
    tab.open(tmp_path / "both.html")
    assert tab.page.locator(".run h2").all_inner_texts() == ["night", "clean"]
    assert all(tab.page.evaluate(INK, figure) > 100 for figure in PANELS)
    for width in (1440, 480):
        tab.page.set_viewport_size({"width": width, "height": 800})
        tab.page.wait_for_timeout(500)
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.errors == []


def million() -> DiagnosedRun:
    steps = 1_000_000
    random = np.random.default_rng(0)
    values: dict[str, Any] = {"step": np.arange(steps, dtype=np.float64)}
    for name in (
        "loss",
        "grad_norm",
        "lr",
        "moment1_norm",
        "moment2_norm",
        "tokens_per_s",
        "loss_scale",
        "token_entropy",
    ):
        values[name] = 2.0 + random.random(steps)
    for layer in range(24):
        values[f"activation_norm/blocks.{layer}"] = values[f"param_norm/blocks.{layer}"] = layer + values["lr"]
    values["loss"][[123_456, 700_000]] = 50.0, np.nan
    logged = {name: np.ones(steps, np.bool_) for name in values}
    run = run_of(Path("million"), Manifest(run_id="million"), Columns(values, logged, rows=steps))
    return DiagnosedRun(name="million", source="million", run=run, diagnosis=None)


def test_a_million_steps_are_a_small_page_with_its_spike(tab: Tab, tmp_path: Path) -> None:
    target = tmp_path / "million.html"
    target.write_text(html_of(page_of([million()]), target))
    assert target.stat().st_size < 5e6
    tab.open(target)
    empty = (7,)
    assert all(tab.page.evaluate(INK, f"panel_{number}") > 100 for number in range(1, 11) if number not in empty)
    script = f"name => {{ {VIEW}; return view.model.y_range.end }}"
    assert tab.page.evaluate(script, "panel_1") > 50
    tab.page.mouse.move(*place(tab, "panel_1", 700_000, 0.03, "floor"))
    tab.page.get_by_text("loss is NaN at step 700000").wait_for()
    assert tab.errors == []


# The page that follows a run.


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[str, Path, subprocess.Popen[str]]]:
    """A server of a run that is under way, its address and its folder."""
    folder = troubled(tmp_path / "experiments" / "night")
    (folder / "incidents" / "1" / "capsule").mkdir(parents=True)
    (folder / "incidents" / "1" / "postmortem.html").write_text("<title>Post-mortem of incident 1</title>")
    (folder / "incidents" / "1" / "capsule" / "capsule.json").write_text("{}")
    program = Path(sys.executable).with_name("sealegs")
    server = subprocess.Popen(
        [program, "dashboard", "night", "--serve"],
        cwd=tmp_path, env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert server.stdout is not None
    watchdog = threading.Timer(60, server.kill)
    watchdog.start()
    address = server.stdout.readline().split()[0]
    yield address, folder, server
    watchdog.cancel()
    if server.poll() is None:
        server.kill()
    server.communicate()


def test_a_live_page_grows_keeps_to_itself_and_ends_quietly(
    tab: Tab, live: tuple[str, Path, subprocess.Popen[str]]
) -> None:
    address, folder, server = live
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[0-9a-f]{32}/", address)
    tab.open(address)
    assert all(tab.page.evaluate(INK, figure) > 100 for figure in PANELS)
    for switch in ("Log scale", "Smoothed"):
        tab.page.get_by_role("button", name=switch).click()
    assert tab.errors == [], "nothing that the page does is against its policy"
    append(folder, (row(step, attempt=1) for step in range(300, 400)))
    tab.page.wait_for_function(f"() => ({X_RANGE})('panel_1')[1] > 399")
    tab.page.get_by_text("steps 0 to 399;").first.wait_for()
    append(folder, [row(400, attempt=1, rare_token_share=0.25)])  # a new signal: the page is built anew
    tab.page.get_by_text("rare_token_share").wait_for(state="detached")
    tab.page.wait_for_function("window.Bokeh && Bokeh.documents.length > 0 && Bokeh.documents[0].is_idle")

    click(tab, "events", SPIKE, "incident")
    tab.page.wait_for_url("**/runs/1/incidents/1/postmortem.html")
    assert tab.page.title() == "Post-mortem of incident 1"

    for path in (
        "manifest.json",
        "runs/1/manifest.json",
        "runs/1/incidents/../manifest.json",
        "%2e%2e/%2e%2e/etc/passwd",
    ):
        assert status(address + path) in (403, 404), path
    for path in (
        "1/capsule/capsule.json",
        "%2e%2e/manifest.json",
        "1/%2e%2e/%2e%2e/manifest.json",
        "2/postmortem.html",
    ):
        assert status(f"{address}runs/1/incidents/{path}") in (403, 404), path
    assert status(f"{address}static/../../../../../../../../etc/passwd") in (403, 404)
    assert status(f"{address}runs/1/incidents/1/postmortem.html", host="evil.example") == 403

    server.send_signal(signal.SIGINT)
    _, err = server.communicate(timeout=20)
    assert (server.returncode, err) == (0, "")


def test_the_panels_of_a_kind_of_run_are_painted_below_the_ten(browser: Browser, tmp_path: Path) -> None:
    signals = ("reward", "zero_spread_share", "policy_entropy", "expert_load/0.0", "expert_load/0.1", "amax/fc1")
    rows = [{name: 1 + place + step % 7 for place, name in enumerate(signals)} for step in range(40)]
    log = tmp_path / "agent.jsonl"
    log.write_text("".join(json.dumps({"step": step, **row}) + "\n" for step, row in enumerate(rows)))
    page = tmp_path / "agent.html"
    assert main(["dashboard", str(log), "-o", str(page)]) == 0
    with new_tab(browser) as tab:
        tab.open(page)
        for number in (11, 12, 19, 24):
            assert tab.page.evaluate(INK, f"panel_{number}") > 100, number
        described = tab.page.locator("#panel-19 [role=img]").get_attribute("aria-label")
        assert described is not None
        assert "0.1: 5 at step 0" in described
        assert tab.page.locator("#panel-13").count() == 0
        assert tab.errors == []


def status(address: str, host: str | None = None) -> int:
    request = urllib.request.Request(address, headers={"Host": host} if host else {})  # noqa: S310 - our own server
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
