"""Requests that run here and may go on elsewhere, with the KV they have."""

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from baton.engine.async_engine import SequenceStream
from baton.engine.messages import EngineRequest, SequenceUpdate
from baton.engine.scheduler.sequences.sequence import FinishReason
from baton.errors import AlreadyExistsError, NotFoundError
from baton.v1 import decode_pb2 as pb
from baton.worker.cancellation import unless_ended
from baton_decode_worker import wire
from baton_kvtransfer.block_range import BlockRange
from baton_kvtransfer.handle import FirstToken
from baton_kvtransfer.lease import Claim
from baton_kvtransfer.lease_table import LeaseTable

# A router that had nobody to give a request to is told of the drain again after so many seconds.
REMIND_INTERVAL = 1.0


class Departure:
    """One running request and, once it was told to leave, who may have its blocks."""

    def __init__(self, stream: SequenceStream, leases: LeaseTable, block_size: int) -> None:
        self._stream = stream
        self._leases = leases
        self._block_size = block_size
        self._claim: Claim | None = None
        self._next_reminder = 0.0

    def order(self, claim: Claim) -> None:
        """Has it stop behind its next token. Raises `AlreadyExistsError` if it was told before, or
        the lease's id is used."""
        if self._claim is not None:
            raise AlreadyExistsError("the request was told before to go on elsewhere")
        self._leases.check_new(claim.lease_id)
        self._claim = claim
        self._stream.suspend()

    async def follow(
        self, last: SequenceUpdate, *, drains: bool
    ) -> AsyncIterator[pb.DecodeGenerateResponse]:
        """What is to be said behind an update of the sequence: of one that has stopped, that its
        blocks can be fetched, and that they were; of one that runs while the worker drains, that it
        should leave. Raises what broke the lease."""
        if last.finish_reason is FinishReason.SUSPENDED:
            async for response in self._lend(last):
                yield response
        elif last.finish_reason is None and drains and self._is_reminder_due():
            yield wire.draining()

    def _is_reminder_due(self) -> bool:
        """Whether to say that it should leave, of which it takes note."""
        now = time.monotonic()
        if self._claim is not None or now < self._next_reminder:
            return False
        self._next_reminder = now + REMIND_INTERVAL
        return True

    async def _lend(self, last: SequenceUpdate) -> AsyncIterator[pb.DecodeGenerateResponse]:
        """Keeps the blocks of the stopped sequence until its claimant has them; frees none."""
        assert self._claim is not None, "stopped without having been told to"
        assert last.token_id is not None, "stopped without a token to go on with"
        extent = BlockRange(last.num_computed_tokens, self._block_size)
        with self._leases.open(self._claim, extent) as lease:
            lease.advance(last.block_ids, extent.num_blocks)
            lease.complete(FirstToken(last.position, last.token_id), lambda: None)
            yield wire.suspended(extent.num_tokens, self._claim.lease_id)
            await unless_ended(self._stream, lease.over())
            yield wire.released()


class Departures:
    """The requests that may leave, by id."""

    def __init__(self, leases: LeaseTable, block_size: int) -> None:
        self._leases = leases
        self._block_size = block_size
        self._running: dict[str, Departure] = {}

    @contextmanager
    def open(self, request: EngineRequest, stream: SequenceStream) -> Iterator[Departure | None]:
        """A request that runs, for the length of the block; None if it has several sequences, which
        do not leave."""
        if request.params.num_sequences > 1:
            yield None
            return
        departure = Departure(stream, self._leases, self._block_size)
        self._running[request.request_id] = departure
        try:
            yield departure
        finally:
            del self._running[request.request_id]

    def order(self, request_id: str, claim: Claim) -> None:
        """Raises `NotFoundError` for one that does not run, and what `Departure.order` does."""
        if request_id not in self._running:
            raise NotFoundError(f"no request {request_id!r} runs here that could be handed over")
        self._running[request_id].order(claim)
