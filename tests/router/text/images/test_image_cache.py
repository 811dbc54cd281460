"""Cache of preprocessed images: bound, order, and requests that share it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from baton.context_length import ContextLength
from baton.models.images.encoder_input import TensorData
from baton.serving.tenant import Tenant
from baton.v1 import inference_pb2 as pb
from baton_router.call.generate_call import GivenClip, GivenImage
from baton_router.text.images.expansion import ReadImage
from baton_router.text.images.image_reader import FileKey, ImageCache, ImageReader
from baton_router.text.intake import Intake
from baton_router.text.model_card import read_model_card
from baton_router.text.prompt_images import PromptImages
from baton_router.text.request_bounds import RequestLimits
from tests.support.engine.images import IMAGE_TOKEN, image
from tests.support.router.calls import call_of, tokenized
from tests.support.router.front import front_of
from tests.support.router.images import (
    animated,
    data_url,
    encoded,
    running_reader,
    save_checkpoint,
)
from tests.support.router.written import writing

pytestmark = pytest.mark.asyncio(loop_scope="module")
BYTES = 3 * 24 * 24 * 4
FILES = [encoded(image(seed)) for seed in range(4)]
CLIP = animated([image(1), image(1).rotate(180)], "PNG")


def frames(num_bytes: int) -> tuple[ReadImage, ...]:
    data = {"pixel_values": TensorData("uint8", (num_bytes,), bytes(num_bytes))}
    return (ReadImage("<image>", (1,), b"", data),)


def key(name: str) -> FileKey:
    return FileKey(b"", name.encode(), 1)


async def test_cache_evicts_least_recently_used_beyond_its_bytes():
    cache = ImageCache(10)
    for name in "abc":
        cache.put(key(name), frames(3))
    assert cache.get(key("a"))
    cache.put(key("d"), frames(4))
    assert [name for name in "abcd" if cache.get(key(name))] == ["a", "c", "d"]
    assert cache.num_bytes == 10
    assert (cache.num_hits, cache.num_misses) == (4, 1)


async def test_cache_keeps_nothing_larger_than_its_bytes():
    cache = ImageCache(10)
    cache.put(key("a"), frames(10))
    cache.put(key("a"), frames(10))
    cache.put(key("b"), frames(11))
    assert cache.num_bytes == 10
    assert cache.get(key("b")) is None
    assert ImageCache(0).get(key("a")) is None


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return save_checkpoint("llava_clip", tmp_path_factory.mktemp("llava"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reader(checkpoint) -> AsyncIterator[ImageReader]:
    async with running_reader(checkpoint) as made:
        yield made


def cached(checkpoint: str, reader: ImageReader, cache_bytes: int = 2**20) -> Intake:
    """Returns an intake that has cached nothing."""
    reader.cache = ImageCache(cache_bytes)
    card = read_model_card(checkpoint)
    return Intake(card, RequestLimits(), images=PromptImages(card, reader))


def counts(intake: Intake) -> tuple[int, int]:
    cache = intake.images.cache
    assert cache is not None
    return cache.num_hits, cache.num_misses


async def read(intake: Intake, files: Sequence[bytes], tenant: Tenant) -> Any:
    text = " ".join(["w5", *[IMAGE_TOKEN] * len(files)])
    message = pb.GenerateRequest(text=text, images=[pb.Image(data=file) for file in files])
    request = await intake.read(call_of(message), ContextLength(256), tenant)
    tensors = [each.tensors for each in request.encoder_inputs]
    return request.token_ids, request.encoder_inputs, tensors


async def test_next_turn_decodes_new_images_alone(checkpoint, reader):
    tenant = Tenant()
    intake = cached(checkpoint, reader)
    first = await read(intake, FILES[:2], tenant)
    assert counts(intake) == (0, 2)
    second = await read(intake, FILES[:3], tenant)
    assert counts(intake) == (2, 3)
    assert second[2][:2] == first[2]
    intake = cached(checkpoint, reader, cache_bytes=0)
    assert await read(intake, FILES[:3], tenant) == second
    assert await read(intake, FILES[:3], tenant) == second
    assert counts(intake) == (0, 6)


async def test_tenants_find_only_their_own_images(checkpoint, reader):
    intake = cached(checkpoint, reader)
    for salt in (b"a" * 32, b"b" * 32, b""):
        await read(intake, FILES[:1], Tenant("one", salt))
    assert counts(intake) == (0, 3)
    given = pb.TokenizeRequest(text=f"w5 {IMAGE_TOKEN}", images=[pb.Image(data=FILES[0])])
    await tokenized(intake, given)  # of any tenant
    assert counts(intake) == (0, 3)


async def test_images_of_one_tenant_evict_no_others(checkpoint, reader):
    intake = cached(checkpoint, reader, cache_bytes=3 * BYTES)
    few, many = Tenant("few", b"f"), Tenant("many", b"m")
    await read(intake, FILES[:1], few)
    for at in range(1, 4):
        await read(intake, FILES[at : at + 1], many)
    assert counts(intake) == (0, 4)
    await read(intake, FILES[:1], few)
    assert counts(intake) == (1, 4)


async def test_dropped_images_are_read_again(checkpoint, reader):
    intake = cached(checkpoint, reader)
    assert intake.images.cache is not None
    for dropped, num_left, total in ((b"a", 1, (0, 2)), (b"c", 2, (1, 3)), (None, 0, (3, 3))):
        for salt in (b"a", b"b"):
            await read(intake, FILES[:1], Tenant("one", salt))
        assert counts(intake) == total
        intake.images.cache.drop(dropped)
        assert intake.images.cache.num_bytes == num_left * BYTES


async def test_image_and_clip_of_one_file_are_kept_apart(checkpoint, reader):
    intake = cached(checkpoint, reader)
    given = [GivenImage(CLIP, "one"), GivenClip(CLIP, "two")]
    both = await reader.read(given, b"")
    assert [len(each) for each in both] == [1, 2]
    assert await reader.read(given, b"") == both
    assert counts(intake) == (2, 2)


async def test_concurrent_requests_get_their_own_images(checkpoint, reader):
    tenants = [Tenant("one", b"a"), Tenant("two", b"b")]
    intake = cached(checkpoint, reader, cache_bytes=2 * BYTES)
    uncached = cached(checkpoint, reader, cache_bytes=0)
    asked = [(file, tenant) for file in range(4) for tenant in tenants]
    alone = [await read(uncached, [FILES[at]], who) for at, who in asked] * 4
    asked *= 4
    found = await asyncio.gather(*(read(intake, [FILES[at]], who) for at, who in asked))
    assert found == alone
    assert intake.images.cache is not None
    assert intake.images.cache.num_bytes <= 2 * BYTES


async def test_refused_image_is_not_cached(checkpoint, reader):
    intake = cached(checkpoint, reader)
    for _ in range(2):
        with pytest.raises(Exception, match="is no image that can be read"):
            await read(intake, [b"no image"], Tenant())
    assert counts(intake) == (0, 2)
    assert await read(intake, FILES[:1], Tenant())


async def test_next_turn_over_http_hits_cache(checkpoint, reader):
    model = read_model_card(checkpoint)
    intake = cached(checkpoint, reader)
    part = {"type": "image_url", "image_url": {"url": data_url(FILES[0])}}
    body = {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "w5"}]}]}
    workers = writing("w7 w8", 2, pb.FINISH_REASON_END_OF_SEQUENCE, model)
    async with front_of(*workers, model=model, images=reader) as front:
        for _ in range(3):
            assert (await front.post("/v1/chat/completions", json=body)).status_code == 200
    assert counts(intake) == (2, 1)
    first, *others = [list(request.encoder_inputs) for request in workers[0].requests]
    assert others == [first, first]
