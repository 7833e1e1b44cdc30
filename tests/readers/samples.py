"""Logs to read, in every format that can be written without the library it belongs to."""

import json
import math
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

FILES = Path(__file__).with_name("files")

Row = dict[str, float]
Make = Callable[[Path, Sequence[Row]], Path]


def rows(steps: Sequence[int]) -> list[Row]:
    """A falling loss and a gradient norm at these steps."""
    return [{"step": step, "loss": 4 - i / 100, "grad_norm": 1 + i / 10} for i, step in enumerate(steps)]


def run_folder(folder: Path, rows: Sequence[Row]) -> Path:
    from sealegs.record import manifest
    from sealegs.record.schema import to_line

    path = folder / "ours"
    path.mkdir()
    manifest.save(manifest.Manifest(run_id="ours"), path)
    (path / "metrics.jsonl").write_bytes(b"".join(map(to_line, rows)))
    return path


def trainer_state(folder: Path, rows: Sequence[Row]) -> Path:
    path = folder / "state"
    path.write_text(json.dumps({"epoch": 1.0, "log_history": list(rows), "max_steps": 9}, indent=2))
    return path


def json_lines(folder: Path, rows: Sequence[Row]) -> Path:
    path = folder / "lines"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def json_file(folder: Path, rows: Sequence[Row]) -> Path:
    path = folder / "value"
    path.write_text(json.dumps({"history": {name: [row[name] for row in rows] for name in rows[0]}}, indent=1))
    return path


def delimited(folder: Path, rows: Sequence[Row]) -> Path:
    path = folder / "table"
    lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def text(folder: Path, rows: Sequence[Row]) -> Path:
    path = folder / "printed"
    lines = (f"step {r['step']}: loss {r['loss']}, grad norm {r['grad_norm']}, 5.1ms\n" for r in rows)
    path.write_text("loading\n" + "".join(lines))
    return path


def tensorboard(folder: Path, rows: Sequence[Row]) -> Path:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    path = folder / "events"
    writer = EventFileWriter(str(path))
    for i, row in enumerate(rows):
        values = [Summary.Value(tag=f"train/{tag}", simple_value=row[tag]) for tag in ("loss", "grad_norm")]
        writer.add_event(Event(wall_time=1.7e9 + i, step=int(row["step"]), summary=Summary(value=values)))
    writer.close()
    (file,) = path.iterdir()
    return file


def mlflow(folder: Path, rows: Sequence[Row]) -> Path:
    metrics = folder / "mlruns" / "0" / "abc" / "metrics"
    metrics.mkdir(parents=True)
    (metrics.parent / "meta.yaml").write_text("run_id: abc\n")
    for name in ("loss", "grad_norm"):
        lines = [f"{1_700_000_000_000 + i} {row[name]} {row['step']}\n" for i, row in enumerate(rows)]
        (metrics / name).write_text("".join(lines))
    return folder / "mlruns"


def trackio(folder: Path, rows: Sequence[Row]) -> Path:
    path = folder / "project"
    with closing(sqlite3.connect(path)) as store:
        store.execute("CREATE TABLE metrics (id INTEGER PRIMARY KEY, run_name TEXT, step INTEGER, metrics TEXT)")
        store.execute("CREATE TABLE system_metrics (id INTEGER PRIMARY KEY)")
        store.execute("CREATE TABLE configs (id INTEGER PRIMARY KEY, run_name TEXT, config TEXT)")
        for row in rows:
            cells = {name: spelt(value) for name, value in row.items() if name != "step"}
            store.execute("INSERT INTO metrics VALUES (NULL, 'one', ?, ?)", (row["step"], json.dumps(cells)))
        store.commit()
    return path


def spelt(value: float) -> Any:
    return str(value) if math.isnan(value) else value


MAKE: dict[str, Make] = {
    make.__name__: make
    for make in (run_folder, trainer_state, json_lines, json_file, delimited, text, tensorboard, mlflow, trackio)
}
"""By the name of the reader. W&B's format only W&B can write: see ``files``."""

KEPT = {
    "tensorboard": [FILES / "tensorboard", FILES / "tensorboard_tensors"],
    "trainer_state": [FILES / "transformers", FILES / "transformers" / "checkpoint-10" / "trainer_state.json"],
    "delimited": [FILES / "lightning" / "metrics.csv"],
    "wandb": [FILES / "wandb", FILES / "wandb" / "run-tiny.wandb"],
    "trackio": [FILES / "trackio" / "tiny.db"],
    "mlflow": [FILES / "mlflow"],
    "text": [FILES / "keras" / "bars.log", FILES / "keras" / "lines.log", FILES / "transformers" / "printed.log"],
}
"""Made once by the libraries themselves: ``files/make.py``."""
