"""Judged rows in, the stability margins that they ask to tighten out, each with its reason.

A margin that is tightened without a reason costs every later step. So a clipping limit is checked against the norms of
healthy steps, and the other margins are touched only where rows speak for them. No torch here.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import median

from sealegs.detectors.proportion import Proportion
from sealegs.judge import is_surprise
from sealegs.recovery.actions import Action, ClipQK, LowerLR, Tighten, TightenByEvidence, UseBf16
from sealegs.stats.clip_limit import clip_limit
from sealegs.vocabulary import Row, Verdict

WITHIN = 200
"""Steps that are looked at together."""
LIMIT = 100.0
"""The largest element of a gradient, where infinite ones are clipped."""
CHANGED = 2.0
"""The factor by which the norm of weights must have changed, and by which weight decay is changed then."""
SAMPLES = 5
"""Norms of weights from which a change can be told from a leap: no two neighbours may make up half of it."""
YOUNG = Proportion().young
"""Steps of a run in which norms of weights say nothing: those of every model grow from where they are initialised."""
BLOCKS, RISING, CLIMBED = 8, 0.8, 1.5
"""The gradient norm climbs where the medians of so many blocks rise, in all but a tenth of their pairs, and the last is
so many times the first."""
LOWERED = 0.5
"""What is left of the learning rate."""
EMBEDDINGS = ("embed", "wte", "wpe")
"""Parts of the names of embeddings that are no ``nn.Embedding``, such as one that is split between ranks."""


@dataclass(frozen=True, slots=True)
class Margin:
    """A margin, what becomes of it, and why."""

    margin: str
    """``clip``, ``clip_value``, ``weight_decay``, ``qk_clip``, ``lr`` or ``precision``."""
    value: float | str | None
    """Its new limit or factor; None where it is left as it is."""
    because: str

    def __str__(self) -> str:
        return f"{self.margin}: {self.because}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What this run could change."""

    clip: float | None = None
    """The clipping limit in force; None where the guard does not clip."""
    has_decay: bool = True
    """Whether an optimizer has weight decay."""
    has_rate: bool = True
    """Whether the optimizers have a learning rate that can be lowered."""
    can_use_bf16: bool = False
    """Whether the loop asks the guard for its precision."""
    embeddings: frozenset[str] = frozenset()
    """The names of the tables of embeddings among the parameters."""

    def is_embedding(self, name: str) -> bool:
        """Whether a parameter is a table of embeddings."""
        return name in self.embeddings or any(part in name.lower() for part in EMBEDDINGS)


