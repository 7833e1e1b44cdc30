"""The folder of `make demo` in, pictures of its post-mortem and its dashboard out.

python docs/pictures/pages.py experiments/demo-... docs/pictures
"""

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
COLOURS = 256
"""Of a picture: none is off by more than can be seen, and its file is a third of the size."""
TWO_COLUMNS = """
([first, last]) => {
  const main = document.querySelector("main"), parts = [...main.children]
  const place = title => parts.findIndex(each => each.tagName === "H2" && each.textContent === title)
  const figure = parts.findIndex(each => each.tagName === "FIGURE")
  const columns = [parts.slice(0, figure + 1), parts.slice(place(first), place(last))]
  main.replaceChildren(...columns.map(column => {
    const shown = document.createElement("div")
    shown.append(...column)
    return shown
  }))
  main.style = "display: grid; grid-template-columns: 1fr 1fr; gap: 48px"
  document.body.style.maxWidth = "none"
}
"""


def draw(folder: str, into: str) -> None:
    """Both pages, each as far as it is shown."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        (page,) = Path(folder).glob("guarded/incidents/*/postmortem.html")
        _save(_postmortem(browser, page), Path(into) / "postmortem.png")
        _save(_dashboard(browser, Path(folder) / "dashboard.html"), Path(into) / "dashboard.png")
        browser.close()


def _postmortem(browser: Browser, page: Path) -> bytes:
    """Side by side its beginning, up to the first picture, and what comes after the hypotheses and their tests."""
    tab = browser.new_page(viewport={"width": 1620, "height": 900})
    tab.goto(page.resolve().as_uri())
    tab.evaluate(TWO_COLUMNS, ["Root cause", "Follow-ups"])
    return tab.locator("body").screenshot()


def _dashboard(browser: Browser, page: Path) -> bytes:
    """As wide as the summaries of three runs, as high as these and the first four panels."""
    width = 1620
    tab = browser.new_page(viewport={"width": width, "height": 900})
    tab.goto(page.resolve().as_uri())
    tab.wait_for_function("window.Bokeh && Bokeh.documents.length > 0 && Bokeh.documents[0].is_idle")
    height = tab.locator("#panel-5").evaluate("panel => Math.floor(panel.getBoundingClientRect().top) - 8")
    tab.set_viewport_size({"width": width, "height": height})
    tab.wait_for_timeout(500)  # a high window has no bar to scroll: the panels are a little wider
    return tab.screenshot()


def _save(picture: bytes, path: Path) -> None:
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    few = image.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    print(f"{path}  {image.width} x {image.height}, {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    draw(*sys.argv[1:])
