"""The remedies of a card in, those that fit this run out: a clip with a limit that the run's own norms bear out."""

import math
from collections.abc import Iterable

import msgspec
import numpy as np

from sealegs.diagnosis.cause_cards import Remedy, Test
from sealegs.diagnosis.facts import Facts
from sealegs.diagnosis.signs import registry
from sealegs.stats.clip_limit import clip_limit

OTHER_UNITS = 100.0
"""Times a clip that a gradient norm is where it is not in the units of the clip: of a scaled loss, or a sum."""
UNSCALE = (
    "unscale gradients before their norm is measured and clipped (the usual norm is {norm:.3g}: a clip of {clip} would "
    "stop all learning)"
)
"""The order in place of a clip, where gradients are in other units."""


def fitting(facts: Facts, remedies: Iterable[Remedy]) -> list[Remedy]:
    """The remedies for which what they ask for is so, and what makes them pointless is not."""
    sane = (borne_out(facts, remedy) for remedy in remedies if makes_sense(facts, remedy))
    return [remedy for remedy in sane if remedy is not None]


def makes_sense(facts: Facts, one: Remedy | Test) -> bool:
    """Whether what a remedy or a test asks for is so, and what rules it out is not."""
    is_pointless = one.unless and registry.SIGNS[one.unless](facts).holds
    is_beside = one.when and not registry.SIGNS[one.when](facts).holds
    return not is_pointless and not is_beside


def healthy_norms(facts: Facts) -> list[float]:
    """The last gradient norms before anything was out of the usual, the gradients themselves included."""
    before = facts.before("grad_norm")
    norms: list[float] = before.within(-math.inf, facts.sound_before - 1).values.tolist()
    return norms


def borne_out(facts: Facts, remedy: Remedy) -> Remedy | None:
    """The remedy as it is, unless it clips: then with a limit that clips one healthy step in ten where its own would
    clip most, and the share. None where as low a limit is in force."""
    wanted = remedy.clips_at
    if wanted is None:
        return remedy
    now = facts.clip_at(facts.onset)
    if now is not None and 0 < now <= wanted:
        return None
    norms = healthy_norms(facts)
    usual = float(np.median(norms)) if norms else 0.0
    if usual > OTHER_UNITS * wanted:
        return msgspec.structs.replace(remedy, do=UNSCALE.format(norm=usual, clip=f"{wanted:g}"))
    if not norms:
        return msgspec.structs.replace(remedy, do=f"{remedy.do} (not checked: no gradient norm is logged before it)")
    if facts.is_clipped_when_measured:
        because = "not checked: the gradient norm was measured after clipping"
        return msgspec.structs.replace(remedy, do=f"{remedy.do} ({because})")
    limit = clip_limit(wanted, norms, now)
    if limit.value is None:
        return None
    do = remedy.do.replace(remedy.value, f"{limit.value:g}")
    return msgspec.structs.replace(remedy, do=f"{do} ({limit.because})", value=f"{limit.value:g}")
