"""The name and the values of a column in, what it can be out: what it measures, on which scale, and which way is worse.

A name says what is measured, by its words; the values say on which scale. What neither tells is not understood.
"""

import re
from functools import lru_cache
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sealegs.diagnosis.curve.loss_curve import Floats

Nature: TypeAlias = Literal[
    "level",
    "weights",
    "loss",
    "error",
    "score",
    "spread",
    "rate",
    "cost",
    "trouble",
    "open",
    "schedule",
    "clock",
    "judged elsewhere",
    "unknown",
]
"""What a column measures:

``level``    a norm, a size, a logit: positive, and worse the higher
``weights``  a norm of weights or updates: it moves while anything is learned
``loss``     a part of the loss, or the loss of a source
``error``    how wrong the model is on held-out data
``score``    how right it is
``spread``   an entropy, a variance, a divergence: of no use where it is nothing
``rate``     how fast the run goes
``cost``     what a step takes, in time or memory
``trouble``  how many or what share of something that should not be
``open``     a statistic of which neither way is worse
"""

JUDGED = ("level", "weights", "loss", "error", "score", "spread", "rate", "cost", "trouble", "open")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z][a-z])")
HELD_OUT = _words("val valid validation eval test dev evaluation holdout heldout predict")
"""Words of names of what is measured on data that is not trained on."""
_SCHEDULE = _words(
    "lr rate learning momentum beta betas coef coefs coeff coefficient weighting lambda epsilon alpha temperature temp "
    "decay schedule warmup anneal annealing exploration threshold limit target config cfg args hparams budget ramp "
    "curriculum seqlen teacher clip_range factor every interval patience capacity gamma tau num_experts top_k"
)
_CLOCK = _words(
    "epoch epochs step steps iteration iterations iter iters update updates consumed seen total cumulative elapsed eta "
    "remaining wall walltime timestamp date datetime clock progress percentage percent flops flos runtime index idx id "
    "hash seed rank worker pid version start begin best num number n batches episodes timesteps duration"
)
_RATE = re.compile(
    r"(?:.*_)?(?:throughput|tflops?|mfu|hfu|wps|ups|tps|fps|sps|it_s|its_s|samples_s|images_s|tok_s|tokens_s"
    r"|(?:tokens|samples|images|steps|its|iters|iterations|words|examples|seqs|sequences|frames|batches|updates|tok)"
    r"_(?:per|a)_(?:s|sec|second|gpu)(?:_.*)?|per_second|samples_per_second|speed)(?:_.*)?"
)
_COST = re.compile(
    r"(?:.*_)?(?:time|times|seconds|secs|ms|msec|latency|mem|memory|gib|gb|mib|mb|allocated|reserved|vram|rss|wait)(?:_.*)?"
)
_TROUBLE = _words(
    "skipped skip skips nan nans inf infs nonfinite overflow overflows underflow underflows dead dying dropped drop "
    "retries retry timeouts timeout failed failures fails faults ecc xid corrupt invalid saturated zeroed zeros stale "
    "oom mismatch mismatched straggler stragglers duplicates duplicated repeated rejected"
)
_SCORE = re.compile(
    r"(?:.*_)?(?:acc|accs|accuracy|accuracies|map|map_?[0-9_]+|mean_average_precision|ap|precision|recall|f1|fscore"
    r"|bleu|rouge|rouge_?[12l]|meteor|iou|miou|dice|psnr|ssim|auc|auroc|r2|spearman|pearson|corr|correlation|success"
    r"|win|winrate|win_rate|score|scores|top_?[15]|hit|hits|mrr|ndcg|exact_match|em|pass|correct|solved)(?:_.*)?"
)
_ERROR = re.compile(
    r"(?:.*_)?(?:wer|cer|mae|mse|rmse|ppl|perplexity|bpb|bpc|bpd|fid|error|errors|err|nll|ece|lpips)(?:_.*)?"
)
_LOSS = re.compile(r"(?:.*_)?(?:\w*loss|losses|xent|crossentropy|elbo|penalty|objective|nll|ce|aux|zloss)(?:_.*)?")
_WEIGHTS = re.compile(
    r"(?:.*_)?(?:params?|parameters?|weights?|wnorm|lora|adapter|update|updates|delta)(?:_.*)?_?"
    r"(?:norms?|rms|l2|magnitude|checksum|ratio|mean_abs|std)?(?:_.*)?"
)
_SIZE = re.compile(
    r"(?:.*_)?(?:norms?|gnorm|gradnorm|rms|l2|magnitude|absmax|abs_max|amax|maxabs|logits?|activations?|moments?"
    r"|spectral|singular|sharpness|curvature|trace|hessian|eigenvalue|exp_avg|exp_avg_sq|z)(?:_.*)?"
)
_SPREAD = re.compile(
    r"(?:.*_)?(?:entropy|entropies|std|stds|stddev|var|variance|diversity|novelty|kl|kld|effective_rank|erank|usage"
    r"|utili[sz]ation|perplexity_of_codes|codebook_perplexity|active_units)(?:_.*)?"
)
_ELSEWHERE = _words("loss lr loss_scale reward eval_reward time")


