"""What a playbook is made of: triggers, the steps for each, and the actions of a step.

>>> from sealegs.playbook import LowerLR, Playbook, Rollback, Rung, Trigger
>>> mine = Playbook(name="mine", rungs=(Rung(on={Trigger.DAMAGED}, actions=(Rollback(back=100), LowerLR(factor=0.5))),))
>>> print(mine.rungs[0].actions[1])
learning rate x 0.5, warmed up again over 50 steps
"""

from sealegs.recovery.actions import (
    ClipQK,
    Continue,
    CopyMajority,
    Halt,
    LowerLR,
    Rollback,
    SkipBatches,
    Stratify,
    SwapSource,
    Tighten,
    TightenByEvidence,
    UseBf16,
)
from sealegs.recovery.playbook import Playbook, Rung
from sealegs.recovery.recurrence import Trigger

__all__ = [
    "ClipQK",
    "Continue",
    "CopyMajority",
    "Halt",
    "LowerLR",
    "Playbook",
    "Rollback",
    "Rung",
    "SkipBatches",
    "Stratify",
    "SwapSource",
    "Tighten",
    "TightenByEvidence",
    "Trigger",
    "UseBf16",
]
