"""The shell around the user's loop: takes a loss that was backpropagated, decides, updates or skips, writes it down.

A loss goes this way: ``Guard.step`` calls ``LoopPort.decide``, which measures it (``step/step_inputs``) and has its
update prepared (``step/decision``). That submits the row to ``Watch``, whose ``_judge_and_record`` has it judged
(``judge``), writes it to the run folder and shows it to its observer, the ``LoopPort``, which queues it for recovery.
Where the device decides, that comes one or two steps later. ``LoopPort.update`` changes the weights or does not
(``step/update``), and ``finish_step`` lets ``recovery`` act on what is in the queue. ``docs/design.md`` has more.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from torch import Tensor, bfloat16, float16, nn
from torch import dtype as Dtype
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sealegs.guard_options import (
    Checkpointing,
    Clipping,
    Elastic,
    GuardOptions,
    LoopScheduler,
    Telemetry,
    has_begun,
    skip_ranges,
)
from sealegs.judge import Detection
from sealegs.loop_port import LoopPort
from sealegs.record.manifest import describe
from sealegs.recovery.actions import refuse_unless
from sealegs.recovery.playbook import Playbook
from sealegs.recovery.saving import Resumed
from sealegs.report.event_text import how_resumed
from sealegs.signals.collect import Signal
from sealegs.step.skip_way import Skipping
from sealegs.vocabulary import Verdict
from sealegs.watch import Observer, Watch

T = TypeVar("T")
RUN = "the path of the folder to record into, or None to record nothing"


class Guard:
    """Keeps a training loop from applying updates that would damage it. Wraps neither model nor optimizer.

    >>> import sealegs, tempfile, torch
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with sealegs.Guard(model, optimizer, run=f"{folder}/a1", clip=1.0) as guard:
    ...         for batch in guard.batches(torch.randn(10, 8, 4)):
    ...             loss = model(batch).square().mean() + (float("nan") if guard.number == 6 else 0.0)
    ...             loss.backward()
    ...             verdict = guard.step(loss)
    ...             if not verdict.go:
    ...                 print(verdict)
    step 6  SKIP  loss is not finite: nan  in weight  rejected 1 of 10
    """

    loop: LoopPort
    """What the loop of a framework calls in the place of ``step``."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        run: str | Path | None,
        scheduler: LRScheduler | Sequence[LRScheduler] | LoopScheduler | None = None,
        scaler: GradScaler | None = None,
        clip: float | Clipping | None = None,
        act: bool | Skipping = True,
        playbook: Playbook | None = None,
        checkpoint_every: int | Checkpointing = 0,
        resume: bool | Literal["auto"] | Elastic = False,
        detection: Detection = Detection(),  # noqa: B008 -- a frozen value
        telemetry: Telemetry = Telemetry(),  # noqa: B008 -- a frozen value
    ) -> None:
        """``run`` is the folder to record into; None records nothing.

        Several optimizers are updated together or not at all. ``scheduler`` is stepped with them; a ``LoopScheduler``
        is stepped by the loop. ``clip`` is the largest global gradient norm; leave it out to clip yourself, and hand
        the norm to ``step``. A ``Clipping`` can limit attention logits, too. Under ``act=False``, shadow mode,
        everything is decided and written down, and nothing is skipped or halted. ``Skipping`` says how updates are
        skipped. In a process group make a guard on every rank.

        ``playbook`` says what is done about an anomaly that skipping does not cure; it needs ``batches``. With one,
        ``Playbook.observe()`` for one that does nothing, an incident leaves a capsule in the folder, from which
        ``sealegs replay`` runs it again.

        Every ``checkpoint_every`` steps a checkpoint is written to the run folder, beside the training; 0 writes none.
        ``Checkpointing`` has more to say: how many, snapshots in memory, state of the loop's own. ``resume`` brings
        everything back that the newest checkpoint to trust has; ``"auto"`` resumes a run that is there and begins one
        that is not, as a job needs that is started again by itself. So does an ``Elastic``, which says what becomes of
        the learning rate where another number of ranks goes on.

        ``detection`` says how steps are judged, ``telemetry`` what else is measured and who is told.
        """
        refuse_unless(run is None or (isinstance(run, str | Path) and str(run) != ""), "run", run, RUN)
        is_known = isinstance(resume, Elastic) or resume in (True, False, "auto")
        refuse_unless(is_known, "resume", resume, 'True, False, "auto", or sealegs.Elastic()')
        options = GuardOptions(
            scheduler=scheduler,
            scaler=scaler,
            clip=clip,
            act=act,
            playbook=playbook,
            checkpoint_every=checkpoint_every,
            resume=resume is True,
            elastic=resume if isinstance(resume, Elastic) else Elastic(),
            detection=detection,
            telemetry=telemetry,
        )
        if resume == "auto" or isinstance(resume, Elastic):
            options = replace(options, resume=has_begun(run, telemetry.timeout_s))
        open_watch = partial(watch_of, run, options, resume=options.resume)
        self.loop = LoopPort(model, optimizer, options, open_watch, has_folder=run is not None)
        if self.resumed is not None and self.watch.record is not None:
            here = describe(self.watch.record.folder.name)
            self.loop.note_resume(changed={}, versions=here.versions, git=here.git, host=here.host)
            self.watch.say(how_resumed(asdict(self.resumed)))

    @classmethod
    def around(cls, loop: LoopPort) -> Self:
        """The shell of a loop that is made already: a framework's, or the lab's."""
        guard = cls.__new__(cls)
        guard.loop = loop
        return guard

    @property
    def number(self) -> int:
        """The number of the step that comes next."""
        return self.loop.number

    @property
    def epoch(self) -> int:
        """The number of the epoch that ``batches`` hands out next: of one that was begun before a resume, the rest.

        For a sampler that is told: ``sampler.set_epoch(guard.epoch)``.
        """
        return self.loop.data.following_epoch

    def accumulation(self, loader: Iterable[Any], planned: int = 1) -> int:
        """How many batches of this loader make a step with as many samples as those of the process before had.

        ``planned`` are those of a run that begins, or whose loader does not say how ranks share a batch.
        """
        return self.loop.accumulation(loader, planned)

    @property
    def watch(self) -> Watch:
        """What judges and records the run."""
        return self.loop.watch

    def autocast_dtype(self, dtype: Dtype) -> Dtype:
        """The precision to train in: ``dtype``, unless a playbook has changed fp16 to bf16.

        A loop that asks at every step, ``torch.autocast("cuda", guard.autocast_dtype(torch.float16))``, is one whose
        precision can be changed.
        """
        recovery = self.loop.recovery
        is_changed = recovery is not None and recovery.asks_for_bf16()
        return bfloat16 if is_changed and dtype == float16 else dtype

    @property
    def is_probe(self) -> bool:
        """Whether the batch that was handed out is only tried again, to tell damaged weights from bad data, or computed
        for another rank (``Telemetry.recompute``).

        Nothing is learned from it: a loop that counts its steps or averages its losses leaves it out. Buffers, random
        state and what is in ``Checkpointing.also`` are put back afterwards.
        """
        return self.loop.data.is_probe

    @property
    def resumed(self) -> Resumed | None:
        """What a resume has brought back."""
        return self.loop.resumed

    @property
    def ended_badly(self) -> str:
        """Once it is over: why the run did not end well, in a sentence."""
        return self.loop.ended_badly

    @property
    def missing(self) -> str:
        """What the run's folder should have and does not: checkpoints, rows, capsules, or that it is gone itself."""
        return self.watch.missing

    def batches(self, loader: Iterable[T], *, skip: Sequence[tuple[int, int]] = ()) -> Iterator[T]:
        """The batches of a loader; the record then says which of them a step saw, and recovery can pass some over.

        ``skip`` are ranges of batches never to train on, ``(first, one after the last)``.
        """
        skip_ranges(self.loop.data, skip)
        return self.loop.batches(loader)

    def step(
        self,
        loss: Tensor | None,
        *,
        grad_norm: Tensor | float | None = None,
        tokens: int | None = None,
        token_losses: Tensor | None = None,
        **signals: Signal,
    ) -> Verdict:
        """End a step: norms, verdict, clipping, optimizer, scheduler, zeroed gradients.

        ``loss`` is that of the whole step, already backpropagated; with accumulation, the sum of what was
        backpropagated; None on the ranks of a pipeline that do not have its last stage. ``grad_norm`` is for those who
        clip themselves: the norm *before* clipping. ``tokens`` were trained on in this step; ``token_losses`` are
        theirs, for a histogram. Further ``signals`` go into the record.

        Gives the newest verdict that is known: of this step on the CPU, of one or two steps before on a GPU, where
        this step's has been decided on the device (``verdict.step`` says which). Raises ``RunHalted`` when the budget
        of skips is spent or the weights are not finite.
        """
        self.loop.decide(loss, grad_norm=grad_norm, tokens=tokens, token_losses=token_losses, **signals)
        return self.loop.update()

    def before_clipping(self, norm: float | None = None) -> None:
        """The loop is about to clip by itself, to ``norm``: measure the gradients while they are whole.

        The next ``step`` goes by that, names the tensor at fault, and clips nothing. A loop that clips in several
        calls may tell before each: they are whole before the first.
        """
        self.loop.before_clipping(norm)

    def accumulate(self) -> AbstractContextManager[None]:
        """Around each micro-batch but the last: gradients add up, and ranks do not exchange them.

        It also says how many batches a step takes, so that those of one can be tried again together.
        """
        return self.loop.accumulate()

    def paused(self) -> AbstractContextManager[None]:
        """Around what is no training, an evaluation or a checkpoint: its time does not count as the step's."""
        return self.loop.paused()

    def announce(self, change: str) -> None:
        """Say that the run is about to change by intention; see ``Watch.announce``."""
        self.watch.announce(change)

    def ask(self, *words: str, by: str = "code") -> None:
        """What ``sealegs do`` asks for, from code: ``guard.ask("rollback", "100")``. Needs a playbook, be it observe.

        On several ranks call it on all of them, at the same step.
        """
        self.loop.ask(*words, by=by)

    def checkpoint(self, *, wait: bool = False) -> bool:
        """Write what is needed to run the next step to the run folder; beside the training, unless it is to wait.

        False, where one that was begun before is still being written.
        """
        return self.loop.checkpoint(wait=wait)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next verdicts depend on, as JSON values: to be saved in the user's checkpoints."""
        return self.loop.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, bit for bit."""
        self.loop.load_state_dict(state)

    def close(self) -> None:
        """Finish, and let go of the folder and of the model.

        A run that is not well, an incident that did not recover or a weight that is not finite, is warned of
        (``sealegs.RunEndedBadly``), unless an error or somebody's ``end`` event has said how it ended. So is a folder
        that lacks something (``sealegs.FolderIncomplete``).
        """
        self.loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self.loop.fail(error)
        self.close()


def watch_of(run: str | Path | None, options: GuardOptions, *, observer: Observer, resume: bool) -> Watch:
    """The watch that a guard records with."""
    return Watch(
        run,
        resume=resume,
        settings=options.telemetry.settings,
        price_per_hour=options.telemetry.price_per_hour,
        sinks=options.telemetry.sinks,
        notify=options.telemetry.notify,
        detection=options.detection,
        observer=observer,
    )
