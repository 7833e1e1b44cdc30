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


def printed(program: str, rows: Sequence[Row]) -> str:
    """Rows as a program prints them, in a layout made after the program's own."""
    return BEFORE.get(program, "") + "".join(PRINTED[program].format(**row, half=row["loss"] / 2) for row in rows)


BAR = "100%|\u2588\u2588| 4/4 [00:00<00:00,  5.2it/s]"
BEFORE = {
    "ultralytics": "engine/trainer: task=detect, mode=train, model=a.pt, epochs=100, batch=16, lr0=0.01\n",
    "NeMo bars": "[NeMo I 2025-05-01 10:00:00 exp:38] \n    trainer:\n      devices: 8\n      precision: bf16\n"
    "      max_steps: 9\n",
}
PRINTED = {
    "torchtitan": "\x1b[36m[rank0]:[titan] 2025-05-01 10:00:00,123 - root - INFO - \x1b[31mstep: {step:2d}  "
    "\x1b[32mloss: {loss:7.4f}  \x1b[38;2;180;60;0mgrad_norm: {grad_norm:7.4f}  \x1b[34mmemory: 40.12GiB(50.7%)  "
    "\x1b[33mtps: 3,502  \x1b[36mtflops: 30.2  \x1b[35mmfu: 9.1%\x1b[39m\n",
    "OLMo": "2025-05-01 10:00:00.181\tnode-1:0\tolmo.train:900\tINFO\t[step={step}/7393,epoch=0]\n"
    "    optim/total_grad_norm={grad_norm:.4f}\n    train/CrossEntropyLoss={loss:.4f}\n"
    "    train/Perplexity=195,153\n    throughput/total_tokens=1,048,576\n    System/Peak GPU Memory (MB)=46,911\n",
    "NeMo": "[NeMo I 2025-05-01 10:00:00 log:3] Training epoch 0, iteration {step}/999 | lr: 3e-05 "
    "| consumed_samples: 8 | global_batch_size: 8 | global_step: {step} | grad_norm: {grad_norm:.4f} "
    "| reduced_train_loss: {loss:.4f} "
    "| train_step_timing in s: 0.031\n",
    "NeMo bars": "\rEpoch 0: :   0%|          | {step}/77225 [00:10<8:01:48, 41.36s/it, loss={loss:.4f}, v_num=, "
    "reduced_train_loss={loss:.4f}, global_step={step}.0, consumed_samples=256.0, grad_norm={grad_norm:.4f}]",
    "litgpt": "Epoch 1 | iter {step} step 1 | loss train: {loss:.4f}, val: n/a | iter time: 112.20 ms (step) "
    "remaining time: 0:01:54\n",
    "nanochat": "step {step:05d}/21400 (0.10%) | loss: {loss:.6f} | grad norm: {grad_norm:.4f} | lrm: 1.00 | "
    "dt: 350.12ms | tok/sec: 1,234,567 | mfu: 47.50 | total time: 3.25m\n",
    "verl": "(TaskRunner pid=87031) step:{step} - global_seqlen/min:340538.000 - actor/entropy:0.317 - "
    "actor/pg_loss:{loss:.5f} - actor/pg_clipfrac:0.000 - actor/grad_norm:{grad_norm:.4f} - actor/lr:1e-06 - "
    "training/global_step:{step}.000 - training/epoch:0.000 - critic/score/mean:0.500\n",
    "ultralytics": "      Epoch    GPU_mem   box_loss   cls_loss   dfl_loss  Instances       Size\n"
    "\r    {step:3d}/999      2.5G      {half:.4f}      1.0      1.0         23        640:   0%| | 0/4 [00:00<?]"
    "\r    {step:3d}/999      2.5G      {loss:.4f}      1.0      1.0         13        640: " + BAR + "\n"
    "                 Class     Images  Instances      Box(P          R      mAP50  mAP50-95): " + BAR + "\n"
    "                   all        128        929       0.64      0.537      0.605      0.446\n",
    "YOLOv5": "\n     Epoch   gpu_mem       box       obj       cls    labels  img_size\n"
    "     {step}/999     3.4G   {loss:.5f}   0.02   0.01       25       640: " + BAR + "\n"
    "                 all        128        929      0.567      0.559     0.575      0.357\n",
    "LLaMA-Factory": "\r  1%|##| {step}/1000 [00:10<00:30,  2.10it/s]{{'loss': {loss:.4f}, "
    "'grad_norm': {grad_norm:.4f}, 'learning_rate': 5e-05, 'epoch': 0.02}}\n"
    "[INFO|trainer.py:3081] 2025-01-01 10:00:00,123 >> \n",
    "levanter": "2025-01-01T10:00:00 - 0 - levanter.callbacks - INFO - Progress on:train {step}.00it/10.0kit "
    "rate:2.1it/s remaining:1:20:00 elapsed:00:10 postfix:loss={loss:.4f}\n",
    "mlx-lm": "Iter {step}: Train loss {loss:.4f}, Learning Rate 1.000e-05, It/sec 17.598, Tokens/sec 1728.137, "
    "Trained Tokens 6521, Peak mem 1.437 GB\n",
    "OLMo-core": "2025-01-01 10:00:00.1\tnode:0\tolmo_core.train:56\tINFO\t[step={step}/1000,epoch=1,eta=1h]\n"
    "    optim/LR (group 0)=0.0001\n    optim/total grad norm={grad_norm:.4f}\n    train/CE loss={loss:.4f}\n"
    "    train/PPL=16.2\n    throughput/device/TPS=12,345\n",
    "metaseq": '2022-01-01 10:00:00 | INFO | train_inner | {{"epoch": 1, "actv_norm": "12.3", "loss": "{loss:.4f}", '
    '"ppl": "7.46", "wps": "100000", "num_updates": "{step}", "lr": "6e-05", "gnorm": "{grad_norm:.4f}", "clip": "0", '
    '"loss_scale": "4"}}\n',
    "Composer": "[batch={step}/1000]:\n\t Train time/epoch: 0\n\t Train loss/train/total: {loss:.4f}\n"
    "\t Train l2_norm/grad/global: {grad_norm:.4f}\n\t Train lr-DecoupledAdamW/group0: 0.0001\n",
}
"""Lines of programs, one row each."""
