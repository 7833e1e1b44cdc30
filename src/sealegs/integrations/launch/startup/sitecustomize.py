"""Runs when Python starts below ``sealegs run``: waits for a framework to be imported, and imports nothing itself.

This folder stands first in PYTHONPATH, so that processes started by the command have it, too. A sitecustomize of the
user's own runs after it, as it would have.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 -- pathlib takes longer than all of this
TRAINERS = frozenset(
    (
        "accelerate.accelerator",
        "transformers.trainer",
        "lightning.pytorch.trainer.trainer",
        "pytorch_lightning.trainer.trainer",
    )
)
"""Modules whose classes train."""


class Finder:
    """Finds what the others find, and has it joined once it is loaded."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
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

    def __init__(self, loader):  # type: ignore[no-untyped-def]
        self._loader = loader

    def __getattr__(self, name):  # type: ignore[no-untyped-def]
        return getattr(self._loader, name)

    def create_module(self, spec):  # type: ignore[no-untyped-def]
        """As the loader does it."""
        return self._loader.create_module(spec)

    def exec_module(self, module):  # type: ignore[no-untyped-def]
        """As the loader does it, and then the hooks."""
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        join(module)


def join(module):  # type: ignore[no-untyped-def]
    """Put the hooks into a framework's module. Whatever goes wrong, the program goes on."""
    try:
        from sealegs.integrations.launch import hooks

        hooks.join(module)
    except Exception as error:
        if os.environ.get("SEALEGS_RUN"):
            import json

            why = f"{sys.executable} cannot load sealegs ({error}); install it there: pip install sealegs"
            report = {"kind": "refused", "what": module.__name__.partition(".")[0], "text": why}
            with open(json.loads(os.environ["SEALEGS_RUN"])["reports"], "a") as file:  # noqa: PTH123
                file.write(json.dumps(report) + "\n")


def run_users_own():  # type: ignore[no-untyped-def]
    """Import the sitecustomize that this one hides, if there is one."""
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != HERE]  # noqa: PTH100
    mine = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", mine)


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, Finder())
    run_users_own()
