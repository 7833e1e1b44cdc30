"""``sealegs scan --incident``: a guarded run on a corpus with a few strange documents, and what is said of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sealegs
from sealegs.cli.main import main
from sealegs.guard_options import Telemetry
from sealegs.playbook import Playbook
from sealegs.report.postmortem import plots

DOCUMENTS, LENGTH, COMMON, RARE = 600, 48, 300, 90
STRANGE = (41, 77, 230, 314, 402, 577, 580)
"""Documents of tokens that hardly any other has."""
AT, STEPS, ROWS = 60, 66, 8
Said = tuple[int, dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, and a run on it that met six of its strange documents at once."""
    folder = tmp_path_factory.mktemp("run")
    random = np.random.default_rng(0)
    weights = 1 / np.arange(2, COMMON + 2) ** 1.7
    rows = random.choice(COMMON, (DOCUMENTS, LENGTH), p=weights / weights.sum())
    for place in STRANGE:
        rows[place] = COMMON + random.permutation(RARE)[:LENGTH]
    np.save(folder / "tokens.npy", rows.astype(np.uint16).reshape(-1))
    np.save(folder / "tokens.starts.npy", np.arange(DOCUMENTS) * LENGTH)
    usual = np.setdiff1d(np.arange(DOCUMENTS), STRANGE)
    batches = [torch.from_numpy(rows[random.choice(usual, ROWS)]) for _ in range(STEPS)]
    batches[AT][:6] = torch.from_numpy(rows[list(STRANGE[:6])])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(COMMON + RARE, 16), nn.Linear(16, COMMON + RARE))
    guard = sealegs.Guard(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        run=folder / "night",
        clip=1.0,
        playbook=Playbook.observe(),
        detection=sealegs.Detection(
            detectors=[lambda row: "a strange batch" if float(row["loss"]) > 5 and float(row["step"]) > 40 else None]
        ),
        telemetry=Telemetry(sample_every=0),
    )
    with guard:
        for batch in guard.batches(batches):
            loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            guard.step(loss)
    return folder


@pytest.fixture
def scan(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    monkeypatch.chdir(run)

    def scanned(*words: str) -> Said:
        code = main(["scan", *words, "--json", "--jobs", "1"])
        return code, json.loads(capsys.readouterr().out)

    return scanned


def test_the_documents_behind_an_incident_are_named_with_what_is_like_them(
    scan: Callable[..., Said], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "can_draw", lambda: False)  # nothing here looks at pictures
    code, scanned = scan("tokens.npy", "--incident", "night#1", "-o", str(tmp_path / "aside"))
    found = scanned["incident"]
    assert (code, found["steps"], found["rows"], found["found"]) == (1, [AT - 1, AT], 2 * ROWS, 2 * ROWS)
    rare = next(each for each in found["measures"] if each["measure"] == "rare")
    assert (rare["value"], rare["rows"], rare["before"], rare["is_unusual"]) == (1, 6, 0, True)
    assert (rare["alike"], rare["examples"]) == (7, ["tokens.npy#41", "tokens.npy#77", "tokens.npy#230"])
    assert {row["documents"][0] for row in found["worst"]} < {f"tokens.npy#{place}" for place in STRANGE[:6]}
    assert found["conclusion"].startswith("all of them are in this corpus; unusual for it by ")
    lines = [json.loads(line) for line in (tmp_path / "aside" / "documents.jsonl").read_text().splitlines()][1:]
    assert [(each["document"], each["action"]) for each in lines] == [
        *((place, "drop") for place in STRANGE[:5]),
        (577, "drop"),
        (580, "defer"),
    ]
    assert json.loads((run / "night/incidents/1/data.json").read_text()) == found
    assert main(["postmortem", "night#1", "-o", str(tmp_path / "page.md")]) == 0
    assert f"of the 16 rows of steps {AT - 1} to {AT}: all of them are in this corpus" in (
        (tmp_path / "page.md").read_text()
    )


def test_the_same_is_found_in_text_with_the_tokenizer_of_the_run(
    scan: Callable[..., Said], run: Path, tmp_path: Path
) -> None:
    words = {f"w{number}": number for number in range(COMMON + RARE)}
    tokenizer = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    split = {"type": "WhitespaceSplit"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": tokenizer, "pre_tokenizer": split}))
    rows = np.load(run / "tokens.npy").reshape(DOCUMENTS, LENGTH)
    corpus = tmp_path / "corpus"
    for name, part in (("a", rows[:300]), ("b", rows[300:])):
        (corpus / name).mkdir(parents=True)
        texts = (json.dumps({"text": " ".join(f"w{token}" for token in row)}) for row in part)
        (corpus / name / "part.jsonl").write_text("\n".join(texts))
    _, scanned = scan(str(corpus), "--incident", "night", "--tokenizer", str(tmp_path / "tokenizer.json"))
    _, of_ids = scan("tokens.npy", "--incident", "night")
    found, like = scanned["incident"], of_ids["incident"]
    assert found["measures"][1] | {"examples": []} == like["measures"][1] | {"examples": []}
    assert found["measures"][1]["examples"] == [f"{corpus}/a/part.jsonl#{place}" for place in STRANGE[:3]]
    assert {each["name"]: each["corpus"] for each in found["sources"]} == {f"{corpus}/{name}": 0.5 for name in "ab"}


def test_a_batch_that_is_like_the_others_is_said_to_be_so(scan: Callable[..., Said], run: Path, tmp_path: Path) -> None:
    """The rows are from the corpus, and there are so many strange documents that six are nothing special."""
    rows = np.load(run / "tokens.npy").reshape(DOCUMENTS, LENGTH)
    random = np.random.default_rng(1)
    more = np.concatenate([rows, COMMON + random.integers(0, RARE, rows.shape, np.uint16)])
    np.save(tmp_path / "more.npy", more.reshape(-1))
    code, scanned = scan(str(tmp_path / "more.npy"), "--row", str(LENGTH), "--incident", "night#1")
    found = scanned["incident"]
    assert (code, found["found"], found["listed"]) == (0, 2 * ROWS, 0)
    assert found["conclusion"] == "all of them are in this corpus; nothing about their tokens is unusual for it"


def test_rows_that_are_in_no_document_are_said_to_be_altered_or_of_another(
    scan: Callable[..., Said], tmp_path: Path
) -> None:
    other = np.random.default_rng(2).integers(0, COMMON, 40_000, np.uint16)
    np.save(tmp_path / "other.npy", other)
    _, scanned = scan(str(tmp_path / "other.npy"), "--incident", "night#1")
    assert scanned["incident"]["found"] == 0
    assert (
        "none of them is in this corpus: another corpus, another tokenizer, or altered"
        in (scanned["incident"]["conclusion"])
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["corpus.txt", "--incident", "night#1"], "this corpus is text; give the run's --tokenizer"),
        (["corpus.jsonl", "--incident", "night#1"], "this corpus is text; give the run's --tokenizer"),
        (["tokens.npy", "--incident", "night#2"], "night#2: no such incident; there are 1"),
        (["tokens.npy", "--incident", "day"], "day: no such run"),
    ],
)
def test_what_cannot_be_searched_is_one_sentence(
    words: list[str], sentence: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run)
    Path("corpus.txt").write_text("some text\n\nand more")
    Path("corpus.jsonl").write_text('{"text": "some text"}')
    assert main(["scan", *words]) == 2
    assert sentence in capsys.readouterr().err
