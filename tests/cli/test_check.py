"""``sealegs check`` and ``sealegs diff``: words in, a page or an object, and an exit code out."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sealegs.cli.main import main
from sealegs.diagnosis.causes import causes
from sealegs.report import explained

ROOT = Path(__file__).parents[2]
KEYS = {
    *("source", "format", "steps", "signals", "verdict", "metric_problems", "incidents", "path", "hypotheses"),
    *("first_action", "log_next_time", "rules"),
}
INCIDENT_KEYS = {
    *("start", "peak", "end", "kind", "trajectory", "pre_loss", "peak_loss", "recovery_loss", "grad_norm_peak"),
}
Said = tuple[int, str, str]
Check = Callable[..., Said]


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Said:
        code = main(["check", *words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def curve(steps: int = 1500, seed: int = 0) -> np.ndarray[Any, Any]:
    noise = 0.01 * np.random.default_rng(seed).standard_t(5, steps)
    falling: np.ndarray[Any, Any] = (2.4 + 6 * np.exp(-np.arange(steps) / 120)) * np.exp(noise)
    return falling


def csv(path: Path, losses: Any, **columns: Any) -> Path:
    names = ["step", "train/loss", *columns]
    rows = zip(range(len(losses)), losses, *columns.values(), strict=True)
    path.write_text("\n".join([",".join(names), *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def spiked() -> np.ndarray[Any, Any]:
    losses = curve()
    losses[900:] += 1.2  # and stays
    losses[900] = 7.0
    return losses


def test_a_healthy_curve(check: Check, tmp_path: Path) -> None:
    code, out, err = check(str(csv(tmp_path / "a.csv", curve())))
    assert (code, err) == (0, "")
    assert "\nHEALTHY: " in out
    assert "loss from 'train/loss'" in out
    assert "Incidents" not in out


def test_a_curve_that_never_fell(check: Check, tmp_path: Path) -> None:
    """There is nothing before a plateau that begins with the run: no NaN is made up for it."""
    losses = 2.0 + 0.1 * np.random.default_rng(0).random(3000)
    _, out, _ = check(str(csv(tmp_path / "a.csv", losses)))
    assert "WATCH: plateau at step 0" in out
    assert re.search(r"panel 1: flat at 2\.0[45]\d* from step 0 on", out)
    assert " nan " not in out


def test_a_curve_that_is_not(check: Check, tmp_path: Path) -> None:
    path = csv(tmp_path / "a.csv", spiked()).name
    code, out, _ = check(path)
    assert code == 1
    assert "\nACT: " in out
    assert re.search(r"steps 900 to .*lingering", out)
    for title in ("First action", "Causes, the likeliest first", "The way through the decision tree", "Log this next"):
        assert title in out
    assert max(map(len, out.splitlines())) <= 100
    assert check(path, "--fail-on", "never")[0] == 0
    assert "What this means" in check(path, "--explain")[1]


def test_the_object_keeps_its_contract(check: Check, tmp_path: Path) -> None:
    code, out, err = check(str(csv(tmp_path / "a.csv", spiked())), "--json")
    told = json.loads(out)
    assert (code, err, told["verdict"], told["format"], told["steps"]) == (1, "", "act", "csv", 1500)
    assert told.keys() >= KEYS
    (incident,) = [each for each in told["incidents"] if each["start"] == 900]
    assert incident.keys() == INCIDENT_KEYS
    assert all(answer.keys() == {"question", "text", "answer", "evidence", "next"} for answer in told["path"])
    asked = [answer["question"] for answer in told["path"]]
    assert asked[:2] == ["Q0", "Q1.1"]
    for hypothesis in told["hypotheses"]:
        assert hypothesis.keys() == {"cause", "grade", "for", "against", "missing", "next_test"}
        assert hypothesis["grade"] in ("established", "supported", "hypothesis", "ruled out")
        assert hypothesis["cause"] in causes()


def test_what_is_not_finite_can_be_parsed(check: Check, tmp_path: Path) -> None:
    losses = curve()
    losses[1400:] = np.nan
    code, out, _ = check(str(csv(tmp_path / "a.csv", losses)), "--json")
    told = json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert (code, told["verdict"], told["incidents"][-1]["kind"]) == (1, "act", "nonfinite")


def test_rules_metric_and_pattern(check: Check, tmp_path: Path) -> None:
    path = csv(tmp_path / "a.csv", curve(), objective=curve(seed=1))
    assert json.loads(check(str(path), "--rules", "textbook", "--json")[1])["rules"] == "textbook"
    assert "loss from 'objective'" in check(str(path), "--metric", "loss=objective")[1]
    text = tmp_path / "log.txt"
    text.write_text("".join(f"<{step}> L~{loss:.4f}\n" for step, loss in enumerate(curve())))
    code, out, _ = check(str(text), "--pattern", r"<(?P<step>\d+)> L~(?P<loss>\S+)", "--json")
    assert (code, json.loads(out)["steps"]) == (0, 1500)


def test_a_run_by_its_name(check: Check, train_run: Path, tmp_path: Path) -> None:
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "a").symlink_to(train_run)
    code, out, _ = check("a", "--json")
    assert code in (0, 1)
    assert json.loads(out)["format"] == "run folder"


@pytest.fixture(scope="module")
def train_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a few rows."""
    import sealegs

    folder = tmp_path_factory.mktemp("runs") / "a"
    with sealegs.Watch(folder, settings={"optimizer": {"lr": 1e-3}}) as watch:
        for step, loss in enumerate(curve(300).tolist()):
            watch.see(step, loss=loss, grad_norm=0.5, lr=1e-3)
    return folder


