"""A SQLite file in, a connection that can only read out; whatever is wrong with the file is a ``SourceError``."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial

from sealegs.errors import SourceError
from sealegs.readers.place import Place

_MARK = b"SQLite format 3\0"


@contextmanager
def opened(place: Place) -> Iterator[sqlite3.Connection]:
    """The file. A text in it that is damaged costs no more than itself."""
    try:
        with closing(sqlite3.connect(f"{place.path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            connection.text_factory = partial(str, encoding="utf-8", errors="replace")
            yield connection
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter where its own message is damaged
        raise SourceError(f"{place.source}: cannot be read as SQLite ({str(error)[:80]!r})") from error


def tables(place: Place) -> set[str]:
    """The names of its tables; none where it is no SQLite file, or not a sound one."""
    if place.head.startswith(_MARK):
        with suppress(SourceError), opened(place) as store:
            return {name for (name,) in store.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    return set()
