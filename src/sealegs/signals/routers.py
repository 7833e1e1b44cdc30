"""Samples the routers of a mixture of experts on some steps: what each expert gets, and how the router chooses.

A router is found by its structure, not by its class: a module that is called a gate or a router and knows the number of
its experts, or the linear map of such a name in a module that does. Anything else says so itself: by the attribute
``expert_counts``, or by ``Telemetry(routers=...)``.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sealegs.signals.activations import FirstRuns, outside_compiled
from sealegs.signals.collect import Block
from sealegs.signals.groups import group_of, plain_name, shortened
from sealegs.signals.layout import local
from sealegs.signals.time_spent import TimeSpent
from sealegs.signals.weights import spacing

Finder: TypeAlias = Callable[[nn.Module], Mapping[str, nn.Module]]
"""Gives the routers of a model, by name."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_experts", "num_total_experts")
"""What modules and configs call the number of experts."""
CHOSEN = ("top_k", "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "experts_per_token", "k")
"""What they call the number of experts that a token goes to."""
NAMES = frozenset(("gate", "router", "gating", "wg", "gate_network", "router_layer"))
KINDS = ("router", "gate", "gating")
"""Ends of the names of classes, in lower case."""

MOST_LOADS = 64
"""Loads that a row holds at most; of more experts there are only summaries."""
TOKENS = 2048
"""Tokens of a call whose logits are looked at, at most: evenly spaced."""
DEAD = 0.1
"""Share of the mean load below which an expert is dead."""
FEWEST = 20
"""Choices for each expert, in the mean, below which dead ones cannot be told from unlucky ones."""
SUMMARIES = 5


class Router(NamedTuple):
    """A router of a model."""

    layer: str
    """Its name in rows."""
    module: nn.Module
    experts: int
    chosen: int
    """Experts that a token goes to; 0 where nobody says."""


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """What the routers did in a step: sums, which several ranks can add."""

    sizes: tuple[tuple[str, int], ...]
    """Each router's layer and number of experts."""
    numbers: Tensor
    """Of the logits that were looked at: sum of entropies, sum of squares, count. Then the choices for each expert."""

    @property
    def has_loads(self) -> bool:
        """Whether the row holds each load."""
        return sum(size for _, size in self.sizes) <= MOST_LOADS

    def summaries(self, numbers: Tensor) -> Tensor:
        """Largest violation, share of dead experts, fewest choices for an expert in the mean of a layer; mean entropy
        and mean square of the logits. NaN where there was none."""
        entropy, square, tokens, counts = numbers[0], numbers[1], numbers[2], numbers[3:]
        by_layer = counts.split([size for _, size in self.sizes])
        means = torch.stack([layer.mean() for layer in by_layer])
        largest = torch.stack([layer.amax() for layer in by_layer])
        dead = torch.stack([(layer < DEAD * layer.mean()).sum() for layer in by_layer]).sum()
        told = (
            (largest / means).amax() - 1,
            dead / counts.numel(),
            means.amin(),
            entropy / tokens,
            square / tokens,
        )
        return torch.stack([each.to(numbers) for each in told])

    def named(self, numbers: Tensor) -> Block:
        """The signals of sums over all ranks."""
        summaries = self.summaries(numbers)
        if not self.has_loads:
            return self.named_summaries(summaries)
        return partial(_with_loads, self.sizes), torch.cat((summaries, numbers[3:]))

    def named_summaries(self, summaries: Tensor) -> Block:
        """The signals of summaries alone."""
        return _summarised, summaries


class RouterSampler:
    """Counts what routers choose, on the steps that ask for it; other steps pay nothing.

    - ``expert_load/<layer>.<expert>``: an expert's share of the choices of its layer, with at most 64 experts in all.
    - ``expert_violation``: the largest load of a layer over its mean, less 1; the largest of all layers.
    - ``dead_expert_share``: share of all experts that get less than a tenth of their layer's mean, where that is
      twenty choices or more: a few tokens say nothing of many experts.
    - ``router_entropy``: entropy of a token's probabilities over the experts, in nats; mean over tokens and layers.
    - ``router_z``: the squared logarithm of its summed exponentials, which grows with the logits; mean as well.

    What a router chose is read from what it gives: indices, or counts, as one of its outputs or in ``expert_counts``;
    where it gives logits alone, the largest of them count, so that a bias which is added later is not in it. Logits are
    an output too, or are computed a second time from its weight.

    Hooks exist from ``arm`` to ``disarm`` only, pass over evaluations and over the second run of checkpointed layers,
    and add up over the micro-batches of a step. Inside compiled modules there are none (``left_out``).
    """

    def __init__(self, model: nn.Module, find: Finder | None = None) -> None:
        """``find`` gives the routers of a model whose own nobody recognises."""
        self._model = model
        self._routers = tuple(routers_of(model, find))
        self._handles: list[RemovableHandle] = []
        self._counts: dict[str, Tensor] = {}
        self._logits: list[Tensor] = []
        self._runs = FirstRuns()
        self.spent = TimeSpent()
        """Counts the time that hooks take; a guard puts that of its run here."""

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """Each router's layer and number of experts."""
        return tuple((router.layer, router.experts) for router in self._routers)

    @property
    def left_out(self) -> Mapping[str, str]:
        """Routers that were not sampled since the last ``arm``, and why."""
        return self._runs.left_out

    def arm(self) -> None:
        """Count the forward passes from here on, and forget earlier ones."""
        self.disarm()
        self._forget()
        self._runs = FirstRuns()
        by_name = dict(zip(self._names(), self._routers, strict=True))
        modules = [(name, router.module) for name, router in by_name.items()]
        for name, module in outside_compiled(self._model, modules, self._runs.left_out):
            self._handles.append(module.register_forward_hook(self._hook(by_name[name])))

    def disarm(self) -> None:
        """Remove the hooks. What they have counted stays until it is taken."""
        while self._handles:
            self._handles.pop().remove()

    @torch.no_grad()
    def collect(self) -> RoutedTokens | None:
        """What was routed since ``arm``, and forget it; None where no router ran."""
        counts, logits = self._counts, self._logits
        self._forget()
        if not counts:
            return None
        home = next(iter(counts.values())).device
        sums = torch.stack(logits).sum(0) if logits else torch.zeros(3, device=home)
        sizes = tuple((layer, size) for layer, size in self.sizes if layer in counts)
        return RoutedTokens(sizes, torch.cat([sums, *(counts[layer] for layer, _ in sizes)]))

    def nothing(self, device: torch.device) -> RoutedTokens:
        """What a rank sends that has seen nothing."""
        return RoutedTokens(self.sizes, torch.zeros(3 + sum(size for _, size in self.sizes), device=device))

    def _names(self) -> Iterator[str]:
        names = {module: name for name, module in self._model.named_modules()}
        return (names.get(router.module, "") for router in self._routers)

    def _forget(self) -> None:
        self._counts, self._logits = {}, []

    def _hook(self, router: Router) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling() or not self._runs.counts(module, router.layer):
                return
            with self.spent.of("signals"), torch.no_grad():
                try:
                    self._take(router, args, output)
                except Exception as error:  # observing fails open: a router that nobody has seen costs its own place
                    self._runs.left_out[router.layer] = f"{type(error).__name__}: {error}"

        return hook

    def _take(self, router: Router, args: Any, output: Any) -> None:
        tensors = [local(each) for each in _tensors(output)]
        if not tensors or (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        logits = _logits(router, args, tensors)
        counts = _counts(router, tensors, logits)
        if counts is None:
            self._runs.left_out[router.layer] = "it gives neither indices nor counts nor logits"
            return
        home = next(iter(self._counts.values())).device if self._counts else counts.device
        if counts.device != home:
            self._runs.left_out[router.layer] = f"on {counts.device}, where the first one is on {home}"
            return
        before = self._counts.get(router.layer)
        self._counts[router.layer] = counts if before is None else before + counts
        if logits is not None:
            self._logits.append(_measured(logits))


def routers_of(model: nn.Module, find: Finder | None = None) -> Iterator[Router]:
    """The routers of a model: those that ``find`` gives, or what looks like one, each once and none inside another."""
    found = dict(find(model)) if find is not None else dict(_look_alikes(model))
    layers: dict[str, int] = {}
    for name in found:
        layers[group_of(name)] = layers.get(group_of(name), 0) + 1
    parents = {child: parent for parent in model.modules() for child in parent.children()}
    for name, module in found.items():
        experts = _experts(module, parents.get(module))
        if experts < 2:
            continue
        group = group_of(name)
        layer = group if layers[group] == 1 else shortened(plain_name(name))
        yield Router(layer, module, experts, said(CHOSEN, module, parents.get(module)))


def _look_alikes(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    inside: tuple[str, ...] = ()
    parents = {child: parent for parent in model.modules() for child in parent.children()}
    for name, module in model.named_modules():
        if not name or name.startswith(inside or ("\0",)):
            continue
        kind, last = type(module).__name__.lower(), plain_name(name).rpartition(".")[2]
        is_called_so = last in NAMES or kind.endswith(KINDS)
        is_told = hasattr(module, "expert_counts")
        if is_told or (is_called_so and _is_router(module, parents.get(module))):
            inside += (f"{name}.",)
            yield name, module


def _is_router(module: nn.Module, parent: nn.Module | None) -> bool:
    """Whether it says how many experts it has, or is the linear map to as many as its parent says."""
    experts = said(EXPERTS, module)
    if experts > 1:
        return True
    weight = getattr(module, "weight", None)
    around = said(EXPERTS, parent)
    return around > 1 and isinstance(weight, Tensor) and weight.ndim == 2 and weight.shape[0] == around


def _experts(module: nn.Module, parent: nn.Module | None) -> int:
    counts = getattr(module, "expert_counts", None)
    if isinstance(counts, Tensor) and counts.ndim == 1:
        return counts.numel()
    return said(EXPERTS, module) or said(EXPERTS, parent)


def said(names: Sequence[str], *modules: nn.Module | None) -> int:
    """The first whole number that a module, or its config, has under one of these names; 0 where none has."""
    for module in modules:
        for owner in (module, getattr(module, "config", None), getattr(module, "args", None)):
            for name in names:
                value = getattr(owner, name, None)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
    return 0


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Mapping):
        output = tuple(output.values())
    found = output if isinstance(output, tuple | list) else (output,)
    return [each for each in found if isinstance(each, Tensor) and each.layout == torch.strided]


def _logits(router: Router, args: Any, tensors: Sequence[Tensor]) -> Tensor | None:
    """A row of logits for each of some tokens: an output, if there is one alone of that shape; else computed again."""
    rows = [each for each in tensors if each.is_floating_point() and each.ndim > 1 and each.shape[-1] == router.experts]
    if len(rows) == 1:
        return rows[0].reshape(-1, router.experts)
    owner = next((each for each in router.module.modules() if _maps_to(each, router.experts)), None)
    given = args[0] if isinstance(args, tuple) and args else None
    if owner is None or not isinstance(given, Tensor):
        return rows[0].reshape(-1, router.experts) if rows else None
    weight: Any = local(owner.weight)  # type: ignore[arg-type]
    inputs = local(given)
    if inputs.shape[-1] != weight.shape[1] or weight.shape[0] != router.experts:
        return None
    bias = getattr(owner, "bias", None)
    tokens = inputs.reshape(-1, weight.shape[1])
    some = tokens[:: spacing(len(tokens), TOKENS)]
    return F.linear(some.to(weight), weight, None if bias is None else local(bias))


def _maps_to(module: nn.Module, experts: int) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and weight.shape[0] == experts


def _counts(router: Router, tensors: Sequence[Tensor], logits: Tensor | None) -> Tensor | None:
    """The choices for each expert: told, counted, or those of the largest logits."""
    told = getattr(router.module, "expert_counts", None)
    if isinstance(told, Tensor) and told.numel() == router.experts:
        return local(told).reshape(-1).float()
    for each in tensors:
        if each.ndim == 1 and each.numel() == router.experts:
            return each.float()
    indices = next((e for e in tensors if not (e.is_floating_point() or e.dtype == torch.bool) and e.ndim > 1), None)
    if indices is None and logits is not None and router.chosen:
        indices = logits.topk(min(router.chosen, router.experts), dim=-1).indices
    if indices is None:
        return None
    # a token that was dropped has the index -1, and gets a place of its own after the others
    places = indices.reshape(-1).long().remainder(router.experts + 1)
    ones = torch.ones_like(places, dtype=torch.float32)
    return torch.zeros(router.experts + 1, device=places.device).index_add_(0, places, ones)[:-1]


def _measured(logits: Tensor) -> Tensor:
    """Sum of the entropies, sum of the squares, and the number of tokens."""
    some = logits[:: spacing(len(logits), TOKENS)].float()
    normaliser = torch.logsumexp(some, dim=-1)
    entropy = normaliser - (some.softmax(-1) * some).sum(-1)
    count = torch.full((), float(len(some)), device=some.device)
    return torch.stack((entropy.sum(), normaliser.square().sum(), count))


def _summarised(numbers: list[float]) -> dict[str, float]:
    violation, dead, choices, entropy, square = numbers
    found = {"expert_violation": violation, "router_entropy": entropy, "router_z": square}
    if choices >= FEWEST:
        found["dead_expert_share"] = dead
    if not choices > 0:
        del found["expert_violation"]
    return {name: value for name, value in found.items() if not math.isnan(value)}


def _with_loads(sizes: tuple[tuple[str, int], ...], numbers: list[float]) -> dict[str, float]:
    found = _summarised(numbers[:SUMMARIES])
    loads = iter(numbers[SUMMARIES:])
    for layer, size in sizes:
        counts = [next(loads) for _ in range(size)]
        if total := math.fsum(counts):
            found |= {f"expert_load/{layer}.{expert}": count / total for expert, count in enumerate(counts)}
    return found
