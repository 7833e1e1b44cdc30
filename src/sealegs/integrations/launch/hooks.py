"""Wraps the call of a framework that trains, when that is imported; what needs torch is imported when it is called."""

import warnings
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any

from sealegs.errors import FolderIncomplete, RunEndedBadly
from sealegs.integrations.launch.request import OWN_LOOP, attempt, report

_IS_WITHIN_TRAINER: ContextVar[bool] = ContextVar("_IS_WITHIN_TRAINER", default=False)
"""Whether a Trainer has the loop: what it asks of Accelerate is its own."""


def join(module: Any) -> None:
    """Wrap what trains in a framework's module."""
    for category in (RunEndedBadly, FolderIncomplete):  # the program's filters know nothing of them
        warnings.simplefilter("default", category)
    if module.__name__ == "accelerate.accelerator":
        _wrap(module.Accelerator, "backward", _backward)
        _wrap(module.Accelerator, "end_training", _end_training)
    elif module.__name__ == "sealegs.watch":
        _wrap(module.Watch, "__init__", _watch)
    elif module.__name__ == "transformers.trainer":
        _wrap(module.Trainer, "train", _train)
    else:
        _wrap(module.Trainer, "fit", _fit)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    method = getattr(owner, name)

    @wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(method, self, *args, **kwargs)

    setattr(owner, name, wrapped)


def _watch(init: Callable[..., Any], watch: Any, *args: Any, **kwargs: Any) -> None:
    init(watch, *args, **kwargs)
    report("own", OWN_LOOP, "" if watch.record is None else watch.record.folder.absolute())


def _train(train: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    def guarded() -> Any:
        from sealegs.integrations.launch.trainer import guarded

        return guarded(trainer)

    attached = attempt("transformers.Trainer", guarded)
    token = _IS_WITHIN_TRAINER.set(True)
    try:
        found = train(trainer, *args, **kwargs)
        if attached is not None:
            attached.was_joined()
        return found
    finally:
        _IS_WITHIN_TRAINER.reset(token)
        if attached is not None:
            attached.detach()


def _fit(fit: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    def guarded() -> None:
        from sealegs.integrations.launch.fit import guard

        guard(trainer)

    attempt("Lightning's Trainer", guarded)
    token = _IS_WITHIN_TRAINER.set(True)
    try:
        return fit(trainer, *args, **kwargs)
    finally:
        _IS_WITHIN_TRAINER.reset(token)


def _backward(backward: Callable[..., Any], accelerator: Any, loss: Any, **kwargs: Any) -> Any:
    if not _IS_WITHIN_TRAINER.get():
        from sealegs.integrations.launch.accelerate_loop import before_backward

        before_backward(accelerator, loss)
    return backward(accelerator, loss, **kwargs)


def _end_training(end: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    from sealegs.integrations.launch.accelerate_loop import ended

    ended(accelerator)
    return end(accelerator, *args, **kwargs)
