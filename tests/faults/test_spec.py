"""Text in, Faults out, and back."""

import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sealegs.errors import ConfigError
from sealegs.faults.contract import Fault
from sealegs.faults.data import (
    DataFault,
    DuplicateBatch,
    EncodingJunk,
    MaskedLabels,
    PermutedVocabulary,
    PoisonedSource,
    RandomShard,
    RareTokens,
    RepeatedNgram,
    ReplayedBatches,
    ShiftedLabels,
)
from sealegs.faults.live import (
    ActivationScale,
    Bf16Weights,
    BitFlip,
    Fp16Overflow,
    FrozenMoment2,
    GradientScale,
    InfGradient,
    LiveFault,
    LrSpike,
    MissingZeroGrad,
    MomentsReset,
    NanGradient,
    RecurringFault,
    RouterBias,
    ScalerOff,
    SkippedAllReduce,
    StuckScale,
    WarmupLost,
    WeightScale,
    WrongBetas,
)
from sealegs.faults.reward import ConstantReward, EntropyPenalty, HackedReward, NoisySampler
from sealegs.faults.spec import KINDS, parse

COUNTS = st.integers(0, 10**18 - 1)
FROM_1 = st.integers(1, 10**18 - 1)
ANY = {"step": COUNTS, "rank": st.none() | COUNTS}
LIVE = ANY | {"steps": FROM_1, "placebo": st.sampled_from(["no", "yes"])}
TENSOR = st.none() | st.text(min_size=1).filter(lambda name: "," not in name)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**300), 10**300)
FACTORS = NUMBERS.filter(lambda factor: factor != 1)
POSITIVE = FACTORS.filter(lambda factor: factor > 0)
ELEMENT = LIVE | {"tensor": TENSOR, "seed": COUNTS}
BETAS = st.floats(0, 1, exclude_max=True)
DATA = ANY | {"placebo": st.sampled_from(["no", "yes"])}
BATCHES = DATA | {"batches": FROM_1}
FIELDS: dict[type[Fault], dict[str, st.SearchStrategy[Any]]] = {
    NanGradient: ELEMENT,
    InfGradient: ELEMENT,
    BitFlip: ELEMENT | {"in_": st.sampled_from(["gradient", "weight", "moment1", "moment2"])},
    GradientScale: LIVE | {"tensor": TENSOR, "factor": FACTORS},
    WeightScale: LIVE
    | {"tensor": TENSOR, "factor": FACTORS}
    | {"rows": st.none() | st.fractions(0, 1, max_denominator=10**9 - 1).filter(lambda share: 0 < share < 1)},
    LrSpike: LIVE | {"factor": POSITIVE, "log": st.sampled_from(["hides", "shows"])},
    MomentsReset: LIVE | {"in_": st.sampled_from(["both", "moment1", "moment2"])},
    FrozenMoment2: LIVE,
    WrongBetas: LIVE | {"beta1": st.none() | BETAS, "beta2": BETAS},
    WarmupLost: LIVE,
    ScalerOff: LIVE | {"tensor": TENSOR},
    Bf16Weights: LIVE,
    Fp16Overflow: LIVE | {"module": TENSOR, "factor": POSITIVE},
    ActivationScale: LIVE | {"module": TENSOR.filter(lambda name: name is not None), "factor": FACTORS},
    RouterBias: LIVE
    | {"amount": NUMBERS.filter(lambda amount: amount != 0)}
    | {"expert": COUNTS, "experts": FROM_1, "module": TENSOR},
    StuckScale: LIVE | {"module": TENSOR, "factor": NUMBERS.filter(lambda factor: factor > 0)},
    MissingZeroGrad: LIVE,
    SkippedAllReduce: LIVE | {"rank": COUNTS},
    RandomShard: BATCHES | {"seed": COUNTS},
    RareTokens: BATCHES | {"seed": COUNTS},
    ShiftedLabels: BATCHES,
    MaskedLabels: BATCHES,
    DuplicateBatch: DATA | {"batches": st.integers(2, 10**18 - 1)},
    PoisonedSource: DATA | {"seed": COUNTS, "source": TENSOR.filter(lambda name: name is not None)},
    RepeatedNgram: BATCHES | {"seed": COUNTS, "length": st.integers(1, 13)},
    PermutedVocabulary: BATCHES | {"seed": COUNTS},
    EncodingJunk: BATCHES | {"seed": COUNTS},
    EntropyPenalty: LIVE | {"weight": NUMBERS.filter(lambda weight: weight > 0)},
    ConstantReward: LIVE | {"value": NUMBERS},
    HackedReward: LIVE
    | {"weight": NUMBERS.filter(lambda weight: weight > 0), "pays": st.sampled_from(["length", "repetition"])},
    NoisySampler: LIVE | {"noise": NUMBERS.filter(lambda noise: noise > 0), "seed": COUNTS},
    ReplayedBatches: BATCHES | {"step": st.integers(2**32, 10**18 - 1), "back": st.integers(1, 2**32)},
}


