"""Commands of `baton`, found by the entry points `baton.commands` of the installed packages.

A package declares `name = "package.commands:name"` in its metadata, and marks the function:

    @command("Use")
    def generate(...) -> None: ...
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from baton.cli.running import finishing
from baton.serving.optional_dependencies import check_extra, has_extra

GROUP = "baton.commands"
SECTIONS = ("Run", "Use", "Look", "Administer", "Plan", "Shell")
"""Headings of `baton --help`, in order."""
ALIASES: Mapping[str, str] = {"serve": "up"}
"""Other names of commands, which other servers have taught."""
HINTS: Mapping[str, str] = {
    "run": "`baton up --model MODEL` starts a cluster, then `baton chat` talks with it",
    **dict.fromkeys(("start", "launch", "server"), "`baton up` starts a cluster"),
    **dict.fromkeys(("stop", "down", "kill", "shutdown"), "Ctrl-C ends `baton up`"),
    **dict.fromkeys(("list", "ls", "nodes", "worker"), "`baton workers` lists the workers"),
    **dict.fromkeys(("models", "show", "info"), "`baton workers` and /v1/models over HTTP list"),
    **dict.fromkeys(("ps", "status", "stats", "watch"), "`baton top` shows workers and requests"),
    **dict.fromkeys(("complete", "completions", "ask", "prompt"), "`baton generate` does it"),
    **dict.fromkeys(("pull", "download"), "`baton fetch ID` downloads a model"),
    **dict.fromkeys(("bench", "benchmark"), "`baton simulate` plans a cluster for a workload"),
    **dict.fromkeys(("check", "health"), "`baton doctor` looks for faults"),
    **dict.fromkeys(("logs", "log"), "`baton up --log-dir DIR` keeps the logs there"),
    **dict.fromkeys(("drain", "scale"), "`baton role` moves workers between the pools"),
    "why": "`baton explain` says why a prompt runs where it runs",
    "encode": "`baton encode-worker` runs one worker",
    "prefill": "`baton prefill-worker` runs one worker",
    "decode": "`baton decode-worker` runs one worker",
    "help": "`baton --help` lists the commands, `baton COMMAND --help` the options of one",
}
"""Advice for names that are no commands."""

MAX_SUMMARY = 60
"""Most characters of a command's summary, the first line of its help, which is never cut."""
_NO_TERMS: Mapping[str, str] = {}
# The command itself parses the arguments after its name, `--help` too.
_TAKES_REST = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}


@dataclass(frozen=True, slots=True)
class Command:
    """Command: the object that an entry point names.

    Attributes:
        callback: its parameters become arguments and options, its docstring the help.
        section: one of `SECTIONS`.
        extra: optional dependencies that it needs; without them it is not listed.
        click_class: formats its help; None: as Typer does.
        takes_rest: all its arguments are in `context.args`, not parsed.
        legend: terms that it prints, each with its meaning; the end of its help.
    """

    callback: Callable[..., None]
    section: str
    extra: str | None
    click_class: type[TyperCommand] | None
    takes_rest: bool
    legend: Mapping[str, str]


def command(
    section: str,
    *,
    extra: str | None = None,
    subject: str = "",
    click_class: type[TyperCommand] | None = None,
    takes_rest: bool = False,
    legend: Mapping[str, str] = _NO_TERMS,
) -> Callable[[Callable[..., None]], Command]:
    """Makes a function a `Command`, which exits as `finishing` says. If `extra` is not installed,
    it exits with a sentence that begins with `subject`."""

    def make(function: Callable[..., None]) -> Command:
        @functools.wraps(function)
        def callback(*args: Any, **kwargs: Any) -> None:
            with finishing():
                if extra is not None:
                    check_extra(extra, subject)
                function(*args, **kwargs)

        return Command(callback, section, extra, click_class, takes_rest, legend)

    return make


class Sections(TyperGroup):
    """Command group whose help lists commands under the headings of their sections, and which
    knows what other programs call them."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Returns the command by its name or alias. Fails with advice for other known names."""
        name = ALIASES.get(args[0], args[0])
        if name in HINTS and name not in self.commands:
            ctx.fail(f"No such command {name!r}: {HINTS[name]}.")
        return super().resolve_command(ctx, [name, *args[1:]])

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - click's
        for section in SECTIONS:
            listed = [
                (name, found.get_short_help_str(MAX_SUMMARY))
                for name, found in self.commands.items()
                if not found.hidden and getattr(found, "rich_help_panel", None) == section
            ]
            if listed:
                with formatter.section(section):
                    formatter.write_dl(listed)


def add_commands(app: typer.Typer, own: Mapping[str, Command]) -> None:
    """Adds the commands of all installed packages, and `own`, by name."""
    found: Command
    installed = {point.name: point.load() for point in entry_points(group=GROUP)}
    for name, found in {**installed, **own}.items():
        is_hidden = found.extra is not None and not has_extra(found.extra)
        app.command(
            name,
            cls=found.click_class,
            hidden=is_hidden,
            rich_help_panel=found.section,
            epilog=_epilog(found.legend),
            context_settings=_TAKES_REST if found.takes_rest else None,
        )(found.callback)


def _epilog(legend: Mapping[str, str]) -> str | None:
    """Returns a paragraph that click does not wrap, a line for each term; None without terms."""
    if not legend:
        return None
    width = max(map(len, legend))
    return "\n".join(["\b", "Terms:", *(f"  {t:{width}}  {m}" for t, m in legend.items())])
