import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.errors import FailedPreconditionError
from baton.serving.grpc.channels import channel_options
from baton.serving.server import Server
from baton.serving.settings import ServingSettings
from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceStub
from tests.support.serving.fakes import chunk, serving

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health_of(channel: grpc.aio.Channel) -> list[int]:
    """The health of "liveness", "readiness" and "", in this order."""
    stub = health_pb2_grpc.HealthStub(channel)
    requests = [health_pb2.HealthCheckRequest(service=n) for n in ("liveness", "readiness", "")]
    return [(await stub.Check(request)).status for request in requests]


async def test_server_is_live_from_start_and_ready_when_set():
    async with serving() as running:
        server = running.server
        assert await health_of(running.channel) == [SERVING, NOT_SERVING, NOT_SERVING]
        assert (server.is_serving("liveness"), server.is_serving("readiness")) == (True, False)
        await server.set_ready(True)
        assert await health_of(running.channel) == [SERVING, SERVING, SERVING]
        assert server.is_serving("readiness")
        await server.drain()
        assert await health_of(running.channel) == [SERVING, NOT_SERVING, NOT_SERVING]
        assert (server.is_serving("liveness"), server.is_serving("readiness")) == (True, False)
        await running.server.set_ready(True)
        assert await health_of(running.channel) == [SERVING, NOT_SERVING, NOT_SERVING]


async def test_server_names_flag_when_port_is_taken():
    async with serving() as running:
        port = running.server.port
        with pytest.raises(FailedPreconditionError) as caught:
            await Server(ServingSettings(port=port)).start()
    assert str(caught.value) == (f"port {port} on 127.0.0.1 is taken; choose another with --port")


async def test_server_names_host_that_does_not_exist():
    with pytest.raises(FailedPreconditionError, match=r"cannot listen on no-such-host\.invalid:0"):
        await Server(ServingSettings(host="no-such-host.invalid", insecure=True)).start()


async def test_server_endpoint_has_advertised_host():
    async with serving() as running:
        assert running.server.endpoint == f"127.0.0.1:{running.server.port}"
    server = Server(ServingSettings(advertise_host="localhost"))
    port = await server.start()
    assert server.endpoint == f"localhost:{port}"
    await server.stop()


async def test_drain_waits_for_calls_in_flight():
    release = asyncio.Event()

    async def generate(request, context):
        yield chunk("a")
        await release.wait()
        yield chunk("b")

    async with serving(generate) as running:
        call = running.inference.Generate(pb.GenerateRequest())
        assert (await call.read()).tokens.text == "a"
        drain = asyncio.create_task(running.server.drain())
        await asyncio.sleep(0.05)
        assert not drain.done()
        assert running.server.is_draining
        assert running.server.num_calls == 1
        release.set()
        await asyncio.wait_for(drain, 2.0)
        await running.server.stop()
        assert (await call.read()).tokens.text == "b"
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_drain_ends_at_its_timeout(caplog):
    async def generate(request, context):
        yield chunk("a")
        await asyncio.sleep(60)

    async with serving(generate, drain_timeout_s=0.1) as running:
        call = running.inference.Generate(pb.GenerateRequest())
        await call.read()
        await asyncio.wait_for(running.server.drain(), 2.0)
        assert "1 calls are left" in caplog.text
        call.cancel()


async def test_drain_runs_every_callback_when_one_fails(caplog):
    ran: list[str] = []

    async def break_down() -> None:
        raise ValueError("broken")

    async def note() -> None:
        ran.append("noted")

    async with serving() as running:
        running.server.on_drain(break_down)
        running.server.on_drain(note)
        await running.server.drain()
    assert ran == ["noted"]
    assert "broken" in caplog.text


async def test_drain_and_stop_ignore_open_health_watch():
    async with serving() as running:
        stub = health_pb2_grpc.HealthStub(running.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="readiness"))
        await watch.read()
        began = time.monotonic()
        await running.server.drain()
        await running.server.stop()
        assert time.monotonic() - began < 5.0


async def test_released_connections_keep_their_calls_alone():
    release = asyncio.Event()
    peers = []

    async def generate(request, context):
        peers.append(context.peer())
        yield chunk("a")
        if request.request_id == "long":
            await release.wait()
            yield chunk("b")

    async with serving(generate) as running:
        server, generating = running.server, running.inference.Generate
        long = generating(pb.GenerateRequest(request_id="long"))
        await long.read()
        await server.set_ready(True)
        port = server.port
        await server.release_connections()
        assert server.port == port
        assert [m.tokens.text async for m in generating(pb.GenerateRequest())] == ["a"]
        assert peers[0] != peers[1]
        assert await health_of(running.channel) == [SERVING, SERVING, SERVING]
        draining = asyncio.create_task(server.drain())
        await asyncio.sleep(0.05)
        assert (server.num_calls, draining.done()) == (1, False)
        release.set()
        await asyncio.wait_for(draining, 2.0)
        assert (await long.read()).tokens.text == "b"
        assert await long.code() is grpc.StatusCode.OK
        async with asyncio.timeout(4.0):
            await server.stop()


async def test_stop_ends_calls_on_released_connections():
    async def generate(request, context):
        yield chunk("a")
        await asyncio.sleep(60)

    async with serving(generate) as running:
        call = running.inference.Generate(pb.GenerateRequest())
        await call.read()
        await running.server.release_connections()
        async with asyncio.timeout(4.0):
            await running.server.stop(0.0)
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()


