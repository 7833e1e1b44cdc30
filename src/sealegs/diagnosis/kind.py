"""What kind of run it is, and by which signals such a run is judged first.

A loss that falls says that language-model pretraining is well. It says little of a policy that is trained for reward,
and nothing of experts that get no tokens. So the kind is said before anything else, with the reason, and "healthy" is
only said where the first signals of that kind were logged.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np

from sealegs.diagnosis.curve.loss_curve import SHORTEST_PART, LossCurve
from sealegs.diagnosis.first_signals.reward import FEWEST_RISING, has_learned
from sealegs.diagnosis.settings import frozen_share
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

TRAINED_BEFORE = ("fine-tuning", "preference")
"""Kinds whose weights come from an earlier training. A beta2 of 0.999, no weight decay and hardly a warm-up are usual
there in a few thousand steps, and the architecture is what it is."""

FIRST: Mapping[str, tuple[tuple[str, ...], ...]] = {
    **dict.fromkeys(LOSS_TELLS, (("loss",),)),
    "preference": (("loss",), ("preference_accuracy", "reward_margin")),
    "policy-gradient": (("reward", "eval_reward"), ("policy_entropy", "kl", "policy_kl")),
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
    "policy-gradient": "reinforcement learning",
    "diffusion": "a diffusion model",
    "gan": "a GAN",
    "vision": "a vision model",
    "supervised": "a model that learns to lower a loss",
    "unknown": "a run of unknown kind",
    "moe": "with a mixture of experts",
    "low-precision": "in low precision",
}

TO_LOG: Mapping[str, str] = {
    "reward": "TRL, verl and Stable-Baselines3 log it by themselves; elsewhere the mean reward of each step",
    "policy_entropy": "TRL logs `entropy` and, with beta above 0, `kl`; verl `actor/entropy` and `actor/ppo_kl`; "
    "Stable-Baselines3 `train/entropy_loss`",
    "preference_accuracy": "TRL logs `rewards/accuracies` and `rewards/margins`",
    "discriminator_loss": "the losses of both players, by name",
    "generator_loss": "the losses of both players, by name",
    "expert_load": "Megatron --moe-per-layer-logging and --log-moe-overload-factor; elsewhere the share of the tokens "
    "that each expert gets, as `expert_load/<layer>.<expert>`",
}
"""How the first signal of a row of ``FIRST`` comes into a log."""

PREFERENCE = ("chosen_reward", "rejected_reward", "reward_margin", "preference_accuracy")
POLICY = (
    *("reward", "zero_spread_share", "policy_kl", "clip_share", "importance_ratio", "logp_gap", "completion_length"),
    *("policy_entropy", "kl", "cut_share"),
)
"""Signals of a policy. One alone may be of something else."""
ACTOR = re.compile(
    r"(?:.*_)?(?:(value|policy|actor|critic|td|vfn?|pg|qf\d?|surrogate|policy_gradient|value_function|ent_coef)_loss"
    r"|loss_(?:pi|vf?|qf?)|(explained_var(?:iance)?)|(ep(?:isode)?_?len(?:gth)?)(?:_?mean)?|(advantages?)(?:_mean)?)"
)
"""Names of columns that agents have: two of them are enough where there is no reward."""
EXPERTS = ("expert_load", "expert_violation", "dead_expert_share", "router_entropy", "router_balance_loss")
LOW_PRECISION = ("amax", "quant_scale", "saturated_share", "zeroed_share")
BY_PART = (*EXPERTS, *LOW_PRECISION, "router_z_loss", "loss_at_position", "loss_at_timestep", "loss_of_source")
"""Signals that may come by layer, tensor, bucket or source, with a slash."""

TRAINERS: tuple[tuple[re.Pattern[str], KindName], ...] = (
    (re.compile(r".*(grpo|ppo|rloo|reinforce|onlinedpo|xpo|nashmd|gfpo|dapo|policy).*"), "policy-gradient"),
    (re.compile(r".*(dpo|kto|orpo|cpo|bco|simpo|reward).*"), "preference"),
    (re.compile(r".*(sft|seq2seq|lora).*"), "fine-tuning"),
)
"""What trainers and their settings are called, in lower case; the first that fits."""
FINE_TUNING = ("lora_r", "lora_alpha", "lora_rank", "lora", "peft", "adapter", "finetuning_type", "peft_config")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_experts", "experts")
ROUTERS = re.compile(r"(?:.*[._])?(?:router|gate|wg)(?:[._]weight)?|all-linear")
"""Names of modules that route; ``gate_proj`` is part of an expert."""
OF_ITS_TRAINER: tuple[tuple[frozenset[str], KindName], ...] = (
    (frozenset(("completion_only_loss", "assistant_only_loss")), "fine-tuning"),
    (frozenset(("base_model", "micro_batch_size")), "fine-tuning"),
)
"""Settings that only a trainer of answers has, whatever they are set to: TRL's SFT, Axolotl."""
STAGES: Mapping[str, KindName] = {
    "sft": "fine-tuning",
    "dpo": "preference",
    "kto": "preference",
    "rm": "preference",
    "ppo": "policy-gradient",
}
"""LLaMA-Factory's stages."""
VISION = ("num_classes", "image_size", "img_size", "imgsz")
DIFFUSION = ("num_train_timesteps", "noise_scheduler", "snr_gamma", "prediction_type", "beta_schedule")
NOISED = ("loss_simple", "loss_vlb", "vb_loss", "min_snr", "denoising_loss", "flow_matching_loss")
"""Names of columns, or their ends, that only models of noise have."""
LANGUAGE = ("vocabulary", "vocab_size", "padded_vocab_size", "n_vocab")
PICTURES = re.compile(
    r"(?:.*_)?(?:top_?[15]|(?:acc|prec)_?[15]|m?ap_?50|m?iou|box_loss|cls_loss|dfl_loss|dice|psnr|ssim|lpips|loss_bbox)"
    r"(?:_.*)?"
)
"""Names of columns that only vision has."""
WRITTEN_BY = frozenset(("megatron text", "nanogpt text", "llm.c text", "modded-nanogpt text"))
"""Formats of programs that train language models and nothing else."""
OF_LANGUAGE = re.compile(
    r"(?:.*_)?(?:lm_loss|trl|mfu|ppl|perplexity|bpb|bits_per_byte|hella|hellaswag|tokens_per_s|tok_s)"
)
"""Names of columns that language models have."""
LEAST_GUESS, LARGEST_GUESS = 4.1, 14.0
"""A little below ln 65 and above ln 256,000: losses of models that know nothing of the vocabularies in use."""
AT_THE_END = 10
KNOWS_NOTHING = 0.5
"""Share of ln(vocabulary) from which on the first logged loss is that of a model from scratch."""
LOADS = re.compile(
    r"(?:.*_)?(?:moe|experts?_(?:load|util\w*|usage|tokens|balance)|tokens_per_expert|dead_experts?)(?:_.*)?"
)
"""Names of columns about experts, whatever they say."""
ENVIRONMENT = frozenset(("episode", "episodes", "ep", "eplen", "epcount", "timestep", "timesteps", "env"))
"""Words in the names of columns of a policy that acts in an environment."""
HELD_OUT = frozenset(("eval", "val", "valid", "validation", "test", "heldout", "holdout", "evaluation"))
OF_COMPLETIONS = ("completion_length", "cut_share", "zero_spread_share")
"""Signals of a policy that writes texts."""
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
VALUES = re.compile(r"explor|epsilon|q_?val|td_?(loss|err)|ent_coef|critic_loss|actor_loss|qf\d?_|q_loss|alpha_loss")
"""Names of columns of a policy that is read off learned values: it has neither an entropy nor a divergence to log."""


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
        """``reinforcement learning, with a mixture of experts (reward and kl are logged)``"""
        return f"{self.words} ({self.because})" if self.because else self.words

    @property
    def words(self) -> str:
        """The kind and its traits: ``reinforcement learning, with a mixture of experts``."""
        return ", ".join(WORDS[name] for name in (self.name, *self.traits))

    @property
    def first(self) -> tuple[str, ...]:
        """The signals by which it is judged first."""
        return tuple(dict.fromkeys(name for part in (self.name, *self.traits) for row in FIRST[part] for name in row))

    @property
    def is_trained_before(self) -> bool:
        """Whether what is good practice in a long run from random weights is beside the point."""
        return self.name in TRAINED_BEFORE

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
        how = list(
            dict.fromkeys(TO_LOG[first] for first in (row.split(" or ")[0] for row in self.missing) if first in TO_LOG)
        )
        told = f" ({'; '.join(how)})" if how else ""
        return f"this is {words}, of which {' and '.join(self.missing)} would tell first, and is not logged{told}"


