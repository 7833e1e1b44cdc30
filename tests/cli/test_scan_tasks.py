"""``sealegs scan --on``: any number of tasks, killed and begun again, comes to the same bytes as one process."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from sealegs.cli.main import main
from sealegs.scan import id_reader, text_reader

pytest.importorskip("datatrove", reason="--on needs the extra `cluster`")
ROOT = Path(__file__).parents[2]
PLANT = ROOT / "tests" / "scan" / "plant.py"
RUN = """
import sys, sealegs.scan.tasks
from sealegs.cli.main import main
sealegs.scan.tasks._LOOK_S = 0.2
if __name__ == "__main__": raise SystemExit(main(sys.argv[1:]))
"""
PATIENCE_S = 240.0
"""For a process that ends by itself, on a machine that does other things too."""
Said = tuple[int, str, str]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of every format, some of many documents and most of few; the same text in several of them."""
    folder = tmp_path_factory.mktemp("corpus")
    subprocess.run([sys.executable, PLANT, folder / "planted", "--seed", "3", "--documents", "40"], check=True)
    (folder / "planted" / "truth.json").unlink()
    lines = (folder / "planted" / "corpus.jsonl").read_text().splitlines()
    draw = random.Random(4)  # noqa: S311 - no secrets
    for number in range(206):
        few = [*draw.choices(lines, k=2), json.dumps({"text": f"Document {number} of the small files."}), "no JSON"]
        (folder / f"{number:03d}.jsonl").write_text("\n".join(few) + "\n")
    for number in range(5):
        (folder / f"{number}.md").write_text(f"# Chapter {number}\n\nA file that is one document.\n")
    return folder


@pytest.fixture
def scan(
    corpus: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Said]:
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Said:
        code = main(["scan", *words, *(["--jobs", "1"] if "--jobs" not in words else [])])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def files_in(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in sorted(folder.iterdir())}


def report(scan: Callable[..., Said], corpus: Path, *words: str) -> tuple[str, dict[str, bytes]]:
    """What is printed and what is written; and the folder is free for the next."""
    code, out, _ = scan(str(corpus), "-o", "out", *words)
    assert code == 1
    found = files_in(Path("out"))
    shutil.rmtree("out")
    return out, found


def test_any_number_of_tasks_comes_to_the_same_bytes(scan: Callable[..., Said], corpus: Path) -> None:
    of_one_process = report(scan, corpus)
    of_two = report(scan, corpus, "--on", "local", "--tasks", "2", "--work", "two")
    of_many = report(scan, corpus, "--on", "local", "--tasks", "200", "--work", "many")
    assert of_one_process == of_two == of_many
    assert len(list(Path("many/tasks/count-00200/completions").iterdir())) == 200
    assert "duplicate" in of_many[0]
    assert not [each for each in Path("many").rglob("*") if each.suffix in {".pik", ".pkl", ".pickle"}]
    code, out, _ = scan("--work", "many", "--status")
    assert (code, out[:5]) == (0, "100% ")


