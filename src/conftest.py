"""Which modules the doctests are looked for in."""

from pathlib import Path


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Three modules in four have none, and to import and search them takes every worker a second."""
    if collection_path.suffix != ".py" or b">>>" in collection_path.read_bytes():
        return None
    return True
