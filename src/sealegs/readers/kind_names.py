"""The names that frameworks give to signals which only some kinds of run have: rewards, experts, scales, buckets.

A word such as ``entropy``, ``kl`` or ``aux_loss`` means one thing beside a reward or a router and another beside a
classifier. Such a name counts only in company: where the log has a signal, under a name of its own, that settles it.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sealegs.record.columns import Column

NAMES = {
    "reward": "reward mean_reward reward_mean avg_reward average_reward ep_rew_mean eprewmean episode_reward_mean "
    "episode_return_mean episode_reward mean_episode_reward episodic_return episode_return averagereturn averageepret "
    "mean_total_reward env_all_reward_total critic_score_mean critic_rewards_mean objective_verifiable_reward "
    "objective_scores objective_rlhf_reward ppo_mean_scores task_reward_avg raw_reward reward_all_mean rewards_mean "
    "rewards final_reward_avg rewards_step avg_episode_reward ep_reward total_reward mean_100_episode_reward "
    "eprew eprew_recent eprew_mean epret epret_mean",
    "reward_std": "reward_std rewards_std std_reward group_reward_std reward_stddev critic_score_std ppo_std_scores",
    "zero_spread_share": "zero_spread_share frac_reward_zero_std zero_std_ratio by_group_frac_mixed "
    "baseline_reward_pct_mixed real_batch_size_ratio",
    "policy_entropy": "policy_entropy policy_entropy_avg actor_entropy approx_entropy learner_stats_entropy "
    "default_policy_entropy update_entropy_avg entropy_all_mean optim_entropy actor_entropy_loss losses_entropy "
    "objective_entropy averageentropy",
    "kl": "kl_policy_base ref_kl ref_kl_all_mean kl_to_ref kl_ref actor_kl_loss actor_reward_kl_penalty "
    "objective_kl objective_kl_avg critic_kl reward_kl_penalty",
    "policy_kl": "policy_kl approx_kl approxkl ppo_kl policy_approxkl_avg approxkl_avg kl_approx update_approx_kl_avg "
    "learner_stats_kl default_policy_mean_kl_loss info_kl meankl",
    "clip_share": "clip_share pg_clipfrac clipfrac policy_clipfrac_avg clip_ratio_region_mean ppo_clip_ratio "
    "update_clip_ratio_avg actor_clipfrac clipfrac_avg",
    "importance_ratio": "importance_ratio importance_sampling_ratio_mean sampling_importance_ratio rollout_is_mean "
    "update_importance_weight_avg probs_ratio val_ratio",
    "importance_ratio_max": "importance_ratio_max importance_sampling_ratio_max rollout_is_max probs_ratio_max",
    "logp_gap": "logp_gap sampling_logp_difference_mean train_rollout_logprob_abs_diff rollout_probs_diff_mean "
    "vllm_vs_local_logprob_diff_mean logprobs_diff mismatch_kl_all_mean mismatch_kl gen_kl_error vllm_kl "
    "rollout_corr_kl rollout_corr_log_ppl_diff kl_sample_train_v1 behave_approx_kl_avg token_mult_prob_error",
    "logp_gap_max": "logp_gap_max sampling_logp_difference_max rollout_probs_diff_max vllm_vs_local_logprob_diff_max",
    "completion_length": "completion_length completions_mean_length mean_completion_length response_length_mean "
    "response_length mean_response_length completion_lengths response_len_mean response_lengths sequence_lengths "
    "mean_gen_tokens_per_sample mean_generation_length ac_tokens_per_turn",
    "cut_share": "cut_share completions_clipped_ratio response_length_clip_ratio response_clip_ratio "
    "completion_clip_ratio truncation_rate truncated_ratio truncated_rate no_eos_ratios_avg natural_termination_rate "
    "val_stop_rate",
    "chosen_reward": "rewards_chosen chosen_reward chosen_rewards rewards_chosen_mean",
    "rejected_reward": "rewards_rejected rejected_reward rejected_rewards rewards_rejected_mean reject_reward",
    "reward_margin": "rewards_margins rewards_margin reward_margin reward_margins",
    "preference_accuracy": "rewards_accuracies rewards_accuracy preference_accuracy",
    "chosen_logp": "logps_chosen chosen_logp chosen_logps",
    "rejected_logp": "logps_rejected rejected_logp rejected_logps",
    "token_accuracy": "mean_token_accuracy token_accuracy",
    "expert_violation": "expert_violation max_vio_mean max_vio maxvio moe_max_violation load_violation "
    "moe_overload_factor load_imbalance",
    "dead_expert_share": "dead_expert_share dead_experts_share dead_expert_ratio dead_experts_ratio dead_expert_frac "
    "active_expert_ratio",
    "router_entropy": "router_entropy routing_entropy gate_entropy gating_entropy",
    "router_balance_loss": "router_balance_loss load_balancing_loss_unscaled load_balancing_loss load_balance_loss "
    "seq_load_balancing_loss global_load_balancing_loss loadbalancingloss router_aux_loss moe_aux_loss moe_lb_loss "
    "moe_loss",
    "router_z_loss": "router_z_loss_unscaled router_z_loss moe_z_loss moezloss router_zloss",
    "saturated_share": "saturated_share saturation_ratio saturated_frac sat_frac fp8_saturated",
    "zeroed_share": "zeroed_share zeroed_frac fp8_zeroed",
}
"""Names that mean our signal in any log, the best first, as ``names.TABLE`` writes them: frameworks' own, in full."""

