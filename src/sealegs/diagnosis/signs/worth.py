"""What a sign is worth as evidence: which signal it is read off, and whether it says what happened or why.

Two signs off one signal are one observation. A generic sign is a symptom that many causes have: a gradient that is
many times the usual, a loss that leaps about the peak of the learning rate, a setting that healthy runs have, too.
"""

from collections.abc import Mapping

SOURCES: Mapping[str, str] = {
    "loss": "back-at-once burst-of-rows goes-on-rising heals-slowly is-young leaps-recur came-suddenly "
    "forward-breaks nonfinite-stays nonfinite-passes nonfinite-from-the-start nonfinite-before-any-update "
    "loss-infinite "
    "leaps-with-resume leaps-after-resume goes-on-from-earlier flat-from-the-start stuck-at-uniform "
    "back-at-the-start back-for-long exactly-zero multiple-of-uniform level-shifts is-flat loss-hovers "
    "ends-next-to-nothing comes-in-turns "
    "loss-turns-with-lr lower-after-resume lower-after-each-resume starts-above-uniform starts-far-above-uniform "
    "metric-doubtful",
    "gradient norm": "gradient-many-fold gradient-calm gradient-as-before gradient-ramps gradient-alone gradients-grow "
    "gradients-vanish gradient-first loss-first gradients-overflow zero-loss-without-gradient loss-of-nothing "
    "zero-loss-zero-gradient gradient-climbs-before climbs-with-gradients calibrates-again scaled-by-whole-number",
    "epochs": "falls-by-epochs",
    "gradients by group": "infinite-in-embedding",
    "gradients by rank": "one-rank-stands-out one-rank-leaps-alone",
    "learning rate": "lr-jumps lr-smooth lr-restarts lr-not-restored lr-rises lr-rises-throughout "
    "lr-rises-as-a-cosine lr-falls-then-rises lr-near-peak lr-ends-early warm-up-outlasts-the-run no-warm-up "
    "warm-up-begins-again rate-is-tiny warmup-just-over step-size-jumps",
    "updates": "updates-leap updates-outgrow",
    "moments": "moments-dropped moments-kept second-moment-leaps",
    "weights": "weights-stand-still weights-grow weights-shrink weights-halved weights-leap weights-grow-on "
    "weight-breaks-first weight-breaks-alone nonfinite-at-sound-weights",
    "weights of the other groups": "one-group-leaps",
    "computations of other ranks": "computed-wrongly",
    "weights by rank": "ranks-differ copies-part",
    "activations": "activations-grow activation-near-limit activation-vanishes embedding-stands-out",
    "output logits": "output-logits-grow",
    "attention logits": "attention-logits-grow logits-over-exp",
    "tokens": "few-tokens-dear all-tokens-dear entropy-low entropy-high entropy-usual",
    "batches": "batch-repeats batches-differ data-begins-again data-not-restored same-batch-harmless "
    "same-batch-bad-again same-batch-other-loss finite-again",
    "sources of the data": "sources-change one-source",
    "held-out loss": "eval-flat eval-flat-meanwhile eval-rises eval-turns eval-plateau eval-flat-at-resumes "
    "train-is-multiple-of-eval train-in-bits held-out-turns",
    "loss scale": "scale-begins-again scale-falls scale-collapsed scale-is-high scale-moves scale-stands-still",
    "lost gradients": "gradients-underflow",
    "settings": "beta2-long beta2-short clip-off decay-high decay-low eps-zero init-wide log-loss-naive "
    "log-loss-sound softmax-naive post-norm-deep muon-is-clipped no-fixed-beta2 is-fp16 is-not-fp16 settings-change "
    "infinite-norm-clipped multiple-is-the-accumulation multiple-by-the-settings rate-above-its-setting",
    "resume": "resumed-before parts-restored versions-change",
    "reward": "reward-falls reward-flat reward-rises reward-logged groups-without-spread nothing-to-learn",
    "held-out reward": "held-out-reward-falls",
    "policy entropy": "entropy-vanishes entropy-explodes",
    "divergence": "kl-leaps",
    "sampler": "sampler-apart",
    "importance ratios": "clip-saturates",
    "completions": "length-collapses length-leaps completions-cut cut-and-rewarded",
    "critic": "critic-explains-nothing critic-blows-up",
    "pairs": "preference-lost pairs-by-heart",
    "likelihood of the preferred": "preferred-becomes-unlikely",
    "expert loads": "router-collapses experts-die",
    "balance loss": "balance-loss-grows",
    "router": "router-entropy-vanishes router-logits-grow",
    "range of values": "values-saturate values-vanish",
    "scale of tensors": "scale-of-zero amax-broken amax-stuck",
    "two networks": "discriminator-wins",
}
"""The signs that are read off each signal, beside the loss that says where to look."""

SYMPTOMS = (
    "loss-infinite forward-breaks "
    "ends-next-to-nothing back-at-once goes-on-rising heals-slowly is-young leaps-recur came-suddenly level-shifts "
    "nonfinite-stays nonfinite-passes nonfinite-from-the-start is-flat flat-from-the-start back-at-the-start "
    "leaps-with-resume leaps-after-resume lower-after-resume resumed-before parts-restored gradient-many-fold "
    "gradient-calm gradient-ramps gradients-grow gradients-vanish gradient-first loss-first gradient-climbs-before "
    "climbs-with-gradients activations-grow batches-differ lr-smooth lr-near-peak lr-rises eval-rises "
    "settings-change entropy-usual beta2-long clip-off decay-low init-wide is-fp16 is-not-fp16 muon-is-clipped "
    "one-source no-warm-up rate-is-tiny reward-falls reward-flat reward-rises reward-logged groups-without-spread "
    "clip-saturates entropy-explodes length-leaps balance-loss-grows router-entropy-vanishes preference-lost"
)
"""Signs that say what happened, or what healthy runs have, too: none of them points at one cause."""

GENERIC = frozenset(SYMPTOMS.split())
_SOURCE_OF = {name: source for source, names in SOURCES.items() for name in names.split()}


def source_of(sign: str) -> str:
    """The signal that a sign is read off: two signs of one source are one observation."""
    return _SOURCE_OF[sign]
