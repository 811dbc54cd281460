"""Prompts with images, against transformers' own processor and against `LLM`."""

import base64
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
from PIL import Image
from transformers import AutoProcessor

from baton.context_length import ContextLength
from baton.engine.executor.vision.prompt_processor import PromptProcessor
from baton.errors import FailedPreconditionError, InvalidArgumentError
from baton.models import locate
from baton.rpc.encoder_inputs import encoder_input_to_message
from baton.serving.tenant import Tenant
from baton.v1 import inference_pb2 as pb
from baton_router.call.request import Request
from baton_router.text.intake import Intake
from baton_router.text.model_card import read_model_card
from baton_router.text.prompt_images import PromptImages
from baton_router.text.request_bounds import RequestLimits
from tests.support.engine.images import IMAGE_TOKEN, PLACEHOLDER_ID, TOKENS_PER_IMAGE, image, words
from tests.support.router.calls import call_of, tokenized
from tests.support.router.images import encoded, running_intake, save_checkpoint

MAX_LEN = ContextLength(256)
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module", params=["llava_clip", "llava_siglip"])
def checkpoint(request, tmp_path_factory) -> str:
    return save_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def intake(checkpoint) -> AsyncIterator[Intake]:
    async with running_intake(checkpoint) as made:
        yield made


def files(*seeds: int) -> list[pb.Image]:
    return [pb.Image(data=encoded(image(seed))) for seed in seeds]


def text_of(num_images: int) -> str:
    return f" {IMAGE_TOKEN} ".join(words(3, seed) for seed in range(num_images + 1))


async def read(intake: Intake, **fields: object) -> Request:
    return await intake.read(call_of(pb.GenerateRequest(**fields)), MAX_LEN)


async def refusal(intake: Intake, **fields: object) -> InvalidArgumentError:
    with pytest.raises(InvalidArgumentError) as caught:
        await read(intake, **fields)
    return caught.value


def chat(*parts: str | pb.Image, role: str = "user") -> pb.Chat:
    given = [
        pb.ContentPart(text=p) if isinstance(p, str) else pb.ContentPart(image=p) for p in parts
    ]
    return pb.Chat(messages=[pb.ChatMessage(role=role, parts=given)])


async def test_prompt_equals_the_processors(intake, checkpoint):
    processor = AutoProcessor.from_pretrained(checkpoint)
    for seeds in ((1,), (2, 3), (4, 4, 5)):
        text = text_of(len(seeds))
        given = processor(text=text, images=list(map(image, seeds)), return_tensors="np")
        request = await read(intake, text=text, images=files(*seeds))
        assert request.token_ids == tuple(given["input_ids"][0].tolist())
        pixels = [
            np.frombuffer(each.tensors["pixel_values"].data, np.float32).reshape(
                each.tensors["pixel_values"].shape
            )
            for each in request.encoder_inputs
        ]
        assert np.array_equal(np.concatenate(pixels), given["pixel_values"])


async def test_inputs_equal_those_of_the_engine(intake, checkpoint):
    reader = intake.images.reader
    processor = PromptProcessor(checkpoint, reader._format)
    prompt = processor(text_of(2), [image(6), image(7)])
    request = await read(intake, text=text_of(2), images=files(6, 7))
    assert request.token_ids == tuple(prompt.token_ids)
    assert request.encoder_inputs == tuple(prompt.encoder_inputs)
    assert [each.tensors for each in request.encoder_inputs] == [
        each.tensors for each in prompt.encoder_inputs
    ]


async def test_token_ids_expand_as_the_text(intake):
    by_text = await read(intake, text=text_of(2), images=files(1, 2))
    tokens = pb.TokenIds(ids=intake._card.encode(text_of(2)))
    by_ids = await read(intake, token_ids=tokens, images=files(1, 2))
    assert by_ids.token_ids == by_text.token_ids
    assert by_ids.encoder_inputs == by_text.encoder_inputs


async def test_chat_equals_the_processors(intake, checkpoint):
    processor = AutoProcessor.from_pretrained(checkpoint)
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "w9 w8"}, {"type": "image"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "w7"}]},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "w6"}]},
    ]
    rendered = processor.apply_chat_template(turns, add_generation_prompt=True)
    given = processor(
        text=rendered, images=[image(1), image(2)], add_special_tokens=False, return_tensors="np"
    )
    messages = [
        *chat("w9 w8", *files(1)).messages,
        pb.ChatMessage(role="assistant", content="w7"),
        *chat(*files(2), "w6").messages,
    ]
    request = await read(intake, chat=pb.Chat(messages=messages))
    assert request.token_ids == tuple(given["input_ids"][0].tolist())
    assert len(request.encoder_inputs) == 2


@pytest.mark.parametrize(
    "texts",
    [[f"a {IMAGE_TOKEN} b"], [IMAGE_TOKEN], ["<", "image", ">"], ["<image", ">"], ["<im", "age>"]],
    ids=["within", "alone", "in three parts", "in two parts", "in other parts"],
)
async def test_placeholder_in_users_text_is_text(intake, texts):
    without = await read(intake, chat=chat(*texts))
    assert PLACEHOLDER_ID not in without.token_ids
    request = await read(intake, chat=chat(*texts, *files(1), *texts))
    assert request.token_ids.count(PLACEHOLDER_ID) == TOKENS_PER_IMAGE
    (encoder_input,) = request.encoder_inputs
    assert encoder_input.start == request.token_ids.index(PLACEHOLDER_ID)


