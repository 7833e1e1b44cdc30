"""Reads our own run folder, whose names are ours already."""

from sealegs.errors import SourceError
from sealegs.readers.place import Place
from sealegs.readers.table import Table
from sealegs.record import manifest as manifests
from sealegs.record.columns import read_columns
from sealegs.record.reading import read_json, reading
from sealegs.record.schema import EVENTS, MANIFEST, METRICS

FORMAT = "run folder"


def recognises(place: Place) -> bool:
    """Whether it is a folder with a manifest that names a schema."""
    if not place.is_folder:
        return False
    try:
        manifest = read_json(place.path / MANIFEST, place.path)
    except (OSError, SourceError):
        return False
    return isinstance(manifest, dict) and "schema" in manifest and "run_id" in manifest


def read(place: Place) -> Table:
    """Read the rows, the manifest and the events."""
    manifest = manifests.load(place.path)
    try:
        with reading(place.path / METRICS):
            columns = read_columns(place.path / METRICS)
    except FileNotFoundError:
        raise SourceError(f"{place.source}: the run has no {METRICS} yet; wait for its first step") from None
    remarks = [f"{columns.damaged_lines} lines are no rows: left out"] if columns.damaged_lines else []
    if columns.left_out:
        remarks.append(f"{columns.left_out} values are neither numbers nor text, or more than may be held: left out")
    return Table(FORMAT, columns, tuple(remarks), manifest=manifest, events=place.path / EVENTS)
