"""Runs in, flags out: Sealegs, and the rules of others at one threshold or at several."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
from bench.peers import RULES, Column, Flags, Rule, Scored, Stepwise
from bench.streams import Stream

from sealegs import judge
from sealegs.detectors.spike import GROWN, STRICTER, Spike, usable
from sealegs.stats import streaming
from sealegs.vocabulary import Severity, Verdict

SETTLED = streaming.START + streaming.SETTLED
FLAG, ALARM, SKIP = DECISIONS = "**Sealegs, flag**", "**Sealegs, alarm**", "**Sealegs, skip**"
"""What it finds at a step, of any gravity beyond a remark; what opens an incident; what it does not apply."""
TURNED, STATISTIC = "**Sealegs, turned**", "Sealegs, bare statistic"
ALONE = {"loss": "Sealegs, loss alone", "grad_norm": "Sealegs, norm alone"}
"""What it would flag if it were given one signal only."""

Respond = Callable[[Stream], Mapping[str, Flags]]


class Contender(Protocol):
    """Anything that flags steps: a name and a column of flags for each of its decisions or thresholds."""

    def flags(self, run: Stream) -> Mapping[str, Flags]:
        """The steps of a run that are flagged."""

    def at(self, base: Stream, places: Iterable[int], *, once: bool) -> Iterator[tuple[int, Respond]]:
        """For each place of a run, in order, what flags an event that follows on the steps before it.

        To be used before the next place is asked for: some walk on through the run.
        ``once``: what comes after the first flag from the onset on is not asked for.
        """


def contenders(rule: Rule, rows: Mapping[str, float]) -> list[Contender]:
    """A rule at these thresholds, by the names they are reported under."""
    if isinstance(rule, Statistic):
        return [rule.fold(name, threshold) for name, threshold in rows.items()]
    return [Peer(rule, rows)] if rows else []


# ---- the rules of others


@dataclass(frozen=True)
class Peer:
    """A rule of ``peers``, at its thresholds."""

    rule: Rule
    rows: Mapping[str, float]

    def flags(self, run: Stream) -> Mapping[str, Flags]:
        """Of a whole run; scores are computed once for all thresholds."""
        if isinstance(self.rule, Scored):
            scores = self.rule.scores(run.loss, run.grad_norm)
            return {name: scores > threshold for name, threshold in self.rows.items()}
        return {
            name: replace(self.rule, threshold=threshold).flags(run.loss, run.grad_norm)
            for name, threshold in self.rows.items()
        }

    def at(self, base: Stream, places: Iterable[int], *, once: bool) -> Iterator[tuple[int, Respond]]:
        """Given no more of the run before than the rule remembers."""
        if isinstance(self.rule, Stepwise):
            yield from self._stepwise(self.rule, base, places, once=once)
            return
        for place in sorted(places):
            start = max(0, place - self.rule.memory) if self.rule.memory else 0
            yield place, partial(self._after, base, start, place)

    def _after(self, base: Stream, start: int, place: int, event: Stream) -> Mapping[str, Flags]:
        return {name: flags[place - start :] for name, flags in self.flags(joined(base, start, place, event)).items()}

    def _stepwise(
        self, rule: Stepwise, base: Stream, places: Iterable[int], *, once: bool
    ) -> Iterator[tuple[int, Respond]]:
        """One walk through the run, from which events branch off."""
        columns = [column.tolist() for column in rule.columns(base.loss, base.grad_norm)]
        watchers = {
            name: [replace(rule, threshold=threshold).begin() for _ in columns] for name, threshold in self.rows.items()
        }

        def respond(event: Stream) -> Mapping[str, Flags]:
            flags = {name: np.zeros(len(event), dtype=bool) for name in watchers}
            for name, own in watchers.items():
                for watcher, values in zip(own, rule.columns(event.loss, event.grad_norm), strict=True):
                    see = watcher.copy().see
                    for i, x in enumerate(values.tolist()):
                        if see(x):
                            flags[name][i] = True
                            if once and i >= event.onset:
                                break
            return flags

        step = 0
        for place in sorted(places):
            for own in watchers.values():
                for watcher, values in zip(own, columns, strict=True):
                    for x in values[step:place]:
                        watcher.see(x)
            step = place
            yield place, respond


def joined(base: Stream, start: int, place: int, event: Stream) -> Stream:
    """Some steps of a run, and what follows on them."""
    norm = None
    if base.grad_norm is not None and event.grad_norm is not None:
        norm = np.concatenate([base.grad_norm[start:place], event.grad_norm])
    return Stream(name=event.name, loss=np.concatenate([base.loss[start:place], event.loss]), grad_norm=norm)


def families() -> dict[str, tuple[Rule, dict[str, float]]]:
    """Rules that differ by their threshold alone together, under the name of the first: its rows at the defaults."""
    found: dict[Rule, dict[str, float]] = {}
    for rule in RULES:
        found.setdefault(replace(rule, name="", threshold=0.0), {})[rule.name] = rule.threshold
    return {next(iter(rows)): (replace(rule, name=next(iter(rows))), rows) for rule, rows in found.items()}


# ---- Sealegs

Advance = Callable[[Any, dict[str, float]], tuple[Any, tuple[bool, ...]]]


@dataclass(frozen=True)
class Fold:
    """A fold over rows. Its states are values: a healthy run is folded once, and events go on from any step of it."""

    names: tuple[str, ...]
    begin: Callable[[], Any]
    advance: Advance

    def flags(self, run: Stream) -> Mapping[str, Flags]:
        """Of a whole run."""
        return self._run(self.begin(), run, first=0, once=False)

    def at(self, base: Stream, places: Iterable[int], *, once: bool) -> Iterator[tuple[int, Respond]]:
        """From the state before each place."""
        state = self.begin()
        wanted = set(places)
        for step, row in enumerate(rows_of(base, 0)):
            if step in wanted:
                yield step, partial(self._run, state, first=step, once=once)
            if step == max(wanted):
                break
            state, _ = self.advance(state, row)

    def _run(self, state: Any, run: Stream, *, first: int, once: bool) -> Mapping[str, Flags]:
        found = np.zeros((len(run), len(self.names)), dtype=bool)
        missing = set(range(len(self.names)))
        for i, row in enumerate(rows_of(run, first)):
            state, flags = self.advance(state, row)
            if any(flags):
                found[i] = flags
                if once and i >= run.onset:
                    missing -= {j for j, flag in enumerate(flags) if flag}
                    if not missing:
                        break
        return {name: found[:, j] for j, name in enumerate(self.names)}


def rows_of(run: Stream, first: int) -> Iterator[dict[str, float]]:
    """A run as the fold takes it."""
    signals = {"loss": run.loss.tolist()} | ({} if run.grad_norm is None else {"grad_norm": run.grad_norm.tolist()})
    for i in range(len(run)):
        yield {"step": first + i} | {name: values[i] for name, values in signals.items()}


def sealegs(
    turned: Mapping[str, float] | None = None,
    counted: Counter[str] | None = None,
    scores: list["Surprise"] | None = None,
) -> Fold:
    """The public path, ``judge.fold`` with ``judge.standard()``, and what it would flag at other thresholds.

    A threshold whose name begins with that of a signal (``loss@10``) is for this one alone.
    ``counted`` gets what each detector asks for, ``scores`` how surprising each step is.
    """
    detectors = judge.standard()
    limits = {
        name: (next((signal for signal in ALONE if name.startswith(signal)), "both"), limit)
        for name, limit in (turned or {}).items()
    }

    def advance(state: Any, row: dict[str, float]) -> tuple[Any, tuple[bool, ...]]:
        before = state
        state, verdict = judge.fold(detectors, state, row)
        grave = [finding for finding in verdict.findings if finding.severity >= Severity.GATE]
        if counted is not None:
            for finding in grave:
                counted[f"{finding.detector} flag"] += 1
                counted[f"{finding.detector} alarm"] += finding.severity >= Severity.ALARM
                counted[f"{finding.detector} skip"] += finding.spoils_update
        found = bool(grave), any(finding.severity >= Severity.ALARM for finding in grave), not verdict.go
        if not limits and scores is None:
            return state, found
        score = surprise(detectors, before, row, verdict)
        if scores is not None:
            scores.append(score)
        return state, (*found, *(score[given] > limit for given, limit in limits.values()))

    return Fold((*DECISIONS, *limits), lambda: judge.begin(detectors), advance)


Surprise = dict[str, float]
"""-log10 of the chance at which the spike detectors would just not flag a step; infinite if others do. By what is given
to them: ``both``, or one signal alone."""


def surprise(
    detectors: judge.Detectors, state: judge.JudgeState, row: Mapping[str, float], verdict: Verdict
) -> Surprise:
    """Of a step, by the state before it and the verdict on it.

    What the detectors learn does not depend on that chance, so one fold answers for all, nor on the other signal, so it
    answers for each alone. At the chance of the standard set this is what it flags (tests/bench/test_detection.py).
    """
    sure = {
        f.signal
        for f in verdict.findings
        if f.severity >= Severity.GATE
        and f.detector != "budget"  # counts what surprises at the standard chance
        and (f.p is None or not f.detector.startswith("spike/"))
    }
    sure |= {signal for signal in ALONE if signal in row and usable(row, signal) is None}
    alone, together = dict.fromkeys(ALONE, -math.inf), []
    for detector, own in zip(detectors, state.detectors, strict=True):
        if isinstance(detector, Spike) and (value := usable(row, detector.signal)) is not None:
            if value > detector.gross_limit(own):  # at any chance
                sure.add(detector.signal)
            p = detector.p(own, row, value) * own.audit.correction
            score = -math.log10(p) if p > 0 else math.inf
            is_doubtful = own.seen < GROWN and own.stream.burst == 0
            alone[detector.signal] = score - math.log10(STRICTER) if is_doubtful else score
            together.append(score)
    both = math.inf if sure else max(*alone.values(), min(together) if len(together) > 1 else -math.inf)
    return {"both": both} | {signal: math.inf if signal in sure else score for signal, score in alone.items()}


@dataclass(frozen=True, kw_only=True)
class Statistic(Rule):
    """The bare streaming statistic of both signals at p < 10^-threshold, from step 150 on: no young rules, no audit."""

    def flags(self, loss: Column, grad_norm: Column | None) -> Flags:
        """By ``scan``."""
        flags = np.zeros(len(loss), dtype=bool)
        for values in self.columns(loss, grad_norm):
            flags |= streaming.scan(np.log(values), limit=10**-self.threshold)[0] < 10**-self.threshold
        flags[:SETTLED] = False
        return flags

    def fold(self, name: str, threshold: float) -> Fold:
        """The same with look and learn, to go on from any step."""
        limit = 10**-threshold

        def advance(states: dict[str, streaming.StreamState], row: dict[str, float]) -> tuple[Any, tuple[bool, ...]]:
            after, flag = dict(states), False
            for signal in states.keys() & row.keys():
                x, state = row[signal], states[signal]
                if not 0 < x < math.inf:  # NaN too
                    flag = True
                    continue
                p = streaming.look(state, math.log(x)).p
                flag |= p < limit
                suspicious = streaming.is_suspicious(state, p, limit)
                after[signal] = streaming.learn(state, math.log(x), suspicious=suspicious)
            return after, (flag and row["step"] >= SETTLED,)

        return Fold((name,), lambda: {"loss": streaming.StreamState(), "grad_norm": streaming.StreamState()}, advance)


BARE = Statistic(name=STATISTIC, threshold=4, bracket=(2.0, 12.0), signals="both")


def looked_at(rule: Rule | None, runs: Sequence[Stream]) -> list[Stream]:
    """The runs that have what a rule needs."""
    return [run for run in runs if run.grad_norm is not None or rule is None or rule.signals != "grad_norm"]
