"""Commands that operate a cluster or check this installation."""

import sys
from typing import Annotated

import typer

from baton.cli.command import command
from baton.cli.options.common import (
    DEFAULT_ADDRESS,
    DEFAULT_ADMIN_ADDRESS,
    Address,
    Admin,
    Json,
    JsonLines,
    Timeout,
    Token,
)
from baton.cli.options.tls import TlsOptions, takes_tls
from baton.cli.running import console
from baton.errors import InvalidArgumentError
from baton.serving.telemetry.placement_terms import LOAD


@command("Look")
@takes_tls
def workers(
    *,
    tls: TlsOptions,
    admin: Admin = DEFAULT_ADMIN_ADDRESS,
    memory: Annotated[
        bool, typer.Option("--memory", help="Show the use of their KV memory instead.")
    ] = False,
    json: JsonLines = False,
) -> None:
    """List the workers, or the use of their KV memory.

    \b
    Examples:
      baton workers --admin 127.0.0.1:50053
      baton workers --memory
    """
    from baton.cli import workers as impl
    from baton.cli.session import admin_session

    with admin_session(admin, 5.0, tls=tls.tls()) as client:
        if memory:
            used = client.get_memory()
            impl.print_json(used) if json else impl.print_memory(used, console())
            return
        found = client.list_workers()
    if json:
        impl.print_json(found)
    else:
        impl.print_table(found, console())


@command("Look", legend=LOAD)
@takes_tls
def top(
    *,
    tls: TlsOptions,
    admin: Admin = DEFAULT_ADMIN_ADDRESS,
    token: Token = "",
    interval: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Time between two updates.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot and exit.")] = False,
    json: JsonLines = False,
) -> None:
    """Watch workers, KV cache, transfers and the oldest requests.

    \b
    Examples:
      baton top
      baton top --once
      baton top --json --interval 5
    """
    import asyncio

    from baton.cli.session import admin_session

    with admin_session(admin, 10.0, token, tls.tls()) as client:
        client.get_load()
    if json or once or not sys.stdout.isatty():
        from baton.cli.top import plain as impl

        if json:
            impl.print_json(admin, token, interval, tls.tls(), once=once)
        else:
            impl.show_once(admin, token, interval, console(), tls.tls())
        return
    from baton.cli.top.app import run_app

    asyncio.run(run_app(admin, token, interval, tls.tls()))


@command("Administer")
@takes_tls
def role(
    *,
    tls: TlsOptions,
    worker: Annotated[str | None, typer.Argument(help="Worker whose role changes.")] = None,
    to: Annotated[
        str | None, typer.Argument(metavar="[encode|prefill|decode]", help="Its new role.")
    ] = None,
    admin: Admin = DEFAULT_ADMIN_ADDRESS,
    json: Json = False,
    timeout: Timeout = 120.0,
) -> None:
    """Change a worker's role, or show the load of the pools.

    The load is shown by model; with --json, one line for each. A worker whose role changes drains:
    its requests migrate or finish. It keeps the model that it has loaded.

    \b
    Examples:
      baton role
      baton role decode-1 prefill
    """
    from baton.cli import role as impl
    from baton.cli.session import admin_session

    if worker is not None and to is None:
        raise InvalidArgumentError("role", "is needed with a worker: encode, prefill or decode")
    with admin_session(admin, timeout, tls=tls.tls()) as client:
        if worker is not None and to is not None:
            print(impl.change(client, worker, to))
            return
        found = impl.balances(client)
    if json:
        impl.print_json(found)
    else:
        impl.print_balances(found, console())


@command("Administer")
@takes_tls
def pause(*, tls: TlsOptions, admin: Admin = DEFAULT_ADMIN_ADDRESS) -> None:
    """Pause admission: new requests wait, running ones continue.

    Requests that wait fail at their deadlines. Each router has an admission queue of its own.

    \b
    Example:
      baton pause --admin 127.0.0.1:50053
    """
    from baton.cli.session import admin_session

    with admin_session(admin, 5.0, tls=tls.tls()) as client:
        print(f"admission is paused; requests waiting: {client.pause_admission()}")


@command("Administer")
@takes_tls
def resume(*, tls: TlsOptions, admin: Admin = DEFAULT_ADMIN_ADDRESS) -> None:
    """Resume admission after `baton pause`.

    \b
    Example:
      baton resume --admin 127.0.0.1:50053
    """
    from baton.cli.session import admin_session

    with admin_session(admin, 5.0, tls=tls.tls()) as client:
        print(f"admission has resumed; requests that waited: {client.resume_admission()}")


@command("Administer")
@takes_tls
def flush(
    *,
    tls: TlsOptions,
    prompt: Annotated[
        str | None,
        typer.Argument(help="Text to drop from the caches; -: read it from stdin. Unset: all."),
    ] = None,
    admin: Admin = DEFAULT_ADMIN_ADDRESS,
    token: Token = "",
) -> None:
    """Drop cached prefixes: all, or those of one prompt.

    A prompt is looked up as one of the tenant of --token. Running requests continue.

    \b
    Examples:
      baton flush
      baton flush "def fibonacci(n):"
    """
    from baton.cli.session import admin_session

    text = sys.stdin.read() if prompt == "-" else prompt
    with admin_session(admin, 30.0, token, tls.tls()) as client:
        print(f"cached blocks dropped: {client.flush_cache(text)}")


@command("Look")
@takes_tls
def doctor(
    *,
    tls: TlsOptions,
    admin: Annotated[
        str | None,
        typer.Option(
            envvar="BATON_ADMIN_ADDRESS",
            metavar="HOST:PORT",
            help="Address of a router's admin service, to check its cluster. Unset: check this "
            "installation.",
        ),
    ] = None,
    address: Address = DEFAULT_ADDRESS,
    redis_url: Annotated[
        str | None,
        typer.Option(envvar="BATON_REDIS_URL", help="Redis to check. Unset: an embedded one."),
    ] = None,
    redis_password: Annotated[
        str | None,
        typer.Option(
            envvar="BATON_REDIS_PASSWORD",
            help="Its password, any text. Unset: the one in the URL.",
            show_default=False,
        ),
    ] = None,
    token: Token = "",
    tries: Annotated[
        bool, typer.Option("--try", help="Also have the router at --address answer a request.")
    ] = False,
    json: JsonLines = False,
) -> None:
    """Check this installation or a cluster for faults.

    Exits with status 1 if there is a fault.

    \b
    Examples:
      baton doctor
      baton doctor --admin 127.0.0.1:50053 --try
    """
    from baton.cli import doctor as impl
    from baton.cluster.redis.address import with_password

    if redis_url is not None:
        redis_url = with_password(redis_url, redis_password)
    if admin is None:
        findings = impl.installation(DEFAULT_ADDRESS, redis_url)
    else:
        findings = impl.endpoint(admin, address if tries else None, token, redis_url, tls.tls())
    if impl.report(findings, console(), as_json=json):
        raise typer.Exit(1)


@command("Administer")
def token(
    tenant: Annotated[str, typer.Argument(help="Name of the tenant.")],
    json: Json = False,
) -> None:
    """Create a tenant's bearer token for --tenants-file.

    Prints it and its line of the file, which has only its hash: the token is not stored.

    \b
    Example:
      baton token acme
    """
    from baton.cli import token as impl

    impl.show(tenant, as_json=json)
