"""What a run is about to do, as plain values. A field that is not known is ``None``, and no rule uses it.

A plan can be written by hand as TOML: a table ``[plan.optimizer]``, ``[plan.schedule]`` ... for each class here.
"""

import difflib
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from sealegs.errors import ConfigError
from sealegs.record.reading import shown

Dtype: TypeAlias = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
Kind: TypeAlias = Literal["cosine", "linear", "constant", "inverse-sqrt", "stable-decay", "cosine-restarts"]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=10**18)]
Size: TypeAlias = Annotated[int, msgspec.Meta(gt=0, lt=10**18)]
Number: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
Positive: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
Share: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Some of the fields of a plan; no two groups share a name."""


class Optimizer(Group, frozen=True, kw_only=True):
    """How weights are updated."""

    optimizer: str | None = None
    """``adamw``, ``adam``, ``sgd``, ..."""
    lr: Positive | None = None
    """The largest learning rate of the run."""
    beta1: Share | None = None
    beta2: Share | None = None
    eps: Number | None = None
    weight_decay: Number | None = None
    decoupled: bool | None = None
    """Whether weights decay directly (AdamW), not through the gradient (Adam with L2)."""
    decays_vectors: bool | None = None
    """Whether norm gains and biases decay, too."""
    decays_embeddings: bool | None = None
    moments_dtype: Dtype | None = None
    clip: Number | None = None
    """The clipping norm; 0 is off."""
    clip_by: Literal["norm", "value"] | None = None
    clips_updates: bool | None = None
    """Whether the clip is applied to what Muon has orthogonalised, and not to the gradient."""
    typical_grad_norm: Number | None = None
    """The median norm before clipping, if a run has shown it."""
    tuned_lr: Positive | None = None
    """The learning rate that was found best."""
    tuned_batch_tokens: Positive | None = None
    """The batch with which it was found, in tokens."""


class Schedule(Group, frozen=True, kw_only=True):
    """The learning rate over the run."""

    steps: Size | None = None
    """Number of updates."""
    schedule: Kind | None = None
    warmup_steps: Count | None = None
    decay_steps: Size | None = None
    """The step at which the schedule has come down; by default the last of the run."""
    final_lr_share: Share | None = None
    """The share of the peak that is left there."""
    cycles: Annotated[float, msgspec.Meta(gt=0, le=1000)] | None = None
    """Cycles of ``cosine-restarts``."""
    stable_share: Share | None = None
    """For ``stable-decay``: the share of the run up to which the rate stays at its peak."""
    rates: Annotated[tuple[Number, ...], msgspec.Meta(min_length=1)] | None = None
    """The learning rate of every step, if it was simulated or written down."""
    schedule_step: Count | None = None
    """The present step of the schedule."""
    optimizer_step: Count | None = None
    """The updates that the optimizer has made."""


class Precision(Group, frozen=True, kw_only=True):
    """Number formats."""

    dtype: Dtype | None = None
    """Format of matrix products."""
    weights_dtype: Dtype | None = None
    """Format of the weights that the optimizer updates: the master copy, if there is one."""
    scaler: bool | None = None
    """Whether a loss scaler is on."""
    static_scale: Number | None = None
    """A loss scale that never changes."""
    stochastic_rounding: bool | None = None
    softmax_dtype: Dtype | None = None
    naive_softmax: bool | None = None
    """Whether no maximum is subtracted before the exponential."""
    naive_log_loss: bool | None = None
    """Whether the loss is log(softmax(x)) instead of log_softmax(x)."""
    gradient_dtype: Dtype | None = None
    """Format in which the gradients of micro-batches and ranks are summed."""
    addends: Size | None = None
    """Micro-batches times ranks."""
    fp8_gradients: Literal["e4m3", "e5m2"] | None = None


class Architecture(Group, frozen=True, kw_only=True):
    """The kind of model."""

    parameters: Size | None = None
    width: Size | None = None
    """Width of the residual stream."""
    layers: Size | None = None
    vocabulary: Size | None = None
    norm_position: Literal["pre", "post", "branch"] | None = None
    """Position of the norms: before a layer's computation, after the residual sum, or on what a layer adds to it."""
    norm_eps: Number | None = None
    final_norm: bool | None = None
    embedding_norm: bool | None = None
    qk_norm: bool | None = None
    attention_softcap: Number | None = None
    """0 is none."""
    attention_kernel: str | None = None
    logit_softcap: Number | None = None
    """0 is none."""
    misplaced_softcap: Number | None = None
    """A soft-cap at a place where the model does not read it."""
    z_loss: Number | None = None
    """Its factor; 0 is off."""
    gated_mlp: bool | None = None
    tied_head: bool | None = None
    init_std: Number | None = None
    """The widest spread of the initial weights that read the residual stream."""
    widest_tensor: str | None = None
    initial_logit_std: Number | None = None
    """Measured before the first step."""
    narrowed_residual: bool | None = None
    """Whether matrices that write into the residual stream start narrower, by the depth."""
    mup_base_width: Size | None = None


class ParameterState(Group, frozen=True, kw_only=True):
    """Names of parameters with a problem; an empty list means checked, and no problem."""

    unowned: tuple[str, ...] | None = None
    """Trainable, but in no optimizer."""
    strangers: tuple[str, ...] | None = None
    """In the optimizer, but not in the model."""
    frozen: tuple[str, ...] | None = None
    owned_twice: tuple[str, ...] | None = None
    unmoved: tuple[str, ...] | None = None
    """Unchanged by a step."""
    moved_share: Share | None = None
    """Share of the entries with a gradient that a step changes, all parameters together."""
    untied: tuple[str, ...] | None = None
    """Meant to be tied to another, but not tied."""
    nonfinite: tuple[str, ...] | None = None
    moments_empty: bool | None = None
    not_held: tuple[str, ...] | None = None
    """Objects that follow the training and that no state has."""