BAD: dict[str, bytes | None] = {
    "nothing-there": None,
    "empty": b"",
    "junk": bytes(range(256)) * 40,
    "no-loss.csv": b"step,accuracy\n1,0.5\n2,0.6\n3,0.7\n",
    "prose.txt": b"Dear diary,\ntoday nothing was trained.\n",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence(name: str, check: Check, tmp_path: Path) -> None:
    if (content := BAD[name]) is not None:
        (tmp_path / name).write_bytes(content)
    code, out, err = check(name)
    assert (code, out) == (2, "")
    assert err.startswith("sealegs check: ")
    assert name in err
    assert len(err.splitlines()) == 1


LITTLE = {"three": [2.5, 2.4, 2.3], "NaN": [float("nan")] * 50, "constant": [2.5] * 200}


@pytest.mark.parametrize("losses", LITTLE.values(), ids=LITTLE)
def test_little_can_be_said_of_little(losses: list[float], check: Check, tmp_path: Path) -> None:
    code, out, err = check(str(csv(tmp_path / "a.csv", losses)), "--json")
    assert err == ""
    assert code in (0, 1)
    assert json.loads(out)["verdict"] in ("unknown", "act", "watch")


def test_a_folder_of_several_runs_asks_for_one(check: Check, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        csv(tmp_path / "runs" / name / "metrics.csv", curve(50))
    code, _, err = check("runs")
    assert code == 2
    assert "a/metrics.csv" in err
    assert len(err.splitlines()) == 1


def test_a_metric_that_is_no_pair_is_refused(check: Check, tmp_path: Path) -> None:
    code, _, err = check(str(csv(tmp_path / "a.csv", curve(50))), "--metric", "objective")
    assert (code, err.count("\n")) == (2, 1)
    assert "--metric loss=train/objective" in err


def test_every_finding_is_explained_and_has_its_page() -> None:
    page = (ROOT / explained.PAGE).read_text()
    headings = {re.sub(r"[^a-z0-9 ]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in page.splitlines()}
    assert {"verdicts", "metrics-that-cannot-be-believed", "incidents", "causes"} <= headings
    for name in (*explained.VERDICTS, *explained.INCIDENTS, *explained.PROBLEMS):
        assert f"`{name}`" in page, name


def test_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = csv(tmp_path / "a.csv", curve()), csv(tmp_path / "b.csv", spiked())
    assert main(["diff", str(a), str(a)]) == 0
    assert capsys.readouterr().out.rstrip().endswith("no difference")
    assert main(["diff", str(a), str(b), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [(each["signal"], each["first"], each["beyond_noise"]) for each in told["partings"]] == [("loss", 900, 900)]
    assert main(["diff", str(a), str(tmp_path / "c.csv")]) == 2
    assert "c.csv" in capsys.readouterr().err