def test_a_scan_that_is_killed_goes_on(scan: Callable[..., Said], corpus: Path, tmp_path: Path) -> None:
    """At a random moment, with another number of tasks afterwards; then one of its processes alone."""
    some = tmp_path / "some"  # files, so that it takes less time
    some.mkdir()
    for each in sorted(corpus.glob("*.jsonl"))[:60]:
        shutil.copyfile(each, some / each.name)
    wanted = report(scan, some)
    (tmp_path / "run.py").write_text(RUN)
    draw = random.Random()  # noqa: S311 - another moment in every run
    for number, kill_all in enumerate((True, False)):
        work = tmp_path / f"work{number}"
        words = ["scan", str(some), "-o", "out", "--on", "local", "--tasks", "9", "--jobs", "2", "--work", str(work)]
        run = subprocess.Popen(
            [sys.executable, "run.py", *words], cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        enough = draw.randrange(1, 40)
        counts = work / "counts"
        while not counts.is_dir() or len(list(counts.glob("*.json"))) < enough:
            assert run.poll() is None
            time.sleep(0.005)
        if kill_all:
            os.killpg(run.pid, signal.SIGKILL)
            run.communicate(timeout=PATIENCE_S)
        else:
            os.kill(worker_of(run.pid), signal.SIGKILL)
            _, err = run.communicate(timeout=PATIENCE_S)
            assert run.returncode == 2, err
            assert "a process of the scan was killed" in err
            assert "Traceback" not in err
        done = len(list(counts.glob("*.json")))
        assert enough <= done <= 60
        code, out, _ = scan("--work", str(work), "--status")
        assert code == (3 if done < 60 else 0)  # the other process counts on until the first is missed
        assert f"{done} of 60" in out or done == 60
        before = {each: each.stat().st_mtime_ns for each in counts.glob("*.json")}
        assert report(scan, some, "--on", "local", "--tasks", "4", "--work", str(work)) == wanted
        assert {each: each.stat().st_mtime_ns for each in before} == before  # what was counted is not counted again


STRUCK = """
import os, pathlib, signal, time
def struck(place, rank, world, counted=sealegs.scan.tasks.count_bundles):
    counted(place, rank, world)
    while rank == 0 and len(list(pathlib.Path(place, "counts").glob("*.json"))) < 5: time.sleep(0.05)
    if rank == 0: os.kill(os.getpid(), signal.SIGKILL)
sealegs.scan.tasks.count_bundles = struck
"""


def test_a_process_that_is_killed_after_its_last_count_keeps_nobody_waiting(
    scan: Callable[..., Said], corpus: Path, tmp_path: Path
) -> None:
    begin, main_part = RUN.split("if __name__")
    (tmp_path / "run.py").write_text(f"{begin}{STRUCK}if __name__{main_part}")
    words = [str(corpus / "planted"), "-o", "out", "--on", "local", "--tasks", "2", "--jobs", "2", "--work", "work"]
    done = subprocess.run(
        [sys.executable, "run.py", "scan", *words], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 2, done.stderr
    assert "a process of the scan was killed" in done.stderr
    assert len(list((tmp_path / "work" / "counts").glob("*.json"))) == 5
    assert report(scan, corpus / "planted", *words[3:]) == report(scan, corpus / "planted")


def worker_of(pid: int) -> int:
    """A process of the pool: one that has been spawned, and does not mind the others."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    spawned = [each for each in children if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes()]
    return int(spawned[-1])


def test_a_tokenizer_is_that_of_the_folder(
    scan: Callable[..., Said], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another folder has another file of the same name."""
    counted = []
    for name, words in (("one", {"?": 0, "the": 1}), ("two", {"?": 0, "the": 1, "of": 2, "and": 3})):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))  # noqa: S106
        made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        made.save("tokenizer.json")
        _, out, _ = scan(str(corpus / "planted" / "corpus.jsonl"), "--tokenizer", "tokenizer.json", "--json")
        counted.append(json.loads(out)["distinct"])
    assert counted[0] < counted[1]


def test_counts_that_a_power_cut_has_torn_are_counted_again(scan: Callable[..., Said], corpus: Path) -> None:
    words = ("--on", "local", "--tasks", "3", "--work", "work")
    wanted = report(scan, corpus, *words)
    for name in ("00003.npz", "00005.documents"):
        torn = Path("work/counts") / name
        torn.write_bytes(torn.read_bytes()[:-7])
    assert report(scan, corpus, *words) == wanted


def test_a_corpus_at_an_address_is_read_as_one_on_disk(scan: Callable[..., Said], corpus: Path) -> None:
    """And the work folder may be at one, too."""
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.store.clear()
    files = [each for each in corpus.rglob("*") if each.is_file()]
    for each in [*files[::9], *(corpus / "planted").rglob("*.parquet"), *(corpus / "planted").rglob("*.arrow")]:
        memory.pipe_file(f"/bucket/{each.relative_to(corpus)}", each.read_bytes())
        copied = Path("copy") / each.relative_to(corpus)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(each, copied)
    code, out, _ = scan("copy", "--json")
    wanted = out.replace('"copy', '"memory://bucket').replace("as copy", "as memory://bucket")
    assert code == 1
    for words in ((), ("--on", "local", "--tasks", "5", "--work", "memory://tasks/here")):
        code, out, _ = scan("memory://bucket/", "--json", *words)
        assert out.replace('"memory://bucket/"', '"memory://bucket"') == wanted
    assert memory.exists("/tasks/here/counts/00000.json")
    assert not memory.glob("/tasks/here/**/*.partial")
    local = Path("copy").absolute()
    assert scan(f"file://{local}", "--json")[1].replace("file://", "") == scan(str(local), "--json")[1]


