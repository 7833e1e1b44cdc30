"""Batches: numbered over all epochs, gone back to, left out, handed out later; against a model made of lists."""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SubsetRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler  # type: ignore[import-untyped]

from sealegs.batching.batch_sampler import StratifiedBatchSampler
from sealegs.batching.stratified import RareRows
from sealegs.data.position import Batches, Ranges
from sealegs.errors import ConfigError, SourceError
from sealegs.lab.data import Batch, Source, Stream

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

LENGTH = 5
"""Batches of an epoch."""


class Resumable:
    """A loader as people write them: it goes on where it is, and begins anew after the end."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < LENGTH:
            self.place += 1
            yield self.place - 1
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.place = state["place"]


class Drawing(Resumable):
    """Draws each batch when it is asked for, from a generator that it takes back when it is told its state."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(9)

    def __iter__(self) -> Iterator[int]:
        for _ in super().__iter__():
            yield int(torch.randint(1000, (), generator=self.generator))

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.generator.set_state(state["generator"])


class Counting(IterableDataset[int]):
    """A stateful dataset, for a stateful loader."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < 2 * LENGTH:
            self.place += 1
            yield self.place - 1
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.place = state["place"]


def stream() -> Stream:
    sources = [
        Source(name, np.random.default_rng(i).integers(0, 60, 300).astype(np.uint16), np.arange(10) * 30)
        for i, name in enumerate("ab")
    ]
    return Stream(sources, {"a": 1.0, "b": 1.0}, rows="packed", batch=2, context=6, vocabulary=64, seed=1)


def say_nothing(loader: Any, epoch: int) -> None: ...


@dataclass(frozen=True)
class Kind:
    """A kind of loader, and how the loop around it goes."""

    make: Callable[[], Any]
    tell: Callable[[Any, int], None] = say_nothing
    """What the loop does before each epoch, by which the order of that is decided."""
    goes_on: Callable[[int], Any] | None = None
    """Content by number, where a new iterator goes on where the last one was left."""
    length: int | None = LENGTH
    can_be_left: bool = True
    """Whether the order of an epoch is the same if the one before it was left in the middle."""

    @property
    def is_told(self) -> bool:
        return self.tell is not say_nothing

    def order(self) -> Callable[[int, int, int], Any]:
        """Content by epoch, number in the epoch, and number over all; as the loader gives it without us."""
        if by_number := self.goes_on:
            return lambda epoch, place, number: by_number(number)
        torch.manual_seed(7)
        loader = self.make()
        epochs = []
        for epoch in range(12):
            self.tell(loader, epoch)
            epochs.append([content(batch) for batch in loader])
        assert all(len(epoch) == LENGTH for epoch in epochs)
        return lambda epoch, place, number: epochs[epoch][place]

    def end(self, first: int, is_after_end: bool) -> float:
        """The number after the last of an epoch."""
        if self.length is None:
            return float("inf")
        if not self.goes_on:
            return first + LENGTH
        is_empty = first % LENGTH == 0 and not is_after_end  # left at the end, before it had come to that
        return first if is_empty else (first // LENGTH + 1) * LENGTH


def content(batch: Any) -> Any:
    if isinstance(batch, Batch):
        return batch.hash
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def seed_torch(loader: Any, epoch: int) -> None:
    torch.manual_seed(1000 + epoch)


def seed_python(loader: Any, epoch: int) -> None:
    random.seed(1000 + epoch)


def tell_sampler(loader: Any, epoch: int) -> None:
    loader.sampler.set_epoch(epoch)


def tell_batch_sampler(loader: Any, epoch: int) -> None:
    loader.batch_sampler.set_epoch(epoch)


class Shuffling:
    """A batch sampler as people write them: no generator of its own."""

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(LENGTH))
        random.shuffle(order)
        for index in order:
            yield [2 * index, 2 * index + 1]

    def __len__(self) -> int:
        return LENGTH


ENDLESS = stream()
DRAWN = [batch for loader in [Drawing()] for _ in range(12) for batch in loader]
DATA: Any = list(range(2 * LENGTH))
SEEDED = torch.Generator  # for reading


def shuffled_by(generator: torch.Generator) -> Any:
    """The generator is the loader's too, which draws a seed for workers from it."""
    sampler = SubsetRandomSampler(DATA, generator=generator)
    return DataLoader(DATA, batch_size=2, sampler=sampler, generator=generator)


