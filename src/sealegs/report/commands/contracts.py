"""What a command found in, the object of its ``--json`` out; docs/*.schema.json say what is in each."""

from typing import Any

import msgspec

from sealegs.record.schema import speakable


def contract(found: msgspec.Struct) -> dict[str, Any]:
    """As JSON values; NaN and the infinities as strings, as in the run folder."""
    told: dict[str, Any] = speakable(msgspec.to_builtins(found))
    return told