def recurring(fault: Fault) -> st.SearchStrategy[Fault]:
    """The fault, or the same coming again and again, where it can."""
    if not isinstance(fault, RecurringFault):
        return st.just(fault)
    every = st.integers(fault.steps, 10**18 - 1)
    return st.just(fault) | st.builds(
        lambda every, times: replace(fault, every=every, times=times), every, st.none() | FROM_1
    )


FLIP_IN_A_MODULE = st.builds(BitFlip, in_=st.just("activation"), module=TENSOR, **LIVE, seed=COUNTS)
FAULTS = st.one_of(FLIP_IN_A_MODULE, *(st.builds(kind, **values) for kind, values in FIELDS.items())).flatmap(recurring)


def test_every_kind_is_in_the_round_trip() -> None:
    assert set(FIELDS) == set(KINDS.values())
    assert all(kind.name == name for name, kind in KINDS.items())


@given(FAULTS)
@example(GradientScale(step=3, factor=1 + 2**53))
@example(NanGradient(step=3, tensor=" a@b=c:d "))
def test_what_is_printed_is_read_back(fault: Fault) -> None:
    assert parse(str(fault)) == fault
    assert parse(f"  {fault}\n") == fault


@pytest.mark.parametrize(
    "text",
    [
        "nan-gradient@120",
        "inf-gradient:tensor=blocks.0,seed=7@0",
        "gradient-scale:factor=1000,rank=1@200",
        "gradient-scale:factor=-0.5,tensor=head.weight,steps=10@200",
        "gradient-scale:factor=1e-07@3",
        "bit-flip:in=weight@50",
        "bit-flip:in=weight,tensor=a.b,seed=4,steps=2,rank=1@50",
        "bit-flip:in=moment1@200",
        "nan-gradient:every=50@100",
        "gradient-scale:factor=2,every=50,times=3,steps=2@100",
        "lr-spike:factor=30,steps=10@200",
        "weight-scale:factor=16,tensor=*.q_proj+*.k_proj@200",
        "weight-scale:factor=16,tensor=*.query_key_value,rows=2/3@200",
        "moments-reset@200",
        "moments-reset:in=moment2@200",
        "frozen-moment2@200",
        "wrong-betas:beta1=0.5,beta2=0.9,steps=20@200",
        "warmup-lost:steps=20@200",
        "scaler-off:tensor=blocks.0@200",
        "bf16-weights:steps=20@200",
        "fp16-overflow:module=head,factor=1@200",
        "activation-scale:factor=30,module=head@200",
        "bit-flip:in=activation,module=blocks.0.mlp,seed=4@50",
        "missing-zero-grad:steps=5@200",
        "skipped-all-reduce:steps=20,rank=1@200",
        "lr-spike:factor=30,placebo=yes@200",
        "random-shard:batches=40@200",
        "rare-tokens:seed=3,batches=10@200",
        "shifted-labels:batches=10,rank=0@200",
        "duplicate-batch:batches=20@200",
        "poisoned-source:source=data/web.txt@200",
        "repeated-ngram:length=5,seed=3,batches=10,rank=1,placebo=yes@200",
        "permuted-vocabulary:seed=2,batches=10@200",
        "encoding-junk:seed=1,batches=40,placebo=yes@200",
        "replayed-batches:back=20,batches=10@200",
        "replayed-batches@50",
        "random-shard:placebo=yes@200",
        "rare-tokens:placebo=yes@200",
        "shifted-labels:placebo=yes@200",
        "duplicate-batch:placebo=yes@200",
        "poisoned-source:source=a,placebo=yes@200",
    ],
)
def test_prints_as_it_was_written(text: str) -> None:
    assert str(parse(text)) == text


