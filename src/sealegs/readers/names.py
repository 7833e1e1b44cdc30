"""Maps the names that logs use to our signals: by one table, a few rules, and what the user says."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import lru_cache

import numpy as np

from sealegs.errors import SourceError
from sealegs.readers.kind_names import Role, kind_signals, plain
from sealegs.record.columns import Columns
from sealegs.record.rows import sound_name
from sealegs.record.schema import SIGNALS

STEP, EPOCH = "step", "epoch"
CARRIED = ("step of the bar", "step of a line before")
"""Prefixes of step names whose value comes from another row."""

TABLE = {
    "loss": "loss train_loss training_loss loss_train train_loss_step train_step_loss train_batch_loss batch_loss "
    "loss_step step_loss lm_loss train_lm_loss train_inner_loss reduced_train_loss total_loss loss_total mean_loss "
    "avg_loss average_loss loss_mean loss_avg cross_entropy_loss crossentropyloss ce_loss nll_loss train_nll nll "
    "train_loss_epoch losses",
    "eval_loss": "eval_loss val_loss valid_loss validation_loss loss_val loss_valid loss_validation loss_eval "
    "val_loss_epoch val_loss_step lm_loss_value dev_loss test_loss loss_test loss_dev",
    "grad_norm": "grad_norm gradient_norm global_grad_norm total_grad_norm grad_norm_total gnorm grads_norm "
    "gradients_norm grad_norm_before_clip global_norm grad_2_0_norm_total grad_2_norm_total grad_l2_norm norm_grad "
    "l2_norm_grad_global grad_global_norm gradnorm norm_grad_global preclip_grad_norm grad_norm_pre_clip",
    "lr": "lr learning_rate lr_0 lr_pg1 lr_group0 lr_adamw lr_adam lr_sgd lr_adamw_pg1 lr_adam_pg1 lr_group_0 "
    "learning_rate_group0 learning_rate_group_0 lr_decoupledadamw_group0 lr_decoupled_adamw_group0 lr_fusedadam "
    "adam_lr scheduler_lr current_lr",
    "loss_scale": "loss_scale grad_scale amp_scale scaler_scale",
    "param_norm": "param_norm params_norm weight_norm parameter_norm total_param_norm l2_norm_param_global "
    "weights_norm params_l2_norm",
    "attention_logit_max": "attention_logit_max max_attn_logits max_attn_logit max_attention_logit "
    "max_attention_logits attn_logits_max attention_logits_max attn_max_logit max_qk_logit max_qk_logits",
    "activation_norm": "activation_norm actv_norm activations_norm",
    "update_rms": "update_rms updates_rms rms_update",
    "tokens_per_s": "tokens_per_s tokens_per_second tokens_per_sec tok_s tok_sec tps tokens_sec tok_per_sec "
    "tokens_per_second_per_gpu tokens_per_gpu_per_second tgs",
    "step_s": "step_s step_time_s seconds_per_step sec_per_step step_time_ms step_ms iter_time_ms "
    "iteration_time_ms time_per_iteration_ms elapsed_time_per_iteration_ms ms_per_step iteration_time "
    "train_step_timing_in_s step_time",
    STEP: "time_iterations global_step num_updates iteration iterations iter iters step steps update_step train_step "
    "training_step optimizer_step current_step current_steps n_iter num_steps updates batch_idx",
    EPOCH: "epoch epochs",
}
"""Our signals and their names elsewhere, the best first, in lower case with ``_`` between the words.

