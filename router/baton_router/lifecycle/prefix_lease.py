"""The cached beginning of a prompt, which one worker keeps for another as long as a call lasts."""

import asyncio
import logging
from typing import Any

import grpc

from baton.serving.telemetry.propagation import outgoing
from baton.v1 import kv_sharing_pb2_grpc, prefill_pb2
from baton_router.fleet.fleet import Member
from baton_router.lifecycle import wire

# A worker that does not say within so many seconds what it keeps is not waited for.
PATIENCE = 0.5

logger = logging.getLogger(__name__)


class PrefixLease:
    """Asks `holder` at once. Whatever comes of it, the prompt can be computed."""

    def __init__(
        self,
        holder: Member,
        channel: grpc.aio.Channel,
        block_hashes: list[bytes],
        claimant: str,
        tenant: str,
    ) -> None:
        self._holder = holder
        self._lease_id = wire.new_lease_id()
        request = wire.share_request(self._lease_id, block_hashes, claimant, tenant)
        self._call: Any = kv_sharing_pb2_grpc.KvSharingStub(channel).Share(
            request, metadata=outgoing()
        )

    async def source(self) -> prefill_pb2.PrefixSource | None:
        """Where the blocks can be had, or None."""
        try:
            async with asyncio.timeout(PATIENCE):
                response = await self._call.read()
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            logger.debug("%s lends nothing: %s", self._holder.record.id, error)
            return None
        return wire.prefix_source(self._holder, self._lease_id, response.shared.num_blocks)

    def end(self) -> None:
        """Gives the blocks back. Idempotent."""
        self._call.cancel()
