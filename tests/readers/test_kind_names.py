"""What frameworks call the signals of their kind of run, and what the same words mean elsewhere."""

import numpy as np
import pytest

from sealegs.readers.kind_names import changed, kind_role, kind_signals
from sealegs.readers.names import assign
from sealegs.record.columns import Columns


def found(text: str) -> dict[str, str]:
    """The signals that are taken from columns of these names, without those that are called as we call them."""
    names = text.split("|")
    values = {name: np.arange(30.0) for name in names}
    columns = Columns(values, {name: np.ones(30, np.bool_) for name in names}, rows=30)
    return {signal: name for signal, name in assign("log", columns, {}).items() if signal != name}


FRAMEWORKS = {
    "TRL GRPO": (
        "loss|grad_norm|num_tokens|completions/mean_length|completions/clipped_ratio|rewards/acc/mean|rewards/acc/std|"
        "reward|reward_std|frac_reward_zero_std|kl|clip_ratio/low_mean|clip_ratio/region_mean|entropy|eval_reward|"
        "sampling/sampling_logp_difference/mean|sampling/sampling_logp_difference/max|"
        "sampling/importance_sampling_ratio/mean|sampling/importance_sampling_ratio/max",
        {
            "completion_length": "completions/mean_length",
            "cut_share": "completions/clipped_ratio",
            "zero_spread_share": "frac_reward_zero_std",
            "clip_share": "clip_ratio/region_mean",
            "policy_entropy": "entropy",
            "logp_gap": "sampling/sampling_logp_difference/mean",
            "logp_gap_max": "sampling/sampling_logp_difference/max",
            "importance_ratio": "sampling/importance_sampling_ratio/mean",
            "importance_ratio_max": "sampling/importance_sampling_ratio/max",
        },
    ),
    "TRL PPO": (
        "objective/kl|objective/entropy|objective/rlhf_reward|objective/scores|policy/approxkl_avg|"
        "policy/clipfrac_avg|loss/policy_avg|loss/value_avg|val/clipfrac_avg|policy/entropy_avg|val/ratio|lr",
        {
            "kl": "objective/kl",
            "policy_entropy": "policy/entropy_avg",
            "reward": "objective/scores",
            "policy_kl": "policy/approxkl_avg",
            "clip_share": "policy/clipfrac_avg",
            "importance_ratio": "val/ratio",
            "loss": "loss/policy_avg",
        },
    ),
    "TRL DPO": (
        "loss|rewards/chosen|rewards/rejected|rewards/margins|rewards/accuracies|logps/chosen|logps/rejected|"
        "logits/chosen|eval_rewards/chosen|mean_token_accuracy",
        {
            "chosen_reward": "rewards/chosen",
            "rejected_reward": "rewards/rejected",
            "reward_margin": "rewards/margins",
            "preference_accuracy": "rewards/accuracies",
            "chosen_logp": "logps/chosen",
            "rejected_logp": "logps/rejected",
            "token_accuracy": "mean_token_accuracy",
        },
    ),
    "TRL SFT": ("loss|entropy|mean_token_accuracy|num_tokens", {"token_accuracy": "mean_token_accuracy"}),
    "verl": (
        "step|actor/entropy|actor/kl_loss|actor/kl_coef|actor/pg_loss|actor/pg_clipfrac|actor/pg_clipfrac_lower|"
        "actor/ppo_kl|actor/grad_norm|actor/lr|critic/score/mean|critic/score/max|critic/rewards/mean|"
        "critic/advantages/mean|response_length/mean|response_length/clip_ratio|prompt_length/mean|"
        "prompt_length/clip_ratio|timing_s/step|val-core/gsm8k/reward/mean@8|training/rollout_probs_diff_mean",
        {
            "policy_entropy": "actor/entropy",
            "kl": "actor/kl_loss",
            "clip_share": "actor/pg_clipfrac",
            "policy_kl": "actor/ppo_kl",
            "reward": "critic/score/mean",
            "completion_length": "response_length/mean",
            "cut_share": "response_length/clip_ratio",
            "eval_reward": "val-core/gsm8k/reward/mean@8",
            "logp_gap": "training/rollout_probs_diff_mean",
            "loss": "actor/pg_loss",
            "grad_norm": "actor/grad_norm",
            "lr": "actor/lr",
        },
    ),
    "OpenRLHF": (
        "train/policy_loss|train/actor_lr|train/kl|train/reward|train/response_length|train/vllm_kl|"
        "train/entropy_loss|train/group_reward_std|train/ppo_clip_ratio|train/ppo_kl|train/truncated",
        {
            "kl": "train/kl",
            "reward": "train/reward",
            "completion_length": "train/response_length",
            "logp_gap": "train/vllm_kl",
            "policy_entropy": "train/entropy_loss",
            "reward_std": "train/group_reward_std",
            "clip_share": "train/ppo_clip_ratio",
            "policy_kl": "train/ppo_kl",
            "cut_share": "train/truncated",
            "loss": "train/policy_loss",
            "lr": "train/actor_lr",
        },
    ),
    "NeMo-RL": (
        "train/reward|train/loss|train/gen_kl_error|train/probs_ratio|train/probs_ratio_max|train/approx_entropy|"
        "train/mean_gen_tokens_per_sample|train/baseline_reward/pct_mixed|validation/accuracy",
        {
            "reward": "train/reward",
            "logp_gap": "train/gen_kl_error",
            "importance_ratio": "train/probs_ratio",
            "importance_ratio_max": "train/probs_ratio_max",
            "policy_entropy": "train/approx_entropy",
            "completion_length": "train/mean_gen_tokens_per_sample",
            "zero_spread_share": "train/baseline_reward/pct_mixed",
            "eval_reward": "validation/accuracy",
            "loss": "train/loss",
        },
    ),
    "slime": (
        "train/loss|train/pg_loss|train/entropy_loss|train/ppo_kl|train/train_rollout_logprob_abs_diff|"
        "rollout/raw_reward|rollout/rewards|rollout/response_len/mean|rollout/truncated_ratio|train/kl_loss",
        {
            "policy_entropy": "train/entropy_loss",
            "policy_kl": "train/ppo_kl",
            "logp_gap": "train/train_rollout_logprob_abs_diff",
            "reward": "rollout/raw_reward",
            "completion_length": "rollout/response_len/mean",
            "cut_share": "rollout/truncated_ratio",
            "kl": "train/kl_loss",
            "loss": "train/loss",
        },
    ),
    "AReaL": (
        "ppo_actor/task_reward/avg|ppo_actor/update/entropy/avg|ppo_actor/update/approx_kl/avg|"
        "ppo_actor/update/actor_loss/avg|ppo_actor/no_eos_ratios/avg|ppo_actor/update/behave_approx_kl/avg",
        {
            "reward": "ppo_actor/task_reward/avg",
            "policy_entropy": "ppo_actor/update/entropy/avg",
            "policy_kl": "ppo_actor/update/approx_kl/avg",
            "cut_share": "ppo_actor/no_eos_ratios/avg",
            "logp_gap": "ppo_actor/update/behave_approx_kl/avg",
            "loss": "ppo_actor/update/actor_loss/avg",
        },
    ),
    "Stable-Baselines3": (
        "time/iterations|time/total_timesteps|rollout/ep_rew_mean|rollout/ep_len_mean|train/approx_kl|"
        "train/clip_fraction|train/clip_range|train/entropy_loss|train/loss|train/value_loss|eval/mean_reward",
        {
            "reward": "rollout/ep_rew_mean",
            "policy_kl": "train/approx_kl",
            "clip_share": "train/clip_fraction",
            "policy_entropy": "train/entropy_loss",
            "eval_reward": "eval/mean_reward",
            "loss": "train/loss",
        },
    ),
    "CleanRL": (
        "charts/episodic_return|charts/learning_rate|losses/policy_loss|losses/value_loss|losses/entropy|"
        "losses/old_approx_kl|losses/approx_kl|losses/clipfrac",
        {
            "reward": "charts/episodic_return",
            "policy_entropy": "losses/entropy",
            "policy_kl": "losses/approx_kl",
            "clip_share": "losses/clipfrac",
            "loss": "losses/policy_loss",
            "lr": "charts/learning_rate",
        },
    ),
    "RLlib": (
        "episode_reward_mean|info/learner/default_policy/learner_stats/kl|training_iteration|"
        "info/learner/default_policy/learner_stats/entropy|info/learner/default_policy/learner_stats/total_loss",
        {
            "reward": "episode_reward_mean",
            "policy_kl": "info/learner/default_policy/learner_stats/kl",
            "policy_entropy": "info/learner/default_policy/learner_stats/entropy",
            "loss": "info/learner/default_policy/learner_stats/total_loss",
        },
    ),
    "rsl_rl": (
        "Train/mean_reward|Train/mean_episode_length|Loss/value_function|Loss/surrogate|Loss/entropy|"
        "Loss/learning_rate|Policy/mean_noise_std",
        {
            "reward": "Train/mean_reward",
            "policy_entropy": "Loss/entropy",
            "loss": "Loss/surrogate",
            "lr": "Loss/learning_rate",
        },
    ),
    "spinning up": (
        "Epoch|AverageEpRet|StdEpRet|LossPi|LossV|Entropy|KL|ClipFrac",
        {
            "reward": "AverageEpRet",
            "policy_entropy": "Entropy",
            "policy_kl": "KL",
            "clip_share": "ClipFrac",
            "loss": "LossPi",
        },
    ),
    "Megatron": (
        "lm loss|load_balancing_loss|z_loss|iteration|moe/load_balancing_loss_layer_11|moe/z_loss_layer_3",
        {
            "loss": "lm loss",
            "router_balance_loss": "load_balancing_loss",
            "router_z_loss": "z_loss",
            "router_balance_loss/11": "moe/load_balancing_loss_layer_11",
            "router_z_loss/3": "moe/z_loss_layer_3",
        },
    ),
    "OLMo-core": (
        "train/CE loss|train/load balancing loss|train/router Z loss|train/Z loss|train/block 03/load imbalance",
        {
            "loss": "train/CE loss",
            "router_balance_loss": "train/load balancing loss",
            "router_z_loss": "train/router Z loss",
            "expert_violation/3": "train/block 03/load imbalance",
        },
    ),
    "OLMoE": (
        "train/TokensPercentage/layer0/expert1|train/TokensTotal/layer0/expert1|train/LoadBalancingLoss|"
        "train/MoEZLoss|train/CrossEntropyLoss",
        {
            "loss": "train/CrossEntropyLoss",
            "expert_load/0.1": "train/TokensPercentage/layer0/expert1",
            "router_balance_loss": "train/LoadBalancingLoss",
            "router_z_loss": "train/MoEZLoss",
        },
    ),
    "prime-rl": (
        "reward/mean|entropy/all/mean|mismatch_kl/all/mean|loss/mean|max_vio/mean|optim/grad_norm",
        {
            "reward": "reward/mean",
            "policy_entropy": "entropy/all/mean",
            "logp_gap": "mismatch_kl/all/mean",
            "expert_violation": "max_vio/mean",
            "loss": "loss/mean",
            "grad_norm": "optim/grad_norm",
        },
    ),
    "a router's hooks": (
        "loss|moe/layer_3/expert_5/tokens|expert_load/4.7|tokens_per_expert_0|moe/expert_9_fraction|aux_loss|"
        "moe/layer_3/router_entropy|moe/layer_3/active_expert_ratio",
        {
            "expert_load/3.5": "moe/layer_3/expert_5/tokens",
            "expert_load/0": "tokens_per_expert_0",
            "expert_load/9": "moe/expert_9_fraction",
            "router_balance_loss": "aux_loss",
            "router_entropy/3": "moe/layer_3/router_entropy",
            "dead_expert_share/3": "moe/layer_3/active_expert_ratio",
        },
    ),
    "eight bits": (
        "loss|amax/blocks.0.fc1|scale/blocks.0.fc1|blocks.1.fc.amax|fc2_underflows%|fc2_overflows%|grad_scale",
        {
            "quant_scale/blocks.0.fc1": "scale/blocks.0.fc1",
            "amax/blocks.1.fc": "blocks.1.fc.amax",
            "zeroed_share/fc2": "fc2_underflows%",
            "saturated_share/fc2": "fc2_overflows%",
            "loss_scale": "grad_scale",
        },
    ),
    "parts of a loss": (
        "loss|loss_pos_512|loss/source/wiki|loss_t_0_100|train/loss/domain/code|val/loss/source/wiki",
        {
            "loss_at_position/512": "loss_pos_512",
            "loss_of_source/wiki": "loss/source/wiki",
            "loss_at_timestep/0-100": "loss_t_0_100",
            "loss_of_source/code": "train/loss/domain/code",
            "eval_loss": "val/loss/source/wiki",
        },
    ),
    "guided diffusion": (
        "loss|loss_q0|loss_q1|loss_q2|loss_q3|mse_q0",
        {f"loss_at_timestep/q{quarter}": f"loss_q{quarter}" for quarter in range(4)},
    ),
    "a GAN": ("loss_G|loss_D|D(x)", {"generator_loss": "loss_G", "discriminator_loss": "loss_D", "loss": "loss_G"}),
    "CycleGAN": ("epoch|iters|D_A|G_A|cycle_A", {"generator_loss": "G_A", "discriminator_loss": "D_A", "loss": "G_A"}),
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_a_framework_calls_its_signals(framework: str) -> None:
    names, signals = FRAMEWORKS[framework]
    assert {s: n for s, n in found(names).items() if s != "step"} == signals


OTHERS = {
    "a variational autoencoder": "loss|kl|recon_loss|kl_loss|kl_div",
    "a classifier": "loss|entropy|accuracy|score|ratio|clip_ratio|margin",
    "segmentation": "loss|aux_loss|acc_seg|balance_loss|z_loss",
    "imitation": "loss|expert_5|expert_accuracy|expert_reward_loss|load_expert_data_time|expert/1/accuracy",
    "a solver with constraints": "loss|max_violation|truncated",
    "critics": "loss|loss_q1|loss_q2|loss_pos|loss_neg|loss_pos_weight",
    "one player of a GAN": "loss|g_loss",
    "attention": "loss|feature_absmax|logit_scale|guidance_scale|blocks.0.scale",
}


@pytest.mark.parametrize("of", OTHERS)
def test_common_words_mean_nothing_without_company(of: str) -> None:
    assert found(OTHERS[of]) == {}


def test_a_loss_under_a_common_word_is_still_a_loss() -> None:
    assert found("d_loss|accuracy") == {"loss": "d_loss"}
    assert found("kl_loss|step") == {"loss": "kl_loss"}


def test_three_common_words_for_a_policy_vouch_for_each_other() -> None:
    assert found("loss|avg_kl|avg_entropy|avg_clip_fraction") == {
        "kl": "avg_kl",
        "policy_entropy": "avg_entropy",
        "clip_share": "avg_clip_fraction",
    }


def test_a_clip_setting_is_no_gradient_norm() -> None:
    assert found("loss|max_grad_norm") == {}


@pytest.mark.parametrize(
    ("signal", "name", "beside", "value", "wanted"),
    [
        ("policy_entropy", "train/entropy_loss", "rollout/ep_rew_mean", -0.7, 0.7),
        ("expert_violation/3", "block 03/load imbalance", "", 1.5, 0.5),
        ("zero_spread_share", "env/all/by_group/frac_mixed", "", 0.25, 0.75),
        ("cut_share", "train/natural_termination_rate", "", 0.9, 0.1),
        ("logp_gap", "train/token_mult_prob_error", "", float(np.exp(0.02)), 0.02),
        ("zeroed_share/fc1", "fc1_underflows%", "", 3.0, 0.03),
    ],
)
def test_what_says_a_signal_in_another_way_is_turned_round(
    signal: str, name: str, beside: str, value: float, wanted: float
) -> None:
    how = changed(signal, name, [name, beside])
    assert how is not None
    assert how[1](np.array([value])) == pytest.approx([wanted])


def test_an_entropy_loss_of_others_is_the_entropy() -> None:
    assert changed("policy_entropy", "train/entropy_loss", ["train/entropy_loss", "train/pg_loss"]) is None


def test_a_reward_that_is_seldom_logged_is_of_an_evaluation() -> None:
    """``Eval num_timesteps=10000, episode_reward=126.14`` stands between the tables of Stable-Baselines3."""
    assert dict(kind_signals({"episode_reward": 5, "rollout/ep_rew_mean": 24}, ()))["reward"] == "rollout/ep_rew_mean"
    assert dict(kind_signals({"episode_reward": 24, "rollout/ep_rew_mean": 24}, ()))["reward"] == "episode_reward"


@pytest.mark.parametrize(
    ("name", "signal"),
    [
        ("Episodic Reward/episode", "reward"),
        ("Average Episodic Reward/info", "reward"),
        ("RewardMean", "reward"),
        ("mean_return_last_100", "reward"),
        ("my_agent/episode_reward_mean", "reward"),
        ("my_agent/eval_episode_reward_mean", "eval_reward"),
        ("best_episode_reward", None),
        ("episode_reward_std", None),
        ("reward_model_loss_mean", None),
        ("reward/collision", None),
        ("total_return", None),
        ("window_reward", None),
    ],
)
def test_a_reward_of_episodes_is_known_by_its_words(name: str, signal: str | None) -> None:
    found = kind_role(name)
    assert (found.signal if found else None) == signal
