"""Makes ``Settings`` from presets, a TOML file and a manifest; refuses unknown keys and wrong types by name."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import msgspec

from sealegs.errors import ConfigError, SourceError
from sealegs.lab.settings import PRESETS, SIZES, Settings
from sealegs.record import manifest as manifests
from sealegs.record.reading import parse_toml, read_bytes, shown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

_STARTING_POINTS = ("preset", "size")
_LARGEST = 1 << 20
"""The largest file of settings, in bytes."""
_TOLD = "run"
"""The table of what is not a setting of the run: where it is reported. It is not in the manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """Where a run is reported, besides its folder."""

    tracker: str | tuple[str, ...] = ()
    """Names of trackers, or one."""
    notify: str | tuple[str, ...] | None = field(default=None, repr=False)
    """The address of a webhook, a command, or ``$NAME`` of an environment variable with either."""
    notify_page: str | None = None
    """Address of the page that messages lead to; ``{run}`` in it is the run's name."""


def told(config: Path | None) -> Listeners:
    """The table ``[run]`` of a file."""
    written = read_toml(config).get(_TOLD, {}) if config else {}
    if not isinstance(written, Mapping):
        raise ConfigError(f"{config}: {_TOLD}={shown(written)}: a table, [{_TOLD}]")
    words = [where] if isinstance(where := written.get("notify", ""), str) else where
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):  # may be a secret: unsaid
        raise ConfigError(f"{config}: {_TOLD}.notify: an address, a command or $NAME as text, or a list of words")
    return overlaid(Listeners(), written, where=str(config), group=f"{_TOLD}.")


def starting_point(*, preset: str | None = None, size: str | None = None, config: Path | None = None) -> Settings:
    """The settings before the command line: preset, then size, then the file on top."""
    written = read_toml(config) if config else {}
    written.pop(_TOLD, None)
    in_file = {name: written.pop(name, None) for name in _STARTING_POINTS}
    preset, size = preset or in_file["preset"], size or in_file["size"]
    settings = _named(PRESETS, "preset", preset) if preset else _named(SIZES, "size", size or "toy")
    if preset and size:
        settings = _resized(settings, _named(SIZES, "size", size))
    return overlaid(settings, written, where=str(config))


def of_run(folder: Path, *, preset: str | None = None, size: str | None = None, config: Path | None = None) -> Settings:
    """The settings that a run was started with, the file's on top. A size that is not the run's is refused."""
    manifest = manifests.load(folder)
    settings = overlaid(Settings(), manifest.settings, where=str(folder / "manifest.json"))
    if preset or size:
        asked = starting_point(preset=preset, size=size).model
        for name in ("layers", "width", "heads", "hidden", "vocabulary", "context"):
            if getattr(asked, name) != getattr(settings.model, name):
                raise ConfigError(
                    f"--{'size' if size else 'preset'} {size or preset}: {folder} was started with model."
                    f"{name}={getattr(settings.model, name)}; leave it out, a resumed run knows its settings"
                )
    written = read_toml(config) if config else {}
    own = {name: value for name, value in written.items() if name not in (*_STARTING_POINTS, _TOLD)}
    return overlaid(settings, own, where=str(config))


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as nested dicts."""
    try:
        return parse_toml(read_bytes(path, at_most=_LARGEST).decode())
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror}); give the path of a TOML file") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not TOML ({error})") from error


def overlaid(base: T, values: Mapping[str, Any], *, where: str, group: str = "") -> T:
    """Settings with some fields replaced, also inside their groups."""
    types = get_type_hints(type(base))
    known = [entry.name for entry in fields(base)]
    changes: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {group}{near[0]}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"{where}: no setting is called {group}{name[:60]}; {hint}")
        current = getattr(base, name)
        if is_dataclass(current) and not isinstance(current, type):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where}: {group}{name}={shown(value)}: a table of settings, [{group}{name}]")
            changes[name] = overlaid(current, value, where=where, group=f"{group}{name}.")
        else:
            try:
                changes[name] = msgspec.convert(value, types[name])
            except (msgspec.ValidationError, UnicodeError) as error:  # half of a character cannot be text
                raise ConfigError(f"{where}: {group}{name}={shown(value)}: {error}") from error
    return replace(base, **changes)


def _named(choices: Mapping[str, Settings], what: str, name: str) -> Settings:
    try:
        return choices[name]
    except (KeyError, TypeError):
        raise ConfigError(f"{what}={shown(name)}: one of {', '.join(choices)}") from None


def _resized(settings: Settings, size: Settings) -> Settings:
    """A preset at another size: that size's shape and learning rate, everything else as in the preset."""
    shape = {name: getattr(size.model, name) for name in ("layers", "width", "heads", "hidden")}
    return replace(
        settings,
        model=replace(settings.model, **shape),
        optimizer=replace(settings.optimizer, lr=size.optimizer.lr),
    )
