"""From a real incident to its post-mortem: trained, broken, run again, written; and logs that know less."""

import io
import json
import math
import random
import re
import shutil
from collections.abc import Iterable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sealegs.capsule.read import open_capsule
from sealegs.cli.main import main
from sealegs.faults.practice import disturbed
from sealegs.faults.spec import parse
from sealegs.incidents import Incident
from sealegs.lab import branches
from sealegs.lab.settings import SIZES
from sealegs.lab.sources import open_data
from sealegs.lab.train import resolved, train
from sealegs.record import manifest
from sealegs.record.run import open_run
from sealegs.record.schema import EVENTS, METRICS, to_line
from sealegs.report.commands import verify as verified
from sealegs.report.commands.replay import ArmShown, Replayed
from sealegs.report.postmortem import plots
from sealegs.report.postmortem.build import Case, diagnosed, logged_incidents, open_incident, postmortem_of
from sealegs.report.postmortem.causes import discriminating, hypotheses, root_cause, title_of
from sealegs.report.postmortem.stretch import rows_about, stretch, went_back

pytestmark = pytest.mark.xdist_group("postmortem")  # one run serves all

NANO = SIZES["nano"]
CADENCE = replace(NANO.cadence, evaluate_steps=0, checkpoint_steps=0, evaluate_batches=1)
MODEL = replace(NANO.model, layers=1)  # no section depends on its depth, and a step takes a third less
SETTINGS = resolved(replace(NANO, steps=300, threads=1, shadow=True, cadence=CADENCE, model=MODEL))
STRUCK, LAST = 230, 300
TITLES = [
    *("Symptoms", "Evidence", "Hypotheses", "Discriminating evidence", "Root cause", "Classification"),
    *("Recovery action", "Outcome", "Cost", "Remediation", "Verification", "Lesson", "Follow-ups"),
]


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with forty batches of noise in it, which were run again already."""
    run = tmp_path_factory.mktemp("runs") / "experiments" / "noisy"
    run.parent.mkdir()
    data = open_data(SETTINGS)
    branches.begin(SETTINGS, data, run, steps=200)
    left = iter(range(LAST - 200))
    train(
        SETTINGS,
        data,
        run,
        resume=True,
        disturb=partial(disturbed, [parse(f"random-shard:batches=40@{STRUCK}")], SETTINGS.model.vocabulary),
        should_stop=lambda: None if next(left, None) is not None else "enough",
    )
    assert main(["replay", str(run)]) == 0
    return run


@pytest.fixture
def run(struck: Path, tmp_path: Path) -> Path:
    """A copy, to write into."""
    copy = tmp_path / "experiments" / "noisy"
    shutil.copytree(struck, copy)
    return copy


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer than all else of a document, and longer than reruns."""
    monkeypatch.setattr(plots, "find_spec", lambda name: None)


