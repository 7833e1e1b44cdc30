"""What the tests share: an own cache, a file of tokens, a short standard library."""

import fcntl
import gc
import os
import sys
from collections.abc import Generator, Iterator
from functools import cache
from itertools import islice
from pathlib import Path

import hypothesis
import numpy as np
import pytest

# Next to nothing that is imported is garbage: to look for some while importing takes every worker a second or two.
gc.disable()

# There is a worker a core: with more threads each, they would wait for each other. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What the processes find that tests start, of which some say themselves where else they look for modules.
PROCESSES = str(Path(__file__).parent / "processes")
if PROCESSES not in (paths := os.environ.get("PYTHONPATH", "").split(os.pathsep)):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [PROCESSES, *paths]))

# No example is timed: machines are noisy, and a slow one is not wrong. There are others in every run.
hypothesis.settings.register_profile("sealegs", deadline=None, max_examples=40)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=500)
hypothesis.settings.load_profile("sealegs")


LONGEST = ("test_examples.py", "test_readme.py")
"""Half a minute in one piece: first of all, or at the end one worker would wait for the other."""


TRAINS = (
    *("bench", "browser", "drills", "integrations", "ranks", "replay", "capsule", "fuzz"),
    *("recovery/test_coming_back", "recovery/test_grown", "recovery/test_kills", "recovery/test_recovery"),
    *(
        "recovery/test_resuming",
        "recovery/test_run_end",
        "recovery/test_runs",
        "recovery/test_saving",
        "lab/test_corpus",
        "lab/test_data",
        "lab/test_incident_samples",
        "lab/test_train",
        "report/test_postmortem_run",
    ),
    *(
        "cli/test_coordcheck",
        "cli/test_dashboard",
        "cli/test_do",
        "cli/test_drill",
        "cli/test_gallery",
        "cli/test_main",
        "cli/test_run",
    ),
    *(
        "cli/test_text_of_strangers",
        "cli/test_tracker",
        "cli/test_train",
        "faults/test_code",
        "faults/test_injector",
        "sinks/test_mlflow",
    ),
    *(
        "readers/test_damaged",
        "report/dashboard/test_page",
        "report/dashboard/test_server",
        "preflight_check/test_coordcheck",
        "signals/test_activations",
    ),
    *("cli/test_run", "lab/test_policy_gradient", "step/test_decision", "step/test_undo", "step/test_update"),
    *("state/test_extra_state", "state/test_frozen", "state/test_resume_audit", "state/test_shadows"),
    *("test_bit_for_bit", "test_examples", "test_guard", "test_readme"),
)
"""Folders and files whose tests train, or wait for other processes: ``make quick`` leaves them out."""
TESTS = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """What tests share has no doctests, and every worker would import Lightning to find none."""
    is_shared = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    return is_shared or None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Tests have no doctests either, and to look through all of them takes every worker a second."""
    found = yield
    return [collector for collector in found if type(collector) is pytest.Module]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """What is not compiled yet is compiled by one worker, and read by the others: all at once would take each of them
    ten seconds."""
    path = collector.path
    if not isinstance(collector, pytest.Module) or any(path.parent.glob(f"__pycache__/{path.stem}.*")):
        return (yield)
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return (yield)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run what is marked as long, and nothing else")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long") or not config.getoption("file_or_dir"):  # of a file that is named all is run
        kept: list[pytest.Item] = []
        left_out: list[pytest.Item] = []
        for item in items:
            is_long = item.get_closest_marker("long") is not None
            (kept if is_long == config.getoption("--long") else left_out).append(item)
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)
    items.sort(key=lambda item: item.path.name not in LONGEST)
    for item in items:
        if trains(item.path):
            item.add_marker("trains")


@cache
def trains(path: Path) -> bool:
    """Asked of as many tests as there are, and of far fewer files."""
    if not path.is_relative_to(TESTS):
        return False
    place = path.relative_to(TESTS).with_suffix("").as_posix()
    return place.split("/")[0] in TRAINS or place in TRAINS


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No test reads or writes the user's cache. The workers of one test run share theirs."""
    shared = tmp_path_factory.getbasetemp().parent if os.environ.get("PYTEST_XDIST_WORKER") else None
    folder = (shared or tmp_path_factory.mktemp("cache")) / "sealegs-cache"
    os.environ["SEALEGS_CACHE"] = str(folder)
    # Trackio looks at its own when it is imported, W&B at these whenever it is asked
    os.environ["TRACKIO_DIR"] = str(tmp_path_factory.mktemp("trackio"))
    os.environ |= {"WANDB_MODE": "offline", "WANDB_CACHE_DIR": str(folder), "WANDB_CONFIG_DIR": str(folder)}
    return folder


FRAMEWORKS = {"transformers", "lightning", "mlflow", "torch"}
"""What brings a hundred thousand objects or more when it is imported, which stay until the end."""
_passed_over: set[str] = set()


@pytest.fixture(autouse=True)
def frameworks_are_no_garbage() -> Iterator[None]:
    """A training of a framework ends with a search for garbage: a fourth of the time of their tests, as long as all
    that was imported is gone through each time."""
    yield
    if new := FRAMEWORKS & sys.modules.keys() - _passed_over:
        _passed_over.update(new)
        gc.collect()
        gc.freeze()


@pytest.fixture
def little_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a source, `stdlib` is its first sixty modules: all of it takes a quarter of a minute to tokenise.

    For every test that has it as its only source: they share what is in the cache.
    """
    from sealegs.lab import corpus  # not before the number of threads is set

    whole = corpus.stdlib_documents
    monkeypatch.setattr(corpus, "stdlib_documents", lambda: islice(whole(), 60))


@pytest.fixture(scope="session")
def tokens_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token ids that a model can learn something of in a few steps, without a tokenizer: a noisy counter."""
    path = tmp_path_factory.mktemp("tokens") / "counter.npy"
    random = np.random.default_rng(0)
    noise = random.random(20_000) < 0.1
    ids = np.where(noise, random.integers(0, 64, 20_000), np.arange(20_000) % 64)
    np.save(path, ids.astype(np.uint16))
    return path
