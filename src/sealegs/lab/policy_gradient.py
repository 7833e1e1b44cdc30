"""A policy-gradient toy, to be read top to bottom: GRPO teaches a tiny transformer to copy digits, guarded.

A question is some digits, its answer the same digits and the end token. An answer's reward is the share of its places
that are right, so anyone can check it. A step reads some questions, each answered by a group of samples: what an answer
is worth is how much better it is than its group. Two updates are made of each sample, so the second one is a little
off-policy, as in every real run.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from sealegs.errors import ConfigError
from sealegs.guard import Guard
from sealegs.guard_options import Telemetry
from sealegs.lab.model import Transformer
from sealegs.lab.settings import ModelSettings
from sealegs.vocabulary import Sink

DIGITS = 10
"""Token ids 0 to 9 are digits."""
ASKED, END = DIGITS, DIGITS + 1
"""The tokens that end a question and an answer."""
ANSWER, LIMIT = 5, 8
"""Tokens of a right answer, its end included; tokens at which an answer is cut."""
QUESTION = ANSWER
"""Tokens of a question: the digits and ``ASKED``."""


class LoopHooks(Protocol):
    """What the loop hands over on its way, so that it can be broken on purpose (``faults/policy.py``)."""

    def disturb_sampler(self, sampler: nn.Module) -> None:
        """The sampler has the newest weights, and is about to answer."""

    def rewards(self, rewards: Tensor, answers: Tensor, counts: Tensor) -> Tensor:
        """The rewards to go on with."""

    def entropy_weight(self, weight: float) -> float:
        """The factor on the entropy to go on with."""


class NoHooks:
    """Everything as it was."""

    def disturb_sampler(self, sampler: nn.Module) -> None:
        """Nothing is done to it."""

    def rewards(self, rewards: Tensor, answers: Tensor, counts: Tensor) -> Tensor:
        """As they are."""
        return rewards

    def entropy_weight(self, weight: float) -> float:
        """As it is."""
        return weight


Disturb: TypeAlias = Callable[
    [nn.Module, Optimizer, Callable[[], int], Callable[[str], None]], AbstractContextManager[LoopHooks]
]
"""A context that disturbs a model, its optimizer and its loop. It gets a function for the number of the step, and one
that takes a line of text."""


def undisturbed(_: nn.Module, __: Optimizer, *___: object) -> AbstractContextManager[LoopHooks]:
    """The loop unchanged."""
    return nullcontext(NoHooks())


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """A whole run."""

    steps: int = 240
    """Updates of the weights; two are made of each set of samples."""
    seed: int = 0
    """Chooses weights, questions and samples."""
    samples_seed: int = 0
    """Chooses other samples of the same weights and questions."""
    questions: int = 8
    """Questions an update."""
    group: int = 8
    """Answers to each of them."""
    temperature: float = 1.0
    """Of the sampler. Less explores less."""
    lr: float = 6e-4
    """Of the policy."""
    clip_low: float = 0.2
    """An importance ratio below 1 less this earns nothing more."""
    clip_high: float = 0.28
    """The same above 1; more than ``clip_low`` lets rare tokens grow (DAPO)."""
    kl_weight: float = 0.02
    """Factor on the divergence from the reference, the policy as it began."""
    entropy_weight: float = 0.0
    """A bonus for entropy. Below 0 it is the wrong way round."""
    scale_advantages: bool = True
    """Divide what an answer is worth by the spread of its group, as GRPO does."""
    warmup: int = 50
    """Supervised steps before: a policy that is never right is never rewarded."""
    evaluate_steps: int = 20
    """Steps between evaluations on questions that are never trained on."""
    model: ModelSettings = field(
        default_factory=lambda: ModelSettings(
            vocabulary=DIGITS + 2, context=QUESTION + LIMIT, layers=2, width=32, heads=2, hidden=64
        )
    )

    def __post_init__(self) -> None:
        for name in ("steps", "questions", "evaluate_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.group < 2:
            raise ConfigError(f"group={self.group}: a group has 2 answers or more, which are compared")
        if not self.temperature > 0:
            raise ConfigError(f"temperature={self.temperature}: must be above 0")


class Samples(NamedTuple):
    """Answers as the sampler gave them."""

    tokens: Tensor
    """Question and answer, (answers, tokens)."""
    counts: Tensor
    """1 for each token of an answer, its end included, (answers, LIMIT)."""
    logp: Tensor
    """The sampler's log-probability of each of them."""

    @property
    def answers(self) -> Tensor:
        """Without the question."""
        return self.tokens[:, QUESTION:]


