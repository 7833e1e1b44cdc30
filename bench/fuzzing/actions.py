"""What is done with a sample that is no command: opening a run in Python, a ledger, a capsule, requests."""

import os
from collections.abc import Callable
from pathlib import Path

from bench.fuzzing import page

from sealegs.errors import SealegsError


def _refused(action: Callable[[Path], object]) -> Callable[[Path], int]:
    """A refusal is as good as a result."""

    def do(path: Path) -> int:
        try:
            action(path)
        except SealegsError as error:
            if not str(error) or len(str(error)) > 3000:
                raise
            return 2
        return 0

    return do


def log(path: Path) -> None:
    """A log of any program, and what holds of every one that is read."""
    import numpy as np

    from sealegs.readers.read import read

    run = read(str(path)).run
    assert (np.diff(run.steps) > 0).all(), "steps rise"
    assert len(run.column("loss")) == len(run.steps) > 0, "a loss a step"
    assert all(len(run.written(name).steps) for name in run.signals), "no signal without a value"


def open_run(path: Path) -> None:
    """Everything that ``sealegs.open_run`` gives."""
    import sealegs

    run = sealegs.open_run(path)
    for name in run.signals:
        assert len(run.column(name)) == len(run.logged(name)) == len(run.steps)
        run.written(name)
    assert sum(1 for _ in run.rows()) == len(run.steps)
    assert all(isinstance(event.step, int) and isinstance(event.kind, str) for event in run.events)


def ledger(path: Path) -> None:
    """What a resume reads besides the checkpoints."""
    from sealegs.recovery.ledger import read_ledger
    from sealegs.state.checkpoints import Checkpoints

    read_ledger(path)
    checkpoints = Checkpoints(path / "checkpoints")
    checkpoints.tags()
    checkpoints.newest_intact()


def capsule(path: Path) -> None:
    """A capsule and its state."""
    from sealegs.capsule.read import incident_folder, open_capsule

    found = open_capsule(incident_folder(path, None))
    found.steps()
    found.state()


def plan(path: Path) -> int:
    """The settings of a run: of one that is to be trained, and before it."""
    from sealegs.cli.main import main
    from sealegs.lab import config

    [file] = path.iterdir()
    if file.suffix == ".toml":
        _refused(lambda path: (config.starting_point(config=path), config.told(path)))(file)
    return main(["preflight", str(file)])


def batches(path: Path) -> int:
    """An order of tokens."""
    from sealegs.cli.main import main

    [file] = path.iterdir()
    return main(["batches", str(file), "--row", "64", "--batch", "4", "-o", "order.npy"])


def scan(path: Path) -> int:
    """A look through a corpus."""
    from sealegs.cli.main import main

    [file] = path.iterdir()
    return main(["scan", str(file), "-o", "scanned"])


def requests(path: Path) -> None:
    """All that lies in the folder of requests, taken by a run: as ``Recovery`` does, without a model."""
    from sealegs.errors import ConfigError
    from sealegs.record.requests import MOST_FILES, Inbox
    from sealegs.recovery.actions import plain_actions, requested_action

    inbox = Inbox(path)
    for _ in range(MOST_FILES):
        found, refused = inbox.take()
        for entry in refused:
            assert entry.id.isprintable()
            assert entry.reason
        if found is None:
            break
        assert found.by not in ("ana", "")
        try:
            plain_actions((requested_action(found.words),))
        except ConfigError:
            continue
    left = [name for name in os.listdir(path / "requests") if name.endswith(".json")]  # noqa: PTH208
    assert not left, f"still there: {left}"


ACTIONS: dict[str, Callable[[Path], int]] = {
    "@log": _refused(log),
    "@open_run": _refused(open_run),
    "@page": page.throw,
    "@ledger": _refused(ledger),
    "@capsule": _refused(capsule),
    "@requests": _refused(requests),
    "@plan": plan,
    "@batches": batches,
    "@scan": scan,
}
