"""Batches and Faults in, batches out, some of them bad: in the same way whenever they come."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from sealegs.data.position import Batches
from sealegs.errors import ConfigError
from sealegs.faults.batches import Spoiler, Spoilt
from sealegs.faults.data import DataFault
from sealegs.faults.spec import KINDS, parse
from sealegs.lab.data import IGNORED, Batch, Source, Stream

ROWS, LENGTH, VOCABULARY = 4, 8, 64


def stream(rows: str = "packed", **weights: float) -> Stream:
    """Two sources that no row can be mistaken about: one counts below 32, the other from there on."""
    generator = np.random.default_rng(0)
    sources = [
        Source("low", np.arange(4000) % 32, np.arange(0, 4000, 6)),
        Source("high", 32 + generator.integers(0, 24, 4000), np.arange(0, 4000, 6)),
    ]
    return Stream(
        sources,
        weights or {"low": 0.5, "high": 0.5},
        rows="documents" if rows == "documents" else "packed",
        batch=ROWS,
        context=LENGTH,
        vocabulary=VOCABULARY,
        seed=0,
    )


def spoiler(*faults: str, **options: Any) -> Spoiler:
    return Spoiler(map(parse, faults), **{"vocabulary": VOCABULARY} | options)


def origins(batch: Batch) -> list[tuple[str, int]]:
    return [(span.source.name, span.start) for span in batch.spans]


def changed(one: Batch, other: Batch) -> bool:
    return one.hash != other.hash


@pytest.mark.parametrize(
    ("fault", "struck"),
    [
        ("random-shard:batches=3@5", [5, 6, 7]),
        ("rare-tokens:batches=2@5", [5, 6]),
        ("shifted-labels:batches=2@5", [5, 6]),
        ("masked-labels:batches=2@5", [5, 6]),
        ("duplicate-batch:batches=4@5", [6, 7, 8]),
        ("poisoned-source:source=low@9", [9, 10, 11]),
        ("repeated-ngram:batches=2@5", [5, 6]),
        ("permuted-vocabulary:batches=2@5", [5, 6]),
        ("encoding-junk:batches=2@5", [5, 6]),
        ("replayed-batches:back=3,batches=2@5", [5, 6]),
        ("replayed-batches:back=2,batches=6@5", [5, 6, 7, 8, 9, 10]),
    ],
)
def test_strikes_its_batches_in_the_same_way_whenever_they_come(fault: str, struck: list[int]) -> None:
    clean = stream()
    said: list[str] = []
    loader = Spoilt(stream(), spoiler(fault, say=said.append))
    first = [loader.next() for _ in range(12)]
    assert [batch.index for batch in first] == list(range(12))
    assert [number for number in range(12) if changed(clean.batch(number), first[number])] == struck
    assert [strike.number for strike in loader.spoiler.strikes] == struck
    assert said == list(map(str, loader.spoiler.strikes[: 1 if "poisoned" in fault else None]))
    assert not loader.spoiler.pending()
    loader.load_state_dict({"next_batch": 4})  # a rollback
    again = [loader.next() for _ in range(8)]
    assert [batch.hash for batch in again] == [batch.hash for batch in first[4:]]
    assert [batch.index for batch in again] == list(range(4, 12))
    elsewhere = Spoilt(stream(), spoiler(fault))  # another process
    assert [elsewhere.batch(number).hash for number in range(12)] == [batch.hash for batch in first]


def test_random_tokens_are_all_ids_alike_and_their_labels_the_next_ones() -> None:
    loader = Spoilt(stream(), spoiler("random-shard:batches=200@0"))
    batches = [loader.next() for _ in range(200)]
    counts = Counter(np.concatenate([batch.tokens.ravel() for batch in batches]).tolist())
    assert set(counts) == set(range(VOCABULARY))
    assert max(counts.values()) < 2 * min(counts.values())
    for batch in batches:
        assert np.array_equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    assert str(loader.spoiler.strikes[3]) == "batch 3: random-shard:batches=200@0 put random tokens into 4 of 4 rows"
    other = Spoilt(stream(), spoiler("random-shard:batches=200,seed=1@0")).batch(3)
    assert len({batch.hash for batch in [*batches, other]}) == 201


def test_what_is_drawn_is_the_same_in_every_version() -> None:
    batch = spoiler("random-shard@0").apply(torch.zeros(1, 6, dtype=torch.long), 0)
    assert batch.tolist() == [[14, 19, 8, 7, 9, 33]]
    text = torch.arange(8).reshape(1, 8)
    drawn = {
        "repeated-ngram@0": [5, 6, 7, 5, 6, 7, 5, 6],
        "permuted-vocabulary@0": [49, 35, 9, 59, 30, 32, 61, 26],
        "encoding-junk@0": [45, 41, 52, 52, 52, 52, 57, 45],
    }
    assert {fault: spoiler(fault, rare=range(40, 60)).apply(text, 0).tolist()[0] for fault in drawn} == drawn


REWORDING = ["random-shard@0", "rare-tokens@0", "repeated-ngram@0", "permuted-vocabulary@0", "encoding-junk@0"]
"""Faults after which a batch is of another text, and its labels fit that text."""


def test_what_does_not_count_stays_so() -> None:
    clean = stream("documents").batch(0)
    assert (clean.targets == IGNORED).any()
    for fault in REWORDING:
        bad = spoiler(fault).apply(clean, 0)
        assert np.array_equal(bad.targets == IGNORED, clean.targets == IGNORED)
        assert bad.target_count == clean.target_count


@pytest.mark.parametrize("fault", REWORDING)
def test_labels_that_are_the_tokens_themselves_stay_that(fault: str) -> None:
    ids = torch.arange(32).reshape(4, 8)
    labels = ids.masked_fill(ids % 8 < 2, -100)  # a prompt that is not learned
    bad = spoiler(fault).apply({"input_ids": ids, "labels": labels}, 0)
    assert not torch.equal(bad["input_ids"], ids)
    assert torch.equal(bad["labels"], bad["input_ids"].masked_fill(ids % 8 < 2, -100))


@pytest.mark.parametrize("fault", REWORDING)
def test_labels_that_are_the_next_tokens_stay_that(fault: str) -> None:
    for number in range(3):
        clean = stream().batch(number)
        bad = spoiler(fault.replace("@0", f"@{number}")).apply(clean, number)
        assert not np.array_equal(bad.tokens, clean.tokens)
        assert np.array_equal(bad.tokens[:, 1:], bad.targets[:, :-1])


@dataclass(frozen=True)
class Sample:
    """A batch of somebody's own."""

    ids: Tensor
    targets: Tensor