async def test_server_stop_gives_up_when_grpc_takes_too_long(caplog):
    server = Server(ServingSettings(), closing_seconds=0.0)  # gRPC takes longer in any case
    await server.start()
    async with asyncio.timeout(5.0):
        await server.stop(0.0)
    assert "did not close its connections" in caplog.text


async def test_reflection_lists_services_only_when_enabled():
    async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    async with serving(reflection=True) as running:
        stub = reflection_pb2_grpc.ServerReflectionStub(running.channel)
        answers = [answer async for answer in stub.ServerReflectionInfo(ask())]
    names = {service.name for service in answers[0].list_services_response.service}
    assert {"baton.v1.Inference", "grpc.health.v1.Health"} <= names

    async with serving() as running:
        stub = reflection_pb2_grpc.ServerReflectionStub(running.channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.ServerReflectionInfo(ask()).read()


async def test_server_refuses_response_over_message_limit():
    async def get_model(request, context):
        return pb.GetModelResponse(name="x" * 10_000)

    async with serving(get_model=get_model, max_message_bytes=4096) as running:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.inference.GetModel(pb.GetModelRequest())
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


PROCESS = textwrap.dedent("""
    import asyncio
    import sys
    from baton.serving.server import Server
    from baton.serving.settings import ServingSettings
    from baton.v1 import inference_pb2 as pb
    from baton.v1.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server

    class Slow(InferenceServicer):
        async def Generate(self, request, context):
            yield pb.GenerateResponse(tokens=pb.TokenChunk(text="begun"))
            await asyncio.sleep(float(request.text))
            yield pb.GenerateResponse(tokens=pb.TokenChunk(text="done"))
        async def GetModel(self, request, context): ...
        async def Tokenize(self, request, context): ...

    async def main():
        server = Server(ServingSettings())
        server.add(add_InferenceServicer_to_server, Slow())
        print(await server.start(), flush=True)
        await server.set_ready(True)
        await server.run_until_signal()
        print("stopped", flush=True)

    asyncio.run(main())
    sys.stdin.read()
""")


class Process:
    """A real server process with one call in flight, which takes `seconds`."""

    def __init__(self, seconds: float) -> None:
        command = [sys.executable, "-c", PROCESS]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        port = int(self._child.stdout.readline())
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", channel_options())
        self.call = InferenceStub(self._channel).Generate(pb.GenerateRequest(text=str(seconds)))
        assert next(self.call).tokens.text == "begun"

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill()
        self._child.wait()
        self._child.stdin.close()
        self._child.stdout.close()
        self._channel.close()

    def signal(self, signum: int) -> None:
        os.kill(self._child.pid, signum)

    def stopped(self) -> str:
        """Line that it prints once it has stopped to serve; it waits for `wait` then."""
        return self._child.stdout.readline().strip()

    def wait(self) -> tuple[int, str]:
        """Its exit code and what it printed last."""
        self._child.stdin.close()
        code = self._child.wait(timeout=20)
        return code, self._child.stdout.read().strip()


@pytest.mark.e2e
@pytest.mark.alone
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_server_finishes_call_in_flight_after_first_signal(signum):
    with Process(seconds=0.5) as process:
        process.signal(signum)
        assert next(process.call).tokens.text == "done"
        assert list(process.call) == []
        assert process.wait() == (0, "stopped")


@pytest.mark.e2e
@pytest.mark.alone
def test_server_stops_at_once_after_second_signal():
    with Process(seconds=60.0) as process:
        process.signal(signal.SIGTERM)
        time.sleep(0.3)
        process.signal(signal.SIGTERM)
        began = time.monotonic()
        assert process.wait() == (0, "stopped")
        assert time.monotonic() - began < 10.0
        with pytest.raises(grpc.RpcError):
            next(process.call)


@pytest.mark.e2e
@pytest.mark.alone
def test_signal_does_not_cut_the_end_of_a_process():
    with Process(seconds=0.1) as process:
        process.signal(signal.SIGTERM)
        assert process.stopped() == "stopped"
        process.signal(signal.SIGTERM)
        assert process.wait() == (0, "")


@pytest.mark.e2e
@pytest.mark.alone
def test_client_detects_silent_server_within_bound():
    with Process(seconds=60.0) as process:
        process.signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(grpc.RpcError) as caught:
            next(process.call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - began < 5.0


CALLER = textwrap.dedent("""
    import sys
    import grpc
    from baton.v1 import inference_pb2 as pb
    from baton.v1.inference_pb2_grpc import InferenceStub

    with grpc.insecure_channel(sys.argv[1]) as channel:
        for _ in InferenceStub(channel).Generate(pb.GenerateRequest()):
            pass
""")


@pytest.mark.e2e
@pytest.mark.alone
async def test_server_detects_silent_client_within_bound():
    begun, ended = asyncio.Event(), asyncio.Event()

    async def generate(request, context):
        yield chunk("a")
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async with serving(generate) as running:
        arguments = [sys.executable, "-c", CALLER, running.server.endpoint]
        child = await asyncio.create_subprocess_exec(*arguments)
        try:
            await asyncio.wait_for(begun.wait(), 20.0)
            child.send_signal(signal.SIGSTOP)
            await asyncio.wait_for(ended.wait(), 5.0)
        finally:
            child.kill()
            await child.wait()
