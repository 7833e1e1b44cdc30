"""What is released: its files agree, its build is the same bytes, and what it says of pickles is so."""

import ast
import hashlib
import os
import re
import subprocess
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW = (ROOT / ".github" / "workflows" / "release.yml").read_text()
UNPICKLES = {
    "record/second_process.py": "our own second process",
    "recovery/recomputation.py": "the other ranks of your job",
    "state/checkpoint_table.py": "an unpickler that knows only what such tables are made of",
}
"""The modules that can unpickle more than tensors and plain values, and the words of SECURITY.md about each."""


def test_every_place_that_could_unpickle_is_in_the_threat_model() -> None:
    """`weights_only` and `allow_pickle` are said at each call, so that no default of a library decides it."""
    found = set()
    for path in (ROOT / "src" / "sealegs").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if is_unsafe(node):
                found.add(path.relative_to(ROOT / "src" / "sealegs").as_posix())
    assert found == set(UNPICKLES)
    page = re.sub(r"\s+", " ", (ROOT / "SECURITY.md").read_text()).lower()
    assert [words for words in UNPICKLES.values() if words not in page] == []


def is_unsafe(node: ast.AST) -> bool:
    """Whether a piece of code can run a stranger's code by reading it."""
    if isinstance(node, ast.ClassDef):
        return any("Unpickler" in ast.unparse(base) for base in node.bases)
    if not isinstance(node, ast.Call):
        return False
    name, said = ast.unparse(node.func), {each.arg: ast.unparse(each.value) for each in node.keywords}
    return (
        name
        in ("pickle.load", "pickle.loads", "pickle.Unpickler", "dill.load", "dill.loads", "eval", "exec", "joblib.load")
        or (name == "torch.load" and said.get("weights_only") != "True")
        or (name in ("np.load", "numpy.load", "np.lib.format.read_array") and said.get("allow_pickle") != "False")
        or (name == "yaml.load" and said.get("Loader") != "Plain")
        or name in ("yaml.unsafe_load", "yaml.full_load")
    )


@pytest.mark.parametrize(
    ("code", "unsafe"),
    [
        ("torch.load(path)", True),
        ("torch.load(path, weights_only=True)", False),
        ("np.load(path, allow_pickle=True)", True),
        ("pickle.loads(data)", True),
        ("json.loads(data)", False),
    ],
)
def test_what_counts_as_unsafe(code: str, unsafe: bool) -> None:
    assert is_unsafe(ast.parse(code, mode="eval").body) is unsafe