A name may have a prefix: ``metrics/train/lm loss`` is a ``lm_loss``.
"""

ALONE = {
    "loss": "trl train",
    "eval_loss": "tel val",
    "grad_norm": "norm",
    "loss_scale": "scale",
    "step_s": "dt_ms time_ms",
    STEP: "it s i n update batch",
}
"""The same for names without a prefix only: they are too short to mean much elsewhere."""

_HELD_OUT = frozenset({"val", "valid", "validation", "eval", "test", "dev", "evaluation", "holdout", "heldout", "tel"})
_NO_LOSS = re.compile(
    r"scaler?|weight(s|ing)?|coef|coefficient|every|lambda|best|min|max|ratio|final|initial|clip|limit|patience|alpha|"
    r"beta|threshold|interval|fn|std|var|time|ema|z|smoothing"
)
_SETTING = re.compile(r"max|min|clip|clipping|limit|threshold|target|init|initial|peak|base|args?|config|cfg|hparams?")
"""Words before the name of a signal that make a setting of it."""
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_LOSS_LIKE = re.compile(
    r"mse|rmse|nmse|mae|l1|nll|bce|ce|xent|xentropy|crossentropy|entropy|objective|cost|criterion|elbo|bpd|bpb|bpc|"
    r"perplexity|ppl|residual|energy|err|error|losses?|\w*loss"
)
"""Words of names that may mean a loss."""
_AS_LOSS = frozenset(
    [
        "mse",
        "rmse",
        "nmse",
        "mae",
        "nll",
        "bce",
        "xent",
        "crossentropy",
        "elbo",
        "bpd",
        "bpb",
        "bpc",
        "perplexity",
        "ppl",
    ]
)
"""Those that are taken for it where nothing is called a loss; the others are asked for."""
_HOW_TAKEN = frozenset(["scaled", "normalized", "normalised", "mean", "avg", "average", "total", "step", "epoch"])
"""Words after the name of a measure that say how it was taken."""
_NO_STEP = re.compile(r"total|max|number|per|warmup|save|log|logging|time|skipped|nan|remaining|avg|every")
_OF_BOXES = re.compile(r"(?:.*_)?(?:box|cls|dfl)_(?:om|oo)")
"""The losses of YOLOv10's two heads, one to many and one to one, that are not called losses."""
_POLICY = frozenset({"policy", "pg", "surrogate", "actor", "pi"})
"""Words of a policy's own loss, which comes before that of its critic."""
_SELDOM = 20
"""Times as often as a loss that another measure is logged, from which on the loss is not what the log is about."""
_PART = re.compile(
    r"(?:rank|local|worker|gpu|cuda|device|node|host|shard|replica|stage|layer|block|group|expert|head|module)s?\d*"
    r"|h\d+|wte|wpe|embed\w*|lm|encoder|decoder|attn|attention|mlp|ffn|router|gate|lora|adapter|weight|bias|qkv?|proj"
    r"|conv\d*|backbone|trunk|stem|unet|vae|vision|tower"
)
"""Words before the name of a norm that say of which part of the run or the model it is: it is not the run's."""
_ONE_OF_MANY = re.compile(r"(?:.*_)?(?:(?:rank|worker|gpu|cuda|device|node|host|shard|replica)_?\d+|local)(?:_.*)?")
"""Names of what one of several ranks has measured: any loss of all of them comes before."""
_FALLBACK_RANK = 1000


