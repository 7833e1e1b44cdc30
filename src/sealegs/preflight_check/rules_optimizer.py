"""Rules about the optimizer and the clipping of its gradients. None of them says: take another optimizer."""

import math

from sealegs.preflight_check.rule import Family, RuleFinding, Unknown
from sealegs.report.commands.preflight import Grade

OPTIMIZER = Family("OPT", "optimizer")
CLIP = Family("CLIP", "clipping")

SMALLEST = {"fp16": 6e-8, "bf16": 9.2e-41, "fp32": 1.4e-45}
"""The smallest number above zero in each format."""
STEP = {"fp16": 2.0**-11, "bf16": 2.0**-8}
"""Relative changes below this may be lost to rounding."""
DECAYS_GRADIENTS = ("sgd", "asgd", "rmsprop", "adagrad", "adadelta", "rprop")
"""Optimizers whose weight decay is added to the gradient: what AdamW has as 0.1 is 1e-4 there."""


@OPTIMIZER.rule(margin=True, from_scratch=True)
def stale_second_moment(beta2: float) -> RuleFinding | None:
    """The second moment remembers too long.

    Why: Adam divides by the root of v, an average over about 1 / (1 - beta2) steps: 1000 at 0.999, 20 at 0.95. When
      gradients grow, an old v is too small, and updates are too large until it has caught up: spikes of the loss
      follow within steps of v falling behind.
    Set: beta2 to 0.95, as GPT-3, Llama and OLMo 2 have it.
    Sure: established for pretraining; for fine-tuning of a few thousand steps 0.999 is usual and mostly harmless.
    See: Wortsman et al. 2023, Stable and low-precision training for large-scale vision-language models, section 3;
      Brown et al. 2020 (GPT-3), appendix B.
    """
    if beta2 <= 0.98:
        return None
    window = f"averages about {1 / (1 - beta2):.0f} steps" if beta2 < 1 else "never learns anything new"
    return RuleFinding("warning" if beta2 > 0.995 else "note", f"beta2 is {beta2:g}: v {window}", "beta2", "0.95")


@OPTIMIZER.rule()
def momentum_outlives_variance(beta1: float, beta2: float) -> RuleFinding | None:
    """The first moment remembers longer than the second.

    Why: a large gradient is then still in m when v has forgotten it, and m / sqrt(v) is no longer near 1: one outlier
      moves weights for about 1 / (1 - beta1) steps with nothing to damp it. Proofs that Adam converges ask
      for beta1 < sqrt(beta2).
    Set: beta2 above beta1; (0.9, 0.95) is usual.
    Sure: established; some train with equal betas, on purpose.
    See: Kingma and Ba 2015, Adam; Zhang et al. 2022, Adam can converge without any modification on update rules.
    """
    if beta1 < beta2:
        return None
    grade: Grade = "error" if beta1 >= math.sqrt(beta2) else "warning"
    return RuleFinding(grade, f"beta1 is {beta1:g}, beta2 {beta2:g}", "beta2", "0.95, with beta1 0.9")


@OPTIMIZER.rule()
def eps_is_nothing(eps: float, moments_dtype: str = "fp32") -> RuleFinding | None:
    """Adam's eps is zero in the numbers that it is kept in.

    Why: weights that have had no gradient yet (rows of tokens that have not come) have m = v = 0, and 0 / (0 + eps) is
      NaN where eps is 0. The smallest number of fp16 is 6e-8: there an eps of 1e-8 is 0.
    Set: eps to 1e-8 with moments in fp32; 1e-6 or more where moments must be fp16.
    Sure: established: arithmetic.
    See: Kingma and Ba 2015, Adam, algorithm 1; IEEE 754 binary16.
    """
    if eps >= SMALLEST.get(moments_dtype, 0.0) and eps > 0:
        return None
    return RuleFinding("error", f"eps is {eps:g}, moments are {moments_dtype}", "eps", "1e-8, with moments in fp32")


