"""Commands that generate text: generate and chat."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.command import command
from baton.cli.options.common import DEFAULT_ADDRESS, Address, Json, ServedModel, Timeout, Token
from baton.cli.options.sampling import GroupedCommand, SamplingOptions, takes_sampling
from baton.cli.options.tls import TlsOptions, takes_tls


@command("Use", click_class=GroupedCommand)
@takes_sampling()
@takes_tls
def generate(
    *,
    prompt: Annotated[str, typer.Argument(help="Text to continue; -: read it from stdin.")],
    sampling: SamplingOptions,
    tls: TlsOptions,
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    model: ServedModel = "",
    stats: Annotated[
        bool, typer.Option("--stats", help="Print usage and timings on stderr.")
    ] = False,
    json: Json = False,
    timeout: Timeout = 120.0,
) -> None:
    """Generate a continuation of a text, streamed to stdout.

    It is the most likely one, unless an option or the model's generation_config.json asks for
    sampling.

    \b
    Examples:
      baton generate "def __enter__(self):" --max-tokens 21
      cat story.txt | baton generate - --temperature 0.8 --seed 1 --stop "The end"
      baton generate "The date: " --regex "[0-9]{4}-[0-9]{2}-[0-9]{2}"
      baton generate "A name: " --beam-width 4 --n 2 --json
    """
    from baton.cli import generate as impl
    from baton.cli.session import session

    params = sampling.params()
    if not json:
        impl.check_printable(params)
    text = sys.stdin.read() if prompt == "-" else prompt
    with session(address, timeout, token, tls.tls()) as client:
        generation = client.generate(text, params, model=model, priority=sampling.priority)
        if json:
            print(impl.as_json(generation, params))
            return
        finished = impl.show(generation, params)
        if stats:
            print(impl.stats_line(finished), file=sys.stderr)


@command("Use", click_class=GroupedCommand)
@takes_sampling(
    without=frozenset({"n", "logprobs", "prompt_logprobs"}),
    max_tokens=None,
)
@takes_tls
def chat(
    *,
    sampling: SamplingOptions,
    tls: TlsOptions,
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    model: ServedModel = "",
    system: Annotated[str, typer.Option(help="System message.")] = "",
    tools: Annotated[
        Path | None,
        typer.Option(
            help="JSON file of tools in the form of OpenAI's API. The next lines after a call are "
            "the results of its tools.",
            metavar="FILE",
        ),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            help="Image file (PNG, JPEG, WebP or GIF) of the first turn; may be repeated.",
            metavar="FILE",
        ),
    ] = None,
    clip: Annotated[
        list[Path] | None,
        typer.Option(
            help="Animated file (GIF, WebP or PNG) of the first turn, whose frames become images; "
            "may be repeated.",
            metavar="FILE",
        ),
    ] = None,
    timeout: Timeout = 120.0,
) -> None:
    """Talk with the model; each line is a turn.

    Answers are sampled as the model's generation_config.json says, else at temperature 0.7 and
    top-p 0.95. An answer may fill the model's length, unless --max-tokens is given; one that was
    cut says so on stderr. Reasoning is dim, or on stderr if stdout is no terminal. Ctrl-C stops an
    answer, Ctrl-D ends.

    \b
    Examples:
      baton chat --system "You write Python."
      baton chat --tools tools.json
      echo "How many circles are there?" | baton chat --image circles.png
      echo "What changes?" | baton chat --clip circles.gif
      echo 'Write a function `get` that returns the value of the key.' | baton chat --temperature 0
    """
    from baton.cli import chat as impl
    from baton.cli.session import session

    given = [] if tools is None else impl.read_tools(tools)
    images, clips = map(impl.read_image, image or ()), map(impl.read_clip, clip or ())
    params = sampling.params()
    with session(address, timeout, token, tls.tls()) as client:
        impl.run(client, params, system, sampling.priority, given, [*images, *clips], model)
