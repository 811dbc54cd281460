"""Commands `baton encode-worker` and `baton prefill-worker`."""

import typer

from baton.cli.command import command
from baton.serving.first_line import log_first_line


@command("Run", extra="worker", subject="an encode worker", takes_rest=True)
def encode_worker(context: typer.Context) -> None:
    """Run one worker, in the encode role at first."""
    log_first_line("encode", context.args)
    from baton.worker.process import main

    main("encode", context.args, context.command_path)


@command("Run", extra="worker", subject="a prefill worker", takes_rest=True)
def prefill_worker(context: typer.Context) -> None:
    """Run one worker, in the prefill role at first."""
    log_first_line("prefill", context.args)
    from baton.worker.process import main

    main("prefill", context.args, context.command_path)
