"""Numbers the batches of a run, brings the data back to an earlier batch, and leaves batches out.

Batches are numbered from 0, over all epochs; ``Ranges`` holds the numbers to leave out. A *position* says where the
next batch is, as JSON values that another process can go to.

The iterator that ``over`` gives follows a position that is set between two batches: the next batch comes from there,
even in an earlier epoch, and later epochs are gone through again.
"""

import bisect
import copy
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from sealegs.data.cuts import Cuts
from sealegs.data.loaders import cannot_reposition, loader_of
from sealegs.data.recut import is_divided_otherwise, piece_at, recut, rows_in
from sealegs.data.shares import world_size
from sealegs.data.stateful import UNKNOWN, DataChanges, Epoch, Loader, StatefulLoader
from sealegs.errors import ConfigError, SourceError


class Ranges:
    """Whole numbers as ranges ``[first, end)``, sorted and merged where they touch.

    >>> ranges = Ranges([(5, 8), (0, 2)])
    >>> ranges.add(2, 3)
    >>> ranges.as_list(), 2 in ranges, 3 in ranges
    ([[0, 3], [5, 8]], True, False)
    """

    def __init__(self, ranges: Iterable[Iterable[int]] = ()) -> None:
        self._ranges: list[list[int]] = []
        for first, end in ranges:
            self.add(first, end)

    def add(self, first: int, end: int) -> None:
        """Add a range."""
        touched = [each for each in self._ranges if each[0] <= end and first <= each[1]]
        if touched:
            first, end = min(first, touched[0][0]), max(end, touched[-1][1])
        self._ranges = sorted([*(each for each in self._ranges if each not in touched), [first, end]])

    def __contains__(self, number: int) -> bool:
        place = bisect.bisect_right(self._ranges, number, key=lambda each: each[0]) - 1
        return place >= 0 and number < self._ranges[place][1]

    def as_list(self) -> list[list[int]]:
        """The ranges, as JSON values."""
        return [list(each) for each in self._ranges]


Position: TypeAlias = dict[str, Any]
T = TypeVar("T")

KEPT_EPOCHS = 100
"""Epochs before the newest whose order is remembered, so that a run that went back can repeat them."""


