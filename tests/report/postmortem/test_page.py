"""The page of a document: what is in it is what the document says, and no more."""

import base64
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tests.report.postmortem.test_markdown import FULL

from sealegs.report.marked_text import spans
from sealegs.report.postmortem.page import page
from sealegs.report.postmortem.values import LayerActivations, Picture

PNG = b"\x89PNG\r\n\x1a\n, or so"


class Read(HTMLParser):
    """The elements and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@given(st.text(st.sampled_from("<>&\"'/=!-`\\ aimgscriptonerror\n\x1b")) | st.text())
def test_a_field_adds_no_element_and_is_there_as_it_is(text: str) -> None:
    base = replace(FULL.evidence, layers=(LayerActivations(name="h", before=1.0, at=1.0, step=1),))
    layers = (LayerActivations(name=text, before=1.0, at=1.0, step=1),)
    plain = Read(page(replace(FULL, evidence=base, run_id="x", root_cause="x", lesson="x")))
    read = Read(
        page(replace(FULL, evidence=replace(base, layers=layers), run_id=text, root_cause=f"{text}.", lesson="x"))
    )
    assert [tag for tag in read.tags if tag[0] != "code"] == [tag for tag in plain.tags if tag[0] != "code"]
    assert "".join(span.text for span in spans(f"{text}.")) in read.text


def test_pictures_are_those_that_were_drawn_and_no_file_is_opened(tmp_path: Path) -> None:
    private = tmp_path / "private.png"
    private.write_text("the words of ana")
    pictures = (Picture(file=str(private), caption='Panel 1: "loss" <b>', content=PNG),)
    named = f"![a]({private})"
    document = replace(
        FULL, evidence=replace(FULL.evidence, pictures=pictures, tracker=named), run_id=named, root_cause=named
    )
    read = Read(page(document))
    (picture,) = [attributes for tag, attributes in read.tags if tag == "img"]
    assert picture == {
        "src": f"data:image/png;base64,{base64.b64encode(PNG).decode()}",
        "alt": 'Panel 1: "loss" <b>',
    }
    assert read.text.count(named) == 4, "the title twice, the tracker and the cause"


def test_boxes_are_ticked_and_what_is_empty_stands_out() -> None:
    text = page(replace(FULL, lesson="", why_empty={"Lesson": "none"}))
    assert '<p class="empty">EMPTY: none</p>' in text
    assert text.count('<li class="task">\N{BALLOT BOX} ') == 3
    assert "<code>&#x27;tten&#x27;</code> (3 in the batch" in text
    forged = page(replace(FULL, root_cause="EMPTY: nothing", outcome=("[x] loss below 1",)))
    assert 'class="empty"' not in forged
    assert forged.count('<li class="task">') == 3
