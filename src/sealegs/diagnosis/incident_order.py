"""The order of incidents: which of several the verdict names, and which one is explained."""

from collections.abc import Sequence

from sealegs.incidents import Incident

BENIGN = ("epoch_step",)
WATCHED = ("plateau",)
NUMERIC = ("nonfinite", "overflow")
"""Kinds that are about numbers, whatever these measure."""
PRIORITY = (
    "nonfinite",
    "overflow",
    "resume_jump",
    "level_shift",
    "spike",
    "drift",
    "collapse",
    "plateau",
    "epoch_step",
)
"""Kinds by priority: for a stretch that several finders found, and for incidents with the same trajectory."""
GRAVEST = ("divergent", "lingering", None, "slow", "fast")
"""Trajectories, the gravest first; None is still open."""


def gravity(incident: Incident) -> tuple[bool, int, int, int]:
    """Sort key of an incident: the verdict names the first one, and the diagnosis explains it.

    A word that is not known, in a file of another version, comes last.
    """
    is_mild = incident.kind in BENIGN + WATCHED
    return is_mild, _place(incident.trajectory, GRAVEST), _place(incident.kind, PRIORITY), incident.start


def _place(word: str | None, order: Sequence[str | None]) -> int:
    return order.index(word) if word in order else len(order)
