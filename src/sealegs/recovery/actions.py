"""The actions that a playbook can take or a person can request: plain values, without torch.

An action prints as a phrase, goes to files as JSON, and is read from a person's words by ``requested_action``.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, TypeAlias, get_args

from sealegs.errors import ConfigError, SealegsError, SourceError

LOGIT = "the largest attention logit that is left alone, above 0"


class Impossible(SealegsError):
    """An action cannot be carried out here; the playbook's next rung is tried instead."""


@dataclass(frozen=True, slots=True)
class Continue:
    """Go on as before."""

    kind: ClassVar[str] = "continue"

    def __str__(self) -> str:
        return "go on, skipping what is rejected"


@dataclass(frozen=True, slots=True)
class Rollback:
    """Restore a healthy state, and leave out the batches from the step before the onset on."""

    kind: ClassVar[str] = "rollback"
    back: int = 0
    """Go to the newest healthy state that is at least this many steps older than the onset."""
    skip: int = 10
    """How many batches to leave out, counted from the batch of the onset."""

    def __post_init__(self) -> None:
        refuse_unless(is_whole(self.back, 0), "Rollback.back", self.back, "steps before the onset, from 0")
        refuse_unless(is_whole(self.skip, 0), "Rollback.skip", self.skip, "a number of batches, from 0")

    def __str__(self) -> str:
        which = f" at least {self.back} steps before the onset" if self.back else ""
        return f"roll back to the newest healthy state{which}, skip {_batches(self.skip)}"


@dataclass(frozen=True, slots=True)
class LowerLR:
    """Multiply the learning rate for the rest of the run; the schedule goes on under the factor."""

    kind: ClassVar[str] = "lower-lr"
    factor: float = 0.5
    rewarm_steps: int = 50
    """Steps in which the rate rises from zero to its new value."""

    def __post_init__(self) -> None:
        is_sound = is_number(self.factor) and 0 < self.factor < 1
        refuse_unless(is_sound, "LowerLR.factor", self.factor, "what is left of the learning rate, between 0 and 1")
        is_sound = is_whole(self.rewarm_steps, 0)
        refuse_unless(is_sound, "LowerLR.rewarm_steps", self.rewarm_steps, "a number of steps, from 0")

    def __str__(self) -> str:
        rewarmed = f", warmed up again over {self.rewarm_steps} steps" if self.rewarm_steps else ""
        return f"learning rate x {self.factor:g}{rewarmed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tighten:
    """Clip harder or decay more; a field that is None stays as it is.

    In a playbook, limits are checked: ``clip`` by the norms of healthy steps, ``clip_value`` by whether the gradient of
    an embedding was infinite.
    """

    kind: ClassVar[str] = "tighten"
    clip: float | None = None
    """The largest global norm of the gradients."""
    clip_value: float | None = None
    """The largest element of a gradient, applied before the norm."""
    weight_decay: float | None = None
    """A factor on the weight decay: 2 doubles it."""

    def __post_init__(self) -> None:
        values = asdict(self)
        refuse_unless(any(value is not None for value in values.values()), "Tighten", "()", "say what: clip=0.5, ...")
        for name, value in values.items():
            is_sound = value is None or (is_number(value) and value > 0)
            refuse_unless(is_sound, f"Tighten.{name}", value, "a number above 0, or None to leave it")

    def __str__(self) -> str:
        words = {"clip": "clip at", "clip_value": "clip elements at", "weight_decay": "weight decay times"}
        return ", ".join(f"{words[name]} {value:g}" for name, value in asdict(self).items() if value is not None)


@dataclass(frozen=True, slots=True)
class ClipQK:
    """Rescale the queries and keys of every head whose largest attention logit is beyond the limit, for the rest of the
    run. In a playbook, where a logit was beyond it lately."""

    kind: ClassVar[str] = "clip-qk"
    limit: float = 100.0
    """The largest logit that is left alone."""

    def __post_init__(self) -> None:
        refuse_unless(is_number(self.limit) and self.limit > 0, "ClipQK.limit", self.limit, LOGIT)

    def __str__(self) -> str:
        return f"rescale queries and keys at logits of {self.limit:g}"


@dataclass(frozen=True, slots=True)
class TightenByEvidence:
    """Tighten the margins that the evidence asks for, and no others: elements of an infinite embedding gradient, weight
    decay, learning rate, precision."""

    kind: ClassVar[str] = "tighten-by-evidence"

    def __str__(self) -> str:
        return "tighten what the evidence asks for"


@dataclass(frozen=True, slots=True)
class UseBf16:
    """Train in bf16 instead of fp16, where the loop asks ``guard.autocast_dtype`` for its precision."""

    kind: ClassVar[str] = "use-bf16"

    def __str__(self) -> str:
        return "train in bf16 instead of fp16"


@dataclass(frozen=True, slots=True)
class SwapSource:
    """Take a data source out of the mixture, or give it less weight."""

    kind: ClassVar[str] = "swap-source"
    source: str | None = None
    """None stands for the source that the evidence names."""
    weight: float = 0.0
    """Its new weight in the mixture."""

    def __post_init__(self) -> None:
        is_sound = self.source is None or (isinstance(self.source, str) and bool(self.source))
        refuse_unless(is_sound, "SwapSource.source", self.source, "a name, or None for the one that the evidence names")
        is_sound = is_number(self.weight) and self.weight >= 0
        refuse_unless(is_sound, "SwapSource.weight", self.weight, "a weight in the mixture, from 0")

    def __str__(self) -> str:
        source = f"source {self.source}" if self.source else "the source that the evidence names"
        return f"give {source} the weight {self.weight:g}" if self.weight else f"take out {source}"


