"""Rules about the number formats of a run."""

from sealegs.preflight_check.rule import Family, RuleFinding, Unknown
from sealegs.preflight_check.rules_optimizer import STEP
from sealegs.preflight_check.schedule import RateCurve
from sealegs.report.commands.preflight import Grade

PRECISION = Family("PRC", "precision")
MOVED = 0.5
"""Share of the weights with a gradient that a step must change, or most of it is lost."""
EXP_OVERFLOWS = {"fp16": 11.1, "bf16": 88.7, "fp32": 88.7}
"""The logit from which on its exponential is infinite."""


@PRECISION.rule(margin=True)
def fp16_without_scaler(dtype: str, scaler: bool) -> RuleFinding | None:
    """fp16 without a loss scaler.

    Why: fp16 ends at 65504 and begins at 6e-8. Without a scale many gradients of a Transformer are below that and
      become 0: parts of the model stop learning, without a sign of it.
    Set: a GradScaler; or bf16, which has the range of fp32 and needs none.
    Sure: established.
    See: Micikevicius et al. 2018, Mixed precision training, section 3.2.
    """
    if dtype != "fp16" or scaler:
        return None
    return RuleFinding("error", "fp16, and no loss scaler", "scaler", "true (torch.amp.GradScaler); or dtype bf16")


@PRECISION.rule()
def scaler_without_fp16(dtype: str, scaler: bool) -> RuleFinding | None:
    """A loss scaler where none is needed.

    Why: bf16 and fp32 reach from 1e-38 to 3e38. There a scale saves nothing from underflow, and growing by two every
      2000 steps it is one more thing that can overflow and skip steps.
    Set: no scaler.
    Sure: established.
    See: Kalamkar et al. 2019, A study of bfloat16 for deep learning training.
    """
    if not scaler or dtype not in ("bf16", "fp32", "tf32"):
        return None
    return RuleFinding("warning", f"a loss scaler with {dtype}", "scaler", "false")


@PRECISION.rule()
def static_loss_scale(dtype: str, static_scale: float) -> RuleFinding | None:
    """A loss scale that never changes.

    Why: gradients shrink and grow over a run. A scale that fits at the beginning overflows at the first spike, and
      without a check it is infinite gradients that reach the weights; later it lets small ones underflow.
    Set: dynamic loss scaling: halve at an overflow, double after 2000 steps without.
    Sure: established.
    See: Micikevicius et al. 2018, Mixed precision training, section 3.2.
    """
    if dtype != "fp16" or static_scale <= 0:
        return None
    return RuleFinding("warning", f"a loss scale of {static_scale:g} for ever", "static_scale", "none: a dynamic one")


@PRECISION.rule(margin=True)
def updates_are_rounded_away(
    weights_dtype: str,
    lr: float | None = None,
    init_std: float | None = None,
    curve: RateCurve | None = None,
    stochastic_rounding: bool = False,
    moved_share: float | None = None,
) -> RuleFinding | None:
    """Weights are kept in numbers too coarse for their updates.

    Why: a weight in bf16 keeps 8 bits: what is added is lost where it is under 2^-8 (0.004) of the weight, in fp16
      under 2^-11. An update of Adam is about lr, a weight about 0.02: at 3e-5 the share is 0.0015, and most updates do
      nothing. It looks like a run that has converged.
    Set: fp32 master weights: weights in fp32 with autocast, or an optimizer that keeps an fp32 copy.
    Sure: established: arithmetic; larger steps are lost in part.
    See: Zamirai et al. 2020, Revisiting bfloat16 training; Micikevicius et al. 2018, Mixed precision training,
      section 3.1.
    """
    if weights_dtype not in STEP or stochastic_rounding:
        return None
    if moved_share is not None:  # a step of the largest size was tried: smaller ones move fewer
        tried: Grade = "error" if moved_share < MOVED else "warning"
        found = f"weights are updated in {weights_dtype}: a step changes {moved_share:.0%} of those with a gradient"
        return RuleFinding(tried, found, "weights_dtype", "fp32, beside autocast")
    if lr is None:
        found = f"weights are updated in {weights_dtype}: updates under {STEP[weights_dtype]:.2g} of a weight are lost"
        return RuleFinding("warning", found, "weights_dtype", "fp32, beside autocast")
    size = init_std or 0.02
    step, last = STEP[weights_dtype], curve.rates[-1] if curve else lr
    grade: Grade = "error" if lr / size < step else "warning"
    found = (
        f"weights are updated in {weights_dtype}: an update is {lr / size:.2g} of a weight of {size:.2g} at the peak "
        f"and {last / size:.2g} at the end; under {step:.2g} it is lost"
    )
    return RuleFinding(grade, found, "weights_dtype", "fp32, beside autocast")