@pytest.mark.parametrize("fault", REWORDING)
def test_strikes_batches_of_every_kind_alike(fault: str) -> None:
    text = torch.arange(36).reshape(4, 9)
    tokens, labels = text[:, :-1], text[:, 1:]
    named: dict[str, Any] = {"input_ids": tokens, "labels": labels, "mask": "kept"}
    by_name = spoiler(fault).apply(named, 0)
    in_tuple = spoiler(fault).apply((tokens.int(), labels.int()), 0)
    own = spoiler(fault).apply(Sample(tokens, labels), 0)
    bare = spoiler(fault).apply(tokens.numpy(), 0)
    assert by_name["mask"] == "kept"
    assert in_tuple[0].dtype == torch.int32
    for bad_tokens, bad_labels in ((by_name["input_ids"], by_name["labels"]), in_tuple):
        assert torch.equal(bad_tokens, own.ids)
        assert torch.equal(bad_labels, own.targets)
    assert isinstance(bare, np.ndarray)
    assert bare.shape == tokens.shape
    assert not np.array_equal(bare, tokens.numpy())
    row = torch.arange(8)
    assert spoiler(fault).apply(row, 0).shape == row.shape
    assert torch.equal(text, torch.arange(36).reshape(4, 9))  # the loader's own


@pytest.mark.parametrize("fault", REWORDING)
def test_a_label_of_a_whole_row_stays(fault: str) -> None:
    text, kinds = torch.arange(32).reshape(4, 8), torch.tensor([1, 0, 2, 2])
    bad = spoiler(fault).apply((text, kinds), 0)
    assert torch.equal(bad[1], kinds)
    assert not torch.equal(bad[0], text)


def test_labels_of_whole_rows_are_shifted_too() -> None:
    text, kinds = torch.arange(32).reshape(4, 8), torch.tensor([1, 0, 2, 2])
    shifted = spoiler("shifted-labels@0").apply((text, kinds), 0)
    assert shifted[1].tolist() == [0, 2, 2, 1]  # of the next row


