"""Commands for a cluster on this machine: up, demo, fetch and certs."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.command import command
from baton.cli.options.common import JsonLines
from baton.cli.options.workers import TakesWorkerSettings
from baton.cli.running import console


@command(
    "Run",
    extra="worker",
    subject="a cluster on this machine",
    click_class=TakesWorkerSettings,
)
def up(
    context: typer.Context,
    given_model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A model; the same as --model.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            envvar="BATON_MODEL",
            help="'tiny' or 'shapes' (shipped with Baton), a folder, a GGUF file, or a hub id; or "
            "NAME=MODEL. May be repeated: each model has workers of its own. Unset: tiny.",
        ),
    ] = None,
    encode: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of encode workers of each model, for images of vision-language models.",
        ),
    ] = 0,
    prefill: Annotated[
        int | None, typer.Option(help="Number of prefill workers of each model. Unset: 1.")
    ] = None,
    decode: Annotated[
        int | None, typer.Option(help="Number of decode workers of each model. Unset: 1.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="In place of --prefill and --decode: number of workers of each model that compute "
            "prompts and write answers. With 1 the model is in memory once and has all CPU "
            "threads. In return a prompt and the answers of others share steps, so a long prompt "
            "delays their tokens; and while the only worker restarts, no other resumes its "
            "requests.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(envvar="BATON_HOST", help="Address that the router listens on.")
    ] = "127.0.0.1",
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Allow a --host that other machines reach, without TLS."),
    ] = False,
    port: Annotated[
        int,
        typer.Option(
            envvar="BATON_PORT", min=0, max=65535, help="Port of the router; 0: any free port."
        ),
    ] = 50051,
    admin_port: Annotated[
        int | None,
        typer.Option(
            envvar="BATON_ADMIN_PORT",
            min=0,
            max=65535,
            help="Port of the router's admin service, on loopback; 0: any free port. Unset: "
            "50053, or a free port if that is taken.",
        ),
    ] = None,
    http_port: Annotated[
        int | None,
        typer.Option(
            envvar="BATON_HTTP_PORT",
            min=0,
            max=65535,
            help="Port of the OpenAI-compatible API and its web page; 0: any free port. Unset: "
            "8000, or a free port if that is taken.",
        ),
    ] = None,
    http: Annotated[bool, typer.Option("--http/--no-http", help="Serve the HTTP API.")] = True,
    redis_url: Annotated[
        str | None,
        typer.Option(envvar="BATON_REDIS_URL", help="Redis of any kind. Unset: an embedded one."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            envvar="BATON_DEVICE", help="cpu, cuda, cuda:N, or auto (a GPU if there is one)."
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of weights and cache: auto, float32, bfloat16 or float16.")
    ] = None,
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(help="Of the KV cache: auto, or fp8_e4m3 (one byte per value, less precise)."),
    ] = None,
    num_blocks: Annotated[
        int | None, typer.Option(min=1, help="Number of KV blocks in each worker's pool.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of one sequence.")
    ] = None,
    num_threads: Annotated[
        int | None,
        typer.Option(
            envvar="BATON_NUM_THREADS", min=1, help="CPU threads per worker; else cores / workers."
        ),
    ] = None,
    worker_arg: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", hidden=True, help="The same as --KEY VALUE."),
    ] = None,
    router_arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Any other setting of the router, such as tool-call-parser=hermes; may be "
            "repeated.",
        ),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Chat template, in Jinja, that takes the place of the checkpoint's. Of several "
            "models NAME=FILE,NAME=FILE.",
        ),
    ] = None,
    elastic: Annotated[
        bool,
        typer.Option("--elastic", help="Change workers' roles to balance the load of the pools."),
    ] = False,
    tls: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            metavar="DIR",
            help="Use TLS in the whole cluster, with the certificates of `baton certs DIR`.",
        ),
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for the log files.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the commands.")] = False,
    json: JsonLines = False,
) -> None:
    """Run a cluster on this machine until Ctrl-C.

    Every setting of a worker is an option, too: --max-num-seqs 32 for all workers,
    --prefill.max-num-seqs 32 for those of one role. `baton decode-worker --help` has them all.
    Workers of --workers are decode workers.

    With --json each line is an event: starting, status of a process, ready with its addresses,
    redis_died, stopping, stopped with its reason.

    \b
    Examples:
      baton up
      baton up Qwen/Qwen3-0.6B --workers 1
      baton up Qwen/Qwen3-0.6B --prefill 2 --decode 1
      baton up Qwen/Qwen3-VL-2B-Instruct --encode 1
      baton up --model chat=Qwen/Qwen3-8B --model Qwen/Qwen3-0.6B
      baton up --max-num-seqs 16 --decode.num-blocks 4096 --dry-run
      baton up --port 0 --json | jq --unbuffered 'select(.event == "ready").address'
    """
    from baton.cli.local import up as impl
    from baton.cli.local.local_cluster import LocalCluster
    from baton.cli.local.worker_counts import router_settings, worker_counts

    counts = worker_counts(encode, prefill, decode, workers)
    counts.check_settings(context.obj.of_role)
    flags = {
        "device": device,
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "num_blocks": num_blocks,
        "max_model_len": max_model_len,
        "num_threads": num_threads,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    if not dry_run and impl.listens_here(host):
        wanted = {"--port": port, "--admin-port": admin_port}
        impl.check_ports({**wanted, "--http-port": http_port if http else None})
    # That of the environment is read apart: the argument overrides it, and it may have spaces.
    source = context.get_parameter_source("model")
    is_given = source is not None and source.name == "COMMANDLINE"
    cluster = LocalCluster(
        impl.models_of(given_model, model if is_given else None),
        counts.prefill,
        counts.decode,
        port,
        redis_url,
        num_encode=counts.encode,
        admin_port=impl.admin_port_of(admin_port),
        http_port=impl.http_port_of(http_port) if http else None,
        worker_flags={
            **given,
            **impl.parse_flags(worker_arg or [], "--worker-arg"),
            **context.obj.common,
        },
        **{f"{role}_flags": flags for role, flags in context.obj.of_role.items()},
        router_flags=router_settings(
            {
                "host": host,
                **({"insecure": True} if insecure else {}),
                **({"elastic": True} if elastic else {}),
                **({"chat_template": chat_template} if chat_template else {}),
                **impl.parse_flags(router_arg or [], "--router-arg"),
            },
            workers,
        ),
        log_dir=log_dir,
        tls_dir=tls,
    )
    if dry_run:
        impl.print_commands(cluster)
        return
    report = impl.JsonLines() if json else impl.Text(console(), may_move_http=http_port is None)
    impl.run(cluster, report)


@command("Run", extra="worker", subject="a cluster on this machine")
def demo() -> None:
    """Run a small cluster, send three prompts, show the results.

    \b
    Example:
      baton demo
    """
    from baton.cli.local import demo as impl

    impl.run(console())


@command("Run")
def fetch(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Hub ids, ID@REVISION, or ID/FILE.gguf.")
    ],
) -> None:
    """Download models from the Hugging Face hub into its cache.

    Takes what workers read, the description and the weights, and prints the folders. HF_HOME names
    the cache, HF_TOKEN opens gated models.

    \b
    Examples:
      baton fetch Qwen/Qwen3-0.6B
      HF_HOME=/cache/huggingface baton fetch org/model@v2
      baton fetch Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf
    """
    from baton.models import DESCRIPTION, WEIGHTS, checkpoint_folder

    for model in models:
        print(checkpoint_folder(model, (*DESCRIPTION, *WEIGHTS)))


@command("Administer")
def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write them to.")],
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Name by which clients reach the router, besides localhost; may be repeated.",
        ),
    ] = None,
    tenant: Annotated[
        list[str] | None,
        typer.Option(help="Tenant that gets a client certificate; may be repeated."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="Days for which they are valid.")] = 365,
    secrets: Annotated[
        str,
        typer.Option(
            metavar="NAMESPACE",
            show_default=False,
            help="Print them as Secrets of Kubernetes in this namespace, for kubectl apply; the "
            "router's is for the names of its Services, too.",
        ),
    ] = "",
    release: Annotated[
        str, typer.Option(metavar="NAME", help="With --secrets: the release of the chart.")
    ] = "baton",
) -> None:
    """Create TLS certificates of all roles, for trials.

    They are signed by a new certificate authority. With --secrets, stderr has the values by which
    the chart takes the secrets.

    \b
    Examples:
      baton certs trial
      baton up --tls trial
      baton certs /etc/baton/tls --host baton.example.org --tenant acme
      baton certs trial --secrets llm --release demo | kubectl apply -f -
    """
    from baton.cli import certs as impl
    from baton.cli import kubernetes_secrets

    hosts = host or []
    if secrets:
        kubernetes_secrets.check_names(secrets, release)
        hosts = [*hosts, *kubernetes_secrets.service_hosts(secrets, release)]
    made = impl.make(folder, hosts, tenant or [], days)
    if secrets:
        print(kubernetes_secrets.manifests(folder, secrets, release))
        values = kubernetes_secrets.values(release).items()
        print(f"--set {','.join(f'{key}={value}' for key, value in values)}", file=sys.stderr)
    else:
        print("\n".join(map(str, made)))
