import asyncio

from baton.serving.grpc.channels import Channels
from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceStub
from tests.support.serving.fakes import serving
from tests.support.waiting import until

ENDPOINT = "127.0.0.1:1"


async def answer(request, context):
    return pb.GetModelResponse(name="x" * (5 * 2**20))


async def test_channels_keep_one_channel_per_endpoint_while_used():
    channels = Channels()
    with channels.use(ENDPOINT) as first, channels.use(ENDPOINT) as second:
        assert second is first
        assert channels.get("127.0.0.1:2") is not first
    with channels.use(ENDPOINT):  # at once
        await asyncio.sleep(0)
        assert channels.get(ENDPOINT) is first
    await until(lambda: channels.get(ENDPOINT) is not first, within=5.0)
    await channels.close()


async def test_channels_close_those_unused_but_not_their_calls():
    began, going_on = asyncio.Event(), asyncio.Event()

    async def slow(request, context):
        began.set()
        await going_on.wait()
        return await answer(request, context)

    async with serving(get_model=slow) as running:
        channels = Channels(idle_seconds=0.0)
        stub = InferenceStub(channels.get(running.server.endpoint))
        pending_call = asyncio.ensure_future(stub.GetModel(pb.GetModelRequest()))
        await began.wait()
        for port in range(1, 30):
            channels.get(f"127.0.0.1:{port}")
        assert list(channels._channels) == list(channels._last_used) == ["127.0.0.1:29"]
        going_on.set()
        assert (await pending_call).name
        await channels.close()


async def test_channels_reconnect_by_a_new_connection():
    peers = []

    async def tell(request, context):
        peers.append(context.peer())
        return pb.GetModelResponse()

    async with serving(get_model=tell) as running:
        channels = Channels()
        for _ in range(2):
            for _ in range(2):
                stub = InferenceStub(channels.get(running.server.endpoint))
                await stub.GetModel(pb.GetModelRequest())
            channels.reconnect(running.server.endpoint)
        await channels.close()
    assert peers[0] == peers[1] != peers[2] == peers[3]


async def test_channels_pass_messages_over_default_grpc_limit():
    async with serving(get_model=answer) as running:
        model = await running.inference.GetModel(pb.GetModelRequest())
    assert len(model.name) == 5 * 2**20


async def test_channels_ignore_proxy_of_environment(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    async with serving(get_model=answer) as running:
        channels = Channels()
        stub = InferenceStub(channels.get(running.server.endpoint))
        assert (await stub.GetModel(pb.GetModelRequest())).name
        await channels.close()
