"""A plugin that puts a guard into the Trainer which Axolotl makes. In its file of settings:

plugins:
  - sealegs.integrations.axolotl.SealegsPlugin
sealegs_run: experiments/a1
sealegs_playbook: standard
"""

from pathlib import Path
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from sealegs.integrations import hf
from sealegs.integrations.loop_options import named_options


class SealegsArgs(BaseModel):
    """What the file may say."""

    sealegs_run: str | None = None
    """The folder to record into; ``sealegs`` in the ``output_dir``, if none is given."""
    sealegs_act: bool = True
    """Whether bad updates are skipped, or that is only said."""
    sealegs_playbook: str | None = None


class SealegsPlugin(BasePlugin):  # type: ignore[misc]
    """Attaches a guard when Axolotl has made its Trainer."""

    def get_input_args(self) -> str:
        """Tell where the settings are described."""
        return f"{SealegsArgs.__module__}.{SealegsArgs.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Attach the guard, which makes its folder when training begins."""
        run = cfg.sealegs_run or Path(trainer.args.output_dir) / "sealegs"
        hf.attach(trainer, run=run, **named_options(act=cfg.sealegs_act is not False, playbook=cfg.sealegs_playbook))
