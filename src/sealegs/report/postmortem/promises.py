"""Parses promises: ``loss@312<2.5``, ``max grad_norm[300:401]<3.0``, ``mean10 loss[312:501]<baseline+0.05``.

    [max | mean | meanN] SIGNAL@STEP | SIGNAL[A:B]  < | <=  NUMBER | baseline+NUMBER

A:B are the steps A to B - 1. ``max``, which may be left out, is about every row, ``mean`` about their mean, ``meanN``
about every mean of N consecutive rows. ``baseline`` is the value of the signal before the onset.
"""

import math
import re
from collections.abc import Mapping

from sealegs.errors import ConfigError
from sealegs.report.postmortem.numbers import NAMES
from sealegs.report.postmortem.values import Promise

PATTERN = re.compile(
    r"\s*(?:(?P<how>max|mean(?P<of>\d{1,15})?)\s+)?(?P<signal>\w+)\s*"
    r"(?:@\s*(?P<step>\d{1,15})|\[\s*(?P<first>\d{1,15})\s*:\s*(?P<end>\d{1,15})\s*\])\s*"
    r"(?P<sign><=|<)\s*(?P<base>baseline\s*\+\s*)?(?P<limit>[^\s]+)\s*"
)


def parse(text: str, baselines: Mapping[str, float | None]) -> Promise:
    """A promise about a rerun from its text; ``baselines`` are by signal.

    >>> parse("loss@312<2.5", {})
    Promise(signal='loss', first=312, last=312, below=2.5, was=None, mean_of=1, or_equal=False)
    """
    match = PATTERN.fullmatch(text)
    if match is None:
        raise ConfigError(f"--expect {text}: write it like loss@312<2.5 or max grad_norm[300:401]<3.0")
    signal = match["signal"]
    if signal not in NAMES:
        raise ConfigError(f"--expect {text}: {signal} is not measured; give one of {', '.join(NAMES)}")
    first = int(match["step"] or match["first"])
    end = first + 1 if match["step"] else int(match["end"])
    if first >= end:
        raise ConfigError(f"--expect {text}: {first}:{end} has no step in it; end after its beginning")
    rows = end - first
    of = 1 if match["how"] in (None, "max") else int(match["of"] or rows)
    if not 1 <= of <= rows:
        raise ConfigError(f"--expect {text}: {of} rows are not in {first}:{end}; give a mean of 1 to {rows}")
    return Promise(
        signal=signal,
        first=first,
        last=end - 1,
        below=_limit(text, match["limit"], match["base"] is not None, signal, baselines),
        was=None,
        mean_of=of,
        or_equal=match["sign"] == "<=",
    )


def _limit(text: str, written: str, is_above: bool, signal: str, baselines: Mapping[str, float | None]) -> float:
    try:
        limit = float(written)
    except ValueError:
        limit = math.nan
    if not math.isfinite(limit):
        raise ConfigError(f"--expect {text}: {written} is no limit; give a number such as 2.5, or baseline+0.05")
    if not is_above:
        return limit
    baseline = baselines.get(signal)
    if baseline is None:
        raise ConfigError(f"--expect {text}: no {signal} from before the onset is known; give a number")
    return baseline + limit
