"""`baton demo`: a local cluster, three prompts over its public API, and their handoffs."""

import time
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from baton.cli.local.display import status_display
from baton.cli.local.local_cluster import LocalCluster
from baton.cli.local.signals import interrupted_by_signals
from baton.client.client import Accepted, Client, Finished, Message, Prompt
from baton.models import INTRODUCTION
from baton.sampling import SamplingParams

_ANSWER_TIMEOUT = 15.0
_PARAMS = SamplingParams(max_tokens=64, stop=("\n\ndef",))  # an answer is one function

_PREFIX = '''\
"""Helpers for reading and writing small files of settings."""

import json
import os


def read_settings(path):
    """Return the settings in the file as a dictionary."""
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def write_settings(path, settings):
    """Write the settings, in the order of their names."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(settings, file, indent=2, sort_keys=True)


'''

_QUESTION = "Write a function `get` that returns the value of the key."
PROMPTS: tuple[tuple[str, str, Prompt], ...] = (
    ("1", "a Python file to continue", _PREFIX + "def read_file(path):\n"),
    ("2", "the same file, another ending", _PREFIX + "def read_lines(path):\n"),
    ("3", "a conversation", [Message("user", _QUESTION)]),
)


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """Answer to one prompt, with its timings.

    Attributes:
        time_to_first_token: seconds, measured by the client.
        inter_token_latency: seconds between tokens on average; None with fewer than two.
    """

    name: str
    accepted: Accepted
    finished: Finished
    time_to_first_token: float
    inter_token_latency: float | None


def run(console: Console) -> None:
    """Runs the demo, and stops all of it however it ends. Raises the error of a failed prompt."""
    # On the CPU, so that it is the same everywhere; a small pool starts faster.
    # Every prompt is computed by a prefill worker, since the demo shows the KV transfer.
    cluster = LocalCluster(
        worker_flags={"device": "cpu", "kv_cache_bytes": 64 * 2**20},
        router_flags={"conditional_disaggregation": False},
    )
    with interrupted_by_signals():
        try:
            with status_display(console) as on_status:
                cluster.start(on_status=on_status)
            with Client(cluster.address, timeout=_ANSWER_TIMEOUT) as client:
                answers = [_ask(client, console, *prompt) for prompt in PROMPTS]
            console.print(handoff(answers[0]), table(answers), INTRODUCTION, highlight=False)
        finally:
            cluster.stop()


def _ask(client: Client, console: Console, name: str, what: str, prompt: Prompt) -> TimedAnswer:
    """Streams one answer to the console."""
    console.rule(f"{name}: {what}", align="left")
    moments: list[float] = []
    began = time.monotonic()
    with client.generate(prompt, _PARAMS) as generation:
        for chunk in generation:
            moments += [time.monotonic()] * len(chunk.token_ids)
            console.out(chunk.text, end="", highlight=False)
    console.print()
    assert generation.finished is not None, "the stream was complete"
    between = (moments[-1] - moments[0]) / (len(moments) - 1) if len(moments) > 1 else None
    return TimedAnswer(name, generation.accepted, generation.finished, moments[0] - began, between)


def handoff(answer: TimedAnswer) -> str:
    """Returns a sentence about the KV blocks that moved for an answer."""
    usage, placement = answer.finished.usage, answer.accepted.placement
    return (
        f"{placement.prefill_worker} computed {usage.num_prompt_tokens} tokens and handed "
        f"{usage.num_transferred_blocks} KV blocks ({usage.num_transferred_bytes:,} bytes) to "
        f"{placement.decode_worker}, which wrote {usage.num_output_tokens} tokens."
    )


def table(answers: list[TimedAnswer]) -> Table:
    """Returns a table with a row for each answer."""
    result = Table()
    for column in ("prompt", "prefill by", "decode by"):
        result.add_column(column)
    for column in ("TTFT", "ITL", "tokens in", "cached", "tokens out", "blocks", "bytes"):
        result.add_column(column, justify="right")
    for answer in answers:
        result.add_row(*_cells(answer))
    result.caption = (
        "TTFT: time to first token. ITL: mean time between tokens. cached: prompt tokens that the\n"
        "prefill worker had computed before. blocks, bytes: KV cache handed over."
    )
    result.caption_justify = "left"
    return result


def _cells(answer: TimedAnswer) -> list[str]:
    usage, placement = answer.finished.usage, answer.accepted.placement
    between = answer.inter_token_latency
    return [
        answer.name,
        placement.prefill_worker or "-",
        placement.decode_worker,
        f"{answer.time_to_first_token * 1000:.0f} ms",
        "-" if between is None else f"{between * 1000:.1f} ms",
        str(usage.num_prompt_tokens),
        str(usage.num_cached_prompt_tokens),
        str(usage.num_output_tokens),
        str(usage.num_transferred_blocks),
        f"{usage.num_transferred_bytes:,}",
    ]
