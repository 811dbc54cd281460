"""Speed of the simulator, and its error against a real cluster.

Speed: half an hour of the conversation trace on 1,000 workers, where the trace is there, and what
running alike steps in one go brings on a made-up workload. Error: the shipped model on one prefill
and one decode worker of real processes, at three loads, against the simulator with a machine that
was fitted to the idle cluster just before (`bench.engine.steps`). The load is the part of the rate
at which the simulated cluster could serve all requests if they came at once. In between, what
admission does to prefill and decode where too much is asked (`baton_simulator.oscillation`).
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile

import numpy as np

from baton import AsyncClient, SamplingParams
from baton.cli.local.local_cluster import LocalCluster
from baton.cluster.prefix import hash_chain
from baton_simulator.cluster import Cluster
from baton_simulator.disaggregated import Disaggregated
from baton_simulator.fit import fit_machine
from baton_simulator.gaps import FloatArray, Gaps
from baton_simulator.job import Job
from baton_simulator.latency import Machine
from baton_simulator.machines import h200_8b
from baton_simulator.oscillation import swings
from baton_simulator.outcome import Objectives
from baton_simulator.setup import Setup
from baton_simulator.study import simulate
from baton_simulator.traces import TraceRow, read_mooncake, trace_folder
from bench.engine.steps import VOCAB_SIZE, WORKER_FLAGS, measure
from bench.report import Row

TRACE = "mooncake_conversation.jsonl"
NUM_WORKERS = 1000
TRACE_SECONDS = 1800.0
AIM_SECONDS = 150.0
NUM_SYNTHETIC = 100

LOADS = (0.3, 0.6, 0.9)
NUM_REQUESTS = 60
BLOCK_SIZE = 16
SHARES = (0.5, 0.9)


def run(repeats: int) -> list[Row]:
    """Speed, what admission does to the evenness of load, then the error at each load."""
    return [*_speed_rows(), *_swing_rows(), *_error_rows(repeats)]


# Speed.


def _speed_rows() -> list[Row]:
    half = NUM_WORKERS // 2
    rows = []
    path = trace_folder() / TRACE
    if path.exists():
        setup = Setup(machine=h200_8b(), num_prefill=half, num_decode=half)
        requests = takewhile(lambda row: row.arrival < TRACE_SECONDS, read_mooncake(path))
        seconds = _seconds_of(setup, list(requests))
        case = f"{NUM_WORKERS:,} workers, half an hour of conversations"
        aim = AIM_SECONDS / seconds
        rows.append(Row(case, seconds, "s of one core", "the aim", AIM_SECONDS, aim, 1.0))
    setup = Setup(machine=h200_8b(), num_prefill=4, num_decode=4)
    fast, slow = (
        _seconds_of(replace(setup, fast_forward=fast_forward), _synthetic())
        for fast_forward in (True, False)
    )
    case = f"{NUM_SYNTHETIC} requests on 4 + 4 workers"
    rows.append(Row(case, fast, "s of one core", "single steps", slow, slow / fast, None))
    return rows


def _seconds_of(setup: Setup, rows: Sequence[TraceRow]) -> float:
    start = time.process_time()
    simulate(setup, rows)
    return time.process_time() - start


def _synthetic() -> list[TraceRow]:
    """Prompts of 1 to 24 blocks, a second apart in the mean."""
    source, now, rows = random.Random(0), 0.0, []
    for i in range(NUM_SYNTHETIC):
        num_blocks = source.randint(1, 24)
        ids = (0, *(1 + 100 * i + b for b in range(num_blocks - 1)))
        rows.append(TraceRow(now, 512 * num_blocks, source.randint(20, 700), ids))
        now += source.expovariate(1.0)
    return rows


# Admission.


def _swing_rows() -> list[Row]:
    """Naive early rejection against the prediction, under the same load."""
    found = swings(Objectives(10.0, 0.1))
    naive, predicted = found["naive"], found["predicted"]
    against = "predicted occupancy"
    return [
        Row(
            "naive rejection: standard deviation of the decode load by its mean",
            naive.unevenness,
            "",
            against,
            predicted.unevenness,
            predicted.unevenness / naive.unevenness,
            None,
        ),
        Row(
            "naive rejection: goodput",
            naive.goodput,
            "requests/s",
            against,
            predicted.goodput,
            naive.goodput / predicted.goodput,
            None,
        ),
    ]


# The error.


@dataclass(frozen=True, slots=True)
class _Request:
    """One request of the check: what is asked, and when, in seconds of a cluster that could just
    serve all."""

    token_ids: list[int]
    max_tokens: int
    arrival: float


@dataclass(frozen=True, slots=True)
class _Figures:
    """Percentiles 50 and 90 in milliseconds."""

    ttft: tuple[float, ...]
    itl: tuple[float, ...]


def _error_rows(repeats: int) -> list[Row]:
    machine = fit_machine(measure(repeats))
    at_once = _simulated(machine, _requests(0), load=float("inf"))
    capacity = NUM_REQUESTS / at_once.clock.now
    rows = []
    with LocalCluster(worker_flags=WORKER_FLAGS) as cluster:
        asyncio.run(_served(cluster.address, _requests(1)[:10], capacity))  # unmeasured
        for seed, load in enumerate(LOADS, 2):
            requests = _requests(seed)
            real = asyncio.run(_served(cluster.address, requests, load * capacity))
            simulated = _figures_of(_simulated(machine, requests, load * capacity))
            for name in ("ttft", "itl"):
                for i, share in enumerate(SHARES):
                    case = f"{load:.0%} load: {name.upper()} p{share * 100:.0f}"
                    value, reference = getattr(simulated, name)[i], getattr(real, name)[i]
                    rows.append(_error_row(case, value, reference))
    return rows


def _error_row(case: str, value: float, reference: float) -> Row:
    error = value / reference - 1
    near = min(value / reference, reference / value)
    return Row(f"{case} ({error:+.0%})", value, "ms", "the real cluster", reference, near, None)


def _requests(seed: int) -> list[_Request]:
    """Prompts of 40 to 400 tokens, of which one in three begins like others, at random times that
    are 1 apart in the mean."""
    source = random.Random(seed)
    shared = [[source.randrange(4, VOCAB_SIZE) for _ in range(128)] for _ in range(3)]
    requests, now = [], 0.0
    for _ in range(NUM_REQUESTS):
        own = [source.randrange(4, VOCAB_SIZE) for _ in range(source.randint(40, 270))]
        begin = source.choice(shared) if source.random() < 1 / 3 else []
        requests.append(_Request(begin + own, source.randint(8, 48), now))
        now += source.expovariate(1.0)
    return requests


def _simulated(machine: Machine, requests: Sequence[_Request], load: float) -> Cluster:
    """At so many requests a second."""
    root = bytes(16)
    jobs = [
        Job(
            number=i,
            row=TraceRow(0.0, len(request.token_ids), request.max_tokens),
            hashes=tuple(hash_chain(root, request.token_ids, BLOCK_SIZE)),
            root=root,
            arrival=request.arrival / load,
        )
        for i, request in enumerate(requests)
    ]
    setup = Setup(machine=machine, num_prefill=1, num_decode=1, block_size=BLOCK_SIZE)
    cluster = Disaggregated(setup, jobs)
    cluster.run(lambda _done, _total, _now: None)
    return cluster


def _figures_of(cluster: Cluster) -> _Figures:
    ttfts = Gaps()
    ttfts.add(_array([job.ttft or 0.0 for job in cluster.jobs]))
    return _Figures(_milliseconds(ttfts), _milliseconds(cluster.gaps))


async def _served(address: str, requests: Sequence[_Request], load: float) -> _Figures:
    """Returns what a client measures at `load` requests per second, sent in an open loop."""
    ttfts, itls = Gaps(), Gaps()
    start = time.perf_counter()
    async with AsyncClient(address) as client:

        async def one(request: _Request) -> None:
            due = start + request.arrival / load
            await asyncio.sleep(due - time.perf_counter())
            params = SamplingParams(max_tokens=request.max_tokens, ignore_eos=True)
            times = []
            async for chunk in client.generate(request.token_ids, params):
                times += [time.perf_counter()] * len(chunk.token_ids)
            ttfts.add(_array([times[0] - due]))
            itls.add(_array([b - a for a, b in pairwise(times)]))

        await asyncio.gather(*map(one, requests))
    return _Figures(_milliseconds(ttfts), _milliseconds(itls))


def _milliseconds(values: Gaps) -> tuple[float, ...]:
    return tuple(1e3 * value for value in values.percentiles(SHARES))


def _array(values: Sequence[float]) -> FloatArray:
    return np.array(values)
