"""What kind of run it is, and by which signals such a run is judged first.

A loss that falls says that language-model pretraining is well. It says little of a policy that is trained for reward,
and nothing of experts that get no tokens. So the kind is said before anything else, with the reason, and "healthy" is
only said where the first signals of that kind were logged.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np

from sealegs.diagnosis.curve.loss_curve import SHORTEST_PART, LossCurve
from sealegs.errors import ConfigError
from sealegs.record.manifest import dotted
from sealegs.record.run import Run

KindName: TypeAlias = Literal[
    "pretraining",
    "fine-tuning",
    "preference",
    "policy-gradient",
    "diffusion",
    "gan",
    "vision",
    "supervised",
    "unknown",
]
"""``supervised`` is any model that learns to lower one loss, where nothing says of what."""
Trait: TypeAlias = Literal["moe", "low-precision"]
"""What a run of any kind can be besides: a mixture of experts; weights or activations in eight bits or fewer."""

NO_MEASURE = ("policy-gradient", "gan")
"""Kinds whose loss is a means to a gradient: how high it is says nothing."""
LOSS_TELLS = ("pretraining", "fine-tuning", "diffusion", "vision", "supervised")
"""Kinds whose loss is their first signal."""

FIRST: Mapping[str, tuple[tuple[str, ...], ...]] = {
    **dict.fromkeys(LOSS_TELLS, (("loss",),)),
    "preference": (("loss",), ("preference_accuracy", "reward_margin")),
    "policy-gradient": (("reward",), ("policy_entropy", "kl", "policy_kl")),
    "gan": (("discriminator_loss",), ("generator_loss",)),
    "unknown": (),
    "moe": (("expert_load", "expert_violation", "dead_expert_share", "router_entropy", "router_balance_loss"),),
    "low-precision": (("loss",),),
}
"""The signals that a kind or trait is judged by first: one of each row is enough."""

WORDS: Mapping[str, str] = {
    "pretraining": "language-model pretraining",
    "fine-tuning": "supervised fine-tuning",
    "preference": "preference tuning",
    "policy-gradient": "policy-gradient reinforcement learning",
    "diffusion": "a diffusion model",
    "gan": "a GAN",
    "vision": "a vision model",
    "supervised": "a model that learns to lower a loss",
    "unknown": "a run of unknown kind",
    "moe": "with a mixture of experts",
    "low-precision": "in low precision",
}

PREFERENCE = ("chosen_reward", "rejected_reward", "reward_margin", "preference_accuracy")
POLICY = (
    *("reward", "zero_spread_share", "policy_kl", "clip_share", "importance_ratio", "logp_gap", "completion_length"),
    *("policy_entropy", "kl", "cut_share"),
)
"""Signals of a policy. One alone may be of something else: a variational autoencoder has a ``kl``, too."""
EXPERTS = ("expert_load", "expert_violation", "dead_expert_share", "router_entropy")
LOW_PRECISION = ("amax", "quant_scale", "saturated_share", "zeroed_share")

TRAINERS: Mapping[str, KindName] = {
    **dict.fromkeys(
        ("grpotrainer", "ppotrainer", "rlootrainer", "onlinedpotrainer", "grpoconfig", "ppoconfig"), "policy-gradient"
    ),
    **dict.fromkeys(
        ("dpotrainer", "ktotrainer", "orpotrainer", "cpotrainer", "dpoconfig", "ktoconfig", "orpoconfig"), "preference"
    ),
    **dict.fromkeys(("sfttrainer", "sftconfig"), "fine-tuning"),
}
"""What trainers and their settings are called, in lower case."""
FINE_TUNING = ("lora_r", "lora_alpha", "lora_rank", "lora", "peft", "adapter", "finetuning_type", "peft_config")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
VISION = ("num_classes", "image_size", "img_size", "imgsz")
DIFFUSION = ("num_train_timesteps", "noise_scheduler", "snr_gamma", "prediction_type", "beta_schedule")
LANGUAGE = ("vocabulary", "vocab_size", "padded_vocab_size", "n_vocab")
PICTURES = ("top1", "top5", "acc1", "acc5", "map50", "iou", "box_loss", "cls_loss", "dfl_loss", "miou")
"""Parts of the names of columns that only vision has."""
VALUES = re.compile(r"explor|epsilon|q_?val|td_?(loss|err)|ent_coef|critic_loss|actor_loss|qf\d?_|q_loss|alpha_loss")
"""Names of columns of a policy that is read off learned values: it has neither an entropy nor a divergence to log."""
LOADS = re.compile(r"expert.*(load|token|util|usage|count)|(load|token|util|usage|dead).*expert")
"""Names of columns that say what experts get."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The kind of a run, and the reason."""

    name: KindName = "unknown"
    traits: tuple[Trait, ...] = ()
    because: str = ""
    """The reason, in a few words."""
    missing: tuple[str, ...] = ()
    """First signals of the kind that were not logged."""

    def __str__(self) -> str:
        """``policy-gradient reinforcement learning, with a mixture of experts (reward and kl are logged)``"""
        words = ", ".join(WORDS[name] for name in (self.name, *self.traits))
        return f"{words} ({self.because})" if self.because else words

    @property
    def first(self) -> tuple[str, ...]:
        """The signals by which it is judged first."""
        return tuple(dict.fromkeys(name for part in (self.name, *self.traits) for row in FIRST[part] for name in row))

    @property
    def loss_measures(self) -> bool:
        """Whether its loss says how good the model is."""
        return self.name not in NO_MEASURE

    @property
    def lacks(self) -> str:
        """Why "healthy" cannot be said of it; empty if it can."""
        if self.name == "unknown":
            return f"the kind of run is not known: {self.because}; say it with --kind"
        if not self.missing:
            return ""
        words = ", ".join(WORDS[name] for name in (self.name, *self.traits))
        return f"this is {words}, of which {' and '.join(self.missing)} would tell first, and is not logged"


