"""Names of parameters in, groups and sums by group out."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from sealegs.lab.model import Transformer
from sealegs.lab.settings import SIZES
from sealegs.signals.groups import (
    MOST_CELLS,
    MOST_GROUPS,
    MOST_LETTERS,
    Groups,
    Sums,
    find_layers,
    group_of,
    merged_groups,
    plain_name,
    shortened,
)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("blocks.0.attention.wq.weight", "blocks.0"),
        ("transformer.h.11.mlp.c_fc.weight", "transformer.h.11"),
        ("layers.3.experts.17.w1", "layers.3"),
        ("embedding.weight", "embedding"),
        ("0.weight", "0"),
        ("temperature", "temperature"),
        ("conv2d.weight", "conv2d"),  # a number inside a word is none
        ("module.module.blocks.2.weight", "blocks.2"),
        ("_orig_mod.head.weight", "head"),
        ("module._orig_mod._fsdp_wrapped_module.blocks.10._checkpoint_wrapped_module.up.weight", "blocks.10"),
        ("blocks.1._orig_mod.up.weight", "blocks.1"),
        ("submodule.up.weight", "submodule"),
    ],
)
def test_a_group_ends_at_the_first_number_or_the_first_word(name: str, group: str) -> None:
    assert group_of(name) == group


@pytest.mark.parametrize("name", ["encoder.module.weight", "my_orig_mod.weight", "modules.0.weight"])
def test_what_only_looks_like_a_wrapper_stays(name: str) -> None:
    assert plain_name(name) == name


def test_real_wrappers_are_seen_through() -> None:
    model = Transformer(SIZES["nano"].model)
    plain = Groups(name for name, _ in model.named_parameters()).names
    assert plain[0] == "embedding"
    assert plain[1:-1] == tuple(f"blocks.{n}" for n in range(len(model.blocks)))
    assert plain[-1] == "final_norm"
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    assert Groups(name for name, _ in compiled.named_parameters()).names == plain


def test_sums_go_to_their_groups_also_where_these_are_torn_apart() -> None:
    groups = Groups(["a.0.x", "head.w", "a.0.y", "a.1.x", "head.b", "a.0.z"])
    assert groups.names == ("a.0", "head", "a.1")
    values = torch.tensor([1.0, 10.0, 2.0, 100.0, 20.0, 4.0])
    assert groups.sum_by_group(values).tolist() == [7.0, 30.0, 100.0]
    stacked = groups.sum_by_group(torch.stack((values, -values)).double())
    assert stacked.tolist() == [[7.0, 30.0, 100.0], [-7.0, -30.0, -100.0]]
    assert stacked.dtype == torch.float64


def test_a_nan_stays_in_its_group() -> None:
    groups = Groups(["a.0.x", "a.0.y", "b.w"])
    first, second = groups.sum_by_group(torch.tensor([math.nan, 1.0, 2.0])).tolist()
    assert math.isnan(first)
    assert second == 2.0
    assert groups.sum_by_group(torch.tensor([1.0, 2.0, math.inf])).tolist() == [3.0, math.inf]


def test_the_tables_are_sent_once_a_device() -> None:
    sums = Groups(["a.w", "b.w"]).sum_by_group
    sums(torch.ones(2))
    (tables,) = sums._tables.values()
    assert len(tables[0]) == 1
    sums(torch.ones(2))
    assert next(iter(sums._tables.values())) is tables


def test_sums_may_share_entries() -> None:
    sums = Sums([(0, 1, 2), (1,), ()])
    assert sums(torch.tensor([1.0, 2.0, 4.0])).tolist() == [7.0, 2.0, 0.0]


def test_no_parameters_no_groups() -> None:
    assert Groups([]).sum_by_group(torch.zeros(0)).shape == (0,)


# A thousand layers.

LAYERS = 1000


class Tiny(nn.Module):
    """A layer with a weight that takes no time to make, and whatever is inside it."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0))
        for name, child in children.items():
            self.add_module(name, child)


