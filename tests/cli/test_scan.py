"""``sealegs scan``: a corpus in, what was planted in it out, and nothing else."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from sealegs.cli.main import main
from sealegs.report.commands.scan import Scanned

ROOT = Path(__file__).parents[2]
PLANT = ROOT / "tests" / "scan" / "plant.py"
Said = tuple[int, str, str]


@pytest.fixture
def scan(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Said]:
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Said:
        code = main(["scan", *words, "--jobs", "1"])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    subprocess.run([sys.executable, PLANT, folder, "--seed", "11"], check=True)
    return folder


def listed(folder: Path, corpus: Path) -> dict[str, dict[int, str]]:
    """By file and number: the kinds that were found."""
    first, *lines = (json.loads(line) for line in (folder / "documents.jsonl").read_text().splitlines())
    assert first["schema"] == 1
    found: dict[str, dict[int, str]] = {}
    for line in lines:
        name = str(Path(line["file"]).relative_to(corpus))
        kinds = {why.partition(":")[0] for why in line["why"]}
        found.setdefault(name, {})[line["document"]] = " ".join(sorted(kinds))
    return found


@pytest.mark.parametrize(
    "names",
    [
        ["corpus.txt"],
        ["corpus.jsonl"],
        ["corpus.parquet"],
        ["dataset/data-00000-of-00002.arrow", "dataset/data-00001-of-00002.arrow"],
    ],
    ids=lambda names: names[0],
)
def test_all_that_was_planted_is_found_and_nothing_else(
    names: list[str], scan: Callable[..., Said], planted: Path, tmp_path: Path
) -> None:
    truth = json.loads((planted / "truth.json").read_text())
    corpus = planted / (names[0] if len(names) == 1 else "dataset")
    code, out, _ = scan(str(corpus), "-o", "out", "--longest", "5000")
    assert code == 1
    expected = {name: {int(number): kind for number, kind in truth[name].items()} for name in names}
    found = listed(tmp_path / "out", planted)
    assert {name: found.get(name, {}) for name in names} == expected
    assert out == (tmp_path / "out" / "scan.txt").read_text()
    assert sum(map(len, expected.values())) >= 16


def test_with_a_tokenizer_the_same_is_found(scan: Callable[..., Said], planted: Path, tmp_path: Path) -> None:
    """In tokens: of words that are several tokens, spans of up to 13 are shorter, so one of the repeats is too long."""
    import tokenizers

    texts = [json.loads(line)["text"] for line in (planted / "corpus.jsonl").read_text().splitlines()]
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(texts, trainer)
    made.save("tokenizer.json")
    code, out, _ = scan(
        str(planted / "corpus.jsonl"), "-o", "out", "--longest", "8000", "--tokenizer", "tokenizer.json", "--json"
    )
    assert code == 1
    told = msgspec.convert(json.loads(out), Scanned)
    assert told.unit == told.length_unit == "tokens"
    ids = [token for text in texts for token in made.encode(text, add_special_tokens=False).ids]
    assert (told.counted, told.distinct) == (len(ids), len(set(ids)))
    assert told.rare == sum(count < 10 for count in Counter(ids).values())
    truth = {int(n): kind for n, kind in json.loads((planted / "truth.json").read_text())["corpus.jsonl"].items()}
    found = listed(tmp_path / "out", planted)["corpus.jsonl"]
    assert {n for n, kind in truth.items() if kind != "repeats"} <= found.keys()
    assert {n for n, kinds in found.items() if kinds != "crowded"} <= truth.keys()
    assert sum(kinds == "repeats" for kinds in found.values()) >= 3


def test_processes_find_the_same(scan: Callable[..., Said], planted: Path, tmp_path: Path) -> None:
    """Two processes, three files; the object alone on stdout."""
    words = [*(str(planted / f"corpus.{kind}") for kind in ("txt", "jsonl", "parquet")), "--json"]
    program = f"from sealegs.cli.main import main\nif __name__ == '__main__': main({['scan', *words, '--jobs', '2']!r})"
    (tmp_path / "run.py").write_text(program)
    done = subprocess.run([sys.executable, tmp_path / "run.py"], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert told == json.loads(scan(*words)[1])
    assert told["documents"] > 1200


def test_the_schema_in_the_documents_is_the_one_that_holds(scan: Callable[..., Said]) -> None:
    promised = json.loads((ROOT / "docs" / "scan.schema.json").read_text())
    assert promised == msgspec.json.schema(Scanned)
    Path("a.txt").write_text("One.\n\nTwo.\n\nOne.\n")
    code, out, err = scan("a.txt", "--json")
    assert (code, err) == (1, "")
    told = msgspec.convert(json.loads(out), Scanned, strict=True)
    assert (told.documents, told.to_drop) == (3, 1)


def test_a_clean_corpus_is_said_to_be_clean(scan: Callable[..., Said]) -> None:
    Path("a.txt").write_text("\n\n".join(f"Document {number} of them all." for number in range(50)))
    code, out, err = scan("a.txt")
    assert (code, err) == (0, "")
    assert "Nothing wrong was found in any document." in out
    assert "50 documents" in out


def test_what_cannot_be_read_is_named_and_passed_over(scan: Callable[..., Said]) -> None:
    Path("c").mkdir()
    Path("c/a.jsonl").write_text('{"text": "One."}\n{"text": "cut o\n\n{"other": 1}\n[1]\n{"text": "Two."}\n')
    Path("c/b.dat").write_bytes(b"\x7fELF\0\0\0")
    Path("c/c.parquet").write_bytes(b"PAR1 and then nothing")
    Path("c/d.txt").write_text(" \n\n")
    Path("c/e.md").write_bytes("UTF-16".encode("utf-16"))
    Path("c/f.npy").write_bytes(b"no array")
    code, out, err = scan("c")
    assert (code, err) == (0, "")
    assert "2 documents" in out
    assert 'c/a.jsonl: line 2: not a JSON object with text (Input data was truncated): \'{"text": "cut o\'' in out
    assert "c/a.jsonl: line 4: no field 'text'; give --field" in out
    assert "c/a.jsonl: line 5: not a JSON object with text (Expected `object`, got `array`)" in out
    assert "c/b.dat: a binary file" in out
    assert "c/c.parquet: not a Parquet file, or damaged" in out
    assert "c/d.txt: has no text in it" in out
    assert "c/e.md: UTF-16; save it as UTF-8" in out
    assert "c/f.npy: not a numpy array file" in out
    assert "8 could not be read" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere"], "nowhere: no such file or folder"),
        (["empty"], "empty: no files in it"),
        (["a.dat"], "a.dat: a binary file"),
        (["empty.txt"], "empty.txt: has no text in it"),
        (["ids.npy", "a.txt"], "the corpus has text and token ids: scan them apart"),
        (["floats.npy"], "floats.npy: 1-dimensional float64; token ids are whole numbers"),
        (["odd.bin"], "odd.bin: 3 bytes, not a whole number of uint16 token ids; give --dtype"),
        (["odd.bin", "--dtype", "float"], "--dtype float: give uint8, uint16"),
        (["a.txt", "--batch", "4"], "--batch 4: a forecast is for one file of token ids"),
        (["ids.npy", "--row", "0"], "--row 0: at least 1"),
        (["ids.npy", "--batch", "2", "--row", "4", "--order", "a.txt"], "--order a.txt: cannot be read"),
        (["ids.npy", "--batch", "2", "--row", "4", "--order", "ids.npy"], "--order ids.npy: not numbers of rows"),
        (["ids.npy", "--order", "ids.npy"], "--order: give --batch, too"),
        (["a.txt", "-o", "empty"], "--output empty: is there already; name a new folder"),
        (["a.txt", "--tokenizer", "a.txt"], "--tokenizer a.txt: not a tokenizer.json"),
        (["a.txt", "--tokenizer", "panic.json"], "--tokenizer panic.json: not a tokenizer.json (range"),
        (["a.txt", "mine.toml"], "a settings file is scanned by itself"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], sentence: str, scan: Callable[..., Said]) -> None:
    Path("empty").mkdir()
    Path("a.txt").write_text("One.")
    Path("empty.txt").write_text("")
    Path("a.dat").write_bytes(b"\0")
    Path("odd.bin").write_bytes(b"123")
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"], "continuing_subword_prefix": "###"}
    Path("panic.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    np.save("ids.npy", np.arange(100, dtype=np.uint16))
    np.save("floats.npy", np.zeros(3))
    before = sorted(Path().rglob("*"))
    code, out, err = scan(*words)
    assert (code, out) == (2, "")
    assert sentence in err
    assert len(err.splitlines()) == 1
    assert sorted(Path().rglob("*")) == before


def test_without_the_library_parquet_says_what_to_install(
    scan: Callable[..., Said], planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    code, _, err = scan(str(planted / "corpus.parquet"))
    assert code == 2
    assert "needs pyarrow, which is not installed: pip install 'sealegs[scan]'" in err


def test_sources_are_told_apart_by_a_field(scan: Callable[..., Said]) -> None:
    lines = [{"content": f"Document {n}.", "where": "web" if n % 3 else "books"} for n in range(9)]
    lines[4]["content"] = lines[1]["content"]
    Path("a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    _, out, _ = scan("a.jsonl", "--field", "content", "--source", "where", "--json")
    sources = {each["name"]: (each["documents"], each["found"]) for each in json.loads(out)["sources"]}
    assert sources == {"books": (3, {}), "web": (6, {"duplicate": 1})}


# Token ids.


def test_token_ids_have_documents_rare_tokens_and_a_forecast(scan: Callable[..., Said], tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    tokens = draw.integers(1, 50, 32 * 100).astype(np.uint16)
    tokens[31::32] = 0  # a document a row
    tokens[5 * 32 : 6 * 32] = tokens[2 * 32 : 3 * 32]  # a duplicate
    tokens[9 * 32 + 8 : 9 * 32 + 28] = 77  # many, but not rare
    tokens[[40 * 32 + 3, 41 * 32 + 7, 42 * 32 + 9, 90 * 32]] = 900
    tokens[60 * 32 : 60 * 32 + 6] = 901
    np.save("ids.npy", tokens)
    code, out, _ = scan("ids.npy", "--end", "0", "--row", "32", "--batch", "4", "-o", "out", "--json")
    assert code == 1
    told = msgspec.convert(json.loads(out), Scanned)
    assert told.documents == 100
    assert [(each.id, each.count) for each in told.rare_examples] == [(901, 6), (900, 4)]
    assert told.rare_examples[1].where == [f"ids.npy#{n}" for n in (40, 41, 42, 90)]
    assert listed(tmp_path / "out", Path()) == {"ids.npy": {5: "duplicate", 60: "crowded"}}
    assert told.forecast is not None
    assert (told.forecast.batches, told.forecast.meeting) == (25, 1)
    worst = told.forecast.worst[0]
    assert (worst.batch, worst.rare, worst.met, worst.tokens) == (10, 3, 1, ["#900"])
    counts = np.load(tmp_path / "out" / "token_counts.npy")
    assert counts.tolist() == np.bincount(tokens).tolist()

    assert main(["batches", "ids.npy", "--row", "32", "--batch", "4", "-o", "order.npy"]) == 0
    _, out, _ = scan("ids.npy", "--end", "0", "--row", "32", "--batch", "4", "--order", "order.npy", "--json")
    assert '"meeting": 0' in out.partition("forecast")[2]


def test_a_line_of_a_table_is_a_row_of_the_forecast_as_it_is_one_of_the_order(scan: Callable[..., Said]) -> None:
    np.save("table.npy", np.random.default_rng(0).integers(0, 1200, (100, 24)).astype(np.uint16))
    assert main(["batches", "table.npy", "--batch", "8", "-o", "order.npy"]) == 0
    asked = ("table.npy", "--batch", "8", "--json")
    forecasts = []
    for words in ((), ("--row", "24"), ("--order", "order.npy")):
        _, out, _ = scan(*asked, *words)  # what `batches` said comes first
        told = msgspec.convert(json.loads(out[out.index("{") :]), Scanned)
        assert told.forecast is not None
        forecasts.append((told.documents, told.forecast.batches, told.forecast.meeting))
    assert [batches for _, batches, _ in forecasts] == [13, 13, 13]
    assert forecasts[0] == forecasts[1]
    assert forecasts[2][2] < forecasts[0][2]
    code, _, err = scan("table.npy", "--batch", "8", "--row", "1024")
    assert (code, "--row 1024: table.npy has 24 tokens a row; leave --row out" in err) == (2, True)


def test_the_run_of_a_settings_file_is_forecast(scan: Callable[..., Said], monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, numbers and batches are those of the trainer."""
    from sealegs.lab.config import starting_point
    from sealegs.lab.sources import open_data

    monkeypatch.setenv("SEALEGS_CACHE", str(Path("cache").absolute()))
    Path("mine.toml").write_text('size = "nano"\nsteps = 12\n[data]\nsentences = 300\nbatch = 64\n')
    _, out, err = scan("mine.toml", "--json")
    assert err.startswith("tokenising grammar")
    told = msgspec.convert(json.loads(out), Scanned)
    assert told.sources[0].name == "grammar"
    assert told.documents == 300
    assert told.forecast is not None
    assert told.forecast.batches == 12
    worst = told.forecast.worst[0]
    stream = open_data(starting_point(config=Path("mine.toml"))).training
    batch = stream.batch(worst.batch)
    rare = [int(text[1:].split()[0]) for text in worst.tokens]
    assert all(token in batch.tokens or token in batch.targets for token in rare)
    rows = [(batch.tokens == rare[0]).any(1) | (batch.targets == rare[0]).any(1)][0]
    assert rows.sum() > 1


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    """Soon after its processes are started, which is when it is most easily got wrong."""
    (tmp_path / "a.txt").write_text("A document, of which there are many.\n\n" * 1_000_000)
    listen = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a job in the background is deaf
    )
    program = "from sealegs.cli.main import main\nif __name__ == '__main__': raise SystemExit(main(WORDS))"
    program = f"{listen}\n{program}"
    (tmp_path / "run.py").write_text(program.replace("WORDS", "['scan', 'a.txt', '-o', 'out', '--jobs', '2']"))
    run = subprocess.Popen(
        [sys.executable, "run.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
    while len(children.read_text().split()) < 3:  # one of them minds the others
        time.sleep(0.01)
    time.sleep(0.4)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does: to all of them
    out, err = run.communicate(timeout=60)
    assert (run.returncode, out) == (130, b""), err.decode()
    assert err.decode().splitlines()[-1] == "sealegs scan: interrupted"
    assert b"Traceback" not in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "run.py"]


def test_a_book_is_over_long_without_being_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(7)  # noqa: S311 - words, not secrets
    words = [f"word{number}" for number in range(5000)]
    (tmp_path / "book.txt").write_text(" ".join(draw.choices(words, k=60_000)))
    assert main(["scan", str(tmp_path / "book.txt"), "--jobs", "1"]) == 1
    assert "over-long" in capsys.readouterr().out
