"""`sealegs run` around commands that train nothing, or never get to it: the command is as it would be without."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from sealegs.cli.main import main
from sealegs.cli.run import carried_out, refusals_told
from sealegs.integrations.launch.request import Report, Request, reports_in

NOTHING = (
    "sealegs run: nothing was guarded: no Trainer of transformers or Lightning trained, and no loop of Accelerate; "
    "for one of your own there is sealegs.Guard\n"
)
RUN = [sys.executable, "-c", "from sealegs.cli.main import main; raise SystemExit(main())", "run"]


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


@pytest.mark.parametrize(
    ("command", "code", "printed"),
    [
        ([*python("print('done', *__import__('sys').argv[1:])"), "--read-up-to", "--act", "--"], 0, "done"),
        (python("print('failed'); raise SystemExit(3)"), 3, "failed"),
        (python("import os; print('killed', flush=True); os.kill(os.getpid(), 15)"), 128 + 15, "killed"),
        (["sh", "-c", "echo no Python"], 0, "no Python"),
    ],
    ids=["done", "failed", "killed", "no Python"],
)
def test_exit_code_and_output_are_the_commands(
    command: list[str],
    code: int,
    printed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--act", "--", *command]) == code
    out, err = capfd.readouterr()
    assert out == " ".join([printed, *command[3:]] if printed == "done" else [printed]) + "\n"
    assert err == NOTHING
    assert not list(tmp_path.iterdir())


def test_a_program_with_a_watch_of_its_own_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        main(["run", "--", *python("import sealegs; sealegs.Watch('own').close(); sealegs.Watch(None).close()")]) == 0
    )
    told = f"nothing was added: the program has a guard or a watch of its own, recorded in {tmp_path / 'own'}"
    assert capfd.readouterr().err.endswith(f"sealegs run: {told}\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "sealegs run: there is no command; give it after two dashes: sealegs run -- python train.py\n"),
        (
            ["--", "no-such-program", "-x"],
            "sealegs run: no-such-program -x: cannot be started (No such file or directory)\n",
        ),
    ],
)
def test_what_cannot_be_started_is_a_sentence(words: list[str], says: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *words]) == 2
    assert capfd.readouterr().err == says


def test_a_program_finds_python_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A sitecustomize of its own runs, nothing of ours is in its paths, and nothing heavy is imported."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.users_own = True")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    program = (
        "import sys; import sitecustomize; print(sys.users_own, sitecustomize.__file__,"
        "[name for name in sys.modules if name.partition('.')[0] in ('sealegs', 'torch', 'json')],"
        "[path for path in sys.path if path.endswith('startup')])"
    )
    assert main(["run", "--", *python(program)]) == 0
    assert capfd.readouterr().out == f"True {tmp_path / 'sitecustomize.py'} [] []\n"


def test_a_python_without_sealegs_goes_on_and_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A module of a framework's name is enough: this Python has none of them."""
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "accelerator.py").write_text("done = 'trained'")
    program = (
        "import accelerate.accelerator as it;"
        "print(it.done, type(it.__loader__).__name__, it.__spec__.loader is it.__loader__)"
    )
    (reports := tmp_path / "reports").touch()
    asked = Request(folder=str(tmp_path / "run"), act=False, playbook=None, reports=str(reports))
    bare = str(Path(sys.base_prefix) / "bin" / "python3")
    environment = asked.environment({"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)})
    assert carried_out([bare, "-c", program], environment) == 0
    assert capfd.readouterr().out == "trained SourceFileLoader True\n"
    (said,) = reports_in(reports)
    assert said.text.startswith(f"{bare}")
    assert said.text.endswith("(No module named 'sealegs'); install it there: pip install sealegs")


def test_what_cannot_be_guarded_is_said_while_the_command_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    reports = tmp_path / "reports"
    refused = json.dumps(asdict(Report("refused", "transformers.Trainer", "its Trainer has no such method")))
    guarded = json.dumps(asdict(Report("guarded", "Lightning's Trainer", "/data/a")))
    reports.write_text(f"{refused}\n{guarded}\n{refused}\n{refused[:20]}")
    told, until = "", time.monotonic() + 20
    with refusals_told(reports, every_s=0.01):
        while not told and time.monotonic() < until:
            time.sleep(0.05)
            told += capfd.readouterr().err
    told += capfd.readouterr().err
    assert told == ("sealegs run: the training goes on, but transformers.Trainer: its Trainer has no such method\n"), (
        "once, and the line that is being written not at all"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_go_through(number: signal.Signals, tmp_path: Path) -> None:
    program = (
        "import signal, sys, time\n"
        "def stop(number, _): print('stopped by', number, flush=True); sys.exit(7)\n"
        "for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, stop)\n"
        "open('begun', 'w').close(); time.sleep(60)"
    )
    with subprocess.Popen(
        [*RUN, "--", *python(program)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # the tests may run where it is ignored
    ) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "begun").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (out, err, process.returncode) == (f"stopped by {int(number)}\n", NOTHING, 7)
