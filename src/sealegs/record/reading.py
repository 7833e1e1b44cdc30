"""Reads files that somebody else may have written: regular files only, inside their folder, up to a bound, JSON of a
sane depth. Every refusal is a ``SourceError`` of one sentence.

Standard library only, because a run in progress reads with it, too.
"""

import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from sealegs.errors import ConfigError, SourceError

READ_UP_TO = "SEALEGS_READ_UP_TO"
"""The environment variable that raises the bound; the command line sets it with ``--read-up-to``."""
MOST_BYTES = 2 << 30
"""The most that one file may come to in memory or unpacked, unless the user raises it."""
DEEPEST_JSON = 100
"""Levels of nesting beyond which JSON is no record: everything that walks through it would run out of stack."""

_UNITS = {"": 1, "k": 10, "m": 20, "g": 30, "t": 40}
_SIZE = re.compile(r"(\d{1,12})\s*([kmgt]?)i?b?", re.IGNORECASE)
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}


def most_bytes() -> int:
    """The most bytes that one file may come to."""
    words = os.environ.get(READ_UP_TO)
    return MOST_BYTES if words is None else parse_size(words, READ_UP_TO)


def parse_size(words: str, name: str) -> int:
    """The bytes that a size in words stands for; ``name`` is the setting that it comes from.

    >>> parse_size("8GiB", "--read-up-to"), parse_size("500m", "--read-up-to")
    (8589934592, 524288000)
    """
    found = _SIZE.fullmatch(words.strip())
    if found is None:
        raise ConfigError(f"{name}={words}: a size, such as 8GiB or 500MiB")
    unit = found[2].lower()
    return int(found[1]) << _UNITS[unit] if unit else int(found[1])


def spell_size(size: int) -> str:
    """A size in words.

    >>> spell_size(2 << 30), spell_size(1500)
    ('2 GiB', '1,500 bytes')
    """
    for unit, shift in (("GiB", 30), ("MiB", 20)):
        if size >= 1 << shift:
            return f"{size / (1 << shift):,.4g} {unit}"
    return f"{size:,} bytes"


def too_large(path: object, size: str = "") -> SourceError:
    """The refusal of something that comes to more than the bound; ``size`` says how much, where it is known."""
    comes_to = f"comes to {size}, which is more than" if size else "comes to more than"
    return SourceError(
        f"{path}: {comes_to} {spell_size(most_bytes())}; if that is meant, raise the bound: --read-up-to 8GiB, "
        f"or {READ_UP_TO}=8GiB"
    )


def open_file(path: Path, inside: Path | None = None) -> BufferedReader:
    """Open a regular file; what is none is refused, and never waited for.

    A path that the user gave may be a link. A file that lies in a folder is opened with ``inside``, the folder: a link
    that leads out of it is refused. A missing file is a ``FileNotFoundError``, as ever.
    """
    place = path if inside is None else confined(path, inside)
    # an unopened FIFO is not waited for, and what was a file a moment ago is not followed elsewhere
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if inside is not None else 0)
    refuse_special(path, place.stat().st_mode)  # before it is opened: that alone can set a device going
    handle = os.open(place, flags)
    try:
        refuse_special(path, os.fstat(handle).st_mode)
        if _is_hollow(handle):
            raise SourceError(f"{path}: next to nothing in it was ever written, it is a hole; leave it out")
    except BaseException:
        os.close(handle)
        raise
    return os.fdopen(handle, "rb")


def _is_hollow(handle: int) -> bool:
    """Whether a file that is larger than the bound is mostly holes: it costs nothing to make, and hours to read."""
    size = os.fstat(handle).st_size
    if size <= most_bytes():
        return False
    written = at = 0
    try:
        for _ in range(1000):
            at = os.lseek(handle, at, os.SEEK_DATA)
            hole = os.lseek(handle, at, os.SEEK_HOLE)
            written, at = written + hole - at, hole
    except OSError:  # there is no more
        at = size
    os.lseek(handle, 0, os.SEEK_SET)
    return written < at // 2


def refuse_special(path: Path, mode: int) -> None:
    """Refuse what is not a regular file."""
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise SourceError(f"{path}: {kind}, not a file; put a file in its place, or leave it out")


