"""Token arrays in, batches out."""

import hashlib
import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealegs.batching.exclusions import LeftOut
from sealegs.errors import ConfigError, SourceError
from sealegs.lab.data import IGNORED, Batch, Source, Stream, apportion


def source(name: str = "a", documents: int = 30, length: int = 7, first_token: int = 1) -> Source:
    """Documents of equal length, each made of its own token, ended by 0."""
    tokens = np.repeat(np.arange(first_token, first_token + documents), length)
    tokens[length - 1 :: length] = 0
    return Source(name, tokens.astype(np.uint16), np.arange(documents) * length)


def stream(
    *sources: Source,
    rows: str = "packed",
    seed: int = 3,
    batch: int = 4,
    is_stratified: bool = False,
    left_out: dict[str, LeftOut] | None = None,
    **weights: float,
) -> Stream:
    return Stream(
        sources,
        weights or {each.name: 1.0 for each in sources},
        rows=rows,  # type: ignore[arg-type]
        batch=batch,
        context=6,
        vocabulary=512,
        seed=seed,
        is_stratified=is_stratified,
        left_out=left_out,
    )


def documents_of(batch: Batch) -> list[int]:
    return [document for span in batch.spans for document in span.documents]


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=512))
def test_shares_add_up_and_none_is_nothing(weights: list[float]) -> None:
    shares = apportion(weights, 1024)
    assert sum(shares) == 1024
    assert min(shares) >= 1


