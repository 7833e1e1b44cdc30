"""Without the libraries that an extra brings, one line says which one to install."""

import subprocess
import sys

WITHOUT = """
import sys
from importlib.abc import MetaPathFinder
class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("transformers", "accelerate"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from sealegs.errors import MissingExtra
for module in ("hf", "accelerate"):
    try:
        __import__(f"sealegs.integrations.{module}")
    except MissingExtra as error:
        print(error)
"""


def test_a_missing_library_is_one_line() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines() == [
        "sealegs.integrations.hf needs transformers with accelerate, which is not installed: "
        "pip install 'sealegs[huggingface]'",
        "sealegs.integrations.accelerate needs Accelerate, which is not installed: pip install 'sealegs[accelerate]'",
    ]
