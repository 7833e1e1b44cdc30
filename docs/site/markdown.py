"""Markdown as GitHub reads it: its links, its headings, and what Python-Markdown needs to read it alike."""

import re
from collections.abc import Callable, Iterator

ITEM = re.compile(r"( {0,3})([-*]|\d+\.) +")
FENCE = re.compile(r" *(```+|~~~+)")
HEADING = re.compile(r"(#+) (.+)")


def links(text: str) -> list[str]:
    """Where the links and pictures of a page lead to; what stands in code is none."""
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "``", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", prose)


def headings(text: str) -> list[str]:
    """As links name them."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [slug(title) for title in re.findall(r"^#+ (.+)$", prose, flags=re.MULTILINE)]


def slug(title: str) -> str:
    """The name of a heading in links."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def relinked(text: str, lead: Callable[[str], str]) -> str:
    """The page with each link replaced by what ``lead`` makes of it; what stands in code stays as it is."""
    code = re.compile(r"^```.*?^```$|`[^`\n]*`", flags=re.MULTILINE | re.DOTALL)

    def replaced(prose: str) -> str:
        return re.sub(r"\]\(([^)\s]+)\)", lambda found: f"]({lead(found[1])})", prose)

    # Code in the text of a link, as in [`check`](check.md), would part it: such code is put aside meanwhile.
    kept: list[str] = []

    def aside(found: re.Match[str]) -> str:
        kept.append(found[0])
        return f"\0{len(kept) - 1}\0"

    return re.sub(r"\0(\d+)\0", lambda found: kept[int(found[1])], replaced(code.sub(aside, text)))


def for_python_markdown(text: str) -> str:
    """The same page for Python-Markdown: empty lines before lists and tables, four spaces, headings with names."""
    lines = re.sub(r"\A(<!--.*?-->\s*)+", "", text, flags=re.DOTALL).splitlines()
    return "\n".join(_named(_blocks(lines))) + "\n"


def _named(lines: Iterator[str]) -> Iterator[str]:
    """Each heading with the name that links give it."""
    fence = ""
    for line in lines:
        fence = _fence_after(line, fence)
        found = None if fence else HEADING.fullmatch(line)
        yield f"{line} {{#{slug(found[2])}}}" if found else line


def _blocks(lines: list[str]) -> Iterator[str]:
    """The lines with empty ones before lists and tables, and lists indented by four."""
    fence, before, at = "", "", 0
    while at < len(lines):
        line = lines[at]
        fence = _fence_after(line, fence)
        item = None if fence else ITEM.match(line)
        if item is None:
            starts_table = not fence and line.startswith("|") and not before.startswith("|")
            if starts_table and before.strip():
                yield ""
            yield line
            before, at = line, at + 1
            continue
        if before.strip():
            yield ""
        while at < len(lines) and (item := ITEM.match(lines[at])):
            width = item.end()
            body, at = _item_body(lines, at, width)
            inside = list(_blocks(body))
            yield f"{item[2]:<4}{inside[0]}"
            yield from (f"    {one}" if one else "" for one in inside[1:])
        before = "" if at < len(lines) and not lines[at].strip() else lines[at - 1]
        if at < len(lines) and lines[at].strip():
            yield ""
            before = ""


def _item_body(lines: list[str], at: int, width: int) -> tuple[list[str], int]:
    """What belongs to the item that begins at a line, without its indentation; and the line behind it."""
    body = [lines[at][width:]]
    at += 1
    while at < len(lines):
        line = lines[at]
        indent = len(line) - len(line.lstrip(" "))
        if not line.strip():
            following = lines[at + 1] if at + 1 < len(lines) else ""
            if len(following) - len(following.lstrip(" ")) < 2 or not following.strip():
                break
            body.append("")
        elif indent >= 2:
            body.append(line[min(indent, width) :])
        elif ITEM.match(line) or line.startswith(("#", "```", "|", "<")) or not body[-1].strip():
            break
        else:
            body.append(line)
        at += 1
    return body, at


def _fence_after(line: str, fence: str) -> str:
    """The mark of the code block that is open after a line."""
    found = FENCE.match(line)
    if found is None:
        return fence
    if not fence:
        return found[1]
    return "" if found[1] == fence and not line.strip().strip("`~") else fence
