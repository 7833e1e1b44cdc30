"""An experiment in, its arms out: what is changed in each, and which cause that takes away or adds."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from sealegs.replay.experiment import Change, Experiment
from sealegs.replay.subject import Subject, Text
from sealegs.signals.weights import FIRST_MOMENTS, SECOND_MOMENTS

Kind: TypeAlias = Literal["placebo", "without", "with"]
"""Harmless; takes a cause away; brings it into a healthy stretch."""

JUMP = 1.5
"""By what factor a learning rate must have risen from one step to the next to be a jump."""
TAIL = 0.1
"""Of the text: what the rare tokens make up together."""
OLDER = 8
"""Steps that a state must be older by to be another one."""
SLOWLY = 16
"""Steps before the others from which on the learning rate is lower: what is too high has done its harm slowly."""
STALE = 0.99
"""A beta2 above this remembers gradients for more than a hundred steps ..."""
FRESH = 0.95
"""... and below this for twenty, ..."""
FORGETS = 16
"""... so that after so many steps more than half of what it knew is forgotten."""
OF_USE = 0.25
"""Of what a model knows beyond the frequencies of tokens: what must be left of it for a batch of real text."""
MOST_MASKED = 0.5
"""Of a batch: without more it is another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One rerun."""

    name: str
    kind: Kind
    cause: str
    """A card of ``causes.toml``; empty where there is none for it."""
    does: str
    """In words."""
    change: Change
    asks: Literal["all", "damage"] = "all"
    """What counts: whether the loss is high at all, or whether the weights are damaged in the end, if that shows."""


def arms(experiment: Experiment) -> Iterator[Arm]:
    """The cheapest first, as far as the incident can be asked that way."""
    yield one_ulp()
    if experiment.loop.subject.text is not None:
        turned = Change(batches=lambda _, batches: tuple(map(_turned, batches)))
        yield _placebo("other order", "the rows of every batch in another order", turned)
    yield from _of_data(experiment)
    yield from _of_rates(experiment)
    yield from _of_moments(experiment)
    yield from _of_precision(experiment)


def _placebo(name: str, does: str, change: Change) -> Arm:
    return Arm(name=name, kind="placebo", cause="", does=does, change=change)


def one_ulp(seed: int = 0) -> Arm:
    """A placebo, of which there are as many as one likes."""
    does = "the last bit of every weight is rounded otherwise"
    return _placebo(
        f"one ulp{f' ({seed})' if seed else ''}", does, Change(before=lambda subject: _round(subject, seed))
    )


def shaken(arm: Arm, seed: int) -> Arm:
    """An arm once more, with that placebo on top."""

    def before(subject: Subject) -> None:
        _round(subject, seed)
        arm.change.before(subject)

    return replace(arm, name=f"{arm.name} ({seed})", change=replace(arm.change, before=before))


@torch.no_grad()
def _round(subject: Subject, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in subject.model.parameters():
        up = torch.rand(parameter.shape, generator=generator).to(parameter.device) < 0.5
        toward = torch.where(up, math.inf, -math.inf).to(parameter.dtype)
        parameter.copy_(torch.nextafter(parameter, toward))


def _turned(batch: Any) -> Any:
    """A batch with its rows in the opposite order."""
    if isinstance(batch, dict):
        return {name: _turned(part) for name, part in batch.items()}
    if isinstance(batch, Tensor):
        return batch.flip(0)
    return batch[::-1].copy() if isinstance(batch, np.ndarray) else batch


# The data.


def _of_data(experiment: Experiment) -> Iterator[Arm]:
    onset, oldest, before = experiment.onset, experiment.oldest, experiment.before()
    if before:
        yield Arm(
            name="other batches",
            kind="without",
            cause="bad-data-batch",
            does=f"from step {onset} on, batches from before",
            change=Change(batches=lambda step, b: b if step < onset else before[step % len(before)]),
        )
    if experiment.first - oldest >= OLDER and not experiment.was_stuck:
        yield Arm(
            name="older state",
            kind="with",
            cause="bad-data-batch",
            does=f"the batches from step {onset} on, with the state of step {oldest}",
            change=Change(first=onset, state_of=oldest),
        )
    if repeated := experiment.repeated & set(range(oldest, experiment.window.stop)):
        yield Arm(
            name="no repetition",
            kind="without",
            cause="duplicate-batch",
            does=f"the updates of {len(repeated)} repeated batches are left out, from step {min(repeated)} on",
            change=Change(first=min(repeated), applied=lambda step: step not in repeated, usual=experiment.fresh),
        )
    text, tail = experiment.loop.subject.text, tail_of(experiment)
    if (
        text is not None
        and tail is not None
        and 0 < tail.share_of(text, experiment.batches_of(experiment.peak)) <= MOST_MASKED
    ):

        def mask(step: int, batches: tuple[Any, ...]) -> tuple[Any, ...]:
            return batches if step < onset else tuple(tail.masked(text, batch) for batch in batches)

        yield Arm(
            name="rare tokens masked",
            kind="without",
            cause="long-tail-token",
            does=f"targets that are rare ({tail}) do not count",
            change=Change(batches=mask),
        )


@dataclass(frozen=True, slots=True)
class Tail:
    """The tokens that are rare: the least frequent ones that together make up a small part of the text."""

    common: Tensor
    """All other token ids."""
    kinds: float
    """Which part of all kinds of tokens the rare ones are."""

    def share_of(self, text: Text, batches: tuple[Any, ...]) -> float:
        """Which part of the targets of batches is rare."""
        targets = torch.cat([text.targets(batch).flatten() for batch in batches])
        return float(self.are_rare(targets).sum() / (targets >= 0).sum().clamp(min=1))

    def masked(self, text: Text, batch: Any) -> Any:
        """A batch in which they do not count."""
        return text.without(batch, self.are_rare(text.targets(batch)))

    def are_rare(self, targets: Tensor) -> Tensor:
        """Which targets are, of those that count."""
        return (targets >= 0) & ~torch.isin(targets, self.common)

    def __str__(self) -> str:
        return f"{self.kinds:.0%} of the vocabulary, {TAIL:.0%} of the text"


def tail_of(experiment: Experiment) -> Tail | None:
    """By the counts of the corpus, where the subject has them; else by those in the batches before."""
    text = experiment.loop.subject.text
    if text is None:
        return None
    counts = counts_of(experiment)
    if counts is None:
        return None
    order = counts.argsort(descending=True)
    covered = counts[order].cumsum(0) / counts.sum()
    common = order[: int((covered < 1 - TAIL).sum()) + 1]
    return Tail(common, 1 - len(common) / len(counts))


def counts_of(experiment: Experiment) -> Tensor | None:
    """How often each token occurs: in the corpus, where the subject knows; else in the batches before the onset."""
    text, before = experiment.loop.subject.text, experiment.before()
    if text is None or not before:
        return None
    if text.counts is not None:
        return text.counts
    ids = torch.cat([text.targets(batch).flatten() for batches in before for batch in batches])
    here = torch.cat([text.targets(batch).flatten() for batch in experiment.batches_of(experiment.peak)])
    return torch.bincount(ids[ids >= 0], minlength=int(max(ids.max(), here.max())) + 1)


def surprise(experiment: Experiment) -> "TokenSurprise | None":
    """What the tokens of the dearest batch cost; None where batches are no text."""
    text, counts = experiment.loop.subject.text, counts_of(experiment)
    if text is None or counts is None:
        return None
    costs = -((counts + 0.5) / (counts + 0.5).sum()).log()
    targets = torch.cat([text.targets(batch).flatten() for batch in experiment.batches_of(experiment.peak)])
    return TokenSurprise(
        float(costs[targets[targets >= 0]].mean()), float(costs.mean()), float((counts * costs).sum() / counts.sum())
    )


@dataclass(frozen=True, slots=True)
class TokenSurprise:
    """What the tokens of a batch cost a model that knows nothing but how frequent each is."""

    batch: float
    random: float
    """A batch drawn at random, each token as likely as another."""
    usual: float
    """A batch of the text."""

    def __str__(self) -> str:
        return (
            f"by their frequencies alone their tokens cost {self.batch:.2f}, those of the text {self.usual:.2f}, and "
            f"tokens drawn at random {self.random:.2f}"
        )


def is_of_rare_tokens(experiment: Experiment) -> str | None:
    """Whether the dearest batch is made of rare tokens, more than one that is drawn at random would be; in words."""
    text, tail = experiment.loop.subject.text, tail_of(experiment)
    if text is None or tail is None:
        return None
    share = tail.share_of(text, experiment.batches_of(experiment.peak))
    if share < (1 + tail.kinds) / 2:
        return None
    return f"{share:.0%} of the targets of step {experiment.peak} are rare ({tail})"


def is_garbage(experiment: Experiment, loss: float, cost: TokenSurprise) -> bool:
    """Whether the model is of no use for a batch: hardly better than one that knows how frequent each token is."""
    return cost.batch - loss < OF_USE * (cost.usual - experiment.usual.loss)


# The learning rate.


def _of_rates(experiment: Experiment) -> Iterator[Arm]:
    rates = {step: float(row["lr"]) for step, row in experiment.rows.items() if step < experiment.window.stop}
    jumps = [step for step in rates if step >= experiment.oldest and rates[step] > JUMP * rates.get(step - 1, math.inf)]
    if jumps:
        jump = jumps[0]
        before, factor = rates[jump - 1], rates[jump] / rates[jump - 1]
        yield Arm(
            name="rate from before",
            kind="without",
            cause="lr-discontinuity",
            asks="damage",
            does=f"the learning rate of step {jump - 1} from step {jump} on, {before:.3g} instead of {rates[jump]:.3g}",
            change=Change(first=jump, lr=lambda step, lr: before),
        )
        if spare := [experiment.batches_of(step) for step in range(experiment.oldest, jump)]:
            yield Arm(
                name="rate elsewhere",
                kind="with",
                cause="lr-discontinuity",
                asks="damage",
                does=f"batches from before, the learning rate times {factor:.3g} as it was",
                change=Change(first=jump, batches=lambda step, b: spare[step % len(spare)]),
            )
        return
    first = max(experiment.oldest, experiment.first - SLOWLY)
    for factor in (0.5, 0.1):
        yield Arm(
            name=f"rate x{factor}",
            kind="without",
            cause="lr-too-high",
            asks="damage",
            does=f"the learning rate times {factor} from step {first} on",
            change=Change(first=first, lr=lambda _, lr, factor=factor: lr * factor),  # type: ignore[misc]
        )


# The optimizer.


def _of_moments(experiment: Experiment) -> Iterator[Arm]:
    states = [state for optimizer in experiment.loop.subject.optimizers for state in optimizer.state.values()]
    if not any(name in state for state in states for name in SECOND_MOMENTS):
        return
    slow = max((group["betas"][1] for group in groups_of(experiment) if "betas" in group), default=0.0)
    if slow > STALE and experiment.first - experiment.oldest >= FORGETS:
        yield Arm(
            name="second moment fresh",
            kind="without",
            cause="stale-beta2",
            asks="damage",
            does=f"beta2 is {FRESH} instead of {slow:g} from step {experiment.oldest} on",
            change=Change(first=experiment.oldest, before=lambda subject: set_beta2(subject.optimizers, FRESH)),
        )
    yield Arm(
        name="first moment zeroed",
        kind="without",
        cause="",
        asks="damage",
        does=f"the first moment is zero at step {experiment.onset}",
        change=Change(first=experiment.onset, before=zero_first),
    )


def groups_of(experiment: Experiment) -> list[dict[str, Any]]:
    """The groups of all optimizers, with their settings."""
    return [group for optimizer in experiment.loop.subject.optimizers for group in optimizer.param_groups]


def set_beta2(optimizers: Sequence[Optimizer], beta2: float) -> None:
    """Let second moments average over fewer steps, or more. Their bias is corrected by the beta that they have now, so
    they are scaled to go on from what they were."""
    groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups if "betas" in group]
    for optimizer, group in groups:
        beta1, before = group["betas"]
        group["betas"] = (beta1, beta2)
        for state in (optimizer.state[parameter] for parameter in group["params"] if optimizer.state[parameter]):
            done = float(state["step"])
            for moment in (state[name] for name in SECOND_MOMENTS if name in state):
                moment.mul_((1 - beta2**done) / (1 - before**done))


def zero_first(subject: Subject) -> None:
    """Forget where the updates were going."""
    for _, moment in _moments(subject, FIRST_MOMENTS):
        moment.zero_()


def zero(names: Sequence[str], subject: Subject) -> None:
    """Forget what was gathered of gradients, as a resume without the optimizer's state does, or with a part of it."""
    for _, moment in _moments(subject, names):
        moment.zero_()


LOST: dict[str, Callable[[Subject], None]] = {
    "its moments": partial(zero, (*FIRST_MOMENTS, *SECOND_MOMENTS)),
    "its second moment": partial(zero, SECOND_MOMENTS),
    "its first moment": partial(zero, FIRST_MOMENTS),
}
"""What an optimizer can be without."""


def _moments(subject: Subject, names: Sequence[str]) -> Iterator[tuple[Tensor, Tensor]]:
    for optimizer in subject.optimizers:
        for parameter, state in optimizer.state.items():
            for name in names:
                if isinstance(moment := state.get(name), Tensor) and moment.shape == parameter.shape:
                    yield parameter, moment


# Precision.


def _of_precision(experiment: Experiment) -> Iterator[Arm]:
    subject = experiment.loop.subject
    if subject.precision is None or subject.scaler is None or not subject.scaler.is_enabled():
        return
    yield Arm(
        name="fp32",
        kind="without",
        cause="fp16-overflow",
        does="everything is computed in fp32",
        change=Change(precision="fp32"),
    )
