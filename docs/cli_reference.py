"""Reference of the command line, from the definitions of the commands.

Formatted help is not used: its lines depend on the terminal and on the version of Typer.
"""

import re
from collections import defaultdict
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import typer
from typer.models import ParamMeta
from typer.utils import get_params_from_function

from baton.cli.command import SECTIONS
from baton.cli.main import app
from docs.tables import code, page, prose, table

_INTRODUCTION = """```
baton generate "def main(" --max-tokens 40
```

`baton --help` lists the commands, and `baton COMMAND --help` the options of one. An option goes
before its environment variable, the variable before the default. Each command also has
`-h` and `--help`. `baton serve` is another name of `baton up`. To complete commands and options in
bash:

```
source <(baton completion bash)
```"""

_PROCESSES = {
    "router": "settings.md#router",
    "picker": "settings.md#endpoint-picker",
    "encode-worker": "settings.md#workers",
    "prefill-worker": "settings.md#workers",
    "decode-worker": "settings.md#workers",
}
_OPTIONS = ("option", "type", "default", "environment", "meaning")


def cli() -> str:
    """Returns the page of all commands, in the sections of `baton --help`."""
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    parts = [_INTRODUCTION]
    for section in SECTIONS:
        parts.append(f"## {section}")
        for name, command in sorted(commands.items()):
            if command.rich_help_panel == section:
                parts += _command(name, command)
    return page("Command line", *parts)


def _command(name: str, command: Any) -> list[str]:
    if name in _PROCESSES:
        usage, tables = f"baton {name} [--config FILE] [--SETTING VALUE ...]", []
        tables.append(
            f"Each [setting]({_PROCESSES[name]}) is an option, such as `--log-level DEBUG`. "
            "`--config FILE`, or `BATON_CONFIG`, names a YAML file of settings."
        )
    else:
        arguments = [p for p in command.params if not p.opts[0].startswith("-")]
        options = [p for p in command.params if p not in arguments]
        usage = " ".join(["baton", name, *map(_usage, arguments), "[OPTIONS]"])
        tables = _options(options, get_params_from_function(command.callback))
        if arguments:
            rows = [(" or ".join(map(code, _names(p))), prose(p.help or "")) for p in arguments]
            tables.insert(0, table(("argument", "meaning"), rows))
    return [f"### baton {name}", f"```\n{usage}\n```", *_help(command.help or ""), *tables]


def _help(text: str) -> tuple[str, str]:
    """Splits the help of a command into its text and its examples, as a block of code."""
    paragraphs = re.split(r"\n\s*\n", text.strip())
    examples = [p for p in paragraphs if p.startswith("\b")]
    prose_paragraphs = [prose(" ".join(p.split())) for p in paragraphs if p not in examples]
    blocks = []
    for example in examples:
        title, *lines = example.removeprefix("\b").strip("\n").splitlines()
        blocks.append("\n".join([title, "", "```", *(line.strip() for line in lines), "```"]))
    return "\n\n".join(prose_paragraphs), "\n\n".join(blocks)


def _options(options: list[Any], declared: dict[str, ParamMeta]) -> list[str]:
    """Returns a table for each group of options, under the name of the group."""
    groups: dict[str, list[Any]] = defaultdict(list)
    for option in options:
        if not option.hidden and "--help" not in option.opts:
            groups[option.rich_help_panel or ""].append(option)
    parts = []
    for title, members in groups.items():
        rows = [
            (
                code(" / ".join([*o.opts, *o.secondary_opts])),
                _kind(declared[o.name].annotation, o.metavar) + _bounds(declared[o.name].default),
                _default(o),
                code(o.envvar or ""),
                prose(o.help or ""),
            )
            for o in members
        ]
        parts += [f"**{title}**" if title else "", table(_OPTIONS, rows)]
    return parts


def _names(parameter: Any) -> list[str]:
    """Returns the placeholder of an argument, or its choices."""
    return _choices(str(parameter.metavar or parameter.name.upper()))


def _choices(metavar: str) -> list[str]:
    """Splits a placeholder such as `[prefill|decode]`."""
    is_list = re.fullmatch(r"\[[\w|-]+\]", metavar)
    return (metavar[1:-1] if is_list else metavar).split("|")


def _usage(argument: Any) -> str:
    name = "|".join(_names(argument))
    return name if argument.required else f"[{name}]"


def _default(option: Any) -> str:
    """Returns the default that help shows; none of flags that are off, and of what is unset."""
    default = option.default
    if isinstance(default, Enum):
        default = default.value
    if not option.show_default or default is None or default is False or default in ("", (), []):
        return ""
    if default is True and option.secondary_opts:
        return code(option.opts[0])
    return code(default)


def _kind(annotation: Any, metavar: str | None) -> str:
    """Returns what follows an option: its placeholder, its choices or its type."""
    kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
    if get_origin(annotation) is Literal:
        return ", ".join(map(code, get_args(annotation)))
    if get_origin(annotation) in (list, tuple):
        return f"{_kind(kinds[0], metavar)}, repeatable"
    if kinds:
        return _kind(kinds[0], metavar)
    if metavar:
        return " or ".join(map(code, _choices(metavar)))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(code(member.value) for member in annotation)
    names = {bool: "flag", int: "integer", float: "number", str: "text", Path: "path"}
    return names.get(annotation, getattr(annotation, "__name__", "text"))


def _bounds(declared: Any) -> str:
    limits = {"≥": declared.min, "≤": declared.max}
    bounds = [f"{sign} {limit:g}" for sign, limit in limits.items() if limit is not None]
    return " ".join(["", ", ".join(bounds)]).rstrip()