SELDOM = 2
"""Times as often as a column that another of the same meaning has a value, from which on it is one by the way: of an
evaluation, or a summary."""
POLICY_COMPANY = (
    *("reward", "eval_reward", "zero_spread_share", "policy_kl", "logp_gap"),
    *("chosen_reward", "rejected_reward", "preference_accuracy"),
)
EXPERT_COMPANY = ("expert_load", "expert_violation", "dead_expert_share", "router_entropy", "router_balance_loss")
TOGETHER = frozenset({"policy_entropy", "kl", "clip_share"})
"""Signals of a policy whose common names vouch for each other where all three are there."""
IN_COMPANY: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "reward_std": ("std_scores", POLICY_COMPANY),
    "policy_entropy": (
        "entropy entropy_mean mean_entropy avg_entropy entropy_avg loss_policy_entropy mean_entropy_loss entropy_loss",
        POLICY_COMPANY,
    ),
    "kl": (
        "kl kl_mean mean_kl exact_kl kl_avg avg_kl kl_div kl_divergence kl_loss kl_penalty reward_kl",
        POLICY_COMPANY,
    ),
    "clip_share": ("clip_ratio clip_fraction clip_frac", POLICY_COMPANY),
    "importance_ratio": ("ratio ratio_mean mean_ratio", POLICY_COMPANY),
    "cut_share": ("clipped_ratio truncated", POLICY_COMPANY),
    "completion_length": ("generation_length", POLICY_COMPANY),
    "eval_reward": ("validation_accuracy", ("completion_length", "zero_spread_share", "logp_gap")),
    "reward_margin": ("margin margins", ("chosen_reward",)),
    "preference_accuracy": ("accuracy acc acc_mean", ("chosen_reward",)),
    "expert_violation": ("max_violation", EXPERT_COMPANY),
    "router_balance_loss": (
        "aux_loss auxiliary_loss balance_loss lb_loss l_aux",
        ("expert_load", "expert_violation", "dead_expert_share", "router_entropy", "router_z_loss"),
    ),
    "router_z_loss": ("z_loss zloss", EXPERT_COMPANY),
    "saturated_share": ("overflows overflow_share saturated", ("amax", "zeroed_share")),
    "zeroed_share": ("underflows zeroed", ("amax", "saturated_share")),
    "discriminator_loss": ("discriminator_loss d_loss loss_d errd disc_loss loss_disc d_real d_a", ("generator_loss",)),
    "generator_loss": ("generator_loss g_loss loss_g errg gen_loss loss_gen g_gan g_a", ("discriminator_loss",)),
}
"""Names that are common words, and the signals of which one must be logged for them to count."""

BEFORE = frozenset({"train", "training", "actor", "critic", "rollout", "policy", "objective", "metrics", "metric"}) | {
    *("stats", "env", "model", "moe", "router", "sampling", "losses", "loss", "charts", "info", "debug", "optim"),
    *("completions", "ppo", "grpo", "agent", "runners", "runner", "perf", "main", "update", "avg", "response"),
    *("learner", "learners", "default"),
}
"""Words that may stand before such a name: it then means the same."""
_HELD_OUT = frozenset({"val", "valid", "validation", "eval", "test", "evaluation", "heldout"})

EPISODES = re.compile(r"ep_?rew|averageep|averagereturn|episod|rollout_return|meanreward")
"""Rewards of whole episodes: beside them a ``kl`` is to the policy before the update, as there is no other."""
AGENT = re.compile(r"ep_(rew|len)_mean|explained_variance|n_updates|clip_range")
"""Columns of Stable-Baselines3, whose ``entropy_loss`` is the entropy times -1."""

