"""`baton` command line. Each command imports its implementation when it runs, so that `--help` is
fast.
"""

import os
from typing import Annotated

import typer

from baton.cli.command import Sections, add_commands
from baton.cli.commands.shell import COMPLETION_VARIABLE, completion, print_version, version
from baton.installation import install_command
from baton.serving.optional_dependencies import has_extra

_WITH_WORKERS = """\b
Examples:
  baton demo
  baton up --model Qwen/Qwen3-0.6B
  baton generate "def main(" --max-tokens 40
  baton COMMAND --help

`baton serve` is `baton up`."""
_WITHOUT_WORKERS = f"""\b
Examples:
  baton router --redis-url redis://127.0.0.1:6379/0
  baton generate "def main(" --max-tokens 40
  baton COMMAND --help

\b
Workers, and `baton up` and `baton demo`, which start some, need:
  {install_command("worker")}"""

app = typer.Typer(
    cls=Sections,
    help="Serve large language models with prefill and decode apart.",
    epilog=_WITH_WORKERS if has_extra("worker") else _WITHOUT_WORKERS,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Runs the `baton` command: the entry point."""
    if COMPLETION_VARIABLE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()
    app(complete_var=COMPLETION_VARIABLE)


def _version(wanted: bool) -> None:
    if wanted:
        print_version()
        raise typer.Exit


_VERSION = typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)


@app.callback()
def _baton(_version: Annotated[bool, _VERSION] = False) -> None:
    """Options before the command."""


add_commands(app, {"completion": completion, "version": version})
