"""The catalogue of drills: what can go wrong with a run, to practise with. Standard library only."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from sealegs.errors import ConfigError
from sealegs.faults.contract import Fault
from sealegs.faults.data import DataFault
from sealegs.faults.reward import PolicyFault
from sealegs.faults.spec import KINDS, parse

Family: TypeAlias = Literal[
    "data",
    "schedule",
    "optimizer",
    "precision",
    "hardware",
    "code",
    "experts",
    "policy",
    "natural",
    "benign",
    "your own",
]
Where: TypeAlias = Literal["any loop", "the lab", "text", "ranks", "policy gradient"]
SCARCE: dict[Where, str] = {
    "the lab": "the lab's own model or data",
    "ranks": "several ranks, and a loop of your own is drilled in one process",
    "policy gradient": "the lab's policy-gradient loop",
}
"""What a loop of the user's own lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """One thing that goes wrong; a benign drill has none."""

    name: str
    family: Family
    what: str
    """The drill in a sentence."""
    faults: tuple[str, ...] = ()
    """The faults in the syntax of ``sealegs train --inject``, without the step."""
    settings: tuple[str, ...] = ()
    """Settings of the lab as flags: ``optimizer.clip=0``."""
    control: str = ""
    """A harmless change of the lab's data: a name in ``controls``."""
    causes: tuple[str, ...] = ()
    """The causes that a tested diagnosis may name; empty if no diagnosis is expected."""
    shown: tuple[str, ...] = ()
    """The causes that `sealegs check` may name in the record, where no replay can test one. The guard only observes
    these: it skips and rolls back for a loss or a gradient, not for a reward or a load."""
    where: Where = "any loop"
    """``text``: batches must have tokens; ``ranks``: the lab, on two ranks; ``policy gradient``: its GRPO toy."""

    @property
    def is_benign(self) -> bool:
        """Whether nothing is wrong, so that the guard must do nothing."""
        return self.family == "benign"

    @property
    def rank(self) -> int | None:
        """The one rank that is struck."""
        return next((fault.rank for fault in self.struck(0) if fault.rank is not None), None)

    def struck(self, at: int) -> list[Fault]:
        """Its faults from a step on; a fault that names a step keeps it."""
        return [parse(text if "@" in text else f"{text}@{at}") for text in self.faults]


def _of(family: Family, where: Where, *rows: tuple[str, str, str, str]) -> tuple[Drill, ...]:
    """Drills of one fault each: name, fault, causes, sentence."""
    return tuple(
        Drill(name=name, family=family, what=what, faults=(fault,), causes=tuple(causes.split()), where=where)
        for name, fault, causes, what in rows
    )