@OPTIMIZER.rule(from_scratch=True)
def eps_mutes_gradients(
    eps: float, parameters: int, typical_grad_norm: float | None = None, clip: float | None = None
) -> RuleFinding | None:
    """Adam's eps is as large as the gradients.

    Why: the update is m / (sqrt(v) + eps). An entry of a gradient of norm 1 over N parameters is 1 / sqrt(N) in size,
      1.2e-5 at 7B; an eps of a tenth of that takes a tenth of every update away, and more where gradients are small.
      The larger the model, the sooner.
    Set: eps to 1e-8; OLMo 2 came down from 1e-5, and its gradient norm settled sooner.
    Sure: supported by measurements of two teams; it slows training rather than breaking it.
    See: OLMo team 2025, 2 OLMo 2 Furious, section 3; Wortsman et al. 2023, Small-scale proxies for large-scale
      Transformer training instabilities.
    """
    typical = (typical_grad_norm or clip or 1.0) / math.sqrt(max(parameters, 1))
    if eps < 0.1 * typical:
        return None
    return RuleFinding("note", f"eps is {eps:g}, an entry of the gradient about {typical:.1e}", "eps", "1e-8")


@OPTIMIZER.rule(margin=True, from_scratch=True)
def decay_too_low(weight_decay: float, optimizer: str = "", decoupled: bool | None = None) -> RuleFinding | None:
    """Hardly any weight decay.

    Why: nothing holds the size of the weights then. Over a long run logits of attention and output grow, softmax
      saturates, gradients fade. Below 0.01 that is as good as none. (Of AdamW and its kind: SGD's decay is another
      number, times a rate a hundred times as large.)
    Set: weight_decay to 0.1.
    Sure: supported for pretraining of many thousand steps; short fine-tuning does not need it.
    See: Loshchilov and Hutter 2019, Decoupled weight decay regularization; Wortsman et al. 2023, Small-scale proxies
      for large-scale Transformer training instabilities, section 3.2.
    """
    if optimizer.lower() in DECAYS_GRADIENTS:
        raise Unknown("decoupled")
    if weight_decay >= 0.01:
        return None
    value = "0.1, with decoupled_weight_decay=True" if optimizer.lower() == "adam" and not decoupled else "0.1"
    return RuleFinding("warning", f"weight decay is {weight_decay:g}", "weight_decay", value)


@OPTIMIZER.rule()
def decay_too_high(weight_decay: float) -> RuleFinding | None:
    """So much weight decay that the model cannot fit.

    Why: weights shrink by lr * decay a step. Above 0.5 that balances gradients at weights too small to fit the data:
      the loss stays high, and norms of weights collapse.
    Set: weight_decay to 0.1.
    Sure: rule of thumb; what counts is the product with the learning rate.
    See: Loshchilov and Hutter 2019, Decoupled weight decay regularization.
    """
    if weight_decay <= 0.5:
        return None
    return RuleFinding("warning", f"weight decay is {weight_decay:g}", "weight_decay", "0.1")


@OPTIMIZER.rule()
def decay_through_the_gradient(optimizer: str, weight_decay: float, decoupled: bool = False) -> RuleFinding | None:
    """Adam's weight decay goes through the gradient.

    Why: added to the gradient, decay is divided by sqrt(v) like everything else: weights with large gradients hardly
      decay, others do. The number means something else than in AdamW, where 0.1 is usual.
    Set: decoupled_weight_decay=True, which torch.optim.Adam takes; the same moments, the same state.
    Sure: established.
    See: Loshchilov and Hutter 2019, Decoupled weight decay regularization.
    """
    if optimizer.lower() != "adam" or decoupled or weight_decay <= 0:
        return None
    return RuleFinding("note", f"Adam with an L2 term of {weight_decay:g}", "decoupled", "true")


@OPTIMIZER.rule(from_scratch=True)
def decay_on_everything(
    weight_decay: float, decays_vectors: bool, decays_embeddings: bool = True
) -> RuleFinding | None:
    """Weight decay pulls at everything alike.

    Why: gains of norms and biases set scales and offsets; pulled to zero, they are held up by gradients alone, and a
      row of the embedding that rarely comes is pulled at every step. One group for all is mostly nobody's choice.
    Set: two groups: decay on matrices, none on what has one dimension.
    Sure: rule of thumb; some decay norms on purpose (OLMo 2 does, and leaves embeddings out).
    See: Brown et al. 2020 (GPT-3) and most code since; OLMo team 2025, 2 OLMo 2 Furious.
    """
    if not (weight_decay > 0 and decays_vectors and decays_embeddings):
        return None
    return RuleFinding(
        "note", "gains of norms and biases decay with all the rest", "decays_vectors", "false: a second group"
    )


