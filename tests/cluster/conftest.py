"""A real Redis for every test, and a patient way to wait for what background tasks do."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from redis.asyncio import Redis

from baton.cluster.embedded import EmbeddedRedis
from baton.cluster.redis import connect

Eventually = Callable[..., object]


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as running:
        yield running


@pytest.fixture
async def redis(server: EmbeddedRedis) -> AsyncIterator[Redis]:
    client = connect(server.url)
    yield client
    await client.aclose()


@pytest.fixture
def eventually() -> Eventually:
    """`await eventually(condition, within=5.0)` returns once `condition()` holds, or fails."""

    async def wait(condition: Callable[[], bool], within: float = 5.0) -> None:
        deadline = time.monotonic() + within
        while not condition():
            assert time.monotonic() < deadline, f"it did not happen within {within} s"
            await asyncio.sleep(0.01)

    return wait