@PRECISION.rule(margin=True)
def softmax_overflows(
    dtype: str = "fp32", naive_softmax: bool | None = None, softmax_dtype: str | None = None
) -> RuleFinding | None:
    """A softmax that can overflow, or is too coarse.

    Why: exp overflows at 88.7 in fp32 and bf16 and at 11.1 in fp16; inf / inf is NaN. With the maximum subtracted the
      largest exponent is 0. In bf16 the sum of some thousand terms keeps two digits, and attention with it.
    Set: torch's softmax or scaled_dot_product_attention, which subtract the maximum, with the sum in fp32.
    Sure: established: arithmetic.
    See: Goodfellow, Bengio and Courville 2016, Deep learning, section 4.1; Dao et al. 2022, FlashAttention.
    """
    if naive_softmax is None and softmax_dtype is None:
        raise Unknown("naive_softmax")
    if naive_softmax:
        limit = EXP_OVERFLOWS.get(softmax_dtype or dtype, 88.7)
        return RuleFinding("error", f"no maximum is subtracted: logits of {limit:g} overflow", "naive_softmax", "false")
    if softmax_dtype in ("bf16", "fp16"):
        return RuleFinding("warning", f"softmax is computed in {softmax_dtype}", "softmax_dtype", "fp32")
    return None


@PRECISION.rule(margin=True)
def log_of_zero(naive_log_loss: bool) -> RuleFinding | None:
    """The loss takes the logarithm of a probability that can be zero.

    Why: exp(-104) is 0 in fp32, and log(0) is -inf: one token that the model is sure not to come makes the loss
      infinite. log_softmax has no such limit.
    Set: log_softmax, or cross_entropy on logits.
    Sure: established: arithmetic.
    See: Goodfellow, Bengio and Courville 2016, Deep learning, section 4.1.
    """
    return RuleFinding("error", "the loss is log(softmax(x))", "naive_log_loss", "false") if naive_log_loss else None


@PRECISION.rule()
def gradients_added_coarsely(gradient_dtype: str, addends: int) -> RuleFinding | None:
    """Gradients are added up in numbers too coarse for so many of them.

    Why: the sum of n equal terms in bf16 stops growing when a term is under 2^-8 of it, at the latest after 256 of
      them, and loses digits long before. Micro-batches times ranks is n.
    Set: fp32 for accumulation and for the reduction across ranks.
    Sure: established from some hundred terms on; at a few it costs little.
    See: Smith et al. 2022 (Megatron-Turing NLG 530B) and Le Scao et al. 2022 (BLOOM), which add up in fp32.
    """
    if gradient_dtype not in STEP or addends < 32:
        return None
    grade: Grade = "warning" if addends >= 1 / STEP[gradient_dtype] else "note"
    return RuleFinding(grade, f"{addends} gradients are added in {gradient_dtype}", "gradient_dtype", "fp32")


@PRECISION.rule()
def fp8_gradients_out_of_range(dtype: str, fp8_gradients: str) -> RuleFinding | None:
    """fp8 gradients in the format of the forward pass.

    Why: e4m3 ends at 448 and begins at 0.002: 18 powers of two. Gradients span more; e5m2 reaches from 1.5e-5 to 57344.
    Set: e4m3 forward, e5m2 backward, each with a scale of its own.
    Sure: established as a recipe; finer scaling, a block at a time, allows e4m3 for both.
    See: Micikevicius et al. 2022, FP8 formats for deep learning.
    """
    if dtype != "fp8" or fp8_gradients != "e4m3":
        return None
    return RuleFinding("note", "gradients are e4m3", "fp8_gradients", "e5m2; or scales for each block")


@PRECISION.rule()
def fp8_with_gated_mlp(dtype: str, gated_mlp: bool, steps: int, batch_tokens: float) -> RuleFinding | None:
    """fp8 with SwiGLU over very many tokens.

    Why: the two projections that SwiGLU multiplies align late in training; their product then has outliers beyond what
      delayed scaling foresees. A run diverged after some 200 billion tokens for that.
    Set: the product before the down-projection in bf16, or a smooth scale for each of its channels.
    Sure: supported by one study of runs of 2 trillion tokens.
    See: Fishman et al. 2024, Scaling FP8 training to trillion-token LLMs.
    """
    tokens = steps * batch_tokens
    if dtype != "fp8" or not gated_mlp or tokens < 2e11:
        return None
    return RuleFinding("note", f"fp8, SwiGLU, {tokens:.1g} tokens", "the input of the down-projection", "bf16")


@PRECISION.rule()
def fp16_at_scale(dtype: str, parameters: int) -> RuleFinding | None:
    """fp16 for a large model.

    Why: activations of large models pass 65504, and no loss scale helps there: it scales gradients, not the forward
      pass. fp16 was one of two obstacles on which a run of 104B parameters failed; in bf16 a larger one went through.
    Set: bf16, on hardware that has it.
    Sure: supported by public logbooks.
    See: Bekman, Machine learning engineering open book, on the 104B run before BLOOM; Le Scao et al. 2022 (BLOOM).
    """
    if dtype != "fp16" or parameters < 1e9:
        return None
    return RuleFinding("note", f"fp16 at {parameters / 1e9:.1f}B parameters", "dtype", "bf16")