_DATA = _of(
    "data",
    "text",
    ("random-tokens", "random-shard:batches=20", "bad-data-batch", "a shard of random tokens, 20 batches"),
    ("rare-tokens", "rare-tokens:batches=10", "long-tail-token bad-data-batch", "ten batches of rare tokens"),
    ("shifted-labels", "shifted-labels:batches=20", "bad-data-batch", "labels one place too far, 20 batches"),
    ("duplicated-batch", "duplicate-batch:batches=60", "duplicate-batch", "a stuck loader: one batch 60 times"),
    (
        "repeated-ngram",
        "repeated-ngram:length=3,batches=20",
        "bad-data-batch long-tail-token",
        "documents of one span of three tokens, repeated; 20 batches",
    ),
    (
        "permuted-vocabulary",
        "permuted-vocabulary:batches=20",
        "bad-data-batch long-tail-token",
        "another tokenizer's ids, 20 batches",
    ),
    (
        "encoding-junk",
        "encoding-junk:batches=20",
        "bad-data-batch",
        "text read in the wrong encoding, 20 batches",
    ),
)
_MASKED = Drill(
    name="masked-labels",
    family="data",
    what="every label of eight batches is masked",
    faults=("masked-labels:batches=8",),
    causes=("masked-labels",),
    where="text",
)
_POISONED = Drill(
    name="poisoned-source",
    family="data",
    what="one of two sources gives random tokens from now on",
    faults=("poisoned-source:source=stdlib",),
    settings=("data.sources={'grammar': 0.7, 'stdlib': 0.3}",),
    causes=("bad-data-batch", "long-tail-token"),
    where="the lab",
)
_SCHEDULE = _of(
    "schedule",
    "any loop",
    ("lr-x3", "lr-spike:factor=3,steps=50", "unlogged-step-size lr-too-high", "learning rate x3 for 50 steps"),
    ("lr-x10", "lr-spike:factor=10,steps=10", "unlogged-step-size lr-too-high", "learning rate x10 for 10 steps"),
    ("lr-x30", "lr-spike:factor=30,steps=10", "unlogged-step-size lr-too-high", "learning rate x30 for 10 steps"),
    ("lr-x30-once", "lr-spike:factor=30,steps=1", "unlogged-step-size lr-too-high", "learning rate x30 for one step"),
    (
        "lr-discontinuity",
        "lr-spike:factor=40,steps=15,log=shows",
        "lr-discontinuity lr-too-high",
        "the schedule itself jumps, x40 for 15 steps",
    ),
)
_WARMUP = Drill(
    name="warmup-lost",
    family="schedule",
    what="the rate of the peak from the fifth step on",
    faults=("warmup-lost:steps=50@5",),
    where="any loop",
)
_OPTIMIZER = _of(
    "optimizer",
    "any loop",
    ("moments-lost", "moments-reset", "optimizer-reset", "both moments zero after a reload"),
    ("second-moment-lost", "moments-reset:in=moment2", "optimizer-reset", "the second moment zero after a reload"),
    ("frozen-second-moment", "frozen-moment2:steps=50", "", "the second moment stays as it is for 50 steps"),
    ("wrong-betas", "wrong-betas:beta2=0.5,steps=50", "", "a resume with beta2 0.5, for 50 steps"),
)
_PRECISION = (
    *_of(
        "precision",
        "any loop",
        ("fp16-overflow", "fp16-overflow", "fp16-overflow", "an activation beyond fp16"),
        ("scaler-off", "scaler-off:steps=50", "", "gradients in fp16 without a loss scale, 50 steps"),
        ("bf16-weights", "bf16-weights:steps=100", "", "no fp32 master weights for 100 steps"),
    ),
    Drill(
        name="naive-softmax",
        family="precision",
        what="attention without subtracting the maximum, queries and keys x30",
        faults=("weight-scale:factor=30,tensor=*.query_key_value,rows=2/3",),
        settings=("model.naive_softmax=True",),
        causes=("softmax-overflow", "corrupt-weight"),
        where="the lab",
    ),
    Drill(
        name="log-of-zero",
        family="precision",
        what="log(softmax(x)) instead of log_softmax(x), embeddings x200",
        faults=("weight-scale:factor=200,tensor=embedding",),
        settings=("model.naive_log_loss=True",),
        causes=("log-of-zero", "corrupt-weight"),
        where="the lab",
    ),
    Drill(
        name="zero-variance-norm",
        family="precision",
        what="norms with eps 0 and an embedding of zeros",
        faults=("weight-scale:factor=0,tensor=embedding",),
        settings=("model.norm_eps=0",),
        causes=("zero-variance-norm", "corrupt-weight"),
        where="the lab",
    ),
)
_SCALE = Drill(
    name="saturated-scale",
    family="precision",
    what="products of eight bits whose scale is stuck 16 times too high",
    faults=("stuck-scale:factor=16,steps=1000",),
    settings=("model.float8=True",),
    shown=("low-precision-saturation",),
    where="the lab",
)
_EXPERTS = tuple(
    Drill(
        name=name,
        family="experts",
        what=what,
        faults=(fault,),
        settings=("model.experts=4", "model.balance='none'"),
        shown=tuple(shown.split()),
        where="the lab",
    )
    for name, fault, shown, what in (
        (
            "router-collapse",
            "router-bias:experts=2,amount=6,steps=1000",
            "router-collapse",
            "every token goes to the same two experts of four",
        ),
        (
            "dead-expert",
            "router-bias:expert=3,amount=-30,steps=1000",
            "dead-experts router-collapse",
            "one expert of four gets no token any more",
        ),
    )
)
_POLICY = tuple(
    Drill(name=name, family="policy", what=what, faults=(fault,), shown=tuple(shown.split()), where="policy gradient")
    for name, fault, shown, what in (
        ("entropy-collapse", "entropy-penalty:weight=8", "entropy-collapse", "an entropy bonus with the wrong sign"),
        ("zero-spread", "constant-reward", "zero-reward-spread", "a reward function that gives every answer 0"),
        (
            "hacked-reward",
            "hacked-reward:weight=2",
            "reward-hacking completions-cut",
            "the reward pays for length, too",
        ),
        (
            "perturbed-sampler",
            "noisy-sampler:noise=0.2",
            "sampler-trainer-mismatch",
            "the sampler's weights are off by a fifth of their size",
        ),
    )
)
_HARDWARE = _of(
    "hardware",
    "any loop",
    ("nan-gradient", "nan-gradient", "corrupt-gradient", "NaN in one element of a gradient"),
    ("nan-gradient-often", "nan-gradient:every=25,times=4", "corrupt-gradient", "the same, four times"),
    (
        "gradient-x1000",
        "gradient-scale:factor=1000",
        "corrupt-gradient",
        "one step's gradient x1000, as of one bad rank",
    ),
    ("flipped-gradient", "bit-flip", "corrupt-gradient", "the top exponent bit of one gradient"),
    ("flipped-activation", "bit-flip:in=activation", "kernel-fault", "the same in an activation"),
    ("flipped-weight", "bit-flip:in=weight", "corrupt-weight", "the same in a weight, for good"),
    ("flipped-first-moment", "bit-flip:in=moment1", "corrupt-weight", "the same in a first moment"),
    ("flipped-second-moment", "bit-flip:in=moment2", "", "the same in a second moment"),
)
_RANKS = (
    *_of(
        "hardware",
        "ranks",
        ("rank-nan", "nan-gradient:rank=1", "corrupt-gradient", "NaN in a gradient of one rank of two"),
        ("rank-x1000", "gradient-scale:factor=1000,rank=1", "corrupt-gradient", "the gradients of one rank x1000"),
        ("replica-drift", "weight-scale:factor=1.02,rank=1", "ranks-out-of-step", "the weights of one replica 2 % off"),
    ),
    *_of(
        "code",
        "ranks",
        (
            "rank-skips-all-reduce",
            "skipped-all-reduce:rank=1,steps=50",
            "ranks-out-of-step",
            "one rank uses its own gradients instead of the mean, 50 steps",
        ),
    ),
)
_CODE = (
    *_of(
        "code",
        "any loop",
        ("missing-zero-grad", "missing-zero-grad:steps=50", "", "gradients that are never cleared, 50 steps"),
        ("wrong-accumulation", "gradient-scale:factor=8,steps=50", "", "summed over 8 micro-batches, not averaged"),
    ),
    *_of(
        "code",
        "text",
        ("replayed-batches", "replayed-batches:back=60,batches=60", "duplicate-batch", "the last 60 batches once more"),
    ),
    Drill(
        name="logits-x30",
        family="code",
        what="queries, keys and values of one block x30: attention that looks at one token",
        faults=("activation-scale:factor=30,module=blocks.0.attention.query_key_value,steps=20",),
        where="the lab",
    ),
)
_NATURAL = tuple(
    Drill(name=name, family="natural", what=what, settings=settings, causes=tuple(causes.split()), where="the lab")
    for name, settings, causes, what in (
        (
            "no-warmup-high-lr",
            ("optimizer.warmup_steps=0", "optimizer.lr=0.03"),
            "lr-too-high",
            "no warm-up and ten times the rate",
        ),
        (
            "no-clip-beta2-0.999",
            ("optimizer.clip=0", "optimizer.betas=(0.9, 0.999)"),
            "",
            "no clipping and a second moment of a thousand steps",
        ),
        (
            "post-norm-deep",
            ("model.norm_position='post'", "model.layers=12", "optimizer.warmup_steps=0"),
            "",
            "twelve layers with the norms after them, no warm-up",
        ),
        ("wide-init", ("model.init_std=0.5",), "", "initial weights ten times as wide"),
        ("no-weight-decay", ("optimizer.weight_decay=0",), "", "weight decay 0"),
        ("heavy-weight-decay", ("optimizer.weight_decay=1",), "", "weight decay 1"),
    )
)
_BENIGN = (
    *(
        Drill(name=name, family="benign", what=what, control=name, where="the lab")
        for name, what in (
            ("hard-batch", "one batch of another kind of text"),
            ("domain-switch", "half of the text is of another kind from now on"),
            ("other-domain", "all of the text is of another kind from now on, and nobody has announced it"),
            ("batch-size-ramp", "batches of twice the size from now on"),
            ("checkpoint-pause", "two seconds without a step"),
            ("clean-resume", "stopped and resumed"),
        )
    ),
    Drill(
        name="lr-decay",
        family="benign",
        what="the schedule begins its decay: a tenth of the rate from now on",
        faults=("lr-spike:factor=0.1,steps=100000,log=shows",),
    ),
)
DRILLS: dict[str, Drill] = {
    drill.name: drill
    for drill in (
        *_DATA,
        _MASKED,
        _POISONED,
        *_SCHEDULE,
        _WARMUP,
        *_OPTIMIZER,
        *_PRECISION,
        _SCALE,
        *_HARDWARE,
        *(drill for drill in _RANKS if drill.family == "hardware"),
        *_CODE,
        *(drill for drill in _RANKS if drill.family == "code"),
        *_EXPERTS,
        *_POLICY,
        *_NATURAL,
        *_BENIGN,
    )
}
"""All drills by name."""
FAMILIES = get_args(Family)[:-1]


