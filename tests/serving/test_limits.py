"""Limits of a gRPC server for one client, and the errors beyond them."""

import asyncio

import grpc
import pytest

from baton.rpc.errors import error_of
from baton.serving.grpc.channels import MAX_EARLY_PINGS
from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceStub
from bench.router.stream_resets import GOAWAY, PING, PREFACE, SETTINGS, frame
from tests.support.serving.fakes import chunk, serving

# A connection that no other channel of this process shares.
ONE_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
ENHANCE_YOUR_CALM = (11).to_bytes(4, "big")


async def name(request, context):
    return pb.GetModelResponse(name="tiny")


async def test_server_refuses_headers_over_limit():
    async with serving(get_model=name, max_header_bytes=8192) as running:
        small = (("x-filler", "a" * 7000),)
        assert (await running.inference.GetModel(pb.GetModelRequest(), metadata=small)).name
        large = (("x-filler", "a" * 9000),)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.inference.GetModel(pb.GetModelRequest(), metadata=large)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await running.inference.GetModel(pb.GetModelRequest())).name


async def test_server_queues_calls_over_concurrent_stream_limit():
    begun, release = [], asyncio.Event()

    async def generate(request, context):
        begun.append(request.text)
        yield chunk(request.text)
        await release.wait()

    async with serving(generate, max_concurrent_streams=2) as running:
        calls = [running.inference.Generate(pb.GenerateRequest(text=t)) for t in ("a", "b")]
        for call in calls:
            await call.read()
        late = running.inference.Generate(pb.GenerateRequest(text="too late"), timeout=0.3)
        assert await late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        patient = running.inference.Generate(pb.GenerateRequest(text="c"))
        release.set()
        assert (await asyncio.wait_for(patient.read(), 5.0)).tokens.text == "c"
        assert set(begun[:2]) == {"a", "b"}
        assert begun[2:] == ["c"], "the one that was late has begun"


async def test_server_closes_idle_connection_and_client_reconnects():
    async with serving(get_model=name, max_connection_idle_s=0.2) as running:
        assert (await running.inference.GetModel(pb.GetModelRequest())).name
        async with asyncio.timeout(10.0):
            state = running.channel.get_state()
            while state is grpc.ChannelConnectivity.READY:
                await running.channel.wait_for_state_change(state)
                state = running.channel.get_state()
        assert (await running.inference.GetModel(pb.GetModelRequest())).name


@pytest.mark.parametrize("first", [b"", b"PRI * HTTP/2.0\r\n"], ids=["silent", "begun"])
async def test_server_closes_connection_without_handshake(first):
    async with serving(get_model=name, handshake_timeout_s=0.3) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.server.port)
        writer.write(first)
        async with asyncio.timeout(10.0):
            while await reader.read(1024):
                pass
        writer.close()
        assert (await running.inference.GetModel(pb.GetModelRequest())).name


async def test_server_closes_connections_beyond_their_limit():
    async with serving(get_model=name, max_connections=1) as running:
        assert (await running.inference.GetModel(pb.GetModelRequest())).name
        async with grpc.aio.insecure_channel(running.server.endpoint, ONE_CONNECTION) as second:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await InferenceStub(second).GetModel(pb.GetModelRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (await running.inference.GetModel(pb.GetModelRequest())).name


async def test_server_names_limit_when_message_is_too_large():
    async with serving(get_model=name, max_message_bytes=4096) as running:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.inference.Generate(pb.GenerateRequest(text="a" * 5000)).read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "4096" in str(error_of(caught.value))


async def test_server_closes_connection_that_only_pings():
    async with serving(get_model=name) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.server.port)
        writer.write(PREFACE + frame(SETTINGS))
        num_answered, kind = 0, SETTINGS
        async with asyncio.timeout(10.0):
            while kind != GOAWAY:
                assert num_answered < 2 * MAX_EARLY_PINGS
                writer.write(frame(PING, num_answered.to_bytes(8, "big")))
                kind, content = await read_frame(reader)
                while kind not in (PING, GOAWAY):
                    kind, content = await read_frame(reader)
                num_answered += kind == PING
        assert num_answered >= MAX_EARLY_PINGS
        assert content[4:8] == ENHANCE_YOUR_CALM
        writer.close()
        assert (await running.inference.GetModel(pb.GetModelRequest())).name


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readexactly(9)
    return head[3], await reader.readexactly(int.from_bytes(head[:3], "big"))
