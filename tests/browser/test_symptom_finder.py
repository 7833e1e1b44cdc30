"""The box of the site that finds symptoms: it gives what `sealegs symptom` gives, and needs no network."""

from pathlib import Path

import pytest
from docs.site.assemble import FINDER, add_finder
from playwright.sync_api import Browser
from tests.browser.conftest import new_tab
from tests.diagnosis.test_symptoms import CHOSEN_BEFORE, TITLES

from sealegs.diagnosis.symptoms import found, symptoms

PAGE = f"""<!doctype html><title>Symptoms</title>{FINDER}
<script src="../finder/tables.js"></script><script src="../finder/finder.js"></script>"""
LISTED = """questions => questions.map((question) => {
    const box = document.querySelector("input");
    box.value = question;
    box.dispatchEvent(new Event("input"));
    return [...document.querySelectorAll("li a")].map((link) => [link.href, link.textContent]);
})"""
ODD = [
    "",
    "why is it that",
    "xyzzy",
    "constructor toString",
    "LOSS=NaN!!! lr 1e-3 __proto__",
    "Learning Rate 0.0",
    "über café",
]


@pytest.mark.xdist_group("browser")
def test_the_box_gives_what_the_command_gives(browser: Browser, tmp_path: Path) -> None:
    add_finder(tmp_path / "finder")
    (tmp_path / "symptoms").mkdir()
    (tmp_path / "symptoms" / "index.html").write_text(PAGE)
    questions = [title for title, _ in TITLES] + [title["text"] for title in CHOSEN_BEFORE] + ODD
    questions += [words for each in symptoms().values() for words in each.searched]
    with new_tab(browser) as tab:
        tab.page.goto((tmp_path / "symptoms" / "index.html").as_uri())
        tab.page.get_by_role("searchbox").fill("grad_norm nan")
        assert tab.page.locator("li a").first.inner_text() == "grad_norm is nan and loss is 0.0"
        assert tab.page.get_by_role("status").inner_text().startswith("Not among them? See all symptoms.")
        tab.page.get_by_role("searchbox").fill("xyzzy")
        below = tab.page.get_by_role("status")
        assert below.inner_text().startswith("No page has these words. See all symptoms. To skip a bad update")
        assert below.get_by_role("link", name="the guard").get_attribute("href") == f"{tmp_path.as_uri()}/guard.html"
        tab.page.get_by_role("searchbox").fill(" ")
        assert below.inner_text() == ""
        listed = tab.page.evaluate(LISTED, questions)
        home = (tmp_path / "symptoms").as_uri()
        for question, links in zip(questions, listed, strict=True):
            assert links == [[f"{home}/{each.name}.html", each.title] for each in found(question)], question
        assert tab.errors == []
        assert all(address.startswith("file:") for address in tab.asked)
