"""Measures sizes of weights, moments and updates, on the device and without waiting for it.

It is meant for every tenth step or so: one pass over weights and moments, and a sample of the weights around the
update.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sealegs.signals.collect import Block
from sealegs.signals.cuda_graphs import GraphCapturer, GraphedFunction, layout
from sealegs.signals.groups import Groups, Sums, merged_groups, sent
from sealegs.signals.layout import Layout, local
from sealegs.signals.tensor_norms import alike, exact_dtype, lengths

MOST_SAMPLED = 16_384
"""Elements of one tensor that a sample has at most."""

FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
SECOND_MOMENTS = ("exp_avg_sq", "square_avg", "sum")
"""torch's names for them; ``sum`` is Adagrad's."""

_MEASURED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})

_Owned: TypeAlias = list[tuple[Tensor, Tensor]]
"""Parameters, each with a tensor that belongs to it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """Everything that follows from the set of parameters alone."""

    parameters: tuple[nn.Parameter, ...]
    """The measured parameters; the trained ones come first."""
    groups: Groups
    trained: int
    """How many of them updates change."""
    trained_groups: Groups
    trained_elements: float
    """Trained elements on all ranks together."""
    spaced: "_SpacedElements"
    device: torch.device
    left_out: Mapping[str, str]
    everything: tuple[Tensor, ...]
    """All parameters of the model and of the optimizers; held, so that no other object can take their identities."""
    fingerprint: tuple[object, ...]
    change_sums: Sums
    norm_sums: dict[tuple[int, int], Sums] = field(default_factory=dict)
    """By the number of moments of each kind."""


@dataclass(frozen=True, slots=True, eq=False)
class _Before:
    """The measurements before an update."""

    plan: _Plan
    sums: Tensor
    """Squares for ``norms``."""
    trained_squares: Tensor
    """Square of each trained parameter's norm."""
    moments: tuple[int, int]
    """How many tensors of each kind there were."""
    sample: list[Tensor]
    """Sampled elements of the trained parameters."""


@dataclass(frozen=True, slots=True)
class _Moments:
    """Where the optimizers keep their moments."""

    plan: _Plan
    first: _Owned
    second: _Owned
    tensors: list[Tensor]
    """The moments of both kinds."""
    places: list[tuple[Mapping[str, Any], str, Any]]
    """Every entry of every state."""
    states: list[object]
    """All states of the optimizers."""

    def are_still_there(self, optimizers: Sequence[Optimizer]) -> bool:
        """Whether these are still the optimizers' moments. A first step, a loaded checkpoint or an optimizer may
        replace them."""
        states = _states_of(optimizers)
        return (
            len(states) == len(self.states)
            and all(map(is_, states, self.states))
            and all(state.get(key) is value for state, key, value in self.places)
        )