@OPTIMIZER.rule(from_scratch=True)
def decayed_embeddings_at_scale(
    decays_embeddings: bool, weight_decay: float, parameters: int, tied_head: bool, embedding_norm: bool = False
) -> RuleFinding | None:
    """Weight decay shrinks the embeddings of a large model.

    Why: the Jacobian of the first norm grows as one over the size of what it reads: embeddings that shrink make the
      gradients of the first layers grow. A tied head holds their size up; here the head is its own matrix.
    Set: no decay on embeddings; or a norm after them.
    Sure: supported by two studies at 7B and below.
    See: Takase et al. 2023, Spike no more; OLMo team 2025, 2 OLMo 2 Furious, section 3.
    """
    at_risk = decays_embeddings and weight_decay > 0 and not tied_head and not embedding_norm
    if not at_risk or parameters < 1e9:
        return None
    found = f"embeddings decay by {weight_decay:g}, {parameters / 1e9:.1f}B parameters, head not tied"
    return RuleFinding("note", found, "decays_embeddings", "false")


@OPTIMIZER.rule(from_scratch=True)
def rate_against_width(lr: float, width: int, mup_base_width: int | None = None) -> RuleFinding | None:
    """The learning rate is too high for this width.

    Why: an update of Adam moves every entry of a matrix by about lr, all in directions that agree with the input, so
      that what the matrix gives moves by about lr * width. Llama 7B and OLMo 2 7B have 1.2, GPT-3 175B 0.7; at 4 a
      single step changes activations by several times their size.
    Set: lr to 1.2 / width or less; or muP, where hidden matrices learn at lr * base / width.
    Sure: rule of thumb from published runs; QK-norm and z-loss allow more.
    See: Yang et al. 2022, Tensor programs V; Wortsman et al. 2023, Small-scale proxies for large-scale Transformer
      training instabilities.
    """
    product = lr * min(width, mup_base_width or width)
    if not product > 4:
        return None
    grade: Grade = "warning" if product < 20 else "error"
    return RuleFinding(grade, f"lr {lr:g} at width {width}: lr * width is {product:.2g}", "lr", f"{1.2 / width:.1g}")


@OPTIMIZER.rule()
def rate_against_batch(
    lr: float, batch_tokens: float, tuned_lr: float, tuned_batch_tokens: float
) -> RuleFinding | None:
    """The learning rate was found for another batch.

    Why: the noise of a gradient falls as the root of the batch. With Adam the rate that keeps a run on the same path
      goes with that root: four times the batch, twice the rate. Kept as it was, a smaller batch is noisier than the
      rate allows.
    Set: lr to tuned_lr * sqrt(batch / tuned batch).
    Sure: supported between batches that are below the critical one; not beyond it.
    See: Malladi et al. 2022, On the SDEs and scaling rules for adaptive gradient algorithms; McCandlish et al. 2018,
      An empirical model of large-batch training.
    """
    wanted = tuned_lr * math.sqrt(batch_tokens / tuned_batch_tokens)
    if not lr > 2 * wanted:
        return None
    found = f"lr {lr:g} for batches of {batch_tokens:g} tokens; {tuned_lr:g} was found with {tuned_batch_tokens:g}"
    return RuleFinding("warning", found, "lr", f"{wanted:.2g}")


@OPTIMIZER.rule()
def moments_too_coarse(moments_dtype: str, beta2: float, stochastic_rounding: bool = False) -> RuleFinding | None:
    """The second moment is kept in numbers that cannot hold it.

    Why: v is a mean of squares. In fp16 the square of a gradient under 2e-4 is 0, and most gradients are. In bf16 a
      change under 2^-8 (0.004) of a number is rounded away, and where gradients fade v falls by 1 - beta2 a step:
      at 0.999 it stands still, too large for ever.
    Set: moments in fp32; or bf16 with beta2 0.95, or with stochastic rounding.
    Sure: established: arithmetic.
    See: Zamirai et al. 2020, Revisiting bfloat16 training; IEEE 754 binary16.
    """
    if moments_dtype == "fp16":
        return RuleFinding("error", "moments are fp16: v is 0 where gradients are under 2e-4", "moments_dtype", "fp32")
    if moments_dtype != "bf16" or stochastic_rounding or 1 - beta2 >= STEP["bf16"]:
        return None
    found = f"moments are bf16, and v falls by {1 - beta2:.1g} a step at most"
    return RuleFinding("error", found, "moments_dtype", "fp32")


