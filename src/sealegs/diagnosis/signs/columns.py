"""Signs in columns beside the loss, by what the general judgement of columns has found in them."""

import math

from sealegs.diagnosis.columns.meaning import nature_of, words_of
from sealegs.diagnosis.facts import Facts
from sealegs.diagnosis.signs.sign import NOT_ASKED, Sign, so

COPIES = ("rank", "ranks", "replica", "replicas", "worker", "gpu", "device", "host", "node", "shard", "dp", "tp")
"""Words in the names of columns that are one for each copy of the model, or for each machine."""


def copies_part(facts: Facts) -> Sign:
    """A number that was the same on all ranks is not any more."""
    return _shown(facts, "copies-part", *COPIES)


def one_rank_leaps_alone(facts: Facts) -> Sign:
    """The norm of one rank leaps, again and again, and no other's."""
    return _shown(facts, "leaps-alone", *COPIES)


def weights_grow_on(facts: Facts) -> Sign:
    """The norm of the weights grows without slowing, to a multiple, up to the end."""
    return _shown(facts, "rises", "param", "params", "weight", "weights", "parameter")


def output_logits_grow(facts: Facts) -> Sign:
    """The output's logits, or the loss that holds their normaliser near 1, have grown many-fold."""
    for one in facts.findings.columns:
        words = set(words_of(one.signal))
        is_of_output = not words & {"attn", "attention", "qk", "router", "gate", "moe"}
        if (
            one.shows in ("rises", "leaps")
            and is_of_output
            and (words & {"zloss", "logits", "logit"} or {"z", "loss"} <= words)
        ):
            return so(True, one.text)
    return NOT_ASKED


def held_out_turns(facts: Facts) -> Sign:
    """A held-out error ends far above its lowest, and the training loss went on falling."""
    natures = (one for one in facts.findings.columns if one.shows == "turns" and nature_of(one.signal) == "error")
    found = next(natures, None)
    if found is None:
        return NOT_ASKED
    then, last = facts.loss.finite.within(-math.inf, found.step).values, facts.loss.finite.values
    count = max(len(last) // 20, 1)
    return so(len(then) > 0 and last[-count:].mean() < then[-count:].mean(), found.text)


def _shown(facts: Facts, shows: str, *words: str) -> Sign:
    found = facts.in_columns(shows, *words)
    return NOT_ASKED if found is None else so(True, found.text)