def _ranks() -> tuple[dict[str, Role], dict[str, Role]]:
    anywhere = {name: Role(rank, signal) for signal, names in TABLE.items() for rank, name in enumerate(names.split())}
    alone = {
        name: Role(_FALLBACK_RANK // 2 + rank, signal)
        for signal, names in ALONE.items()
        for rank, name in enumerate(names.split())
    }
    return anywhere, alone


_ANYWHERE, _ALONE = _ranks()


@lru_cache(maxsize=50_000)
def role(name: str) -> Role | None:
    """The role of a column of this name, if it has one.

    >>> role("val/lm loss").signal, role("Finished training it").signal, role("koleo_loss_weight")
    ('eval_loss', 'step', None)
    >>> role("TrainLoss").signal, role("valLoss").signal, role("clip_grad_norm"), role("max_grad_norm")
    ('loss', 'eval_loss', None, None)
    >>> role("rank0_loss").rank > role("koleo_loss").rank > role("train/loss").rank
    True
    """
    found = _role(name)
    split = _CAMEL.sub("_", name)
    found = _role(split) if found is None and split != name else found
    if found is None or found.signal not in ("loss", "eval_loss"):
        return found
    is_one_of_many = _ONE_OF_MANY.fullmatch(plain(split.rpartition(" - ")[2]))  # not by the name of a run
    return Role(found.rank + 2 * _FALLBACK_RANK, found.signal) if is_one_of_many else found


def _role(name: str) -> Role | None:
    key = plain(name)
    words = key.split("_")
    if name.endswith(("__MIN", "__MAX")):  # statistics beside each column of a W&B export
        return None
    if name.startswith(CARRIED):
        return Role(_FALLBACK_RANK, STEP)
    if key in _ALONE:
        return _ALONE[key]
    held_out = not _HELD_OUT.isdisjoint(words)
    for cut in range(len(words)):
        found = _ANYWHERE.get("_".join(words[cut:]))
        if words[cut:] == ["it"]:
            found = _ALONE["it"]
        if found is None:
            continue
        if found.signal in ("loss", "eval_loss"):
            if not any(map(_NO_LOSS.fullmatch, words[:cut])):
                better = 10 * (not _POLICY.isdisjoint(words[:cut]))
                return Role(found.rank + 20 * cut - better, "eval_loss" if held_out else found.signal)
        elif found.signal in (STEP, EPOCH):
            if not any(map(_NO_STEP.fullmatch, words[:cut])):
                return Role(found.rank + cut, found.signal)  # train/global_step before _step
        elif not held_out and not any(
            map(_SETTING.fullmatch, words[:cut])
        ):  # max_grad_norm is what they are clipped to
            if found.signal == "grad_norm" and _is_of_a_part(name):
                continue
            return Role(found.rank + 20 * cut, found.signal)
    if ("loss" in words or _OF_BOXES.fullmatch(key)) and not any(map(_NO_LOSS.fullmatch, words)):
        better = 100 * ("train" in words) + 50 * (not _POLICY.isdisjoint(words))
        return Role(_FALLBACK_RANK - better, "eval_loss" if held_out else "loss")
    return None


def _is_of_a_part(name: str) -> bool:
    """Whether the name of a norm says of which rank, layer or module it is; the name of a run before it does not count.

    >>> role("layers.0.grad_norm"), role("rank0_grad_norm"), role("lm-encoder-3 - train/grad_norm").signal
    (None, None, 'grad_norm')
    """
    return any(map(_PART.fullmatch, plain(name.rpartition(" - ")[2]).split("_")))


def candidates(columns: Columns, signal: str) -> list[str]:
    """The columns that can stand for a signal, the best first.

    A column that another one exceeds ten times in logged values comes after it: it is a summary at the end of a run.
    """
    roles = {name: found for name in columns.values if (found := role(name)) and found.signal == signal}
    counts = {name: np.count_nonzero(columns.logged[name]) for name in roles}
    most = max(counts.values(), default=0)
    return sorted(roles, key=lambda name: (counts[name] * 10 < most, roles[name].rank, -counts[name]))


def assign(source: str, columns: Columns, said: Mapping[str, str], *, needs_loss: bool = True) -> dict[str, str]:
    """The column that each of our signals is taken from."""
    for signal, name in said.items():
        if name not in columns.values:
            raise SourceError(f"{source}: no column {name!r} to take {signal} from; it has {listed(columns.values)}")
    mapping = dict(said)
    counts = {name: int(np.count_nonzero(mask)) for name, mask in columns.logged.items()}
    for signal, name in kind_signals(counts, mapping.values()):
        mapping.setdefault(signal, name)
    for signal in (signal for signal in TABLE if signal not in (STEP, EPOCH, *said)):
        found = [name for name in candidates(columns, signal) if name not in mapping.values()]
        if not found:
            continue
        rivals = [name for name in found if " - " in name and plain(name) == plain(found[0])]
        if signal == "loss" and len(rivals) > 1:
            raise SourceError(
                f"{source}: the losses of {len(rivals)} runs; choose: --metric loss={rivals[0]!r} or another"
            )
        mapping[signal] = found[0]
    if "loss" in mapping and "loss" not in said and _is_by_the_way(mapping["loss"], counts):
        del mapping["loss"]
        mapping.pop("eval_loss", None)
    if "loss" not in mapping and "generator_loss" in mapping:
        mapping["loss"] = mapping["generator_loss"]
    has_neither = "loss" not in mapping and "reward" not in mapping
    is_alone = all(
        is_held_out(name) or _is_of_a_loss(name) for name in counts if is_loss_like(name)
    )  # else one of the others may be the loss
    if has_neither and is_alone and "eval_loss" in mapping and "eval_loss" not in said:
        mapping["loss"] = mapping.pop("eval_loss")
    if {"loss", "reward", "eval_reward"}.isdisjoint(mapping):
        like = _loss_like(counts)
        taken = next((name for name in like if _is_as_loss(name)), None)
        if taken is None and needs_loss:
            raise SourceError(f"{source}: {no_loss(columns)}")
        if taken is None:
            return mapping
        mapping["loss"] = taken
        held_out = [name for name in like if _is_as_loss(name, held_out=True)]
        if held_out:
            mapping.setdefault("eval_loss", held_out[0])
    return mapping


def no_loss(columns: Columns) -> str:
    """The sentence about a table without a column that is called a loss, those that may be one first."""
    like = _loss_like({name: int(np.count_nonzero(mask)) for name, mask in columns.logged.items()})
    is_of_training = bool(like) and _HELD_OUT.isdisjoint(plain(like[0]).split("_"))
    first = f"--metric loss={quoted(like[0])}" if is_of_training else "--metric loss=NAME"
    others = [name for name in columns.values if name not in like]
    return f"no column looks like a training loss among {listed([*like, *others])}; say which it is: {first}"


def _is_by_the_way(loss: str, counts: Mapping[str, int]) -> bool:
    """Whether what is called a loss was told once or twice, and a squared error or the like in most rows."""
    most = max((counts[name] for name in counts if _is_as_loss(name)), default=0)
    return _SELDOM * counts[loss] < most


def is_named_otherwise(name: str) -> bool:
    """Whether a column that was taken for the loss is not called one: a squared error, a negative log-likelihood."""
    found = role(name)
    return found is None or found.signal != "loss"


def is_held_out(name: str) -> bool:
    """Whether a column is a loss on data that is not trained on."""
    found = role(name)
    return found is not None and found.signal == "eval_loss"


def _is_as_loss(name: str, *, held_out: bool = False) -> bool:
    words = plain(name).split("_")
    last = next((word for word in reversed(words) if word not in _HOW_TAKEN), words[-1])
    is_apart = _NO_LOSS.fullmatch(last) is not None or not _LOSS_LIKE.fullmatch(last)
    return bool(_AS_LOSS & set(words)) and held_out == (not _HELD_OUT.isdisjoint(words)) and not is_apart


def _is_of_a_loss(name: str) -> bool:
    """Whether a name speaks of the lowest loss so far, its weight or its scale, and not of the loss itself."""
    return any(map(_NO_LOSS.fullmatch, plain(_CAMEL.sub("_", name)).split("_")))


def _loss_like(counts: Mapping[str, int]) -> list[str]:
    """The columns whose names speak of a loss: those of training first, and of them the one logged most often."""

    def order(name: str) -> tuple[bool, bool, bool, int]:
        words = plain(_CAMEL.sub("_", name)).split("_")
        is_held_out, is_setting = not _HELD_OUT.isdisjoint(words), _is_of_a_loss(name)
        return is_setting, is_held_out, "train" not in words, -counts[name]

    return sorted(filter(is_loss_like, counts), key=order)


def is_loss_like(name: str) -> bool:
    """Whether a name speaks of a loss, whatever it is called: ``Train Energy``, ``val_rmse``."""
    return any(map(_LOSS_LIKE.fullmatch, plain(_CAMEL.sub("_", name)).split("_")))


def quoted(name: str) -> str:
    """A name as a shell takes it."""
    return shlex.quote(name[:80]) if name.isprintable() else repr(name[:80])


def live_names(names: Iterable[str], taken: Set[str] = frozenset()) -> dict[str, str]:
    """The names in a row for what a framework logs of one step: our signals where the name is one of theirs, else its
    own. What is measured anyway, and what is ``taken``, keeps its meaning: the framework's is ``trainer/<name>``.

    >>> live_names(["reward", "rewards/len/mean", "entropy", "lr"])
    {'reward': 'reward', 'rewards/len/mean': 'rewards/len/mean', 'entropy': 'policy_entropy', 'lr': 'trainer/lr'}
    """
    names = tuple(names)
    named = {name: signal for signal, name in kind_signals(dict.fromkeys(names, 1), ())}
    return {name: named.get(name) or _own_name(name, taken) for name in names}


def _own_name(name: str, taken: Set[str]) -> str:
    family = name.partition("/")[0]
    is_free = family not in SIGNALS and name not in taken and name not in ("step", "time", "applied")
    return sound_name(name if is_free else f"trainer/{name}")


def listed(names: Sequence[str] | Mapping[str, object], most: int = 12) -> str:
    """A few names in words."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(name[:80] if name.isprintable() else repr(name[:80]) for name in names[:most]) + more) or "none"
