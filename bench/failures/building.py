"""A seed in, what a team could see of a failed run out: noisy curves in the layouts of frameworks.

The curves are of our own making. Noise is multiplicative, heavy-tailed and remembers itself, as that of batches is; the
columns beside the loss are there because the frameworks write them, and most of them say nothing.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Curve = NDArray[np.float64]
Columns = Mapping[str, Sequence[float] | Curve]
Steps = Sequence[int] | NDArray[Any]
Chatter = Mapping[int, str]
"""Lines of a program that stand before the row of a step."""


@dataclass(frozen=True)
class Evidence:
    """The files of a team, and the one that it would hand to `sealegs check`."""

    files: dict[str, str]
    main: str
    settings: str | None = None
    """The file of settings that lies beside it."""


@dataclass(frozen=True)
class Failure:
    """A documented kind of failure, and what an answer to it is worth."""

    make: Callable[[np.random.Generator], Evidence]
    area: str
    source: str
    right: tuple[str, ...]
    """Cards of causes.toml, each of them right; empty where none of them is."""
    verdicts: tuple[str, ...]
    near: tuple[str, ...] = ()
    """Neighbours: neither right nor wrong."""
    wrong: tuple[str, ...] = ()
    """Where no card is right: what it would be wrong to say with confidence. Else: every other card."""
    column: tuple[str, ...] = ()
    """Where the trouble stands in a column: a page that says so has one of these words."""

    @property
    def name(self) -> str:
        """The name of the generator, in words."""
        return self.make.__name__.strip("_").replace("_", " ")


@dataclass
class Half:
    """A register of failures."""

    failures: list[Failure] = field(default_factory=list)

    def failure(
        self,
        area: str,
        source: str,
        *,
        right: Sequence[str] = (),
        verdicts: Sequence[str] = ("act",),
        near: Sequence[str] = (),
        wrong: Sequence[str] = (),
        column: Sequence[str] = (),
    ) -> Callable[[Callable[[np.random.Generator], Evidence]], Callable[[np.random.Generator], Evidence]]:
        """Register the generator below, whose docstring tells the story."""

        def registered(make: Callable[[np.random.Generator], Evidence]) -> Callable[[np.random.Generator], Evidence]:
            answers = {"right": right, "verdicts": verdicts, "near": near, "wrong": wrong, "column": column}
            self.failures.append(Failure(make, area, source, **{name: tuple(value) for name, value in answers.items()}))
            return make

        return registered


# ------------------------------------------------------------------------------------------------------------ curves


def noise(rng: np.random.Generator, count: int, size: float = 0.015, *, memory: float = 0.3, tail: float = 5) -> Curve:
    """Factors about 1: heavy tails, each a little like the one before."""
    shocks = rng.standard_t(tail, count) * size * math.sqrt(1 - memory**2) / math.sqrt(tail / (tail - 2))
    walk = np.empty(count)
    last = 0.0
    for place, shock in enumerate(shocks):
        last = memory * last + float(shock)
        walk[place] = last
    return np.asarray(np.exp(walk))


def falling(count: int, first: float, last: float, *, bend: float = 0.02, power: float = 0.6) -> Curve:
    """A loss that falls by a power of the step, from one level to about another."""
    shape = (1 + np.arange(count) / max(bend * count, 1)) ** -power
    shape = (shape - shape[-1]) / (1 - shape[-1])
    return np.asarray(last + (first - last) * shape)


def cosine(count: int, peak: float, *, warmup: float = 0.02, floor: float = 0.1, total: int | None = None) -> Curve:
    """A learning rate: a linear warm-up, then a cosine to a share of the peak."""
    total = total or count
    step, warm = np.arange(count), max(int(warmup * total), 1)
    share = np.clip((step - warm) / max(total - warm, 1), 0, 1)
    falls = peak * (floor + (1 - floor) * 0.5 * (1 + np.cos(np.pi * share)))
    return np.asarray(np.where(step < warm, peak * (step + 1) / warm, falls))


def norms(rng: np.random.Generator, count: int, last: float = 0.4, *, first: float = 4.0, size: float = 0.15) -> Curve:
    """Gradient norms: large at first, heavy-tailed."""
    return falling(count, first, last, bend=0.005, power=0.9) * noise(rng, count, size, memory=0.2, tail=4)


def steady(rng: np.random.Generator, count: int, level: float, size: float = 0.02) -> Curve:
    """A column that says nothing."""
    return level * noise(rng, count, size, memory=0.1)


def between(rng: np.random.Generator, low: float, high: float) -> float:
    """A severity, evenly by its logarithm."""
    return float(math.exp(rng.uniform(math.log(low), math.log(high))))


def ramp(count: int, since: int, until: int | None = None) -> Curve:
    """0 up to one step, 1 from another on, straight between."""
    until = count if until is None else until
    return np.asarray(np.clip((np.arange(count) - since) / max(until - since, 1), 0, 1))


def excursion(count: int, at: int, height: float, decay: float) -> Curve:
    """A factor that leaps at a step and comes back by halves."""
    since = np.arange(count) - at
    return np.asarray(1 + (height - 1) * np.where(since >= 0, np.exp(-np.maximum(since, 0) / decay), 0))


# ----------------------------------------------------------------------------------------------------------- layouts


def _number(value: float) -> float | str:
    return (
        value
        if math.isfinite(value)
        else {True: "NaN"}.get(math.isnan(value), "Infinity" if value > 0 else "-Infinity")
    )


def rows_of(steps: Steps, columns: Columns) -> list[dict[str, float]]:
    """A row a step; a NaN in a column of an evaluation is left to whoever writes it."""
    return [
        {"step": int(step), **{name: float(values[place]) for name, values in columns.items()}}
        for place, step in enumerate(steps)
    ]


def megatron(
    steps: Steps,
    columns: Columns,
    *,
    arguments: Mapping[str, object] | None = None,
    chatter: Chatter | None = None,
    batch: int = 512,
) -> str:
    """The text of Megatron-LM: its block of arguments, then a line for each iteration, bars between the fields."""
    lines = []
    if arguments:
        lines.append("------------------------ arguments ------------------------")
        lines += [f"  {name} {'.' * max(46 - len(name), 3)} {value}" for name, value in sorted(arguments.items())]
        lines.append("-------------------- end of arguments ---------------------")
    last, place_of = max(steps), {"loss": "lm loss", "grad_norm": "grad norm", "lr": "learning rate"}
    for row in rows_of(steps, columns):
        step = int(row.pop("step"))
        if chatter and step in chatter:
            lines.append(chatter[step])
        skipped, nans, elapsed = row.pop("skipped", 0.0), row.pop("nans", 0.0), row.pop("elapsed", 1843.0)
        size = row.pop("batch", float(batch))
        fields = [f"iteration {step:8d}/{last:8d}", f"consumed samples: {int(step * size):12d}"]
        fields.append(f"elapsed time per iteration (ms): {elapsed:.1f}")
        fields.append(f"learning rate: {row.pop('lr', 3e-4):.6E}")
        fields.append(f"global batch size: {int(size):5d}")
        scale = row.pop("loss_scale", 1.0)
        loss = row.pop("loss")
        if not skipped or math.isfinite(loss):
            fields.append(f"lm loss: {loss:.6E}".replace("NAN", "nan").replace("INF", "inf"))
        fields.append(f"loss scale: {scale:.1f}")
        fields += [f"{place_of.get(name, name)}: {value:.3f}" for name, value in row.items()]
        fields.append(f"number of skipped iterations: {int(skipped):3d}")
        fields.append(f"number of nan iterations: {int(nans):3d}")
        lines.append(" " + " | ".join(fields) + " |")
    return "\n".join(lines) + "\n"


def trainer_state(
    steps: Steps,
    columns: Columns,
    *,
    evals: Mapping[int, Mapping[str, float]] | None = None,
    per_epoch: int = 500,
) -> str:
    """Hugging Face's trainer_state.json."""
    names = {"lr": "learning_rate"}
    history: list[dict[str, object]] = []
    for row in rows_of(steps, columns):
        step = int(row.pop("step"))
        shown: dict[str, object] = {names.get(name, name): float(f"{value:.8g}") for name, value in row.items()}
        history.append({"epoch": round(step / per_epoch, 4), **shown, "step": step})
        if evals and step in evals:
            ran = {"eval_runtime": 61.2, "eval_samples_per_second": 32.6, "eval_steps_per_second": 4.1}
            history.append({"epoch": round(step / per_epoch, 4), **evals[step], **ran, "step": step})
    last = int(max(steps))
    head = {"best_metric": None, "best_model_checkpoint": None, "epoch": last / per_epoch, "global_step": last}
    tail = {"logging_steps": 10, "max_steps": last, "num_train_epochs": 3, "train_batch_size": 4}
    return json.dumps({**head, "is_local_process_zero": True, "log_history": history, **tail}, indent=2)


