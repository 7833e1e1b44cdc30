"""Finds the settings that programs print about themselves: argument blocks, namespaces, YAML, tables, command lines.

A header is what was printed between two stretches of rows. Some forms can be nothing but settings: Megatron's dotted
block, ``Namespace(...)``, a command line. Others look like results, too (``accuracy: 0.5``); these count before the
first row, and later if they name what an earlier header named.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from sealegs.readers.wording import ROW, signal_of

MOST_SETTINGS, MOST_HEADERS = 3000, 64
"""The most settings of a header, and headers of a log; more is no header."""
_LONGEST_VALUE, _LONGEST_BLOCK, _DEEPEST, _LONGEST_LINE = 200, 300_000, 8, 20_000
_FEWEST = 3
"""Settings in a block, for it to be one."""
_FEWEST_IN_BRACES, _FEWEST_IN_LINE = 6, 5
_BEGUN = 3
"""Rows from which on the log is under way: a sentence of a header may name a loss, too."""
_SAME = 0.5
"""Share of the names of a block that an earlier header must have for it to be a header, too."""

_PREFIX = re.compile(
    r"(?:\(\w+ pid=\d+[^)\n]{0,60}\) ?"  # Ray
    r"|\[[^\[\]\n]{1,90}\]:? ?"  # [rank0]: [2024-05-01 10:00:00] [INFO]
    r"|\d{1,5}: "  # srun --label
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?Z? ?"
    r"|[IWEF]\d{4,8} \d\d:\d\d:\d\d(?:\.\d+)? +\d+ [^\]\n]{0,90}\] ?"
    r"|(?:INFO|WARNING|DEBUG)\b ?:? ?"
    r"|(?:Overriding|[Oo]verride): "
    r"|[-|] "
    r"|[\w.]{1,60} \| "
    r"|[\w./]{1,60}/[\w./]{1,60}: "
    r")*+"
)
_DOTTED = re.compile(r" *([A-Za-z_][\w./-]{0,80}) ?\.{3,} ?(.*)")
_COLON = re.compile(r"( *)(?:- )?['\"]?([A-Za-z_][\w./-]{0,80})['\"]?:(?: +(.*))?")
_EQUALS = re.compile(r"( *)([A-Za-z_][\w./-]{0,80})\s*=\s*(.*)")
_CELLS = re.compile(
    r" *[|\u2502\u2503] *([A-Za-z_][^|\u2502\u2503]{0,60}?) *[|\u2502\u2503]([^|\u2502\u2503]+)[|\u2502\u2503] *"
)
_OPENS = re.compile(
    r"[\w ./'-]{0,60}[:=]? ?"
    r"((?:\w{0,40}(?:Namespace|Config|Arguments|Args|Params|Hyperparameters|HParams|Options)\(|\{))"
)
_PAIR = re.compile(r"([A-Za-z_][\w./-]{0,80})=([^,]*)(?:, ?|$)")
_OPTION = re.compile(r"(?<!\S)--?([A-Za-z][\w.-]*)(?:=(\S*)|\s+(?!--?[A-Za-z])(\S+))?")
_OVERRIDE = re.compile(r"(?<!\S)\+{0,2}([A-Za-z_][\w.-]*(?:[./][\w.-]+)+)=(\S*)")
_PROGRAM = re.compile(r"\b(?:python\d?|torchrun|deepspeed|srun|mpirun)\b|\w\.py\b|accelerate launch")
_CALL = re.compile(r"[A-Za-z_][\w.]*\(.*\)", re.DOTALL)
_SECRET = re.compile(
    r"(?:api|access|private)[_-]?key|secret|passw|(?:hub|auth|access|hf)[_-]?token|credential", re.IGNORECASE
)
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:_\d{3})+(?:\.\d*)?")
_PRODUCT = re.compile(r"\d{1,9}(?: ?\* ?\d{1,9}){1,4}")
_TYPE = re.compile(
    r"(?:int|float|bool|str|bytes|dict|list|tuple|set|Any|Optional\[.*|.*\b(?:Tensor|Module|Array|ndarray))"
)
_OPERATOR = re.compile(r" (?:[-+*/%<>]|//|\*\*|[<>]=|or|and|if|not|in|is) ")
"""Python's names for types, and an expression: programs print their own source, whose signatures look like settings."""
_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None, "null": None, "": None}


class Header(NamedTuple):
    """Settings that a program printed, and where."""

    row: int
    """The number of rows before it."""
    settings: Mapping[str, Any]


