"""Watch of an engine: ends one that stands still with work in hand, as it does where its GPU or
driver hangs, or its process was stopped.

Its server answers keepalives and health checks all the while, so that no router would notice.
"""

import asyncio
import logging
from typing import NoReturn

from baton.engine.client import EngineClient

logger = logging.getLogger(__name__)

# Looks within the timeout. They count, and not the clock: a machine that was suspended, or a server
# that was itself held up, blames no engine.
_NUM_LOOKS = 8


async def watch_engine(engine: EngineClient, timeout: float) -> NoReturn:
    """Kills the engine once it has shown no sign of life for `timeout` seconds while it has work: a
    report, or on a CPU, where a step may take longer, CPU time. Runs until it is cancelled."""
    num_still, last = 0, _signs_of_life(engine)
    while True:
        await asyncio.sleep(timeout / _NUM_LOOKS)
        seen = _signs_of_life(engine)
        num_still = num_still + 1 if engine.has_work and seen == last else 0
        if engine.has_work:
            engine.ping()
        last = seen
        if num_still > _NUM_LOOKS:
            reason = f"it stood still for {timeout:g} s with {engine.num_streams} requests"
            logger.error("the engine is ended: %s (--engine-timeout-s)", reason)
            engine.kill(reason)
            num_still = 0


def _signs_of_life(engine: EngineClient) -> tuple[int, float]:
    is_on_cpu = engine.device.type == "cpu"
    return engine.num_reports, engine.handle.cpu_seconds if is_on_cpu else 0.0
