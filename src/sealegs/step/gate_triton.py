"""The gate as one Triton kernel: ``decide_in_torch`` of ``step/gate.py`` in a few microseconds instead of ninety
launches.

It is imported only where there are a CUDA device and Triton. One program of one warp does both signals, all in float64.

The statistic is that of ``stats/streaming.py``, which ``detectors/spike.py`` uses on the host and
``diagnosis/curve/live_statistic.py`` over whole curves. ``tests/gpu/test_gate_on_cuda.py`` holds this kernel equal to
the detectors on the host.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sealegs import judge
from sealegs.detectors import spike
from sealegs.stats import calibration, streaming
from sealegs.step.gate import LIMITS, ROW, SCALARS, Gate, HostFacts

# Triton reads globals only as its own constants.
_START = tl.constexpr(streaming.START)
_SETTLED = tl.constexpr(streaming.SETTLED)
_PATIENCE = tl.constexpr(streaming.PATIENCE)
_WINSOR = tl.constexpr(streaming.WINSOR)
_LEVEL_RATE = tl.constexpr(streaming.LEVEL_RATE)
_SLOPE_RATE = tl.constexpr(streaming.SLOPE_RATE)
_SCALE_RATE = tl.constexpr(streaming.SCALE_RATE)
_QUANTILE_RATE = tl.constexpr(streaming.QUANTILE_RATE)
_TAIL_RATE = tl.constexpr(streaming.TAIL_RATE)
_LARGEST_EXCESS = tl.constexpr(streaming.LARGEST_EXCESS)
_SMALLEST_SCALE = tl.constexpr(streaming.SMALLEST_SCALE)
_SMALLEST_SPREAD = tl.constexpr(streaming.SMALLEST_SPREAD)
_SAME = tl.constexpr(judge.SAME)
_HEAVIEST_TAIL = tl.constexpr(streaming.HEAVIEST_TAIL)
_MEDIAN_OF_NORMAL = tl.constexpr(streaming.MEDIAN_OF_NORMAL)
_QUANTILE_GAP = tl.constexpr(streaming.QUANTILE_GAP)
_NEARLY_LINEAR = tl.constexpr(streaming.NEARLY_LINEAR)
_SMALLEST_UNIT, _LARGEST_UNIT = (tl.constexpr(unit) for unit in streaming.UNITS)
_POSITIVE = tl.constexpr(streaming.POSITIVE)
_NO_UNIT_YET = tl.constexpr(streaming.NO_UNIT_YET)
_P80, _P90, _P98 = (tl.constexpr(level) for level in streaming.LEVELS)
_LOG80, _LOG90, _LOG98 = (tl.constexpr(level) for level in streaming.LOG_LEVELS)
_FIRST_Q80, _FIRST_Q90, _FIRST_Q98 = (tl.constexpr(q) for q in streaming.FIRST_QUANTILES)
_FIRST_EXCESS, _FIRST_SQUARED = (tl.constexpr(moment) for moment in streaming.FIRST_EXCESS)
_MEMORY = tl.constexpr(calibration.MEMORY)
_TOLERANCE = tl.constexpr(calibration.TOLERANCE)
_LARGEST_CORRECTION = tl.constexpr(calibration.LARGEST_CORRECTION)
_LOW, _LOWER = (tl.constexpr(p) for p in calibration.CHECKED)
_YOUNG = tl.constexpr(spike.YOUNG)
_CLIPPED = tl.constexpr(spike.CLIPPED)
_FADING = tl.constexpr(spike.FADING)
_SUSPICIOUS = tl.constexpr(spike.SUSPICIOUS)
_ACCEPTED_SPREAD = tl.constexpr(streaming.ACCEPTED_SPREAD)
_FIRST_JUDGED = tl.constexpr(spike.FIRST_JUDGED)
_SCALARS = tl.constexpr(len(SCALARS))
_INF = tl.constexpr(float("inf"))
_LARGEST = tl.constexpr(torch.finfo(torch.float64).max)
_CHUNK = tl.constexpr(512)
_SQRT2 = tl.constexpr(2.0**0.5)
_LOG2 = tl.constexpr(math.log(2.0))

# Places in the state of a signal, in the row, in the limits of a signal and among the host's facts.
_AT_AGE = tl.constexpr(SCALARS.index("age"))
_AT_EARLY = tl.constexpr(SCALARS.index("early"))
_AT_LEVEL = tl.constexpr(SCALARS.index("level"))
_AT_SLOPE = tl.constexpr(SCALARS.index("slope"))
_AT_SCALE = tl.constexpr(SCALARS.index("scale"))
_AT_Q80 = tl.constexpr(SCALARS.index("q80"))
_AT_Q90 = tl.constexpr(SCALARS.index("q90"))
_AT_Q98 = tl.constexpr(SCALARS.index("q98"))
_AT_EXCESS = tl.constexpr(SCALARS.index("excess"))
_AT_SQUARED = tl.constexpr(SCALARS.index("excess_squared"))
_AT_BEYOND = tl.constexpr(SCALARS.index("beyond"))
_AT_BURST = tl.constexpr(SCALARS.index("burst"))
_AT_UNIT = tl.constexpr(SCALARS.index("unit"))
_AT_VALUES = tl.constexpr(SCALARS.index("values"))
_AT_HUNDREDTHS = tl.constexpr(SCALARS.index("hundredths"))
_AT_THOUSANDTHS = tl.constexpr(SCALARS.index("thousandths"))
_AT_LARGEST = tl.constexpr(SCALARS.index("largest"))
_AT_MET = tl.constexpr(SCALARS.index("met"))
_ROW_CLOSED = tl.constexpr(ROW.index("gate_closed"))
_ROW_P = tl.constexpr(ROW.index("loss_p"))
_ROW_WORST = tl.constexpr(ROW.index("worst_tensor"))
_LIMITS = tl.constexpr(len(LIMITS))
_LIMIT_CHANCE = tl.constexpr(LIMITS.index("chance"))
_LIMIT_SMALLEST = tl.constexpr(LIMITS.index("smallest"))
_LIMIT_GROSS = tl.constexpr(LIMITS.index("gross"))
_LIMIT_GROWTH = tl.constexpr(LIMITS.index("growth"))
_FACT_ANNOUNCED = tl.constexpr(HostFacts._fields.index("announced"))
_FACT_COARSE = tl.constexpr(HostFacts._fields.index("coarse"))
_FACT_HELD = tl.constexpr(HostFacts._fields.index("held"))
_FACT_RESTRAINED = tl.constexpr(HostFacts._fields.index("restrained"))
_FACT_CLIP_NORM = tl.constexpr(HostFacts._fields.index("clip_norm"))


def launch(gate: Gate, loss: Tensor, norms: Tensor, worst: Tensor) -> None:
    """Judge a step, without waiting for the device."""
    given = (loss, norms, worst)
    count = norms.numel() if norms.dim() else 0
    arguments = (
        *(*given, count, gate.state, gate.limits, gate.told, gate.clip),
        *(gate.row, gate.found_inf, gate.grad_scale),
    )
    # Triton checks every argument at every launch; only the types and addresses of these three can differ here.
    key = tuple((tensor.dtype, tensor.device, tensor.data_ptr() % 16) for tensor in given)
    compiled = gate.kernels.get(key)
    if compiled is None:
        # the host does not fuse multiplications with additions, so neither does the kernel
        gate.kernels[key] = _decide[(1,)](*arguments, num_warps=1, enable_fp_fusion=False)
    elif torch.cuda.current_device() == gate.state.device.index:
        compiled[(1, 1, 1)](*arguments)
    else:
        with torch.cuda.device(gate.state.device):
            compiled[(1, 1, 1)](*arguments)


@triton.jit(do_not_specialize=["count"])
def _decide(  # type: ignore[no-untyped-def]
    loss_at,
    norms_at,
    worst_at,
    count,
    state_at,
    limits_at,
    told_at,
    clip_at,
    row_at,
    found_inf_at,
    grad_scale_at,
):
    announced = tl.load(told_at + _FACT_ANNOUNCED) > 0
    widened = tl.load(told_at + _FACT_COARSE) > 0
    held = tl.load(told_at + _FACT_HELD) > 0
    restrained = tl.load(told_at + _FACT_RESTRAINED) > 0
    clip_norm = tl.load(told_at + _FACT_CLIP_NORM)
    closed = tl.where(held, _f64(1.0), 0.0)
    broken = tl.zeros([], tl.float64)
    same = tl.zeros([], tl.float64)
    was_closed = tl.load(row_at + _ROW_CLOSED) > 0
    grad_norm, worst = _all_together(norms_at, worst_at, count)
    for signal in tl.static_range(2):
        value = tl.load(loss_at).to(tl.float64) if signal == 0 else grad_norm
        is_finite = tl.abs(value) < _INF  # false for NaN
        at = state_at + signal * (_SCALARS + _START)
        spoilt, p = _judge(value, at, limits_at + signal * _LIMITS, announced, widened, clip_norm)
        closed = tl.where(spoilt, 1.0, closed)
        broken = tl.where(is_finite, broken, 1.0)
        before = tl.load(row_at + signal)
        is_same = tl.abs(value - before) <= _SAME * tl.maximum(tl.abs(value), tl.abs(before))
        same = tl.where(is_same, same + 1.0, same)
        tl.store(row_at + signal, value)
        tl.store(row_at + _ROW_P + signal, p)
    closed = tl.where(restrained | (was_closed & (same == 2.0)), 0.0, closed)
    closed = tl.where(broken > 0.0, 1.0, closed)
    tl.store(row_at + _ROW_CLOSED, closed)
    tl.store(row_at + _ROW_WORST, worst)
    tl.store(found_inf_at, closed.to(tl.float32))
    scale = (grad_norm + _f64(1e-6)) / tl.load(clip_at)
    scale = tl.where((scale > 1.0) & (scale < _INF), scale, 1.0)
    tl.store(grad_scale_at, scale.to(tl.float32))


@triton.jit
def _all_together(norms_at, worst_at, count):  # type: ignore[no-untyped-def]
    """The norm of all gradients and the index of the largest, NaN before infinity; as given where count is 0."""
    total = tl.zeros([], tl.float64)
    largest = tl.full([], -1.0, tl.float64)
    worst = tl.zeros([], tl.float64)
    if count == 0:
        total = tl.load(norms_at).to(tl.float64)
        worst = tl.load(worst_at).to(tl.float64)
    else:
        for start in range(0, count, _CHUNK):
            place = tl.arange(0, _CHUNK)
            norms = tl.load(norms_at + start + place, mask=start + place < count, other=0.0).to(tl.float64)
            total += tl.sum(norms * norms, 0)
            key = tl.where(norms < _INF, norms, _f64(_LARGEST))
            key = tl.where(norms == norms, key, _INF)
            highest = tl.max(key, 0)
            first = tl.min(tl.where(key == highest, place, _CHUNK), 0)
            worst = tl.where(highest > largest, (start + first).to(tl.float64), worst)
            largest = tl.maximum(largest, highest)
        total = tl.sqrt(total)
    return total, worst


@triton.jit
def _judge(value, state_at, limits_at, announced, widened, clip_norm):  # type: ignore[no-untyped-def]
    """Look at one signal, then learn from it. Gives whether it spoils the update, and its p."""
    chance = tl.load(limits_at + _LIMIT_CHANCE)
    smallest = tl.load(limits_at + _LIMIT_SMALLEST)
    gross = tl.load(limits_at + _LIMIT_GROSS)
    growth = tl.load(limits_at + _LIMIT_GROWTH)
    unit = tl.load(state_at + _AT_UNIT)
    was_signed = unit != _POSITIVE
    is_signed = was_signed | ((value < 0) & (value > -_f64(_INF)))
    changes_scale = is_signed & (was_signed == 0)
    begins_anew = changes_scale | announced
    unit = tl.where(is_signed & begins_anew, _f64(_NO_UNIT_YET), unit)
    age = tl.where(begins_anew, 0.0, tl.load(state_at + _AT_AGE))
    early = tl.where(begins_anew, 0.0, tl.load(state_at + _AT_EARLY))
    level = tl.where(begins_anew, 0.0, tl.load(state_at + _AT_LEVEL))
    slope = tl.where(begins_anew, 0.0, tl.load(state_at + _AT_SLOPE))
    scale = tl.where(begins_anew, 1.0, tl.load(state_at + _AT_SCALE))
    q80 = tl.where(begins_anew, _f64(_FIRST_Q80), tl.load(state_at + _AT_Q80))
    q90 = tl.where(begins_anew, _f64(_FIRST_Q90), tl.load(state_at + _AT_Q90))
    q98 = tl.where(begins_anew, _f64(_FIRST_Q98), tl.load(state_at + _AT_Q98))
    excess = tl.where(begins_anew, _f64(_FIRST_EXCESS), tl.load(state_at + _AT_EXCESS))
    squared = tl.where(begins_anew, _f64(_FIRST_SQUARED), tl.load(state_at + _AT_SQUARED))
    beyond = tl.where(begins_anew, 0.0, tl.load(state_at + _AT_BEYOND))
    burst = tl.where(begins_anew, 0.0, tl.load(state_at + _AT_BURST))
    values = tl.where(changes_scale, 0.0, tl.load(state_at + _AT_VALUES))
    hundredths = tl.where(changes_scale, 0.0, tl.load(state_at + _AT_HUNDREDTHS))
    thousandths = tl.where(changes_scale, 0.0, tl.load(state_at + _AT_THOUSANDTHS))
    largest = tl.where(changes_scale, 0.0, tl.load(state_at + _AT_LARGEST))
    met = tl.where(changes_scale, 0.0, tl.load(state_at + _AT_MET))
    place = tl.arange(0, _START)
    after = tl.load(state_at + _SCALARS + place + 1, mask=place < _START - 1, other=0.0)
    after_next = tl.load(state_at + _SCALARS + place + 2, mask=place < _START - 2, other=0.0)

    usable = (tl.abs(value) < _INF) & ((value > 0) | (is_signed & (value < 0)))
    safe = tl.where(usable, value, 1.0)
    seen = age + early
    coarse = (seen < _YOUNG) | widened
    has_limit = (seen >= _FIRST_JUDGED) & (gross < _INF) & (is_signed == 0)
    limit = tl.where(has_limit, gross * tl.maximum(largest, met), _f64(_INF))
    correction = tl.minimum(
        tl.maximum(_too_often(hundredths, _LOW * values), _too_often(thousandths, _LOWER * values)),
        _f64(_LARGEST_CORRECTION),
    )
    x = _height(safe, unit)
    rise = x - (level + slope)
    p = tl.where(coarse | (rise <= smallest), 1.0, _probability(rise / scale, q80, q90, q98, excess, squared))
    is_gross = (safe <= limit) == 0
    is_exploding = (burst > 0) & (p < chance / correction) & (safe >= growth * largest)
    is_beyond = (safe <= tl.where(clip_norm <= limit, limit * _f64(_CLIPPED), limit)) == 0
    spoilt = usable & (is_signed == 0) & (is_beyond | is_exploding)
    joins = (burst > 0) & (p < _f64(_P98))
    suspicious = usable & ((p < _f64(_SUSPICIOUS) / correction) | joins) & (coarse == 0)
    in_burst = suspicious & (burst > 0)

    if usable:
        if early >= _START:
            r = rise / scale
            accepted = suspicious & (burst + 1 >= _PATIENCE)
            moved = tl.where(in_burst, 1.0, tl.minimum(tl.maximum(r, -_f64(_WINSOR)), _f64(_WINSOR))) * scale
            tl.store(state_at + _AT_AGE, age + 1)
            tl.store(state_at + _AT_EARLY, early)
            followed = level + slope + tl.maximum(1 / (age / 4 + 4), _f64(_LEVEL_RATE)) * moved
            tl.store(state_at + _AT_LEVEL, tl.where(accepted, x, followed))
            tl.store(state_at + _AT_SLOPE, tl.where(accepted, 0.0, slope + _SLOPE_RATE * moved))
            surprised = tl.where(tl.abs(rise) > _MEDIAN_OF_NORMAL * scale, 0.5, -0.5)
            scaled = scale * tl.exp(tl.maximum(1 / (age + 10), _f64(_SCALE_RATE)) * surprised)
            next_scale = tl.where(in_burst, scale, tl.maximum(scaled, _f64(_SMALLEST_SCALE)))
            new_scale = tl.maximum(scale, _ACCEPTED_SPREAD * tl.abs(rise))
            tl.store(state_at + _AT_SCALE, tl.where(accepted, new_scale, next_scale))
            tl.store(state_at + _AT_BURST, tl.where(suspicious & (accepted == 0), burst + 1, 0.0))
            learns_tail = (age >= _SETTLED) & (in_burst == 0) & (accepted == 0)
            is_beyond = learns_tail & (r > q98)
            y = tl.minimum(r - q98, _f64(_LARGEST_EXCESS))
            speed = tl.maximum(1 / (beyond + 17), _f64(_TAIL_RATE))
            rate = tl.maximum(1 / tl.maximum(age - _SETTLED + 20, 1.0), _f64(_QUANTILE_RATE))
            next_q80 = tl.maximum(q80 + rate * (tl.where(r > q80, _f64(1), 0.0) - _P80), _f64(_QUANTILE_GAP))
            next_q90 = tl.maximum(q90 + rate * (tl.where(r > q90, _f64(1), 0.0) - _P90), next_q80 + _QUANTILE_GAP)
            next_q98 = tl.maximum(q98 + rate * (tl.where(r > q98, _f64(1), 0.0) - _P98), next_q90 + _QUANTILE_GAP)
            tl.store(state_at + _AT_Q80, tl.where(learns_tail, next_q80, q80))
            tl.store(state_at + _AT_Q90, tl.where(learns_tail, next_q90, q90))
            tl.store(state_at + _AT_Q98, tl.where(learns_tail, next_q98, q98))
            tl.store(state_at + _AT_EXCESS, tl.where(is_beyond, excess + speed * (y - excess), excess))
            tl.store(state_at + _AT_SQUARED, tl.where(is_beyond, squared + speed * (y * y - squared), squared))
            tl.store(state_at + _AT_BEYOND, tl.where(is_beyond, beyond + 1, beyond))
        else:
            heights = tl.where(place == _START - 1, x, after)
            if early == _START - 1:
                following = tl.where(place == _START - 2, x, after_next)
                if is_signed:  # bare values, until now
                    size = _median(tl.abs(heights), place >= 0, _f64(_START))
                    noise = _f64(_NEARLY_LINEAR) * _spread(heights, following)
                    unit = tl.where(noise > size, noise, size)
                    unit = tl.minimum(tl.maximum(unit, _f64(_SMALLEST_UNIT)), _f64(_LARGEST_UNIT))
                    heights = _asinh(heights / unit)
                    following = _asinh(following / unit)
                level = _median(heights, place >= _START - 9, _f64(9))
                scale = tl.maximum(_spread(heights, following), _f64(_SMALLEST_SCALE))
            tl.store(state_at + _AT_AGE, age)
            tl.store(state_at + _AT_EARLY, early + 1)
            tl.store(state_at + _AT_LEVEL, level)
            tl.store(state_at + _AT_SLOPE, slope)
            tl.store(state_at + _AT_SCALE, scale)
            tl.store(state_at + _AT_Q80, q80)
            tl.store(state_at + _AT_Q90, q90)
            tl.store(state_at + _AT_Q98, q98)
            tl.store(state_at + _AT_EXCESS, excess)
            tl.store(state_at + _AT_SQUARED, squared)
            tl.store(state_at + _AT_BEYOND, beyond)
            tl.store(state_at + _AT_BURST, burst)
            tl.store(state_at + _SCALARS + place, heights)
        counted = (coarse == 0) & (in_burst == 0)
        if counted | changes_scale:
            more = tl.where(counted, _f64(1.0), 0.0)
            memory = tl.where(counted, _f64(_MEMORY), 1.0)
            tl.store(state_at + _AT_VALUES, values * memory + more)
            tl.store(state_at + _AT_HUNDREDTHS, hundredths * memory + tl.where(p < _LOW, more, 0.0))
            tl.store(state_at + _AT_THOUSANDTHS, thousandths * memory + tl.where(p < _LOWER, more, 0.0))
        taken = tl.minimum(safe, limit)
        tl.store(state_at + _AT_LARGEST, tl.maximum(largest * _f64(_FADING), taken))
        tl.store(state_at + _AT_MET, tl.where(is_gross, tl.maximum(met, taken), met))
        tl.store(state_at + _AT_UNIT, unit)
    elif announced:  # the statistic begins anew, whatever this value is
        tl.store(state_at + _AT_AGE, age)
        tl.store(state_at + _AT_EARLY, early)
        tl.store(state_at + _AT_LEVEL, level)
        tl.store(state_at + _AT_SLOPE, slope)
        tl.store(state_at + _AT_SCALE, scale)
        tl.store(state_at + _AT_Q80, q80)
        tl.store(state_at + _AT_Q90, q90)
        tl.store(state_at + _AT_Q98, q98)
        tl.store(state_at + _AT_EXCESS, excess)
        tl.store(state_at + _AT_SQUARED, squared)
        tl.store(state_at + _AT_BEYOND, beyond)
        tl.store(state_at + _AT_BURST, burst)
        tl.store(state_at + _AT_UNIT, unit)
    return spoilt, tl.where(usable, p, 1.0)


@triton.jit
def _f64(number):  # type: ignore[no-untyped-def]
    """A constant in full precision: beside another tensor Triton would round it to float32 first."""
    return tl.full([], number, tl.float64)


@triton.jit
def _height(value, unit):  # type: ignore[no-untyped-def]
    """``streaming.height``."""
    is_positive = unit == _POSITIVE
    signed = tl.where(unit > 0, _asinh(value / tl.where(unit > 0, unit, 1.0)), value)
    return tl.where(is_positive, tl.log(tl.where(is_positive, value, 1.0)), signed)


@triton.jit
def _asinh(x):  # type: ignore[no-untyped-def]
    """By the logarithm of one and a little, which loses nothing near zero; of large numbers by theirs and of two."""
    size = tl.abs(x)
    y = tl.minimum(size, _f64(1e8))
    square = y * y
    above = y + square / (1 + tl.sqrt(1 + square))  # exp(asinh) less 1
    whole = 1 + above
    small = tl.where(whole == 1, above, tl.log(whole) * (above / tl.where(whole == 1, 1.0, whole - 1)))
    found = tl.where(size > y, tl.log(size) + _f64(_LOG2), small)
    return tl.where(x < 0, -found, found)


@triton.jit
def _spread(heights, following):  # type: ignore[no-untyped-def]
    """``streaming.spread_of``; ``following`` are the heights one place later."""
    is_pair = tl.arange(0, _START) < _START - 1
    differences = following - heights
    drift = _median(differences, is_pair, _f64(_START - 1))
    return _median(tl.abs(differences - drift), is_pair, _f64(_START - 1)) / _MEDIAN_OF_NORMAL / _SQRT2


@triton.jit
def _probability(r, q80, q90, q98, excess, squared):  # type: ignore[no-untyped-def]
    variance = squared - excess * excess
    shape = tl.where(variance > 0, 0.5 * (1 - excess * excess / tl.where(variance > 0, variance, 1.0)), 0.0)
    shape = tl.minimum(tl.maximum(shape, 0.0), _f64(_HEAVIEST_TAIL))
    y = tl.maximum(r - q98, 0.0) / tl.maximum(excess * (1 - shape), _f64(_SMALLEST_SPREAD))
    is_heavy = shape > 0
    heavy = tl.exp(-tl.log(1 + shape * y) / tl.where(is_heavy, shape, 1.0))
    p = _P98 * tl.where(is_heavy, heavy, tl.exp(-y))
    p = tl.where(r <= q98, tl.exp(_LOG90 + (_LOG98 - _LOG90) * (r - q90) / (q98 - q90)), p)
    p = tl.where(r <= q90, tl.exp(_LOG80 + (_LOG90 - _LOG80) * (r - q80) / (q90 - q80)), p)
    p = tl.where(r <= q80, tl.exp(_LOG80 * r / q80), p)
    return tl.where(r <= 0, 1.0, p)


@triton.jit
def _too_often(seen, expected):  # type: ignore[no-untyped-def]
    root = tl.maximum(tl.sqrt(seen) - 1.0, 0.0)
    certain = root * root
    return tl.where(certain > _TOLERANCE * expected, certain / tl.where(expected > 0, expected, 1.0), 1.0)


@triton.jit
def _median(numbers, is_held, held):  # type: ignore[no-untyped-def]
    """The median by rank: each number is compared with each, which a warp does faster than it sorts."""
    place = tl.arange(0, _START)
    known = tl.where(is_held, numbers, _INF)
    mine, other = tl.expand_dims(known, 1), tl.expand_dims(known, 0)
    is_before = (other < mine) | ((other == mine) & (tl.expand_dims(place, 0) < tl.expand_dims(place, 1)))
    rank = tl.sum(is_before.to(tl.int32), 1)
    count = held.to(tl.int32)
    low = tl.sum(tl.where(rank == (count - 1) // 2, known, 0.0), 0)
    high = tl.sum(tl.where(rank == count // 2, known, 0.0), 0)
    return (low + high) / 2
