"""Overhead of the router: per message, per request, and the gain of coalescing.

Client, router and workers are processes of their own; the workers are scripted
(`bench.router.router_worker`), so that nothing but the way is measured. The reference is a bare
grpc.aio relay between the same client and the same worker, that passes the same messages on without
looking at them. Tokens are counted at the end of every stream.

Router and relay run on the same core, which is idle while the other one is measured; the client,
the worker and Redis share another one. On all cores at once, the contenders would compete with
client and worker, the one that takes more CPU time would wait for them longer, and the threads of
gRPC would move between the cores, which doubles the cost of the same code.

A hop is the CPU time that the process in the middle spends on a message: unlike the time of the
clock, it does not depend on how fast client and worker are. That of a request is shown as well.
"""

import asyncio
import json
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc

from baton.cli.local.ports import free_port
from baton.cli.local.process import Process
from baton.cluster.redis.embedded import EmbeddedRedis
from baton.v1 import decode_pb2, decode_pb2_grpc, inference_pb2_grpc, sampling_pb2
from baton.v1 import inference_pb2 as pb
from bench.child import Child
from bench.engine.cores import on_load_core, on_tested_core
from bench.report import Row, medians
from bench.router.router_worker import ADMIT, STREAM

NUM_MESSAGES = 12_000
NUM_STREAMS = 8
PACED_SECONDS = 0.004
NUM_PACED = 250
NUM_REQUESTS = 100
NUM_AT_ONCE = 16
NUM_PROMPT_TOKENS = 512
FAST_SECONDS = 20e-6  # between the tokens of each of the streams that are coalesced
NUM_FAST = 1_500
NUM_ROUNDS = 3
GATHER_SECONDS = 0.001

HOP_AIM = 1 / 1.2
ADMISSION_AIM = 1 / 1.5
COALESCING_AIM = 5.0

_READY_SECONDS = 60.0
_PROMPT = "the " * NUM_PROMPT_TOKENS


def run(repeats: int) -> list[Row]:
    """All cases, the contenders of each in turns."""
    with on_load_core(), EmbeddedRedis() as redis, tempfile.TemporaryDirectory() as folder:
        routers = {
            name: Process(
                name,
                "router",
                free_port(set()),
                {
                    "redis_url": redis.url,
                    "coalesce_ms": coalesce_ms,
                    "conditional_disaggregation": False,
                },
            )
            for name, coalesce_ms in (("router", 0), ("coalescing", 1))
        }
        try:
            with on_tested_core():
                for router in routers.values():
                    router.start(Path(folder))
            return asyncio.run(_compare(redis.url, routers, repeats))
        finally:
            for router in routers.values():
                router.signal(signal.SIGKILL)


@dataclass(slots=True)
class MessagePath:
    """Path of messages from the worker to this process.

    Attributes:
        call: opens a stream of so many tokens.
        count: the tokens in a message of it.
        cpu: CPU seconds that the process in the middle has used; None: there is none.
    """

    call: Callable[[int], Any]
    count: Callable[[Any], int]
    cpu: Callable[[], Any] | None = None

    async def cpu_seconds(self) -> float:
        assert self.cpu is not None, "what is measured"
        return float(await self.cpu())


@dataclass(slots=True)
class Figures:
    """Figures of one contender, one per repetition."""

    of: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        self.of.setdefault(name, []).append(value)


async def _compare(redis_url: str, routers: dict[str, Process], repeats: int) -> list[Row]:
    async with AsyncExitStack() as stack:
        worker, endpoint = await stack.enter_async_context(child("worker", redis_url))
        with on_tested_core():
            relay, relay_endpoint = await stack.enter_async_context(child("relay", endpoint))
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(target))
            for target in (endpoint, relay_endpoint, *(r.endpoint for r in routers.values()))
        ]
        direct, through_relay, *through_routers = channels
        stub = decode_pb2_grpc.DecodeStub(direct)
        paths = {"direct": MessagePath(lambda n: stub.Generate(_decode(n)), _tokens)}
        for name, method in (("relay", STREAM), ("relay of two calls", ADMIT)):
            call = _relayed(through_relay, method)
            paths[name] = MessagePath(call, _tokens, lambda: relay.ask("cpu"))
        for (name, process), channel in zip(routers.items(), through_routers, strict=True):
            paths[name] = MessagePath(routed(channel), shown, cpu_of(process))
            await until_ready(paths[name])
        bench = _Bench(worker, paths)
        figures: dict[str, Figures] = {name: Figures() for name in paths}
        for i in range(repeats + 1):
            of = figures if i else {name: Figures() for name in paths}  # the first is a warm-up
            await bench.hop(of)
            await bench.latency(of)
            await bench.admission(of)
            await bench.coalescing(of)
        return _rows({name: medians(f.of) for name, f in figures.items()})


