"""Text documents in, token ids out, and back."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sealegs.errors import ConfigError, MissingExtra, SourceError, StorageError
from sealegs.lab import tokenizer as bpe
from sealegs.lab.corpus import grammar_sentences
from sealegs.lab.tokenizer import END, END_ID, SMALLEST_VOCABULARY, Tokenizer, load, train


@pytest.fixture(scope="module")
def tutor() -> Tokenizer:
    return train(grammar_sentences(0, 2000), 512)


def documents_of(tokenizer: Tokenizer, documents: list[str]) -> list[str]:
    """What is left of the documents after encoding and decoding."""
    tokens, starts = tokenizer.encode_documents(documents)
    assert len(starts) == len(documents)
    ends = [*(starts[1:] - 1), len(tokens) - 1][: len(starts)]
    assert [int(token) for token in tokens[ends]] == [END_ID] * len(documents)
    assert np.count_nonzero(tokens == END_ID) == len(documents)
    return [tokenizer.decode(tokens[start:end]) for start, end in zip(starts, ends, strict=True)]


text = st.lists(st.text() | st.sampled_from([END, " ", "\r\n", "the ", "👩‍🚀", "e\u0301"])).map("".join)


@given(st.lists(text))
@example(["", f"a{END}b", f"{END}{END}", "", " lead and trail ", "\x00", "née\tﬁ", "don't  \n\n x"])
def test_what_was_encoded_comes_back(tutor: Tokenizer, documents: list[str]) -> None:
    assert documents_of(tutor, documents) == documents


@given(st.lists(text), st.integers(1, 9))
def test_long_documents_are_encoded_in_pieces(tutor: Tokenizer, documents: list[str], piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe, "_ENCODING_PIECE", piece)
        assert documents_of(tutor, documents) == documents
        batches = list(bpe._batches(documents))
    assert sum(is_end for batch in batches for _, is_end in batch) == len(documents)
    assert all(sum(len(part) for part, _ in batch) <= 2 * piece for batch in batches)


def test_starts_and_type_of_tokens(tutor: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, starts = tutor.encode_documents(iter(["zz", "", "z"]))
    assert tokens.tolist() == [*tokens[:2], 0, 0, tokens[0], 0]
    assert starts.tolist() == [0, 3, 4]
    assert tokens.dtype == np.uint16
    assert starts.dtype == np.int64
    assert [len(array) for array in tutor.encode_documents([])] == [0, 0]
    monkeypatch.setattr(Tokenizer, "size", 1 << 16)
    assert tutor.encode_documents(["zz"])[0].dtype == np.uint16
    monkeypatch.setattr(Tokenizer, "size", (1 << 16) + 1)
    assert tutor.encode_documents(["zz"])[0].dtype == np.uint32


def test_training_repeats_byte_for_byte(tmp_path: Path) -> None:
    """Whatever the hash seed, and however many threads the library counts with."""
    program = (
        "import hashlib; from sealegs.lab import corpus, tokenizer;"
        "made = tokenizer.train(corpus.grammar_sentences(0, 2000), 700).to_json();"
        "print(hashlib.sha256(made.encode()).hexdigest())"
    )
    here = hashlib.sha256(train(grammar_sentences(0, 2000), 700).to_json().encode()).hexdigest()
    for seed, threads, parallel in (("0", "1", "true"), ("1", "2", "true"), ("2", "5", "true"), ("3", "1", "false")):
        environment = {"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": parallel}
        done = subprocess.run(
            [sys.executable, "-c", program], env=os.environ | environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == here


def test_vocabulary_of_bytes_alone() -> None:
    with pytest.raises(ConfigError, match=r"^model\.vocabulary=256: text needs at least 257, a token for each byte"):
        train(["a"], 256)
    smallest = train(["the the the"], SMALLEST_VOCABULARY)
    assert smallest.size == 257
    tokens, _ = smallest.encode_documents(["née"])
    assert len(tokens) == 5
    assert smallest.decode(tokens) == f"née{END}"


def test_small_corpus_gives_fewer_tokens() -> None:
    few = train(["the the the"], 5000)
    assert 257 < few.size < 270
    assert train([], 300).size == 257


def test_training_hands_on_what_goes_wrong_with_the_documents() -> None:
    def documents() -> Iterator[str]:
        yield "one"
        raise SourceError("a.txt: line 3 is not UTF-8 text")

    with pytest.raises(SourceError, match=r"a\.txt"):
        train(documents(), 300)
    with pytest.raises(SourceError, match=r"a\.txt"):
        train(["a"], 300).encode_documents(documents())


def test_training_survives_an_unbroken_run() -> None:
    """The library alone would need minutes for this one."""
    run = train(["a" * 300_000], 300)
    assert len(run.encode_documents(["a" * 300_000])[0]) < 300_000 / 100


def test_ids_without_a_token_are_shown_as_such(tutor: Tokenizer) -> None:
    """A model's vocabulary may be larger than the tokenizer's."""
    assert tutor.decode([tutor.size, -100, END_ID]) == f"<|{tutor.size}|><|-100|>{END}"


def test_half_a_character(tutor: Tokenizer) -> None:
    tokens, _ = tutor.encode_documents(["a👩"])
    assert tutor.decode(tokens[:2]) == "a\ufffd"


# On disk.


def test_saved_and_loaded(tutor: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tutor.save(path)
    again = load(path, 512)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert again.to_json() == tutor.to_json() == path.read_text(encoding="utf-8")
    assert documents_of(again, [f"She has written{END} a letter."]) == [f"She has written{END} a letter."]
    assert load(path).size == 512


def test_too_big_for_the_model(tutor: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tutor.save(path)
    with pytest.raises(SourceError) as raised:
        load(path, 511)
    problem = "has 512 tokens, more than model.vocabulary=511: set that to at least 512"
    assert str(raised.value) == f"{path}: {problem}"


def test_saving_where_nothing_can_be_saved(tutor: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="missing"):
        tutor.save(tmp_path / "missing" / "tokenizer.json")


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "a.json", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(SourceError) as raised:
            load(path, 512)
        assert str(raised.value) == f"{path}: cannot be read ({reason}): give the path of a tokenizer.json"


@pytest.mark.parametrize("kept", [0, 1, 100, 2000, -1])
def test_damaged_file(tutor: Tokenizer, tmp_path: Path, kept: int) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tutor.to_json().encode()[:kept])
    with pytest.raises(SourceError, match=r"tokenizer\.json: damaged, or not a tokenizer\.json \(.+\): copy or train"):
        load(path, 512)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"null", b"{}", b"written", b'{"version": "1.0"}'])
def test_another_kind_of_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=r"damaged, or not a tokenizer\.json"):
        load(path, 512)


def test_a_file_that_the_library_panics_at(tutor: Tokenizer, tmp_path: Path) -> None:
    """At once, or at the first text: Rust's panic is no ``Exception``."""
    path = tmp_path / "tokenizer.json"
    model = json.loads(tutor.to_json())["model"]
    truncation = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 5}
    for content, why in (
        (changed(tutor, model={**model, "continuing_subword_prefix": "####"}), "out of range"),
        (changed(tutor, truncation=truncation), "strictly less"),
    ):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(SourceError, match=rf"damaged, or not a tokenizer\.json \(.*{why}.*\): copy or train"):
            load(path, 600)


