"""The manifest of a run, ``manifest.json``: what was run, read and written."""

import json
import os
import platform
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from sealegs.errors import SourceError
from sealegs.record.files import whole_file
from sealegs.record.reading import read_json
from sealegs.record.schema import MANIFEST, SCHEMA, speakable
from sealegs.record.typed import fits, typed


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything that is known about a run before its first step."""

    schema: int = SCHEMA
    run_id: str
    created: str = ""
    """Time in UTC, ISO 8601."""
    seed: int | None = None
    dtype: str | None = None
    """The precision regime: ``fp32``, ``bf16`` (autocast, fp32 master weights) or ``fp16`` (with loss scaling)."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The run's settings, nested by group: model, data, optimizer, ..."""
    recorded: Mapping[str, Any] = field(default_factory=dict)
    """What the guard or the watch has read from the live objects: optimizer, schedule, precision, model, data, ranks,
    environment. What the user has written is in ``settings``, and goes before it."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """What the data turned out to be: documents, tokens, fingerprints, unigram entropy."""
    price_per_hour: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    git: Mapping[str, Any] | None = None
    """The commit, and whether the tree had changes; null outside a repository."""
    host: Mapping[str, Any] = field(default_factory=dict)
    tracker: Mapping[str, Any] | None = None
    """Name, run id and URI of the tracker that also has this run; of several, the first."""
    trackers: Sequence[Mapping[str, Any]] = ()
    """The same for every tracker that has this run or a part of it."""


def describe(run: str, **known: Any) -> Manifest:
    """A manifest for a new run called ``run``, with machine, versions and git state filled in."""
    return Manifest(
        run_id=new_id(run),
        created=now(),
        versions=dict(_versions()),
        git=_git_state(),
        host={
            "name": platform.node(),
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            **known.pop("host", {}),
        },
        **known,
    )


def now() -> str:
    """The time for ``Manifest.created``."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def new_id(run: str) -> str:
    """An id that tells a run called ``run`` from every other of that name."""
    return f"{run}-{uuid.uuid4().hex[:8]}"


def save(manifest: Manifest, folder: Path) -> None:
    """Write the manifest into a run folder, whole or not at all."""
    with whole_file(folder / MANIFEST) as file:
        file.write(to_json(manifest))


def to_json(manifest: Manifest) -> bytes:
    """The manifest as the text of its file."""
    return json.dumps(speakable(asdict(manifest)), indent=2, allow_nan=False).encode() + b"\n"


def load(folder: Path) -> Manifest:
    """The manifest of a run folder, or an error that says in a sentence why it cannot be read."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise SourceError(f"{folder}: no such run folder; give the folder that holds {MANIFEST}")
    try:
        values = read_json(path, folder)
    except FileNotFoundError:
        raise SourceError(f"{folder}: not a run folder, there is no {MANIFEST} in it") from None
    schema = values.get("schema") if isinstance(values, dict) else None
    if not isinstance(schema, int) or not fits(schema, int) or not isinstance(values.get("run_id"), str):
        raise SourceError(f"{path}: not a manifest, it names no schema and run_id")
    if schema > SCHEMA:
        raise SourceError(f"{path}: schema {schema}, this Sealegs reads up to {SCHEMA}: pip install -U sealegs")
    for name in ("settings", "recorded", "data", "host", "versions"):
        if not isinstance(values.get(name, {}), dict):
            raise SourceError(f"{path}: {name} is not a table; restore the manifest from a copy")
    if not isinstance(values.get("trackers", []), list):
        raise SourceError(f"{path}: trackers is not a list; restore the manifest from a copy")
    values["versions"] = {name: word for name, word in values.get("versions", {}).items() if isinstance(word, str)}
    values["trackers"] = [tracker for tracker in values.get("trackers", []) if isinstance(tracker, dict)]
    seed = values.pop("seed", None)  # may take all of 64 bits
    is_seed = isinstance(seed, int) and not isinstance(seed, bool)
    return replace(typed(Manifest, values, wrong_is_missing=True), seed=seed if is_seed else None)


def dotted(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings one by one, by their dotted names.

    >>> dict(dotted({"seed": 1, "model": {"width": 96}}))
    {'seed': 1, 'model.width': 96}
    """
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from dotted(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


@cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("sealegs", "torch", "numpy", "tokenizers", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _git_state() -> dict[str, Any] | None:
    def git(*words: str) -> str:
        return subprocess.run(  # noqa: S603 - fixed words
            ["git", *words],  # noqa: S607 - the user's own git, as in their shell
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
