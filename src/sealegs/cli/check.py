"""``sealegs check``: says what is wrong with a run, from any training log."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from sealegs.cli.output import show, show_json
from sealegs.cli.run_names import place_of
from sealegs.errors import ConfigError, SourceError

if TYPE_CHECKING:
    from sealegs.diagnosis.contract import Advised, Diagnosis, Reruns, Tried
    from sealegs.diagnosis.kind import Kind
    from sealegs.record.run import Run

DESCRIPTION = """\
Is this curve normal? Reads a training log of any common format, finds what went wrong where, walks the stability
decision tree and ranks the causes, with the numbers. Needs no hooks, no account and no GPU.

SOURCE is a run folder, or its name in experiments/; a Hugging Face checkpoint folder or trainer_state.json; TensorBoard
event files; mlflow:RUN_ID or an mlruns folder; a W&B offline folder or export; a Trackio store; CSV, TSV, JSON lines;
or the text that a program printed (Megatron, nanoGPT, llm.c, fairseq, Keras, ...). Gzip is undone.

exit code: 0 nothing at or above --fail-on, 1 something, 2 the log cannot be read.

examples:
  sealegs check experiments/a1                             a run of `sealegs train`, or of your guarded loop
  sealegs check out/checkpoint-500                         Hugging Face
  sealegs check train.log --metric loss=lm_loss            say which column is the loss
  sealegs check train.log --pattern 'it (?P<step>\\d+) .* L=(?P<loss>\\S+)'
  sealegs check grpo.jsonl --kind policy-gradient          where the columns do not say what is trained
  sealegs check metrics.csv --json | jq .verdict           for machines
  sealegs check metrics.csv --fail-on watch                strict, in a script
  sealegs check train.log --settings args.yaml             what the log does not say of the run's settings
  sealegs check train.log --tried "skip batches 400-450: no help" --tried "halve the LR: helped"
  sealegs check train.log --html page.html                 the same as one page, with the curve and its marks
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line can say."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """The log."""
    json: bool = False
    """Print one JSON object, and nothing else."""
    explain: bool = False
    """Print all of it, and say in plain words what each finding means."""
    html: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the same as one self-contained page, with the curve and its marks."""
    settings: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE"), tyro.conf.UseAppendAction] = ()
    """Settings of the run that its log does not have: TOML, JSON or YAML; may be given several times."""
    tried: Annotated[tuple[str, ...], tyro.conf.arg(metavar="ACTION: OUTCOME"), tyro.conf.UseAppendAction] = ()
    """What was tried, and what came of it (helped, no help, worse, unclear), or a TOML of it; may be given several
    times."""
    rules: Literal["calibrated", "textbook"] = "calibrated"
    """The statistic of this project, or the literal three-sigma rule."""
    fail_on: Literal["act", "watch", "never"] = "act"
    """The verdict from which on the exit code is 1."""
    metric: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SIGNAL=NAME"), tyro.conf.UseAppendAction] = ()
    """Which column is which signal, where the names do not say: loss=objective; may be given several times."""
    kind: Annotated[str | None, tyro.conf.arg(metavar="KIND")] = None
    """What kind of run it is, where the log does not tell: pretraining, fine-tuning, preference, policy-gradient,
    diffusion, gan, vision or supervised, with +moe or +low-precision; or one of these two alone."""
    pattern: Annotated[str | None, tyro.conf.arg(metavar="REGEX")] = None
    """For text that is like no other: a regular expression with a named group a signal."""


def main(arguments: Sequence[str]) -> int:
    """Read the log, and print the diagnosis."""
    options = tyro.cli(Options, args=list(arguments), prog="sealegs check", description=DESCRIPTION)
    from sealegs.report.commands.check import contract, page, whole  # only now: --help must not wait for numpy
    from sealegs.report.commands.explain import explained

    diagnosis = check(
        options.source,
        metrics=_pairs(options.metric),
        pattern=options.pattern,
        rules=options.rules,
        kind=options.kind,
        settings=options.settings,
        tried=options.tried,
    )
    if options.html is not None:
        _write_page(options.html, diagnosis)
    if options.json:
        show_json(contract(diagnosis))
    elif options.explain:
        show(whole, diagnosis)
        show(explained, diagnosis)
    else:
        show(page, diagnosis)
    fails = {"act": ("act",), "watch": ("act", "watch"), "never": ()}[options.fail_on]
    return int(diagnosis.findings.verdict in fails)


