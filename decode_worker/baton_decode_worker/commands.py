"""Command `baton decode-worker`."""

import typer

from baton.cli.command import command
from baton.serving.first_line import log_first_line


@command("Run", extra="worker", subject="a decode worker", takes_rest=True)
def decode_worker(context: typer.Context) -> None:
    """Run one worker, in the decode role at first."""
    log_first_line("decode", context.args)
    from baton.worker.process import main

    main("decode", context.args, context.command_path)
