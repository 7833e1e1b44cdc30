"""A stranger's run folder, with hostile text in every string of its files: nothing of it comes to life anywhere."""

import base64
import json
import re
import shutil
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import pytest
import torch
from markdown_it import MarkdownIt
from tests.report import runs
from torch import nn
from torch.optim import SGD

import sealegs
from sealegs.cli.main import main
from sealegs.cli.output import show
from sealegs.cli.postmortem import cases_of
from sealegs.errors import SealegsError
from sealegs.guard_options import Checkpointing
from sealegs.incidents import Incident
from sealegs.record.schema import EVENTS, METRICS, to_line
from sealegs.report.commands.replay import ArmShown, Replayed, RowShown, TokenShown, UsualShown
from sealegs.report.commands.replay import page as replayed_page
from sealegs.report.commands.verify import FixShown, PromiseShown, Verified
from sealegs.report.commands.verify import page as verified_page
from sealegs.report.postmortem import plots

pytestmark = [
    pytest.mark.xdist_group("text of strangers"),  # one run serves all
    pytest.mark.filterwarnings("ignore::sealegs.errors.RunEndedBadly"),  # in the middle of its incident
]

PRIVATE = "the words of ana"
FORGED = "FORGED"
"""How a line begins that a file wants to be taken for one of ours."""
EVIDENCE = "incidents/1/evidence"
PAYLOADS = {
    "terminal": "\x1b[2J\x1b]0;owned\x07\x1bP\x9b31m\x9d8;;http://evil\x9c\r\b\x7f\x00\t| end",
    "direction": "\u202eevil\u2066\u200b\u200f\ufeff\u2028\u2029\x85\U000e0041 end",
    "lines": f"x\n{FORGED}: all is well\r\n{FORGED}\n# {FORGED}\n\n- [x] {FORGED}\n\n> {FORGED}\n\n    {FORGED} end",
    "image": "![a]({secret}) ![b](../../../secret.png) ![c](file://{secret}) ![d](evidence/link.png) ![e](<{secret}>)",
    "lone image": "![a]({secret})",
    "reference": "![a][r]\n\n[r]: {secret}\n\n![r]",
    "fence": "``` ![a]({secret}) `",
    "backslash": "\\` ![a]({secret}) ` \\![a]({secret}) !\\[a\\]({secret}) \\",
    "entity": "&#33;&#91;a&#93;({secret}) &lt;script&gt; &amp;",
    "html": "<script>alert(1)</script><img src='{secret}' onerror=alert(1)>\"'><svg onload=alert(1)><!--",
    "link": "[a](javascript:alert(1)) <javascript:alert(1)> <http://evil> [b](//evil/x) [c](data:text/html,x) ]( ![",
    "markup": "_$^$ *a* _b_ __c__ ~~d~~ `e | | f {{7*7}} {% raw %} $$\\href{evil}{x}$$ EMPTY: <!channel> @everyone",
}


IN_A_TERMINAL = ("terminal", "direction", "lines")