class WeightSampler:
    """Norms of weights and moments as they are before an update, and the size of the update.

    - ``param_norm``, ``param_norm/<group>``: L2 norm of the weights; frozen ones count, tied ones count once
    - ``params_finite``: 1.0, or 0.0 when a weight is NaN or infinite
    - ``update_rms``: root mean square change of a trained weight in this update
    - ``update_ratio/<group>``: L2 norm of the change over that of the weights, both of the trained ones
    - ``moment1_norm``, ``moment2_norm``: L2 norms of the optimizers' running means of gradients and of their squares;
      absent where an optimizer has none, or has none yet

    A finite weight of 1e25, whose square float32 cannot hold, is not taken for an infinite one
    (``signals/tensor_norms.py``; weights that are float64 themselves: up to 1e154). Norms are exact on a
    GPU; on a CPU they are as good as ``MOST_ADDED`` says, and the same for the same numbers.

    The change is *estimated* from up to ``MOST_SAMPLED`` evenly spaced elements of each tensor, copied before the
    update and compared after it; to compare all would take the memory of a second model. Their spacing shares no
    divisor with the number of elements, hence none with any dimension: rows and columns are met alike. The relative
    standard error of a norm from n elements is sqrt((kurtosis - 1) / n) / 2: 0.6 % of one large tensor whose changes
    are normally distributed, less under Adam, whose changes are much of one size, and less for a group of tensors.
    Small tensors are compared whole. Where few rows change by much (plain SGD on an embedding: the tokens of one
    batch), the error is larger, about 1 / (2 sqrt(rows met)). A skipped update gives exactly 0.

    **Ranks.** ``before_update`` and ``after_update`` give sums of squares in float64, which may be summed over ranks
    before ``norms`` and ``changes`` make values of them. What several ranks hold is to count once in such a sum, so
    each rank divides it by ``Layout.copies_of``. With the layout of one rank, the default, the values are of
    what this rank holds. The shards of DTensors (FSDP2) are measured where they lie.

    Parameters are those of the model. What an optimizer alone knows (master copies of the weights, weights of a loss)
    counts in the moments only. ``add_param_group``, freezing and unfreezing are noticed at the next ``before_update``.

    On CUDA each of the two is one launch (``signals/cuda_graphs.py``) once weights and moments have stayed in their
    places for a few samples, and again after they have moved.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], *, layout: Layout = Layout()) -> None:  # noqa: B008 -- a frozen value
        self._model = model
        self._optimizers = tuple(optimizers)
        self._layout = layout
        self._plan: _Plan | None = None
        self._before: _Before | None = None
        self._changed: _Plan | None = None
        self._found_moments: _Moments | None = None
        self._recorder = GraphCapturer()
        self._measure = GraphedFunction[_Before](self._recorder)
        self._compare = GraphedFunction[Tensor](self._recorder)

    def goes_by(self, layout: Layout) -> None:
        """Go by another layout from the next ``before_update`` on."""
        self._layout, self._plan = layout, None

    @property
    def left_out(self) -> Mapping[str, str]:
        """Parameters that are not measured, and why: on another device than most, or of no common floating type."""
        return self._current_plan().left_out

    @torch.no_grad()
    def before_update(self) -> Tensor:
        """Keep a sample of the weights, and measure the weights before the update: squares for ``norms``."""
        plan = self._current_plan()
        moments = self._moments(plan)
        measure = partial(_measured, plan, moments, self._layout)
        if not _can_be_replayed(plan):
            self._before = measure()
            return self._before.sums
        tensors = [*map(local, plan.parameters), *moments.tensors]
        where, what = layout(tensors)
        self._before = self._measure(measure, (where, (what, plan, len(moments.first))), plan.device)
        return self._before.sums.clone()

    def norms(self, squares: Tensor) -> Block:
        """The signals from the squares of the last ``before_update``."""
        before = self._last_before()
        moments = zip(("moment1_norm", "moment2_norm"), before.moments, strict=True)
        groups = (f"param_norm/{group}" for group in before.plan.groups.names)
        names = ("param_norm", *groups, *(name for name, count in moments if count))

        def finish(numbers: list[float]) -> dict[str, float]:
            norms = dict(zip(names, map(math.sqrt, numbers), strict=True))
            return norms | {"params_finite": float(math.isfinite(numbers[0]))}

        return finish, squares

    @torch.no_grad()
    def after_update(self) -> Tensor:
        """Compare the sample with the weights as they are now: squares for ``changes``."""
        before = self._last_before()
        plan = self._changed = before.plan
        compare = partial(_compared, before)
        if not _can_be_replayed(plan):
            return compare()
        trained = [local(parameter) for parameter in plan.parameters[: plan.trained]]
        where, what = layout(trained)
        return self._compare(compare, (where, (what, before)), plan.device).clone()

    def changes(self, squares: Tensor) -> Block:
        """The signals from the squares of the last ``after_update``, even of an earlier process."""
        plan = self._changed or self._current_plan()
        groups = plan.trained_groups.names

        def finish(numbers: list[float]) -> dict[str, float]:
            if not groups:
                return {}
            total, changed, weights = numbers[0], numbers[1 : 1 + len(groups)], numbers[1 + len(groups) :]
            ratios = map(_ratio, changed, weights)
            names = (f"update_ratio/{group}" for group in groups)
            return {"update_rms": math.sqrt(total / plan.trained_elements)} | dict(zip(names, ratios, strict=True))

        return finish, squares

    def _last_before(self) -> _Before:
        assert self._before is not None, "before_update comes first"
        return self._before

    def _moments(self, plan: _Plan) -> _Moments:
        """The moments as they are now; looked for again only where they were replaced."""
        found = self._found_moments
        if found is None or found.plan is not plan or not found.are_still_there(self._optimizers):
            found = self._found_moments = self._find_moments(plan)
        return found

    def _find_moments(self, plan: _Plan) -> _Moments:
        first: _Owned = []
        second: _Owned = []
        places: list[tuple[Mapping[str, Any], str, Any]] = []
        for optimizer in self._optimizers:
            for parameter in _parameters_of(optimizer):
                state = optimizer.state.get(parameter, {})
                for key, value in state.items():
                    places.append((state, key, value))
                    kind = first if key in FIRST_MOMENTS else second if key in SECOND_MOMENTS else None
                    if kind is not None and isinstance(value, Tensor):
                        moment = local(value)
                        # of eight bits, as packages wrap them, only their optimizer knows how to read
                        if type(moment) is Tensor and moment.device == plan.device and moment.dtype in _MEASURED:
                            kind.append((parameter, moment))
        tensors = [moment for _, moment in (*first, *second)]
        return _Moments(plan, first, second, tensors, places, _states_of(self._optimizers))

    def _current_plan(self) -> _Plan:
        """The plan, made again after a change that shows without a walk through the model."""
        held = [parameter for optimizer in self._optimizers for parameter in _parameters_of(optimizer)]
        if self._plan is None or _fingerprint(held, self._plan.everything) != self._plan.fingerprint:
            self._plan = _plan(self._model, held, self._layout)
        return self._plan


class _SpacedElements:
    """Evenly spaced elements of some parameters, to be copied: one concatenation per dtype."""

    def __init__(self, parameters: Sequence[nn.Parameter], layout: Layout, device: torch.device) -> None:
        self._parameters = tuple(parameters)
        elements = [local(parameter).numel() for parameter in parameters]
        self._counts = [len(range(0, count, spacing(count))) for count in elements]
        shares = zip(parameters, elements, self._counts, strict=True)
        scales = [math.sqrt(all_ / (count or 1) / layout.copies_of(parameter)) for parameter, all_, count in shares]
        self.scales = sent(torch.tensor(scales, dtype=exact_dtype(device)), device)
        """Norm of the whole over that of its sample, shared among the ranks that hold it."""
        self._places: list[list[int]] = []
        self._views: list[Tensor | None] = []
        self._pointers: list[int] = []

    def copied(self) -> list[Tensor]:
        """The elements as they are now: one tensor per dtype, in float32 or wider."""
        tensors = [local(parameter) for parameter in self._parameters]
        pointers = [tensor.data_ptr() for tensor in tensors]
        if pointers != self._pointers:  # first use, or moved
            self._places, self._pointers = alike(tensors), pointers
            self._views = [view if _is_view(view := _spaced(tensor), tensor) else None for tensor in tensors]
        samples = []
        for places in self._places:
            pairs = [(self._views[place], tensors[place]) for place in places]
            sample = torch.cat([_spaced(tensor) if view is None else view for view, tensor in pairs])
            samples.append(sample.to(torch.promote_types(sample.dtype, torch.float32)))
        return samples

    def split(self, samples: Sequence[Tensor]) -> list[Tensor]:
        """Tensors like those of ``copied``, split into one per parameter."""
        pieces: dict[int, Tensor] = {}
        for places, sample in zip(self._places, samples, strict=True):
            pieces.update(zip(places, sample.split([self._counts[place] for place in places]), strict=True))
        return [pieces[place] for place in range(len(self._parameters))]


def _can_be_replayed(plan: _Plan) -> bool:
    """Whether to replay a graph: on CUDA, but not while the user captures, since it then becomes part of the user's
    graph."""
    return plan.device.type == "cuda" and plan.trained > 0 and not torch.cuda.is_current_stream_capturing()


def _measured(plan: _Plan, moments: _Moments, layout: Layout) -> _Before:
    """Measure what the step begins with."""
    weights = ((parameter, local(parameter)) for parameter in plan.parameters)
    owned = [*weights, *moments.first, *moments.second]
    norms = lengths([tensor for _, tensor in owned], plan.device)
    if layout.world > 1 and owned:
        shares = [1 / math.sqrt(layout.copies_of(owner)) for owner, _ in owned]
        norms = torch.stack(torch._foreach_mul(norms.unbind(), shares))
    squares = norms.square()
    counts = len(moments.first), len(moments.second)
    if counts not in plan.norm_sums:
        plan.norm_sums[counts] = Sums(_norm_members(plan, counts))
    sums = plan.norm_sums[counts](squares)
    return _Before(plan, sums, squares[: plan.trained], counts, plan.spaced.copied())


def _compared(before: _Before) -> Tensor:
    """Squares of the trained weights, and of their changes since."""
    plan = before.plan
    changes = [now - earlier for now, earlier in zip(plan.spaced.copied(), before.sample, strict=True)]
    norms = lengths(plan.spaced.split(changes), plan.device) * plan.spaced.scales
    return plan.change_sums(torch.cat((before.trained_squares, norms.square())))


def _ratio(change: float, weight: float) -> float:
    """Square root of a ratio of squares. Where all weights are 0, no change gives 0 and any other infinity."""
    return math.sqrt(change / weight) if weight else math.sqrt(change) * math.inf if change else 0.0


def flat(tensor: Tensor) -> Tensor:
    """The elements in the order in which they lie in memory: a view, unless memory has gaps between them."""
    outermost_first = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(outermost_first).reshape(-1)


def spacing(elements: int, most: int = MOST_SAMPLED) -> int:
    """The closest spacing that meets at most ``most`` of the elements and shares no divisor with their number.

    >>> spacing(1000), spacing(768 * 768), spacing(50257 * 768)
    (1, 37, 2357)
    """
    step = max(1, -(-elements // most))
    while math.gcd(step, elements) > 1:
        step += 1
    return step


def _plan(model: nn.Module, held: Sequence[Tensor], layout: Layout) -> _Plan:
    named = dict(model.named_parameters())
    where = Counter[torch.device]()
    for parameter in named.values():
        if not parameter.is_meta:
            where[parameter.device] += parameter.numel()
    device = where.most_common(1)[0][0] if where else torch.device("cpu")
    left_out = {name: reason for name, parameter in named.items() if (reason := _why_not(parameter, device))}
    in_optimizers = set(map(id, held))
    if in_optimizers.isdisjoint(map(id, named.values())):  # the optimizers hold master copies of the weights
        in_optimizers = set(map(id, named.values()))

    def is_trained(name: str) -> bool:
        return named[name].requires_grad and id(named[name]) in in_optimizers

    trained = [name for name in named if name not in left_out and is_trained(name)]
    frozen = [name for name in named if name not in left_out and not is_trained(name)]
    merged = merged_groups(model)
    groups = Groups(trained, merged, layout.groups)
    everything = tuple({id(parameter): parameter for parameter in (*named.values(), *held)}.values())
    return _Plan(
        parameters=tuple(named[name] for name in trained + frozen),
        groups=Groups(trained + frozen, merged, layout.groups),
        trained=len(trained),
        trained_groups=groups,
        trained_elements=layout.elements or sum(named[name].numel() for name in trained),
        spaced=_SpacedElements([named[name] for name in trained], layout, device),
        device=device,
        left_out=left_out,
        everything=everything,
        fingerprint=_fingerprint(held, everything),
        change_sums=Sums(_change_members(len(trained), groups)),
    )


def _fingerprint(held: Sequence[Tensor], everything: Sequence[Tensor]) -> tuple[object, ...]:
    trained, devices = [tensor.requires_grad for tensor in everything], [tensor.device for tensor in everything]
    return list(map(id, held)), trained, devices


def _why_not(parameter: nn.Parameter, device: torch.device) -> str | None:
    if parameter.is_meta:
        return "on the meta device: it has no values"
    if parameter.device != device:
        return f"on {parameter.device}, where most weights are on {device}"
    return None if parameter.dtype in _MEASURED else f"of {parameter.dtype}, which has no norm"


def _norm_members(plan: _Plan, moments: tuple[int, int]) -> Iterator[Sequence[int]]:
    """Which squares make up which sum: all weights, those of each group, the moments of each kind."""
    weights = range(len(plan.parameters))
    first = range(weights.stop, weights.stop + moments[0])
    second = range(first.stop, first.stop + moments[1])
    yield weights
    yield from plan.groups.members
    yield from (moment for moment in (first, second) if moment)


def _change_members(trained: int, groups: Groups) -> Iterator[Sequence[int]]:
    """Which squares make up which sum, of trained weights and then their changes: all changes, each group's, its
    weights."""
    if trained:
        yield range(trained, 2 * trained)
    yield from ([trained + place for place in places] for places in groups.members)
    yield from groups.members


def _parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _states_of(optimizers: Sequence[Optimizer]) -> list[object]:
    return [state for optimizer in optimizers for state in optimizer.state.values()]


def _spaced(tensor: Tensor) -> Tensor:
    return flat(tensor)[:: spacing(tensor.numel())]


def _is_view(part: Tensor, whole: Tensor) -> bool:
    return part.data_ptr() == whole.data_ptr()
