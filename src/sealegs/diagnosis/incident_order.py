"""Incidents in, their order out: which of several is told of, and explained."""

from sealegs.incidents import Incident

BENIGN = ("epoch_step",)
WATCHED = ("plateau",)
PRIORITY = ("nonfinite", "overflow", "resume_jump", "level_shift", "spike", "drift", "plateau", "epoch_step")
"""What a stretch is called that several finders have found; of incidents that went the same way, which to tell of."""
GRAVEST = ("divergent", "lingering", None, "slow", "fast")
"""Trajectories, the gravest first; None is still open."""


def gravity(incident: Incident) -> tuple[bool, int, int, int]:
    """The order of incidents: the first is the one that the verdict tells of and that the causes are sought for."""
    is_mild = incident.kind in BENIGN + WATCHED
    return is_mild, GRAVEST.index(incident.trajectory), PRIORITY.index(incident.kind), incident.start
