"""Reads the lines that programs print: Megatron, nanoGPT, llm.c, fairseq, Keras, progress bars, and the like.

A line is split at its numbers, and the text before a number names it. No program has a pattern of its own here: the
reader makes a pattern from each kind of line it understands, and reads later lines of that kind ten times as fast.
"""

import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sealegs.errors import SourceError
from sealegs.readers import delimited, json_file, json_lines, trainer_state
from sealegs.readers.launches import LaunchLines
from sealegs.readers.lines_kept import LinesKept
from sealegs.readers.names import CARRIED, is_loss_like
from sealegs.readers.place import Place
from sealegs.readers.setting_lines import SettingLines
from sealegs.readers.table import Gathered, Table, some_rows
from sealegs.readers.wording import ROW, LineWording, below, boxed, names_above, signal_of, understood
from sealegs.record.columns import Columns

FORMATS = (
    ("megatron text", {"lm loss", "iteration"}),
    ("nanogpt text", {"iter", "mfu"}),
    ("llm.c text", {"norm", "loss", "step", "lr"}),
    ("modded-nanogpt text", {"train_loss", "step_avg (ms)"}),
    ("modded-nanogpt text", {"s", "trl"}),
    ("fairseq text", {"gnorm"}),
    ("transformers text", {"loss", "learning_rate", "epoch"}),
    ("verl text", {"actor/pg_loss", "step"}),
    ("stable-baselines3 text", {"time/total_timesteps"}),
    ("rsl_rl text", {"Learning iteration", "Mean reward"}),
)
"""Names that tell the programs apart. The first entry whose names all occur names the format, and nothing else."""

_VALUE = r"[+-]?(?>\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|nan|NaN|inf|Inf)"
_NUMBER = re.compile(
    r"(?<![\w.@])([+-]?(?:\d{1,3}(?:,\d{3})+(?![\d,])(?:\.\d+)?|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?"
    r"|(?:nan|NaN|NAN|[iI]nf(?:inity)?|INF)(?![A-Za-z_]| iterations)))"
)
_IN_BLOCK = re.compile(r"\s+([A-Za-z][\w.() -]*(?:/[\w.() -]+)+)=[^\s=]+\s*")
"""A line of the block that OLMo prints below a step: ``    optim/clipped=0.12``."""
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LONGEST_LINE, _MOST_NUMBERS = 20_000, 500
"""Longest line, and most numbers in one: a longer line is data, not a row, and a pattern for it takes seconds."""
_EDGES = ("|", "\u2502", "\u2503")
"""What a line of a box begins with."""
_MOST_KINDS, _SEEN_OFTEN, _MOST_BARS = 16, 3, 8
"""Patterns that are tried on a line, lines of a wording before it becomes a pattern, progress bars at a time."""
_FEW = 8
"""Rows from which on a log is read by what is called a loss; else by other names, if they give so many times more."""
_BLOCK = 8192
"""Lines of a kind that are read at once."""


def recognises(place: Place) -> bool:
    """Whether it is text that none of the stricter formats accepts."""
    others = (json_lines, json_file, trainer_state, delimited)
    return place.is_text and not any(other.recognises(place) for other in others)


def is_log(place: Place) -> bool:
    """Whether its beginning has rows. Most text files in a folder are something else."""
    scan = _Scan()
    for line in place.head_text.split("\n"):
        scan.see(line)
    return scan.columns().rows > 1


def read(place: Place) -> Table:
    """Read the lines that have a loss or a gradient norm, and every named number in them."""
    scan = _scanned(place, _Scan())
    if scan.gathered.rows < _FEW:  # the losses may have other names
        otherwise = _scanned(place, _Scan(is_row_name=is_loss_like))
        scan = otherwise if otherwise.gathered.rows > _FEW * scan.gathered.rows else scan
    if not scan.gathered.rows:
        raise SourceError(
            f"{place.source}: text in which no line names a loss; say how one looks: "
            r"--pattern 'step (?P<step>\d+).*loss (?P<loss>\S+)'"
        )
    columns = scan.columns()
    printed_by = next((name for name, keys in FORMATS if keys <= set(columns.values)), "text")
    return replace(scan.beside_rows(), format=printed_by, columns=columns, remarks=(*place.remarks, *scan.remarks))


def _scanned(place: Place, scan: "_Scan") -> "_Scan":
    for line in _lines(place):
        scan.see(line)
    scan.close_box()
    scan.close_block()
    return scan


