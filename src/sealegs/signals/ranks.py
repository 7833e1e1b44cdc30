"""Merges the signals of all ranks: one small collective per step, the same on every path.

Signals are gathered, not verdicts: equal numbers give equal verdicts on all ranks, and each rank's row tells where an
anomaly came from. The group is Sealegs' own and has a timeout: a missing rank becomes an error that names it, never a
hang.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sealegs.errors import RankMissing
from sealegs.signals.collective import TIMEOUT_S, group_of_all, roll_call
from sealegs.signals.groups import plain_name, sent
from sealegs.signals.own_time import OwnTime

if TYPE_CHECKING:
    from sealegs.signals.gradient_digest import GradientDigests

# newer torch has new names: the old ones warn at every call
_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

FIELDS = (
    *("loss", "has_loss", "square", "worst_norm", "worst_tensor", "norm_before", "step"),
    *("checksum_high", "checksum_low"),
)
"""What a rank contributes. ``norm_before`` is the norm of its own gradients before the reduction; -1 is unknown."""
MERGED = (
    *("loss", "grad_norm", "worst_tensor", "worst_rank", "culprit_rank", "culprit_excess", "steps_apart", "losses"),
    *("ranks_differ", "differing_rank"),
)
"""What ``merge`` gives, in this order."""
CULPRIT_EXCESS = 3.0
"""How many times the median a rank's own gradient norm must be for the rank to be named."""


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
    loss: Tensor | None,
    square: Tensor,
    worst_norm: Tensor,
    worst_tensor: Tensor,
    norm_before: Tensor | None,
    step: int,
    checksum: Tensor,
) -> Tensor:
    """A rank's row in the order of FIELDS, on the device of the gradients. The first stages of a pipeline have no
    loss."""
    before = torch.full_like(square, -1.0) if norm_before is None else norm_before
    nothing = torch.zeros_like(square)
    numbers = (
        *(nothing if loss is None else loss, nothing if loss is None else nothing + 1.0),
        *(square, worst_norm, worst_tensor, before, nothing + float(step), *checksum),
    )
    return torch.stack([number.detach().reshape(()).to(square.device, torch.float64) for number in numbers])


class Standing(NamedTuple):
    """Which ranks are compared with which: by rank, the first one of its group."""

    peers: Tensor
    """Of those whose gradients are parts of one mean."""
    twins: Tensor
    """Of those that hold the same copies of weights."""

    @classmethod
    def of(cls, peers: Sequence[int], twins: Sequence[int], device: torch.device) -> "Standing":
        """On the device of the rows."""
        return cls(sent(torch.tensor(peers), device), sent(torch.tensor(twins), device))


@torch.no_grad()
def merge(rows: Tensor, standing: Standing | None = None) -> Tensor:
    """What the ranks saw together, in the order of MERGED: a function of the rows alone.

    The culprit is the one rank whose loss, or else whose gradients before the reduction, are not finite; or else the
    one whose gradients were the largest, of those that are parts of one mean. Its excess is how many times the median
    of these that is. Nobody is named where all are alike, or where ranks that do different things are suspect at once:
    a number that is not finite goes through all stages of a pipeline.
    """
    loss, has_loss, square, worst_norm, worst_tensor, norm_before, step = rows[:, :7].unbind(1)
    losses = has_loss.sum()
    worst_rank = worst_norm.argmax(0, keepdim=True)
    peers, twins = (None, None) if standing is None else standing
    return torch.stack(
        (
            loss.sum() / losses,
            square.sum().sqrt(),
            worst_tensor.gather(0, worst_rank)[0],  # indexing by a tensor would wait for it
            worst_rank[0].double(),
            *_culprit(loss, has_loss, norm_before, losses < len(rows), peers),
            step.max() - step.min(),
            losses,
            *_odd_ones(rows[:, FIELDS.index("checksum_high") :], twins),
        )
    )