UNKNOWN = Kind(because="nothing has been looked at")


def kind_of(run: Run, curve: LossCurve, said: str | None = None) -> Kind:
    """The kind of a run by its signals, its settings and its loss; ``said`` by the user goes before all of them."""
    settings = _settings(run)
    name, because, traits = _said(said) if said else (None, "", ())
    if name is None:
        name, because = _name(run, curve, settings)
    traits = tuple(dict.fromkeys((*traits, *_traits(run, settings))))
    rows = [row for part in (name, *traits) for row in FIRST[part]]
    reads_values = any(map(VALUES.search, map(str.lower, run.signals)))
    if name == "policy-gradient" and (reads_values or _reward_tells(run)):
        rows.remove(FIRST[name][1])
    missing = [" or ".join(row[:3]) for row in rows if not any(_has(run, signal) for signal in row)]
    return Kind(name=name, traits=traits, because=because, missing=tuple(dict.fromkeys(missing)))


def _reward_tells(run: Run) -> bool:
    """Whether a reward that has risen is enough to say that a policy is well.

    That of an environment is what is wanted. That of a scorer stands for it, and a policy can please a scorer without
    doing what is meant: its entropy or divergence would show, or what is measured on held-out data.
    """
    words = {name: set(_plain(_CAMEL.sub("_", name)).split("_")) for name in run.signals}
    if not has_learned(run):
        return False
    if not _logged(run, OF_COMPLETIONS) and any(ENVIRONMENT & these for these in words.values()):
        return True
    return any(HELD_OUT & these and _moves(run, name) for name, these in words.items())


