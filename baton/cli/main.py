"""`baton` command line. Each command imports its implementation when it runs, so that `--help` is
fast.
"""

from typing import Annotated

import typer

from baton.cli.command import Sections, add_commands

app = typer.Typer(
    cls=Sections,
    help="Serve large language models with prefill and decode apart.",
    epilog="Try it: `baton demo`.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Runs the `baton` command: the entry point."""
    app()


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    from baton.version import version

    print(f"baton {version()}")
    raise typer.Exit


_VERSION = typer.Option(
    "--version", help="Print the version.", callback=_print_version, is_eager=True
)


@app.callback()
def _baton(_version: Annotated[bool, _VERSION] = False) -> None:
    """Options before the command."""


add_commands(app)
