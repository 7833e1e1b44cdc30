"""Runs when Python starts below ``sealegs run``: waits for a framework to be imported, and imports nothing itself.

This folder stands first in PYTHONPATH, so that processes started by the command have it, too. A sitecustomize of the
user's own runs after it, as it would have.
"""

import os
import sys

TYPE_CHECKING = False  # that of typing, which takes longer to import than this takes
if TYPE_CHECKING:
    from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 -- pathlib takes longer than all of this
TRAINERS = frozenset(
    (
        "accelerate.accelerator",
        "transformers.trainer",
        "lightning.pytorch.trainer.trainer",
        "pytorch_lightning.trainer.trainer",
        "sealegs.watch",
    )
)
"""Modules whose classes train, and the one that every guard or watch of the program's own begins with."""


class Finder:
    """Finds what the others find, and has it joined once it is loaded."""

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        """Of a framework's module, the spec with a loader that joins; of all others, nothing."""
        if name not in TRAINERS:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find and find(name, path, target)
            if spec:
                spec.loader = spec.loader and JoiningLoader(spec.loader)
                return spec
        return None


class JoiningLoader:
    """The loader of a module, which leaves no trace of itself."""

    def __init__(self, loader: "Any") -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> "Any":
        return getattr(self._loader, name)

    def create_module(self, spec: "Any") -> "Any":
        """As the loader does it."""
        return self._loader.create_module(spec)

    def exec_module(self, module: "Any") -> None:
        """As the loader does it, and then the hooks."""
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        join(module)


def join(module: "Any") -> None:
    """Put the hooks into a framework's module. Whatever goes wrong, the program goes on."""
    try:
        from sealegs.integrations.launch import hooks

        hooks.join(module)
    except Exception as error:
        tell(module.__name__.partition(".")[0], error)


def tell(framework: str, error: Exception) -> None:
    """Tell the command that this Python has no Sealegs, if the command is still there."""
    import json

    why = f"{sys.executable} cannot load sealegs ({error}); install it there: pip install sealegs"
    try:
        with open(json.loads(os.environ["SEALEGS_RUN"])["reports"], "a") as file:  # noqa: PTH123
            file.write(json.dumps({"kind": "refused", "what": framework, "text": why}) + "\n")
    except (KeyError, OSError, ValueError):
        pass


def run_users_own() -> None:
    """Import the sitecustomize that this one hides, if there is one."""
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != HERE]  # noqa: PTH100
    mine = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", mine)


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, Finder())
    run_users_own()
