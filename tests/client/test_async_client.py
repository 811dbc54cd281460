import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from baton import AsyncClient, SamplingParams, errors
from tests.support.router.fake_router import ANSWER, TWO, accepted


@pytest_asyncio.fixture
async def client(address: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(address, timeout=10.0) as client:
        yield client


async def ended(router) -> bool:
    return await asyncio.to_thread(router.ended.wait, 1.0)


async def test_generation_streams_chunks_as_the_router_sends_them(client):
    generation = client.generate("Hi")
    assert generation.accepted is None
    assert [chunk.text async for chunk in generation] == ["Hel", "lo"]
    assert generation.accepted.request_id == "r-1"
    assert generation.finished.stop_string == "\n"


async def test_generation_text_covers_chunks_already_read(client, router):
    router.script = TWO
    generation = client.generate([1, 2], SamplingParams(n=2, temperature=1.0))
    await anext(generation)
    assert await generation.text() == "Yo"
    assert await generation.token_ids() == [8, 9]
    assert await generation.texts() == ["Yo", "Hey"]
    assert (await generation.completions())[0].finished is generation.finished


async def test_wait_accepted_returns_the_placement(client, router):
    router.script = [accepted(), None]
    async with client.generate("Hi") as generation:
        assert (await generation.wait_accepted()).placement.decode_worker == "d0"
    assert await ended(router)


async def test_leaving_a_generation_early_cancels_the_request(client, router):
    router.script = [*ANSWER[:2], None]
    async with client.generate("Hi") as generation:
        async for _ in generation:
            break
    assert await ended(router)


async def test_reading_after_cancel_raises_cancelled(client, router):
    router.script = [*ANSWER[:2], None]
    generation = client.generate("Hi")
    await anext(generation)
    generation.cancel()
    for _ in range(2):
        with pytest.raises(errors.CancelledError):
            await anext(generation)


async def test_cancelling_the_reading_task_cancels_the_request(client, router):
    router.script = [*ANSWER[:2], None]
    task = asyncio.create_task(client.generate("Hi").text())
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await ended(router)


async def test_reader_timeout_raises_timeout_error(client, router):
    router.script = [accepted(), None]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await client.generate("Hi").text()
    assert await ended(router)


async def test_close_cancels_running_generations(client, router):
    router.script = [*ANSWER[:2], None]
    generation = client.generate("Hi")
    await anext(generation)
    await client.close()
    with pytest.raises(errors.CancelledError):
        await generation.text()


async def test_generation_raises_a_mid_stream_error_each_time(client, router):
    router.script = [*ANSWER[:2], errors.OverloadedError("full", retry_after=2.0)]
    generation = client.generate("Hi")
    assert (await anext(generation)).text == "Hel"
    for _ in range(2):
        with pytest.raises(errors.OverloadedError) as caught:
            await generation.text()
        assert caught.value.retry_after == 2.0


async def test_client_serves_many_generations_at_once(client):
    texts = await asyncio.gather(*(client.generate("Hi").text() for _ in range(16)))
    assert texts == ["Hello"] * 16


async def test_client_returns_plain_values_from_unary_calls(client):
    assert (await client.tokenize("Hi")).text == "Hi"
    assert (await client.get_model()).name == "tiny"
    assert [worker.id for worker in await client.list_workers()] == ["d0"]
    with pytest.raises(errors.NotFoundError):
        await client.abort("other")
