"""Signs in the first signals of a kind: the same findings that stand in the verdict, asked one by one."""

import re

import numpy as np

from sealegs.detectors.collapse_rules import APART, APART_FLOOR
from sealegs.diagnosis.facts import Facts
from sealegs.diagnosis.first_signals.critic import EXPLAINED, LOSS, columns
from sealegs.diagnosis.first_signals.reward import course_of
from sealegs.diagnosis.first_signals.track import WIDTH, track_of
from sealegs.diagnosis.signs.sign import Sign, so, unlogged

# Policies


def reward_falls(facts: Facts) -> Sign:
    """The reward fell from its best by more than it wanders, and stays down."""
    return _shown(facts, "reward-falls", "reward")


def reward_rises(facts: Facts) -> Sign:
    """The reward rose by more than it wanders, and is still up."""
    reward = track_of(facts.run, "reward")
    if reward is None:
        return unlogged("reward")
    course = course_of(reward)
    return so(course.has_learned, f"reward {course.start:.4g} at first, {course.end:.4g} in the end")


def reward_flat(facts: Facts) -> Sign:
    """The reward has never been higher than at first by more than it wanders, in the whole run."""
    return _shown(facts, "reward-flat", "reward")


def entropy_vanishes(facts: Facts) -> Sign:
    """The entropy of the policy is near nothing, and stays there."""
    return _shown(facts, "entropy-vanishes", "policy_entropy")


def entropy_explodes(facts: Facts) -> Sign:
    """The entropy of the policy is many times what it was."""
    return _shown(facts, "entropy-explodes", "policy_entropy")


def kl_leaps(facts: Facts) -> Sign:
    """The divergence of the policy is many times what it was."""
    return _shown(facts, "kl-leaps", "kl", "policy_kl")


def nothing_to_learn(facts: Facts) -> Sign:
    """No group has a spread of rewards, or the gradient is nothing, up to the end."""
    return _shown(facts, "nothing-to-learn", "zero_spread_share", "reward_std", "grad_norm")


def groups_without_spread(facts: Facts) -> Sign:
    """The rewards of nearly every group are all the same, up to the end."""
    found = facts.shown.get("nothing-to-learn")
    if found is not None and found.signal in ("zero_spread_share", "reward_std"):
        return so(True, f"{found.signal} since step {found.step}")
    return _shown(facts, "groups-without-spread", "zero_spread_share", "reward_std")


def sampler_apart(facts: Facts) -> Sign:
    """The sampler's probabilities leave the trainer's, for the same weights; or slowly, and then the reward falls."""
    sign = _shown(facts, "sampler-apart", "logp_gap", "logp_gap_max", "importance_ratio_max")
    fell, gap = facts.shown.get("reward-falls"), track_of(facts.run, "logp_gap")
    if sign.holds is not False or fell is None or gap is None:
        return sign
    early, before = abs(gap.early()), np.abs(gap.values[gap.steps <= fell.step])
    there = float(np.median(before[-WIDTH:])) if len(before) >= WIDTH else 0.0
    text = f"{gap.signal} {early:.3g} early on, {there:.3g} by the time the reward falls"
    return so(there > APART * max(early, APART_FLOOR / 2), text)


def clip_saturates(facts: Facts) -> Sign:
    """Most importance ratios are clipped, or each update goes far from its samples, up to the end."""
    return _shown(facts, "clip-saturates", "clip_share", "policy_kl")


def length_collapses(facts: Facts) -> Sign:
    """Completions become very short."""
    return _shown(facts, "length-collapses", "completion_length")


def length_leaps(facts: Facts) -> Sign:
    """Completions become several times as long at once."""
    return _shown(facts, "length-leaps", "completion_length")


def completions_cut(facts: Facts) -> Sign:
    """Nearly all completions are cut at the largest length, as they were not before."""
    return _shown(facts, "completions-cut", "cut_share")


def cut_and_rewarded(facts: Facts) -> Sign:
    """Nearly all completions come to be cut while the reward rises: it pays for length, or for what never ends."""
    cut = completions_cut(facts)
    if not cut.holds:
        return cut
    rise = reward_rises(facts)
    return so(rise.holds is True, f"{cut.text}; {rise.text}")


