"""The protocol of all detectors: a frozen value whose state is a plain value passed through it.

A new one goes into ``judge.standard``; the kind of its incidents into ``incidents.KINDS``.
"""

from typing import Protocol, TypeVar

from sealegs.vocabulary import Finding, Row

S = TypeVar("S")


class Detector(Protocol[S]):
    """Looks first and learns after; holds no reference to a model, and keeps nothing in itself.

    States are tuples of plain values, so that they can be saved with a checkpoint and compared bit for bit.
    """

    @property
    def name(self) -> str:
        """The name in its findings."""

    def init(self) -> S:
        """The state before the first step."""

    def look(self, state: S, now: Row) -> Finding | None:
        """Judge a step; change nothing."""

    def learn(self, state: S, now: Row) -> S:
        """The state after a step. What is not finite never enters it."""
