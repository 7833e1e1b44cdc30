"""Sampled forward passes in, the largest logit of each head of attention out, and where that head's weights are.

What is multiplied is seen where it is multiplied: in ``scaled_dot_product_attention``, with rotary positions, norms and
masks in it, whoever calls it. Of torch's own ``MultiheadAttention``, whose product has neither, it is computed again.

Whether a matrix makes the queries that were multiplied, and which of its rows belong to which head, is not believed but
compared: a rotation keeps the length of each query, and a norm does not. What does not fit is refused.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from sealegs.errors import ConfigError
from sealegs.signals.activations import (
    BATCH_ROWS,
    FirstRuns,
    QueryKey,
    additive,
    largest_logits,
    outside_compiled,
    read_multihead,
)
from sealegs.signals.collect import waited_for
from sealegs.signals.groups import group_of, plain_name
from sealegs.signals.routers import said
from sealegs.signals.time_spent import TimeSpent

APART = (("q_proj", "k_proj"), ("query", "key"), ("to_q", "to_k"), ("wq", "wk"), ("q_lin", "k_lin"), ("q", "k"))
"""Names of the two matrices that make queries and keys."""
PACKED = ("query_key_value", "qkv_proj", "c_attn", "qkv", "to_qkv", "Wqkv", "wqkv", "qkv_linear")
"""Names of one that makes values, too."""
HEADS = ("heads", "num_heads", "num_attention_heads", "n_heads", "n_head", "nhead")
NORMS = ("q", "k", "query", "key", "qk")
"""First or last word of a norm's name, by which it is known to be one of queries or keys."""
QUERIES = 128
"""Queries of each row that are looked at."""
ALIKE, FEWEST = 0.03, 16
"""How far lengths may be from proportional, as bf16 rounds them, and how many have to be."""
BLIND = 3
"""Sampled steps without a forward pass of any attention after which it is given up."""

Layout: TypeAlias = Literal["apart", "blocks", "by head"]
"""Two matrices; one with all queries, all keys, all values; one with query, key and value of each head in turn."""


