"""Separate pools against workers that do both, on the same resources: where they pay.

Latency: the shipped model on two workers of one thread each, a prefill and a decode worker or two
that do both. Four answers stream, alone and while long prompts arrive. Workers that do both compute
a prompt in chunks of 128 tokens beside their decodes, which is the default on CPUs. The two
clusters take turns, and caches are off.

Goodput: the first recorded conversations, where the trace is there, on 16 simulated GPUs: 10 that
prefill and 6 that decode, or 16 that do both.
"""

import asyncio
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice, pairwise

from baton import AsyncClient, SamplingParams
from baton.cli.local_cluster import LocalCluster
from baton_simulator.machines import h200_8b
from baton_simulator.outcome import Objectives, outcome_of
from baton_simulator.setup import Setup
from baton_simulator.study import simulate
from baton_simulator.traces import read_mooncake, trace_folder
from bench.report import Row, medians
from bench.steps import WORKER_FLAGS, random_prompt

TRACE = "mooncake_conversation.jsonl"
NUM_REQUESTS = 3000
RATES = (4.0, 6.0, 8.0)
TIGHT, LOOSE = Objectives(5.0, 0.02), Objectives(5.0, 0.1)

NUM_STREAMS = 4
NUM_PROMPTS = 4
PROMPT_LENGTH = 1500
PROMPT_INTERVAL = 0.5
_FLAGS = {**WORKER_FLAGS, "prefix_caching": False}
_ANSWER = SamplingParams(max_tokens=400, ignore_eos=True)
_SHORT_ANSWER = SamplingParams(max_tokens=4, ignore_eos=True)


def run(repeats: int) -> list[Row]:
    """Latencies, then goodput at each rate; a ratio above 1 is in favour of separate pools."""
    with (
        LocalCluster(worker_flags=_FLAGS) as separate,
        LocalCluster(num_prefill=0, num_decode=2, worker_flags=_FLAGS) as both,
    ):
        rows = asyncio.run(_latency_rows(separate.address, both.address, repeats))
    return [*rows, *goodput_rows(RATES)]


async def _latency_rows(separate: str, both: str, repeats: int) -> list[Row]:
    figures: tuple[dict[str, list[float]], dict[str, list[float]]] = ({}, {})
    async with AsyncClient(separate) as one, AsyncClient(both) as other:
        for i in range(repeats + 1):
            for client, found in zip((one, other), figures, strict=True):
                measured = await _streams(client, 0) | await _streams(client, NUM_PROMPTS)
                for case, milliseconds in measured.items() if i > 0 else ():  # the first connects
                    found.setdefault(case, []).append(milliseconds)
    values, references = map(medians, figures)
    return [
        Row(case, value, "ms", "2 that do both", references[case], references[case] / value, None)
        for case, value in values.items()
    ]


async def _streams(client: AsyncClient, num_prompts: int) -> dict[str, float]:
    """Returns milliseconds by case, of streams beside which `num_prompts` long prompts arrive."""
    gaps: list[float] = []
    ttfts: list[float] = []

    async def stream(index: int) -> None:
        times: list[float] = []
        async for chunk in client.generate(random_prompt(16, index), _ANSWER):
            times += [time.perf_counter()] * len(chunk.token_ids)
        gaps.extend(1e3 * (later - earlier) for earlier, later in pairwise(times))

    async def prompt(index: int) -> None:
        await asyncio.sleep(PROMPT_INTERVAL * (index + 0.5))
        began = time.perf_counter()
        generation = client.generate(random_prompt(PROMPT_LENGTH, 100 + index), _SHORT_ANSWER)
        times = [time.perf_counter() async for _ in generation]
        ttfts.append(1e3 * (times[0] - began))

    await asyncio.gather(*map(stream, range(NUM_STREAMS)), *map(prompt, range(num_prompts)))
    hundredths = statistics.quantiles(gaps, n=100)
    beside = "long prompts arrive" if num_prompts else "streams alone"
    found = {f"{beside}: ITL p50": hundredths[49], f"{beside}: ITL p99": hundredths[98]}
    return found | ({f"{beside}: their TTFT p50": statistics.median(ttfts)} if ttfts else {})


def goodput_rows(rates: Iterable[float]) -> Iterator[Row]:
    """Simulates both clusters at each rate; nothing without the trace."""
    path = trace_folder() / TRACE
    if not path.exists():
        return
    requests = list(islice(read_mooncake(path), NUM_REQUESTS))
    setup = Setup(machine=h200_8b(), num_prefill=10, num_decode=6)
    for rate in rates:
        clusters = [
            simulate(one, requests, rate) for one in (setup, replace(setup, is_colocated=True))
        ]
        for objectives in (TIGHT, LOOSE):
            separate, both = (outcome_of(c, "", rate, objectives) for c in clusters)
            bounds = f"{separate.offered:.1f} requests/s, ITL {objectives.itl * 1e3:.0f} ms"
            value, reference = (100 * o.goodput / o.offered for o in (separate, both))
            ratio = value / reference
            yield Row(f"{bounds}: in time", value, "%", "16 that do both", reference, ratio, None)
