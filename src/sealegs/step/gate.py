"""The gate: decides on the device, from loss and gradient norm, whether the update of a step is applied.

It makes the same test as ``detectors/spike.py`` on the same statistic as ``stats/streaming.py`` (which
``diagnosis/curve/live_statistic.py`` scans whole curves with), in float64, for both signals at once. The host never
decides; it reads afterwards what was decided, and with which p.

On CUDA one kernel does it (``step/gate_triton.py``) or, without Triton, one captured graph of this torch code.
``tests/step/test_gate.py`` holds it equal to the host, ``tests/gpu/test_gate_on_cuda.py`` the kernel and the graph.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sealegs.detectors.spike import CLIPPED, FADING, FIRST_JUDGED, SUSPICIOUS, YOUNG, Spike, SpikeState, heeding
from sealegs.judge import SAME
from sealegs.stats import calibration, streaming

SCALARS = (
    *("age", "early", "level", "slope", "scale", "q80", "q90", "q98", "excess", "excess_squared", "beyond", "burst"),
    *("unit", "values", "hundredths", "thousandths", "largest", "met"),
)
"""The state of a signal besides its first values: ``StreamState``, ``CalibrationAudit``, and what else of
``SpikeState`` an update is decided by. That a signal has been negative is said by its unit."""
STREAM = SCALARS.index("unit")
"""How many of the scalars an announced change resets: those of the stream. The first negative value resets the others,
too."""
FIRST_STATE = (
    *(0.0, 0.0, 0.0, 0.0, 1.0, *streaming.FIRST_QUANTILES, *streaming.FIRST_EXCESS, 0.0, 0.0),
    *(0.0,) * (len(SCALARS) - STREAM + streaming.START),
)
UNIT = SCALARS.index("unit")
LIMITS = ("chance", "smallest", "gross", "growth")
"""What a signal is judged by, in this order: ``gate``, log ``smallest``, ``gross`` and ``growth`` of its ``Spike``."""
ROW = ("loss", "grad_norm", "gate_closed", "loss_p", "grad_norm_p", "worst_tensor")
"""What ``decide`` gives, in this order."""
GATE_CLOSED = ROW.index("gate_closed")
"""Place of the decision in the row; the values of the two signals come before it."""

Decide = Callable[[Tensor, Tensor, Tensor], None]


class HostFacts(NamedTuple):
    """What the host knows of a step before the device decides it."""

    announced: bool = False
    """Whether a change is announced at this step."""
    coarse: bool = False
    """Whether the statistic does not judge because of an announced change."""
    held: bool = False
    """Whether the update is skipped in any case: ``judge.Tally.is_held``."""
    restrained: bool = False
    """Whether only what is not finite closes the gate: ``judge.Tally.is_restrained``."""
    clip_norm: float = math.inf
    """The norm that gradients are clipped to, also if the loop clips."""


CLIP_NORM = HostFacts._fields.index("clip_norm")
"""Place of the clip norm among the host's facts; the flags come before it."""


