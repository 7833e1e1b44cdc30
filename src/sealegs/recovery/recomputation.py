"""Has micro-batches computed again on the neighbouring rank, to find hardware that computes wrongly.

Every N steps each rank hands out the micro-batches of the rank before it, with that rank's random state and buffers,
before its own. The loop computes them like any others; their gradients are dropped. Where the answers differ, the step
is not updated: a third rank computes the micro-batches, the owner computes its own once more, and that is the step.
"""

import io
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from sealegs.data.position import Batches
from sealegs.recovery.corruption import Answer, Bound, Wrong, disputed, ranks_of, suspects, who_is_wrong
from sealegs.recovery.probe_isolation import ProbeIsolation
from sealegs.signals.collective import Collective
from sealegs.signals.gradient_digest import Difference, Digest, GradientDigests, difference
from sealegs.signals.layout import NEAR
from sealegs.signals.meter import Meter
from sealegs.signals.time_spent import TimeSpent
from sealegs.state.rng import Rng, restore_rng, rng_now
from sealegs.state.training_state import TrainingState

T = TypeVar("T")
EVERY = 500
"""Steps between two checks. One costs a forward and a backward pass: at most 0.2 % of so many steps."""
UNREPEATED = 3
"""Checks in a row in which the loop did not repeat itself, after which there are no more."""
_END = object()


class _Pass(Enum):
    """A forward and backward pass of the step that is checked."""

    NEXT = auto()
    """This rank computes what the one before it is about to."""
    OWN = auto()
    THIRD = auto()
    """This rank computes what the one two before it has."""
    AGAIN = auto()
    """Its own once more."""


class _Handed(NamedTuple):
    """What another rank needs to compute the same."""

    batches: tuple[Any, ...]
    rng: Rng
    buffers: dict[str, Tensor]

    difference: Difference | None = None


