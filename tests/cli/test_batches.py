"""``sealegs batches``: token ids in, an order out."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from sealegs.batching.batch_sampler import StratifiedBatchSampler
from sealegs.batching.tokens import rare_rows
from sealegs.cli.main import main
from sealegs.report.commands.batches import Batched

ROOT = Path(__file__).parents[2]
Said = tuple[int, str, str]


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NDArray[np.uint16]:
    """100 rows of 16 tokens; three rare ones, each in rows that lie side by side, and one twice in a row."""
    monkeypatch.chdir(tmp_path)
    rows = np.random.default_rng(0).integers(0, 40, (100, 16)).astype(np.uint16)
    for token in range(3):
        rows[10 * token : 10 * token + 9, 5] = 100 + token
    rows[50, :2] = 200
    np.save("table.npy", rows)
    np.save("flat.npy", rows.reshape(-1))
    rows.reshape(-1).astype(np.uint32).tofile("flat.bin")
    return rows


@pytest.fixture
def batches(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    def run(*words: str) -> Said:
        code = main(["batches", *words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.mark.parametrize(
    "words",
    [("table.npy",), ("flat.npy", "--row", "16"), ("flat.bin", "--row", "16", "--dtype", "uint32")],
    ids=lambda words: words[0],
)
def test_the_order_is_that_of_the_sampler(
    words: tuple[str, ...], table: NDArray[np.uint16], batches: Callable[..., Said]
) -> None:
    code, out, err = batches(*words, "--batch", "8", "--seed", "5", "-o", "order.npy", "--json")
    assert code == 0
    assert "writing order.npy" in err
    told = msgspec.convert(json.loads(out), Batched, strict=True)
    assert (told.rows, told.batches, told.rare, told.rare_rows) == (100, 13, 4, 28)
    assert told.shuffled > told.unmet == 0
    assert told.in_one_row == 1
    order = np.load("order.npy")
    assert order.shape == (13, 8)
    assert order[12].tolist()[4:] == [-1] * 4
    sampler = StratifiedBatchSampler(rare_rows(table), 8, seed=5)
    assert [[row for row in batch if row >= 0] for batch in order.tolist()] == list(sampler)


def test_a_row_may_be_a_document(table: NDArray[np.uint16], batches: Callable[..., Said]) -> None:
    np.save("flat.starts.npy", np.array([0, 16, 20, 1000]))
    _, out, _ = batches("flat.npy", "--documents", "--batch", "2")
    assert out.startswith("4 rows, 2 batches of 2\n")


def test_what_cannot_be_parted_is_named(table: NDArray[np.uint16], batches: Callable[..., Said]) -> None:
    code, out, _ = batches("table.npy", "--batch", "20")
    assert code == 0
    assert "in this order\n  token 10" in out
    assert "1 times a row has a rare token twice or more, which no order of rows parts" in out


def test_the_schema_in_the_documents_is_the_one_that_holds() -> None:
    assert json.loads((ROOT / "docs" / "batches.schema.json").read_text()) == msgspec.json.schema(Batched)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere.npy"], "nowhere.npy: cannot be read (No such file or directory)"),
        (["table.npy", "--row", "8"], "--row 8: table.npy has 16 tokens a row; leave --row out"),
        (["flat.npy", "--row", "0"], "--row 0: at least 1"),
        (["flat.npy", "--batch", "0"], "batch_size=0: at least 1"),
        (["flat.npy", "--documents"], "--documents: flat.starts.npy is not there"),
        (["flat.npy", "-o", "order.txt"], "--output order.txt: the order is a numpy array"),
        (["flat.npy", "-o", "nowhere/order.npy"], "nowhere/order.npy: cannot be written"),
        (["negative.npy"], "token id -1: ids are from 0"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str],
    sentence: str,
    table: NDArray[np.uint16],
    batches: Callable[..., Said],
) -> None:
    np.save("negative.npy", np.array([-1, 2]))
    before = sorted(Path().iterdir())
    code, out, err = batches(*words)
    assert (code, out) == (2, "")
    assert sentence in err.splitlines()[-1]
    assert sorted(Path().iterdir()) == before