def held_out_reward_falls(facts: Facts) -> Sign:
    """The held-out reward falls while the reward in training rises."""
    return _shown(facts, "held-out-reward-falls", "eval_reward")


def critic_explains_nothing(facts: Facts) -> Sign:
    """The critic explains nothing of the returns in the second half of the log."""
    return _of_critic(facts, "critic-explains-nothing", EXPLAINED, "explained_variance")


def critic_blows_up(facts: Facts) -> Sign:
    """The critic's loss grows many-fold, at a reward that is no higher."""
    return _of_critic(facts, "critic-blows-up", LOSS, "value_loss")


def _of_critic(facts: Facts, shows: str, names: re.Pattern[str], missing: str) -> Sign:
    logged = columns(facts.run, names)
    return _shown(facts, shows, *logged) if logged else unlogged(missing)


# Pairs


def preference_lost(facts: Facts) -> Sign:
    """Pairs that were told apart are not any more."""
    return _shown(facts, "preference-lost", "preference_accuracy")


def pairs_by_heart(facts: Facts) -> Sign:
    """The loss of the pairs is nothing, at a wide margin."""
    return _shown(facts, "pairs-by-heart", "reward_margin")


def preferred_becomes_unlikely(facts: Facts) -> Sign:
    """The preferred answers become far less likely, with the others."""
    return _shown(facts, "preferred-becomes-unlikely", "chosen_reward")


# Experts


def router_collapses(facts: Facts) -> Sign:
    """Few experts take the load, up to the end."""
    return _shown(facts, "router-collapses", "expert_load", "expert_violation", "dead_expert_share")


def experts_die(facts: Facts) -> Sign:
    """More and more experts get hardly any token."""
    if (found := facts.in_columns("appears", "dead") or facts.in_columns("rises", "dead")) is not None:
        return so(True, found.text)  # a count of them, which is no signal of ours
    return _shown(facts, "experts-die", "dead_expert_share", "expert_load")


def balance_loss_grows(facts: Facts) -> Sign:
    """The loss that keeps loads alike is several times its lowest."""
    return _shown(facts, "balance-loss-grows", "router_balance_loss")


def router_entropy_vanishes(facts: Facts) -> Sign:
    """The router's choice has no entropy left."""
    return _shown(facts, "router-entropy-vanishes", "router_entropy")


def router_logits_grow(facts: Facts) -> Sign:
    """The loss that keeps the router's logits small is many times its lowest."""
    return _shown(facts, "router-logits-grow", "router_z_loss")


# Few bits


def values_saturate(facts: Facts) -> Sign:
    """More and more values of a tensor are beyond the largest number."""
    return _shown(facts, "values-saturate", "saturated_share")


def values_vanish(facts: Facts) -> Sign:
    """More and more values of a tensor become zero."""
    return _shown(facts, "values-vanish", "zeroed_share")


def scale_of_zero(facts: Facts) -> Sign:
    """The scale of a tensor is 0, or not finite."""
    return _shown(facts, "scale-of-zero", "quant_scale")


def amax_broken(facts: Facts) -> Sign:
    """The largest magnitude of a tensor is 0 or not finite, up to the end."""
    found = facts.shown.get("amax-not-finite") or facts.shown.get("amax-of-zero")
    return so(True, found.text) if found is not None else _shown(facts, "amax-not-finite", "amax")


def amax_stuck(facts: Facts) -> Sign:
    """The largest magnitude of a tensor does not change any more, while others do."""
    return _shown(facts, "amax-stuck", "amax")


# Two networks


def discriminator_wins(facts: Facts) -> Sign:
    """The discriminator's loss is nothing, and the generator's grows."""
    return _shown(facts, "discriminator-wins", "discriminator_loss")


def _shown(facts: Facts, shows: str, *signals: str) -> Sign:
    """Whether it stands; if none of the signals was logged that could show it, the first is what is missing."""
    if (found := facts.shown.get(shows)) is not None:
        return so(True, found.text)
    logged = [name for name in facts.run.signals if name in signals or name.partition("/")[0] in signals]
    return so(False, f"nothing such in {logged[0]}") if logged else unlogged(signals[0])
