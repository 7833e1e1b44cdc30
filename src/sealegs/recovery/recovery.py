"""Recovery as the guard sees it: judged rows in, once a step, the step to go on with out.

The incident tracker says what is wrong. Interventions do something about it. Restore points are where rollbacks go. The
ledger records what stays changed. Nothing here waits for a device while nothing is wrong.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from sealegs.capsule.write import FlightRecorder
from sealegs.data.position import Batches
from sealegs.detectors.spike import Spike
from sealegs.errors import ConfigError
from sealegs.recovery.adjustments import Adjustments
from sealegs.recovery.evidence import Anomaly
from sealegs.recovery.incident_tracker import IncidentTracker
from sealegs.recovery.ledger import Ledger
from sealegs.recovery.playbook import Playbook
from sealegs.recovery.playbook_runner import PlaybookRunner
from sealegs.recovery.probe import NewScale, Noise, Probe, ProbeResult
from sealegs.recovery.recurrence import Trigger, first_apart
from sealegs.recovery.requests import RequestQueue
from sealegs.recovery.restore_points import RestorePoints
from sealegs.signals.collective import TIMEOUT_S, Collective
from sealegs.signals.groups import embedding_tables
from sealegs.signals.meter import CHECKSUM_STEPS
from sealegs.state.checkpoints import Checkpoints, StoredState
from sealegs.state.snapshots import Snapshots
from sealegs.state.training_state import TrainingState
from sealegs.vocabulary import Row, Verdict
from sealegs.watch import Watch


class Recovery:
    """Keeps restore points, and goes back to one where the playbook says so. A guard owns it and calls it once a
    step."""

    def __init__(
        self,
        *,
        playbook: Playbook,
        training: TrainingState,
        watch: Watch,
        batches: Batches,
        snapshots: Snapshots,
        checkpoints: Checkpoints | None,
        folder: Path | None,
        act: bool,
        capsule_bytes: float,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """``folder`` is the run's; None on ranks that do not write. A rank that does not come within the timeout is
        named."""
        self.playbook = playbook
        self._training = training
        self._watch = watch
        self._batches = batches
        self._goes_back = act and bool(playbook.rungs)
        self._optimizers = training.optimizers
        self._trained = 0
        """Number of parameters that the optimizers had at the last update."""
        self._versions: int | None = None
        """Sum of the parameters' version counters after the last update; None where it is unknown."""
        self._says_set = True
        self._probe = Probe()
        self._new_scale: NewScale | None = None
        """Gradients found to be computed otherwise, until it shows whether they stay so."""
        self._probes = act and any(map(playbook.has_rung_for, (Trigger.DAMAGED, Trigger.BAD_DATA, Trigger.SPOILT)))
        self._ranks = ranks = Collective(timeout_s)
        self.recorder = FlightRecorder(
            training=training,
            watch=watch,
            snapshots=snapshots,
            checkpoints=checkpoints,
            ranks=ranks,
            acts=act,
            budget=capsule_bytes,
        )
        self._tracker = IncidentTracker(playbook, watch, self.recorder, ranks)
        self._restore_points = RestorePoints(
            training=training, watch=watch, batches=batches, snapshots=snapshots, checkpoints=checkpoints, ranks=ranks
        )
        self._ledger = Ledger(playbook, batches, watch, folder, ranks)
        self._runner = PlaybookRunner(
            playbook=playbook,
            ledger=self._ledger,
            tracker=self._tracker,
            restore_points=self._restore_points,
            optimizers=training.optimizers,
            embeddings=embedding_tables(training.model),
            batches=batches,
            watch=watch,
            act=act,
        )
        self._requests = RequestQueue(folder, ranks, watch.lost_folder)
        batches.on_loader = self._probe.forget_all  # kept batches may refer to data of the old loader

    @property
    def found_sound(self) -> bool:
        """Whether the last probe found that the data have changed, and not the weights."""
        evidence, incident = self._tracker.evidence, self._tracker.incident
        return evidence.is_sound and not evidence.is_running_away(0 if incident is None else incident.start)

    @property
    def is_over(self) -> bool:
        """Whether a halt was decided."""
        return self._runner.is_over

    @property
    def interventions(self) -> int:
        """How many there were in the run."""
        return self._ledger.interventions

    @property
    def adjustments(self) -> Adjustments:
        """The adjustments in force."""
        return self._ledger.adjustments

    def can_copy_majority(self, copy_majority: Callable[[Collective], str]) -> None:
        """Several ranks hold replicas, which can be made equal again."""
        self._runner.copy_majority = partial(copy_majority, self._ranks)

    def can_watch_heads(self, watch_heads: Callable[[], str]) -> None:
        """Attention logits can be looked at when they are needed: it says why not, else nothing."""
        self._runner.watch_heads = watch_heads

    def asks_for_bf16(self) -> bool:
        """Whether the loop is to train in bf16 instead of fp16; whoever asks can be told so later."""
        self._runner.asks_precision = True
        return self.adjustments.bf16

    # What the guard calls, in the order of a step.

    def handed_out(self, step: int, batch: Any) -> None:
        """Note a batch that a step is about to train on; probe batches do not count."""
        if self._probes:
            self._probe.handed_out(batch)
        self.recorder.handed_out(step, self._batches.number, batch)

    def before_update(self, norms: Tensor) -> None:
        """Finish pending copies before the weights change. The host does not wait.

        ``norms`` holds the norm of each gradient, or one number for all.
        """
        self._probe.norms = norms
        self._announce_added_parameters()
        self._forget_probes_if_weights_set()
        self._restore_points.before_update()

    def after_step(
        self, number: int, *, tokens: int, clip: float | None, loop_clips: bool, batches: int = 1
    ) -> int | None:
        """Act on the rows judged so far, before step ``number``. Gives the step to run instead, if it is another.

        The last step trained on so many ``tokens`` and ``batches``. Its gradients were clipped at ``clip``, or by the
        loop.
        """
        self._versions = self._count_changes()
        self._restore_points.tokens += tokens
        self._runner.loop_clips, self._runner.batches_a_step, self._runner.clip = loop_clips, batches, clip
        self.recorder.clip, self.recorder.loop_clips = clip, loop_clips
        anomaly = None
        for row, verdict in self._tracker.waiting_rows():
            anomaly = self._follow(row, verdict, number) or anomaly
        self._keep_probe(number, batches)
        self.recorder.keep_nonfinite()
        self.recorder.after_step()
        if anomaly is not None and not self._runner.is_over:
            return self._runner.intervene(anomaly, number)
        if self._probes and self._tracker.evidence.wants_probe:
            if probes := self._probe.begin():
                self._batches.repeat(probes)
            else:
                self._tracker.evidence.cannot_probe()
        if (
            (count := self._tracker.row_of_skips())
            and self._goes_back
            and self._restore_points.count_back(number, count)
        ):
            self._tracker.forget_queued()
            return number - count
        if self._goes_back:
            self._restore_points.schedules.remember(number)
        self._restore_points.after_step(number)
        return self._act_on_requests(number)

    def between_steps(self) -> None:
        """Note that the loop has finished its step and asks for the next batch."""
        self._restore_points.between_steps()

    def probed(self, loss: float, grad_norm: float | None, norms: Sequence[float], number: int) -> int | None:
        """Take in a probe's loss and norms for one batch; act on the result once all batches are tried."""
        streams = {detector.signal: state.stream for detector, state in self._watch.states_of(Spike)}
        of_norms = streams["grad_norm"]
        # a stream without a start, or begun anew by an announced change, has no known noise
        evidence = self._tracker.evidence
        noise = Noise(streams["loss"].scale, of_norms.scale if of_norms.has_started else 0.0, *evidence.wander)
        found = self._probe.compared(loss, grad_norm, norms, noise)
        if found is None or not evidence.wants_probe:  # an intervention came in between
            return None
        evidence.compare_with_what_passed(found.loss)
        excuse = self._excuse(found)
        is_condemned = found.is_condemned and not excuse
        is_condemned = evidence.is_left_worse_off(found.loss, noise.least_rise) or is_condemned
        self._watch.note("probe", step=number, **asdict(found), is_condemned=is_condemned)
        if found.is_condemned and not is_condemned:
            self._watch.note("weights-excused", step=number, reason=f"{found}, but {excuse}")
        if found.change:
            self._new_scale = self._new_scale or NewScale.of(found)
        source = None if is_condemned or found.change else self._tracker.suspect()
        anomaly = evidence.probed(
            str(found),
            number=number,
            loss=found.loss,
            rise=found.rise,
            least=noise.least_rise,
            is_condemned=is_condemned,
            source=source,
            oldest=self._probe.oldest,
        )
        if evidence.doubted_since is not None and self._tracker.incident is None:
            self._watch.alarm_of_damage(evidence.doubted_since)
        return None if anomaly is None else self._runner.intervene(anomaly, number)

    def _excuse(self, found: ProbeResult) -> str:
        """Why batches from before may be worse though the weights are not damaged; empty where there is no reason."""
        evidence = self._tracker.evidence
        if evidence.is_of_the_data(found.rise, norm_has_grown=found.norm_has_grown):
            return "new batches have risen far more: the data have changed, and those from before are forgotten"
        if not found.norm_is_gross and evidence.is_slight(found.loss, found.loss_then):
            return "next to nothing of what was learned is lost"
        return ""

    def stand_back(self) -> None:
        """Probe no more and roll back no more: another guard trains beside this one."""
        self.playbook = Playbook.observe()
        self._goes_back = self._probes = False
        self._runner.stand_back()

    def leave_the_loss(self) -> None:
        """Probe no more, and act no more on a loss, which says nothing about the weights; on what is not finite as
        before."""
        self._probes = False
        self._runner.leave_the_loss()

    def try_no_batch_again(self, reason: str) -> None:
        """Probe no more; the looks of an incident tell what lasts."""
        if self._probes:
            self._probes = False
            self._watch.note("no-probe", reason=reason)

    def saved(self, step: int, *, was_waited_for: bool = False, is_proven: bool = False) -> None:
        """Note that a checkpoint is being written. One that the run waits for, as the last one, is judged by the steps
        before it."""
        led_by = self._tracker.healthy if was_waited_for else 0
        self._restore_points.health.saved(step, led_by=led_by, is_proven=is_proven)

    def restored_snapshot(self) -> Callable[[], StoredState] | None:
        """What captures the snapshot that the run has just gone back to, once; None where it went to a checkpoint."""
        points = self._restore_points
        snapshot, points.gone_back_to = points.gone_back_to, None
        if snapshot is None:
            return None
        return partial(self._training.capture_past, points.snapshots, snapshot, whole=True)

    def ask(self, number: int, words: Sequence[str], *, by: str, request: str | None = None) -> int | None:
        """Carry out a person's request, or raise a ConfigError that says why not."""
        return self._runner.ask(number, words, by=by, request=request)

    def forget_after(self, step: int) -> None:
        """Forget what was kept of later steps: somebody else has brought the run to this step."""
        self._restore_points.forget_after(step)
        self._probe.forget_from(step)
        self._versions = self._new_scale = None
        self._tracker.resume_at()
        self._tracker.forget_queued()

    def went_to(self, step: int) -> None:
        """Forget what was kept of this step and later ones: the run goes on here with other weights."""
        self.recorder.forget_from(step)
        self._probe.forget_from(step)
        self._versions = self._new_scale = None

    def close(self) -> None:
        """Wait until incidents are written; an open one is written as it stands."""
        self._tracker.close()
        self.recorder.close()

    # What survives the process, and what belongs to a step.

    def adopt(self, ledger: Mapping[str, Any]) -> float:
        """Continue the ledger of another replica, and forget the restore points that are not its own: those after the
        step that is given, infinite where both had the same interventions."""
        before, own = self._ledger.history, self._ledger.now().data
        self._ledger.take_over({**ledger, "data": own})  # which batches were left out is of each replica's own data
        step = first_apart(before, self._ledger.history)
        if step < math.inf:
            self._restore_points.forget_after(int(step))
        return step

    def bookkeeping(self) -> dict[str, Any]:
        """The ledger as JSON values; a rollback does not undo it."""
        return self._ledger.to_plain()

    def take_over(self, ledger: Mapping[str, Any]) -> None:
        """Continue the ledger of the process before."""
        self._ledger.take_over(ledger)

    def state_dict(self) -> dict[str, Any]:
        """The state that belongs to a step, as JSON values."""
        points = self._restore_points
        return self._tracker.state_dict() | {"health": points.health.state_dict(), "spent": points.spent}

    def load_state_dict(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Continue from a saved state, that of ``step``; None where there was no recovery then."""
        if state is not None:
            self._tracker.load_state_dict(state)
        self._restore_points.health.load_state_dict((state or {}).get("health", {}), step)  # older states have none
        self._restore_points.went_on_from((state or {}).get("spent", {}))

    def queue_row(self, row: Row, verdict: Verdict) -> None:
        """Keep a row that was judged and written until its step is over."""
        self._tracker.queue_row(row, verdict)
        self._restore_points.add_judging(int(row["step"]))

    def _follow(self, row: Row, verdict: Verdict, number: int) -> Anomaly | None:
        step = int(row["step"])
        self._follow_new_scale(row)
        seen = self._tracker.advance(row, verdict, number)
        self._restore_points.observe_step(step, is_calm=seen.is_calm, is_doubtful=seen.is_doubtful)
        # the same fault may come again: without batches from before it there could be no probe
        is_retried = seen.is_retried or self._tracker.has_other_data
        self._probe.consider(row, is_calm=seen.is_calm or is_retried, is_doubtful=seen.is_doubtful and not is_retried)
        if seen.anomaly is None and self._tracker.incident is None:  # while one is open, the outcome is not known
            if self._tracker.is_back:
                self._ledger.held(step, self._tracker.good)
            else:
                self._ledger.lingers(step)
        return seen.anomaly or self._differing_replicas(row)

    def _differing_replicas(self, row: Row) -> Anomaly | None:
        """Ranks that hold other weights than the rest, where the playbook has a rung for it."""
        if not float(row.get("ranks_differ", 0.0)) or not self.playbook.has_rung_for(Trigger.REPLICAS_DIFFER):
            return None
        step = int(row["step"])
        onset = max(step - CHECKSUM_STEPS, 0)  # until then they held the same
        text = f"at step {step} {float(row['ranks_differ']):.0f} of the ranks hold other weights than the rest"
        return Anomaly(trigger=Trigger.REPLICAS_DIFFER, onset=onset, batch=None, text=text)

    def _follow_new_scale(self, row: Row) -> None:
        """Announce gradients that are computed otherwise once they have stayed so, for the statistic to learn the new
        level instead of rejecting it. A few scaled steps are no change of the run."""
        if self._new_scale is None:
            return
        self._new_scale = self._new_scale.after(float(row.get("grad_norm", math.nan)))
        if self._new_scale.is_known:
            if self._new_scale.lasts:
                self._probe.forget_all()  # their norms are of the old scale
                self._watch.announce(self._new_scale.change)
            self._new_scale = None

    def _announce_added_parameters(self) -> None:
        """Treat parameters added to an optimizer as an announced change. A model of which more is trained is another
        model, and earlier losses of batches say nothing about it."""
        count = sum(len(group["params"]) for optimizer in self._optimizers for group in optimizer.param_groups)
        if 0 < self._trained < count:
            self._probe.forget_all()
            self._watch.announce(f"the optimizer trains {count - self._trained} more parameters than before")
        self._trained = count

    def _forget_probes_if_weights_set(self) -> None:
        """Forget the kept batches if the loop has set weights itself since the last update, as for lottery tickets or a
        new head. Such weights are meant to be what they are. Failing memory does not raise torch's version counters;
        neither does a write to ``.data``."""
        changes = self._count_changes()
        if None in (self._versions, changes) or self._versions == changes:
            return
        self._probe.forget_all()
        self._tracker.evidence.loss_is_back()
        if self._says_set:
            text = "the loop has set weights by itself: batches from before it are not tried again (said once)"
            self._watch.note("weights-set", text=text)
            self._says_set = False

    def _count_changes(self) -> int | None:
        """How often torch has changed the weights in place; None for shards, which change when they are gathered."""
        if not self._probes or self._ranks.world > 1:
            return None
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        versions: list[int] = [weight._version for group in groups for weight in group["params"]]
        return sum(versions)

    def _keep_probe(self, number: int, batches: int) -> None:
        """Keep the batches of the last step, if they are due."""
        if not self._probes:
            return
        is_healthy = self._tracker.healthy > 0 or self._tracker.is_retried or self._tracker.has_other_data
        self._probe.after_step(number, batches=batches, is_healthy=is_healthy)
        if self._probe.unavailable_because:
            self._probes = False
            self._watch.note("no-probe", step=number, reason=self._probe.unavailable_because)

    def _act_on_requests(self, number: int) -> int | None:
        request, refused = self._requests.request(number)
        for name, by, why in refused:
            self._watch.note("request-refused", step=number, request=name, by=by, reason=why)
        if request is None:
            return None
        try:
            return self.ask(number, request.words, by=request.by, request=request.id)
        except ConfigError as reason:
            self._watch.note("request-refused", step=number, request=request.id, by=request.by, reason=str(reason))
            return None
