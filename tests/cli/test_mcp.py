"""What an agent gets, by the SDK's own client, from a server in a process of its own."""

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import sealegs
from sealegs.cli.main import main
from sealegs.record import manifest as manifests
from sealegs.record import requests
from sealegs.record.writer import RunWriter
from sealegs.report.commands.diff import Differing
from sealegs.report.commands.health import Standing
from sealegs.report.commands.interventions import Entry, Log

anyio = pytest.importorskip("anyio")
pytest.importorskip("mcp", reason="the MCP SDK is not installed: pip install 'sealegs[mcp]'")

ROOT = Path(__file__).parents[2]
READS = ["check", "diff", "health", "interventions"]
LOSSES = (4 - np.arange(80) / 100).tolist()


class Answer:
    """What a tool has said."""

    def __init__(self, result: Any) -> None:
        self.is_error = result.is_error
        self.found = result.structured_content
        (content,) = result.content
        self.text = content.text


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a log, a run that is over, one that this process trains, and what lies outside of it."""
    outside = tmp_path_factory.mktemp("mcp")
    (outside / "other.csv").write_text("step,loss\n" + "".join(f"{step},{loss}\n" for step, loss in enumerate(LOSSES)))
    folder = outside / "agent"
    (folder / "experiments").mkdir(parents=True)
    (folder / "metrics.csv").write_bytes((outside / "other.csv").read_bytes())
    (folder / "link.csv").symlink_to(outside / "other.csv")
    with sealegs.Watch(folder / "experiments" / "over", settings={"optimizer": {"lr": 1e-3}}) as watch:
        for step, loss in enumerate(LOSSES):
            watch.see(step, loss=loss if step != 60 else float("nan"), grad_norm=0.5, lr=1e-3)
        detail = {"decided_by": "playbook", "trigger": "spike", "onset": 60, "evidence": "loss nan", "acted": True}
        watch.note("intervention", step=61, number=1, text="skip", actions=[{"action": "skip-batches"}], **detail)
    writer = RunWriter.create(folder / "experiments" / "now", manifests.describe("now"))
    yield folder
    writer.close()


class Served:
    """All answers of two servers: one that may intervene, and one that may not."""

    def __init__(self) -> None:
        self.tools: dict[str, list[Any]] = {}
        self.answers: dict[str, Answer] = {}
        self.requests: dict[str, dict[str, Any]] = {}
        self.left_behind: list[Path] = []


@pytest.fixture(scope="module")
def served(place: Path) -> Served:
    found = Served()
    with ThreadPoolExecutor(1) as apart:  # in this thread a browser's loop may run, of tests before
        apart.submit(anyio.run, talk, place, found).result()
    return found


async def talk(place: Path, found: Served) -> None:
    from mcp import Client, StdioServerParameters

    def server(*words: str) -> StdioServerParameters:
        return StdioServerParameters(
            command=sys.executable, args=["-m", "sealegs", "mcp", *words], env=dict(os.environ), cwd=str(place)
        )

    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "check": ("check", {"source": "metrics.csv"}),
        "check a run": ("check", {"source": "over", "tried": ["halve the LR: helped"]}),
        "diff": ("diff", {"a": "metrics.csv", "b": "over"}),
        "health": ("health", {"run": "over"}),
        "interventions": ("interventions", {"run": "over"}),
        "missing log": ("check", {"source": "nothing.csv"}),
        "missing run": ("health", {"run": "nobody"}),
        "above": ("check", {"source": "../other.csv"}),
        "absolute": ("diff", {"a": "metrics.csv", "b": "/etc/passwd"}),
        "link": ("check", {"source": "link.csv"}),
        "choice": ("check", {"source": "../other.csv#a"}),
        "home": ("check", {"source": "~"}),
        "settings": ("check", {"source": "metrics.csv", "settings": ["../settings.toml"]}),
        "tried": ("check", {"source": "metrics.csv", "tried": ["../tried.toml"]}),
        "run above": ("interventions", {"run": "../experiments"}),
        "tracker": ("check", {"source": "mlflow:abc"}),
        "misspelt": ("check", {"sauce": "metrics.csv"}),
        "do": ("do", {"run": "now", "what": ["lr", "0.5"]}),
    }
    async with Client(server()) as client:
        found.tools["reads"] = (await client.list_tools()).tools
        for name, (tool, arguments) in asked.items():
            found.answers[name] = Answer(await client.call_tool(tool, arguments))
    async with Client(server("--allow-do")) as client:
        found.tools["does"] = (await client.list_tools()).tools
        of_do: dict[str, dict[str, Any]] = {
            "late": {"run": "now", "what": ["lr", "0.5"], "wait_s": 0.2},
            "over": {"run": "over", "what": ["halt"]},
            "impossible": {"run": "now", "what": ["lr", "2"]},
        }
        for name, arguments in of_do.items():
            found.answers[name] = Answer(await client.call_tool("do", arguments))
        found.left_behind += (place / "experiments" / "now" / requests.FOLDER).glob("*")

        async def of_agent() -> None:
            found.answers["done"] = Answer(
                await client.call_tool("do", {"run": "now", "what": ["lr", "0.5"], "wait_s": 20})
            )

        async def of_person() -> None:
            words = ["do", str(place / "experiments" / "now"), "lr", "0.5", "--wait", "20"]
            assert await anyio.to_thread.run_sync(main, words) == 0

        for name, ask in (("agent", of_agent), ("person", of_person)):
            async with anyio.create_task_group() as group:
                group.start_soon(ask)
                found.requests[name] = await carry_out(place / "experiments" / "now")
        async with anyio.create_task_group() as group:  # an agent that goes away while it waits
            group.start_soon(of_agent)
            await request_in(place / "experiments" / "now")
            group.cancel_scope.cancel()
    found.left_behind += (place / "experiments" / "now" / requests.FOLDER).glob("*")


async def request_in(run: Path) -> Path:
    """The file of a request, once it is there."""
    with anyio.fail_after(60):
        while not (there := sorted((run / requests.FOLDER).glob("*.json"))):
            await anyio.sleep(0.02)
    return there[0]


async def carry_out(run: Path) -> dict[str, Any]:
    """What the process that trains does with a request; gives the content of its file."""
    content: dict[str, Any] = json.loads((await request_in(run)).read_text())
    taken, refused = requests.Inbox(run).take()
    assert (taken is not None, refused) == (True, [])
    told = {"number": 1, "decided_by": "person x", "trigger": "asked", "onset": 5, "evidence": "", "acted": True}
    event = {"kind": "intervention", "step": 5, "time": 1.0, "text": "lr x 0.5", "request": content["id"], **told}
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    return content


def test_what_is_found_is_what_the_command_prints(
    served: Served, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    for name, words in {
        "check": ["check", "metrics.csv"],
        "check a run": ["check", "over", "--tried", "halve the LR: helped"],
        "diff": ["diff", "metrics.csv", "over"],
        "health": ["health", "over"],
        "interventions": ["interventions", "over"],
    }.items():
        main([*words, "--json"])
        printed = json.loads(capsys.readouterr().out)
        answer = served.answers[name]
        assert (answer.is_error, answer.found) == (False, printed), name
        assert json.loads(answer.text) == printed
    assert served.answers["check a run"].found["tried"] == [{"action": "halve the LR", "outcome": "helped"}]
    assert served.answers["interventions"].found["interventions"][0]["decided_by"] == "playbook"


def test_schemas_are_those_of_the_documents(served: Served) -> None:
    """The client holds each answer to them."""
    for tool, gives in (("diff", Differing), ("health", Standing), ("interventions", Log)):
        assert json.loads((ROOT / "docs" / f"{tool}.schema.json").read_text()) == msgspec.json.schema(gives)
    offered = {tool.name: tool for tool in served.tools["reads"]}
    assert list(offered) == READS
    for name, tool in offered.items():
        promised = json.loads((ROOT / "docs" / f"{name}.schema.json").read_text())
        assert tool.output_schema["$defs"] == promised["$defs"]
        assert tool.output_schema["properties"] == promised["$defs"][promised["$ref"].rpartition("/")[2]]["properties"]
        assert (tool.input_schema["type"], tool.input_schema["additionalProperties"]) == ("object", False)
        assert tool.annotations.read_only_hint


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing log", "nothing.csv: no such file or folder"),
        ("missing run", "experiments/nobody: no such run folder"),
        ("above", "../other.csv: not in "),
        ("absolute", "/etc/passwd: not in "),
        ("link", "link.csv: not in "),
        ("choice", "where alone this server reads; --root FOLDER allows more"),
        ("home", "where alone this server reads"),
        ("settings", "../settings.toml: not in "),
        ("tried", "../tried.toml: not in "),
        ("run above", "../experiments: not in "),
        ("tracker", "mlflow:abc: a tracker is not read for an agent"),
        ("misspelt", "unknown field `sauce`"),
        ("do", "no tool is called 'do'; there are check, diff, health, interventions"),
        ("late", "it was not carried out within 0.2 s"),
        ("over", "no process is training this run"),
        ("impossible", "between 0 and 1"),
    ],
)
def test_a_refusal_is_one_sentence(served: Served, name: str, says: str) -> None:
    answer = served.answers[name]
    assert (answer.is_error, answer.found, len(answer.text.splitlines())) == (True, None, 1)
    assert says in answer.text


def test_an_agent_asks_what_a_person_asks(served: Served) -> None:
    """The file is that of `sealegs do`, and the answer the entry in the log of interventions."""
    assert [tool.name for tool in served.tools["does"]] == [*READS, "do"]
    assert not served.tools["does"][-1].annotations.read_only_hint
    agent, person = served.requests["agent"], served.requests["person"]
    assert agent["words"] == ["lr", "0.5"]
    assert {**agent, "id": ""} == {**person, "id": ""}
    answer = served.answers["done"]
    assert not answer.is_error
    assert (answer.found["step"], answer.found["request"]) == (5, agent["id"])
    assert msgspec.convert(answer.found, Entry)
    assert served.left_behind == [], "a request that nobody waits for is taken back"


def test_what_cannot_be_served_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mcp", "--root", str(tmp_path / "absent")]) == 2
    assert "absent: no such folder; give one that has runs or logs in it" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "mcp.server.stdio", None)
    assert main(["mcp"]) == 2
    assert capsys.readouterr().err == (
        "sealegs mcp: sealegs mcp needs the MCP SDK, which is not installed: pip install 'sealegs[mcp]'\n"
    )
