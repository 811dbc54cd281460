"""Clips as frames: prompts over gRPC and HTTP, limits and refusals."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from transformers import AutoProcessor

from baton.context_length import ContextLength
from baton.v1 import inference_pb2 as pb
from baton_router.text.images.image_limits import ImageLimits
from baton_router.text.images.image_source import sampled
from baton_router.text.intake import Intake
from baton_router.text.model_card import read_model_card
from tests.support.engine.images import image
from tests.support.router.calls import call_of, tokenized
from tests.support.router.front import front_of
from tests.support.router.images import (
    animated,
    data_url,
    encoded,
    frames_url,
    running_intake,
    save_checkpoint,
)
from tests.support.router.written import writing

pytestmark = pytest.mark.asyncio(loop_scope="module")
MAX_LEN = ContextLength(256)
PICTURES = [image(1).rotate(angle) for angle in range(0, 360, 60)]
FILES = [encoded(picture) for picture in PICTURES]
CLIP = animated(PICTURES, "PNG")
CLIP_URL = data_url(CLIP)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return save_checkpoint("llava_clip", tmp_path_factory.mktemp("llava"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def intake(checkpoint) -> AsyncIterator[Intake]:
    limits = ImageLimits(max_per_request=7, max_clip_frames=3, processes=1)
    async with running_intake(checkpoint, limits) as made:
        yield made


Part = str | dict[str, Any]


def picture(file: bytes) -> Part:
    return {"image": pb.Image(data=file)}


def clip(source: bytes | str = CLIP) -> Part:
    field = "data" if isinstance(source, bytes) else "url"
    return {"clip": pb.Image(**{field: source})}


def chat(*turns: list[Part]) -> pb.Chat:
    messages = [
        pb.ChatMessage(
            role="user",
            parts=[
                pb.ContentPart(text=part) if isinstance(part, str) else pb.ContentPart(**part)
                for part in turn
            ],
        )
        for turn in turns
    ]
    return pb.Chat(messages=messages)


async def read(intake: Intake, *turns: list[Part]) -> Any:
    request = await intake.read(call_of(pb.GenerateRequest(chat=chat(*turns))), MAX_LEN)
    return request.token_ids, request.encoder_inputs


@pytest.mark.parametrize(
    ("num", "most", "taken"),
    [
        (1, 8, [0]),
        (8, 8, [0, 1, 2, 3, 4, 5, 6, 7]),
        (9, 8, [0, 1, 2, 3, 4, 5, 6, 8]),
        (100, 3, [0, 49, 99]),
        (100, 2, [0, 99]),
        (5, 1, [0]),
    ],
)
async def test_sampled_frames_are_evenly_spaced(num, most, taken):
    assert sampled(num, most) == taken


async def test_clip_equals_its_frames_as_images(intake):
    first, second, third = (picture(FILES[at]) for at in (0, 2, 5))
    frames = await read(intake, ["w5", first, second, third, "w6"], [first, "w7"])
    assert await read(intake, ["w5", clip(), "w6"], [first, "w7"]) == frames
    assert await read(intake, ["w5", clip(CLIP_URL), "w6"], [clip(FILES[0]), "w7"]) == frames
    assert await read(intake, ["w5", clip(frames_url(FILES)), "w6"], [first, "w7"]) == frames


async def test_clip_equals_the_processors(intake, checkpoint):
    processor = AutoProcessor.from_pretrained(checkpoint)
    turns = [
        {"role": "user", "content": [{"type": "image"}] * 2 + [{"type": "text", "text": "w9"}]}
    ]
    rendered = processor.apply_chat_template(turns, add_generation_prompt=True)
    expected = processor(text=rendered, images=PICTURES[:2], add_special_tokens=False)
    token_ids, inputs = await read(intake, [clip(animated(PICTURES[:2], "PNG")), "w9"])
    assert list(token_ids) == expected["input_ids"][0]
    assert len(inputs) == 2


async def test_tokenize_counts_frames_of_clip(intake):
    given = chat(["w5", clip()])
    token_ids, _ = await tokenized(intake, pb.TokenizeRequest(chat=given))
    assert tuple(token_ids) == (await read(intake, ["w5", clip()]))[0]


def turn(url: str) -> dict[str, Any]:
    part = {"type": "video_url", "video_url": {"url": url}}
    return {"role": "user", "content": [{"type": "text", "text": "w5"}, part]}


@pytest.mark.parametrize("url", [CLIP_URL, frames_url(FILES)], ids=["a file", "frames"])
async def test_front_takes_clip_as_over_grpc(intake, checkpoint, url):
    model = read_model_card(checkpoint)
    workers = writing("w7 w8", 2, pb.FINISH_REASON_END_OF_SEQUENCE, model)
    body = {"messages": [turn(url)]}
    async with front_of(*workers, model=model, images=intake.images.reader) as front:
        answer = await front.post("/v1/chat/completions", json=body)
        tokens = await front.post("/tokenize", json=body)
    assert answer.status_code == 200
    expected, inputs = await read(intake, ["w5", clip()])
    assert tokens.json()["tokens"] == list(expected)
    (request,) = workers[0].requests
    assert list(request.token_ids) == list(expected)
    assert [each.content_hash for each in request.encoder_inputs] == [
        each.content_hash for each in inputs
    ]


CONTENT = "messages[0].content[1].video_url: "
REFUSED = {
    "a video": (data_url(b"\0\0\0\x18ftypmp42", "video/mp4"), "Send a video as frames"),
    "a host": ("https://example.org/a.gif", "--images-url-hosts"),
    "a path": ("file:///a.gif", "expected a data URL"),
    "an empty frame": (frames_url([FILES[0], b""]), "is empty"),
    "a broken frame": (frames_url([FILES[0], b"no frame"]), "is no image that can be read"),
    "many frames": (frames_url([b""] * 5000), "has 5000 frames; at most 4096 are taken"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_front_names_the_clip_that_it_refuses(intake, checkpoint, name):
    url, reason = REFUSED[name]
    model = read_model_card(checkpoint)
    workers = writing("w7 w8", 2, pb.FINISH_REASON_END_OF_SEQUENCE, model)
    async with front_of(*workers, model=model, images=intake.images.reader) as front:
        answer = await front.post("/v1/chat/completions", json={"messages": [turn(url)]})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert message.startswith(CONTENT)
    assert reason in message


@pytest.mark.parametrize("url", [CLIP_URL, frames_url(FILES)], ids=["files", "frames"])
async def test_frames_count_as_images_of_the_request(intake, checkpoint, url):
    model = read_model_card(checkpoint)
    workers = writing("w7 w8", 2, pb.FINISH_REASON_END_OF_SEQUENCE, model)
    async with front_of(*workers, model=model, images=intake.images.reader) as front:
        body = {"messages": [turn(url)] * 3}
        answer = await front.post("/v1/chat/completions", json=body)
    assert answer.json()["error"]["message"] == (
        "messages[2].content[1].video_url: makes 9 images of the request, frames of clips "
        "included; at most 7 are taken"
    )


OTHER_APIS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a response": (
        "/v1/responses",
        "input_video",
        {"input": [{"role": "user", "content": [{"type": "input_video", "video_url": CLIP_URL}]}]},
    ),
    "a message": (
        "/v1/messages",
        "video",
        {"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "video"}]}]},
    ),
}


@pytest.mark.parametrize("name", OTHER_APIS)
async def test_other_apis_refuse_clips(intake, checkpoint, name):
    path, named, body = OTHER_APIS[name]
    model = read_model_card(checkpoint)
    workers = writing("w7 w8", 2, pb.FINISH_REASON_END_OF_SEQUENCE, model)
    async with front_of(*workers, model=model, images=intake.images.reader) as front:
        answer = await front.post(path, json={"model": model.name, **body})
    assert answer.status_code == 400
    assert f"is {named!r}, which is not supported here" in answer.json()["error"]["message"]