class MarginEvidence:
    """What the last rows of a run say about its margins."""

    def __init__(self) -> None:
        self._healthy: deque[float] = deque(maxlen=WITHIN)
        """Gradient norms of healthy steps; an intervention does not make them other ones."""
        self.forget()

    def forget(self) -> None:
        """Start over after an intervention: later rows are judged for themselves."""
        self._rows: deque[Row] = deque(maxlen=WITHIN)

    def observe(self, row: Row, verdict: Verdict) -> None:
        """Take in a judged row."""
        self._rows.append(row)
        norm = float(row.get("grad_norm", math.nan))
        if verdict.go and math.isfinite(norm) and not any(map(is_surprise, verdict.findings)):
            self._healthy.append(norm)

    def led(self, actions: Iterable[Action], means: Means) -> tuple[tuple[Action, ...], tuple[Margin, ...]]:
        """The actions of a rung as the evidence leads them, and every margin that it has decided about."""
        given = tuple(actions)
        tighten = next((action for action in given if isinstance(action, Tighten)), None)
        margins: list[Margin] = []
        others: list[Action] = [action for action in given if not isinstance(action, Tighten | TightenByEvidence)]
        for action in given:
            if isinstance(action, ClipQK):
                margins.append(self._qk_clip(action.limit))
                others = others if margins[-1].value is not None else [each for each in others if each != action]
        fields = {} if tighten is None else asdict(tighten)
        if (clip := fields.get("clip")) is not None:
            margins.append(self.check_clip(clip, means.clip))
            fields["clip"] = margins[-1].value
        if fields.get("clip_value") is not None:
            margins.append(self._clip_value(fields["clip_value"], means))
            fields["clip_value"] = margins[-1].value
        if any(isinstance(action, TightenByEvidence) for action in given):
            for margin in self._asked_for(means):
                if margin.margin == "lr":
                    others += [] if any(isinstance(o, LowerLR) for o in others) else [LowerLR(LOWERED)]
                elif margin.margin == "precision":
                    others += [] if margin.value is None else [UseBf16()]
                elif fields.get(margin.margin) is None:
                    fields[margin.margin] = margin.value
                else:
                    continue
                margins.append(margin)
        if any(value is not None for value in fields.values()):
            others.append(Tighten(**fields))
        return tuple(others), tuple(margins)

    def check_clip(self, clip: float, now: float | None = None) -> Margin:
        """A clipping limit, checked against the norms of healthy steps; ``now`` is the one in force.

        >>> evidence = MarginEvidence()
        >>> for step in range(100):
        ...     evidence.observe({"step": step, "loss": 2.0, "grad_norm": 1.45 + step / 1000}, Verdict(step=step))
        >>> print(evidence.check_clip(0.5))
        clip: 0.5 would clip 100% of the healthy steps, whose median norm is 1.499: 1.54 clips one in 10
        >>> evidence.check_clip(0.5, now=1.0).value
        """
        return Margin("clip", *clip_limit(clip, self._healthy, now))

    def _qk_clip(self, limit: float) -> Margin:
        """Rescaling queries and keys, where logits of attention were too large."""
        logits = [
            (float(value), name.partition("/")[2])
            for row in self._rows
            for name, value in row.items()
            if name.startswith("attention_logit_max/") and math.isfinite(float(value))
        ]
        if not logits:
            return Margin("qk_clip", None, "no attention logit is known")
        largest, layer = max(logits)
        told = f"the largest attention logit of {WITHIN} steps was {largest:.4g}, in {layer}"
        return Margin("qk_clip", limit if largest > limit else None, told)

    def _asked_for(self, means: Means) -> Iterable[Margin]:
        if (value := self._clip_value(LIMIT, means)).value is not None:
            yield value
        if (decay := self._decay()) is not None:
            because = decay.because if means.has_decay else f"{decay.because}; the optimizer has no weight decay"
            yield replace(decay, value=decay.value if means.has_decay else None, because=because)
        scale = self._collapsed_scale()
        if (climb := scale or self._climb()) and means.has_rate:
            yield Margin("lr", LOWERED, climb)
        if fp16 := scale or self._overflow():
            advice = "" if means.can_use_bf16 else "; train in bf16, or let the loop ask guard.autocast_dtype(dtype)"
            yield Margin("precision", "bf16" if means.can_use_bf16 else None, fp16 + advice)

    def _clip_value(self, limit: float, means: Means) -> Margin:
        """Clipping of elements, which cures an infinite gradient of an embedding and nothing else."""
        broken = [row for row in self._rows if not math.isfinite(float(row.get("grad_norm", 0.0)))]
        if any(math.isnan(float(row["grad_norm"])) for row in broken):
            return Margin("clip_value", None, "a gradient was NaN, which clipping of elements does not cure")
        named = [str(row["culprit"]) for row in broken if "culprit" in row and math.isfinite(float(row["loss"]))]
        found = next((name for name in named if means.is_embedding(name.partition(" on ")[0])), None)
        if found is None:
            return Margin("clip_value", None, "no gradient of an embedding was infinite")
        return Margin("clip_value", limit, f"the gradient of {found} was infinite")

    def _decay(self) -> Margin | None:
        """Weight decay, where the weights of a group have steadily grown or shrunk. All of a young model's grow."""
        if not self._rows or int(self._rows[-1]["step"]) < YOUNG:
            return None
        for name in sorted({name for row in self._rows for name in row if name.startswith("param_norm/")}):
            norms = [float(row[name]) for row in self._rows if name in row]
            if len(norms) < SAMPLES or not all(0 < norm < math.inf for norm in norms):
                continue
            change = math.log(norms[-1] / norms[0])
            leap = max(abs(math.log(after / before)) for before, after in pairwise(norms))
            if abs(change) > math.log(CHANGED) and leap < abs(change) / 2:
                text = f"{name} went from {norms[0]:.4g} to {norms[-1]:.4g} within {WITHIN} steps"
                return Margin("weight_decay", CHANGED if change > 0 else 1 / CHANGED, text)
        return None

    def _collapsed_scale(self) -> str:
        scales = [float(row["loss_scale"]) for row in self._rows if "loss_scale" in row]
        return f"the loss scale has collapsed to {scales[-1]:g}" if scales and scales[-1] < 1 else ""

    def _overflow(self) -> str:
        count = sum(
            "loss_scale" in row and not (math.isfinite(float(row["loss"])) and float(row.get("grads_finite", 1.0)) == 1)
            for row in self._rows
        )
        return f"{count} of {len(self._rows)} steps in fp16 were not finite" if count > 1 else ""

    def _climb(self) -> str:
        norms = [norm for row in self._rows if math.isfinite(norm := float(row.get("grad_norm", math.nan)))]
        if len(norms) < WITHIN * 3 // 4:
            return ""
        middles = [median(block) for block in _blocks(norms)]
        pairs = [later > earlier for place, earlier in enumerate(middles) for later in middles[place + 1 :]]
        if 2 * sum(pairs) / len(pairs) - 1 < RISING or not middles[-1] >= CLIMBED * middles[0]:
            return ""
        return f"the gradient norm has climbed from {middles[0]:.4g} to {middles[-1]:.4g} in {len(norms)} steps"


def _blocks(values: Sequence[float]) -> list[Sequence[float]]:
    size = len(values) // BLOCKS
    return [values[len(values) - (BLOCKS - place) * size :][:size] for place in range(BLOCKS)]