UNKNOWN = Kind(because="nothing has been looked at")


def kind_of(run: Run, curve: LossCurve, said: str | None = None) -> Kind:
    """The kind of a run by its signals, its settings and its loss; ``said`` by the user goes before all of them."""
    settings = {name.rpartition(".")[2].lower(): value for name, value in dotted(run.manifest.settings)}
    settings = {name.rpartition(".")[2].lower(): v for name, v in dotted(run.manifest.recorded)} | settings
    name, because, traits = _said(said) if said else (None, "", ())
    if name is None:
        name, because = _name(run, curve, settings)
    traits = tuple(dict.fromkeys((*traits, *_traits(run, settings))))
    rows = [row for part in (name, *traits) for row in FIRST[part]]
    if name == "policy-gradient" and any(map(VALUES.search, map(str.lower, run.signals))):
        rows.remove(FIRST[name][1])
    missing = [" or ".join(row[:3]) for row in rows if not any(_has(run, signal) for signal in row)]
    return Kind(name=name, traits=traits, because=because, missing=tuple(dict.fromkeys(missing)))


def _said(said: str) -> tuple[KindName | None, str, tuple[Trait, ...]]:
    """``moe``, ``fine-tuning`` or ``fine-tuning+moe``."""
    names: list[KindName] = []
    traits: list[Trait] = []
    for word in said.split("+"):
        names += [name for name in get_args(KindName) if name == word]
        traits += [trait for trait in get_args(Trait) if trait == word]
        if word not in (*get_args(KindName), *get_args(Trait)):
            known = ", ".join((*get_args(KindName), *get_args(Trait)))
            raise ConfigError(f"kind={said}: {word!r} is no kind of run; join some of {known} with +")
    if len(names) > 1:
        raise ConfigError(f"kind={said}: one of {' and '.join(names)}")
    return (names[0] if names else None), "as you say", tuple(traits)


def _has(run: Run, signal: str) -> bool:
    return any(name == signal or name.startswith(f"{signal}/") for name in run.signals)


def _logged(run: Run, signals: tuple[str, ...]) -> list[str]:
    return [signal for signal in signals if _has(run, signal)]


def _traits(run: Run, settings: Mapping[str, object]) -> Iterator[Trait]:
    has_experts = any(isinstance(count := settings.get(name), int | float) and count > 1 for name in EXPERT_COUNTS)
    if has_experts or _logged(run, EXPERTS) or any(map(LOADS.search, map(str.lower, run.signals))):
        yield "moe"
    precision = " ".join(str(settings.get(name, "")) for name in ("dtype", "precision", "mixed_precision", "fp8"))
    if _logged(run, LOW_PRECISION) or any(word in precision.lower() for word in ("fp8", "mxfp", "nvfp4", "float8")):
        yield "low-precision"


def _name(run: Run, curve: LossCurve, settings: Mapping[str, object]) -> tuple[KindName, str]:
    """The kind, by what says most about it first."""
    trainer = str(settings.get("trainer", "")).lower()
    if trainer in TRAINERS:
        return TRAINERS[trainer], f"its trainer is a {settings['trainer']}"
    if found := _logged(run, PREFERENCE):
        return "preference", _are_logged(found)
    found = _logged(run, POLICY)
    if not _has(run, "token_accuracy") and (len(found) > 1 or found == ["reward"]):
        return "policy-gradient", _are_logged(found)
    if len(found := _logged(run, ("discriminator_loss", "generator_loss"))) > 1:
        return "gan", _are_logged(found)
    if _has(run, "loss_at_timestep"):
        return "diffusion", "its loss is logged by timestep"
    for name, kind in ((DIFFUSION, "diffusion"), (FINE_TUNING, "fine-tuning"), (VISION, "vision")):
        if told := [word for word in name if word in settings]:
            return kind, f"its settings have {told[0]}"  # type: ignore[return-value]
    if _has(run, "token_accuracy"):
        return "fine-tuning", "the accuracy of target tokens is logged"
    if told := [name for name in run.signals if any(word in name.lower() for word in PICTURES)]:
        return "vision", f"{told[0]} is logged"
    if told := [word for word in LANGUAGE if word in settings]:
        return "pretraining", f"its settings have {told[0]}"
    return _by_loss(run, curve)


def _by_loss(run: Run, curve: LossCurve) -> tuple[KindName, str]:
    """By the loss alone: one that is to be lowered comes down from where it began, or is never below zero."""
    losses = curve.losses[curve.finite]
    if not len(losses):
        return "unknown", "no loss is logged" if "loss" not in run.signals else "no loss is finite"
    tenth = max(len(losses) // 10, 1)
    if losses.min() >= 0:
        return "supervised", "its loss is never negative, and no signal of another kind is logged"
    if len(losses) >= SHORTEST_PART and np.median(losses[-tenth:]) < losses[:tenth].min():
        return "supervised", "its loss falls, and no signal of another kind is logged"
    return "unknown", "its loss takes both signs and does not fall, and no signal says what it measures"


def _are_logged(signals: list[str]) -> str:
    *rest, last = signals[:3]
    return f"{', '.join(rest)} and {last} are logged" if rest else f"{last} is logged"
