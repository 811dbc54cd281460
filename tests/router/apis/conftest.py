"""Redis of the responses that are stored."""

from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis

from baton.cluster.redis.client import connect
from baton.cluster.redis.embedded import EmbeddedRedis


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as running:
        yield running


@pytest.fixture
async def redis(server: EmbeddedRedis) -> AsyncIterator[Redis]:
    client = connect(server.url)
    await client.flushdb()
    yield client
    await client.aclose()
