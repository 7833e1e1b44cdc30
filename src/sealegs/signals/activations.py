"""Samples activations, attention logits, underflow and token losses on some steps, as small device tensors."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sealegs.signals.groups import find_layers, group_of, merged_groups, plain_name, shortened
from sealegs.signals.layout import local
from sealegs.signals.time_spent import TimeSpent
from sealegs.signals.weights import MOST_SAMPLED, flat, spacing


class QueryKey(NamedTuple):
    """What an attention module multiplies: its logits are query times key, over sqrt(width), plus the mask."""

    query: Tensor
    """(rows, heads, queries, width), with positions and norms in it. A few rows of the batch are enough."""
    key: Tensor
    """(rows, heads, keys, width)."""
    mask: Tensor | None = None
    """-inf where a query does not see a key, else what is added; broadcasts to (rows, heads, queries, keys)."""
    causal: bool = False
    """Whether a query sees no later key."""
    scale: float | None = None
    """What stands in the place of 1 over sqrt(width), where something else does."""


Reader: TypeAlias = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], QueryKey]
"""Gives what an attention module multiplies, from the module and the arguments of a call."""


class FirstRuns:
    """Tells the runs of modules that a sampler counts: those of the forward pass of a step, each once."""

    def __init__(self) -> None:
        self.left_out: dict[str, str] = {}
        """Modules that were not counted, and why."""
        self._run_forward: set[nn.Module] = set()

    def counts(self, module: nn.Module, layer: str) -> bool:
        """Whether to sample this run of a module.

        A checkpointed module runs twice: reentrant, first without gradients and then inside backward; not reentrant,
        first with gradients and then inside backward once more.
        """
        if not torch.is_grad_enabled():
            return False
        if torch._C._len_torch_dispatch_stack():
            self.left_out[layer] = "under a dispatch mode (selective checkpointing, for one)"
            return False
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self.left_out[layer] = "inside a function transform (vmap, grad)"  # its tensors must not leave it
            return False
        if torch._C._current_graph_task_id() >= 0:  # inside backward
            return module not in self._run_forward
        self._run_forward.add(module)
        return True

    def end_step(self) -> None:
        """Begin with the next step."""
        self._run_forward = set()


def outside_compiled(
    model: nn.Module, modules: Iterable[tuple[str, nn.Module]], left_out: dict[str, str]
) -> Iterator[tuple[str, nn.Module]]:
    """The modules, by their names in the model, on which a hook runs; the others are ``left_out``."""
    has_compiled = any(module._compiled_call_impl is not None for module in model.modules())
    for name, module in modules:
        if _is_inside_compiled(model, name, has_compiled=has_compiled):
            left_out[plain_name(name)] = "compiled: only force_eager could look inside"
        else:
            yield name, module


class ActivationSampler:
    """Sizes of activations, layer by layer, on the steps that ask for them; other steps pay nothing.

    - ``activation_norm/<layer>``: the L2 norm of a token's vector in the layer's output, as root mean square over
      tokens: sqrt(sum of squares / number of vectors), over all micro-batches of the step. The vector is the last
      dimension; in outputs of four or five dimensions (images, videos) the second. Accumulated in float32, which on
      the CPU is good to three digits.
    - ``attention_logit_max/<layer>``, only for types of module that ``attention`` has a reader for (``MULTIHEAD``:
      torch's own): the largest logit of up to 16 evenly spaced queries of each row that the reader gives. Logits live
      inside fused kernels, so queries and keys are computed a second time.

    Layers are the members of the outermost numbered containers (``blocks.0``, ``transformer.h.11``); in a model without
    any, its children. Neighbours among too many layers are measured as one (``groups.merged_groups``). Hooks exist from
    ``arm`` to ``disarm`` only. They pass over evaluations (gradients off) and over the second run of checkpointed
    layers, change nothing and keep no activation. Inside selective checkpointing, or under any other dispatch mode,
    they do nothing, since the mode could record their operation. Nor do they inside ``torch.func`` (gradients of single
    rows), whose tensors must not leave it.

    **torch.compile** (seen with 2.13). Code compiled without hooks ignores hooks that come later: nothing is compiled
    again, nothing is sampled. Code compiled with hooks is compiled once more when they have gone. So layers inside
    compiled modules get none (``left_out`` names them), and hooks do nothing while they are traced. A compiled
    *function* cannot be recognised from here: arm from the second step on, and it costs nothing. Blocks that were each
    replaced by ``torch.compile(block)`` are sampled from outside. ``force_eager`` samples all: armed steps then run
    without compiled code. Nothing is compiled again, but such a step is slow and may need more memory.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        attention: Mapping[type[nn.Module], Reader] | None = None,
        force_eager: bool = False,
        layers: Callable[[nn.Module], dict[str, nn.Module]] = find_layers,
    ) -> None:
        """``layers`` says of which modules the output is measured."""
        self._model = model
        self._layers = layers
        self._readers = dict(attention or {})
        self.force_eager = force_eager
        """Whether sampled steps run without compiled code."""
        self._stance: Any = None
        self._handles: list[RemovableHandle] = []
        self._norms: dict[str, list[Tensor]] = {}
        self._vectors: dict[str, int] = {}
        self._logits: dict[str, list[Tensor]] = {}
        self._runs = FirstRuns()
        self._merged: dict[str, str] = {}
        self._merged_of: tuple[str, ...] = ()
        """The layers of which ``_merged`` was made."""
        self.autocast: tuple[torch.dtype | None] | None = None
        """The dtype of autocast in a forward pass that was seen, or None without it; nothing before there was one."""
        self.spent = TimeSpent()
        """Counts the time that hooks take; a guard puts that of its run here."""

    @property
    def left_out(self) -> dict[str, str]:
        """Modules that were not sampled since the last ``arm``, and why."""
        return self._runs.left_out

    @property
    def names(self) -> list[str]:
        """All names that ``take`` may ever give, norms first."""
        merged = merged_groups(self._model)
        layers = {
            "activation_norm": [shortened(plain_name(name)) for name in self._layers(self._model)],
            "attention_logit_max": [group_of(name) for _, found in self._attention_modules() for name, _ in found],
        }
        return [
            f"{signal}/{layer}"
            for signal, found in layers.items()
            for layer in dict.fromkeys(merged.get(name, name) for name in found)
        ]

    def arm(self) -> None:
        """Sample the forward passes from here on, and forget earlier values."""
        self.disarm()
        self.collect()
        self._runs = FirstRuns()
        layers = self._layers(self._model)
        if self._merged_of != tuple(layers):  # a model may grow
            self._merged_of, self._merged = tuple(layers), merged_groups(self._model)
        merged = self._merged
        for name, layer in self._outside_compiled(layers.items()):
            group = shortened(plain_name(name))
            self._handles.append(layer.register_forward_hook(self._layer_hook(merged.get(group, group))))
        for reader, found in self._attention_modules():
            for name, module in self._outside_compiled(found):
                group = group_of(name)
                hook = self._attention_hook(merged.get(group, group), reader)
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        if self.force_eager:
            self._stance = torch.compiler.set_stance("force_eager")

    def disarm(self) -> None:
        """Remove the hooks. Their values stay until they are taken."""
        while self._handles:
            self._handles.pop().remove()
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Armed inside the ``with`` block."""
        self.arm()
        try:
            yield
        finally:
            self.disarm()

    @torch.no_grad()
    def collect(self) -> tuple[tuple[str, ...], Tensor]:
        """Names and float32 values of everything since ``arm``, and forget them; empty where there was nothing."""
        norms, vectors, logits = self._norms, self._vectors, self._logits
        self._norms, self._vectors, self._logits = {}, {}, {}
        self._runs.end_step()
        if len(norms) == 1 and not logits:  # an embedding, at every step
            ((layer, of_layer),) = norms.items()
            if len(of_layer) == 1:
                return (f"activation_norm/{layer}",), (of_layer[0] / math.sqrt(vectors[layer])).reshape(1)
        values = []
        if norms:
            calls = [norm for of_layer in norms.values() for norm in of_layer]
            shares = [1 / math.sqrt(vectors[layer]) for layer, of_layer in norms.items() for _ in of_layer]
            scaled = iter(torch._foreach_mul(calls, shares))
            rows = [[next(scaled) for _ in of_layer] for of_layer in norms.values()]
            values.append(torch.linalg.vector_norm(_rectangle(rows, torch.zeros_like(calls[0])), dim=1))
        if logits:
            rows = list(logits.values())
            values.append(_rectangle(rows, torch.full_like(rows[0][0], -math.inf)).amax(dim=1))
        names = [f"activation_norm/{layer}" for layer in norms] + [f"attention_logit_max/{layer}" for layer in logits]
        return tuple(names), torch.cat(values) if values else torch.empty(0)

    def _attention_modules(self) -> Iterator[tuple[Reader, list[tuple[str, nn.Module]]]]:
        for kind, reader in self._readers.items():
            yield reader, [(name, module) for name, module in self._model.named_modules() if isinstance(module, kind)]

    def _outside_compiled(self, modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
        return iter(modules) if self.force_eager else outside_compiled(self._model, modules, self.left_out)

    def _layer_hook(self, layer: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling() or not self._runs.counts(module, layer):
                return
            tensor = _first_tensor(output)
            if tensor is not None and not (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
                kind = tensor.device.type
                is_cast = torch.is_autocast_enabled(kind)  # and would copy it to fp32
                self.autocast = self.autocast or (torch.get_autocast_dtype(kind) if is_cast else None,)
                plainly = torch.autocast(kind, enabled=False) if is_cast else nullcontext()
                with self.spent.of("signals"), torch.no_grad(), plainly:
                    norm = torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
                width = tensor.shape[1] if tensor.ndim in (4, 5) else tensor.shape[-1]
                if self._keep(self._norms, layer, norm):
                    self._vectors[layer] = self._vectors.get(layer, 0) + tensor.numel() // width

        return hook

    def _attention_hook(self, layer: str, reader: Reader) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch.compiler.is_compiling() or not self._runs.counts(module, layer):
                return
            with self.spent.of("signals"), torch.no_grad():
                self._keep(self._logits, layer, largest_logits(reader(module, args, kwargs)).amax())

        return hook

    def _keep(self, seen: dict[str, list[Tensor]], layer: str, value: Tensor) -> bool:
        home = next(iter(seen.values()))[0].device if seen else value.device
        if value.device != home:
            self.left_out[layer] = f"on {value.device}, where the first one is on {home}"
            return False
        seen.setdefault(layer, []).append(value.float())
        return True


def _is_inside_compiled(model: nn.Module, name: str, *, has_compiled: bool) -> bool:
    """Whether a hook on this module would run inside compiled code; ``has_compiled`` if any of the model is."""
    words = name.split(".")
    owners = (model.get_submodule(".".join(words[:depth])) for depth in range(len(words) + 1) if has_compiled)
    return "_orig_mod" in words or any(owner._compiled_call_impl is not None for owner in owners)


def _first_tensor(output: Any) -> Tensor | None:
    """The first tensor of activations in a module's output."""
    if isinstance(output, Mapping):
        output = tuple(output.values())
    for value in output if isinstance(output, tuple | list) else (output,):
        if (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and _is_plain(value)
            and value.numel()
            and value.ndim
        ):
            return local(value)
    return None


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


