"""Merges the signals of all ranks: one small collective per step, the same on every path.

Signals are gathered, not verdicts: equal numbers give equal verdicts on all ranks, and each rank's row tells where an
anomaly came from. The group is Sealegs' own and has a timeout: a missing rank becomes an error that names it, never a
hang.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sealegs.errors import RankMissing
from sealegs.signals.collective import TIMEOUT_S, group_of_all, roll_call
from sealegs.signals.groups import plain_name

# newer torch has new names: the old ones warn at every call
_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

FIELDS = ("loss", "square", "worst_norm", "worst_tensor", "norm_before", "step", "checksum_high", "checksum_low")
"""What a rank contributes. ``norm_before`` is the norm of its own gradients before the reduction; -1 is unknown."""
MERGED = (
    *("loss", "grad_norm", "worst_tensor", "culprit_rank", "culprit_excess", "steps_apart"),
    *("ranks_differ", "differing_rank"),
)
"""What ``merge`` gives, in this order."""


class Ranks:
    """The ranks of a run; one, where there is no process group."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self._group = group_of_all(timeout_s)
        self.world = 1 if self._group is None else dist.get_world_size()
        self.rank = 0 if self._group is None else dist.get_rank()

    def gather(self, mine: Tensor, step: int) -> Tensor:
        """The rows of all ranks, by rank."""
        if self._group is None:
            return mine[None]
        rows = torch.empty(self.world * mine.numel(), dtype=mine.dtype, device=mine.device)
        try:
            _gather_into(rows, mine, group=self._group)
        except RuntimeError as error:
            what = f"step {step}: the ranks could not exchange their signals"
            missing = roll_call(what, f"step-{step}", self.timeout_s)
            reason = f"{what}, though all of them are running: {str(error).splitlines()[0]}"
            raise RankMissing(missing or reason) from error
        return rows.view(self.world, -1)


def contribution(
    loss: Tensor,
    square: Tensor,
    worst_norm: Tensor,
    worst_tensor: Tensor,
    norm_before: Tensor | None,
    step: int,
    checksum: Tensor,
) -> Tensor:
    """A rank's row in the order of FIELDS, on the loss's device."""
    before = torch.full_like(square, -1.0) if norm_before is None else norm_before
    numbers = (loss, square, worst_norm, worst_tensor, before, torch.full_like(square, float(step)), *checksum)
    return torch.stack([number.detach().reshape(()).to(loss.device, torch.float64) for number in numbers])


@torch.no_grad()
def merge(rows: Tensor) -> Tensor:
    """What the ranks saw together, in the order of MERGED.

    The culprit is the rank whose gradients were the largest before the reduction, or whose loss is not finite. Its
    excess is how many times the median of all ranks that is.
    """
    loss, square, worst_norm, worst_tensor, norm_before, step = rows[:, :6].unbind(1)
    suspicion = torch.where(torch.isfinite(loss), norm_before, torch.nan)  # NaN is the largest of all to argmax and max
    culprit = suspicion.argmax()
    usual = norm_before.nan_to_num(posinf=torch.finfo(torch.float64).max).median()
    excess = suspicion.max() / usual
    excess = torch.where(excess.isnan(), torch.inf, excess)
    differs = (rows[:, 6:] != rows[0, 6:]).any(1)
    # The minority is wrong; of two ranks nobody can say.
    first_is_odd = differs.sum() > len(rows) / 2
    return torch.stack(
        (
            loss.mean(),
            square.sum().sqrt(),
            worst_tensor.gather(0, worst_norm.argmax(0, keepdim=True))[0],  # indexing by a tensor would wait for it
            culprit.double(),
            torch.where((norm_before >= 0).all() | suspicion.isnan().any(), excess, 0.0),
            step.max() - step.min(),
            torch.where(first_is_odd, (~differs).sum(), differs.sum()).double(),
            torch.where(first_is_odd, 0, differs.double().argmax()).double(),
        )
    )


@torch.no_grad()
def checksum_of(parameters: list[Tensor], device: torch.device) -> Tensor:
    """Two numbers that change with any single bit of the weights: their sum as integers, in two halves that float64
    holds."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for place, parameter in enumerate(parameters):
        real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        whole = real.detach().contiguous().view(_INTEGER[real.element_size()]).sum(dtype=torch.int64).to(device)
        total = total + whole * (2 * place + 1)  # the same flip in two tensors does not cancel
    return torch.stack((total >> 32, total & 0xFFFFFFFF))


_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class NormsBefore:
    """Measures the norm of this rank's own gradients before the reduction mixes them with others'.

    DDP allows one communication hook: where the user has one, there are no such norms. FSDP2 lets its reduce-scatter be
    replaced, unit by unit.
    """

    def __init__(self, model: nn.Module) -> None:
        self._squares: list[Tensor] = []
        self.group: Any = None
        """The process group in which DDP exchanges gradients."""
        self.units: list[str] = []
        self._is_closed = False
        self.attached_to = _attach(self, model)

    def keep(self, gradients: Tensor) -> None:
        """Add a bucket of gradients that is about to be reduced."""
        if self._is_closed:
            return
        numbers = gradients.coalesce().values() if gradients.is_sparse else gradients
        self._squares.append(torch.linalg.vector_norm(numbers, dtype=torch.float64).square())

    def close(self) -> None:
        """Stop measuring: torch keeps a hook for as long as the model lives."""
        self._is_closed = True
        self._squares.clear()

    def collect(self) -> Tensor | None:
        """The norm since the last call; None where nothing was reduced or seen."""
        if not self._squares:
            return None
        squares, self._squares = self._squares, []
        return torch.stack(squares).sum().sqrt()


def _attach(norms: NormsBefore, model: nn.Module) -> str | None:
    model = getattr(model, "_orig_mod", model)  # compiled
    if isinstance(model, nn.parallel.DistributedDataParallel):
        norms.group = model.process_group
        try:
            model.register_comm_hook(norms, _reduce_noting)
        except RuntimeError:  # torch takes one hook, and the user has one
            return None
        return "DDP"
    units = [(name, module) for name, module in model.named_modules() if hasattr(module, "set_custom_reduce_scatter")]
    for name, unit in units:
        hand_over: Callable[[Any], None] = unit.set_custom_reduce_scatter
        hand_over(_ScatterNoting(norms))
        norms.units.append(plain_name(name))
    return "FSDP2" if units else None


def _reduce_noting(
    norms: NormsBefore,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP insists on the annotation
) -> torch.futures.Future[Tensor]:
    """Do what DDP does without a hook, after noting the norm.

    It is equal to the last bit. Where torch's own hook divides, DDP multiplies by a share, which differs on three
    ranks, or five; sparse gradients it divides.
    """
    gradients, world = bucket.buffer(), norms.group.size()
    norms.keep(gradients)
    if gradients.is_sparse:
        gradients.div_(world)
    else:
        gradients.mul_(1 / world)
    work = dist.all_reduce(gradients, group=norms.group, async_op=True)
    reduced: torch.futures.Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
    return reduced


class _ScatterNoting:
    """FSDP2's own reduce-scatter, after noting the norm."""

    def __init__(self, norms: NormsBefore) -> None:
        self._norms = norms

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        self._norms.keep(input_tensor)
        return _scatter_into(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


@contextmanager
def _fsdp_without_exchange(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def without_exchange(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which ranks do not exchange gradients: for all micro-batches of a step but the last."""
    model = getattr(model, "_orig_mod", model)  # compiled
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.no_sync()
    if hasattr(model, "set_requires_gradient_sync"):
        return _fsdp_without_exchange(model)
    return nullcontext()
