"""Words in, an exit code out: finds the command, and turns our errors into one sentence.

0: done. 1: findings. 2: bad input or usage, or something could not be written. 130: Ctrl-C, 143: SIGTERM, both after a
checkpoint. Results go to stdout, progress and errors to stderr.
"""

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from sealegs.cli import first_contact
from sealegs.cli.output import say, show, tell
from sealegs.errors import SealegsError
from sealegs.record.reading import READ_UP_TO, most_bytes

_BOUND = "--read-up-to"

# A command is a module with `main(arguments) -> exit code`, imported when it is called: --help must not wait for tyro,
# and nothing but training for torch.
GROUPS = {
    "prevent": {
        "scan": "what waits in a corpus: rare tokens, repeats, broken text, duplicates",
        "batches": "an order of the data in which no batch has a rare token twice",
        "preflight": "what is wrong with the settings of a run, before it costs anything",
        "coordcheck": "does a learning rate found on a small model hold for a large one? muP, proven",
    },
    "run": {
        "run": "start a training command with a guard in it, its code unchanged",
        "train": "pretrain a small language model and record everything",
        "do": "intervene in a run that is under way",
        "notify": "try whether messages about a run arrive",
    },
    "judge": {
        "check": "is this curve normal? any training log in, what is wrong and why out",
        "symptom": "what it usually is, and what to do first, by the words that people search for",
        "diff": "where two runs part: settings, versions, signals",
        "dashboard": "draw runs: one HTML file, or a page that follows them",
        "health": "before a restart: the healthy checkpoint, who was at fault, whether to start at all",
        "audit": "what a checkpoint holds, and what a resume from it would lack",
        "interventions": "what was done to a run, by whom, why, and what came of it",
        "mcp": "serve check, diff, health and interventions to an agent",
    },
    "explain": {
        "replay": "run an incident again, one thing changed at a time: its tested cause",
        "locate": "the first operation of an incident or a step that makes NaN of finite numbers",
        "postmortem": "a document about each incident: symptoms, causes, cost, what to change",
        "verify": "run an incident again with its remedy: are the promises of the post-mortem kept?",
    },
    "practise": {
        "drill": "break a run on purpose: would it survive, and would the cause be found?",
        "gallery": "incidents that can be run again: the log, the replay, the post-mortem",
    },
}
OPTIONS = ("--help", "--version", "--print-completion", _BOUND)
COMMANDS = {name: purpose for commands in GROUPS.values() for name, purpose in commands.items()}


def _listed() -> str:
    """The commands, by what they are for."""
    groups = []
    for group, commands in GROUPS.items():
        groups.append("\n".join([f"{group}:", *(f"  {name:<14} {purpose}" for name, purpose in commands.items())]))
    return "\n\n".join(groups)


USAGE = f"""\
usage: sealegs COMMAND [OPTIONS]

Keeps training runs standing: prevent, detect, recover from and explain numerical failure.

{_listed()}

options:
  -h, --help     this page; `sealegs COMMAND --help` for the options of a command
  --version      print the version
  --print-completion SHELL   print what completes all this in bash, zsh or fish
  --read-up-to SIZE   with any command: what one file may come to in memory or unpacked (2GiB)

examples:
  sealegs scan corpus.jsonl -o scanned             what is wrong with the text, before it is trained on
  sealegs batches tokens.npy -o order.npy          batches in which rare tokens do not meet
  sealegs train --size toy --steps 400 --run a     train the toy model into experiments/a
  sealegs train --run a --resume                   go on with it after an interruption
  sealegs preflight mine.toml                      what is wrong with settings, before the run
  sealegs check train.log                          what went wrong in any training log, and why
  sealegs symptom grad_norm nan loss 0.0           what that usually is, and what to do first
  sealegs dashboard a                              draw it: experiments/a/dashboard.html
  sealegs replay a#1                               why its first incident happened, tested
  sealegs postmortem a                             a document about each of its incidents
  sealegs verify a#1                               whether the remedy brings what the document promises
  sealegs drill lr-x30 nan-gradient                would a run survive this? a score card
  sealegs gallery run nan-gradient                 somebody's incident, made again and taken apart
  sealegs interventions a                          what was done to it
  sealegs do a lr 0.5                              halve its learning rate while it runs
  sealegs run --act -- trl sft --config mine.yaml  guard somebody else's training command
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and keep what goes wrong to one sentence."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # either is None where it was closed (`2>&-`), and everything below may print
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    try:
        try:
            return run(words)
        finally:
            sys.stdout.flush()  # here, where a reader that has gone can still be forgiven
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains again as it ends
        return 0


def run(words: Sequence[str]) -> int:
    """One command, by its words."""
    words, bound = _without_bound(words)
    before = os.environ.get(READ_UP_TO)
    if bound is not None:
        os.environ[READ_UP_TO] = bound  # processes that the command starts obey it, too
    try:
        return _run(words)
    finally:
        if bound is not None and before is None:
            del os.environ[READ_UP_TO]
        elif before is not None:
            os.environ[READ_UP_TO] = before


def _without_bound(words: Sequence[str]) -> tuple[list[str], str | None]:
    """The words without ``--read-up-to SIZE``, which every command knows, and the size."""
    left: list[str] = []
    bound = None
    following = iter(words)
    for word in following:
        if word == "--":  # what follows is a command of somebody else's
            left.extend([word, *following])
        elif word == _BOUND:
            bound = next(following, "")
        elif word.startswith(f"{_BOUND}="):
            bound = word.partition("=")[2]
        else:
            left.append(word)
    return left, bound


def _completion(words: Sequence[str]) -> int:
    """Print the script for a shell."""
    from sealegs.cli.completion import script

    _, _, shell = " ".join(words).replace("=", " ").partition(" ")
    try:
        text = script(shell, COMMANDS, OPTIONS)
    except SealegsError as error:
        tell(f"sealegs: {error}")
        return 2
    show(lambda: text)
    return 0


def _run(words: Sequence[str]) -> int:
    if not words:
        here = first_contact.shown(first_contact.suggested(Path()))
        show(lambda: f"{here}\n\n{USAGE.rstrip()}" if here else USAGE.rstrip())
        return 0
    if words[0] in ("-h", "--help"):
        show(lambda: USAGE.rstrip())
        return 0
    if words[0].partition("=")[0] == "--print-completion":
        return _completion(words)
    if words[0] == "--version":
        say(f"sealegs {metadata.version('sealegs')}")
        return 0
    if words[0] not in COMMANDS:
        near = difflib.get_close_matches(words[0], COMMANDS, n=1)
        hint = f"did you mean `sealegs {near[0]}`?" if near else "see `sealegs --help`"
        tell(f"sealegs: no command is called {words[0]!r}; {hint}")
        return 2
    try:
        if os.environ.get("NO_COLOR"):  # https://no-color.org; tyro reads a name of its own, when it is imported
            os.environ.setdefault("PYTHON_TYRO_ANSI_CODES", "False")
        most_bytes()  # refuses a size that is none, before anything is read
        code: int = importlib.import_module(f"sealegs.cli.{words[0]}").main(words[1:])
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:  # before the training loop could take it, or twice
        tell(f"sealegs {words[0]}: interrupted")
        return 130
    except (SealegsError, OSError, MemoryError) as error:
        page = getattr(error, "page", "")
        more = f" ({page})" if page and page not in str(error) else ""
        tell(f"sealegs {words[0]}: {str(error) or 'out of memory'}{more}")
        return 2
    return code