def _rectangle(rows: list[list[Tensor]], filler: Tensor) -> Tensor:
    """Rows of scalars as a matrix, short rows filled up. Stacked, since an index would have to be sent to the
    device."""
    longest = max(map(len, rows))
    filled = [scalar for row in rows for scalar in (*row, *[filler] * (longest - len(row)))]
    return torch.stack(filled).view(len(rows), longest)


# Attention.

BATCH_ROWS = 4
"""Rows of a batch that are enough."""
_QUERIES = 16


def largest_logits(multiplied: QueryKey, most: int = _QUERIES) -> Tensor:
    """The largest logit of each head, of up to ``most`` evenly spaced queries; the last query, which sees the most
    keys, is among them."""
    query, key, mask, causal, scale = multiplied
    queries, keys = query.shape[-2], key.shape[-2]
    step = math.ceil(queries / most)
    first = (queries - 1) % step
    divisor = math.sqrt(query.shape[-1]) if scale is None else 1 / scale
    with torch.autocast(query.device.type, enabled=False):
        logits = query[..., first::step, :].float() @ key.float().mT / divisor
        if mask is not None:
            logits = logits + (mask if mask.shape[-2] == 1 else mask[..., first::step, :])
        if causal:
            newest_seen = torch.arange(first, queries, step, device=query.device) + (keys - queries)
            later = torch.arange(keys, device=query.device) > newest_seen[:, None]
            logits = logits.masked_fill(later, -math.inf)
        return logits.amax(dim=(0, 2, 3))


