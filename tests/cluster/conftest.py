"""Real Redis server and client for each test."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from baton.cluster.redis.client import connect
from baton.cluster.redis.embedded import EmbeddedRedis
from tests.support.redis_loops import Loops
from tests.support.redis_servers import SUPPORTED, RedisServer


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as running:
        yield running


@pytest.fixture(params=SUPPORTED)
def supported_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    """Each server that the documentation promises."""
    with RedisServer(tmp_path, binary=request.param()) as running:
        yield running


@pytest.fixture
async def redis(server: EmbeddedRedis) -> AsyncIterator[Redis]:
    client = connect(server.url)
    yield client
    await client.aclose()


@pytest.fixture
async def loops(redis: Redis) -> AsyncIterator[Loops]:
    """Stops what it started before `redis` is closed."""
    running = Loops()
    yield running
    await running.stop()
