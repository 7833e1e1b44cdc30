"""Every sign by its name: ``gradient-many-fold`` is ``spikes.gradient_many_fold``."""

from inspect import getmembers, isfunction

from sealegs.diagnosis.facts import Facts
from sealegs.diagnosis.signs import data, numbers, settings, spikes, state
from sealegs.diagnosis.signs.sign import Ask, Sign

FAMILIES = (spikes, numbers, data, settings, state)

SIGNS: dict[str, Ask] = {
    name.replace("_", "-"): function
    for family in FAMILIES
    for name, function in getmembers(family, isfunction)
    if function.__module__ == family.__name__
    and not name.startswith("_")
    and function.__annotations__.get("return") is Sign
}


def read(facts: Facts) -> dict[str, Sign]:
    """The answer of each sign about a run."""
    return {name: ask(facts) for name, ask in SIGNS.items()}
