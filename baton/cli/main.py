"""The `baton` command. Each room is imported inside its command, so that `--help` costs nothing."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

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
from baton.cli.sampling_options import (
    GroupedCommand,
    SamplingOptions,
    takes_sampling,
    with_options_named,
)
from baton.cli.tls_options import TlsOptions, takes_tls
from baton.errors import BatonError, InvalidArgumentError

if TYPE_CHECKING:
    from rich.console import Console

_INTERRUPTED = 130

app = typer.Typer(
    help="Serve large language models with prefill and decode apart.",
    epilog="Try it: `baton demo`.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """The entry point."""
    app()


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        print(f"baton {version('baton-serve')}")
    except PackageNotFoundError:
        print("baton, not installed: run from its sources")
    raise typer.Exit


_VERSION = typer.Option(
    "--version", help="Print the version.", callback=_print_version, is_eager=True
)


@app.callback()
def _baton(_version: Annotated[bool, _VERSION] = False) -> None:
    """What comes before the command."""


@app.command()
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

    def command() -> None:
        from baton.serving.extras import check_extra

        check_extra("local", "a cluster on this machine")
        from baton.cli import up as room
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
            admin_port=room.admin_port_of(admin_port),
            http_port=room.http_port_of(http_port) if http else None,
            worker_flags={**said, **room.parse_flags(worker_arg or [])},
            router_flags={
                "host": host,
                **({"insecure": True} if insecure else {}),
                **({"elastic": True} if elastic else {}),
            },
            log_dir=log_dir,
            tls_dir=tls,
        )
        if dry_run:
            room.print_commands(cluster)
        else:
            room.run(cluster, _console())

    _finish(command)


@app.command()
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
    """Make an authority, and certificates of every role signed by it, to try TLS with.

    \b
    Examples:
      baton certs trial
      baton up --tls trial
      baton certs /etc/baton/tls --host baton.example.org --tenant acme
    """

    def command() -> None:
        from baton.cli import certs as room

        made = room.make(folder, host or [], tenant or [], days)
        print("\n".join(map(str, made)))

    _finish(command)


@app.command()
def demo() -> None:
    """Start a small cluster, send it three prompts, and show what happened.

    \b
    Example:
      baton demo
    """

    def command() -> None:
        from baton.serving.extras import check_extra

        check_extra("local", "a cluster on this machine")
        from baton.cli import demo as room

        room.run(_console())

    _finish(command)


@app.command(cls=GroupedCommand)
@takes_sampling()
@takes_tls
def generate(
    *,
    prompt: Annotated[str, typer.Argument(help="The text to continue; -: read it from stdin.")],
    sampling: SamplingOptions,
    tls: TlsOptions,
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    stats: Annotated[
        bool, typer.Option("--stats", help="Say on stderr what it used and took.")
    ] = False,
    json: Json = False,
    timeout: Timeout = 120.0,
) -> None:
    """Continue a text; the answer is streamed to stdout.

    \b
    Examples:
      baton generate "def fibonacci(n):" --max-tokens 64
      cat story.txt | baton generate - --temperature 0.8 --seed 1 --stop "The end"
      baton generate "The date: " --regex "[0-9]{4}-[0-9]{2}-[0-9]{2}"
      baton generate "A name: " --beam-width 4 --n 2 --json
    """

    def command() -> None:
        from baton.cli import generate as room
        from baton.cli.session import session

        params = sampling.params()
        if not json:
            room.check_printable(params)
        text = sys.stdin.read() if prompt == "-" else prompt
        with session(address, timeout, token, tls.tls()) as client:
            generation = client.generate(text, params, priority=sampling.priority)
            if json:
                print(room.as_json(generation, params))
                return
            finished = room.show(generation, params)
            if stats:
                print(room.stats_line(finished), file=sys.stderr)

    _finish(command)


@app.command(cls=GroupedCommand)
@takes_sampling(
    without=frozenset({"n", "logprobs", "prompt_logprobs"}),
    max_tokens=256,
    temperature=0.7,
    top_p=0.95,
)
@takes_tls
def chat(
    *,
    sampling: SamplingOptions,
    tls: TlsOptions,
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    system: Annotated[str, typer.Option(help="What the model is told before all else.")] = "",
    timeout: Timeout = 120.0,
) -> None:
    """Talk with the model; each line is a turn. Ctrl-C stops an answer, Ctrl-D ends.

    \b
    Examples:
      baton chat --system "You write Python."
      echo "Write a function that adds two numbers." | baton chat --temperature 0
    """

    def command() -> None:
        from baton.cli import chat as room
        from baton.cli.session import session

        params = sampling.params()
        with session(address, timeout, token, tls.tls()) as client:
            room.run(client, params, system, sampling.priority)

    _finish(command)


@app.command()
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
            room.print_table(found, _console())

    _finish(command)


@app.command()
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
        if room.report(findings, _console(), as_json=json):
            raise typer.Exit(1)

    _finish(command)


@app.command()
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

    _finish(command)


@app.command()
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
            room.print_balance(balance, _console())

    _finish(command)


@app.command()
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
            room.print_tables(found, _console())

    _finish(command)


@app.command()
def replay(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="What `--record` of a router wrote.")
    ],
    policy: Annotated[
        str | None,
        typer.Option(help="Decide by this policy; else by the recorded one, as a check."),
    ] = None,
    json: Json = False,
) -> None:
    """Decide again what a router recorded, on the same snapshots, and show what differs.

    \b
    Examples:
      baton replay placements.jsonl --policy least-loaded
      baton replay placements.jsonl.2 placements.jsonl.1 placements.jsonl --json
    """

    def command() -> None:
        from baton.cli import replay as room

        redecided = room.redecide(files, room.policy_of(policy))
        if json:
            room.print_json(redecided)
        else:
            room.print_table(redecided, _console())

    _finish(command)


@app.command()
def simulate(
    trace: Annotated[
        Path,
        typer.Option(help="A recorded workload: Mooncake's format (.jsonl) or Azure's (.csv)."),
    ],
    prefill: Annotated[int, typer.Option(min=1, help="Prefill workers.")] = 8,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 8,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="A placement policy, such as round-robin; may be repeated.  [baton]"),
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(help="Times the trace's own rate of arrivals; may be repeated.  [1]"),
    ] = None,
    slo_ttft: Annotated[
        float, typer.Option(metavar="MS", help="Within how long the first token is in time.")
    ] = 2000.0,
    slo_itl: Annotated[
        float, typer.Option(metavar="MS", help="How far apart tokens may be in the mean.")
    ] = 50.0,
    latency_model: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="What a step takes: h200-8b (an 8B model on an H200, from its roofline), "
            "or a file with what `python -m bench steps --json` printed.",
        ),
    ] = "h200-8b",
    deadlines: Annotated[
        bool, typer.Option("--deadlines", help="Refuse whose first token would not be in time.")
    ] = False,
    admission: Annotated[
        str,
        typer.Option(
            help="Who is let in by the decode workers' load: none (everybody), naive (by that of "
            "the moment), predicted (by that at the end of the prefill)."
        ),
    ] = "none",
    cache_blocks: Annotated[
        int | None,
        typer.Option(
            min=1, help="512-token blocks of KV in each worker; else what it has room for."
        ),
    ] = None,
    block_size: Annotated[
        int, typer.Option(min=1, help="Tokens in a block; 16 is real, and slower to simulate.")
    ] = 512,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only so many requests of the trace.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write an HTML report with plots here.")
    ] = None,
    json: Json = False,
) -> None:
    """Serve a recorded workload in simulated time: what would a cluster make of it?

    Router, scheduler and block pools are the real ones; what a step takes is a model. Colocated
    workers, each of which prefills and decodes, are simulated beside, on as many machines.

    \b
    Examples:
      baton simulate --trace conversation_trace.jsonl --prefill 8 --decode 8 --rate 4 --rate 6
      baton simulate --trace trace.csv --policy baton --policy round-robin --report out.html
    """

    def command() -> None:
        from baton.serving.extras import check_extra

        check_extra("worker", "the simulator")
        from baton.cli import simulate as room

        study = room.study_of(
            num_prefill=prefill,
            num_decode=decode,
            policies=policy or ["baton"],
            rates=rate or [1.0],
            slo_ttft=slo_ttft,
            slo_itl=slo_itl,
            deadlines=deadlines,
            admission=admission,
            latency_model=latency_model,
            cache_blocks=cache_blocks,
            block_size=block_size,
        )
        rows = room.read_rows(trace, limit)
        room.run(study, rows, trace.name, report, as_json=json)

    _finish(command)


@app.command()
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
                room.show_once(admin, token, interval, _console(), tls.tls())
            return
        from baton.cli.top.app import watch_on

        asyncio.run(watch_on(admin, token, interval, tls.tls()))

    _finish(command)


def _finish(command: Callable[[], None]) -> NoReturn:
    """Runs a command and exits: 0, 1 with a sentence on stderr, or 130 when interrupted."""
    code = 0
    try:
        command()
    except BatonError as error:
        print(f"baton: {with_options_named(str(error))}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = _INTERRUPTED
    raise typer.Exit(code)


def _console() -> "Console":
    """Stdout. A pipe has no width to wrap at."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=160)


if __name__ == "__main__":
    main()