@torch.no_grad()
def give_weights(model: Transformer, sampler: Transformer) -> None:
    """Bring the sampler's weights up to date, in the bf16 of inference engines."""
    for theirs, ours in zip(sampler.parameters(), model.parameters(), strict=True):
        theirs.copy_(ours.bfloat16())


def questions(count: int, generator: torch.Generator, *, held_out: bool = False) -> Tensor:
    """Questions drawn at random. One in ten, by the sum of its digits, is kept for evaluation."""
    digits = torch.randint(0, DIGITS, (count * 16, QUESTION - 1), generator=generator)
    is_kept = digits.sum(1) % DIGITS == 0
    chosen = digits[is_kept if held_out else ~is_kept][:count]
    return torch.cat([chosen, torch.full((len(chosen), 1), ASKED)], 1)


def share_right(tokens: Tensor, counts: Tensor) -> Tensor:
    """The check: the share of places at which an answer is right, of those that it or the right one has."""
    right = torch.cat([tokens[:, : QUESTION - 1], torch.full((len(tokens), 1), END)], 1)
    hits = ((tokens[:, QUESTION : QUESTION + ANSWER] == right) * counts[:, :ANSWER]).sum(1)
    return hits / counts.sum(1).clamp(min=ANSWER)


@torch.no_grad()
def sampled(model: Transformer, asked: Tensor, temperature: float) -> Samples:
    """An answer to each question, token by token."""
    tokens, logps, counts = asked, [], []
    going = torch.ones(len(asked))
    for _ in range(LIMIT):
        choices = (model(tokens)[:, -1] / temperature).log_softmax(-1)
        token = torch.multinomial(choices.exp(), 1)
        tokens = torch.cat([tokens, token], 1)
        logps.append(choices.gather(1, token)[:, 0] * going)
        counts.append(going)
        going = going * (token[:, 0] != END)
    return Samples(tokens, torch.stack(counts, 1), torch.stack(logps, 1))


def logp_and_entropy(model: Transformer, samples: Samples, temperature: float) -> tuple[Tensor, Tensor]:
    """The policy's log-probability of each token of the answers, and its entropy there."""
    logits = model(samples.tokens[:, :-1])[:, QUESTION - 1 :] / temperature
    choices = logits.log_softmax(-1)
    return choices.gather(2, samples.answers[..., None])[..., 0], torch.special.entr(choices.exp()).sum(-1)


def divergence(logp: Tensor, other: Tensor) -> Tensor:
    """An estimate of the divergence from another policy that is never negative (k3)."""
    ratio = (other - logp).exp()
    return ratio - (other - logp) - 1


def advantages_of(rewards: Tensor, *, is_scaled: bool) -> Tensor:
    """How much better each answer is than its group, (questions, group)."""
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, keepdim=True) + 1e-4) if is_scaled else centred