def distributed(sampler: type[Any]) -> Any:
    return sampler(DATA, num_replicas=1, rank=0, seed=3)


def stratified() -> StratifiedBatchSampler:
    return StratifiedBatchSampler(RareRows(len(DATA), np.arange(4), np.zeros(4, np.int64)), 2)


KINDS = {
    "list": Kind(lambda: list("abcde")),
    "tensor": Kind(lambda: torch.arange(10).reshape(LENGTH, 2)),
    "in order": Kind(lambda: DataLoader(DATA, batch_size=2)),
    "shuffled": Kind(lambda: DataLoader(DATA, batch_size=2, shuffle=True), seed_torch),
    "generator": Kind(lambda: shuffled_by(SEEDED().manual_seed(5))),
    "generator, drawn from to the end": Kind(
        lambda: DataLoader(DATA, batch_size=2, shuffle=True, generator=SEEDED().manual_seed(5)),
        can_be_left=False,
    ),
    "unbatched": Kind(
        lambda: DataLoader(DATA[:LENGTH], batch_size=None, shuffle=True, generator=SEEDED().manual_seed(5)),
        can_be_left=False,
    ),
    "batch sampler": Kind(lambda: DataLoader(DATA, batch_sampler=Shuffling()), seed_python),
    "distributed": Kind(lambda: DataLoader(DATA, 2, sampler=distributed(DistributedSampler)), tell_sampler),
    "stateful sampler": Kind(
        lambda: DataLoader(DATA, 2, sampler=distributed(StatefulDistributedSampler)),
        tell_sampler,
    ),
    "stratified": Kind(lambda: DataLoader(DATA, batch_sampler=stratified()), tell_batch_sampler),
    "torchdata stratified": Kind(lambda: StatefulDataLoader(DATA, batch_sampler=stratified()), tell_batch_sampler),
    "torchdata": Kind(lambda: StatefulDataLoader(DATA, batch_size=2)),
    "torchdata shuffled": Kind(lambda: StatefulDataLoader(DATA, batch_size=2, shuffle=True)),
    "torchdata distributed": Kind(
        lambda: StatefulDataLoader(DATA, 2, sampler=distributed(DistributedSampler)), tell_sampler
    ),
    "torchdata stateful sampler": Kind(
        lambda: StatefulDataLoader(DATA, 2, sampler=distributed(StatefulDistributedSampler)), tell_sampler
    ),
    "torchdata iterable": Kind(
        lambda: StatefulDataLoader(Counting(), batch_size=2),
        goes_on=lambda number: [2 * (number % LENGTH), 2 * (number % LENGTH) + 1],
    ),
    "own": Kind(Resumable, goes_on=lambda number: number % LENGTH),
    "own, drawing": Kind(Drawing, goes_on=lambda number: DRAWN[number]),
    "stream": Kind(stream, goes_on=lambda number: content(ENDLESS.batch(number)), length=None),
}


# The model.


@dataclass
class Place:
    """Where the model is: plain lists and numbers."""

    epoch: int = -1
    first: int = 0
    is_after_end: bool = True
    """Whether the epoch before it had been gone through to the end."""
    next: int = 0
    end: int | None = None
    """The end of the epoch, once it was come to."""

    def copy(self) -> "Place":
        return replace(self)


