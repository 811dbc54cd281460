"""Command `baton prefill-worker`."""

import typer

from baton.cli.command import command
from baton.serving.first_line import log_first_line


@command("Processes", extra="worker", subject="a prefill worker", takes_rest=True)
def prefill_worker(context: typer.Context) -> None:
    """Run a worker that begins in the prefill role, until a signal."""
    log_first_line("prefill", context.args)
    from baton.worker.process import main

    main("prefill", context.args, context.command_path)