class Gate:
    """The test of a step before its update. All tensors stay where they are: CUDA graphs and kernels keep addresses."""

    def __init__(self, device: torch.device, detectors: Sequence[Spike], clip: float | None = None) -> None:
        """``detectors`` judge loss and gradient norm; ``clip`` is the largest norm that an update may have."""
        assert [detector.signal for detector in detectors] == ["loss", "grad_norm"]
        double: Any = {"dtype": torch.float64, "device": device}
        limits = [(d.gate, math.log(d.smallest), d.gross, d.growth) for d in detectors]
        self.limits = torch.tensor(limits, **double)
        self.state = torch.tensor([FIRST_STATE] * len(limits), **double)
        self.first = self.state[:, : len(SCALARS)].clone()
        self.told = torch.tensor(HostFacts(), **double)
        """The host's facts of the step, in the order of ``HostFacts``."""
        self.row = torch.zeros(len(ROW), **double)
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)
        """Read by fused optimizers: 1 where the update is to be skipped."""
        self.grad_scale = torch.ones((), dtype=torch.float32, device=device)
        """What fused optimizers divide gradients by, which clips them."""
        self.clip = torch.full((), math.inf, **double)
        self._clipped_at: float | None = None
        self.grad_norm = self.row[ROW.index("grad_norm")]
        """The norm of all gradients of the step."""
        self.without_kernel = ""
        """Why a captured graph replaces the kernel, where it does."""
        self.kernels: dict[Any, Any] = {}
        """Compiled kernels, by the types and addresses of their arguments."""
        self._nowhere = torch.full((), -1.0, **double)
        self._told_before = HostFacts()
        self._decide: Decide = _quickest(self)
        self.clip_at(clip)

    def decide(
        self,
        loss: Tensor,
        norms: Tensor,
        worst: Tensor | None = None,
        told: "HostFacts | None" = None,
    ) -> Tensor:
        """Judge a step and learn from it. Gives the row, the same tensor every time.

        ``norms`` is a vector with the norm of each gradient, or one number for all; then ``worst`` is the index of the
        tensor with the largest norm. The row passes it on.
        """
        told = told or HostFacts()
        if told != self._told_before:
            self._told_before = told
            for place, known in enumerate(told):
                self.told[place].fill_(known)  # item assignment would wait for the device
        self._decide(loss.detach(), norms.detach(), self._nowhere if worst is None else worst)
        return self.row

    def clip_at(self, limit: float | None) -> None:
        """Let ``grad_scale`` bring gradients down to this norm from here on."""
        if limit != self._clipped_at:
            self._clipped_at = limit
            self.clip.fill_(math.inf if limit is None else limit)

    def begin_from(self, states: Sequence[SpikeState], skipped: Sequence[float] = ()) -> None:
        """Continue from the host's states; ``skipped`` holds loss and gradient norm of the step before, if it was
        skipped."""
        # gate_closed, no surprise in either signal, no worst tensor
        self.load([flat(heeding(state, {})) for state in states], [*skipped, 1.0, 1.0, 1.0, -1.0] if skipped else None)

    def load(self, state: Sequence[Sequence[float]], row: Sequence[float] | None = None) -> None:
        """Continue from ``state.tolist()`` and ``row.tolist()`` of another gate."""
        self.state.copy_(torch.tensor(state, dtype=torch.float64))
        if row is not None:
            self.row.copy_(torch.tensor(row, dtype=torch.float64))


def flat(state: SpikeState) -> list[float]:
    """The part of a host state that the gate remembers, as numbers in the order of ``SCALARS``."""
    stream = state.stream
    scalars = (stream.age, len(stream.early), *stream[2:], *state.audit, state.largest, state.met)
    return [*map(float, scalars), *(0.0,) * (streaming.START - len(stream.early)), *stream.early]


def _quickest(gate: Gate) -> Decide:
    if gate.state.is_cuda:
        kept = gate.state.clone()
        try:
            from sealegs.step.gate_triton import launch

            launch(gate, gate.limits[0, 0], gate.limits[0, 0], gate.limits[0, 0])  # compiles, which needs a C compiler
        except Exception as error:
            gate.without_kernel = f"{type(error).__name__}: {error}"
            return _captured(gate)
        finally:
            gate.state.copy_(kept)
            gate.row.zero_()
        return lambda loss, norms, worst: launch(gate, loss, norms, worst)
    return lambda loss, norms, worst: decide_in_torch(gate, loss, *_all_together(norms, worst))


