"""Commands for whoever looks after a cluster, or after this installation."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.options import (
    DEFAULT_ADDRESS,
    DEFAULT_ADMIN_ADDRESS,
    Address,
    Admin,
    Json,
    Timeout,
    Token,
)
from baton.cli.running import console, finish
from baton.cli.tls_options import TlsOptions, takes_tls
from baton.errors import InvalidArgumentError


@takes_tls
def workers(*, tls: TlsOptions, admin: Admin = DEFAULT_ADMIN_ADDRESS, json: Json = False) -> None:
    """List the workers of a cluster.

    \b
    Example:
      baton workers --admin 127.0.0.1:50053
    """

    def command() -> None:
        from baton.cli import workers as room
        from baton.cli.session import admin_session

        with admin_session(admin, 5.0, tls=tls.tls()) as client:
            found = client.list_workers()
        if json:
            room.print_json(found)
        else:
            room.print_table(found, console())

    finish(command)


@takes_tls
def top(
    *,
    tls: TlsOptions,
    admin: Admin = DEFAULT_ADMIN_ADDRESS,
    token: Token = "",
    interval: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Between two looks.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print it once and stop.")] = False,
    json: Json = False,
) -> None:
    """Watch a cluster: its workers, their KV, what is handed over, and the oldest requests.

    \b
    Examples:
      baton top
      baton top --once
      baton top --json --interval 5
    """

    def command() -> None:
        import asyncio

        from baton.cli.session import admin_session

        with admin_session(admin, 10.0, token, tls.tls()) as client:
            client.get_load()
        if json or once or not sys.stdout.isatty():
            from baton.cli.top import plain as room

            if json:
                room.print_json(admin, token, interval, tls.tls(), once=once)
            else:
                room.show_once(admin, token, interval, console(), tls.tls())
            return
        from baton.cli.top.app import watch_on

        asyncio.run(watch_on(admin, token, interval, tls.tls()))

    finish(command)


@takes_tls
def role(
    *,
    tls: TlsOptions,
    worker: Annotated[
        str | None, typer.Argument(help="The worker that is to change its role.")
    ] = None,
    to: Annotated[
        str | None, typer.Argument(metavar="[prefill|decode]", help="What it is to be.")
    ] = None,
    admin: Admin = DEFAULT_ADMIN_ADDRESS,
    json: Json = False,
    timeout: Timeout = 120.0,
) -> None:
    """Have a worker change its role; by itself: say how the pools compare, and who should.

    The worker hands over what it runs, or finishes it, and goes on with the model it has loaded.

    \b
    Examples:
      baton role
      baton role decode-1 prefill
    """

    def command() -> None:
        from baton.cli import role as room
        from baton.cli.session import admin_session

        if worker is not None and to is None:
            raise InvalidArgumentError("role", "is needed with a worker: prefill or decode")
        with admin_session(admin, timeout, tls=tls.tls()) as client:
            if worker is not None and to is not None:
                print(room.change(client, worker, to))
                return
            balance = client.role_balance()
        if json:
            room.print_json(balance)
        else:
            room.print_balance(balance, console())

    finish(command)


@takes_tls
def explain(
    *,
    tls: TlsOptions,
    prompt: Annotated[
        str | None, typer.Argument(help="The text to place; -: read it from stdin.")
    ] = None,
    admin: Admin = DEFAULT_ADMIN_ADDRESS,
    request_id: Annotated[
        str | None,
        typer.Option(help="Explain this request, which was placed of late, in place of a prompt."),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Look for --request-id in what `--record` wrote."),
    ] = None,
    json: Json = False,
) -> None:
    """Say where a prompt would run if it came now, and why; nothing is run.

    \b
    Examples:
      baton explain "def fibonacci(n):"
      baton explain --request-id 8c2f0a6b1d3e4f57
      baton explain --request-id 8c2f0a6b1d3e4f57 --record placements.jsonl
    """

    def command() -> None:
        from baton.cli import explain as room
        from baton.cli.session import admin_session

        if (prompt is None) == (request_id is None):
            raise InvalidArgumentError("prompt", "or --request-id is needed, and only one of them")
        if record is not None:
            found = room.recorded(record, request_id)
        else:
            with admin_session(admin, 30.0, tls=tls.tls()) as client:
                if request_id is not None:
                    found = client.explain_request(request_id)
                else:
                    found = client.explain(sys.stdin.read() if prompt == "-" else prompt or "")
        if json:
            room.print_json(found)
        else:
            room.print_tables(found, console())

    finish(command)


@takes_tls
def doctor(
    *,
    tls: TlsOptions,
    admin: Annotated[
        str | None,
        typer.Option(
            envvar="BATON_ADMIN_ADDRESS",
            metavar="HOST:PORT",
            help="Look at the cluster whose router listens there for administration; else at this "
            "installation.",
        ),
    ] = None,
    address: Address = DEFAULT_ADDRESS,
    redis_url: Annotated[
        str | None,
        typer.Option(envvar="BATON_REDIS_URL", help="A Redis to look at; else our own."),
    ] = None,
    token: Token = "",
    tries: Annotated[
        bool, typer.Option("--try", help="Have the router at --address generate a token, too.")
    ] = False,
    json: Json = False,
) -> None:
    """Look at this installation, or at a running cluster: what is wrong, and what to do.

    Exits with 1 where there is a fault.

    \b
    Examples:
      baton doctor
      baton doctor --admin 127.0.0.1:50053 --try
    """

    def command() -> None:
        from baton.cli import doctor as room

        if admin is None:
            findings = room.installation(DEFAULT_ADDRESS, redis_url)
        else:
            findings = room.endpoint(admin, address if tries else None, token, redis_url, tls.tls())
        if room.report(findings, console(), as_json=json):
            raise typer.Exit(1)

    finish(command)


def token(
    tenant: Annotated[str, typer.Argument(help="Whose calls are to bear it.")],
    json: Json = False,
) -> None:
    """Make a token for a tenant, and the line that tells a router's --tenants-file of it.

    The token is shown this once and kept nowhere; the file has its hash.

    \b
    Example:
      baton token acme
    """

    def command() -> None:
        from baton.cli import token as room

        room.show(tenant, as_json=json)

    finish(command)