@dataclass
class Model:
    kind: Kind
    order: Callable[[int, int, int], Any]
    place: Place = field(default_factory=Place)
    begun: dict[int, tuple[int, bool]] = field(default_factory=dict)
    """First number of each epoch, and whether the one before it had been gone through."""
    newest: int = -1
    drawn: int = 0
    """How often an epoch was begun that had not been begun before."""
    target: Place | None = None
    skipped: set[int] = field(default_factory=set)

    def new_iterator(self) -> None:
        """``over``, and the first ``next`` of it; with a target, what is left of an epoch comes first."""
        if self.target is not None:
            self.go()
            if self.peek() is not None:
                return
            self.next()
        self.begin()

    def begin(self) -> None:
        self._new_epoch()
        self.newest = self.place.epoch

    def _new_epoch(self) -> None:
        self.drawn += 1
        place = self.place
        first = place.next if place.end is None else place.end
        is_after_end = place.epoch < 0 or place.end is not None
        self.place = Place(place.epoch + 1, first, is_after_end, first)
        self.begun[self.place.epoch] = (first, is_after_end)

    def go(self) -> None:
        assert self.target is not None
        self.place, self.target = self.target, None
        self.begun[self.place.epoch] = (self.place.first, self.place.is_after_end)
        self.newest = max(self.newest, self.place.epoch)

    def peek(self) -> int | None:
        other = replace(
            self,
            place=self.place.copy(),
            target=self.target and self.target.copy(),
            begun=dict(self.begun),
        )
        return other.next()

    def next(self) -> int | None:
        if self.target is not None:
            self.go()
        while True:
            place = self.place
            later = self.begun.get(place.epoch + 1) if place.epoch < self.newest else None
            if later and later[0] < place.next:
                later = None
            cut = later[0] if later and not later[1] else float("inf")
            end = min(self.kind.end(*self.begun[place.epoch]), cut)
            while place.end is None and place.next < end:
                place.next += 1
                if place.next - 1 not in self.skipped:
                    return place.next - 1
            if cut == float("inf"):
                if place.end is None:
                    place.end = place.next
                place.next = place.end
            if place.epoch >= self.newest:
                return None
            if later and later[0] == place.next:
                self.place = Place(place.epoch + 1, *later, later[0])
            else:
                self._new_epoch()

    def content(self, number: int) -> Any:
        return self.order(self.place.epoch, number - self.place.first, number)

    def skip(self, first: int, count: int) -> None:
        self.skipped |= set(range(first, first + count))


class Run:
    """Batches and the model, side by side."""

    def __init__(self, kind: Kind, order: Callable[[int, int, int], Any]) -> None:
        torch.manual_seed(7)
        self.kind = kind
        self.loader = kind.make()
        self.batches = Batches(must_reposition=True)
        self.model = Model(kind, order)
        self.saved: list[tuple[str, Place]] = []
        self.iterator: Iterator[Any] = iter(())
        self.handed_out: Any = None
        self.went_at = -1
        """How many epochs had been begun when it was told to go somewhere."""
        self.new_iterator()

    def new_iterator(self) -> None:
        self.model.new_iterator()
        self.iterator = self.batches.over(self.loader)
        self.kind.tell(self.loader, self.model.newest)
        self.step()

    def step(self) -> None:
        expected = self.model.next()
        before = torch.get_rng_state()
        batch = next(self.iterator, None)
        assert (batch is None) == (expected is None)
        if expected is None:
            self.new_iterator()
            return
        assert self.batches.number == expected
        assert content(batch) == self.model.content(expected)
        assert not self.batches.is_probe
        if self.went_at == self.model.drawn:
            assert torch.equal(before, torch.get_rng_state()), "going somewhere draws from nobody's generator"
        self.went_at = -1
        self.handed_out = batch
        torch.rand(1)  # training draws too
        random.random()  # noqa: S311

    def save(self) -> None:
        position = json.dumps(self.batches.position())
        assert json.loads(position) == self.batches.position()
        self.saved.append((position, (self.model.target or self.model.place).copy()))

    def go_to(self, which: int) -> None:
        if self.saved:
            position, place = self.saved[which % len(self.saved)]
            self.batches.go_to(json.loads(position))
            self.model.target = place.copy()
            self.went_at = self.model.drawn
            assert self.batches.position() == json.loads(position)

    def skip(self, ahead: int, count: int) -> None:
        first = max(0, (self.model.target or self.model.place).next + ahead)
        self.batches.skip(first, count)
        self.model.skip(first, count)

    def probe(self) -> None:
        if self.model.target is None:
            number, position = self.batches.number, self.batches.position()
            again = [object(), self.handed_out]
            self.batches.repeat(again)
            for each in again:
                assert next(self.iterator) is each
                assert self.batches.is_probe
                assert (self.batches.number, self.batches.position()) == (number, position)

    def restart(self, which: int) -> None:
        """Another process goes on from what was saved."""
        if not self.saved:
            return
        ledger = json.loads(json.dumps(self.batches.bookkeeping()))
        torch.manual_seed(7)
        self.loader = self.kind.make()
        self.batches = Batches(must_reposition=True)
        self.batches.take_over(ledger)
        self.model.begun.clear()
        self.model.newest = -1
        self.go_to(which)
        here = self.saved[which % len(self.saved)][1].epoch
        if self.kind.is_told:  # of epochs that this process has not begun, only the loop would know
            self.saved = [saved for saved in self.saved if saved[1].epoch in (here - 1, here)]
        self.new_iterator()


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("save")),
        st.tuples(st.just("go to"), st.integers(0, 5)),
        st.tuples(st.just("skip"), st.integers(-2, 3), st.integers(1, 4)),
        st.tuples(st.just("new iterator")),
        st.tuples(st.just("probe")),
        st.tuples(st.just("restart"), st.integers(0, 5)),
    ),
    max_size=25,
)


