"""The report of ``sealegs diff``: where two runs differ."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sealegs.diagnosis.diff import Difference
from sealegs.record.schema import speakable


def page(difference: Difference, names: tuple[str, str]) -> str:
    """Settings, versions, then the signals, the one that differs first on top."""
    lines = [f"{names[0]}  ->  {names[1]}, {difference.shared_steps:,} steps in common"]
    lines += _changed("Settings", difference.settings) + _changed("Versions", difference.versions)
    if difference.partings:
        lines += ["", "Signals, by the first step at which they differ"]
        width = max(len(parting.signal) for parting in difference.partings)
        for parting in difference.partings:
            noise = (
                "never beyond noise" if parting.beyond_noise is None else f"beyond noise from {parting.beyond_noise}"
            )
            values = " -> ".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in parting.values)
            lines.append(f"  {parting.signal:<{width}}  step {parting.first}: {values}; {noise}")
    if difference.equal:
        lines += ["", f"Equal at every step: {', '.join(difference.equal)}"]
    for name, signals in zip(names, difference.only_in, strict=True):
        lines += ["", f"Only in {name}: {', '.join(signals)}"] if signals else []
    return "\n".join(lines if difference.is_any else [*lines, "", "no difference"])


def contract(difference: Difference, names: tuple[str, str]) -> dict[str, Any]:
    """As one JSON object."""
    spoken: dict[str, Any] = speakable({"runs": list(names)} | asdict(difference))
    return spoken


def _changed(title: str, changed: Mapping[str, tuple[Any, Any]]) -> list[str]:
    if not changed:
        return []
    width = max(map(len, changed))
    return ["", title, *(f"  {name:<{width}}  {old!r} -> {new!r}" for name, (old, new) in sorted(changed.items()))]
