"""The command `baton simulate`."""

from pathlib import Path
from typing import Annotated

import typer

from baton.cli.command import command
from baton.cli.options.common import JsonLines


@command("Plan", extra="worker", subject="the simulator")
def simulate(
    trace: Annotated[
        Path,
        typer.Option(help="A recorded workload: Mooncake's format (.jsonl) or Azure's (.csv)."),
    ],
    prefill: Annotated[int, typer.Option(min=1, help="Prefill workers.")] = 8,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 8,
    encode: Annotated[
        int, typer.Option(min=0, help="Encode workers, for the images of a multimodal trace.")
    ] = 0,
    image_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="Tokens of each image that a trace counts (NumImages of Azure's); "
            "0: its images are text.",
        ),
    ] = 0,
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
            "h100-gemma-4b, h100-llava-7b or h100-qwen-vl-7b, which take images, "
            "or a file with what `python -m bench steps --json` printed.",
        ),
    ] = "h200-8b",
    deadlines: Annotated[
        bool, typer.Option("--deadlines", help="Refuse requests that would be late.")
    ] = False,
    admission: Annotated[
        str,
        typer.Option(
            help="Admission by the decode workers' load: none (all requests), naive (load now), "
            "predicted (load at the end of the prefill)."
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
    json: JsonLines = False,
) -> None:
    """Serve a recorded workload in simulated time.

    Router, scheduler and block pools are the real ones; what a step takes is a model. Colocated
    workers, each of which prefills and decodes, are simulated beside, on as many machines.

    \b
    Examples:
      baton simulate --trace conversation_trace.jsonl --prefill 8 --decode 8 --rate 4 --rate 6
      baton simulate --trace trace.csv --policy baton --policy round-robin --report out.html
      baton simulate --trace images.csv --image-tokens 256 --latency-model h100-gemma-4b --encode 2
    """
    from baton_simulator import cli as impl

    study = impl.study_of(
        num_prefill=prefill,
        num_decode=decode,
        num_encode=encode,
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
    rows = impl.read_rows(trace, limit, image_tokens)
    impl.run(study, rows, trace.name, report, as_json=json)
