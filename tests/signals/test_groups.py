"""Names of parameters in, groups and sums by group out."""

import math

import pytest
import torch
from torch import nn

from sealegs.lab.model import Transformer
from sealegs.lab.settings import SIZES
from sealegs.signals.groups import Groups, Sums, group_of, plain_name


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
    sums(torch.ones(2))
    assert next(iter(sums._tables.values())) is tables


def test_sums_may_share_entries() -> None:
    sums = Sums([(0, 1, 2), (1,), ()])
    assert sums(torch.tensor([1.0, 2.0, 4.0])).tolist() == [7.0, 2.0, 0.0]


def test_no_parameters_no_groups() -> None:
    assert Groups([]).sum_by_group(torch.zeros(0)).shape == (0,)