@given(st.data())
def test_damage_is_refused_or_does_no_harm(tutor: Tokenizer, tmp_path_factory: Any, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("damaged") / "tokenizer.json"
    content = bytearray(tutor.to_json().encode())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place : place + data.draw(st.integers(0, 50))] = data.draw(st.binary(max_size=3))
    path.write_bytes(content)
    try:
        loaded = load(path, 600)
    except SourceError as error:
        assert str(error).startswith(f"{path}: ")  # noqa: PT017 - most damage is refused, not all of it
    else:
        assert documents_of(loaded, ["She has written a letter."]) == ["She has written a letter."]


def changed(tokenizer: Tokenizer, **parts: Any) -> str:
    return json.dumps(json.loads(tokenizer.to_json()) | parts)


def test_a_tokenizer_from_elsewhere(tutor: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    model = json.loads(tutor.to_json())["model"]
    prefix = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    foreign = [
        changed(tutor, normalizer={"type": "Lowercase"}),
        changed(tutor, normalizer={"type": "NFC"}),
        changed(tutor, pre_tokenizer=prefix),
        changed(tutor, added_tokens=[], model={**model, "vocab": {}, "merges": []}),
        changed(tutor, added_tokens=[], model={**model, "vocab": {"a": 0, "b": 1}, "merges": []}),
        changed(tutor, added_tokens=[], model={**model, "vocab": {END: 0, "b": 2}, "merges": []}),
        changed(tutor, added_tokens=[], model={**model, "vocab": {"\u4e00": 600, **model["vocab"]}}),
    ]
    for content in foreign:
        path.write_text(content, encoding="utf-8")
        with pytest.raises(SourceError, match=r"not a tokenizer that Sealegs trained .*: train it anew"):
            load(path, 1000)


def test_library_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtra, match=r"text data needs tokenizers, .*sealegs\[lab\]"):
        train(["a"], 300)
    with pytest.raises(MissingExtra, match=r"text data needs tokenizers, .*sealegs\[lab\]"):
        load(tmp_path / "tokenizer.json", 300)