@pytest.mark.parametrize("rows", ["packed", "documents"])
def test_every_epoch_reads_every_window_once(rows: str) -> None:
    subject = stream(source(documents=32), rows=rows)
    windows = 32 if rows == "documents" else (32 * 7 - 1) // 6
    read = [(span.start, span.end) for index in range(3 * windows // 4) for span in subject.batch(index).spans]
    for epoch in range(2):
        assert len(set(read[epoch * windows : (epoch + 1) * windows])) == windows
    assert read[:windows] != read[windows : 2 * windows]


def test_a_stream_resumes_at_any_batch() -> None:
    whole = stream(source("a"), source("b"), a=0.7, b=0.3)
    expected = [whole.next().hash for _ in range(700)]
    assert len(set(expected)) > 600
    for start in (0, 1, 255, 256, 257, 699):
        other = stream(source("a"), source("b"), a=0.7, b=0.3)
        other.load_state_dict({"next_batch": start})
        assert other.next().hash == expected[start]
        assert other.state_dict() == {"next_batch": start + 1}


def test_weights_are_met_exactly_over_a_cycle() -> None:
    subject = stream(source("a"), source("b"), source("c"), a=2.0, b=1.0, c=1.0)
    rows = Counter(span.source.name for index in range(256) for span in subject.batch(index).spans)
    assert rows == {"a": 512, "b": 256, "c": 256}


def test_packed_rows_are_windows_of_the_running_text() -> None:
    subject = stream(source())
    batch = subject.batch(0)
    assert batch.tokens.shape == batch.targets.shape == (4, 6)
    for row, span in enumerate(batch.spans):
        assert batch.tokens[row].tolist() == span.source.tokens[span.start : span.end - 1].tolist()
        assert batch.targets[row].tolist() == span.source.tokens[span.start + 1 : span.end].tolist()
    assert batch.target_count == 24
    assert batch.sources == "a=4"


def test_a_row_knows_its_documents() -> None:
    batch = stream(source(documents=40)).batch(2)
    for row, span in enumerate(batch.spans):
        seen = {int(token) - 1 for token in [*batch.tokens[row], batch.targets[row, -1]] if token}
        assert seen <= set(span.documents)


def test_document_rows_are_padded_or_cut() -> None:
    short, long = source("s", length=4), source("l", length=20)
    batch = stream(short, rows="documents").batch(0)
    assert (batch.tokens[:, 3:] == 0).all()
    assert (batch.targets[:, 3:] == IGNORED).all()
    assert batch.target_count == 4 * 3
    assert len(set(documents_of(batch))) == 4
    assert stream(long, rows="documents").batch(0).target_count == 4 * 6


def test_equal_content_has_an_equal_hash_and_other_content_another() -> None:
    subject = stream(source(documents=8), rows="documents", batch=8)
    first, again = subject.batch(0), subject.batch(0)
    assert first.hash == again.hash
    hashes = {subject.batch(index).hash for index in range(20)}
    assert len(hashes) == 20


def test_the_seed_chooses_the_order() -> None:
    assert stream(source(), seed=1).batch(0).hash != stream(source(), seed=2).batch(0).hash


@given(st.integers(2, 60), st.floats(0.01, 0.9))
def test_a_split_loses_nothing_and_mixes_nothing(documents: int, held_out: float) -> None:
    whole = source(documents=documents)
    training, held = whole.split(held_out)
    assert np.array_equal(np.concatenate([training.tokens, held.tokens]), whole.tokens)
    assert len(training.starts) + len(held.starts) == documents
    assert len(held.starts) >= 1
    assert not set(training.tokens.tolist()) & set(held.tokens.tolist()) - {0}


def test_bare_tokens_are_split_too() -> None:
    training, held = Source("bare", np.arange(100), np.zeros(1, np.int64)).split(0.1)
    assert (len(training.tokens), len(held.tokens)) == (90, 10)
    assert held.starts.tolist() == [0]


def test_too_little_data_is_refused_in_a_sentence() -> None:
    with pytest.raises(
        SourceError, match=r"a: a part of 6 tokens in 1 documents, too few for one row of model.context=6"
    ):
        stream(source(documents=1, length=6))


def test_an_id_beyond_the_vocabulary_is_refused_wherever_it_is() -> None:
    subject = stream(source(first_token=500, documents=30))
    with pytest.raises(SourceError, match=r"a: token id 5\d\d is beyond model.vocabulary=512; set model.vocabulary"):
        [subject.batch(index) for index in range(20)]


def test_a_repeated_document_shows_as_low_entropy() -> None:
    rich = Batch(0, np.arange(24).reshape(4, 6), np.arange(24).reshape(4, 6), ())
    poor = Batch(0, rich.tokens, np.ones((4, 6), np.int64), ())
    assert rich.token_statistics()["token_entropy"] == pytest.approx(np.log(24))
    assert poor.token_statistics()["token_entropy"] == 0


def test_fingerprints_tell_data_apart() -> None:
    other = source()
    changed = other.tokens.copy()
    changed[-1] += 1
    assert source().fingerprint() == other.fingerprint()
    assert Source("a", changed, other.starts).fingerprint() != other.fingerprint()


@pytest.mark.parametrize(("rows", "expected"), [("packed", "682c83a1aedf2ee1"), ("documents", "b042283663f05019")])
def test_streams_stay_what_they_were(rows: str, expected: str) -> None:
    """Published numbers and runs to resume rest on them."""
    subject = stream(source("a"), source("b", documents=40, length=9, first_token=50), rows=rows, a=0.7, b=0.3)
    digest = hashlib.sha256("".join(subject.batch(index).hash for index in [*range(600), 10**6]).encode())
    assert digest.hexdigest()[:16] == expected


def test_a_stream_is_a_loader() -> None:
    subject = stream(source())
    expected = [subject.batch(index).hash for index in range(6)]
    assert [batch.hash for batch in islice(subject, 3)] == expected[:3]
    assert [batch.hash for batch in islice(subject, 3)] == expected[3:], "it goes on from its place"


# Other weights on the way.


def three(rows: str = "packed") -> Stream:
    return stream(source("a"), source("b"), source("c", documents=31), rows=rows, a=2.0, b=1.0, c=1.0)


def rows_of(batches: list[Batch]) -> Counter[str]:
    return Counter(span.source.name for batch in batches for span in batch.spans)


@pytest.mark.parametrize("at", [0, 1, 255, 256, 300])
def test_other_weights_hold_from_the_next_batch_on(at: int) -> None:
    subject = three()
    subject.load_state_dict({"next_batch": at})
    subject.reweight("b", 0.0)
    assert rows_of(list(islice(subject, 256))) == {"a": 682, "c": 342}, "met over a cycle"
    untouched, before = three(), range(max(0, at - 5), at)
    assert [subject.batch(index).hash for index in before] == [untouched.batch(index).hash for index in before]


@pytest.mark.parametrize("rows", ["packed", "documents"])
def test_sources_go_on_where_they_were(rows: str) -> None:
    """Nothing is read twice in an epoch of a source, or left out of it, because the weights changed in it."""
    subject = three(rows)
    read: dict[str, list[tuple[int, int]]] = {"a": [], "b": [], "c": []}
    for index, batch in enumerate(islice(subject, 700)):
        for span in batch.spans:
            read[span.source.name].append((span.start, span.end))
        if index in (3, 301, 302):
            subject.reweight("a", index / 100)
        if index == 310:
            subject.reweight("b", 0.0)
        if index == 600:
            subject.reweight("b", 7.0)
    windows = {"a": 30, "b": 30, "c": 31} if rows == "documents" else {"a": 34, "b": 34, "c": 36}
    for name, spans in read.items():
        epochs = [spans[i : i + windows[name]] for i in range(0, len(spans) - windows[name], windows[name])]
        assert len(epochs) > 10
        assert all(len(set(epoch)) == windows[name] for epoch in epochs)


def test_a_batch_is_a_function_of_its_number_and_the_weights() -> None:
    subject = three()
    seen = {}
    for batch in islice(subject, 400):
        seen[batch.index] = batch.hash
        if batch.index in (10, 200, 201):
            subject.reweight("c", batch.index / 50)
    state = json.loads(json.dumps(subject.state_dict()))
    assert [first for first, _ in state["weights"]] == [0, 11, 201, 202]
    other = three()
    other.load_state_dict(state)
    assert {index: other.batch(index).hash for index in reversed(range(400))} == seen
    assert other.state_dict() == state
    other.load_state_dict(state | {"next_batch": 150})
    assert other.next().hash == seen[150]
    other.load_state_dict({"next_batch": 150})
    assert other.next().hash == three().batch(150).hash, "a place without weights has those of the beginning"


def test_weights_that_were_never_used_leave_no_trace() -> None:
    subject = three()
    [subject.next() for _ in range(20)]
    subject.reweight("a", 2.0)
    subject.reweight("b", 0.5)
    subject.batch(20)
    subject.reweight("b", 90.0)
    assert rows_of([subject.batch(20)]) == {"b": 4}
    subject.reweight("b", 1.0)
    assert subject.state_dict() == {"next_batch": 20}
    untouched = three()
    assert [subject.batch(index).hash for index in range(30)] == [untouched.batch(index).hash for index in range(30)]
    subject.load_state_dict({"next_batch": 0})
    subject.reweight("b", 0.0)
    assert subject.state_dict() == {"next_batch": 0, "weights": [[0, {"a": 2.0, "b": 0.0, "c": 1.0}]]}


def test_weights_that_change_all_the_time_are_met_too() -> None:
    # so many documents that a cycle goes through them hardly more than once: each change plans one anew
    subject = stream(source("a", documents=500), source("b", documents=500))
    batches = []
    for batch in islice(subject, 100):
        batches.append(batch)
        subject.reweight("a", 1.0 + 1e-6 * batch.index)
    assert 0.4 < rows_of(batches)["a"] / 400 < 0.6
    assert len({tuple(span.source.name for span in batch.spans) for batch in batches}) == 2**4


def test_weights_that_cannot_be_are_refused_in_a_sentence() -> None:
    subject = three()
    with pytest.raises(
        ConfigError, match=r"source='d': not one of those that are mixed; give one of \['a', 'b', 'c'\]"
    ):
        subject.reweight("d", 1.0)
    for weight in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"weight=.*: the new weight of 'a', 0 or above"):
            subject.reweight("a", weight)
    subject.reweight("a", 0.0)
    subject.reweight("b", 0.0)
    before = subject.state_dict()
    with pytest.raises(ConfigError, match=r"source='c': without it nothing is left to train on"):
        subject.reweight("c", 0.0)
    with pytest.raises(SourceError, match=r"the place is in a stream of \['a'\], and this one mixes \['a', 'b', 'c'\]"):
        subject.load_state_dict({"next_batch": 7, "weights": [[0, {"a": 1.0}]]})
    assert subject.state_dict() == before


def test_rare_tokens_are_spread_from_the_next_batch_on() -> None:
    """Nine rows with one rare token, side by side in the source; a cycle has the same rows, in another order."""
    text = source(documents=1024, length=8)
    tokens = np.where(np.arange(len(text.tokens)) % 8 == 3, 7, text.tokens % 5)
    tokens[np.arange(40 * 8 + 3, 49 * 8, 8)] = 500  # nine windows in a row
    rare = stream(Source("a", tokens, text.starts), batch=64, a=1.0)
    before = [rare.batch(number) for number in range(16)]

    def most(batches: list[Batch]) -> int:
        return max(int((batch.tokens == 500).any(axis=1).sum()) for batch in batches)

    assert most(before) > 1
    rare.load_state_dict({"next_batch": 0})
    rare.stratify()
    after = [rare.next() for _ in range(16)]
    assert most(after) == 1
    assert sorted(span.start for batch in before for span in batch.spans) == sorted(
        span.start for batch in after for span in batch.spans
    )
    state = rare.state_dict()
    other = stream(Source("a", tokens, text.starts), batch=64, a=1.0)
    other.load_state_dict(state | {"next_batch": 3})
    assert other.next().hash == after[3].hash


def left_out(dropped: list[int], deferred: list[int], documents: int = 30) -> dict[str, LeftOut]:
    return {"a": LeftOut(documents, np.array(dropped, np.int64), np.array(deferred, np.int64))}


@pytest.mark.parametrize("rows", ["packed", "documents"])
def test_documents_are_dropped_and_put_off_to_the_end_of_each_epoch(rows: str) -> None:
    some = stream(source(), rows=rows, batch=1, left_out=left_out([4, 17], [2, 3, 20]))
    windows = 34 if rows == "packed" else 30
    every = [some.batch(number).spans[0] for number in range(2 * windows)]
    assert not any({4, 17} & set(span.documents) for span in every)
    epoch = next(n for n in range(1, len(every)) if every[n].start in {span.start for span in every[:n]})
    assert epoch < windows
    for begin in (0, epoch):
        late = [bool({2, 3, 20} & set(span.documents)) for span in every[begin : begin + epoch]]
        assert sum(late) >= 3
        assert late == sorted(late), "after all others"
    assert len({span.start for span in every[:epoch]}) == epoch


def test_nothing_left_out_is_the_stream_as_it_was() -> None:
    plain, listed = stream(source()), stream(source(), left_out=left_out([], []))
    assert [plain.batch(n).hash for n in range(20)] == [listed.batch(n).hash for n in range(20)]


def test_rare_tokens_can_be_spread_from_the_beginning() -> None:
    text = source(documents=1024, length=6)
    tokens = text.tokens % 5
    tokens[np.arange(40 * 6 + 3, 49 * 6, 6)] = 500
    whole = Source("a", tokens, text.starts)
    from_the_start = stream(whole, batch=64, is_stratified=True)
    told = stream(whole, batch=64)
    told.stratify()
    assert [from_the_start.next().hash for _ in range(20)] == [told.next().hash for _ in range(20)]
    assert from_the_start.state_dict() == {"next_batch": 20}
    again = stream(whole, batch=64, is_stratified=True)
    again.load_state_dict({"next_batch": 20})
    assert again.next().hash == told.next().hash
