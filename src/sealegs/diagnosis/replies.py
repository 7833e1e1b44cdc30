"""The replies of a run to each question of the decision tree, with the numbers."""

import math
from typing import NamedTuple

import numpy as np

from sealegs.diagnosis.facts import DRIFT_STEPS, LEAPS, NEAR, SOON, USUAL, Facts
from sealegs.diagnosis.settings import missing_margins
from sealegs.diagnosis.signs import data, spikes, state
from sealegs.diagnosis.signs import first_signals as signs_of_first
from sealegs.diagnosis.signs import numbers as signs_of_numbers
from sealegs.diagnosis.signs import settings as signs_of_settings
from sealegs.diagnosis.signs.sign import NOT_ASKED, Ask, Sign
from sealegs.incidents import FAST

YES, NO, UNKNOWN = "yes", "no", "unknown"


class Reply(NamedTuple):
    """An answer, before the tree says where it leads."""

    answer: str
    evidence: str
    missing: tuple[str, ...] = ()
    """Signals that would have told more."""


def of(sign: Sign) -> Reply:
    """The reply that a sign gives."""
    if sign.holds is None:
        return Reply(UNKNOWN, f"{sign.missing} is not logged", (sign.missing,))
    return Reply(YES if sign.holds else NO, sign.text)


def margins(facts: Facts) -> Reply:
    """Question 0: the stability margins that the settings lack."""
    if not facts.known.values:
        return Reply(UNKNOWN, "the log does not say with which settings the run was made", ("the settings",))
    gone = list(missing_margins(facts.known, is_trained_before=facts.findings.kind.is_trained_before))
    if not gone and facts.known.values.keys() == {"dtype"}:  # a column of the log says so much
        return Reply(UNKNOWN, "of the settings the log says the precision alone", ("the settings",))
    if not gone:
        return Reply(YES, f"nothing to object to in {len(facts.known.values)} settings")
    return Reply(NO, f"{len(gone)} missing: " + "; ".join(gone))


def nonfinite(facts: Facts) -> Reply:
    """Question 1.1: whether a value is NaN or infinite, and where first."""
    firsts = {
        "loss": facts.first_bad("loss"),
        "weights": facts.first_bad_weight,
        "grad norm": None if facts.dtype == "fp16" else facts.first_bad("grad_norm"),
    }
    told = [f"{name} at step {step}" for name, step in firsts.items() if step is not None]
    if told:
        stays = ", then finite again"
        if facts.stays_bad or facts.ends_bad:
            stays = ", and the loss stays so" if facts.stays_bad else ", and the log ends with such a loss"
        return Reply(YES, f"first not finite: {', '.join(told)}{stays}")
    return Reply(NO, f"all {len(facts.loss.values)} logged losses are finite")


def reward_lost(facts: Facts) -> Reply:
    """Question 5.1: whether the reward is lost."""
    return _first(facts, signs_of_first.reward_falls)


def left_to_learn(facts: Facts) -> Reply:
    """Question 5.2: whether anything is left to learn from."""
    found = _first(facts, signs_of_first.nothing_to_learn)
    return Reply({YES: NO, NO: YES}.get(found.answer, found.answer), found.evidence, found.missing)


def entropy_at_an_end(facts: Facts) -> Reply:
    """Question 5.3: whether the policy tries nothing new, or says anything."""
    return _first(facts, signs_of_first.entropy_vanishes, signs_of_first.entropy_explodes)


def policy_away(facts: Facts) -> Reply:
    """Question 5.4: whether the policy, or the sampler, is far from where it should be."""
    return _first(facts, signs_of_first.kl_leaps, signs_of_first.sampler_apart, signs_of_first.clip_saturates)


def completions(facts: Facts) -> Reply:
    """Question 5.5: whether completions have another shape than before."""
    asked = (signs_of_first.length_collapses, signs_of_first.length_leaps, signs_of_first.completions_cut)
    return _first(facts, *asked)


def load(facts: Facts) -> Reply:
    """Question 6.1: whether few experts take the load."""
    return _first(facts, signs_of_first.router_collapses, signs_of_first.experts_die)


def router(facts: Facts) -> Reply:
    """Question 6.2: whether the router shows it."""
    asked = (signs_of_first.router_entropy_vanishes, signs_of_first.router_logits_grow)
    return _first(facts, *asked, signs_of_first.balance_loss_grows)


