"""Measures a step after backward: all its signals, on the device, the same on all ranks.

At every step: the norms of all gradients, before anything clips them, and the output of the embedding. Every few steps,
and at each one around an anomaly, also weights, moments, the last update and activations. Signals that differ between
ranks go through one collective, so that all ranks judge equal numbers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sealegs.errors import ConfigError
from sealegs.signals import low_precision
from sealegs.signals.activations import ActivationSampler, token_loss_histogram, underflow_share
from sealegs.signals.attention import HeadLogits
from sealegs.signals.collect import Block, waited_for
from sealegs.signals.collective import Collective
from sealegs.signals.groups import Groups, find_embeddings, merged_groups, sent
from sealegs.signals.incident_window import IncidentWindow
from sealegs.signals.layout import STRANGER, Divided, Layout, find_layout, local
from sealegs.signals.norms import GradientReader, Gradients
from sealegs.signals.own_time import FOUND, OwnTimes
from sealegs.signals.ranks import (
    CULPRIT_EXCESS,
    FIELDS,
    MERGED,
    NormsBefore,
    Ranks,
    Standing,
    checksum_of,
    contribution,
    merge,
)
from sealegs.signals.routers import MOST_LOADS, SUMMARIES, Finder, RouterSampler
from sealegs.signals.time_spent import TimeSpent
from sealegs.signals.together import (
    ABSENT,
    block,
    block_if_any,
    block_of_means,
    largest,
    mean_of_sent,
    sum_of_sent,
    summed,
)
from sealegs.signals.weights import WeightSampler
from sealegs.vocabulary import Number, Row

CHECKSUM_STEPS = 100
"""How often, in steps, the ranks compare their weights."""
HISTOGRAM_STEPS = 100
"""How often, in steps, the histogram of token losses is kept; steps that are not plain GO always keep it."""
BLIND = 3
"""Sampled steps in a row without an activation after which sampling stops: the loop runs compiled code."""


@dataclass(frozen=True, slots=True)
class StepSignals:
    """What is known of a step before it is decided."""

    loss: Tensor
    norms: Tensor
    """The norm of each gradient; or one number for all, where it is known already."""
    worst: Tensor | None
    """Index of the tensor with the largest gradient, where ranks have agreed on one."""
    gradients: Gradients | None
    """None where the user clips, and gave the norm."""
    blocks: tuple[Block, ...]
    squares: Tensor | None = None
    """For several ranks, the square of the norm that each holds, as a share of all."""
    logits: Tensor | None = None
    """The largest logit of each head of attention, the same on all ranks; None where nobody looked."""
    names: tuple[str, ...] = ()
    """The tensors that ``worst`` is one of, where ranks have agreed on it."""
    is_one: bool = True
    """Whether each name stands for one tensor, of which every rank holds a part or a copy."""

    def grad_norm(self) -> Tensor:
        """The norm of all gradients."""
        return self.norms if self.gradients is None or not self.norms.dim() else self.gradients.total()

    def are_replicated(self) -> Tensor | None:
        """For several ranks, whether all hold the same gradients, as far as their norms tell."""
        return None if self.squares is None else (self.squares == self.squares[0]).all() & self.is_one


@dataclass(frozen=True, slots=True)
class _Sample:
    """Numbers of a rank that are to become the same on all."""

    slot: str
    """Which kind of numbers they are."""
    numbers: Tensor
    together: Callable[[Tensor], Tensor]
    """Makes the run's numbers from those of all ranks."""
    named: Callable[[Tensor], Block]


@dataclass(frozen=True, slots=True)
class _UnsampledStep:
    """What the rest of a step's signals can still be measured from, until its update."""

    number: int
    gradients: Gradients | None
    loss_scale: Tensor | None


