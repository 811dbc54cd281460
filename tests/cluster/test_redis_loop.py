import logging

import pytest

from baton.cluster.redis.loop import RedisLoop
from tests.support.waiting import until


async def nothing() -> float:
    return 0.0


def test_redis_loop_backs_off_exponentially_with_jitter() -> None:
    pauses = []
    for _ in range(2):
        loop = RedisLoop("loop", nothing)
        pauses.append([loop._record_failure(OSError("gone")) for _ in range(12)])
        for number, pause in enumerate(pauses[-1]):
            longest = min(0.1 * 2**number, 2.0)
            assert longest / 2 <= pause <= longest
    assert pauses[0] != pauses[1]


async def test_redis_loop_resets_its_backoff_after_success(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outcomes = [OSError("gone"), OSError("gone"), None, ValueError("a bug")]

    async def step() -> float:
        outcome = outcomes.pop(0) if outcomes else None
        if outcome is not None:
            raise outcome
        return 0.0

    loop = RedisLoop("loop", step)
    loop.start()
    await until(lambda: not outcomes and loop.answering_since is not None, within=5.0)
    await loop.stop()
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert [w.getMessage() for w in warnings] == [
        "loop: continuing without Redis: OSError: gone",
        "loop: Redis answers again",
        "loop: continuing without Redis: ValueError: a bug",
        "loop: Redis answers again",
    ]
    assert [bool(w.exc_info) for w in warnings] == [False, False, True, False]
