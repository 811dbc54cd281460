"""The admin service, which is where its clients are and nowhere else."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.errors import FailedPreconditionError
from baton.rpc.errors import error_of
from baton.serving.server import Server
from baton.serving.settings import ServingSettings
from baton.v1 import admin_pb2
from baton.v1 import inference_pb2 as pb
from baton.v1.admin_pb2_grpc import AdminServicer, AdminStub, add_AdminServicer_to_server
from baton.v1.inference_pb2_grpc import InferenceStub, add_InferenceServicer_to_server
from tests.support.serving.fakes import ScriptedInference


class Patient(AdminServicer):
    """Answers a drain only once there is nothing left to wait for."""

    def __init__(self) -> None:
        self.is_asked = asyncio.Event()

    async def Drain(self, request, context):  # noqa: N802
        self.is_asked.set()
        await asyncio.Event().wait()

    async def GetLoad(self, request, context):  # noqa: N802
        return admin_pb2.GetLoadResponse(num_running=3)


@asynccontextmanager
async def two_ports(
    **settings: Any,
) -> AsyncIterator[tuple[Server, Patient, grpc.aio.Channel, Any]]:
    """A server, what it serves at its admin port, and channels to its port and to that one."""
    admin = Patient()
    server = Server(ServingSettings(**settings))

    async def get_model(request, context):
        return pb.GetModelResponse(name="tiny")

    server.add(add_InferenceServicer_to_server, ScriptedInference(get_model=get_model))
    server.add_admin(add_AdminServicer_to_server, admin)
    await server.start()
    async with (
        grpc.aio.insecure_channel(server.endpoint) as channel,
        grpc.aio.insecure_channel(server.admin_endpoint) as to_admin,
    ):
        yield server, admin, channel, to_admin
    await server.stop(0.0)


async def test_services_are_served_at_their_own_port_only():
    async with two_ports() as (_, _, channel, to_admin):
        load = await AdminStub(to_admin).GetLoad(admin_pb2.GetLoadRequest())
        assert load.num_running == 3
        assert (await InferenceStub(channel).GetModel(pb.GetModelRequest())).name == "tiny"
        wrong = (
            AdminStub(channel).GetLoad(admin_pb2.GetLoadRequest()),
            InferenceStub(to_admin).GetModel(pb.GetModelRequest()),
        )
        for call in wrong:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            error = error_of(caught.value)
            assert isinstance(error, FailedPreconditionError)
            assert "--admin-port" in str(error)


async def test_health_is_the_same_at_both_ports():
    async with two_ports() as (server, _, *channels):
        request = health_pb2.HealthCheckRequest(service="readiness")
        for ready in (False, True):
            await server.set_ready(ready)
            answers = [await health_pb2_grpc.HealthStub(c).Check(request) for c in channels]
            serving = health_pb2.HealthCheckResponse.SERVING
            assert [answer.status == serving for answer in answers] == [ready, ready]


async def test_drain_does_not_wait_for_drain_call():
    async with two_ports() as (server, admin, _, to_admin):
        call = asyncio.ensure_future(AdminStub(to_admin).Drain(admin_pb2.DrainRequest()))
        async with asyncio.timeout(5.0):
            await admin.is_asked.wait()
            assert server.num_calls == 0
            await server.drain()
        assert not call.done()
        call.cancel()


async def test_server_names_flag_when_admin_port_is_taken():
    async with two_ports() as (server, *_):
        taken = int(server.admin_endpoint.rpartition(":")[2])
        other = Server(ServingSettings(admin_port=taken))
        other.add_admin(add_AdminServicer_to_server, Patient())
        with pytest.raises(FailedPreconditionError, match=f"{taken} .* with --admin-port"):
            await other.start()
        await other.stop(0.0)


@pytest.mark.parametrize(
    ("settings", "host"),
    [
        ({}, "127.0.0.1"),
        ({"host": "0.0.0.0", "advertise_host": "worker.example"}, "worker.example"),
        ({"host": "0.0.0.0", "advertise_host": "x.example", "admin_host": "0.0.0.0"}, "x.example"),
        ({"advertise_host": "worker.example", "admin_host": "127.0.0.1"}, "127.0.0.1"),
    ],
)
async def test_server_advertises_reachable_admin_host(settings, host):
    server = Server(ServingSettings(insecure=True, **settings))
    server.add_admin(add_AdminServicer_to_server, Patient())
    await server.start()
    assert server.admin_endpoint.rpartition(":")[0] == host
    await server.stop(0.0)
