"""Against a real HTTP server on loopback: what arrives, in which order, how often, and what if nothing does."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import sealegs
from sealegs.cli.main import main
from sealegs.errors import ConfigError, RunHalted, SinkFailed
from sealegs.guard_options import Telemetry
from sealegs.sinks import delivery, notify
from sealegs.sinks.messages import Messenger
from sealegs.sinks.notify import Notifier, Notify
from sealegs.vocabulary import Event

PATIENCE_S = 60.0
SECRET = "T00/B00/x7secret"  # noqa: S105 - none


class Hook:
    """A webhook that remembers what it was sent, and answers as it is told to."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.answers: list[int] = []
        """Codes to answer with, first to last; then 200."""
        self.slow_s = 0.0
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                time.sleep(hook.slow_s)
                code = hook.answers.pop(0) if hook.answers else 200
                hook.paths.append(self.path)
                if code == 200:
                    hook.got.append(json.loads(body))
                self.send_response(code)
                if code == 302:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_POST  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/{SECRET}"

    @property
    def titles(self) -> list[str]:
        return [got["text"].splitlines()[0] for got in self.got]

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    monkeypatch.setattr(delivery, "WAITS_S", (0.01, 0.01))
    hook = Hook()
    yield hook
    hook.stop()


def started(folder: Path, where: notify.Where) -> Notifier:
    notifier = Notifier(where)
    notifier.start({"folder": str(folder)})
    return notifier


def happened(kind: str, step: int = 0, **detail: Any) -> Event:
    return Event(kind=kind, step=step, time=1.5, detail=detail)


def alarm(number: int) -> Event:
    return happened("alarm", number, text=f"step {number}  ALARM  loss spike: 9", incident=number)


def no_secret_in(folder: Path) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if b"x7secret" in path.read_bytes()]


def test_a_message_has_verdict_first_action_and_page(hook: Hook, tmp_path: Path) -> None:
    notifier = started(tmp_path / "a", Notify(hook.url, page="https://runs.example.org/{run}"))
    notifier.event(happened("guard", act=True, playbook="standard"))
    notifier.event(happened("alarm", 312, text="step 312  ALARM  loss spike: 6.93 & <more>", incident=1))
    notifier.event(happened("end", 400, reason="finished", skips=1))
    notifier.close()
    assert hook.got[0] == {
        "text": (
            "a: incident 1 began (step 312)\n"
            "step 312  ALARM  loss spike: 6.93 &amp; &lt;more&gt;\n"
            f"first: nothing yet, playbook standard decides; if it comes back, `sealegs replay {tmp_path}/a#1`\n"
            "page: https://runs.example.org/a"
        )
    }
    assert hook.titles[1:] == ["a: finished (step 400)"]
    assert set(hook.paths) == {f"/{SECRET}"}


def test_a_message_calls_nobody_and_ends_no_line_that_is_not_ours(hook: Hook, tmp_path: Path) -> None:
    """Names of modules, sources and people, and errors, come from anywhere."""
    text = "x\n\x1b[2Jpage: http://evil\r<!channel> <@U1> <http://evil|here> @everyone @bob [free](http://evil) \u202e"
    notifier = started(tmp_path / "a", Notify(hook.url, page="https://runs.example.org/{run}"))
    notifier.event(happened("guard", act=True, playbook=text))
    notifier.event(happened("alarm", 312, text=text, incident=1))
    notifier.event(happened("intervention", 313, text=text, evidence=text, changed=text, number=1, acted=True))
    notifier.event(happened("stalled", 314, seconds=9.0, where=text))
    notifier.event(happened("end", 400, reason="failed", error=text, by=text, skipped=text))
    notifier.close()
    assert len(hook.got) == 4
    for got in hook.got:
        verdict, first, page = got["text"].splitlines()[1:]
        assert (first.startswith("first: "), page) == (True, "page: https://runs.example.org/a")
        assert "\\x1b[2Jpage: http://evil\\r" in verdict
        assert got["text"].replace("\n", "").isprintable()
        assert "<" not in got["text"]
        assert "](" not in got["text"]
        assert not re.search(r"(?<!\w)@", got["text"])


def test_a_command_gets_parts_that_an_environment_can_hold(tmp_path: Path) -> None:
    told = tmp_path / "told"
    notifier = started(tmp_path / "a", ["sh", "-c", f"env | grep ^SEALEGS_TITLE >> {told}"])
    notifier.event(happened("intervention", 3, text="a\0b\nc", evidence="d", changed="", number=1, acted=True))
    notifier.close()
    assert told.read_text().splitlines() == [
        r"SEALEGS_TITLE=intervention 1: a\x00b\nc (step 3)",
        "SEALEGS_TITLE=closed (step 0)",
    ]