@pytest.mark.parametrize("name", KINDS)
def test_any_way_through_the_data_is_the_one_of_a_list(name: str) -> None:
    order = KINDS[name].order()

    @settings(max_examples=30)
    @given(OPERATIONS)
    def go(operations: list[tuple[Any, ...]]) -> None:
        run = Run(KINDS[name], order)
        for operation in operations:
            if run.model.newest > 9:
                break
            match operation:
                case "step", count:
                    for _ in range(count):
                        run.step()
                case ("save",):
                    run.save()
                case "go to", which:
                    run.go_to(which)
                case "skip", ahead, count:
                    run.skip(ahead, count)
                case ("new iterator",):
                    drawn = run.model.drawn
                    if run.kind.can_be_left:
                        run.new_iterator()
                    while run.model.drawn == drawn and not run.kind.can_be_left:
                        run.step()
                case ("probe",):
                    run.probe()
                case "restart", which:
                    run.restart(which)
        skipped = [number for first, end in run.batches.skipped for number in range(first, end)]
        assert skipped == sorted(run.model.skipped)

    go()


# Word by word.


def numbers_of(batches: Batches, loader: Any, count: int | None = None) -> list[int | None]:
    return [batches.number for _ in islice(batches.over(loader), count)]


def test_batches_are_numbered_over_all_epochs() -> None:
    batches = Batches()
    assert batches.number is None
    assert batches.position() == {}
    assert numbers_of(batches, "abc") == [0, 1, 2]
    assert numbers_of(batches, "abc") == [3, 4, 5]


def test_it_notices_between_two_batches_that_it_is_to_go_elsewhere() -> None:
    batches = Batches()
    seen: list[str] = []
    start: Any = None
    for letter in batches.over("abcdef"):
        seen.append(letter)
        if letter == "b":
            start = start or batches.position()
        if letter == "e" and len(seen) < 6:
            batches.skip(3, 1)
            batches.go_to(start)
    assert "".join(seen) == "abcde" + "cef"


