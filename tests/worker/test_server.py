"""Server of a worker, without a model."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from baton.v1 import prefill_pb2
from baton.v1.prefill_pb2_grpc import PrefillServicer, PrefillStub, add_PrefillServicer_to_server
from baton.worker.server import WorkerServer
from baton.worker.settings import WorkerSettings
from tests.support.waiting import until


class Waiting(PrefillServicer):
    """Service whose calls last until `released`."""

    def __init__(self) -> None:
        self.released = asyncio.Event()

    async def Prefill(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        await self.released.wait()
        yield prefill_pb2.PrefillResponse()


async def test_worker_server_is_alive_and_not_ready_before_a_model():
    server = WorkerServer(WorkerSettings())
    async with AsyncExitStack() as stack:
        await server.start(stack)
        assert server.metrics_endpoint
        async with grpc.aio.insecure_channel(server.main.endpoint) as channel:
            health: Any = HealthStub(channel)
            states = [
                (await health.Check(health_pb2.HealthCheckRequest(service=name))).status
                for name in ("liveness", "readiness")
            ]
    serving = health_pb2.HealthCheckResponse
    assert states == [serving.SERVING, serving.NOT_SERVING]


@pytest.mark.parametrize("kv_port", [None, 0])
async def test_worker_server_is_idle_after_calls_of_both_ports(kv_port):
    server, service = WorkerServer(WorkerSettings(kv_port=kv_port)), Waiting()
    for each in {server.main, server.kv}:
        each.add(add_PrefillServicer_to_server, service)
    async with AsyncExitStack() as stack:
        await server.start(stack)
        assert (server.kv is server.main) == (kv_port is None)
        assert (server.kv.port == server.main.port) == (kv_port is None)
        calls = []
        for each in (server.main, server.kv):
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(each.endpoint))
            stub: Any = PrefillStub(channel)
            calls.append(stub.Prefill(prefill_pb2.PrefillRequest()))
        await until(lambda: server.num_calls == 2)
        idle = asyncio.ensure_future(server.wait_idle())
        await asyncio.sleep(0)
        assert not idle.done()
        service.released.set()
        for call in calls:
            await call.read()
            await call.read()
        await asyncio.wait_for(idle, 5.0)
        assert server.num_calls == 0
