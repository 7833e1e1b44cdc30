"""Renders a post-mortem's Markdown as one self-contained HTML file: pictures inside, no scripts, light and dark."""

import base64
import html
import mimetypes
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sealegs.errors import MissingExtra

if TYPE_CHECKING:
    from markdown_it.token import Token

STYLE = """\
:root { color-scheme: light dark; --ink: #1f2328; --faint: #57606a; --edge: #d0d7de; --paper: #fff; --link: #0550ae;
  --code: #f0f2f5; --warn: #b00020 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --faint: #9aa4af; --edge: #3d444d; --paper: #0d1117;
  --link: #6cb6ff; --code: #1c2128; --warn: #ff8f8f } }
body { margin: 0 auto; padding: 8px 20px 64px; max-width: 880px; color: var(--ink); background: var(--paper);
  font: 16px/1.55 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 24px; line-height: 1.25; margin: 24px 0 8px }
h2 { font-size: 19px; margin: 32px 0 8px; padding-bottom: 4px; border-bottom: 1px solid var(--edge) }
h3 { font-size: 16px; margin: 20px 0 4px }
ul { padding-left: 22px; margin: 8px 0 } li { margin: 3px 0 } li.task { list-style: none; margin-left: -20px }
a { color: var(--link) } code { background: var(--code); padding: 1px 4px; border-radius: 3px; font-size: 14px }
table { border-collapse: collapse; margin: 12px 0; font-variant-numeric: tabular-nums; display: block;
  overflow-x: auto }
th, td { padding: 4px 12px; border-bottom: 1px solid var(--edge); text-align: left } th { font-weight: 600 }
figure { margin: 16px 0 } figure img { width: 100%; height: auto; border-radius: 6px; background: #fff; display: block }
figcaption { color: var(--faint); font-size: 14px; margin-top: 4px }
.empty { color: var(--warn); font-weight: 600 }
@media print { body { max-width: none } h2 { break-after: avoid } figure { break-inside: avoid } }
"""
BOXES = {"[ ] ": "\N{BALLOT BOX}", "[x] ": "\N{BALLOT BOX WITH CHECK}"}
PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<main>
{body}</main>
</body>
</html>
"""


def can_render() -> bool:
    """Whether markdown-it-py is installed."""
    return find_spec("markdown_it") is not None


def page(text: str, folder: Path) -> str:
    """The page of a document whose pictures are relative to a folder."""
    if not can_render():
        raise MissingExtra("the page of a post-mortem", "markdown-it-py", "report")
    from markdown_it import MarkdownIt

    reader = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = reader.parse(text)
    for place, token in enumerate(tokens):
        _dress(tokens, place, token, folder)
    title = text.partition("\n")[0].removeprefix("# ").replace("\\", "")
    body = reader.renderer.render(tokens, reader.options, {})
    return PAGE.format(title=html.escape(title), style=STYLE, body=body)


def _dress(tokens: "list[Token]", place: int, token: "Token", folder: Path) -> None:
    """Make pictures figures with their bytes inside, promises boxes to tick, and empty sections stand out."""
    if token.type != "inline" or not token.children:
        return
    around = tokens[place - 1]
    if [child.type for child in token.children] == ["image"]:
        picture = token.children[0]
        picture.attrs["src"] = _inlined(folder / str(picture.attrs["src"]))
        for edge in (around, tokens[place + 1]):
            edge.tag = "figure"
        caption: Any = type(token)("html_inline", "", 0)
        caption.content = f"<figcaption>{html.escape(picture.content)}</figcaption>"
        picture.attrs["alt"] = picture.content
        token.children.append(caption)
    first = token.children[0]
    if first.content[:4] in BOXES and place >= 2 and tokens[place - 2].type == "list_item_open":
        first.content = f"{BOXES[first.content[:4]]} {first.content[4:]}"
        tokens[place - 2].attrs["class"] = "task"
    if first.content.startswith("EMPTY: ") and around.type == "paragraph_open":
        around.attrs["class"] = "empty"


def _inlined(path: Path) -> str:
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