def tiny_layers(count: int = LAYERS) -> nn.ModuleList:
    return nn.ModuleList(Tiny() for _ in range(count))


def nested(name: str, depth: int, within: nn.Module) -> nn.Module:
    for _ in range(depth):
        within = Tiny(**{name: within})
    return within


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a list": lambda: Tiny(embedding=Tiny(), layers=tiny_layers(), head=Tiny()),
    "blocks": lambda: Tiny(blocks=nn.ModuleList(Tiny(inner=tiny_layers(2)) for _ in range(LAYERS // 2))),
    "names": lambda: Tiny(**{f"layer_{n}": Tiny() for n in range(LAYERS)}),
    "many lists": lambda: Tiny(**{f"part_{n}": tiny_layers(2) for n in range(LAYERS // 2)}),
    "two lists in turns": lambda: Tiny(
        **{f"{word}{n}": nn.ModuleList([Tiny()]) for n in range(LAYERS // 2) for word in "ab"}
    ),
    "layers without weights": lambda: nn.Sequential(*(nn.Identity() if n % 2 else Tiny() for n in range(LAYERS))),
    "layers in two lists": lambda: Tiny(one=(layers := tiny_layers()), other=nn.ModuleList(layers)),
    "a list far inside": lambda: nested("a_long_name", 100, tiny_layers()),
}


@pytest.mark.parametrize("kind", MODELS)
def test_however_many_layers_there_are_the_groups_are_few_and_their_names_short(kind: str) -> None:
    model = MODELS[kind]()
    merged = merged_groups(model)
    layers = {merged[shortened(name)] for name in find_layers(model)}
    groups = Groups((name for name, _ in model.named_parameters()), merged)
    assert len({*merged.values()}) <= MOST_GROUPS
    assert len(groups.names) <= MOST_GROUPS
    assert {*groups.names, *layers} == {*merged.values()}
    assert sum(map(len, groups.members)) == sum(1 for _ in model.parameters())
    assert max(map(len, (*merged.values(), *groups.names))) <= 2 * MOST_LETTERS + 1


def test_neighbours_are_merged_within_their_list_and_what_stands_alone_stays() -> None:
    names = list(dict.fromkeys(merged_groups(MODELS["a list"]()).values()))
    assert names[:3] == ["weight", "embedding", "layers.0-3"]
    assert names[-2:] == ["layers.996-999", "head"]
    assert len(names) == 253


def test_names_without_a_number_are_merged_from_the_first_to_the_last() -> None:
    names = list(dict.fromkeys(merged_groups(MODELS["names"]()).values()))
    assert names[:2] == ["weight-layer_2", "layer_3-layer_6"]
    assert names[-1] == "layer_999"


def test_a_model_of_few_groups_is_measured_as_ever() -> None:
    assert merged_groups(Tiny(layers=tiny_layers(MOST_GROUPS - 1))) == {}
    assert merged_groups(Tiny(layers=tiny_layers(MOST_GROUPS))) != {}
    assert merged_groups(Transformer(SIZES["nano"].model)) == {}


def test_ranges_do_not_depend_on_what_has_a_gradient() -> None:
    model = MODELS["a list"]()
    names = [name for name, _ in model.named_parameters()]
    merged = merged_groups(model)
    assert Groups(names[500:508], merged).names == ("layers.496-499", "layers.500-503", "layers.504-507")


def test_the_tables_of_sums_grow_with_the_entries_and_not_with_their_square() -> None:
    """All entries, those of each of five thousand groups, and none."""
    entries = 20_000
    members = [range(entries), *(range(first, first + 4) for first in range(0, entries, 4)), ()]
    sums = Sums(members)
    values = torch.arange(entries, dtype=torch.float64)
    found = sums(torch.stack((values, -values)))
    assert found[0].tolist() == [float(sum(places)) for places in members]
    assert torch.equal(found[1], -found[0])
    ((rectangles, _),) = sums._tables.values()
    assert sum(index.numel() for index, _ in rectangles) == 2 * entries
    assert len(members) * entries > MOST_CELLS, "so much would one rectangle have had"