@pytest.mark.parametrize("limit", [None, 4])
def test_where_a_loop_counts_epochs_an_iterator_ends_with_each(limit: int | None) -> None:
    """Also after going back; a later epoch then has the order that it had, whatever was drawn at random since."""
    rows: Any = range(6)
    loader: Any = DataLoader(rows, 1, shuffle=True)
    per_epoch = limit or 6
    batches = Batches(must_reposition=True)
    batches.by_epoch, batches.limit = True, limit
    before: list[tuple[int | None, int]] = []
    start: Any = None
    for _ in range(2):
        for batch in islice(batches.over(loader), limit):  # as a loop that has a limit itself
            before.append((batches.number, int(batch)))
            start = start or batches.position()
    assert batches.is_at_end(batches.position())
    walk = batches.over(loader)
    before.append((2 * per_epoch, int(next(walk))))
    batches.go_to(start)
    batches.skip(per_epoch - 1, 3)
    assert batches.is_at_end(start) is False
    assert [(batches.number, int(batch)) for batch in walk] == before[1 : per_epoch - 1]
    torch.rand(5)
    random_state = torch.get_rng_state()
    again = iter(batches.over(loader))
    second = [(batches.number, int(next(again)))]
    drawn = torch.get_rng_state()
    torch.set_rng_state(random_state)
    next(iter(loader))
    assert torch.equal(drawn, torch.get_rng_state()), "it draws as a new epoch does"
    second += [(batches.number, int(batch)) for batch in again]
    assert [content for _, content in second] == [content for _, content in before[per_epoch + 2 : 2 * per_epoch]]
    third = [(batches.number, int(batch)) for batch in batches.over(loader)]
    assert third[0] == before[-1]
    assert len(third) == per_epoch


def test_a_rollback_into_the_epoch_before_goes_on_with_the_present_one_from_its_beginning() -> None:
    batches = Batches(must_reposition=True)
    loader = DataLoader(DATA, batch_size=2, shuffle=True)
    torch.manual_seed(1)
    first, second = [], []
    for batch in batches.over(loader):
        first.append(batch.tolist())
        if batches.number == 2:
            position = batches.position()
    has_gone_back = False
    for batch in batches.over(loader):
        second.append(batch.tolist())
        if batches.number == 6 and not has_gone_back:
            has_gone_back = True
            batches.go_to(position)
    assert second == [*second[:2], *first[3:], *second[:2], *second[-3:]]
    assert sorted(number for batch in second[-5:] for number in batch) == DATA
    assert batches.number == 9


def test_skipped_ranges_may_be_given_by_hand_and_are_merged() -> None:
    batches = Batches(skipped=[(8, 9), (1, 3), (3, 4)])
    batches.skip(6, 1)
    assert batches.skipped == [[1, 4], [6, 7], [8, 9]]
    assert numbers_of(batches, "abcde") == [0, 4]
    assert numbers_of(batches, "abcde") == [5, 7, 9]


@pytest.mark.parametrize("skipped", [(-1, 3), (3, 3), (4, 2)])
def test_a_range_that_is_none_is_refused(skipped: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=rf"skip {skipped[0]}:{skipped[1]}: give the first batch, from 0, and"):
        Batches(skipped=[skipped])


@pytest.mark.parametrize("make", [lambda: "abcdef", lambda: StatefulDataLoader("abcdef", batch_size=None)])
def test_a_position_among_batches_that_an_older_run_handed_out_again_is_at_the_end(make: Callable[[], Any]) -> None:
    batches = Batches(skipped=[(1, 3)])
    assert "".join(batches.over(make())) == "adef"
    position = batches.position()
    position["epoch"] |= {"dropped": [[1, 3]], "end_state": position["state"]}
    older, loader = Batches(skipped=[(1, 3)]), make()
    older.go_to(position | {"next": 2, "is_again": True, "state": None})
    assert "".join(older.over(loader)) == "abcdef"
    assert older.number == 11


def test_a_probe_is_the_very_object_and_moves_nothing() -> None:
    batches, kept = Batches(), object()
    iterator: Iterator[Any] = batches.over([1, 2, 3])
    assert next(iterator) == 1
    position = batches.position()
    probes = [batches.is_probe]
    batches.repeat([kept])
    probes.append(batches.is_probe)
    assert next(iterator) is kept
    probes.append(batches.is_probe)
    assert (batches.number, batches.position()) == (0, position)
    assert next(iterator) == 2
    probes.append(batches.is_probe)
    assert probes == [False, False, True, False]
    next(iterator)
    batches.repeat([kept])
    assert next(iterator) is kept, "at the end of the data, too"
    batches.repeat([kept])
    batches.go_to(position)
    assert list(iterator) == [2, 3], "who goes elsewhere wants no probe any more"


