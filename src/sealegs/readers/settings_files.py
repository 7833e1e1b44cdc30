"""Reads files that hold settings and no rows: TOML, JSON, YAML, as Hugging Face, W&B and Lightning write them.

Either a person names one (``--settings``), or it lies beside a log where its program puts it. A pickle is never opened.
"""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sealegs.errors import MissingExtra, SourceError
from sealegs.readers.place import Place
from sealegs.record.reading import is_inside, parse_json, read_bytes
from sealegs.record.schema import MANIFEST

MOST_BYTES = 4 << 20
"""A file of settings is no larger than this."""
MOST_SETTINGS = 5000
SUFFIXES = (".toml", ".json", ".yaml", ".yml")
PICKLE = "training_args.bin"
OF_TRAINER = ("training_args.json", "training_args.yaml", "config.json", "adapter_config.json")
"""Files beside a ``trainer_state.json``."""
OF_WANDB = ("config.yaml", "wandb-metadata.json")
"""Files of a W&B run, in its folder or in ``files/`` of it."""
OF_LIGHTNING = ("hparams.yaml",)
OF_PICKLE = (
    f"{PICKLE} is a pickle, which can run code, and was not opened: write the arguments as JSON "
    "(trainer.args.to_json_string()) and name that file with --settings"
)


def read_settings(path: Path, inside: Path | None = None) -> dict[str, Any]:
    """The settings in a file, or an error that says what is wrong with it."""
    if path.suffix in (".bin", ".pt", ".pkl", ".pickle"):
        raise SourceError(f"{path}: a pickle, which can run code, is not opened; give settings as {_forms()}")
    if path.suffix not in SUFFIXES:
        raise SourceError(f"{path}: settings are read from {_forms()}; give one of these")
    try:
        content = read_bytes(path, inside, MOST_BYTES)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror or error}); give a file of settings") from error
    try:
        values = _parsed(path, content.decode("utf-8-sig", errors="replace"))
    except (ValueError, RecursionError) as error:  # TOML's and YAML's errors are made of it
        raise SourceError(f"{path}: not {path.suffix[1:].upper()} ({' '.join(str(error).split())[:100]})") from error
    if not isinstance(values, Mapping) or not values:
        raise SourceError(f"{path}: no table of settings in it; give names with their values")
    return _plain(path, values)


def beside(place: Place, is_trainer: bool) -> tuple[dict[str, Any], list[str]]:
    """The settings that lie beside a log under the names that programs give them, and notices about them.

    ``is_trainer`` says that the log is a ``trainer_state.json``: only then does ``config.json`` belong to it.
    """
    found: dict[str, Any] = {}
    remarks: list[str] = []
    folder = place.path if place.is_folder else place.path.parent
    files = list(_files(place, folder, is_trainer))
    for path in files:
        try:
            found[path.stem.replace("-", "_")] = read_settings(path, path.parent)
            remarks.append(f"settings from {path.name}")
        except (SourceError, MissingExtra) as error:
            remarks.append(f"settings beside the log were left out: {error}")
    has_arguments = any(path.stem == "training_args" for path in files)
    if is_trainer and not has_arguments and any((at / PICKLE).exists() for at in (folder, *_checkpoints(folder))):
        remarks.append(OF_PICKLE)
    return found, remarks


def _files(place: Place, folder: Path, is_trainer: bool) -> Iterator[Path]:
    """Settings that belong to a log, each name once."""
    if is_trainer:
        above = [folder.parent] if folder.name.startswith("checkpoint-") else _checkpoints(folder)
        for name in OF_TRAINER:
            yield from [each / name for each in (folder, *above) if is_inside(each / name, each)][:1]
        return
    if (folder / MANIFEST).exists():
        return
    for name in OF_WANDB:  # config.yaml is many programs' name: W&B's stands beside its metadata or summary
        places = [each for each in (folder, folder / "files") if is_inside(each / name, each) and _is_wandb(each)]
        yield from [each / name for each in places][:1]
    logs = [path for pattern in ("*.csv", "events.out.tfevents*") for path in folder.glob(pattern)]
    if len(logs) == 1 and (place.is_folder or place.path == logs[0]):
        yield from (folder / name for name in OF_LIGHTNING if is_inside(folder / name, folder))


def _is_wandb(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("wandb-metadata.json", "wandb-summary.json"))


def _checkpoints(folder: Path) -> list[Path]:
    """The newest checkpoint folder in a folder, if there is one."""
    found = [path for path in folder.glob("checkpoint-*") if path.name[11:].isdecimal() and is_inside(path, folder)]
    return [max(found, key=lambda path: int(path.name[11:][:15]))] if found else []


def _parsed(path: Path, text: str) -> Any:
    if path.suffix == ".toml":
        return tomllib.loads(text)
    if path.suffix == ".json":
        return parse_json(text)
    return _yaml(path, text)


def _yaml(path: Path, text: str) -> Any:
    """YAML, through the reader that W&B, MLflow and Transformers bring with them; the standard library has none."""
    try:
        import yaml
    except ImportError as error:
        raise MissingExtra(f"reading {path.name}", "PyYAML", "wandb") from error

    class Plain(yaml.SafeLoader):  # type: ignore[misc]
        """Makes plain values only, and follows no alias: a few lines of them can stand for billions of values."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.events.AliasEvent):
                raise ValueError("an alias, which settings have no need of")
            return super().compose_node(parent, index)

    try:
        return yaml.load(text, Loader=Plain)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _plain(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without what W&B wraps them in: ``lr: {value: 0.1}``, arguments as a list of words."""
    if path.name == "wandb-metadata.json":
        return _of_metadata(values)
    unwrapped = {
        str(name): value["value"] if isinstance(value, Mapping) and set(value) <= {"value", "desc"} and "value" in value
        else value
        for name, value in values.items()
        if name not in ("_wandb", "wandb_version")
    }  # fmt: skip
    if sum(1 for _ in _leaves(unwrapped)) > MOST_SETTINGS:
        raise SourceError(f"{path}: more than {MOST_SETTINGS:,} values; give a file of settings")
    return unwrapped


def _of_metadata(values: Mapping[str, Any]) -> dict[str, Any]:
    """The words of the command line: ``["--lr", "1e-3", "--bf16"]``."""
    words = [word for word in values.get("args") or () if isinstance(word, str)][:MOST_SETTINGS]
    found: dict[str, Any] = {}
    for place, word in enumerate(words):
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("--") and name:
            following = words[place + 1] if place + 1 < len(words) else "--"
            found[name] = value if equals else True if following.startswith("--") else following
    return found


def _leaves(value: Any) -> Iterator[Any]:
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield inner
        yield from _leaves(inner)


def _forms() -> str:
    return "TOML, JSON or YAML (.toml, .json, .yaml; YAML with PyYAML)"