def chosen(names: Iterable[str], *, is_lab: bool) -> list[Drill]:
    """The requested drills, by name, by family, or as a fault of one's own; without names, all that fit."""
    found: dict[str, Drill] = {}
    for name in names:
        family = [drill for drill in DRILLS.values() if drill.family == name]
        wanted = [DRILLS[name]] if name in DRILLS else family or [_own(name)]
        for drill in wanted:
            if not is_lab and drill.where in SCARCE and not family:
                raise ConfigError(f"{drill.name}: needs {SCARCE[drill.where]}; leave out --build")
            found[drill.name] = drill
    fitting = [drill for drill in found.values() or DRILLS.values() if is_lab or drill.where not in SCARCE]
    return sorted(fitting, key=lambda drill: get_args(Family).index(drill.family))


def _own(text: str) -> Drill:
    """A drill of a fault in the syntax of ``sealegs train --inject``."""
    name = text.partition("@")[0].partition(":")[0]
    if name not in KINDS:
        known: Sequence[str] = (*DRILLS, *FAMILIES, *KINDS)
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else "see `sealegs drill --list`"
        raise ConfigError(f"{text!r}: no drill, family or fault is called that; {hint}")
    drill = Drill(name=text, family="your own", what="as you wrote it", faults=(text,))
    [fault] = drill.struck(0)
    if fault.rank is not None:
        return replace(drill, where="ranks")
    if isinstance(fault, PolicyFault):
        return replace(drill, where="policy gradient")
    return replace(drill, where="text") if isinstance(fault, DataFault) else drill
