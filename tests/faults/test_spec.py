"""Text in, Faults out, and back."""

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sealegs.errors import ConfigError
from sealegs.faults.spec import KINDS, BitFlip, Fault, GradientScale, InfGradient, NanGradient, parse

COUNTS = st.integers(0, 10**18 - 1)
COMMON = {"step": COUNTS, "steps": st.integers(1, 10**18 - 1), "rank": st.none() | COUNTS}
TENSOR = st.none() | st.text(min_size=1).filter(lambda name: "," not in name)
ELEMENT = COMMON | {"tensor": TENSOR, "seed": COUNTS}
NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**300), 10**300)
FIELDS: dict[type[Fault], dict[str, st.SearchStrategy[Any]]] = {
    NanGradient: ELEMENT,
    InfGradient: ELEMENT,
    BitFlip: ELEMENT | {"in_": st.sampled_from(["gradient", "weight"])},
    GradientScale: COMMON | {"tensor": TENSOR, "factor": NUMBERS.filter(lambda factor: factor != 1)},
}
FAULTS = st.one_of(*(st.builds(kind, **values) for kind, values in FIELDS.items()))


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


def test_strikes_at_so_many_steps_in_a_row() -> None:
    assert list(parse("nan-gradient:steps=3@5").when) == [5, 6, 7]


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
        ("nan-gradient@٣", ["step='٣'", "whole number"]),
        ("nan-gradient@" + "9" * 5000, ["step=", "whole number"]),
        ("nan-gradient:@3", ["''", "key=value", "tensor, seed, steps, rank"]),
        ("nan-gradient:rank@3", ["'rank'", "key=value"]),
        ("nan-gradient:rank=1,@3", ["''", "key=value"]),
        ("nan-gradient:step=4@3", ["'step=4'", "tensor, seed, steps, rank"]),
        ("nan-gradient:in=weight@3", ["'in=weight'", "nan-gradient", "tensor, seed, steps, rank"]),
        ("bit-flip:in_=weight@3", ["'in_=weight'", "in, tensor, seed, steps, rank"]),
        ("nan-gradient:rank=1,rank=2@3", ["rank=", "twice"]),
        ("nan-gradient:rank=one@3", ["rank='one'", "whole number"]),
        ("nan-gradient:steps=0@3", ["steps=0", "from 1"]),
        ("nan-gradient:tensor=@3", ["tensor=''", "name"]),
        ("gradient-scale@3", ["factor=", "needs", "gradient-scale:factor=VALUE@STEP"]),
        ("gradient-scale:factor=big@3", ["factor='big'", "number"]),
        ("gradient-scale:factor=nan@3", ["factor=nan", "finite"]),
        ("gradient-scale:factor=1e999@3", ["factor=inf", "finite"]),
        ("gradient-scale:factor=1.0@3", ["factor=1", "another"]),
        ("gradient-scale:factor=2,seed=1@3", ["'seed=1'", "factor, tensor, steps, rank"]),
        ("bit-flip:in=weights@3", ["in='weights'", "gradient, weight"]),
    ],
)
def test_bad_text_is_one_sentence_with_field_value_and_cure(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse(text)
    sentence = str(refusal.value)
    assert all(word in sentence for word in words), sentence
    assert "\n" not in sentence
    assert ". " not in sentence


@given(st.text() | st.from_regex(r"(nan-gradient|bit-flip|gradient-scale)(:[a-z=,0-9]*)?@[0-9]*", fullmatch=True))
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
    ],
)
def test_values_that_cannot_be_are_refused(kind: type[Fault], values: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        kind(**values)
    assert f"{kind.name}: {field}" in str(refusal.value)


def test_reads_without_torch() -> None:
    program = "import sys, sealegs.faults.spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
