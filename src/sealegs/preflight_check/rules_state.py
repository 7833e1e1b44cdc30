"""Rules about the state in which a run begins: the optimizer's parameters, and its memory of earlier steps."""

from collections.abc import Sequence

from sealegs.preflight_check.rule import Family, RuleFinding

STATE = Family("STA", "state")


@STATE.rule()
def unowned_parameters(unowned: Sequence[str]) -> RuleFinding | None:
    """Parameters that are to be trained are in no optimizer.

    Why: they get gradients and never move: a layer that stays as it was drawn. It happens when a module is added, or
      replaced, after the optimizer was made.
    Set: make the optimizer last; or freeze on purpose, with requires_grad_(False).
    Sure: established.
    See: the documentation of torch.optim, on constructing an optimizer.
    """
    if not unowned:
        return None
    return RuleFinding(
        "error", f"in no optimizer: {some(unowned)}", "the optimizer", "made of all parameters that train"
    )


@STATE.rule()
def parameters_of_another_model(strangers: Sequence[str]) -> RuleFinding | None:
    """The optimizer has parameters that are not the model's.

    Why: it was made of a model that has been copied, moved or rebuilt since. It updates tensors that nobody reads, and
      clipping by their norm counts nothing.
    Set: make the optimizer after the model has its last form.
    Sure: established.
    See: the documentation of torch.optim, on constructing an optimizer.
    """
    if not strangers:
        return None
    return RuleFinding("error", f"not in the model: {some(strangers)}", "the optimizer", "made after the model")


@STATE.rule(from_scratch=True)
def frozen_parameters(frozen: Sequence[str]) -> RuleFinding | None:
    """Some parameters are frozen.

    Why: what does not move limits what can be learnt, and a run from scratch has no reason for it. In fine-tuning it is
      meant.
    Set: requires_grad_(True), where nobody meant it.
    Sure: established that they are; whether it is meant, you know.
    See: the documentation of torch.Tensor.requires_grad_.
    """
    if not frozen:
        return None
    return RuleFinding("note", f"frozen: {some(frozen)}", "requires_grad", "true, unless it is meant")


@STATE.rule()
def owned_twice(owned_twice: Sequence[str]) -> RuleFinding | None:
    """Parameters are in an optimizer twice.

    Why: they are updated twice a step, with two sets of moments or the same one advanced twice: a learning rate of
      twice the size for them alone.
    Set: every parameter in one group of one optimizer; tied ones once.
    Sure: established.
    See: the documentation of torch.optim, on per-parameter options.
    """
    if not owned_twice:
        return None
    return RuleFinding("error", f"twice: {some(owned_twice)}", "the groups of the optimizer", "each parameter once")


@STATE.rule()
def parameters_that_stand_still(unmoved: Sequence[str]) -> RuleFinding | None:
    """A step leaves parameters as they were.

    Why: a detached branch, a layer that the forward pass leaves out, an update that is rounded away: whatever it is,
      these do not learn. (Rows of an embedding whose tokens have not come are not counted.)
    Set: find where the gradient stops: grad is None, or all zero.
    Sure: established for that step.
    See: the documentation of torch.autograd, on detach and no_grad.
    """
    if not unmoved:
        return None
    return RuleFinding("warning", f"did not move: {some(unmoved)}", "the forward pass", "one that uses them")


@STATE.rule()
def lost_ties(untied: Sequence[str]) -> RuleFinding | None:
    """Weights that belong together are two.

    Why: head and embedding that are meant to be one tensor, and were copied apart (loaded, moved, wrapped, cast), learn
      each for itself from here on, and a checkpoint keeps one of them.
    Set: tie again after loading and before the optimizer is made: head.weight = embedding.weight.
    Sure: established where the configuration says tied; likely where two matrices are equal to the last bit.
    See: Press and Wolf 2017, Using the output embedding to improve language models.
    """
    if not untied:
        return None
    return RuleFinding("error", f"apart: {some(untied)}", "the tie", "made again, before the optimizer")


@STATE.rule()
def moments_left_behind(moments_empty: bool, schedule_step: int) -> RuleFinding | None:
    """The run goes on without what its optimizer remembers.

    Why: the schedule is in mid-run and the moments are empty: for the first tens of steps Adam divides by an average of
      a handful of gradients, at a full learning rate. A warm-up again, or a leap of the loss.
    Set: load the optimizer's state with the weights.
    Sure: established.
    See: Liu et al. 2020, On the variance of the adaptive learning rate and beyond, for why v is no use at first.
    """
    if not moments_empty or schedule_step <= 0:
        return None
    found = f"the schedule is at step {schedule_step}, the optimizer remembers nothing"
    return RuleFinding("error", found, "optimizer.load_state_dict", "of the same checkpoint")


@STATE.rule()
def weights_not_finite(nonfinite: Sequence[str]) -> RuleFinding | None:
    """Weights are NaN or infinite before the first step.

    Why: whatever they are multiplied with is NaN too, and so is the loss.
    Set: an older checkpoint; or initialise them (tensors made with torch.empty hold what was there).
    Sure: established.
    See: IEEE 754.
    """
    if not nonfinite:
        return None
    return RuleFinding("error", f"not finite: {some(nonfinite)}", "the weights", "from a checkpoint before")


@STATE.rule()
def shadows_in_no_state(not_held: Sequence[str]) -> RuleFinding | None:
    """Something follows the weights, and no state has it.

    Why: an average of the weights, or whatever else is called at each step and keeps tensors, stays where it is when
      the run goes back to an earlier state, and begins anew at a resume: from then on it is that of another run.
    Set: Checkpointing(also={"ema": ema}), and also= here; the object needs state_dict and load_state_dict.
    Sure: established that it is called and keeps something; whether that matters, you know.
    See: Izmailov et al. 2018, Averaging weights leads to wider optima, for what such averages are for.
    """
    if not not_held:
        return None
    return RuleFinding("note", f"in no state: {some(not_held)}", "Checkpointing.also", "it, by a name")


def some(names: Sequence[str]) -> str:
    """A few of them, and how many there are.

    >>> some(["a", "b", "c", "d"])
    'a, b, c and 1 more'
    """
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
