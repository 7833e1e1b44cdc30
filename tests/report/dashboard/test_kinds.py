"""Panels that only some kinds of run have, and runs without a loss."""

import json
from pathlib import Path

import pytest

from sealegs.cli.main import main
from sealegs.record.schema import SIGNALS
from sealegs.report.dashboard.columns import columns_of
from sealegs.report.dashboard.figures import draw
from sealegs.report.dashboard.subjects import BESIDE, LABELS, OF_A_KIND, SUBJECTS
from sealegs.report.dashboard.summary import described
from sealegs.report.dashboard.values import Page, Panel, page_of, see

ALL = {name: 0.5 for subject in OF_A_KIND for name in subject.signals}
ALL |= {f"{group}/{part}": 0.5 for subject in OF_A_KIND for group in subject.groups for part in ("0", "1")}
STEPS = 30


def log(folder: Path, name: str, signals: dict[str, float]) -> str:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"step": step, **signals}) + "\n" for step in range(STEPS)))
    return str(path)


def page(folder: Path, *runs: dict[str, float]) -> Page:
    sources = [log(folder, f"run{number}", signals) for number, signals in enumerate(runs)]
    return page_of([see(source, Path(source).stem, len(runs)) for source in sources])


def of_number(page: Page, number: int) -> Panel:
    return next(panel for panel in page.panels if panel.subject.number == number)


def test_their_numbers_come_after_the_ten_and_their_signals_have_words() -> None:
    assert [subject.number for subject in (*SUBJECTS, *OF_A_KIND)] == list(range(1, 29))
    names = {name for subject in OF_A_KIND for name in (*subject.signals, *subject.groups)}
    assert names <= SIGNALS.keys()
    assert LABELS.keys() | BESIDE <= SIGNALS.keys()


def test_a_page_has_them_all_where_all_is_logged(tmp_path: Path) -> None:
    shown = page(tmp_path, {"loss": 2.0, **ALL})
    assert [panel.subject.number for panel in shown.panels] == list(range(1, 29))
    for panel in shown.panels[10:]:
        assert panel.missing == ()
        assert f"{panel.series[0].label}: 0.5 at step 0, 0.5 at step 29" in described(panel, shown)
    drawing = draw(shown, [{}])
    assert {f"panel-{subject.number}" for subject in OF_A_KIND} <= drawing.figures.keys()


def test_a_page_has_those_whose_signals_are_logged_and_no_others(tmp_path: Path) -> None:
    assert len(page(tmp_path, {"loss": 2.0}).panels) == 10
    shown = page(tmp_path, {"loss": 2.0}, {"loss": 2.0, "reward": 1.0, "zero_spread_share": 0.1})
    assert [panel.subject.number for panel in shown.panels[10:]] == [11]
    assert [(each.run, each.label, each.is_share) for each in shown.panels[10].series] == [
        (1, "reward", False),
        (1, "groups without spread", True),
    ]
    labels = [axis.axis_label for axis in draw(shown, [{}, {}]).figures["panel-11"].right]
    assert labels == ["share of the groups"]


def test_a_line_alone_says_which_it_is(tmp_path: Path) -> None:
    drawing = draw(page(tmp_path, {"loss": 2.0, "reward": 1.0, "policy_kl": 0.1}), [{}])
    assert [item.label.value for item in drawing.figures["panel-13"].legend[0].items] == ["to the sampler"]
    assert drawing.figures["panel-1"].legend == []


def test_a_signal_has_the_same_dashes_in_every_run(tmp_path: Path) -> None:
    shown = page(tmp_path, {"reward": 1.0, "kl": 0.1, "policy_kl": 0.1}, {"reward": 1.0, "policy_kl": 0.1})
    lines = columns_of(shown, [{}, {}])["panel-13/left-axis/lines"]
    dashes = dict(zip(lines["label"], lines["dash"], strict=True))
    assert dashes["run1: to the sampler"] == dashes["run0: to the sampler"] != dashes["run0: to the reference"]


def test_experts_are_lines_by_layer_and_number(tmp_path: Path) -> None:
    loads = {f"moe/layer_{layer}/expert_{expert}/tokens": 0.1 for layer in (2, 10) for expert in (1, 0)}
    shown = page(tmp_path, {"loss": 2.0, **loads})
    assert [each.label for each in of_number(shown, 19).series] == ["2.0", "2.1", "10.0", "10.1"]


@pytest.mark.parametrize("command", ["check", "check --json", "dashboard", "diff"])
def test_a_run_without_a_loss_is_shown(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = str(tmp_path / "agent.jsonl")
    rows = ({"step": step, "ep_rew_mean": 21.5 + step % 3, "train/approx_kl": 0.01} for step in range(STEPS))
    Path(source).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = command.split()
    assert main([*words[:1], source, *([source] if command == "diff" else []), *words[1:]]) == 0
    out = capsys.readouterr().out
    wanted = {"check": "read reward from 'ep_rew_mean'", "check --json": '"name": "policy-gradient"'}
    assert wanted.get(command, "") in out
    if command == "dashboard":
        html = next(tmp_path.glob("*.html")).read_text()
        assert "HEALTHY" in html
        assert 'id="panel-11"' in html
        assert 'id="panel-14"' not in html