def jsonl(steps: Steps, columns: Columns, *, step_name: str = "_step", sparse: Mapping[str, int] | None = None) -> str:
    """A JSON object a line; a column in ``sparse`` is there each so many rows."""
    lines = []
    for place, row in enumerate(rows_of(steps, columns)):
        step = int(row.pop("step"))
        kept = {name: _number(value) for name, value in row.items() if not (sparse and place % sparse.get(name, 1))}
        text = json.dumps({step_name: step, **kept})
        lines.append(text.replace('"NaN"', "NaN").replace('"Infinity"', "Infinity"))
    return "\n".join(lines) + "\n"


def table(steps: Steps, columns: Columns, *, step_name: str = "step", sparse: Mapping[str, int] | None = None) -> str:
    """CSV, with empty cells where a column was not measured."""
    lines = [",".join([step_name, *columns])]
    for place, row in enumerate(rows_of(steps, columns)):
        step = int(row.pop("step"))
        cells = ["" if sparse and place % sparse.get(name, 1) else f"{value:.6g}" for name, value in row.items()]
        lines.append(",".join([str(step), *cells]))
    return "\n".join(lines) + "\n"


def torchtitan(steps: Steps, columns: Columns, *, chatter: Chatter | None = None) -> str:
    """The console of torchtitan."""
    lines = []
    for row in rows_of(steps, columns):
        step = int(row.pop("step"))
        if chatter and step in chatter:
            lines.append(chatter[step])
        clock = f"{step // 3600 % 24:02d}:{step // 60 % 60:02d}:{step % 60:02d},101"
        head = f"[rank0]:[titan] 2026-03-{1 + step // 86400 % 28:02d} {clock}"
        tps = row.pop("tps", 6120.0)
        extra = "  ".join(f"{name}: {value:.4f}" for name, value in row.items() if name not in ("loss", "grad_norm"))
        text = (
            f"step: {step:2d}  loss: {row['loss']:8.5f}  grad_norm: {row['grad_norm']:7.4f}  memory: 61.22GiB(77.36%)"
        )
        text += f"  tps: {tps:,.0f}  tflops: {tps / 16:.2f}  mfu: {tps / 158:.2f}%" + (f"  {extra}" if extra else "")
        lines.append(f"{head} - root - INFO - {text}")
    return "\n".join(lines) + "\n"