def check(
    source: str,
    *,
    metrics: dict[str, str] | None = None,
    pattern: str | None = None,
    rules: str = "calibrated",
    kind: str | None = None,
    settings: Sequence[Path] = (),
    tried: Sequence[str] = (),
) -> "Diagnosis":
    """The diagnosis of a log."""
    from sealegs.diagnosis.findings import look
    from sealegs.diagnosis.rank import diagnose
    from sealegs.readers.read import read

    attempts = [attempt for words in tried for attempt in _tried(words)]  # a wrong word is told before the log is read
    log = read(place_of(source), metrics=metrics, pattern=pattern, needs_loss=False)
    run = with_settings(log.run, settings)
    found = look(run, rules=rules, kind=kind)
    if {"loss", "reward", "eval_reward"}.isdisjoint(run.signals) and not found.judged:
        raise SourceError(f"{source}: {log.remarks[0]}")
    reruns, damaged = reruns_in(run)
    findings = replace(found, advised=advised(run, found.kind), tried=tuple(attempts), reruns=tuple(reruns))
    remarks = (*log.remarks, *damaged)
    return diagnose(findings, source=source, format=log.format, rules=rules, mapping=log.mapping, remarks=remarks)


def with_settings(run: "Run", files: Sequence[Path]) -> "Run":
    """The run with the settings of some files: they go before what its log says."""
    from sealegs.readers.settings_files import read_settings

    said: dict[str, Any] = {}
    for file in files:
        said |= read_settings(file)
    return replace(run, manifest=replace(run.manifest, settings={**run.manifest.settings, **said})) if said else run


def advised(run: "Run", kind: "Kind") -> "tuple[Advised, ...]":
    """What the pre-flight rules say of the settings of a run; of a fine-tune, by the rate that its rows have shown."""
    import numpy as np

    from sealegs.diagnosis.contract import Advised
    from sealegs.preflight_check.config_readers import of_log
    from sealegs.preflight_check.plan import merged, plan_from
    from sealegs.preflight_check.rule import check as asked
    from sealegs.preflight_check.rules import RULES

    found = of_log(run.manifest)
    shown: dict[str, Any] = {}
    if kind.is_trained_before:
        rates = run.written("lr").values if "lr" in run.signals else np.empty(0)
        shown = {"finetunes": True, "lr": float(np.nanmax(rates, initial=0.0)) or None}
        shown |= {"objective": "pairs"} if kind.name == "preference" else {}
    advice = asked(merged(plan_from(shown), found.plan), run.manifest.run_id, RULES, found.names).findings
    return tuple(Advised(code=one.code, grade=one.grade, text=f"{one.found} ({one.knob})") for one in advice)


def reruns_in(run: "Run") -> "tuple[list[Reruns], list[str]]":
    """What the reruns in a run folder say of its incidents, and which of their files cannot be read."""
    from sealegs.diagnosis.contract import Reruns
    from sealegs.report.postmortem.build import folders_of, open_incident

    found, damaged = [], []
    for folder in folders_of(run).values():
        try:
            incident, replayed, _ = open_incident(folder)
        except SourceError as error:
            damaged.append(str(error))
            continue
        if replayed is not None:
            out = tuple(cause for cause, standing in replayed.causes.items() if standing == "not needed")
            found.append(
                Reruns(
                    incident=incident,
                    cause=replayed.cause,
                    because=replayed.because,
                    is_by_exclusion=replayed.is_by_exclusion,
                    not_needed=out,
                )
            )
    return found, damaged


def _tried(words: str) -> "tuple[Tried, ...]":
    """The attempts of a flag: in words, or in a TOML."""
    from sealegs.diagnosis.tried import tried_in_toml, tried_in_words
    from sealegs.record.reading import read_bytes

    if not words.endswith(".toml"):
        return (tried_in_words(words),)
    try:
        content = read_bytes(Path(words), at_most=1 << 20)
    except OSError as error:
        raise ConfigError(f"--tried {words}: cannot be read ({error.strerror}); give a TOML of attempts") from error
    return tried_in_toml(content.decode(errors="replace"), words)


def _write_page(path: Path, diagnosis: "Diagnosis") -> None:
    from sealegs.record.files import whole_file, writing
    from sealegs.report.check_page import html_page

    content = html_page(diagnosis).encode("utf-8", "backslashreplace")
    with writing(path), whole_file(path, durable=False) as file:
        file.write(content)


def _pairs(words: Sequence[str]) -> dict[str, str]:
    pairs = [word.partition("=") for word in words]
    for word, (signal, equals, name) in zip(words, pairs, strict=True):
        if not (signal and equals and name):
            raise ConfigError(f"--metric {word}: a signal, an equals sign and a column: --metric loss=train/objective")
    return {signal: name for signal, _, name in pairs}
