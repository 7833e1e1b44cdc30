"""Passes the batches of a prepared loader through a guard, which can then go back in them.

This does what Accelerate does for a batch: it sets the random states of the ranks, the epoch of the sampler, the device
and the mark on the last batch. Unlike Accelerate it reads no batch ahead, because a guard has to know which batch is
trained on.
"""

from collections.abc import Iterator
from typing import Any

from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.utils import send_to_device, synchronize_rng_states

from sealegs.data.loaders import cannot_reposition
from sealegs.errors import ConfigError
from sealegs.guard import Guard


def handed_out(guard: Guard, loader: Any, *, by_ourselves: bool) -> Iterator[Any]:
    """The batches of an epoch. A loader that never goes back is iterated as Accelerate does it."""
    if not by_ourselves and isinstance(loader, DataLoaderShard | DataLoaderDispatcher):
        yield from guard.loop.batches(iter(loader))
    elif isinstance(loader, DataLoaderDispatcher):
        raise ConfigError(
            "loader=DataLoaderDispatcher: one process reads for all, and cannot be brought back to an earlier batch; "
            "give dispatch_batches=False and a dataset with a length, or a playbook that does not go back"
        )
    elif isinstance(loader, DataLoaderShard):
        yield from _by_ourselves(guard, loader)
    else:
        yield from guard.loop.batches(loader)


def has_places(loader: Any) -> bool:
    """Whether the guard can read its batches itself, from any position on."""
    if isinstance(loader, DataLoaderDispatcher):
        return False
    return cannot_reposition(getattr(loader, "base_dataloader", loader)) is None


def _by_ourselves(guard: Guard, loader: Any) -> Iterator[Any]:
    if loader.rng_types is not None:
        synchronize_rng_states(loader.rng_types, loader.synchronized_generator)
    # the larger of the two: on a resume the loader may know its epoch, or the guard, or neither
    guard.loop.data.on_epoch = lambda number: _tell_epoch(loader, max(number, loader.iteration))
    loader.begin()
    try:
        for batch in guard.loop.batches(loader.base_dataloader):
            loader.end_of_dataloader = guard.loop.data.is_last
            if loader.device is not None:
                batch = send_to_device(batch, loader.device, non_blocking=loader._non_blocking)
            yield batch
        loader.iteration += 1
    finally:
        loader.end()


def _tell_epoch(loader: Any, epoch: int) -> None:
    loader.set_epoch(epoch)
    # Accelerate does not pass the epoch on to a batch sampler that it has divided among the ranks
    inner: Any = getattr(loader.batch_sampler, "batch_sampler", None)
    if hasattr(inner, "set_epoch"):
        inner.set_epoch(epoch)
