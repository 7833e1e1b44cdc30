"""Divides a corpus into parts: which file is read how, cut between documents."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from sealegs.errors import SourceError
from sealegs.scan import arrow_reader, id_reader, text_reader
from sealegs.scan.blocks import PART_BYTES, Format, Part, Read, Ways
from sealegs.scan.encoder import tokenizer_of

READERS: dict[Format, Callable[[Part, Ways], Read]] = {
    "paragraphs": text_reader.read_paragraphs,
    "whole": text_reader.read_whole,
    "lines": text_reader.read_lines,
    "parquet": arrow_reader.read_arrow,
    "arrow": arrow_reader.read_arrow,
    "ids": id_reader.read_ids,
}
_ENDINGS: dict[str, Format] = {
    ".txt": "paragraphs",
    ".txt.gz": "paragraphs",
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".jsonl.gz": "lines",
    ".json.gz": "lines",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".npy": "ids",
    ".bin": "ids",
}
_PASSED_OVER = frozenset({"__pycache__", "node_modules"})
_FILES_A_PART = 1000


def planned(corpus: Sequence[str], ways: Ways) -> list[Part]:
    """The parts of some files and folders; each is read in bounded memory."""
    parts: list[Part] = []
    if ways.tokenizer is not None:
        tokenizer_of(ways.tokenizer)  # refused now, not in every process
    for name in corpus:
        path = Path(name)
        if not path.exists():
            raise SourceError(f"{name}: no such file or folder")
        files = sorted(_files(path)) if path.is_dir() else [path]
        if not files:
            raise SourceError(f"{name}: no files in it")
        parts += _parts_of(files, path, ways)
    return in_order(parts)


def in_order(parts: Iterable[Part]) -> list[Part]:
    """The parts with their numbers."""
    return [replace(part, number=number) for number, part in enumerate(parts)]


def of_ids(name: str, path: Path, ways: Ways) -> list[Part]:
    """The parts of a file of token ids under a given name."""
    return [Part(0, name, name, "ids", *each, path=str(path)) for each in _ranges(path, "ids", ways)]


def of_files(name: str, files: Sequence[str]) -> list[Part]:
    """The parts of files that are a document each, numbered under one name."""
    parts: list[Part] = []
    here: list[str] = []
    size = 0
    for each in files:
        here.append(each)
        size += Path(each).stat().st_size
        if size > PART_BYTES or len(here) == _FILES_A_PART:
            parts.append(Part(0, name, name, "whole", size=size, files=tuple(here)))
            here, size = [], 0
    if here:
        parts.append(Part(0, name, name, "whole", size=size, files=tuple(here)))
    return parts


def _parts_of(files: Sequence[Path], root: Path, ways: Ways) -> Iterator[Part]:
    """The parts in the order of the files; files that are a document each are taken together."""
    alone: dict[str, list[str]] = {}
    for file in files:
        format_ = format_of(file)
        source = _source(file, root)
        if format_ == "whole":
            alone.setdefault(source, []).append(str(file))
            continue
        try:
            ranges = _ranges(file, format_, ways)
        except SourceError as error:
            if file == root:
                raise
            yield Part(0, str(file), source, format_, trouble=str(error).removeprefix(f"{file}: "))
            continue
        yield from (Part(0, str(file), source, format_, *each) for each in ranges)
    for source, names in alone.items():
        yield from (replace(part, source=source) for part in of_files("", names))


def format_of(path: Path) -> Format:
    """The format by the file's name; an unknown one is text, one document."""
    name = path.name.lower()
    return next((kind for ending, kind in _ENDINGS.items() if name.endswith(ending)), "whole")


def _ranges(path: Path, format_: Format, ways: Ways) -> list[tuple[int, int, int]]:
    try:
        if format_ in ("parquet", "arrow"):
            return arrow_reader.ranges(path, format_)
        if format_ == "ids":
            itemsize = id_reader.open_ids(path, ways.dtype)[0].itemsize
            return [(start, end, (end - start) * itemsize) for start, end in id_reader.ranges(path, ways)]
        if not path.name.endswith(".gz") and (reason := text_reader.is_text(path)):
            raise SourceError(f"{path}: {reason}")
        return [(start, end, end - start) for start, end in text_reader.ranges(path, format_)]
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror})") from error


def _source(file: Path, root: Path) -> str:
    """The named file or folder, or a folder directly in it."""
    below = file.relative_to(root).parts
    return str(root / below[0]) if len(below) > 1 else str(root)


def _files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _PASSED_OVER and not name.startswith(".")]
        is_dataset = "state.json" in names and any(name.endswith(".arrow") for name in names)
        for name in names:
            is_part = name.endswith(".arrow") or not (is_dataset or name == "dataset_dict.json")
            if is_part and not name.startswith(".") and not name.endswith(".starts.npy"):
                yield Path(place) / name
