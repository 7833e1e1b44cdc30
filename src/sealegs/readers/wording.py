"""Names the numbers of a line by the texts between them."""

import re
from functools import lru_cache
from typing import NamedTuple

from sealegs.readers.kind_names import kind_role
from sealegs.readers.names import EPOCH, STEP, role

ROW = frozenset(("loss", "eval_loss", "grad_norm", "reward", "generator_loss"))
"""Signals of which a line must have one to be a row."""

_KEY = re.compile(
    r"([A-Za-z_][\w./@-]*(?: [A-Za-z_][\w./@-]*){0,4}(?: ?\((?:ms|s|sec)\))?)"
    r"[\"']?\s*[:=]?\s*[\"'(\[]*(?:[\w.]+\(\s*)?~?$"
)
_RANK = re.compile(r"\s*\[?(?:rank)?\s?$", re.IGNORECASE)
_UNIT = re.compile(r"(?:ms|us|s|[KMG]i?B|[KMB]|%|it/s|s/it)(?![\w/])")
_HELD_OUT = re.compile(
    r"(?<![\w./-])(?:val|valid|validation|validating|eval|evaluation|evaluating|test|testing)(?![\w./-])", re.IGNORECASE
)
_NO_VALUE = (":", "-", "f}", "e}", "g}")
"""Text that follows a number in a date, or in the source of a format string: programs print their own source, too."""
_LONGEST_TEXT = 200
_AT = re.compile(r".* at (?=[A-Za-z])", re.IGNORECASE)
"""What is told of a step, before its name: ``validation loss at iteration 2000``."""
_EDGE = re.compile(r"[|\u2502\u2503]")
_CELL_NAME = re.compile(r"[A-Za-z_][\w./@ %()-]*|")
_ABOVE = re.compile(r"[A-Za-z_][\w./@-]*")
_PARTS = ("box", "obj", "cls", "dfl", "seg", "pose", "kobj")
"""What detectors print as the name of a part of their loss."""
_PERCENT = re.compile(r"(\d+)%")
_COUNT = re.compile(r"([+-]?(?:\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|nan|inf))(?:/\d+|[KMGT]i?B?)?")
_CELL = re.compile(r"[+-]?(?:\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+|nan|inf)", re.IGNORECASE)


class LineWording(NamedTuple):
    """The meaning of lines of one wording: a name for each number that has one, by its position among the numbers."""

    names: dict[int, str]
    signals: frozenset[str]
    step: int | None = None
    """Position of the step; the next two are positions, too."""
    epoch: int | None = None
    rank: int | None = None
    bar: tuple[int, int] | None = None
    """Positions of a progress bar's current value and its end."""

    @property
    def stands_alone(self) -> bool:
        """Whether such a line is a row by itself, whatever came before."""
        is_row = self.step is not None and not self.signals.isdisjoint(ROW)
        return is_row and self.rank is None and self.bar is None


def understood(texts: list[str], numbers: list[str]) -> LineWording:
    """The meaning of a line's numbers, from the texts before, between and after them."""
    names: dict[int, str] = {}
    signals: dict[int, str] = {}
    held_out = False
    for at, text in enumerate(texts[:-1]):
        unit = _UNIT.match(text) if at else None
        name, signal, begins_held_out = _before_number(text[unit.end() :] if unit else text)
        held_out = held_out or begins_held_out
        if not name or texts[at + 1] in _NO_VALUE or texts[at + 1][:2] in _NO_VALUE:
            continue
        if signal in ROW and texts[at + 1].startswith("%|"):  # "train: 3%|###" is how far a bar has come
            continue
        name += " (ms)" if texts[at + 1].startswith("ms") else ""
        if held_out and signal == "loss" and "train" not in name.lower():
            name, signal = f"eval {name}", "eval_loss"
        if name not in names.values():
            names[at], signals[at] = name, signal
    bar = next((at for at in range(len(numbers) - 1) if _is_bar(texts, numbers, at)), None)
    steps = [at for at, signal in signals.items() if signal == STEP]
    epochs = [at for at, signal in signals.items() if signal == EPOCH]
    rank = None
    if _RANK.match(texts[0]) and numbers[0].isdecimal() and texts[1][:1] in ("]", ")", " ", "\t", ","):
        if steps and texts[1].startswith("]"):
            rank = 0
        elif not steps and texts[1].strip() == "," and len(numbers) > 2 and numbers[1].isdecimal():
            names |= {0: EPOCH, 1: STEP}  # as in [2, 250] loss: 3.28
            epochs, steps = [0], [1]
        elif not steps and 1 in signals and signals[1]:
            names[0] = STEP  # as in 250 val 3.28
            steps = [0]
    return LineWording(
        names,
        frozenset(signals.values()) - {""},
        steps[0] if steps else None,
        epochs[0] if epochs else None,
        rank,
        None if bar is None else (bar, bar + 1),
    )


