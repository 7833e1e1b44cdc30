"""Sealegs keeps a training run standing."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sealegs.errors import MissingExtra

if TYPE_CHECKING:
    from sealegs.guard import Watch
    from sealegs.record.run import Run, open_run

__all__ = ["Run", "Watch", "open_run"]

# Loaded when first asked for: `import sealegs` costs nothing, and a laptop without torch can still open runs.
_HOMES = {"Run": "sealegs.record.run", "Watch": "sealegs.guard", "open_run": "sealegs.record.run"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sealegs' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtra(f"sealegs.{name}", "PyTorch", "torch") from None


def __dir__() -> list[str]:
    return __all__
