"""Maps the names that logs use to our signals: by one table, a few rules, and what the user says."""

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sealegs.errors import SourceError
from sealegs.record.columns import Columns
from sealegs.record.rows import sound_name
from sealegs.record.schema import SIGNALS

STEP, EPOCH = "step", "epoch"
CARRIED = ("step of the bar", "step of a line before")
"""Prefixes of step names whose value comes from another row."""

TABLE = {
    "loss": "loss train_loss training_loss loss_train train_loss_step train_step_loss train_batch_loss batch_loss "
    "loss_step step_loss lm_loss train_lm_loss train_inner_loss reduced_train_loss total_loss loss_total mean_loss "
    "avg_loss average_loss loss_mean loss_avg cross_entropy_loss ce_loss nll_loss train_nll nll train_loss_epoch",
    "eval_loss": "eval_loss val_loss valid_loss validation_loss loss_val loss_valid loss_validation loss_eval "
    "val_loss_epoch val_loss_step lm_loss_value dev_loss test_loss loss_test loss_dev",
    "grad_norm": "grad_norm gradient_norm global_grad_norm total_grad_norm grad_norm_total gnorm grads_norm "
    "gradients_norm grad_norm_before_clip global_norm grad_2_0_norm_total grad_2_norm_total grad_l2_norm norm_grad",
    "lr": "lr learning_rate lr_0 lr_pg1 lr_group0 lr_adamw lr_adam lr_sgd lr_adamw_pg1 lr_adam_pg1",
    "loss_scale": "loss_scale grad_scale amp_scale scaler_scale",
    "param_norm": "param_norm params_norm weight_norm parameter_norm total_param_norm",
    "tokens_per_s": "tokens_per_s tokens_per_second tokens_per_sec tok_s tok_sec tps tokens_sec tok_per_sec",
    "step_s": "step_s step_time_s seconds_per_step sec_per_step step_time_ms step_ms iter_time_ms "
    "iteration_time_ms time_per_iteration_ms elapsed_time_per_iteration_ms ms_per_step",
    STEP: "global_step num_updates iteration iterations iter iters step steps update_step train_step training_step "
    "optimizer_step current_step current_steps n_iter num_steps updates batch_idx",
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

OF_A_KIND = {
    "reward": "reward mean_reward reward_mean rewards_mean score_mean ep_rew_mean episode_reward episode_reward_mean "
    "mean_episode_reward avg_reward average_reward episode_return episodic_return return_mean mean_return rewards",
    "reward_std": "reward_std rewards_std std_reward reward_stddev",
    "zero_spread_share": "frac_reward_zero_std zero_std_ratio zero_spread_share",
    "policy_entropy": "policy_entropy entropy entropy_mean mean_entropy entropy_avg entropy_loss",
    "kl": "kl mean_kl kl_mean kl_div kl_divergence kl_loss kl_penalty reward_kl non_score_kl",
    "policy_kl": "policy_kl approx_kl ppo_kl approxkl approxkl_avg kl_approx",
    "clip_share": "clip_share clip_fraction clipfrac pg_clipfrac clip_ratio clip_ratio_region_mean clip_frac "
    "clipfrac_avg actor_clipfrac",
    "importance_ratio": "importance_ratio importance_sampling_ratio_mean rollout_is_mean",
    "importance_ratio_max": "importance_ratio_max importance_sampling_ratio_max rollout_is_max",
    "logp_gap": "logp_gap sampling_logp_difference_mean rollout_probs_diff_mean rollout_log_ppl_diff mismatch_kl",
    "logp_gap_max": "logp_gap_max sampling_logp_difference_max rollout_probs_diff_max",
    "completion_length": "completion_length completions_mean_length mean_completion_length response_length_mean "
    "response_length mean_response_length completion_lengths",
    "cut_share": "cut_share completions_clipped_ratio response_length_clip_ratio clipped_ratio truncated_ratio",
    "chosen_reward": "rewards_chosen chosen_reward",
    "rejected_reward": "rewards_rejected rejected_reward",
    "reward_margin": "rewards_margins rewards_margin reward_margin",
    "preference_accuracy": "rewards_accuracies rewards_accuracy preference_accuracy",
    "chosen_logp": "logps_chosen chosen_logp",
    "rejected_logp": "logps_rejected rejected_logp",
    "token_accuracy": "mean_token_accuracy token_accuracy",
    "expert_violation": "expert_violation max_violation max_vio maxvio load_violation",
    "dead_expert_share": "dead_expert_share dead_experts_ratio dead_expert_ratio dead_experts_share",
    "router_entropy": "router_entropy gate_entropy gating_entropy routing_entropy",
    "router_balance_loss": "router_balance_loss load_balancing_loss load_balance_loss lb_loss balance_loss aux_loss "
    "moe_aux_loss moe_loss router_aux_loss",
    "router_z_loss": "router_z_loss z_loss moe_z_loss zloss",
    "saturated_share": "saturated_share saturation_ratio overflow_share fp8_saturated",
    "zeroed_share": "zeroed_share fp8_zeroed",
    "discriminator_loss": "discriminator_loss d_loss loss_d errd disc_loss loss_disc",
    "generator_loss": "generator_loss g_loss loss_g errg gen_loss loss_gen",
}
"""Signals that only some kinds of run have, as ``TABLE``. Many of their names are common words, so only ``BEFORE`` may
stand before them."""

BEFORE = frozenset({"train", "training", "actor", "critic", "rollout", "policy", "objective", "metrics", "metric"}) | {
    *("stats", "env", "model", "moe", "router", "sampling", "losses", "loss", "charts", "info")
}

_HELD_OUT = frozenset({"val", "valid", "validation", "eval", "test", "dev", "evaluation", "holdout", "heldout", "tel"})
_NO_LOSS = re.compile(
    r"scaler?|weight(s|ing)?|coef|coefficient|every|lambda|best|min|max|ratio|final|initial|clip|limit|patience|alpha|"
    r"beta|threshold|interval|fn|std|var|time|ema|z|smoothing"
)
_NO_STEP = re.compile(r"total|max|number|per|warmup|save|log|logging|time|skipped|nan|remaining|avg|every")
_FALLBACK_RANK = 1000


@dataclass(frozen=True)
class Role:
    """The signal that a column can stand for. A lower rank is a better name for it."""

    rank: int
    signal: str


def plain(name: str) -> str:
    """A name as the table writes it.

    >>> plain("Loss/train"), plain("elapsed time per iteration (ms)"), plain("my run - train/lm_loss")
    ('loss_train', 'elapsed_time_per_iteration_ms', 'train_lm_loss')
    """
    return re.sub(r"[^a-z0-9]+", "_", name.rsplit(" - ", 1)[-1].lower()).strip("_")


def _ranks() -> tuple[dict[str, Role], dict[str, Role], dict[str, Role]]:
    anywhere, of_a_kind = (
        {name: Role(rank, signal) for signal, names in table.items() for rank, name in enumerate(names.split())}
        for table in (TABLE, OF_A_KIND)
    )
    alone = {
        name: Role(_FALLBACK_RANK // 2 + rank, signal)
        for signal, names in ALONE.items()
        for rank, name in enumerate(names.split())
    }
    return anywhere, of_a_kind, alone


_ANYWHERE, _OF_A_KIND, _ALONE = _ranks()


@lru_cache(maxsize=50_000)
def role(name: str) -> Role | None:
    """The role of a column of this name, if it has one.

    >>> role("val/lm loss").signal, role("Finished training it").signal, role("koleo_loss_weight")
    ('eval_loss', 'step', None)
    """
    key = plain(name)
    words = key.split("_")
    if name.endswith(("__MIN", "__MAX")):  # statistics beside each column of a W&B export
        return None
    if name.startswith(CARRIED):
        return Role(_FALLBACK_RANK, STEP)
    if key in _ALONE:
        return _ALONE[key]
    for cut in range(len(words)):
        if (found := _OF_A_KIND.get("_".join(words[cut:]))) is not None and BEFORE.issuperset(words[:cut]):
            return Role(found.rank + 20 * cut, found.signal)
    held_out = not _HELD_OUT.isdisjoint(words)
    for cut in range(len(words)):
        found = _ANYWHERE.get("_".join(words[cut:]))
        if words[cut:] == ["it"]:
            found = _ALONE["it"]
        if found is None:
            continue
        if found.signal in ("loss", "eval_loss"):
            if not any(map(_NO_LOSS.fullmatch, words[:cut])):
                return Role(found.rank + 20 * cut, "eval_loss" if held_out else found.signal)
        elif found.signal in (STEP, EPOCH):
            if not any(map(_NO_STEP.fullmatch, words[:cut])):
                return Role(found.rank + cut, found.signal)  # train/global_step before _step
        elif not held_out:
            return Role(found.rank + 20 * cut, found.signal)
    if "loss" in words and not any(map(_NO_LOSS.fullmatch, words)):
        return Role(_FALLBACK_RANK - (100 if "train" in words else 0), "eval_loss" if held_out else "loss")
    return None


def candidates(columns: Columns, signal: str) -> list[str]:
    """The columns that can stand for a signal, the best first.

    A column that another one exceeds ten times in logged values comes after it: it is a summary at the end of a run.
    """
    roles = {name: found for name in columns.values if (found := role(name)) and found.signal == signal}
    counts = {name: np.count_nonzero(columns.logged[name]) for name in roles}
    most = max(counts.values(), default=0)
    return sorted(roles, key=lambda name: (counts[name] * 10 < most, roles[name].rank, -counts[name]))


def assign(source: str, columns: Columns, said: Mapping[str, str]) -> dict[str, str]:
    """The column that each of our signals is taken from."""
    for signal, name in said.items():
        if name not in columns.values:
            raise SourceError(f"{source}: no column {name!r} to take {signal} from; it has {listed(columns.values)}")
    mapping = dict(said)
    for signal in (signal for signal in (*OF_A_KIND, *TABLE) if signal not in (STEP, EPOCH, *said)):
        found = [name for name in candidates(columns, signal) if name not in mapping.values()]
        if not found:
            continue
        rivals = [name for name in found if " - " in name and plain(name) == plain(found[0])]
        if signal == "loss" and len(rivals) > 1:
            raise SourceError(
                f"{source}: the losses of {len(rivals)} runs; choose: --metric loss={rivals[0]!r} or another"
            )
        mapping[signal] = found[0]
    if "loss" not in mapping and "generator_loss" in mapping:
        mapping["loss"] = mapping["generator_loss"]
    if "loss" not in mapping and "reward" not in mapping:
        raise SourceError(
            f"{source}: no column looks like a training loss among {listed(columns.values)}; say which it is: "
            "--metric loss=NAME"
        )
    return mapping


def live_names(names: Iterable[str], taken: Set[str] = frozenset()) -> dict[str, str]:
    """The names in a row for what a framework logs of one step: our signals where the name is one of theirs, else its
    own. What is measured anyway, and what is ``taken``, keeps its meaning: the framework's is ``trainer/<name>``.

    >>> live_names(["kl", "rewards/len/mean", "entropy", "lr"])
    {'kl': 'kl', 'rewards/len/mean': 'rewards/len/mean', 'entropy': 'policy_entropy', 'lr': 'trainer/lr'}
    """
    names = tuple(names)
    roles = {name: found for name in names if (found := role(name)) is not None and found.signal in OF_A_KIND}
    best: dict[str, str] = {}
    for name in sorted(roles, key=lambda name: roles[name].rank):
        best.setdefault(roles[name].signal, name)
    named = {name: signal for signal, name in best.items()}
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
