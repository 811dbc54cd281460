"""Answers that stream while long prompts arrive, over HTTP: separate pools against one worker that
does both, on the same cores.

Four clients stream answers to short prompts, one after the other, from a random Llama of 80 M
parameters in float32, while prompts of 1,000 tokens arrive at equal intervals, whether or not those
before are answered. The interval is such that one worker, were it else idle, would compute them for
a share of the time. Contenders take turns: a prefill and a decode worker of Baton, a decode worker
of Baton alone, and where the command `vllm` is on the path a server of vLLM's CPU build, with its
defaults and with steps of 128 tokens. Caches are off. What counts is the time between two events of
a stream (ITL), the time to first token of the long prompts (TTFT) and of the streams, and goodput:
the requests per second whose TTFT and longest gap both keep an objective.
"""

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from operator import truediv
from pathlib import Path

import httpx

from baton.cli.local.local_cluster import LocalCluster
from bench.peers import vllm_cpu
from bench.report import Row
from bench.workload import VOCAB_SIZE, save_model

# Of the time, for which one worker would compute the long prompts.
HEADLINE = 0.5
SHARES = (HEADLINE, 0.25, 0.125)
NUM_LONG_PROMPTS = 6  # of one measurement at the share of the headline, and fewer at the others
NUM_STREAMS = 4
PROMPT_LENGTH = 1000
SHORT_PROMPT_LENGTH = 32
ANSWER_LENGTH = 64

MAX_TTFT, MAX_GAP = 4.0, 0.2  # objectives of goodput, in seconds

ITL_AIM, TTFT_AIM = 3.0, 1.0

_SIZES = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}
_WORKER_FLAGS = {"prefix_caching": False, "num_blocks": 1024, "device": "cpu", "dtype": "float32"}
_ANSWER_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Answered:
    """One request: when it was sent, and when each event of its stream came, in seconds."""

    sent: float
    events: Sequence[float]

    @property
    def ttft(self) -> float:
        return self.events[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.events)]

    @property
    def is_in_time(self) -> bool:
        return self.ttft <= MAX_TTFT and max(self.gaps, default=0.0) <= MAX_GAP


def run(repeats: int) -> list[Row]:
    """Compares at each share; a ratio above 1 is in favour of separate pools. `repeats` are those
    of the headline; of other shares a third."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save_model(folder, **_SIZES)
        contenders = dict(_contenders(folder, stack))
        return asyncio.run(_compare(contenders, repeats))


def _contenders(folder: Path, stack: ExitStack) -> Iterator[tuple[str, str]]:
    """Starts all contenders; yields the name and the HTTP address of each, separate pools first."""
    for name, num_prefill in (("separate pools", 1), ("one worker", 0)):
        cluster = LocalCluster(
            model=f"model={folder}",
            num_prefill=num_prefill,
            http_port=0,
            worker_flags=_WORKER_FLAGS,
        )
        yield name, stack.enter_context(cluster).http_address
    if vllm_cpu.is_installed():
        yield "vLLM", stack.enter_context(vllm_cpu.server(folder))
        steps = ["--max-num-batched-tokens", "128"]
        yield "vLLM, steps of 128", stack.enter_context(vllm_cpu.server(folder, *steps))


async def _compare(contenders: dict[str, str], repeats: int) -> list[Row]:
    rows: list[Row] = []
    # Of the first ones nothing counts: they connect, and compute what is computed once.
    alone = {name: await _long_prompt_seconds(address) for name, address in contenders.items()}
    ours, *others = contenders
    seconds = alone[others[0]]
    window = seconds / HEADLINE * NUM_LONG_PROMPTS
    for share in SHARES:
        rounds = [
            {n: await _measured(a, window, seconds / share) for n, a in contenders.items()}
            for _ in range(repeats if share == HEADLINE else -(-repeats // 3))
        ]
        for other in others:
            rows += _rows(share, other, [(one[ours], one[other]) for one in rounds])
    return rows


async def _long_prompt_seconds(address: str) -> float:
    """Returns the time to first token of a long prompt on a server that is else idle."""
    async with httpx.AsyncClient(base_url=address, timeout=_ANSWER_SECONDS) as client:
        answered = [await _long_answer(client, index) for index in range(3)]
    return min(one.ttft for one in answered)


def _rows(
    share: float, other: str, rounds: Sequence[tuple[dict[str, float], dict[str, float]]]
) -> Iterator[Row]:
    aims = {"ITL p99": ITL_AIM, "TTFT p50": TTFT_AIM} if share == HEADLINE else {}
    for case in rounds[0][0]:
        values, references = zip(*((ours[case], its[case]) for ours, its in rounds), strict=True)
        is_rate = case == "goodput"
        # The halves of a round are seconds apart: other load on the machine meets both.
        ratios = map(truediv, values, references) if is_rate else map(truediv, references, values)
        yield Row(
            f"long prompts {share:.1%}: {case}",
            statistics.median(values),
            "requests/s" if is_rate else "ms",
            other,
            statistics.median(references),
            statistics.median(ratios),
            aims.get(case),
        )


async def _measured(address: str, window: float, interval: float) -> dict[str, float]:
    """Returns the figures of one window of load, in seconds, with a long prompt at each interval:
    milliseconds, and requests per second."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=address, timeout=_ANSWER_SECONDS, limits=limits
    ) as client:
        began = time.perf_counter()
        streams = [_stream(client, began + window, index) for index in range(NUM_STREAMS)]
        answered, long = await asyncio.gather(
            asyncio.gather(*streams), _long_prompts(client, round(window / interval), interval)
        )
        elapsed = time.perf_counter() - began
    short = [one for each in answered for one in each]
    gaps = sorted(1e3 * gap for one in short for gap in one.gaps)
    return {
        "ITL p50": statistics.median(gaps),
        "ITL p99": gaps[int(0.99 * len(gaps))],
        "TTFT p50": 1e3 * statistics.median(one.ttft for one in long),
        "stream TTFT p50": 1e3 * statistics.median(one.ttft for one in short),
        "goodput": sum(one.is_in_time for one in [*short, *long]) / elapsed,
    }


async def _stream(client: httpx.AsyncClient, end: float, index: int) -> list[Answered]:
    """Streams answers one after the other until `end`."""
    source, answered = random.Random(index), []
    while time.perf_counter() < end:
        answered.append(await _answer(client, source, SHORT_PROMPT_LENGTH, ANSWER_LENGTH))
    return answered


async def _long_prompts(
    client: httpx.AsyncClient, num_prompts: int, interval: float
) -> list[Answered]:
    """Sends long prompts at the interval, the first after half of one."""

    async def later(index: int) -> Answered:
        await asyncio.sleep(interval * (index + 0.5))
        return await _long_answer(client, index)

    return await asyncio.gather(*map(later, range(num_prompts)))


async def _long_answer(client: httpx.AsyncClient, index: int) -> Answered:
    return await _answer(client, random.Random(1000 + index), PROMPT_LENGTH, 4)


async def _answer(
    client: httpx.AsyncClient, source: random.Random, prompt_length: int, max_tokens: int
) -> Answered:
    """Streams one answer to a prompt of random tokens."""
    prompt = [source.randrange(3, VOCAB_SIZE) for _ in range(prompt_length)]
    body = {"model": "model", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0}
    body |= {"stream": True, "ignore_eos": True}
    sent = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        events = [
            time.perf_counter()
            async for line in response.aiter_lines()
            if line.startswith("data: {") and json.loads(line[6:])["choices"]
        ]
    return Answered(sent, events)
