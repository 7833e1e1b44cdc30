"""Ways to damage bytes, JSON, TOML and records: what a kill, a bad disk, another program or a stranger leaves."""

import gzip
import json
import random
import re
import struct
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

Chance = random.Random
Damage = Callable[[Chance, bytes], bytes]

BOMB_BYTES = 700 << 20
"""What a bomb unpacks to; more than a case may hold in memory."""
SECRET = "SENTINEL-7f3a-OF-A-FILE-OUTSIDE"  # noqa: S105 - a mark to look for, not a password
"""The content of a file beside the sandbox: nothing may show it."""

HARD = [
    *b"nan NaN -inf Infinity 1e999 -1e308 1e-320 9007199254740993 18446744073709551616 -1 0.5 1_000 0x10 12%".split(),
    *b"1,234.5 00012 --5 +3 1e 1.2.3 . - , ; | \" ' { } [ ] {} [] null true None : = / # \\ \\u0000 \\ud800".split(),
    *(b"\t", b"\r", b"\r\n", b"\n\n", b" ", b"\0", b"\0" * 4, b"\x1b[31m", b"\x1b", b"\b", b"\xff", b"\xfe\xff"),
    *(b"\xef\xbb\xbf", b"\x1f\x8b", "\u0663\u066b\u0661".encode(), "\uff11\uff12".encode(), "\u00b2".encode()),
    *("\u2028".encode(), "\x85".encode(), "\u202e".encode(), "\u22125".encode(), "\U0001f642".encode()),
    *b"loss step epoch val_loss grad_norm lr global_step iter train/loss [0] 5/10 tensor( step:1/2 __MIN".split(),
    *(b"9" * 400, b"9" * 5000, b"-" + b"9" * 30, b"[" * 3000, b'{"a":' * 3000, b"x" * 100_000, b"1," * 3000),
    *(b"\n" * 3000, b"../../../outside/secret", b"/etc/passwd"),
]
"""Pieces of text that are hard to read."""

WRONG: list[Any] = [
    *(None, True, False, 0, -1, 1, 7, 2**31, 2**53 + 1, 2**63, -(2**64), 10**30, 10**400, -(10**4000)),
    *(1e308, -1e308, 1e-320, 0.5, -0.0, float("nan"), float("inf"), "NaN", "Infinity", "-Infinity", "1e5", "12"),
    *("", "x", "../../outside/secret", "/etc/passwd", "\x1b[2J\x1b]0;x\a", "<img src=x onerror=alert(1)>", "a" * 9000),
    *("![x](/etc/passwd)", "\ud800", "\0", "\n", "`|*_#", "model/w", "#tuple", "loss", "nan-gradient"),
    *([], [[]], {}, {"a": 1}, [0] * 1000, ["x", 1], [1, 2], [None], {"": None}, {"#tuple": 5}, {"#tensor": [1]}),
    *({"#array": ["float64", [10**6, 10**6], ""]}, {"#mapping": [[{}, 1]]}, {"#aside": "nowhere"}, {"#bytes": "!"}),
]
"""Values that are of another type or size than anything expects."""


def deep(levels: int) -> Any:
    """A value that is nested so deep."""
    value: Any = 0
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


# Bytes


def cut(chance: Chance, data: bytes) -> bytes:
    """Its beginning."""
    return data[: chance.randrange(len(data) + 1)]


def leave_out(chance: Chance, data: bytes) -> bytes:
    """Without some of the middle."""
    at = chance.randrange(len(data) + 1)
    return data[:at] + data[at + chance.choice((1, 4, 40, 1000)) :]


def double(chance: Chance, data: bytes) -> bytes:
    """With some of the middle several times."""
    at = chance.randrange(len(data) + 1)
    return data[:at] + data[at : at + chance.choice((1, 40, 1000))] * chance.choice((2, 3, 50)) + data[at:]