def trained(folder: Path) -> Path:
    """A run under a guard whose loss becomes NaN: its checkpoint and its capsule are real."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    kept = Checkpointing(snapshot_memory=2**20, snapshot_every=20)
    how: dict[str, Any] = {"playbook": sealegs.Playbook.standard(), "checkpoint_every": kept, "act": False}
    with sealegs.Guard(model, SGD(model.parameters(), lr=1e-3), run=folder, clip=1.0, **how) as guard:
        for x in guard.batches(list(torch.randn(60, 16, 8))):
            loss = model(x).square().mean() * (float("nan") if guard.number >= 30 else 1.0)
            loss.backward()
            guard.step(loss)
            if guard.number > 40:
                break
    return folder


ARMS: tuple[tuple[str, Literal["placebo", "without"], Literal["there", "gone"]], ...] = (
    ("one ulp", "placebo", "there"),
    ("other batches", "without", "gone"),
)
REPLAYED = Replayed(
    source="night",
    incident=1,
    kind="spike",
    onset=runs.SPIKE,
    steps=90,
    apart=0.0,
    usual=UsualShown(loss=2.1, deviation=0.02, grad_norm=0.8),
    departure=None,
    height=90.0,
    damage=3.0,
    arms=[
        ArmShown(
            name=name,
            kind=kind,
            cause="bad-data-batch",
            does="other data",
            left=0.0,
            shows=shows,
            height=1.0,
            damage=0.1,
        )
        for name, kind, shows in ARMS
    ],
    causes={"bad-data-batch": "necessary", "lr-too-high": "not needed"},
    unasked=["older state"],
    rows=[
        RowShown(row=1, origin="web", loss=9.0, grad_norm=9.0, share=0.5, repeated=0.1, rare=0.2, text="a text"),
    ],
    tokens=[TokenShown(token=7, text="tten", times=3, before=0, loss=12.0, share=0.4)],
    histogram=[0, 4, 1],
    histogram_before=[4, 1, 0],
    location="softmax of blocks.0",
    cause="bad-data-batch",
    because="without these batches the incident is gone",
)
VERIFIED = Verified(
    source="night",
    incident=1,
    kind="spike",
    onset=runs.SPIKE,
    cause="bad-data-batch",
    begun="snapshot",
    first=190,
    last=250,
    folder="experiments/again",
    borrowed=0,
    fixes=[FixShown(name="data.mix", value="web", does="set data.mix to web")],
    promises=[
        PromiseShown(
            signal="loss", first=200, last=250, below=2.5, or_equal=False, mean_of=1, was=7.0, measured=2.2, step=230,
            kept=True, does="loss below 2.5",
        )
    ],
    kept=True,
)  # fmt: skip
DESCRIBED = {
    "seed": 3,
    "dtype": "bf16",
    "settings": {"model": {"width": 64, "kind": "gpt"}, "data": {"mix": ["web", "code"]}, "optimizer": {"clip": 1.0}},
    "data": {"sources": {"web": {"documents": 7, "from": "a.jsonl"}}},
    "price_per_hour": 2.0,
    "tracker": {"name": "mlflow", "run_id": "ab", "uri": "http://127.0.0.1:5000/#/experiments/1/runs/ab"},
    "trackers": [{"name": "mlflow", "run_id": "ab", "uri": "http://127.0.0.1:5000/#/runs/ab"}],
}
MORE_EVENTS: list[dict[str, Any]] = [
    {"kind": "resume", "passed_over": {"90": "torn"}, "changed": {"seed": ["1", "2"]}, "checkpoint": 80},
    {"kind": "resume-audit", "not_as_saved": {"moments": "other"}, "changed": ["torch"]},
    {"kind": "sink-failed", "sink": "mlflow", "reason": "timeout"},
    {"kind": "remark", "text": "throughput at 69%", "findings": []},
    {"kind": "halt", "text": "HALT", "incident": 1},
    {"kind": "checkpoint-failed", "reason": "disk full"},
    {"kind": "stalled", "seconds": 9.0, "where": "loader"},
    {"kind": "announced", "what": "lr decay", "text": "lr decay"},
    {"kind": "request-refused", "request": "1", "reason": "no playbook", "by": "ana"},
    {"kind": "counted-back", "steps": 1, "text": "1 step counted back"},
    {"kind": "end", "reason": "failed", "error": "RuntimeError: x", "by": "ana", "skipped": "3 of 9"},
]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that a run can leave, and secrets around it that are none of its business."""
    place = tmp_path_factory.mktemp("strangers")
    run = runs.troubled(place / "night")
    real = trained(place / "real")
    shutil.move(real / "incidents" / "1", run / "incidents" / "1")
    for name in ("checkpoints", "recovery.json"):
        shutil.move(real / name, run / name)
    told = json.loads((run / "manifest.json").read_bytes()) | DESCRIBED
    (run / "manifest.json").write_text(json.dumps(told))
    more = [{"time": 1.7e9 + 99, "step": 260, **event} for event in MORE_EVENTS]
    with (run / EVENTS).open("ab") as file:
        file.write((real / EVENTS).read_bytes())
        file.writelines(map(to_line, more))
    shutil.rmtree(real)
    incident = Incident(
        number=1, start=runs.SPIKE, kind="spike", pre_loss=2.1, usual=2.1, limit=2.2, peak=205, peak_loss=7.0,
        grad_norm_peak=20.8, end=250, trajectory="slow", recovery_loss=2.1,
    )  # fmt: skip
    kept = {"incident.json": asdict(incident), "replay.json": msgspec.to_builtins(REPLAYED)}
    for name, value in (kept | {"verified.json": msgspec.to_builtins(VERIFIED)}).items():
        (run / "incidents" / "1" / name).write_text(json.dumps(value))
    (run / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}, "merges": ["a b"]}}))
    (run / EVIDENCE).mkdir()
    for secret in (place / "secret.png", place / "secret.txt"):
        secret.write_text(PRIVATE)
    (run / EVIDENCE / "link.png").symlink_to(place / "secret.png")
    return run