class Recomputation:
    """The checks of a run. ``over`` is around the batches, ``after_pass`` before each step is decided."""

    def __init__(
        self,
        every: int,
        training: TrainingState,
        meter: Meter,
        batches: Batches,
        *,
        note: Callable[..., None],
        say: Callable[[str], None],
        spent: TimeSpent,
        timeout_s: float,
    ) -> None:
        """Where ``refusal`` has nothing against it, on every rank."""
        self._every = every
        self._training = training
        self._batches = batches
        self._note = note
        self._say = say
        self._spent = spent
        self._ranks = Collective(timeout_s)
        self._layout = meter.layout
        self._sends_buffers = not getattr(_uncompiled(training.model), "broadcast_buffers", False)
        """DDP gives all ranks the buffers of rank 0 before each forward pass, if it is not told otherwise."""
        assert meter.norms_before is not None
        self._digests = meter.norms_before.digests = GradientDigests(training.model)
        self._where = self._ranks.gather((platform.node(), str(meter.device), _hardware(meter.device)))
        of_all = {hardware for _, _, hardware in self._where}
        self._bound = Bound(
            is_exact=len(of_all) == 1 and _is_deterministic(meter.device),
            smallest=max(
                torch.finfo(each.dtype).eps for each in training.model.parameters() if each.is_floating_point()
            ),
        )
        self._is_proven = False
        """Whether all ranks have once given the same, so that the loop does repeat itself."""
        self._unrepeated = 0
        self._due = every
        self._a_step = 0
        """Micro-batches of a step."""
        self._handed_out = 0
        """Micro-batches since the last step."""
        self._draws: bool | None = None
        """Whether the loader draws from the random numbers that the model draws from, too."""
        self._coming: list[_Pass] = []
        """The passes of the step under way, the present one first."""
        self._has_begun = False
        """Whether the first micro-batch of the present pass was handed out."""
        self._mine: tuple[tuple[int, Any], ...] = ()
        self._packed = b""
        self._before: ProbeIsolation | None = None
        self._of_others: dict[_Pass, _Handed] = {}
        self._answers: dict[_Pass, Digest] = {}
        self._differences: list[Difference] = []
        """By the rank whose micro-batch it is."""
        self._paused_at = 0.0
        self._paused_s = 0.0
        self.stopped_because = ""
        """Why there are no checks any more."""
        how = (
            "to the last bit" if self._bound.is_exact else "within what rounding makes of them, which is measured first"
        )
        note("recompute", every=every, is_exact=self._bound.is_exact, text=f"micro-batches are compared {how}")

    @property
    def is_redone(self) -> bool:
        """Whether the batch that is handed out was handed out before, for the same step."""
        return self._coming[:1] == [_Pass.AGAIN]

    @property
    def is_under_way(self) -> bool:
        """Whether a step is being checked: its batches were read, and are not all trained on."""
        return bool(self._coming)

    @property
    def is_of_another(self) -> bool:
        """Whether the batch that is handed out is another rank's."""
        return bool(self._coming) and self._coming[0] in (_Pass.NEXT, _Pass.THIRD)

    def over(self, source: Iterator[T], number: Callable[[], int]) -> Iterator[T]:
        """The batches of the loop, with those of other ranks in between; ``number`` gives that of the step to come."""
        while True:
            before = self._random() if self._watches_draws(number()) else None
            batch: Any = next(source, _END)
            if batch is _END:
                return
            if before is not None:
                self._draws = bool(self._draws) or before != self._random()
            if not self._coming and not self._batches.is_probe:
                if self._is_due(number()):
                    with self._spent.of("recomputed"):
                        self._begin(batch, source, number())
                    continue
                self._handed_out += 1
            elif self._coming and not self._has_begun:
                with self._spent.of("recomputed"):
                    self._begin_pass()
            yield batch

    def after_pass(self, loss: Tensor | None, number: int) -> bool:
        """The loop ends a step. Gives whether it is one that is not to be trained on."""
        if not self._coming or not self._has_begun:
            return False
        with self._spent.of("recomputed"):
            return self._after_pass(loss, number)

    def went_to(self, number: int) -> None:
        """The run went back to a step."""
        self._due = number + self._every
        self._handed_out = 0
        self._forget()

    def take_pause_s(self) -> float:
        """How long the step under way was held up, for whoever times steps; once."""
        paused_s, self._paused_s = self._paused_s, 0.0
        return paused_s

    def after_step(self, number: int, batches: int) -> None:
        """A step was trained on, and the loop said of how many micro-batches."""
        handed_out, self._handed_out = self._handed_out, 0
        if self.stopped_because or not handed_out:
            return
        if handed_out != batches:
            self.stop(
                f"at step {number - 1} the loop had taken {handed_out} batches and told of {batches}: take one at a "
                "time, or all but the last in `with guard.accumulate():`",
                number,
            )
        self._a_step = batches

    def stop(self, reason: str, number: int) -> None:
        """Check no more, and say why."""
        self.stopped_because = reason
        self._forget()
        self._note("no-recompute", step=number, reason=reason)
        self._say(f"micro-batches are not computed again any more: {reason}")

    def state_dict(self) -> dict[str, Any]:
        """What was learned of the loop, as JSON values."""
        return {**self._bound.to_plain(self._ranks.world), "is_proven": self._is_proven, "due": self._due}

    def load_state_dict(self, state: dict[str, Any], number: int) -> None:
        """Go on with that."""
        self._bound = self._bound.from_plain(state, self._ranks.world)
        self._is_proven = bool(state.get("is_proven"))
        self._due = max(int(state.get("due", 0)), number + 1)

    # A step that is checked.

    def _is_due(self, number: int) -> bool:
        return bool(not self.stopped_because and number >= self._due and self._a_step and not self._handed_out)

    def _watches_draws(self, number: int) -> bool:
        """Where micro-batches add up, those of a step are read before the first is computed."""
        return self._a_step > 1 and not self._coming and not self.stopped_because and number == self._due - 1

    def _begin(self, first: Any, source: Iterator[Any], number: int) -> None:
        """Read what this rank is to train on, and exchange it with the neighbour."""
        self._due = number + self._every
        self._paused_at = time.perf_counter()
        before = ProbeIsolation.of(self._training)
        mine = [(self._number(), first)]
        reason = "the loader draws from the random numbers of the model, so that no batch can be read before its turn"
        reason = reason if self._draws else ""
        if not self._ranks.gather(bool(reason)).count(True):
            while len(mine) < self._a_step and (batch := next(source, _END)) is not _END:
                mine.append((self._number(), batch))
        packed, failure = _packed(_Handed(tuple(batch for _, batch in mine), before.rng, self._buffers(before)))
        told = self._ranks.gather((reason or failure, len(mine)))
        self._batches.hand_out_again(mine)
        if why := next((reason for reason, _ in told if reason), ""):
            self.stop(why, number)
            return
        if {count for _, count in told} != {self._a_step}:  # the end of an epoch
            return
        self._mine, self._packed, self._before = tuple(mine), packed, before
        self._coming = [_Pass.NEXT, _Pass.OWN]
        self._has_begun = False
        self._fetch(_Pass.NEXT, by=1)

    def _number(self) -> int:
        assert self._batches.number is not None
        return self._batches.number

    def _buffers(self, before: ProbeIsolation) -> dict[str, Tensor]:
        return dict(before.buffers) if self._sends_buffers else {}

    def _fetch(self, which: _Pass, by: int) -> None:
        """Have the micro-batches of another rank handed out next."""
        theirs = _unpacked(self._ranks.pass_on(self._packed, by), self._device)
        self._of_others[which] = theirs
        self._batches.repeat(theirs.batches)

    @property
    def _device(self) -> torch.device:
        return next(self._training.model.parameters()).device

    def _begin_pass(self) -> None:
        """The first micro-batch of a pass is about to be handed out: set its owner's random state and buffers."""
        self._has_begun = True
        assert self._before is not None
        self._before.put_back(self._training)
        if (theirs := self._of_others.get(self._coming[0])) is None:
            self._paused_s += time.perf_counter() - self._paused_at
        else:
            with torch.no_grad():
                for name, buffer in self._training.model.named_buffers():
                    if (held := theirs.buffers.get(name)) is not None and held.shape == buffer.shape:
                        buffer.copy_(held)
            restore_rng(theirs.rng)
        self._digests.arm()

    def _after_pass(self, loss: Tensor | None, number: int) -> bool:
        is_of = self._coming.pop(0)
        self._has_begun = False
        self._answers[is_of] = self._digests.collect(loss)
        if is_of in (_Pass.NEXT, _Pass.THIRD):
            return True
        if is_of is _Pass.OWN:
            self._paused_at = time.perf_counter()
            if not self._is_disputed(number):
                self._forget()
                return False
            self._batches.hand_out_again(self._own_again())
            self._fetch(_Pass.THIRD, by=1 if self._ranks.world == 2 else 2)
            self._coming = [_Pass.THIRD, _Pass.AGAIN]
            self._batches.is_probe = True  # a loop that asks after the step is told so
            return True
        self._resolve(number)
        self._forget()
        return False

    def _own_again(self) -> list[tuple[int, Any]]:
        """Its own micro-batches as they were: the loop may have changed them."""
        theirs = _unpacked(self._packed, self._device)
        return [(number, batch) for (number, _), batch in zip(self._mine, theirs.batches, strict=True)]

    def _is_disputed(self, number: int) -> bool:
        """Compare each rank's answer with that of its neighbour, on all ranks alike."""
        theirs = _digest_of(self._ranks.pass_on(_bytes_of(self._answers[_Pass.OWN]), 1))
        found = self._ranks.gather(difference(theirs, self._answers[_Pass.NEXT]))
        self._differences = [found[(owner + 1) % len(found)] for owner in range(len(found))]
        if self._bound.is_exact:
            is_disputed = any(not one.is_exact for one in self._differences)
            self._is_proven |= not is_disputed
            return is_disputed
        distances = [one.distance for one in self._differences]
        if not self._bound.is_known:
            self._learn(distances, number)
            return False
        is_disputed = bool(disputed(distances, self._bound))
        if not is_disputed:
            self._learn(distances, number)
        return is_disputed

    def _learn(self, distances: list[float], number: int) -> None:
        """Take in how far right answers are apart; where they have nothing in common, the loop is of another kind."""
        self._bound = self._bound.with_measured(distances)
        far = [owner for owner, each in enumerate(distances) if not each <= NEAR]
        is_unlike = bool(far) and (len(far) == len(distances) or not suspects(far, len(distances)))
        self._unrepeated = self._unrepeated + 1 if is_unlike else 0
        self._is_proven |= not far
        if self._unrepeated >= UNREPEATED:
            self.stop(self._why_unrepeated(), number)

    def _why_unrepeated(self) -> str:
        worst = max(self._differences, key=lambda one: one.distance)
        return (
            f"the loop does not compute the same on another rank ({worst.tensors} of {worst.of} tensors differ, "
            f"{worst.worst} most): what it computes depends on the rank, or on random numbers of a generator of its own"
        )

    def _resolve(self, number: int) -> None:
        """All answers are known: say who was wrong, or that the loop does not repeat itself."""
        world = self._ranks.world
        is_exact = self._bound.is_exact
        distances = [float(not one.is_exact) if is_exact else one.distance for one in self._differences]
        owners = [*disputed(distances, self._bound)]
        is_asked = any(self._ranks.rank in ranks_of(owner, world).values() for owner in owners)
        mine = {which: _bytes_of(answer) for which, answer in self._answers.items()} if is_asked else {}
        everyone = self._ranks.gather(mine)
        apart = {owner: _distances(ranks_of(owner, world), everyone, is_exact=is_exact) for owner in owners}
        wrong = who_is_wrong(owners, world, apart, self._bound, self._bound.usual(distances))
        others_agree = any(
            not set(suspects(owners, world)) & {owner, (owner + 1) % world}
            for owner in range(world)
            if owner not in owners
        )
        if wrong is None or not (self._is_proven or others_agree or len(wrong.ranks) == 1):
            self._was_unrepeated(number)
            return
        self._unrepeated = 0
        self._tell(wrong, owners, number)

    def _was_unrepeated(self, number: int) -> None:
        """No rank alone can be at fault."""
        if self._bound.is_exact:
            self._bound = Bound(is_exact=False, smallest=self._bound.smallest)
            text = "the loop does not repeat itself to the last bit: answers are compared within a bound from now on"
            self._note("recompute", step=number, every=self._every, is_exact=False, text=text)
        self._learn([one.distance for one in self._differences], number)

    def _tell(self, wrong: Wrong, owners: list[int], number: int) -> None:
        found = max((self._differences[owner] for owner in owners), key=lambda one: one.tensors)
        names = [self._named(rank) for rank in wrong.ranks]
        who = names[0] if len(names) == 1 else f"{names[0]} or {names[1]}"
        what = f"{found.tensors} of {found.of} gradients differ, {found.worst} most"
        what += ", and so does the loss" if found.is_in_loss else ", and the loss does not"
        times = "twice" if wrong.is_lasting else "once"
        how = (
            f"{times}, by what two other computations agree on"
            if len(names) == 1
            else "and which of the two is not known"
        )
        text = f"{who} computed a micro-batch wrongly, {how}: {what}"
        is_one = len(wrong.ranks) == 1
        self._note(
            "silent-corruption",
            step=number,
            rank=wrong.ranks[0] if is_one else None,
            ranks=list(wrong.ranks),
            host=self._where[wrong.ranks[0]][0] if is_one else None,
            device=self._where[wrong.ranks[0]][1] if is_one else None,
            is_lasting=wrong.is_lasting,
            tensors=found.tensors,
            of=found.of,
            worst=found.worst,
            is_in_loss=found.is_in_loss,
            distance=found.distance,
            text=text,
        )
        self._say(f"step {number}: {text}")

    def _named(self, rank: int) -> str:
        host, device, _ = self._where[rank]
        return f"{self._layout.on_rank(rank)} ({device} of {host})"

    def _forget(self) -> None:
        self._coming, self._has_begun = [], False
        self._mine, self._packed, self._before = (), b"", None
        self._of_others, self._answers = {}, {}

    def _random(self) -> tuple[Any, ...]:
        """The random state, to be compared."""
        of_torch, of_host = rng_now()
        return (*(bytes(state.numpy().tobytes()) for state in of_torch.values()), repr(of_host))