def test_options_come_in_any_order_and_defaults_are_left_out() -> None:
    fault = parse("bit-flip:rank=1,seed=0,steps=1,in=gradient@5")
    assert fault == BitFlip(step=5, rank=1)
    assert str(fault) == "bit-flip:rank=1@5"
    assert parse("gradient-scale:rank=1,factor=1e3,steps=3@200") == GradientScale(
        step=200, steps=3, rank=1, factor=1000.0
    )


@pytest.mark.parametrize(
    ("text", "struck", "total"),
    [
        ("nan-gradient:steps=3@5", [5, 6, 7], 3),
        ("nan-gradient:every=10@5", [5, 15, 25, 35], None),
        ("nan-gradient:every=10,times=2@5", [5, 15], 2),
        ("nan-gradient:every=10,times=3,steps=2@5", [5, 6, 15, 16, 25, 26], 6),
        ("gradient-scale:factor=2,every=2,steps=2@36", [36, 37, 38, 39], None),
        ("lr-spike:factor=30,steps=4@7", [7, 8, 9, 10], 4),
        ("moments-reset@0", [0], 1),
        ("frozen-moment2@20", list(range(20, 40)), 50),
        ("warmup-lost:steps=2@7", [7, 8], 2),
    ],
)
def test_strikes_at_its_steps_and_no_others(text: str, struck: list[int], total: int | None) -> None:
    fault = parse(text)
    assert isinstance(fault, LiveFault)
    assert [step for step in range(40) if fault.is_at(step)] == struck
    assert fault.total == total


