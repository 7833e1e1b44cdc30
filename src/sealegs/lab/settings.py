"""The settings of a lab run: frozen values that refuse what cannot work, and the named starting points.

Standard library only, so that ``sealegs train --help`` need not wait for torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from sealegs.errors import ConfigError


def _refuse_unless(sound: bool, name: str, value: Any, cure: str) -> None:
    if not sound:
        raise ConfigError(f"{name}={value!r}: {cure}")


def _refuse_unknown_choices(settings: Any, group: str = "") -> None:
    """Refuse a word that is not one of a field's choices."""
    for name, kind in get_type_hints(type(settings)).items():
        value = getattr(settings, name)
        if get_origin(kind) is Literal and value not in get_args(kind):
            _refuse_unless(False, f"{group}{name}", value, f"one of {', '.join(get_args(kind))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """A decoder-only transformer. The defaults keep every margin; each switch says which one it gives or takes."""

    vocabulary: int = 512
    """Number of token ids."""
    context: int = 64
    """Tokens that one row of a batch spans."""
    layers: int = 4
    """Blocks of attention and MLP."""
    width: int = 96
    """Width of the residual stream."""
    heads: int = 4
    """Attention heads; they share the width."""
    hidden: int = 256
    """Width inside the MLP; 8/3 of `width` gives SwiGLU the parameters of a classic 4x MLP."""
    tied_head: bool = True
    """Use the embedding as output matrix. Untied takes some margin: the head's logits can grow on their own."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Neither is known to be the more stable one; RMSNorm is cheaper."""
    norm_position: Literal["pre", "post"] = "pre"
    """`post` takes a large margin: gradients pass through every norm, and stacks of about 48 layers diverge."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    """SwiGLU fits better at equal size. Its product of two projections has heavier tails than GELU (fp8 notices)."""
    qk_norm: bool = False
    """Gives margin: normalised queries and keys bound the attention logits. Worth it from about 1B parameters."""
    z_loss: float = 0.0
    """Gives margin: this factor (1e-4 in PaLM) on the squared log-partition keeps output logits near zero."""
    embedding_norm: bool = False
    """Gives margin: a norm after the embedding (BLOOM) bounds what a rare token's row can do. Costs some loss."""
    norm_eps: float = 1e-6
    """0 takes the margin that keeps a zero row from becoming 0/0 = NaN."""
    naive_softmax: bool = False
    """Takes a margin: attention exponentials without subtracting the maximum overflow at logits of 88.7 in fp32."""
    naive_log_loss: bool = False
    """Takes a margin: log(softmax(x)) instead of log_softmax(x) is log(0) = -inf once a probability underflows."""
    init_std: float | Literal["from width"] = "from width"
    """Spread of the initial weights; "from width" is sqrt(1 / (3 width)). A wider one takes margin from step 0."""
    mup_base_width: int | None = None
    """muP: the width that learning rate and init were found at. At another one hidden matrices learn at lr * base /
    width and begin narrower, embedding and head as at the base; logits are divided by width / base, and attention
    logits by the width of a head."""
    rotary_base: float = 10_000.0
    """The slowest pair of a head turns once in about 6 times this many tokens."""
    experts: int = 0
    """Experts in the place of each MLP; 0 is one MLP for all tokens."""
    experts_per_token: int = 2
    """Experts that a token uses: the router's best."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """What makes scores of the router's logits. `sigmoid` (DeepSeek) lets experts compete less."""
    balance: Literal["aux", "bias", "none"] = "aux"
    """What keeps the experts' loads alike. `aux`: a loss (Switch). `bias`: a correction of the choice that no gradient
    sees (DeepSeek). `none` takes a margin: experts that are used learn, and are used more."""
    balance_weight: float = 0.01
    """Factor on the balance loss of `aux`."""
    balance_rate: float = 1e-3
    """How far `bias` moves in a step."""
    router_z_weight: float = 1e-3
    """Gives margin: factor on the squared log-partition of the router's logits, which keeps them small (ST-MoE)."""
    float8: bool = False
    """Takes some margin: what the MLPs' products read is rounded to eight bits (E4M3), with a scale for each tensor."""

    def __post_init__(self) -> None:
        _refuse_unknown_choices(self, "model.")
        for name in ("vocabulary", "context", "layers", "width", "heads", "hidden"):
            _refuse_unless(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "must be at least 1")
        _refuse_unless(
            self.width % (2 * self.heads) == 0,
            "model.heads",
            self.heads,
            f"model.width={self.width} must be a multiple of twice the heads (rotary positions turn pairs)",
        )
        base = self.mup_base_width
        _refuse_unless(
            base is None or base >= 1, "model.mup_base_width", base, "must be at least 1; leave it out for none"
        )
        _refuse_unless(self.norm_eps >= 0, "model.norm_eps", self.norm_eps, "must not be negative")
        _refuse_unless(self.z_loss >= 0, "model.z_loss", self.z_loss, "must not be negative; 0 is off")
        _refuse_unless(self.rotary_base > 1, "model.rotary_base", self.rotary_base, "must be above 1")
        _refuse_unless(self.experts >= 0, "model.experts", self.experts, "must not be negative; 0 is one MLP for all")
        _refuse_unless(
            self.experts_per_token >= 1 and (self.experts_per_token < self.experts or not self.experts),
            "model.experts_per_token",
            self.experts_per_token,
            f"at least 1, and fewer than model.experts={self.experts}",
        )
        for name in ("balance_weight", "balance_rate", "router_z_weight"):
            _refuse_unless(getattr(self, name) >= 0, f"model.{name}", getattr(self, name), "must not be negative")
        is_sound = self.init_std == "from width" if isinstance(self.init_std, str) else 0 < self.init_std < 10
        _refuse_unless(is_sound, "model.init_std", self.init_std, 'between 0 and 10, or "from width"')

    @property
    def initial_std(self) -> float:
        """The spread of initial weights as a number; under muP, that of embedding and head."""
        width = self.mup_base_width or self.width
        return math.sqrt(1 / (3 * width)) if isinstance(self.init_std, str) else self.init_std

    @property
    def mup_times(self) -> float:
        """This width as a multiple of the base width; 1 without muP."""
        return self.width / (self.mup_base_width or self.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """What the model reads, and in which portions."""

    sources: Mapping[str, float] = field(default_factory=lambda: {"grammar": 1.0})
    """Weights by source: `grammar` (generated), `stdlib` (the interpreter's own source code), or the path of a .txt
    (UTF-8), .npy or .bin (uint16 token ids) file."""
    rows: Literal["packed", "documents"] = "packed"
    """`packed`: a row is a window of the running text. `documents`: a row is one document, padded or cut."""
    batch: int = 8
    """Rows a step."""
    accumulation: int = 1
    """Micro-batches that a step is cut into; the result is the same mean over all its target tokens."""
    held_out: float = 0.02
    """Share of each source that is kept for evaluation and never trained on."""
    sentences: int = 20_000
    """How many distinct sentences the `grammar` source has."""
    tokenizer: str | None = None
    """A tokenizer.json to use; without one, a byte-level BPE is trained on the text sources and cached."""
    leave_out: str | None = None
    """The documents.jsonl of `sealegs scan`: which are not trained on, which come last in an epoch."""
    stratified: bool = False
    """Gives margin: no batch has a rare token (fewer than 10 in the data) in two rows, where that can be."""

    def __post_init__(self) -> None:
        _refuse_unknown_choices(self, "data.")
        _refuse_unless(0 < len(self.sources) <= 512, "data.sources", self.sources, "name 1 to 512 sources")
        for name, weight in self.sources.items():
            _refuse_unless(
                0 < weight < math.inf, f"data.sources.{name}", weight, "a weight above 0; leave a source out to drop it"
            )
        _refuse_unless(self.batch >= 1, "data.batch", self.batch, "must be at least 1")
        _refuse_unless(
            self.accumulation >= 1 and self.batch % self.accumulation == 0,
            "data.accumulation",
            self.accumulation,
            f"must divide data.batch={self.batch}",
        )
        _refuse_unless(0 < self.held_out < 1, "data.held_out", self.held_out, "a share between 0 and 1")
        _refuse_unless(self.sentences >= 2, "data.sentences", self.sentences, "must be at least 2")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW with linear warm-up and cosine decay."""

    lr: float = 3e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """beta2 0.95 averages about 20 steps and damps a rare large gradient soon; 0.999 averages 1000 and stays stale."""
    eps: float = 1e-8
    """Keeps AdamW's division from a second moment of zero."""
    weight_decay: float = 0.1
    """On matrices only. Below 0.01 weights drift upwards, above 0.5 the model cannot fit."""
    clip: float = 1.0
    """Largest global L2 norm of the gradients; 0 is off, and takes the first line of defence."""
    qk_clip: float = 0.0
    """Gives margin: where an attention logit of a head is larger, its queries and keys are rescaled; 0 is off, 100 is
    what Kimi K2 was trained with."""
    warmup_steps: int = 50
    """Steps in which the learning rate rises from nearly nothing to its peak."""
    final_lr_share: float = 0.1
    """What is left of the peak at the last step."""

    def __post_init__(self) -> None:
        _refuse_unless(0 < self.lr < math.inf, "optimizer.lr", self.lr, "must be above 0")
        _refuse_unless(
            all(0 <= beta < 1 for beta in self.betas), "optimizer.betas", self.betas, "two numbers in [0, 1)"
        )
        _refuse_unless(self.eps > 0, "optimizer.eps", self.eps, "must be above 0")
        _refuse_unless(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "must not be negative")
        _refuse_unless(self.clip >= 0, "optimizer.clip", self.clip, "must not be negative; 0 is off")
        _refuse_unless(self.qk_clip >= 0, "optimizer.qk_clip", self.qk_clip, "must not be negative; 0 is off")
        _refuse_unless(self.warmup_steps >= 0, "optimizer.warmup_steps", self.warmup_steps, "must not be negative")
        _refuse_unless(
            0 <= self.final_lr_share <= 1, "optimizer.final_lr_share", self.final_lr_share, "a share from 0 to 1"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CadenceSettings:
    """What happens how often."""

    evaluate_steps: int = 100
    """Steps between evaluations; 0 evaluates only at the end."""
    evaluate_batches: int = 8
    """Held-out batches that an evaluation reads: the same ones each time."""
    checkpoint_steps: int = 200
    """Steps between checkpoints; 0 is off. The last step always leaves one."""
    checkpoint_minutes: float = 30.0
    """Minutes between checkpoints, whichever comes first; 0 is off."""
    keep_checkpoints: int = 3
    """The newest so many are kept, and always at least one intact one."""
    snapshot_steps: int = 50
    """Steps between snapshots in memory, where a playbook may go back to them."""
    detail_steps: int = 10
    """Steps between the costlier signals: throughput, token entropy."""

    def __post_init__(self) -> None:
        for name in ("evaluate_steps", "checkpoint_steps", "checkpoint_minutes"):
            _refuse_unless(getattr(self, name) >= 0, f"cadence.{name}", getattr(self, name), "must not be negative")
        for name in ("evaluate_batches", "keep_checkpoints", "snapshot_steps", "detail_steps"):
            _refuse_unless(getattr(self, name) >= 1, f"cadence.{name}", getattr(self, name), "must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A whole run."""

    steps: int = 400
    """Updates of the weights, in all; the schedule ends there."""
    seed: int = 0
    """Chooses the initial weights and the order of the data."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """`auto`: bf16 autocast with fp32 master weights where the hardware has bf16 and it is faster (on a CPU: not for
    narrow models), else fp32. `fp16` scales the loss."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: CUDA where torch sees it."""
    compile: bool = False
    """Run the model through torch.compile."""
    threads: int = 0
    """CPU threads; 0: OMP_NUM_THREADS, or all cores. A resumed run keeps its number: sums in another order differ."""
    playbook: Literal["observe", "standard", "palm"] = "observe"
    """What is done about trouble: `observe` skips and halts, the others go back, pass over data, lower the rate."""
    shadow: bool = False
    """Decide and write down, but neither skip nor halt nor treat: to see what would have been done."""
    price_per_hour: float = 0.0
    """What an hour of this machine costs, for the cost of incidents."""
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    cadence: CadenceSettings = field(default_factory=CadenceSettings)

    def __post_init__(self) -> None:
        _refuse_unknown_choices(self)
        _refuse_unless(self.steps >= 1, "steps", self.steps, "must be at least 1")
        _refuse_unless(0 <= self.seed < 2**63, "seed", self.seed, "a whole number from 0 to 2^63 - 1")
        _refuse_unless(self.threads >= 0, "threads", self.threads, "must not be negative; 0 takes all cores")
        _refuse_unless(self.price_per_hour >= 0, "price_per_hour", self.price_per_hour, "must not be negative")


def _sized(layers: int, width: int, heads: int, hidden: int, *, lr: float, **other: Any) -> Settings:
    model = {name: other.pop(name) for name in ("vocabulary", "context") if name in other}
    return Settings(
        model=ModelSettings(layers=layers, width=width, heads=heads, hidden=hidden, **model),
        data=DataSettings(**{name: other.pop(name) for name in ("batch",) if name in other}),
        optimizer=OptimizerSettings(lr=lr, **other),
    )


SIZES: Mapping[str, Settings] = {
    "nano": _sized(2, 48, 4, 96, lr=3e-3, context=32, warmup_steps=20),
    "toy": _sized(4, 96, 4, 256, lr=3e-3),
    "small": _sized(7, 320, 5, 864, lr=1e-3, vocabulary=4096, context=256, batch=16, warmup_steps=100),
    "x1": _sized(10, 576, 9, 1536, lr=6e-4, vocabulary=16384, context=1024, batch=32, warmup_steps=200),
}
"""Model sizes with the data and learning rate that suit them: 71k, 0.5M, 10M and 49M parameters."""

PRESETS: Mapping[str, Settings] = {
    "demo": replace(SIZES["toy"], steps=600),
    "x1": replace(SIZES["x1"], steps=20_000, data=DataSettings(sources={"stdlib": 1.0}, batch=32)),
    "seed-002": replace(
        SIZES["nano"],
        # The width at which the loss before step 312 is nearest to the 2.31 of the worked example.
        model=replace(SIZES["nano"].model, width=128, hidden=256),
        steps=2000,
        seed=42,
        dtype="fp32",
        # 300 sentences less a fifth held out: the 240 of the worked example.
        data=DataSettings(rows="documents", batch=8, sentences=300, held_out=0.2),
        optimizer=OptimizerSettings(lr=3e-4, warmup_steps=100, final_lr_share=0.0),
    ),
}
"""Whole runs to start from: the demo, the 24-hour run of 50M parameters, the worked example of a loss spike."""
