"""Prefix lease: cached blocks of a prompt's beginning, kept for another worker by an open call."""

import asyncio
import logging

import grpc

from baton_router.lifecycle import worker_wire
from baton_router.lifecycle.attempts import worker_methods
from baton_router.lifecycle.attempts.work_bounds import Unreadable
from baton_router.routing.fleet.member import Member

# Maximum seconds to wait for the holder's answer.
PATIENCE = 0.5

logger = logging.getLogger(__name__)


class PrefixLease:
    """Prefix lease, requested from `holder` on construction. Without it, the prompt is computed."""

    def __init__(
        self,
        holder: Member,
        channel: grpc.aio.Channel,
        block_hashes: list[bytes],
        claimant: str,
        tenant: str,
    ) -> None:
        self._holder = holder
        self._lease_id = worker_wire.new_lease_id()
        request = worker_wire.share_request(self._lease_id, block_hashes, claimant, tenant)
        self._call = worker_methods.share(channel, request)

    async def source(self) -> worker_wire.PrefixSource | None:
        """Returns the source of the blocks; None if `holder` refuses or does not answer in time."""
        try:
            async with asyncio.timeout(PATIENCE):
                response = await self._call.read()
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            logger.debug("%s grants no prefix lease: %s", self._holder.record.id, error)
            return None
        if response is grpc.aio.EOF or isinstance(response, Unreadable):
            logger.debug("%s grants no prefix lease, and no reason", self._holder.record.id)
            return None
        num_blocks = worker_wire.num_shared_blocks(response)
        return worker_wire.prefix_source(self._holder, self._lease_id, num_blocks)

    def end(self) -> None:
        """Ends the lease, which releases the blocks. Idempotent."""
        self._call.cancel()
