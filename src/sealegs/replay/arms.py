"""The arms of an experiment: ablation reruns, each of which takes one possible cause away or adds it."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from sealegs.replay.experiment import Change, Experiment
from sealegs.replay.subject import Subject, Text
from sealegs.signals.weights import FIRST_MOMENTS, SECOND_MOMENTS

Kind: TypeAlias = Literal["placebo", "without", "with"]
"""``placebo`` changes nothing that matters, ``without`` takes a cause away, ``with`` adds it to a healthy stretch."""

JUMP = 1.5
"""Factor by which a learning rate must rise from one step to the next to be a jump."""
TAIL = 0.1
"""Share of the text that the rare tokens make up together."""
OLDER = 8
"""Steps by which a state must be older to count as another one."""
SLOWLY = 16
"""Steps by which a lower learning rate starts earlier than the other changes: too high a rate does its harm slowly."""
STALE = 0.99
"""A beta2 above this remembers gradients for more than a hundred steps."""
FRESH = 0.95
"""The beta2 of the arm with a fresh second moment: it remembers gradients for twenty steps."""
FORGETS = 16
"""Steps after which a second moment with that beta2 has forgotten more than half of its past."""
OF_USE = 0.25
"""Share of its knowledge beyond token frequencies that a model must keep on a batch of real text."""
IN_PART = 0.6
"""The same, where about half of the rows may be none."""
MOST_MASKED = 0.5
"""Largest share of a batch that an arm may mask: with more masked it is another batch."""
IN_ORDER = 0.9
"""Share of the different pairs of a random order that text has at the most."""
SHUFFLES = 99
"""Orders of the same tokens that a text has to differ from: by chance it does in 1 of 100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One ablation rerun."""

    name: str
    kind: Kind
    cause: str
    """A card of ``causes.toml``; empty where there is none for it."""
    does: str
    """The change in words."""
    change: Change
    asks: Literal["all", "damage"] = "all"
    """What the arm measures: any high loss, or only damage to the weights in the end if the incident shows any."""


def arms(experiment: Experiment) -> Iterator[Arm]:
    """The arms that this incident allows, the cheapest first."""
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
    """A placebo that rounds the weights by one unit in the last place. Every seed gives another one."""
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
        if not parameter.requires_grad:  # states leave these out
            continue
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


# The data


def _of_data(experiment: Experiment) -> Iterator[Arm]:
    onset, oldest, before = experiment.onset, experiment.oldest, experiment.before()
    jump = _jump_of(experiment)
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
            does=f"the batches from step {onset} on, with the state of step {oldest}"
            + (f" and the learning rate of step {jump.step - 1}" if jump is not None else ""),
            change=Change(first=onset, state_of=oldest, lr=_without(jump)),
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
    """The rare tokens: the least frequent ones that together make up a small part of the text."""

    common: Tensor
    """All other token ids."""
    kinds: float
    """The share of the vocabulary that is rare."""

    def share_of(self, text: Text, batches: tuple[Any, ...]) -> float:
        """The share of the targets of some batches that is rare."""
        targets = torch.cat([text.targets(batch).flatten() for batch in batches])
        return float(self.are_rare(targets).sum() / (targets >= 0).sum().clamp(min=1))

    def masked(self, text: Text, batch: Any) -> Any:
        """A batch in which rare targets do not count."""
        return text.without(batch, self.are_rare(text.targets(batch)))

    def are_rare(self, targets: Tensor) -> Tensor:
        """A mask of the rare targets among those that count."""
        return (targets >= 0) & ~torch.isin(targets, self.common)

    def __str__(self) -> str:
        return f"{self.kinds:.0%} of the vocabulary, {TAIL:.0%} of the text"


def tail_of(experiment: Experiment) -> Tail | None:
    """The rare tokens by the counts of the corpus if the subject has them, otherwise of the batches before."""
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
    """How often each token occurs: in the corpus if the subject knows, otherwise in the batches before the onset."""
    text, before = experiment.loop.subject.text, experiment.before()
    if text is None or not before:
        return None
    if text.counts is not None:
        return text.counts
    ids = torch.cat([text.targets(batch).flatten() for batches in before for batch in batches])
    here = torch.cat([text.targets(batch).flatten() for batch in experiment.batches_of(experiment.peak)])
    return torch.bincount(ids[ids >= 0], minlength=int(max(ids.max(), here.max())) + 1)


def surprise(experiment: Experiment) -> "TokenSurprise | None":
    """The surprise of the tokens in the highest-loss batch; None where batches are not text."""
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
    """The mean loss that a unigram model, which knows only token frequencies, has on a batch."""

    batch: float
    random: float
    """On a batch of tokens drawn uniformly."""
    usual: float
    """On a batch of the text."""

    def __str__(self) -> str:
        return (
            f"by their frequencies alone their tokens cost {self.batch:.2f}, those of the text {self.usual:.2f}, and "
            f"tokens drawn at random {self.random:.2f}"
        )


def is_of_rare_tokens(experiment: Experiment) -> str | None:
    """A sentence if the highest-loss batch has more rare tokens than a randomly drawn one would; otherwise None."""
    text, tail = experiment.loop.subject.text, tail_of(experiment)
    if text is None or tail is None:
        return None
    share = tail.share_of(text, experiment.batches_of(experiment.peak))
    if share < (1 + tail.kinds) / 2:
        return None
    return f"{share:.0%} of the targets of step {experiment.peak} are rare ({tail})"


def are_in_the_order_of_text(experiment: Experiment) -> bool:
    """Whether the tokens of the highest-loss batch follow each other as in a text, whatever they are.

    Then fewer different pairs of neighbours occur than in any random order of the same tokens, by a tenth or more: one
    drawing in a hundred has a few less by chance.
    """
    text = experiment.loop.subject.text
    assert text is not None
    rows = torch.cat([text.targets(batch) for batch in experiment.batches_of(experiment.peak)]).cpu().numpy()
    random, count, are_tokens, shuffled = np.random.default_rng(0), _different_pairs(rows), rows >= 0, []
    for _ in range(SHUFFLES):
        rows[are_tokens] = random.permutation(rows[are_tokens])
        shuffled.append(_different_pairs(rows))
        if shuffled[-1] <= count:
            return False
    return count <= IN_ORDER * float(np.median(shuffled))


def _different_pairs(rows: NDArray[np.int64]) -> int:
    left, right = rows[:, :-1], rows[:, 1:]
    both = (left >= 0) & (right >= 0)
    return len(set(zip(left[both].tolist(), right[both].tolist(), strict=True)))


def is_garbage(experiment: Experiment, loss: float, cost: TokenSurprise, of_use: float = OF_USE) -> bool:
    """Whether the model does hardly better on a batch than token frequencies alone."""
    return cost.batch - loss < of_use * (cost.usual - experiment.usual.loss)


# The learning rate


@dataclass(frozen=True, slots=True)
class Jump:
    """A sudden rise of the learning rate."""

    step: int
    before: float
    after: float


def _jump_of(experiment: Experiment) -> Jump | None:
    """The first jump of the learning rate in the rows that are run again."""
    rates = {step: float(row["lr"]) for step, row in experiment.rows.items() if step < experiment.window.stop}
    jumps = (step for step in rates if step >= experiment.oldest and rates[step] > JUMP * rates.get(step - 1, math.inf))
    return next((Jump(step, rates[step - 1], rates[step]) for step in jumps), None)


def _without(jump: Jump | None) -> Callable[[int, float], float]:
    """The learning rate as it would be without a jump."""
    return lambda step, lr: lr if jump is None or step < jump.step else jump.before


def _of_rates(experiment: Experiment) -> Iterator[Arm]:
    jump = _jump_of(experiment)
    if jump is not None:
        yield Arm(
            name="rate from before",
            kind="without",
            cause="lr-discontinuity",
            asks="damage",
            does=f"the learning rate of step {jump.step - 1} from step {jump.step} on, {jump.before:.3g} instead of "
            f"{jump.after:.3g}",
            change=Change(first=jump.step, lr=_without(jump)),
        )
        if spare := [experiment.batches_of(step) for step in range(experiment.oldest, jump.step)]:
            yield Arm(
                name="rate elsewhere",
                kind="with",
                cause="lr-discontinuity",
                asks="damage",
                does=f"batches from before, the learning rate times {jump.after / jump.before:.3g} as it was",
                change=Change(first=jump.step, batches=lambda step, b: spare[step % len(spare)]),
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


# The optimizer


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
    """The parameter groups of all optimizers."""
    return [group for optimizer in experiment.loop.subject.optimizers for group in optimizer.param_groups]


def set_beta2(optimizers: Sequence[Optimizer], beta2: float) -> None:
    """Set beta2. Adam corrects the bias with the present beta, so the moments are rescaled to continue smoothly."""
    groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups if "betas" in group]
    for optimizer, group in groups:
        beta1, before = group["betas"]
        group["betas"] = (beta1, beta2)
        for state in (optimizer.state[parameter] for parameter in group["params"] if optimizer.state[parameter]):
            done = float(state["step"])
            for moment in (state[name] for name in SECOND_MOMENTS if name in state):
                moment.mul_((1 - beta2**done) / (1 - before**done))


def zero_first(subject: Subject) -> None:
    """Zero the first moment."""
    for _, moment in _moments(subject, FIRST_MOMENTS):
        moment.zero_()


def zero(names: Sequence[str], subject: Subject) -> None:
    """Zero the named moments, as a resume does that loses the optimizer's state or a part of it."""
    for _, moment in _moments(subject, names):
        moment.zero_()


LOST: dict[str, Callable[[Subject], None]] = {
    "its moments": partial(zero, (*FIRST_MOMENTS, *SECOND_MOMENTS)),
    "its second moment": partial(zero, SECOND_MOMENTS),
    "its first moment": partial(zero, FIRST_MOMENTS),
}
"""What a resume can lose of an optimizer."""


def _moments(subject: Subject, names: Sequence[str]) -> Iterator[tuple[Tensor, Tensor]]:
    for optimizer in subject.optimizers:
        for parameter, state in optimizer.state.items():
            for name in names:
                if isinstance(moment := state.get(name), Tensor) and moment.shape == parameter.shape:
                    yield parameter, moment


# Precision


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