@dataclass(slots=True, eq=False, kw_only=True)
class AttentionHeads:
    """The heads of one module of attention, and the matrices that make their queries and keys."""

    name: str
    module: nn.Module
    heads: int
    makers: tuple[nn.Module, ...]
    """Of queries and of keys; one that makes both; torch's own module itself."""
    layout: Layout | None = None
    """None until it is known."""
    width: int = 0
    """Of a head's queries."""
    key_heads: int = 0
    """Fewer than heads where several share a key."""

    @property
    def layer(self) -> str:
        """The group that rows have it under."""
        return group_of(self.name)

    @property
    def is_grouped(self) -> bool:
        """Whether heads share their keys."""
        return self.key_heads < self.heads

    def scaled(self, of_queries: Tensor, of_keys: Tensor) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Weights and biases, each with a factor for every row, and the dimension that its rows are in. ``of_queries``
        has one for each head, ``of_keys`` one for each head that has keys of its own."""
        queries = of_queries.repeat_interleave(self.width)
        keys = of_keys.repeat_interleave(self.width)
        if isinstance(self.module, nn.MultiheadAttention):
            packed = torch.cat((queries, keys, torch.ones_like(queries)))
            whole: Tensor | None = self.module.in_proj_weight
            if whole is not None:
                yield whole, packed, 0
            else:
                yield self.module.q_proj_weight, queries, 0
                yield self.module.k_proj_weight, keys, 0
            if self.module.in_proj_bias is not None:
                yield self.module.in_proj_bias, packed, 0
        elif self.layout == "apart":
            shares = (queries,) if self.is_grouped else (queries, keys)
            for maker, rows in zip(self.makers, shares, strict=False):
                yield from _with_bias(maker, rows)
        else:
            rest = _rows_of(self.makers[0]) - len(queries) - len(keys)
            if self.layout == "blocks":
                rows = torch.cat((queries, keys, queries.new_ones(rest)))
            else:
                of_head = (queries.view(self.heads, -1), keys.view(self.heads, -1))
                rows = torch.cat((*of_head, torch.ones_like(of_head[0])), dim=1).flatten()
            yield from _with_bias(self.makers[0], rows)


def _with_bias(maker: nn.Module, rows: Tensor) -> Iterator[tuple[Tensor, Tensor, int]]:
    yield maker.weight, rows, _row_dim(maker)  # type: ignore[misc]
    if isinstance(bias := maker.bias, Tensor):
        yield bias, rows, 0


def _row_dim(maker: nn.Module) -> int:
    return 1 if type(maker).__name__ == "Conv1D" else 0  # as GPT-2 of transformers has it


def _rows_of(maker: nn.Module) -> int:
    weight: Any = maker.weight
    return int(weight.shape[_row_dim(maker)])


class HeadLogits:
    """Looks at the logits of all heads in the forward passes from ``arm`` to ``disarm``.

    Of each pass it takes up to 4 rows of the batch and 128 queries in each; the largest of all may be larger.
    Everything else is as with ``ActivationSampler``: evaluations and second runs of checkpointed layers do not count,
    and in compiled code there is nothing to see.
    """

    def __init__(self, model: nn.Module, *, force_eager: bool = False) -> None:
        """Raises a ConfigError where some attention of the model is not understood."""
        self.attentions = attentions_of(model)
        self.refused = ""
        """Why nothing can be done about the logits, once a forward pass has shown that."""
        self.arrived: dict[int, list[float]] = {}
        """What ``collect`` gave, as it has come to the host, by step. Who needs it takes it out."""
        self.spent = TimeSpent()
        self._model = model
        self._force_eager = force_eager
        self._handles: list[RemovableHandle] = []
        self._runs = FirstRuns()
        self._looking: dict[nn.Module, _Products] = {}
        self._largest: dict[str, Tensor] = {}
        self._doubts: dict[str, dict[Layout, _Doubt]] = {}
        self._blind = 0
        """Times in a row that nothing was seen."""
        self._has_seen = False

    @property
    def size(self) -> int:
        """How many heads there are."""
        return sum(each.heads for each in self.attentions)

    def arm(self) -> None:
        """Look at the forward passes from here on."""
        self.disarm()
        self._runs, self._largest, self._doubts = FirstRuns(), {}, {}
        modules = [(each.name, each.module) for each in self.attentions]
        by_module = {each.module: each for each in self.attentions}
        seen = iter(modules) if self._force_eager else outside_compiled(self._model, modules, self._runs.left_out)
        for _, module in seen:
            each = by_module[module]
            if isinstance(module, nn.MultiheadAttention):
                self._handles.append(module.register_forward_pre_hook(self._multihead_hook(each), with_kwargs=True))
                continue
            self._handles.append(module.register_forward_pre_hook(self._begin(each)))
            self._handles += [maker.register_forward_hook(self._made(each)) for maker in each.makers]
            self._handles.append(module.register_forward_hook(self._end(each), always_call=True))

    def disarm(self) -> None:
        """Remove the hooks. What they have seen stays until it is taken."""
        while self._handles:
            self._handles.pop().remove()

    @torch.no_grad()
    def collect(self) -> Tensor | None:
        """The largest logit of each head since ``arm``, -inf of one that was not seen; None where none was."""
        largest, self._largest = self._largest, {}
        self._runs.end_step()
        if not self._settle() or not largest:
            self._blind += 1
            if self._blind == BLIND and not self.refused and not self._has_seen:
                reasons = sorted(set(self._runs.left_out.values())) or ["as in compiled code"]
                self.refused = f"no forward pass of its attention was seen ({'; '.join(reasons)})"
            return None
        self._blind, self._has_seen = 0, True
        home = next(iter(largest.values())).device
        unseen = torch.full((), -math.inf, device=home)
        return torch.cat([largest.get(each.name, unseen.expand(each.heads)).to(home) for each in self.attentions])

    def by_module(self, numbers: Sequence[float]) -> Iterator[tuple[AttentionHeads, list[float]]]:
        """What ``collect`` gave, module by module."""
        left = iter(numbers)
        for each in self.attentions:
            yield each, list(islice(left, each.heads))

    def named(self, step: int, numbers: Sequence[float]) -> dict[str, float]:
        """The same as signals: the largest of each layer that was seen."""
        self.arrived[step] = list(numbers)
        found: dict[str, float] = {}
        for each, of_heads in self.by_module(numbers):
            if (largest := max(of_heads)) > -math.inf:
                name = f"attention_logit_max/{each.layer}"
                found[name] = max(largest, found.get(name, largest))
        return found

    def _counts(self, module: nn.Module, each: AttentionHeads) -> bool:
        is_seen = not torch.compiler.is_compiling() and self._runs.counts(module, each.name)
        return is_seen and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())

    def _multihead_hook(self, each: AttentionHeads) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._counts(module, each):
                with self.spent.of("signals"), torch.no_grad():
                    assert isinstance(module, nn.MultiheadAttention)
                    seen = read_multihead(module, args, kwargs)
                    self._keep(each, seen._replace(mask=None if seen.mask is None else _hidden(seen.mask)))

        return hook

    def _begin(self, each: AttentionHeads) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            if self._counts(module, each):
                self._looking[module] = _Products()
                self._looking[module].begin()

        return hook

    def _made(self, each: AttentionHeads) -> Callable[[nn.Module, Any, Any], None]:
        def hook(maker: nn.Module, args: Any, output: Any) -> None:
            if (looking := self._looking.get(each.module)) is not None and each.layout is None:
                looking.made[maker] = output.detach()

        return hook

    def _end(self, each: AttentionHeads) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            looking = self._looking.pop(module, None)
            if looking is None:
                return
            looking.end()
            with self.spent.of("signals"), torch.no_grad():
                why = self._take(each, looking)
            if why and output is not None:  # else the forward pass itself has failed
                self.refused = self.refused or f"{each.name}: {why}"

        return hook

    def _take(self, each: AttentionHeads, looking: "_Products") -> str:
        """Keep what was multiplied; why it cannot be used, where that is so."""
        if len(looking.seen) != 1:
            return f"it calls scaled_dot_product_attention {len(looking.seen)} times, and not once"
        query, key, mask, *_ = product = looking.seen[0]
        if query.ndim != 4 or query.shape[1] != each.heads:
            return (
                f"it multiplies queries of shape {tuple(query.shape)}, not (rows, {each.heads} heads, queries, width)"
            )
        some = slice(None, None, math.ceil(len(query) / BATCH_ROWS))
        if each.layout is None and each.name not in self._doubts:
            found = {layout: doubt for layout in _layouts(each) if (doubt := _compared(each, layout, looking, some))}
            if not found:
                return "its queries and keys are not of the shapes that its matrices make"
            self._doubts[each.name] = found
        if mask is not None:
            mask = _hidden(mask[some] if mask.ndim == 4 and len(mask) == len(query) else mask)
        key = key[some].repeat_interleave(each.heads // key.shape[1], dim=1)
        self._keep(each, product._replace(query=query[some], key=key, mask=mask))
        return ""

    def _keep(self, each: AttentionHeads, seen: QueryKey) -> None:
        largest, before = largest_logits(seen, QUERIES), self._largest.get(each.name)
        self._largest[each.name] = largest if before is None else torch.maximum(largest, before)

    def _settle(self) -> bool:
        """Learn how the modules that were seen for the first time are laid out. The host waits for that, once."""
        doubts, self._doubts = self._doubts, {}
        if doubts:
            told = iter(waited_for(torch.stack([d.fits.float() for each in doubts.values() for d in each.values()])))
            for each in self.attentions:
                found = doubts.get(each.name, {})
                fitting = [layout for layout in found if next(told) > 0]
                if found and not fitting:
                    why = "what it multiplies is not what its matrices make, but for a rotation: is there a norm?"
                    self.refused = self.refused or f"{each.name}: {why}"
                elif fitting:
                    each.layout = fitting[0]
                    _, each.width, each.key_heads = found[fitting[0]]
        return not self.refused


class _Products(TorchFunctionMode):
    """Notes what is multiplied while it is on, and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[QueryKey] = []
        self.made: dict[nn.Module, Tensor] = {}
        """What the matrices gave."""

    def begin(self) -> None:
        """Be on."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Be off."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.seen.append(_product(*args, **kwargs))
        return func(*args, **kwargs)


def _product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> QueryKey:
    return QueryKey(query.detach(), key.detach(), attn_mask, is_causal, scale)


def _hidden(mask: Tensor) -> Tensor:
    """A mask that only hides: what others add to logits does not grow with the weights."""
    if mask.dtype == torch.bool:  # of scaled_dot_product_attention, where True is seen
        return additive(~mask)
    return additive(mask <= torch.finfo(mask.dtype).min / 2)


class _Doubt(NamedTuple):
    """A layout that a module may have."""

    fits: Tensor
    """Whether it has it, on its device."""
    width: int
    key_heads: int


def _layouts(each: AttentionHeads) -> tuple[Layout, ...]:
    return ("apart",) if len(each.makers) == 2 else ("blocks", "by head")


def _compared(each: AttentionHeads, layout: Layout, looking: _Products, some: slice) -> _Doubt | None:
    """Whether what a module multiplies has the lengths of what its matrices make, if these are laid out like that."""
    query, key, *_ = looking.seen[0]
    rows, heads, length, width = query.shape
    made = [looking.made[maker] for maker in each.makers if maker in looking.made]
    if len(made) != len(each.makers) or heads * width * rows * length > made[0].numel():
        return None
    if layout == "apart":
        queries, keys = (part.reshape(rows, -1, part.shape[-1])[some].unflatten(-1, (-1, width)) for part in made)
    else:
        parts = made[0].reshape(rows, -1, made[0].shape[-1])[some].unflatten(-1, (-1, width))
        shared = (parts.shape[-2] - heads) // 2
        if layout == "blocks":
            queries, keys = parts[..., :heads, :], parts[..., heads : heads + shared, :]
        elif shared == heads:
            queries, keys = parts[..., 0::3, :], parts[..., 1::3, :]
        else:
            return None
    key_heads = keys.shape[-2]
    if queries.shape[-2] != heads or heads % max(key_heads, 1) or key.shape[1] not in (heads, key_heads):
        return None
    multiplied = key[some][:, :: key.shape[1] // key_heads]
    pairs = (query[some], queries.transpose(1, 2)), (multiplied, keys.transpose(1, 2))
    if any(a.shape != b.shape or a.shape[:-1].numel() < FEWEST for a, b in pairs):
        return None
    return _Doubt(torch.stack([_are_rotated(*pair) for pair in pairs]).all(), width, key_heads)


def _are_rotated(multiplied: Tensor, made: Tensor) -> Tensor:
    """Whether two sets of vectors have the same lengths, but for one factor for all of them."""
    a, b = multiplied.float().norm(dim=-1), made.float().norm(dim=-1)
    usual = (a * b).sum() / a.square().sum()
    is_alike: Tensor = (a * usual - b).abs() <= ALIKE * b
    return is_alike.all()


# What a model has.


def attentions_of(model: nn.Module) -> list[AttentionHeads]:
    """The modules of attention that are trained. Raises a ConfigError where one is not understood, or none is found."""
    found = [each for name, module in model.named_modules() if (each := _attention(plain_name(name), module))]
    if not found:
        raise ConfigError(
            "the model has no trained attention that is understood: nn.MultiheadAttention, or a module with plain "
            "linear maps named q_proj and k_proj, query_key_value or the like, which says its num_heads"
        )
    return found


def _attention(name: str, module: nn.Module) -> AttentionHeads | None:
    """A module as attention; None where it is none, or is frozen."""
    makers: tuple[nn.Module, ...]
    known: dict[str, Any] = {}
    if isinstance(module, nn.MultiheadAttention):
        weights = [w for w in (module.in_proj_weight, module.q_proj_weight, module.k_proj_weight) if w is not None]
        if "bias_k" in dict(module.named_parameters(recurse=False)):
            raise ConfigError(f"{name}: it has a key that no matrix makes (add_bias_kv)")
        heads, makers = module.num_heads, (module,)
        known = {"layout": "blocks", "width": module.embed_dim // heads, "key_heads": heads}
    else:
        makers = _makers(module)
        if not makers:
            return None
        heads = said(HEADS, module)
        weights = [weight for maker in makers if (weight := maker._parameters.get("weight")) is not None]
        if not heads:
            raise ConfigError(f"{name}: it does not say how many heads it has ({', '.join(HEADS[:3])})")
        if len({id(weight) for weight in weights}) < len(makers):
            raise ConfigError(f"{name}: its queries and keys have one matrix, or one that is computed")
    if not any(weight.requires_grad for weight in weights):
        return None
    if not all(weight.requires_grad and weight.is_floating_point() for weight in weights):
        raise ConfigError(f"{name}: not all of what makes its queries and keys is trained")
    if norm := _norm_in(module):
        raise ConfigError(f"{name}: it normalises queries and keys ({norm}), which bounds its logits already")
    return AttentionHeads(name=name, module=module, heads=heads, makers=makers, **known)


def _makers(module: nn.Module) -> tuple[nn.Module, ...]:
    """The matrices that make queries and keys, if a module has some by their names."""
    children = {name: child for name, child in module.named_children() if _is_matrix(child)}
    for pair in APART:
        if all(name in children for name in pair):
            return tuple(children[name] for name in pair)
    return next(((children[name],) for name in PACKED if name in children), ())


def _is_matrix(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _norm_in(module: nn.Module) -> str:
    """The name of a norm of queries or keys in a module of attention; empty without one."""
    for name, each in module.named_modules():
        words = name.rpartition(".")[2].lower().split("_")
        if "norm" in type(each).__name__.lower() and (words[0] in NORMS or words[-1] in NORMS):
            return str(name)
    return ""
