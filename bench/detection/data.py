"""Files and a seed in, everything that is looked at out: healthy runs, noise, places for faults, recorded runs."""

import csv
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from bench.streams import Stream

from bench import streams

PLACES = 150
GROWN = 1000
FIRST_PLACE, ROOM = GROWN + 200, 1600
"""Steps before the first place of a fault, and steps that are left behind the last."""


@dataclass(frozen=True)
class Lab:
    """A recorded run, and what was done to it."""

    source: str
    fault: str
    healthy: bool
    run: Stream


@dataclass(frozen=True)
class Data:
    """Everything that is looked at."""

    healthy: Sequence[Stream]
    noise: Mapping[str, Sequence[Stream]]
    young: Mapping[str, Sequence[Stream]]
    labs: Sequence[Lab]
    base: Stream
    """The run that faults are put into: the longest that has both signals."""
    places: Sequence[int]
    """Where: in its grown part, with room behind."""


def gather(real: Sequence[Stream], labs: Sequence[Lab], seed: int) -> Data:
    """The real runs if there are any, and what a seed makes."""
    random = np.random.default_rng
    made = [streams.healthy("t5", "power law", 20_000, random([seed, 300, i]), with_norm=True) for i in range(5)]
    noises = [*((noise, False) for noise in streams.NOISES), ("Gaussian", True)]
    noise = {
        f"{name}, and norm" if with_norm else name: [
            streams.healthy(name, trend, 15_000, random([seed, number, i]), with_norm=with_norm)
            for i, trend in enumerate(streams.TRENDS)
        ]
        for number, (name, with_norm) in enumerate(noises)
    }
    young = [
        streams.healthy(name, "power law", 1000, random([seed, 100, number, i]), with_norm=True)
        for number, name in enumerate(streams.NOISES)
        for i in range(5)
    ]
    base = max((run for run in real or made if run.grad_norm is not None), key=len)
    return Data(
        healthy=real or made,
        noise=noise,
        young={"real": [run.part(0, GROWN) for run in real], "synthetic": young},
        labs=[*worked_examples(), *labs],
        base=base,
        places=random([seed, 200]).permutation(np.arange(FIRST_PLACE, len(base) - ROOM))[:PLACES].tolist(),
    )


def read(folder: Path) -> list[Stream]:
    """Healthy runs: every CSV file with a loss column."""
    runs = []
    for path in sorted(folder.glob("*.csv")):
        with path.open() as file:
            lines = list(csv.DictReader(file))
        if lines and "loss" in lines[0]:
            columns = {key: np.array([float(line[key] or "nan") for line in lines]) for key in lines[0]}
            runs.append(Stream(name=path.stem, loss=columns["loss"], grad_norm=columns.get("grad_norm")))
    return runs


def refusal(real: Sequence[Stream]) -> str:
    """Why these runs cannot be measured on; empty where they can.

    >>> refusal([streams.healthy("t5", "power law", 1500, np.random.default_rng(0), with_norm=True)])
    'faults are put into a run with loss and grad_norm of more than 2800 steps; the longest here has 1500'
    """
    longest = max((len(run) for run in real if run.grad_norm is not None), default=0)
    if longest > FIRST_PLACE + ROOM:
        return ""
    wanted = f"faults are put into a run with loss and grad_norm of more than {FIRST_PLACE + ROOM} steps"
    return f"{wanted}; {f'the longest here has {longest}' if longest else 'there is none with both in a CSV file here'}"


def worked_examples() -> Iterable[Lab]:
    """Forty seeds, with the spike and without."""
    for seed in range(40):
        for spiked in (True, False):
            run = replace(streams.worked_example(seed, spiked=spiked), onset=streams.WORKED_STEP)
            yield Lab(source="the worked example", fault="worked example", healthy=not spiked, run=run)


def recorded(file: Path) -> Iterable[Lab]:
    """Runs of a lab, one a line: name, fault, at (the step it begins with), loss, grad_norm, healthy."""
    for line in file.read_text().splitlines():
        told = json.loads(line)
        loss, norm = (np.array(told.get(key) or [], dtype=np.float64) for key in ("loss", "grad_norm"))
        onset = 0 if told["healthy"] else int(told["at"])
        peak = onset + int(np.argmax(np.nan_to_num(loss[onset:], nan=math.inf)))  # the first NaN, where there is one
        run = Stream(
            name=told["name"],
            loss=loss,
            grad_norm=norm if len(norm) else None,
            onset=onset,
            peak=peak if peak > onset else None,
        )
        fault = "" if told["healthy"] else without_seed(told["fault"])
        yield Lab(source=f"recorded runs of {file.name}", fault=fault, healthy=told["healthy"], run=run)


def without_seed(fault: str) -> str:
    """What was done, of however many seeds, and wherever.

    >>> without_seed("nan-gradient:every=50,seed=501@230"), without_seed("bit-flip:seed=7@9"), without_seed("lr-spike")
    ('nan-gradient:every=50', 'bit-flip', 'lr-spike')
    """
    name, _, options = fault.split("@")[0].partition(":")
    kept = [option for option in options.split(",") if option and not option.startswith("seed=")]
    return ":".join([name, *([",".join(kept)] if kept else [])])


def fingerprint(data: Data) -> str:
    """Changes with the data, and with the code that looks at it."""
    root = Path(__file__).resolve().parents[2]
    names = ["bench/peers.py", "bench/streams.py", "src/sealegs/judge.py"]
    names += [f"bench/detection/{name}.py" for name in ("cells", "contenders", "data", "measures", "turned")]
    folders = [root / "src/sealegs" / name for name in ("stats", "detectors")]
    crc = zlib.crc32(repr(data.places).encode())
    for source in [
        *(root / name for name in names),
        *sorted(path for folder in folders for path in folder.glob("*.py")),
    ]:
        crc = zlib.crc32(source.read_bytes(), crc)
    pools = [data.healthy, *data.noise.values(), *data.young.values(), [lab.run for lab in data.labs]]
    for stream in (stream for pool in pools for stream in pool):
        crc = zlib.crc32(stream.loss.tobytes() + (b"" if stream.grad_norm is None else stream.grad_norm.tobytes()), crc)
    return f"{crc:08x}"