@CLIP.rule(margin=True)
def no_clipping(clip: float, clips_updates: bool = False) -> RuleFinding | None:
    """Gradients are not clipped.

    Why: the first line of defence: one batch with a gradient of 100 times the usual norm moves weights, and what Adam
      remembers, 100 times as far. Clipping at the global norm bounds that, and costs healthy steps nothing.
    Set: clip by global norm, 1.0.
    Sure: established; PaLM, Llama and OLMo clip at 1.0.
    See: Pascanu et al. 2013, On the difficulty of training recurrent neural networks; Zhang et al. 2020, Why gradient
      clipping accelerates training.
    """
    if clip > 0 or clips_updates:
        return None
    return RuleFinding("warning", "gradients are not clipped", "clip", "1.0")


@CLIP.rule(margin="CLIP1")
def clip_far_above(clip: float, typical_grad_norm: float | None = None) -> RuleFinding | None:
    """Gradients are clipped so far out that it hardly ever happens.

    Why: gradient norms of language models settle at 0.1 to 1. What clips at 10 times the usual lets updates of 10
      times the usual size through, which is what a spike begins with.
    Set: clip to 1.0, or to two or three times the norm that the run has shown.
    Sure: rule of thumb; the usual norm depends on the loss and on how it is averaged.
    See: Pascanu et al. 2013, On the difficulty of training recurrent neural networks.
    """
    if not clip > 10 * (typical_grad_norm or 1.0):
        return None
    value = f"{max(2 * typical_grad_norm, 1.0):.2g}" if typical_grad_norm else "1.0"
    return RuleFinding("note", f"gradients are clipped at {clip:g}", "clip", value)


@CLIP.rule()
def clips_most_steps(clip: float, typical_grad_norm: float) -> RuleFinding | None:
    """Most gradients are clipped.

    Why: clipped below the usual norm, every step has the same size whatever its gradient, and a clip can no longer
      tell an outlier. 0.5 under a usual norm of 0.6 clips most steps.
    Set: clip to two or three times the norm that the run shows.
    Sure: supported; some clip so hard on purpose, beside a learning rate that is made for it.
    See: Pascanu et al. 2013, On the difficulty of training recurrent neural networks.
    """
    if clip <= 0 or clip > typical_grad_norm:
        return None
    found = f"gradients are clipped at {clip:g}; half of them are above {typical_grad_norm:.3g}"
    return RuleFinding("note", found, "clip", f"{2 * typical_grad_norm:.2g}")


@CLIP.rule()
def clip_by_value_alone(clip_by: str, clip: float) -> RuleFinding | None:
    """Gradients are clipped entry by entry.

    Why: that turns the gradient: large entries are cut, small ones are not, and what is left points elsewhere. It
      bounds an infinite entry, not the size of a step: a million entries of 1 have a norm of 1000.
    Set: clip by global norm, 1.0; by value at 100 beside it, where single entries overflow.
    Sure: supported.
    See: Pascanu et al. 2013, On the difficulty of training recurrent neural networks.
    """
    if clip_by != "value" or clip <= 0:
        return None
    return RuleFinding("note", f"gradients are clipped by value, at {clip:g}", "clip_by", "norm")


@CLIP.rule()
def clips_orthogonalised_update(clips_updates: bool, clip: float | None = None) -> RuleFinding | None:
    """The clip is applied to the update that Muon has orthogonalised.

    Why: an orthogonalised update has a norm that grows with the width, whatever the gradient: 4 at a width of 128 and
      86 at 8192 were measured. A clip at 1.0 divides every step by it, and the learning rate no longer says how far a
      step goes. DeepSpeed does so under ZeRO, and clips at 1.0 where gradient_clipping is left out.
    Set: the clip to 0 there; or clip gradients before the momentum, as torch's clip_grad_norm_ does.
    Sure: established where it is seen: of DeepSpeed's Muon, by the name of its settings or its class. Code of your own
      that clips after the step's update was made cannot be seen, unless the plan says clips_updates.
    See: DeepSpeed issues 7713 and 8439.
    """
    if not clips_updates or clip == 0:
        return None
    found = (
        "the clip is left out, which is 1.0 in DeepSpeed"
        if clip is None
        else f"updates of Muon are clipped at {clip:g}"
    )
    return RuleFinding("error", found, "clip", "0")
