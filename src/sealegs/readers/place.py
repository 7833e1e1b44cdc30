"""A path in, what is there out: its first bytes, its text in pieces, gzip undone, every refusal one sentence."""

import codecs
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, cast

from sealegs.errors import SourceError

HEAD_BYTES = 256 << 10
_PIECE_BYTES = 1 << 20
_LONGEST_LINE = 64 << 20
"""Bytes without a line end after which a file is no log."""
_MOST_BYTES = 512 << 20
"""Of a file that has to be held whole: what is made of it takes several times as much."""
_SAMPLE = 4096
_GZIP = b"\x1f\x8b"
_UTF16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
_CONTROL = re.compile(r"[\x01-\x07\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f\ufffd]")


@dataclass(frozen=True)
class Place:
    """A file or folder to be read, and what came up on the way."""

    source: str
    """As the user gave it."""
    path: Path
    choice: str = ""
    """Which of the runs in it, where there are several: what the source says after ``#``."""
    remarks: list[str] = field(default_factory=list)

    @property
    def is_folder(self) -> bool:
        """Whether there is more than one file to it."""
        return self.path.is_dir()

    @cached_property
    def head(self) -> bytes:
        """The first bytes, unzipped; zeros before them left out, which a log that was cut while written to has."""
        if self.is_folder:
            return b""
        with self.opened() as file:
            head = file.read(HEAD_BYTES)
            while head and head.count(0) == len(head):
                head = file.read(HEAD_BYTES)
        return head.lstrip(b"\0")

    @property
    def is_text(self) -> bool:
        """Whether the head looks like text in some encoding."""
        sample = self.head_text[:_SAMPLE]
        return bool(sample.strip()) and len(_CONTROL.findall(sample)) <= len(sample) // 20

    @cached_property
    def head_text(self) -> str:
        """The head decoded, up to its last line end where the file goes on."""
        text = _plain(self.head.decode(self._encoding, errors="replace"))
        goes_on = len(self.head) >= HEAD_BYTES - 1
        return text[: text.rfind("\n") + 1] or text if goes_on else text

    @property
    def is_gzip(self) -> bool:
        """Whether the file is compressed."""
        if self.is_folder:
            return False
        with self._refusals(), self.path.open("rb") as file:
            return file.read(2) == _GZIP

    def lines(self) -> Iterator[str]:
        """The text in pieces of about a megabyte that end where a line ends: in ``\\n``, whatever it was."""
        decoder = codecs.getincrementaldecoder(self._encoding)("replace")
        kept = ""
        with self.opened() as file:
            while piece := file.read(_PIECE_BYTES):
                text = kept + _plain(decoder.decode(piece))
                end = text.rfind("\n") + 1
                if end:
                    yield text[:end]
                kept = text[end:]
                if len(kept) > _LONGEST_LINE:
                    raise SourceError(f"{self.source}: {_LONGEST_LINE >> 20} MiB without a line end; not a log")
        kept += _plain(decoder.decode(b"", final=True))
        if kept:
            yield kept

    def whole(self) -> bytes:
        """All of the file, where it is small enough to be held."""
        with self.opened() as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise SourceError(
                f"{self.source}: one JSON value of more than {_MOST_BYTES >> 20} MiB, which must be held whole; "
                "give it as JSON lines or CSV"
            )
        return content.decode(self._encoding, errors="replace").lstrip("\ufeff").encode(errors="replace")

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """The file, unzipped. What a torn archive still gives is taken, and that is said."""
        with self._refusals():
            zipped = self.is_gzip
            with self.path.open("rb") as file:
                yield cast(BinaryIO, io.BufferedReader(_Unzipped(file, self.remarks))) if zipped else file

    @property
    def _encoding(self) -> str:
        return _UTF16.get(self.head[:2], "utf-8")

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SourceError(f"{self.source}: cannot be read ({error.strerror or error})") from error


def torn(file: Path, at_byte: int) -> str:
    """What is said of a file that is cut short or damaged there."""
    return f"{file.name} is torn or damaged at byte {at_byte:,} of {file.stat().st_size:,}: read up to there"


def _plain(text: str) -> str:
    """Lines that all end in the same way, without zeros or a mark of the encoding before them."""
    return text.lstrip("\ufeff").replace("\0", "").replace("\r\n", "\n").replace("\r", "\n")


class _Unzipped(io.RawIOBase):
    """A gzip stream that ends where the archive is torn."""

    def __init__(self, file: BinaryIO, remarks: list[str]) -> None:
        self._stream = gzip.GzipFile(fileobj=file)
        self._remarks = remarks

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "bytearray | memoryview") -> int:  # type: ignore[override]
        try:
            content = self._stream.read1(len(buffer))
        except (EOFError, zlib.error, gzip.BadGzipFile):
            if "the archive is torn: read up to there" not in self._remarks:
                self._remarks.append("the archive is torn: read up to there")
            return 0
        buffer[: len(content)] = content
        return len(content)
