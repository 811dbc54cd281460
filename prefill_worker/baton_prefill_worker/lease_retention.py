"""Lease retention and lease reclaim: keeps computed blocks until their decode worker has them.

Blocks here wait until a decode worker has free blocks; blocks there wait until a prompt is computed
here. If both pools are full, that is a deadlock. So an unclaimed lease is reclaimed while prompts
whose decode worker already waits find no free blocks; its prompt is computed again after a claim.
"""

from dataclasses import replace

from baton.engine.client import EngineClient, SequenceStream
from baton.engine.request import EngineRequest, KvSource
from baton.errors import NotFoundError, UnavailableError
from baton.rpc.cancellation import run_until
from baton.sampling import SamplingParams
from baton_kvtransfer.lease.handle import FirstToken
from baton_kvtransfer.lease.lease import Lease
from baton_kvtransfer.lease.machine import LeaseState
from baton_kvtransfer.lease.reclaim import claimed_or_deadlocked
from baton_kvtransfer.lease.table import LeaseTable


class LeaseRetention:
    """Lease retention of one prefill worker, for leases whose prompts are computed."""

    def __init__(self, leases: LeaseTable) -> None:
        self._leases = leases

    async def until_released(
        self,
        engine: EngineClient,
        stream: SequenceStream,
        request: EngineRequest,
        lease: Lease,
        token: FirstToken,
    ) -> None:
        """Waits until the claimant has all blocks of `request`; its complete `lease` frees them.
        Raises the reason if the lease breaks, or `UnavailableError` after the time limit."""
        try:
            if await run_until(self._reclaims(engine, lease), stream.failure()):
                await run_until(lease.claimed(), stream.failure())
                engine.close_stream(request.request_id)  # the next one has its id
                await run_until(self._compute_again(engine, request, lease, token), lease.over())
            else:
                await run_until(lease.over(), stream.failure())
        except NotFoundError as error:
            if lease.state is not LeaseState.EXPIRED:
                raise
            raise UnavailableError(
                f"no decode worker took the blocks within {lease.time_limit:g} s; the lease is over"
            ) from error

    async def _reclaims(self, engine: EngineClient, lease: Lease) -> bool:
        """Waits until the lease is claimed and returns False, or reclaims it and returns True if a
        deadlock over blocks is found first. No claim can come between the finding and the reclaim.
        """
        is_deadlocked = await claimed_or_deadlocked(lease, engine, lambda: self._leases.has_awaited)
        if is_deadlocked:
            lease.retract()
        return is_deadlocked

    async def _compute_again(
        self, engine: EngineClient, request: EngineRequest, lease: Lease, token: FirstToken
    ) -> None:
        """Computes the blocks again; token and log-probabilities were already sent."""
        params = SamplingParams(max_tokens=request.params.max_tokens)
        again = replace(request, params=params, kv_source=KvSource.LOCAL, num_external_tokens=0)
        with engine.open(again) as stream:
            async for updates in stream.updates():
                last = updates[-1]
                lease.advance(last.block_ids, last.num_computed_tokens // lease.blocks.block_size)
            lease.complete(token, lambda: engine.free(request.request_id))
            await run_until(lease.over(), stream.failure())
