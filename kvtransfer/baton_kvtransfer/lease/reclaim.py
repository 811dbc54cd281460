"""Lease reclaim: detection of a deadlock over the blocks of an unclaimed lease."""

import asyncio
from collections.abc import Callable

from baton.engine.client import EngineClient
from baton.engine.scheduler.scheduler_stats import SchedulerStats
from baton_kvtransfer.lease.lease import Lease

# Seconds between two checks for a deadlock, which counts if two in succession find it.
POLL_INTERVAL = 0.1


async def claimed_or_deadlocked(
    lease: Lease, engine: EngineClient, is_wanted: Callable[[], bool] = lambda: True
) -> bool:
    """Waits until the lease is claimed and returns False, or until a deadlock over blocks and
    returns True: sequences wait in `engine`, none computes, and `is_wanted` returns True.

    The lease is unclaimed when this returns True. The caller must end it before it awaits anything.
    """
    deadlocked_at = None
    while not lease.is_claimed:
        try:
            async with asyncio.timeout(POLL_INTERVAL):
                await lease.claimed()
        except TimeoutError:
            reading = engine.reading
            is_deadlocked = _is_stuck(reading.stats) and is_wanted()
            num_steps = reading.time_spent.num_steps
            # A claim may have come in the turns of the event loop that the timeout took.
            if is_deadlocked and deadlocked_at == num_steps and not lease.is_claimed:
                return True
            deadlocked_at = num_steps if is_deadlocked else None
    return False


def _is_stuck(stats: SchedulerStats) -> bool:
    """Returns whether sequences wait for blocks and none runs or awaits its KV."""
    return stats.num_waiting > 0 and stats.num_running + stats.num_awaiting_kv == 0
