"""Two checkpoints in, or the files of two ranks of one, where their tensors differ out, and by how much.

Whatever ``sealegs audit`` reads is read here, and bare safetensors and folders of ``torch.distributed.checkpoint``.
Nothing is unpickled that could run code.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sealegs.errors import SourceError
from sealegs.record.checkpoint_tags import DIGESTS
from sealegs.record.reading import most_bytes, spell_size, too_large
from sealegs.state import checkpoint_files
from sealegs.state.checkpoint_audit import load_file, load_safetensors
from sealegs.state.checkpoint_table import TABLE
from sealegs.state.memory import CPU, free_bytes

COPIES = re.compile(
    r"norm|(?:^|[._/])ln_?\w{0,6}[._/]|router|(?:^|[._/])gate[._/]|position_embed|pos_emb|wpe"
    r"|(?:dense|dense_4h_to_h|o_proj|out_proj|c_proj|down_proj|linear_proj|linear_fc2|wo)[._/]bias$",
    re.IGNORECASE,
)
"""Names of tensors that every tensor-parallel rank has a copy of. Whatever else is alike by chance is not judged."""
_RANK = re.compile(r"rank[_-]?\d+|(?:^|[._-])(?:tp|mp)[_-]?\d+", re.IGNORECASE)
LONGEST_NAME = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """How one tensor differs."""

    name: str
    what: str
    """``values``, ``shape`` or ``dtype``; of the last alone the values are the same."""
    sizes: tuple[str, str]
    largest: float | None = None
    """The largest difference of two numbers; NaN where one of them is not finite. None where shapes differ."""
    at: tuple[int, ...] = ()
    """Where that is."""
    values: tuple[float, float] | None = None
    share: float | None = None
    """The share of the numbers that differ."""
    relative: float | None = None
    """The norm of the difference over the norm of the first."""
    rows: tuple[int, int] | None = None
    """First and last row that differ, where less than half of the rows do."""
    is_rounding: bool = False
    """Whether both are the same when they are rounded to bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two sets of tensors, compared."""

    shared: int
    equal: int
    differing: tuple[TensorDifference, ...]
    """In the order of the first checkpoint: that of the model, as far as its format keeps it."""
    only_in: tuple[tuple[str, ...], tuple[str, ...]]
    unjudged: int = 0
    """Tensors of ranks that each have their own part of."""

    @property
    def is_alike(self) -> bool:
        """Whether nothing that had to be equal differs."""
        return not self.differing and not any(self.only_in)


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint but the random state, by its name."""
    if path.is_file():
        return _ordered(load_safetensors(path)) if path.suffix == ".safetensors" else dict(_named(load_file(path), ""))
    if (path / TABLE).exists():
        return _distributed(path)
    found: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= load_safetensors(file, path)
    found = _ordered(found)
    for file in sorted(path.glob("pytorch_model*.bin")):
        found |= dict(_named(load_file(file, path), ""))
    for file in sorted([*path.glob("optimizer.pt"), *path.glob("model*.pt"), *path.glob("mp_rank*.pt")]):
        found |= {f"{file.stem}/{name}": each for name, each in _named(load_file(file, path), "")}
    if not found:
        raise SourceError(
            f"{path}: no checkpoint that can be compared; give a folder of checkpoints/, of "
            "torch.distributed.checkpoint or of Hugging Face, a .safetensors or a .pt file"
        )
    return found


def are_ranks(a: Path, b: Path) -> bool:
    """Whether two files are of two ranks of one checkpoint: side by side, named alike but for the number.

    >>> are_ranks(Path("it/mp_rank_00/model.pt"), Path("it/mp_rank_01/model.pt"))
    True
    >>> are_ranks(Path("checkpoints/100"), Path("checkpoints/200"))
    False
    >>> are_ranks(Path("model-00001-of-00002.safetensors"), Path("model-00002-of-00002.safetensors"))
    False
    """
    apart = [(one, other) for one, other in zip(a.parts, b.parts, strict=False) if one != other]
    if len(a.parts) != len(b.parts) or len(apart) != 1:
        return False
    one, other = apart[0]
    return _RANK.search(one) is not None and _RANK.sub("#", one) == _RANK.sub("#", other)


