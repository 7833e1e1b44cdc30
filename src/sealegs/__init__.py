"""Sealegs keeps a training run standing."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sealegs.errors import MissingExtra

if TYPE_CHECKING:
    from sealegs.guard import Guard
    from sealegs.judge import Budget
    from sealegs.record.run import Run, open_run
    from sealegs.vocabulary import Finding, Severity, Verdict
    from sealegs.watch import Watch

__all__ = ["Budget", "Finding", "Guard", "Run", "Severity", "Verdict", "Watch", "open_run"]

# Loaded when first asked for: `import sealegs` costs nothing, and a laptop without torch can still open runs.
_HOMES = {
    "Budget": "sealegs.judge",
    "Finding": "sealegs.vocabulary",
    "Guard": "sealegs.guard",
    "Run": "sealegs.record.run",
    "Severity": "sealegs.vocabulary",
    "Verdict": "sealegs.vocabulary",
    "Watch": "sealegs.watch",
    "open_run": "sealegs.record.run",
}


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