def few_bits(facts: Facts) -> Reply:
    """Question 7.1: whether numbers are lost in few bits."""
    asked = (signs_of_first.scale_of_zero, signs_of_first.values_saturate, signs_of_first.values_vanish)
    return _first(facts, *asked, signs_of_first.amax_broken)


def _first(facts: Facts, *asked: Ask) -> Reply:
    """Yes, by the first of several signs that holds; unknown where none was logged; no by those that were."""
    signs = [ask(facts) for ask in asked]
    if found := [sign.text for sign in signs if sign.holds]:
        return Reply(YES, "; ".join(found))
    missing = tuple(dict.fromkeys(sign.missing for sign in signs if sign.holds is None))
    if all(sign.holds is None for sign in signs):
        return Reply(UNKNOWN, f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not logged", missing)
    told = [sign.text for sign in signs if sign.holds is False and sign.text]
    return Reply(NO, "; ".join([*told, *([f"not logged: {', '.join(missing)}"] if missing else [])]), missing)


def precision(facts: Facts) -> Reply:
    """Question 1.2: the precision of the run."""
    if facts.dtype is None:
        is_unscaled = not facts.series("loss_scale").finite.is_empty
        told = (
            "no dtype is in the log, and a loss scale of 1 is none"
            if is_unscaled
            else "neither a dtype nor a loss scale is in the log"
        )
        return Reply(UNKNOWN, told, ("dtype",))
    where = {"fp16": "beyond 65504 is infinite", "bf16": "exp overflows at 88.7, sums at 3e38"}
    return Reply(facts.dtype, where.get(facts.dtype, "NaN is rare: log(0) or 0/0, mostly"))


def origin(facts: Facts) -> Reply:
    """Question 1.3: the first layer or tensor that was not finite, or changed violently."""
    leap = _leap_before_nan(facts)
    if leap.holds:
        return Reply(leap.text.removeprefix("panel 5: ").partition(" ")[0], leap.text)
    broken = facts.onset if facts.first_nonfinite is None else facts.first_nonfinite
    near = facts.culprits(broken - NEAR * facts.stride, broken)  # an alarm before, or a step since, is another trouble
    if near:
        at, named = max(near.items())
        return Reply(named, f"the tensor with the worst gradient at step {at}")
    for signal in ("activation_norm", "grad_norm", "param_norm"):
        firsts = {name: step for name in facts.groups(signal) if (step := facts.first_bad(name)) is not None}
        first = [name for name, step in firsts.items() if step == min(firsts.values())]
        # layers are logged in their order, and what is not finite goes forward; in gradients it goes everywhere
        if len(first) == 1 or (first and signal == "activation_norm"):
            return Reply(first[0], f"first not finite at step {firsts[first[0]]}")
    test = "reload the last clean checkpoint and run the batch with checks at each layer"
    families = {"activation_norm": "activation_norm/<layer>", "grad_norm": "grad_norm/<group>"}
    return Reply(UNKNOWN, test, tuple(name for signal, name in families.items() if not facts.groups(signal)))


def _leap_before_nan(facts: Facts) -> Sign:
    """A leap of the weights, unless what it began is long over where the first value is not finite."""
    broken = facts.first_nonfinite
    is_long_over = broken is not None and broken > facts.onset + 2 * NEAR * facts.stride
    return NOT_ASKED if is_long_over else state.weights_leap(facts)


def fix_of_nan(facts: Facts) -> Reply:
    """Question 1.4: the fix for a NaN."""
    if (leap := _leap_before_nan(facts)).holds:
        return Reply("go back to before the weights leapt", leap.text)
    if signs_of_numbers.infinite_in_embedding(facts).holds:
        return Reply("clip gradients by value at 100", "the embedding's gradient is infinite")
    if signs_of_settings.log_loss_naive(facts).holds:
        return Reply("log_softmax(x) instead of log(softmax(x))", "written so the loss can be the log of a zero")
    if signs_of_numbers.loss_infinite(facts).holds and not signs_of_settings.log_loss_sound(facts).holds:
        both = "the loss is inf: the log of a zero, or logits that overflowed"
        return Reply("look at logits and probabilities of that batch", both)
    if signs_of_settings.eps_zero(facts).holds:
        return Reply("norm eps 1e-6", "a row of zeros is 0/0 without it")
    if signs_of_settings.softmax_naive(facts).holds or signs_of_numbers.logits_over_exp(facts).holds:
        return Reply("subtract the maximum before exp", "exp overflows at 88.7, in fp16 at 11.1")
    return Reply(UNKNOWN, "it depends on where the NaN came from")


def leap(facts: Facts) -> Reply:
    """Question 2.1: whether the loss leaps above what was usual."""
    if facts.rules == "textbook" and len(facts.loss.values) <= USUAL:
        return Reply(UNKNOWN, f"{len(facts.loss.values)} losses: the rule needs {USUAL} before the first")
    found = [incident for incident in facts.incidents if incident.kind in LEAPS]
    if not found:
        return Reply(NO, f"no step is out of the ordinary by the {facts.rules} rule")
    chosen = facts.focus if facts.focus in found else found[0]
    assert chosen is not None
    others = f"; {len(found)} in all" if len(found) > 1 else ""
    text = f"from {chosen.usual:.4g} to {chosen.peak_loss:.4g} at step {chosen.peak}, onset {chosen.start}{others}"
    return Reply(YES, text)


def back(facts: Facts) -> Reply:
    """Question 2.2: whether the loss comes back soon."""
    focus = facts.focus
    if focus is None:
        return Reply(UNKNOWN, "no incident to follow")
    if facts.rules == "textbook":
        after = facts.loss.finite.within(focus.start + 1, math.inf).values[:SOON]
        if not math.isfinite(focus.limit) or not len(after):
            return Reply(UNKNOWN, "nothing to compare with")
        return Reply(
            YES if after.min() <= focus.limit else NO, f"lowest of 50 {after.min():.4g}, limit {focus.limit:.4g}"
        )
    after = facts.loss.finite.within(focus.start + 40 * facts.stride, focus.start + 50 * facts.stride).values
    level = (
        f"{after.mean():.4g} about 50 rows on, limit {focus.limit:.4g}" if len(after) else "the log ends before that"
    )
    if focus.trajectory is None and focus.end is not None and facts.came_back:
        if focus.end - focus.start >= FAST:
            return Reply(NO, f"above it for {focus.end - focus.start + 1} steps at least: {level}")
        return Reply(
            UNKNOWN, f"back {focus.end - focus.start + facts.stride} steps on, at a row in {facts.stride} steps"
        )
    if focus.trajectory is None and not facts.persists:
        return Reply(UNKNOWN, level)
    return Reply(NO if facts.persists else YES, f"{focus.trajectory or 'not so far'}: {level}")


def panels(facts: Facts) -> Reply:
    """Question 2.3: the panels that stand out; both branches ask it."""
    told: list[str] = []
    out: list[str] = []
    missing: list[str] = []
    for panel, ask in (
        ("3", spikes.gradient_many_fold),
        ("2", signs_of_settings.lr_jumps),
        ("10", data.batch_repeats),
        ("4", spikes.embedding_stands_out),
        ("7", spikes.few_tokens_dear),
        ("6", state.moments_dropped),
    ):
        sign = ask(facts)
        if sign.holds is None:
            missing.append(sign.missing)
        elif sign.text:
            told.append(sign.text)
            out += [panel] if sign.holds else []
    told += [f"not logged: {', '.join(missing)}"] if missing else []
    answer = f"panel {', '.join(out)}" if out else "none" if len(told) > bool(missing) else UNKNOWN
    return Reply(answer, "; ".join(told), tuple(missing))


def checkpoint(facts: Facts) -> Reply:
    """Question 2.4: the last checkpoint before the incident."""
    step = facts.checkpoint_before
    if step is None:
        return Reply(
            UNKNOWN, f"the log tells of no checkpoint before step {facts.sound_before}", ("checkpoint events",)
        )
    return Reply(f"step {step}", f"{facts.onset - step} steps before the onset")


def overflow(facts: Facts) -> Reply:
    """Question 3.1: whether gradients overflow."""
    return of(signs_of_numbers.gradients_overflow(facts))


def loss_scale(facts: Facts) -> Reply:
    """Question 3.2: whether the loss scale moves as it should."""
    word = signs_of_numbers.scale_of(facts)
    values = facts.series("loss_scale").finite.values
    if word is None:
        return Reply(UNKNOWN, "loss_scale is not logged", ("loss_scale",))
    says = {"moving": YES, "collapsed": "collapsed", "stuck": "constant", "constant": "constant", "still": UNKNOWN}[
        word
    ]
    return Reply(says, f"loss scale between {values.min():.6g} and {values.max():.6g}, {values[-1]:.6g} at the end")


def fingerprint(facts: Facts) -> Reply:
    """Question 3.3: whether a gradient or activation and a halving scale come first, or the loss itself."""
    gradient, directly = signs_of_numbers.gradient_first(facts), signs_of_numbers.loss_first(facts)
    scale = signs_of_numbers.scale_of(facts)
    if facts.first_bad("loss") is None:
        return Reply("fp16 overflow", gradient.text or "the loss stays finite")
    if gradient.holds or scale in ("collapsed", "stuck"):
        return Reply("fp16 overflow", gradient.text if gradient.holds else f"panel 9: loss scale {scale}")
    test = "run that batch once in fp32: if it is finite there, fp16 overflowed"
    if directly.holds is None or scale is None:
        return Reply(UNKNOWN, test, tuple(filter(None, (directly.missing, "loss_scale" if scale is None else ""))))
    if signs_of_numbers.activation_near_limit(facts).holds:
        return Reply("fp16 overflow", signs_of_numbers.activation_near_limit(facts).text)
    # a loss that is not finite by itself may be a forward pass beyond 65504, unless other batches give it, too
    is_structural = directly.holds and facts.stays_bad
    return Reply("structural" if is_structural else UNKNOWN, f"{directly.text}; {test}")


def fix_of_overflow(facts: Facts) -> Reply:
    """Question 3.4: the fix for an overflow."""
    scale = signs_of_numbers.scale_of(facts)
    if scale in ("stuck", "constant", "still", None):
        said = "the loss scale does not move" if scale else "no loss scale is logged"
        return Reply("dynamic loss scaling, or bf16", said)
    if scale == "collapsed":
        lower = "bf16" if signs_of_settings.rate_is_tiny(facts).holds else "halve the LR, or bf16"
        return Reply(lower, "the loss scale collapsed: activations are too large throughout")
    return Reply("none needed" if facts.first_bad("loss") is None else "bf16", "the scaler does its work")


def rising(facts: Facts) -> Reply:
    """Question 4.1: whether the loss rises slowly."""
    window = facts.loss.finite.within(*facts.slow_window).values
    if len(window) < 8 or facts.loss.steps[-1] - facts.loss.steps[0] < DRIFT_STEPS:
        return Reply(UNKNOWN, f"{len(window)} losses in the last {DRIFT_STEPS} steps are too few to tell")
    change = facts.change("loss")
    assert change is not None
    text = f"loss {change.usual:.4g}, then {change.value:.4g} in steps {facts.slow_window[0]} to {facts.slow_window[1]}"
    if facts.rules == "textbook":
        return Reply(YES if bool((np.diff(window) > 0).all()) else NO, text)
    drifts = any(incident.kind == "drift" and incident.end is None for incident in facts.incidents)
    drifts |= facts.focus is not None and (facts.focus.kind == "drift" or _is_climbing(facts))
    return Reply(YES if drifts else NO, text + ("" if drifts else ": no trend"))


def _is_climbing(facts: Facts) -> bool:
    """Whether the loss rises by a tenth in the slow window, nearly without a break: an incident may climb like that."""
    change, trend = facts.change("loss"), facts.trend("loss")
    return change is not None and trend is not None and change.ratio > 1.1 and trend > 0.7


def lr_rising(facts: Facts) -> Reply:
    """Question 4.2: whether the learning rate rises meanwhile."""
    return of(signs_of_settings.lr_rises(facts))


def weights_changing(facts: Facts) -> Reply:
    """Question 4.3: whether weights grow or shrink meanwhile."""
    grow, shrink = state.weights_grow(facts), state.weights_shrink(facts)
    if facts.norm_changes and rising(facts).answer == NO:  # no rise says where to look
        return Reply(YES, f"panel 5: {facts.norm_changes[0]}")
    return of(grow if grow.holds or grow.holds is None else shrink)


def gradients_rising(facts: Facts) -> Reply:
    """Question 4.4: whether gradients rise meanwhile; otherwise it is a plateau."""
    if facts.norm_rise is not None and rising(facts).answer == NO:
        return Reply(YES, f"panel 3: {facts.norm_rise}")
    return of(spikes.gradients_grow(facts))