@dataclass(frozen=True, slots=True)
class Stratify:
    """Spread rare tokens over the batches: several in one batch add up to the largest update that Adam can make."""

    kind: ClassVar[str] = "stratify"

    def __str__(self) -> str:
        return "spread rare tokens over the batches"


@dataclass(frozen=True, slots=True)
class SkipBatches:
    """Leave out the next batches, without going back."""

    count: int
    kind: ClassVar[str] = "skip-batches"

    def __post_init__(self) -> None:
        refuse_unless(is_whole(self.count, 1), "SkipBatches.count", self.count, "a number of batches, from 1")

    def __str__(self) -> str:
        return f"skip the next {_batches(self.count)}"


@dataclass(frozen=True, slots=True)
class CopyMajority:
    """Give ranks that hold other weights than their replicas what the majority holds, moments too."""

    kind: ClassVar[str] = "copy-majority"

    def __str__(self) -> str:
        return "copy the weights of the majority to the ranks that differ"


@dataclass(frozen=True, slots=True)
class Halt:
    """Stop the run."""

    kind: ClassVar[str] = "halt"
    advice: str = ""
    """What to change before the next start; if empty, the playbook gives its advice for the trigger."""

    def __post_init__(self) -> None:
        refuse_unless(isinstance(self.advice, str), "Halt.advice", self.advice, "a text, or leave it out")

    def __str__(self) -> str:
        return f"halt: {self.advice}" if self.advice else "halt"


Action: TypeAlias = (
    Continue
    | Rollback
    | LowerLR
    | Tighten
    | ClipQK
    | TightenByEvidence
    | UseBf16
    | SwapSource
    | Stratify
    | SkipBatches
    | CopyMajority
    | Halt
)
ACTIONS: tuple[type[Action], ...] = get_args(Action)


def plain_actions(actions: Iterable[Action]) -> list[dict[str, Any]]:
    """Actions as JSON values.

    >>> plain_actions((Rollback(back=100, skip=50), Halt()))
    [{'action': 'rollback', 'back': 100, 'skip': 50}, {'action': 'halt', 'advice': ''}]
    """
    return [{"action": action.kind, **asdict(action)} for action in actions]


def actions_from(plain: Iterable[Mapping[str, Any]]) -> tuple[Action, ...]:
    """The actions that ``plain_actions`` wrote, read back from a file."""
    kinds = {kind.kind: kind for kind in ACTIONS}
    actions = []
    for entry in plain:
        values = dict(entry) if isinstance(entry, Mapping) else {"action": entry}
        name = values.pop("action", None)
        if not isinstance(name, str) or name not in kinds:
            raise SourceError(f"action {name!r}: not one of {', '.join(kinds)}; was it written by a newer Sealegs?")
        unknown = sorted(values.keys() - {field.name for field in fields(kinds[name])})
        if unknown:
            raise SourceError(f"action {name!r} has no {unknown[0]!r}; was it written by a newer Sealegs?")
        try:
            actions.append(kinds[name](**values))
        except (ConfigError, TypeError) as error:
            raise SourceError(f"action {name!r}: {error}") from None
    return tuple(actions)


def _batches(count: int) -> str:
    return f"{count} batch" if count == 1 else f"{count} batches" if count else "no batch"


MOST = 2**53
"""The most steps or batches that an action can be about; a larger number is a slip, and no array holds it."""


def is_whole(value: Any, lowest: int) -> bool:
    """Whether a value is a whole number from ``lowest`` to ``MOST``; True and False do not count."""
    return isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= MOST


def is_number(value: Any) -> bool:
    """Whether a value is a finite number; True and False do not count."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def refuse_unless(sound: bool, name: str, value: Any, cure: str) -> None:
    """Raise a ConfigError of one sentence: the field, its value, the cure."""
    if not sound:
        raise ConfigError(f"{name}={value!r}: {cure}")


FORMS: dict[str, tuple[str, Callable[[str], Action]]] = {
    "rollback": ("[STEPS]", lambda steps: Rollback(back=int(steps or 0), skip=0)),
    "lr": ("FACTOR", lambda factor: LowerLR(factor=float(factor))),
    "skip": ("BATCHES", lambda count: SkipBatches(count=int(count))),
    "clip": ("NORM", lambda norm: Tighten(clip=float(norm))),
    "clip-qk": ("LOGIT", lambda limit: ClipQK(float(limit))),
    "swap": ("SOURCE", lambda source: SwapSource(source=source)),
    "halt": ("", lambda _: Halt(advice="asked for by a person")),
}
"""What a person can request: by word, the form of its argument and the action that it means."""


def requested_action(words: Sequence[str]) -> Action:
    """The action that a person's words request.

    >>> print(requested_action(["lr", "0.5"]))
    learning rate x 0.5, warmed up again over 50 steps
    """
    name, values = (words[0], words[1:]) if words else ("", ())
    if name not in FORMS:
        raise ConfigError(f"{name or 'nothing'!r}: not something that can be asked for; one of {', '.join(FORMS)}")
    form, make = FORMS[name]
    fewest, most = (form != "" and not form.startswith("["), form != "")
    if not fewest <= len(values) <= most:
        raise ConfigError(f"{' '.join(words)}: say `{f'{name} {form}'.strip()}`")
    try:
        return make(values[0] if values else "")
    except ValueError:
        raise ConfigError(f"{' '.join(words)}: {values[0]!r} is no number; say `{name} {form}`") from None
