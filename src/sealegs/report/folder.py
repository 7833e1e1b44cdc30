"""The table of contents of a run folder."""

from pathlib import Path

from sealegs.record.schema import CONTENTS


def contents(folder: Path) -> list[str]:
    """One line for each file of a run folder: name, size, purpose."""
    lines = []
    for name, purpose in CONTENTS.items():
        path = folder / name
        if path.exists():
            shown = f"{name}/" if path.is_dir() else name
            lines.append(f"  {shown:<20} {_size(path):>9}  {purpose}")
    return [f"{folder}/", *lines]


def _size(path: Path) -> str:
    files = path.rglob("*") if path.is_dir() else [path]
    size = sum(file.stat().st_size for file in files if file.is_file())
    for factor, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} B"
