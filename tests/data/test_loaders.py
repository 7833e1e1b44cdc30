"""Each kind of loader: what is refused, what is read, what is drawn, and what becomes of its workers."""

import itertools
import json
import multiprocessing
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]
from torchdata.stateful_dataloader.sampler import (  # type: ignore[import-untyped]
    RandomSampler as TorchdataRandomSampler,
)
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from sealegs.data.loaders import cannot_reposition
from sealegs.data.position import Batches
from sealegs.errors import ConfigError, SourceError

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),  # workers are forked
]

SIZE = 12


class Numbers(Dataset[int]):
    """Says what was read of it."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def listed(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def loader(**options: Any) -> DataLoader[int]:
    return DataLoader(Numbers(), batch_size=2, **options)


def distributed(kind: type[Any] = DistributedSampler) -> Any:
    return kind(Numbers(), num_replicas=1, rank=0)


# Refused at the start, in one sentence.

CANNOT_BE_BROUGHT_BACK: dict[str, tuple[Callable[[], Any], str]] = {
    "a generator": (
        lambda: (batch for batch in range(3)),
        r"loader=generator: it cannot be brought back to an earlier batch; give a DataLoader, a sequence, or a loader "
        r"with state_dict and load_state_dict",
    ),
    "a dict": (lambda: {0: 1}, r"loader=dict: it cannot be brought back"),
    "an iterable dataset": (
        lambda: DataLoader(Endless(), batch_size=2),
        r"loader=DataLoader over the IterableDataset Endless: .*; use torchdata's StatefulDataLoader",
    ),
    "no order": (lambda: loader(num_workers=2, in_order=False), r"loader=DataLoader: in_order=False .*; leave it out"),
    "no order, with a state": (
        lambda: StatefulDataLoader(Numbers(), num_workers=2, in_order=False),
        r"loader=StatefulDataLoader: in_order=False .*; leave it out",
    ),
    "a sampler that is spent": (
        lambda: loader(sampler=iter(range(SIZE))),
        r"sampler=range_iterator: can be gone through once; give what it is the iterator of",
    ),
    "a sampler that torchdata forgets": (
        lambda: StatefulDataLoader(Numbers(), sampler=RandomSampler(Numbers(), generator=generator())),
        r"sampler=RandomSampler: StatefulDataLoader does not bring its order back; use shuffle=True instead",
    ),
}


@pytest.mark.parametrize("name", CANNOT_BE_BROUGHT_BACK)
def test_what_cannot_be_brought_back_is_refused_at_the_start(name: str) -> None:
    make, sentence = CANNOT_BE_BROUGHT_BACK[name]
    given = make()
    assert cannot_reposition(given)
    with pytest.raises(ConfigError, match=sentence):
        Batches(must_reposition=True).over(given)


@pytest.mark.parametrize(
    "given",
    [
        [1, 2],
        torch.zeros(3),
        np.zeros(3),
        Numbers(),
        loader(),
        loader(shuffle=True),
        loader(sampler=WeightedRandomSampler([1.0] * SIZE, SIZE)),
        loader(sampler=distributed()),
        DataLoader(Numbers(), batch_sampler=[[0, 1], [2]]),
    ],
    ids=lambda given: type(given).__name__,
)
def test_what_can_be_brought_back(given: Any) -> None:
    assert cannot_reposition(given) is None


def test_what_torchdata_can_bring_back() -> None:
    for options in (
        {"shuffle": True},
        {"sampler": TorchdataRandomSampler(Numbers())},
        {"sampler": distributed()},
        {"sampler": distributed(StatefulDistributedSampler)},
        {"batch_sampler": [[0, 1], [2]]},
    ):
        assert cannot_reposition(StatefulDataLoader(Numbers(), **options)) is None
    assert cannot_reposition(StatefulDataLoader(Endless())) is None


def test_torch_itself_does_not_bring_that_sampler_back() -> None:
    """The reason for the refusal: when this fails, it has become needless."""
    subject = StatefulDataLoader(
        Numbers(), batch_size=2, sampler=RandomSampler(Numbers(), generator=generator()), num_workers=0
    )
    whole, state = [], {}
    for batch in subject:
        whole.append(listed(batch))
        if len(whole) == 2:
            state = subject.state_dict()
    subject.load_state_dict(state)
    assert [listed(batch) for batch in subject] != whole[2:]


def test_without_a_need_to_go_back_anything_iterable_goes() -> None:
    batches = Batches(skipped=[(1, 3)])
    batches.count_from(1)
    assert list(batches.over(letter for letter in "abcde")) == ["c", "d", "e"]
    assert batches.number == 5
    position = json.loads(json.dumps(batches.position()))
    with pytest.raises(ConfigError, match="it cannot be brought back"):
        batches.go_to(position)
    other = Batches()
    other.go_to(position)
    next(other.over(letter for letter in "abcde"))
    assert other.number == 6, "another process goes on counting, with what it is given"
    strict = Batches(must_reposition=True)
    strict.go_to(position)
    with pytest.raises(SourceError, match="another loader: kind any there, sequence in this list"):
        strict.over(["f"])


class HiddenOrder(Sampler[list[int]]):
    """Draws another order each time, from what nobody can see."""

    def __init__(self) -> None:
        self.hidden = [random.Random(3)]  # noqa: S311

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(SIZE))
        self.hidden[0].shuffle(order)
        yield from ([index] for index in order)


class EveryBatch(Sampler[list[int]]):
    """Draws each batch when it is asked for, from everyone's generator."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(SIZE):
            yield np.random.randint(0, SIZE, 3).tolist()


