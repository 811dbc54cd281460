"""Command `baton decode-worker`."""

import typer

from baton.cli.command import command
from baton.serving.first_line import log_first_line


@command("Processes", extra="worker", subject="a decode worker", takes_rest=True)
def decode_worker(context: typer.Context) -> None:
    """Run a worker that begins in the decode role, until a signal."""
    log_first_line("decode", context.args)
    from baton.worker.process import main

    main("decode", context.args, context.command_path)
