"""Saves and restores the random state of a process: torch's as tensors, Python's and numpy's as JSON values."""

import random
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Rng: TypeAlias = tuple[Mapping[str, Tensor], Mapping[str, Any] | None]


def rng_now() -> Rng:
    """The random state of this process."""
    return torch_rng(), host_rng()


def restore_rng(rng: Rng) -> None:
    """Restore a random state; missing parts are left alone."""
    of_torch, of_host = rng
    if "cpu" in of_torch:
        torch.set_rng_state(of_torch["cpu"])
    if "cuda" in of_torch and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(of_torch["cuda"])
    if of_host is not None:
        version, internal, gauss = of_host["python"]
        random.setstate((version, tuple(internal), gauss))
        np.random.set_state(of_host["numpy"])


def refuse_unsound_rng(rng: Rng) -> None:
    """Restore a random state into generators of its own: what is damaged raises an error, and nothing has changed."""
    of_torch, of_host = rng
    if "cpu" in of_torch:
        torch.Generator().set_state(of_torch["cpu"])
    if of_host is not None:
        version, internal, gauss = of_host["python"]
        random.Random().setstate((version, tuple(internal), gauss))  # noqa: S311 - no secret
        np.random.RandomState().set_state(of_host["numpy"])


def torch_rng() -> dict[str, Tensor]:
    """torch's random state, by device."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def host_rng() -> dict[str, Any]:
    """Python's and numpy's global generators. The lab draws from neither; a fork of it may."""
    numpy_state: Any = np.random.get_state(legacy=False)
    return {"python": random.getstate(), "numpy": numpy_state | {"state": _listed(numpy_state["state"])}}


def seed_anew(seed: int, step: int, rank: int) -> None:
    """Seed a rank that the checkpoint does not know, unlike any other rank or step."""
    of_torch, of_python, of_numpy = np.random.SeedSequence((seed, step, rank)).generate_state(3).tolist()
    torch.manual_seed(of_torch)
    random.seed(of_python)
    np.random.seed(of_numpy)


def _listed(state: Mapping[str, Any]) -> dict[str, Any]:
    return {**state, "key": state["key"].tolist()}
