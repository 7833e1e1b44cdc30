"""Lays out the pages of the site: ``python -m docs.site.assemble FOLDER``; zensical then makes HTML of them.

Pages of ``docs`` stay where they are, those beside it get a place, files of the repository that a page links to become
pages themselves, and the reference is made from docstrings and ``--help``: the site needs no network and no repository.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from docs.site import reference
from docs.site.markdown import for_python_markdown, links, relinked

from sealegs.diagnosis.symptoms import ENDINGS, SAME, SAY_NOTHING, phrases, symptoms, worth_of_words

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ROOT_PAGES = {
    "README.md": "overview.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "LICENSE": "licence.md",
}
"""Pages beside ``docs``, and where they lie in the site."""
KINDS = {
    ".py": "python",
    ".toml": "toml",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "json",
    ".cff": "yaml",
    ".sh": "bash",
}


FINDER = '<div class="symptom-finder"></div>'
"""Where ``finder.js`` puts its box."""


def main(folder: Path) -> None:
    """Write ``FOLDER/pages`` and ``FOLDER/mkdocs.yml`` for zensical."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = folder / "pages"
    for place, text in assembled().items():
        (pages / place).parent.mkdir(parents=True, exist_ok=True)
        (pages / place).write_text(text, "utf-8")
    for path in _files():
        if path.suffix != ".md":
            (pages / path.relative_to(DOCS)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, pages / path.relative_to(DOCS))
    add_finder(pages / "finder")
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    settings |= {"docs_dir": "pages", "site_dir": "site", "nav": list(_nav(settings["nav"], pages))}
    (folder / "mkdocs.yml").write_text(json.dumps(settings, indent=1, ensure_ascii=False), "utf-8")


def add_finder(folder: Path) -> None:
    """The script that finds symptoms by the words of a question, and its tables."""
    folder.mkdir(parents=True)
    for name in ("finder.js", "finder.css"):
        shutil.copyfile(Path(__file__).with_name(name), folder / name)
    worth = worth_of_words()
    said = {name: [" ".join(words) for words in each] for name, each in phrases().items()}
    tables = {
        "same": SAME,
        "sayNothing": sorted(SAY_NOTHING),
        "endings": ENDINGS,
        "symptoms": [
            {"name": name, "title": each.title, "worth": worth[name], "phrases": said[name]}
            for name, each in symptoms().items()
        ],
    }
    (folder / "tables.js").write_text(f"window.sealegsSymptoms = {json.dumps(tables)};\n", "utf-8")


def assembled() -> Mapping[str, str]:
    """Every page of the site by its place, as Markdown."""
    written: dict[str, str] = {}
    waiting = [*(ROOT / name for name in ROOT_PAGES), *(path for path in _files() if path.suffix == ".md")]
    waiting += {path.parent for path in waiting} - {ROOT, DOCS}
    while waiting:
        path = waiting.pop()
        place = place_of(path)
        if place in written:
            continue
        text = _text(path)
        if path.is_dir() or path.suffix == ".md":
            waiting += [target for link in links(text) if (target := _target(link, path)) and _needs_page(target)]
            text = for_python_markdown(relinked(text, partial(_lead, path)))
        written[place] = text
    for place in ("README.md", "symptoms/README.md"):
        before = "\n| you see |" if place == "README.md" else "\n-   "
        head, rest = written[place].split(before, maxsplit=1)
        written[place] = f"{head}\n{FINDER}\n{before}{rest}"
    made = {f"reference/{place}": text for place, text in reference.pages().items()}
    return written | {place: for_python_markdown(text) for place, text in made.items()}


def place_of(path: Path) -> str:
    """Where a file of the repository lies in the site."""
    inside = path.relative_to(ROOT).as_posix()
    if inside in ROOT_PAGES:
        return ROOT_PAGES[inside]
    place = inside.removeprefix("docs/") if inside.startswith("docs/") else f"source/{inside}"
    if path.is_dir():
        return f"{place}/README.md"
    return place if path.suffix == ".md" or not place.startswith("source/") else f"{place}.md"


def _files() -> list[Path]:
    """What of ``docs`` belongs to the site."""
    return [
        path
        for path in sorted(DOCS.rglob("*"))
        if path.is_file() and path.suffix != ".py" and not {"__pycache__", "site"} & set(path.relative_to(DOCS).parts)
    ]


def _needs_page(target: Path) -> bool:
    """Whether something that a page links to is shown on a page: what is not, is copied as it is."""
    return target.is_dir() or target.suffix == ".md" or not target.is_relative_to(DOCS)


def _target(link: str, path: Path) -> Path | None:
    """The file or folder that a link leads to; None out of the repository, or within the page."""
    file = link.partition("#")[0]
    if not file or re.match(r"[a-z]+:", link):
        return None
    return ((path if path.is_dir() else path.parent) / file).resolve()


def _lead(path: Path, link: str) -> str:
    """Where a link of a page leads to in the site."""
    target = _target(link, path)
    if target is None:
        return link
    _, mark, heading = link.partition("#")
    start = Path(place_of(path)).parent
    return os.path.relpath(place_of(target), start).replace(os.sep, "/") + mark + heading


def _text(path: Path) -> str:
    """The Markdown of a page, or of a page about a folder or a file of another kind."""
    inside = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        index = path / "README.md"
        return index.read_text("utf-8") if index.exists() else "\n".join(_listing(path))
    if path.suffix == ".md":
        return path.read_text("utf-8")
    kind = KINDS.get(path.suffix, "text")
    return f"# {inside}\n\n`````{kind}\n{path.read_text('utf-8')}\n`````\n"


def _listing(folder: Path) -> Iterator[str]:
    """A page that lists the files of a folder, newest first where their names begin with a date."""
    paths = [path for path in sorted(folder.iterdir(), reverse=True) if _is_listed(path)]
    dated = all(re.match(r"\d{4}-", path.name) for path in paths)
    yield from (f"# {folder.relative_to(ROOT).as_posix().removeprefix('docs/').capitalize()}", "")
    for path in paths if dated else reversed(paths):
        title = re.search(r"^# (.+)$", path.read_text("utf-8"), flags=re.MULTILINE) if path.suffix == ".md" else None
        day = path.name[:10] if dated else ""
        shown = re.sub(rf",? {day}", "", title[1]) if title and day else title[1] if title else path.name
        yield f"- {day}{': ' if day else ''}[{shown}]({path.name})"


def _is_listed(path: Path) -> bool:
    is_measured = path.parent.parent == DOCS
    return path.is_file() and (path.suffix == ".md" if is_measured else path.suffix not in (".pyc", ".png", ".svg"))


def _nav(entries: list[Any], pages: Path) -> Iterator[Any]:
    """The navigation, with each folder (``symptoms/``) as the pages that its own first page links to, in that order."""
    for entry in entries:
        if isinstance(entry, str):
            yield entry
            continue
        ((title, value),) = entry.items()
        if isinstance(value, list):
            yield {title: list(_nav(value, pages))}
        elif not value.endswith("/"):
            yield {title: value}
        elif (pages / value).is_dir():
            yield {title: list(_pages_of(pages, value))}


def _pages_of(pages: Path, folder: str) -> Iterator[str]:
    yield f"{folder}README.md"
    named = [f"{folder}{link.partition('#')[0]}" for link in links((pages / folder / "README.md").read_text("utf-8"))]
    for place in dict.fromkeys(named):
        if place.endswith(".md") and ".." not in place and not place.endswith("README.md"):
            yield place


if __name__ == "__main__":
    main(Path(sys.argv[1]))
