"""Names, versions and bounds of Redis servers, and how one that is too old is told."""

import asyncio
from collections.abc import Mapping

import pytest

from baton.cluster.redis.client import check_answers
from baton.cluster.redis.server_version import ServerVersion
from baton.errors import UnavailableError
from tests.support.redis_servers import RedisServer

VALKEY_9 = {"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "9.1.2"}


@pytest.mark.parametrize(
    ("info", "said", "supported"),
    [
        (VALKEY_9, "Valkey 9.1.2", True),
        ({"redis_version": "7.2.4", "valkey_version": "7.2.5"}, "Valkey 7.2.5", True),
        ({"redis_version": "7.0.15"}, "Redis 7.0.15", True),
        ({"redis_version": "6.2.0"}, "Redis 6.2.0", True),
        ({"redis_version": "10.0.0"}, "Redis 10.0.0", True),
        ({"redis_version": "6.0.16"}, "Redis 6.0.16", False),
        ({"redis_version": "5.0.7"}, "Redis 5.0.7", False),
        ({}, "Redis", True),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_server_version_is_read_from_info(
    info: Mapping[str, str], said: str, supported: bool
) -> None:
    version = ServerVersion.from_info(info)
    assert (str(version), version.is_supported) == (said, supported)


def test_check_answers_returns_the_version(supported_server: RedisServer) -> None:
    reported = supported_server.info("server")
    version = check_answers(f"redis://{supported_server.node}/0")
    assert version == ServerVersion.from_info(reported)
    assert version.version.split(".") > ["6", "1"]
    # Which of the fields is the server's own: a Valkey reports a `redis_version` as well.
    assert version.name == ("Valkey" if "valkey_version" in reported else "Redis")


async def test_check_answers_rejects_redis_that_is_too_old() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = b"# Server\r\nredis_version:6.0.16\r\n"
        while line := await reader.readline():
            if b"INFO" in line.upper():
                writer.write(b"$%d\r\n%s\r\n" % (len(info), info))
            elif b"PING" in line:
                writer.write(b"+PONG\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(UnavailableError, match=r"is Redis 6\.0\.16; expected Redis 6\.2 or"):
            await asyncio.to_thread(check_answers, f"redis://127.0.0.1:{port}/0")
