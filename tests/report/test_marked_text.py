"""Any text in: nothing but text and code comes out, as a Markdown reader sees it, and all of it."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from sealegs.report.marked_text import block_of, cell_of, code_of, markdown_of, spans

READER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
TEXTS = st.text(st.sampled_from("`\\[]()!<>*_~&#;|-+=.1ax \n\t/:@'\"{}$é\u202e\x1b")) | st.text()


def inside(tokens: list[Token], *kinds: str) -> str:
    """The text of the one line that a document of these blocks has."""
    assert tuple(token.type for token in tokens if not token.hidden) == kinds
    (line,) = [token for token in tokens if token.type == "inline"]
    children = line.children or []
    assert {child.type for child in children} <= {"text", "text_special", "code_inline"}
    return "".join(child.content for child in children)


def text_of(sentence: str) -> str:
    return "".join(span.text for span in spans(sentence))


@given(TEXTS)
@example("``` ![a](/etc/passwd) `")
@example("\\` ![a](/etc/passwd) `")
@example("!\\[a\\](/etc/passwd)")
@example("![a](/etc/passwd)")
@example("<img src=x>")
@example("&#33;[x]")
@example("[x]: /etc/passwd")
@example("-- -")
@example("`` ` `` `\\` _a_ __b__ ~c~")
@example("a ``b` ``` c`` `` ` ``")
def test_a_sentence_stays_one(sentence: str) -> None:
    text = text_of(sentence)
    if not text:
        return
    assert text.isprintable() or " " in text
    item = ("bullet_list_open", "list_item_open", "inline", "list_item_close", "bullet_list_close")
    assert inside(READER.parse(f"- {block_of(sentence)}\n"), *item) == text
    assert inside(READER.parse(f"{block_of(sentence)}\n"), "paragraph_open", "inline", "paragraph_close") == text
    assert inside(READER.parse(f"- for: {markdown_of(sentence)}\n"), *item) == f"for: {text}"


@given(TEXTS)
@example("a|b \\| `|` c\\")
def test_a_cell_stays_one(sentence: str) -> None:
    tokens = READER.parse(f"| name | value |\n|---|---:|\n| {cell_of(sentence)} | 1 |\n")
    cells = [token for token in tokens if token.type == "inline"]
    assert [token.content for token in cells[:2]] == ["name", "value"]
    name, value = cells[2:]
    assert {child.type for child in name.children or ()} <= {"text", "text_special", "code_inline"}
    assert value.content == "1"


@pytest.mark.parametrize(
    ("sentence", "written"),
    [
        ("a*b* <i> [x](y) \n `<k>`", r"a\*b\* \<i> \[x\](y) `<k>`"),
        ("one ` alone", r"one \` alone"),
        ("grad_norm of blocks_0.attn, _private, a__b", r"grad_norm of blocks_0.attn, \_private, a__b"),
        ("C:\\runs, \\*, R&D, &lt;", r"C:\runs, \\\*, R&D, \&lt;"),
        ("http://127.0.0.1:5000/#/experiments/1", "http://127.0.0.1:5000/#/experiments/1"),
        ("run `a`` b` or `c`", "run ```a`` b``` or `c`"),
    ],
)
def test_no_more_is_escaped_than_must_be(sentence: str, written: str) -> None:
    assert markdown_of(sentence) == written


@given(TEXTS.filter(str.strip))
def test_code_stays_one_span(text: str) -> None:
    only = [span for span in spans(f"see {code_of(text)} there") if span.is_code]
    assert len(only) == 1
