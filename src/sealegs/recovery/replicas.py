"""Makes replicas equal again: ranks that hold something else get what the majority holds.

Weights alone would not do: the moments of a rank that has trained other weights differ, too.
"""

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from sealegs.recovery.actions import Impossible
from sealegs.signals.collect import waited_for
from sealegs.signals.collective import Collective
from sealegs.signals.layout import Layout, local
from sealegs.signals.ranks import checksum_of


@torch.no_grad()
def copy_majority(layout: Layout, optimizers: Sequence[Optimizer], ranks: Collective) -> str:
    """Copy weights and moments from a rank of the majority to those that differ, and say which these were.

    Raises Impossible on all ranks, and changes nothing, where no majority holds the same. Call it on every rank.
    """
    held = _held(layout, optimizers)
    kinds = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in held]
    found = ranks.gather((_sums(held), kinds))
    sources = _sources(layout.twins, [sums for sums, _ in found])
    if any(found[odd][1] != found[source][1] for odd, source in sources.items()):
        raise Impossible("an optimizer holds other tensors on a rank that differs than on the others")
    ranks.together(lambda: _exchange(held, sources, ranks))
    after = ranks.gather(_sums(held))
    assert not any(after[odd] != after[source] for odd, source in sources.items()), "a copy is equal to the last bit"
    copied = (f"{layout.on_rank(odd)} has got what {layout.on_rank(source)} holds" for odd, source in sources.items())
    return "; ".join(copied)


def _held(layout: Layout, optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """What is to be the same, in an order that is the same on all ranks."""
    held = []
    for parameter in layout.compared:
        held.append(local(parameter))
        for optimizer in optimizers:
            state = optimizer.state.get(parameter, {})
            held += [local(state[key]) for key in sorted(state) if isinstance(state[key], Tensor)]
    return held


def _sums(held: Sequence[Tensor]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(waited_for(checksum_of([tensor], tensor.device))) for tensor in held)


def _sources(twins: Sequence[int], sums: Sequence[object]) -> dict[int, int]:
    """By rank that differs from the majority of its twins, the first rank of that majority."""
    sources: dict[int, int] = {}
    for first in sorted(set(twins)):
        members = [rank for rank, other in enumerate(twins) if other == first]
        ((most, count),) = Counter(sums[rank] for rank in members).most_common(1)
        if count == len(members):
            continue
        if 2 * count <= len(members):
            who = ", ".join(map(str, members))
            raise Impossible(f"of ranks {who} no majority holds the same, so nobody can say which of them are right")
        source = next(rank for rank in members if sums[rank] == most)
        sources |= {rank: source for rank in members if sums[rank] != most}
    if not sources:
        raise Impossible("the ranks hold the same by now")
    return sources


def _exchange(held: Sequence[Tensor], sources: dict[int, int], ranks: Collective) -> None:
    for odd, source in sorted(sources.items()):
        for tensor in held:
            if ranks.rank == source:
                dist.send(tensor.cpu().contiguous(), dst=odd, group=ranks.group)
            elif ranks.rank == odd:
                right = torch.empty(tensor.shape, dtype=tensor.dtype)
                dist.recv(right, src=source, group=ranks.group)
                tensor.copy_(right)
