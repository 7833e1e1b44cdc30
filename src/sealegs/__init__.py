"""Sealegs keeps a training run standing."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sealegs.errors import MissingExtra

if TYPE_CHECKING:
    from sealegs import playbook
    from sealegs.batching.batch_sampler import StratifiedBatchSampler
    from sealegs.batching.tokens import rare_rows
    from sealegs.errors import ConfigError, FolderIncomplete, RunEndedBadly, RunHalted, SealegsError
    from sealegs.faults.injector import inject
    from sealegs.guard import Guard
    from sealegs.guard_options import Checkpointing, Elastic, LoopScheduler, Telemetry
    from sealegs.judge import Budget, Detection
    from sealegs.preflight_check.live import preflight
    from sealegs.readers.read import open_run
    from sealegs.record.run import Run
    from sealegs.recovery.playbook import Playbook
    from sealegs.replay.subject import Subject, Text
    from sealegs.sinks.notify import Notify
    from sealegs.sinks.trackers import tracker
    from sealegs.state.frozen import Frozen
    from sealegs.step.skip_way import Skipping
    from sealegs.vocabulary import Finding, Severity, Verdict
    from sealegs.watch import Watch

__all__ = [
    "Budget",
    "Checkpointing",
    "ConfigError",
    "Detection",
    "Elastic",
    "Finding",
    "FolderIncomplete",
    "Frozen",
    "Guard",
    "LoopScheduler",
    "Notify",
    "Playbook",
    "Run",
    "RunEndedBadly",
    "RunHalted",
    "SealegsError",
    "Severity",
    "Skipping",
    "StratifiedBatchSampler",
    "Subject",
    "Telemetry",
    "Text",
    "Verdict",
    "Watch",
    "inject",
    "open_run",
    "playbook",
    "preflight",
    "rare_rows",
    "tracker",
]

# Loaded when first asked for: `import sealegs` costs nothing, and a laptop without torch can still open runs.
_HOMES = {
    "Budget": "sealegs.judge",
    "Checkpointing": "sealegs.guard_options",
    "ConfigError": "sealegs.errors",
    "Detection": "sealegs.judge",
    "Elastic": "sealegs.guard_options",
    "Finding": "sealegs.vocabulary",
    "FolderIncomplete": "sealegs.errors",
    "Frozen": "sealegs.state.frozen",
    "Guard": "sealegs.guard",
    "LoopScheduler": "sealegs.guard_options",
    "Notify": "sealegs.sinks.notify",
    "Playbook": "sealegs.recovery.playbook",
    "Run": "sealegs.record.run",
    "RunEndedBadly": "sealegs.errors",
    "RunHalted": "sealegs.errors",
    "SealegsError": "sealegs.errors",
    "Severity": "sealegs.vocabulary",
    "Skipping": "sealegs.step.skip_way",
    "StratifiedBatchSampler": "sealegs.batching.batch_sampler",
    "Subject": "sealegs.replay.subject",
    "Telemetry": "sealegs.guard_options",
    "Text": "sealegs.replay.subject",
    "Verdict": "sealegs.vocabulary",
    "Watch": "sealegs.watch",
    "inject": "sealegs.faults.injector",
    "open_run": "sealegs.readers.read",
    "preflight": "sealegs.preflight_check.live",
    "rare_rows": "sealegs.batching.tokens",
    "tracker": "sealegs.sinks.trackers",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("sealegs")
    if name == "playbook":
        return import_module("sealegs.playbook")
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
