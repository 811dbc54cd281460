"""Live migration of running requests to another decode worker, with their KV."""

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from baton.engine.client import SequenceStream
from baton.engine.outputs import SequenceUpdate
from baton.engine.request import EngineRequest, FinishReason
from baton.errors import AlreadyExistsError, NotFoundError
from baton.rpc.cancellation import run_until
from baton.v1 import decode_pb2 as pb
from baton_decode_worker import decode_messages
from baton_kvtransfer.lease.block_range import BlockRange
from baton_kvtransfer.lease.handle import FirstToken
from baton_kvtransfer.lease.lease import Claim
from baton_kvtransfer.lease.table import LeaseTable

# Seconds after which a router that could not place the request is notified of the drain again.
REMIND_INTERVAL = 1.0


class Migration:
    """Running request that may migrate, with the claim on its blocks after the router's order."""

    def __init__(self, stream: SequenceStream, leases: LeaseTable, block_size: int) -> None:
        self._stream = stream
        self._leases = leases
        self._block_size = block_size
        self._claim: Claim | None = None
        self._next_reminder = 0.0

    def order(self, claim: Claim) -> None:
        """Suspends the request after its next token. Raises `AlreadyExistsError` for a second
        order, or a lease id that is or was in use."""
        if self._claim is not None:
            raise AlreadyExistsError("the request was told before to go on elsewhere")
        self._leases.check_new(claim.lease_id)
        self._claim = claim
        self._stream.suspend()

    async def follow(
        self, last: SequenceUpdate, *, drains: bool
    ) -> AsyncIterator[pb.DecodeGenerateResponse]:
        """Yields responses after an update of the sequence: for a suspended one `suspended`, and
        `released` after its blocks were fetched; for a running one, if the worker `drains`, a
        reminder to migrate it. Raises the reason if the lease breaks."""
        if last.finish_reason is FinishReason.SUSPENDED:
            async for response in self._lease_blocks(last):
                yield response
        elif last.finish_reason is None and drains and self._is_reminder_due():
            yield decode_messages.draining()

    def _is_reminder_due(self) -> bool:
        """Returns whether to send a `draining` reminder, and schedules the next one."""
        now = time.monotonic()
        if self._claim is not None or now < self._next_reminder:
            return False
        self._next_reminder = now + REMIND_INTERVAL
        return True

    async def _lease_blocks(self, last: SequenceUpdate) -> AsyncIterator[pb.DecodeGenerateResponse]:
        """Leases the blocks of the suspended sequence until its claimant has them; frees none."""
        assert self._claim is not None, "suspended without an order"
        assert last.token_id is not None, "suspended without a token to resume after"
        blocks = BlockRange(last.num_computed_tokens, self._block_size)
        with self._leases.open(self._claim, blocks) as lease:
            lease.advance(last.block_ids, blocks.num_blocks)
            lease.complete(FirstToken(last.position, last.token_id), lambda: None)
            yield decode_messages.suspended(blocks.num_tokens, self._claim.lease_id)
            await run_until(lease.over(), self._stream.failure())
            yield decode_messages.released()


class Migrations:
    """Running requests that may migrate, by id."""

    def __init__(self, leases: LeaseTable, block_size: int) -> None:
        self._leases = leases
        self._block_size = block_size
        self._running: dict[str, Migration] = {}

    @contextmanager
    def open(self, request: EngineRequest, stream: SequenceStream) -> Iterator[Migration | None]:
        """Registers a running request for the duration of the `with` block. Yields None for one
        with several sequences, which cannot migrate."""
        if request.params.num_sequences > 1:
            yield None
            return
        migration = Migration(stream, self._leases, self._block_size)
        self._running[request.request_id] = migration
        try:
            yield migration
        finally:
            del self._running[request.request_id]

    def order(self, request_id: str, claim: Claim) -> None:
        """Suspends a request for migration. Raises `NotFoundError` if it does not run, and the
        errors of `Migration.order`."""
        if request_id not in self._running:
            raise NotFoundError(f"no request {request_id!r} runs here that could be handed over")
        self._running[request_id].order(claim)
