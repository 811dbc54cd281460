"""The decode worker's face: one call per sequence."""

from collections.abc import AsyncIterator
from typing import Any

from google.protobuf.duration_pb2 import Duration

from baton.engine.async_engine import AsyncEngine, SequenceStream
from baton.engine.core.sequence import KvSource
from baton.engine.engine import EngineRequest, SequenceUpdate
from baton.errors import DataLossError, InvalidArgumentError
from baton.v1 import decode_pb2 as pb
from baton.v1 import decode_pb2_grpc as pb_grpc
from baton.worker.patience import unless_ended
from baton.worker.wire import engine_request, finish_reason_to_message
from baton.worker.worker import Worker
from decode_worker.capacity import Capacity
from kvtransfer.client import KvFetcher
from kvtransfer.handle import FirstToken, Handle
from kvtransfer.wire import handle_of

# When the caller sets no deadline.
DEFAULT_TIMEOUT = 600.0


class DecodeService(pb_grpc.DecodeServicer):
    """Continues sequences whose KV another worker computes, or which it computes itself."""

    def __init__(self, worker: Worker, admit_factor: float) -> None:
        self._worker = worker
        self._admit_factor = admit_factor
        self._capacity: Capacity | None = None

    @property
    def num_promised_blocks(self) -> int:
        return self._capacity.num_promised if self._capacity else 0

    async def Generate(
        self, request: pb.DecodeGenerateRequest, context: Any
    ) -> AsyncIterator[pb.DecodeGenerateResponse]:
        engine = self._worker.engine_for_new_work()
        handle = handle_of(request.handle) if request.HasField("handle") else None
        source = KvSource.EXTERNAL if handle else KvSource.LOCAL
        wanted = engine_request(request, kv_source=source)
        fetcher = self._fetcher(engine)
        if handle is not None:
            _check_covers(handle, wanted)
            fetcher.check(handle)
        num_blocks = -(-len(wanted.token_ids) // engine.engine.config.block_size)
        with self._capacity_of(engine).promise(num_blocks), engine.open(wanted) as stream:
            yield pb.DecodeGenerateResponse(admitted=pb.DecodeAdmitted())
            if handle is not None:
                remaining = context.time_remaining()
                timeout = DEFAULT_TIMEOUT if remaining is None else remaining
                vocab_size = engine.engine.info.vocab_size
                ready, token = await _receive(stream, fetcher, handle, timeout, vocab_size)
                yield pb.DecodeGenerateResponse(kv_ready=ready)
                # The router has it from the prefill worker, unless that one has just died.
                yield _first_token(token)
            async for updates in stream.updates():
                for response in _responses(updates, wanted.params.logprobs):
                    yield response

    def _fetcher(self, engine: AsyncEngine) -> KvFetcher:
        worker = self._worker
        return KvFetcher(engine.engine.pool, worker.pairing(), worker.id, worker.channels.get)

    def _capacity_of(self, engine: AsyncEngine) -> Capacity:
        if self._capacity is None:
            self._capacity = Capacity(int(engine.engine.pool.num_blocks * self._admit_factor))
        return self._capacity


def _check_covers(handle: Handle, wanted: EngineRequest) -> None:
    if handle.num_tokens != len(wanted.token_ids):
        raise InvalidArgumentError(
            "handle.num_tokens",
            f"is {handle.num_tokens}; must be the number of token_ids, {len(wanted.token_ids)}",
        )


async def _receive(
    stream: SequenceStream, fetcher: KvFetcher, handle: Handle, timeout: float, vocab_size: int
) -> tuple[pb.KvReady, FirstToken]:
    """Brings the KV in and hands the sequence to the scheduler."""
    allocation = await stream.allocation()
    fetching = fetcher.fetch(handle, allocation, timeout)
    token, report = await unless_ended(stream, fetching)
    if token.token_id >= vocab_size:
        raise DataLossError(f"the transfer brought token {token.token_id} of {vocab_size}")
    stream.commit_external(token.token_id)
    exposed = Duration()
    exposed.FromNanoseconds(int(report.exposed_s * 1e9))
    ready = pb.KvReady(
        num_transferred_blocks=report.num_blocks,
        num_transferred_bytes=report.num_bytes,
        num_reused_blocks=allocation.num_hit_blocks,
        exposed=exposed,
    )
    return ready, token


def _first_token(token: FirstToken) -> pb.DecodeGenerateResponse:
    logprobs = [] if token.logprob is None else [token.logprob]
    tokens = pb.DecodeTokens(
        sequence_index=0, position=token.position, token_ids=[token.token_id], logprobs=logprobs
    )
    return pb.DecodeGenerateResponse(tokens=tokens)


def _responses(
    updates: list[SequenceUpdate], with_logprobs: bool
) -> list[pb.DecodeGenerateResponse]:
    """Updates that gathered since the last look, as one message of tokens; then the ending."""
    sampled = [u for u in updates if u.token_id is not None]
    responses = []
    if sampled:
        tokens = pb.DecodeTokens(
            sequence_index=0,
            position=sampled[0].position,
            token_ids=[u.token_id for u in sampled if u.token_id is not None],
            logprobs=[u.logprob or 0.0 for u in sampled] if with_logprobs else [],
        )
        responses.append(pb.DecodeGenerateResponse(tokens=tokens))
    if updates[-1].finish_reason is not None:
        reason = finish_reason_to_message(updates[-1].finish_reason)
        responses.append(
            pb.DecodeGenerateResponse(finished=pb.DecodeFinished(sequence_index=0, reason=reason))
        )
    return responses