def test_another_corpus_does_not_go_into_the_same_folder(scan: Callable[..., Said]) -> None:
    Path("a.txt").write_text("One.\n\nTwo.")
    words = ("--on", "local", "--tasks", "1", "--work", "work")
    assert scan("a.txt", *words)[0] == 0
    code, _, err = scan("a.txt", *words, "--longest", "7")
    assert (code, "--work work: it was begun with --longest 32768; name a new folder" in err) == (2, True)
    Path("a.txt").write_text("One.\n\nTwo.\n\nThree.")
    code, _, err = scan("a.txt", *words)
    assert (code, "the corpus or the tokenizer has changed since it was begun" in err) == (2, True)
    Path("b.txt").write_text("One.")
    code, _, err = scan("b.txt", *words)
    assert (code, "it holds the scan of a.txt in " in err) == (2, True)


def test_a_task_that_ends_is_told_with_its_reason(scan: Callable[..., Said]) -> None:
    Path("a.txt").write_text("One.")
    Path("work/counts/00000.npz").mkdir(parents=True)
    code, _, err = scan("a.txt", "--on", "local", "--tasks", "1", "--work", "work")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "counts/00000.npz: cannot be written (" in err
    Path("work/counts/00000.npz").rmdir()
    code, out, _ = scan("--work", "work", "--status")
    assert (code, "task 0 ended: " in out) == (3, True)
    assert scan("a.txt", "--on", "local", "--tasks", "1", "--work", "work")[0] == 0
    assert "ended" not in scan("--work", "work", "--status")[1]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["a.txt", "--tasks", "2"], "--tasks 2: give --on, too: local, slurm or ray"),
        (["a.txt", "--on", "local", "--tasks", "2"], "--on local: give --work, too: a folder that every task sees"),
        (["a.txt", "--on", "local", "--work", "w"], "--tasks: give at least 1 for --on local"),
        (["a.txt", "--on", "local", "--work", "w", "--tasks", "0"], "--tasks 0: give at least 1"),
        (["a.txt", "--on", "local", "--work", "w", "--tasks", "1", "--dry-run"], "no batch script for --on local"),
        (["a.txt", "--on", "slurm", "--work", "w", "--tasks", "1"], "--on slurm: give --partition, too"),
        (["a.txt", "--on", "slurm", "--work", "w", "--tasks", "1", "--sbatch", "x"], "--sbatch x: give KEY=VALUE"),
        (["a.txt", "--on", "local", "--work", "w", "--tasks", "1", "--incident", "r#1"], "--incident: the corpus is"),
        (["a.txt", "--near"], "--near: give --on, too: it runs in tasks"),
        (["a.txt", "--spans"], "--spans: give --on, too: it runs in tasks"),
        (["a.txt", "--near-words", "0"], "--near-words 0: at least 1"),
        (["--status"], "--status: give --work, too"),
        (["--status", "--work", "nowhere"], "--work nowhere: no scan has been started in it"),
        (["s4://bucket/corpus"], "s4://bucket/corpus: Protocol not known: s4"),
        (["memory://nothing"], "memory://nothing: no such file or folder"),
        (["memory://here/a.npy"], "memory://here/a.npy: token ids are mapped into memory; copy or mount them"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], sentence: str, scan: Callable[..., Said]) -> None:
    import fsspec

    fsspec.filesystem("memory").pipe_file("/here/a.npy", b"ids")
    Path("a.txt").write_text("One.")
    code, out, err = scan(*words)
    assert (code, out) == (2, "")
    assert sentence in err
    assert len(err.splitlines()) == 1