class Meter:
    """Measures the steps of one model. ``measure_step`` comes before the update, ``updated`` after it."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        sample_every: int,
        ranks: Ranks,
        activations: ActivationSampler | None = None,
        routers: Finder | None = None,
        spent: TimeSpent | None = None,
        divided: Divided | None = None,
    ) -> None:
        self.ranks = ranks
        self._is_updated = False
        """Whether there was an update since the ranks compared their weights."""
        self.norms_before = NormsBefore(model) if ranks.world > 1 else None
        self._own_times: OwnTimes | None = None
        self._model = model
        self._reader = GradientReader(model, optimizers)
        self._collective = Collective(ranks.timeout_s)
        self.layout = (
            find_layout(model, ranks.rank, self._collective.world, self._collective.gather)
            if divided is None
            else divided.layout
        )
        """What each rank holds of the model."""
        if self.layout.world != ranks.world:  # there is no process group to ask
            alike = (0,) * ranks.world
            self.layout = Layout(world=ranks.world, names=(*self._reader.by_name, STRANGER), peers=alike, twins=alike)
        self._is_layout_sure = not self.layout.is_guessed
        self._standing: Standing | None = None
        held = model if divided is None else divided.held
        self._weights = WeightSampler(held, optimizers, layout=self.layout)
        self._activations = activations or ActivationSampler(model)
        self._activations.spent = spent or TimeSpent()
        self._embeddings = ActivationSampler(model, layers=find_embeddings)
        self._embeddings.spent = self._activations.spent
        self._sees_embeddings = False
        self._routers = RouterSampler(model, routers)
        self._routers.spent = self._activations.spent
        self._scales = low_precision.ScaleSampler(model)
        self._are_routers_armed = False
        self._routers_unseen = 0
        """Sampled steps in a row in which no router was seen, though there are some."""
        self._is_armed = False
        self._blind = 0
        """Sampled steps in a row without activations."""
        self._heads: HeadLogits | None = None
        self._sees_heads = False
        self._sample_every = sample_every
        self._window = IncidentWindow(sample_every)
        self._measured: int | None = None
        """The step whose weights were measured before its update."""
        self._unsampled: _UnsampledStep | None = None
        self._groups = Groups(())
        self._groups_of: tuple[str, ...] = ()
        self._exchanged: tuple[str, ...] = ()
        """Signals that a framework logs on every rank, and of which the mean is judged."""
        self._names_of_all: dict[str, tuple[str, ...]] = {}
        """Activations by their sampler, of all ranks where these have different ones."""
        if not self.layout.are_alike:
            self._share_names()
        self._slots = self._sized_slots(model) if ranks.world > 1 else {}
        self._shares_of: dict[tuple[str, ...], Tensor] = {}
        self._places_of: dict[tuple[str, ...], Tensor] = {}
        """Where gradients are in the names of all ranks, by their own names."""
        self._last_change: Tensor | None = None

    def is_sampled(self, number: int) -> bool:
        """Whether a step is sampled: weights, moments and activations too."""
        return self._is_due(number) or self._window.is_sampled(number)

    def _is_due(self, number: int) -> bool:
        return self._sample_every > 0 and number % self._sample_every == 0

    def is_near_incident(self, number: int) -> bool:
        """Whether a step is one of those that are sampled because of an anomaly, as far as that is still possible."""
        return self._sample_every > 0 and self._window.covers(number)

    def incident_at(self, number: int) -> None:
        """Something is wrong at a step: sample the next ones, and this one if the run goes back to it."""
        self._window.open(number)

    def rest_of(self, number: int) -> tuple[Block, ...]:
        """What was not sampled of the step that was measured last, and can be until its update: all but activations.

        Empty on several ranks, which would have to exchange it.
        """
        unsampled = self._unsampled
        if unsampled is None or unsampled.number != number or self.ranks.world > 1 or self._measured == number:
            return ()
        if not self._window.is_sampled(number):
            return ()
        samples = self._sizes(number, unsampled.gradients, unsampled.loss_scale)
        return tuple(sample.named(sample.numbers) for sample in samples)

    def exchange(self, signals: tuple[str, ...]) -> None:
        """Exchange also these signals, as each rank logs them: on every rank, before the first step."""
        self._exchanged = signals
        if self.ranks.world > 1:
            self._slots = self._sized_slots(self._model)

    def watch_heads(self) -> HeadLogits:
        """Look at the logits of each head of attention on sampled steps: from the next one on, on every rank. Raises a
        ConfigError where they cannot be."""
        if not self.layout.are_alike:
            raise ConfigError("logits are looked at where all ranks have the same layers, and here they have not")
        if not self._sample_every:
            raise ConfigError("logits are looked at on sampled steps, and sample_every=0 has none")
        if self._heads is None:
            self._heads = HeadLogits(self._model, force_eager=self._activations.force_eager)
            self._heads.spent = self._activations.spent
            if self.ranks.world > 1:
                self._slots = self._sized_slots(self._model)
        return self._heads

    def alone(self, logged: Mapping[str, Number]) -> Mapping[str, Number]:
        """Of what was logged, what is not exchanged."""
        if self.ranks.world == 1:
            return logged
        return {name: value for name, value in logged.items() if name not in self._exchanged}

    @property
    def autocast(self) -> tuple[torch.dtype | None] | None:
        """What was seen of autocast in a forward pass."""
        return self._embeddings.autocast or self._activations.autocast

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self._reader.device

    def read(self) -> Gradients:
        """The gradients as they are now."""
        return self._reader.read()

    def holds(self, gradients: Gradients) -> bool:
        """Whether the parameters still have these gradients, clipped or not."""
        return self._reader.holds(gradients)

    def measure_step(
        self,
        number: int,
        loss: Tensor | None,
        grad_norm: Tensor | None,
        gradients: Gradients | None = None,
        *,
        step_s: float | None = None,
        token_losses: Tensor | None,
        loss_scale: Tensor | None,
        logged: Mapping[str, Number] = MappingProxyType({}),
    ) -> StepSignals:
        """Measure a step before its update: by ``gradients`` if they were read before, else by those of now.

        A rank without a ``loss`` takes that of the others.
        """
        if gradients is None and grad_norm is None:
            gradients = self.read()
        if not self._is_layout_sure:
            self._make_layout_sure(has_loss=loss is not None)
        samples = self._samples(number, gradients, step_s, token_losses, loss_scale)
        samples += self._of_all_ranks(logged)
        if self.ranks.world > 1 and number >= 0:  # no probe
            samples.append(self._own_time())
        self._unsampled = _UnsampledStep(number, gradients, loss_scale)
        if self.ranks.world == 1:
            blocks = tuple(sample.named(sample.numbers) for sample in samples)
            logits = next((sample.numbers for sample in samples if sample.slot == "heads"), None)
            assert loss is not None
            if gradients is None:
                assert grad_norm is not None
                return StepSignals(loss, grad_norm, None, None, blocks, logits=logits)
            return StepSignals(loss, gradients.norms, None, gradients, blocks, logits=logits)
        mine = self._contribution(number, loss, grad_norm, gradients)
        rows = self.ranks.gather(self._padded(mine, samples), number)
        merged = merge(rows[:, : len(FIELDS)], self._standing_on(rows.device))
        _, *columns = rows.split([len(FIELDS), *self._slots.values()], dim=1)
        parts = dict(zip(self._slots, columns, strict=True))
        together = {s.slot: s.together(parts[s.slot][:, : s.numbers.numel()]) for s in samples}
        blocks = tuple(s.named(together[s.slot]) for s in samples)
        compared = len(MERGED) if number % CHECKSUM_STEPS == 0 else MERGED.index("ranks_differ")
        worst = merged[2] if gradients is not None else None
        agreed: Block = partial(_agreed, number, MERGED[3:compared]), merged[3:compared]
        squares = rows[:, FIELDS.index("square")]
        return StepSignals(
            merged[0],
            merged[1],
            worst,
            gradients,
            (agreed, *blocks),
            squares,
            together.get("heads"),
            self.layout.names,
            self.layout.is_one,
        )

    def _make_layout_sure(self, *, has_loss: bool) -> None:
        """Look at what each rank holds once more, now that there are gradients: once, on all ranks."""
        self._is_layout_sure = True
        self.layout = find_layout(
            self._model, self.ranks.rank, self.ranks.world, self._collective.gather, has_loss=has_loss
        )
        self._weights.goes_by(self.layout)
        self._standing = None
        self._shares_of.clear()

    def _share_names(self) -> None:
        """Learn of the layers that other ranks have."""
        own = {"embeddings": self._embeddings.names, "activations": self._activations.names}
        for slot, names in own.items():
            of_all = self._collective.gather(tuple(names))
            self._names_of_all[slot] = tuple(dict.fromkeys(name for names in of_all for name in names))

    def _standing_on(self, device: torch.device) -> Standing | None:
        """Which ranks are compared with which, where it is not each with each."""
        if not any(self.layout.peers) and not any(self.layout.twins):
            return None
        if self._standing is None:
            self._standing = Standing.of(self.layout.peers, self.layout.twins, device)
        return self._standing

    def ranks_apart(self, number: int) -> dict[str, float]:
        """Which ranks hold other weights than the rest, if a step was made since they were compared; every rank is
        asked. Empty where none does, where each weight is held once, and where ranks are not at the same step."""
        if self.ranks.world == 1 or not self._is_updated or len(set(self.layout.twins)) == self.ranks.world:
            return {}
        self._is_updated = False
        nothing = torch.zeros((), dtype=torch.float64, device=self.device)
        checksum = checksum_of(self._compared, self.device)
        mine = contribution(nothing, nothing, nothing, nothing, None, number, checksum)
        rows = self.ranks.gather(self._padded(mine, ()), number)  # as long as the row of a step
        merged = merge(rows[:, : len(FIELDS)], self._standing_on(rows.device))
        found = dict(zip(MERGED, waited_for(merged), strict=True))
        are_apart = found["ranks_differ"] > 0 and not found["steps_apart"]
        return {name: found[name] for name in ("ranks_differ", "differing_rank")} if are_apart else {}

    @property
    def _compared(self) -> list[Tensor]:
        """The weights of which other ranks hold copies, as this rank has them."""
        return [local(parameter) for parameter in self.layout.compared]

    def updated(self, number: int) -> None:
        """Measure what the update of a step did, for the next row; prepare the next step."""
        self._unsampled = None
        self._is_updated = True
        if self.norms_before is not None:
            self.norms_before.own_time.begin()
        is_measured = self._measured == number
        self._last_change = self._weights.after_update() if is_measured else None
        self._window.took(sampled=is_measured and not self._is_due(number))
        self.get_ready(number + 1)

    def forget_own_time(self) -> None:
        """Something else than the step was done: this rank says nothing of how long it took."""
        if self.norms_before is not None:
            self.norms_before.own_time.forget()

    def get_ready(self, number: int) -> None:
        """Sample the forward pass of a step, if it is to be sampled; that of embeddings always.

        Not of step 0, which a new run begins with before it has seen its model: one that begins it again has the same
        row.
        """
        if number and self._sample_every and not self._sees_embeddings:
            self._embeddings.arm()
            self._sees_embeddings = True
        if number and self.is_sampled(number) and self._blind < BLIND:
            self._activations.arm()
            self._is_armed = True
        has_routers = self._routers.sizes and self.layout.are_alike
        if number and self.is_sampled(number) and has_routers and self._routers_unseen < BLIND:
            self._routers.arm()
            self._are_routers_armed = True
        if self._heads is not None:
            self._heads.disarm()
            self._sees_heads = number > 0 and self.is_sampled(number)
            if self._sees_heads and not self._heads.refused:
                self._heads.arm()

    @property
    def unseen_routers(self) -> str:
        """Why routers are not sampled any more, at the step at which that shows; else empty."""
        if self._routers_unseen != BLIND or self._are_routers_armed:
            return ""
        self._routers_unseen += 1
        reasons = sorted(set(self._routers.left_out.values())) or ["no forward pass was seen, as in compiled code"]
        return f"{len(self._routers.sizes)} routers: {'; '.join(reasons)}"

    def close(self) -> None:
        """Leave the model as it was."""
        self._activations.disarm()
        self._embeddings.disarm()
        self._routers.disarm()
        if self._heads is not None:
            self._heads.disarm()
        self._is_armed = self._sees_embeddings = self._are_routers_armed = self._sees_heads = False
        if self.norms_before is not None:
            self.norms_before.close()

    def named(self, row: Row) -> Row:
        """A row that has arrived, with names in place of tensor and rank numbers."""
        named = dict(row)
        tensor = str(named.pop("worst_tensor", ""))
        holder = int(named.pop("worst_rank", 0))
        rank, excess = named.pop("culprit_rank", None), float(named.pop("culprit_excess", 0.0))
        culprit = "" if rank is None or excess <= CULPRIT_EXCESS else self.layout.on_rank(int(rank))
        if tensor in self.layout.own:
            peers = self.layout.peers
            if not culprit:
                tensor = f"{tensor} of {self.layout.on_rank(holder)}"
            elif peers[holder] != peers[int(rank or 0)]:
                tensor = ""  # that of another stage, which has the same name
        if tensor or culprit:
            named["culprit"] = " on ".join(filter(None, (tensor, culprit)))
        return named

    def state_dict(self) -> dict[str, Any]:
        """The change by the last update, which the next row will report. With several ranks each knows only its part:
        None."""
        change = self._last_change if self.ranks.world == 1 else None
        return {"last_change": None if change is None else change.tolist(), "window": self._window.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue as if the update had just been made; weights and optimizers must be what they were."""
        if "window" in state:  # older states have none, and a run that goes back keeps its own
            self._window.load_state_dict(state["window"])
        saved = state["last_change"]
        self._last_change = None if saved is None else torch.tensor(saved, dtype=torch.float64, device=self.device)

    def _samples(
        self,
        number: int,
        gradients: Gradients | None,
        step_s: float | None,
        token_losses: Tensor | None,
        loss_scale: Tensor | None,
    ) -> list[_Sample]:
        device = self.device
        samples = []
        if step_s is not None and self.ranks.world > 1:
            slowest = torch.full((1,), step_s, dtype=torch.float64, device=device)
            samples.append(_Sample("step_s", slowest, largest, lambda n: (("step_s",), n)))
        if self._last_change is not None:
            samples.append(_Sample("changes", self._last_change, summed, self._weights.changes))
        if self._sees_embeddings:
            samples += self._activation_samples(*self._embeddings.collect(), of=self._embeddings, slot="embeddings")
        if self._is_armed:
            self._activations.disarm()
            self._is_armed = False
            names, values = self._activations.collect()
            self._blind = 0 if names or self.ranks.world > 1 else self._blind + 1
            samples += self._activation_samples(names, values, of=self._activations, slot="activations")
        if self._are_routers_armed:
            samples += self._router_samples()
        if self._sees_heads:
            samples += self._head_samples(number)
        if self.is_sampled(number):
            samples += self._sizes(number, gradients, loss_scale)
            samples += self._scale_samples() if self._has_scales else []
        if token_losses is not None:
            counts = token_loss_histogram(token_losses, token_losses != 0)  # ignored targets have a loss of 0
            samples.append(_Sample("histogram", counts, summed, lambda n: (("token_loss_histogram",), n)))
        return samples

    @property
    def _has_scales(self) -> bool:
        """Whether there are scales of eight bits; of layers that not all ranks have they are not exchanged."""
        return self._scales.has_any and self.layout.are_alike

    def _own_time(self) -> _Sample:
        """How long this rank worked by itself, and now and then who takes longest."""
        assert self.norms_before is not None
        if self._own_times is None:
            self._own_times = OwnTimes(self.layout.peers, self.device)
        seconds = torch.full((1,), self.norms_before.own_time.seconds(), dtype=torch.float64, device=self.device)
        return _Sample("own_s", seconds.nan_to_num(ABSENT), self._slowest, partial(block_if_any, FOUND))

    def _slowest(self, times: Tensor) -> Tensor:
        assert self._own_times is not None
        self._own_times.add(times[:, 0])
        return self._own_times.slowest() if self._own_times.is_due else times.new_zeros(0)

    def _sizes(self, number: int, gradients: Gradients | None, loss_scale: Tensor | None) -> list[_Sample]:
        """Weights, moments and gradients, as they are before the update."""
        self._measured = number
        samples = [_Sample("norms", self._weights.before_update(), summed, self._weights.norms)]
        if gradients is not None:
            samples.append(self._group_norms(gradients))
        if loss_scale is not None and gradients is not None:
            share = underflow_share(gradients.tensors, loss_scale).reshape(1)
            samples.append(_Sample("underflow", share, mean_of_sent, lambda n: (("underflow_share",), n)))
        return samples

    def _of_all_ranks(self, logged: Mapping[str, Number]) -> list[_Sample]:
        """What was logged on some ranks: values, and where there is one. All ranks send them at every step, since none
        knows what another has."""
        if not self._exchanged or self.ranks.world == 1:
            return []
        if logged:
            values = [float(logged.get(name, 0.0)) for name in self._exchanged]
            there = [float(name in logged) for name in self._exchanged]
            numbers = sent(torch.tensor(values + there, dtype=torch.float64), self.device)
        else:
            numbers = torch.zeros(2 * len(self._exchanged), dtype=torch.float64, device=self.device)
        return [_Sample("logged", numbers, summed, partial(block_of_means, self._exchanged))]

    def _activation_samples(
        self, names: tuple[str, ...], values: Tensor, *, of: ActivationSampler, slot: str
    ) -> list[_Sample]:
        """Norms are averaged over ranks; of logits the largest counts."""
        if self.ranks.world > 1:  # a layer may be dropped on one rank and not on another
            by_name = dict(zip(names, values.unbind(), strict=True))
            of_all = self._names_of_all.get(slot)
            names = tuple(of.names) if of_all is None else of_all
            absent = torch.full((), ABSENT, device=self.device)
            values = torch.stack([by_name.get(name, absent).to(absent) for name in names]) if names else values
        norms = sum(name.startswith("activation_norm/") for name in names)
        kinds = (
            (slot, names[:norms], values[:norms], mean_of_sent),
            ("logits", names[norms:], values[norms:], largest),
        )
        return [_Sample(slot, part, together, partial(block, some)) for slot, some, part, together in kinds if some]

    def _scale_samples(self) -> list[_Sample]:
        """The scales of what is in eight bits: of several ranks the summaries alone."""
        found = self._scales.read()
        if self.ranks.world == 1:
            if found is None:
                return []
            tensors, numbers = found
            return [_Sample("scales", numbers, summed, partial(self._scales.named, tensors))]
        absent = torch.full((len(low_precision.SUMMARIES),), ABSENT, device=self.device)
        numbers = absent if found is None else found[1][: len(absent)]
        return [_Sample("scales", numbers, low_precision.together, partial(self._scales.named, ()))]

    def _router_samples(self) -> list[_Sample]:
        """What the routers did: choices are added over ranks if a row holds them, else summaries are averaged."""
        self._routers.disarm()
        self._are_routers_armed = False
        routed = self._routers.collect()
        self._routers_unseen = 0 if routed is not None or self.ranks.world > 1 else self._routers_unseen + 1
        if self.ranks.world == 1:
            return [] if routed is None else [_Sample("routers", routed.numbers, summed, routed.named)]
        whole = self._routers.nothing(self.device)
        if routed is None or routed.sizes != whole.sizes:  # every rank sends as much
            routed = whole
        if routed.has_loads:
            return [_Sample("routers", routed.numbers, sum_of_sent, routed.named)]
        summaries = routed.summaries(routed.numbers).nan_to_num(nan=ABSENT)
        return [_Sample("routers", summaries, mean_of_sent, routed.named_summaries)]

    def _head_samples(self, number: int) -> list[_Sample]:
        """The largest logit of each head, over all ranks."""
        assert self._heads is not None
        self._heads.disarm()
        self._sees_heads = False
        seen = self._heads.collect()
        if seen is None:
            if self.ranks.world == 1:
                return []
            nothing = math.nan if self._heads.refused else -math.inf  # where one rank cannot, none does
            seen = torch.full((self._heads.size,), nothing, device=self.device)
        named = partial(self._heads.named, number)
        return [_Sample("heads", seen, largest, lambda numbers: (named, numbers))]

    def _sized_slots(self, model: nn.Module) -> dict[str, int]:
        """Number of places for each kind of signal: every row has the same length on every rank and step.

        Ranks may see different signals, but they must send equally many numbers, or the exchange fails.
        """
        own = (name for name, _ in model.named_parameters())
        groups = len(self.layout.groups or Groups(own, merged_groups(model)).names)
        activations = self._names_of_all.get("activations", self._activations.names)
        norms = sum(name.startswith("activation_norm/") for name in activations)
        experts = sum(size for _, size in self._routers.sizes) if self.layout.are_alike else 0
        return {
            "step_s": 1,
            "own_s": 1,
            "changes": 1 + 2 * groups,
            "embeddings": len(self._names_of_all.get("embeddings", self._embeddings.names)),
            "activations": norms,
            "logits": len(activations) - norms,
            "norms": groups + 3,
            "group_norms": groups,
            "underflow": 1,
            "histogram": 33,
            "scales": len(low_precision.SUMMARIES) if self._has_scales else 0,
            "routers": 3 + experts if experts <= MOST_LOADS else SUMMARIES if experts else 0,
            "logged": 2 * len(self._exchanged),
            "heads": 0 if self._heads is None else self._heads.size,
        }

    def _padded(self, mine: Tensor, samples: Sequence[_Sample]) -> Tensor:
        """A rank's row: its numbers in their places."""
        said = {sample.slot: sample.numbers.to(mine) for sample in samples}
        parts = [mine]
        for slot, size in self._slots.items():
            numbers = said.get(slot, mine[:0])
            parts += [numbers, torch.full((size - numbers.numel(),), ABSENT, dtype=mine.dtype, device=mine.device)]
        return torch.cat(parts)

    def _group_norms(self, gradients: Gradients) -> _Sample:
        if gradients.names != self._groups_of:
            groups = Groups(gradients.names, merged_groups(self._model), self.layout.groups)
            self._groups_of, self._groups = gradients.names, groups
        names = tuple(f"grad_norm/{group}" for group in self._groups.names)
        squares = self._groups.sum_by_group(self._shares(gradients))
        return _Sample("group_norms", squares, summed, lambda total: (partial(_square_roots, names), total))

    def _shares(self, gradients: Gradients) -> Tensor:
        """The square of each norm, divided among the ranks that hold the same gradient."""
        squares = gradients.norms.square()
        world = self.ranks.world
        if world == 1:
            return squares
        if gradients.names not in self._shares_of:
            by_name = self._reader.by_name
            copies = self.layout.copies_of
            held = [1 / copies(by_name[name]) if name in by_name else 1 / world for name in gradients.names]
            self._shares_of = {gradients.names: sent(torch.tensor(held, dtype=squares.dtype), squares.device)}
        return squares * self._shares_of[gradients.names]

    def _contribution(
        self, number: int, loss: Tensor | None, grad_norm: Tensor | None, gradients: Gradients | None
    ) -> Tensor:
        world = self.ranks.world
        checksum = torch.zeros(2, dtype=torch.int64, device=self.device)
        if number % CHECKSUM_STEPS == 0:
            checksum = checksum_of(self._compared, self.device)
        if gradients is None:
            assert grad_norm is not None
            square, worst_norm, worst = grad_norm.square() / world, grad_norm, torch.zeros_like(grad_norm)
        else:
            worst = self._place_in_all(gradients)
            square = self._shares(gradients).sum()
            worst_norm = gradients.norms.max() if gradients.names else torch.zeros_like(square)
        before = self.norms_before.collect() if self.norms_before else None
        return contribution(loss, square, worst_norm, worst, before, number, checksum)

    def _place_in_all(self, gradients: Gradients) -> Tensor:
        """The gradient with the largest norm, by its place in the names of all ranks."""
        names = gradients.names
        if names not in self._places_of:
            place = {name: at for at, name in enumerate(self.layout.names)}
            table = torch.tensor([place.get(name, len(place) - 1) for name in names or ("",)], dtype=torch.float64)
            self._places_of = {names: sent(table, self.device)}
        return self._places_of[names].gather(0, gradients.worst().reshape(1))[0]


def _square_roots(names: tuple[str, ...], squares: list[float]) -> dict[str, float]:
    return dict(zip(names, map(math.sqrt, squares), strict=True))


def _agreed(step: int, names: tuple[str, ...], numbers: list[float]) -> dict[str, float]:
    """Signals that the ranks found together. A row's first block, since the rest means nothing if their steps
    differ."""
    found = dict(zip(names, numbers, strict=True))
    if not found.pop("losses"):
        raise ConfigError(f"step {step}: loss=None on every rank: give it on those with the last stage of the pipeline")
    if apart := found.pop("steps_apart"):
        raise ConfigError(
            f"step {step}: the guards of the ranks are {apart:.0f} steps apart; restore the guard's state on every "
            "rank, from the same checkpoint"
        )
    return found
