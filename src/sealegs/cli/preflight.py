"""``sealegs preflight``: says what is wrong with a run that has not begun, before it costs anything."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from sealegs.cli.output import show, show_json
from sealegs.cli.run_names import place_of
from sealegs.errors import ConfigError, SourceError

if TYPE_CHECKING:
    from sealegs.preflight_check.config_readers import Read

DESCRIPTION = """\
Looks at the settings of a run before money is spent on it: optimizer, clipping, schedule (all of it is simulated),
precision, architecture, data, checkpoints and logs. Each finding has a rule, what was found, why it matters, the knob
and the value, how sure we are and where to read on. What a source does not say, no rule speaks of.

SOURCE is a TOML of `sealegs train`, or one with a [plan]; a run folder, or its name in experiments/; Hugging Face's
training_args.json, adapter_config.json or a model's config.json, or a folder with them; the YAML of Axolotl or
LLaMA-Factory. Several are read as one plan, the last has its say.
For live objects, where more can be seen: sealegs.preflight(model, optimizer, scheduler, ...).

exit code: 0 no errors, 1 errors, 2 a source cannot be read.

examples:
  sealegs preflight mine.toml                            settings of `sealegs train`
  sealegs preflight night                                a run of experiments/: also what its gradients came to
  sealegs preflight training_args.json config.json       Hugging Face: how it is trained, and what
  sealegs preflight axolotl.yaml                         a fine-tune: no advice for pretraining
  sealegs preflight mine.toml --json | jq .margins_missing
  sealegs preflight --explain OPT1                       the page of a rule; `all` lists them
"""
HUGGING_FACE = ("config.json", "training_args.json", "adapter_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line can say."""

    sources: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="SOURCE")] = ()
    """Settings; several are read as one."""
    explain: Annotated[str | None, tyro.conf.arg(metavar="CODE")] = None
    """Print the page of a rule instead; `all`: a line for each."""
    json: bool = False
    """Print one JSON object, and nothing else."""


def main(arguments: Sequence[str]) -> int:
    """Read the settings, call every rule, and print the report."""
    options = tyro.cli(Options, args=list(arguments), prog="sealegs preflight", description=DESCRIPTION)
    from sealegs.preflight_check.plan import merged
    from sealegs.preflight_check.rule import check
    from sealegs.preflight_check.rules import RULES
    from sealegs.report.commands.contracts import contract
    from sealegs.report.commands.preflight import page

    if options.explain is not None:
        show(explained, options.explain)
        return 0
    if not options.sources:
        raise ConfigError("SOURCE: name settings to look at; `sealegs preflight --help` has examples")
    found = [each for source in options.sources for each in read(source)]
    names = {ours: theirs for each in found for ours, theirs in each.names.items()}
    advised = check(merged(*(each.plan for each in found)), " ".join(options.sources), RULES, names)
    show_json(contract(advised)) if options.json else show(page, advised)
    return int(advised.has_errors)


def explained(code: str) -> str:
    """The page of a rule, or the list of them."""
    from sealegs.preflight_check.rules import FAMILIES, RULES

    if code == "all":
        lines = []
        for family in FAMILIES:
            lines += [family.about, *(f"  {rule.code:<6} {rule.title}" for rule in family.rules)]
        return "\n".join(lines)
    pages = {rule.code: rule.page for rule in RULES}
    if code.upper() not in pages:
        raise ConfigError(f"--explain {code}: no rule is called that; `sealegs preflight --explain all` lists them")
    return pages[code.upper()]


def read(source: str) -> "Iterator[Read]":
    """The plans of a source; a Hugging Face folder has one for each file."""
    from sealegs.preflight_check.config_readers import Read, of_json, of_lab, of_settings
    from sealegs.preflight_check.plan import written
    from sealegs.readers.settings_files import read_settings
    from sealegs.record.reading import read_bytes
    from sealegs.record.schema import MANIFEST

    path = Path(place_of(source))
    if path.is_dir():
        if (path / MANIFEST).exists():
            yield of_run(path)
            return
        files = [path / name for name in HUGGING_FACE if (path / name).is_file()]
        if not files:
            raise SourceError(f"{source}: there is neither {MANIFEST} nor {' nor '.join(HUGGING_FACE)} in it")
        for file in files:
            yield of_json(read_bytes(file, path), str(file))
    elif path.suffix == ".toml":
        from sealegs.lab import config

        values = config.read_toml(path)
        if "plan" in values:
            if others := sorted(values.keys() - {"plan"}):
                raise ConfigError(f"{source}: {others[0]} beside [plan]; a plan is all in tables [plan.optimizer], ...")
            yield Read(written(values["plan"], source), {})
        else:
            yield of_lab(asdict(config.starting_point(config=path)))
    elif path.suffix in (".yaml", ".yml"):
        yield of_settings(read_settings(path), source)
    else:
        try:
            text = read_bytes(path)
        except OSError as error:
            raise SourceError(
                f"{source}: cannot be read ({error.strerror}); give a TOML or JSON file, or a run"
            ) from error
        yield of_json(text, source)


def of_run(folder: Path) -> "Read":
    """The plan from a run's manifest, and from what its rows have shown."""
    from sealegs.lab import config
    from sealegs.preflight_check.config_readers import of_lab, of_manifest
    from sealegs.record import manifest as manifests

    manifest = manifests.load(folder)
    try:
        settings = asdict(config.of_run(folder)) if manifest.settings else None
    except ConfigError:  # the manifest of a user's own loop
        settings = None
    shown = rows_of(folder)
    speed = shown.pop("tokens_per_s", None)
    if settings is None:
        return of_manifest(manifest, shown)
    shown.pop("clip", None)  # which the settings say
    if speed:
        shown["seconds_per_step"] = settings["data"]["batch"] * settings["model"]["context"] / speed
    return of_lab(settings | {"dtype": manifest.dtype or "auto"}, **shown)


def rows_of(folder: Path) -> dict[str, float]:
    """Medians of what the run has shown so far."""
    import numpy as np

    from sealegs.record.run import open_run

    try:
        run = open_run(folder)
    except SourceError:
        return {}
    found = {}
    for ours, theirs in (("typical_grad_norm", "grad_norm"), ("tokens_per_s", "tokens_per_s"), ("clip", "clip_norm")):
        if theirs in run.signals:
            values = run.column(theirs)
            values = values[np.isfinite(values)]
            with np.errstate(over="ignore"):  # of two values near the largest number
                median = float(np.median(values)) if len(values) else math.nan
            if math.isfinite(median):
                found[ours] = median
    return found
