"""Command `baton decode-worker`."""

import typer

from baton.cli.command import command


@command("Processes", extra="worker", subject="a decode worker", takes_rest=True)
def decode_worker(context: typer.Context) -> None:
    """Run a worker that begins in the decode role, until a signal."""
    from baton.worker.process import main

    main("decode", context.args, context.command_path)
