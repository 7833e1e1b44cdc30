"""A real run that is halted, started again as a launcher would, refused, and let go on by a person."""

import json
from pathlib import Path

import pytest
import torch

import sealegs
from sealegs.cli.main import main
from sealegs.errors import RestartRefused
from sealegs.record.health import HEALTH


def trained(folder: Path, *, broken_from: int) -> int:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with sealegs.Guard(model, optimizer, run=folder, resume="auto", checkpoint_every=20) as guard:
        for step in range(guard.number, 80):
            rows = torch.randn(16, 4)
            wanted = rows.sum(1, keepdim=True) * (float("nan") if step >= broken_from else 1.0)
            loss = (model(rows) - wanted).square().mean()
            loss.backward()
            guard.step(loss)
    return guard.number


def told(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / HEALTH).read_text()))


def test_a_run_that_is_halted_twice_at_one_place_is_not_started_a_third_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "a7"
    for advice, code in (("restart from healthy", 0), ("do not restart", 1)):
        with pytest.raises(sealegs.RunHalted) as halt:
            trained(run, broken_from=45)
        assert halt.value.exit_code == 70
        known = told(run)
        assert (known["verdict"], known["advice"]) == ("halted", advice)
        assert known["newest_healthy"] == {
            "step": 20,
            "path": "checkpoints/20",
            "proof": "25 steps came of it without an incident, and it is from none",
        }
        assert main(["health", str(run)]) == code
    assert "newest healthy checkpoint: step 20" in capsys.readouterr().out
    events = (run / "events.jsonl").read_bytes()
    with pytest.raises(RestartRefused, match=r"halted at step 55, and again at step 55 after a restart"):
        trained(run, broken_from=99)
    assert (run / "events.jsonl").read_bytes() == events  # nothing half done
    assert main(["health", str(run), "--clear"]) == 0
    assert trained(run, broken_from=99) == 80
    assert (told(run)["verdict"], told(run)["advice"]) == ("healthy", "go on")
    capsys.readouterr()
    assert main(["health", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["advice"] == "go on"