def nanogpt(
    steps: Steps, columns: Columns, *, evals: Mapping[int, tuple[float, float]], chatter: Chatter | None = None
) -> str:
    """The console of nanoGPT: evaluations between the iterations."""
    lines = ["tokens per iteration will be: 491,520", "number of parameters: 123.59M"]
    for row in rows_of(steps, columns):
        step = int(row["step"])
        if chatter and step in chatter:
            lines.append(chatter[step])
        if step in evals:
            lines.append(f"step {step}: train loss {evals[step][0]:.4f}, val loss {evals[step][1]:.4f}")
        lines.append(f"iter {step}: loss {row['loss']:.4f}, time {row.get('ms', 271.3):.2f}ms, mfu 37.{step % 97:02d}%")
    return "\n".join(lines) + "\n"


def fairseq(steps: Steps, columns: Columns, *, chatter: Chatter | None = None) -> str:
    """The console of fairseq and metaseq: a name, an equals sign, a value."""
    lines = []
    for row in rows_of(steps, columns):
        step = int(row.pop("step"))
        if chatter and step in chatter:
            lines.append(chatter[step])
        values = {
            "loss": row["loss"] / math.log(2),
            "ppl": min(math.exp(min(row["loss"], 30)), 1e6),
            "wps": row.get("wps", 91342),
        }
        head = (
            f"2026-02-{1 + step // 9000 % 27:02d} {step // 3000 % 24:02d}:{step // 50 % 60:02d}:11 "
            "| INFO | train_inner |"
        )
        shown = ", ".join(f"{name}={value:.5g}" for name, value in values.items())
        tail = (
            f"wpb=2.1e+06, bsz=1024, num_updates={step}, lr={row['lr']:.5g}, gnorm={row['grad_norm']:.3f}, "
            f"clip={row.get('clip', 0):.0f}"
        )
        lines.append(
            f"{head} epoch 001: {step:6d} / 140000 {shown}, {tail}, loss_scale={row.get('loss_scale', 64):.6g}, "
            f"train_wall=94, gb_free=11.2, wall={step * 2}"
        )
    return "\n".join(lines) + "\n"


