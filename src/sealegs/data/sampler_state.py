"""Reads and restores what the order of a loader's batches is drawn from: generators, epochs, sampler states.

They are read at the beginning of an epoch; written back, they give the same order again.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sealegs.state.serialization import live, plain


@dataclass(frozen=True, slots=True)
class Origin:
    """Something that the order of an epoch may depend on."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    is_lent: bool = False
    """Whether it is shared, and so put back once the order has been drawn."""
    is_kept: bool = False
    """Whether it is recorded even if drawing an order does not change it."""


def global_origins() -> list[Origin]:
    """The process's global generators."""
    return [
        Origin("torch", torch.get_rng_state, torch.set_rng_state, is_lent=True),
        Origin("python", random.getstate, random.setstate, is_lent=True),
        Origin("numpy", lambda: np.random.get_state(legacy=False), np.random.set_state, is_lent=True),
    ]


def own_origins(given: Any) -> list[Origin]:
    """The generators of a loader and of its samplers, and the epoch numbers of its samplers."""
    samplers = samplers_of(given)
    held = [getattr(given, "generator", None)]
    held += [value for sampler in samplers for value in getattr(sampler, "__dict__", {}).values()]
    held = [each for each in held if isinstance(each, _GENERATORS) and not isinstance(each, random.SystemRandom)]
    generators = {id(each): each for each in held}
    told = [sampler for sampler in samplers if has_epoch(sampler)]
    return [
        *(_generator(f"generator {i}", each) for i, each in enumerate(generators.values())),
        *(_epoch(f"epoch {i}", each) for i, each in enumerate(told)),
    ]


_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def _generator(name: str, held: Any) -> Origin:
    if isinstance(held, random.Random):
        return Origin(name, held.getstate, held.setstate)
    if isinstance(held, np.random.Generator):
        bits = held.bit_generator
        return Origin(name, lambda: bits.state, lambda state: setattr(bits, "state", state))
    return Origin(name, held.get_state, held.set_state)


def _epoch(name: str, sampler: Any) -> Origin:
    if hasattr(sampler, "set_epoch"):  # the loop sets it
        return Origin(name, lambda: sampler.epoch, sampler.set_epoch, is_lent=True, is_kept=True)
    return Origin(name, lambda: sampler.epoch, lambda epoch: setattr(sampler, "epoch", epoch), is_kept=True)


def sampler_states(given: Any) -> list[Origin]:
    """The states of a loader's samplers."""
    return [
        Origin(f"state {i}", sampler.state_dict, sampler.load_state_dict, is_kept=True)
        for i, sampler in enumerate(filter(has_state, samplers_of(given)))
    ]


def read(origins: Iterable[Origin]) -> dict[str, Any]:
    """The current values of the origins, as JSON values."""
    return {origin.name: plain(origin.read(), f"sampler's {origin.name}") for origin in origins}


def drawn_from(origins: Sequence[Origin], before: Mapping[str, Any]) -> dict[str, Any]:
    """The former values of what drawing an order has changed, and of what is always kept."""
    after = read(origins)
    kept = {origin.name for origin in origins if origin.is_kept}
    return {name: value for name, value in before.items() if name in kept or value != after[name]}


@contextmanager
def as_at(start: Mapping[str, Any], origins: Iterable[Origin]) -> Iterator[None]:
    """Draw as at the start of an epoch."""
    here = [origin for origin in origins if origin.name in start]
    lent = [(origin, origin.read()) for origin in here if origin.is_lent]
    for origin in here:
        origin.write(live(start[origin.name]))
    try:
        yield
    finally:
        for origin, value in lent:
            origin.write(value)


def samplers_of(given: Any) -> list[Any]:
    """Everything that decides the order of a loader's batches: its samplers, and the samplers inside them."""
    found: list[Any] = []

    def follow(holder: Any, *names: str) -> None:
        for name in names:
            sampler = getattr(holder, name, None)
            if sampler is not None and all(sampler is not other for other in found):
                found.append(sampler)
                follow(sampler, "sampler", "batch_sampler")

    follow(given, "batch_sampler", "sampler")
    return found


def has_epoch(sampler: Any) -> bool:
    """Whether a sampler has an epoch number."""
    return type(getattr(sampler, "epoch", None)) is int


def has_state(given: Any) -> bool:
    """Whether an object has ``state_dict`` and ``load_state_dict``."""
    return hasattr(given, "state_dict") and hasattr(given, "load_state_dict")
