"""A case in, a Run out: signals described as lines between points, with noise, as ``tests/cases/README.md`` says."""

import json
import math
import re
import tomllib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sealegs.record.columns import Columns
from sealegs.record.log_lines import LogLine
from sealegs.record.manifest import Manifest
from sealegs.record.run import Run, run_of

CASES = sorted((Path(__file__).parents[1] / "cases").glob("[!R]*.md"))
SPELT = {"NaN": math.nan, "inf": math.inf}


@dataclass(frozen=True)
class Case:
    name: str
    prose: str
    stream: Mapping[str, Any]
    expect: Mapping[str, Any]


def read_case(path: Path) -> Case:
    text = path.read_text()
    (block,) = re.findall(r"^```toml\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    values = tomllib.loads(block)
    expect = values.pop("expect")
    return Case(path.stem, text[: text.index("```toml")], values, expect)


def run_from(case: Case, folder: Path) -> Run:
    """The run that a case describes."""
    stream = case.stream
    random = np.random.default_rng(zlib.crc32(case.name.encode()))
    every = stream.get("every", 1)
    steps = np.arange(stream.get("first", 0), stream["steps"], every)
    segments = np.zeros(len(steps), dtype=int)
    for back_to, at in stream.get("resumes", []):
        kept = steps < at if back_to < at else steps < back_to
        after = np.arange(back_to, stream["steps"], every)
        segments = np.concatenate([segments[kept], np.full(len(after), segments.max() + 1)])
        steps = np.concatenate([steps[kept], after])
    values: dict[str, Any] = {"step": steps.astype(float)}
    logged: dict[str, Any] = {"step": np.ones(len(steps), dtype=bool)}
    unique, place = np.unique(steps, return_inverse=True)
    for name, told in flat(stream["signals"]).items():
        shocks = random.standard_t(8, len(unique))[place]  # of the batch: a step that comes again has its own again
        column, mask = signal(told, steps, shocks)
        if "after_resume" in told:
            again, mask_again = signal(told["after_resume"], steps, shocks)
            column, mask = np.where(segments > 0, again, column), np.where(segments > 0, mask_again, mask)
        values[name], logged[name] = column, mask
    events = folder / "events.jsonl"
    with events.open("w") as file:
        for event in told_events(stream):
            file.write(json.dumps({"time": 0.0, **event}) + "\n")
    manifest = Manifest(
        run_id=case.name,
        dtype=stream.get("dtype"),
        settings=stream.get("settings", {}),
        versions=stream.get("versions", {}),
    )
    lines = tuple(LogLine(int(step) if step >= 0 else None, text, 1) for step, text in stream.get("lines", []))
    return run_of(folder, manifest, Columns(values, logged, len(steps)), events=events, lines=lines)


def told_events(stream: Mapping[str, Any]) -> list[dict[str, Any]]:
    every = stream.get("checkpoints", 0)
    steps = range(every, stream["steps"], every) if every else ()
    saved = [{"kind": "checkpoint", "step": step, "checkpoint": step} for step in steps]
    return sorted([*saved, *stream.get("events", [])], key=lambda event: event["step"])


def flat(signals: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {name if "/" in name else name.replace(".", "/"): told for name, told in signals.items()}


def signal(told: Mapping[str, Any], steps: Any, shocks: Any) -> tuple[Any, Any]:
    mask = (steps % told.get("every", 1) == 0) | np.isin(steps, told.get("also", []))
    if "batches" in told:
        return batches(told, steps), mask
    if "texts" in told:
        texts = sorted((int(step), text) for step, text in told["texts"].items())
        places = np.searchsorted([step for step, _ in texts], steps, side="right") - 1
        return np.array([texts[place][1].encode() if place >= 0 else b"" for place in places]), mask & (places >= 0)
    at, level = np.array(told["line"], dtype=float).T
    column = np.interp(steps, at, level)
    column = column * np.exp(shocks * told.get("noise", 0.0))
    for first, last, value in told.get("set", []):
        column = np.where((steps >= first) & (steps <= last), SPELT.get(value, value), column).astype(float)
    if "averaged" in told:
        for row in range(1, len(column)):
            column[row] = column[row - 1] + (column[row] - column[row - 1]) / told["averaged"]
    return column, mask


def batches(told: Mapping[str, Any], steps: Any) -> Any:
    """Digests: each step has its own, but for those that see the batch of another step, or go on from another."""
    seen = steps.copy()
    for first, last, other in told.get("same_as", []):
        seen = np.where((steps >= first) & (steps <= last), other, seen)
    for first, other in told.get("again_from", []):
        seen = np.where(steps >= first, steps - first + other, seen)
    return np.array([f"{zlib.crc32(str(step).encode()):08x}".encode() for step in seen.tolist()])