def test_who_looks_without_a_page_is_told_the_place(hook: Hook, tmp_path: Path) -> None:
    notifier = started(tmp_path / "a", hook.url)
    notifier.event(alarm(3))
    notifier.close()
    assert hook.got[0]["text"].endswith(f":{tmp_path}/a/incidents/3")
    assert "nothing is done about it here" in hook.got[0]["text"], "a watch only looks"


def test_what_is_told_in_order_and_what_is_not(hook: Hook, tmp_path: Path) -> None:
    notifier = started(tmp_path / "a", hook.url)
    intervention = {"number": 1, "incident": 1, "evidence": "why", "changed": "all", "acted": True}
    notifier.event(happened("guard", act=True, playbook="observe"))
    for step in range(50):
        notifier.row({"step": step, "loss": 2.5})
        notifier.event(happened("skip", step, text="step  SKIP"))
        notifier.event(happened("remark", step, text="step  GO"))
        notifier.event(happened("checkpoint", step))
    notifier.event(alarm(1))
    notifier.event(happened("intervention", 51, text="go back", actions=[{"action": "rollback"}], **intervention))
    notifier.event(happened("incident-closed", 60, number=1, text="incident 1"))
    notifier.event(happened("stalled", 61, seconds=600.0, where="loader.py, line 3"))
    notifier.event(happened("halt", 62, text="step 62  HALT", incident=2))
    notifier.event(happened("halt", 63, text="step 63  HALT", incident=2))
    notifier.event(happened("end", 63, reason="halted", error="RunHalted: ..."))
    notifier.close()
    assert hook.titles == [
        "a: incident 1 began (step 1)",
        "a: intervention 1: go back (step 51)",
        "a: incident 1 ended (step 60)",
        "a: stands still (step 61)",
        "a: halted (step 62)",
    ]


def test_a_halt_that_a_playbook_treats_is_no_end(hook: Hook, tmp_path: Path) -> None:
    notifier = started(tmp_path / "a", hook.url)
    notifier.event(happened("guard", act=True, playbook="standard"))
    notifier.event(happened("halt", 62, text="step 62  ALARM  a parameter is not finite", incident=2))
    notifier.event(happened("end", 90, reason="halted", error="RunHalted: ..."))
    notifier.close()
    assert hook.titles == ["a: would be halted, playbook standard decides (step 62)", "a: halted (step 90)"]
    assert "nothing yet, playbook standard decides" in hook.got[0]["text"]


def test_what_was_said_is_not_said_again_and_too_much_is_counted(hook: Hook, tmp_path: Path) -> None:
    notifier = started(tmp_path / "a", Notify(hook.url, at_most=3))
    for number in (1, 1, 2, 3, 4, 5):
        notifier.event(alarm(number))
    notifier.event(happened("end", 9, reason="failed", error="OSError: no"))
    notifier.close()
    assert hook.titles == [
        *(f"a: incident {number} began (step {number})" for number in (1, 2, 3)),
        "a: failed (step 9)",
    ]
    told = [got["text"].splitlines()[-1] for got in hook.got]
    assert told[1] == "(1 more since the last message were held back)"
    assert told[-1] == "(2 more since the last message were held back)", "the end is never held back"


def test_the_window_slides(hook: Hook, tmp_path: Path) -> None:
    notifier = started(tmp_path / "a", Notify(hook.url, at_most=1, per_s=0.05, again_after_s=0.0))
    notifier.event(alarm(1))
    time.sleep(0.06)
    notifier.event(alarm(1))
    notifier.close()
    assert hook.titles[:2] == ["a: incident 1 began (step 1)"] * 2


@pytest.mark.parametrize("answers", [[500], [503, 429]])
def test_a_server_that_stumbles_is_asked_again(hook: Hook, tmp_path: Path, answers: list[int]) -> None:
    hook.answers = answers.copy()
    notifier = started(tmp_path / "a", hook.url)
    notifier.event(alarm(1))
    notifier.close()
    assert len(hook.paths) == len(answers) + 2, "and the end of the run"
    assert hook.titles[0] == "a: incident 1 began (step 1)"


@pytest.mark.parametrize(
    ("answers", "attempts", "reason"),
    [
        ([500] * 3, 3, "it answers 500"),
        ([404], 1, "it answers 404"),
        ([302], 1, "it answers 302, which would lead elsewhere"),
    ],
)
def test_a_hook_that_refuses_is_one_event_and_is_tried_again_with_the_next_message(
    hook: Hook, tmp_path: Path, answers: list[int], attempts: int, reason: str
) -> None:
    hook.answers = answers.copy()
    with sealegs.Watch(tmp_path / "a", notify=hook.url) as watch:
        watch.note("alarm", step=1, text="step 1  ALARM", incident=1)
        watch.note("alarm", step=2, text="step 2  ALARM", incident=2)
    assert len(hook.paths) == attempts + 2
    assert "/elsewhere" not in hook.paths
    assert hook.titles == ["a: incident 2 began (step 2)", "a: closed (step 0)"]
    assert hook.got[0]["text"].endswith("(1 earlier message did not arrive)")
    failures = [event for event in sealegs.open_run(tmp_path / "a").events if event.kind == "sink-failed"]
    port = hook.server.server_port
    assert [event.detail for event in failures] == [
        {
            "sink": "notify",
            "reason": f"notify: a message did not arrive at the webhook at 127.0.0.1:{port}: {reason};"
            " the next ones are tried",
            "goes_on": True,
        }
    ]
    no_secret_in(tmp_path)


