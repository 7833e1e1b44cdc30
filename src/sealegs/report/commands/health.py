"""The JSON contract of ``sealegs health --json``, which is that of ``health.json``. Keys may come, none is removed."""

import json
from typing import Any, TypedDict

from sealegs.record.health import Advice, Health, State


class SavedState(TypedDict):
    """A checkpoint, and how it is known to be healthy."""

    step: int
    path: str
    proof: str


class Fault(TypedDict):
    """The rank whose doing it was, where it runs, and how that is known."""

    rank: int
    host: str
    device: str
    evidence: str


class Standing(TypedDict):
    """How a run stands, for a launcher. What is not known is null; ``ranks`` is the only number it may go on with."""

    schema: int
    run: str
    updated: str
    step: int | None
    verdict: State
    because: str
    advice: Advice
    newest_healthy: SavedState | None
    newest: SavedState | None
    at_fault: Fault | None
    ranks: int | None
    pardoned: float


def contract(health: Health) -> dict[str, Any]:
    """As one JSON object."""
    told: dict[str, Any] = json.loads(health.to_json())
    return told
