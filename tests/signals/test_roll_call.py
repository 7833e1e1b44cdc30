"""Who is missing, asked of a real store by many ranks at once. Killed ranks are in tests/ranks/test_lost.py."""

import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist

from sealegs.signals.collective import absent


class Counted:
    """A store that counts what it is asked."""

    def __init__(self) -> None:
        torch_own: Any = dist
        self._store = torch_own.HashStore()
        self.asked = Counter[str]()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*arguments: Any) -> Any:
            self.asked[name] += 1
            return method(*arguments)

        return call


def roll_call(world: int, missing: set[int], seconds: float) -> tuple[Counted, dict[int, list[int]]]:
    store, found, deadline = Counted(), {}, time.monotonic() + seconds

    def on(rank: int) -> None:
        found[rank] = absent(store, "step-7", rank, world, deadline)

    threads = [threading.Thread(target=on, args=(rank,)) for rank in range(world) if rank not in missing]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return store, found


@pytest.mark.parametrize("missing", [set(), {0}, {5, 63}])
def test_every_rank_learns_who_is_missing_by_a_few_requests(missing: set[int]) -> None:
    world = 64
    store, found = roll_call(world, missing, 1.0 if missing else 30.0)
    assert len(found) == world - len(missing)
    assert all(set(each) == missing for each in found.values())
    by_each = store.asked["set"] + store.asked["add"] + store.asked["wait"] + store.asked["get"]
    assert by_each < 4 * world + 20, "and what the first one has asked while it waited"
    assert store.asked["check"] < 40, "it asked for halves, not for each"


def test_a_rank_that_is_late_does_not_name_itself() -> None:
    store, found = roll_call(4, {2}, 0.2)
    assert found == {0: [2], 1: [2], 3: [2]}
    assert absent(store, "step-7", 2, 4, time.monotonic() + 5.0) == []


def test_where_the_first_is_lost_the_others_look_themselves() -> None:
    store = Counted()
    store.add("sealegs/step-7/here", 1)  # rank 0 came, and was killed before it could answer
    store.set("sealegs/step-7/rank-0", "here")
    assert absent(store, "step-7", 1, 3, time.monotonic() + 0.1) == [2]
