"""Groups parameters and layers by name, and sums values by group on the device.

However deep a model is, there are at most ``MOST_GROUPS`` groups: what is measured at a step, what a row holds and what
a reader opens stay small.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice, pairwise
from types import MappingProxyType

import torch
from torch import Tensor, nn

MOST_GROUPS = 256
"""Groups that a model is measured in at most. Where it has more, neighbours become one: ``layers.0-39``."""
MOST_EMBEDDINGS = 2
"""Embeddings whose output is measured at every step: those of tokens and positions, and not the tables of a
recommender."""
MOST_LETTERS = 120
"""Letters of a group's name at most; a longer one loses its middle."""
MOST_CELLS = 2**22
"""Cells of one table of ``Sums`` at most: 32 MiB."""

_WRAPPERS = re.compile(r"^(module(\.|$))+|\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(\.|$)")


def plain_name(name: str) -> str:
    """The name without what DDP, torch.compile, FSDP and activation checkpointing put into it.

    >>> plain_name("module._orig_mod.blocks.0._checkpoint_wrapped_module.mlp.up.weight")
    'blocks.0.mlp.up.weight'
    """
    while (plain := _WRAPPERS.sub("", name)) != name:
        name = plain
    return name.removesuffix(".")


def group_of(parameter_name: str) -> str:
    """The name up to and including its first number; without a number, its first word.

    >>> group_of("transformer.h.11.mlp.c_fc.weight"), group_of("embedding.weight")
    ('transformer.h.11', 'embedding')
    """
    words = plain_name(parameter_name).split(".")
    numbers = (place for place, word in enumerate(words) if word.isdecimal())
    return shortened(".".join(words[: next(numbers, 0) + 1]))


def shortened(name: str) -> str:
    """The name, or both its ends: a model may be nested a hundred deep."""
    end = (MOST_LETTERS - 3) // 2
    return name if len(name) <= MOST_LETTERS else f"{name[:end]}...{name[-end:]}"