def test_a_dead_hook_is_one_event_in_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "WAITS_S", (0.01,))
    with sealegs.Watch(tmp_path / "a", notify=f"http://127.0.0.1:9/{SECRET}") as watch:
        for step in range(200):
            watch.see(step, loss=1.0)
            if step % 20 == 0:
                watch.note("alarm", text="ALARM", incident=step)
                time.sleep(0.02)
    run = sealegs.open_run(tmp_path / "a")
    assert run.steps.tolist() == list(range(200))
    (failure,) = [event for event in run.events if event.kind == "sink-failed"]
    assert "127.0.0.1:9: Connection refused; the next ones are tried" in failure.detail["reason"]
    no_secret_in(tmp_path)


def test_a_slow_hook_holds_neither_steps_nor_the_end(
    hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "CLOSE_WITHIN_S", 0.1)
    hook.slow_s = PATIENCE_S / 4
    began = time.monotonic()
    with sealegs.Watch(tmp_path / "a", notify=hook.url) as watch:
        for step in range(100):
            watch.see(step, loss=1.0)
            watch.note("alarm", text="ALARM", incident=step)
    assert time.monotonic() - began < hook.slow_s, "less than one message takes"
    (failure,) = [event for event in sealegs.open_run(tmp_path / "a").events if event.kind == "sink-failed"]
    assert failure.detail["reason"].startswith("notify: not done within 0.1 s of the end of the run; 0 rows and events")


def test_a_server_that_never_answers_is_given_up(hook: Hook) -> None:
    hook.slow_s = PATIENCE_S
    way = delivery.opened(hook.url, timeout_s=0.05)
    with pytest.raises(delivery.Undelivered, match=r"^no answer within 0\.05 s$"):
        way.send(None, "text")  # type: ignore[arg-type]


def test_a_loop_that_fails_says_of_what(hook: Hook, tmp_path: Path) -> None:
    def loop() -> None:
        with sealegs.Watch(tmp_path / "a", notify=hook.url) as watch:
            watch.see(7, loss=2.5)
            raise MemoryError("no more of it")

    with pytest.raises(MemoryError):
        loop()
    (got,) = hook.got
    assert got["text"].startswith("a: failed (step 7)\nMemoryError: no more of it, loss 2.5\nfirst: `sealegs check ")
    (end,) = [event for event in sealegs.open_run(tmp_path / "a").events if event.kind == "end"]
    assert end.detail["tax"]["steps"] == 1
    assert {**end.detail, "tax": None} == {"reason": "failed", "error": "MemoryError: no more of it", "tax": None}


def test_a_guard_that_halts_says_so_once(hook: Hook, tmp_path: Path) -> None:
    import torch

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop() -> None:
        with sealegs.Guard(model, optimizer, run=tmp_path / "a", telemetry=Telemetry(notify=hook.url)) as guard:
            for _ in range(20):
                loss = model(torch.ones(1, 2)).sum() * float("nan")
                loss.backward()
                guard.step(loss)

    with pytest.raises(RunHalted):
        loop()
    assert [title.rpartition(" (")[0] for title in hook.titles] == ["a: incident 1 began", "a: halted"]
    assert [event.detail["reason"] for event in sealegs.open_run(tmp_path / "a").events if event.kind == "end"] == [
        "halted"
    ]


LEFT_OPEN = """
import sys
from sealegs.sinks.notify import Notifier
notifier = Notifier("$HOOK")
notifier.start({"folder": sys.argv[1]})
notifier.row({"step": 5, "loss": 2.5})
raise MemoryError("no more of it")
"""


def test_a_process_that_dies_of_an_error_says_so_although_nobody_closed_the_run(hook: Hook, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN, str(tmp_path / "a")],
        env=os.environ | {"HOOK": hook.url},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1
    assert "x7secret" not in done.stdout + done.stderr
    assert [got["text"].splitlines()[:2] for got in hook.got] == [
        ["a: failed (step 5)", "MemoryError: no more of it, loss 2.5"]
    ]


