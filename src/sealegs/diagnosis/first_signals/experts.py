"""What the experts of a mixture get in, what stands in it out.

Loads are uneven at first, and even out: what counts is what stays, or gets worse, long after. The loss need not show
it, since the experts that are left learn on.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sealegs.detectors.collapse_rules import LEAST_VIOLATION, MANY_DEAD, MORE_DEAD, SOME_DEAD, VIOLATED
from sealegs.diagnosis.contract import Standing
from sealegs.diagnosis.curve.loss_curve import Floats, Indices
from sealegs.diagnosis.first_signals.track import FEWEST, MOST, SOON, STAYS, Track, track_of, tracks_of
from sealegs.record.run import Run

HARDLY = 0.05
"""Share of an even load below which an expert gets hardly anything."""
ALIVE = 0.25
"""Share of an even load that an expert must have had for a while, to have died since."""
OF_SO_MANY = 16
"""One expert of so many must have died, at the least, to be told."""
DEAD_COUNT = re.compile(r"(?:.*[/_ .])?(?:(?:num|n|number|count)_?(?:of_)?dead_experts?|dead_experts?_count)")
"""Names of columns that count the experts that get no token."""
CROWDED = 0.6
"""How far the fullest expert, or the fullest eighth of them, is on the way from an even load to all of it."""
FAR_VIOLATED = 6.0
ENTROPY_LEFT, NO_ENTROPY = 0.1, 0.02
"""Share of its highest level that is left of the router's entropy, which falls in any case while a router learns."""
UNBALANCED, FAR_UNBALANCED = 2.0, 4.0
"""Growth of the balance loss from its lowest."""
LOGITS_GROW = 10.0


