from baton.serving.channels import Channels
from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceStub
from tests.support.serving.fakes import serving


async def answer(request, context):
    return pb.GetModelResponse(name="x" * (5 * 2**20))


async def test_channels_keep_one_channel_per_endpoint_until_discarded():
    channels = Channels()
    first = channels.get("127.0.0.1:1")
    assert channels.get("127.0.0.1:1") is first
    assert channels.get("127.0.0.1:2") is not first
    await channels.discard("127.0.0.1:1")
    await channels.discard("127.0.0.1:1")
    assert channels.get("127.0.0.1:1") is not first
    await channels.close()


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
