"""What shows that text was decoded wrongly."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sealegs.scan.encoding import controls, mojibake, not_utf8, suspects

SOUND = [
    "«CAFÉ» “BEYONCÉ\u2019S” «NÃO» À…”, 30 °C, £5, ½ naïve Ærø señor",
    "«ÉTÉ» «CAFÉ» «THÉ» «PRÉ» «BLÉ» «CLÉ»",
    "Überprüfung für Größen; ÄÖÜ»…",
    "Ç\u2019est «ÉTÉ»… “ÎLE” ÀÉÈ",
    "Здравствуй, мир! Ελληνικά. עברית العربية हिन्दी ไทย",
    "日本語、中文、한국어。「引用」…",
    "Emoji 🚢🌊 and maths ½ ≤ x² ≤ ¾, µm, Å, ±3",
]


@pytest.mark.parametrize("text", SOUND)
def test_sound_text_of_many_scripts_is_sound(text: str) -> None:
    assert mojibake(text.encode()) is None
    assert controls(text.encode()) is None
    assert not_utf8(text.encode()) is None


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252"])
@pytest.mark.parametrize(
    "text",
    [
        "It\u2019s the owner\u2019s.",
        "A dash \u2014 and “quotes”",
        "naïve café",
        "Größe, schön, Übung",
        "Русский текст",
        "日本語の文章",
        "a ship 🚢",
        "5 £ and 3 €",
    ],
)
def test_what_was_read_as_latin_is_found(text: str, encoding: str) -> None:
    wrong = b"Plain words, then " + text.encode().decode(encoding, "ignore").encode()
    found = mojibake(wrong)
    assert found is not None
    assert 18 <= found[1] < len(wrong)
    assert len(suspects(wrong)) > 0, "else nobody would look"


@given(st.text(st.characters(min_codepoint=0xC0, max_codepoint=0xFF), min_size=2, max_size=20))
def test_all_accented_letters_are_found(text: str) -> None:
    assert mojibake(text.encode().decode("latin-1").encode()) is not None


@given(st.text(st.characters(max_codepoint=0x7F)))
def test_ascii_is_never_mojibake(text: str) -> None:
    assert mojibake(text.encode()) is None
    assert len(suspects(text.encode())) == 0


@given(st.text(max_size=40))
def test_whatever_has_something_wrong_is_a_suspect(text: str) -> None:
    """The quick look misses nothing that the slow one finds, but for control characters of ASCII."""
    data = text.encode(errors="ignore")
    assume(not any(ord(character) < 32 or ord(character) == 127 for character in text))
    if mojibake(data) or controls(data) or "\ufffd" in text:
        assert len(suspects(data)) > 0


def test_control_characters_are_counted_from_the_first() -> None:
    assert controls(b"a\tb\r\nc\fd\x0b") is None
    assert controls(b"ab\x00\x1f\x7f") == (3, 2)
    assert controls("ab\u0093quoted\u0094".encode()) == (2, 2)
    assert controls("next line\u0085".encode()) is None


def test_bytes_that_are_no_utf8_are_found() -> None:
    assert not_utf8("café".encode("latin-1")) == 3
    assert not_utf8(b"abc\xc3") == 3
