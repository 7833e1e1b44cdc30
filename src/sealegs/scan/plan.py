"""Divides a corpus into parts: which file is read how, cut between documents."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from sealegs.errors import SourceError
from sealegs.scan import arrow_reader, id_reader, text_reader
from sealegs.scan.blocks import PART_BYTES, Format, Part, Read, Ways
from sealegs.scan.encoder import tokenizer_of
from sealegs.scan.files import folders_below, is_address, is_folder, settled, size_of

T = TypeVar("T")

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
_FILES_A_PART = 1000
_AT_ONCE = 32
"""Files at an address that are looked at side by side: each look takes a round trip or two."""


def planned(corpus: Sequence[str], ways: Ways) -> list[Part]:
    """The parts of some files and folders; each is read in bounded memory."""
    parts: list[Part] = []
    if ways.tokenizer is not None:
        tokenizer_of(ways.tokenizer)  # refused now, not in every process
    for name in corpus:
        root = _plain(name)
        has_files = is_folder(root)
        if has_files is None:
            raise SourceError(f"{name}: no such file or folder")
        files = sorted(_files(root), key=lambda each: each.split("/")) if has_files else [root]
        if not files:
            raise SourceError(f"{name}: no files in it")
        parts += _parts_of(files, root, ways)
    return in_order(parts)


def _plain(name: str) -> str:
    """An address as it is, without a slash at its end; a path as ``Path`` writes it."""
    name = settled(name)
    return name.rstrip("/") if is_address(name) else str(Path(name))


def in_order(parts: Iterable[Part]) -> list[Part]:
    """The parts with their numbers."""
    return [replace(part, number=number) for number, part in enumerate(parts)]


def of_ids(name: str, path: Path, ways: Ways) -> list[Part]:
    """The parts of a file of token ids under a given name."""
    return [Part(0, name, name, "ids", *each, path=str(path)) for each in _ranges(str(path), "ids", ways)]


def of_files(name: str, files: Sequence[str]) -> list[Part]:
    """The parts of files that are a document each, numbered under one name."""
    parts: list[Part] = []
    here: list[str] = []
    size = 0
    for each, bytes_of_it in zip(files, _side_by_side(size_of, files), strict=True):
        here.append(each)
        size += bytes_of_it
        if size > PART_BYTES or len(here) == _FILES_A_PART:
            parts.append(Part(0, name, name, "whole", size=size, files=tuple(here)))
            here, size = [], 0
    if here:
        parts.append(Part(0, name, name, "whole", size=size, files=tuple(here)))
    return parts


def _parts_of(files: Sequence[str], root: str, ways: Ways) -> Iterator[Part]:
    """The parts in the order of the files; files that are a document each are taken together."""
    alone: dict[str, list[str]] = {}
    for file in files:
        if format_of(file) == "whole":
            alone.setdefault(_source(file, root), []).append(file)
    others = [file for file in files if format_of(file) != "whole"]
    for file, found in zip(others, _side_by_side(partial(_cut, ways=ways), others), strict=True):
        source, format_ = _source(file, root), format_of(file)
        if not isinstance(found, SourceError):
            yield from (Part(0, file, source, format_, *each) for each in found)
        elif file == root:
            raise found
        else:
            yield Part(0, file, source, format_, trouble=str(found).removeprefix(f"{file}: "))
    for source, names in alone.items():
        yield from (replace(part, source=source) for part in of_files("", names))


def format_of(name: str) -> Format:
    """The format by the file's name; an unknown one is text, one document."""
    name = name.lower()
    return next((kind for ending, kind in _ENDINGS.items() if name.endswith(ending)), "whole")


def _side_by_side(look: Callable[[str], T], files: Sequence[str]) -> Iterator[T]:
    """What a function makes of each file, in their order."""
    if not any(map(is_address, files)):
        yield from map(look, files)
        return
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        yield from threads.map(look, files)


def _cut(name: str, ways: Ways) -> list[tuple[int, int, int]] | SourceError:
    """Where a file is cut, and the bytes of each piece; or why it cannot be."""
    try:
        return _ranges(name, format_of(name), ways)
    except SourceError as error:
        return error
    except OSError as error:
        return SourceError(f"{name}: cannot be read ({error.strerror or error})")


def _ranges(name: str, format_: Format, ways: Ways) -> list[tuple[int, int, int]]:
    if format_ in ("parquet", "arrow"):
        return arrow_reader.ranges(name, format_)
    if format_ == "ids":
        if is_address(name):
            raise SourceError(f"{name}: token ids are mapped into memory; copy or mount them where there is a path")
        path = Path(name)
        itemsize = id_reader.open_ids(path, ways.dtype)[0].itemsize
        return [(start, end, (end - start) * itemsize) for start, end in id_reader.ranges(path, ways)]
    if not name.endswith(".gz") and (reason := text_reader.is_text(name)):
        raise SourceError(f"{name}: {reason}")
    return [(start, end, end - start) for start, end in text_reader.ranges(name, format_)]


def _source(file: str, root: str) -> str:
    """The named file or folder, or a folder directly in it."""
    below = file.removeprefix("" if root == "." else root).lstrip("/").split("/")
    return (below[0] if root == "." else f"{root.rstrip('/')}/{below[0]}") if len(below) > 1 else root


def _files(folder: str) -> Iterator[str]:
    for place, names in folders_below(folder):
        is_dataset = "state.json" in names and any(name.endswith(".arrow") for name in names)
        for name in names:
            is_part = name.endswith(".arrow") or not (is_dataset or name == "dataset_dict.json")
            if is_part and not name.startswith(".") and not name.endswith(".starts.npy"):
                yield f"{place}/{name}" if is_address(place) else str(Path(place) / name)
