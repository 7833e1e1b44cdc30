"""The reference: the public names by their docstrings, and every command by its own ``--help``.

All of it is read from the source; nothing is imported that would need torch.
"""

import ast
import contextlib
import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import sealegs
from sealegs.cli.main import GROUPS, USAGE, main

SOURCE = Path(sealegs.__file__).parent
FRAMEWORKS = ("hf", "lightning", "accelerate", "deepspeed")
Definition = ast.ClassDef | ast.FunctionDef


def pages() -> Mapping[str, str]:
    """Markdown by its path in the folder of the reference."""
    written = {"README.md": _index(), "commands/README.md": _commands()}
    for commands in GROUPS.values():
        written |= {f"commands/{name}.md": _command(name, purpose) for name, purpose in commands.items()}
    for group, names in _groups().items():
        written |= {f"{group}/{name}.md": _name(group, name, node) for name, node in names.items()}
    return written


def _groups() -> dict[str, dict[str, Definition]]:
    """What is public, by the name that it is imported from."""
    found = {"sealegs": {name: _definition(home, name) for name, home in sealegs._HOMES.items()}}
    found["sealegs"]["Clipping"] = _definition("sealegs.guard_options", "Clipping")
    found["sealegs"] = dict(sorted(found["sealegs"].items()))
    imports = [node for node in _parsed("sealegs.playbook").body if isinstance(node, ast.ImportFrom)]
    named = {alias.name: node.module or "" for node in imports for alias in node.names}
    found["playbook"] = {name: _definition(home, name) for name, home in sorted(named.items())}
    found["integrations"] = {name: _definition(f"sealegs.integrations.{name}", "attach") for name in FRAMEWORKS}
    return found


def _parsed(module: str) -> ast.Module:
    path = SOURCE.parent / module.replace(".", "/")
    return ast.parse(path.with_suffix(".py").read_text("utf-8"))


def _definition(module: str, name: str) -> Definition:
    (node,) = [
        node
        for node in _parsed(module).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name and not _is_overload(node)
    ]
    return node


def _is_overload(node: ast.AST) -> bool:
    return any("overload" in ast.unparse(mark) for mark in getattr(node, "decorator_list", []))


IMPORTED = {
    "sealegs": "import sealegs",
    "playbook": "from sealegs.playbook import {name}",
    "integrations": "from sealegs.integrations import {name}",
}


def _index() -> str:
    lines = ["# Reference", "", "Made from the docstrings and from the `--help` of each command.", ""]
    lines += ["- [Every command](commands/README.md), with its options"]
    lines += ["- [The glossary](../glossary.md), and [what is promised of versions](../versions.md)", ""]
    titles = {
        "sealegs": "Python: `import sealegs`",
        "playbook": "Python: `sealegs.playbook`",
        "integrations": "Python: a framework's own loop",
    }
    for group, names in _groups().items():
        lines += [f"## {titles[group]}", "", "| name | what it is |", "|---|---|"]
        lines += [f"| [`{name}`]({group}/{name}.md) | {_first(node)} |" for name, node in names.items()]
        lines.append("")
    return "\n".join(lines)


def _shown(group: str, name: str) -> str:
    if name == "Clipping":
        return "sealegs.guard_options.Clipping"
    return {"sealegs": f"sealegs.{name}", "playbook": name, "integrations": f"{name}.attach"}[group]


def _first(node: Definition) -> str:
    """The first sentence of a docstring, fit for a table."""
    text = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
    return _code_spans(text).replace("|", "\\|")


def _name(group: str, name: str, node: Definition) -> str:
    shown = _shown(group, name)
    imported = IMPORTED[group].format(name=name)
    if name == "Clipping":
        imported = "from sealegs.guard_options import Clipping"
    lines = [f"# {shown}", "", "```python", imported, "```", ""]
    if isinstance(node, ast.FunctionDef):
        return "\n".join([*lines, *_function(node, shown)]) + "\n"
    lines += [*_signature_of_class(node, shown), *_prose(ast.get_docstring(node)), ""]
    constructor = _method(node, "__init__")
    if constructor is not None:
        lines += [*_prose(ast.get_docstring(constructor)), ""]
    fields = list(_fields(node))
    if fields:
        lines += ["## Fields", "", *fields, ""]
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_") and not _is_overload(method):
            lines += [f"## {method.name}", "", *_function(method, method.name), ""]
    return "\n".join(lines) + "\n"


def _method(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == name), None)


def _signature_of_class(node: ast.ClassDef, shown: str) -> list[str]:
    constructor = _method(node, "__init__")
    if constructor is not None:
        return _signature(constructor, shown)
    base = ", ".join(ast.unparse(base) for base in node.bases)
    if "Enum" in base or base.endswith(("Error", "Exception")):
        return [f"A `{base}`.", ""]
    return []