@asynccontextmanager
async def child(*arguments: str) -> AsyncIterator[tuple[Child, str]]:
    child = Child("bench.router.router_worker", *arguments)
    try:
        yield child, await child.read()
    finally:
        await child.close()


class _Bench:
    def __init__(self, worker: Child, paths: dict[str, MessagePath]) -> None:
        self._worker = worker
        self._paths = paths

    async def hop(self, figures: dict[str, Figures]) -> None:
        """Messages of one token as fast as they go, in several streams, less what streams of one
        message take: what it takes to open one is `admission`."""
        await self._configure(interval=0, gather=0)
        for name in ("relay", "router"):
            path = self._paths[name]
            elapsed, cpu = await _streams(path, NUM_MESSAGES // NUM_STREAMS)
            figures[name].add("messages/s", NUM_MESSAGES / elapsed)
            _, opening = await _streams(path, 1)
            figures[name].add("hop", 1e6 * (cpu - opening) / (NUM_MESSAGES - NUM_STREAMS))

    async def latency(self, figures: dict[str, Figures]) -> None:
        """One slow stream: from the worker's sending to the client's having, message by message."""
        await self._configure(interval=PACED_SECONDS, gather=0)
        for name in ("direct", "relay", "router", "coalescing"):
            moments = await read(self._paths[name], NUM_PACED)
            sent = json.loads(await self._worker.ask("sent"))
            delays = sorted(1e3 * (m - s) for m, s in zip(moments[1:], sent[1:], strict=False))
            gaps = sorted(1e3 * (b - a) for a, b in pairwise(moments))
            figures[name].add("p50", statistics.median(delays))
            figures[name].add("p99", delays[int(0.99 * len(delays))])
            figures[name].add("itl", gaps[int(0.99 * len(gaps))])

    async def admission(self, figures: dict[str, Figures]) -> None:
        """Requests one by one until they are accepted, then many at once to their only token."""
        await self._configure(interval=0, gather=0)
        for name in ("relay of two calls", "router"):
            path = self._paths[name]
            before = await path.cpu_seconds()
            waits = [1e3 * await _accepted(path) for _ in range(NUM_REQUESTS)]
            cpu = await path.cpu_seconds() - before
            figures[name].add("admission", statistics.median(waits))
            figures[name].add("CPU", 1e3 * cpu / NUM_REQUESTS)
            began = time.perf_counter()
            await asyncio.gather(*(_in_a_row(path) for _ in range(NUM_AT_ONCE)))
            total = NUM_AT_ONCE * (NUM_REQUESTS // NUM_AT_ONCE)
            figures[name].add("requests/s", total / (time.perf_counter() - began))

    async def coalescing(self, figures: dict[str, Figures]) -> None:
        """Streams of a worker faster than messages are, singly and gathered."""
        for name, gather in (("router", 0.0), ("coalescing", GATHER_SECONDS)):
            await self._configure(interval=FAST_SECONDS, gather=gather)
            began = time.perf_counter()
            for _ in range(NUM_ROUNDS):
                await asyncio.gather(
                    *(read(self._paths[name], NUM_FAST) for _ in range(NUM_STREAMS))
                )
            rate = NUM_ROUNDS * NUM_STREAMS * NUM_FAST / (time.perf_counter() - began)
            figures[name].add("tokens/s", rate)

    async def _configure(self, interval: float, gather: float) -> None:
        await self._worker.ask(f"pace {interval}")
        await self._worker.ask(f"gather {gather}")


async def read(path: MessagePath, num_tokens: int) -> list[float]:
    """Reads one stream to its end; when each message of tokens came."""
    moments, received = [], 0
    async for message in path.call(num_tokens):
        count = path.count(message)
        if count:
            moments.append(time.monotonic())
            received += count
    assert received == num_tokens, f"{received} tokens of {num_tokens} came"
    return moments


async def _streams(path: MessagePath, num_tokens: int) -> tuple[float, float]:
    """Reads several streams at once; the seconds and the CPU seconds in the middle it took."""
    before, began = await path.cpu_seconds(), time.perf_counter()
    await asyncio.gather(*(read(path, num_tokens) for _ in range(NUM_STREAMS)))
    return time.perf_counter() - began, await path.cpu_seconds() - before


async def _accepted(path: MessagePath) -> float:
    """Seconds until the first message of a request, which is then read to its end."""
    began = time.perf_counter()
    moments = [time.perf_counter() async for _message in path.call(1)]
    return moments[0] - began


async def _in_a_row(path: MessagePath) -> None:
    for _ in range(NUM_REQUESTS // NUM_AT_ONCE):
        await read(path, 1)


async def until_ready(path: MessagePath) -> None:
    """Until the router knows the workers, and answers."""
    async with asyncio.timeout(_READY_SECONDS):
        while True:
            try:
                await read(path, 2)
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.1)
            else:
                return


def _decode(num_tokens: int) -> decode_pb2.DecodeGenerateRequest:
    return decode_pb2.DecodeGenerateRequest(
        token_ids=[1] * NUM_PROMPT_TOKENS,
        num_prompt_tokens=NUM_PROMPT_TOKENS,
        sampling=sampling_pb2.SamplingParams(max_tokens=num_tokens),
    )


def _relayed(channel: grpc.aio.Channel, path: str) -> Callable[[int], Any]:
    method = channel.unary_stream(
        path,
        request_serializer=decode_pb2.DecodeGenerateRequest.SerializeToString,
        response_deserializer=decode_pb2.DecodeGenerateResponse.FromString,
    )
    return lambda num_tokens: method(_decode(num_tokens))


def routed(channel: grpc.aio.Channel) -> Callable[[int], Any]:
    stub = inference_pb2_grpc.InferenceStub(channel)

    def call(num_tokens: int) -> Any:
        sampling = sampling_pb2.SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        return stub.Generate(pb.GenerateRequest(text=_PROMPT, sampling=sampling))

    return call


def _tokens(message: decode_pb2.DecodeGenerateResponse) -> int:
    return len(message.tokens.token_ids)


def shown(message: pb.GenerateResponse) -> int:
    return len(message.tokens.token_ids)


def cpu_of(process: Process) -> Callable[[], Any]:
    """Returns a function that reads the CPU seconds of a process so far."""
    # Linux's clock of a process, to the nanosecond: its count of ticks is too coarse for ratios.
    clock = (~process.pid << 3) | 2

    async def cpu() -> float:
        return time.clock_gettime(clock)

    return cpu


def _rows(of: dict[str, dict[str, float]]) -> list[Row]:
    direct, relay, twice = of["direct"], of["relay"], of["relay of two calls"]
    router, coalescing = of["router"], of["coalescing"]

    return [
        _less("hop of a message", router["hop"], "us", "relay", relay["hop"], HOP_AIM),
        Row(
            f"{NUM_STREAMS} streams, singly",
            router["messages/s"],
            "messages/s",
            "relay",
            relay["messages/s"],
            router["messages/s"] / relay["messages/s"],
            None,
        ),
        *(
            _less(
                f"added latency, {p}",
                router[p] - direct["p50"],
                "ms",
                "relay",
                relay[p] - direct["p50"],
                None,
            )
            for p in ("p50", "p99")
        ),
        _less(
            "admission",
            router["admission"],
            "ms",
            "relay of two calls",
            twice["admission"],
            ADMISSION_AIM,
        ),
        _less("CPU of a request", router["CPU"], "ms", "relay of two calls", twice["CPU"], None),
        Row(
            f"{NUM_AT_ONCE} requests at once",
            router["requests/s"],
            "requests/s",
            "relay of two calls",
            twice["requests/s"],
            router["requests/s"] / twice["requests/s"],
            None,
        ),
        Row(
            f"{NUM_STREAMS} fast streams, coalesced",
            coalescing["tokens/s"],
            "tokens/s",
            "singly",
            router["tokens/s"],
            coalescing["tokens/s"] / router["tokens/s"],
            COALESCING_AIM,
        ),
        _less(
            "slow stream coalesced, p99 ITL", coalescing["itl"], "ms", "singly", router["itl"], None
        ),
    ]


def _less(
    case: str, value: float, unit: str, against: str, reference: float, aim: float | None
) -> Row:
    """A row of which less is better."""
    return Row(case, value, unit, against, reference, reference / value, aim)
