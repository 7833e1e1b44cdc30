"""Says what is wrong with the JSON of a checkpoint, before anybody reads it field by field.

It does not know what a schedule or a loader keeps; it knows the frame around that.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from sealegs.record.typed import fits

DESCRIBED = re.compile(
    r"(?P<dtype>[a-z]\w{2,30}) \[(?P<shape>(?:\d{1,18}(?:, \d{1,18}){0,30})?)\] [0-9a-f]{16}", re.ASCII
)
"""How a frozen weight is described: type, shape and digest."""


def fault_in_plain(plain: Mapping[str, Any], own: Mapping[str, Any]) -> str | None:
    """The first fault of the JSON that all ranks share, or of that of one rank; None if both are sound.

    A checkpoint without ``optimizers`` is of an older version, which is said elsewhere.
    """
    return next(_faults(plain, own), None) if "optimizers" in plain else None


def _faults(plain: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    kinds = {"ranks": int, "extra": Mapping, "optimizers": list, "schedulers": list, "scaler": Mapping}
    for name, kind in kinds.items():
        if not fits(plain.get(name), kind):
            yield f"{name} is no {'number' if kind is int else 'list' if kind is list else 'object'}"
            return
    for name, values in (("data", plain), ("also", plain), ("data", own), ("rng", own)):
        if not fits(values.get(name), Mapping | None):
            yield f"{name} is no object"
    frozen = plain.get("frozen", {})
    if not isinstance(frozen, dict) or not all(
        isinstance(each, str) and DESCRIBED.fullmatch(each) for each in frozen.values()
    ):
        yield "what it says of frozen weights is none"
    for name, values in (("data", plain), *((name, own) for name in ("data", "rng") if own)):
        if name not in values:
            yield f"it has no {name}"
    if not all(map(_is_number, plain["scaler"].values())):
        yield "the loss scale is no number"
    for scheduler in plain["schedulers"]:
        if not isinstance(scheduler, dict) or not isinstance(scheduler.get("kind"), str) or "state" not in scheduler:
            yield "a schedule is none"
    yield from (fault for optimizer in plain["optimizers"] for fault in _faults_of_optimizer(optimizer))


def _faults_of_optimizer(optimizer: Any) -> Iterator[str]:
    if not isinstance(optimizer, dict) or not isinstance(optimizer.get("kind"), str):
        yield "an optimizer is none"
        return
    state, groups = optimizer.get("state"), optimizer.get("groups")
    if not isinstance(state, dict) or not all(isinstance(of_one, dict) for of_one in state.values()):
        yield "the state of an optimizer is none"
    for group in groups if isinstance(groups, list) else [None]:
        known = group if isinstance(group, dict) else {}
        names = known.get("params")
        is_named = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not is_named or not isinstance(known.get("settings"), dict):
            yield "a group of parameters is none"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