_GAINS = frozenset({"reward", "rewards", "return", "returns", "rew"})
_OF_EPISODES = frozenset({"episode", "episodes", "episodic", "ep", "eps", "game", "rollout"})
_HOW_TAKEN = frozenset({"mean", "avg", "average", "averaged", "running", "moving", "smoothed", "recent", "last", "sum"})
_SUMMED = frozenset({"cumulative", "total"})
"""Not of returns, which those who trade have without any policy."""
_ASIDE = frozenset(
    {"train", "training", "env", "agent", "undiscounted", "raw", "per", "of", "the", "over", "t", "info"}
)
"""The words that a reward of whole episodes is named with, besides numbers: ``Average Episodic Reward/info``,
``mean_return_last_100``. With any other word it may be a part of the reward, its target or its spread."""
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")

_LAYER = re.compile(r"(?:^|_)(?:layers?|blocks?)_?(\d+)(?=_|$)")
_OF_LAYERS = ("expert_violation", "dead_expert_share", "router_entropy", "router_balance_loss", "router_z_loss")
_OF_EXPERTS = re.compile(r"experts?")
_TELLS_LOAD = re.compile(
    r"moe|router|gate|gating|loads?|tokens?|counts?|usage|util|utili[sz]ation|share|fraction|frac|freq|frequency|"
    r"percentage|tokenspercentage|tokenstotal"
)
_BESIDE_LOAD = re.compile(
    r"per|routed|assigned|assignments|layers?|blocks?|mlp|ffn|model|decoder|transformer|train|training|metrics|stats|"
    r"global|h|l|to|of"
)
"""The words that a name of an expert's load is made of, and no others: an ``expert`` can also be one to imitate."""
_POSITION = re.compile(
    r"(?:train_)?(?:(?:lm_)?loss_(?:at_|by_|per_)?(?:token_)?pos(?:ition)?s?_(?:bucket_)?"
    r"|pos(?:ition)?_(?:bucket_)?loss_)([0-9][0-9k_]*)"
)
_TIMESTEP = re.compile(
    r"(?:train_)?(?:(?:mse_)?loss_(?:at_|by_|per_)?(?:t|timesteps?|noise_level|sigma)_(?:bucket_|bin_)?"
    r"|timestep_loss_|loss_(?=q[0-3]$))(q?[0-9][0-9_]*)"
)
_SOURCE = re.compile(
    r"(?:train/)?(?:loss(?:es)?[/_](?:of_|by_|per_)?(?:source|domain|dataset|subset)"
    r"|(?:source|domain|dataset|subset)_loss(?:es)?)/(.+)"
)
_AMAX = re.compile(r"(?:(.+)[/._])?(?:cur_)?amax(?:[/._](.+))?")
_QUANT_SCALE = re.compile(r"(?:(.+)[/._])?(?:fp8_)?scale(?:[/._](.+))?")
_NOT_QUANTISED = re.compile(r"loss|grad|amp|logit|lr|guidance|hist")
_OF_TENSORS = re.compile(r"(.+)[/._](saturated_share|zeroed_share|overflows|underflows)%?")
_HELD_OUT_REWARD = re.compile(
    r"val_core_.+_(?:reward|acc|score)_mean(?:_\d+)?|val_test_score_.+|eval_rewards_.+_mean|eval_mean_reward|"
    r"evaluation_returns_mean|test_env_all_reward_total"
)


@dataclass(frozen=True, slots=True)
class Role:
    """The signal that a column can stand for. A lower rank is a better name for it."""

    rank: int
    signal: str
    company: frozenset[str] = frozenset()
    """Signals of which one must be logged; empty if the name says enough."""


def plain(name: str) -> str:
    """A name as the table writes it.

    >>> plain("Loss/train"), plain("elapsed time per iteration (ms)"), plain("my run - train/lm_loss")
    ('loss_train', 'elapsed_time_per_iteration_ms', 'train_lm_loss')
    """
    return re.sub(r"[^a-z0-9]+", "_", name.rsplit(" - ", 1)[-1].lower()).strip("_")


def _ranks() -> dict[str, Role]:
    sure = {name: Role(rank, signal) for signal, names in NAMES.items() for rank, name in enumerate(names.split())}
    common = {
        name: Role(100 + rank, signal, frozenset(company))
        for signal, (names, company) in IN_COMPANY.items()
        for rank, name in enumerate(names.split())
    }
    return common | sure


_BY_NAME = _ranks()


