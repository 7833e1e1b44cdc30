"""Counts that were written aside and read again are those that were written, whatever is in them."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sealegs.scan import work_folder as subject
from sealegs.scan.blocks import Part, Ways, joined
from sealegs.scan.counts import Counts, UnreadablePart, merge, merged
from sealegs.scan.summary import CorpusSummary
from sealegs.scan.text import look_at_text
from sealegs.scan.work_folder import Store, WorkFolder, planned_bundles

TEXTS = st.lists(st.text("ab \né\ufffdÃ©\x00.", max_size=6) | st.sampled_from(["go " * 40, "ab", "same"]), max_size=9)
CORPUS = st.lists(TEXTS, min_size=1, max_size=7).filter(lambda parts: any("same" in texts for texts in parts))


def of_text(part: int, texts: list[str]) -> Counts:
    block = joined([text.encode() for text in texts], range(len(texts)), f"source \udc80 {part % 2}")
    end = Counts(parts={part: len(texts)}, problems=(UnreadablePart(part, 0, "what"),), problem_count=1)
    return merge(look_at_text(block, part, longest=20), end)


def told(summary: CorpusSummary) -> list[Any]:
    return [list(summary.listed()), summary.scanned(["corpus"]), summary.counts.tokens.tolist(), summary.sizes()]


@settings(max_examples=40, deadline=None)
@given(CORPUS, st.integers(1, 9))
def test_what_is_kept_in_bundles_comes_to_the_same_report(corpus: list[list[str]], at_once: int) -> None:
    """In tables of very few documents, too: what is equal still meets."""
    parts = [Part(n, f"{n}\udc80.txt", "all", "paragraphs", size=n % 3) for n in range(len(corpus))]
    counts = [of_text(number, texts) for number, texts in enumerate(corpus)]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(subject, "_AT_ONCE", at_once)
        patch.setattr(CorpusSummary, "_beginning", lambda *_: "")  # the files are not there
        before = told(CorpusSummary(merged(counts), parts, Ways()))
        work = WorkFolder.prepared(folder, ["corpus"], parts, Ways())
        for bundle in reversed(range(len(work.plan.bundles))):
            work.keep(bundle, merged(counts[part.number] for part in work.plan.of_bundle(bundle)))
        again = WorkFolder.opened(folder)
        assert again.plan == work.plan
        assert again.damaged() == []
        after = told(CorpusSummary(merged(again.kept()), parts, Ways(), tables=again.tables))
    assert after == before


def test_bundles_are_of_about_the_same_size_and_hold_each_part_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "MOST_BUNDLES", 10)
    parts = [Part(n, f"{n}", "", "lines", size=size) for n, size in enumerate([0, 5, 1, 1, 1, 40, 1, 0, 7, 1] * 20)]
    plan = planned_bundles(["corpus"], parts, Ways())
    bundles = [plan.of_bundle(bundle) for bundle in range(len(plan.bundles))]
    assert [part for bundle in bundles for part in bundle] == parts
    total = sum(part.size for part in parts)
    assert len(bundles) <= 10
    assert all(sum(part.size for part in bundle[:-1]) < total / 10 for bundle in bundles)  # no part could be spared


def test_a_store_at_an_address_does_what_one_on_disk_does(tmp_path: Path) -> None:
    pytest.importorskip("fsspec", reason="addresses need the extra `cluster`")
    for place in (str(tmp_path / "store"), "memory://store/here"):
        store = Store(place)
        assert store.sizes("counts") == {}
        store.write("counts/1.json", b"0123456789")
        store.write("counts/2.json", b"more")
        assert (store.read("counts/1.json"), store.read("counts/1.json", 2, 5)) == (b"0123456789", b"234")
        assert store.sizes("counts") == {"1.json": 10, "2.json": 4}
        assert (store.has("counts/2.json"), store.has("counts/3.json")) == (True, False)
        store.write("counts/1.json", b"new")
        assert store.read("counts/1.json") == b"new"
        store.remove("counts/1.json")
        store.remove("counts/1.json")
        assert store.sizes("counts") == {"2.json": 4}
        with pytest.raises(FileNotFoundError):
            store.read("counts/1.json")
