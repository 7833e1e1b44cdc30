"""Rules about the model: where its norms stand, what bounds its logits, how its weights begin."""

import math

from sealegs.preflight_check.rule import Family, RuleFinding
from sealegs.report.commands.preflight import Grade

ARCHITECTURE = Family("ARC", "architecture")
LARGE = 1e9
"""Parameters from which on logits deserve a bound of their own."""
TOO_WIDE = 3.0
"""Times sqrt(1 / (3 width)): published runs of 7B have 2.2, one that was unstable had 4.1."""


@ARCHITECTURE.rule(margin=True, from_scratch=True)
def norms_after_the_sum(norm_position: str, layers: int = 12) -> RuleFinding | None:
    """Norms stand on the residual stream itself.

    Why: then no path leads from the loss to the first layers without passing every norm, and at the start gradients of
      the last layers are large and those of the first fade: the warm-up must be long, and stacks of about 48 layers
      diverge.
    Set: pre-norm: x + f(norm(x)), and a norm after the last layer.
    Sure: established.
    See: Xiong et al. 2020, On layer normalization in the Transformer architecture; Wang et al. 2019, Learning deep
      Transformer models for machine translation.
    """
    if norm_position != "post":
        return None
    grade: Grade = "error" if layers >= 48 else "warning" if layers >= 12 else "note"
    return RuleFinding(grade, f"post-norm, {layers} layers", "norm_position", "pre")


@ARCHITECTURE.rule(margin=True)
def norm_divides_by_zero(norm_eps: float, dtype: str = "fp32") -> RuleFinding | None:
    """A norm can divide by zero.

    Why: a row of zeros (padding, a dead layer) has a variance of 0, and without eps a norm gives 0 / 0 = NaN. In fp16
      an eps under 6e-8 is 0 too.
    Set: norm_eps to 1e-6 or 1e-5.
    Sure: established: arithmetic.
    See: Zhang and Sennrich 2019, Root mean square layer normalization.
    """
    if norm_eps > (6e-8 if dtype == "fp16" else 0.0):
        return None
    return RuleFinding("error", f"norms add {norm_eps:g}", "norm_eps", "1e-6")


@ARCHITECTURE.rule(margin=True, from_scratch=True)
def attention_logits_unbounded(parameters: int, qk_norm: bool, attention_softcap: float = 0.0) -> RuleFinding | None:
    """Nothing bounds the attention logits of a large model.

    Why: queries and keys grow together, their product with the square; attention collapses onto one token, its entropy
      goes to zero and the loss diverges. The higher the rate and the larger the model, the sooner.
    Set: QK-norm: a norm on queries and keys before they are multiplied.
    Sure: supported; a run at a moderate rate goes through without (Llama 7B to 70B did).
    See: Dehghani et al. 2023, Scaling vision Transformers to 22 billion parameters; Wortsman et al. 2023, Small-scale
      proxies for large-scale Transformer training instabilities, section 3.1.
    """
    if parameters < LARGE or qk_norm or attention_softcap > 0:
        return None
    return RuleFinding("note", f"{parameters / 1e9:.1f}B parameters without QK-norm", "qk_norm", "true")


@ARCHITECTURE.rule(margin=True, from_scratch=True)
def output_logits_unbounded(parameters: int, z_loss: float, logit_softcap: float = 0.0) -> RuleFinding | None:
    """Nothing bounds the output logits of a large model.

    Why: softmax does not see a constant that is added to all logits, so nothing keeps it from drifting; in bf16 a logit
      of 100 is known to 0.5. The loss then rises late in training.
    Set: z_loss to 1e-4 (PaLM) or 1e-5 (OLMo 2): that factor on the squared log of softmax's denominator.
    Sure: supported; large runs went through without (Llama).
    See: Chowdhery et al. 2022 (PaLM), section 5; Wortsman et al. 2023, Small-scale proxies for large-scale Transformer
      training instabilities, section 3.1.
    """
    if parameters < LARGE or z_loss > 0 or logit_softcap > 0:
        return None
    return RuleFinding("note", f"{parameters / 1e9:.1f}B parameters without z-loss", "z_loss", "1e-4")


@ARCHITECTURE.rule(margin=True, from_scratch=True)
def init_too_wide(init_std: float, width: int, widest_tensor: str = "the widest") -> RuleFinding | None:
    """Initial weights are too wide for this width.

    Why: what a matrix gives has a variance of width * std^2: a default of 0.02, made for widths about 1000, gives 5.7
      instead of 0.33 at 14336. A run of 104B parameters could not be held until it was 0.00482.
    Set: init_std to sqrt(1 / (3 width)).
    Sure: supported by public logbooks; from about three times on.
    See: Smith et al. 2022 (Megatron-Turing NLG 530B); Bekman, Machine learning engineering open book, on
      initialisation.
    """
    wanted = math.sqrt(1 / (3 * width))
    if not init_std > TOO_WIDE * wanted:
        return None
    grade: Grade = "error" if init_std > 10 * TOO_WIDE * wanted else "warning"
    found = f"std {init_std:.3g} at width {width} ({widest_tensor}): {init_std / wanted:.1f} times {wanted:.3g}"
    return RuleFinding(grade, found, "init_std", f"{wanted:.3g}")


