"""Opens a SQLite file read-only; anything wrong with the file becomes a ``SourceError``."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial

from sealegs.errors import SourceError
from sealegs.readers.place import Place
from sealegs.record.reading import most_bytes

_MARK = b"SQLite format 3\0"
_PAUSE = 10_000
"""Instructions of SQLite's own machine between two looks at how many there were."""
_LEAST, _A_BYTE = 20_000_000, 200
"""Instructions that reading may take: some for any file, and more for each of its bytes. A view in the place of a table
can ask for endless ones."""


@contextmanager
def opened(place: Place) -> Iterator[sqlite3.Connection]:
    """Open the file. Damaged text in it is replaced, not an error."""
    try:
        with closing(sqlite3.connect(f"{place.path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            connection.text_factory = partial(str, encoding="utf-8", errors="replace")
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, min(most_bytes(), 2**31 - 1))
            pauses = iter(range((_LEAST + _A_BYTE * place.path.stat().st_size) // _PAUSE))
            connection.set_progress_handler(lambda: next(pauses, None) is None, _PAUSE)
            yield connection
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter if SQLite's own message is damaged
        raise SourceError(f"{place.source}: cannot be read as SQLite ({str(error)[:80]!r})") from error


def tables(place: Place) -> set[str]:
    """The names of its tables; empty if it is not a sound SQLite file."""
    if place.head.startswith(_MARK):
        with suppress(SourceError), opened(place) as store:
            return {name for (name,) in store.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    return set()
