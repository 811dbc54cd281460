"""Separate pools against workers that do both, on the same resources: where they pay.

Latency: the shipped model on two workers of one thread each, a prefill and a decode worker or two
that do both. Long prompts arrive while four answers stream. A worker that does both computes a
chunk of a prompt in one step with its decodes: of 128 tokens, the default on CPUs, or of 512. The
two clusters take turns, and caches are off.

Goodput: the first recorded conversations, where the trace is there, on 16 simulated GPUs: 10 that
prefill and 6 that decode, or 16 that do both.
"""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise, product
from operator import truediv

from baton import AsyncClient, SamplingParams
from baton.cli.local.local_cluster import LocalCluster
from baton_simulator.machines import h200_8b
from baton_simulator.outcome import Objectives, outcome_of
from baton_simulator.setup import Setup
from baton_simulator.study import simulate
from baton_simulator.traces import read_mooncake, trace_folder
from bench.engine.parallel import in_processes
from bench.engine.steps import WORKER_FLAGS, random_prompt
from bench.report import Row

TRACE = "mooncake_conversation.jsonl"
NUM_REQUESTS = 3000
RATES = (4.0, 6.0, 8.0)
_SEPARATE, _BOTH = "separate", "both"
OBJECTIVES = (Objectives(5.0, 0.02), Objectives(5.0, 0.1))

CHUNKS = (128, 512)
NUM_STREAMS = 4
NUM_PROMPTS = 4
PROMPT_LENGTH = 1500
PROMPT_INTERVAL = 0.5
_ANSWER = SamplingParams(max_tokens=400, ignore_eos=True)
_SHORT_ANSWER = SamplingParams(max_tokens=4, ignore_eos=True)


def run(repeats: int) -> list[Row]:
    """Latencies, then goodput at each rate; a ratio above 1 is in favour of separate pools."""
    rows: list[Row] = []
    for chunk in CHUNKS:
        flags = {**WORKER_FLAGS, "prefix_caching": False, "max_num_batched_tokens": chunk}
        with (
            LocalCluster(worker_flags=flags) as separate,
            LocalCluster(num_prefill=0, num_decode=2, worker_flags=flags) as both,
        ):
            rows += asyncio.run(_latency_rows(separate.address, both.address, chunk, repeats))
    return [*rows, *goodput_rows(RATES)]


async def _latency_rows(separate: str, both: str, chunk: int, repeats: int) -> list[Row]:
    async with AsyncClient(separate) as one, AsyncClient(both) as other:
        rounds = [(await _latencies(one), await _latencies(other)) for _ in range(repeats + 1)]
    rows = []
    for case in rounds[0][0]:  # of the first one nothing counts: it connects
        values, references = zip(*((a[case], b[case]) for a, b in rounds[1:]), strict=True)
        value, reference = statistics.median(values), statistics.median(references)
        # The two halves of a round are seconds apart: other load on the machine meets both.
        ratio = statistics.median(map(truediv, references, values))
        case = f"chunks of {chunk}: {case}"
        rows.append(Row(case, value, "ms", "2 that do both", reference, ratio, None))
    return rows


async def _latencies(client: AsyncClient) -> dict[str, float]:
    """Returns milliseconds by case, of answers that stream while long prompts arrive."""
    streams = [_stream(client, index) for index in range(NUM_STREAMS)]
    prompts = [_ttft(client, index) for index in range(NUM_PROMPTS)]
    times, ttfts = await asyncio.gather(asyncio.gather(*streams), asyncio.gather(*prompts))
    gaps = [later - earlier for each in times for earlier, later in pairwise(each)]
    hundredths = statistics.quantiles(gaps, n=100)
    figures = {
        "ITL p50": hundredths[49],
        "ITL p99": hundredths[98],
        "TTFT of prompts": statistics.median(ttfts),
    }
    return {case: 1e3 * seconds for case, seconds in figures.items()}


async def _stream(client: AsyncClient, index: int) -> list[float]:
    """Returns when each token of an answer came."""
    times: list[float] = []
    async for chunk in client.generate(random_prompt(16, index), _ANSWER):
        times += [time.perf_counter()] * len(chunk.token_ids)
    return times


async def _ttft(client: AsyncClient, index: int) -> float:
    """Returns the time to first token of a long prompt."""
    await asyncio.sleep(PROMPT_INTERVAL * (index + 0.5))
    began = time.perf_counter()
    generation = client.generate(random_prompt(PROMPT_LENGTH, 100 + index), _SHORT_ANSWER)
    times = [time.perf_counter() async for _ in generation]
    return times[0] - began


def goodput_rows(rates: Iterable[float]) -> Iterator[Row]:
    """Simulates both clusters at each rate; nothing without the trace."""
    path = trace_folder() / TRACE
    if not path.exists():
        return
    goodput = in_processes(__name__, product(map(str, rates), (_SEPARATE, _BOTH)))
    for of_separate, of_both in zip(goodput[::2], goodput[1::2], strict=True):
        for separate, both, objectives in zip(of_separate, of_both, OBJECTIVES, strict=True):
            offered, value = separate
            bounds = f"{offered:.1f} requests/s, ITL {objectives.itl * 1e3:.0f} ms"
            _, reference = both
            ratio = value / reference
            yield Row(f"{bounds}: in time", value, "%", "16 that do both", reference, ratio, None)


def _goodput(rate: float, *, is_colocated: bool) -> list[tuple[float, float]]:
    """Returns for each of `OBJECTIVES` the requests per second that come at a rate, and the
    percentage of them that are in time."""
    requests = list(islice(read_mooncake(trace_folder() / TRACE), NUM_REQUESTS))
    setup = Setup(machine=h200_8b(), num_prefill=10, num_decode=6, is_colocated=is_colocated)
    cluster = simulate(setup, requests, rate)
    outcomes = [outcome_of(cluster, "", rate, objectives) for objectives in OBJECTIVES]
    return [(one.offered, 100 * one.goodput / one.offered) for one in outcomes]


if __name__ == "__main__":
    print(json.dumps(_goodput(float(sys.argv[1]), is_colocated=sys.argv[2] == _BOTH)))
