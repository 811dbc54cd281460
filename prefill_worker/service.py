"""The prefill worker's face: one call per prompt, as long as its lease."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from google.protobuf.duration_pb2 import Duration

from baton.engine.async_engine import SequenceStream
from baton.engine.core.sequence import FinishReason, Purpose
from baton.engine.engine import SequenceUpdate
from baton.errors import UnavailableError
from baton.v1 import prefill_pb2 as pb
from baton.v1 import prefill_pb2_grpc as pb_grpc
from baton.worker.patience import unless_ended
from baton.worker.wire import engine_request, finish_reason_to_message
from baton.worker.worker import Worker
from kvtransfer.handle import FirstToken
from kvtransfer.lease import Lease, LeaseTable
from kvtransfer.wire import first_token_to_message, lease_id_of


class PrefillService(pb_grpc.PrefillServicer):
    """Computes prompts and keeps their blocks under leases."""

    def __init__(self, worker: Worker, leases: LeaseTable, lease_timeout: float) -> None:
        self._worker = worker
        self._leases = leases
        self._lease_timeout = lease_timeout

    async def Prefill(
        self, request: pb.PrefillRequest, _context: Any
    ) -> AsyncIterator[pb.PrefillResponse]:
        received_at = time.monotonic()
        lease_id = lease_id_of(request.lease_id)
        engine = self._worker.engine_for_new_work()
        wanted = engine_request(request, purpose=Purpose.PREFILL)
        # The blocks are freed after the lease on them has ended, whatever ends this call.
        with (
            engine.open(wanted) as stream,
            self._leases.open(lease_id, request.decode_worker) as lease,
        ):
            yield pb.PrefillResponse(admitted=pb.PrefillAdmitted())
            last: SequenceUpdate | None = None
            async for updates in stream.updates():
                if last is None:
                    yield _started(updates[0], time.monotonic() - received_at)
                last = updates[-1]
                self._advance(lease, last)
            assert last is not None
            token = _first_token(last, wanted.params.logprobs)
            is_handed_over = last.finish_reason is FinishReason.PREFILLED and request.decode_worker
            # A sequence that is complete with its first token has nothing to hand over; its lease
            # ends with this call.
            if is_handed_over:
                lease.complete(token)
            yield _result(token, last)
            if is_handed_over:
                await self._until_released(stream, lease)
                yield pb.PrefillResponse(released=pb.LeaseReleased())

    def _advance(self, lease: Lease, update: SequenceUpdate) -> None:
        block_size = self._worker.settings.block_size
        lease.advance(update.block_ids, update.num_computed_tokens // block_size)

    async def _until_released(self, stream: SequenceStream, lease: Lease) -> None:
        try:
            async with asyncio.timeout(self._lease_timeout):
                await unless_ended(stream, lease.over())
        except TimeoutError as error:
            raise UnavailableError(
                f"no decode worker took the blocks within {self._lease_timeout:g} s; "
                "the lease is over"
            ) from error


def _started(update: SequenceUpdate, waited: float) -> pb.PrefillResponse:
    queue_time = Duration()
    queue_time.FromNanoseconds(int(waited * 1e9))
    started = pb.PrefillStarted(num_cached_tokens=update.num_cached_tokens, queue_time=queue_time)
    return pb.PrefillResponse(started=started)


def _first_token(update: SequenceUpdate, with_logprob: bool) -> FirstToken:
    assert update.token_id is not None, "a prefill ends with a token"
    return FirstToken(update.position, update.token_id, update.logprob if with_logprob else None)


def _result(token: FirstToken, update: SequenceUpdate) -> pb.PrefillResponse:
    message = first_token_to_message(token)
    message.finish_reason = finish_reason_to_message(update.finish_reason)
    return pb.PrefillResponse(
        result=pb.PrefillResult(first_tokens=[message], num_cached_tokens=update.num_cached_tokens)
    )
