"""The site: every page that it should have, readable Markdown, no dead link, and nothing that comes over a network."""

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml
from docs.site import assemble
from docs.site.markdown import for_python_markdown, links, relinked

import sealegs
from sealegs import playbook
from sealegs.cli.main import COMMANDS, main
from sealegs.diagnosis.symptoms import symptoms

ZENSICAL = Path(sys.executable).with_name("zensical")


@pytest.fixture(scope="module")
def pages() -> Mapping[str, str]:
    return assemble.assembled()


def test_every_page_of_the_docs_is_there(pages: Mapping[str, str]) -> None:
    docs = assemble.DOCS
    assert {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} <= pages.keys()
    assert set(assemble.ROOT_PAGES.values()) <= pages.keys()
    assert "source/examples/raw_loop.py.md" in pages


def test_every_public_name_and_command_has_a_page(pages: Mapping[str, str]) -> None:
    modules = {"playbook"}
    for name in set(sealegs.__all__) - modules:
        text = pages[f"reference/sealegs/{name}.md"]
        first, _, _ = (getattr(sealegs, name).__doc__ or "").partition("\n")
        assert first.replace("``", "`") in text, name
    for name in playbook.__all__:
        assert f"reference/playbook/{name}.md" in pages
    for name in COMMANDS:
        assert f"reference/commands/{name}.md" in pages
    index = pages["reference/README.md"] + pages["reference/commands/README.md"]
    assert all(f"/{name}.md)" in index or f"({name}.md)" in index for name in [*COMMANDS, *playbook.__all__])


def test_a_guard_is_shown_as_it_is_called(pages: Mapping[str, str]) -> None:
    text = pages["reference/sealegs/Guard.md"]
    assert "    checkpoint_every: int | Checkpointing = 0,\n" in text
    assert "step(\n    loss: Tensor | None,\n" in text
    assert "def " not in text
    assert "self" not in text.replace("yourself", "").replace("itself", "")
    assert "- `keep: int = 3`: How many of the newest checkpoints stay." in re.sub(
        " +", " ", pages["reference/sealegs/Checkpointing.md"]
    )


def test_a_command_is_shown_as_it_says_itself(
    pages: Mapping[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "78")
    with pytest.raises(SystemExit):
        main(["symptom", "--help"])
    said = capsys.readouterr().out
    text = pages["reference/commands/symptom.md"]
    options = [line.strip() for line in said.splitlines() if line.strip().startswith("--")]
    assert options
    assert all(line in text for line in options)


def test_no_link_of_a_page_is_dead(pages: Mapping[str, str]) -> None:
    """Of the Markdown; the built site is looked at below."""
    checked = 0
    for place, text in pages.items():
        if place.startswith("source/") and "`````" in text:
            continue
        for link in links(text):
            file, _, heading = link.partition("#")
            if re.match(r"[a-z]+:", link):
                continue
            target = (Path("/") / place).parent.joinpath(file).resolve().relative_to("/").as_posix() if file else place
            is_copied = (assemble.DOCS / target).is_file()
            assert target in pages or is_copied, f"{place}: {link}"
            assert not heading or f"{{#{heading}}}" in pages[target], f"{place}: {link}"
            checked += 1
    assert checked > 1000


def test_lists_and_tables_are_read_as_github_reads_them() -> None:
    text = "Some:\n- one\n  goes on\n- two:\n  1. inner\n  2. other\n\nAnd\n| a |\n|---|\n```text\nof\n- code\n```\n"
    assert for_python_markdown(f"<!-- made -->\n# A `b`, c?\n{text}") == (
        "# A `b`, c? {#a-b-c}\nSome:\n\n-   one\n    goes on\n-   two:\n\n    1.  inner\n    2.  other\n\n"
        "And\n\n| a |\n|---|\n```text\nof\n- code\n```\n"
    )


def test_links_in_code_stay_as_they_are() -> None:
    text = "[`a`](b.md) and `[c](d.md)`\n```\n[e](f.md)\n```\n"
    assert relinked(text, str.upper) == "[`a`](B.MD) and `[c](d.md)`\n```\n[e](f.md)\n```\n"


def test_a_folder_in_the_navigation_stands_for_its_pages(tmp_path: Path) -> None:
    """And one that is not there is left out."""
    assemble.main(tmp_path / "site")
    settings = yaml.safe_load((tmp_path / "site" / "mkdocs.yml").read_text())
    named = {title: value for entry in settings["nav"] for title, value in entry.items()}
    assert named["Symptoms"] == ["symptoms/README.md", *(f"symptoms/{name}.md" for name in symptoms())]
    assert ("Incidents" in named) == (assemble.DOCS / "gallery").is_dir()
    placed = _places(settings["nav"])
    there = {path.relative_to(tmp_path / "site/pages").as_posix() for path in tmp_path.glob("site/pages/**/*.md")}
    assert placed <= there
    forgotten = {place for place in there - placed if not place.startswith(("source/", "gallery/"))}
    assert forgotten == set(), "put them into the navigation of mkdocs.yml"


def _places(entries: object) -> set[str]:
    if isinstance(entries, str):
        return {entries}
    values = entries.values() if isinstance(entries, dict) else entries
    assert isinstance(values, list | type({}.values()))
    return {place for value in values for place in _places(value)}


class Html(HTMLParser):
    """What a page refers to, what it loads, and the names within it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.leads: list[str] = []
        self.loads: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.names.add(given.get("id") or "")
        self.leads += [value for key in ("href", "src") if (value := given.get(key))]
        if tag != "a":
            self.loads += [value for key in ("href", "src") if (value := given.get(key))]


@pytest.mark.trains
@pytest.mark.skipif(not ZENSICAL.exists(), reason="zensical is not installed: `make docs` brings it")
def test_the_built_site_has_no_dead_link_and_needs_no_network(tmp_path: Path) -> None:
    folder = tmp_path / "site"
    assemble.main(folder)
    done = subprocess.run([ZENSICAL, "build", "--strict"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    site = folder / "site"
    pages = {path: Html(path.read_text()) for path in site.rglob("*.html")}
    assert len(pages) > 300
    assert [load for page in pages.values() for load in page.loads if re.match(r"[a-z]+:|//", load)] == []
    dead = {
        f"{at.relative_to(site)}: {lead}"
        for at, page in pages.items()
        for lead in page.leads
        if _is_dead(lead, at, pages, site)
    }
    assert dead == set()
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"url\([\"']?(?:https?:)?//", styles) == []
    shutil.rmtree(folder)


def _is_dead(lead: str, at: Path, pages: Mapping[Path, Html], site: Path) -> bool:
    if re.match(r"[a-z]+:|//", lead):
        return False
    file, _, name = unquote(lead).partition("#")
    target = site / file.lstrip("/") if file.startswith("/") else (at.parent / file).resolve() if file else at
    if target.is_dir():
        target /= "index.html"
    return not target.exists() or bool(name and target in pages and name not in pages[target].names)
