"""Lets the ranks of a job do something together: on all of them or on none."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from sealegs.errors import StorageError

T = TypeVar("T")


class Collective:
    """The ranks of a job, in a process group of their own; one rank, where there is no process group.

    On the training's own group, a thread's messages would mix with the model's in no fixed order. Make it on every
    rank, in the same order.
    """

    def __init__(self) -> None:
        self.world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        self.rank = dist.get_rank() if self.world > 1 else 0
        self.group: Any = dist.new_group(backend="gloo") if self.world > 1 else None

    def gather(self, mine: T) -> list[T]:
        """The values of all ranks, by rank."""
        if self.group is None:
            return [mine]
        of_all: list[Any] = [None] * self.world
        dist.all_gather_object(of_all, mine, group=self.group)
        return of_all

    def agree(self, part: Callable[[], T]) -> T:
        """Do this rank's part; return once all ranks have done theirs. An error on one rank is raised on all."""
        if self.group is None:
            return part()
        try:
            result = part()
        except BaseException as error:
            self.gather(f"{type(error).__name__}: {error}")
            raise
        for rank, failure in enumerate(self.gather("")):
            if failure:
                raise StorageError(f"rank {rank} could not do its part: {failure}")
        return result

    def first(self, part: Callable[[], T]) -> T:
        """Rank 0's result, on all ranks."""
        return self.gather(self.agree(lambda: part() if self.rank == 0 else None))[0]  # type: ignore[return-value]