def _lines(place: Place) -> Iterator[str]:
    for piece in place.lines():
        text = piece.replace("\b", "")
        yield from (_ESCAPE.sub("", text) if "\x1b" in text else text).split("\n")


@lru_cache(maxsize=512)  # long ones take longer to compile than hundreds of lines to read
def _pattern_of(wording: tuple[str, ...]) -> re.Pattern[str]:
    """Lines with these texts between their numbers, each blank in which stands for any."""
    texts = [r"\s+".join(map(re.escape, text.split(" "))) for text in wording]
    return re.compile(f"({_VALUE})".join(texts))


class _Scan:
    """Reads one line after the other; remembers the step and the epoch of earlier lines."""

    def __init__(self, is_row_name: Callable[[str], bool] = lambda name: False) -> None:
        self.gathered = Gathered()
        self._is_row_name = is_row_name
        self.remarks: list[str] = []
        self._kinds: list[tuple[re.Pattern[str], LineWording]] = []
        self._wordings: Counter[tuple[str, ...]] = Counter()
        self._epoch: dict[str, float] = {}
        self._last: float | None = None
        self._bars: dict[str, float] = {}
        self._rank: str | None = None
        self._other_ranks = 0
        self._losses = 0
        self._without_step = array("q")
        self._block: list[Sequence[str]] = []
        self._block_kind: LineWording | None = None
        self._box: dict[str, float] = {}
        self._title = ""
        self._names_above: tuple[str, ...] = ()
        self._others = LinesKept()
        self._settings = SettingLines()
        self._launches = LaunchLines()
        self._kept: NDArray[np.bool_] | None = None

    def see(self, line: str) -> None:
        """Read one line."""
        if not line or line.isspace():  # there are files of little else
            self.close_box()
            if self._settings.is_in_braces:
                self._settings.see(line, self._rows_so_far)
            return
        for place, (pattern, kind) in enumerate(self._kinds):
            if found := pattern.fullmatch(line):
                if place:  # the one that was last of use goes last when there are too many
                    self._kinds.insert(0, self._kinds.pop(place))
                if kind is self._block_kind:
                    self._block.append(found.groups())
                    if len(self._block) == _BLOCK:
                        self.close_block()
                        self._block_kind = kind
                else:
                    self.close_block()
                    if not self._take(kind, found.groups()):
                        self._others.see(line, self.gathered.rows)
                        self._launches.see(line, self.gathered.rows)
                    needs_epoch = bool(self._epoch) and kind.epoch is None
                    self._block_kind = kind if kind.stands_alone and not needs_epoch else None
                return
        if line[:1] in _EDGES and (cells := boxed(line)) is not None:
            self._open(cells)
            self._settings.see(line, self._rows_so_far)
            return
        self.close_box()
        if self._names_above and (cells := below(self._names_above, line)) is not None:
            self.close_block()
            self._settings.close(self.gathered.rows)
            self.gathered.add(cells)
            self._losses += 1
            return
        self._names_above = names_above(line) or self._names_above
        if not (_is_worth_a_look(line) and self._is_understood(line)):
            rows = self._rows_so_far
            self._launches.see(line, rows)
            if not self._settings.see(line, rows):
                self._others.see(line, rows)

    @property
    def _rows_so_far(self) -> int:
        return self.gathered.rows + len(self._block)

    def _is_understood(self, line: str) -> bool:
        """Whether a line is a row."""
        parts = _NUMBER.split(line[:_LONGEST_LINE])
        numbers = [text.replace(",", "") for text in parts[1::2]]
        if not 0 < len(numbers) <= _MOST_NUMBERS:
            return False
        kind = understood(parts[::2], numbers)
        self.close_block()
        in_block = _IN_BLOCK.fullmatch(line) if self._last is not None and kind.signals.isdisjoint(ROW) else None
        if in_block is not None and len(numbers) == 1:
            self.gathered.add({in_block[1]: float(numbers[0]), CARRIED[1]: self._last})
            return True
        is_row = self._take(kind, numbers)
        if kind.signals or kind.bar:
            self._remember_wording(parts, kind)
        return is_row

    def _open(self, cells: dict[str, str]) -> None:
        """Read a line of a box, which is one row: ``| train/ |  |`` stands before the names below it."""
        for name, value in cells.items():
            if not value:
                self._title = name if name.endswith("/") else ""
            elif name:
                self._box[self._title + name] = float(value)

    def close_box(self) -> None:
        """Take the box that ends here as a row, if it has something of one."""
        box, self._box, self._title = self._box, {}, ""
        if box and not ROW.isdisjoint(map(signal_of, box)):
            self.close_block()
            self._settings.drop()
            self.gathered.add(box)
            self._losses += any(signal_of(name) == "loss" for name in box)

    def close_block(self) -> None:
        """Read a block of consecutive lines of one kind at once."""
        kind = self._block_kind
        if self._block and kind is not None:
            by_number = list(zip(*self._block, strict=True))
            self.gathered.add_many(len(self._block), {name: by_number[at] for at, name in kind.names.items()})
            self._losses += len(self._block) if "loss" in kind.signals else 0
            assert kind.step is not None, "else it would not stand alone"
            self._last = float(by_number[kind.step][-1])
            if kind.epoch is not None:
                self._epoch = {kind.names[kind.epoch]: float(by_number[kind.epoch][-1])}
        self._block, self._block_kind = [], None

    def _remember_wording(self, parts: list[str], kind: LineWording) -> None:
        wording = tuple(re.sub(r"\s+", " ", text) for text in parts[::2])
        self._wordings[wording] += 1
        if len(self._wordings) > 1000:  # wordings that never come again would fill the memory
            self._wordings.clear()
        if self._wordings[wording] % _SEEN_OFTEN == 0:
            pattern = _pattern_of(wording)
            if any(pattern == known for known, _ in self._kinds):  # it is no pattern of its own lines
                return
            self._kinds.insert(0, (pattern, kind))
            del self._kinds[_MOST_KINDS:]

    def _take(self, kind: LineWording, numbers: Sequence[str]) -> bool:
        """Take what a line says; whether it is a row."""
        step = float(numbers[kind.step]) if kind.step is not None else None
        if kind.epoch is not None:
            self._epoch = {kind.names[kind.epoch]: float(numbers[kind.epoch])}
        if kind.bar:
            self._bars[f"{CARRIED[0]} to {numbers[kind.bar[1]]}"] = float(numbers[kind.bar[0]])
            if len(self._bars) > _MOST_BARS:
                del self._bars[next(iter(self._bars))]
        is_row = not kind.signals.isdisjoint(ROW) or any(map(self._is_row_name, kind.names.values()))
        if is_row:
            self._settings.close(self.gathered.rows)
            self._add(kind, numbers, step)
        if step is not None:
            self._last = step
        return is_row

    def _add(self, kind: LineWording, numbers: Sequence[str], step: float | None) -> None:
        if kind.rank is not None:
            rank = numbers[kind.rank]
            self._rank = self._rank or rank
            if rank != self._rank:
                self._other_ranks += 1
                return
        row = {name: float(numbers[at]) for at, name in kind.names.items()}
        if step is None and self._last is not None:
            row[CARRIED[1]] = self._last
        if self._bars:
            row.update(self._bars)
            self._bars.clear()
        if kind.epoch is None:
            row.update(self._epoch)
        if "loss" in kind.signals:
            self._losses += 1
            if step is None:
                self._without_step.append(self.gathered.rows)
        self.gathered.add(row)

    def columns(self) -> Columns:
        """The columns so far, without the few losses that have no step where nearly all have one."""
        self.close_box()
        self.close_block()
        columns = self.gathered.columns()
        if self._other_ranks:
            self.remarks.append(f"several ranks print: only the lines of rank {self._rank} are taken")
        if not 0 < len(self._without_step) <= self._losses // 10:
            return columns
        kept = np.ones(columns.rows, np.bool_)
        kept[self._without_step] = False
        self._kept = kept
        return some_rows(columns, kept)

    def beside_rows(self) -> Table:
        """What the log holds besides its rows; after ``columns``, which may leave out rows."""
        self._settings.close(self.gathered.rows)
        kept = np.ones(self.gathered.rows, np.bool_) if self._kept is None else self._kept
        so_far = np.append(0, np.cumsum(kept)).tolist()
        return Table(
            "text",
            Columns({}, {}),
            lines=tuple(replace(line, row=so_far[line.row]) for line in self._others.lines()),
            headers=tuple(header._replace(row=so_far[header.row]) for header in self._settings.headers),
            launches=tuple(replace(launch, row=so_far[launch.row]) for launch in self._launches.found),
        )


def _is_worth_a_look(line: str) -> bool:
    """Whether a line can hold anything: clumsy, but far faster than one pattern."""
    return (
        "oss" in line or "norm" in line or "tep" in line or "iter" in line or "poch" in line or "/" in line
        or "trl" in line or "tel" in line or "val" in line or "train" in line or "nll" in line or "OSS" in line
        or "eward" in line or "eturn" in line
    )  # fmt: skip