def confined(path: Path, inside: Path) -> Path:
    """The real path of something in a folder; it is refused if that is not in the folder."""
    try:
        real, folder = Path(os.path.realpath(path)), Path(os.path.realpath(inside))
    except ValueError as error:  # a zero byte in the name
        raise SourceError(f"{str(path)!a}: not a name of a file ({error})") from None
    if not real.is_relative_to(folder):
        raise SourceError(f"{path}: it leads out of {inside}, to {real}; put a copy in its place")
    return real


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a regular file or a folder is there that does not lead out of ``folder``."""
    try:
        mode = confined(path, folder).stat().st_mode
    except (OSError, SourceError):
        return False
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def is_number(name: str) -> bool:
    """Whether a name is a number of a sane length, such as that of a checkpoint or an incident.

    >>> is_number("200"), is_number("\u0663"), is_number("9" * 5000)
    (True, False, False)
    """
    return name.isascii() and name.isdecimal() and len(name) <= 15


def read_bytes(path: Path, inside: Path | None = None, at_most: int | None = None) -> bytes:
    """All of a file, if it is no larger than ``at_most``, or than the bound."""
    bound = most_bytes() if at_most is None else at_most
    with open_file(path, inside) as file:
        size = os.fstat(file.fileno()).st_size  # Python sets aside as much memory as it is asked for
        content = file.read(min(size, bound) + 1)
    if len(content) <= bound:
        return content
    if at_most is None:
        raise too_large(path, spell_size(size))
    raise SourceError(f"{path}: larger than {spell_size(at_most)}, which is too large for what it is")


def parse_json(text: bytes | str, *, exact_integers: bool = False) -> Any:
    """The value of a JSON text; a ``ValueError`` says why there is none.

    Integers that 64 bits do not hold become floats, because nothing that is measured is as large; the state of a
    generator is read with ``exact_integers``.
    """
    try:
        value = json.loads(text, parse_int=None if exact_integers else _integer)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    _refuse_deep(value)
    return value


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) < 19 else _large(digits)


def _large(digits: str) -> int | float:
    value = float(digits)  # infinity, where there are hundreds of digits
    return int(digits) if abs(value) < 2**64 else value


def _refuse_deep(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST_JSON):
        level = [inner for outer in level for inner in _items(outer) if isinstance(inner, dict | list)]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {DEEPEST_JSON} levels")


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text; a ``ValueError`` says why there are none."""
    import tomllib  # only now: the command line starts without it

    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    _refuse_deep(tables)
    _refuse_large(tables)
    return tables


def _refuse_large(value: Any) -> None:
    """TOML has integers of 64 bits, and Python reads any."""
    level = [value]
    while level:
        level = [inner for outer in level for inner in _items(outer)]
        if any(isinstance(each, int) and abs(each) >= 2**63 for each in level):
            raise ValueError("it has an integer of more than 64 bits")


def shown(value: Any, most: int = 60) -> str:
    """A value of a file in a sentence, however long it is.

    >>> shown([1, 2]), shown("x" * 1000, 8)
    ('[1, 2]', "'xxxxxxx...")
    """
    try:
        text = ascii(value)
    except ValueError:  # an integer of thousands of digits
        text = "an integer of thousands of digits"
    return text if len(text) <= most else f"{text[:most]}..."


def read_json(path: Path, inside: Path | None = None, *, exact_integers: bool = False) -> Any:
    """The value in a JSON file; a missing file is a ``FileNotFoundError``."""
    with reading(path):
        return parse_json(read_bytes(path, inside), exact_integers=exact_integers)


def read_object(path: Path, inside: Path | None = None) -> dict[str, Any]:
    """The object in a JSON file; any other value is refused."""
    value = read_json(path, inside)
    if not isinstance(value, dict):
        raise SourceError(f"{path}: no JSON object; restore it from a copy")
    return value


@contextmanager
def reading(path: Path, *, cure: str = "restore it from a copy") -> Iterator[None]:
    """Turn what goes wrong with the content of a file into one sentence."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, ValueError, MemoryError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or "out of memory"
        raise SourceError(f"{path}: cannot be read ({_short(reason)}); {cure}") from error


def _short(reason: str, most: int = 200) -> str:
    return reason if len(reason) <= most else f"{reason[:most]}..."
