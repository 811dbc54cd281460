"""Images over HTTP: OpenAI's and Anthropic's own clients, streamed and whole."""

import base64
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from baton.context_length import ContextLength
from baton.v1 import inference_pb2 as pb
from baton_router.text.images.image_reader import ImageReader
from baton_router.text.intake import Intake
from baton_router.text.model_card import ModelCard, read_model_card
from baton_router.text.prompt_images import PromptImages
from baton_router.text.request_bounds import RequestLimits
from tests.support.engine.images import PLACEHOLDER_ID, TOKENS_PER_IMAGE, image
from tests.support.router.calls import call_of
from tests.support.router.front import anthropic_client_of, front_of, openai_client_of
from tests.support.router.images import data_url, encoded, running_reader, save_checkpoint
from tests.support.router.written import writing

pytestmark = pytest.mark.asyncio(loop_scope="module")
URL = data_url(encoded(image(1)))
SOURCE: Any = {
    "type": "base64",
    "media_type": "image/png",
    "data": base64.b64encode(encoded(image(1))).decode(),
}
TEXT = "w5 w6"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ModelCard:
    return read_model_card(save_checkpoint("llava_clip", tmp_path_factory.mktemp("llava")))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reader(tmp_path_factory) -> AsyncIterator[ImageReader]:
    folder = save_checkpoint("llava_clip", tmp_path_factory.mktemp("reader"))
    async with running_reader(folder) as made:
        yield made


async def expected(model: ModelCard, reader: ImageReader) -> list[int]:
    """Returns the prompt of the same conversation over gRPC."""
    parts = [pb.ContentPart(text=TEXT), pb.ContentPart(image=pb.Image(url=URL))]
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", parts=parts)])
    intake = Intake(model, RequestLimits(), images=PromptImages(model, reader))
    request = await intake.read(
        call_of(pb.GenerateRequest(chat=chat)), ContextLength(model.max_model_len)
    )
    return list(request.token_ids)


def workers(model: ModelCard) -> Any:
    return writing("w7 w8", 2, pb.FINISH_REASON_END_OF_SEQUENCE, model)


def prompt_given_to(given: Any) -> list[int]:
    (request,) = given[0].requests
    return list(request.token_ids.ids if hasattr(request.token_ids, "ids") else request.token_ids)


def openai_turn(url: str = URL) -> Any:
    part = {"type": "image_url", "image_url": {"url": url, "detail": "high"}}
    return {"role": "user", "content": [{"type": "text", "text": TEXT}, part]}


def responses_turn(url: str = URL) -> Any:
    part = {"type": "input_image", "image_url": url, "detail": "auto"}
    return {"role": "user", "content": [{"type": "input_text", "text": TEXT}, part]}


def messages_turn(source: Any = SOURCE) -> Any:
    part = {"type": "image", "source": source}
    return {"role": "user", "content": [{"type": "text", "text": TEXT}, part]}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_chat_takes_images(model, reader, stream):
    given = workers(model)
    async with front_of(*given, model=model, images=reader) as front:
        answer = await openai_client_of(front).chat.completions.create(
            model=model.name, messages=[openai_turn()], max_tokens=20, stream=stream
        )
        if stream:
            texts = [
                chunk.choices[0].delta.content or "" async for chunk in answer if chunk.choices
            ]
            text = "".join(texts)
        else:
            text = answer.choices[0].message.content
    assert text.split() == ["w7", "w8"]
    assert prompt_given_to(given) == await expected(model, reader)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_responses_take_images(model, reader, stream):
    given = workers(model)
    async with front_of(*given, model=model, images=reader) as front:
        answer = await openai_client_of(front).responses.create(
            model=model.name, input=[responses_turn()], max_output_tokens=20, stream=stream
        )
        if stream:
            (whole,) = [e.response async for e in answer if e.type == "response.completed"]
        else:
            whole = answer
    assert whole.output_text.split() == ["w7", "w8"]
    assert prompt_given_to(given) == await expected(model, reader)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("source", [SOURCE, {"type": "url", "url": URL}], ids=["base64", "url"])
async def test_messages_take_images(model, reader, source, stream):
    given = workers(model)
    async with front_of(*given, model=model, images=reader) as front:
        client = anthropic_client_of(front)
        body = {"model": model.name, "messages": [messages_turn(source)], "max_tokens": 20}
        if stream:
            async with client.messages.stream(**body) as events:
                text = await events.get_final_text()
        else:
            text = (await client.messages.create(**body)).content[0].text
    assert text.split() == ["w7", "w8"]
    assert prompt_given_to(given) == await expected(model, reader)


class ReaderOfFiles:
    """Reader that is given no preprocessed images."""

    def __init__(self, reader: ImageReader) -> None:
        self._reader = reader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    async def check(self, *_args: Any) -> Any:
        raise AssertionError("images that the router has made are not checked and hashed again")


async def test_images_of_chat_are_handed_over_once(model, reader):
    given = workers(model)
    only: Any = ReaderOfFiles(reader)
    async with front_of(*given, model=model, images=only) as front:
        answer = await front.post("/v1/chat/completions", json={"messages": [openai_turn()]})
    assert answer.status_code == 200
    (request,) = given[0].requests
    (sent,) = request.encoder_inputs
    assert sent.start == list(request.token_ids).index(PLACEHOLDER_ID)
    assert sent.length == TOKENS_PER_IMAGE