@pytest.mark.parametrize(
    ("text", "struck"),
    [
        ("random-shard:batches=3@5", [5, 6, 7]),
        ("shifted-labels@5", [5]),
        ("duplicate-batch@5", [5, 6]),
        ("poisoned-source:source=a@36", [36, 37, 38, 39]),
        ("repeated-ngram:batches=2@5", [5, 6]),
        ("permuted-vocabulary:batches=2@5", [5, 6]),
        ("encoding-junk:batches=2@5", [5, 6]),
        ("replayed-batches:back=3,batches=4@5", [5, 6, 7, 8]),
    ],
)
def test_strikes_its_batches_and_no_others(text: str, struck: list[int]) -> None:
    fault = parse(text)
    assert isinstance(fault, DataFault)
    assert [number for number in range(40) if fault.is_at(number)] == struck


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["''", "NAME[:key=value,...]@STEP"]),
        ("nan-gradient", ["'nan-gradient'", "no step", "@STEP"]),
        ("nan-grad@3", ["'nan-grad'", "nan-gradient", "inf-gradient", "gradient-scale", "bit-flip"]),
        ("@3", ["''", "nan-gradient"]),
        ("nan-gradient@", ["step=''", "whole number"]),
        ("nan-gradient@-3", ["step='-3'", "whole number"]),
        ("nan-gradient@1.5", ["step='1.5'", "whole number"]),
        ("nan-gradient@٣", [r"step='\u0663'", "whole number"]),
        ("nan-gradient@" + "9" * 5000, ["step=", "whole number"]),
        ("nan-gradient:@3", ["''", "key=value", "tensor, seed, every, times, steps, rank"]),
        ("nan-gradient:rank@3", ["'rank'", "key=value"]),
        ("nan-gradient:rank=1,@3", ["''", "key=value"]),
        ("nan-gradient:step=4@3", ["'step=4'", "tensor, seed, every, times, steps, rank"]),
        ("nan-gradient:in=weight@3", ["'in=weight'", "nan-gradient", "tensor, seed, every, times, steps, rank"]),
        ("bit-flip:in_=weight@3", ["'in_=weight'", "in, module, tensor, seed, every, times, steps, rank"]),
        ("nan-gradient:rank=1,rank=2@3", ["rank=", "twice"]),
        ("nan-gradient:rank=one@3", ["rank='one'", "whole number"]),
        ("nan-gradient:steps=0@3", ["steps=0", "from 1"]),
        ("nan-gradient:tensor=@3", ["tensor=''", "name"]),
        ("gradient-scale@3", ["factor=", "needs", "gradient-scale:factor=VALUE@STEP"]),
        ("gradient-scale:factor=big@3", ["factor='big'", "number"]),
        ("gradient-scale:factor=nan@3", ["factor=nan", "finite"]),
        ("gradient-scale:factor=1e999@3", ["factor=inf", "finite"]),
        ("gradient-scale:factor=1.0@3", ["factor=1", "another"]),
        ("gradient-scale:factor=2,seed=1@3", ["'seed=1'", "factor, tensor, every, times, steps, rank"]),
        ("bit-flip:in=weights@3", ["in='weights'", "gradient, weight, moment1, moment2, activation"]),
        ("bit-flip:module=a@3", ["module='a'", "in=activation", "tensor="]),
        ("bit-flip:in=activation,tensor=a@3", ["tensor='a'", "in=activation", "module="]),
        ("bit-flip:in=activation,module=@3", ["module=''", "name"]),
        ("nan-gradient:every=0@3", ["every=0", "from 1"]),
        ("nan-gradient:steps=5,every=4@3", ["every=4", "from 5"]),
        ("nan-gradient:times=4@3", ["times=4", "every=50"]),
        ("nan-gradient:every=4,times=0@3", ["times=0", "from 1"]),
        ("lr-spike@3", ["factor=", "needs"]),
        ("lr-spike:factor=1@3", ["factor=1", "another"]),
        ("lr-spike:factor=0@3", ["factor=0", "above 0"]),
        ("lr-spike:factor=-2@3", ["factor=-2", "above 0"]),
        ("lr-spike:factor=2,log=no@3", ["log='no'", "one of hides, shows"]),
        ("lr-spike:factor=2,every=5@3", ["'every=5'", "factor, log, steps, rank"]),
        ("weight-scale:factor=16,rows=3/2@3", ["rows=3/2", "between 0 and 1"]),
        ("weight-scale:factor=16,rows=1/0@3", ["rows='1/0'", "2/3"]),
        ("weight-scale:factor=16,rows=0.5@3", ["rows='0.5'", "2/3"]),
        ("moments-reset:tensor=a@3", ["'tensor=a'", "steps, rank"]),
        ("moments-reset:in=weight@3", ["in='weight'", "both, moment1, moment2"]),
        ("frozen-moment2:steps=0@3", ["steps=0", "from 1"]),
        ("wrong-betas@3", ["beta1=", "beta2=", "wrong-betas:beta2=0.5@STEP"]),
        ("wrong-betas:beta1=1@3", ["beta1=1", "from 0 to below 1"]),
        ("wrong-betas:beta2=-0.1@3", ["beta2=-0.1", "from 0 to below 1"]),
        ("wrong-betas:beta2=nan@3", ["beta2=nan", "finite"]),
        ("wrong-betas:beta2=high@3", ["beta2='high'", "number"]),
        ("warmup-lost:factor=2@3", ["'factor=2'", "steps, rank"]),
        ("scaler-off:tensor=@3", ["tensor=''", "name"]),
        ("fp16-overflow:factor=0@3", ["factor=0", "above 0"]),
        ("fp16-overflow:factor=nan@3", ["factor=nan", "finite"]),
        ("activation-scale:factor=2@3", ["module=", "needs"]),
        ("activation-scale:module=a@3", ["factor=", "needs"]),
        ("activation-scale:factor=1,module=a@3", ["factor=1", "another"]),
        ("skipped-all-reduce@3", ["rank=", "needs", "skipped-all-reduce:rank=VALUE@STEP"]),
        ("nan-gradient:placebo=maybe@3", ["placebo='maybe'", "no, yes"]),
        ("random-shard:steps=4@3", ["'steps=4'", "seed, batches, rank"]),
        ("random-shard:batches=0@3", ["batches=0", "from 1"]),
        ("duplicate-batch:batches=1@3", ["batches=1", "at least 2"]),
        ("poisoned-source@3", ["source=", "needs"]),
        ("poisoned-source:source=@3", ["source=''", "name of a source"]),
        ("repeated-ngram:length=0@3", ["length=0", "from 1"]),
        ("repeated-ngram:length=14@3", ["length=14", "1 to 13"]),
        ("permuted-vocabulary:length=2@3", ["'length=2'", "seed, batches, rank"]),
        ("encoding-junk:batches=0@3", ["batches=0", "from 1"]),
        ("replayed-batches:back=0@3", ["back=0", "from 1"]),
        ("replayed-batches:back=4@3", ["back=4", "only 3 come before batch 3", "smaller back"]),
        ("replayed-batches:back=3,seed=1@3", ["'seed=1'", "back, batches, rank"]),
        ("encoding-junk:placebo=maybe@3", ["placebo='maybe'", "one of no, yes"]),
    ],
)
def test_bad_text_is_one_sentence_with_field_value_and_cure(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse(text)
    sentence = str(refusal.value)
    assert all(word in sentence for word in words), sentence
    assert "\n" not in sentence
    assert ". " not in sentence


WRITTEN = rf"({'|'.join(KINDS)})(:(factor=[0-9]+)?[a-z=,0-9/]*)?@[0-9]*"


@given(st.text() | st.from_regex(WRITTEN, fullmatch=True))
def test_any_text_is_a_fault_or_refused(text: str) -> None:
    try:
        fault = parse(text)
    except ConfigError:
        return
    assert parse(str(fault)) == fault


@pytest.mark.parametrize(
    ("kind", "values", "field"),
    [
        (NanGradient, {"step": -1}, "step=-1"),
        (NanGradient, {"step": True}, "step=True"),
        (NanGradient, {"step": 1.0}, "step=1.0"),
        (NanGradient, {"step": 10**18}, "step=1000"),
        (InfGradient, {"step": 1, "steps": 0}, "steps=0"),
        (InfGradient, {"step": 1, "rank": -1}, "rank=-1"),
        (InfGradient, {"step": 1, "seed": "a"}, "seed='a'"),
        (BitFlip, {"step": 1, "tensor": "a,b"}, "tensor='a,b'"),
        (BitFlip, {"step": 1, "tensor": 3}, "tensor=3"),
        (BitFlip, {"step": 1, "in_": "moment"}, "in='moment'"),
        (GradientScale, {"step": 1, "factor": False}, "factor=False"),
        (GradientScale, {"step": 1, "factor": 10**400}, "factor=1000"),
        (GradientScale, {"step": 1, "factor": 2, "tensor": ""}, "tensor=''"),
        (WeightScale, {"step": 1, "factor": 2, "rows": 0.5}, "rows=0.5"),
        (WeightScale, {"step": 1, "factor": 2, "rows": Fraction(1)}, "rows=1"),
        (WrongBetas, {"step": 1, "beta1": True}, "beta1=True"),
        (Fp16Overflow, {"step": 1, "module": "a,b"}, "module='a,b'"),
        (ActivationScale, {"step": 1, "factor": 2, "module": 3}, "module=3"),
        (SkippedAllReduce, {"step": 1, "rank": None}, "rank=None"),
        (RandomShard, {"step": 1, "seed": -1}, "seed=-1"),
        (PoisonedSource, {"step": 1, "source": "a,b"}, "source='a,b'"),
        (PoisonedSource, {"step": 1, "source": "a", "seed": None}, "seed=None"),
        (RepeatedNgram, {"step": 1, "length": 2.0}, "length=2.0"),
        (RepeatedNgram, {"step": 1, "seed": -1}, "seed=-1"),
        (PermutedVocabulary, {"step": 1, "seed": True}, "seed=True"),
        (EncodingJunk, {"step": 1, "seed": "a"}, "seed='a'"),
        (ReplayedBatches, {"step": 9, "back": True}, "back=True"),
    ],
)
def test_values_that_cannot_be_are_refused(kind: type[Fault], values: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        kind(**values)
    assert f"{kind.name}: {field}" in str(refusal.value)


@given(st.integers(1, 100), st.integers(0, 100), st.integers(1, 500), st.integers(0, 500))
def test_what_comes_again_came_so_many_before_or_came_again_then(
    back: int, more: int, batches: int, after: int
) -> None:
    fault = ReplayedBatches(step=back + more, back=back, batches=batches)
    number = fault.step + after % batches
    before = number - back
    assert fault.original(number) == (before if before < fault.step else fault.original(before))
    assert fault.original(number) in fault.replayed
    assert len(fault.replayed) == min(back, batches)


def test_reads_without_torch() -> None:
    program = "import sys, sealegs.faults.spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