def test_the_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert f"## [{PROJECT['version']}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_workflow_trusts_as_little_as_it_can() -> None:
    """Actions by their commits, no permission but where it is named, no token, and a person before it is published."""
    workflow = yaml.safe_load(WORKFLOW)
    used = re.findall(r"uses: (\S+)", WORKFLOW)
    assert len(used) == 6
    assert [each for each in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", each)] == []
    assert workflow["permissions"] == {}
    assert workflow["jobs"]["build"]["permissions"] == {"contents": "read"}
    assert workflow["jobs"]["publish"]["environment"] == "release"
    assert workflow["jobs"]["publish"]["permissions"]["id-token"] == "write"
    assert "secrets." not in WORKFLOW
    assert "${{" not in "".join(step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"])


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has what builds, in the version of constraints.txt."""
    folder = tmp_path_factory.mktemp("tools")
    venv.create(folder, with_pip=True)
    pip(folder, "--constraint", str(ROOT / "constraints.txt"), "hatchling")
    return folder


def pip(folder: Path, *words: str) -> None:
    command: list[str | Path] = [
        folder / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        *words,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if "No matching distribution" in done.stderr or "Connection" in done.stderr:
        pytest.skip(f"no registry to install from: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr


def built(tools: Path, place: Path, *, umask: int, time: int) -> dict[str, Path]:
    """Wheel and sdist of a copy of what git tracks, made under other circumstances."""
    source = place / "source"
    source.mkdir(parents=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        copy = source / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
        copy.chmod(0o666 & ~umask)
        os.utime(copy, (time, time))
    environment = os.environ | {"SOURCE_DATE_EPOCH": "1763000000", "TZ": "Asia/Tokyo" if umask else "UTC"}
    command: list[str | Path] = [tools / "bin" / "python", "-m", "hatchling", "build", "-d", place / "dist"]
    subprocess.run(command, cwd=source, env=environment, capture_output=True, check=True)
    return {path.name: path for path in (place / "dist").iterdir()}


@pytest.mark.long
def test_two_builds_are_the_same_bytes_and_the_wheel_works_alone(tools: Path, tmp_path: Path) -> None:
    first = built(tools, tmp_path / "first", umask=0o022, time=1_600_000_000)
    second = built(tools, tmp_path / "second", umask=0o077, time=1_700_000_000)
    assert sorted(first) == [f"sealegs-{PROJECT['version']}-py3-none-any.whl", f"sealegs-{PROJECT['version']}.tar.gz"]
    digests = [
        {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in each.items()} for each in (first, second)
    ]
    assert digests[0] == digests[1]
    wheel, sdist = (first[name] for name in sorted(first))
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {"sealegs/py.typed", "sealegs/diagnosis/symptoms.toml"} < set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "LICENSE",
        "SECURITY.md",
        "CITATION.cff",
        "docs/versions.md",
        "examples/raw_loop.py",
        "tests/test_release.py",
    } < held
    smoke(wheel, tmp_path)
    smoke(wheel, tmp_path, *(requirement.replace(">=", "==") for requirement in PROJECT["dependencies"]))


def smoke(wheel: Path, folder: Path, *versions: str) -> None:
    """The installed wheel, where there is no torch, with the newest or the oldest of what it needs."""
    empty = folder / ("oldest" if versions else "newest")
    venv.create(empty, with_pip=True)
    pip(empty, str(wheel), *versions)
    log = folder / "metrics.csv"
    log.write_text("step,loss\n" + "".join(f"{step},{4 - step / 100}\n" for step in range(80)))
    for words, code in (
        (["--version"], 0),
        ([], 0),
        (["--print-completion", "bash"], 0),
        (["check", "metrics.csv"], 0),
        (["symptom", "loss-is-inf"], 0),
        (["train"], 2),
        (["mcp"], 2),
    ):
        done = sealegs_in(empty, folder, *words)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    program = "import sealegs, importlib.util as u; print(u.find_spec('torch'), sealegs.open_run)"
    assert said_by(empty, folder, program).startswith("None <function")


def sealegs_in(environment: Path, folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """A command of the wheel that is installed there."""
    command: list[str | Path] = [environment / "bin" / "sealegs", *words]
    return subprocess.run(command, cwd=folder, env=outside(), capture_output=True, text=True)


def said_by(environment: Path, folder: Path, program: str) -> str:
    """What a program prints there."""
    command: list[str | Path] = [environment / "bin" / "python", "-c", program]
    done = subprocess.run(command, cwd=folder, env=outside(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def outside() -> dict[str, str]:
    """Nothing that leads back to these sources."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


LOOP = """
import sealegs, torch
model = torch.nn.Linear(4, 1)
guard = sealegs.Guard(model, torch.optim.AdamW(model.parameters()), run="experiments/loop")
for step in range(5):
    loss = model(torch.randn(8, 4)).square().mean() * (float("nan") if step == 3 else 1)
    loss.backward()
    verdict = guard.step(loss)
guard.close()
print(sealegs.__file__, sealegs.open_run("experiments/loop").steps.tolist())
"""


@pytest.mark.long
def test_the_wheel_works_with_torch(tools: Path, tmp_path: Path) -> None:
    """torch by its version in constraints.txt, which is what `make` installs, too."""
    wheel = next(
        path for name, path in built(tools, tmp_path, umask=0o022, time=1_600_000_000).items() if "whl" in name
    )
    place = tmp_path / "with-torch"
    venv.create(place, with_pip=True)
    for named in ("torch", f"{wheel}[lab]"):
        pip(place, "--constraint", str(ROOT / "constraints.txt"), named)
    for words, code in (
        (["train", "--size", "nano", "--steps", "20", "--run", "a", "--threads", "1"], 0),
        (["check", "a"], 0),
        (["audit", "experiments/a/checkpoints/20"], 0),
        (["dashboard", "a"], 2),
    ):
        done = sealegs_in(place, tmp_path, *words)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    file, _, steps = said_by(place, tmp_path, LOOP).partition(" ")
    assert (Path(file).is_relative_to(place), steps.strip()) == (True, "[0, 1, 2, 3, 4]")