def _function(node: ast.FunctionDef, shown: str) -> list[str]:
    marks = {ast.unparse(mark) for mark in node.decorator_list}
    if "property" in marks:
        returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return ["```python", f"{shown}{returned}", "```", "", *_prose(ast.get_docstring(node))]
    return [*_signature(node, shown), *_prose(ast.get_docstring(node))]


def _signature(node: ast.FunctionDef, shown: str) -> list[str]:
    """As it stands in the source, without ``self``, a parameter a line where it is long."""
    given = node.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    parts = [
        _parameter(one, default) for one, default in zip(plain, defaults, strict=True) if one.arg not in ("self", "cls")
    ]
    if given.vararg:
        parts.append(f"*{_parameter(given.vararg, None)}")
    elif given.kwonlyargs:
        parts.append("*")
    parts += [_parameter(one, default) for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    if given.kwarg:
        parts.append(f"**{_parameter(given.kwarg, None)}")
    returned = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    line = f"{shown}({', '.join(parts)}){returned}"
    if len(line) > 88:
        line = "\n".join([f"{shown}(", *(f"    {part}," for part in parts), f"){returned}"])
    return ["```python", line, "```", ""]


def _parameter(given: ast.arg, default: ast.expr | None) -> str:
    kind = f": {ast.unparse(given.annotation)}" if given.annotation else ""
    if default is None:
        return f"{given.arg}{kind}"
    return f"{given.arg}{kind} = {ast.unparse(default)}" if kind else f"{given.arg}={ast.unparse(default)}"


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """What a dataclass or an enumeration has, each with the text below it."""
    for part, following in zip(node.body, [*node.body[1:], None], strict=True):
        named = _named_field(part)
        if named is None or named.startswith("_"):
            continue
        text = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = _code_spans(" ".join(str(following.value.value).split()))
        yield f"- `{named}`" + (f": {text}" if text else "")


def _named_field(part: ast.stmt) -> str | None:
    if isinstance(part, ast.AnnAssign) and not ast.unparse(part.annotation).startswith("ClassVar"):
        default = f" = {ast.unparse(part.value)}" if part.value is not None else ""
        return f"{ast.unparse(part.target)}: {ast.unparse(part.annotation)}{default}"
    if isinstance(part, ast.Assign) and ast.unparse(part.targets[0]) != "__slots__":
        return f"{ast.unparse(part.targets[0])} = {ast.unparse(part.value)}"
    return None


def _prose(docstring: str | None) -> list[str]:
    """A docstring as Markdown: examples in a block of their own."""
    lines: list[str] = []
    for paragraph in re.split(r"\n\s*\n", docstring or ""):
        before, mark, example = paragraph.partition(">>>")
        if before.strip():
            lines += [*_code_spans(before).splitlines(), ""]
        if mark:
            lines += ["```pycon", *f">>>{example}".splitlines(), "```", ""]
    return lines


def _code_spans(text: str) -> str:
    return re.sub(r"``(.+?)``", r"`\1`", text)


def _commands() -> str:
    lines = ["# Commands", "", "```text", *USAGE.strip().splitlines(), "```", ""]
    for group, commands in GROUPS.items():
        lines += [f"## {group.capitalize()}", "", "| command | what it does |", "|---|---|"]
        lines += [f"| [`sealegs {name}`]({name}.md) | {_sentence(purpose)} |" for name, purpose in commands.items()]
        lines.append("")
    return "\n".join(lines)


def _sentence(purpose: str) -> str:
    return f"{purpose[:1].upper()}{purpose[1:]}" + ("" if purpose.endswith("?") else ".")


def _command(name: str, purpose: str) -> str:
    return "\n".join([f"# sealegs {name}", "", _sentence(purpose), "", *_help_as_markdown(help_of(name))]) + "\n"


def _help_as_markdown(said: str) -> Iterator[str]:
    """Sentences as text, all else as it stands: usage, examples, options."""
    prose, *options = re.split(r"(?m)^(?= ?(?:positional arguments|options)$)", said, maxsplit=1)
    for paragraph in prose.strip().split("\n\n"):
        if paragraph.startswith(("usage:", "examples:")) or "\n " in paragraph:
            yield from ("```text", *paragraph.splitlines(), "```", "")
        else:
            yield from (paragraph.replace("<", "&lt;"), "")
    for text in options:
        yield from ("```text", *text.strip("\n").splitlines(), "```")


def help_of(name: str, columns: int = 78) -> str:
    """What ``sealegs NAME --help`` prints, in a terminal of so many columns."""
    set_here = {"COLUMNS": str(columns), "PYTHON_TYRO_ANSI_CODES": "False", "NO_COLOR": "1"}
    before = {key: os.environ.get(key) for key in set_here}
    os.environ |= set_here
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            main([name, "--help"])
    finally:
        _restore(before.items())
    return "\n".join(line.rstrip() for line in said.getvalue().strip().splitlines())


def _restore(before: Iterable[tuple[str, str | None]]) -> None:
    for key, value in before:
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value
