"""The file or folder to read: its first bytes, its text in pieces, unzipped; every refusal is one sentence."""

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
from sealegs.record.reading import READ_UP_TO, most_bytes, open_file, spell_size, too_large

HEAD_BYTES = 256 << 10
_PIECE_BYTES = 1 << 20
_LONGEST_LINE = 64 << 20
"""Bytes without a line end after which a file is not a log."""
_PARSED = 4
"""How many times its size a JSON text takes once it is parsed, at the least."""
_SAMPLE = 4096
_GZIP = b"\x1f\x8b"
_UTF16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
_CONTROL = re.compile(r"[\x01-\x07\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f\ufffd]")


@dataclass(frozen=True)
class Place:
    """A file or folder to read, and the notices about it."""

    source: str
    """The source as the user gave it."""
    path: Path
    choice: str = ""
    """Which of several runs to read: the part of the source after ``#``."""
    inside: Path | None = None
    """The folder that it was found in, which it must not lead out of; None if the user named it."""
    remarks: list[str] = field(default_factory=list)

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return self.path.is_dir()

    @cached_property
    def head(self) -> bytes:
        """The first bytes, unzipped, without the leading zeros of a log that was truncated during writing."""
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
        with self._refusals(), open_file(self.path, self.inside) as file:
            return file.read(2) == _GZIP

    def lines(self) -> Iterator[str]:
        """The text in pieces of about a megabyte that end at a line end, with every line end as ``\\n``."""
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
        """All of the file, if it is small enough to hold in memory."""
        most = most_bytes() // _PARSED
        content = bytearray()
        with self.opened() as file:
            while piece := file.read(_PIECE_BYTES):  # Python sets aside as much memory as it is asked for
                content += piece
                if len(content) > most:
                    raise SourceError(
                        f"{self.source}: one JSON value of more than {spell_size(most)}, which must be held whole; "
                        f"give it as JSON lines or CSV, or raise the bound: --read-up-to 8GiB, or {READ_UP_TO}=8GiB"
                    )
        return content.decode(self._encoding, errors="replace").lstrip("\ufeff").encode(errors="replace")

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """Open the file, unzipped. A torn archive gives what it still has, and a notice."""
        with self._refusals():
            zipped = self.is_gzip
            with open_file(self.path, self.inside) as file:
                yield cast(BinaryIO, io.BufferedReader(_Unzipped(file, self))) if zipped else file

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
    """The notice for a file that is cut short or damaged at a byte."""
    return f"{file.name} is torn or damaged at byte {at_byte:,} of {file.stat().st_size:,}: read up to there"


def _plain(text: str) -> str:
    """The text with uniform line ends, without zero bytes or a byte order mark."""
    return text.lstrip("\ufeff").replace("\0", "").replace("\r\n", "\n").replace("\r", "\n")


class _Unzipped(io.RawIOBase):
    """A gzip stream that ends where the archive is torn, and is refused where it comes to more than the bound."""

    def __init__(self, file: BinaryIO, place: Place) -> None:
        self._stream = gzip.GzipFile(fileobj=file)
        self._source, self._remarks = place.source, place.remarks
        self._left = most_bytes()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "bytearray | memoryview") -> int:  # type: ignore[override]
        try:
            content = self._stream.read1(len(buffer))
        except (EOFError, zlib.error, gzip.BadGzipFile):
            if "the archive is torn: read up to there" not in self._remarks:
                self._remarks.append("the archive is torn: read up to there")
            return 0
        self._left -= len(content)
        if self._left < 0:
            raise too_large(self._source)
        buffer[: len(content)] = content
        return len(content)