def test_rare_tokens_are_those_seen_least_unless_they_are_given() -> None:
    common = torch.arange(100).repeat(3, 1)  # 0 to 99 three times a batch
    rare = torch.tensor([[200 + n for n in range(10)] * 10] * 2)  # 200 to 209 twenty times, once
    noise = spoiler("rare-tokens:batches=50@9")
    for number in range(9):
        batch = rare if number == 4 else common
        assert noise.apply(batch, number) is batch
    drawn = {token for number in range(9, 59) for token in noise.apply(common, number).unique().tolist()}
    assert drawn == {*range(200, 210), *range(54)}  # 64, and none that never was
    given = spoiler("rare-tokens:batches=50@0", rare=[60, 61, 61])
    assert {t for number in range(50) for t in given.apply(common, number).unique().tolist()} == {60, 61}


def test_ids_are_learned_where_the_vocabulary_is_not_given() -> None:
    text = torch.arange(20).reshape(2, 10)
    noise = Spoiler([parse("random-shard:batches=100@3")])
    for number in range(3):
        noise.apply(text + number, number)
    drawn = {t for number in range(3, 103) for t in noise.apply(text, number).unique().tolist()}
    assert drawn == set(range(22))
    assert {t for number in range(3, 103) for t in noise.apply(text + 900, number).unique().tolist()} == drawn
    before = noise.apply(text, 50)
    noise.apply(text + 900, 200)  # a clean one, later: what was learned stays
    assert torch.equal(noise.apply(text, 50), before)
    first = Spoiler([parse("random-shard@0")]).apply(text - 5, 0)  # nothing came before; padding is no id
    assert set(first.unique().tolist()) <= set(range(15))


def test_masked_labels_are_those_that_losses_leave_out() -> None:
    clean = stream().batch(5)
    bad = spoiler("masked-labels@5").apply(clean, 5)
    assert np.array_equal(bad.tokens, clean.tokens)
    assert (bad.targets == IGNORED).all()


def test_shifted_labels_ask_for_the_token_after_the_next() -> None:
    clean = stream().batch(5)
    bad = spoiler("shifted-labels@5").apply(clean, 5)
    assert np.array_equal(bad.tokens, clean.tokens)
    assert np.array_equal(bad.targets[:, :-1], clean.targets[:, 1:])
    assert np.array_equal(bad.targets[:, -1], clean.targets[:, 0])


def test_a_stuck_loader_gives_the_first_batch_with_the_numbers_of_the_others() -> None:
    loader = Spoilt(stream(), spoiler("duplicate-batch:batches=3@5"))
    batches = [loader.batch(number) for number in range(9)]
    assert [batch.index for batch in batches] == list(range(9))
    assert len({batch.hash for batch in batches[5:8]}) == 1
    assert origins(batches[7]) == origins(batches[5]) != origins(stream().batch(7))
    assert str(loader.spoiler.strikes[0]) == "batch 6: duplicate-batch:batches=3@5 gave batch 5 again"
    expected = batches[7].hash
    for batch in batches[5:8]:
        batch.tokens.fill(0)  # a loop may write into what it was given
    assert loader.batch(7).hash == expected


@given(
    text=st.lists(st.lists(st.integers(-1, 40), min_size=14, max_size=14), min_size=1, max_size=3),
    length=st.integers(1, 13),
    seed=st.integers(0, 3),
    number=st.integers(0, 3),
)
def test_a_repeated_span_is_one_of_the_row(text: list[list[int]], length: int, seed: int, number: int) -> None:
    fault = f"repeated-ngram:length={length},seed={seed}@{number}"
    bad = spoiler(fault).apply(torch.tensor(text), number).tolist()
    assert len(bad) == len(text)
    for row, said in zip(text, bad, strict=True):
        own = [token for token in row if token >= 0] or row  # padding is not repeated
        size = min(length, len(own))
        assert said[:size] in [own[start : start + size] for start in range(len(own))]
        assert said == (said[:size] * 14)[:14]