KILLED = """
import os, pathlib, signal, sys
from sealegs.record.manifest import describe
from sealegs.record.writer import RunWriter
from sealegs.sinks.notify import Notifier
folder = pathlib.Path(sys.argv[1])
record = RunWriter.create(folder, describe("a"))
notifier = Notifier("$HOOK")
notifier.start({"folder": str(folder)})
notifier.event(record.event("halt", 7, text="step 7  HALT"))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_while_a_message_is_on_its_way_costs_the_record_nothing(hook: Hook, tmp_path: Path) -> None:
    hook.slow_s = 0.2
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "a")], env=os.environ | {"HOOK": hook.url}, timeout=PATIENCE_S
    )
    assert done.returncode == -9
    assert [event.kind for event in sealegs.open_run(tmp_path / "a").events] == ["halt"]
    assert len(hook.got) <= 1
    no_secret_in(tmp_path)


@pytest.mark.parametrize(
    ("reason", "first"),
    [
        ("finished", "nothing; `sealegs dashboard "),
        ("interrupted", "resume it from its last checkpoint"),
        ("failed", "`sealegs check "),
        ("something new", "`sealegs check "),
    ],
)
def test_the_end_says_how_and_what_to_do_first(reason: str, first: str, tmp_path: Path) -> None:
    messenger = Messenger(tmp_path / "a")
    message = messenger.message(happened("end", 9, reason=reason))
    assert message is not None
    assert (message.title, message.is_last) == (f"{reason} (step 9)", True)
    assert message.first.startswith(first)
    assert messenger.closed() is None, "it has been said"


def test_a_command_gets_the_text_on_its_input_and_the_parts_in_its_environment(tmp_path: Path) -> None:
    script = tmp_path / "tell.sh"
    script.write_text('#!/bin/sh\n{ cat; echo "$1 $SEALEGS_KIND $SEALEGS_RUN $SEALEGS_STEP"; } >> "$0.out"\n')
    script.chmod(0o755)
    notifier = started(tmp_path / "a", f"{script} 'two words'")
    notifier.event(alarm(1))
    notifier.event(happened("end", 2, reason="finished"))
    notifier.close()
    lines = (tmp_path / "tell.sh.out").read_text().splitlines()
    assert (lines[0], lines[4]) == ("a: incident 1 began (step 1)", "two words alarm a 1")
    assert lines[-1] == "two words end a 2"


def test_a_command_that_fails_is_told_without_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "WAITS_S", ())
    notifier = started(tmp_path / "a", ["false", "--token", SECRET])
    notifier.event(alarm(1))
    with pytest.raises(SinkFailed) as told:
        notifier.close()
    assert str(told.value) == (
        "notify: a message did not arrive at the command false: its exit code is 1; the next ones are tried"
    )


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ("$NO_SUCH_HOOK", r"notify=\$NO_SUCH_HOOK: there is no such environment variable"),
        ("ftp://host/x7secret", r"notify=ftp://\.\.\.: give the https:// address"),
        ("https:///x7secret", r"no host, or a blank in it"),
        ("https://host/x7 secret", r"no host, or a blank in it"),
        ("no-such-program --token x7secret", r"notify=no-such-program \.\.\.: there is no such program"),
        ("hooks.host.com/x7secret", r"notify= \.\.\.: there is no such program"),
        ("//host/x7secret", r"notify= \.\.\.: there is no such program"),
        ("https:/host/x7secret", r"notify= \.\.\.: there is no such program"),
        ("TOKEN=x7secret curl -d @-", r"notify= \.\.\.: there is no such program"),
        ("./no-such-program x7secret", r"notify=\./no-such-program \.\.\.: there is no such program"),
        ([], r"give the https:// address of a webhook, or a command"),
    ],
)
def test_a_place_that_cannot_be_is_refused_before_there_is_a_folder(where: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence) as told:
        sealegs.Watch(tmp_path / "a", notify=where)
    assert "x7" not in str(told.value)
    assert not (tmp_path / "a").exists()


def test_the_options_are_checked_and_do_not_show_the_place() -> None:
    assert "x7secret" not in repr(Notify(f"https://host/{SECRET}"))
    with pytest.raises(ConfigError, match=r"Notify\.at_most=0"):
        Notify("cat", at_most=0)
    with pytest.raises(ConfigError, match=r"Notify\.per_s=-1"):
        Notify("cat", per_s=-1)


def test_the_command_line_tries_it(hook: Hook, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("HOOK", hook.url)
    assert main(["notify", "$HOOK"]) == 0
    assert hook.titles == ["sealegs: a test"]
    hook.answers = [500]
    assert main(["notify", "${HOOK}"]) == 1
    said = capsys.readouterr()
    port = hook.server.server_port
    assert said.out == (
        f"delivered to the webhook at 127.0.0.1:{port}\n"
        f"did not arrive at the webhook at 127.0.0.1:{port}: it answers 500\n"
    )
