import logging

import pytest

from baton.cluster.loop import RedisLoop
from tests.support.waiting import until


async def nothing() -> float:
    return 0.0


def test_pauses_double_up_to_two_seconds_and_no_two_loops_pause_alike() -> None:
    pauses = []
    for _ in range(2):
        loop = RedisLoop("loop", nothing)
        pauses.append([loop._record_failure(OSError("gone")) for _ in range(12)])
        for number, pause in enumerate(pauses[-1]):
            longest = min(0.1 * 2**number, 2.0)
            assert longest / 2 <= pause <= longest
    assert pauses[0] != pauses[1]


async def test_after_a_success_the_first_pause_is_short_again(
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
