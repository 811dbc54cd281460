"""Room for new gRPC connections beside clients that hold idle ones."""

import asyncio
import socket
from contextlib import AsyncExitStack, suppress

import grpc
import pytest

from baton.fairness.client_address import holder_of
from baton.serving.grpc.connection_guard import ConnectionLimits
from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceStub
from bench.router.stream_resets import PREFACE, SETTINGS, frame
from tests.support.serving.fakes import chunk, serving
from tests.support.waiting import until

LIMITS = ConnectionLimits(max_new_streams_per_s=2000, max_resets_per_s=200)
ONE_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


async def name(request, context):
    return pb.GetModelResponse(name="tiny")


def idle_connection(source: str, port: int) -> socket.socket:
    """A connection that has finished its handshake, and makes no call. Raises `OSError` if it is
    closed before."""
    connection = socket.create_connection(("127.0.0.1", port), 10.0, (source, 0))
    connection.sendall(PREFACE + frame(SETTINGS))
    if not connection.recv(9):
        connection.close()
        raise ConnectionResetError("no handshake")
    return connection


async def idle_connection_at_last(source: str, port: int) -> socket.socket:
    """Such a connection once there is room: gRPC counts one that gives way until it is closed."""
    made: list[socket.socket] = []

    def try_once() -> bool:
        with suppress(OSError):
            made.append(idle_connection(source, port))
        return bool(made)

    await until(try_once)
    return made[0]


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


async def test_idle_connections_of_one_address_leave_room_for_others():
    hold = asyncio.Event()

    async def generate(request, context):
        yield chunk("a")
        await hold.wait()
        yield chunk("b")

    async with serving(generate, name, LIMITS, max_connections=16) as running:
        port = running.server.port
        stream = running.inference.Generate(pb.GenerateRequest(text="a"))
        await stream.read()
        async with AsyncExitStack() as stack:
            few = [stack.enter_context(idle_connection("127.0.0.3", port)) for _ in range(3)]
            many = [stack.enter_context(idle_connection("127.0.0.2", port)) for _ in range(14)]
            await until(lambda: running.server.num_dropped_connections >= 2)
            later = stack.enter_context(await idle_connection_at_last("127.0.0.2", port))
            for num_dropped in range(3, 8):
                await until(lambda: running.server.num_dropped_connections >= num_dropped)  # noqa: B023
                new = grpc.aio.insecure_channel(f"127.0.0.1:{port}", ONE_CONNECTION)
                await stack.enter_async_context(new)
                call = InferenceStub(new).GetModel(pb.GetModelRequest(), timeout=30.0)
                assert (await call).name == "tiny"
            assert all(map(is_open, few))
            assert is_open(later), "a connection gave way before older ones"
            assert 6 <= sum(map(is_open, many)) <= 7
        hold.set()
        assert (await stream.read()).tokens.text == "b"


@pytest.mark.parametrize(
    ("host", "holder"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("::1", "::/64"),
    ],
)
def test_holder_of_address_is_network_of_ipv6_host(host, holder):
    assert holder_of(host) == holder
