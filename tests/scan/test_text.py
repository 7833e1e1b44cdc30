"""What is wrong with documents of text."""

import pytest

from sealegs.scan.blocks import joined
from sealegs.scan.counts import Counts
from sealegs.scan.text import look_at_text


def look(*documents: str | bytes, longest: int = 1000) -> Counts:
    raw = [each if isinstance(each, bytes) else each.encode() for each in documents]
    return look_at_text(joined(raw, range(len(raw)), "a"), 0, longest=longest)


def kinds(counts: Counts) -> list[tuple[int, str]]:
    return [(each.document, each.kind) for each in counts.findings]


@pytest.mark.parametrize(
    ("document", "kind", "text"),
    [
        ("go " * 32, "repeats", "1 word, 32 times on end"),
        ("one, two; " * 50, "repeats", "4 words, 50 times on end"),
        ("a " + "x" * 256 + " " + "y" * 255, "repeats", "1 character, 256 times on end"),
        ("a " + "x" * 1000, "unbroken", "1,000 characters without a space"),
        ("<>" * 100, "symbols", "0% letters and digits"),
        ("word " * 31 + "word2 " * 970, "over-long", "1,001 words"),
        ("a\x00b", "control", "control character: 1 in 3 bytes"),
        ("lost \ufffd\ufffd", "replaced", "replacement character: 2 in 11 bytes"),
        ("Itâ€™s", "mojibake", "UTF-8 read as Latin-1: 1 in 11 bytes"),
        (b"one\ncaf\xe9", "not utf-8", "byte 0xe9 in its line 2"),
        (" \n\t", "empty", "no text"),
        ("", "empty", "no text"),
    ],
)
def test_each_kind_is_found_alone_and_with_its_numbers(document: str | bytes, kind: str, text: str) -> None:
    counts = look("Before it.", document, "After it.")
    found = [each for each in counts.findings if each.kind == kind]
    assert [(each.document, each.text) for each in found] == [(1, text)]
    assert {number for number, _ in kinds(counts)} == {1}


@pytest.mark.parametrize(
    "document",
    [
        "go " * 31,
        "x" * 255,
        "xy" * 499 + "x",
        "<>" * 99,
        "<>" * 100 + "a" * 67,
        "word1 word2 " * 15,
        "tab\tand\fpage\r\n",
        "日本" * 900,
    ],
)
def test_just_below_the_limit_is_nothing(document: str) -> None:
    assert kinds(look("Before it.", document, "After it.")) == []


def test_documents_without_anything_between_them_stay_apart() -> None:
    """Neither words, nor repeats, nor runs without a space go from one to the next."""
    counts = look("go " * 20 + "go", "go " * 20, "xy" * 300, "xy" * 300)
    assert kinds(counts) == []
    assert counts.sources["a"].tokens == 21 + 20 + 2


def test_words_that_only_look_alike_are_no_repeat() -> None:
    """More than 16 bytes, of which the middle differs."""
    words = " ".join(f"identifier{number:04d}ofsomething" for number in range(40))
    assert kinds(look(words)) == []
    assert kinds(look("identifier0000ofsomething " * 40)) == [(0, "repeats")]


def test_a_little_damage_puts_off_and_much_drops() -> None:
    text = " ".join(f"word{number}" for number in range(500))
    damaged = look("\ufffd " + text, "\ufffd\ufffd\ufffd\ufffd\ufffd " + text)
    assert [(each.kind, each.action) for each in damaged.findings] == [("replaced", "defer"), ("replaced", "drop")]


def test_characters_are_counted_and_rare_ones_have_their_places() -> None:
    counts = look("aaaaaaaaaaaa é", "b é", "日")
    assert counts.tokens[[ord("a"), ord("b"), ord("é"), ord("日")]].tolist() == [12, 1, 2, 1]
    assert counts.tokens.sum() == len("aaaaaaaaaaaa éb é日")
    places = sorted(zip(counts.places.tokens.tolist(), counts.places.documents.tolist(), strict=True))
    assert places == sorted([(32, 0), (32, 1), (ord("b"), 1), (ord("é"), 0), (ord("é"), 1), (ord("日"), 2)])


def test_excerpts_are_of_the_document_alone() -> None:
    (found,) = look("The one before it.", "Text \x07 with a bell.", "The one after.").findings
    assert found.excerpt == "Text \\x07 with a bell."


def test_the_same_text_has_the_same_digest_whatever_blanks_are_around_it() -> None:
    counts = look("same", " same\n", "other", "")
    assert counts.digests[0] == counts.digests[1] != counts.digests[2]
    assert counts.documents.tolist() == [0, 1, 2]