def refusal(model: nn.Module, meter: Meter) -> str:
    """Why no rank can compute what another one has, in a sentence; empty where each can."""
    if meter.ranks.world == 1:
        return "there is one rank, and none beside it to compute anything again"
    attached = None if meter.norms_before is None else meter.norms_before.attached_to
    if attached is None:
        return (
            "gradients are compared before ranks exchange them, which shows under DistributedDataParallel without a "
            "communication hook of your own, and under FSDP2"
        )
    if meter.layout.why_not_one:
        return f"{meter.layout.why_not_one}, so that no rank can compute what another one does"
    placed = [parameter for parameter in model.parameters() if hasattr(parameter, "placements")]
    if attached == "DDP" and placed:
        return "parameters are divided among ranks besides DDP, so that no rank can compute what another one does"
    if any(_is_divided_otherwise(parameter) for parameter in placed):
        return "ranks that share a batch (tensor parallel) have parts of the same layers: no rank has all of one"
    kinds = {type(module).__name__ for module in model.modules()}
    if "SyncBatchNorm" in kinds:
        return "SyncBatchNorm mixes the batches of all ranks in the forward pass: no rank's answer is its own"
    return ""


def _is_divided_otherwise(parameter: Any) -> bool:
    """Whether a parameter is divided by more than FSDP2, or FSDP2 on replicas."""
    divided = [axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    last = len(parameter.placements) - 1
    return divided not in ([], [last]) or parameter.device_mesh.ndim > 2


def _uncompiled(model: nn.Module) -> nn.Module:
    return getattr(model, "_orig_mod", model)


def _hardware(device: torch.device) -> str:
    """What computes; ranks with the same should give the same bits."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {torch.__version__}"
    processor = platform.processor()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line for line in lines if line.startswith("model name")), processor)
    return f"{processor} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()} {torch.__version__}"


def _is_deterministic(device: torch.device) -> bool:
    return torch.are_deterministic_algorithms_enabled() or (device.type == "cpu" and torch.get_num_threads() == 1)


def _packed(handed: _Handed) -> tuple[bytes, str]:
    """What another rank needs, as bytes; or why it cannot be given to it."""
    buffer = io.BytesIO()
    try:
        torch.save(handed, buffer)
    except Exception as error:  # whatever the batch holds
        return b"", f"a batch cannot be given to another rank ({type(error).__name__}: {str(error)[:200]})"
    return buffer.getvalue(), ""


def _unpacked(content: bytes, device: torch.device) -> _Handed:
    """What another rank has packed: from a process of this job, which is trusted as this one is."""

    def here(storage: Any, place: str) -> Any:
        return storage if place == "cpu" else storage.to(device)

    handed = torch.load(io.BytesIO(content), map_location=here, weights_only=False)
    assert isinstance(handed, _Handed)
    return handed


def _bytes_of(digest: Digest) -> bytes:
    buffer = io.BytesIO()
    torch.save((digest.loss, dict(digest.tensors)), buffer)
    return buffer.getvalue()


def _digest_of(content: bytes) -> Digest:
    return Digest(*torch.load(io.BytesIO(content), weights_only=True))


def _distances(
    ranks: dict[Answer, int], everyone: list[dict[_Pass, bytes]], *, is_exact: bool
) -> dict[tuple[Answer, Answer], float]:
    """How far the answers to one micro-batch are apart."""
    passes: dict[Answer, _Pass] = {"own": _Pass.OWN, "next": _Pass.NEXT, "third": _Pass.THIRD, "again": _Pass.AGAIN}
    answers = {answer: _digest_of(everyone[rank][passes[answer]]) for answer, rank in ranks.items()}
    apart: dict[tuple[Answer, Answer], float] = {}
    for one, left in answers.items():
        for other, right in answers.items():
            found = difference(left, right)
            apart[one, other] = (0.0 if found.is_exact else 1.0) if is_exact else found.distance
    return apart
