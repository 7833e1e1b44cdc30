"""Every sign by its name: ``gradient-many-fold`` asks ``signs_of_spikes.gradient_many_fold``."""

from inspect import getmembers, isfunction

from sealegs.diagnosis import signs_of_data, signs_of_numbers, signs_of_settings, signs_of_spikes, signs_of_state
from sealegs.diagnosis.evidence import Ask, Sign
from sealegs.diagnosis.facts import Facts

FAMILIES = (signs_of_spikes, signs_of_numbers, signs_of_data, signs_of_settings, signs_of_state)

SIGNS: dict[str, Ask] = {
    name.replace("_", "-"): function
    for family in FAMILIES
    for name, function in getmembers(family, isfunction)
    if function.__module__ == family.__name__
    and not name.startswith("_")
    and function.__annotations__.get("return") is Sign
}


def read(facts: Facts) -> dict[str, Sign]:
    """What each sign says of a run."""
    return {name: ask(facts) for name, ask in SIGNS.items()}
