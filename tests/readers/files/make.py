"""Makes the files beside it, each by the library whose format it is: ``python make.py tensorboard wandb ...``.

They are kept, so the tests need none of these libraries. Every file has 20 steps; the loss at step n is 4 - n / 10, but
NaN at step 13; evaluations are at steps 10 and 20.
"""

# mypy: ignore-errors
# because the libraries are not installed where types are checked

import contextlib
import logging
import math
import os
import shutil
import sqlite3
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
STEPS = range(1, 21)


def loss(step: int) -> float:
    return math.nan if step == 13 else 4 - step / 10


def tensorboard(folder: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for step in STEPS:
            writer.add_scalar("train/loss", loss(step), step)
            writer.add_scalar("train/grad_norm", 1.5, step)
            if step % 10 == 0:
                writer.add_scalar("eval/loss", 3.5, step)


def tensorboard_tensors(folder: Path) -> None:
    """As TensorFlow 2 and Keras write them: tensors, in a folder a split."""
    import numpy as np
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    from tensorboard.util.tensor_util import make_tensor_proto

    about = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="scalars"))
    for split, value in (("train", loss), ("validation", lambda _: 3.5)):
        writer = EventFileWriter(str(folder / split))
        for step in STEPS if split == "train" else (10, 20):
            tensor = make_tensor_proto(np.float32(value(step)))
            summary = Summary(value=[Summary.Value(tag="loss", metadata=about, tensor=tensor)])
            writer.add_event(Event(wall_time=1.7e9 + step, step=step, summary=summary))
        writer.close()


def wandb(folder: Path) -> None:
    import wandb

    with tempfile.TemporaryDirectory() as scratch:
        settings = wandb.Settings(
            x_disable_stats=True, x_disable_meta=True, console="off", disable_git=True, silent=True
        )
        run = wandb.init(project="p", mode="offline", dir=scratch, settings=settings, config={"lr": 0.1}, id="tiny")
        for step in STEPS:
            row = {"train/loss": loss(step), "train/global_step": step}
            run.log(row | ({"eval/loss": 3.5} if step % 10 == 0 else {}))
        run.finish()
        (file,) = Path(scratch).rglob("*.wandb")
        shutil.copy(file, folder / "run-tiny.wandb")


def trackio(folder: Path) -> None:
    os.environ["TRACKIO_DIR"] = str(folder)
    import trackio

    for name in ("first", "second"):
        trackio.init(project="tiny", name=name, config={"lr": 0.1})
        for step in STEPS:
            trackio.log({"loss": loss(step)} | ({"eval_loss": 3.5} if step % 10 == 0 else {}), step=step)
        trackio.finish()
    (folder / "tiny.lock").unlink()
    with contextlib.closing(sqlite3.connect(folder / "tiny.db", isolation_level=None)) as store:
        store.execute("PRAGMA journal_mode = DELETE")
        store.execute("PRAGMA page_size = 512")  # a tenth of the size
        store.execute("VACUUM")


def mlflow(folder: Path) -> None:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    from mlflow import MlflowClient

    client = MlflowClient(folder.as_uri())
    run = client.create_run(client.create_experiment("tiny"), run_name="tiny").info.run_id
    client.log_param(run, "lr", 0.1)
    for step in STEPS:
        client.log_metric(run, "train/loss", loss(step), step=step, timestamp=1_700_000_000_000 + step)
        if step % 10 == 0:
            client.log_metric(run, "eval_loss", 3.5, step=step, timestamp=1_700_000_000_000 + step)
    for file in folder.rglob("meta.yaml"):
        file.write_text(file.read_text().replace(folder.as_uri(), "file:///runs"))


def lightning(folder: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(str(folder.parent), name="", version=folder.name)
    for step in STEPS:
        logger.log_metrics({"train_loss_step": loss(step), "epoch": (step - 1) // 10}, step)
        if step % 10 == 0:
            logger.log_metrics({"val_loss": 3.5, "epoch": (step - 1) // 10}, step)
            logger.log_metrics({"train_loss_epoch": 3.0, "epoch": (step - 1) // 10}, step)
    logger.save()


def transformers(folder: Path) -> None:
    """Two checkpoints and what the trainer prints; the loss is set from outside."""
    import torch
    from transformers import Trainer, TrainingArguments

    class Given(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.step = 0

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            self.step += self.training
            value = loss(self.step) if self.training else 3.5
            return {"loss": self.weight.sum() * 0 + value, "logits": x}

    data = [{"x": torch.zeros(1), "labels": torch.zeros(1)}] * 40
    with tempfile.TemporaryDirectory() as scratch, (folder / "printed.log").open("w") as log:
        arguments = TrainingArguments(
            output_dir=scratch,
            max_steps=20,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=10,
            save_steps=10,
            per_device_train_batch_size=2,
            report_to=[],
            use_cpu=True,
            logging_nan_inf_filter=False,
        )
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            Trainer(model=Given(), args=arguments, train_dataset=data, eval_dataset=data[:2]).train()
        for state in Path(scratch).glob("checkpoint-*/trainer_state.json"):
            (folder / state.parent.name).mkdir()
            shutil.copy(state, folder / state.parent.name)


def keras(folder: Path) -> None:
    """What ``fit`` prints: a bar an epoch, and a line an epoch."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras
    import numpy as np

    for name, verbose in (("bars.log", 1), ("lines.log", 2)):
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile(loss="mse", optimizer="sgd")
        x = np.linspace(0, 1, 40)[:, None]
        with (folder / name).open("w") as log, contextlib.redirect_stdout(log):
            model.fit(x, 2 * x, batch_size=4, epochs=20, verbose=verbose, validation_data=(x, 2 * x))


if __name__ == "__main__":
    logging.disable()
    for name in sys.argv[1:]:
        target = HERE / name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        globals()[name](target)