class Batches:
    """The data of a run: tells its position, goes to one, leaves batches out."""

    def __init__(
        self,
        *,
        skipped: Iterable[tuple[int, int]] = (),
        must_reposition: bool = False,
    ) -> None:
        """``skipped`` are ranges ``(first, end)`` of batch numbers to leave out.

        With ``must_reposition`` a loader that cannot be brought back is refused at the start.
        """
        self.number: int | None = None
        """The number of the batch that was handed out last."""
        self.is_probe = False
        """Whether the current batch comes from ``repeat``."""
        self.on_epoch: Callable[[int], object] = lambda number: None
        """Called with its number when an epoch is about to begin, before its order is drawn."""
        self.on_loader: Callable[[], object] = lambda: None
        """Called when batches come from another loader."""
        self.on_misplaced: Callable[[str], object] = lambda how: None
        """Called, with how its state differs, when a loader is not where it was brought."""
        self.on_recut: Callable[[dict[str, Any]], object] = lambda told: None
        """Called, with what is to be recorded, when the rest of an epoch was divided anew."""
        self.on_share: Callable[[dict[str, Any]], object] = lambda told: None
        """Called, with what is to be recorded, when batches come from a loader that shares them with other ranks."""
        self.by_epoch = False
        """Whether an iterator ends with its epoch even after going back from a later one, which the next iterator then
        repeats. For loops that count epochs."""
        self.limit: int | None = None
        """Batches after which such a loop ends an epoch, even if there are more."""
        self._must_reposition = must_reposition
        self._skipped = Ranges()
        self._changes = DataChanges()
        self._cuts = Cuts()
        """What batch numbers mean, also those that are left out."""
        self._given: Any = None
        self._loader: Loader | None = None
        self._epoch: Epoch | None = None
        self._epochs: dict[int, Epoch] = {}
        self._newest = -1
        self._next = 0
        self._begins = 0, 0
        """The number of the first epoch, and how many of its batches come before the first one here."""
        self._target: Position | None = None
        """The position of the next batch, if it is not where the loader is."""
        self._probe: list[Any] = []
        self._again: list[tuple[int, Any]] = []
        """Numbered batches that were read, and are to be handed out before any other."""
        self._iterators = 0
        self._walk: Generator[tuple[int, Any], None, None] | None = None
        for first, end in skipped:
            self.skip(first, end - first)

    def over(self, loader: Iterable[T]) -> Iterator[T]:
        """The batches of an epoch of a loader, or the rest of it after going to a position.

        After going back into an earlier epoch, an iterator hands out the rest of that one first.
        """
        if loader is not self._given:
            is_another = self._given is not None
            self._take(loader)
            if is_another:
                self._probe.clear()
                self._again.clear()
                self.on_loader()
        self._iterators += 1
        return self._hand_out(self._iterators)

    def position(self) -> Position:
        """The position of the next batch. Empty before there is a loader; for some loaders only the number is known."""
        if self._target is not None:
            return copy.deepcopy(self._target)
        if self._loader is None:
            return {}
        identity, state = self._loader.identity, None
        try:
            state = self._loader.state()
        except ConfigError:
            if self._must_reposition:
                raise
            identity = UNKNOWN
        return {
            "loader": {**identity, "ranks": world_size()} if identity != UNKNOWN else dict(identity),
            "epoch": copy.deepcopy(self._epoch or self._new_epoch()),
            "next": self._next,
            "state": state,
            **({"cuts": self._cuts.to_plain()} if self._cuts.pieces else {}),
            **self._orders_of_later_epochs(),
        }

    def go_to(self, position: Mapping[str, Any]) -> None:
        """Go to a position. One of another loader is refused, and nothing changes."""
        is_first = self._epoch is None
        if not position and is_first:
            self._target = None
            return
        if {"loader", "epoch", "next", "state"} - position.keys():
            raise SourceError("the position of the data: it was taken before the first batch; take a later one")
        if damaged := _damaged_part(position):
            raise SourceError(f"{damaged!r} in the position of the data is {position[damaged]!a:.40}; use another one")
        if position["loader"] == UNKNOWN and is_first and not self._must_reposition:
            self.count_from(position["next"])  # whoever resumes such a run brings its loader to the place
            return
        target = copy.deepcopy(dict(position))
        if target.pop("is_again", False):  # an older run, amid what it had left out of an epoch
            epoch = target["epoch"]
            target |= {"next": epoch["end"], "state": epoch.get("end_state")}
        if self._loader is not None:
            target = self._fitted(self._given, self._loader, target)
        self._target = target
        for epoch in self._target.get("later", []):
            self._epochs.setdefault(epoch["number"], epoch)
        self._probe.clear()
        self._again.clear()

    def _fitted(self, given: Any, loader: Loader, target: Position) -> Position:
        """A position as this loader can go to it, divided anew if need be. Refused where it cannot."""
        if refusal := cannot_reposition(given):
            raise ConfigError(refusal)
        try:
            there = Cuts.from_plain(target.get("cuts", []))
        except (TypeError, KeyError, ValueError) as error:
            raise SourceError(f"'cuts' in the position of the data is damaged ({error!r:.60}); use another") from error
        if not is_divided_otherwise(loader, target):
            _refuse_other(given, loader, target)
            self._number_by(there)
            return target
        try:
            position, piece, told = recut(given, loader, target)
        except (TypeError, KeyError, ValueError, ArithmeticError) as error:
            raise SourceError(f"the position of the data is damaged ({error!r:.100}); use another one") from error
        self._number_by(there.cut(piece))
        self._epochs.clear()  # their numbers are of other cuts; a new order is that of its number, as ever
        self._newest = -1
        if told.get("left") != 0:  # else it is over, and the next one is divided as any
            self.on_recut(told | {"skipped": self.skipped})
        return position

    def _number_by(self, cuts: Cuts) -> None:
        """Carry the ranges that are left out over to other cuts."""
        before, self._cuts = self._cuts, cuts
        if len({piece.rows for piece in (*before.pieces, *cuts.pieces)}) < 2:
            return  # as ever: a number is a number
        self._skipped = Ranges(before.carried(first, end, to=cuts) for first, end in self._skipped.as_list())

    def state_dict(self) -> Position:
        """The position, for a checkpoint."""
        return self.position()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position."""
        self.go_to(state)

    @property
    def skipped(self) -> list[list[int]]:
        """The ranges ``[first, end)`` of batch numbers that are left out."""
        return self._skipped.as_list()

    def skip(self, first: int, count: int) -> None:
        """Leave out ``count`` batches from a number on, now and later."""
        if first < 0 or count < 1:
            raise ConfigError(
                f"skip {first}:{first + count}: give the first batch, from 0, and one after it as the end"
            )
        self._skipped.add(first, first + count)

    def repeat(self, batches: Sequence[Any]) -> None:
        """Hand out these objects next, once, then go on from the current position."""
        self._probe[:] = reversed(batches)

    def hand_out_again(self, batches: Sequence[tuple[int, Any]]) -> None:
        """Hand out these numbered batches to be trained on, before those that follow; after what ``repeat`` has."""
        self._again[:] = batches

    @property
    def will_repeat(self) -> bool:
        """Whether the next batch comes from ``repeat``."""
        return bool(self._probe)

    def swap(self, source: str, weight: float) -> None:
        """Give a data source another weight; 0 takes it out. It holds after a rollback, too."""
        if refusal := self.cannot_swap(source):
            raise ConfigError(refusal)
        self._given.reweight(source, weight)
        self._changes.swaps[source] = weight

    def stratify(self) -> None:
        """Let the loader spread rare tokens over its batches. It holds after a rollback, too."""
        self._given.stratify()
        self._changes.is_stratified = True

    def cannot_stratify(self) -> str | None:
        """Why the loader cannot stratify, in a sentence; None where it can."""
        if hasattr(self._given, "stratify"):
            return None
        return f"stratify: {_has_no(self._given, 'stratify()')}; give guard.batches a loader that can"

    def cannot_swap(self, source: str) -> str | None:
        """Why a source cannot be given another weight, in a sentence; None where it can."""
        if hasattr(self._given, "reweight"):
            return None
        what = _has_no(self._given, "reweight(source, weight)")
        return f"swap source={source!r}: {what}; give guard.batches a loader that can change its mixture"

    def count_from(self, number: int, *, epoch: int = 0, into: int = 0) -> None:
        """Set the number of the first batch, for a loader that someone else has brought to its place.

        A loader that is still at the beginning of its epoch leaves out the first ``into`` batches.
        """
        assert self._epoch is None, "the first batch has its number"
        self._next, self._begins = number, (epoch, into)

    @property
    def following(self) -> int:
        """The number of the next batch, if it is not left out."""
        return self._next if self._target is None else int(self._target["next"])

    @property
    def following_epoch(self) -> int:
        """The number of the epoch that an iterator begun now hands out; in the midst of one, its rest comes first."""
        if self._target is not None:
            epoch = self._target["epoch"]
            length = self._target["loader"].get("length")
            is_whole = (
                isinstance(length, int) and "cut" not in epoch and self._target["next"] >= epoch["first"] + length
            )
            return int(epoch["number"]) + (self.is_at_end(self._target) is True or is_whole)
        if self._epoch is None:
            return self._begins[0]
        return self._epoch["number"] + (self._walk is None or self._epoch.get("end") == self._next)

    @property
    def epoch(self) -> int:
        """The number of the last batch's epoch."""
        return 0 if self._epoch is None else self._epoch["number"]

    @property
    def length(self) -> int | None:
        """Batches of an epoch, as far as the loader tells."""
        length = None if self._loader is None else self._loader.identity.get("length")
        return length if isinstance(length, int) else None

    @property
    def rows_of_all(self) -> int | None:
        """Samples of a batch of all ranks, as far as the loader tells."""
        return None if self._loader is None else rows_in(self._loader)

    @property
    def is_last(self) -> bool:
        """Whether the current batch is the last of its epoch, as far as the loader tells its length."""
        length = self.length
        if length is None or self._epoch is None or self.number is None or self._probe:
            return False
        is_cut = "cut" in self._epoch
        rest = range(self.number + 1, self._epoch["end"] if is_cut else self._epoch["first"] + length)
        return not any(map(self._is_wanted, rest))

    @property
    def misplaced(self) -> str:
        """How the loader is not where it was brought last, or why nobody can say; empty where it is there."""
        if self._target is not None:
            return "nobody has gone there: the loop takes no batch from guard.batches"
        if not isinstance(self._loader, StatefulLoader):
            return ""
        cannot_tell = self._loader.cannot_tell
        return f"cannot be compared: {cannot_tell}" if cannot_tell else self._loader.misplaced

    def is_at_end(self, position: Mapping[str, Any]) -> bool | None:
        """Whether a position is at the end of its epoch; None where that is not known yet."""
        epoch: Epoch = position["epoch"]
        known = self._epochs.get(epoch["number"])
        end = epoch.get("end", None if known is None or known["first"] != epoch["first"] else known.get("end"))
        if self.limit is not None:
            end = epoch["first"] + self.limit if end is None else min(end, epoch["first"] + self.limit)
        return None if end is None else position["next"] >= end

    def bookkeeping(self) -> dict[str, Any]:
        """What a rollback does not undo, as JSON values for the ledger."""
        return {
            "skipped": self._skipped.as_list(),
            "swaps": dict(self._changes.swaps),
            "stratified": self._changes.is_stratified,
            **({"cuts": self._cuts.to_plain()} if self._cuts.pieces else {}),
        }

    def put_back(self, bookkeeping: Mapping[str, Any]) -> None:
        """Undo what was left out since."""
        cuts = Cuts.from_plain(bookkeeping.get("cuts", []))
        self._skipped = Ranges(cuts.carried(first, end, to=self._cuts) for first, end in bookkeeping["skipped"])

    def take_over(self, bookkeeping: Mapping[str, Any]) -> None:
        """Continue the ledger of the process before; ranges given by hand stay."""
        self._number_by(Cuts.from_plain(bookkeeping.get("cuts", [])))
        for first, end in bookkeeping["skipped"]:
            self._skipped.add(first, end)
        self._changes.swaps |= bookkeeping["swaps"]
        self._changes.is_stratified |= bookkeeping["stratified"]

    def _take(self, given: Iterable[Any]) -> None:
        """Wrap a loader that was not seen before."""
        changes = self._changes
        loader = loader_of(given, must_reposition=self._must_reposition, changes=changes)
        target = self._target
        if target is not None and (refusal := cannot_reposition(given)):
            raise ConfigError(refusal)
        before, self._given = self._given, given
        refusals = [self.cannot_swap(source) for source in changes.swaps]
        refusals += [self.cannot_stratify()] if changes.is_stratified else []
        if refusal := next(filter(None, refusals), None):
            self._given = before
            raise ConfigError(refusal)
        try:
            target = None if target is None else self._fitted(given, loader, target)
        except BaseException:
            self._given = before
            raise
        changes.apply(given)
        self._target, self._loader = target, loader
        share = None if loader.shared is None else loader.shared.share
        if share is not None and (length := loader.identity["length"]) is not None:
            twice, left_out = share.uneven(length)
            told = {"ranks": share.ranks, "rows": share.rows_of_all, "samples": share.samples}
            if share.ranks > 1 or left_out:
                self.on_share(told | {"used_twice": twice, "left_out": left_out})

    def _hand_out(self, iterator: int) -> Iterator[Any]:
        # with no batch left in its epoch it goes on with the next, as if nothing had been saved
        is_resumed = self._epoch is None and self._begins[1] > 0
        if self._target is not None:
            is_resumed = not self.by_epoch or self.is_at_end(self._target) is not False
        if iterator == self._iterators:
            self._stop_walk()
        is_sent = False
        try:
            while True:
                if iterator != self._iterators:
                    raise ConfigError("batches: another iterator was begun after this one; go through one at a time")
                self.is_probe = bool(self._probe)
                if self.is_probe:
                    yield self._probe.pop()
                    continue
                if self._again:
                    self.number, batch = self._again.pop(0)
                    yield batch
                    continue
                if self._target is not None or self._walk is None:
                    self._stop_walk()
                    target, self._target = self._target, None
                    self._walk, is_sent = self._walk_from(target), target is not None
                found = next(self._walk, None)
                if is_sent and isinstance(self._loader, StatefulLoader) and self._loader.misplaced:
                    self.on_misplaced(self._loader.misplaced)
                is_sent = False
                if found is not None:
                    is_resumed = False
                    self.number, self._next = found[0], found[0] + 1
                    yield found[1]
                elif is_resumed:
                    is_resumed, self._walk = False, None
                else:
                    return
        finally:
            if iterator == self._iterators:
                self._stop_walk()

    def _stop_walk(self) -> None:
        """Close the loader's iterator, and so its workers, before another one is made."""
        if self._walk is not None:
            self._walk.close()
        self._walk = None

    def _walk_from(self, position: Position | None) -> Generator[tuple[int, Any], None, None]:
        """Numbered batches from a position, or from the start of a new epoch, to the end of the newest epoch."""
        assert self._loader is not None
        state = None
        if position is None:
            epoch = self._following_epoch() if self.by_epoch else self._new_epoch()
            self._newest = epoch["number"]
            self.on_epoch(epoch["number"])
        else:
            epoch, self._next, state = position["epoch"], position["next"], position["state"]
            self._newest = max(self._newest, epoch["number"])
        while True:
            number = epoch["number"]
            self._epoch = self._epochs[number] = epoch
            self._count_in(epoch)
            self._epochs.pop(self._newest - KEPT_EPOCHS, None)
            later = self._epochs.get(number + 1) if number < self._newest else None
            if later and ("start" not in later or later["first"] < epoch.get("end", self._next)):
                later = None  # failed before its first batch, or belongs to steps that a rollback undid
            cut = later["first"] if later and not later["is_after_end"] else None
            if later and cut == self._next:
                state = later["start"].get("state")  # the loop had left this epoch here
            else:
                limit = None if self.limit is None else max(epoch["first"] + self.limit, self._next)
                ends = [epoch.get("end", cut), limit]
                until = min((end for end in ends if end is not None), default=None)
                self._next = yield from self._loader.walk(epoch, self._next, self._is_wanted, until, state)
                state = None
            if cut is None:
                self._next = epoch.setdefault("end", self._next)
            if self.by_epoch or number >= self._newest:
                return
            if later and later["first"] == self._next:
                epoch = {
                    "number": later["number"],
                    "first": later["first"],
                    "is_after_end": later["is_after_end"],
                    "start": later["start"],
                }
            else:
                epoch = self._new_epoch()
                self.on_epoch(epoch["number"])

    def _count_in(self, epoch: Epoch) -> None:
        """Note what the numbers of a new epoch mean, unless it is what they mean by the last cut."""
        assert self._loader is not None
        is_new = epoch["first"] == self._next and "cut" not in epoch
        if not is_new or (piece := piece_at(self._loader, epoch["first"], epoch["number"])) is None:
            return
        last = self._cuts.pieces[-1] if self._cuts.pieces else None
        is_known = last is not None and (last.rows, last.length) == (piece.rows, piece.length)
        if not is_known or self._cuts.place(piece.number) != (piece.epoch, 0):
            self._cuts = self._cuts.cut(piece)

    def _new_epoch(self) -> Epoch:
        if self._epoch is None:
            number, into = self._begins
            return {"number": number, "first": self._next - into, "is_after_end": True}
        if "cut" in self._epoch and self._next < self._epoch.get("end", self._next):
            del self._epoch["end"]  # the loop has left it before
        self._next = self._epoch.get("end", self._next)
        return {"number": self._epoch["number"] + 1, "first": self._next, "is_after_end": "end" in self._epoch}

    def _following_epoch(self) -> Epoch:
        """The next epoch. If it was begun before the loop went back behind it, it keeps its order, to which the numbers
        of skipped batches refer."""
        epoch = self._new_epoch()
        known = self._epochs.get(epoch["number"])
        if known is not None and "start" in known and known["first"] == epoch["first"]:
            epoch["as_then"] = known["start"]
        return epoch

    def _orders_of_later_epochs(self) -> dict[str, Any]:
        """The orders of epochs that the loop went back behind, for another process to repeat."""
        here = -1 if self._epoch is None else self._epoch["number"]
        later = [epoch for number, epoch in sorted(self._epochs.items()) if number > here and "start" in epoch]
        known = [{name: epoch[name] for name in ("number", "first", "is_after_end", "start")} for epoch in later]
        return {"later": copy.deepcopy(known)} if self.by_epoch and known else {}

    def _is_wanted(self, number: int) -> bool:
        return number not in self._skipped


def _refuse_other(given: Any, loader: Loader, position: Mapping[str, Any]) -> None:
    """Refuse a position of another loader."""
    there = position["loader"]
    for name in ("kind", "length", "workers"):
        if there.get(name) != loader.identity.get(name):
            raise SourceError(
                f"the position is in the data of another loader: {name} {there.get(name)} there, "
                f"{loader.identity.get(name)} in this {type(given).__name__}; give the loader that it was taken of"
            )


def _damaged_part(position: Mapping[str, Any]) -> str | None:
    """The name of a part that no loader has written, if there is one."""

    def is_epoch(value: Any) -> bool:
        needed = isinstance(value, Mapping) and is_number(value.get("number")) and is_number(value.get("first"))
        return needed and is_number(value.get("end", 0))

    def is_number(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0

    later = position.get("later", [])
    sound = {
        "loader": isinstance(position["loader"], Mapping),
        "epoch": is_epoch(position["epoch"]),
        "next": is_number(position["next"]),
        "later": isinstance(later, list) and all(map(is_epoch, later)),
    }
    return next((name for name, is_sound in sound.items() if not is_sound), None)


def _has_no(given: Any, method: str) -> str:
    return "there is no loader" if given is None else f"{type(given).__name__} has no {method}"