def words_of(name: str) -> list[str]:
    """The words of a name, in lower case: ``val/meanIoU`` is ``val mean iou``."""
    return [word for word in re.split(r"[^a-z0-9]+", _CAMEL.sub("_", name).lower()) if word]


@lru_cache(maxsize=50_000)
def nature_of(name: str) -> Nature:
    """What a column of this name measures.

    >>> nature_of("optim/total_grad_norm"), nature_of("train/ZLoss"), nature_of("metrics/mAP50(B)")
    ('level', 'loss', 'score')
    >>> nature_of("test-3px-error-r2"), nature_of("eval/accuracy"), nature_of("loss_of_source/web")
    ('error', 'score', 'loss')
    >>> nature_of("max_attn_logits"), nature_of("lora_B_norm"), nature_of("consumed samples"), nature_of("foo")
    ('level', 'weights', 'clock', 'unknown')
    """
    family = name.partition("/")[0]
    if name in _ELSEWHERE or family in (
        "batch_index",
        "batch_hash",
        "params_finite",
        "grads_finite",
        "announced",
        "clip_norm",
    ):
        return "judged elsewhere"
    words = words_of(name)
    text, known = "_".join(words), set(words)
    if not words:
        return "unknown"
    if _RATE.fullmatch(text):
        return "rate"
    if _COST.fullmatch(text) and not known & {"total", "elapsed", "remaining", "wall", "train", "eta", "runtime"}:
        return "cost"
    if known & _TROUBLE:
        return "trouble"
    if "coef" in known or "clip" in known or words[-1] in ("lr", "weight", "every", "limit", "threshold"):
        return "schedule"
    if known & {"kl", "kld"}:
        return "spread"
    is_size, is_spread = _SIZE.fullmatch(text) is not None, _SPREAD.fullmatch(text) is not None
    if _WEIGHTS.fullmatch(text) and (is_size or known & {"checksum", "ratio", "rms"}):
        return "weights"
    if _LOSS.fullmatch(text):
        return "error" if known & HELD_OUT else "loss"
    if is_size and not is_spread:
        return "level"
    if is_spread:
        return "spread"
    if _ERROR.fullmatch(text):
        return "error" if known & HELD_OUT else "loss"
    if _SCORE.fullmatch(text):
        return "score"
    if known & _SCHEDULE:
        return "schedule"
    return "clock" if known & _CLOCK else "unknown"


def is_clock(values: Floats) -> bool:
    """Whether values only go one way, as a clock, a counter or what is left of one does.

    >>> is_clock(np.arange(20.0)), is_clock(np.arange(20.0) ** 2 % 7)
    (True, False)
    """
    change = np.diff(values)
    return len(values) > 2 and bool((change >= 0).all() or (change <= 0).all()) and bool((change != 0).mean() > 0.9)


def is_share(values: Floats) -> bool:
    """Whether all values are between 0 and 1."""
    return bool(values.min() >= 0 and values.max() <= 1)


def is_whole(values: NDArray[np.float64]) -> bool:
    """Whether all values are whole numbers, as counts are."""
    return bool((values == np.round(values)).all())