def _all_together(norms: Tensor, worst: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of all gradients, and the index of the largest; NaN is larger than anything."""
    return (torch.linalg.vector_norm(norms), norms.argmax()) if norms.dim() else (norms, worst)


def _captured(gate: Gate) -> Decide:
    """Capture the operations below as one launch. They run once before, on copies: capturing needs them loaded."""
    loss = torch.ones((), dtype=torch.float64, device=gate.state.device)
    grad_norm, worst = loss.clone(), loss.clone()
    kept = gate.state.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        decide_in_torch(gate, loss, grad_norm, worst)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decide_in_torch(gate, loss, grad_norm, worst)
    gate.state.copy_(kept)

    def decide(loss_now: Tensor, norms_now: Tensor, worst_now: Tensor) -> None:
        grad_norm_now, worst_now = _all_together(norms_now, worst_now)
        loss.copy_(loss_now.reshape(()))
        grad_norm.copy_(grad_norm_now.reshape(()))
        worst.copy_(worst_now.reshape(()))
        graph.replay()

    return decide


@torch.no_grad()
def decide_in_torch(gate: Gate, loss: Tensor, grad_norm: Tensor, worst: Tensor) -> None:
    """Decide one step, both signals side by side: detectors/spike.py and stats/streaming.py line for line."""
    announced, widened, held, restrained = (gate.told[:CLIP_NORM] > 0).unbind()
    clip_norm = gate.told[CLIP_NORM]
    state, early_values = gate.state[:, : len(SCALARS)], gate.state[:, len(SCALARS) :]
    chance, smallest, gross, growth = gate.limits.unbind(1)

    value = torch.stack((loss.reshape(()).double(), grad_norm.reshape(()).double()))
    finite = torch.isfinite(value)
    was_signed = state[:, UNIT] != streaming.POSITIVE
    is_signed = was_signed | (finite & (value < 0))
    changes_scale = is_signed & ~was_signed
    begins_anew = changes_scale | announced
    state[:, :STREAM] = torch.where(begins_anew[:, None], gate.first[:, :STREAM], state[:, :STREAM])
    state[:, STREAM:] = torch.where(changes_scale[:, None], gate.first[:, STREAM:], state[:, STREAM:])
    state[:, UNIT] = torch.where(is_signed & begins_anew, streaming.NO_UNIT_YET, state[:, UNIT])
    age, early, level, slope, scale, q80, q90, q98, excess, squared, _, burst, unit, *more = state.unbind(1)
    values, hundredths, thousandths, largest, met = more
    usable = finite & ((value > 0) | (is_signed & (value < 0)))
    value_or_one = torch.where(usable, value, 1.0)
    seen = age + early
    coarse = (seen < YOUNG) | widened

    limit = torch.where(seen >= FIRST_JUDGED, gross * torch.maximum(largest, met), math.inf)
    limit = torch.where(torch.isinf(gross) | is_signed, math.inf, limit)
    correction = _correction(values, hundredths, thousandths)
    x = _height(value_or_one, unit)
    e = x - (level + slope)
    p = torch.where(coarse | (e <= smallest), 1.0, _probability(e / scale, q80, q90, q98, excess, squared))
    is_gross = ~(value_or_one <= limit)
    is_exploding = (burst > 0) & (p < chance / correction) & (value_or_one >= growth * largest)

    joins = (burst > 0) & (p < streaming.LEVELS[2])
    suspicious = usable & ((p < SUSPICIOUS / correction) | joins) & ~coarse
    in_burst = suspicious & (burst > 0)
    taken = torch.minimum(value_or_one, limit)
    shifted = torch.cat((early_values[:, 1:], x[:, None]), 1)
    counted = usable & ~coarse & ~in_burst
    next_more = (
        torch.where(counted, values * calibration.MEMORY + 1.0, values),
        torch.where(counted, hundredths * calibration.MEMORY + (p < calibration.CHECKED[0]), hundredths),
        torch.where(counted, thousandths * calibration.MEMORY + (p < calibration.CHECKED[1]), thousandths),
        torch.where(usable, torch.maximum(largest * FADING, taken), largest),
        torch.where(usable & is_gross, torch.maximum(met, taken), met),
    )
    begins = early == streaming.START - 1
    unit = torch.where(begins & is_signed, _unit(shifted), unit)
    shifted = torch.where((begins & is_signed)[:, None], torch.asinh(shifted / unit[:, None]), shifted)
    next_stream = (*_learned(state, x, suspicious, in_burst, shifted), (unit, state[:, UNIT]))
    next_state = torch.stack((*(torch.where(usable, a, b) for a, b in next_stream), *next_more), 1)
    next_early = torch.where((usable & (early < streaming.START))[:, None], shifted, early_values)

    last = gate.row[:GATE_CLOSED]
    is_same = (value - last).abs() <= SAME * torch.maximum(value.abs(), last.abs())
    is_repeated = (gate.row[GATE_CLOSED] > 0) & is_same.all()
    is_beyond = ~(value_or_one <= torch.where(clip_norm <= limit, limit * CLIPPED, limit))
    spoilt = (usable & ~is_signed & (is_beyond | is_exploding)).any() | held
    closed = ((spoilt & ~restrained & ~is_repeated) | ~finite.all()).double()
    gate.row.copy_(torch.cat((value, closed[None], torch.where(usable, p, 1.0), worst.double().reshape(1))))
    gate.found_inf.copy_(closed)
    scale = torch.clamp((value[1] + 1e-6) / gate.clip, min=1.0)
    gate.grad_scale.copy_(torch.where(torch.isfinite(scale), scale, 1.0))
    gate.state.copy_(torch.cat((next_state, next_early), 1))


def _height(value: Tensor, unit: Tensor) -> Tensor:
    """``streaming.height``."""
    is_positive, is_known = unit == streaming.POSITIVE, unit > 0
    signed = torch.where(is_known, torch.asinh(value / torch.where(is_known, unit, 1.0)), value)
    return torch.where(is_positive, torch.log(torch.where(is_positive, value, 1.0)), signed)


def _learned(
    state: Tensor, x: Tensor, suspicious: Tensor, in_burst: Tensor, shifted: Tensor
) -> tuple[tuple[Tensor, Tensor], ...]:
    """``streaming.learn``: each scalar of the stream after the value, and before."""
    age, early, level, slope, scale, q80, q90, q98, excess, squared, beyond, burst, *_ = state.unbind(1)
    started = early >= streaming.START
    begins = early == streaming.START - 1
    begun_level, begun_scale = _begun(shifted)

    e = x - (level + slope)
    r = e / scale
    surprised = torch.where(e.abs() > streaming.MEDIAN_OF_NORMAL * scale, 0.5, -0.5)
    accepted = started & suspicious & (burst + 1 >= streaming.PATIENCE)
    bounded = torch.where(in_burst, 1.0, r.clamp(-streaming.WINSOR, streaming.WINSOR)) * scale
    level_rate = torch.clamp(1 / (age / 4 + 4), min=streaming.LEVEL_RATE)
    scale_rate = torch.clamp(1 / (age + 10), min=streaming.SCALE_RATE)
    scaled = torch.clamp(scale * torch.exp(scale_rate * surprised), min=streaming.SMALLEST_SCALE)
    widened = torch.maximum(scale, streaming.ACCEPTED_SPREAD * e.abs())

    learns_tail = started & ~in_burst & ~accepted & (age >= streaming.SETTLED)
    rate = torch.clamp(1 / (age - streaming.SETTLED + 20).clamp(min=1), min=streaming.QUANTILE_RATE)
    is_beyond = learns_tail & (r > q98)
    y = torch.clamp(r - q98, max=streaming.LARGEST_EXCESS)
    speed = torch.clamp(1 / (beyond + 17), min=streaming.TAIL_RATE)
    low, middle, high = streaming.LEVELS
    next_q80 = torch.clamp(q80 + rate * ((r > q80).double() - low), min=streaming.QUANTILE_GAP)
    next_q90 = torch.maximum(q90 + rate * ((r > q90).double() - middle), next_q80 + streaming.QUANTILE_GAP)
    next_q98 = torch.maximum(q98 + rate * ((r > q98).double() - high), next_q90 + streaming.QUANTILE_GAP)
    where = torch.where
    return (
        (where(started, age + 1, age), age),
        (where(started, early, early + 1), early),
        (
            where(accepted, x, where(started, level + slope + level_rate * bounded, where(begins, begun_level, level))),
            level,
        ),
        (where(accepted, 0.0, where(started, slope + streaming.SLOPE_RATE * bounded, slope)), slope),
        (
            where(accepted, widened, where(started, where(in_burst, scale, scaled), where(begins, begun_scale, scale))),
            scale,
        ),
        (where(learns_tail, next_q80, q80), q80),
        (where(learns_tail, next_q90, q90), q90),
        (where(learns_tail, next_q98, q98), q98),
        (where(is_beyond, excess + speed * (y - excess), excess), excess),
        (where(is_beyond, squared + speed * (y * y - squared), squared), squared),
        (where(is_beyond, beyond + 1, beyond), beyond),
        (where(accepted, 0.0, where(started, where(suspicious, burst + 1, 0.0), burst)), burst),
    )


def _probability(r: Tensor, q80: Tensor, q90: Tensor, q98: Tensor, excess: Tensor, squared: Tensor) -> Tensor:
    """``streaming.probability``."""
    low, middle, high = streaming.LOG_LEVELS
    variance = squared - excess * excess
    shape = torch.where(variance > 0, 0.5 * (1 - excess * excess / torch.where(variance > 0, variance, 1.0)), 0.0)
    shape = shape.clamp(0.0, streaming.HEAVIEST_TAIL)
    spread = torch.clamp(excess * (1 - shape), min=streaming.SMALLEST_SPREAD)
    y = torch.clamp(r - q98, min=0.0) / spread
    is_heavy = shape > 0
    safe = torch.where(is_heavy, shape, 1.0)
    beyond = streaming.LEVELS[2] * torch.where(is_heavy, (1 + shape * y) ** (-1 / safe), torch.exp(-y))
    p = torch.where(r <= q98, torch.exp(middle + (high - middle) * (r - q90) / (q98 - q90)), beyond)
    p = torch.where(r <= q90, torch.exp(low + (middle - low) * (r - q80) / (q90 - q80)), p)
    p = torch.where(r <= q80, torch.exp(low * r / q80), p)
    return torch.where(r <= 0, 1.0, p)


def _correction(values: Tensor, hundredths: Tensor, thousandths: Tensor) -> Tensor:
    """``CalibrationAudit.correction``."""

    def excess(seen: Tensor, expected: Tensor) -> Tensor:
        certain = torch.clamp(torch.sqrt(seen) - 1.0, min=0.0) ** 2
        return torch.where(
            certain > calibration.TOLERANCE * expected, certain / torch.where(expected > 0, expected, 1.0), 1.0
        )

    low, lower = calibration.CHECKED
    largest = torch.maximum(excess(hundredths, low * values), excess(thousandths, lower * values))
    return torch.clamp(largest, max=calibration.LARGEST_CORRECTION)


def _begun(early: Tensor) -> tuple[Tensor, Tensor]:
    """``streaming.begun``: level and scale of the first values."""
    return early[:, -9:].median(1).values, torch.clamp(_spread(early), min=streaming.SMALLEST_SCALE)


def _unit(early: Tensor) -> Tensor:
    """The unit of ``streaming.begun_signed``."""
    size, noise = _middle(early.abs()), streaming.NEARLY_LINEAR * _spread(early)
    smallest, largest = streaming.UNITS
    return torch.clamp(torch.where(noise > size, noise, size), smallest, largest)


def _spread(early: Tensor) -> Tensor:
    """``streaming.spread_of``."""
    differences = early[:, 1:] - early[:, :-1]
    drift = differences.median(1).values
    spread = (differences - drift[:, None]).abs().median(1).values / streaming.MEDIAN_OF_NORMAL
    return spread / math.sqrt(2)


def _middle(values: Tensor) -> Tensor:
    """The median of an even number of values, of which torch gives the lower middle."""
    ordered = values.sort(1).values
    half = values.shape[1] // 2
    return (ordered[:, half - 1] + ordered[:, half]) / 2
