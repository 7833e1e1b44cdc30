"""``sealegs check``: says what is wrong with a run, from any training log."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from sealegs.cli.output import show, show_json
from sealegs.errors import ConfigError

if TYPE_CHECKING:
    from sealegs.diagnosis.contract import Diagnosis

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
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line can say."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """The log."""
    json: bool = False
    """Print one JSON object, and nothing else."""
    explain: bool = False
    """Say in plain words what each finding means."""
    rules: Literal["calibrated", "textbook"] = "calibrated"
    """The statistic of this project, or the literal three-sigma rule."""
    fail_on: Literal["act", "watch", "never"] = "act"
    """The verdict from which on the exit code is 1."""
    metric: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SIGNAL=NAME"), tyro.conf.UseAppendAction] = ()
    """Which column is which signal, where the names do not say: loss=objective; may be given several times."""
    kind: Annotated[str | None, tyro.conf.arg(metavar="KIND")] = None
    """What kind of run it is, where the log does not tell: pretraining, fine-tuning, preference, policy-gradient,
    diffusion, gan, vision or supervised, with +moe or +low-precision."""
    pattern: Annotated[str | None, tyro.conf.arg(metavar="REGEX")] = None
    """For text that is like no other: a regular expression with a named group a signal."""


def main(arguments: Sequence[str]) -> int:
    """Read the log, and print the diagnosis."""
    options = tyro.cli(Options, args=list(arguments), prog="sealegs check", description=DESCRIPTION)
    from sealegs.report.commands.check import contract, page  # only now: --help must not wait for numpy
    from sealegs.report.commands.explain import explained

    diagnosis = check(
        options.source, metrics=_pairs(options.metric), pattern=options.pattern, rules=options.rules, kind=options.kind
    )
    if options.json:
        show_json(contract(diagnosis))
    else:
        show(page, diagnosis)
        if options.explain:
            show(explained, diagnosis)
    fails = {"act": ("act",), "watch": ("act", "watch"), "never": ()}[options.fail_on]
    return int(diagnosis.findings.verdict in fails)


def check(
    source: str, *, metrics: dict[str, str], pattern: str | None, rules: str, kind: str | None = None
) -> "Diagnosis":
    """The diagnosis of a log."""
    from sealegs.diagnosis.findings import look
    from sealegs.diagnosis.rank import diagnose
    from sealegs.readers.read import read

    log = read(place_of(source), metrics=metrics, pattern=pattern)
    findings = look(log.run, rules=rules, kind=kind)
    return diagnose(findings, source=source, format=log.format, rules=rules, mapping=log.mapping, remarks=log.remarks)


def place_of(source: str) -> str:
    """The path of a source: a bare name may be a run in ``experiments``, as in the other commands."""
    named = Path("experiments") / source
    return str(named) if not Path(source).exists() and "/" not in source and named.is_dir() else source


def _pairs(words: Sequence[str]) -> dict[str, str]:
    pairs = [word.partition("=") for word in words]
    for word, (signal, equals, name) in zip(words, pairs, strict=True):
        if not (signal and equals and name):
            raise ConfigError(f"--metric {word}: a signal, an equals sign and a column: --metric loss=train/objective")
    return {signal: name for signal, _, name in pairs}
