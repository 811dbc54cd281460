"""The `baton` command. Each room is imported inside its command, so that `--help` costs nothing."""

from typing import Annotated

import typer

from baton.cli.commands import ask, local, look_after, study
from baton.cli.sampling_options import GroupedCommand

app = typer.Typer(
    help="Serve large language models with prefill and decode apart.",
    epilog="Try it: `baton demo`.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """The entry point."""
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
    """What comes before the command."""


app.command()(local.up)
app.command()(local.demo)
app.command(cls=GroupedCommand)(ask.generate)
app.command(cls=GroupedCommand)(ask.chat)
app.command()(look_after.workers)
app.command()(look_after.top)
app.command()(look_after.role)
app.command()(look_after.explain)
app.command()(look_after.doctor)
app.command()(look_after.token)
app.command()(local.certs)
app.command()(study.replay)
app.command()(study.simulate)


if __name__ == "__main__":
    main()
