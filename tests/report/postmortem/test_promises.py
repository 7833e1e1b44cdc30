"""Promises as a person writes them."""

import re

import pytest

from sealegs.errors import ConfigError
from sealegs.report.postmortem.promises import parse
from sealegs.report.postmortem.values import Promise

BEFORE = {"loss": 2.31, "grad_norm": None}


@pytest.mark.parametrize(
    ("text", "signal", "first", "last", "below", "mean_of", "or_equal"),
    [
        ("loss@312<2.5", "loss", 312, 312, 2.5, 1, False),
        ("max grad_norm[300:401]<3.0", "grad_norm", 300, 400, 3.0, 1, False),
        (" clipped_norm [300 : 401] <= 0.5 ", "clipped_norm", 300, 400, 0.5, 1, True),
        ("mean loss[312:501]<2.36", "loss", 312, 500, 2.36, 189, False),
        ("mean10 loss[312:501]<baseline+0.05", "loss", 312, 500, 2.36, 10, False),
        ("loss@3<-1e-3", "loss", 3, 3, -1e-3, 1, False),
    ],
)
def test_what_is_promised(
    text: str, signal: str, first: int, last: int, below: float, mean_of: int, or_equal: bool
) -> None:
    made = parse(text, BEFORE)
    assert made.below == pytest.approx(below)
    assert made == Promise(
        signal=signal, first=first, last=last, below=made.below, was=None, mean_of=mean_of, or_equal=or_equal
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("loss<2", "write it like loss@312<2.5"),
        ("loss@312>2", "write it like loss@312<2.5"),
        ("median loss[3:9]<2", "write it like loss@312<2.5"),
        ("lr@312<2", "lr is not measured; give one of loss, grad_norm, clipped_norm"),
        ("loss[9:9]<2", "9:9 has no step in it"),
        ("mean10 loss[3:9]<2", "10 rows are not in 3:9; give a mean of 1 to 6"),
        ("mean0 loss[3:9]<2", "0 rows are not in 3:9"),
        ("loss@312<low", "low is no limit; give a number such as 2.5, or baseline+0.05"),
        ("loss@312<nan", "nan is no limit"),
        ("grad_norm@312<baseline+1", "no grad_norm from before the onset is known; give a number"),
    ],
)
def test_what_cannot_be_promised_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--expect {text}: {sentence}")):
        parse(text, BEFORE)
