"""Addresses that servers listen on, of IPv6 and IPv4, with and without brackets."""

import asyncio
import socket
from contextlib import closing

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.errors import FailedPreconditionError
from baton.serving.listening import host_and_port, listen, socket_address, without_brackets
from baton.serving.server import Server
from baton.serving.settings import ServingSettings
from baton.serving.telemetry.scrape_server import ScrapeServer
from baton.v1 import admin_pb2
from baton.v1.admin_pb2_grpc import AdminServicer, AdminStub, add_AdminServicer_to_server
from tests.support.addresses import LOOPBACKS

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Admin(AdminServicer):
    async def GetLoad(self, request, context):  # noqa: N802
        return admin_pb2.GetLoadResponse(num_running=7)


@pytest.mark.parametrize(
    ("given", "host"), [("[::]", "::"), ("[fd00::7]", "fd00::7"), ("::1", "::1"), ("a.b", "a.b")]
)
def test_settings_take_addresses_in_brackets(given, host):
    settings = ServingSettings(host=given, admin_host=given, advertise_host=given, insecure=True)
    assert (settings.host, settings.admin_host, settings.advertise_host) == (host, host, host)
    assert without_brackets(given) == host


def test_bracketed_loopback_needs_no_tls():
    assert ServingSettings(host="[::1]").host == "::1"


def test_endpoint_has_ipv6_address_in_brackets():
    assert host_and_port("fd00::7", 50051) == "[fd00::7]:50051"
    assert host_and_port("10.0.0.7", 50051) == "10.0.0.7:50051"


def test_any_address_is_that_of_ipv4_without_ipv6():
    assert socket_address("::", 7, lambda: False) == (socket.AF_INET, ("0.0.0.0", 7))
    assert socket_address("::1", 7, lambda: False) == (socket.AF_INET6, ("::1", 7, 0, 0))


@pytest.mark.parametrize("host", ["a..b", ".com", "a" * 64 + ".com"])
def test_host_is_refused_that_is_no_dns_name(host):
    with pytest.raises(FailedPreconditionError, match=r"cannot listen on .*: .* no DNS name"):
        listen(host, 0, "--port", 1)


def test_port_on_any_address_is_named_when_taken():
    with closing(listen("::", 0, "--port", 1)) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(FailedPreconditionError, match=rf"port {port} on :: is taken; .*--port"):
            listen("::", port, "--port", 1)


@pytest.mark.parametrize("host", LOOPBACKS)
@pytest.mark.parametrize("is_any", [False, True], ids=["itself", "any"])
async def test_all_ports_take_connections_to_loopback(host, is_any):
    address = "[::]" if is_any else host
    settings = ServingSettings(host=address, advertise_host=host, insecure=True)
    server = Server(settings)
    server.add_admin(add_AdminServicer_to_server, Admin())
    metrics = ScrapeServer({"/": lambda _accept: (b"here", "text/plain")}, settings.host, 0)
    await server.start()
    await metrics.start()
    try:
        assert server.endpoint == host_and_port(host, server.port)
        await server.release_connections()
        async with grpc.aio.insecure_channel(server.endpoint) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest(service="liveness"))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        async with grpc.aio.insecure_channel(server.admin_endpoint) as channel:
            assert (await AdminStub(channel).GetLoad(admin_pb2.GetLoadRequest())).num_running == 7
        reader, writer = await asyncio.open_connection(host, metrics.port)
        writer.write(GET)
        assert (await asyncio.wait_for(reader.read(), 5.0)).endswith(b"here")
        writer.close()
    finally:
        await metrics.stop()
        await server.stop(0.0)
