"""The subject of a lab run for replays, from its settings."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LambdaLR

from sealegs.errors import SourceError
from sealegs.lab.data import IGNORED, Batch
from sealegs.lab.model import Transformer
from sealegs.lab.settings import Settings
from sealegs.lab.train import backward, build_optimizer, lr_share, on_device, precision
from sealegs.replay.subject import Subject, Text


def subject_of(settings: Settings, tokenizer: Path | None = None) -> Subject:
    """What ``train`` trains with these settings, which must be ``resolved``. A tokenizer prints the tokens as text."""
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    model = Transformer(settings.model).to(settings.device)
    optimizer = build_optimizer(model, settings.optimizer)
    scaler = GradScaler(settings.device, enabled=settings.dtype == "fp16")
    now = settings
    read = partial(whole, vocabulary=settings.model.vocabulary)

    @contextmanager
    def in_precision(dtype: Any) -> Iterator[None]:
        nonlocal now
        now = replace(settings, dtype=dtype)
        try:
            yield
        finally:
            now = settings

    def gradients(batches: Sequence[Mapping[str, Any]]) -> Tensor:
        # the lab has one batch per step, and divides it itself; several are those of its ranks, which DDP averages
        done = [backward(scaler, model.losses, read(batch), now) for batch in batches]
        if len(done) > 1:
            for gradient in (weight.grad for weight in model.parameters() if weight.grad is not None):
                gradient /= len(done)
        if settings.model.experts:
            model.loads = torch.stack([each.beside["expert_load"] for each in done]).mean(0)
        return torch.stack([each.loss for each in done]).mean()

    def losses(batch: Mapping[str, Any]) -> Tensor:
        known = read(batch)
        with precision(now):
            return model.losses(on_device(known.tokens, now), on_device(known.targets, now)).tokens

    return Subject(
        model=model,
        optimizers=[optimizer],
        schedulers=[LambdaLR(optimizer, partial(lr_share, settings.optimizer, settings.steps))],
        scaler=scaler,
        loss=lambda batch: losses(batch).sum() / read(batch).target_count,
        backward=gradients,
        precision=in_precision,
        text=Text(
            targets=lambda batch: torch.from_numpy(batch["targets"]),
            losses=losses,
            without=_without,
            spell=_speller(tokenizer),
        ),
    )


def whole(recorded: Mapping[str, Any], vocabulary: int | None = None) -> Batch:
    """The batch from the numbers in a capsule, where its sources are only text; with token ids below ``vocabulary``."""
    found = [recorded.get(name) for name in ("tokens", "targets")] if isinstance(recorded, Mapping) else []
    if not all(isinstance(ids, np.ndarray) and ids.ndim == 2 and ids.dtype.kind in "iu" and ids.size for ids in found):
        found = []
    shapes = {ids.shape for ids in found if ids is not None}
    if len(shapes) != 1:
        raise SourceError("a batch in the capsule is damaged: it has no tokens and targets; restore it from a copy")
    tokens, targets = (np.asarray(ids, np.int64) for ids in found)
    if vocabulary is not None and not ((tokens >= 0) & (tokens < vocabulary) & (targets < vocabulary)).all():
        raise SourceError(f"a batch in the capsule is damaged: a token is none of {vocabulary}; restore it from a copy")
    if not ((targets >= 0) | (targets == IGNORED)).all():
        raise SourceError("a batch in the capsule is damaged: a target is no token; restore it from a copy")
    return Batch(0, tokens, targets, ())


def _without(recorded: Mapping[str, Any], mask: Tensor) -> dict[str, Any]:
    return {**recorded, "targets": np.where(mask.numpy(), IGNORED, recorded["targets"])}


def _speller(tokenizer: Path | None) -> Callable[[Sequence[int]], str]:
    if tokenizer is None or not tokenizer.exists():
        return lambda tokens: " ".join(map(str, tokens))
    from sealegs.lab import tokenizer as bpe  # not needed to train on token ids

    return bpe.load(tokenizer).decode
