"""Step time and serving overhead: the measurements that the simulator is fitted to.

The shipped model on the CPU, one thread for each process. Steps are measured in an engine of this
process; first tokens, handoffs and served steps on an idle cluster of one prefill and one decode
worker. Of each case stands beside it what the fitted model says. `--json` into a file makes a
`--latency-model` of `baton simulate`.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Iterator

from baton import AsyncClient, SamplingParams
from baton.cli.local.local_cluster import LocalCluster
from baton.engine import LLM, EngineConfig
from baton.engine.request import EngineRequest
from baton.models import locate
from baton_simulator.fit import (
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    decodes,
    fit_machine,
    fit_steps,
    load_of,
    prompt_steps,
)
from baton_simulator.latency import Machine
from bench.report import Row, medians

VOCAB_SIZE = 3072
SHORT_PROMPTS = (8, 32, 64)
LONG_PROMPT = 1024
BATCHES = (1, 2, 4, 8, 16)
CONTEXTS = (64, 512)
SERVED = (1, 4, 12)
SERVED_CONTEXT = 64
FIRST_TOKENS = (64, 400, 1000)
NUM_STEPS = 24

WORKER_FLAGS: dict[str, object] = {"device": "cpu", "dtype": "float32", "num_threads": 1}


def run(repeats: int) -> list[Row]:
    """Every case, against the fitted model's figure."""
    measured = measure(repeats)
    machine, steps = fit_machine(measured), fit_steps(measured)
    rows = []
    for case, value in measured.items():
        load = load_of(case)
        if load is not None:
            fitted = float(steps.seconds(load)[0]) * 1e3
        else:
            fitted = _served(machine, case) or value
        unit = "tokens" if case.startswith("pool") else "ms"
        rows.append(Row(case, value, unit, "the fitted model", fitted, fitted / value, None))
    return rows


def measure(repeats: int) -> dict[str, float]:
    """Medians in milliseconds, and the tokens that a worker's pool holds."""
    with LocalCluster(worker_flags=WORKER_FLAGS) as cluster:
        served = asyncio.run(_measure_cluster(cluster.address, repeats))
    engine = _engine(MAX_NUM_BATCHED_TOKENS)
    wide = _engine(2 * max(BATCHES) * max(CONTEXTS))  # takes all prompts in one step
    figures: dict[str, list[float]] = {}
    for _ in range(repeats):
        for case, value in (*_measure_prompts(engine), *_measure_decodes(wide)):
            figures.setdefault(case, []).append(value)
    num_tokens = engine.core.cache.pools[0].num_blocks * engine.core.config.block_size
    return {**medians(figures), **served, "pool: tokens": float(num_tokens)}


def random_prompt(length: int, seed: int) -> list[int]:
    """Tokens that no other seed gives."""
    source = random.Random(seed)
    return [source.randrange(4, VOCAB_SIZE) for _ in range(length)]


# An engine alone.


def _engine(max_num_batched_tokens: int) -> LLM:
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        num_threads=1,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    return LLM.from_pretrained(locate("tiny"), config)


def _measure_prompts(engine: LLM) -> Iterator[tuple[str, float]]:
    for length in SHORT_PROMPTS:
        (seconds,) = _prompt_times(engine, length)
        yield f"step: {length} prompt tokens behind 0", seconds
    times = _prompt_times(engine, LONG_PROMPT)
    for i, milliseconds in enumerate(times):
        behind = i * MAX_NUM_BATCHED_TOKENS
        yield f"step: {MAX_NUM_BATCHED_TOKENS} prompt tokens behind {behind}", milliseconds


def _measure_decodes(engine: LLM) -> Iterator[tuple[str, float]]:
    for context in CONTEXTS:
        for batch in BATCHES:
            middle = context + NUM_STEPS // 2
            yield f"step: {batch} decodes behind {middle}", _decode_time(engine, batch, context)


def _prompt_times(engine: LLM, length: int) -> list[float]:
    """Returns the seconds of each step of one prompt."""
    engine.core.scheduler.flush_cache()
    _add(engine, 0, length, max_tokens=1)
    return _steps(engine)


def _decode_time(engine: LLM, batch: int, context: int) -> float:
    """The median of steps in which all decode: the first one has computed all prompts."""
    engine.core.scheduler.flush_cache()
    for i in range(batch):
        _add(engine, i, context, max_tokens=NUM_STEPS + 1)
    _, *times = _steps(engine)
    assert len(times) == NUM_STEPS, "not all decode together"
    return statistics.median(times)


def _add(engine: LLM, number: int, length: int, max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    token_ids = tuple(random_prompt(length, number))
    engine.core.add(EngineRequest(f"measured-{number}", token_ids, params, length))


def _steps(engine: LLM) -> list[float]:
    times = []
    while engine.core.has_work:
        start = time.perf_counter()
        num_tokens = len(engine.core.step().updates)
        if num_tokens:
            times.append((time.perf_counter() - start) * 1e3)
    return times


# An idle cluster.


async def _measure_cluster(address: str, repeats: int) -> dict[str, float]:
    figures: dict[str, list[float]] = {}
    async with AsyncClient(address) as client:
        for i in range(repeats + 1):
            for length in FIRST_TOKENS:
                times = await _served_times(client, length, NUM_STEPS, 1000 * i + length)
                if i:
                    first, second = times[0], times[1] - times[0]
                    figures.setdefault(f"first token: {length} prompt tokens", []).append(first)
                    figures.setdefault(f"handoff: {length} tokens", []).append(second)
            for batch in SERVED:
                if i:
                    case = f"served step: {batch} decodes behind {SERVED_CONTEXT}"
                    figures.setdefault(case, []).append(await _served_gap(client, batch, i))
    return medians(figures)


async def _served_gap(client: AsyncClient, batch: int, seed: int) -> float:
    """Milliseconds between tokens while so many streams run."""
    half = SERVED_CONTEXT // 2  # so that in the mean they are behind twice as many
    streams = await asyncio.gather(
        *(_served_times(client, half, 2 * half, seed * 100_000 + i) for i in range(batch))
    )
    gaps = [(times[-1] - times[half // 2]) / (len(times) - 1 - half // 2) for times in streams]
    return statistics.median(gaps)


async def _served_times(
    client: AsyncClient, length: int, max_tokens: int, seed: int
) -> list[float]:
    """Returns the arrival of each token, in milliseconds after the request."""
    start, times = time.perf_counter(), []
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    async for chunk in client.generate(random_prompt(length, seed), params):
        times += [(time.perf_counter() - start) * 1e3] * len(chunk.token_ids)
    return times


def _served(machine: Machine, case: str) -> float | None:
    """Returns the fitted machine's prediction for a case of the cluster, in milliseconds."""
    kind, _, rest = case.partition(": ")
    number = rest.split(" ", 1)[0]
    if kind == "served step":
        return _milliseconds(machine, int(number))
    if kind == "first token":
        steps = sum(float(machine.steps.seconds(s)[0]) for s in prompt_steps(int(number)))
        return (machine.network.per_request + steps) * 1e3
    if kind == "handoff":
        network = machine.network
        moved = network.per_transfer + int(number) * network.per_token
        step = float(machine.steps.seconds(decodes(1, int(number)))[0])
        return (moved + step) * 1e3
    return None


def _milliseconds(machine: Machine, batch: int) -> float:
    return float(machine.steps.seconds(decodes(batch, SERVED_CONTEXT))[0]) * 1e3


assert max(BATCHES) <= MAX_NUM_SEQS