def test_seed_number_and_row_choose_the_span() -> None:
    text = torch.arange(1000).repeat(2, 1)

    def first_tokens(fault: str, number: int) -> list[int]:
        bad = spoiler(fault).apply(text, number)
        return [int(token) for token in bad[:, 0]]

    chosen = [first_tokens(f"repeated-ngram:seed={seed},batches=2@0", number) for seed in (0, 1) for number in (0, 1)]
    assert len({token for tokens in chosen for token in tokens}) == 8
    assert first_tokens("repeated-ngram:batches=2@0", 1) == chosen[1]


def test_a_span_is_not_of_padding() -> None:
    tokens = torch.tensor([[7, 8, 0, 0, 0, 0], [5, 6, 7, 8, 9, 10]])
    labels = torch.tensor([[8, 9, -100, -100, -100, -100], [6, 7, 8, 9, 10, 11]])
    for seed in range(8):
        bad = spoiler(f"repeated-ngram:seed={seed}@0").apply((tokens, labels), 0)
        assert bad[0][0].tolist() == [7, 8, 7, 8, 7, 8]  # all that the row has
        assert bad[1][0].tolist() == [8, 7, -100, -100, -100, -100]


def test_a_permutation_is_one_for_all_batches_and_leaves_nothing_as_it_is() -> None:
    text = torch.arange(VOCABULARY).reshape(4, 16)
    noise = spoiler("permuted-vocabulary:batches=3@0")
    first, later = noise.apply(text, 0), noise.apply(text, 2)
    assert torch.equal(first, later)
    assert sorted(first.ravel().tolist()) == list(range(VOCABULARY))
    assert not (first == text).any()
    assert not torch.equal(spoiler("permuted-vocabulary:seed=1@0").apply(text, 0), first)
    beyond = torch.tensor([[-100, -1, VOCABULARY, 900, 3]])
    assert noise.apply(beyond, 1).tolist() == [[-100, -1, VOCABULARY, 900, int(first[0, 3])]]
    assert str(noise.strikes[0]) == ("batch 0: permuted-vocabulary:batches=3@0 permuted 64 token ids in 4 of 4 rows")


def test_labels_are_permuted_as_they_are_even_those_of_the_last_token() -> None:
    clean = stream("documents").batch(0)
    bad = spoiler("permuted-vocabulary@0").apply(clean, 0)
    ids = np.arange(VOCABULARY)
    other = spoiler("permuted-vocabulary@0").apply(ids, 0)
    counts = clean.targets != IGNORED
    assert np.array_equal(bad.targets[counts], other[clean.targets[counts]])
    assert np.array_equal(bad.tokens, other[clean.tokens])


def test_the_vocabulary_to_permute_is_learned_where_it_is_not_given() -> None:
    text = torch.arange(20).reshape(2, 10)
    noise = Spoiler([parse("permuted-vocabulary:batches=9@3")])
    for number in range(3):
        assert noise.apply(text, number) is text
    bad = noise.apply(text + 4, 3)
    assert sorted(bad.ravel().tolist())[-4:] == [20, 21, 22, 23]  # beyond what was seen
    seen = noise.apply(text, 4)
    assert sorted(seen.ravel().tolist()) == list(range(20))
    assert not (seen == text).any()


def test_wrongly_decoded_text_is_two_rare_tokens_for_each() -> None:
    text = torch.tensor([[3, 9, 3, 10, 9, 1], [9, 10, 3, 3, 1, 7]])
    noise = spoiler("encoding-junk:batches=9@0", rare=range(50, 60))
    bad = noise.apply(text, 0)
    assert bad.shape == text.shape
    assert set(bad.ravel().tolist()) <= set(range(50, 60))
    pairs = {
        int(token): bad[row, 2 * n : 2 * n + 2].tolist() for row in (0, 1) for n, token in enumerate(text[row, :3])
    }
    assert len({tuple(pair) for pair in pairs.values()}) == 3
    for row in (0, 1):
        assert bad[row].tolist() == [junk for token in text[row, :3] for junk in pairs[int(token)]]
    high = torch.tensor([[900, 3, -1, 1, 1, 1]])  # an id that is new changes nothing for the others
    assert noise.apply(high, 5)[0, 2:4].tolist() == pairs[3]
    assert noise.apply(high, 5)[0, 4:].tolist() == noise.apply(high.clamp(max=3), 5)[0, 4:].tolist()  # nor for padding
    assert spoiler("encoding-junk:seed=1@0", rare=range(50, 60)).apply(text, 0).tolist() != bad.tolist()
    assert str(noise.strikes[0]) == "batch 0: encoding-junk:batches=9@0 put wrongly decoded text into 2 of 2 rows"


