"""``sealegs check`` and ``sealegs diff``: words in, a page or an object, and an exit code out."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.acting import Acting

import sealegs
from sealegs import curve_picture
from sealegs.cli.main import main
from sealegs.diagnosis.cause_cards import causes
from sealegs.incidents import Incident
from sealegs.report.commands import explain
from sealegs.report.commands.check import _incident
from sealegs.report.commands.check_schema import Checked

pytestmark = pytest.mark.xdist_group("check")  # some share a run

ROOT = Path(__file__).parents[2]
KEYS = {
    *("source", "format", "steps", "signals", "verdict", "metric_problems", "incidents", "path", "hypotheses"),
    *("first_action", "log_next_time", "rules", "skips", "interventions"),
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
    assert out.startswith("HEALTHY: ")
    assert "loss from 'train/loss'" in out
    assert "Incidents" not in out


def test_a_curve_that_never_fell(check: Check, tmp_path: Path) -> None:
    """There is nothing before a plateau that begins with the run: no NaN is made up for it."""
    losses = 2.0 + 0.1 * np.random.default_rng(0).random(3000)
    _, out, _ = check(str(csv(tmp_path / "a.csv", losses)))
    assert "WATCH: plateau at step 0" in out
    assert re.search(r"loss \(panel 1\): flat at 2\.0[45]\d* from step 0 on", out)
    assert " nan " not in out


def test_a_curve_that_is_not(check: Check, tmp_path: Path) -> None:
    path = csv(tmp_path / "a.csv", spiked()).name
    code, out, _ = check(path)
    assert code == 1
    assert out.startswith("ACT: ")
    assert re.search(r"steps 900 to .*lingering", out)
    for title in ("First action: ", "Why: ", "Causes, the likeliest first", "Log this next"):
        assert f"\n{title}" in out
    assert max(map(len, out.splitlines())) <= 100
    assert len(out.splitlines()) <= 35
    assert check(path, "--fail-on", "never")[0] == 0
    told = check(path, "--explain")[1]
    assert "The way through the decision tree" in told
    assert "What this means" in told
    assert not re.search(r"(?<!\()panels? \d", told), "a panel is named"


def test_the_object_keeps_its_contract(check: Check, tmp_path: Path) -> None:
    code, out, err = check(str(csv(tmp_path / "a.csv", spiked())), "--json")
    told = json.loads(out)
    assert (code, err, told["verdict"], told["format"], told["steps"]) == (1, "", "act", "csv", 1500)
    assert told.keys() >= KEYS
    assert msgspec.convert(told, Checked) == told
    assert (told["skips"], told["interventions"]) == (None, None)  # a CSV does not tell
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
    folder = tmp_path_factory.mktemp("runs") / "a"
    with sealegs.Watch(folder, settings={"optimizer": {"lr": 1e-3}}) as watch:
        for step, loss in enumerate(curve(300).tolist()):
            watch.see(step, loss=loss, grad_norm=0.5, lr=1e-3)
    return folder


def test_the_schema_in_the_documents_is_the_one_that_holds() -> None:
    assert json.loads((ROOT / "docs" / "check.schema.json").read_text()) == msgspec.json.schema(Checked)


Guarded = Callable[..., str]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Guarded:
    """A run in a guard's folder, with losses and norms as they are given at some steps; events as a guard writes
    them. Equal runs are made once, and copied."""
    made: dict[str, Path] = {}

    def make(folder: Path, spoilt: dict[int, float], norms: dict[int, float], *, act: bool, playbook: Any) -> None:
        with sealegs.Watch(folder, observer=Acting(act)) as watch:
            watch.note("guard", act=act, playbook=playbook)
            for step, loss in enumerate(curve(1500).tolist()):
                watch.see(step, loss=spoilt.get(step, loss), grad_norm=norms.get(step, 0.5))

    def copied(
        folder: Path,
        spoilt: dict[int, float],
        *,
        norms: dict[int, float] | None = None,
        act: bool = True,
        playbook: Any = None,
    ) -> str:
        what = repr((spoilt, norms, act, playbook))
        if what not in made:
            made[what] = tmp_path_factory.mktemp("guarded") / "a"
            make(made[what], spoilt, norms or {}, act=act, playbook=playbook)
        shutil.copytree(made[what], folder)
        return str(folder)

    return copied


def noted(folder: str, kind: str, *, step: int = 1500, **told: Any) -> str:
    """With one more event."""
    with (Path(folder) / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": kind, "step": step, "time": 1.0, **told}) + "\n")
    return folder


def test_steps_that_were_skipped_are_no_health(check: Check, guarded: Guarded, tmp_path: Path) -> None:
    """Two steps in eighty were skipped, each with a norm far beyond all before it, and the curve is smooth: these were
    never learned."""
    exploded = [step + more for step in range(300, 1480, 80) for more in (0, 1)]
    norms = {step: 0.5 * 11.0**count for count, step in enumerate(exploded, 1)}
    folder = guarded(tmp_path / "a", {350: float("nan")}, norms=norms)
    code, out, _ = check(folder, "--json")
    told = json.loads(out)
    assert msgspec.convert(told, Checked) == told
    assert told["verdict"] != "healthy"
    assert told["skips"].pop("share") == pytest.approx(31 / 1500)
    assert told["skips"] == {
        "count": 31,
        "reasons": {"spike/grad_norm": 30, "nonfinite": 1},
        "first": 300,
        "last": 1421,
        "finite": 30,
        "not_acted": 0,
        "unlearned": None,
    }
    assert told["interventions"] == {"count": 0, "by_action": {}, "outcomes": {}}
    _, out, _ = check(folder)
    words = " ".join(out.split())
    assert "30 of 1,500 steps (2.0%) were skipped though finite: what was in them was never learned" in words
    assert "Skipped 31 of 1,500 steps (spike/grad_norm 30, nonfinite 1), 2.1%, the first at step 300" in words
    assert code in (0, 1)


def test_many_small_skips_are_watched_with_a_way_out(check: Check, guarded: Guarded, tmp_path: Path) -> None:
    """Spikes that the curve itself does not count as incidents: only the events know of them."""
    folder = Path(guarded(tmp_path / "a", {}))
    finding = {"detector": "spike/grad_norm", "signal": "grad_norm", "severity": "GATE", "spoils_update": True}
    with (folder / "events.jsonl").open("a") as file:
        for step in range(400, 1400, 20):
            line = {"kind": "skip", "step": step, "time": 1.0, "text": "", "findings": [finding], "acted": True}
            file.write(json.dumps(line) + "\n")
    told = json.loads(check(str(folder), "--json")[1])
    assert (told["verdict"], told["skips"]["reasons"]) == ("watch", {"spike/grad_norm": 50})
    assert told["because"].startswith("50 of 1,500 steps (3.3%) were skipped though finite")
    assert "batch" in told["first_action"]
    assert "loosen" in told["first_action"]


@pytest.mark.parametrize(("every", "verdict"), [(30, "watch"), (10, "healthy")])
def test_a_source_that_is_hardly_learned_is_to_be_watched(
    check: Check, tmp_path: Path, every: int, verdict: str
) -> None:
    """Eight skips of 1,500 steps, none with finite numbers: nothing, but for the source that had them all."""
    folder = tmp_path / "a"
    with sealegs.Watch(folder) as watch:
        watch.note("guard", act=True, playbook=None)
        for step, loss in enumerate(curve().tolist()):
            watch.see(step, loss=loss, grad_norm=0.5, sources="books=7 code=1" if step % every else "wiki=8")
    finding = {"detector": "nonfinite", "signal": "loss", "severity": "GATE", "spoils_update": True}
    for step in range(300, 1500, 150):
        noted(str(folder), "skip", step=step, text="", findings=[finding], acted=True)
    code, out, _ = check(str(folder), "--json")
    found = json.loads(out)
    assert msgspec.convert(found, Checked) == found
    assert (code, found["verdict"], found["skips"]["finite"]) == (0, verdict, 0)
    assert (found["skips"]["unlearned"]["source"], found["skips"]["unlearned"]["skipped"]) == ("wiki", 8)
    lost = f"{8 * every / 1500:.0%} of it was never learned"
    told = f"8 of 8 skipped steps were of wiki, {1 / every:.1%} of the data: {lost}"
    assert (found["because"] == told) == (verdict == "watch")
    assert found["first_action"].startswith("Look at the batches" if verdict == "watch" else "Leave it")
    assert f"; {told}." in " ".join(check(str(folder))[1].split())


def test_what_nobody_acted_on_and_what_could_not_be_learned_is_told_and_no_more(
    check: Check, guarded: Guarded, tmp_path: Path
) -> None:
    shadow = json.loads(check(guarded(tmp_path / "a", {}, norms={900: 20.0}, act=False), "--json")[1])
    assert (shadow["skips"]["count"], shadow["skips"]["not_acted"]) == (0, 1)
    folder = guarded(tmp_path / "b", {step: float("nan") for step in range(300, 900, 100)})
    broken = json.loads(check(folder, "--json")[1])
    assert (broken["skips"]["count"], broken["skips"]["finite"]) == (6, 0)
    assert "never learned" not in broken["because"]


def test_a_run_that_was_halted_is_to_be_acted_on_until_it_goes_on(
    check: Check, guarded: Guarded, tmp_path: Path
) -> None:
    folder = Path(guarded(tmp_path / "a", {step: float("nan") for step in range(1489, 1500)}))
    code, out, _ = check(str(folder), "--json")
    told = json.loads(out)
    assert (code, told["verdict"]) == (1, "act")
    assert told["first_action"].startswith("The run was halted at step 1499: step 1499  HALT")
    with sealegs.Watch(folder, resume=True, observer=Acting()) as watch:
        watch.note("guard", step=1400, act=True, playbook=None)
        for step, loss in enumerate(curve(1700).tolist()[1400:], 1400):
            watch.see(step, loss=loss, grad_norm=0.5)
    assert not json.loads(check(str(folder), "--json")[1])["first_action"].startswith("The run was halted")


def test_an_incident_that_is_open_in_the_end_is_to_be_watched(check: Check, guarded: Guarded, tmp_path: Path) -> None:
    """Whether it is trouble the curve says: here it shows none, for the alarm is of another kind."""

    def told(name: str, at: int, **options: Any) -> dict[str, Any]:
        folder = noted(guarded(tmp_path / name, {}, **options), "alarm", step=at, incident=1)
        code, out, _ = check(folder, "--json")
        assert code == 0
        return dict(json.loads(out))

    late = told("a", 1494)
    assert late["verdict"] == "watch"
    assert late["because"] == "incident 1, since step 1494, was not over when the record ends"
    assert late["first_action"] == "Leave it: nothing asks for an action."
    over = told("b", 1300)
    assert over["verdict"] == "healthy"
    assert "not over" not in over["first_action"] + over["because"]
    followed = told("c", 1300, playbook="observe")
    assert followed["verdict"] == "watch"
    assert "was not over when the record ends" in followed["because"]  # with a playbook its end would be told


def test_a_loss_that_is_up_in_the_end_is_to_be_watched(check: Check, guarded: Guarded, tmp_path: Path) -> None:
    late = dict.fromkeys(range(1494, 1500), 20.0)
    code, out, _ = check(guarded(tmp_path / "a", late), "--json")
    told = json.loads(out)
    assert (code, told["verdict"], told["skips"]["count"]) == (0, "watch", 0)
    assert told["because"].startswith("spike at step 1494: loss 2.")
    assert "eload" not in told["first_action"]


def test_how_a_run_ended_is_told_and_its_curve_says_whether_to_act(
    check: Check, guarded: Guarded, tmp_path: Path
) -> None:
    ended: dict[str, Any] = {"kind": "end", "reason": "ended-badly", "why": "incident 1 never came back"}
    calm = json.loads(check(noted(guarded(tmp_path / "a", {}), **ended), "--json")[1])
    assert (calm["verdict"], calm["because"]) == ("watch", "the run ended badly: incident 1 never came back")
    stays = {step: float(loss) for step, loss in enumerate(spiked()) if step >= 900}
    code, out, _ = check(noted(guarded(tmp_path / "b", stays), **ended), "--json")
    assert (code, json.loads(out)["verdict"]) == (1, "act")


def test_a_loss_that_is_not_a_runs_own_is_watched_at_most(check: Check, guarded: Guarded, tmp_path: Path) -> None:
    """Of one of two that take turns; else this curve is to be acted on."""
    stays = {step: float(loss) for step, loss in enumerate(spiked()) if step >= 900}
    folder = guarded(tmp_path / "a", stays)
    assert json.loads(check(folder, "--json")[1])["verdict"] == "act"
    told = json.loads(check(noted(folder, "one-of-several"), "--json")[1])
    assert told["verdict"] == "watch"
    assert told["because"].endswith(
        "its loss is not its own: another model is trained in turns with it, and what one loses the other wins"
    )
    assert "eload" not in told["first_action"]


def test_a_loss_about_zero_is_explained(check: Check, tmp_path: Path) -> None:
    losses = 0.02 * np.random.default_rng(1).standard_normal(400)
    code, out, _ = check(str(csv(tmp_path / "a.csv", losses)), "--explain")
    words = " ".join(out.split())
    assert code == 0
    assert "CANNOT TELL: the loss goes to and fro about zero" in words
    assert "First action: Find out: plot the reward beside the loss" in words
    assert "Log this next time the settings, reward, entropy, kl" in words
    assert "hovers: A loss of both signs" in words


def test_interventions_and_what_came_of_them(check: Check, guarded: Guarded, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    guarded(folder, {})
    with sealegs.Watch(folder, resume=True) as watch:
        back = [{"action": "rollback", "back": 1}, {"action": "lower-lr", "factor": 0.5}]
        for number, actions in enumerate((back[:1], back), 1):
            watch.note("intervention", step=400 * number, number=number, actions=actions, acted=True)
        watch.note("intervention", step=1200, number=3, actions=back, acted=False)
        watch.note("outcome", step=600, intervention=1, result="helped", text="helped")
    told = json.loads(check(str(folder), "--json")[1])
    wanted = {"count": 2, "by_action": {"rollback": 2, "lower-lr": 1}, "outcomes": {"helped": 1, "not known yet": 1}}
    assert told["interventions"] == wanted
    out = " ".join(check(str(folder))[1].split())
    assert "Interventions: 2 (rollback 2, lower-lr 1); helped 1, not known yet 1." in out


def test_what_was_tested_by_a_replay_is_the_cause(check: Check, guarded: Guarded, tmp_path: Path) -> None:
    folder = guarded(tmp_path / "a", {900: 7.0, 901: 6.5})
    place = tmp_path / "a" / "incidents" / "1"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    numbers = {"pre_loss": 2.4, "usual": 2.4, "limit": 2.6, "peak_loss": 7.0, "grad_norm_peak": 0.5}
    incident = {"number": 1, "kind": "spike", "start": 900, "peak": 900, "end": 910, "recovery_loss": 2.4, **numbers}
    (place / "incident.json").write_text(json.dumps(incident))
    assert "replay" not in check(folder)[1]
    replayed = {"source": "a", "incident": 1, "kind": "spike", "onset": 900, "steps": 20, "apart": 0.0, "arms": []}
    replayed |= {"departure": None, "height": 99.0, "damage": 0.0, "causes": {"lr-too-high": "not needed"}}
    replayed |= {"location": None, "cause": "bad-data-batch", "because": "it is these batches, with any state"}
    (place / "replay.json").write_text(json.dumps(replayed))
    out = " ".join(check(folder)[1].split())
    assert "Why: bad data batch (established): replay: it is these batches, with any state" in out
    told = json.loads(check(folder, "--json")[1])["hypotheses"]
    assert (told[0]["cause"], told[0]["grade"]) == ("bad-data-batch", "established")
    (place / "replay.json").write_text("{}")
    code, out, err = check(folder)
    assert (code, err) == (0, "")
    assert "replay.json: cannot be read" in " ".join(out.split()), "a page without it is better than none"
    assert "established" not in out


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
    page = (ROOT / explain.PAGE).read_text()
    headings = {re.sub(r"[^a-z0-9 ]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in page.splitlines()}
    assert {"verdicts", "metrics-that-cannot-be-believed", "incidents", "causes"} <= headings
    for name in (*explain.VERDICTS, *explain.INCIDENTS, *explain.PROBLEMS):
        assert f"`{name}`" in page, name
    source = (ROOT / "src" / "sealegs" / "diagnosis" / "metrics.py").read_text()
    assert set(re.findall(r'kind="([a-z-]+)"', source)) == set(explain.PROBLEMS)


def test_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = csv(tmp_path / "a.csv", curve()), csv(tmp_path / "b.csv", spiked())
    assert main(["diff", str(a), str(a)]) == 0
    assert capsys.readouterr().out.rstrip().endswith("no difference")
    assert main(["diff", str(a), str(b), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [(each["signal"], each["first"], each["beyond_noise"]) for each in told["partings"]] == [("loss", 900, 900)]
    assert main(["diff", str(a), str(tmp_path / "c.csv")]) == 2
    assert "c.csv" in capsys.readouterr().err


def test_an_incident_that_was_over_after_a_way_back_does_not_end_before_it_began() -> None:
    over = Incident(
        number=1, start=703, kind="spike", pre_loss=0.45, usual=0.45, limit=0.5, peak=709, peak_loss=7.4,
        grad_norm_peak=12.6, end=658, trajectory="fast", recovery_loss=0.42,
    )  # fmt: skip
    told = " ".join(" ".join(_incident(over)).split())
    assert told.startswith(
        "from step 703 until the run had gone back and come to step 658 spike, fast: loss 0.45 before"
    )


def test_what_was_tried_and_the_settings_are_on_the_page(check: Check, tmp_path: Path) -> None:
    path = csv(tmp_path / "a.csv", spiked()).name
    (tmp_path / "args.toml").write_text("[optimizer]\nlr = 0.5\nweight_decay = 0.0\nbeta2 = 0.999\n")
    (tmp_path / "tried.toml").write_text('[[tried]]\naction = "halve the LR"\noutcome = "no help"\n')
    words = (path, "--settings", "args.toml", "--tried", "skip batches 890-950: no help", "--tried", "tried.toml")
    out = check(*words)[1]
    assert "  skip batches 890-950: no help\n  halve the LR: no help\n" in out
    assert "OPT1: beta2 is 0.999" in out
    told = json.loads(check(*words, "--json")[1])
    assert told["tried"][0] == {"action": "skip batches 890-950", "outcome": "no help"}
    assert {"OPT1", "OPT5"} <= {each["code"] for each in told["settings"]}
    assert msgspec.convert(told, Checked) == told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tried", "something"), "an action, a colon and what came of it"),
        (("--tried", "nowhere.toml"), "cannot be read"),
        (("--settings", "nowhere.json"), "cannot be read"),
        (("--settings", "model.bin"), "a pickle"),
        (("--html", "no/such/folder/page.html"), "cannot be written"),
    ],
)
def test_flags_that_are_wrong_are_told_in_one_sentence(
    words: tuple[str, ...], said: str, check: Check, tmp_path: Path
) -> None:
    code, out, err = check(csv(tmp_path / "a.csv", curve()).name, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_a_page_that_has_too_much_to_say_leaves_out_what_matters_least(check: Check, tmp_path: Path) -> None:
    losses = curve(1500)
    for at in (300, 500, 700, 900):
        losses[at : at + 30] += 2.0
    losses[1100:] += 1.5
    rows = [f"step {step} loss {loss:.4f} grad_norm {0.5 + loss / 50:.4f}" for step, loss in enumerate(losses.tolist())]
    warnings = [
        "Some weights of M were not initialized from the model checkpoint",
        "size mismatch for lm_head.weight: copying a param",
        "Detected call of `lr_scheduler.step()` before `optimizer.step()`",
        "OVERFLOW! Skipping step.",
    ]
    (tmp_path / "train.log").write_text("\n".join([*warnings, *rows]) + "\n")
    (tmp_path / "args.toml").write_text(
        "lr = 0.5\nweight_decay = 0.0\nbeta2 = 0.999\ngrad_clip = 0.0\nwarmup_steps = 0\n"
    )
    tried = [f"clip at {bound}: no help" for bound in (0.1, 0.3, 0.5, 1)] + ["skip batches 1090-1110: no help"]
    words = [word for each in tried for word in ("--tried", each)]
    out = check("train.log", "--settings", "args.toml", *words)[1]
    assert len(out.splitlines()) <= 35
    assert max(map(len, out.splitlines())) <= 100
    for part in ("ACT: ", "First action: ", "Why: ", "Incidents", "Causes, the likeliest first", "What was tried"):
        assert part in out
    assert "--explain shows more (" in out.splitlines()[-1], "and it says that there is more"


def test_lines_of_a_text_log_are_told(check: Check, tmp_path: Path) -> None:
    rows = [f"step {step} loss {loss:.4f}" for step, loss in enumerate(curve(400).tolist())]
    text = [
        "Some weights of M were not initialized from the model checkpoint",
        *rows,
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
    ]
    (tmp_path / "train.log").write_text("\n".join(text) + "\n")
    code, out, _ = check("train.log")
    assert code == 0
    assert out.startswith("WATCH: the log ends: torch.OutOfMemoryError: CUDA out of memory.")
    assert "smaller micro-batch" in out
    assert "some weights were not in the checkpoint and begin at random (before the first row" in " ".join(out.split())
    assert len(json.loads(check("train.log", "--json")[1])["lines"]) == 2


HOSTILE = '<script>alert(1)</script><img src=x onerror=alert(1)>"\x1b[31m'


def test_the_same_as_one_page_with_the_curve(check: Check, tmp_path: Path) -> None:
    losses = spiked()
    losses[1200:1210] = np.nan
    path = csv(tmp_path / "a.csv", losses, grad_norm=0.5 + 0.1 * np.random.default_rng(3).random(1500))
    code, out, _ = check(path.name, "--html", "page.html")
    page = (tmp_path / "page.html").read_text()
    verdict, action = out.splitlines()[0], "<strong>First action:</strong>"
    assert code == 1
    assert verdict.split(": ")[0] in page
    assert action in page
    assert "<p>Why: " in page
    assert "--explain" not in page
    assert page.count("<polyline") >= 3, "the loss breaks where it is not finite, and the gradient norm is below it"
    assert page.count('fill-opacity="0.16"') >= 2
    assert "The way through the decision tree" in page
    numbers = re.findall(r"-?\d+\.\d+", "".join(re.findall(r'points="([^"]*)"', page)))
    assert all(-1 <= float(number) <= 1000 for number in numbers), "nothing is drawn outside"


def test_text_of_strangers_is_text_on_the_page(check: Check, tmp_path: Path) -> None:
    rows = "\n".join(f"step {step} loss {loss:.4f}" for step, loss in enumerate(curve(300).tolist()))
    name = "a<script>.log"
    (tmp_path / name).write_text(f"missing keys: {HOSTILE}\n{rows}\n")
    check(name, "--html", "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "&lt;script&gt;" in page
    assert "<script" not in page.lower()
    assert "<img" not in page.lower()
    assert "\x1b" not in page
    assert "default-src 'none'" in page


def test_a_million_rows_are_drawn_by_their_extremes(tmp_path: Path) -> None:
    losses = np.full(1_000_000, 2.0)
    losses[500_000] = 9.0
    drawn = curve_picture._strokes(np.arange(1_000_000), losses, (0, 999_999))
    ((places, values),) = drawn
    assert len(places) < 4 * curve_picture.WIDTH
    assert values.max() == 9.0


@pytest.mark.parametrize(("end", "verdict"), [(0.9, "unknown"), (0.1, "watch")])
def test_a_log_without_a_loss_is_judged_by_its_columns(check: Check, tmp_path: Path, end: float, verdict: str) -> None:
    """A score that is lost shows trouble; one that is not shows no health. A column of no known meaning is no log."""
    scores = np.interp(np.arange(40), [0, 20, 25, 39], [0.2, 0.85, end, end])
    rows = "".join(f"{n},{score}\n" for n, score in enumerate(scores))
    (tmp_path / "scores.csv").write_text("epoch,val_acc\n" + rows)
    (tmp_path / "others.csv").write_text("epoch,zorp\n" + rows)
    code, out, _ = check("scores.csv", "--json")
    said = json.loads(out)
    assert (code, said["verdict"]) == (0, verdict)
    assert "no column looks like a training loss" in said["because"]
    assert check("others.csv")[0] == 2