def test_without_datatrove_it_says_what_to_install(scan: Callable[..., Said], monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.txt").write_text("One.")
    monkeypatch.setitem(sys.modules, "sealegs.scan.local_executor", None)
    code, _, err = scan("a.txt", "--on", "local", "--tasks", "1", "--work", "work")
    assert code == 2
    assert "--on local needs datatrove, which is not installed: pip install 'sealegs[cluster]'" in err


def test_a_giant_file_a_tokenizer_and_token_ids_go_through_tasks(
    scan: Callable[..., Said], corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = np.random.default_rng(0).integers(1, 900, 32 * 300).astype(np.uint16)
    tokens[31::32] = 0
    np.save("ids.npy", tokens)
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "the": 1, "of": 2}, unk_token="?"))  # noqa: S106
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save("tokenizer.json")
    giant = str(corpus / "planted" / "corpus.jsonl")
    asked = {
        "giant": (giant, str(corpus / "000.jsonl")),
        "words": (giant, "--tokenizer", "tokenizer.json"),
        "ids": ("ids.npy", "--end", "0", "--row", "32", "--batch", "4"),
    }
    wanted = {name: scan(*words, "--json")[1] for name, words in asked.items()}
    monkeypatch.setattr(text_reader, "PART_BYTES", 5000)  # a document may be larger
    monkeypatch.setattr(id_reader, "_PART_TOKENS", 1000)
    for name, words in asked.items():
        assert scan(*words, "--json", "--on", "local", "--tasks", "3", "--work", name)[1] == wanted[name]
        assert len(json.loads(Path(name, "plan.json").read_text())["bundles"]) >= 8
    assert "forecast" in wanted["ids"]


# Near-duplicates.


def test_of_documents_that_are_alike_the_first_is_kept_whatever_the_tasks(scan: Callable[..., Said]) -> None:
    draw = random.Random(5)  # noqa: S311 - no secrets
    words = [f"word{number}" for number in range(3000)]
    texts = [draw.choices(words, k=120) for _ in range(12)]

    def edited(number: int, place: int) -> str:
        return " ".join([*texts[number][:place], "another", *texts[number][place + 1 :]])

    files = {
        "b.jsonl": [*map(" ".join, texts[:6]), edited(1, 50), " ".join(texts[2])],
        "a.jsonl": [edited(0, 7), *map(" ".join, texts[6:]), "too short"],
        "c.txt": [edited(3, 30), edited(3, 60), edited(7, 90) + " \x1b", "Unlike any other."],
        "d.txt": [edited(8, 20) + "\ufffd\ufffd\ufffd"],  # spoilt, and not the first: the sound one is kept anyway
    }
    for name, of_file in files.items():
        kept = [json.dumps({"text": each}) for each in of_file] if "jsonl" in name else of_file
        Path("corpus").mkdir(exist_ok=True)
        (Path("corpus") / name).write_text(("\n" if "jsonl" in name else "\n\n").join(kept))
    spoilt = json.dumps({"text": edited(9, 40) + "\ufffd" * 9})
    Path("corpus/0.jsonl").write_text(spoilt + "\n")  # spoilt, and the first
    found = []
    for tasks in ("2", "5"):
        code, _, _ = scan("corpus", "--on", "local", "--tasks", tasks, "--work", tasks, "--near", "-o", "out")
        assert code == 1
        found.append(files_in(Path("out")))
        shutil.rmtree("out")
    assert found[0] == found[1]
    listed = [json.loads(line) for line in found[0]["documents.jsonl"].splitlines()[1:]]
    near = {
        (each["file"], each["document"]): why.partition(": ")[2]
        for each in listed
        for why in each["why"]
        if why.startswith("near-duplicate")
    }
    assert near == {
        ("corpus/0.jsonl", 0): "as corpus/a.jsonl#4",
        ("corpus/b.jsonl", 0): "as corpus/a.jsonl#0",
        ("corpus/b.jsonl", 6): "as corpus/b.jsonl#1",
        ("corpus/c.txt", 0): "as corpus/b.jsonl#3, one of 3",
        ("corpus/c.txt", 1): "as corpus/b.jsonl#3, one of 3",
        ("corpus/c.txt", 2): "as corpus/a.jsonl#2",
        ("corpus/d.txt", 0): "as corpus/a.jsonl#3",
    }
    same = next(each for each in listed if (each["file"], each["document"]) == ("corpus/b.jsonl", 7))
    assert same["why"] == ["duplicate: the same as corpus/b.jsonl#2"]  # and not said twice