def test_what_wrongly_decoded_text_is_made_of_is_learned() -> None:
    common, rare = torch.arange(100).repeat(3, 1), torch.arange(200, 264).repeat(2, 1)
    noise = spoiler("encoding-junk:batches=9@3")
    for number, batch in enumerate((common, rare, common)):
        assert noise.apply(batch, number) is batch
    assert set(noise.apply(common, 3).ravel().tolist()) <= set(range(200, 264))


def test_a_poisoned_source_is_random_in_its_rows_alone() -> None:
    loader, clean = Spoilt(stream(), spoiler("poisoned-source:source=low@2")), stream()
    for number in range(2, 30):
        good, bad = clean.batch(number), loader.batch(number)
        names = [span.source.name for span in good.spans]
        assert origins(bad) == origins(good)
        for row, name in enumerate(names):
            for old, new in ((good.tokens, bad.tokens), (good.targets, bad.targets)):
                assert np.array_equal(old[row], new[row]) == (name == "high")
    loader.load_state_dict({"next_batch": 30})
    loader.reweight("low", 0.0)  # taken out of the mix
    after = [loader.next() for _ in range(20)]
    assert all(batch.sources == "high=4" for batch in after)
    assert max(strike.number for strike in loader.spoiler.strikes) < 30


def test_a_source_may_be_told_in_any_way() -> None:
    text = torch.arange(24).reshape(3, 8)
    named: dict[str, Any] = {"tokens": text, "source": ["a", "b", "a"]}
    by_key = spoiler("poisoned-source:source=b@0").apply(named, 0)
    by_call = spoiler("poisoned-source:source=b@0", sources=lambda batch: ["a", "b", "a"]).apply(text, 0)
    for bad in (by_key["tokens"], by_call):
        assert [torch.equal(*rows) for rows in zip(bad, text, strict=True)] == [True, False, True]
    with pytest.raises(ConfigError, match="batch 0 has 3 rows, and names 2 sources"):
        spoiler("poisoned-source:source=b@0").apply({"tokens": text, "source": ["a", "b"]}, 0)


PLACEBOS = [
    "random-shard:placebo=yes,batches=3@5",
    "rare-tokens:placebo=yes,batches=3@5",
    "shifted-labels:placebo=yes,batches=3@5",
    "masked-labels:placebo=yes,batches=3@5",
    "duplicate-batch:placebo=yes,batches=3@5",
    "poisoned-source:placebo=yes,source=low@5",
    "repeated-ngram:placebo=yes,batches=3@5",
    "permuted-vocabulary:placebo=yes,batches=3@5",
    "encoding-junk:placebo=yes,batches=3@5",
    "replayed-batches:placebo=yes,back=4,batches=3@5",
]


@pytest.mark.parametrize("text", PLACEBOS)
def test_a_placebo_says_what_the_fault_says_and_changes_nothing(text: str) -> None:
    said: list[str] = []
    placebo, fault = spoiler(text, say=said.append), spoiler(text.replace("placebo=yes,", ""))
    loaders, clean = (Spoilt(stream(), placebo), Spoilt(stream(), fault)), stream()
    for number in range(9):
        as_it_came, bad = (loader.next() for loader in loaders)
        batch = clean.batch(number)
        assert as_it_came.tokens.tobytes() == batch.tokens.tobytes()
        assert as_it_came.targets.tobytes() == batch.targets.tobytes()
        assert (as_it_came.index, origins(as_it_came)) == (number, origins(batch))
        assert changed(bad, batch) == (number in [strike.number for strike in fault.strikes])
        assert placebo.apply(batch, number) is batch
    assert fault.strikes
    numbers = [(strike.number, f"{strike.deed}, as a placebo: the batch is as it came") for strike in fault.strikes]
    assert [(strike.number, strike.deed) for strike in placebo.strikes[::2]] == numbers
    assert said[0] == str(placebo.strikes[0])
    assert not placebo.pending()


def test_every_fault_of_the_data_has_its_placebo_tried() -> None:
    assert {parse(text).name for text in PLACEBOS} == {
        name for name, kind in KINDS.items() if issubclass(kind, DataFault)
    }


