"""CLI command `baton picker`."""

import typer

from baton.cli.command import command
from baton.serving.first_line import log_first_line


@command("Run", takes_rest=True)
def picker(context: typer.Context) -> None:
    """Run an endpoint picker for a gateway.

    It places requests on model servers of others, by the router's own policies.
    """
    log_first_line("endpoint-picker", context.args)
    from baton_picker.process import run

    run(context.args, context.command_path)
