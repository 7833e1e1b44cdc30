"""Debian's Chromium through Playwright. Where there is none these tests are skipped, under CI=true they fail."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

EVIL = "evil.example"
"""The name of another site, which leads to this machine."""
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
FLAGS += [f"--host-resolver-rules=MAP {EVIL} 127.0.0.1"]
PAINTED = "window.Bokeh && Bokeh.documents.length > 0 && Bokeh.documents[0].is_idle"


class Tab:
    """A page of the browser that remembers what went wrong in it and what it asked the network for."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.errors: list[str] = []
        self.asked: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda said: self._complain(said.type, said.text))
        page.on("request", lambda request: self.asked.append(request.url))

    def _complain(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and "getImageData" not in text:  # the tests' own way to look at pixels
            self.errors.append(text)

    def open(self, address: str | Path) -> None:
        """Go there, and wait until everything is painted."""
        self.page.goto(address.as_uri() if isinstance(address, Path) else address)
        self.page.wait_for_function(PAINTED)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        reason = "no chromium here: apt-get install chromium"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    with sync_playwright() as playwright:  # each launch has a profile folder of its own
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


@contextmanager
def new_tab(browser: Browser) -> Iterator[Tab]:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.set_default_timeout(20_000)
    yield Tab(page)
    page.close()


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    with new_tab(browser) as tab:
        yield tab
