"""Clients that reset their calls, beside clients that want answers."""

import asyncio
from contextlib import suppress
from itertools import chain

import grpc
import pytest

from baton.serving.grpc.connection_guard import CallRates, ConnectionLimits
from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceStub
from bench.router.stream_resets import attackers
from tests.support.serving.fakes import chunk, serving
from tests.support.waiting import until

GENERATE = "/baton.v1.Inference/Generate"
LIMITS = ConnectionLimits(max_new_streams_per_s=2000, max_resets_per_s=200)


async def generate(request, context):
    for _ in range(5):
        await asyncio.sleep(0.01)
        yield chunk("x")


async def code_of(call) -> grpc.StatusCode:
    """The outcome of a call, whose answer is read to its end."""
    with suppress(grpc.RpcError):
        async for _ in call:
            pass
    return await call.code()


async def calls_until(stop: asyncio.Event, endpoint: str) -> list[grpc.StatusCode]:
    """The outcomes of calls of one client, one after the other, on a connection of its own."""
    codes = []
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(endpoint, options) as channel:
        while not stop.is_set():
            call = InferenceStub(channel).Generate(pb.GenerateRequest(text="a"), timeout=60.0)
            codes.append(await code_of(call))
    return codes


async def test_guard_keeps_calls_whole_beside_resetting_clients():
    stop = asyncio.Event()
    async with serving(generate, connection_limits=LIMITS) as running:
        innocents = [
            asyncio.create_task(calls_until(stop, running.server.endpoint)) for _ in range(4)
        ]
        with attackers(running.server.port, GENERATE, 2, seconds=20.0) as outcomes:
            await asyncio.sleep(1.0)
            stop.set()
            codes = [*chain(*await asyncio.gather(*innocents))]
            # The end of the block waits for the attackers without the event loop.
            await until(lambda: running.server.num_dropped_connections == 2, within=20.0)
    assert set(codes) == {grpc.StatusCode.OK}
    assert len(codes) >= 4
    assert [was_dropped for _, was_dropped in outcomes] == [True, True]


async def test_guard_lets_client_cancel_all_that_it_has_in_flight():
    begun, cancelled = asyncio.Queue(), asyncio.Event()

    async def endless(request, context):
        begun.put_nowait(None)
        await cancelled.wait()
        yield chunk("x")

    limits = ConnectionLimits(max_new_streams_per_s=2000, max_resets_per_s=10)
    async with serving(endless, connection_limits=limits) as running:
        calls = []
        for _ in range(15):
            calls.append(running.inference.Generate(pb.GenerateRequest(text="a")))
            await begun.get()
            await asyncio.sleep(0.12)
        for call in calls:
            call.cancel()
        await asyncio.sleep(0.3)
        cancelled.set()
        last = running.inference.Generate(pb.GenerateRequest(text="b"))
        assert await code_of(last) is grpc.StatusCode.OK
        assert running.server.num_dropped_connections == 0


@pytest.mark.parametrize(
    ("opened", "reset", "excess"),
    [
        (1999, 0, None),
        (2101, 0, "opens more than 2000 calls a second"),
        (205, 205, None),
        (211, 211, "opens and resets more than 200 calls a second"),
        (5, 1024, None),
        (1024, 5, None),
    ],
)
def test_call_rates_name_limit_that_calls_exceed(opened, reset, excess):
    assert CallRates(LIMITS, 10, 10).update(10 + opened, 10 + reset, seconds=0.05) == excess


def test_call_rates_never_exceed_limit_at_a_steady_rate():
    rates = CallRates(LIMITS, 0, 0)
    assert not any(rates.update(10 * look, 10 * look, seconds=0.05) for look in range(1, 1000))


def test_call_rates_add_resets_that_alternate_with_new_calls():
    rates = CallRates(LIMITS, 0, 0)
    seen = [rates.update(200 * (look // 2), 200 * ((look + 1) // 2), 0.05) for look in range(1, 9)]
    assert any(seen)