def compared(a: Mapping[str, Tensor], b: Mapping[str, Tensor], *, ranks: bool = False) -> Comparison:
    """Compare two sets of tensors. Of two ``ranks`` only what each has a copy of must be equal."""
    shared = [name for name in a if name in b]
    judged = [name for name in shared if not ranks or (COPIES.search(name) and a[name].shape == b[name].shape)]
    differing = [found for name in judged if (found := _difference(name, a[name], b[name])) is not None]
    return Comparison(
        shared=len(shared),
        equal=len(judged) - len(differing),
        differing=tuple(differing),
        only_in=(tuple(name for name in a if name not in b), tuple(name for name in b if name not in a)),
        unjudged=len(shared) - len(judged),
    )


def _difference(name: str, a: Tensor, b: Tensor) -> TensorDifference | None:
    sizes = _size(a), _size(b)
    if a.shape != b.shape:
        return TensorDifference(name=name, what="shape", sizes=sizes)
    one, other = _plain(a), _plain(b)
    differs = ~((one == other) | (one.isnan() & other.isnan()))
    count = int(differs.sum())
    if not count:
        return None if a.dtype == b.dtype else TensorDifference(name=name, what="dtype", sizes=sizes, share=0.0)
    apart = torch.where(differs, (one - other).abs(), 0.0)
    place = int(apart.nan_to_num(nan=torch.inf).argmax())
    norm = float(one.norm())
    rows = differs.reshape(differs.shape[0], -1).any(1).nonzero().flatten() if differs.ndim > 1 else None
    few = rows is not None and 2 * len(rows) < differs.shape[0]
    return TensorDifference(
        name=name,
        what="values",
        sizes=sizes,
        largest=float(apart.flatten()[place]),
        at=tuple(int(each) for each in torch.unravel_index(torch.tensor(place), one.shape)) if one.ndim else (),
        values=(float(one.flatten()[place]), float(other.flatten()[place])),
        share=count / max(one.numel(), 1),
        relative=float((one - other).norm()) / norm if norm else None,
        rows=(int(rows[0]), int(rows[-1])) if few and rows is not None else None,
        is_rounding=bool((one.bfloat16() == other.bfloat16()).all()),
    )


def _plain(tensor: Tensor) -> Tensor:
    """The numbers as a type in which any two can be compared."""
    return tensor.detach().to(torch.float64 if tensor.dtype in (torch.float64, torch.int64) else torch.float32)


def _size(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _named(value: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of nested tables and lists, by their dotted names; the random state is none of the model's."""
    pending: list[tuple[str, Any]] = [(prefix, value)]
    seen: set[int] = set()
    while pending:
        name, each = pending.pop()
        if isinstance(each, Tensor):
            if "rng" not in name.lower():
                yield name[:LONGEST_NAME], each
        elif isinstance(each, Mapping | list | tuple) and id(each) not in seen:  # a pickle can hold itself
            seen.add(id(each))
            inner = each.items() if isinstance(each, Mapping) else enumerate(each)
            pending += [(f"{name}.{key}" if name else str(key), part) for key, part in reversed(list(inner))]


def _distributed(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder of ``torch.distributed.checkpoint``, ours or another's."""
    if (folder / DIGESTS).exists() and (fault := checkpoint_files.fault_in(folder)) is not None:
        raise SourceError(f"{folder}: damaged ({fault}); use another checkpoint")
    checkpoint_files.expect_to_be_alone()
    entries = {name: each for name, each in checkpoint_files.tensors_in(folder).items() if not name.startswith("rng/")}
    size = sum(each.size.numel() * each.properties.dtype.itemsize for each in entries.values())
    if size > min(free_bytes(CPU), max(most_bytes(), 0) * 64):
        raise too_large(folder, spell_size(size))
    rooms = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in entries.items()}
    checkpoint_files.read_tensors(folder, rooms, None)
    return _ordered(rooms)


def _ordered(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a format that keeps no order, about as a model has them: embeddings, layers by number, the head."""

    def place(name: str) -> tuple[int, list[tuple[int, str]]]:
        part = 3 if "optim" in name else 0 if re.search("embed|wte|wpe", name) else 1 if re.search(r"\d", name) else 2
        return part, [(int(word), "") if word.isdecimal() else (-1, word) for word in re.split(r"(\d{1,9})", name)]

    return {name: found[name] for name in sorted(found, key=place)}