@pytest.mark.parametrize(
    ("sampler", "sentence"),
    [
        (HiddenOrder(), r"sampler=HiddenOrder: it does not give the order of an epoch a second time; let it have a"),
        (EveryBatch(), r"sampler=EveryBatch: it draws every batch from a global generator, .*; let it draw from"),
    ],
    ids=["hidden", "every batch"],
)
def test_an_order_that_does_not_come_again_is_refused_before_the_first_batch(
    sampler: Sampler[list[int]], sentence: str
) -> None:
    given = DataLoader(Numbers(), batch_sampler=sampler)
    with pytest.raises(ConfigError, match=sentence):
        next(Batches(must_reposition=True).over(given))
    assert len(list(Batches().over(given))) == SIZE, "and goes where nobody needs it"


def test_an_order_that_has_changed_is_not_taken_for_the_old_one() -> None:
    batches = Batches()
    given = DataLoader(Numbers(), batch_sampler=HiddenOrder())
    iterator = batches.over(given)
    next(iterator)
    batches.go_to(batches.position())
    with pytest.raises(ConfigError, match="does not give the order of an epoch a second time"):
        next(iterator)


def test_a_state_that_cannot_be_kept_is_refused_before_the_first_batch() -> None:
    class Odd:
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

        def state_dict(self) -> dict[str, Any]:
            return {"file": object()}

        def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    with pytest.raises(ConfigError, match=r"loader=Odd: its state has a object, which cannot be kept"):
        next(Batches(must_reposition=True).over(Odd()))
    batches = Batches()
    assert list(batches.over(Odd())) == [0, 1, 2]
    other = Batches()
    other.go_to(json.loads(json.dumps(batches.position())))
    next(other.over(Odd()))
    assert other.number == 3


# Nothing is read that is not handed out.


@pytest.mark.parametrize("batch_size", [2, None])
def test_what_is_skipped_or_passed_over_is_not_read(batch_size: int | None) -> None:
    rows = batch_size or 1
    data = Numbers(6 * rows)
    given = DataLoader(data, batch_size=batch_size)
    batches = Batches(skipped=[(1, 3)], must_reposition=True)
    iterator = batches.over(given)
    next(iterator), next(iterator)
    assert data.read == [*range(rows), *range(3 * rows, 4 * rows)]
    position = batches.position()
    next(iterator)
    data.read.clear()
    batches.go_to(position)
    batches.skip(4, 1)
    assert listed(next(iterator)) == ([10, 11] if batch_size else 5)
    assert data.read == [*range(5 * rows, 6 * rows)]


# What is drawn.


