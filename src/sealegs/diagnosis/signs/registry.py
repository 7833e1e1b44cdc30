"""Every sign by its name: ``gradient-many-fold`` is ``spikes.gradient_many_fold``."""

from inspect import getmembers, isfunction

from sealegs.diagnosis.facts import Facts
from sealegs.diagnosis.signs import columns, data, first_signals, numbers, settings, spikes, state
from sealegs.diagnosis.signs.sign import Ask, Sign

FAMILIES = (spikes, numbers, data, settings, state, first_signals, columns)

SIGNS: dict[str, Ask] = {
    name.replace("_", "-"): function
    for family in FAMILIES
    for name, function in getmembers(family, isfunction)
    if function.__module__ == family.__name__
    and not name.startswith("_")
    and function.__annotations__.get("return") is Sign
}


OF_THE_END = (
    *("nonfinite-stays", "nonfinite-passes", "goes-on-rising", "heals-slowly", "back-at-once"),
    *("eval-flat", "eval-flat-meanwhile"),
)
"""Signs that need the end of the incident, which is unknown where the run went back over it."""

WENT_BACK = "how it would have gone on: the run went back"
"""What is missing then, and no log can have."""


def read(facts: Facts) -> dict[str, Sign]:
    """The answer of each sign about a run."""
    said = {name: ask(facts) for name, ask in SIGNS.items()}
    if facts.went_back:
        said |= dict.fromkeys(OF_THE_END, Sign(None, missing=WENT_BACK))
    return said