def _culprit(
    loss: Tensor, has_loss: Tensor, norm_before: Tensor, is_staged: Tensor, peers: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The rank at fault, and its excess: infinite where a number is not finite, 0 where nobody can be named."""
    broken_loss = (has_loss > 0) & ~torch.isfinite(loss) & ~is_staged
    broken = torch.where(broken_loss.any(), broken_loss, ~torch.isfinite(norm_before))
    sizes = norm_before.nan_to_num(posinf=torch.finfo(torch.float64).max)
    times = norm_before / (sizes.median() if peers is None else _medians(sizes, peers))
    times = torch.where(times.isnan(), torch.where(norm_before > 0, torch.inf, 0.0), times)
    largest = times.argmax(0, keepdim=True)
    excess = torch.where((norm_before >= 0).all(), times.amax(), 0.0)
    if peers is not None:
        is_elsewhere = (times > CULPRIT_EXCESS) & (peers != peers.gather(0, largest))
        excess = torch.where(is_elsewhere.any(), 0.0, excess)
    is_broken = broken.any()
    return (
        torch.where(is_broken, broken.int().argmax(), largest[0]).double(),
        torch.where(is_broken, torch.where(broken.sum() == 1, torch.inf, 0.0), excess),
    )


def _odd_ones(checksums: Tensor, twins: Tensor | None) -> tuple[Tensor, Tensor]:
    """How many ranks hold other weights than those that should hold the same, and the first of them.

    The minority is wrong; of two ranks nobody can say.
    """
    if twins is None:
        differs = (checksums != checksums[0]).any(1)
        first_is_odd = differs.sum() > len(checksums) / 2
        count = torch.where(first_is_odd, (~differs).sum(), differs.sum())
        return count.double(), torch.where(first_is_odd, 0, differs.double().argmax()).double()
    differs = (checksums != checksums[twins]).any(1)
    nothing = torch.zeros_like(checksums[:, 0])
    sizes = nothing.index_add(0, twins, nothing + 1.0)
    odd = nothing.index_add(0, twins, differs.double())
    first_is_odd = odd > sizes / 2
    is_first = twins == torch.arange(len(twins), device=twins.device)
    is_odd = torch.where(first_is_odd[twins], is_first, differs)
    return torch.where(first_is_odd, sizes - odd, odd).sum(), is_odd.double().argmax().double()


def _medians(values: Tensor, groups: Tensor) -> Tensor:
    """For each value the median of its group, the lower one of two: all groups in one sort."""
    order = values.argsort(stable=True)
    order = order.gather(0, groups[order].argsort(stable=True))  # by group, and by value within it
    sizes = torch.zeros_like(values, dtype=torch.long).index_add(0, groups, torch.ones_like(groups))
    starts = sizes.cumsum(0) - sizes
    middles = (starts + (sizes - 1) // 2).clamp(0, len(values) - 1)
    return values[order][middles][groups]


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
        self.own_time = OwnTime(next((p.device for p in model.parameters()), torch.device("cpu")))
        """How long this rank works until its gradients are ready, where a hook says when that is."""
        self.group: Any = None
        """The process group in which DDP exchanges gradients."""
        self.units: list[str] = []
        self.digests: GradientDigests | None = None
        """What also looks at these gradients, where micro-batches are recomputed."""
        self._handles: list[Any] = []
        self._is_closed = False
        self.attached_to = _attach(self, model)

    def attach_to(self, parameters: Iterable[Tensor], exchanged_by: str) -> None:
        """Measure the gradients of these parameters as backward makes them: for an engine that exchanges them by
        itself, afterwards."""
        self.attached_to = exchanged_by
        self._handles = [each.register_hook(self._keep_one) for each in parameters if each.requires_grad]

    def _keep_one(self, gradient: Tensor) -> None:
        self.keep(gradient, lambda _: ())

    def keep(self, gradients: Tensor, tensors: Callable[[Tensor], Iterable[tuple[Tensor | str, Tensor]]]) -> None:
        """Add a bucket of gradients that is about to be reduced; ``tensors`` says whose they are."""
        if self._is_closed:
            return
        numbers = gradients.coalesce().values() if gradients.is_sparse else gradients
        if self.digests is not None and self.digests.is_armed:
            for whose, gradient in tensors(numbers):
                self.digests.see(whose, gradient)
        self._squares.append(torch.linalg.vector_norm(numbers, dtype=torch.float64).square())

    def close(self) -> None:
        """Stop measuring: torch keeps a hook for as long as the model lives."""
        self._is_closed = True
        self._squares.clear()
        for handle in self._handles:
            handle.remove()
        self._handles = []

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
        hand_over(_ScatterNoting(norms, plain_name(name)))
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
    norms.own_time.ready()
    norms.keep(gradients, lambda numbers: _tensors_of(bucket, numbers))
    if gradients.is_sparse:
        gradients.div_(world)
    else:
        gradients.mul_(1 / world)
    work = dist.all_reduce(gradients, group=norms.group, async_op=True)
    reduced: torch.futures.Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
    return reduced


def _tensors_of(
    bucket: dist.GradBucket,  # type: ignore[name-defined]
    numbers: Tensor,
) -> Iterable[tuple[Tensor | str, Tensor]]:
    """The gradients of a bucket, each with its parameter."""
    if bucket.buffer().is_sparse:  # of one parameter
        return ((bucket.parameters()[0], numbers),)
    return zip(bucket.parameters(), bucket.gradients(), strict=True)


class _ScatterNoting:
    """FSDP2's own reduce-scatter, after noting the norm."""

    def __init__(self, norms: NormsBefore, unit: str) -> None:
        self._norms = norms
        self._unit = unit or "the whole model"

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        self._norms.keep(input_tensor, lambda numbers: ((self._unit, numbers),))
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