@lru_cache(maxsize=50_000)
def kind_role(name: str) -> Role | None:
    """What a column of this name is in a run of some kind.

    >>> kind_role("critic/score/mean").signal, kind_role("moe/layer_3/expert_5/tokens").signal
    ('reward', 'expert_load/3.5')
    >>> kind_role("Average Episodic Reward/info").signal, kind_role("RewardMean").signal, kind_role("max_ep_reward")
    ('reward', 'reward', None)
    """
    if name.endswith(("__MIN", "__MAX")):  # statistics beside each column of a W&B export
        return None
    key, split = plain(name), plain(_CAMEL.sub("_", name))
    known = _by_table(key) or (_by_table(split) if split != key else None)
    return (
        known or _of_family(name.rsplit(" - ", 1)[-1], key) or _of_episodes(_CAMEL.sub("_", name.rsplit(" - ", 1)[-1]))
    )


def _by_table(key: str) -> Role | None:
    words = key.split("_")
    for cut in range(len(words)):
        found = _BY_NAME.get("_".join(words[cut:]))
        if found is None:
            continue
        before = set(words[:cut])
        if before <= BEFORE:
            return Role(found.rank + 20 * cut, found.signal, found.company)
        if found.signal == "reward" and before <= BEFORE | _HELD_OUT:
            return Role(found.rank + 20 * cut, "eval_reward")
    if _HELD_OUT_REWARD.fullmatch(key):
        return Role(len(key), "eval_reward")
    return None


def _of_episodes(name: str) -> Role | None:
    """A reward that nothing else is said of than that it is of episodes, or a mean: by a program of one's own.

    Where its last part says so in full, what stands before is the program's own: ``custom/episode_reward_mean``.
    """
    words = [word for word in plain(name).split("_") if not word.isdecimal()]
    own = [word for word in plain(name.rpartition("/")[2]).split("_") if not word.isdecimal()]
    told = own if not _GAINS.isdisjoint(own) and not _OF_EPISODES.isdisjoint(own) else words
    others = set(told) - _GAINS
    taken = _OF_EPISODES | _HOW_TAKEN | (_SUMMED if not {"reward", "rewards", "rew"}.isdisjoint(told) else frozenset())
    if len(others) == len(set(told)) or others.isdisjoint(taken) or not others <= taken | _ASIDE | _HELD_OUT:
        return None
    rank = 200 + len(words) - 10 * (not _OF_EPISODES.isdisjoint(told)) - 5 * (not _HOW_TAKEN.isdisjoint(told))
    return Role(rank, "reward" if _HELD_OUT.isdisjoint(words) else "eval_reward")


def _of_family(name: str, key: str) -> Role | None:
    """A name with a layer, an expert, a tensor, a place, a noise level or a source in it."""
    if "expert" in key or "layer" in key or "block" in key:
        if (load := _load(key)) is not None:
            return load
        layer, found = _LAYER.search(key), _by_table(_LAYER.sub("", key).strip("_"))
        if layer is not None and found is not None and found.signal in _OF_LAYERS:
            return Role(found.rank, f"{found.signal}/{int(layer[1])}", found.company)
    if "loss" in key:
        return _loss_of_part(name.lower(), key)
    return _of_tensor(name, key) if "amax" in key or "scale" in key or "%" in name else None


def _load(key: str) -> Role | None:
    """``moe/layer_3/expert_5/tokens``, ``expert_load/3.5``, ``tokens_per_expert_0``, ``moe/expert_3_fraction``"""
    parts = re.findall(r"[a-z]+|\d+", key)
    words, numbers = [part for part in parts if not part.isdecimal()], [part for part in parts if part.isdecimal()]
    patterns = (_OF_EXPERTS, _TELLS_LOAD, _BESIDE_LOAD)
    kinds = [next((pattern for pattern in patterns if pattern.fullmatch(word)), None) for word in words]
    if None in kinds or not {_OF_EXPERTS, _TELLS_LOAD}.issubset(kinds) or not 1 <= len(numbers) <= 2:
        return None
    is_count = not {"count", "counts", "tokenstotal"}.isdisjoint(words)  # a share is the better of the two
    return Role(len(parts) + 100 * is_count, f"expert_load/{'.'.join(str(int(number)) for number in numbers)}")


def _loss_of_part(name: str, key: str) -> Role | None:
    if place := _POSITION.fullmatch(key):
        return Role(0, f"loss_at_position/{place[1].replace('_', '-')}")
    if level := _TIMESTEP.fullmatch(key):
        bucket = level[1].replace("_", "-")
        company: tuple[str, ...] = ()
        if bucket.startswith(
            "q"
        ):  # a quarter of the levels; the critics of actor-critic methods are q1 and q2, no more
            company = (f"loss_at_timestep/q{(int(bucket[1]) + 2) % 4}",)
        return Role(0, f"loss_at_timestep/{bucket}", frozenset(company))
    if source := _SOURCE.fullmatch(name):
        return Role(0, f"loss_of_source/{source[1]}")
    return None