@pytest.fixture(scope="module")
def documented(struck: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """A copy with its post-mortem, to look at; and the files that the command named."""
    run = tmp_path_factory.mktemp("documented") / "experiments" / "noisy"
    shutil.copytree(struck, run)
    said = io.StringIO()
    with redirect_stdout(said):
        assert main(["postmortem", str(run)]) == 0
    return run, [Path(line) for line in said.getvalue().splitlines()]


def written_sections(text: str) -> dict[str, str]:
    parts = text.split("\n## ")[1:]
    return {part.partition("\n")[0]: part.partition("\n")[2].strip() for part in parts}


def test_every_section_is_filled_and_the_cause_is_the_tested_one(documented: tuple[Path, list[Path]]) -> None:
    run, paths = documented
    folder = run / "incidents" / "1"
    assert paths == [
        folder / "postmortem.md",
        folder / "postmortem.html",
        *(folder / "evidence" / f"{name}.png" for name in ("course", "token-losses", "tokens", "activations")),
        run.parent / "lessons.md",
    ]
    text = paths[0].read_text()
    told = written_sections(text)
    assert list(told) == TITLES
    assert "Every section is filled." in text
    assert "EMPTY" not in text
    identity = json.loads((run / "manifest.json").read_text())["run_id"]
    assert text.splitlines()[0].startswith("# Post-mortem: incident 1, 20")
    assert text.splitlines()[0].endswith(f" UTC, run {identity}")
    assert told["Symptoms"].startswith(f"- onset: step {STRUCK}\n- loss before (EMA over 50 steps): 3.")
    assert f"at step {STRUCK}; baseline 1." in told["Symptoms"]
    assert f"batch index: {STRUCK} to 269" in told["Symptoms"]
    assert "in the batch, 0 before, loss" in told["Symptoms"]
    assert told["Hypotheses"].count("### H") >= 3
    assert told["Hypotheses"].count("; panel") == told["Hypotheses"].count("### H")
    assert told["Hypotheses"].startswith(
        "### H1. Bad data: degenerate, mis-encoded or over-long text (tested; panels 1"
    )
    assert "batches from before): 0% of the incident is left: favours H1" in told["Discriminating evidence"]
    assert "of the incident is left: favours H1\n- panel 1, rerun with older state (" in told["Discriminating evidence"]
    assert told["Root cause"].startswith("Bad data: degenerate, mis-encoded or over-long text, tested: it is these")
    assert "- root cause: bad data batch" in told["Classification"]
    done = "- none: no update was skipped, and nothing else was done; its playbook observes"  # they cost, no more
    assert told["Recovery action"].startswith(done)
    assert told["Remediation"].splitlines() == [
        "- skip those batches (skip: from the onset to the last bad row)",
        f"- in a rerun: leave out the batches of steps {STRUCK} to 269 (`--fix skip={STRUCK}:270`)",
    ]
    assert f"with the change above (`sealegs verify {run}#1`), and expect:" in told["Verification"]
    assert told["Verification"].count("- [ ] ") == 4
    cost, of_the_run = told["Cost"].split("\n\n")
    assert cost.endswith("price not given.")
    assert of_the_run.startswith("Of the whole run: stability cost ")
    assert len(told["Lesson"].splitlines()) == 1


def test_a_run_that_was_not_run_again_says_which_test_would_tell(run: Path) -> None:
    (run / "incidents" / "1" / "replay.json").unlink()
    assert main(["postmortem", f"{run}#1"]) == 0
    text = (run / "incidents" / "1" / "postmortem.md").read_text()
    told = written_sections(text)
    assert f"not replayed: run `sealegs replay {run}#1`" in told["Discriminating evidence"]
    assert told["Root cause"].startswith("Not known yet; likeliest is H1, Bad data")
    assert told["Root cause"].endswith(f"and this is the test that would tell: `sealegs replay {run}#1`.")
    assert told["Lesson"].startswith("EMPTY: ")
    assert "1 of 13 sections is empty: Lesson." in text
    assert "- skip those batches (skip: from the onset to the last bad row), if it is H1" in told["Remediation"]
    assert not (run.parent / "lessons.md").exists()
    assert not (run / "incidents" / "1" / "evidence" / "tokens.png").exists()


@pytest.mark.usefixtures("no_pictures")
def test_the_lesson_is_there_once_and_is_renewed(run: Path) -> None:
    book = run.parent / "lessons.md"
    book.write_text("# Lessons\n\n- other-1#1: an older one.\n")
    for _ in range(2):
        assert main(["postmortem", str(run)]) == 0
    identity = json.loads((run / "manifest.json").read_text())["run_id"]
    lines = book.read_text().splitlines()
    assert lines[:3] == ["# Lessons", "", "- other-1#1: an older one."]
    assert len(lines) == 4
    assert lines[3].startswith(f"- {identity}#1: spike at step 230: Bad data")
    book.write_text("\n".join([*lines[:2], f"- {identity}#1: what was thought first.", lines[2]]) + "\n")
    assert main(["postmortem", str(run)]) == 0
    assert book.read_text().splitlines() == [*lines[:2], lines[3], lines[2]], "in its place"


class Page(HTMLParser):
    """What a page asks for, and whether every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in ("meta", "img", "br", "hr", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_one_file_that_asks_for_nothing(documented: tuple[Path, list[Path]]) -> None:
    run, _ = documented
    text = (run / "incidents" / "1" / "postmortem.html").read_text()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.tags.count("img") == page.tags.count("figure") == page.tags.count("figcaption") == 4
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text
    assert page.tags.count("h2") == len(TITLES)
    assert text.count('<li class="task">') == 4
    assert page.tags.count("table") == 1


def test_without_matplotlib_there_is_still_a_document(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    assert main(["postmortem", str(run)]) == 0
    said = capsys.readouterr()
    folder = run / "incidents" / "1"
    names = [folder / "postmortem.md", folder / "postmortem.html", run.parent / "lessons.md"]
    assert said.out.splitlines() == list(map(str, names))
    assert "<img" not in (folder / "postmortem.html").read_text()
    assert (
        "- pictures: none: matplotlib is not installed: `pip install 'sealegs[report]'`"
        in (folder / "postmortem.md").read_text()
    )
    assert "![" not in (folder / "postmortem.md").read_text()


@pytest.mark.usefixtures("no_pictures")
def test_an_incident_that_was_brought_elsewhere_has_its_document_there(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "incidents" / "1", tmp_path / "brought")
    assert main(["postmortem", str(tmp_path / "brought")]) == 0
    told = written_sections((tmp_path / "brought" / "postmortem.md").read_text())
    assert told["Root cause"].startswith("Bad data: ")
    assert told["Recovery action"].startswith("EMPTY: ")


def test_a_damaged_incident_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "incidents" / "1" / "replay.json").write_text("{}")
    assert main(["postmortem", str(run)]) == 2
    assert "replay.json: cannot be read" in capsys.readouterr().err
    (run / "incidents" / "1" / "incident.json").write_text('{"number": 1}')
    assert main(["postmortem", str(run)]) == 2
    assert "incident.json: cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere"], "nowhere: no such file"),
        (["{run}#7"], "#7: no such incident; there are 1"),
        (["{run}#x"], "after the # comes the number of an incident"),
        (["{run}", "-o", "a.html"], "the name of a document ends in .md"),
        (["{run}", "-o", "nowhere/a.md"], "is in no folder that there is"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str], sentence: str, struck: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["postmortem", *(word.format(run=struck) for word in words)]) == 2
    assert sentence in capsys.readouterr().err


# Whether the remedy brings what is promised.


@pytest.mark.usefixtures("no_pictures")
def test_what_is_promised_is_measured_and_goes_into_the_document(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run), "--json"]) == 0
    folder = run / "incidents" / "1"
    found = verified.read(capsys.readouterr().out.encode())
    assert verified.read((folder / "verified.json").read_bytes()) == found
    assert [(fix.name, fix.value) for fix in found.fixes] == [("skip", f"{STRUCK}:270")]
    assert [promise.signal for promise in found.promises] == ["loss", "loss", "grad_norm", "clipped_norm"]
    loss, *_, clipped = found.results
    assert (found.first, found.last, found.borrowed, found.begun) == (201, loss.promise.last, 0, "snapshot")
    assert loss.promise.was is not None
    assert loss.value is not None
    assert loss.value < loss.promise.below < loss.promise.was
    assert clipped.value == pytest.approx(1.0, abs=1e-4), "measured, not the setting"
    text = (folder / "postmortem.md").read_text()
    told = written_sections(text)["Verification"]
    assert told.startswith("Run again from step 201, a state in the capsule, to step ")
    assert told.count("- [x] ") == 4
    assert f": {loss.value:.4g} at step {loss.step}, kept" in told
    assert (folder / "postmortem.html").read_text().count("\N{BALLOT BOX WITH CHECK}") == 4
    assert main(["postmortem", str(run)]) == 0
    assert (folder / "postmortem.md").read_text() == text


@pytest.mark.usefixtures("no_pictures")
def test_a_remedy_that_does_not_help_breaks_them(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = [f"loss[{STRUCK}:{STRUCK + 4}]<baseline+1", "max clipped_norm[201:234]<=0.5"]
    words = [word for each in expected for word in ("--expect", each)]
    assert main(["verify", f"{run}#1", "--fix", "clip=0.5", *words]) == 1
    out = capsys.readouterr().out
    assert "BROKEN: Run again from step 201" in out
    assert "1 of 2 promises are kept" in out
    noisy, clipped = verified.read((run / "incidents" / "1" / "verified.json").read_bytes()).promises
    assert isinstance(noisy.measured, float)
    assert noisy.measured == pytest.approx(open_run(run).column("loss")[noisy.step], abs=1.0), (
        "the noise is still there"
    )
    assert clipped.kept
    told = written_sections((run / "incidents" / "1" / "postmortem.md").read_text())["Verification"]
    assert (told.count("- [ ] "), told.count("- [x] ")) == (1, 1)


@pytest.mark.usefixtures("no_pictures")
def test_from_the_seed_it_is_the_same_run_with_the_batches_that_were_bad(run: Path) -> None:
    """Nothing is changed here, so that all that is recorded comes again, bit for bit, up to the end of the capsule."""
    last = open_capsule(run / "incidents" / "1").steps().stop - 1
    assert last >= STRUCK
    words = ["--fix", "lr=1.0", "--expect", f"max grad_norm[0:{last + 1}]<3", "--from-seed"]
    assert main(["verify", str(run), *words]) == 1
    again, before = open_run(run / "incidents" / "1" / "rerun-1"), open_run(run)
    assert again.steps.tolist() == list(range(last + 1))
    for signal in ("loss", "grad_norm"):
        assert again.column(signal).tolist() == before.column(signal)[: last + 1].tolist()
    found = verified.read((run / "incidents" / "1" / "verified.json").read_bytes())
    assert (found.begun, found.first, found.last) == ("seed", 0, last)
    assert found.folder == str(run / "incidents" / "1" / "rerun-1")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--fix", "skip=7"], "7 is not what skip can be"),
        (["--expect", "loss<2"], "write it like loss@312<2.5"),
        (["--expect", "loss@100<2"], "the state of the capsule is of step 201; begin there, or say --from-seed"),
        (["--fix", "optimizer.eps=1e-6"], "optimizer.eps cannot be changed here; in a state that is there, only"),
        (["--fix", "model.norm_epps=1e-6"], "model.norm_epps cannot be changed here"),
        (["--fix", "model.norm_eps=tiny"], "tiny is no value of a setting"),
        (["--fix", "lr=before"], "the learning rate has no jump in the capsule"),
        (["--from-seed", "--expect", "loss@300<2"], "the run has 300 steps, the last is 299"),
        (["--from-seed", "--fix", "data.batch=4"], "data.batch cannot be changed here; from the seed, those of model"),
        (["--from-seed", "--build", "train.py:build"], "so its seed is not known; leave out --from-seed"),
    ],
)
def test_what_cannot_be_verified_is_one_sentence(
    words: list[str], sentence: str, struck: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(struck), *words]) == 2
    assert sentence in capsys.readouterr().err
    assert not (struck / "incidents" / "1" / "verified.json").exists()


@pytest.mark.usefixtures("no_pictures")
def test_without_a_tested_cause_somebody_must_say_what_to_change(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "incidents" / "1" / "replay.json").unlink()
    assert main(["verify", str(run)]) == 2
    assert f"run `sealegs replay {run}#1` first, or say what to change: --fix clip=0.5" in capsys.readouterr().err
    shutil.copytree(run / "incidents" / "1", run.parent / "brought")
    words = ["--fix", "gate=230:231", "--expect", "loss@230<99"]
    assert main(["verify", str(run.parent / "brought"), *words]) == 0
    assert (run.parent / "brought" / "verified.json").is_file()


# Logs that know less.


def losses(spikes: Iterable[int], steps: int = 1500, rows: int = 30) -> Iterable[tuple[int, float, float]]:
    """Step, loss and gradient norm of a run that learns, with spikes that heal."""
    noise = random.Random(1)  # noqa: S311
    for step in range(steps):
        loss, norm = 2.0 + 3 * math.exp(-step / 200) + noise.gauss(0, 0.03), 0.7 + noise.gauss(0, 0.03)
        for spike in spikes:
            if spike <= step < spike + rows:
                loss += 3 * math.exp(-(step - spike) / 10)
                norm += 40 * (step == spike)
        yield step, loss, norm


@pytest.fixture
def log(tmp_path: Path) -> Path:
    lines = (
        f"step {step} | loss {loss:.4f} | grad_norm {norm:.3f} | lr 3.0e-04" for step, loss, norm in losses([600, 1100])
    )
    path = tmp_path / "train.log"
    path.write_text("\n".join(lines))
    return path


def test_a_foreign_log_has_thinner_documents(
    log: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(log.parent)
    assert main(["postmortem", "train.log"]) == 2
    assert "not a run folder, so say where to write: -o FILE.md" in capsys.readouterr().err
    assert main(["postmortem", "train.log", "-o", "spikes.md"]) == 0
    assert main(["postmortem", "train.log#2", "-o", "second.md"]) == 0
    out = capsys.readouterr().out.splitlines()
    written = [f"spikes-{n}{rest}" for n in (1, 2) for rest in (".md", ".html", "-evidence/course.png")]
    assert [line for line in out if "lessons" not in line] == [
        *written,
        *("second.md", "second.html", "second-evidence/course.png"),
    ]
    for name, onset in (("spikes-1.md", 600), ("second.md", 1100)):
        text = Path(name).read_text()
        told = written_sections(text)
        assert list(told) == TITLES
        assert text.startswith(
            f"# Post-mortem: incident {1 if onset == 600 else 2}, time not recorded, run train.log\n"
        )
        assert f"- onset: step {onset}\n" in told["Symptoms"]
        assert told["Recovery action"] == "EMPTY: the log has no record of what was done"
        assert "this incident left no capsule to run again" in told["Discriminating evidence"]
        assert told["Hypotheses"].count("### H") >= 3
        assert str(1700 - onset) not in told["Hypotheses"], "nothing about the other one"


def test_a_healthy_log_needs_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "healthy.csv"
    path.write_text("step,loss\n" + "\n".join(f"{step},{loss}" for step, loss, _ in losses([], 400)))
    assert main(["postmortem", str(path)]) == 0
    assert "no incident is in it, so there is nothing to write" in capsys.readouterr().out


def make_run(folder: Path, rows: Iterable[dict[str, Any]], events: Iterable[dict[str, Any]]) -> Path:
    """A run folder as a watch leaves one."""
    folder.mkdir(parents=True)
    manifest.save(manifest.describe(folder.name, seed=7, dtype="bf16", price_per_hour=3.6), folder)
    (folder / METRICS).write_bytes(b"".join(map(to_line, rows)))
    (folder / EVENTS).write_bytes(b"".join(map(to_line, events)))
    return folder


@pytest.mark.usefixtures("no_pictures")
def test_a_run_that_was_only_watched_is_known_by_its_alarms(tmp_path: Path) -> None:
    rows = ({"step": step, "loss": loss, "grad_norm": norm} for step, loss, norm in losses([600, 1100]))
    findings = [{"detector": "spike/loss", "severity": "ALARM", "signal": "loss", "value": 5.0}]
    alarms = [
        {"kind": "alarm", "step": step, "time": 1e9, "text": "", "findings": findings, "incident": number}
        for number, step in ((4, 600), (5, 800))
    ]
    folder = make_run(tmp_path / "experiments" / "watched", rows, alarms)
    found = logged_incidents(open_run(folder))
    assert {number: incident.start for number, incident in found.items()} == {4: 600, 5: 800, 6: 1100}
    assert found[4].kind == found[5].kind == "spike"
    assert found[4].recovery_loss is not None, "as hindsight sees it"
    assert (found[5].peak_loss, found[5].end) == (open_run(folder).column("loss")[800], None)
    assert found[5].usual < found[5].limit < found[5].usual + 0.05
    assert main(["postmortem", f"{folder}#5"]) == 0
    text = (folder / "incidents" / "seen-5" / "postmortem.md").read_text()
    assert "incident 5, 2001-09-09 01:46:40 UTC, run watched-" in text
    assert main(["postmortem", str(folder)]) == 0
    assert (folder / "incidents" / "seen-6" / "postmortem.html").exists()


# The stretch that a diagnosis is made from.


def gone_back(folder: Path) -> Path:
    """NaN at step 100 that passes, a spike at 600 that is gone back from at step 620 to 580."""
    told = [{"step": s, "loss": math.nan if s in (100, 101, 102) else loss, "grad_norm": n, "time": float(s)}
            for s, loss, n in losses([600], rows=200)]  # fmt: skip
    again = [
        {"step": step, "loss": loss, "grad_norm": norm, "time": 100.0 + step} for step, loss, norm in losses([], 1500)
    ]
    events = [{"kind": "resume", "step": 580, "time": 690.0}, {"kind": "checkpoint", "step": 500, "time": 500.0}]
    return make_run(folder, [*told[:620], *again[580:]], events)


SPIKE = Incident(
    number=2, start=600, kind="spike", pre_loss=2.1, usual=2.1, limit=2.2, peak=600, peak_loss=5.0, grad_norm_peak=40.0,
    end=650, trajectory="fast", recovery_loss=2.1,
)  # fmt: skip
BROKEN = replace(SPIKE, number=1, start=100, peak=100, peak_loss=math.nan, end=110)


def test_the_stretch_is_the_attempt_in_which_it_happened(tmp_path: Path) -> None:
    run = open_run(gone_back(tmp_path / "back"))
    worst = replace(SPIKE, peak_loss=float(run.written("loss").values[600]))
    part = stretch(run, worst, [BROKEN])
    assert (part.steps[0], part.steps[-1]) == (111, 619), "after the incident before, up to the step back"
    assert part.column("loss")[part.steps == 600][0] == worst.peak_loss
    assert [event.kind for event in part.events] == ["checkpoint"], "the resume came later"
    assert went_back(run, worst)
    assert not went_back(run, replace(worst, start=1200, peak=1200, peak_loss=2.0))
    assert run.column("loss")[run.steps == 600][0] < 3, "the run itself remembers the attempt that went well"


def test_a_diagnosis_is_about_this_incident_alone(tmp_path: Path) -> None:
    run = open_run(gone_back(tmp_path / "back"))
    worst = replace(SPIKE, peak_loss=float(run.written("loss").values[600]))
    facts, _ = diagnosed(Case(source="back", run=run, incident=worst, others=(BROKEN,)))
    assert not facts.is_nonfinite
    assert facts.onset == 600
    assert facts.resumed_before is None
    document = postmortem_of(Case(source="back", run=run, incident=worst, others=(BROKEN,)))
    assert document.symptoms.grad_norm == pytest.approx(40.7, abs=0.2)


def test_a_skip_near_a_spike_is_no_part_of_it(tmp_path: Path) -> None:
    """A NaN that was skipped thirty steps before, and one of thirty steps later, are two more incidents."""
    told = [{"step": step, "loss": loss, "grad_norm": norm} for step, loss, norm in losses([600])]
    for step in (570, 660):
        told[step] |= {"loss": math.nan, "grad_norm": math.nan}
    run = open_run(make_run(tmp_path / "near", told, []))
    seen = logged_incidents(run)
    (spike,) = (each for each in seen.values() if each.kind == "spike")
    others = tuple(each for each in seen.values() if each != spike)
    assert [each.kind for each in others] == ["nonfinite", "nonfinite"]
    case = Case(source="near", run=run, incident=spike, others=others)
    facts, diagnosis = diagnosed(case)
    assert not facts.is_nonfinite
    assert (facts.run.steps[-1], facts.is_over) == (659, True)
    assert 570 not in facts.run.steps
    assert diagnosis.first_action.startswith("Leave it, the loss is back")
    document = postmortem_of(case)
    told_of = [text for each in document.hypotheses for text in (*each.evidence_for, *each.evidence_against)]
    assert told_of
    assert not any("not finite" in text for text in (*told_of, *document.outcome))
    assert [(one.last, math.isfinite(one.was or 0.0)) for one in document.promises] == [(650, True)] * 3
    (first,) = (each for each in others if each.start == 570)
    broken = postmortem_of(replace(case, incident=first, others=(spike, *others[1:])))
    assert "loss not finite at step 570" in broken.hypotheses[0].evidence_for[0]


def test_what_comes_hardly_after_an_incident_is_its_own(tmp_path: Path) -> None:
    told = [{"step": step, "loss": loss, "grad_norm": norm} for step, loss, norm in losses([600])]
    told[637] |= {"loss": math.nan, "grad_norm": math.nan}
    run = open_run(make_run(tmp_path / "chained", told, []))
    facts, _ = diagnosed(Case(source="chained", run=run, incident=replace(SPIKE, end=632)))
    assert facts.is_nonfinite


def test_an_incident_that_hindsight_does_not_see_is_still_the_one_to_explain(spiked: Case) -> None:
    unseen = replace(SPIKE, start=1000, peak=1000, peak_loss=2.1, end=1010)
    facts, _ = diagnosed(replace(spiked, incident=unseen))
    assert facts.focus == unseen


def test_nobody_knows_how_an_attempt_would_have_gone_on(tmp_path: Path) -> None:
    """Three losses that are not finite, then the run went back: that does not mean that they stay so."""
    told = [{"step": step, "loss": loss, "grad_norm": norm} for step, loss, norm in losses([], 700)]
    bad = [{"step": step, "loss": math.nan, "grad_norm": math.nan} for step in range(600, 603)]
    run = open_run(make_run(tmp_path / "broken", [*told[:600], *bad, *told[580:]], []))
    case = Case(source="broken", run=run, incident=replace(BROKEN, start=600, peak=600, end=650))
    facts, _ = diagnosed(case)
    for is_cut_short in (False, True):
        found = hypotheses(replace(facts, is_cut_short=is_cut_short), None)
        texts = [text for each in found for text in (*each.evidence_for, *each.evidence_against)]
        assert any("not finite from step 600 to the end" in text for text in texts) is not is_cut_short
    assert postmortem_of(case).hypotheses == found


def test_a_norm_that_was_nan_before_the_way_back_is_in_the_symptoms(tmp_path: Path) -> None:
    """Gradients are NaN at a finite loss; after the rollback other batches come, and one has a higher loss."""
    told = [
        {"step": step, "loss": loss, "grad_norm": norm, "batch_index": step} for step, loss, norm in losses([], 700)
    ]
    bad = [{**row, "grad_norm": math.nan} for row in told[600:603]]
    again = [{**row, "batch_index": row["batch_index"] + 10} for row in told[550:]]
    again[70] |= {"loss": 9.0, "grad_norm": 1.7}
    run = open_run(make_run(tmp_path / "broken", [*told[:600], *bad, *again], []))
    worst = max(bad, key=lambda row: row["loss"])
    spoilt = replace(BROKEN, kind="nonfinite", start=600, peak=int(worst["step"]), peak_loss=worst["loss"], end=650)
    seen = postmortem_of(Case(source="broken", run=run, incident=spoilt)).symptoms
    assert (seen.grad_norm, seen.grad_norm_step) == (math.inf, 600)
    assert (seen.batches, seen.batch_steps) == ((600, 602), (600, 602))
    of_old_version = replace(spoilt, peak=620, peak_loss=9.0, start=630)  # a peak before its onset
    assert postmortem_of(Case(source="broken", run=run, incident=of_old_version)).symptoms.onset == 630


@pytest.mark.parametrize("to", [880, 550])
def test_the_symptoms_of_an_incident_are_not_those_of_a_later_one_that_the_run_went_back_from(
    to: int, tmp_path: Path
) -> None:
    told = [{"step": step, "loss": loss, "grad_norm": norm} for step, loss, norm in losses([600, 900])]
    told[903] |= {"grad_norm": 400.0}
    again = [{"step": step, "loss": loss, "grad_norm": norm} for step, loss, norm in losses([])]
    run = open_run(make_run(tmp_path / "two", [*told[:910], *again[to:]], []))
    first = replace(SPIKE, number=1, peak_loss=float(told[600]["loss"]), end=632)
    seen = postmortem_of(Case(source="two", run=run, incident=first)).symptoms
    assert (seen.grad_norm, seen.grad_norm_step) == (told[600]["grad_norm"], 600)
    assert seen.batch_steps is not None
    assert seen.batch_steps[1] <= 632


def test_rows_come_as_they_were_written(tmp_path: Path) -> None:
    run = open_run(gone_back(tmp_path / "back"))
    steps = [row["step"] for row in rows_about(run, SPIKE)]
    assert steps == [*range(450, 620), *range(580, 1201)]


def test_the_incident_of_a_folder_is_read_as_it_was_written(struck: Path) -> None:
    incident, replayed, has_capsule = open_incident(struck / "incidents" / "1")
    assert (incident.start, incident.kind, has_capsule) == (STRUCK, "spike", True)
    assert replayed is not None
    assert replayed.cause == "bad-data-batch"


# What reruns say.


def arm(name: str, kind: Any, cause: str, left: float) -> ArmShown:
    shows: Any = "gone" if left < 0.25 else "there" if left > 0.5 else "partly"
    return ArmShown(name=name, kind=kind, cause=cause, does="so", left=left, shows=shows, height=9.0, damage=0.0)


def replayed(
    cause: str | None, *arms: ArmShown, departure: str | None = None, standings: dict[str, Any] | None = None
) -> Replayed:
    return Replayed(
        source="night", incident=2, kind="spike", onset=600, steps=80, apart=0.0, departure=departure, height=30.0,
        damage=0.0, arms=list(arms), causes=standings or {}, location=None, cause=cause, because="the reruns say so",
    )  # fmt: skip


@pytest.fixture
def spiked(tmp_path: Path) -> Case:
    rows = ({"step": step, "loss": loss, "grad_norm": norm} for step, loss, norm in losses([600]))
    return Case(source="night", run=open_run(make_run(tmp_path / "night", rows, [])), incident=SPIKE)


def test_each_rerun_favours_or_rules_out(spiked: Case) -> None:
    facts, _ = diagnosed(spiked)
    shown = replayed(
        "long-tail-token",
        arm("one ulp", "placebo", "", 1.0),
        arm("rare tokens masked", "without", "long-tail-token", 0.0),
        arm("rate x0.5", "without", "lr-too-high", 0.9),
        arm("older state", "with", "bad-data-batch", 0.1),
        arm("second moment raised", "without", "stale-beta2", 0.4),
        arm("first moment zeroed", "without", "first-moment", 0.9),
        standings={
            "long-tail-token": "necessary",
            "lr-too-high": "not needed",
            "bad-data-batch": "unknown",
            "stale-beta2": "unknown",
            "first-moment": "not needed",
        },
    )
    found = hypotheses(facts, shown)
    numbers = {each.cause: f"H{number}" for number, each in enumerate(found, 1)}
    assert (numbers["long-tail-token"], found[0].grade) == ("H1", "tested")
    assert {each.cause: each.grade for each in found}["lr-too-high"] == "ruled out"
    assert all(each.panels for each in found)
    placebo, *lines = discriminating(found, shown)
    assert placebo.endswith("harmless changes: one ulp 100%: what the other reruns show counts")
    assert [line.rpartition("is left: ")[2] for line in lines] == [
        "favours H1",
        f"rules out {numbers['lr-too-high']}",
        f"speaks against {numbers['bad-data-batch']}",
        f"leaves {numbers['stale-beta2']} open",
        "rules out first moment (not among the hypotheses)",
    ]
    assert root_cause(found, shown, "night#2", True) == "Long-tail token, tested: the reruns say so."


def test_reruns_of_the_batches_do_not_tell_causes_apart_that_are_both_these_batches(spiked: Case) -> None:
    """As in the worked example: rare tokens are the tested cause, and no rerun but those of the batches is there."""
    facts, _ = diagnosed(spiked)
    shown = replayed(
        "long-tail-token",
        arm("one ulp", "placebo", "", 1.0),
        arm("other batches", "without", "bad-data-batch", 0.04),
        arm("older state", "with", "bad-data-batch", 1.0),
        standings={"bad-data-batch": "necessary and sufficient"},
    )
    found = hypotheses(facts, shown)
    assert [each.cause for each in found[:2]] == ["long-tail-token", "bad-data-batch"]
    batches = "panel 1: the reruns show these batches as necessary and sufficient; they do not tell it from H1"
    assert found[1].evidence_for[0] == batches
    apart = "H1 and H2 both say so, and this does not tell them apart"
    assert [line.rpartition("is left: ")[2] for line in discriminating(found, shown)[1:]] == [
        f"the incident needs these batches: {apart}",
        f"the incident comes with these batches alone: {apart}",
    ]
    other = discriminating(found, msgspec.structs.replace(shown, cause="lr-too-high"))
    assert other[1].endswith("the incident needs H2, too"), "a rate is another thing than the batches"


def test_reruns_that_harmless_changes_end_tell_nothing(spiked: Case) -> None:
    facts, _ = diagnosed(spiked)
    shown = replayed(None, arm("one ulp", "placebo", "", 0.0), arm("rate x0.5", "without", "lr-too-high", 0.0))
    found = hypotheses(facts, shown)
    placebo, line = discriminating(found, shown)
    assert placebo.endswith("what the other reruns show proves nothing")
    assert line.endswith("tells nothing")
    assert root_cause(found, shown, "night#2", True).startswith(
        "Not known yet (the reruns say so), and this is the test that would tell: "
    )


def test_what_is_not_in_the_record_rules_out_what_is(spiked: Case) -> None:
    facts, _ = diagnosed(spiked)
    shown = replayed("corrupt-gradient", departure="step 600 has another gradient")
    found = hypotheses(facts, shown)
    (line,) = discriminating(found, shown)
    out = [f"H{number}" for number, each in enumerate(found, 1) if each.cause == "long-tail-token"]
    assert found[0].cause == "corrupt-gradient"
    assert ": step 600 has another gradient: favours H1, rules out " in line
    assert out[0] in line.rpartition("rules out")[2]
    document = postmortem_of(replace(spiked, replayed=shown))
    assert document.lesson.startswith("spike at step 600: ")
    assert document.symptoms.unusual_tokens is None


def test_a_cause_that_is_merely_left_over_gives_way_to_one_that_the_log_establishes(
    spiked: Case, tmp_path: Path
) -> None:
    """The reruns had no router that collapsed, and could not know that it was this that the record lacks."""
    shown = replayed("corrupt-weight", departure="step 600 has another loss")
    assert postmortem_of(replace(spiked, replayed=shown)).root_cause.startswith(title_of("corrupt-weight"))
    rows = (
        {"step": step, "loss": loss, "grad_norm": norm}
        | {f"expert_load/0.{expert}": load for expert, load in enumerate((0.3, 0.3, 0.2, 0.2))}
        | (
            {f"expert_load/0.{expert}": load for expert, load in enumerate((0.98, 0.01, 0.005, 0.005))}
            if step >= 600
            else {}
        )
        for step, loss, norm in losses([600])
    )
    case = Case(source="night", run=open_run(make_run(tmp_path / "experts", rows, [])), incident=SPIKE, replayed=shown)
    document = postmortem_of(case)
    assert document.root_cause.startswith(f"{title_of('router-collapse')}, established by the log: ")
    assert document.root_cause.endswith("which the record does not hold: step 600 has another loss.")
    assert (document.hypotheses[0].cause, document.hypotheses[0].grade) == ("router-collapse", "established")
    assert "balance" in " ".join(document.remediation)
    tested = postmortem_of(replace(case, replayed=replayed("corrupt-gradient", departure="step 600 has another norm")))
    assert tested.root_cause.startswith(title_of("corrupt-gradient")), "which the reruns have seen"


FACTS: dict[str, Any] = {}
"""What does not depend on the reruns."""
TESTABLE = ("long-tail-token", "bad-data-batch", "lr-too-high", "stale-beta2", "batch-and-state", "hard-batch")


def standing_of(arms: list[ArmShown]) -> str:
    """As the replay judges a cause whose placebos are sound."""
    without = [each.shows for each in arms if each.kind == "without"]
    brought = [each.shows for each in arms if each.kind == "with"]
    is_sufficient = bool(brought) and set(brought) == {"there"}
    if "gone" in without:
        return "necessary and sufficient" if is_sufficient else "necessary"
    return "sufficient" if is_sufficient else "not needed" if without and set(without) == {"there"} else "unknown"


@st.composite
def results_of_reruns(draw: st.DrawFn) -> Replayed:
    """Any results of reruns, and any conclusion that they do not exclude."""
    placebo = arm("one ulp", "placebo", "", draw(st.sampled_from([0.0, 1.0])))
    tried = [
        arm(
            f"{cause} {number}",
            draw(st.sampled_from(["with", "without"])),
            cause,
            draw(st.sampled_from([0.0, 0.4, 1.0])),
        )
        for cause in draw(st.lists(st.sampled_from(TESTABLE), unique=True))
        for number in range(draw(st.integers(1, 2)))
    ]
    names = dict.fromkeys(each.cause for each in tried)
    known = placebo.shows == "there"
    standings = {
        name: standing_of([one for one in tried if one.cause == name]) if known else "unknown" for name in names
    }
    departure = draw(st.sampled_from([None, "step 600 has another gradient"]))
    possible = [name for name in TESTABLE if standings.get(name) != "not needed"] if departure is None else []
    cause = draw(st.sampled_from([None, "corrupt-gradient", *possible]))
    return replayed(cause, placebo, *tried, departure=departure, standings=standings)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(shown=results_of_reruns())
def test_no_two_parts_of_a_post_mortem_contradict_each_other(spiked: Case, shown: Replayed) -> None:
    """Root cause, order, grades and the sentences about reruns, whatever the reruns gave."""
    if "spiked" not in FACTS:
        FACTS["spiked"] = diagnosed(spiked)[0]
    found = hypotheses(FACTS["spiked"], shown)
    lines = discriminating(found, shown)
    grades = {f"H{number}": each.grade for number, each in enumerate(found, 1)}

    def named(verb: str) -> set[str]:
        parts = [part for line in lines for part in re.findall(rf"{verb} ([^:]*?)(?:, rules out|$)", line)]
        return {number for part in parts for number in re.findall(r"H\d+", part)}

    favoured, out = named("favours"), named("rules out")
    assert {grades[number] for number in out} <= {"ruled out"}
    assert not favoured & out
    assert not any(grades[number] == "ruled out" for number in favoured)
    assert [*grades.values()] == sorted(grades.values(), key="ruled out".__eq__), "what is ruled out comes last"
    if shown.cause is not None:
        assert (found[0].cause, found[0].grade) == (shown.cause, "tested")
        assert favoured <= {"H1"}
        assert root_cause(found, shown, "night#2", True).startswith(f"{found[0].title}, tested")
    elif favoured:
        assert "H1" in favoured
        assert root_cause(found, shown, "night#2", True).startswith("Not known yet")