async def test_tokenize_and_count_expand_images(model, reader):
    async with front_of(*workers(model), model=model, images=reader) as front:
        tokens = await front.post("/tokenize", json={"messages": [openai_turn()]})
        count = await front.post("/v1/messages/count_tokens", json={"messages": [messages_turn()]})
    ids = await expected(model, reader)
    assert tokens.json()["tokens"] == ids
    assert count.json()["input_tokens"] == len(ids)


BAD = "data:image/png;base64,AAAA"
TOOL_USE = {"type": "tool_use", "id": "call_1", "name": "look", "input": {}}
REFUSED: dict[str, Any] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [openai_turn(), openai_turn(BAD)]},
        "messages[1].content[1].image_url",
    ),
    "a file": (
        "/v1/chat/completions",
        {"messages": [openai_turn("file:///etc/passwd")]},
        "messages[0].content[1].image_url",
    ),
    "a host": (
        "/v1/chat/completions",
        {"messages": [openai_turn("https://example.org/a.png")]},
        "messages[0].content[1].image_url",
    ),
    "a response": (
        "/v1/responses",
        {"instructions": "w1", "input": [responses_turn(), responses_turn(BAD)]},
        "input[1].content[1].image_url",
    ),
    "a message": (
        "/v1/messages",
        {"system": "w1", "max_tokens": 9, "messages": [messages_turn({"type": "url", "url": BAD})]},
        "messages[0].content[1].source",
    ),
    "a result": (
        "/v1/messages",
        {
            "max_tokens": 9,
            "messages": [
                {"role": "user", "content": "w1"},
                {"role": "assistant", "content": [TOOL_USE]},
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "call_1",
                            "content": [{"type": "image", "source": {"type": "url", "url": BAD}}],
                        }
                    ],
                },
            ],
        },
        "messages[2].content[0].content[0].source",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_front_names_the_image_that_it_refuses(model, reader, name):
    path, body, field = REFUSED[name]
    async with front_of(*workers(model), model=model, images=reader) as front:
        response = await front.post(path, json={"model": model.name, **body})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(f"{field}: ")


async def test_text_prompt_of_vision_model_needs_no_images(model, reader):
    given = workers(model)
    async with front_of(*given, model=model, images=reader) as front:
        response = await front.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": TEXT}]}
        )
    assert response.status_code == 200
    assert prompt_given_to(given) == model.encode_rendered(f"user : {TEXT} assistant :")


async def test_deadline_covers_images(model, reader):
    (process,) = reader.pool._idle
    os.kill(process.pid, signal.SIGSTOP)
    try:
        async with front_of(*workers(model), model=model, images=reader) as front:
            new = data_url(encoded(image(2)))  # which is in no cache
            body = {"messages": [openai_turn(new)], "baton": {"timeout_s": 0.3}}
            response = await front.post("/v1/chat/completions", json=body)
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert response.status_code == 504
    assert response.json()["error"]["message"] == "the request's deadline has passed"


@pytest.mark.parametrize("is_bad", [False, True], ids=["read", "refused"])
async def test_stream_begins_while_its_images_are_read(model, reader, is_bad):
    """The reader goes on once the client has a sign of life."""
    async with front_of(*workers(model), model=model, images=reader) as front:
        turns = [openai_turn(data_url(encoded(image(51 + is_bad))))]
        await front.post("/v1/chat/completions", json={"messages": turns})
    (process,) = reader.pool._idle
    os.kill(process.pid, signal.SIGSTOP)
    parts: list[bytes] = []

    def note(part: bytes) -> None:
        parts.append(part)
        if part.startswith(b":"):
            os.kill(process.pid, signal.SIGCONT)

    new = data_url(encoded(image(41 + is_bad))[: 60 if is_bad else None])
    body = {"messages": [openai_turn(new)], "stream": True, "max_tokens": 20}
    try:
        async with front_of(
            *workers(model), model=model, images=reader, on_body=note, max_silence=0.05
        ) as front:
            response = await front.post("/v1/chat/completions", json=body)
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert (response.status_code, parts[0]) == (200, b"")
    assert parts[1].startswith(b":")
    if is_bad:
        assert b'"param":"messages[0].content[1].image_url"' in parts[-1]
    else:
        assert parts[-1].endswith(b"data: [DONE]\n\n")


async def test_model_of_text_refuses_images():
    async with front_of(*writing("ab", 1, pb.FINISH_REASON_END_OF_SEQUENCE)) as front:
        response: httpx.Response = await front.post(
            "/v1/chat/completions", json={"messages": [openai_turn()]}
        )
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "model")
    assert "takes no images" in error["message"]


async def test_client_gets_openais_error_for_bad_image(model, reader):
    async with front_of(*workers(model), model=model, images=reader) as front:
        with pytest.raises(openai.BadRequestError) as caught:
            await openai_client_of(front).chat.completions.create(
                model=model.name, messages=[openai_turn(BAD)]
            )
    assert caught.value.param == "messages[0].content[1].image_url"
