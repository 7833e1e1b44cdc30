"""Sealegs keeps a training run standing."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sealegs.errors import MissingExtra

if TYPE_CHECKING:
    from sealegs.batching.batch_sampler import StratifiedBatchSampler
    from sealegs.batching.tokens import rare_rows
    from sealegs.errors import RunEndedBadly
    from sealegs.guard import Guard
    from sealegs.judge import Budget
    from sealegs.preflight_check.live import preflight
    from sealegs.readers.read import open_run
    from sealegs.record.run import Run
    from sealegs.recovery.actions import (
        Continue,
        Halt,
        LowerLR,
        ResetMoments,
        Rollback,
        SkipBatches,
        Stratify,
        SwapSource,
        Tighten,
    )
    from sealegs.recovery.playbook import Playbook, Rung
    from sealegs.recovery.recurrence import Trigger
    from sealegs.replay.subject import Subject, Text
    from sealegs.sinks.notify import Notify
    from sealegs.sinks.trackers import tracker
    from sealegs.vocabulary import Finding, Severity, Verdict
    from sealegs.watch import Watch

__all__ = [
    "Budget",
    "Continue",
    "Finding",
    "Guard",
    "Halt",
    "LowerLR",
    "Notify",
    "Playbook",
    "ResetMoments",
    "Rollback",
    "Run",
    "RunEndedBadly",
    "Rung",
    "Severity",
    "SkipBatches",
    "StratifiedBatchSampler",
    "Stratify",
    "Subject",
    "SwapSource",
    "Text",
    "Tighten",
    "Trigger",
    "Verdict",
    "Watch",
    "open_run",
    "preflight",
    "rare_rows",
    "tracker",
]

# Loaded when first asked for: `import sealegs` costs nothing, and a laptop without torch can still open runs.
_HOMES = {
    "Budget": "sealegs.judge",
    "Continue": "sealegs.recovery.actions",
    "Finding": "sealegs.vocabulary",
    "Guard": "sealegs.guard",
    "Halt": "sealegs.recovery.actions",
    "LowerLR": "sealegs.recovery.actions",
    "Notify": "sealegs.sinks.notify",
    "Playbook": "sealegs.recovery.playbook",
    "ResetMoments": "sealegs.recovery.actions",
    "Rollback": "sealegs.recovery.actions",
    "Run": "sealegs.record.run",
    "RunEndedBadly": "sealegs.errors",
    "Rung": "sealegs.recovery.playbook",
    "Severity": "sealegs.vocabulary",
    "SkipBatches": "sealegs.recovery.actions",
    "StratifiedBatchSampler": "sealegs.batching.batch_sampler",
    "Stratify": "sealegs.recovery.actions",
    "Subject": "sealegs.replay.subject",
    "SwapSource": "sealegs.recovery.actions",
    "Text": "sealegs.replay.subject",
    "Tighten": "sealegs.recovery.actions",
    "Trigger": "sealegs.recovery.recurrence",
    "Verdict": "sealegs.vocabulary",
    "Watch": "sealegs.watch",
    "open_run": "sealegs.readers.read",
    "preflight": "sealegs.preflight_check.live",
    "rare_rows": "sealegs.batching.tokens",
    "tracker": "sealegs.sinks.trackers",
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
