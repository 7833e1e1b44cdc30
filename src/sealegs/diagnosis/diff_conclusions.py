"""Two runs and where they part in, what follows from it out: sentences with numbers, the first suspect, and its test.

Step by step two runs may be within the noise of each other and still lie apart for good. So means of blocks are
compared: their scatter holds the noise of single steps, and the slow changes that neighbouring steps share.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sealegs.diagnosis.diff import Difference, Parting
from sealegs.diagnosis.settings import NAMES, known_of
from sealegs.record.manifest import dotted
from sealegs.record.run import Run

Floats: TypeAlias = NDArray[np.float64]
About: TypeAlias = Literal["offset", "noise", "parting", "ratio", "resume", "start", "suspect", "none", "unknown"]

BLOCKS, FEWEST_ROWS = 16, 64
"""Blocks in which runs are compared, and the fewest rows that both must have."""
SURE = 6.0
"""Standard errors of the mean of the blocks from which on an offset counts."""
OF_ONE_SIGN, NOISIER = 0.9, 1.2
"""Share of the blocks that must agree, and the growth of noise that is told."""
WHOLE, STEADY = 0.04, 0.06
"""How far a ratio may be off a whole number, and how much it may vary from block to block."""
MOST_FACTOR = 4096
ROUNDING = 1e-3
"""Share by which first losses may differ on the same weights and batch, as of bf16 and other kernels."""
NEAR = 3
"""Rows after a resume within which a parting is put down to it."""
COMPARED = ("loss", "eval_loss", "grad_norm", "reward", "lr")
"""Signals whose offsets and ratios are told, the most telling first."""
SIZES = {
    "accumulation": NAMES["accumulation"].split(),
    "number of ranks": [
        "world_size",
        "ranks",
        "num_gpus",
        "n_gpu",
        "num_processes",
        "data_parallel_size",
        "nproc_per_node",
    ],
    "tensor-parallel size": ["tensor_model_parallel_size", "tensor_parallel_size", "tp_size", "tp"],
}
"""Settings whose value a ratio may be, by the names that they go by."""
ASIDE = (
    *("run_id", "run_name", "name", "output", "dir", "path", "save", "log", "wandb", "project", "host", "port", "time"),
    *("date", "device", "tensorboard", "checkpoint", "resume", "entity", "tags", "notes", "group", "debug", "report"),
)
"""Words in the name of a setting that has no part in the numbers."""
FORWARD = ("layers", "width", "vocabulary", "init_std", "norm_eps", "norm_position", "naive_softmax", "dtype")
UPDATE = ("lr", "beta2", "weight_decay", "clip", "warmup_steps", "optimizer", "batch", "accumulation")
"""Our names of settings that act on the forward pass, and of those that act through updates alone or nearly so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """One thing that follows from the comparison of two runs."""

    about: About
    text: str
    test: str = ""
    """What would settle it."""


@np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore")  # a stranger's numbers may be any
def conclude(a: Run, b: Run, difference: Difference, names: tuple[str, str] = ("A", "B")) -> tuple[Conclusion, ...]:
    """What follows, the most telling first; never empty."""
    found: list[Conclusion] = []
    limits: list[str] = []
    for signal in COMPARED:
        if signal in a.signals and signal in b.signals:
            found += _of_signal(a, b, signal, names, limits)
    found.sort(key=lambda each: ("ratio", "offset", "noise").index(each.about))
    at_resume = _at_a_resume(a, b, difference.partings, names)
    start = _of_the_start(a, b, difference)
    parts = bool(found) or at_resume is not None or any(each.beyond_noise is not None for each in difference.partings)
    if parts:
        found += [] if found else _of_partings(difference.partings, names)
        found = [each for each in (at_resume, *found, start) if each is not None]
        return (*found, *_suspects(difference, starts_alike=start is not None and "same" in start.text))
    if not difference.shared_steps:
        return (Conclusion(about="unknown", text="the runs have no step in common: nothing can be compared"),)
    if not difference.partings and difference.equal:
        text = f"every signal that both have is the same at all {difference.shared_steps:,} steps that both have"
        return (Conclusion(about="none", text=text), *_suspects(difference, starts_alike=False, is_idle=True))
    if not limits:
        few = f"{difference.shared_steps} steps in common are too few for a small offset (it takes {FEWEST_ROWS})"
        return (Conclusion(about="none", text=f"no difference beyond noise; {few}"),)
    seen = f"no difference beyond noise; what would have been seen: {'; '.join(limits)}"
    return (Conclusion(about="none", text=seen), *_suspects(difference, starts_alike=False, is_idle=True))