@pytest.mark.parametrize("taken", ["after the last batch", "after the end"])
@pytest.mark.parametrize("name", ["list", "shuffled", "torchdata shuffled", "torchdata stateful sampler", "own"])
def test_a_position_at_the_end_of_an_epoch_begins_the_next_one(name: str, taken: str) -> None:
    """Else a resumed loop would see an epoch without batches, and train on nothing in it."""
    kind = KINDS[name]
    order = kind.order()
    torch.manual_seed(7)
    batches, loader = Batches(must_reposition=True), kind.make()
    iterator = batches.over(loader)
    for _ in range(LENGTH):
        next(iterator)
    if taken == "after the end":
        assert next(iterator, None) is None
    position = json.loads(json.dumps(batches.position()))
    other, loader = Batches(must_reposition=True), kind.make()
    other.go_to(position)
    kind.tell(loader, 1)
    seen = [content(batch) for batch in other.over(loader)]
    assert seen == [order(1, place, LENGTH + place) for place in range(LENGTH)]
    assert other.number == 2 * LENGTH - 1


def test_the_position_of_another_loader_is_refused_and_nothing_changed() -> None:
    def position_in(loader: Any) -> dict[str, Any]:
        batches = Batches(must_reposition=True)
        next(batches.over(loader))
        return batches.position()

    batches = Batches(must_reposition=True)
    iterator = batches.over(DataLoader(DATA, batch_size=2))
    next(iterator)
    before = batches.position()
    for other, sentence in (
        (DataLoader(DATA, batch_size=5), r"another loader: length 2 there, 5 in this DataLoader; give the loader that"),
        (list("abcde"), "another loader: kind sequence there, DataLoader in this DataLoader"),
        (StatefulDataLoader(DATA, batch_size=2), "another loader: kind stateful there, DataLoader in this DataLoader"),
    ):
        with pytest.raises(SourceError, match=sentence):
            batches.go_to(position_in(other))
        waiting = Batches()
        waiting.go_to(position_in(other))
        with pytest.raises(SourceError, match=sentence):
            waiting.over(DataLoader(DATA, batch_size=2))
    with pytest.raises(SourceError, match="workers 0 there, 2 in this StatefulDataLoader"):
        waiting.over(StatefulDataLoader(DATA, batch_size=2, num_workers=2))
    with pytest.raises(SourceError, match="was taken before the first batch"):
        batches.go_to({})
    assert batches.position() == before
    assert next(iterator).tolist() == [2, 3]


def test_going_nowhere_is_undone_too() -> None:
    """A rollback that fails puts back what it found, before the first batch as well."""
    batches = Batches()
    next(batches.over("abc"))
    other, before = Batches(), Batches().position()
    other.go_to(batches.position())
    other.go_to(before)
    assert "".join(other.over("abc")) == "abc"


def test_a_position_does_not_move_with_the_data() -> None:
    batches = Batches()
    iterator = batches.over("abcdef")
    next(iterator)
    position = batches.position()
    batches.skip(2, 1)
    assert "".join(iterator) == "bdef"
    batches.go_to(position)
    assert "".join(batches.over("abcdef")) == "bdef"
    assert batches.position() != position


def test_a_loader_that_fails_at_the_beginning_of_an_epoch_can_be_gone_back_in() -> None:
    class Failing(Resumable):
        fails = False

        def __iter__(self) -> Iterator[int]:
            if self.fails:
                raise OSError("the disk is gone")
            yield from super().__iter__()

    batches, loader = Batches(must_reposition=True), Failing()
    iterator = batches.over(loader)
    next(iterator)
    position = batches.position()
    assert list(iterator) == [1, 2, 3, 4]
    loader.fails = True
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches.over(loader))
    loader.fails = False
    batches.go_to(position)
    assert list(batches.over(loader)) == [1, 2, 3, 4, 0, 1, 2, 3, 4]


def test_two_iterators_at_a_time_are_refused() -> None:
    batches = Batches()
    first, second = batches.over("abc"), batches.over("abc")
    assert next(second) == "a"
    with pytest.raises(ConfigError, match="another iterator was begun after this one"):
        next(first)
    assert next(second) == "b"


