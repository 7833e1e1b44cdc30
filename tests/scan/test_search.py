"""Rows of tokens in, the documents of a corpus that they come from out, in however many parts it is searched."""

from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sealegs.batching.stratified import Ints
from sealegs.scan.blocks import Part, Ways
from sealegs.scan.counts import Counts, document_key
from sealegs.scan.incident import Suspects, TrainedRow
from sealegs.scan.origin import MOST_DOCUMENTS, RUN, documents_of, few, holders, runs
from sealegs.scan.search import Seen, merged, search_part


def found(row: Ints, documents: list[Ints]) -> list[int]:
    """The documents of a row, by their place in the corpus."""
    wanted = np.unique(runs(row))
    lengths = np.array([len(each) for each in documents])
    pairs = holders(wanted, np.concatenate(documents), np.cumsum(lengths) - lengths, np.arange(len(documents)))
    return documents_of(np.searchsorted(wanted, runs(row)).tolist(), pairs)


def test_a_packed_row_has_all_of_its_documents_the_longest_part_first() -> None:
    random = np.random.default_rng(0)
    documents = [random.integers(0, 1000, 60) for _ in range(50)]
    row = np.concatenate([documents[7][50:], documents[8], documents[9][:30]])
    assert found(row, documents) == [8, 9]  # of 7 there are ten tokens: three runs
    row = np.concatenate([documents[7][48:], documents[8], documents[9][:30]])
    assert found(row, documents) == [8, 9, 7]


def test_what_every_document_has_is_put_down_to_one() -> None:
    random = np.random.default_rng(1)
    banner = random.integers(0, 1000, 30)
    documents = [np.concatenate([banner, random.integers(0, 1000, 40)]) for _ in range(20)]
    assert found(documents[13], documents) == [13]
    assert found(np.concatenate([banner, banner[:5]]), documents) == [0]


def test_a_run_across_two_documents_is_in_neither() -> None:
    random = np.random.default_rng(2)
    documents = [random.integers(0, 1000, 20) for _ in range(3)]
    joined = np.concatenate([documents[0][-6:], documents[1][:6]])
    assert found(joined, documents) == []
    assert found(np.arange(RUN - 1), documents) == []
    assert found(np.arange(5), [np.arange(3)]) == []


def test_runs_that_all_have_are_kept_for_so_many() -> None:
    pairs = np.array([(run, document) for document in range(200) for run in (4, 2)])
    kept = few(np.concatenate([pairs, pairs]))
    assert kept.tolist() == [[run, document] for run in (2, 4) for document in range(MOST_DOCUMENTS)]


@given(st.lists(st.integers(1, 40), max_size=6), st.integers(0, 3))
def test_it_does_not_matter_how_a_search_is_divided(bounds: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    every = [
        Seen(
            {"rare": random.integers(0, 9, 5)},
            random.integers(0, 3, (4, 2)),
            {"rare": random.integers(0, 9, 2)},
        )
        for _ in range(40)
    ]
    cuts = [0, *sorted(set(bounds)), 40]
    grouped = merged(merged(every[start:end]) for start, end in pairwise(cuts))
    at_once = merged(every)
    assert grouped.windows["rare"].tolist() == at_once.windows["rare"].tolist()
    assert grouped.holders.tolist() == at_once.holders.tolist()
    assert grouped.alike["rare"].tolist() == at_once.alike["rare"].tolist()


def test_windows_go_on_from_document_to_document(tmp_path: Path) -> None:
    path = tmp_path / "ids.npy"
    ids = np.arange(1, 101, dtype=np.uint16)
    np.save(path, ids)
    row = TrainedRow(5, 5, 0, np.array([3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]))
    suspects = Suspects("night#1", [row], [], Counts(tokens=np.bincount(ids)))
    part = Part(0, str(path), str(path), "ids", 0, 100, 200)
    seen = search_part(part, Ways(row=20), suspects.wanted())
    assert seen.windows["rare"].sum() == 100 // 14
    assert np.unique(seen.holders[:, 1]).tolist() == [int(document_key(0, 0))]


def test_padding_is_no_text() -> None:
    def text(*tokens: int) -> list[int]:
        return list(TrainedRow(0, 0, 0, np.array(tokens)).text)

    assert text(0, 0, 0, 5, 6, 7, 0, 0) == [0, 5, 6, 7, 0]
    assert text(5, 6, 6, 7) == [5, 6, 6, 7]
    assert text(5, 5, 5) == [5, 5, 5]
    assert text(1, 2, 2, 2) == [1, 2]