def _of_tensor(name: str, key: str) -> Role | None:
    """``amax/blocks.0.fc1``, ``blocks.0.fc1.weight_amax``, ``blocks.0.fc1/scale``, ``fc1_underflows%``"""
    if (found := _AMAX.fullmatch(name)) and "amax_h" not in key:
        tensor = found[1] or found[2] or ""
        tensor = tensor.removeprefix("fp8/").removeprefix("fp8_")
        return Role(0, f"amax/{tensor}" if tensor not in ("", "fp8") else "amax")
    if (found := _OF_TENSORS.fullmatch(name)) is not None:
        signal = {"overflows": "saturated_share", "underflows": "zeroed_share"}.get(found[2], found[2])
        others = frozenset(("amax", "saturated_share", "zeroed_share")) - {signal}
        return Role(0, f"{signal}/{found[1]}", frozenset() if name.endswith("%") else others)
    if (found := _QUANT_SCALE.fullmatch(name)) and not _NOT_QUANTISED.search(key):
        tensor = (found[1] or found[2] or "").removeprefix("fp8/").removeprefix("quant_").removesuffix("_fp8")
        return Role(0, f"quant_scale/{tensor}", frozenset({f"amax/{tensor}"})) if tensor else None
    return None


def kind_signals(counts: Mapping[str, int], taken: Collection[str]) -> Iterator[tuple[str, str]]:
    """Signals of a kind and the column that each is best taken from, of columns with so many values each."""
    roles = {name: found for name in counts if name not in taken and (found := kind_role(name)) is not None}
    sure = {found.signal for found in roles.values() if not found.company or _keeps_company(found.signal)}
    sure |= {signal.partition("/")[0] for signal in sure}
    if {found.signal for found in roles.values()} >= TOGETHER:
        sure.add("policy_kl")
    most: dict[str, int] = {}
    for name, found in roles.items():
        most[found.signal] = max(most.get(found.signal, 0), counts[name])
    best: dict[str, tuple[tuple[bool, int, int], str]] = {}
    for name, found in roles.items():
        if found.company and sure.isdisjoint(found.company):
            continue
        order = (counts[name] * SELDOM < most[found.signal], found.rank, -counts[name])
        if found.signal not in best or order < best[found.signal][0]:
            best[found.signal] = order, name
    reward = best.get("reward")
    for signal, (_, name) in best.items():
        by_episode = reward is not None and EPISODES.search(plain(reward[1])) is not None
        if signal == "kl" and by_episode and roles[name].company:
            if "policy_kl" not in best:
                yield "policy_kl", name
        else:
            yield signal, name


def _keeps_company(signal: str) -> bool:
    """Whether it is one of several that vouch for each other, each under a name that alone says nothing."""
    return signal.startswith(("discriminator_loss", "generator_loss", "loss_at_timestep/"))


def _less_one(values: Column) -> Column:
    return values - 1


def _rest(values: Column) -> Column:
    return 1 - values


@np.errstate(divide="ignore", invalid="ignore")
def _log(values: Column) -> Column:
    return np.log(values)


def _negative(values: Column) -> Column:
    return -values


def _per_cent(values: Column) -> Column:
    return values / 100


CHANGES: tuple[tuple[re.Pattern[str], str, Callable[[Column], Column]], ...] = (
    (re.compile(r".*(load_imbalance|overload_factor)"), "one less than", _less_one),
    (
        re.compile(
            r".*(frac_mixed|pct_mixed|real_batch_size_ratio|natural_termination_rate|stop_rate|active_expert_ratio)"
        ),
        "the rest of",
        _rest,
    ),
    (re.compile(r".*token_mult_prob_error"), "the logarithm of", _log),
)
"""Columns that say the same as our signal in another way: by their plain names without the layer, and what is done."""


def changed(signal: str, name: str, columns: Collection[str]) -> tuple[str, Callable[[Column], Column]] | None:
    """What is done to the values of a column that says a signal in another way, in a few words, and by what."""
    key = plain(name)
    if signal == "policy_entropy" and key.endswith("entropy_loss") and any(AGENT.search(plain(one)) for one in columns):
        return "the negative of", _negative
    if name.endswith("%") and signal.startswith(("saturated_share", "zeroed_share")):
        return "a hundredth of", _per_cent
    key = _LAYER.sub("", key)
    return next(((words, change) for pattern, words, change in CHANGES if pattern.fullmatch(key)), None)
