"""gRPC service of the prefill role: one call per prompt, which ends with its lease, or with the
pooled output."""

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from baton.engine.metering.step_times import StepTimes
from baton.engine.metering.work_meter import WorkDone
from baton.engine.outputs import SequenceUpdate
from baton.engine.pooling import pooled_output, pooled_request
from baton.engine.request import EngineRequest, FinishReason, KvSource, Purpose
from baton.errors import FailedPreconditionError, InvalidArgumentError
from baton.models.pooling import why_not
from baton.rpc.attempt_id import request_id_of
from baton.serving.logs import name_request
from baton.v1 import prefill_pb2 as pb
from baton.v1 import prefill_pb2_grpc as pb_grpc
from baton.worker.engine_messages import (
    PromptScores,
    engine_request,
    finish_reason_to_message,
    first_token_due,
    prefill_started,
    work_done_to_message,
)
from baton.worker.request_spans import request_spans
from baton.worker.worker import Worker
from baton_kvtransfer.exchange.encoder_fetch import EncoderFetch
from baton_kvtransfer.exchange.exchange import KvExchange
from baton_kvtransfer.lease.block_range import BlockRange
from baton_kvtransfer.lease.handle import FirstToken
from baton_kvtransfer.lease.lease import Claim
from baton_kvtransfer.transfer_messages import first_token_to_message, lease_id_of
from baton_prefill_worker.lease_retention import LeaseRetention
from baton_prefill_worker.prefix_fetch import FETCH_TIMEOUT, fetch_prefix, source_of


def add_role(worker: Worker) -> None:
    """Adds the prefill role to a worker that does not run yet."""
    worker.server.main.add(pb_grpc.add_PrefillServicer_to_server, worker.component(PrefillService))


class PrefillService(pb_grpc.PrefillServicer):
    """Service that computes prompts and keeps their blocks under leases.

    Attributes:
        prefix_timeout: seconds of a fetch of another worker's prefix, which is then computed.
    """

    def __init__(self, worker: Worker) -> None:
        self.prefix_timeout = FETCH_TIMEOUT
        self._membership = worker.membership
        self._model = worker.model
        self._exchange = worker.component(KvExchange)
        self._encoder_fetch = worker.component(EncoderFetch)
        self._lease_retention = LeaseRetention(self._exchange.leases)

    async def Prefill(
        self, request: pb.PrefillRequest, context: Any
    ) -> AsyncIterator[pb.PrefillResponse]:
        name_request(request_id_of(request.request_id))
        claim = Claim(lease_id_of(request.lease_id), request.decode_worker, request.tenant)
        engine = self._model.engine_for("prefill")
        source = source_of(request, self._exchange.pairing)
        remaining = context.time_remaining()
        wanted = engine_request(
            request,
            remaining,
            purpose=Purpose.PREFILL,
            kv_source=KvSource.EXTERNAL if source else KvSource.LOCAL,
            num_external_tokens=source.num_tokens if source else 0,
        )
        _check_single(wanted)
        grammar = await engine.compile_grammar(wanted)
        blocks = BlockRange(len(wanted.token_ids), engine.facts.block_size)
        # The blocks are freed after the lease has ended, however this call ends.
        async with AsyncExitStack() as held:
            fetching = self._encoder_fetch.outputs_of(request, wanted, remaining)
            await held.enter_async_context(fetching)
            stream = held.enter_context(engine.open(wanted, grammar))
            held.enter_context(request_spans(self._membership.id, wanted, stream))
            lease = held.enter_context(self._exchange.leases.open(claim, blocks))
            yield pb.PrefillResponse(admitted=pb.PrefillAdmitted())
            if source is not None:
                await fetch_prefix(stream, self._exchange.fetcher, source, self.prefix_timeout)
            last: SequenceUpdate | None = None
            scores = PromptScores(wanted.params)
            async for updates in stream.updates():
                if last is None:
                    assert stream.first_step is not None, "an update of no step"
                    yield _started(updates[0], wanted, stream.first_step)
                last = updates[-1]
                lease.advance(last.block_ids, last.num_computed_tokens // blocks.block_size)
                for scored in scores.messages(updates):
                    yield pb.PrefillResponse(prompt_logprobs=scored)
            assert last is not None
            token = _first_token(last)
            # A sequence that finishes with its first token needs no handoff; its lease ends with
            # this call.
            resumes = last.finish_reason is FinishReason.PREFILLED or request.has_several_sequences
            is_handed_over = resumes and request.decode_worker
            if is_handed_over:
                lease.complete(token, lambda: engine.free(wanted.request_id))
            yield _result(token, last, engine.reading.work_done)
            if is_handed_over:
                await self._lease_retention.until_released(engine, stream, wanted, lease, token)
                yield pb.PrefillResponse(released=pb.LeaseReleased())

    async def Pool(self, request: pb.PoolRequest, context: Any) -> AsyncIterator[pb.PoolResponse]:
        name_request(request_id_of(request.request_id))
        is_decode = self._membership.role == "decode"  # of a cluster without prefill workers
        engine = self._model.engine_for("decode" if is_decode else "prefill")
        pooling = engine.facts.info.pooling
        if pooling is None:
            raise FailedPreconditionError(why_not(self._model.name, None, "embedding"))
        arrival = time.monotonic()
        wanted = pooled_request(
            request.request_id,
            tuple(request.token_ids),
            pooling,
            salt=request.salt,
            priority=request.priority,
            arrival_time=arrival,
            due=arrival + first_token_due(request, context.time_remaining()),
        )
        with engine.open(wanted) as stream, request_spans(self._membership.id, wanted, stream):
            yield pb.PoolResponse(admitted=pb.PrefillAdmitted())
            collected: list[SequenceUpdate] = []
            async for updates in stream.updates():
                if not collected:
                    assert stream.first_step is not None, "an update of no step"
                    num_cached = updates[0].num_cached_tokens
                    started = prefill_started(num_cached, wanted.arrival_time, stream.first_step)
                    yield pb.PoolResponse(started=started)
                collected += updates
            result = pb.PoolResult(
                values=pooled_output(pooling, collected, len(wanted.token_ids)),
                num_cached_tokens=collected[-1].num_cached_tokens,
                work_done=work_done_to_message(engine.reading.work_done),
            )
            yield pb.PoolResponse(result=result)


def _check_single(wanted: EngineRequest) -> None:
    if wanted.params.num_sequences > 1:
        raise InvalidArgumentError(
            "sampling.n",
            f"asks for {wanted.params.num_sequences} sequences; a prefill is of one "
            "(has_several_sequences says that the decode worker makes more)",
        )


def _started(update: SequenceUpdate, wanted: EngineRequest, step: StepTimes) -> pb.PrefillResponse:
    started = prefill_started(update.num_cached_tokens, wanted.arrival_time, step)
    return pb.PrefillResponse(started=started)


def _first_token(update: SequenceUpdate) -> FirstToken:
    assert update.token_id is not None, "a prefill ends with a token"
    return FirstToken(update.position, update.token_id, update.logprobs)


def _result(token: FirstToken, update: SequenceUpdate, done: WorkDone) -> pb.PrefillResponse:
    message = first_token_to_message(token)
    message.finish_reason = finish_reason_to_message(update.finish_reason)
    return pb.PrefillResponse(
        result=pb.PrefillResult(
            first_tokens=[message],
            num_cached_tokens=update.num_cached_tokens,
            work_done=work_done_to_message(done),
        )
    )
