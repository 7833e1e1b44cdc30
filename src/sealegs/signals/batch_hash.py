"""Hashes a batch: a few digits that tell it from others."""

import hashlib
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache

import torch
from torch import Tensor

ELEMENTS = 4096
"""Evenly spaced elements of each tensor that are hashed; a batch is hashed at every step."""


def digest_of(batch: object) -> str:
    """A few digits that tell batches apart, from evenly spaced elements of their tensors; empty without tensors.

    Tensors on a device are left out: reading them would mean waiting.
    """
    digest = hashlib.blake2b(digest_size=8)
    found = False
    for tensor in tensors_in(batch):
        if tensor.device.type == "cpu" and tensor.numel() and tensor.layout == torch.strided and not tensor.is_nested:
            digest.update(_kind(tensor.shape, tensor.dtype))
            elements = tensor.detach().reshape(-1)
            if tensor.numel() > ELEMENTS:
                elements = elements[:: math.ceil(tensor.numel() / ELEMENTS)]
            digest.update(elements.contiguous().view(torch.uint8).numpy().data)
            found = True
    return digest.hexdigest() if found else ""


@lru_cache(maxsize=64)  # the batches of a run have a few
def _kind(shape: torch.Size, dtype: torch.dtype) -> bytes:
    return repr((tuple(shape), str(dtype))).encode()


def tensors_in(batch: object) -> Iterator[Tensor]:
    """The tensors of a batch, however they are nested."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors_in(value)