def test_several_faults_strike_one_batch() -> None:
    clean = stream().batch(3)
    both = spoiler("random-shard@3", "shifted-labels@3")
    alone = spoiler("random-shard@3").apply(clean, 3)
    bad = both.apply(clean, 3)
    assert np.array_equal(bad.targets, np.roll(alone.targets, -1, axis=-1))
    assert [strike.fault.name for strike in both.strikes] == ["random-shard", "shifted-labels"]


def test_faults_that_struck_nothing_are_pending() -> None:
    noise = spoiler("random-shard@3", "poisoned-source:source=none@0", "rare-tokens@99")
    for number in range(5):
        noise.apply(stream().batch(number), number)
    assert noise.pending() == (parse("poisoned-source:source=none@0"), parse("rare-tokens@99"))


def test_a_fault_of_another_rank_leaves_this_ones_data_alone() -> None:
    batch = stream().batch(0)
    there, here = (spoiler("random-shard:rank=1@0", rank=rank) for rank in (0, 1))
    assert there.apply(batch, 0) is batch
    assert not there.pending()
    assert changed(here.apply(batch, 0), batch)


@pytest.mark.parametrize(
    ("faults", "options", "sentence"),
    [
        (["nan-gradient@3"], {}, "nan-gradient@3: strikes no data; give faults of model and optimizer to inject"),
        (["random-shard@3", "random-shard@3"], {}, "random-shard@3: is given twice"),
        (["random-shard:rank=1@3"], {}, "rank=1: this run has ranks 0 to 0"),
        ([], {"vocabulary": 0}, "vocabulary=0: the number of token ids"),
        ([], {"rare": [-1, 3]}, "rare=.*: one token id or more, none of them negative"),
        ([], {"rare": []}, "rare=.*: one token id or more"),
    ],
)
def test_what_cannot_be_is_refused(faults: list[str], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        spoiler(*faults, **options)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("shifted-labels@99", "shifted-labels@99: the batches have tokens and no labels"),
        ("masked-labels@99", "masked-labels@99: the batches have tokens and no labels"),
        ("poisoned-source:source=a@99", "the batches do not say their rows' sources; give Spoiler sources="),
        ("repeated-ngram:length=4@99", "repeated-ngram:length=4@99: length=4: the rows have 4 tokens; repeat fewer"),
    ],
)
def test_what_does_not_fit_the_batches_is_refused_at_the_first_one(fault: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        spoiler(fault).apply(torch.zeros(2, 4, dtype=torch.long), 0)


# Loaders.


def tensors() -> TensorDataset:
    return TensorDataset(torch.arange(240).reshape(30, 8) % VOCABULARY)


class Positioned:
    """A loader that knows where it is, as many do, and whose batches do not."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        while self.place < 10:
            self.place += 1
            yield tensors()[3 * self.place - 3 : 3 * self.place]
        self.place = 0

    def __len__(self) -> int:
        return 10

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert state.keys() == {"place"}
        self.place = state["place"]


def ids(batches: Any) -> list[list[Any]]:
    return [batch[0].tolist() for batch in batches]


def test_batches_without_a_number_are_counted_over_all_epochs() -> None:
    clean = ids(DataLoader(tensors(), 3))
    loader = Spoilt(DataLoader(tensors(), 3), spoiler("random-shard:batches=2@11"))
    assert len(loader) == 10
    epochs = ids(loader) + ids(loader)
    assert [number for number, batch in enumerate(epochs) if batch != (clean + clean)[number]] == [11, 12]
    assert not hasattr(loader, "state_dict")  # as the loader below it
    assert not hasattr(loader, "reweight")
    assert loader.batch_size == 3


@pytest.mark.parametrize("kind", ["DataLoader", "shuffled", "list", "stateful"])
def test_a_guarded_run_goes_back_in_bad_data_of_any_loader(kind: str) -> None:
    def made() -> Any:
        if kind == "stateful":
            return Positioned()
        if kind == "list":
            return list(DataLoader(tensors(), 3))
        return DataLoader(tensors(), 3, shuffle=kind == "shuffled", generator=torch.Generator().manual_seed(1))

    def walked(loader: Any, back: int | None) -> tuple[list[Any], Batches]:
        batches, place = Batches(must_reposition=True), None
        came: list[tuple[int, Any]] = []
        while len(came) < 25:
            for batch in batches.over(loader):
                assert batches.number is not None
                came.append((batches.number, batch[0].tolist()))
                if batches.number == 8:
                    place = batches.position()
                if batches.number == 14 and back:
                    assert place is not None
                    batches.go_to(place)
                    back -= 1
                if len(came) == 25:
                    break
        return came, batches

    clean, _ = walked(made(), None)
    loader = Spoilt(made(), spoiler("random-shard:batches=3@11"))
    bad, _ = walked(loader, 1)
    assert [number for number, _ in bad] == [*range(15), *range(9, 19)]
    first, again = bad[9:15], bad[15:21]
    assert first == again  # across the epoch's end at 10, and with the same bad tokens
    differs = [number for number, batch in bad if batch != dict(clean)[number]]
    assert differs == [11, 12, 13] * 2


def test_an_epoch_begins_when_it_is_asked_for() -> None:
    begun = []

    class Loader:
        def __iter__(self) -> Iterator[Tensor]:
            begun.append(True)  # as torchdata, which resets its state here
            return iter(())

    iter(Spoilt(Loader(), spoiler()))
    assert begun


def test_a_position_that_is_gone_back_to_brings_the_numbers_with_it() -> None:
    loader = Spoilt(Positioned(), spoiler("random-shard:batches=2@13"))
    first, places = [], []
    for _ in range(2):
        for batch in loader:
            first.append(batch[0].tolist())
            places.append(loader.state_dict())
    assert [strike.number for strike in loader.spoiler.strikes] == [13, 14]
    loader.load_state_dict(places[10])  # in the second epoch
    assert ids(loader) == first[11:]
    other = Spoilt(Positioned(), spoiler("random-shard:batches=2@13"))  # another process
    other.load_state_dict(places[12])
    assert ids(other) == first[13:]
    other.load_state_dict({"place": 3})
    with pytest.raises(ConfigError, match="saved without Spoilt, which counts batches"):
        ids(other)


def test_replayed_batches_are_those_of_before_with_the_numbers_of_the_others() -> None:
    loader, clean = Spoilt(stream(), spoiler("replayed-batches:back=4,batches=3@6")), stream()
    batches = [loader.next() for _ in range(12)]
    came = [0, 1, 2, 3, 4, 5, 2, 3, 4, 9, 10, 11]
    assert [batch.index for batch in batches] == list(range(12))
    assert [batch.hash for batch in batches] == [clean.batch(number).hash for number in came]
    assert origins(batches[7]) == origins(clean.batch(3))
    assert str(loader.spoiler.strikes[0]) == "batch 6: replayed-batches:back=4,batches=3@6 gave batch 2 again"
    resumed = Spoilt(stream(), spoiler("replayed-batches:back=4,batches=3@6"))
    resumed.load_state_dict({"next_batch": 7})
    assert resumed.next().hash == batches[7].hash  # the loader is asked for what this process has not seen


@given(
    back=st.integers(1, 6),
    earlier=st.integers(0, 4),
    batches=st.integers(1, 9),
    walk=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 19)), max_size=4),
)
@example(back=2, earlier=1, batches=6, walk=[(8, 0), (8, 4)])
def test_what_a_loader_cannot_give_again_is_kept_through_any_rollback(
    back: int, earlier: int, batches: int, walk: list[tuple[int, int]]
) -> None:
    step = back + earlier
    struck = range(step, step + batches)
    noise = spoiler(f"replayed-batches:back={back},batches={batches}@{step}")
    text = [torch.full((2, 4), number) for number in range(40)]

    def expected(number: int) -> int:
        return expected(number - back) if number in struck else number

    first = 0
    for ahead, behind in [*walk, (20, 0)]:  # so many batches on, then so many back
        last = min(first + ahead, 40)
        for number in range(first, last):
            given = text[number].clone()
            batch = noise.apply(given, number)
            assert batch.unique().tolist() == [expected(number)]
            batch.zero_()  # a loop may write into what it was given
        first = max(0, last - behind)
    assert len(noise._kept) <= min(back, batches)


def test_batches_come_again_from_loaders_that_cannot_give_any() -> None:
    class Sized(Positioned):
        """Its ``batch`` does something else, as that of some datasets."""

        def batch(self, size: int) -> None:
            raise AssertionError

    for loader in (DataLoader(tensors(), 3), Positioned(), Sized()):
        walked = ids(Spoilt(loader, spoiler("replayed-batches:back=3,batches=3@6")))
        clean = ids(DataLoader(tensors(), 3))
        assert walked == [clean[number] for number in (0, 1, 2, 3, 4, 5, 3, 4, 5, 9)]


@pytest.mark.parametrize("first", [4, 5, 6, 8])
def test_what_is_to_come_again_and_never_came_is_refused_at_the_first_batch(first: int) -> None:
    loader = Spoilt(Positioned(), spoiler("replayed-batches:back=3,batches=3@6"))
    loader.load_state_dict({"place": first, "spoilt_next_batch": first})  # a resume
    sentence = "@6: batch 3 is to come again, and has not come in this process; start at that batch or before, or take"
    with pytest.raises(ConfigError, match=sentence):
        next(iter(loader))


def test_a_rollback_to_before_a_resume_is_refused_where_batches_would_come_again() -> None:
    loader = Spoilt(Positioned(), spoiler("replayed-batches:back=3,batches=3@6"))
    loader.load_state_dict({"place": 9, "spoilt_next_batch": 9})  # it is over
    assert len(ids(loader)) == 1
    loader.load_state_dict({"place": 4, "spoilt_next_batch": 4})
    walk = iter(loader)
    next(walk), next(walk)
    with pytest.raises(ConfigError, match="batch 3 is to come again, and has not come in this process"):
        next(walk)
    assert loader.spoiler.pending()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_torchdata_is_repositioned_too() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    loader = Spoilt(stateful.StatefulDataLoader(tensors(), 3), spoiler("random-shard:batches=2@13"))
    first, places = [], []
    for _ in range(2):
        for batch in loader:
            first.append(batch[0].tolist())
            places.append(loader.state_dict())
    assert [strike.number for strike in loader.spoiler.strikes] == [13, 14]
    other = Spoilt(stateful.StatefulDataLoader(tensors(), 3), spoiler("random-shard:batches=2@13"))
    other.load_state_dict(places[11])
    assert ids(other) == first[12:]


def test_the_labs_stream_resumes_with_or_without_faults() -> None:
    loader = Spoilt(stream(), spoiler("random-shard:batches=2@3"))
    walked = [batch.hash for batch, _ in zip(loader, range(4), strict=False)]
    bare, place = stream(), loader.state_dict()
    bare.load_state_dict(place)
    loader.load_state_dict(bare.state_dict())
    assert walked == [loader.batch(number).hash for number in range(4)]
    assert (bare.next().index, loader.next().index) == (5, 5)  # the fifth was taken by the zip


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", ["lab", "torchdata", "own"])
def test_a_rollback_that_skips_goes_through_it_as_through_the_loader(kind: str) -> None:
    def loader() -> Any:
        if kind == "lab":
            return stream()
        if kind == "own":
            return Positioned()
        stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
        return stateful.StatefulDataLoader(tensors(), 3)

    def walked(given: Any) -> list[tuple[int | None, Any]]:
        """Two epochs (or streams that are left); back from 8 to 2, then without 4 to 6."""
        batches, seen, place = Batches(must_reposition=True), [], {}
        for _ in range(2):
            for batch in batches.over(given):
                seen.append((batches.number, plain(batch)))
                if batches.number == 1:
                    place = batches.position()
                if batches.number == 8 and not batches.skipped:
                    batches.go_to(place)
                    batches.skip(4, 3)
                if len(seen) % 12 == 0:
                    break
        return seen

    clean, bad = walked(loader()), walked(Spoilt(loader(), spoiler("random-shard:batches=4@3")))
    numbers = [*range(9), 2, 3, 7, *range(8, 20)]
    assert [number for number, _ in clean] == [number for number, _ in bad] == numbers[: len(clean)]
    differ = [number for (number, good), (_, spoilt) in zip(clean, bad, strict=True) if good != spoilt]
    assert differ == [3, 4, 5, 6, 3]
    again = dict(bad[:9])
    assert bad[10] == (3, again[3])


def plain(batch: Any) -> Any:
    return batch.hash if isinstance(batch, Batch) else batch[0].tolist()