def test_a_swap_is_passed_on_and_holds_after_going_back_and_after_a_restart() -> None:
    def sources(iterator: Iterator[Batch], count: int = 64) -> set[str]:
        return {span.source.name for batch in islice(iterator, count) for span in batch.spans}

    batches = Batches(must_reposition=True)
    iterator = batches.over(stream())
    assert sources(iterator) == {"a", "b"}
    position = json.dumps(batches.position())
    with pytest.raises(ConfigError, match="source='c': not one of those that are mixed"):
        batches.swap("c", 0.0)
    batches.swap("b", 0.0)
    assert sources(iterator) == {"a"}
    batches.go_to(json.loads(position))
    assert sources(iterator) == {"a"}, "the reason for it has not gone"
    batches.go_to(json.loads(position))
    batches.swap("b", 1.0)
    assert sources(iterator) == {"a", "b"}
    batches.swap("b", 0.0)

    ledger = json.loads(json.dumps(batches.bookkeeping()))
    for is_resumed in (False, True):
        other = Batches(must_reposition=True)
        other.take_over(ledger)
        if is_resumed:
            other.go_to(json.loads(position))
        assert sources(other.over(stream())) == {"a"}
        assert other.number == (127 if is_resumed else 63)
    with pytest.raises(
        ConfigError, match=r"swap source='b': list has no reweight\(source, weight\); give guard.batches"
    ):
        other.over([1, 2])


def test_a_swap_that_nobody_can_carry_out_is_refused() -> None:
    batches = Batches()
    with pytest.raises(ConfigError, match="swap source='a': there is no loader"):
        batches.swap("a", 0.0)
    next(batches.over("abc"))
    with pytest.raises(ConfigError, match=r"swap source='a': str has no reweight\(source, weight\)"):
        batches.swap("a", 0.0)
    assert batches.bookkeeping()["swaps"] == {}


def test_the_books_go_over_to_the_next_process() -> None:
    batches = Batches(skipped=[(1, 2)])
    ledger = json.loads(json.dumps(batches.bookkeeping()))
    other = Batches(skipped=[(7, 8)])
    other.take_over(ledger | {"handed_out_again": [[1, 2]], "given_up": [[1, 2]]})  # older runs wrote these, too
    assert other.skipped == [[1, 2], [7, 8]], "and what was given by hand stays"
    assert other.bookkeeping() == ledger | {"skipped": [[1, 2], [7, 8]]}


def test_a_loop_may_take_a_new_loader_for_each_epoch() -> None:
    batches = Batches(must_reposition=True)
    for epoch in range(3):
        loader = DataLoader(DATA, batch_size=2)
        assert numbers_of(batches, loader) == list(range(LENGTH * epoch, LENGTH * (epoch + 1)))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=12))
def test_ranges_are_sets_of_numbers(added: list[tuple[int, int]]) -> None:
    ranges, expected = Ranges(), set()
    for first, count in added:
        ranges.add(first, first + count)
        expected |= set(range(first, first + count))
    assert {number for number in range(-1, 40) if number in ranges} == expected
    flat = [bound for each in ranges.as_list() for bound in each]
    assert flat == sorted(set(flat)), "sorted, and none touching another"


def test_the_last_batch_of_an_epoch_is_known_and_epochs_are_announced() -> None:
    told: list[int] = []
    batches = Batches(skipped=[(8, 10)])
    batches.on_epoch = told.append
    loader = list(range(5))
    last = []
    for _ in range(2):
        for _ in batches.over(loader):
            if batches.is_last:
                last.append(batches.number)
    assert last == [4, 7], "what is left out does not come"
    assert told == [0, 1]


def test_a_loader_is_begun_in_the_middle_of_an_epoch() -> None:
    told: list[int] = []
    batches = Batches()
    batches.on_epoch = told.append
    batches.count_from(13, epoch=2, into=3)
    loader = list("abcde")
    found = [(batches.number, batch) for _ in range(2) for batch in batches.over(loader)]
    assert found == [(13, "d"), (14, "e"), *zip(range(15, 20), loader, strict=True)]
    assert told == [2, 3]