def read_multihead(module: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> QueryKey:
    """Queries and keys of torch's own attention, for up to 4 rows of the batch."""
    given = inspect.signature(nn.MultiheadAttention.forward).bind(module, *args, **kwargs).arguments
    query, key, mask, padding = given["query"], given["key"], given.get("attn_mask"), given.get("key_padding_mask")
    if query.ndim == 2:  # no batch
        query, key, padding = query[None], key[None], None if padding is None else padding[None]
    elif not module.batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    if mask is not None and mask.ndim == 3:
        mask = mask.unflatten(0, (len(query), module.num_heads))
    some = slice(None, None, math.ceil(len(query) / BATCH_ROWS))
    masks = [] if mask is None else [additive(mask[some] if mask.ndim == 4 else mask)]
    if padding is not None:
        masks.append(additive(padding[some][:, None, None]))
    packed: Tensor | None = module.in_proj_weight
    weights = (module.q_proj_weight, module.k_proj_weight) if packed is None else packed.chunk(3)[:2]
    biases = (None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)[:2]
    query, key = (
        F.linear(side[some], weight, bias).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
        for side, weight, bias in zip((query, key), weights, biases, strict=True)
    )
    return QueryKey(query, key, sum(masks[1:], masks[0]) if masks else None)


MULTIHEAD: Mapping[type[nn.Module], Reader] = {nn.MultiheadAttention: read_multihead}


def additive(mask: Tensor) -> Tensor:
    """A mask to add: -inf where a boolean one hides."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(mask, -math.inf)


# Gradients and losses.

_RUN = 32
_LOST = 2.0**-25

_NATS_A_BIN = 0.5
_BINS = 32


@torch.no_grad()
def underflow_share(grads: Iterable[Tensor], scale: Tensor | float = 1.0) -> Tensor:
    """Share of gradient elements that fp16 loses: ``|grad| * scale`` of at most 2**-25 becomes 0.

    ``grads`` are as the optimizer will see them, after the loss scale has been divided out; ``scale`` is that scale. An
    exact 0 counts as lost only among neighbours that are not 0: rows of zeros (tokens that the batch has none of, dead
    units) say nothing. So the sample of each tensor is up to 512 evenly spaced runs of 32 neighbours, and runs of
    nothing but zeros are left out - unless all of the tensor's are: then all of it is lost. Beyond a share of about
    0.9, where whole runs begin to be lost, the value bends towards 31/32. Tensors of fewer than 32 elements are passed
    over; without any other the share is 0.
    """
    runs = []
    for grad in grads:
        if _is_plain(grad) and local(grad).numel() >= _RUN:
            elements = flat(local(grad))
            whole = elements[: len(elements) // _RUN * _RUN].view(-1, _RUN)
            runs.append(whole[:: spacing(len(whole), MOST_SAMPLED // _RUN)])
    if not runs:
        return torch.zeros(())
    sample = torch.cat(runs).float()
    has_some = (sample != 0).any(dim=1)
    of_tensors = has_some.split([len(each) for each in runs])
    is_alive = torch.cat([each.any().expand(len(each)) for each in of_tensors])
    is_telling = (has_some | ~is_alive)[:, None]
    lost = (sample.abs() * scale <= _LOST).logical_and_(is_telling).sum()
    telling = is_telling.sum() * _RUN
    return lost / telling


@torch.no_grad()
def token_loss_histogram(token_losses: Tensor, counted: Tensor | None = None) -> Tensor:
    """How many tokens have which loss: 33 counts in float32.

    Bins of half a nat from 0 to 16, of which the last takes everything above; then the count of NaN and Inf.
    ``counted`` is False where a position has no target. ``bincount`` would wait for the device to learn its size.
    """
    losses = token_losses.flatten().float()
    bins = (losses / _NATS_A_BIN).clamp(0, _BINS - 1).masked_fill(~losses.isfinite(), _BINS).long()
    ones = torch.ones_like(bins) if counted is None else counted.flatten().long()
    return torch.zeros(_BINS + 1, dtype=torch.long, device=losses.device).index_add_(0, bins, ones).float()