class Data(Group, frozen=True, kw_only=True):
    """The data, and their order."""

    batch_tokens: Positive | None = None
    """Tokens per update."""
    target_share: Share | None = None
    """Share of the tokens of a batch that count for the loss."""
    emptiest_row: Share | None = None
    """The smallest such share in a row."""
    padding_share: Share | None = None
    shuffle: Literal["none", "buffer", "shards", "all"] | None = None
    shuffle_buffer: Count | None = None
    grouped_by_length: bool | None = None
    workers: Count | None = None
    workers_share_seed: bool | None = None
    ranks: Size | None = None
    ranks_share_data: bool | None = None
    """Whether each rank draws from all of the data with the same seed."""


class FineTuning(Group, frozen=True, kw_only=True):
    """How a model is trained that was trained before."""

    finetunes: bool | None = None
    """Whether the weights come from an earlier training."""
    adapter: bool | None = None
    """Whether an adapter (LoRA, DoRA, ...) is trained, and the base stands still."""
    objective: Literal["answers", "pairs", "reward"] | None = None
    """What is learned: to answer, to tell pairs of answers apart, or to be rewarded."""
    quantised: Literal["4-bit", "8-bit"] | None = None
    """How the base is kept, if in fewer bits."""
    compute_dtype: Dtype | None = None
    """The format into which a quantised base is unpacked."""
    padding_side: Literal["left", "right"] | None = None
    answers_learned: Share | None = None
    """Share of the rows with targets in whose last quarter something counts."""
    ends_learned: bool | None = None
    """Whether the token that ends an answer, where it stands in a row, is a label."""
    doubled_bos: bool | None = None
    """Whether every row begins with the token of the beginning twice."""


class Operations(Group, frozen=True, kw_only=True):
    """Checkpoints, logs and restarts."""

    checkpoint_steps: Count | None = None
    """0 is never."""
    checkpoint_minutes: Number | None = None
    keep_checkpoints: Count | None = None
    saves_optimizer: bool | None = None
    keeps_data_position: bool | None = None
    """Whether a resume continues at the same position in the data."""
    log_steps: Size | None = None
    nan_filter: bool | None = None
    """Whether the log replaces a loss that is not finite."""
    seconds_per_step: Positive | None = None
    price_per_hour: Number | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run is about to do."""

    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    precision: Precision = Precision()
    architecture: Architecture = Architecture()
    state: ParameterState = ParameterState()
    data: Data = Data()
    finetuning: FineTuning = FineTuning()
    operations: Operations = Operations()

    def known(self) -> dict[str, Any]:
        """The known fields, by name."""
        return {name: value for name, value in self.fields() if value is not None}

    def fields(self) -> Iterator[tuple[str, Any]]:
        """Every field with its value."""
        for group in self.__struct_fields__:
            inside = getattr(self, group)
            yield from ((name, getattr(inside, name)) for name in inside.__struct_fields__)


HOMES = {name: group for group in Plan.__struct_fields__ for name in getattr(Plan(), group).__struct_fields__}
"""The group of each field."""


def plan_from(known: Mapping[str, Any], where: str = "plan") -> Plan:
    """A plan from fields by name; ``None`` is not known."""
    groups: dict[str, dict[str, Any]] = {}
    for name, value in known.items():
        if name not in HOMES:
            near = difflib.get_close_matches(name, HOMES, n=1)
            hint = f"did you mean {near[0]}?" if near else "docs/preflight.md has every field of a plan"
            raise ConfigError(f"{where}: {name[:60]} is no field of a plan; {hint}")
        groups.setdefault(HOMES[name], {})[name] = value
    return written(groups, where)


def written(groups: Any, where: str) -> Plan:
    """A plan from tables of fields, as a person writes them."""
    try:
        plan = msgspec.convert(_with_whole_numbers(groups), Plan, strict=True)
    except (msgspec.ValidationError, UnicodeError) as error:  # half of a character cannot be text
        raise ConfigError(f"{where}: {_refusal(str(error), groups)}") from error
    for name, value in plan.fields():
        numbers = value if isinstance(value, tuple) else (value,)
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            raise ConfigError(f"{where}: {HOMES[name]}.{name}={value}: a finite number")
    return plan


def _with_whole_numbers(groups: Any) -> Any:
    """Tables in which ``3e9``, as people write parameters and steps, is a whole number."""
    if isinstance(groups, Mapping):
        return {name: _with_whole_numbers(value) for name, value in groups.items()}
    is_whole = isinstance(groups, float) and groups.is_integer() and abs(groups) < 2**53
    return int(groups) if is_whole else groups


def _refusal(told: str, groups: Any) -> str:
    """msgspec's message about a plan, with the field and its value in front."""
    why, _, place = told.partition(" - at `$.")
    group, _, name = place.rstrip("`").partition(".")
    inside = groups.get(group) if isinstance(groups, Mapping) else None
    if isinstance(inside, Mapping) and name in inside:
        return f"{group}.{name}={shown(inside[name])}: {why}"
    return f"{told[:300]}; docs/preflight.md has every field of a plan"


def merged(first: Plan, *others: Plan) -> Plan:
    """The fields that any of the plans knows; of several values, the last one."""
    known = first.known()
    for other in others:
        known |= other.known()
    return plan_from(known)
