"""A run that was saved on some ranks goes on on others: every sample once in an epoch, or named."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler  # type: ignore[import-untyped]

import sealegs
from sealegs.batching.batch_sampler import StratifiedBatchSampler
from sealegs.batching.stratified import RareRows
from sealegs.data.position import Batches
from sealegs.errors import ConfigError, RanksChanged, SourceError

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

SIZE = 101
DATA: Any = list(range(SIZE))


class OwnSampler(Sampler[int]):
    """As the guide tells people to write one."""

    def __init__(self, num_replicas: int, rank: int) -> None:
        self.num_replicas, self.rank, self.epoch = num_replicas, rank, 0

    def global_order(self) -> Sequence[int]:
        return np.random.default_rng(self.epoch).permutation(SIZE).tolist()  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[int]:
        whole = self.global_order()[: SIZE // self.num_replicas * self.num_replicas]
        return iter(whole[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return SIZE // self.num_replicas

    drop_last = True


def with_sampler(kind: type[Any], sampler: type[Any], **options: Any) -> Callable[[int, int, int], Any]:
    def make(ranks: int, rank: int, rows: int) -> Any:
        held = sampler(DATA, num_replicas=ranks, rank=rank, seed=3, **options)
        return kind(DATA, batch_size=rows, sampler=held)

    return make


def stratified(ranks: int, rank: int, rows: int) -> Any:
    rare = RareRows(SIZE, np.arange(4), np.zeros(4, np.int64))
    return DataLoader(DATA, batch_sampler=StratifiedBatchSampler(rare, rows, seed=3, rank=rank, world_size=ranks))


KINDS: dict[str, Callable[[int, int, int], Any]] = {
    "distributed": with_sampler(DataLoader, DistributedSampler),
    "distributed, in order": with_sampler(DataLoader, DistributedSampler, shuffle=False),
    "distributed, tail dropped": with_sampler(DataLoader, DistributedSampler, drop_last=True),
    "stateful sampler": with_sampler(DataLoader, StatefulDistributedSampler),
    "torchdata": with_sampler(StatefulDataLoader, DistributedSampler),
    "torchdata stateful sampler": with_sampler(StatefulDataLoader, StatefulDistributedSampler),
    "stratified": stratified,
    "own sampler": lambda ranks, rank, rows: DataLoader(DATA, batch_size=rows, sampler=OwnSampler(ranks, rank)),
    "unbatched": lambda ranks, rank, _: DataLoader(
        DATA, batch_size=None, sampler=DistributedSampler(DATA, num_replicas=ranks, rank=rank, seed=3)
    ),
}


class Job:
    """What the ranks of one world do, in one process: ranks one after the other."""

    def __init__(self, make: Callable[[int, int, int], Any], ranks: int, rows: int, position: Any = None) -> None:
        self.told: list[dict[str, Any]] = []
        self.batches = [Batches() for _ in range(ranks)]
        self.loaders = [make(ranks, rank, rows) for rank in range(ranks)]
        self.batches[0].on_recut = self.told.append
        for each in self.batches:
            if position is not None:
                each.go_to(json.loads(json.dumps(position)))

    def epoch(self, number: int, count: int | None = None) -> list[list[int]]:
        """The samples of each number in an epoch, or in its next few batches, of all ranks together."""
        found = []
        for each, loader in zip(self.batches, self.loaders, strict=True):
            sampler = loader.batch_sampler if hasattr(loader.batch_sampler, "set_epoch") else loader.sampler
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(number)
            else:
                sampler.epoch = number
            found.append([_listed(batch) for batch in islice(each.over(loader), count)])
        assert len({len(of_rank) for of_rank in found}) == 1, "all ranks come to as many steps"
        return [[*chain(*of_all)] for of_all in zip(*found, strict=True)]

    @property
    def position(self) -> Any:
        return json.loads(json.dumps(self.batches[0].position()))


def _listed(batch: Any) -> list[int]:
    return batch.tolist() if getattr(batch, "ndim", 0) else [int(batch)]


def used(batches: Sequence[Sequence[int]]) -> Counter[int]:
    return Counter(one for batch in batches for one in batch)


def accounted(seen: Counter[int], told: Sequence[Mapping[str, Any]]) -> Counter[int]:
    """What was seen, less what is named as used twice, and with what is named as left out."""
    last = told[-1]
    return seen - Counter(last["used_twice"]) + Counter(last["left_out"])


WORLDS = [(4, 3, 2), (2, 5, 3), (3, 4, 1), (1, 6, 4)]
"""Ranks and rows of a batch before; ranks after."""


@pytest.mark.parametrize(("before", "rows", "after"), WORLDS)
@pytest.mark.parametrize("name", KINDS)
def test_every_sample_comes_once_whatever_the_number_of_ranks(name: str, before: int, rows: int, after: int) -> None:
    make = KINDS[name]
    first = Job(make, before, rows)
    first.epoch(0)
    seen = first.epoch(1, 3)
    second = Job(make, after, rows, first.position)
    seen += second.epoch(1)
    assert accounted(used(seen), second.told) == Counter(range(SIZE))
    assert len(second.told) == 1
    told = second.told[0]
    assert (told["epoch"], told["ranks"], told["done"]) == (1, [before, after], used(seen[:3]).total())
    assert second.batches[0].number == first.batches[0].number + len(seen) - 3  # type: ignore[operator]
    alone = Job(make, after, rows)
    assert second.epoch(2) == alone.epoch(2), "the next epoch is that of any run"


@pytest.mark.parametrize("name", KINDS)
def test_an_epoch_is_divided_again_and_again(name: str) -> None:
    """Each time the position of a rest that was divided before is saved in its midst, and gone to by others."""
    make = KINDS[name]
    job = Job(make, 2, 3)
    job.epoch(0)
    seen, twice, left_out = job.epoch(1, 2), Counter[int](), Counter[int]()
    for ranks in (3, 1, 1, 4, 2):
        told = job.told
        job = Job(make, ranks, 3, job.position)
        job.told = told if ranks == 1 and not job.told else job.told
        seen += job.epoch(1, 2 if ranks != 2 else None)
    twice, left_out = Counter(job.told[-1]["used_twice"]), Counter(job.told[-1]["left_out"])
    assert used(seen) - twice + left_out == Counter(range(SIZE))
    assert len(job.epoch(2)) == len(Job(make, 2, 3).epoch(2))


def test_another_size_of_batches_is_as_another_number_of_ranks() -> None:
    make = KINDS["distributed"]
    first = Job(make, 1, 8)
    seen = first.epoch(0, 5)
    second = Job(make, 1, 16, first.position)
    seen += second.epoch(0)
    assert used(seen) == Counter(range(SIZE))
    assert second.told[0]["rows"] == [8, 16]


@pytest.mark.parametrize(("size", "drops"), [(7, False), (7, True), (2, False), (1, False), (33, True), (50, False)])
@pytest.mark.parametrize("kind", ["distributed", "stratified"])
def test_epochs_of_few_samples_are_divided_too(kind: str, size: int, drops: bool) -> None:
    """Ranks that have none, batches that are never full, steps that take all; saved after any batch."""

    def make(ranks: int, rank: int, rows: int) -> Any:
        data: Any = list(range(size))
        if kind == "distributed":
            held: Any = DistributedSampler(data, num_replicas=ranks, rank=rank, seed=3)
            return DataLoader(data, batch_size=rows, sampler=held, drop_last=drops)
        rare = RareRows(size, np.arange(1), np.zeros(1, np.int64))
        sampler = StratifiedBatchSampler(rare, rows, seed=3, rank=rank, world_size=ranks, drop_last=drops)
        return DataLoader(data, batch_sampler=sampler)

    divided = 0
    for (ranks, rows), count in product([(3, 2), (2, 5), (1, 1)], [1, 2, 4]):
        try:
            first = Job(make, ranks, rows)
            make(4, 0, 1)
        except ConfigError as refused:
            assert "too few for a step" in str(refused)  # noqa: PT017 -- some of them are
            continue
        seen = first.epoch(0, count)
        if not seen:
            continue
        second = Job(make, 4, 1, first.position)
        rest = second.epoch(0)
        if second.batches[0].epoch == 0:  # else too few were left for four ranks, and the next has begun
            seen += rest
        if second.told:  # else it was over
            divided += 1
            assert accounted(used(seen), second.told) == Counter(range(size))
    assert divided or size < 5


@pytest.mark.parametrize("count", [13, None])
def test_at_the_end_of_an_epoch_there_is_nothing_to_divide(count: int | None) -> None:
    make = KINDS["distributed"]
    first = Job(make, 2, 4)
    first.epoch(0, count)
    second = Job(make, 1, 4, first.position)
    assert second.batches[0].following_epoch == 1
    assert second.epoch(1) == Job(make, 1, 4).epoch(1)


def test_what_is_left_out_stays_left_out() -> None:
    """Ranges of batches, and the samples that they stood for, whichever ranks go on; and back again."""
    make = KINDS["distributed"]
    whole = Job(make, 2, 4).epoch(0)
    bad = {*whole[6], *whole[7]}
    first = Job(make, 2, 4)
    seen = first.epoch(0, 4)
    for each in first.batches:
        each.skip(6, 2)
    ledger, position, own = first.batches[0].bookkeeping(), first.position, [b.position() for b in first.batches]

    second = Job(make, 1, 3)
    second.batches[0].take_over(json.loads(json.dumps(ledger)))
    second.batches[0].go_to(position)
    rest = second.epoch(0)
    assert not bad & used(rest).keys()
    also = set(DATA) - used(seen).keys() - used(rest).keys() - bad
    assert len(also) <= 2 * 2, "batches of other sizes begin and end elsewhere"
    assert second.told[0]["skipped"] != [[6, 8]]

    third = Job(make, 2, 4)
    for each, place in zip(third.batches, own, strict=True):
        each.take_over(json.loads(json.dumps(second.batches[0].bookkeeping())))
        each.go_to(place)
    assert not third.told, "it is its own again"
    rest = third.epoch(0)
    assert not bad & used(rest).keys()
    assert len(set(DATA) - used(seen).keys() - used(rest).keys() - bad) <= 2 * 8


def test_a_rollback_to_a_place_of_other_ranks_is_divided_anew_as_well() -> None:
    """The older checkpoint is from before the division that this run has begun with."""
    make = KINDS["distributed"]
    first = Job(make, 2, 4)
    seen = first.epoch(0, 2)
    older = first.position
    for _ in first.epoch(0, 3):
        pass
    first.batches[0].go_to(older)
    second = Job(make, 1, 6, first.position)
    (batches,), (loader,) = second.batches, second.loaders
    iterator = batches.over(loader)
    for _ in range(5):
        next(iterator)
    batches.go_to(older)
    seen += [_listed(batch) for batch in iterator]
    assert used(seen) == Counter(range(SIZE))
    assert [told["done"] for told in second.told] == [16, 16]
    assert second.epoch(1) == Job(make, 1, 6).epoch(1)


@pytest.mark.parametrize("by_epoch", [False, True])
def test_a_rest_that_is_left_early_is_followed_by_the_next_epoch(by_epoch: bool) -> None:
    make = KINDS["distributed"]
    first = Job(make, 2, 4)
    first.epoch(0, 2)
    second = Job(make, 1, 6, first.position)
    (batches,), (loader,) = second.batches, second.loaders
    batches.by_epoch = by_epoch
    lasts = []
    for _ in batches.over(loader):
        lasts.append(batches.is_last)
        if len(lasts) == 3:
            break
    assert (batches.number, batches.following_epoch) == (4, 1)
    assert second.epoch(1) == Job(make, 1, 6).epoch(1)
    assert (batches.number, batches.position()["epoch"]["first"]) == (5 + 16, 5)
    assert not any(lasts)
    third = Job(make, 1, 6, first.position)
    third.batches[0].by_epoch = by_epoch
    lasts = [third.batches[0].is_last for _ in third.batches[0].over(third.loaders[0])]
    assert lasts == [False] * 14 + [True], "85 samples, 6 a batch"


class Windows:
    """A token memmap as people cut it: batch k of all ranks is known by its number."""

    def __init__(self, ranks: int, rank: int, rows: int) -> None:
        self.global_batch = ranks * rows
        self._rank, self._rows = rank, rows

    def __len__(self) -> int:
        return SIZE // self.global_batch

    def __getitem__(self, number: int) -> Any:
        if number >= len(self):
            raise IndexError(number)
        first = number * self.global_batch + self._rank * self._rows
        return np.array(DATA[first : first + self._rows])


class OwnLoader(Windows):
    """The same, as a loader with a state: a count of the samples of all ranks."""

    done = 0

    def __iter__(self) -> Iterator[Any]:
        while self.done + self.global_batch <= SIZE:
            first = self.done + self._rank * self._rows
            self.done += self.global_batch
            yield np.array(DATA[first : first + self._rows])
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.done = state["done"]


@pytest.mark.parametrize("kind", [Windows, OwnLoader])
def test_a_loader_of_ones_own_says_how_many_samples_a_batch_has(kind: type[Windows]) -> None:
    def run(ranks: int, rows: int, position: Any = None, count: int | None = None) -> tuple[list[int], Any, Any]:
        seen: list[int] = []
        told: list[dict[str, Any]] = []
        for rank in range(ranks):
            batches = Batches()
            batches.on_recut = told.append
            if position is not None:
                batches.go_to(position)
            loader: Any = kind(ranks, rank, rows)
            seen += [one for batch in islice(batches.over(loader), count) for one in batch.tolist()]
        return seen, json.loads(json.dumps(batches.position())), told

    seen, position, _ = run(2, 5, count=3)
    rest, position, told = run(1, 5, position, count=2)
    seen += rest
    rest, _, _ = run(4, 2, position)
    seen += rest
    assert told[0]["rows"] == [10, 5]
    assert sorted(seen) == DATA[: len(seen)], "of a sequence whole items, and of its end what makes no item stays out"
    assert len(seen) >= SIZE - 8


def test_the_order_must_be_the_one_that_it_was() -> None:
    position = _after(Job(KINDS["distributed"], 2, 4), 3)
    for make, sentence in (
        (
            lambda *_: DataLoader(DATA, 4, sampler=_sampler(DATA, seed=4)),
            "shuffled by seed 3 there, shuffled by seed 4",
        ),
        (lambda *_: DataLoader(DATA[:-1], 4, sampler=_sampler(DATA[:-1])), "samples in an epoch 101 there, 100 in"),
    ):
        with pytest.raises(SourceError, match=sentence):
            Job(make, 1, 4, position).epoch(0)


def test_another_order_of_a_sampler_of_ones_own_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    position = _after(Job(KINDS["own sampler"], 2, 4), 3)
    monkeypatch.setattr(OwnSampler, "global_order", lambda self: DATA)
    with pytest.raises(SourceError, match="epoch 0 begins with other samples in this DataLoader; give the sampler"):
        Job(KINDS["own sampler"], 1, 4, position).epoch(0)


@pytest.mark.parametrize("make", [lambda: [1, 2, 3], lambda: DataLoader(DATA, 4), lambda: StatefulDataLoader(DATA, 4)])
def test_what_does_not_say_how_it_is_divided_is_refused_with_the_cure(make: Callable[[], Any]) -> None:
    batches, loader = Batches(), make()
    next(batches.over(loader))
    position = batches.position()
    position["loader"]["ranks"] = 2
    other = Batches()
    other.go_to(position)
    with pytest.raises(
        RanksChanged, match=r"of 2 ranks, and here is 1: loader=.* does not say .*; start again on 2 ranks, or"
    ) as refused:
        other.over(loader)
    assert refused.value.ranks == 2
    assert refused.value.exit_code == 72


def _sampler(data: Any, seed: int = 3) -> Any:
    return DistributedSampler(data, num_replicas=1, rank=0, seed=seed)


def _after(job: Job, count: int) -> Any:
    job.epoch(0, count)
    return job.position


def test_the_page_runs(tmp_path: Path) -> None:
    """Its loop, and the loaders that it shows: on two ranks, then the rest on one."""
    page = (Path(__file__).parents[2] / "docs" / "elastic.md").read_text()
    loop, *classes = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    shown: dict[str, Any] = {"torch": torch, "numpy": np}
    for each in classes:
        exec(each, shown)  # noqa: S102 - our own page
    np.arange(405, dtype=np.uint16).tofile(tmp_path / "tokens")
    windows = shown["Windows"](tmp_path / "tokens", 4)
    assert len(windows) == SIZE
    lengths = [one % 7 for one in DATA]
    makes: dict[str, Callable[[int, int], Any]] = {
        "Windows": lambda ranks, rank: DataLoader(
            windows, 3, sampler=DistributedSampler(windows, num_replicas=ranks, rank=rank)
        ),
        "ByLength": lambda ranks, rank: DataLoader(DATA, 3, sampler=shown["ByLength"](lengths, ranks, rank)),
        "Shards": lambda ranks, rank: shown["Shards"](np.array(DATA), 3, ranks, rank),
    }
    for name, make in makes.items():
        seen, told = Counter[int](), list[dict[str, Any]]()
        position: Any = None
        for ranks, count in ((2, 5), (1, None)):
            before = position
            for rank in range(ranks):
                batches = Batches()
                batches.on_recut = told.append
                if before is not None:
                    batches.go_to(before)
                for batch in islice(batches.over(make(ranks, rank)), count):
                    seen.update((batch[:, 0] // 4 if name == "Windows" else batch).tolist())
                position = batches.position()
        assert seen + Counter(told[0]["left_out"]) == Counter(DATA[:99] if name == "Shards" else DATA), name

    model = torch.nn.Linear(5, 1)
    loader = makes["Windows"](1, 0)
    shown |= {"model": lambda batch: model(batch.float() / 405).square().mean(), "EPOCHS": 2}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sealegs.Guard(model, optimizer, run=tmp_path / "run", resume=sealegs.Elastic(learning_rate="sqrt")) as guard:
        exec(loop, shown | {"guard": guard, "loader": loader, "sampler": loader.sampler})  # noqa: S102 - our own page
        assert (guard.epoch, guard.number) == (2, 2 * 34)
