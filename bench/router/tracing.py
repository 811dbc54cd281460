"""Cost of tracing in the router: all requests traced, one in a hundred, and none.

The routers are processes of their own, the workers scripted (`bench.router.router_worker`), and the
spans go to a real collector, which throws them away. The cost is the CPU time that a router spends
on a request: on few cores wall time measures the client and the workers as well. What a worker adds
is less beside what it computes.

Two processes that do the same differ by more than what is looked for, for as long as they live; so
every measurement is of new ones, and a second router without traces says how large the noise is.
"""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from baton.cli.local.ports import free_port
from baton.cli.local.process import Process
from baton.cluster.redis.embedded import EmbeddedRedis
from bench.report import Row, medians
from bench.router.router import MessagePath, child, cpu_of, read, routed, shown, until_ready

NUM_REQUESTS = 48
NUM_ROUNDS = 6  # of each, in turns, to one measurement: what else the machine does changes faster
NUM_AT_ONCE = 8
NUM_TOKENS = 32
SAMPLED_AIM = 0.99

_SAMPLED = {"none": None, "none, again": None, "1 %": "0.01", "all": "1"}


class _Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.num_spans = 0

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        self.num_spans += sum(len(s.spans) for r in request.resource_spans for s in r.scope_spans)
        return trace_service_pb2.ExportTraceServiceResponse()


def run(repeats: int) -> list[Row]:
    """All of them in turns."""
    collector = _Collector()
    server = grpc.server(ThreadPoolExecutor(1))
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add(collector, server)
    endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        with EmbeddedRedis() as redis:
            rows = asyncio.run(_compare(redis.url, endpoint, repeats))
    finally:
        server.stop(0)
    assert collector.num_spans > repeats * NUM_ROUNDS * NUM_REQUESTS, (
        "spans that the collector did not receive"
    )
    return rows


@contextmanager
def _traced(endpoint: str, ratio: str | None) -> Iterator[None]:
    """Sets the tracing variables of processes started in the block. All use one hash seed, so that
    they differ less."""
    told = {"PYTHONHASHSEED": "0"}
    if ratio is not None:
        told |= {
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": ratio,
        }
    os.environ.update(told)
    try:
        yield
    finally:
        for name in told:
            del os.environ[name]


async def _compare(redis_url: str, collector: str, repeats: int) -> list[Row]:
    cpu: dict[str, list[float]] = {name: [] for name in _SAMPLED}
    rate: dict[str, list[float]] = {name: [] for name in _SAMPLED}
    async with child("worker", redis_url) as (worker, _):
        for _ in range(repeats):
            async with _routers(redis_url, collector) as ways:
                await worker.ask("pace 0")
                await worker.ask("gather 0")
                for way in ways.values():
                    await _round(way)  # as a warm-up
                for name, (micros, per_second) in (await _measure(ways)).items():
                    cpu[name].append(micros)
                    rate[name].append(per_second)
    return _rows(medians(cpu), medians(rate))


@asynccontextmanager
async def _routers(redis_url: str, collector: str) -> AsyncIterator[dict[str, MessagePath]]:
    """New ones, that are ready."""
    flags = {"redis_url": redis_url, "conditional_disaggregation": False}
    routers = {name: Process(name, "router", free_port(set()), flags) for name in _SAMPLED}
    with tempfile.TemporaryDirectory() as folder:
        try:
            async with AsyncExitStack() as stack:
                ways = {}
                for name, router in routers.items():
                    with _traced(collector, _SAMPLED[name]):
                        router.start(Path(folder))
                for name, router in routers.items():
                    channel = grpc.aio.insecure_channel(router.endpoint)
                    await stack.enter_async_context(channel)
                    ways[name] = MessagePath(routed(channel), shown, cpu_of(router))
                    await until_ready(ways[name])
                yield ways
        finally:
            for router in routers.values():
                router.signal(signal.SIGKILL)


async def _measure(ways: dict[str, MessagePath]) -> dict[str, tuple[float, float]]:
    """Microseconds of CPU that a request takes, and requests per second, of each."""
    cpu, elapsed = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0.0)
    for i in range(NUM_ROUNDS):
        for name in list(ways)[:: 1 if i % 2 else -1]:
            took = await _round(ways[name])
            cpu[name], elapsed[name] = cpu[name] + took[0], elapsed[name] + took[1]
    total = NUM_ROUNDS * NUM_REQUESTS
    return {name: (1e6 * cpu[name] / total, total / elapsed[name]) for name in ways}


async def _round(way: MessagePath) -> tuple[float, float]:
    """Seconds of CPU, and of the clock, that so many requests take."""
    assert way.cpu is not None, "what is measured"
    before, began = float(await way.cpu()), time.perf_counter()

    async def in_a_row() -> None:
        for _ in range(NUM_REQUESTS // NUM_AT_ONCE):
            await read(way, NUM_TOKENS)

    await asyncio.gather(*(in_a_row() for _ in range(NUM_AT_ONCE)))
    elapsed = time.perf_counter() - began
    return float(await way.cpu()) - before, elapsed


def _rows(cpu: dict[str, float], rate: dict[str, float]) -> list[Row]:
    rows, off = [], "none"
    for name, aim in (("none, again", None), ("1 %", SAMPLED_AIM), ("all", None)):
        case = f"traced {name}, CPU of a request"
        rows.append(Row(case, cpu[name], "us", off, cpu[off], cpu[off] / cpu[name], aim))
        case = f"traced {name}, {NUM_AT_ONCE} at once"
        ratio = rate[name] / rate[off]
        rows.append(Row(case, rate[name], "requests/s", off, rate[off], ratio, None))
    return rows
