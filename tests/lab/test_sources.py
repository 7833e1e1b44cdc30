"""Settings in, streams of tokens out."""

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sealegs.errors import ConfigError, SourceError
from sealegs.lab import corpus, sources
from sealegs.lab import tokenizer as bpe
from sealegs.lab.corpus import stdlib_documents
from sealegs.lab.settings import PRESETS, SIZES, DataSettings, Settings
from sealegs.lab.sources import cache_folder, open_data
from sealegs.record.files import folder_aside


def nano(sources: dict[str, float], **other: Any) -> Settings:
    return replace(SIZES["nano"], data=DataSettings(sources=sources, sentences=400, **other))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SEALEGS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def tokenised(settings: Settings) -> list[str]:
    """What had to be tokenised, and was not in the cache."""
    said: list[str] = []
    open_data(settings, say=said.append)
    return said


def text_file(folder: Path, words: str = "The sea is calm.") -> str:
    path = folder / "sea.txt"
    path.write_text("\n\n".join(f"{words} Wave {number}." for number in range(300)))
    return str(path)


def test_text_is_tokenised_once(cache: Path) -> None:
    settings = nano({"grammar": 1.0})
    assert len(tokenised(settings)) == 1
    assert tokenised(settings) == []
    assert tokenised(replace(settings, seed=9)) == []
    assert len(tokenised(replace(settings, model=replace(settings.model, vocabulary=300)))) == 1


def test_a_file_that_changed_is_tokenised_anew(cache: Path, tmp_path: Path) -> None:
    settings = nano({text_file(tmp_path): 1.0})
    first = open_data(settings).facts
    text_file(tmp_path, "The sea is rough.")
    assert len(tokenised(settings)) == 1
    assert open_data(settings).facts != first


def test_a_damaged_cache_is_made_anew(cache: Path) -> None:
    settings = nano({"grammar": 1.0})
    facts = open_data(settings).facts
    for name in ("0.npy", "0.starts.npy", "tokenizer.json"):
        (folder,) = (cache / "tokens").iterdir()
        path = folder / name
        path.write_bytes(path.read_bytes()[:40] if name.endswith("npy") else b"")
        assert len(tokenised(settings)) == 1, name
        assert open_data(settings).facts == facts


def test_sources_are_mixed_by_weight_and_share_a_vocabulary(tmp_path: Path) -> None:
    path = text_file(tmp_path)
    data = open_data(nano({"grammar": 3.0, path: 1.0}))
    first, second = data.training.batch(0).sources.split()
    assert (first.split("=")[0], second.split("=")[0]) == (path, "grammar")
    assert data.tokenizer is not None
    (tmp_path / "tokenizer.json").write_bytes(data.tokenizer)
    tokenizer = bpe.load(tmp_path / "tokenizer.json")
    rows = [span for index in range(20) for span in data.training.batch(index).spans if span.source.name == path]
    assert "The sea is calm. Wave" in tokenizer.decode(rows[0].source.tokens[rows[0].start : rows[0].end].tolist())


def test_nothing_held_out_is_trained_on(tmp_path: Path) -> None:
    data = open_data(nano({"grammar": 1.0}, held_out=0.25, rows="documents"))
    (trained,) = {
        id(span.source): span.source for index in range(3) for span in data.training.batch(index).spans
    }.values()
    (held,) = {id(span.source): span.source for index in range(3) for span in data.held_out.batch(index).spans}.values()
    assert (len(trained.starts), len(held.starts)) == (300, 100)

    def sentences(source: Any) -> set[bytes]:
        ends = [*source.starts[1:], len(source.tokens)]
        return {source.tokens[start:end].tobytes() for start, end in zip(source.starts, ends, strict=True)}

    assert not sentences(trained) & sentences(held)


def test_the_unigram_entropy_is_that_of_the_mixture(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(4000) % 4)
    np.save(tmp_path / "b.npy", np.full(4000, 9))
    settings = nano({str(tmp_path / "a.npy"): 1.0, str(tmp_path / "b.npy"): 1.0})
    expected = 4 * -0.125 * math.log(0.125) - 0.5 * math.log(0.5)
    assert open_data(settings).facts["unigram_entropy"] == pytest.approx(expected, abs=1e-4)


def test_text_and_ids_go_together_only_with_their_tokenizer(tmp_path: Path) -> None:
    ids = tmp_path / "ids.npy"
    np.save(ids, np.arange(4000) % 300)
    settings = nano({"grammar": 1.0, str(ids): 1.0})
    with pytest.raises(ConfigError, match=r"mixes text \(grammar\) with token ids .*: give data.tokenizer"):
        open_data(settings)
    made = bpe.train(["a sentence to learn from"] * 20, 300)
    made.save(tmp_path / "tokenizer.json")
    given = replace(settings, data=replace(settings.data, tokenizer=str(tmp_path / "tokenizer.json")))
    data = open_data(given)
    assert data.tokenizer == made.to_json().encode()
    with pytest.raises(SourceError, match=r"none.json: cannot be read"):
        open_data(replace(settings, data=replace(settings.data, tokenizer=str(tmp_path / "none.json"))))


def test_bin_files_are_mapped_as_uint16(tmp_path: Path) -> None:
    (tmp_path / "ids.bin").write_bytes((np.arange(4000) % 500).astype("<u2").tobytes())
    batch = open_data(nano({str(tmp_path / "ids.bin"): 1.0})).training.batch(0)
    assert ((batch.targets - batch.tokens) % 500 == 1).all()


def test_documents_of_tokenised_files_are_known(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(4000) % 300)
    np.save(tmp_path / "ids.starts.npy", np.arange(0, 4000, 10))
    batch = open_data(nano({str(tmp_path / "ids.npy"): 1.0}, rows="documents")).training.batch(0)
    assert batch.target_count == 8 * 9