class SettingLines:
    """Looks at the lines that are no rows, one after the other."""

    def __init__(self) -> None:
        self.headers: list[Header] = []
        self._names: set[str] = set()
        self._form = ""
        self._lines: list[tuple[int, str, str | None]] = []
        self._open: list[str] = []
        self._size = self._depth = 0

    @property
    def is_in_braces(self) -> bool:
        """Whether a block is open that goes on over every line, whatever it is."""
        return bool(self._open)

    def see(self, line: str, row: int) -> bool:
        """Look at a line, ``row`` rows having come before it; whether it may be a setting."""
        if len(line) > _LONGEST_LINE:
            self.close(row)
            return False
        if self._open:
            self._go_on(line, row)
            return True
        bare = line.lstrip()
        if not bare or bare[0] == "#" or (bare[:2] == "- " and self._form == "colon" and ":" not in bare):
            return False
        if not (
            "=" in line or ":" in line or "..." in line or "{" in line or "--" in line or bare[0] in "|\u2502\u2503"
        ):
            self.close(row)
            return False
        cells = _CELLS.fullmatch(line)
        rest = line if cells else line[_PREFIX.match(line).end() :]  # type: ignore[union-attr]  # it matches nothing, too
        form, found = _form_of(rest, cells)
        if form != self._form or not form:
            self.close(row)
        if found is not None:
            self._form = form
            if len(self._lines) < MOST_SETTINGS:
                self._lines.append(found)
            return True
        if opened := _OPENS.match(rest):
            self._open = []
            self._size = self._depth = 0
            self._go_on(rest[opened.start(1) :], row)
        elif "--" in rest and _PROGRAM.search(rest):
            return self._take(_options(rest), row, fewest=2, is_sure=True)
        elif rest.count("=") >= _FEWEST_IN_LINE:
            return self._take(_pairs(rest), row, fewest=_FEWEST_IN_LINE, is_sure=True)
        return bool(self._open)

    def close(self, row: int) -> None:
        """End the block that was being read: a row comes, or the log ends."""
        lines, form = self._lines, self._form
        if lines:
            self._lines, self._form = [], ""
            self._take(_nested(lines), row, fewest=_FEWEST, is_sure=form == "dotted")
        if self._open:
            text, self._open = "".join(self._open), []
            is_call = not text.startswith("{")
            self._take(_parsed(text, 0), row, fewest=_FEWEST if is_call else _FEWEST_IN_BRACES, is_sure=is_call)

    def drop(self) -> None:
        """Forget the block that was being read: it was a row."""
        self._lines, self._form, self._open = [], "", []

    def _go_on(self, line: str, row: int) -> None:
        text = line[_PREFIX.match(line).end() :] if self._open else line  # type: ignore[union-attr]
        self._open.append(text)
        self._size += len(text)
        self._depth += sum(map(text.count, "([{")) - sum(map(text.count, ")]}"))
        if self._depth <= 0 or self._size > _LONGEST_BLOCK:
            self.close(row)

    def _take(self, settings: Any, row: int, *, fewest: int, is_sure: bool) -> bool:
        if not isinstance(settings, dict) or len(self.headers) >= MOST_HEADERS:
            return False
        leaves = dict(_leaves(settings))
        if not fewest <= len(leaves) <= MOST_SETTINGS or any(map(_is_code, leaves, leaves.values())):
            return False
        if not is_sure:
            if any(signal_of(name) in ROW and type(value) in (int, float) for name, value in leaves.items()):
                return False
            if row >= _BEGUN and len(self._names & leaves.keys()) < _SAME * len(leaves):
                return False
        self._names |= leaves.keys()
        if self.headers and self.headers[-1].row == row:
            settings = merged(self.headers.pop().settings, settings)
        self.headers.append(Header(row, settings))
        return True


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with others over them, group by group.

    >>> merged({"lr": 1, "model": {"width": 8, "depth": 2}}, {"model": {"width": 16}})
    {'lr': 1, 'model': {'width': 16, 'depth': 2}}
    """
    both = dict(one)
    for name, value in other.items():
        before = both.get(name)
        both[name] = merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return both


def literal(text: str) -> Any:
    """The value that a text stands for: a number, a switch, nothing, or the text without its quotes.

    >>> literal("3e-4"), literal("True"), literal("None"), literal("'adam'"), literal("1_000"), literal("6,000")
    (0.0003, True, None, 'adam', 1000, '6,000')
    """
    text = text.strip().rstrip(",").strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1][:_LONGEST_VALUE]
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _PRODUCT.fullmatch(text):
        return math.prod(map(int, text.split("*")))
    if text[:1] in "+-.0123456789" and len(text) < 40 and ("_" not in text or _THOUSANDS.fullmatch(text)):
        for kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
    return text[:_LONGEST_VALUE]


def _form_of(rest: str, cells: re.Match[str] | None) -> tuple[str, tuple[int, str, str | None] | None]:
    """The form of a line of a block; and its indentation, name and value as text (None where deeper lines follow)."""
    if cells:
        return "cells", (0, re.sub(r"\W+", "_", cells[1].partition(" (")[0]).strip("_").lower(), cells[2].strip())
    if found := _DOTTED.fullmatch(rest):
        return (
            ("dotted", (0, found[1], found[2])) if "[OKAY]" not in found[2] and "[NO]" not in found[2] else ("", None)
        )
    if (found := _COLON.fullmatch(rest)) and _is_value(found[3]):
        return "colon", (len(found[1]), found[2], found[3] or None)
    if (
        (found := _EQUALS.fullmatch(rest))
        and not found[1]
        and _is_value(found[3])
        and found[3][:1] not in ("", "=", "[")
    ):
        return "equals", (0, found[2], _without_comment(found[3]))
    return "", None


def _is_value(text: str | None) -> bool:
    """Whether a text can be a value: no sentence, no code."""
    if not text:
        return True
    bare = _without_comment(text)
    if bare[:1] in "'\"[":
        return len(bare) > 1 and (bare[-1] in "'\"]" or bare[:1] == "[")
    if _PRODUCT.fullmatch(bare):
        return True
    return (
        len(bare.split()) <= 3
        and not _OPERATOR.search(bare)
        and not any(sign in bare for sign in ("(", "{", " = ", "=="))
    )


def _is_code(name: str, value: Any) -> bool:
    """Whether a setting is a line of a program: a type for a value, or a name for itself."""
    return isinstance(value, str) and (value == name != "none" or _TYPE.fullmatch(value) is not None)


def _without_comment(text: str) -> str:
    return text.partition(" #")[0].strip()


def _nested(lines: list[tuple[int, str, str | None]]) -> dict[str, Any]:
    """The settings of a block: what is indented deeper belongs to the name above it."""
    root: dict[str, Any] = {}
    path: list[tuple[int, dict[str, Any]]] = [(-1, root)]
    for place, (indent, name, value) in enumerate(lines):
        while len(path) > 1 and indent <= path[-1][0]:
            path.pop()
        within = path[-1][1]
        deeper = lines[place + 1][0] > indent if place + 1 < len(lines) else False
        if value is None and deeper and len(path) <= _DEEPEST:
            inner: dict[str, Any] = {}
            within[name] = inner
            path.append((indent, inner))
        elif not _SECRET.search(name):
            within[name] = _parsed(value, 1) if value is not None and value[:1] == "[" else literal(value or "")
    return root


def _parsed(text: str, depth: int) -> Any:
    """A value as Python or JSON writes it: objects and calls as settings by name, lists as lists, the rest as text."""
    text = text.strip()
    is_call = _CALL.fullmatch(text) is not None
    if depth >= _DEEPEST or not (is_call or text[:1] in "{[("):
        return literal(text)
    if text[:1] in "[(":
        inner = [_parsed(part, depth + 1) for part in _split(text[1:].rstrip().rstrip("])"), ",") if part.strip()]
        return inner if len(inner) <= 64 else text[:_LONGEST_VALUE]
    begin = text.index("(") + 1 if is_call else 1
    end = len(text) - (text[-1] in ")}")
    settings: dict[str, Any] = {}
    for part in _split(text[begin:end], ","):
        name, *rest = _split(part, "=" if is_call else ":", 1)
        name = str(literal(name))
        if rest and name and len(name) <= 100 and not _SECRET.search(name):
            settings[name] = _parsed(rest[0], depth + 1)
    return settings if settings else literal(text)


def _split(text: str, sign: str, most: int = MOST_SETTINGS) -> list[str]:
    """The parts of a text between signs that are outside of brackets and quotes."""
    parts: list[str] = []
    begin, depth, quote = 0, 0, ""
    for found in re.finditer(rf"[\[\](){{}}'\"{sign}]", text):
        at, one = found.start(), found[0]
        if quote:
            quote = "" if one == quote and text[at - 1 : at] != "\\" else quote
        elif one in "'\"":
            before = text[at - 1 : at]
            quote = "" if before.isalnum() else one  # an apostrophe
        elif one in "([{":
            depth += 1
        elif one in ")]}":
            depth -= 1
        elif depth == 0 and len(parts) < most:
            parts.append(text[begin:at])
            begin = at + 1
    return [*parts, text[begin:]]


def _options(line: str) -> dict[str, Any]:
    """The options of a command line."""
    found = {each[1].replace("-", "_"): each[2] if each[2] is not None else each[3] for each in _OPTION.finditer(line)}
    found |= {each[1]: each[2] for each in _OVERRIDE.finditer(line)}
    return {
        name: True if value is None else literal(value)
        for name, value in found.items()
        if not _SECRET.search(name) and len(name) > 1
    }


def _pairs(line: str) -> dict[str, Any] | None:
    """The settings of a line ``task=train, mode=fast, lr0=0.01``; None if most of the line is something else."""
    pairs = list(_PAIR.finditer(line))
    covered = sum(len(pair[0]) for pair in pairs)
    if covered < 0.8 * len(line):
        return None
    return {pair[1]: literal(pair[2]) for pair in pairs if not _SECRET.search(pair[1])}


def _leaves(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        else:
            yield name, value
