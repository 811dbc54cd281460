"""Processes that decode images, and the tenants that share them."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest
import pytest_asyncio

from baton.context_length import ContextLength
from baton.errors import OverloadedError
from baton.serving.tenant import Tenant
from baton.v1 import inference_pb2 as pb
from baton_router.text.images import image_process as decoder
from baton_router.text.images.image_limits import ImageLimits
from baton_router.text.images.image_pool import ImagePool, RefusedImageError
from baton_router.text.images.image_reader import ImageReader
from baton_router.text.intake import Intake
from baton_router.text.model_card import read_model_card
from baton_router.text.prompt_images import PromptImages
from baton_router.text.request_bounds import RequestLimits
from tests.support.child_processes import children_running
from tests.support.engine.images import IMAGE_TOKEN, image
from tests.support.router.calls import call_of, tokenized
from tests.support.router.images import encoded, running_reader, save_checkpoint
from tests.support.waiting import settled, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
GOOD = encoded(image(1))
PATIENT = ImageLimits(timeout_s=60.0, processes=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return save_checkpoint("llava_clip", tmp_path_factory.mktemp("llava"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reader(checkpoint) -> AsyncIterator[ImageReader]:
    async with running_reader(checkpoint, PATIENT) as made:
        yield made


def decoders() -> set[int]:
    """Returns the processes that decode images for this one."""
    return {child.pid for child in children_running(decoder.__name__, psutil.Process())}


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


@asynccontextmanager
async def pool_of(checkpoint: str, num_processes: int) -> AsyncIterator[tuple[ImagePool, int]]:
    """Yields a pool with one process that is stopped, and its id."""
    pool, others = ImagePool(checkpoint, PATIENT, num_processes), decoders()
    try:
        await pool.start()
        (stopped,) = decoders() - others
        stop(stopped)
        yield pool, stopped
    finally:
        await pool.close()


async def test_pool_keeps_a_process_free_of_each_tenant(checkpoint, reader):
    card = read_model_card(checkpoint)
    intake = Intake(card, RequestLimits(), images=PromptImages(card, reader))
    text = f"w5 {IMAGE_TOKEN}"
    (stopped,) = decoders()
    stop(stopped)

    def read(seed: int, tenant: str) -> "asyncio.Task[object]":
        message = pb.GenerateRequest(text=text, images=[pb.Image(data=encoded(image(seed)))])
        reading = intake.read(call_of(message), ContextLength(256), Tenant(tenant))
        return asyncio.create_task(reading)

    of_many = [read(seed, "many") for seed in range(4)]
    await until(lambda: reader.pool.num_waiting == 3, within=120.0)
    assert await read(5, "few")
    await tokenized(intake, pb.TokenizeRequest(text=text, images=[pb.Image(data=GOOD)]))
    assert not any(task.done() for task in of_many)
    assert (reader.pool.num_busy, reader.pool.num_waiting, reader.pool.num_idle) == (1, 3, 1)
    os.kill(stopped, signal.SIGCONT)
    assert all(await asyncio.gather(*of_many))


async def test_pool_replaces_process_in_the_turn_that_ended_it(checkpoint):
    async with pool_of(checkpoint, 2) as (pool, stopped):
        first = asyncio.create_task(pool.process(GOOD, holder="many"))
        # The last process is started ahead.
        await until(lambda: (pool.num_busy, pool.num_idle) == (1, 1), within=120.0)
        second = asyncio.create_task(pool.process(GOOD, holder="many"))
        os.kill(stopped, signal.SIGKILL)
        with pytest.raises(RefusedImageError, match="crashed its decoder"):
            await first
        assert (pool.num_waiting, pool.num_idle) == (1, 1)
        assert await pool.process(GOOD, holder="few")
        assert await second
        assert pool.num_restarts == 1


async def test_pool_gives_second_process_once_a_third_is_up(checkpoint):
    async with pool_of(checkpoint, 3) as (pool, stopped):
        first = asyncio.create_task(pool.process(GOOD, holder="many"))
        await until(lambda: (pool.num_busy, pool.num_idle) == (1, 1), within=120.0)
        second = asyncio.create_task(pool.process(GOOD, holder="many"))
        await settled()
        assert (pool.num_busy, pool.num_waiting, pool.num_idle) == (1, 1, 1)
        assert await pool.process(GOOD, holder="few")
        assert await second
        os.kill(stopped, signal.SIGCONT)
        assert await first
        await until(lambda: pool.num_idle == 3, within=120.0)


async def test_full_pool_displaces_newest_of_largest_tenant(checkpoint):
    decoded, refused = [], []

    async def decode(tenant: str, number: int) -> None:
        try:
            await pool.process(GOOD, holder=tenant)
        except OverloadedError:
            refused.append((tenant, number))
        else:
            decoded.append(tenant)

    async with pool_of(checkpoint, 1) as (pool, stopped):
        jobs = [asyncio.create_task(decode("many", number)) for number in range(66)]
        await settled()
        jobs.append(asyncio.create_task(decode("few", 0)))
        await settled()
        assert refused == [("many", 65), ("many", 64)]
        assert pool.num_waiting == 64
        os.kill(stopped, signal.SIGCONT)
        await asyncio.gather(*jobs)
        assert decoded.index("few") <= 2
        assert len(decoded) == 65