def olmo(steps: Steps, columns: Columns, *, chatter: Chatter | None = None) -> str:
    """The console of OLMo: a block of lines for each step."""
    lines = []
    for row in rows_of(steps, columns):
        step = int(row.pop("step"))
        if chatter and step in chatter:
            lines.append(chatter[step])
        stamp = (
            f"2026-01-{1 + step // 9000 % 27:02d}T{step // 400 % 24:02d}:{step // 7 % 60:02d}:03.1 "
            "host-04:0 olmo.train:887 INFO"
        )
        lines.append(f"{stamp} [step={step}/{max(steps)}]")
        lines += [f"    {name}={value:.4g}" for name, value in row.items()]
    return "\n".join(lines) + "\n"


def nemo(steps: Steps, columns: Columns, *, chatter: Chatter | None = None) -> str:
    """The console of NeMo 2: bars between the fields."""
    lines = []
    for row in rows_of(steps, columns):
        step = int(row.pop("step"))
        if chatter and step in chatter:
            lines.append(chatter[step])
        fields = [
            f"Training epoch 0, iteration {step}/{max(steps)}",
            f"lr: {row.pop('lr', 3e-4):.4g}",
            "global_batch_size: 256",
        ]
        fields += [f"global_step: {step}", f"reduced_train_loss: {row.pop('loss'):.4g}"]
        fields += [f"{name}: {value:.4g}" for name, value in row.items()]
        lines.append(" | ".join([*fields, f"consumed_samples: {(step + 1) * 256}"]))
    return "\n".join(lines) + "\n"


def verl(steps: Steps, columns: Columns) -> str:
    """The console of verl: one line a step, dashes between the fields."""
    lines = []
    for row in rows_of(steps, columns):
        step = int(row.pop("step"))
        rest = " - ".join(f"{name}:{value:.4f}" for name, value in row.items())
        lines.append(f"(TaskRunner pid=24117) step:{step} - global_seqlen/min:20113.000 - {rest}")
    return "\n".join(lines) + "\n"


def llama_factory(steps: Steps, columns: Columns, *, per_epoch: int = 400) -> str:
    """The trainer_log.jsonl of LLaMA-Factory."""
    total = int(max(steps))
    lines = []
    for row in rows_of(steps, columns):
        step = int(row.pop("step"))
        row["lr"] = row.get("lr", 1e-5)
        kept = {name: _number(round(value, 9)) for name, value in row.items()}
        clock = {
            "percentage": round(100 * step / total, 2),
            "elapsed_time": f"0:{step // 60 % 60:02d}:{step % 60:02d}",
            "remaining_time": "1:02:11",
        }
        lines.append(
            json.dumps({"current_steps": step, "total_steps": total, **kept, "epoch": step / per_epoch, **clock})
        )
    return "\n".join(lines).replace('"NaN"', "NaN") + "\n"


def ultralytics(rows: int, columns: Columns) -> str:
    """The results.csv of Ultralytics: an epoch a row, names padded with blanks."""
    lines = [", ".join(f"{name:>22}" for name in ("epoch", *columns))]
    for row in rows_of(range(1, rows + 1), columns):
        lines.append(", ".join(f"{value:>22.5g}" for value in row.values()))
    return "\n".join(lines) + "\n"
