"""What every reader is: a module with these two functions."""

from typing import Protocol

from sealegs.readers.place import Place
from sealegs.readers.table import Table


class Reader(Protocol):
    """One format. It knows its own files by their content, never by their name alone."""

    def recognises(self, place: Place) -> bool:
        """Whether this is mine; cheap, and never an error but ``SourceError``."""

    def read(self, place: Place) -> Table:
        """What it says. Raises ``SourceError`` where it says nothing that can be used."""
