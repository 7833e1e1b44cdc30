"""Reads our own run folder, whose names are ours already."""

import json

from sealegs.errors import SourceError
from sealegs.readers.place import Place
from sealegs.readers.table import Table
from sealegs.record import manifest as manifests
from sealegs.record.columns import read_columns
from sealegs.record.schema import EVENTS, MANIFEST, METRICS

FORMAT = "run folder"


def recognises(place: Place) -> bool:
    """Whether it is a folder with a manifest that names a schema."""
    if not place.is_folder:
        return False
    try:
        manifest = json.loads((place.path / MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and "schema" in manifest and "run_id" in manifest


def read(place: Place) -> Table:
    """Read the rows, the manifest and the events."""
    manifest = manifests.load(place.path)
    try:
        columns = read_columns(place.path / METRICS)
    except FileNotFoundError:
        raise SourceError(f"{place.source}: the run has no {METRICS} yet; wait for its first step") from None
    remarks = (f"{columns.damaged_lines} lines are no rows: left out",) if columns.damaged_lines else ()
    return Table(FORMAT, columns, remarks, manifest=manifest, events=place.path / EVENTS)
