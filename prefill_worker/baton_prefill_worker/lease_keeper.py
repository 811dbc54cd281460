"""Keeps computed blocks until their decode worker has taken them over.

Blocks here wait for a decode worker to have room, and blocks there for a prompt to be computed
here. If both pools are full of what the other side does not come to first, neither would ever move.
So a lease that nobody has claimed gives way: while prompts whose decode worker is already waiting
find no blocks, it gives its own back, and computes them again once it is claimed.
"""

import asyncio
from dataclasses import replace

from baton.engine.async_engine import AsyncEngine, SequenceStream
from baton.engine.messages import EngineRequest
from baton.engine.scheduler.sequences.sequence import KvSource
from baton.errors import NotFoundError, UnavailableError
from baton.sampling import SamplingParams
from baton.worker.cancellation import unless_ended
from baton_kvtransfer.handle import FirstToken
from baton_kvtransfer.lease import Lease
from baton_kvtransfer.lease_machine import LeaseState
from baton_kvtransfer.lease_table import LeaseTable

# A jam that is no shorter than this is one.
LOOK_INTERVAL = 0.1


class Keeper:
    """Looks after the leases of one worker whose prompts are computed."""

    def __init__(self, leases: LeaseTable) -> None:
        self._leases = leases

    async def until_released(
        self,
        engine: AsyncEngine,
        stream: SequenceStream,
        request: EngineRequest,
        lease: Lease,
        token: FirstToken,
    ) -> None:
        """Waits until the claimant has all blocks of `request`, whose lease is complete and frees
        them. Raises what broke the lease, or `UnavailableError` after the time limit."""
        try:
            if await unless_ended(stream, self._must_give_way(engine, lease)):
                lease.retract()
                await lease.claimed()
                await lease.during(self._compute_again(engine, request, lease, token))
            else:
                await unless_ended(stream, lease.over())
        except NotFoundError as error:
            if lease.state is not LeaseState.EXPIRED:
                raise
            raise UnavailableError(
                f"no decode worker took the blocks within {lease.time_limit:g} s; the lease is over"
            ) from error

    async def _must_give_way(self, engine: AsyncEngine, lease: Lease) -> bool:
        """Waits until the lease is claimed (False), or others need its blocks first (True)."""
        jammed_at = None
        while not lease.is_claimed:
            try:
                async with asyncio.timeout(LOOK_INTERVAL):
                    await lease.claimed()
            except TimeoutError:
                is_jammed = self._is_jammed(engine)
                if is_jammed and jammed_at == engine.num_steps:
                    return True
                jammed_at = engine.num_steps if is_jammed else None
        return False

    def _is_jammed(self, engine: AsyncEngine) -> bool:
        """Nothing is computed, though somebody is waiting for it on the other side."""
        stats = engine.stats()
        computes = stats.num_running + stats.num_awaiting_kv > 0
        return stats.num_waiting > 0 and not computes and self._leases.has_awaited

    async def _compute_again(
        self, engine: AsyncEngine, request: EngineRequest, lease: Lease, token: FirstToken
    ) -> None:
        """The blocks alone: the token is known, and so is all else that was asked for."""
        params = SamplingParams(max_tokens=request.params.max_tokens)
        again = replace(request, params=params, kv_source=KvSource.LOCAL, num_external_tokens=0)
        with engine.open(again) as stream:
            async for updates in stream.updates():
                last = updates[-1]
                lease.advance(last.block_ids, last.num_computed_tokens // lease.extent.block_size)
            lease.complete(token, lambda: engine.close_stream(request.request_id))
            await unless_ended(stream, lease.over())
