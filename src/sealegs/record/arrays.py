"""Opens a ``.npy`` file as a memory map: no archive, no pickle, and every fault of its head is one kind of error."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from sealegs.record.reading import open_file


def open_array(path: Path) -> NDArray[Any]:
    """The array in a file. A ``ValueError`` says why there is none; a missing file is an ``OSError``, as ever."""
    with open_file(path):  # refuses what is no file: a FIFO would be waited for
        pass
    try:
        return open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:  # numpy reads the head as Python, and raises what Python raises
        raise ValueError(f"{type(error).__name__}: {error}") from error


def open_numbers(path: Path, kind: "np.dtype[Any]") -> NDArray[Any]:
    """A file that is nothing but numbers of one type, a whole number of them."""
    with open_file(path) as file:
        size = file.seek(0, 2)
    return np.memmap(path, kind, "r") if size else np.empty(0, kind)
