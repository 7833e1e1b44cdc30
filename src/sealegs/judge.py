"""Rows in, Verdicts out: every detector looks, the judge gives one verdict, every detector learns.

    state, verdict = fold(detectors, state, row)

The same fold judges live, in replay and offline: same numbers in, same verdicts out.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from sealegs.detectors.collapse import ADVICE, Collapse, Collapsed, refuse_unknown
from sealegs.detectors.contract import Detector
from sealegs.detectors.custom import Rule
from sealegs.detectors.drift import Drift
from sealegs.detectors.learning_rate import NAME as RATE
from sealegs.detectors.learning_rate import Rate
from sealegs.detectors.nonfinite import NonFinite, broken
from sealegs.detectors.overflow import Overflow
from sealegs.detectors.proportion import Proportion
from sealegs.detectors.repeated_batch import RepeatedBatch
from sealegs.detectors.replicas import Replicas
from sealegs.detectors.spike import Spike, SpikeState
from sealegs.detectors.straggler import Straggler
from sealegs.detectors.textbook import textbook
from sealegs.detectors.throughput import Throughput
from sealegs.errors import ConfigError
from sealegs.vocabulary import Finding, Row, Severity, Verdict

Detectors: TypeAlias = Sequence[Detector[Any]]

CALIBRATED = "calibrated"
PROBE = "probe"
"""Stands for a detector in the finding that batches from before have become worse."""
LOSS = "spike/loss"
"""The detector whose surprises count while the learning rate has leapt."""
JUDGED = (LOSS, "spike/grad_norm")
"""The detectors whose surprises are evidence. A reward, judged by a user's own, may leap for good reasons."""

