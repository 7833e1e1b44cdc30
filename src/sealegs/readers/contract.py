"""The contract of a reader: a module with these two functions, listed in ``read.READERS``.

No two readers may recognise the same source.
"""

from typing import Protocol

from sealegs.readers.place import Place
from sealegs.readers.table import Table


class Reader(Protocol):
    """Reads one format. It knows its own files by their content, never by their name alone."""

    def recognises(self, place: Place) -> bool:
        """Whether the place has this format. Cheap, and raises no error but ``SourceError``."""

    def read(self, place: Place) -> Table:
        """Read the log into a table. Raises ``SourceError`` where it holds nothing that can be used."""