def _of_signal(a: Run, b: Run, signal: str, names: tuple[str, str], limits: list[str]) -> Iterator[Conclusion]:
    """Ratio, offset and noise of one signal, at the steps that both have."""
    steps, one, other = _pairs(a, b, signal)
    if len(steps) < FEWEST_ROWS:
        return
    parts = np.array_split(np.arange(len(steps)), BLOCKS)
    positive = bool((one > 0).all() and (other > 0).all())
    word = signal.replace("_", " ")
    ratio = _whole_ratio(one, other, parts) if positive and signal != "lr" else None
    if ratio is not None:
        yield _of_ratio(a, b, word, ratio, names)
        return
    apart = np.log(other) - np.log(one) if positive else other - one
    means = np.array([apart[part].mean() for part in parts])
    settled = means[BLOCKS // 4 :]  # what is only at the beginning is no lasting offset
    error = float(settled.std(ddof=1)) / math.sqrt(len(settled))
    offset = float(settled.mean())
    same_sign = float((np.sign(settled) == np.sign(offset)).mean())
    noise = _noise(np.log(one) if positive else one)
    if (
        abs(offset) > SURE * error
        and abs(offset) > 1e-9 * max(1.0, float(np.abs(one).max()))
        and same_sign >= OF_ONE_SIGN
    ):
        begin = _begins(means)
        since, offset = int(steps[parts[begin][0]]), float(means[begin:].mean())
        how = "less" if abs(offset) < noise else "more"
        text = (
            f"{word} of {names[1]} is {_spelt(abs(offset), positive)} {'higher' if offset > 0 else 'lower'} from about "
            f"step {since} on: {how} than the noise of a step ({_spelt(noise, positive)}), and it lasts"
        )
        yield Conclusion(about="offset", text=text)
    elif error > 0:
        limits.append(f"{word} apart for good by {_spelt(SURE * error, positive)}")
    yield from _of_noise(a, b, word, (one, other), parts, names)


def _of_partings(partings: Sequence[Parting], names: tuple[str, str]) -> list[Conclusion]:
    """The first signal that parts by more than noise, where nothing more can be said of how."""
    clear = [each for each in partings if each.signal in COMPARED and each.beyond_noise is not None]
    if not clear:
        return []
    first = min(clear, key=lambda each: each.beyond_noise or 0)
    text = f"{first.signal.replace('_', ' ')} of {names[0]} and {names[1]} parts by more than noise from step"
    return [Conclusion(about="parting", text=f"{text} {first.beyond_noise} on, before the others")]


def _of_noise(
    a: Run, b: Run, word: str, values: tuple[Floats, Floats], parts: Sequence[Any], names: tuple[str, str]
) -> Iterator[Conclusion]:
    noises = np.array([[_noise(side[part]) for part in parts] for side in values])
    if (noises <= 0).any():
        return
    grown = noises[1] / noises[0]
    factor = min(max(float(np.median(grown)), 1 / MOST_FACTOR), float(MOST_FACTOR))
    which, ratio = (names[1], factor) if factor > 1 else (names[0], 1 / factor)
    agree = float(((grown > 1) == (factor > 1)).mean())
    if ratio < NOISIER or agree < OF_ONE_SIGN:
        return
    text = f"steps of {which} are {ratio:.2g} times as noisy in {word}"
    sizes = [known_of(run.manifest).number("batch") for run in (a, b)]
    if sizes[0] and sizes[1] and abs(math.log((sizes[0] / sizes[1]) / factor**2)) < math.log(1.5):
        yield Conclusion(about="noise", text=f"{text}, as batches of {sizes[0]:g} and {sizes[1]:g} are")
        return
    test = f"log batch size, counting tokens and accumulation of both: {ratio**2:.2g} times fewer would do it"
    yield Conclusion(about="noise", text=text, test=test)


def _whole_ratio(one: Floats, other: Floats, parts: Sequence[Any]) -> float | None:
    """The ratio of two signals if it is a whole number, or one over it, in every part of the run."""
    ratios = np.array([float(np.median(other[part] / one[part])) for part in parts])
    ratio = float(np.median(ratios))
    if not math.isfinite(ratio) or ratio <= 0 or float(np.abs(ratios / ratio - 1).max()) > STEADY:
        return None
    factor = min(max(ratio, 1 / ratio), 2.0 * MOST_FACTOR)
    whole = round(factor)
    return ratio if 2 <= whole <= MOST_FACTOR and abs(factor / whole - 1) < WHOLE else None


def _of_ratio(a: Run, b: Run, word: str, ratio: float, names: tuple[str, str]) -> Conclusion:
    whole = round(max(ratio, 1 / ratio))
    larger, smaller = (names[1], names[0]) if ratio > 1 else (names[0], names[1])
    text = f"{word} of {larger} is {max(ratio, 1 / ratio):.3g} times that of {smaller} all along"
    for size, called in SIZES.items():
        values = [_named(run.manifest.settings, called) for run in (a, b)]
        if whole in values:
            text += f": the {size} is {whole}, so one sums over it what the other averages"
            break
    else:
        text += f": a whole number, as if one summed over {whole} micro-batches or ranks what the other averages"
    test = f"run one step of both on the same batch and the same weights, and divide the {word} of {larger} by {whole}"
    return Conclusion(about="ratio", text=text, test=test)


def _named(settings: Mapping[str, Any], names: Sequence[str]) -> int | None:
    """A setting by one of its names, as a whole number."""
    leaves = {name.rpartition(".")[2].lower().replace("-", "_"): value for name, value in dotted(settings)}
    for name in names:
        try:
            return int(str(leaves[name]))
        except (KeyError, ValueError):
            continue
    return None


def _at_a_resume(a: Run, b: Run, partings: Sequence[Parting], names: tuple[str, str]) -> Conclusion | None:
    """A parting that begins where one of the runs was resumed, and the other was not."""
    resumed = [_resumes(run) for run in (a, b)]
    for parting in sorted(partings, key=lambda each: COMPARED.index(each.signal) if each.signal in COMPARED else 99):
        for begins in filter(None, {parting.first, parting.beyond_noise}):
            for place, name in ((0, names[0]), (1, names[1])):
                steps = (a, b)[place].steps
                later = [step for step in resumed[place] - resumed[1 - place] if step <= begins]
                if later and int(((steps > max(later)) & (steps <= begins)).sum()) <= NEAR and begins > int(steps[0]):
                    word = parting.signal.replace("_", " ")
                    text = f"{word} parts at step {begins}, where {name} was resumed (at step {max(later)})"
                    test = (
                        "compare weights, moments, learning rate, loss scale and the next batch before and after the "
                        "resume: `sealegs audit` on the checkpoint of each says what it lacks"
                    )
                    return Conclusion(about="resume", text=text, test=test)
    return None


def _resumes(run: Run) -> set[int]:
    """The steps at which a run was resumed or launched anew."""
    told = {event.step for event in run.events if event.kind == "resume"}
    return told | {int(step) for step in run.steps[1:][np.diff(run.segments) > 0].tolist()}


def _of_the_start(a: Run, b: Run, difference: Difference) -> Conclusion | None:
    """What the first loss says, which is measured before any update."""
    if "loss" not in a.signals or "loss" not in b.signals or not len(a.steps) or not len(b.steps):
        return None
    if a.steps[0] != b.steps[0] or a.steps[0] > 1:
        return None
    steps, one, other = _pairs(a, b, "loss")
    if len(steps) < 2 or steps[0] != a.steps[0]:
        return None
    apart = abs(one[0] - other[0])
    if apart <= 1e-6 * abs(one[0]):
        parting = next((each for each in difference.partings if each.signal == "loss"), None)
        if parting is None:
            return None
        text = (
            f"the first loss is the same ({one[0]:.6g}) and they part at step {parting.first}: weights, batch and "
            "forward pass are the same at the start, so an update or a later batch differs"
        )
        return Conclusion(about="start", text=text, test="compare gradient norm and learning rate of the first update")
    losses = f"{one[0]:.6g}, {other[0]:.6g}"
    if apart <= ROUNDING * abs(one[0]):
        text = f"the first losses are as good as the same ({losses}): other kernels or rounding differ so much"
        return Conclusion(about="start", text=text)
    text = f"the first loss differs already ({losses}), before any update: weights, batch or loss differ"
    return Conclusion(about="start", text=text, test="run one batch of A on the weights of both")


def _suspects(difference: Difference, *, starts_alike: bool, is_idle: bool = False) -> Iterator[Conclusion]:
    """The settings and versions that differ, as suspects: the first is the one with the most to do with it."""
    ours = {theirs: name for name, names in NAMES.items() for theirs in names.split()}

    def order(name: str) -> int:
        known = ours.get(name.rpartition(".")[2].lower().replace("-", "_"))
        return 0 if known in (UPDATE if starts_alike else (*UPDATE, *FORWARD)) else 1 if known or name == "seed" else 2

    settings = [name for name in difference.settings if not any(word in name.lower() for word in ASIDE)]
    named = [(name, difference.settings[name]) for name in sorted(settings, key=order)]
    named += [(name, pair) for name, pair in difference.versions.items() if name != "sealegs"]
    if not named:
        return
    name, (old, new) = named[0]
    what = f"{name} ({old!r:.60} -> {new!r:.60})"
    if is_idle:
        more = f" and {len(named) - 1} more" if len(named) > 1 else ""
        yield Conclusion(about="suspect", text=f"{what}{more} differ, and the signals do not show it")
        return
    if name == "seed":
        text = f"{what} is the first suspect: with another seed no step can be compared, means alone"
        yield Conclusion(about="suspect", text=text, test="run B again with the seed of A")
    elif len(named) == 1:
        test = f"run B again with {name} as in A: if they still part, it is not this"
        yield Conclusion(about="suspect", text=f"{what} is all that differs, and the first suspect", test=test)
    else:
        others = ", ".join(each for each, _ in named[1:4]) + (" ..." if len(named) > 4 else "")
        test = f"run B again with {name} as in A and the rest as it is; then with half of the rest"
        yield Conclusion(about="suspect", text=f"{what} is the first suspect of {len(named)}: also {others}", test=test)


def _pairs(a: Run, b: Run, signal: str) -> tuple[NDArray[np.int64], Floats, Floats]:
    """The finite values of a signal at the steps at which both have one."""
    if not (a.has_numbers(signal) and b.has_numbers(signal)):
        return np.empty(0, np.int64), np.empty(0), np.empty(0)
    (steps, one), (others, other) = a.series(signal), b.series(signal)
    shared, in_one, in_other = np.intersect1d(steps, others, assume_unique=True, return_indices=True)
    one, other = one[in_one], other[in_other]
    sound = np.isfinite(one) & np.isfinite(other) & (np.abs(one) < 1e30) & (np.abs(other) < 1e30)
    return shared[sound], one[sound], other[sound]


def _noise(values: Floats) -> float:
    """The noise from step to step, by a middle that a few leaps do not move."""
    return float(np.median(np.abs(np.diff(values)))) * 1.4826 / math.sqrt(2) if len(values) > 1 else 0.0


def _begins(means: Floats) -> int:
    """The block from which on two runs are apart, if they were alike before it: where that leaves the least."""

    def left(begin: int) -> float:
        return float((means[:begin] ** 2).sum() + ((means[begin:] - means[begin:].mean()) ** 2).sum())

    return min(range(BLOCKS * 3 // 4 + 1), key=left)


def _spelt(value: float, is_share: bool) -> str:
    return f"{math.expm1(min(value, 50.0)):.2%}" if is_share else f"{value:.3g}"
