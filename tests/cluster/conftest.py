"""Real Redis server and client for each test."""

from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis

from baton.cluster.embedded import EmbeddedRedis
from baton.cluster.redis import connect


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as running:
        yield running


@pytest.fixture
async def redis(server: EmbeddedRedis) -> AsyncIterator[Redis]:
    client = connect(server.url)
    yield client
    await client.aclose()