YOUNG_STEPS = 1000
"""Steps in which the statistic is uncalibrated: it knows its tail only roughly."""
YOUNG_ALARM = 1e-6
"""The p that one signal alone must be below to be an alarm in those steps."""
GROSS = 10.0
"""A gradient norm this many times the recent largest spoils the update, unless something bounds it. Of 138 healthy
trainings three reach it, with the first of something new, and the others a third of it (bench/harm.py)."""
GROWTH = 2.0
"""A gradient norm this many times the recent largest, right after a surprise, spoils the update too. Gradients that
explode do so several times over (6 to 9 times a step in BLOOM-176B); a new level is reached once."""
ROW = 5
"""Surprises in a row that are an incident, however small each is while the statistic is uncalibrated."""
SKIPPED_ROW = 3
"""Finite steps skipped in a row that are an alarm, too; of healthy runs none has had two. An uncalibrated statistic
knows no surprises, and the fifth becomes its new level."""
RARE = 1000
"""One finite step in so many may be skipped alone, with a loss as before at the next. Beyond that it is the nature of
the data, and no finite step is skipped any more."""
LONG_ROW = 10
"""Skips in a row whose end is worth a notice."""
SAME = 1e-6
"""Relative difference up to which loss and gradient norm are those of the same step again."""
COOL_DOWN = 100
"""Steps after an alarm in which another one belongs to its incident, and after a notice in which it is not repeated."""
QUIET = 20
"""Steps without a surprise after which a loss far beyond any of the incident is another one, though it comes sooner."""
FAR = 10.0
"""How many times as far above its limit as they were."""
BEYOND = 1e150
"""Stands for a loss that is not finite, and for any larger one: states hold nothing that JSON cannot spell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much may be skipped before the run is halted: never an unlimited freeze, never a silent accept."""

    in_a_row: int = 150
    """Skipped steps in a row. A new level is accepted after 100, with a notice."""
    nonfinite_in_a_row: int = 10
    """Non-finite steps in a row: they are no level to get used to."""
    total: int = 200
    """Skipped steps in all."""
    share: float = 0.01
    """Skipped steps as a share of all steps; the larger of this and ``total`` counts."""

    def __post_init__(self) -> None:
        if not (self.in_a_row >= 1 and self.nonfinite_in_a_row >= 1 and self.total >= 1 and 0 <= self.share <= 1):
            raise ConfigError(
                f"Budget(in_a_row={self.in_a_row}, nonfinite_in_a_row={self.nonfinite_in_a_row}, total={self.total}, "
                f"share={self.share}): whole numbers from 1, and a share from 0 to 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """How a run is judged."""

    rules: str = CALIBRATED
    """``calibrated``, or ``textbook`` for the common rules of thumb."""
    detectors: Sequence[Rule | Detector[Any]] = ()
    """Your own detectors on top: each a function of a row, or a detector."""
    budget: Budget = Budget()
    """How much may be skipped before the verdict is HALT."""
    halt_on: Sequence[Collapsed] = ()
    """What ends the run as soon as it is found, where it is only told otherwise: ``("entropy-collapse",)``."""
    stalled_after_s: float = 600.0
    """Seconds for which a loop may stand still; longer is an event, with the line that it waits in."""

    def __post_init__(self) -> None:
        rules(self.rules)
        refuse_unknown(self.halt_on, "Detection.halt_on")
        if self.halt_on and self.rules != CALIBRATED:
            raise ConfigError(f"Detection.halt_on={self.halt_on!r}: only the calibrated rules find that")
        seconds = self.stalled_after_s
        is_time = isinstance(seconds, int | float) and not isinstance(seconds, bool) and seconds > 0
        for name, is_sound, cure in (
            ("detectors", isinstance(self.detectors, Sequence), "a list of functions of a row, or of detectors"),
            ("budget", isinstance(self.budget, Budget), "sealegs.Budget(...)"),
            ("stalled_after_s", is_time, "seconds, above 0; math.inf for never"),
        ):
            if not is_sound:
                raise ConfigError(f"Detection.{name}={getattr(self, name)!r}: {cure}")


class Disturbance(NamedTuple):
    """Surprises and alarms with no more than ``QUIET`` other steps between two of them: the last such stretch."""

    first: int = 0
    """Which of the judged steps it began with."""
    last: int = -QUIET - 1
    highest: float = 0.0
    """Its highest loss; infinite ones count as ``BEYOND``."""
    highest_before: float = 0.0
    """The highest loss of earlier ones that belong to the same incident."""
    is_broken: bool = False
    """Whether something in it was not finite."""
    was_broken: bool = False
    """Whether something was in earlier ones that belong to the same incident."""

    def after(self, at: int, loss: float, *, is_broken: bool = False) -> "Disturbance":
        """The stretch after one more surprise or alarm, or the next one, which begins with it."""
        loss = loss if loss < BEYOND else BEYOND  # NaN too
        if at - self.last <= QUIET + 1:
            return self._replace(last=at, highest=max(self.highest, loss), is_broken=self.is_broken or is_broken)
        before = max(self.highest, self.highest_before)
        return Disturbance(at, at, loss, before, is_broken, self.is_broken or self.was_broken)


class Tally(NamedTuple):
    """The judge's own state, beside those of the detectors."""

    steps: int = 0
    skips: int = 0
    skips_in_a_row: int = 0
    nonfinite_in_a_row: int = 0
    incidents: int = 0
    last_alarm: int = -COOL_DOWN - 1
    """Which of the judged ``steps`` it was; step numbers may go back."""
    remarks: tuple[tuple[str, int], ...] = ()
    """Notices that were given, and at which of the ``steps``."""
    skipped: tuple[float, float] | tuple[()] = ()
    """Loss and gradient norm of the last step, if it was skipped."""
    surprises_in_a_row: int = 0
    """Steps in a row, skipped or not, with a loss or a gradient norm that no healthy step is expected to have."""
    lone_skips: int = 0
    """Finite steps that were skipped alone, with a loss as before at the next."""
    is_restrained: bool = False
    """Whether there were so many of them that finite steps are not skipped any more."""
    is_held: bool = False
    """Whether the last step showed a loss that runs away after a leap of the learning rate. A gate on the device then
    skips the next update."""
    disturbance: Disturbance = Disturbance()
    """The last surprises and alarms."""
    is_signed: bool = False
    """Whether the loss has been negative: then no update is held for it."""
    finite_skips_in_a_row: int = 0
    """Skipped steps in a row of which nothing was NaN or infinite."""


class JudgeState(NamedTuple):
    """Everything that the next verdict depends on, besides its row."""

    detectors: tuple[Any, ...]
    tally: Tally = Tally()


def standard(halt_on: Sequence[str] = ()) -> tuple[Detector[Any], ...]:
    """The calibrated detectors; some of what ``Collapse`` finds halts. Two signals are judged by a statistic, so each
    has half of the chance of a false alarm."""
    return (
        NonFinite(),
        Overflow(),
        Spike(signal="loss", gate=0.5e-4, alarm=0.5e-5),
        Spike(signal="grad_norm", gate=0.5e-4, alarm=0.5e-5, smallest=1.5, must_fall=False, gross=GROSS, growth=GROWTH),
        Drift(signal="loss", chance=0.5e-4),
        # rises in health, as learning rates fall, and in warm-up
        Drift(signal="grad_norm", chance=0.5e-4, gravest=Severity.WATCH, young_factor=math.inf),
        Proportion(),
        Throughput(),
        Straggler(),
        RepeatedBatch(),
        Replicas(),
        Rate(),
        Collapse(halts=frozenset(halt_on)),
    )


def rules(name: str, halt_on: Sequence[str] = ()) -> tuple[Detector[Any], ...]:
    """A set of detectors by its name."""
    sets: dict[str, Callable[[], tuple[Detector[Any], ...]]]
    sets = {CALIBRATED: partial(standard, halt_on), "textbook": textbook}
    if name not in sets:
        raise ConfigError(f"Detection.rules={name!r}: one of {', '.join(sets)}")
    return sets[name]()


def is_wished(verdict: Verdict) -> bool:
    """Whether it halts the run because the user wants it for this, whatever a playbook would do."""
    return any(f.severity == Severity.HALT and f.detector in ADVICE for f in verdict.findings)


def begin(detectors: Detectors) -> JudgeState:
    """The state before the first step."""
    return JudgeState(tuple(detector.init() for detector in detectors))


def fold(detectors: Detectors, state: JudgeState, now: Row, budget: Budget = Budget()) -> tuple[JudgeState, Verdict]:  # noqa: B008
    """One step: look, decide, learn."""
    findings = tuple(f for d, s in zip(detectors, state.detectors, strict=True) if (f := d.look(s, now)))
    tally, verdict = decide(state.tally, now, findings, budget)
    states = tuple(d.learn(s, now) for d, s in zip(detectors, state.detectors, strict=True))
    if any(isinstance(known, SpikeState) and known.stream.burst for known in states):
        verdict = replace(verdict, is_suspicious=True)
    return JudgeState(states, tally), verdict


def replay(rows: Iterable[Row]) -> Iterator[Verdict]:
    """The verdicts on recorded rows; rows without a loss are evaluations, and are not judged.

    Where the run went back to a step, the detectors know what they knew before that step, as they did live.
    """
    judged = [row for row in rows if "loss" in row]
    steps = [int(row["step"]) for row in judged]
    again = {after for before, after in pairwise(steps) if after < before}
    known: dict[int, tuple[Any, ...]] = {}
    detectors = standard()
    state, before = begin(detectors), -1
    for row, step in zip(judged, steps, strict=True):
        if step < before:
            state = state._replace(detectors=known.get(step, state.detectors))
        if step in again:
            known[step] = state.detectors
        state, verdict = fold(detectors, state, row)
        before = step
        yield verdict


def decide(tally: Tally, now: Row, findings: tuple[Finding, ...], budget: Budget) -> tuple[Tally, Verdict]:
    """One verdict from all findings, the gravest first, within the budget."""
    step = int(now["step"])
    findings += as_the_probe_found(now)
    is_long = tally.skips_in_a_row >= LONG_ROW
    if not findings and not tally.skips_in_a_row and not float(now.get("gate_closed", 0.0)):  # most steps by far
        return _after_a_calm_step(tally), Verdict(step=step, skip_limit=budget.in_a_row)
    # the first negative loss is always a finding
    is_signed = tally.is_signed or -math.inf < float(now.get("loss", math.nan)) < 0
    findings = sure_if_young(tally.steps, findings)
    findings = findings if is_signed else while_the_rate_is_up(now, findings)
    is_held = any(f.detector == LOSS and f.spoils_update for f in findings)
    if tally.is_restrained:
        findings = tuple(replace(f, spoils_update=False) if f.detector.startswith("spike/") else f for f in findings)
    findings = as_the_gate_decided(now, findings)
    if is_repeated(tally, now):
        findings = tuple(replace(f, spoils_update=False, note=f"{f.note}, the same step again") for f in findings)
    spoilt = any(f.spoils_update and f.severity >= Severity.GATE for f in findings)
    # A loss scaler in search of its scale skips by design, and halts by its own rule when it finds none.
    counts = spoilt and any(
        f.spoils_update and (f.detector != "overflow" or f.severity > Severity.GATE) for f in findings
    )
    is_nonfinite = counts and any(f.detector == "nonfinite" for f in findings)
    is_surprising = any(map(is_surprise, findings))
    before, tally = (
        tally,
        tally._replace(
            steps=tally.steps + 1,
            skips=tally.skips + counts,
            skips_in_a_row=tally.skips_in_a_row + 1 if counts else 0,
            nonfinite_in_a_row=tally.nonfinite_in_a_row + 1 if is_nonfinite else 0,
            skipped=values_of(now) if spoilt else (),
            surprises_in_a_row=tally.surprises_in_a_row + 1 if is_surprising else 0,
            is_held=is_held,
            is_signed=is_signed,
            finite_skips_in_a_row=tally.finite_skips_in_a_row + 1 if counts and broken(now) is None else 0,
        ),
    )
    findings += in_a_row(tally, step, budget, counts=counts)
    if not counts:
        findings += over(before, step) if is_long else ()
        tally, restraint = restrained(before, tally, step)
        findings += restraint
    tally, findings = without_repetition(tally, findings)
    is_alarm = any(f.severity >= Severity.ALARM for f in findings)
    if is_alarm or is_surprising:
        stretch = tally.disturbance.after(tally.steps, float(now.get("loss", math.nan)), is_broken=is_nonfinite)
        tally = tally._replace(disturbance=stretch)
    opens = is_alarm and (tally.steps - tally.last_alarm > COOL_DOWN or is_another(tally, findings))
    if is_alarm:
        tally = tally._replace(incidents=tally.incidents + opens, last_alarm=tally.steps)
    if opens:
        tally = tally._replace(disturbance=tally.disturbance._replace(highest_before=0.0, was_broken=False))
    return tally, Verdict(
        step=step,
        findings=tuple(sorted(findings, key=lambda f: -f.severity)),
        skips_in_a_row=tally.nonfinite_in_a_row if is_nonfinite else tally.skips_in_a_row,
        skip_limit=budget.nonfinite_in_a_row if is_nonfinite else budget.in_a_row,
        incident=tally.incidents if is_alarm else None,
        opens_incident=opens,
        culprit=culprit_in(now) if spoilt else "",
    )


def culprit_in(now: Row) -> str:
    """Where the worst gradient of a step was. A loss or one parameter that is not finite makes all gradients so, and
    the first of them is no culprit: then at most the rank is known.

    >>> named = {"culprit": "emb.weight on rank 1", "loss": 2.5, "grad_norm": math.inf}
    >>> culprit_in(named), culprit_in(named | {"params_finite": 0.0}), culprit_in(named | {"loss": math.nan})
    ('emb.weight on rank 1', 'rank 1', 'rank 1')
    >>> culprit_in({"culprit": "emb.weight of rank 1", "loss": math.nan, "grad_norm": math.nan})
    ''
    >>> culprit_in({"culprit": "emb.weight on rank 1 (dp 0, tp 1)", "loss": math.nan, "grad_norm": math.nan})
    'rank 1 (dp 0, tp 1)'
    """
    named = str(now.get("culprit", ""))
    are_all_broken = not any(math.isfinite(float(now.get(name, 0.0))) for name in ("loss", "grad_norm"))
    if float(now.get("params_finite", 1.0)) == 1.0 and not are_all_broken:
        return named
    rank = re.search(r"(?:^|\bon )(rank \d+(?: \([^()]*\))?)$", named)
    return rank[1] if rank else ""


def sure_if_young(judged: int, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Lower the alarm or gate of one signal alone while the statistic is uncalibrated, unless its p is very small."""
    spikes = [f for f in findings if f.p is not None and f.detector.startswith("spike/")]
    if len(spikes) > 1:
        doubtful = [f for f in spikes if f.severity == Severity.WATCH]
        findings = tuple(replace(f, severity=Severity.GATE) if f in doubtful else f for f in findings)
    surprised = [f for f in findings if f.p is not None and f.severity == Severity.ALARM]
    if judged >= YOUNG_STEPS or len(surprised) != 1 or (surprised[0].p or 0.0) < YOUNG_ALARM:
        return findings
    return tuple(replace(f, severity=Severity.GATE) if f is surprised[0] else f for f in findings)


def while_the_rate_is_up(now: Row, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Reject a surprising loss while the learning rate is far above any that the run has used. The loss runs away from
    such a rate, and more such updates do harm, whatever the gradients are."""
    leap = next((f for f in findings if f.detector == RATE), None)
    if leap is None or not float(now.get("lr", 0.0)) >= leap.limit:
        return findings
    return tuple(
        replace(f, spoils_update=True) if f.detector == LOSS and f.severity >= Severity.GATE else f for f in findings
    )


def is_surprise(finding: Finding) -> bool:
    """Whether it is a finite loss or gradient norm that no healthy step is expected to have."""
    return finding.detector in JUDGED and finding.severity >= Severity.GATE


def is_another(tally: Tally, findings: Iterable[Finding]) -> bool:
    """Whether an alarm soon after another is of a new incident, after some quiet. Either something is not finite, where
    all of that incident was; or the loss has leapt, and by the limit that it is beyond, no loss of that incident was a
    surprise, or none to speak of."""
    if tally.disturbance.first <= tally.last_alarm:
        return False
    if tally.nonfinite_in_a_row and not tally.disturbance.was_broken:
        return True
    leaps = (f for f in findings if f.detector == LOSS and is_surprise(f) and f.lasts == 1)
    highest = tally.disturbance.highest_before
    return any(leap.value - leap.limit > FAR * (highest - leap.limit) for leap in leaps)


def restrained(before: Tally, tally: Tally, step: int) -> tuple[Tally, tuple[Finding, ...]]:
    """Count lone skips after a step that was not skipped; where there are too many, finite steps are skipped no more.

    What is not finite is always skipped.
    """
    is_alone = before.skips_in_a_row == 1 and before.surprises_in_a_row > 0  # a user's own rule does not count
    is_alone = is_alone and not before.nonfinite_in_a_row and not tally.surprises_in_a_row
    if not is_alone or tally.is_restrained:
        return tally, ()
    tally = tally._replace(lone_skips=tally.lone_skips + 1)
    limit = max(1, tally.steps // RARE)
    if tally.lone_skips <= limit:
        return tally, ()
    note = "steps skipped one at a time, each with a loss as before at the next: such are these data, and from here on "
    note += "only what is not finite is skipped"
    found = Finding(
        detector="restraint",
        step=step,
        severity=Severity.WATCH,
        signal="skips",
        value=tally.lone_skips,
        limit=limit,
        spoils_update=False,
        note=note,
    )
    return tally._replace(is_restrained=True), (found,)


def _after_a_calm_step(tally: Tally) -> Tally:
    """The tally after a calm step, written out since nearly every step is one."""
    steps, skips, _, _, incidents, last_alarm, remarks, _, _, lone_skips, is_restrained, _, disturbance, signed, _ = (
        tally
    )
    calm = (steps + 1, skips, 0, 0, incidents, last_alarm, remarks, (), 0, lone_skips, is_restrained, False)
    return Tally(*calm, disturbance, signed)


def as_the_gate_decided(now: Row, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Follow the device's gate, which has applied the update or not: that stands, whatever is found here."""
    if "gate_closed" not in now:
        return findings
    closed = float(now["gate_closed"]) != 0.0
    if not closed:
        return tuple(replace(f, spoils_update=False) for f in findings)
    if any(f.spoils_update and f.severity >= Severity.GATE for f in findings):
        return findings
    by_gate = Finding(
        detector="gate",
        step=int(now["step"]),
        severity=Severity.GATE,
        signal="gate_closed",
        value=1.0,
        limit=0.5,
        note="closed on the device",
    )
    return (by_gate, *findings)


def as_the_probe_found(now: Row) -> tuple[Finding, ...]:
    """An alarm where batches from before have become worse, though no single step need be a surprise."""
    if (since := now.get("damaged_since")) is None:
        return ()
    step, onset = int(now["step"]), int(since)
    found = Finding(
        detector=PROBE,
        step=step,
        severity=Severity.ALARM,
        signal="damaged_since",
        value=onset,
        limit=math.inf,
        spoils_update=False,
        note="batches from before have become worse, so the weights are damaged, since step",
        lasts=max(step - onset + 1, 1),
    )
    return (found,)


def in_a_row(tally: Tally, step: int, budget: Budget, *, counts: bool) -> tuple[Finding, ...]:
    """A halt if this skip was one too many, or an alarm if there were many surprises in a row."""
    skips = (
        (Severity.HALT, "steps skipped in a row", tally.skips_in_a_row, budget.in_a_row),
        (Severity.HALT, "steps in a row not finite", tally.nonfinite_in_a_row, budget.nonfinite_in_a_row),
        (Severity.HALT, "steps skipped in all", tally.skips, max(budget.total, int(budget.share * tally.steps))),
    )
    surprises = tally.surprises_in_a_row if tally.surprises_in_a_row == ROW else 0
    finite = tally.finite_skips_in_a_row if tally.finite_skips_in_a_row == SKIPPED_ROW else 0
    for severity, note, value, limit, lasts in (
        *((*skip, 1) for skip in skips if counts),
        (Severity.ALARM, "surprising steps in a row", surprises, ROW - 1, ROW),
        (Severity.ALARM, "finite steps skipped in a row", finite, SKIPPED_ROW - 1, SKIPPED_ROW),
    ):
        if value > limit:
            return (
                Finding(
                    detector="budget",
                    step=step,
                    severity=severity,
                    signal="skips",
                    value=value,
                    limit=limit,
                    spoils_update=counts,
                    note=note,
                    lasts=lasts,
                ),
            )
    return ()


def over(before: Tally, step: int) -> tuple[Finding, ...]:
    """A notice at the end of a long row of skips, whether the anomaly is over or is the new level: never silently."""
    return (
        Finding(
            detector="budget",
            step=step,
            severity=Severity.WATCH,
            signal="skips",
            value=before.skips_in_a_row,
            limit=math.inf,
            spoils_update=False,
            note="updates are applied again; steps that were skipped in a row",
        ),
    )


def is_repeated(tally: Tally, now: Row) -> bool:
    """Whether a skipped step has come again: the same batch and, since it was skipped, the same weights.

    To skip it once more would change nothing, for ever: a loop on one batch would stand still.
    """
    values = values_of(now)
    return bool(values and tally.skipped) and all(
        math.isclose(a, b, rel_tol=SAME) for a, b in zip(values, tally.skipped, strict=True)
    )


def values_of(now: Row) -> tuple[float, float] | tuple[()]:
    """Loss and gradient norm, where both are finite."""
    values = float(now.get("loss", math.nan)), float(now.get("grad_norm", math.nan))
    return values if math.isfinite(values[0]) and math.isfinite(values[1]) else ()


def without_repetition(tally: Tally, findings: tuple[Finding, ...]) -> tuple[Tally, tuple[Finding, ...]]:
    """Leave out a notice that was given recently for the same signal. A leap of the learning rate is named again beside
    anything graver, since it may be the cause."""
    made = {name: at for name, at in tally.remarks if tally.steps - at <= COOL_DOWN}
    is_grave = any(finding.severity > Severity.WATCH for finding in findings)
    kept = []
    for finding in findings:
        name = f"{finding.detector}:{finding.signal}"
        is_over = finding.detector == RATE and finding.lasts > 1
        is_beside = finding.detector == RATE and is_grave
        if finding.severity > Severity.WATCH or is_beside or (name not in made and not is_over):
            kept.append(finding)
        if finding.severity == Severity.WATCH and not is_over:
            made.setdefault(name, tally.steps)
    return tally._replace(remarks=tuple(made.items())), tuple(kept)


def thaw(like: Any, saved: Any) -> Any:
    """A state from JSON, which has no tuples, in the types of ``like``, a state of ``begin``. Fields that an older
    state lacks are those of ``like``."""
    if hasattr(like, "_fields"):
        known = tuple(thaw(a, b) for a, b in zip(like[: len(saved)], saved, strict=True))
        return type(like)(*known, *like[len(known) :])
    if not isinstance(saved, list):
        return saved
    likes = like if isinstance(like, tuple) and len(like) == len(saved) else (None,) * len(saved)
    return tuple(thaw(a, b) for a, b in zip(likes, saved, strict=True))
