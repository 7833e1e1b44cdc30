"""A shell in, the script that completes our commands and their options in it out."""

import contextlib
import importlib
import io
import os
import re
from collections.abc import Mapping

from sealegs.errors import ConfigError

SHELLS = ("bash", "zsh", "fish")


def script(shell: str, commands: Mapping[str, str], options: tuple[str, ...]) -> str:
    """The script for a shell, for commands with what they are for, and the options of all of them."""
    if shell not in SHELLS:
        raise ConfigError(
            f"--print-completion {shell or 'without a shell'}: give {', '.join(SHELLS[:-1])} or {SHELLS[-1]}"
        )
    flags = {command: (*_flags(command), *options[-1:]) for command in commands}
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](commands, flags, options)


def _flags(command: str) -> list[str]:
    """The options of a command, as its help names them."""
    module = importlib.import_module(f"sealegs.cli.{command}")
    said = io.StringIO()
    width = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "400"  # a page that is narrow cuts names in two
    try:
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            module.main(["--help"])
    finally:
        os.environ.pop("COLUMNS")
        os.environ.update({} if width is None else {"COLUMNS": width})
    page = re.sub(r"\x1b\[[0-9;]*m", "", said.getvalue())
    *_, options = re.split(r" options [─-]", page, maxsplit=1)
    return list(dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][a-z0-9.-]*[a-z0-9]", options)))


def _bash(commands: Mapping[str, str], flags: Mapping[str, tuple[str, ...]], options: tuple[str, ...]) -> str:
    cases = "\n".join(f'        {name}) words="{" ".join(flags[name])}" ;;' for name in commands)
    return f"""\
# sealegs --print-completion bash > ~/.local/share/bash-completion/completions/sealegs
_sealegs() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" words=""
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{" ".join((*commands, *options))}"
    elif [[ "$current" == -* ]]; then
        case "${{COMP_WORDS[1]}}" in
{cases}
        esac
    fi
    [ -z "$words" ] || COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _sealegs sealegs"""


def _zsh(commands: Mapping[str, str], flags: Mapping[str, tuple[str, ...]], options: tuple[str, ...]) -> str:
    listed = "\n".join(f"        {_quoted(f'{name}:{what}')}" for name, what in commands.items())
    cases = "\n".join(f"        {name}) compadd -- {' '.join(flags[name])} ;;" for name in commands)
    return f"""\
#compdef sealegs
# sealegs --print-completion zsh > a file _sealegs in a folder of $fpath
_sealegs() {{
    local -a commands
    commands=(
{listed}
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        compadd -- {" ".join(options)}
        return
    fi
    if [[ "$words[CURRENT]" == -* ]]; then
        case "$words[2]" in
{cases}
        esac
    else
        _files
    fi
}}
if [ "$funcstack[1]" = "_sealegs" ]; then _sealegs "$@"; else compdef _sealegs sealegs; fi"""


def _fish(commands: Mapping[str, str], flags: Mapping[str, tuple[str, ...]], options: tuple[str, ...]) -> str:
    lines = ["# sealegs --print-completion fish > ~/.config/fish/completions/sealegs.fish"]
    for name, what in commands.items():
        lines.append(f"complete -c sealegs -n __fish_use_subcommand -f -a {name} -d {_quoted(what)}")
    lines += [f"complete -c sealegs -n __fish_use_subcommand -f -l {each[2:]}" for each in options]
    for name in commands:
        lines += [f"complete -c sealegs -n '__fish_seen_subcommand_from {name}' -l {each[2:]}" for each in flags[name]]
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """A text as one word of zsh and fish."""
    return "'" + text.replace("'", "'\\''") + "'"
