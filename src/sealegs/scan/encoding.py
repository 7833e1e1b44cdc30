"""Finds signs of wrong decoding in UTF-8: mojibake, replacement and control characters."""

import re

import numpy as np

from sealegs.batching.stratified import Ints

REPLACEMENT = "\ufffd".encode()

# UTF-8 that was read as Latin-1 or Windows-1252 and saved as UTF-8 again has each of its bytes as a character.
# Windows-1252 has characters of its own where Latin-1 has controls (0x80 to 0x9f).
_WINDOWS = "".join(bytes([byte]).decode("cp1252", "ignore") for byte in range(0x80, 0xA0))
_CONTINUED = rb"(?:\xc2[\x80-\xbf]|" + b"|".join(re.escape(each.encode()) for each in _WINDOWS) + rb")"
# Never in sound text: three characters that were a quotation mark or a dash, four that were an emoji.
_SURE = rb"\xc3\xa2(?:\xe2\x82\xac|\xe2\x80\x9a|\xe2\x80\x9e|\xc2[\x80\x82\x84])" + _CONTINUED
_SURE += rb"|\xc3\xb0(?:\xc5\xb8|\xc2\x9f)" + _CONTINUED + rb"{2}"
# Two that were an accented Latin letter or a sign. A single one may be a quoted word that ends in a capital.
_LATIN = rb"\xc3[\x82\x83]" + _CONTINUED
# Any other sequence. Capitals before a quotation mark look the same, so most of them must be such sequences.
_OTHER = rb"\xc3[\x84-\x9f]" + _CONTINUED + rb"|\xc3[\xa0-\xaf]" + _CONTINUED + rb"{2}"
_MOJIBAKE = re.compile(b"(" + _SURE + b")|(" + _LATIN + b")|(" + _OTHER + b")")
_CONTROLS = re.compile(rb"[\x00-\x08\x0e-\x1f\x7f]|\xc2[\x80-\x84\x86-\x9f]")  # U+0085 is a line break

_LEAST_LATIN = 2
_LEAST_OTHER = 5
_MOST = 0.8


def mojibake(document: bytes) -> tuple[int, int] | None:
    r"""How many characters of a document are bytes of others, and where the first one is; None if it has none.

    >>> mojibake("It\u2019s na\u00efve".encode().decode("cp1252").encode())
    (2, 2)
    >>> mojibake("«CAFÉ»".encode())
    """
    sure = latin = other = covered = 0
    first = -1
    for match in _MOJIBAKE.finditer(document):
        first = match.start() if first < 0 else first
        sure += match[1] is not None
        latin += match[2] is not None
        other += match[3] is not None
        covered += len(match[0].decode())
    is_it = sure > 0 or latin >= _LEAST_LATIN
    if not is_it and other >= _LEAST_OTHER:
        beyond_ascii = np.count_nonzero(np.frombuffer(document, np.uint8) >= 0xC0)
        is_it = covered >= _MOST * int(beyond_ascii)
    return (sure + latin + other, first) if is_it else None


def suspects(data: bytes) -> Ints:
    """Where mojibake, a replacement character or a Latin-1 control character may be: a quick look at the bytes."""
    raw = np.frombuffer(data + bytes(2), np.uint8)
    leads = np.flatnonzero(raw >= 0xC2)
    first, second, third = raw[leads], raw[leads + 1], raw[leads + 2]
    are = (first == 0xC3) & (second >= 0x82) & (second <= 0xB4) & (third >= 0xC2) & (third <= 0xE2)
    are |= (first == 0xC2) & (second <= 0x9F)
    are |= (first == REPLACEMENT[0]) & (second == REPLACEMENT[1]) & (third == REPLACEMENT[2])
    found: Ints = leads[are]
    return found


def controls(document: bytes) -> tuple[int, int] | None:
    """How many control characters a document has, and where the first one is; None if it has none.

    >>> controls(b"a\\tb\\x00\\x1b")
    (2, 3)
    """
    places = [match.start() for match in _CONTROLS.finditer(document)]
    return (len(places), places[0]) if places else None


def not_utf8(document: bytes) -> int | None:
    """The position of the first byte that is not UTF-8; None if all are."""
    try:
        document.decode()
    except UnicodeDecodeError as error:
        return error.start
    return None