def find_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The members of the outermost numbered containers, by name; in a model without any, its children."""
    layers = dict(_numbered(model, ""))
    prefix = ""
    while not layers:
        layers = {prefix + name: child for name, child in model.named_children()}
        if list(map(plain_name, layers)) != [""]:
            break
        ((name, model),) = layers.items()  # a wrapper
        layers, prefix = {}, f"{name}."
    return layers


def embedding_tables(model: nn.Module) -> frozenset[str]:
    """The names of the parameters that are tables of embeddings, as rows name them."""
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    return frozenset(plain_name(name) for name, parameter in model.named_parameters() if parameter in tables)


def find_embeddings(model: nn.Module) -> dict[str, nn.Module]:
    """The first ``MOST_EMBEDDINGS`` tables of embeddings that are in no layer, by name; one in two places once."""
    inside = tuple(f"{name}." for name in find_layers(model))
    tables = (
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and not name.startswith(inside)
    )
    return dict(islice(tables, MOST_EMBEDDINGS))


def _numbered(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    children = dict(module.named_children())
    is_container = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
    if is_container and len(children) >= 2 and all(name.isdecimal() for name in children):
        yield from ((prefix + name, child) for name, child in children.items())
    else:
        for name, child in children.items():
            yield from _numbered(child, f"{prefix}{name}.")


def merged_groups(model: nn.Module) -> dict[str, str]:
    """For each group and layer of a model the range that it is measured in; empty where there are few.

    The ranges depend on the names in the model alone, in their order: whatever is frozen or has no gradient at a step,
    ``layers.0-39`` means the same in every signal of every row.
    """
    layers = find_layers(model)
    names: dict[str, None] = {}
    for name, module in model.named_modules():
        if name in layers:
            names[shortened(plain_name(name))] = None
        owned = (f"{name}.{own}" for own, parameter in module._parameters.items() if parameter is not None)
        names.update((group_of(parameter.removeprefix(".")), None) for parameter in owned)
    names.update((shortened(plain_name(name)), None) for name in layers)  # a module may be in two lists
    return _ranges(tuple(names))


def _ranges(names: Sequence[str]) -> dict[str, str]:
    """Ranges of neighbours, all about equally long: within a list of layers if that is enough, else within a module,
    else from one end of the model to the other."""
    if len(names) <= MOST_GROUPS:
        return {}
    families: tuple[Callable[[str], object], ...] = (_family, lambda name: name.rpartition(".")[0], lambda _: None)
    runs = next(runs for family in families if len(runs := _runs(names, family)) <= MOST_GROUPS // 2)
    longest = math.ceil(len(names) / (MOST_GROUPS - len(runs)))
    parts = (run[first : first + longest] for run in runs for first in range(0, len(run), longest))
    return {name: _range_name(part) for part in parts for name in part}


def _runs(names: Sequence[str], family: Callable[[str], object]) -> list[list[str]]:
    return [list(run) for _, run in groupby(names, family)]


def _family(name: str) -> tuple[str, bool]:
    """The list that a layer belongs to; anything else is a family of its own."""
    parent, _, last = name.rpartition(".")
    return (parent, True) if last.isdecimal() else (name, False)


def _range_name(names: Sequence[str]) -> str:
    """The first and the last name.

    >>> _range_name(["layers.0", "layers.1", "layers.2"]), _range_name(["a.9", "b.0"]), _range_name(["head"])
    ('layers.0-2', 'a.9-b.0', 'head')
    """
    first, last = names[0], names[-1]
    if first == last:
        return first
    parent = first.rpartition(".")[0]
    return f"{first}-{last.removeprefix(f'{parent}.') if parent else last}"


class Sums:
    """Sums of chosen entries of a vector, the same bits every time.

    It gathers into a rectangle and sums. ``index_add_`` would add in the order in which CUDA's threads arrive, and a
    product with a matrix of zeros and ones would carry a NaN into every sum. Where one rectangle would be too large,
    since a few sums have many more entries than the others, there is one for every power of two of entries.
    """

    def __init__(self, members: Iterable[Sequence[int]]) -> None:
        self._members = tuple(members)
        self._tables: dict[torch.device, tuple[list[tuple[Tensor, Tensor]], Tensor | None]] = {}

    def __call__(self, values: Tensor) -> Tensor:
        """Sums over the last dimension: (..., entries) in, (..., sums) out. Sends its tables to a device once."""
        rectangles, order = self._tables.get(values.device) or self._send(values.device)
        sums = [values[..., index].masked_fill(absent, 0.0).sum(-1) for index, absent in rectangles]
        return sums[0] if order is None else torch.cat(sums, -1)[..., order]

    def _send(self, device: torch.device) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None]:
        longest = max(map(len, self._members), default=0)
        sizes = {place: len(places).bit_length() for place, places in enumerate(self._members)}
        if len(self._members) * longest <= MOST_CELLS:
            sizes = dict.fromkeys(sizes, 0)
        by_size = sorted(sizes, key=lambda place: sizes[place])
        starts = [0, *(at for at, (a, b) in enumerate(pairwise(by_size), 1) if sizes[a] != sizes[b]), len(by_size)]
        rectangles = [self._rectangle(by_size[first:end], device) for first, end in pairwise(starts)]
        order = None
        if len(rectangles) > 1:
            order = sent(torch.tensor(by_size).argsort(), device)
        self._tables[device] = rectangles, order
        return self._tables[device]

    def _rectangle(self, sums: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        longest = max((len(self._members[place]) for place in sums), default=0)
        index = torch.full((len(sums), longest), -1, dtype=torch.long)
        for row, place in enumerate(sums):
            index[row, : len(self._members[place])] = torch.tensor(self._members[place], dtype=torch.long)
        return sent(index.clamp(min=0), device), sent(index < 0, device)


class Groups:
    """Which entry of a vector belongs to which group of parameters; groups are in the order of first appearance."""

    def __init__(
        self,
        parameter_names: Iterable[str],
        merged: Mapping[str, str] = MappingProxyType({}),
        first: Iterable[str] = (),
    ) -> None:
        """``merged`` are the ``merged_groups`` of the model that has these parameters. The groups that come ``first``
        are there whether or not they have any."""
        members: dict[str, list[int]] = {name: [] for name in first}
        for place, name in enumerate(parameter_names):
            group = group_of(name)
            members.setdefault(merged.get(group, group), []).append(place)
        self.names = tuple(members)
        self.members = tuple(members.values())
        self.sum_by_group = Sums(self.members)
        """(..., parameters) in, (..., groups) out."""


def sent(table: Tensor, device: torch.device) -> Tensor:
    """A copy on the device; on CUDA the host does not wait for it."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)
