"""CLI commands `baton router`, `baton explain` and `baton replay`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.command import command
from baton.cli.options.common import DEFAULT_ADMIN_ADDRESS, Admin, Json, JsonLines, Token
from baton.cli.options.tls import TlsOptions, takes_tls
from baton.cli.running import console
from baton.errors import InvalidArgumentError
from baton.serving.first_line import log_first_line
from baton.serving.telemetry.placement_terms import TERMS


@command("Run", takes_rest=True)
def router(context: typer.Context) -> None:
    """Run one router of a cluster."""
    if "--endpoint-picker" in context.args:
        raise InvalidArgumentError("--endpoint-picker", "is a command now; run `baton picker`")
    log_first_line("router", context.args)
    from baton_router.process import run

    run(context.args, context.command_path)


@command("Look", legend=TERMS)
@takes_tls
def explain(
    *,
    tls: TlsOptions,
    prompt: Annotated[
        str | None, typer.Argument(help="The text to place; -: read it from stdin.")
    ] = None,
    admin: Admin = DEFAULT_ADMIN_ADDRESS,
    token: Token = "",
    request_id: Annotated[
        str | None,
        typer.Option(help="Explain this recently placed request instead of a prompt."),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Look for --request-id in what `--record` wrote."),
    ] = None,
    legend: Annotated[
        bool, typer.Option("--legend", help="Print the meaning of each term shown.")
    ] = False,
    json: Json = False,
) -> None:
    """Say where a prompt would run, and why.

    As if it came now, from the tenant of --token; nothing is run. A request of this tenant that
    came recently is explained by its id.

    \b
    Examples:
      baton explain "def fibonacci(n):"
      baton explain --request-id 8c2f0a6b1d3e4f57
      baton explain --request-id 8c2f0a6b1d3e4f57 --record placements.jsonl
    """
    from baton.cli.session import admin_session
    from baton_router.cli import explain as impl

    if (prompt is None) == (request_id is None):
        raise InvalidArgumentError("prompt", "or --request-id is needed, and only one of them")
    if record is not None:
        found = impl.recorded(record, request_id)
    else:
        with admin_session(admin, 30.0, token, tls.tls()) as client:
            if request_id is not None:
                found = client.explain_request(request_id)
            else:
                found = client.explain(sys.stdin.read() if prompt == "-" else prompt or "")
    if json:
        impl.print_json(found)
    else:
        impl.print_tables(found, console())
        if legend:
            impl.print_legend(found, console())


@command("Plan")
def replay(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="What `--record` of a router wrote.")
    ],
    policy: Annotated[
        str | None,
        typer.Option(help="Decide by this policy; else by the recorded one, as a check."),
    ] = None,
    json: JsonLines = False,
) -> None:
    """Decide recorded placements again, and show what differs.

    On the same snapshots of the cluster, by the same policy or another.

    \b
    Examples:
      baton replay placements.jsonl --policy least-loaded
      baton replay placements.jsonl.2 placements.jsonl.1 placements.jsonl --json
    """
    from baton_router.cli import replay as impl

    redecided = impl.redecide(files, impl.policy_of(policy))
    if json:
        impl.print_json(redecided)
    else:
        impl.print_table(redecided, console())