def _before_number(text: str) -> tuple[str, str, bool]:
    """The name of the number after a text, its signal, and whether the following numbers are on held-out data."""
    return _named_by(text[-_LONGEST_TEXT:])


@lru_cache(maxsize=4096)  # lines differ in their numbers, and hardly in the texts between them
def _named_by(text: str) -> tuple[str, str, bool]:
    found = _KEY.search(text)
    name = found[1].strip() if found else ""
    signal = signal_of(name) if name else ""
    ends = found.start() if found and signal in ROW else len(text)
    if signal in (STEP, EPOCH) and (told := _AT.match(name)) and signal_of(name[told.end() :]) == signal:
        name = name[told.end() :]
    return name, signal, _HELD_OUT.search(text, 0, ends) is not None


def signal_of(name: str) -> str:
    """The signal of a number of this name, as far as a line by itself shows; empty if it has none."""
    what = kind_role(name)
    if what is not None and what.signal in ROW and (what.signal == "reward" or "loss" not in name.lower()):
        return what.signal
    what = role(name)
    return what.signal if what else ""


def boxed(line: str) -> dict[str, str] | None:
    """The cells of a line of a box, value by name; None if it is no such line. A title has an empty value.

    >>> boxed("|    ep_rew_mean     | 21.5     |"), boxed("| rollout/           |          |"), boxed("| a 1 | b 2 |")
    ({'ep_rew_mean': '21.5'}, {'rollout/': ''}, None)
    """
    cells = [cell.strip() for cell in _EDGE.split(line.strip())]
    if len(cells) < 4 or cells[0] or cells[-1] or len(cells) % 2:
        return None
    pairs = dict(zip(cells[1:-1:2], cells[2:-1:2], strict=True))
    is_box = all(_CELL_NAME.fullmatch(name) and (not value or _CELL.fullmatch(value)) for name, value in pairs.items())
    return pairs if is_box else None


def names_above(line: str) -> tuple[str, ...]:
    """The names in a line that stands above columns of numbers; empty if it is no such line.

    >>> names_above("      Epoch    GPU_mem   box_loss   cls_loss       Size")
    ('Epoch', 'GPU_mem', 'box_loss', 'cls_loss', 'Size')
    >>> names_above("Epoch  gpu_mem  box  obj")[2:], names_above("Epoch 3 of 5"), names_above("Step by step it is done")
    (('box_loss', 'obj_loss'), (), ())
    """
    words = line.split()
    if len(words) < 3 or signal_of(words[0]) not in (STEP, EPOCH) or not all(map(_ABOVE.fullmatch, words)):
        return ()
    names = tuple(f"{word}_loss" if word in _PARTS else word for word in words)
    return names if any("loss" in name.lower() for name in names) else ()


def below(names: tuple[str, ...], line: str) -> dict[str, str] | None:
    """The numbers of a line below such names, ``3/100  2.5G  0.05  0.02  640: 100%``; None if it is none, or of a bar
    that is under way.

    >>> below(("Epoch", "mem", "loss"), "  3/100  2.5G  0.05: 100%|###| 8/8"), below(("Epoch", "mem", "loss"), "1/9 2G")
    ({'Epoch': '3', 'mem': '2.5', 'loss': '0.05'}, None)
    """
    cells = line.partition(":")[0].split()
    percent = _PERCENT.search(line)
    if len(cells) != len(names) or (percent and percent[1] != "100"):
        return None
    numbers = [found[1] if (found := _COUNT.fullmatch(cell)) else None for cell in cells]
    return {name: number for name, number in zip(names, numbers, strict=True) if number} if all(numbers) else None


def _is_bar(texts: list[str], numbers: list[str], at: int) -> bool:
    """Whether a progress bar stands here: ``| 120/5000 [`` or ``120/5000 -``."""
    ends = texts[at].strip()[-1:]
    is_fraction = texts[at + 1] == "/" and numbers[at].isdecimal() and numbers[at + 1].isdecimal()
    return is_fraction and ends in ("", "|", "[") and texts[at + 2] != "/"
