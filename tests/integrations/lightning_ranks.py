"""Lightning on two ranks of DDP, guarded: skips, a resume, a rollback. What each saw is written to OUT/<rank>.json."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import sealegs
from sealegs.guard_options import Checkpointing, Telemetry
from sealegs.integrations.lightning import Guarded

_spec = importlib.util.spec_from_file_location("lightning_small", Path(__file__).with_name("lightning_small.py"))
assert _spec is not None
assert _spec.loader is not None
small: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(small)

HOME = "lightning.pytorch"
DAMAGED, LAST, SAVED = 62, 90, 15


class OfOneRank(small.module_class(HOME)):  # type: ignore[misc]
    """Whose spike is in the data of rank 1, and reaches the other in the mean of the gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        is_spoilt = self.trainer.global_step == small.SPIKE and self.global_rank == 1 and self.broken
        return loss * 1e6 if is_spoilt else loss

    def on_after_backward(self) -> None:
        if self.trainer.global_step == small.NAN and self.broken:
            small.spoil(self.net, float("nan"))


def fitted(module: Any, *callbacks: Any, **options: Any) -> Any:
    return small.fitted(module, *callbacks, home=HOME, strategy="ddp", devices=2, **options)


def main(out: Path) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=2)
    module = OfOneRank({small.NAN: 0.0})
    fitted(module, Guarded(run=out / "run"))
    steps = range(small.STEPS - 1)
    seen = {
        "unchanged": [step for step in steps if module.digests[step] == module.digests[step + 1]],
        "weights": module.digests[small.STEPS - 1],
        "losses": [float(small.loss_of(module.net, batch)) for batch in list(module.trainer.train_dataloader)[:2]],
    }
    from lightning.pytorch.callbacks import ModelCheckpoint

    keep = ModelCheckpoint(dirpath=out / "kept", every_n_train_steps=SAVED)
    fitted(OfOneRank({small.NAN: 0.0}), Guarded(run=out / "part"), keep, max_steps=SAVED)
    module = OfOneRank({small.NAN: 0.0})
    torch.manual_seed(7)
    (checkpoint,) = (out / "kept").glob("*.ckpt")
    fitted(module, Guarded(run=out / "part"), keep, ckpt_path=checkpoint)
    seen["resumed"] = module.digests[small.STEPS - 1]
    module = OfOneRank()
    module.damaged = {DAMAGED}
    guarded = Guarded(
        run=out / "back",
        playbook=sealegs.Playbook.standard(),
        telemetry=Telemetry(sample_every=0),
        checkpoint_every=Checkpointing(snapshot_every=10),
    )
    trainer = fitted(module, guarded, max_steps=LAST)
    seen |= {"went back": module.seen, "steps": trainer.global_step}
    (out / f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