@dataclass(frozen=True)
class Loads:
    """The shares of the tokens that the experts of one layer get, row by row."""

    layer: str
    steps: Indices
    shares: Floats
    experts: tuple[str, ...]

    @property
    def dead(self) -> Floats:
        """The share of the experts that get hardly anything."""
        return np.asarray((self.shares < HARDLY / self.shares.shape[1]).mean(axis=1))

    @property
    def crowd(self) -> Floats:
        """The share of the tokens that the fullest eighth of the experts gets."""
        count = max(self.shares.shape[1] // 8, 1)
        return np.asarray(np.sort(self.shares, axis=1)[:, -count:].sum(axis=1))


def judged(run: Run) -> Iterator[Standing]:
    """What stands in the loads of experts and in their router, the gravest first."""
    found = [*_loads(run), *_violations(run), *_dead(run), *_counted(run), *_router(run), *_balance(run)]
    yield from sorted(found, key=lambda one: not one.is_grave)


def loads_of(run: Run) -> Iterator[Loads]:
    """The loads by layer: ``expert_load/<layer>.<expert>``, where at least two experts of a layer were logged."""
    layers: dict[str, list[str]] = defaultdict(list)
    for name in run.signals:
        if name.startswith("expert_load/") and run.has_numbers(name):
            layers[name.partition("/")[2].rpartition(".")[0]].append(name)
    for layer, names in layers.items():
        if len(names) < 2:
            continue
        logged = np.logical_and.reduce([run.logged(name, copy=False) for name in names])
        rows = np.flatnonzero(logged)
        if len(rows) < FEWEST:
            continue
        size = -(-len(rows) // MOST)
        rows = rows[len(rows) % size :: size]
        counts = np.stack([run.column(name, copy=False)[rows] for name in names], axis=1)
        total = counts.sum(axis=1, keepdims=True)
        is_sound = np.isfinite(total[:, 0]) & (total[:, 0] > 0)
        if is_sound.sum() >= FEWEST:
            of_layer = tuple(name.rpartition("/")[2].rpartition(".")[2] for name in names)
            yield Loads(layer, run.steps[rows][is_sound], counts[is_sound] / total[is_sound], of_layer)


def _loads(run: Run) -> Iterator[Standing]:
    """Layers whose load goes to few experts, and experts that get nothing any more; of several layers, the first and
    how many there are."""
    layers = list(loads_of(run))
    if found := [(loads, row) for loads in layers if (row := _collapsed(loads)) is not None]:
        loads, row = min(found, key=lambda one: int(one[0].steps[one[1]]))
        experts, late = loads.shares.shape[1], slice(row, None)
        crowd, dead = float(np.median(loads.crowd[late])), float(np.median(loads.dead[late]))
        count = max(experts // 8, 1)
        few = f"one expert of the {experts}{_of(loads)} gets"
        few = few if count == 1 else f"{count} experts of the {experts}{_of(loads)} get"
        text = (
            f"{few} {crowd:.0%} of the tokens since step {loads.steps[row]}, and {dead:.0%} of the experts get hardly "
            f"any{_and_so(found)}"
        )
        yield _standing("expert_load", int(loads.steps[row]), text, "router-collapses", is_grave=True)
    elif died := [(loads, row, names) for loads in layers for row, names in _died(loads)]:
        loads, row, names = min(died, key=lambda one: int(one[0].steps[one[1]]))
        few = f"expert {names[0]}" if len(names) == 1 else f"{len(names)} experts ({', '.join(names[:4])})"
        text = (
            f"{few} of the {loads.shares.shape[1]}{_of(loads)} had tokens, and hardly any since step "
            f"{loads.steps[row]}{_and_so(died)}"
        )
        are_many = any(len(names) > 1 and len(names) >= SOME_DEAD * each.shares.shape[1] for each, _, names in died)
        shows = "router-collapses" if are_many else "experts-die"  # of four, one is a quarter, and still one alone
        yield _standing("expert_load", int(loads.steps[row]), text, shows)


def _of(loads: Loads) -> str:
    return f" of layer {loads.layer}" if loads.layer else ""


def _and_so(found: Sequence[object]) -> str:
    return f", and so in {len(found)} layers" if len(found) > 1 else ""


def _collapsed(loads: Loads) -> int | None:
    """The row since which the load of a layer goes to few of its experts."""
    dead, crowd = (Track("", loads.steps, values, values) for values in (loads.dead, loads.crowd))
    least = float(dead.level[: dead.rows - dead.lasting].min())
    even = max(loads.shares.shape[1] // 8, 1) / loads.shares.shape[1]
    rows = [
        dead.since(dead.level >= max(MANY_DEAD, least + MORE_DEAD)),
        crowd.since(crowd.level >= even + CROWDED * (1 - even)),
    ]
    return min((row for row in rows if row is not None), default=None)


def _died(loads: Loads) -> Iterator[tuple[int, list[str]]]:
    """The row since which the first of those experts gets hardly any token that had some for a while; and which."""
    count, rows = loads.shares.shape[1], {}
    for name, shares in zip(loads.experts, loads.shares.T, strict=True):
        track = Track("", loads.steps, shares, shares)
        row = track.since(track.level < HARDLY / count)
        if row is not None and int((track.level[:row] >= ALIVE / count).sum()) >= STAYS:
            rows[name] = row
    if len(rows) >= max(count // OF_SO_MANY, 1):
        yield min(rows.values()), list(rows)


def _violations(run: Run) -> Iterator[Standing]:
    """The largest load over the mean, where it grows and stays."""
    for track in tracks_of(run, "expert_violation"):
        lowest = _lowest(track)
        row = track.since(track.level >= max(VIOLATED * lowest, LEAST_VIOLATION))
        if row is not None and row > 0:
            text = (
                f"{track.signal} {lowest:.3g} at its lowest, {track.end:.3g} in the end, since step {track.steps[row]}"
            )
            is_grave = track.end >= FAR_VIOLATED * max(lowest, 0.5)
            yield _standing(track.signal, int(track.steps[row]), text, "router-collapses", is_grave=is_grave)
            return


def _dead(run: Run) -> Iterator[Standing]:
    """Experts that get hardly any token, where there are more and more of them."""
    for track in tracks_of(run, "dead_expert_share"):
        lowest = _lowest(track)
        row = track.since(track.level >= max(SOME_DEAD, lowest + MORE_DEAD))
        if row is not None and row > 0:
            text = (
                f"{track.signal} {lowest:.0%} at its lowest, {track.end:.0%} in the end: experts die since step "
                f"{track.steps[row]}"
            )
            is_grave = track.end >= MANY_DEAD
            many = track.since(track.level >= MANY_DEAD)
            is_at_once = many is not None and many - row <= track.rows // SOON
            shows = "router-collapses" if is_grave and is_at_once else "experts-die"  # they die one after the other
            yield _standing(track.signal, int(track.steps[row]), text, shows, is_grave=is_grave)
            return


def _counted(run: Run) -> Iterator[Standing]:
    """Experts that get no token, where their number is logged and grows."""
    for name in run.signals:
        if not DEAD_COUNT.fullmatch(name.lower()) or (track := track_of(run, name)) is None:
            continue
        lowest = _lowest(track)
        row = track.since(track.level >= lowest + 1)
        if row is not None and row > 0 and track.end > 1:
            step = int(track.steps[row])
            text = f"{name} {lowest:.0f} at its lowest, {track.end:.0f} in the end: experts die since step {step}"
            yield _standing(name, step, text, "experts-die")
            return


def _router(run: Run) -> Iterator[Standing]:
    """A router whose choice has no entropy left, and one whose logits grow."""
    for track in tracks_of(run, "router_entropy"):
        if track.values.min() >= 0 and (row := track.falls(ENTROPY_LEFT)) is not None:
            high = float(track.level[: track.rows - track.lasting].max())
            text = f"{track.signal} {high:.3g} at its highest, {track.end:.2g} since step {track.steps[row]}"
            is_grave = track.end <= NO_ENTROPY * high
            yield _standing(track.signal, int(track.steps[row]), text, "router-entropy-vanishes", is_grave=is_grave)
            break
    for track in tracks_of(run, "router_z_loss"):
        row = track.since(track.level >= LOGITS_GROW * max(_lowest(track), 1e-12))
        if row is not None and row > 0 and track.values.min() >= 0:
            text = f"{track.signal} {_lowest(track):.3g} at its lowest, {track.end:.3g} in the end: its logits grow"
            yield _standing(track.signal, int(track.steps[row]), text, "router-logits-grow")
            break


def _balance(run: Run) -> Iterator[Standing]:
    """The loss that keeps loads alike, where it grows from its lowest and stays."""
    for track in tracks_of(run, "router_balance_loss"):
        lowest = _lowest(track)
        if track.values.min() <= 0:
            continue
        row = track.since(track.level >= UNBALANCED * lowest)
        if row is not None and row > 0:
            text = (
                f"{track.signal} {lowest:.3g} at its lowest, {track.end:.3g} in the end, since step {track.steps[row]}"
            )
            is_grave = track.end >= FAR_UNBALANCED * lowest and lowest >= 0.9  # a form whose least is 1, or top-k
            yield _standing(track.signal, int(track.steps[row]), text, "balance-loss-grows", is_grave=is_grave)
            return


def _lowest(track: Track) -> float:
    """The lowest level before the last rows: what this run can do."""
    return float(track.level[: track.rows - track.lasting].min())


def _standing(signal: str, step: int, text: str, shows: str, *, is_grave: bool = False) -> Standing:
    return Standing(signal=signal, step=step, text=text, shows=shows, is_grave=is_grave)
