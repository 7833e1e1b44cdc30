"""What the pages about pre-flight show is run, and nothing is missing in them."""

import re
from pathlib import Path
from typing import Any

from sealegs.preflight_check.plan import HOMES, Plan, written
from sealegs.preflight_check.rule import check
from sealegs.preflight_check.rules import RULES
from sealegs.report.commands.preflight import Advised

PAGE = (Path(__file__).parents[2] / "docs" / "preflight.md").read_text()
LOOP = """
import torch
import torch.nn.functional as F

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
loader = [(torch.randn(16, 4), torch.randint(4, (16,))) for _ in range(12)]
criterion, (inputs, wanted) = F.cross_entropy, loader[0]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 2000))
"""


def test_the_snippet_runs() -> None:
    [snippet] = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(LOOP + snippet, names)  # noqa: S102 - our own page
    advised = names["advised"]
    assert isinstance(advised, Advised)
    assert [each.code for each in advised.findings] == ["OPT1", "OPT8", "SCH5"]


def test_every_field_of_a_plan_is_in_its_table() -> None:
    for group in Plan.__struct_fields__:
        [row] = re.findall(rf"^\| `plan.{group}` \| (.*) \|$", PAGE, re.MULTILINE)
        assert set(re.findall(r"`(\w+)`", row)) == {name for name, home in HOMES.items() if home == group}


def test_the_counts_on_the_page_are_right() -> None:
    assert f"{len(RULES)} rules ask" in PAGE
    assert sum(rule.margin == rule.code for rule in RULES) == 13
    assert "Thirteen of the rules" in PAGE


def test_the_plan_on_the_page_is_one() -> None:
    import tomllib

    [text] = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert check(written(tomllib.loads(text)["plan"], "page"), "page", RULES).findings == []