@pytest.fixture(scope="module")
def scripts(honest: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many scripts a dashboard has by itself."""
    target = tmp_path_factory.mktemp("page") / "page.html"
    assert main(["dashboard", str(honest), "-o", str(target)]) == 0
    return [tag for tag, _ in Elements(target.read_text()).tags].count("script")


# Every string of every file.

Place = tuple[str | int, ...]
Places = dict[str, tuple[list[Place], list[Place]]]
"""The strings of each file: those that may be anything, and those that the file is refused for."""


def strings(value: Any, at: Place = ()) -> Iterator[Place]:
    """Where a JSON value has strings; a table also has a place for one more name."""
    if isinstance(value, str):
        yield at
    elif isinstance(value, dict):
        if value:
            yield (*at, "")
        for name, item in value.items():
            yield from strings(item, (*at, name))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from strings(item, (*at, number))


def plant(value: Any, at: Place, text: str) -> Any:
    """A copy with the text at one place. At the place for a name, the first entry comes again under the text."""
    if not at:
        return text
    head, *rest = at
    if isinstance(value, dict):
        if head == "":
            return value | {text: next(iter(value.values()))}
        return value | {head: plant(value[head], tuple(rest), text)}
    return [plant(item, tuple(rest), text) if number == head else item for number, item in enumerate(value)]


def plant_all(value: Any, places: Iterable[Place], text: str) -> Any:
    for at in places:
        value = plant(value, at, text)
    return value


FILES = (
    *("manifest.json", "recovery.json", "tokenizer.json", "checkpoints/tags.json"),
    *(f"incidents/1/{name}.json" for name in ("incident", "replay", "verified")),
    *(f"incidents/1/capsule/{name}.json" for name in ("capsule", "manifest")),
)


def is_read(run: Path) -> bool:
    """Whether the files of a run are taken for what they are."""
    try:
        for case, _ in cases_of(f"{run}#1"):
            assert case.run.events
    except SealegsError:
        return False
    return True


def planted_rows(run: Path, text: str) -> Iterator[dict[str, Any]]:
    """Hostile signals, sources and texts. What no reader takes for a name is left out of names."""
    name = "".join(character for character in text if character.isprintable() and character not in '"\\')
    for line in (run / METRICS).read_bytes().splitlines():
        row = json.loads(line)
        texts = {key: text for key, value in row.items() if isinstance(value, str) and key != "loss"}
        texts |= {"culprit": text, "announced": text, "sources": f"{name.replace(' ', '')}=3 web=1"}
        names = {f"{group}/{name}": 1.0 for group in ("activation_norm", "param_norm", "attention_logit_max")}
        spelt = {key: value for key, value in row.items() if value in ("NaN", "Infinity", "-Infinity")}
        yield row | texts | spelt | {"token_loss_histogram": row.get("token_loss_histogram", "")} | names | {name: 1.0}


def planted_events(run: Path, text: str) -> Iterator[dict[str, Any]]:
    """Each event twice: as what it is, and as one of a kind that nobody knows."""
    for line in (run / EVENTS).read_bytes().splitlines():
        event = json.loads(line)
        hostile = plant_all(event, strings(event), text)
        routed = {key: event[key] for key in ("kind",) if key in event}
        yield hostile | routed
        yield hostile


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))


@pytest.fixture(scope="module")
def places(honest: Path, tmp_path_factory: pytest.TempPathFactory) -> Places:
    """What becomes of each string is found out by trying."""
    copy = tmp_path_factory.mktemp("places") / "night"
    shutil.copytree(honest, copy, symlinks=True)
    found: Places = {}
    for name in FILES:
        before = (copy / name).read_bytes()
        value = json.loads(before)
        every = list(strings(value))
        refused = refused_of(copy, name, value, every)
        (copy / name).write_bytes(before)
        found[name] = [at for at in every if at not in refused], refused
    return found


def refused_of(copy: Path, name: str, value: Any, places: list[Place]) -> list[Place]:
    """For which of these the file is refused: most are taken, so that many are tried at once, and then half of them."""
    (copy / name).write_text(json.dumps(plant_all(value, places, "harmless")))
    if not places or is_read(copy):
        return []
    if len(places) == 1:
        return places
    half = len(places) // 2
    return [at for part in (places[:half], places[half:]) for at in refused_of(copy, name, value, part)]


def hostile_copy(honest: Path, target: Path, places: Places, text: str) -> Path:
    shutil.copytree(honest, target, symlinks=True)
    for name, (taken, _) in places.items():
        value = json.loads((honest / name).read_bytes())
        (target / name).write_text(json.dumps(plant_all(value, taken, text)))
    write_lines(target / METRICS, planted_rows(honest, text))
    write_lines(target / EVENTS, planted_events(honest, text))
    for folder in ("checkpoints", "incidents", "incidents/1/evidence"):
        (target / folder / text.replace("/", "_").replace("\0", "")[:60]).mkdir()
    return target


# What may be in an output.

ALLOWED = {"\n"}


def assert_calm(text: str, what: str) -> None:
    """No control character, nothing that turns the text around, no character that cannot be seen; no forged line."""
    odd = {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c not in ALLOWED}
    assert not odd, f"{what}: {odd} in {[line for line in text.splitlines() if odd & set(line)][:2]}"
    # a word of a long text may come first in a line that is indented
    assert not re.search(rf"^\W{{0,2}}{FORGED}", text, re.MULTILINE), f"{what}: {text[:2000]}"


def assert_no_secret(content: bytes, what: str) -> None:
    assert PRIVATE.encode() not in content, what
    for shift in range(3):  # wherever it lies in what is encoded
        core = base64.b64encode(b"x" * shift + PRIVATE.encode())[4:-4]
        assert core not in content, what


class Elements(HTMLParser):
    """The elements of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if not self.tags or self.tags[-1][0] not in ("script", "style"):
            self.texts.append(data)


def assert_page_is_tame(text: str, what: str, *, scripts: int, pictures: set[bytes]) -> None:
    found = Elements(text)
    names = [tag for tag, _ in found.tags]
    assert names.count("script") == scripts, what
    never = {"iframe", "object", "embed", "form", "base", "link", "svg", "math", "input", "video", "audio"}
    assert not never & set(names), what
    for tag, attributes in found.tags:
        assert not [name for name in attributes if name.startswith("on")], (what, tag, attributes)
        for value in attributes.values():
            assert_calm(value or "", f"{what}, {tag}")
        if tag == "img":
            head, _, content = (attributes["src"] or "").partition(",")
            assert head == "data:image/png;base64", what
            assert base64.b64decode(content) in pictures, what
        elif tag != "meta":
            address = attributes.get("href") or attributes.get("src") or "#"
            assert address.startswith(("#", "incidents/1/")), (what, address)
    assert_calm("\n".join(found.texts).replace("\u00a0", " "), what)


def assert_document_is_tame(text: str, what: str, *, headings: int) -> None:
    """Markdown whose only images are ours, and that has no other heading, link, element or rule than we write."""
    assert_calm(text, what)
    tokens = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(text)
    kinds = [token.type for token in tokens]
    assert kinds.count("heading_open") == headings + text.count("\n### H"), what
    assert not {"html_block", "hr", "code_block", "fence", "blockquote_open", "ordered_list_open"} & set(kinds), what
    inner = [child for token in tokens for child in token.children or ()]
    kept = {"text", "text_special", "code_inline", "image", "softbreak"}
    assert {child.type for child in inner} <= kept, (what, [c for c in inner if c.type not in kept][:3])
    for child in inner:
        if child.type == "image":
            assert str(child.attrs["src"]).startswith("evidence/"), (what, child.attrs)
            assert child.attrs["src"] != "evidence/link.png", what


def calm_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> int:
    """Run a command, and look at what it prints; its exit code."""
    code = main(words)
    said = capsys.readouterr()
    what = " ".join(words)
    assert code in (0, 1, 2), what
    assert_calm(said.err, what)
    if "--json" in words and code != 2:
        assert said.out.isascii()
        json.loads(said.out, parse_constant=lambda name: pytest.fail(f"{what}: {name} is not JSON"))
        assert {c for c in said.out if not c.isprintable()} <= {"\n"}
    else:
        assert_calm(said.out, what)
    assert_no_secret((said.out + said.err).encode(), what)
    return code


@pytest.fixture
def hostile(honest: Path, places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes the run `night` of a text; secrets that it may point at are beside the honest one."""
    monkeypatch.chdir(tmp_path)
    return lambda text: hostile_copy(honest, tmp_path / "experiments" / "night", places, text)


@pytest.mark.parametrize("payload", IN_A_TERMINAL)
def test_no_command_passes_on_what_a_terminal_obeys(
    payload: str, hostile: Callable[[str], Path], honest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile(PAYLOADS[payload])
    for words in (
        *(["check", "night", "--explain"], ["check", "night", "--json"]),
        *(["diff", "night", str(honest)], ["diff", str(honest), "night", "--json"]),
        *(["interventions", "night"], ["interventions", "night", "--json"]),
        *(["audit", "night"], ["audit", "night", "--json"], ["preflight", "night"]),
    ):
        assert calm_command(words, capsys) in (0, 1), words
    for words in (
        *(["replay", "night"], ["locate", "night"], ["verify", "night"], ["do", "night", "halt"]),
        ["train", "--run", "night", "--resume"],
    ):
        calm_command(words, capsys)
    show(replayed_page, planted(REPLAYED, PAYLOADS[payload]))  # what reruns would print
    show(verified_page, planted(VERIFIED, PAYLOADS[payload]))
    said = capsys.readouterr()
    assert "end" in said.out
    assert_calm(said.out, "reruns")


Struct = TypeVar("Struct", bound=msgspec.Struct)


def planted(found: Struct, text: str) -> Struct:
    """The same with the text in every field that takes any."""
    value = msgspec.to_builtins(found)
    taken = [at for at in strings(value) if at[-1] and is_text(value, at, type(found))]
    return msgspec.convert(plant_all(value, taken, text), type(found))


def is_text(value: Any, at: Place, kind: type) -> bool:
    """Whether a field takes any text."""
    try:
        msgspec.convert(plant(value, at, "harmless"), kind)
    except msgspec.ValidationError:
        return False
    return True


@pytest.mark.parametrize("payload", IN_A_TERMINAL)
def test_nor_of_other_logs_corpora_and_settings(
    payload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = PAYLOADS[payload]
    flat = text.replace("\n", " ").replace("\r", " ").replace("\0", "").encode(errors="replace").decode()
    name = flat.replace("/", "_")[:60]
    (tmp_path / f"{name}.csv").write_text(f"step,loss,{flat}\n" + "".join(f"{n},{3 - n / 50},1\n" for n in range(50)))
    lines = [json.dumps({"step": n, "loss": 3 - n / 50, text: 1.0}) for n in range(50)]
    (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    (tmp_path / f"{name}.log").write_text("".join(f"{flat} step {n} loss {3 - n / 50}\n" for n in range(50)))
    (tmp_path / f"{name}.toml").write_text(f"{json.dumps(text)} = {json.dumps(text)}\n")
    (tmp_path / "value.toml").write_text(f"[data]\ntokenizer = {json.dumps(text)}\n")
    (tmp_path / "key.toml").write_text(f"[data.sources]\n{json.dumps(text)} = 1.0\n")
    (tmp_path / "model.json").write_text(json.dumps({"model_type": text, "hidden_act": text, text: text}))
    (tmp_path / f"{name}.corpus.jsonl").write_text(
        "".join(json.dumps({"text": text * 9, "meta": text}) + "\n" for _ in "ab")
    )
    settings = f"{name}.toml", "value.toml", "key.toml"
    for words in (
        *([command, f"{name}.{kind}"] for command in ("check", "postmortem") for kind in ("csv", "jsonl", "log")),
        *(["check", f"{name}.csv", "--json"], ["diff", f"{name}.csv", f"{name}.jsonl"]),
        *([command, file] for command in ("train", "preflight", "coordcheck", "scan") for file in settings),
        *(["train", file, *more] for file in settings[1:] for more in (["--help"], ["--data.source", "a"])),
        *(["scan", f"{name}.corpus.jsonl"], ["scan", f"{name}.corpus.jsonl", "-o", "scanned"]),
        *(["preflight", "model.json"], ["scan", f"{name}.corpus.jsonl", "--json"]),
        *(["audit", f"{name}.log"], ["check", f"{name}.none"], ["batches", f"{name}.npy"], ["notify", name], [name]),
    ):  # fmt: skip
        calm_command(words, capsys)
    assert_calm((tmp_path / "scanned" / "scan.txt").read_text(), "report")


@pytest.mark.parametrize("payload", PAYLOADS)
def test_no_text_of_a_file_becomes_a_part_of_the_document(
    payload: str,
    hostile: Callable[[str], Path],
    honest: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_drawn = payload == "markup"  # pictures take longer than all else, and only formulas are anything in them
    if not is_drawn:
        monkeypatch.setattr(plots, "find_spec", lambda name: None)
    run = hostile(PAYLOADS[payload].replace("{secret}", str(honest.parent / "secret.png")))
    assert calm_command(["postmortem", "night#1"], capsys) == 0
    folder = run / "incidents" / "1"
    pictures = [path for path in (run / EVIDENCE).glob("*.png") if path.is_file() and not path.is_symlink()]
    drawn = {path.read_bytes() for path in pictures}
    assert len(drawn) == (4 if is_drawn else 0)
    assert_document_is_tame((folder / "postmortem.md").read_text(), "Markdown", headings=14)
    assert_page_is_tame((folder / "postmortem.html").read_text(), "page", scripts=0, pictures=drawn)
    shutil.copy(honest / "incidents" / "1" / "replay.json", folder)  # hostile causes are none, and teach nothing
    assert calm_command(["postmortem", "night#1"], capsys) == 0
    assert_document_is_tame((run.parent / "lessons.md").read_text(), "lessons", headings=1)
    for path in (folder / "postmortem.md", folder / "postmortem.html", run.parent / "lessons.md"):
        assert_no_secret(path.read_bytes(), str(path))


def test_nor_of_the_dashboard(
    hostile: Callable[[str], Path], honest: Path, scripts: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """One page with everything in it: nothing of HTML depends on what stands beside it."""
    text = " ".join(PAYLOADS.values()).replace("{secret}", str(honest.parent / "secret.png"))
    run = hostile(text)
    assert calm_command(["dashboard", "night"], capsys) == 0
    page = (run / "dashboard.html").read_text()
    assert_page_is_tame(page, "dashboard", scripts=scripts, pictures=set())
    assert_no_secret(page.encode(), "dashboard")
    assert "all is well" in page


def test_a_text_that_no_file_can_hold_is_spelt_out(
    honest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON can write half of a character, which no encoding has."""
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    run = tmp_path / "night"
    shutil.copytree(honest, run, symlinks=True)
    told = json.loads((run / "manifest.json").read_bytes()) | {"dtype": "\ud83d", "run_id": "\ud83d"}
    (run / "manifest.json").write_text(json.dumps(told))
    assert calm_command(["postmortem", str(run)], capsys) == 0
    assert calm_command(["diff", str(run), str(honest)], capsys) == 1
    assert "- dtype: \\ud83d\n" in (run / "incidents" / "1" / "postmortem.md").read_text()


def test_a_file_that_is_refused_is_refused_in_one_calm_sentence(
    honest: Path, places: Places, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "night"
    shutil.copytree(honest, run, symlinks=True)
    text = PAYLOADS["terminal"] + PAYLOADS["lines"]
    tried = 0
    for name, (_, refused) in places.items():
        before = (run / name).read_bytes()
        for at in refused:
            (run / name).write_text(json.dumps(plant(json.loads(before), at, text)))
            assert main(["postmortem", str(run)]) == 2, (name, at)
            said = capsys.readouterr()
            assert len(said.err.splitlines()) == 1, (name, at)
            assert_calm(said.err, f"{name}: {at}")
            tried += 1
        (run / name).write_bytes(before)
    assert tried > 5


@pytest.mark.parametrize("place", ["incidents/1/evidence", "../lessons.md"])
def test_nothing_is_written_or_read_through_a_link(
    place: str, honest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "theirs" / "night"
    shutil.copytree(honest, run, symlinks=True)
    ours = tmp_path / "ours"
    if place.endswith(".md"):
        monkeypatch.setattr(plots, "find_spec", lambda name: None)
        ours.write_text(PRIVATE)
    else:
        shutil.rmtree(run / place)
        ours.mkdir()
    (run / place).symlink_to(ours)
    assert main(["postmortem", str(run)]) == 2
    assert "link" in capsys.readouterr().err or place.endswith(".md")
    assert (run / place).is_symlink()
    assert ours.read_text() == PRIVATE if ours.is_file() else not list(ours.iterdir())