def _moves(run: Run, signal: str) -> bool:
    """Whether a signal was measured often enough, and is no setting."""
    if not run.has_numbers(signal):
        return False
    values = run.series(signal)[1]
    return len(values) >= FEWEST_RISING and bool(values.min() < values.max())


def vocabulary(run: Run) -> float | None:
    """The size of the vocabulary, where the settings have it."""
    return _vocabulary(_settings(run))


def _settings(run: Run) -> dict[str, object]:
    both = (*dotted(run.manifest.recorded), *dotted(run.manifest.settings))
    return {name.rpartition(".")[2].lower(): value for name, value in both}


def _vocabulary(settings: Mapping[str, object]) -> float | None:
    return next((size for name in LANGUAGE if isinstance(size := settings.get(name), int | float) and size > 1), None)


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
    by_part = signal in BY_PART and any(name.startswith(f"{signal}/") for name in run.signals)
    return signal in run.signals or by_part


def _logged(run: Run, signals: tuple[str, ...]) -> list[str]:
    return [signal for signal in signals if _has(run, signal)]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _traits(run: Run, settings: Mapping[str, object]) -> Iterator[Trait]:
    has_experts = any(isinstance(count := settings.get(name), int | float) and count > 1 for name in EXPERT_COUNTS)
    has_experts = has_experts and not _routers_stand_still(settings)
    if has_experts or _logged(run, EXPERTS) or any(LOADS.fullmatch(_plain(name)) for name in run.signals):
        yield "moe"
    precision = " ".join(str(settings.get(name, "")) for name in ("dtype", "precision", "mixed_precision", "fp8"))
    if _logged(run, LOW_PRECISION) or any(word in precision.lower() for word in ("fp8", "mxfp", "nvfp4", "float8")):
        yield "low-precision"


def _routers_stand_still(settings: Mapping[str, object]) -> bool:
    """Whether an adapter is trained that has no part in a router: then no load can collapse by what is learned."""
    named = [settings.get("target_modules"), settings.get("modules_to_save") or []]
    if not all(isinstance(names, list) for names in named) or not named[0]:
        return False
    return not any(ROUTERS.fullmatch(str(name)) for names in named if isinstance(names, list) for name in names)


def _name(run: Run, curve: LossCurve, settings: Mapping[str, object]) -> tuple[KindName, str]:
    """The kind, by what says most about it first."""
    if told := kind_of_trainer(str(settings.get("trainer") or "")):
        return told, f"its trainer is a {settings['trainer']}"
    names = {_plain(name): name for name in (*run.signals, str(settings.get("loss") or ""))}
    return (
        _by_signals(run)
        or _by_columns(names)
        or _by_settings(settings)
        or _by_frozen(run)
        or _of_language(curve, settings, names)
        or _by_loss(run, curve)
    )