@pytest.mark.parametrize("options", [{}, {"generator": generator}], ids=["global", "generator"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_that_never_goes_back_draws_what_it_would_without_us(options: dict[str, Any], workers: int) -> None:
    def states(wrap: Callable[[DataLoader[int]], Iterator[Any]]) -> list[Any]:
        torch.manual_seed(5)
        given = loader(shuffle=True, num_workers=workers, **{name: make() for name, make in options.items()})
        found = []
        for _ in range(3):
            found += [listed(batch) for batch in wrap(given)]
            found.append(torch.get_rng_state().tolist())
        return found

    batches = Batches(must_reposition=True)
    assert states(batches.over) == states(iter)


def test_going_back_leaves_everyones_generators_alone() -> None:
    class Drawing(Sampler[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            order = torch.randperm(SIZE).tolist()
            random.shuffle(order)
            np.random.shuffle(order)
            yield from ([index] for index in order)

    def everyones() -> list[Any]:
        return [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]

    batches = Batches(must_reposition=True)
    iterator = batches.over(DataLoader(Numbers(), batch_sampler=Drawing()))
    order = [listed(next(iterator)) for _ in range(3)]
    position = json.loads(json.dumps(batches.position()))
    assert set(position["epoch"]["start"]) == {"torch", "python", "numpy", "check"}
    order += [listed(batch) for batch in iterator]
    before = everyones()
    batches.go_to(position)
    assert [listed(batch) for batch in batches.over(batches._given)] == order[3:]
    assert everyones() == before


def test_a_position_is_small() -> None:
    for given, limit in ((loader(), 500), (loader(shuffle=True), 5500), (loader(sampler=distributed()), 500)):
        batches = Batches(must_reposition=True)
        next(batches.over(given))
        assert len(json.dumps(batches.position())) < limit


class OwnNumpy(Sampler[int]):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(4)

    def __iter__(self) -> Iterator[int]:
        yield from self.rng.permutation(SIZE).tolist()


class OwnLegacyNumpy(Sampler[int]):
    def __init__(self) -> None:
        self.rng = np.random.RandomState(4)

    def __iter__(self) -> Iterator[int]:
        yield from self.rng.permutation(SIZE).tolist()


class OwnPython(Sampler[int]):
    def __init__(self) -> None:
        self.rng = random.Random(4)  # noqa: S311

    def __iter__(self) -> Iterator[int]:
        for _ in range(SIZE):
            yield self.rng.randrange(SIZE)


class CountsEpochs(Sampler[int]):
    """Its order depends on a number that it raises itself."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(SIZE, generator=generator(self.epoch)).tolist()
        self.epoch += 1


class TellsItsState(Sampler[int]):
    """Goes on where it is, in an order that only its state tells."""

    def __init__(self) -> None:
        self.seeds, self.place = [0], 0

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(SIZE, generator=generator(self.seeds[0])).tolist()
        while self.place < SIZE:
            self.place += 1
            yield order[self.place - 1]
        self.seeds, self.place = [self.seeds[0] + 1], 0

    def state_dict(self) -> dict[str, Any]:
        return {"seeds": self.seeds, "place": self.place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seeds, self.place = state["seeds"], state["place"]


SAMPLERS: dict[str, Callable[[], Any]] = {
    "numpy's": OwnNumpy,
    "numpy's old": OwnLegacyNumpy,
    "Python's, as it goes": OwnPython,
    "torch's, as it goes": lambda: RandomSampler(range(9), replacement=True, num_samples=SIZE, generator=generator()),
    "weighted": lambda: WeightedRandomSampler([1.0] * SIZE, SIZE, generator=generator()),
    "counts epochs": CountsEpochs,
    "tells its state": TellsItsState,
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_of_many_makes_repeat_themselves(name: str) -> None:
    """Into the epoch before and through the present one again; then in another process; then a new epoch."""
    whole = loader(sampler=SAMPLERS[name]())
    epochs = [[listed(batch) for batch in whole] for _ in range(3)]
    batches, given = Batches(must_reposition=True), loader(sampler=SAMPLERS[name]())
    iterator = batches.over(given)
    assert [listed(next(iterator)) for _ in range(2)] == epochs[0][:2]
    position = json.loads(json.dumps(batches.position()))
    assert [listed(batch) for batch in iterator] == epochs[0][2:]
    iterator = batches.over(given)
    assert [listed(next(iterator)) for _ in range(3)] == epochs[1][:3]
    batches.go_to(position)
    assert [listed(batch) for batch in iterator] == epochs[0][2:] + epochs[1]
    assert [listed(batch) for batch in batches.over(given)] == epochs[2]

    batches, given = Batches(must_reposition=True), loader(sampler=SAMPLERS[name]())
    batches.go_to(position)
    assert [listed(batch) for batch in batches.over(given)] == epochs[0][2:]
    assert [listed(batch) for batch in batches.over(given)] == epochs[1]


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("sampler", [DistributedSampler, StatefulDistributedSampler])
def test_a_sampler_keeps_the_epoch_that_the_loop_has_told_it(kind: type[Any], sampler: type[Any]) -> None:
    given = kind(Numbers(), batch_size=2, sampler=distributed(sampler))
    batches = Batches(must_reposition=True)
    iterator = batches.over(given)
    first = [listed(next(iterator)) for _ in range(2)]
    position = batches.position()
    first += [listed(batch) for batch in iterator]
    given.sampler.set_epoch(5)
    iterator = batches.over(given)
    second = [listed(next(iterator))]
    assert second[0] != first[0]
    batches.go_to(position)
    again = [listed(next(iterator))]
    assert given.sampler.epoch == 5
    again += [listed(batch) for batch in iterator]
    assert again[: len(first) - 1] == first[2:] + second
    assert given.sampler.epoch == 5


def test_an_epoch_of_torchdata_comes_again_though_its_generator_seeds_workers_too() -> None:
    """torchdata by itself gives another order in the epoch after one that was gone back into."""
    given = StatefulDataLoader(Numbers(), batch_size=2, shuffle=True, generator=generator())
    batches = Batches(must_reposition=True)
    iterator = batches.over(given)
    first = [listed(next(iterator)) for _ in range(2)]
    position = batches.position()
    first += [listed(batch) for batch in iterator]
    second = [listed(batch) for batch in batches.over(given)]
    iterator = batches.over(given)
    third = [listed(next(iterator))]
    batches.go_to(position)
    again = [listed(batch) for batch in iterator]
    assert again[: len(first) - 2 + len(second) + 1] == first[2:] + second + third


def test_a_loader_stays_where_the_user_has_brought_it() -> None:
    sampler = distributed(StatefulDistributedSampler)
    order = [listed(batch) for batch in StatefulDataLoader(Numbers(), batch_size=2, sampler=sampler)]
    sampler.load_state_dict({"yielded": 4})
    given = StatefulDataLoader(Numbers(), batch_size=2, sampler=sampler)
    assert [listed(batch) for batch in Batches(must_reposition=True).over(given)] == order[2:]


# Workers.


def children() -> set[int]:
    return {child.pid for child in multiprocessing.active_children() if child.pid is not None}


@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_workers_follow(kind: type[Any], persistent: bool) -> None:
    """They read ahead: what they have read of the old place is dropped, as are batches that were skipped meanwhile."""
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": persistent, "batch_size": 1}
    before = children()
    given = kind(Numbers(), shuffle=True, **options)
    next(iter(given))  # what was done with a loader before does not matter
    if kind is DataLoader:
        before = children()
    batches = Batches(must_reposition=True)
    iterator = batches.over(given)
    first = [listed(next(iterator)) for _ in range(3)]
    workers = children() - before
    position = json.loads(json.dumps(batches.position()))
    first += [listed(batch) for batch in iterator]
    iterator = batches.over(given)
    second = [listed(next(iterator)) for _ in range(2)]

    batches.go_to(position)
    batches.skip(4, 2)
    again = [listed(next(iterator)) for _ in range(SIZE - 5 + 2)]
    assert again[: SIZE - 5] == [first[3], *first[6:]], "the rest, without the skipped ones"
    assert again[SIZE - 5 :] == second, "the present epoch from its beginning"
    assert len(children() - before) == 1, "one iterator's workers at a time"
    if persistent and kind is DataLoader:
        assert children() - before == workers

    batches.skip(SIZE + 2, 1)  # has been read ahead
    next(iterator)
    assert batches.number == SIZE + 3
    del iterator, given  # torchdata's loader holds its iterator itself
    batches = Batches()
    assert not children() - before


def test_a_position_of_several_workers_is_gone_to_by_another_process() -> None:
    def make() -> Any:
        torch.manual_seed(2)
        return StatefulDataLoader(Numbers(), batch_size=1, shuffle=True, num_workers=2, snapshot_every_n_steps=3)

    batches = Batches(must_reposition=True)
    iterator = batches.over(make())
    for _ in range(5):
        next(iterator)
    position = json.dumps(batches.position())
    rest = [listed(batch) for batch in iterator]
    other = Batches(must_reposition=True)
    other.go_to(json.loads(position))
    assert [listed(batch) for batch in other.over(make())] == rest
