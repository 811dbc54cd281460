"""Images through the client: what the router gets."""

from collections.abc import Iterator

import pytest

from baton import Client
from baton.client.client import Clip, Image, Message
from baton.v1 import inference_pb2 as pb
from tests.support.router.fake_router import FakeRouter

URL = "https://images.example.org/a.png"


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(address, timeout=10.0) as client:
        yield client


def sent(router: FakeRouter) -> pb.GenerateRequest:
    request = router.requests[0]
    assert isinstance(request, pb.GenerateRequest)
    return request


def test_generate_sends_images_of_messages(client, router):
    messages = [Message("user", [Image(b"a file"), "What is it?", Image(URL)])]
    client.generate(messages).text()
    (message,) = sent(router).chat.messages
    assert message.content == ""
    assert list(message.parts) == [
        pb.ContentPart(image=pb.Image(data=b"a file")),
        pb.ContentPart(text="What is it?"),
        pb.ContentPart(image=pb.Image(url=URL)),
    ]


def test_generate_sends_clips_of_messages(client, router):
    client.generate([Message("user", [Clip(b"a file"), Clip(URL)])]).text()
    (message,) = sent(router).chat.messages
    assert list(message.parts) == [
        pb.ContentPart(clip=pb.Image(data=b"a file")),
        pb.ContentPart(clip=pb.Image(url=URL)),
    ]


def test_generate_sends_images_of_text(client, router):
    client.generate("<image> What is it?", images=[Image(b"a file")]).text()
    assert list(sent(router).images) == [pb.Image(data=b"a file")]