@pytest.mark.parametrize("starts", [[], [5, 9], [0, 9, 9], [0, 4000], [[0]]], ids=str)
def test_starts_that_cannot_be_are_refused(tmp_path: Path, starts: list[int]) -> None:
    np.save(tmp_path / "ids.npy", np.arange(4000) % 300)
    np.save(tmp_path / "ids.starts.npy", np.array(starts))
    with pytest.raises(SourceError, match=r"ids.starts.npy: not the starts of documents"):
        open_data(nano({str(tmp_path / "ids.npy"): 1.0}))


def test_documents_of_one_token_are_refused_when_nothing_else_is_there(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(400) % 300)
    np.save(tmp_path / "ids.starts.npy", np.arange(400))
    with pytest.raises(SourceError, match=r"tokens in 392 documents, too few for one row"):
        open_data(nano({str(tmp_path / "ids.npy"): 1.0}, rows="documents"))
    np.save(tmp_path / "ids.starts.npy", np.array([0, 1, 2, 3, 23, 24, 25, 45, 46, 390]))
    training = open_data(nano({str(tmp_path / "ids.npy"): 1.0}, rows="documents")).training
    assert all(training.batch(index).target_count >= 8 * 19 for index in range(5))


def test_the_order_does_not_depend_on_where_the_data_lie(tmp_path: Path) -> None:
    batches = []
    for folder in (tmp_path / "here", tmp_path / "there"):
        folder.mkdir()
        np.save(folder / "ids.npy", np.arange(4000) % 300)
        batches.append(open_data(nano({str(folder / "ids.npy"): 1.0})).training.batch(0).tokens)
    assert np.array_equal(batches[0], batches[1])


def test_a_run_keeps_its_tokens_when_another_mends_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other saw a folder cut short and takes it away: even the moment after this run has put a whole one there."""
    monkeypatch.setenv("SEALEGS_CACHE", str(tmp_path))
    settings = replace(SIZES["nano"], data=DataSettings(sentences=300))
    expected = open_data(settings).facts
    (cached,) = (tmp_path / "tokens").iterdir()
    shutil.rmtree(cached)

    @contextmanager
    def taken_away(target: Path) -> Iterator[Path]:
        with folder_aside(target) as aside:
            yield aside
        shutil.rmtree(target)

    monkeypatch.setattr(sources, "folder_aside", taken_away)
    assert open_data(settings).facts == expected


def test_two_runs_may_tokenise_at_once(tmp_path: Path) -> None:
    """As the runs of a sweep do on a fresh machine."""
    program = (
        "import sys; from dataclasses import replace; from sealegs.lab.settings import SIZES, DataSettings;"
        "from sealegs.lab.sources import open_data; sys.stdin.readline();"
        "print(open_data(replace(SIZES['nano'], data=DataSettings(sentences=300))).facts)"
    )
    environment = os.environ | {"SEALEGS_CACHE": str(tmp_path / "cold")}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    for child in children:
        assert child.stdin
        child.stdin.write("go\n")
        child.stdin.flush()
    answers = [child.communicate(timeout=60)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0, 0]
    assert len(set(answers)) == 1
    assert len(list((tmp_path / "cold" / "tokens").iterdir())) == 1


@pytest.mark.usefixtures("little_of_the_library")
def test_the_standard_library_is_a_source() -> None:
    """How much there is of it is counted whole; a part is enough to be tokenised."""
    whole = [text for _, text in stdlib_documents()]
    assert len(whole) > 300
    assert sum(len(text) for text in whole) > 5_000_000  # a million tokens and more: this vocabulary is small
    documents = [text for _, text in corpus.stdlib_documents()]
    assert documents == whole[: len(documents)]
    facts = open_data(nano({"stdlib": 1.0})).facts["sources"]["stdlib"]
    assert facts["documents"] == len(documents)
    assert sum(len(text) for text in documents) > facts["tokens"] > sum(len(text) for text in documents) / 5


def test_the_worked_example_trains_on_240_sentences() -> None:
    training = open_data(PRESETS["seed-002"]).training
    documents = {span.documents.start for index in range(30) for span in training.batch(index).spans}
    assert documents == set(range(240))
    assert training.batch(312).tokens.shape == (8, 32)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEALEGS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/sealegs")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "sealegs"


def test_what_a_scan_lists_is_not_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of the scan are those of the trainer, also where the list was made for a text file."""
    from sealegs.cli.main import main

    monkeypatch.chdir(tmp_path)
    text = Path(text_file(tmp_path)).read_text().split("\n\n")
    text[17], text[30], text[260] = "wave " * 40, "rock " * 50, text[5]
    Path("sea.txt").write_text("\n\n".join(text))
    assert main(["scan", "sea.txt", "-o", "scanned", "--jobs", "1"]) == 1
    settings = nano({"sea.txt": 1.0}, rows="documents", leave_out="scanned/documents.jsonl")
    data = open_data(settings)
    assert data.facts["sources"]["sea.txt"] | {"dropped": 3, "deferred": 0} == data.facts["sources"]["sea.txt"]
    read = {
        document for number in range(200) for span in data.training.batch(number).spans for document in span.documents
    }
    assert read == set(range(294)) - {17, 30, 260}, "six are held out"

    with pytest.raises(ConfigError, match=r"it lists documents of sea\.txt, and none of data\.sources is one of those"):
        open_data(nano({"grammar": 1.0}, leave_out="scanned/documents.jsonl"))
    Path("sea.txt").write_text("\n\n".join(text[:-1]))
    with pytest.raises(SourceError, match=r"made for 300 documents of sea\.txt, which has 299; scan it anew"):
        open_data(settings)
