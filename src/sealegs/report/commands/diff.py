"""The report of ``sealegs diff``: what follows from two runs, and where they differ."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypedDict

from sealegs.diagnosis.diff import Difference, Parting
from sealegs.diagnosis.diff_conclusions import Conclusion
from sealegs.record.schema import speakable


class Differing(TypedDict):
    """Where two runs differ; of settings, versions and signals the value of the one and of the other."""

    runs: list[str]
    settings: dict[str, tuple[Any, Any]]
    versions: dict[str, tuple[Any, Any]]
    shared_steps: int
    partings: list[Parting]
    equal: list[str]
    only_in: tuple[list[str], list[str]]
    conclusions: list[Conclusion]


WIDTH = 100
MOST = 30
"""Settings, versions or signals of the page; JSON has all of them."""
LONGEST = 60
"""Characters of a value that are shown."""


def page(difference: Difference, names: tuple[str, str], conclusions: Sequence[Conclusion] = ()) -> str:
    """What follows, then settings, versions and signals, the one that differs first on top."""
    lines = [f"{names[0]}  ->  {names[1]}, {difference.shared_steps:,} steps in common"]
    for each in conclusions:
        lines += textwrap.wrap(each.text, WIDTH, initial_indent="- ", subsequent_indent="  ")
        lines += textwrap.wrap(f"test: {each.test}", WIDTH, initial_indent="  ", subsequent_indent="    ") * bool(
            each.test
        )
    lines += _changed("Settings", difference.settings) + _changed("Versions", difference.versions)
    if difference.partings:
        lines += ["", "Signals, by the first step at which they differ"]
        width = max(len(parting.signal) for parting in difference.partings)
        for parting in difference.partings[:MOST]:
            noise = (
                "never beyond noise" if parting.beyond_noise is None else f"beyond noise from {parting.beyond_noise}"
            )
            values = " -> ".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in parting.values)
            lines.append(f"  {parting.signal:<{width}}  step {parting.first}: {values}; {noise}")
        lines += _and_more(len(difference.partings))
    if difference.equal:
        lines += ["", f"Equal at every step: {', '.join(difference.equal)}"]
    for name, signals in zip(names, difference.only_in, strict=True):
        lines += ["", f"Only in {name}: {', '.join(signals)}"] if signals else []
    return "\n".join(lines if difference.is_any else [*lines, "", "no difference"])


def contract(difference: Difference, names: tuple[str, str], conclusions: Sequence[Conclusion] = ()) -> dict[str, Any]:
    """As one JSON object."""
    told = {"runs": list(names)} | asdict(difference) | {"conclusions": [asdict(each) for each in conclusions]}
    spoken: dict[str, Any] = speakable(told)
    return spoken


def _changed(title: str, changed: Mapping[str, tuple[Any, Any]]) -> list[str]:
    if not changed:
        return []
    shown = sorted(changed.items())[:MOST]
    width = max(len(name) for name, _ in shown)
    told = [f"  {name:<{width}}  {_short(old)} -> {_short(new)}" for name, (old, new) in shown]
    return ["", title, *told, *_and_more(len(changed))]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _and_more(count: int) -> list[str]:
    return [f"  and {count - MOST:,} more: --json has all of them"] if count > MOST else []
