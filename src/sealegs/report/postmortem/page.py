"""Writes a post-mortem as one self-contained HTML file: pictures inside, no scripts, light and dark.

It is made from the document itself and opens no file. The pictures are those that were drawn for the document, and text
is text: nothing that a field says can bring in another file, or a link.
"""

import base64
import html

from sealegs.report.marked_text import Span, spans
from sealegs.report.postmortem.blocks import Block, Heading, Item, Listed, Paragraph, Table, outline, title
from sealegs.report.postmortem.values import Picture, Postmortem

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
td + td, th + th { text-align: right }
figure { margin: 16px 0 } figure img { width: 100%; height: auto; border-radius: 6px; background: #fff; display: block }
figcaption { color: var(--faint); font-size: 14px; margin-top: 4px }
.empty { color: var(--warn); font-weight: 600 }
@media print { body { max-width: none } h2 { break-after: avoid } figure { break-inside: avoid } }
"""
BOXES = {False: "\N{BALLOT BOX}", True: "\N{BALLOT BOX WITH CHECK}"}
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


def page(document: Postmortem) -> str:
    """The page of a document."""
    body = "\n".join(map(_written, outline(document)))
    return PAGE.format(title=_plain(title(document)), style=STYLE, body=f"{body}\n")


def _written(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"<h{level}>{_inline(text)}</h{level}>"
        case Paragraph(text, is_empty):
            return f'<p class="empty">{_inline(text)}</p>' if is_empty else f"<p>{_inline(text)}</p>"
        case Listed(items):
            return "\n".join(["<ul>", *map(_item, items), "</ul>"])
        case Table(head, rows):
            body = "\n".join(_row(row, "td") for row in rows)
            return f"<table>\n<thead>\n{_row(head, 'th')}\n</thead>\n<tbody>\n{body}\n</tbody>\n</table>"
        case Picture(caption=text, content=content):
            source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
            return f'<figure><img src="{source}" alt="{_plain(text)}"><figcaption>{_inline(text)}</figcaption></figure>'


def _item(item: Item) -> str:
    if item.is_ticked is None:
        return f"<li>{_inline(item.text)}</li>"
    return f'<li class="task">{BOXES[item.is_ticked]} {_inline(item.text)}</li>'


def _row(cells: tuple[str, ...], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{_inline(cell)}</{tag}>' for cell in cells)}</tr>"


def _inline(sentence: str) -> str:
    """A sentence as a part of the page."""
    return "".join(f"<code>{_escaped(span)}</code>" if span.is_code else _escaped(span) for span in spans(sentence))


def _plain(sentence: str) -> str:
    """A sentence where there can be no element."""
    return "".join(map(_escaped, spans(sentence)))


def _escaped(span: Span) -> str:
    """The one place where text becomes HTML."""
    return html.escape(span.text)