def flip(chance: Chance, data: bytes) -> bytes:
    """With a few bits flipped."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 10)) if data else 0):
        changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def put_hard(chance: Chance, data: bytes) -> bytes:
    """With a piece that is hard to read."""
    at = chance.randrange(len(data) + 1)
    return data[:at] + chance.choice(HARD) + data[at:]


def put_any(chance: Chance, data: bytes) -> bytes:
    """With some random bytes."""
    at = chance.randrange(len(data) + 1)
    return data[:at] + chance.randbytes(chance.choice((1, 2, 8, 200))) + data[at:]


def large_number(chance: Chance, data: bytes) -> bytes:
    """With a length or a count in it that is far too large."""
    at = chance.randrange(len(data) + 1)
    size = chance.choice((2, 4, 8))
    number = chance.choice(((1 << 8 * size) - 1, 1 << (8 * size - 1), 1 << 31, 1 << 40)) % (1 << 8 * size)
    return data[:at] + number.to_bytes(size, chance.choice(("little", "big"))) + data[at + size :]


def other_numbers(chance: Chance, data: bytes) -> bytes:
    """With one number, some of them, or all of them, by another."""
    put, share = chance.choice(HARD), chance.choice((0.01, 0.1, 1))
    return re.sub(rb"\d+(?:\.\d+)?", lambda found: put if chance.random() < share else found[0], data)


def other_word(chance: Chance, data: bytes) -> bytes:
    """With one word by another, everywhere."""
    words = re.findall(rb"[\w/]{2,40}", data[: 1 << 16])
    return data.replace(chance.choice(words), chance.choice(HARD)) if words else data


def shuffle_lines(chance: Chance, data: bytes) -> bytes:
    """With some of its lines in another order."""
    lines = data.splitlines(keepends=True)
    first, last = sorted((chance.randrange(len(lines) + 1), chance.randrange(len(lines) + 1)))
    return b"".join(lines[:first] + chance.sample(lines[first:last], last - first) + lines[last:])


def other_ends(chance: Chance, data: bytes) -> bytes:
    """With other line ends."""
    return data.replace(b"\n", chance.choice((b"\r\n", b"\r", b"\n\n", b"\n\r", b"\0\n", b"\x85", b"")))


def other_encoding(chance: Chance, data: bytes) -> bytes:
    """In another encoding."""
    return data.decode(errors="replace").encode(chance.choice(("utf-16", "utf-16-be", "utf-8-sig", "utf-32", "utf-7")))


def zipped(chance: Chance, data: bytes) -> bytes:
    """As an archive."""
    return gzip.compress(data, 1)


def gzip_bomb(chance: Chance, data: bytes) -> bytes:
    """An archive that begins as it should and never ends."""
    return gzip.compress(data, 1) + _bomb(31)


@cache
def _bomb(bits: int) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, bits)
    line = b" " * 99 + b"\n"
    block = line * ((1 << 20) // len(line))
    return b"".join([*(packer.compress(block) for _ in range(BOMB_BYTES // len(block))), packer.flush()])


def zlib_bomb() -> bytes:
    """What unpacks to far more than it is."""
    return _bomb(15)


BYTES: tuple[Damage, ...] = (
    cut, leave_out, double, flip, flip, put_hard, put_hard, put_any, large_number, other_numbers, other_numbers,
    other_word, shuffle_lines, other_ends, other_encoding,
)  # fmt: skip


# JSON


def json_value(chance: Chance, data: bytes) -> bytes:
    """A JSON text, or lines of them, with something in the tree other than it was."""
    lines = data.splitlines()
    if len(lines) > 1 and _parsed(lines[0]) is not None:
        return _json_lines(chance, lines)
    value = _parsed(data)
    if value is None:
        return put_hard(chance, data)
    return _written(_changed(chance, value, _path_in(chance, value), _change(chance, value)))


def _json_lines(chance: Chance, lines: list[bytes]) -> bytes:
    """The same change in one line, in some or in all."""
    at = chance.randrange(len(lines))
    value = _parsed(lines[at])
    if value is None:
        return b"\n".join(lines)
    path, change = _path_in(chance, value), _change(chance, value)
    share = chance.choice((0, 0, 0.1, 1))
    changed = []
    for place, line in enumerate(lines):
        known = _parsed(line) if place == at or chance.random() < share else None
        changed.append(line if known is None else _written(_changed(chance, known, path, change)))
    return b"\n".join(changed) + b"\n"


def _parsed(text: bytes) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict | list) else None


def _written(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except (ValueError, RecursionError):
        return b"[" * 500


Change = Callable[[Any], Any]


def _change(chance: Chance, document: Any) -> Change | None:
    """What becomes of the value that was chosen; None: it is left out."""
    kind = chance.randrange(12)
    if kind == 0:
        return None
    if kind == 1:
        nested = deep(chance.choice((50, 90, 150, 400)))
        return lambda value: nested
    if kind == 2:
        return lambda value: [value]
    if kind == 3:
        return lambda value: {"value": value}
    if kind == 4:
        factor = chance.choice((-1, 0, 1000, 1e30, 10**200))
        return lambda value: value * factor if isinstance(value, int | float) and value < 1e9 else value
    if kind == 5:
        other = _at(document, _path_in(chance, document))
        return lambda value: other
    if kind == 6:
        return lambda value: value * 3 if isinstance(value, str | list) else value
    if kind == 7:
        return lambda value: str(value)[:1000]
    put = chance.choice(WRONG)
    return lambda value: put


Path = tuple[str | int, ...]


def _path_in(chance: Chance, value: Any) -> Path:
    """A place in the tree; the deeper, the more often it is chosen."""
    path: list[str | int] = []
    while isinstance(value, dict | list) and value and (not path or chance.random() < 0.8):
        key = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
        path.append(key)
        value = value[key]
    return tuple(path)


def _at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def _changed(chance: Chance, value: Any, path: Path, change: Change | None) -> Any:
    """The tree with that change at that place, where it has the place."""
    if not path:
        return [] if change is None else change(value)
    key, *rest = path
    has_key = (isinstance(value, dict) and key in value) or (
        isinstance(value, list) and isinstance(key, int) and key < len(value)
    )
    if not has_key:
        return value
    copy = dict(value) if isinstance(value, dict) else list(value)
    if rest:
        copy[key] = _changed(chance, copy[key], tuple(rest), change)  # type: ignore[index]
    elif change is None:
        del copy[key]  # type: ignore[arg-type]
    else:
        copy[key] = change(copy[key])  # type: ignore[index]
    return copy


# TOML

_TOML_VALUES = (
    *("nan", "-inf", "1e400", "9" * 400, "9" * 5000, "0x" + "f" * 4000, "true", '""', '"x"', "[]", "{}", "[[[1]]]"),
    *("[" * 400 + "]" * 400, "[" * 5000, "{a=" * 300 + "1" + "}" * 300, "1979-05-27", '"""\n"""', "-1", "0", "1e-320"),
    *("'../../outside/secret'", '"\\u0000"', '"\\ud800"', "[1, 'a']", "{a = 1}", "0.5", "2.0", "1.5", "0b11", "'a'"),
)


def toml_value(chance: Chance, data: bytes) -> bytes:
    """A TOML text with other values, keys or tables."""
    lines = data.decode(errors="replace").split("\n")
    keyed = [place for place, line in enumerate(lines) if "=" in line]
    if not keyed:
        return put_hard(chance, data)
    at = chance.choice(keyed)
    name, _, value = lines[at].partition("=")
    match chance.randrange(6):
        case 0:
            lines[at] = f"{chance.choice(('x', 'plan', '', 'run', 'a.b.c', 'a' * 3000))} ={value}"
        case 1:
            del lines[at]
        case 2:
            lines.insert(at, lines[chance.choice(keyed)])
        case 3:
            lines.insert(
                at, chance.choice(("[plan]", "[[plan]]", "[a.b]", "[run]", "[" + "a." * 2000 + "b]", "[plan.x]"))
            )
        case _:
            lines[at] = f"{name}= {chance.choice(_TOML_VALUES)}"
    return "\n".join(lines).encode(errors="replace")


# Records in frames


def within_a_record(chance: Chance, data: bytes) -> bytes:
    """Of an event file or a W&B run, digests made right again: else their readers stop there."""
    is_wandb = data.startswith(b":W&B")
    if not is_wandb and b"brain.Event:" not in data[:64]:
        return data
    records, at = [], 7 if is_wandb else 0
    while at < len(data):
        length = int.from_bytes(data[at + 4 : at + 6] if is_wandb else data[at : at + 8], "little")
        at += 7 if is_wandb else 12
        records.append(data[at : at + length])
        at += length + (0 if is_wandb else 4)
    changed = chance.randrange(len(records))
    records[changed] = chance.choice((flip, leave_out, double, put_any, large_number))(chance, records[changed])
    if is_wandb:
        sealed = (
            struct.pack("<IHB", zlib.crc32(one, zlib.crc32(b"\1")), len(one) & 0xFFFF, 1) + one for one in records
        )
        return data[:7] + b"".join(sealed)
    lengths = [len(one) for one in records]
    if chance.random() < 0.1:
        lengths[changed] = chance.choice((2**31, 2**40, 2**63 - 1, 2**64 - 1))
    framed = (struct.pack("<Q", length) for length in lengths)
    return b"".join(
        head + struct.pack("<I", _masked_crc(head)) + one + struct.pack("<I", _masked_crc(one))
        for head, one in zip(framed, records, strict=True)
    )


@cache
def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


def _masked_crc(data: bytes) -> int:
    """CRC-32C as TensorBoard writes it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _crc_table()[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