def test_documents_that_share_spans_with_earlier_ones_are_named(scan: Callable[..., Said]) -> None:
    draw = random.Random(6)  # noqa: S311 - no secrets
    words = [f"word{number}" for number in range(5000)]
    texts = [draw.choices(words, k=400) for _ in range(30)]
    spans = {
        7: (2, 300),
        9: (2, 100),
        12: (11, 90),
        20: (19, 49 - 20),
        25: (24, 12),
    }  # document: whose words, and how many
    for later, (earlier, size) in spans.items():
        at, start = draw.randrange(400 - size), draw.randrange(400 - size)
        texts[later][at : at + size] = texts[earlier][start : start + size]
    texts[28] = list(texts[4])  # a duplicate, which is not said twice
    Path("corpus").mkdir()
    for number, each in enumerate(texts):
        Path(f"corpus/{number:02d}.jsonl").write_text(json.dumps({"text": " ".join(each)}))
    found = []
    for tasks in ("2", "7"):
        assert scan("corpus", "--on", "local", "--tasks", tasks, "--work", tasks, "--spans", "-o", "out")[0] == 1
        found.append(files_in(Path("out")))
        shutil.rmtree("out")
        assert f"{tasks} of {tasks} tasks of spans" in scan("--work", tasks, "--status")[1]
    assert found[0] == found[1]
    listed = [json.loads(line) for line in found[0]["documents.jsonl"].splitlines()[1:]]
    assert [(each["file"][7:9], each["action"]) for each in listed] == [
        ("07", "drop"), ("09", "defer"), ("12", "defer"), ("28", "drop")
    ]  # fmt: skip
    assert re.fullmatch(
        r"shared: about [67]\d% of its runs of 32 words are in earlier documents, first in corpus/02.jsonl#0",
        listed[0]["why"][0],
    )
    assert [why.partition(":")[0] for why in listed[3]["why"]] == ["duplicate"]


# Slurm.


def test_the_batch_script_in_the_documents_is_what_a_dry_run_prints(
    scan: Callable[..., Said], corpus: Path, tmp_path: Path
) -> None:
    said = (ROOT / "docs" / "scan.md").read_text()
    example = re.search(r"```\n\$ (sealegs scan [^\n]*--dry-run)\n(.*?)```", said, re.DOTALL)
    assert example is not None
    words = example[1].replace("/lustre/corpus", str(corpus)).replace("/lustre", str(tmp_path)).split()[2:]
    code, out, _ = scan(*words)
    assert code == 0
    assert out.replace(str(tmp_path), "/lustre") == example[2]


def test_slurm_gets_an_array_whose_tasks_count(
    scan: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch script runs below a stand-in for Slurm: what it says, and what its tasks do, is all real."""
    for number in range(3):
        Path(f"{number}.txt").write_text(f"Document {number}.\n\nThe same.")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (
        (
            "sbatch",
            'cp "${@: -1}" batch.$$\ncase "$(cat batch.$$)" in *merge_stats*) ;; *)\nfor task in 0 1; do\n'
            "SLURM_ARRAY_TASK_ID=$task SLURM_NODELIST=here RUN_OFFSET=0 bash batch.$$ >&2 || exit 1\ndone;; esac\n"
            "echo Submitted batch job 17",
        ),
        ("srun", 'while [ "${1:0:1}" = - ] || [ "$1" = 1 ]; do shift; done\nexec "$@"'),
        ("scontrol", "echo here"),
    ):
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    words = ("0.txt", "1.txt", "2.txt", "--on", "slurm", "--tasks", "2", "--partition", "cpu", "--work", "work")
    code, out, _ = scan(*words)
    assert code == 3
    assert out.startswith("submitted as job 17; `sealegs scan --work work --status` says how far it is,")
    assert scan("--work", "work", "--status")[1].startswith("100% ")
    code, out, _ = scan(*words)
    assert code == 1
    assert out == scan("0.txt", "1.txt", "2.txt")[1]


def test_without_sbatch_slurm_is_refused(scan: Callable[..., Said], monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.txt").write_text("One.")
    monkeypatch.setenv("PATH", "")
    code, _, err = scan("a.txt", "--on", "slurm", "--tasks", "1", "--partition", "cpu", "--work", "work")
    assert (code, "--on slurm: there is no sbatch on this machine" in err) == (2, True)


# Ray.


@pytest.mark.long
def test_a_cluster_of_ray_counts_the_same(corpus: Path, tmp_path: Path) -> None:
    """Its own local one. In a process of its own: it leaves threads and files behind."""
    pytest.importorskip("ray", reason="--on ray needs the extra `ray`, of 240 MB")
    (tmp_path / "run.py").write_text(RUN)
    told = []
    tasks = ("--on", "ray", "--tasks", "3", "--memory", "1", "--work", str(tmp_path / "work"))
    for words in (("--jobs", "1"), tasks):
        run = [sys.executable, "run.py", "scan", str(corpus), "--json", *words]
        done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 1, done.stderr
        told.append(done.stdout)
    assert told[0] == told[1]
