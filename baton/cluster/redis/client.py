"""Redis client with short timeouts and failover to the current master.

Data in Redis is advisory, so a command fails if it is not answered within `TIMEOUT`, plus
`CONNECT_TIMEOUT` if it needs a new connection. The client never retries a command; the caller
decides about that. Independent of the data stored, except that all keys have one hash tag.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import MovedError, NoPermissionError, RedisError, ResponseError
from redis.typing import KeyT, StreamIdT

from baton.cluster.redis.address import RedisAddress, parse_address
from baton.cluster.redis.master import MasterLookup, tls_options
from baton.cluster.redis.round_trips import Kind, RoundTrips
from baton.cluster.redis.server_version import ServerVersion
from baton.cluster.redis.signing import SigningKeys
from baton.errors import UnavailableError

TIMEOUT = 1.0  # seconds for one round trip
CONNECT_TIMEOUT = 2.0  # seconds to find the master, connect and, over TLS, shake hands

Command = tuple[str | bytes | int, ...]

_HEALTH_CHECK_INTERVAL = 10  # seconds idle after which a connection is pinged before use


class _Client(Redis):
    """Redis client that counts round trips and knows the key prefix of its deployment and the keys
    of its signatures."""

    round_trips: RoundTrips
    prefix: str
    signing_keys: SigningKeys | None


def connect(
    url: str, round_trips: RoundTrips | None = None, signing_keys: SigningKeys | None = None
) -> Redis:
    """Returns a client for the Redis at `url` (`baton.cluster.redis.address`) without connecting.
    The caller closes it (`aclose`).

    With Sentinels or a Cluster, each new connection goes to the current master.

    Args:
        round_trips: counts those of `transact` and `read_streams`.
        signing_keys: signs what is written, and refuses what none of these keys has signed. None:
            neither.

    Raises:
        InvalidArgumentError: `url` is not a Redis URL.
    """
    address = parse_address(url)
    client = _client(address)
    client.prefix = address.prefix
    client.round_trips = round_trips or RoundTrips()
    client.signing_keys = signing_keys
    return client


def prefix_of(redis: Redis) -> str:
    """Returns the prefix of all key names (`baton.cluster.keys`)."""
    return redis.prefix if isinstance(redis, _Client) else ""


def signing_keys_of(redis: Redis) -> SigningKeys | None:
    """Returns the keys of signatures; None if nothing is signed."""
    return redis.signing_keys if isinstance(redis, _Client) else None


def _client(address: RedisAddress) -> _Client:
    options = _options(address)
    if address.kind == "standalone":
        ((host, port),) = address.nodes
        return _Client(host=host, port=port, **options)
    if address.kind == "unix":
        return _Client(unix_socket_path=address.path, **options)
    make_pool: Callable[..., ConnectionPool] = SentinelConnectionPool
    pool = make_pool(address.service, MasterLookup(address), **options)
    client = _Client.from_pool(pool)
    assert isinstance(client, _Client), "a class method of its own"
    return client


def check_answers(url: str) -> ServerVersion | None:
    """Returns the version of the Redis at `url`; None if its user may not run INFO. Blocks the
    thread, for a few seconds at most.

    Raises:
        InvalidArgumentError: `url` is not a Redis URL.
        UnavailableError: it does not answer, or is too old; the message says why.
    """
    parse_address(url)
    with ThreadPoolExecutor(1) as thread:  # the calling thread may run an event loop already
        version = thread.submit(asyncio.run, _version(url)).result()
    if version is not None and not version.is_supported:
        raise UnavailableError(
            f"the server is {version}; expected Redis 6.2 or later, or Valkey. Upgrade it, or "
            "point --redis-url at another one"
        )
    return version


async def transact(redis: Redis, *commands: Command) -> list[Any]:
    """Runs `commands` as one transaction in one round trip; returns their replies in order.

    Raises:
        redis.exceptions.RedisError, OSError: within the timeouts. The commands may have run.
    """
    async with _bounded(redis, "command", TIMEOUT), redis.pipeline(transaction=True) as pipeline:
        for command in commands:
            pipeline.execute_command(*command)
        replies: list[Any] = await pipeline.execute()
        return replies


async def transact_each(redis: Redis, *commands: Command) -> list[Any]:
    """Runs `commands` as `transact` does. A key of a wrong type fails only its own commands: their
    replies are `redis.exceptions.ResponseError`s.

    Raises:
        redis.exceptions.RedisError, OSError: within the timeouts. The commands may have run.
    """
    async with _bounded(redis, "command", TIMEOUT), redis.pipeline(transaction=True) as pipeline:
        for command in commands:
            pipeline.execute_command(*command)
        replies: list[Any] = await pipeline.execute(raise_on_error=False)
        for reply in replies:
            if isinstance(reply, Exception) and not _is_wrong_type(reply):
                raise reply
        return replies


def _is_wrong_type(error: Exception) -> bool:
    return isinstance(error, ResponseError) and str(error).startswith("WRONGTYPE")


async def read_streams(
    redis: Redis, positions: Mapping[bytes, str], max_entries: int, wait_ms: int
) -> list[tuple[bytes, list[tuple[bytes, Mapping[bytes, bytes]]]]]:
    """Returns the entries after `positions`, by stream, at most `max_entries` of each. Waits up to
    `wait_ms` milliseconds for the first; 0: does not wait.

    Raises:
        redis.exceptions.RedisError, OSError: within the timeouts plus `wait_ms`.
    """
    async with _bounded(redis, "read", TIMEOUT + wait_ms / 1000):
        after: dict[KeyT, StreamIdT] = dict(positions)  # type: ignore[arg-type]
        replies: Any = await redis.xread(after, count=max_entries, block=wait_ms or None)
        return list(replies)


@asynccontextmanager
async def _bounded(redis: Redis, kind: Kind, seconds: float) -> AsyncIterator[None]:
    """Bounds a round trip to `seconds` plus `CONNECT_TIMEOUT`. Drops all connections on a MOVED
    error, so that new ones look up the master."""
    round_trips = redis.round_trips if isinstance(redis, _Client) else RoundTrips()
    try:
        with round_trips.timed(kind):
            async with asyncio.timeout(CONNECT_TIMEOUT + seconds):
                yield
    except MovedError:
        await redis.connection_pool.disconnect()
        raise


async def _version(url: str) -> ServerVersion | None:
    """Returns the server's version; None if the user may not run INFO."""
    try:
        async with connect(url) as redis, asyncio.timeout(CONNECT_TIMEOUT + TIMEOUT):
            await redis.ping()
            try:
                return ServerVersion.from_info(await redis.info("server"))
            except NoPermissionError:
                return None
    except (RedisError, OSError) as error:
        raise UnavailableError(f"Redis does not answer: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Returns the error with its cause, since asyncio reports only "connect call failed"."""
    cause = error.__cause__ or error.__context__
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
        return f"{error} ({os.strerror(cause.errno)})"
    return str(error) or type(error).__name__


def _options(address: RedisAddress) -> dict[str, Any]:
    return {
        "db": address.db,
        "username": address.username,
        "password": address.password,
        "socket_timeout": TIMEOUT,
        "socket_connect_timeout": CONNECT_TIMEOUT,
        "health_check_interval": _HEALTH_CHECK_INTERVAL,
        "retry": Retry(NoBackoff(), 0),
        "decode_responses": False,
        "protocol": 2,
        **tls_options(address.tls),
    }
