"""Applies faults of every kind to a model, its optimizer and its batches, for as long as a context is open."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from sealegs.faults.batches import Spoiler, Spoilt
from sealegs.faults.contract import Fault
from sealegs.faults.data import DataFault
from sealegs.faults.injector import inject
from sealegs.faults.policy import PolicyFaults
from sealegs.faults.reward import PolicyFault

NOT_STRUCK = "has not struck: its steps did not all come, or what it strikes was not there"


@contextmanager
def disturbed_policy(
    faults: Sequence[Fault],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    clock: Callable[[], int],
    say: Callable[[str], None],
) -> Iterator[PolicyFaults]:
    """The same to a policy-gradient loop, which makes its data itself: give what it hands over through the faults."""
    broken = PolicyFaults(faults, clock=clock, say=say)
    others = [fault for fault in faults if not isinstance(fault, PolicyFault)]
    with inject(others, model, optimizers=optimizer, clock=clock, say=say) as injector:
        yield broken
    for fault in (*injector.pending(), *broken.pending()):
        say(f"{fault} {NOT_STRUCK}")


@contextmanager
def disturbed(
    faults: Sequence[Fault],
    vocabulary: int | None,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    batches: Iterable[Any],
    clock: Callable[[], int],
    say: Callable[[str], None],
) -> Iterator[Iterable[Any]]:
    """Apply faults of every kind at once, and give the batches; at the end, report faults that never struck."""
    of_data = [fault for fault in faults if isinstance(fault, DataFault)]
    others = [fault for fault in faults if not isinstance(fault, DataFault)]
    spoiler = Spoiler(of_data, vocabulary=vocabulary, say=say)
    with inject(others, model, optimizers=optimizer, clock=clock, say=say) as injector:
        yield Spoilt(batches, spoiler) if of_data else batches
    for fault in injector.pending():
        say(f"{fault} {NOT_STRUCK}")
    for fault in spoiler.pending():
        say(f"{fault} has not struck: its batches did not come, or had no row of the source")