@ARCHITECTURE.rule(from_scratch=True)
def logits_begin_wide(initial_logit_std: float, vocabulary: int) -> RuleFinding | None:
    """The model begins with strong opinions.

    Why: before the first step no token is known to be likelier: the loss should be ln(vocabulary). Logits with a spread
      of s begin about s^2 / 2 above it, and the first gradients do nothing but take that back. A head that is tied to
      an embedding with torch's default std of 1 is the usual reason.
    Set: the initial std of the head, or of the embedding it is tied to, to sqrt(1 / (3 width)).
    Sure: established.
    See: Press and Wolf 2017, Using the output embedding to improve language models.
    """
    if not initial_logit_std > 3:
        return None
    expected = math.log(vocabulary)
    found = (
        f"logits have a std of {initial_logit_std:.3g} before the first step: a loss of about "
        f"{expected + initial_logit_std**2 / 2:.3g} instead of {expected:.3g}"
    )
    return RuleFinding("warning", found, "init_std", "of the head: sqrt(1 / (3 width))")


@ARCHITECTURE.rule(from_scratch=True)
def residual_grows_with_depth(layers: int, narrowed_residual: bool, norm_position: str = "pre") -> RuleFinding | None:
    """In a deep stack nothing is narrowed by the depth.

    Why: every layer adds to the residual stream; with n layers its variance at the start is n times as large, and the
      last layers add little to it. GPT-2 divides the std of what writes into it by sqrt(2 layers).
    Set: the std of output projections of attention and MLP divided by sqrt(2 layers).
    Sure: rule of thumb, for 48 layers and more.
    See: Radford et al. 2019 (GPT-2), section 2.3.
    """
    if layers < 48 or narrowed_residual or norm_position != "pre":
        return None
    value = f"std / {math.sqrt(2 * layers):.3g} where layers write"
    return RuleFinding("note", f"{layers} layers, all with the same std", "narrowed_residual", value)


@ARCHITECTURE.rule(from_scratch=True)
def no_final_norm(norm_position: str, final_norm: bool) -> RuleFinding | None:
    """No norm between the last layer and the head.

    Why: with pre-norm nothing inside the layers bounds the residual stream: it grows with the depth and over training,
      and logits with it.
    Set: a norm after the last layer.
    Sure: established.
    See: Xiong et al. 2020, On layer normalization in the Transformer architecture.
    """
    if norm_position != "pre" or final_norm:
        return None
    return RuleFinding("warning", "pre-norm, and the head reads the residual stream as it is", "final_norm", "true")


@ARCHITECTURE.rule()
def softcap_on_the_wrong_level(misplaced_softcap: float, logit_softcap: float = 0.0) -> RuleFinding | None:
    """A soft-cap of logits stands where the model does not read it.

    Why: in configurations that nest (`text_config`) the model reads its own level. A soft-cap on the other is silently
      none: logits are not bounded, though the file says so.
    Set: final_logit_softcapping inside text_config.
    Sure: established for nested Hugging Face configurations.
    See: Riviere et al. 2024 (Gemma 2), section 2, for what the cap is.
    """
    if misplaced_softcap == logit_softcap:
        return None
    found = f"{misplaced_softcap:g} on the outer level, {logit_softcap:g} where it is read"
    return RuleFinding("warning", found, "logit_softcap", f"{misplaced_softcap:g} on the inner level")


@ARCHITECTURE.rule()
def softcap_that_the_kernel_skips(attention_softcap: float, attention_kernel: str) -> RuleFinding | None:
    """The attention kernel leaves the soft-cap out.

    Why: scaled_dot_product_attention has no soft-cap: with it attention logits are not bounded, and the model is
      another one than it was trained as.
    Set: attn_implementation to eager, flex_attention, or a FlashAttention that takes softcap.
    Sure: established for torch's own kernel.
    See: Riviere et al. 2024 (Gemma 2), section 2; the documentation of
      torch.nn.functional.scaled_dot_product_attention.
    """
    if attention_softcap <= 0 or attention_kernel != "sdpa":
        return None
    return RuleFinding("warning", f"a cap of {attention_softcap:g}, and sdpa", "attention_kernel", "eager")