def policy_loss(
    settings: PolicySettings,
    model: Transformer,
    samples: Samples,
    advantages: Tensor,
    reference: Tensor,
    entropy_weight: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one update, a mean over tokens, and the signals of the policy."""
    counts = samples.counts

    def mean(of_tokens: Tensor) -> Tensor:
        return (of_tokens * counts).sum() / counts.sum()

    logp, entropy = logp_and_entropy(model, samples, settings.temperature)
    ratio = (logp - samples.logp).exp()
    bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    gain = torch.minimum(ratio * advantages[:, None], bounded * advantages[:, None])
    kl = mean(divergence(logp, reference))
    loss = settings.kl_weight * kl - mean(gain) - entropy_weight * mean(entropy)
    is_clipped = (ratio * advantages[:, None] > gain).float()
    signals = {
        "policy_entropy": mean(entropy),
        "kl": kl,
        "policy_kl": mean(divergence(logp, samples.logp)),
        "clip_share": mean(is_clipped),
        "importance_ratio": mean(ratio),
        "importance_ratio_max": (ratio * counts).max(),
    }
    return loss, {name: each.detach() for name, each in signals.items()}


def reward_signals(rewards: Tensor, samples: Samples) -> dict[str, Tensor]:
    """The signals of rewards and answers; rewards are (questions, group)."""
    ends = ((samples.answers == END) * samples.counts).sum(1)
    return {
        "reward": rewards.mean(),
        "reward_std": rewards.std(),
        "zero_spread_share": (rewards.std(1) < 1e-6).float().mean(),
        "completion_length": samples.counts.sum(1).mean(),
        "cut_share": (ends == 0).float().mean(),
    }


def gap_signals(samples: Samples, trainer: Tensor) -> dict[str, Tensor]:
    """How far the sampler's log-probabilities are from those that the trainer finds with the same weights."""
    gaps = (samples.logp - trainer).abs() * samples.counts
    return {"logp_gap": gaps.sum() / samples.counts.sum(), "logp_gap_max": gaps.max()}


def warm_up(settings: PolicySettings, model: Transformer, generator: torch.Generator) -> None:
    """Some supervised steps on right answers, so that the policy knows what an answer looks like."""
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for _ in range(settings.warmup):
        asked = questions(64, generator)
        whole = torch.cat([asked, asked[:, : QUESTION - 1], torch.full((len(asked), 1), END)], 1)
        logits = model(whole[:, :-1])[:, QUESTION - 1 :]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), whole[:, QUESTION:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_policy(
    settings: PolicySettings,
    run: Path | str | None,
    *,
    disturb: Disturb = undisturbed,
    act: bool = True,
    sinks: Sequence[Sink] = (),
) -> float:
    """Train, recording into the folder ``run``; gives the reward on held-out questions at the end.

    ``disturb`` is for drills.
    """
    torch.manual_seed(settings.seed)
    generator = torch.Generator().manual_seed(settings.seed)
    model = Transformer(settings.model)
    warm_up(settings, model, generator)
    reference, sampler = (copy.deepcopy(model).requires_grad_(False) for _ in range(2))
    optimizer = AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0)
    held_out = questions(64, generator, held_out=True)
    torch.manual_seed(settings.seed + 1_000_003 * settings.samples_seed)
    telemetry = Telemetry(settings={"policy": asdict(settings)}, sinks=sinks)
    with Guard(model, optimizer, run=run, clip=1.0, act=act, telemetry=telemetry) as guard:
        note = partial(guard.watch.note, "fault")
        with disturb(model, optimizer, lambda: guard.number, lambda text: note(text=text)) as hooks:
            while guard.number < settings.steps:
                asked = questions(2 * settings.questions, generator).repeat_interleave(settings.group, 0)
                give_weights(model, sampler)
                hooks.disturb_sampler(sampler)
                samples = sampled(sampler, asked, settings.temperature)
                rewards = hooks.rewards(share_right(samples.tokens, samples.counts), samples.answers, samples.counts)
                rewards = rewards.view(-1, settings.group)
                advantages = advantages_of(rewards, is_scaled=settings.scale_advantages)
                with torch.no_grad():
                    trainer, _ = logp_and_entropy(model, samples, settings.temperature)
                    then, _ = logp_and_entropy(reference, samples, settings.temperature)
                for part in range(2):
                    groups = slice(part * settings.questions, (part + 1) * settings.questions)
                    rows = slice(groups.start * settings.group, groups.stop * settings.group)
                    mine = Samples(*(each[rows] for each in samples))
                    entropy_weight = hooks.entropy_weight(settings.entropy_weight)
                    loss, signals = policy_loss(
                        settings, model, mine, advantages[groups].flatten(), then[rows], entropy_weight
                    )
                    loss.backward()
                    known: dict[str, Any] = (
                        signals | reward_signals(rewards[groups], mine) | gap_signals(mine, trainer[rows])
                    )
                    if guard.number % settings.evaluate_steps == 0:
                        with guard.paused():
                            known["eval_reward"] = evaluated(model, held_out, settings)
                    guard.step(loss, **known)
        guard.loop.finish()
        guard.watch.note("end", reason="finished")  # where it is broken on purpose, the reward says how well it ended
        return float(evaluated(model, held_out, settings))


@torch.no_grad()
def evaluated(model: Transformer, held_out: Tensor, settings: PolicySettings) -> Tensor:
    """The reward on held-out questions, by the check itself; the samples of training stay what they would have been."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        samples = sampled(model, held_out, settings.temperature)
    return share_right(samples.tokens, samples.counts).mean()
