"""What the process has imported that ``tests/forked.py`` forks others from: none of them looks for garbage in it."""

import gc

import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.fsdp  # noqa: F401

import sealegs.lab.train  # noqa: F401

gc.freeze()