async def test_preprocessed_images_are_hashed_here(intake):
    made = await read(intake, text=text_of(2), images=files(1, 2))
    inputs = list(map(encoder_input_to_message, made.encoder_inputs))
    for each in inputs:
        each.content_hash = b"x" * 16
    tokens = pb.TokenIds(ids=made.token_ids)
    request = await read(intake, token_ids=tokens, encoder_inputs=inputs)
    assert request.encoder_inputs == made.encoder_inputs


async def test_content_hashes_of_tenants_differ(intake):
    message = pb.GenerateRequest(text=text_of(1), images=files(1))
    tenants = [Tenant("one", salt) for salt in (b"", b"a" * 32, b"b" * 32, b"a" * 32)]
    requests = [await intake.read(call_of(message), MAX_LEN, tenant) for tenant in tenants]
    shared, first, second, again = [r.encoder_inputs[0].content_hash for r in requests]
    assert len({shared, first, second}) == 3
    assert again == first
    assert {len(shared), len(first)} == {16}


async def test_preprocessed_images_are_checked(intake):
    made = await read(intake, text=text_of(1), images=files(1))
    tokens = pb.TokenIds(ids=made.token_ids)
    given = encoder_input_to_message(made.encoder_inputs[0])

    async def field_of(**changes: object) -> str:
        changed = pb.GenerateRequest().encoder_inputs.add()
        changed.CopyFrom(given)
        for name, value in changes.items():
            setattr(changed, name, value)
        if not changes:
            changed.tensors["pixel_values"].shape[0] = 2
        return (await refusal(intake, token_ids=tokens, encoder_inputs=[changed])).field

    assert await field_of(start=given.start + 1) == "encoder_inputs[0].start"
    assert await field_of(length=given.length - 1) == "encoder_inputs[0].length"
    assert await field_of() == "encoder_inputs[0].tensors"
    twice = await refusal(intake, token_ids=tokens, encoder_inputs=[given, given])
    assert twice.field == "encoder_inputs[1].start"
    beside = await refusal(intake, text="w1", encoder_inputs=[given])
    assert beside.field == "encoder_inputs"


async def test_tokenize_expands_images(intake):
    made = await read(intake, text=text_of(1), images=files(1))
    message = pb.TokenizeRequest(text=text_of(1), images=files(1))
    token_ids, text = await tokenized(intake, message)
    assert tuple(token_ids) == made.token_ids
    assert text.count(IMAGE_TOKEN) == TOKENS_PER_IMAGE


def without_padding(text: str) -> str:
    return text.rstrip("=")


def wrapped(text: str) -> str:
    return "\r\n".join(text[at : at + 76] for at in range(0, len(text), 76)) + "\n"


async def test_other_number_of_placeholders_is_refused(intake):
    for fields, field in (
        ({"text": text_of(2), "images": files(1)}, "input.text"),
        ({"text": text_of(1)}, "input.text"),
        ({"token_ids": pb.TokenIds(ids=[5, 6]), "images": files(1)}, "input.token_ids"),
    ):
        error = await refusal(intake, **fields)
        assert error.field == field
        assert f"expected it once for each of the {len(fields.get('images', []))}" in error.problem


async def test_refused_images_are_named(intake):
    good, bad = files(1)[0], pb.Image(data=b"no image")
    in_text = await refusal(intake, text=text_of(2), images=[good, bad])
    assert in_text.field == "images[1].data"
    in_chat = await refusal(intake, chat=chat("w1", pb.Image(url="data:image/png;base64,AAAA")))
    assert in_chat.field == "input.chat.messages[0].parts[1].image.url"
    empty = await refusal(intake, chat=chat("w1", pb.Image()))
    assert empty.field == "input.chat.messages[0].parts[1].image"
    beside = await refusal(intake, chat=chat("w1", good), images=[good])
    assert beside.field == "images"


@pytest.mark.symptom(
    "llama.cpp#20870, ollama#18432",
    there="the orientation of EXIF is ignored",
    here="Turns the image as it says.",
)
async def test_image_is_turned_as_its_exif_says(intake):
    upright = Image.fromarray(np.arange(24 * 30 * 3, dtype=np.uint8).reshape(24, 30, 3))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    turned = encoded(upright.transpose(Image.Transpose.ROTATE_90), exif=exif)
    found = [
        (await read(intake, text=text_of(1), images=[pb.Image(data=file)])).encoder_inputs
        for file in (encoded(upright), turned)
    ]
    assert found[0] == found[1]


@pytest.mark.symptom(
    "OmniBot#360, ds4#950",
    there="base64 of an image with line breaks is refused",
    here="Takes it, also without padding.",
)
@pytest.mark.parametrize("written", [str, without_padding, wrapped])
async def test_data_url_equals_the_file(intake, written):
    file = encoded(image(1))
    while len(file) % 3 != 1:  # so that there is padding
        file += b"\0"
    url = "data:image/png;base64," + written(base64.b64encode(file).decode())
    by_url = await read(intake, text=text_of(1), images=[pb.Image(url=url)])
    by_file = await read(intake, text=text_of(1), images=[pb.Image(data=file)])
    assert by_url.encoder_inputs == by_file.encoder_inputs


async def test_model_without_images_refuses_them():
    card = read_model_card(locate("tiny"))
    intake = Intake(card, RequestLimits(max_prompt_bytes=1000))
    for fields in ({"text": "abc", "images": files(1)}, {"chat": chat("abc", *files(1))}):
        with pytest.raises(FailedPreconditionError, match="takes no images"):
            await read(intake, **fields)
    intake = Intake(
        card,
        RequestLimits(max_prompt_bytes=1000),
        images=PromptImages(card, why_none="pip install more"),
    )
    with pytest.raises(FailedPreconditionError, match="pip install more"):
        await read(intake, text="abc", images=files(1))
