"""Without the libraries that an extra brings, one line says which one to install."""

import sys
from importlib import import_module

import pytest

from sealegs.errors import MissingExtra


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("hf", "transformers with accelerate, which is not installed: pip install 'sealegs[huggingface]'"),
        ("accelerate", "Accelerate, which is not installed: pip install 'sealegs[accelerate]'"),
        ("torchft", "torchft, which is not installed: pip install 'sealegs[torchft]'"),
    ],
)
def test_a_missing_library_is_one_line(module: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for absent in ("transformers", "accelerate", "torchft"):
        monkeypatch.setitem(sys.modules, absent, None)
    name = f"sealegs.integrations.{module}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(MissingExtra) as raised:
        import_module(name)
    assert str(raised.value) == f"{name} needs {says}"
