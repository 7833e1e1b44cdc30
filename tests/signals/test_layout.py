"""Which ranks hold copies of a tensor, where neither a mesh nor DDP says so. Real meshes are in tests/ranks."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sealegs.signals.layout import STRANGER, Layout, find_layout

WORLD = 4


class Meeting:
    """Ranks that are threads: each gets what all have brought."""

    def __init__(self) -> None:
        self._values: list[Any] = [None] * WORLD
        self._barrier = threading.Barrier(WORLD, timeout=60)

    def gather_of(self, rank: int) -> Callable[[Any], list[Any]]:
        def gather(mine: Any) -> list[Any]:
            self._values[rank] = mine
            self._barrier.wait()
            found = list(self._values)
            self._barrier.wait()
            return found

        return gather


def layouts(models: list[nn.Module], losses: list[bool] | None = None) -> list[Layout]:
    meeting, found = Meeting(), [Layout()] * WORLD

    def on(rank: int) -> None:
        has_loss = None if losses is None else losses[rank]
        found[rank] = find_layout(models[rank], rank, WORLD, meeting.gather_of(rank), has_loss=has_loss)

    threads = [threading.Thread(target=on, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def linear(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


def with_gradients(models: list[nn.Module], seeds: list[int]) -> list[nn.Module]:
    for model, seed in zip(models, seeds, strict=True):
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
    return models


def copies(layout: Layout, model: nn.Module) -> list[int]:
    return [layout.copies_of(parameter) for parameter in model.parameters()]


def test_one_model_on_all_ranks_that_exchange_by_themselves() -> None:
    models = with_gradients([linear(0) for _ in range(WORLD)], [7] * WORLD)
    for losses in (None, [True] * WORLD):
        for layout, model in zip(layouts(models, losses), models, strict=True):
            assert copies(layout, model) == [WORLD, WORLD]
            assert layout.is_one
            assert layout.is_guessed
            assert layout.names == ("weight", "bias", STRANGER)
            assert (layout.peers, layout.twins, len(layout.compared)) == ((0,) * WORLD, (0,) * WORLD, 2)


def test_other_weights_are_no_copies() -> None:
    models: list[nn.Module] = [linear(rank) for rank in range(WORLD)]
    for layout, model in zip(layouts(models), models, strict=True):
        assert copies(layout, model) == [1, 1]
        assert layout.own == {"weight", "bias"}
        assert layout.why_not_one
        assert layout.compared == ()
        assert layout.peers == layout.twins == (0, 1, 2, 3)


def test_stages_that_were_made_from_one_seed_are_told_apart_by_their_gradients() -> None:
    models = with_gradients([linear(0) for _ in range(WORLD)], [1, 2, 3, 4])
    assert layouts(models)[0].is_one, "nothing else is known before the first step"
    found = layouts(models, [False, False, False, True])
    assert [copies(layout, model) for layout, model in zip(found, models, strict=True)] == [[1, 1]] * WORLD
    assert not found[0].is_one


def test_much_the_same_gradient_is_a_copy_only_where_none_is_another() -> None:
    """What flows past the blocks of a pipeline gives biases much the same gradient; a kernel that adds in any order
    gives copies one that is nearly the same."""
    models = with_gradients([linear(0) for _ in range(WORLD)], [1] * WORLD)
    for rank, model in enumerate(models):
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= 1 + 0.001 * rank
    assert copies(layouts(models, [True] * WORLD)[0], models[0]) == [WORLD, WORLD]
    for rank, model in enumerate(models):
        weight: Tensor = next(model.parameters())
        weight.grad = torch.full_like(weight, float(rank))
    assert copies(layouts(models, [False, False, False, True])[0], models[0]) == [1, 1]


def test_gradients_that_nobody_exchanges_say_nothing_of_the_weights() -> None:
    """As where weights are averaged now and then: they are compared, as before."""
    models = with_gradients([linear(0) for _ in range(WORLD)], [1, 2, 3, 4])
    found = layouts(models, [True] * WORLD)
    assert found[0].is_one
    assert copies(found[0], models[0]) == [WORLD, WORLD]


def test_experts_of_each_rank_beside_what_all_share() -> None:
    models: list[nn.Module] = []
    for rank in range(WORLD):
        shared = linear(0)
        models.append(nn.ModuleDict({"shared": shared, "expert": linear(rank)}))
    for layout, model in zip(layouts(models), models, strict=True):
        assert copies(layout, model) == [WORLD, WORLD, 1, 1]
        assert layout.own == {"expert.weight", "expert.bias"}
        assert layout.peers == (0,) * WORLD, "what they share is of one mean"
        assert layout.elements == 8 * (1 + WORLD)


def test_stages_of_other_names() -> None:
    models: list[nn.Module] = [nn.ModuleDict({f"layer{rank}": linear(rank)}) for rank in range(WORLD)]
    found = layouts(models)
    assert not found[0].are_alike
    assert found[0].names == (
        *(f"layer{rank}.{name}" for rank in range(WORLD) for name in ("weight", "bias")),
        STRANGER,
    )
    assert found[0].groups == tuple(f"layer{rank}" for rank in range(WORLD))
    assert all(layout.names == found[0].names for layout in found)
