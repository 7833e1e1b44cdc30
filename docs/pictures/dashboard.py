"""The page of a run in, a picture of its top out.

sealegs dashboard experiments/demo-.../guarded
python docs/pictures/dashboard.py experiments/demo-.../guarded/dashboard.html docs/pictures/dashboard.png
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def draw(page: str, picture: str) -> None:
    """As wide as two panels, as high as the summary and the first four."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        tab = browser.new_page(viewport={"width": 1360, "height": 900})
        tab.goto(Path(page).resolve().as_uri())
        tab.wait_for_function("window.Bokeh && Bokeh.documents.length > 0 && Bokeh.documents[0].is_idle")
        height = tab.locator("#panel-5").evaluate("panel => Math.floor(panel.getBoundingClientRect().top) - 8")
        tab.set_viewport_size({"width": 1360, "height": height})
        tab.wait_for_timeout(500)  # a high window has no bar to scroll: the panels are a little wider
        tab.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    draw(*sys.argv[1:])
