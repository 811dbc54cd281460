"""Check of the Redis that a cluster would use."""

import asyncio
import time
from collections.abc import Iterator
from statistics import median

from baton.cli.checks.finding import Finding, fault, note, ok
from baton.cluster.redis.client import check_answers, connect, transact
from baton.cluster.redis.embedded import EmbeddedRedis
from baton.errors import BatonError
from baton.installation import install_command

_NUM_TRIPS = 5
# Seconds of a slow round trip: commands time out after one second.
_SLOW = 0.1
_SKEW = 1.0


def store(url: str | None) -> Iterator[Finding]:
    """Checks the Redis at `url`; None: the one that `baton up` starts."""
    subject = "Redis" if url else "embedded Redis"
    try:
        if url is not None:
            yield from _look(subject, url)
            return
        redis = EmbeddedRedis()
        redis.start()
        try:
            yield from _look(subject, redis.url)
        finally:
            redis.stop()
    except BatonError as error:
        advice = (
            "check that it runs, and that this machine can reach it"
            if url
            else f"{install_command('worker')}, or name a Redis with --redis-url"
        )
        yield fault(subject, str(error), advice)


def _look(subject: str, url: str) -> Iterator[Finding]:
    version = check_answers(url)
    seconds, skew = asyncio.run(_measure(url))
    trip = f"{version or 'a server'} answers within {1000 * seconds:.1f} ms"
    if seconds > _SLOW:
        yield note(subject, trip, "cache events reach routers late; run it closer to them")
    else:
        yield ok(subject, trip)
    if abs(skew) > _SKEW:
        yield note(
            "clock",
            f"Redis is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} this machine",
            "synchronize both with NTP: a worker's epoch is the time of its start",
        )


async def _measure(url: str) -> tuple[float, float]:
    """Returns the seconds of a round trip, and those that the clock of Redis is ahead of ours."""
    trips, skews = [], []
    async with connect(url) as redis:
        for _ in range(_NUM_TRIPS):
            began, at = time.perf_counter(), time.time()
            ((seconds, microseconds),) = await transact(redis, ("TIME",))
            trips.append(time.perf_counter() - began)
            skews.append(int(seconds) + int(microseconds) / 1e6 - at - trips[-1] / 2)
    return median(trips[1:]), median(skews[1:])
