"""Commands for a cluster on this machine: up, demo and certs."""

from pathlib import Path
from typing import Annotated

import typer

from baton.cli.command import command
from baton.cli.running import console, finish


@command("This machine", extra="worker", subject="a cluster on this machine")
def up(
    model: Annotated[
        str,
        typer.Option(
            envvar="BATON_MODEL", help="'tiny', which ships with Baton, a folder, or a hub id."
        ),
    ] = "tiny",
    prefill: Annotated[int, typer.Option(min=1, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 1,
    host: Annotated[
        str, typer.Option(envvar="BATON_HOST", help="Address the router listens on.")
    ] = "127.0.0.1",
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Let --host be one that others reach, without TLS."),
    ] = False,
    port: Annotated[
        int,
        typer.Option(
            envvar="BATON_PORT", min=0, max=65535, help="The router's port; 0: any free one."
        ),
    ] = 50051,
    admin_port: Annotated[
        int | None,
        typer.Option(
            envvar="BATON_ADMIN_PORT",
            min=0,
            max=65535,
            help="The router's port for administration, on loopback; 0: any free one. Unset: "
            "50053, or a free one where that is taken.",
        ),
    ] = None,
    http_port: Annotated[
        int | None,
        typer.Option(
            envvar="BATON_HTTP_PORT",
            min=0,
            max=65535,
            help="Where OpenAI's API and a page to try it are; 0: any free port. Unset: 8000, or "
            "a free one where that is taken.",
        ),
    ] = None,
    http: Annotated[bool, typer.Option("--http/--no-http", help="Serve HTTP beside gRPC.")] = True,
    redis_url: Annotated[
        str | None,
        typer.Option(envvar="BATON_REDIS_URL", help="A Redis of any kind to use; else our own."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            envvar="BATON_DEVICE", help="cpu, cuda, cuda:N, or auto: a GPU if there is one."
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="auto, float32, bfloat16 or float16: weights and cache.")
    ] = None,
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(help="auto, or fp8_e4m3: a KV cache of one byte a number, less precise."),
    ] = None,
    num_blocks: Annotated[
        int | None, typer.Option(min=1, help="KV blocks in each worker's pool.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of one sequence at most.")
    ] = None,
    num_threads: Annotated[
        int | None,
        typer.Option(
            envvar="BATON_NUM_THREADS", min=1, help="CPU threads of each; else cores / workers."
        ),
    ] = None,
    worker_arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="Any other setting of the workers; may be repeated."
        ),
    ] = None,
    elastic: Annotated[
        bool,
        typer.Option("--elastic", help="Have workers change their roles as the load asks for it."),
    ] = False,
    tls: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            metavar="DIR",
            help="Have all speak TLS, with the certificates that `baton certs DIR` has made.",
        ),
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(file_okay=False, help="Keep the logs in this folder.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands only.")] = False,
) -> None:
    """Run a cluster on this machine until Ctrl-C.

    \b
    Examples:
      baton up
      baton up --model Qwen/Qwen3-0.6B --prefill 2 --decode 1
      baton up --worker-arg max-num-seqs=16 --dry-run
    """

    def run() -> None:
        from baton.cli import up as impl
        from baton.cli.local_cluster import LocalCluster

        flags = {
            "device": device,
            "dtype": dtype,
            "kv_cache_dtype": kv_cache_dtype,
            "num_blocks": num_blocks,
            "max_model_len": max_model_len,
            "num_threads": num_threads,
        }
        said = {name: value for name, value in flags.items() if value is not None}
        cluster = LocalCluster(
            model,
            prefill,
            decode,
            port,
            redis_url,
            admin_port=impl.admin_port_of(admin_port),
            http_port=impl.http_port_of(http_port) if http else None,
            worker_flags={**said, **impl.parse_flags(worker_arg or [])},
            router_flags={
                "host": host,
                **({"insecure": True} if insecure else {}),
                **({"elastic": True} if elastic else {}),
            },
            log_dir=log_dir,
            tls_dir=tls,
        )
        if dry_run:
            impl.print_commands(cluster)
        else:
            impl.run(cluster, console())

    finish(run)


@command("This machine", extra="worker", subject="a cluster on this machine")
def demo() -> None:
    """Run a small cluster, send three prompts, show the results.

    \b
    Example:
      baton demo
    """

    def run() -> None:
        from baton.cli import demo as impl

        impl.run(console())

    finish(run)


@command("This machine")
def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write them.")],
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="By which clients reach the router, beside localhost; may be repeated.",
        ),
    ] = None,
    tenant: Annotated[
        list[str] | None,
        typer.Option(help="Make a certificate of this tenant's clients too; may be repeated."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="How long they are good for.")] = 365,
) -> None:
    """Make a trial authority, and TLS certificates of all roles.

    \b
    Examples:
      baton certs trial
      baton up --tls trial
      baton certs /etc/baton/tls --host baton.example.org --tenant acme
    """

    def run() -> None:
        from baton.cli import certs as impl

        made = impl.make(folder, host or [], tenant or [], days)
        print("\n".join(map(str, made)))

    finish(run)
