"""What the experts of a mixture get in, what stands in it out.

Loads are uneven at first, and even out: what counts is what stays, or gets worse, long after. The loss need not show
it, since the experts that are left learn on.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sealegs.diagnosis.contract import Standing
from sealegs.diagnosis.curve.loss_curve import Floats, Indices
from sealegs.diagnosis.first_signals.track import FEWEST, MOST, Track, tracks_of
from sealegs.record.run import Run

HARDLY = 0.05
"""Share of an even load below which an expert gets hardly anything."""
MANY_DEAD, SOME_DEAD = 0.5, 0.25
"""Share of the experts that get hardly anything: a router that has collapsed, and one to look at."""
MORE_DEAD = 0.2
"""By how much that share must have grown from its lowest."""
CROWDED = 0.6
"""How far the fullest expert, or the fullest eighth of them, is on the way from an even load to all of it."""
VIOLATED, LEAST_VIOLATION = 3.0, 2.0
"""Growth of the largest violation from its lowest, and the least that is told."""
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
    found = [*_loads(run), *_violations(run), *_dead(run), *_router(run), *_balance(run)]
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
            yield Loads(layer, run.steps[rows][is_sound], counts[is_sound] / total[is_sound])


def _loads(run: Run) -> Iterator[Standing]:
    """Layers whose load goes to few experts; of several, the first and how many there are."""
    found = [(loads, row, grave) for loads in loads_of(run) for row, grave in _collapse(loads)]
    if not found:
        return
    loads, row, _ = min(found, key=lambda one: (not one[2], int(one[0].steps[one[1]])))
    layers = f", and so in {len(found)} layers" if len(found) > 1 else ""
    where = f" of layer {loads.layer}" if loads.layer else ""
    experts, late = loads.shares.shape[1], slice(row, None)
    crowd, dead = float(np.median(loads.crowd[late])), float(np.median(loads.dead[late]))
    count = max(experts // 8, 1)
    few = f"one expert of the {experts}{where} gets" if count == 1 else f"{count} experts of the {experts}{where} get"
    text = (
        f"{few} {crowd:.0%} of the tokens since step {loads.steps[row]}, and {dead:.0%} of the experts get hardly any"
        f"{layers}"
    )
    is_grave = any(grave for *_, grave in found)
    yield _standing("expert_load", int(loads.steps[row]), text, "router-collapses", is_grave=is_grave)


def _collapse(loads: Loads) -> Iterator[tuple[int, bool]]:
    """The row since which the load of a layer goes to few of them, and whether that calls for action."""
    dead, crowd = (Track("", loads.steps, values, values) for values in (loads.dead, loads.crowd))
    least = float(dead.level[: dead.rows - dead.lasting].min())
    even = max(loads.shares.shape[1] // 8, 1) / loads.shares.shape[1]
    rows = [
        dead.since(dead.level >= max(MANY_DEAD, least + MORE_DEAD)),
        crowd.since(crowd.level >= even + CROWDED * (1 - even)),
    ]
    if (row := min((row for row in rows if row is not None), default=None)) is not None:
        yield row, True
    elif (row := dead.since(dead.level >= max(SOME_DEAD, least + MORE_DEAD))) is not None:
        yield row, False


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
            yield _standing(track.signal, int(track.steps[row]), text, "experts-die", is_grave=is_grave)
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
