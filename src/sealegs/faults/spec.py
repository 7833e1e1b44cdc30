"""Parses faults from text, such as ``gradient-scale:factor=1000,rank=1@200``; a fault prints as the same text.

    NAME[:key=value,...]@STEP

A new kind of fault needs a class in ``live.py`` or ``data.py``, a place in ``KINDS``, and code that applies it.
"""

import re
from dataclasses import MISSING
from fractions import Fraction
from typing import Any, get_type_hints

from sealegs.errors import ConfigError
from sealegs.faults.contract import Fault, options
from sealegs.faults.data import (
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
    LrSpike,
    MissingZeroGrad,
    MomentsReset,
    NanGradient,
    RouterBias,
    ScalerOff,
    SkippedAllReduce,
    StuckScale,
    WarmupLost,
    WeightScale,
    WrongBetas,
)
from sealegs.faults.reward import ConstantReward, EntropyPenalty, HackedReward, NoisySampler
from sealegs.record.reading import shown

DIGITS = re.compile("[0-9]{1,18}")
SHARE = re.compile("[0-9]{1,9}/[0-9]{1,9}")

KINDS: dict[str, type[Fault]] = {
    kind.name: kind
    for kind in (
        NanGradient,
        InfGradient,
        GradientScale,
        BitFlip,
        WeightScale,
        LrSpike,
        MomentsReset,
        FrozenMoment2,
        WrongBetas,
        WarmupLost,
        ScalerOff,
        Bf16Weights,
        Fp16Overflow,
        ActivationScale,
        RouterBias,
        StuckScale,
        MissingZeroGrad,
        SkippedAllReduce,
        RandomShard,
        RareTokens,
        ShiftedLabels,
        MaskedLabels,
        DuplicateBatch,
        PoisonedSource,
        RepeatedNgram,
        PermutedVocabulary,
        EncodingJunk,
        ReplayedBatches,
        EntropyPenalty,
        ConstantReward,
        HackedReward,
        NoisySampler,
    )
}
"""Every kind of fault that can be written, by name."""


def parse(text: str) -> Fault:
    """The fault that a text describes, such as ``nan-gradient@120``.

    >>> parse("gradient-scale:factor=1000,rank=1@200")
    GradientScale(step=200, rank=1, placebo='no', steps=1, every=None, times=None, factor=1000.0, tensor=None)
    >>> str(parse("bit-flip:in=weight@50"))
    'bit-flip:in=weight@50'
    """
    described, at, step = text.strip().rpartition("@")
    if not at:
        raise ConfigError(f"{_called(text)}: has no step; write NAME[:key=value,...]@STEP, such as nan-gradient@120")
    name, colon, listed = described.partition(":")
    if name not in KINDS:
        raise ConfigError(f"{_called(text)}: no fault is named {shown(name)}; take one of {', '.join(KINDS)}")
    kind = KINDS[name]
    known = options(kind)
    values: dict[str, Any] = {}
    for option in listed.split(",") if colon else ():
        key, equals, value = option.partition("=")
        if not equals or key not in known:
            cure = f"write key=value, the key one of {', '.join(known)}"
            raise ConfigError(f"{_called(text)}: {shown(option)} is no option of {name}; {cure}")
        if known[key].name in values:
            raise ConfigError(f"{_called(text)}: {key}= is given twice; keep one")
        values[known[key].name] = read(kind, known[key].name, value, text)
    for key, field in known.items():
        if field.default is MISSING and field.name not in values:
            raise ConfigError(f"{_called(text)}: {name} needs {key}=; write {name}:{key}=VALUE@STEP")
    return kind(step=read(kind, "step", step, text), **values)


def read(kind: type[Fault], field: str, value: str, text: str) -> Any:
    """The value of one option in its field's type; the fault itself checks whether it makes sense."""
    hint = get_type_hints(kind)[field]
    key = field.rstrip("_")
    if hint in (int, int | None):
        if not DIGITS.fullmatch(value):
            raise ConfigError(f"{_called(text)}: {key}={shown(value)}: a whole number of digits alone, such as 120")
        return int(value)
    if hint in (float, float | None):
        try:
            return float(value)
        except ValueError:
            raise ConfigError(f"{_called(text)}: {key}={shown(value)}: a number, such as 1000 or 1e-3") from None
    if hint == Fraction | None:
        if not SHARE.fullmatch(value) or not int(value.partition("/")[2]):
            raise ConfigError(f"{_called(text)}: {key}={shown(value)}: a share, such as 2/3")
        return Fraction(value)
    return value


def _called(text: str) -> str:
    return f"fault {shown(text, 120)}"