def kind_of_trainer(name: str) -> KindName | None:
    """What a trainer of this name trains, where its name says so."""
    return next((kind for pattern, kind in TRAINERS if pattern.fullmatch(name.lower())), None)


def _by_signals(run: Run) -> tuple[KindName, str] | None:
    if found := _logged(run, PREFERENCE):
        return "preference", _are_logged(found)
    found = _logged(run, POLICY)
    if "reward" in found or _has(run, "eval_reward") or (len(found) > 1 and not _has(run, "token_accuracy")):
        return "policy-gradient", _are_logged(found)
    if len(found := _logged(run, ("discriminator_loss", "generator_loss"))) > 1:
        return "gan", _are_logged(found)
    if _has(run, "loss_at_timestep"):
        return "diffusion", "its loss is logged by timestep"
    return ("fine-tuning", "the accuracy of target tokens is logged") if _has(run, "token_accuracy") else None


def _by_columns(names: Mapping[str, str]) -> tuple[KindName, str] | None:
    """By columns that have no meaning to us but tell what is trained."""
    agent = {
        next(filter(None, found.groups()), found[0]): names[key] for key in names if (found := ACTOR.fullmatch(key))
    }
    if len(agent) > 1:
        return "policy-gradient", _are_logged(list(agent.values()))
    if told := [names[key] for key in names if key.endswith(NOISED)]:
        return "diffusion", _are_logged(told)
    if told := [names[key] for key in names if PICTURES.fullmatch(key)]:
        return "vision", _are_logged(told[:1])
    return None


def _by_settings(settings: Mapping[str, object]) -> tuple[KindName, str] | None:
    if "finetuning_type" in settings and (stage := STAGES.get(str(settings.get("stage")))):
        return stage, f"its stage is {settings['stage']}"
    kinds: tuple[tuple[tuple[str, ...], KindName], ...]
    kinds = ((DIFFUSION, "diffusion"), (FINE_TUNING, "fine-tuning"), (VISION, "vision"))
    for names, kind in kinds:
        if told := [name for name in names if settings.get(name) not in (None, "", 0, "None", "none", "full")]:
            return kind, f"its settings have {told[0]}"
    if trainer := next(((keys, kind) for keys, kind in OF_ITS_TRAINER if keys <= settings.keys()), None):
        return trainer[1], f"its settings have {min(trainer[0])}"
    return None


def _by_frozen(run: Run) -> tuple[KindName, str] | None:
    """A model most of which is frozen was trained before."""
    share = frozen_share(run.manifest.recorded)
    return ("fine-tuning", f"{share:.4g} of its weights are frozen") if share > 0.5 else None


def _of_language(
    curve: LossCurve, settings: Mapping[str, object], names: Mapping[str, str]
) -> tuple[KindName, str] | None:
    """A language model from scratch begins at about ln(vocabulary), one that was trained before far below.

    A log that begins later does not show it.
    """
    rows = curve.finite
    if not len(rows) or curve.steps[rows[0]] - curve.steps[0] > 0 or curve.steps[0] > 10 * curve.interval:
        return None
    first, last = float(curve.losses[rows[0]]), float(np.median(curve.losses[rows[-AT_THE_END:]]))
    if (size := _vocabulary(settings)) is not None:
        guess = math.log(size)
        if KNOWS_NOTHING * guess <= first < 2 * guess:
            return "pretraining", f"its loss begins at {first:.3g}, as of a model that knows nothing of {size:,} tokens"
        if 0 < first < KNOWS_NOTHING * guess:
            return (
                "fine-tuning",
                f"its loss begins at {first:.3g}, as of a model that knows its {size:,} tokens already",
            )
        return None
    written_by = str(settings.get("format") or "")
    column = next((name for key, name in names.items() if OF_LANGUAGE.fullmatch(key)), "")
    if (written_by in WRITTEN_BY or column) and LEAST_GUESS <= first < LARGEST_GUESS and last < first:
        program = written_by.removesuffix(" text")
        why = f"its lines are those of {program}" if written_by in WRITTEN_BY else f"{column} is logged"
        return "pretraining", f"{why}, and its loss begins at {first:.3g}, as of a model that knows nothing yet"
    return None


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
